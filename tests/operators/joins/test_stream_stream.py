"""Two streams joined within a time bound, against two lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.columnar.keys import encode_keys
from headrace.errors import InputError
from headrace.operators.joins import row_store, stream_stream, timers
from headrace.operators.joins.row_store import KeyedRowStore
from headrace.operators.joins.sides import ResultColumn, Side
from headrace.operators.joins.stream_stream import StreamStreamJoin
from headrace.operators.kernel import UNSTARTED
from headrace.testing.kernels import MemoryState
from tests.operators.histories import History, Row, Ticks
from tests.operators.joins.join_driver import Drive, Track, check_all_ways, cuts, restored, tracks
from tests.short_forms import examples

TIME = pa.timestamp("us", "UTC")
LEFT = Side(pa.schema([("k", pa.int64()), ("t", TIME), ("n", pa.int64())]), ("k",), time="t")
RIGHT = Side(
    pa.schema([("key", pa.int64()), ("at", TIME), ("m", pa.string())]), ("key",), time="at"
)
COLUMNS: list[ResultColumn] = [
    ("key", "k", "k"),
    ("time", "t", "time"),
    ("left", "t", "t"),
    ("left", "n", "n"),
    ("right", "at", "at"),
    ("right", "m", "m"),
]


def join(how: str, before: int, after: int) -> StreamStreamJoin:
    return restored(
        StreamStreamJoin("j", LEFT, RIGHT, COLUMNS, before_us=before, after_us=after, how=how)
    )


@dataclass
class Oracle:
    """All rows that still matter, in two lists; tick by tick, every row with every row."""

    how: str
    before: int
    after: int

    def __post_init__(self) -> None:
        self.pools: tuple[list[Row], list[Row]] = ([], [])
        self.late = [0, 0]

    def tick(
        self, number: int, inputs: tuple[list[Row], list[Row]], watermarks: tuple[Track, Track]
    ) -> list[Row]:
        keeps, reach = (
            (self.how in {"left", "full"}, self.how in {"right", "full"}),
            (
                self.after,
                self.before,
            ),
        )
        for side in (0, 1):
            fresh = [
                {**row, "matched": False, "tick": number}
                for row in inputs[side]
                if row["time"] >= watermarks[side].horizon_before(number)
            ]
            self.late[side] += len(inputs[side]) - len(fresh)
            self.pools[side].extend(fresh)
            self.pools[side].sort(key=lambda row: row["time"])
        emitted = [
            (left, right)
            for left in self.pools[0]
            for right in self.pools[1]
            if self._meet(left, right, number)
        ]
        for left, right in emitted:
            left["matched"] = right["matched"] = True
        for side, pool in enumerate(self.pools):
            complete, closed = (
                watermarks[1 - side].complete[number],
                watermarks[1 - side].closed[number],
            )
            alone = [
                row
                for row in pool
                if keeps[side]
                and not row["matched"]
                and (row["k"] is None or row["time"] + reach[side] < complete)
            ]
            emitted += [(row, None) if side == 0 else (None, row) for row in alone]  # type: ignore[misc]
            pool[:] = [
                row
                for row in pool
                if row not in alone and row["k"] is not None and row["time"] + reach[side] >= closed
            ]
        return self._in_order(emitted)

    def _meet(self, left: Row, right: Row, tick: int) -> bool:
        new = tick in {left["tick"], right["tick"]}
        return (
            new
            and left["k"] == right["k"]
            and left["k"] is not None
            and -self.before <= right["time"] - left["time"] <= self.after
        )

    def _in_order(self, emitted: list[Any]) -> list[Row]:
        keys = encode_keys(
            pa.table(
                {"k": pa.array([(left or right)["k"] for left, right in emitted], pa.int64())}
            ),
            ["k"],
        ).to_pylist()
        # Unmatched rows are emitted at their left row's position; right ones behind all left ones
        # of their key. Pools are in order of time.
        at = [
            (key, left is None, self._place(left), self._place(right))
            for key, (left, right) in zip(keys, emitted, strict=True)
        ]
        return [
            emitted[which] for which in sorted(range(len(emitted)), key=lambda which: at[which])
        ]

    @staticmethod
    def _place(row: Row | None) -> tuple[int, int]:
        return (UNSTARTED, -1) if row is None else (row["time"], row["number"])

    @property
    def due(self) -> int | None:
        keeps, reach = (
            (self.how in {"left", "full"}, self.how in {"right", "full"}),
            (
                self.after,
                self.before,
            ),
        )
        waits = [
            row["time"] + reach[side] + 1
            for side in (0, 1)
            if keeps[side]
            for row in self.pools[side]
            if not row["matched"]
        ]
        return min(waits, default=None)


def shown(tick: int, pair: tuple[Row | None, Row | None]) -> Row:
    left, right = pair
    some = left or right
    assert some is not None
    return {
        "k": some["k"],
        "time": moment(some["time"]),
        "t": moment(left and left["time"]),
        "n": left and left["number"],
        "at": moment(right and right["time"]),
        "m": right and str(right["number"]),
        "_tick": tick,
    }


def moment(time: Any) -> Any:
    return pa.scalar(time, TIME).as_py()


def histories(ticks: tuple[Ticks, Ticks]) -> tuple[History, History]:
    lefts = [
        [{"k": row["k"], "t": row["time"], "n": row["number"]} for row in rows] for rows in ticks[0]
    ]
    rights = [
        [{"key": row["k"], "at": row["time"], "m": str(row["number"])} for row in rows]
        for rows in ticks[1]
    ]
    return History(LEFT.schema, lefts, is_table=False), History(
        RIGHT.schema, rights, is_table=False
    )


def stored_rows(state: MemoryState) -> int:
    keys = sorted(name[1:] for name in state.values if name[:1] == b"h")
    row_store = KeyedRowStore("j", state, pa.array(keys, pa.binary()), sections=2, registers=4)
    return sum(len(row_store.load_all(section)) for section in range(2))


@st.composite
def rows_in_ticks(draw: st.DrawFn, ticks: int, *, keys: int = 2) -> Ticks:
    row = st.fixed_dictionaries(
        {"k": st.none() | st.integers(0, keys), "time": st.integers(-4, 14)}
    )
    drawn = draw(st.lists(st.lists(row, max_size=4), min_size=ticks, max_size=ticks))
    numbers = iter(range(1000))
    return [[{**each, "number": next(numbers)} for each in rows] for rows in drawn]


def check(
    ticks: tuple[Ticks, Ticks],
    watermarks: tuple[Track, Track],
    how: str,
    bounds: tuple[int, int],
    cut: list[int],
    *,
    due: bool = True,
) -> None:
    oracle = Oracle(how, *bounds)
    expected = []
    for number, inputs in enumerate(zip(*ticks, strict=True)):
        expected += [shown(number, pair) for pair in oracle.tick(number, inputs, watermarks)]  # type: ignore[arg-type]
    drive = Drive(histories(ticks), watermarks)
    state = check_all_ways(
        drive, lambda: join(how, *bounds), expected, ("k", pa.int64()), [["k"], ["key"]], cut
    )
    assert stored_rows(state) == sum(map(len, oracle.pools)), (
        "a row is kept as long as it may meet another, and no longer"
    )
    if due:
        assert join(how, *bounds).due(state) == oracle.due
    for kind, passed in enumerate(
        (watermarks[1].complete, watermarks[1].closed, watermarks[0].complete, watermarks[0].closed)
    ):
        waits = timers.earliest_timer(state, kind)
        assert waits is None or waits > passed[-1], "what a clock has passed waits for it no more"
    kernel = join(how, *bounds)
    kernel.step_timed(
        MemoryState(),
        [each.table(0, len(ticks[0])) for each in drive.inputs],
        [each.watermarks(0, len(ticks[0])) for each in watermarks],
    )
    assert kernel.counts == {"late_left": oracle.late[0], "late_right": oracle.late[1]}


bounds = st.tuples(st.integers(-2, 4), st.integers(-2, 4)).filter(lambda each: sum(each) >= 0)
hows = pytest.mark.parametrize("how", ["inner", "left", "right", "full"])


@hows
@given(data=st.data())
@settings(max_examples=examples(50))
def test_rows_meet_within_their_bounds_and_are_emitted_unmatched_once(
    how: str, data: st.DataObject
) -> None:
    ticks = data.draw(st.integers(1, 6))
    watermarks = data.draw(tracks(ticks)), data.draw(tracks(ticks))
    check(
        (data.draw(rows_in_ticks(ticks)), data.draw(rows_in_ticks(ticks))),
        watermarks,
        how,
        data.draw(bounds),
        data.draw(cuts(ticks)),
    )


@hows
@given(data=st.data())
@settings(max_examples=examples(25))
def test_many_rows_of_a_key_in_chunks(how: str, data: st.DataObject) -> None:
    """One key with many rows, in small chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_store, "MAX_CHUNK_ROWS", 3)
        patch.setattr(row_store, "_SPLIT_CHUNK_ROWS", 2)
        ticks = data.draw(st.integers(3, 6))
        watermarks = data.draw(tracks(ticks, max_step=2)), data.draw(tracks(ticks, max_step=2))
        rows = (
            [*data.draw(rows_in_ticks(ticks, keys=0)), []],
            [
                *data.draw(rows_in_ticks(ticks, keys=0)),
                [],
            ],
        )
        watermarks = tuple(Track([*each.complete, 100], [*each.closed, 100]) for each in watermarks)  # type: ignore[assignment]
        # Of what was not looked at it is only known from when on it may be due.
        check(rows, watermarks, how, data.draw(bounds), list(range(1, ticks + 1)), due=False)


@hows
@given(data=st.data())
@settings(max_examples=examples(25))
def test_many_that_are_forgotten_together(how: str, data: st.DataObject) -> None:
    """Later than they could be, which changes nothing that is emitted; and all of them in the
    end.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_stream, "_DROP_TIMES", 1)
        ticks = data.draw(st.integers(2, 6))
        watermarks = data.draw(tracks(ticks, max_step=3)), data.draw(tracks(ticks, max_step=3))
        watermarks = tuple(Track([*each.complete, 100], [*each.closed, 100]) for each in watermarks)  # type: ignore[assignment]
        rows = [*data.draw(rows_in_ticks(ticks)), []], [*data.draw(rows_in_ticks(ticks)), []]
        check(rows, watermarks, how, data.draw(bounds), data.draw(cuts(ticks + 1)))


@hows
def test_state_is_empty_once_the_watermarks_have_passed(how: str) -> None:
    rows = [[{"k": 1, "time": 5, "number": 0}, {"k": 2, "time": 6, "number": 1}], []]
    others = [[{"k": 1, "time": 7, "number": 0}, {"k": 3, "time": 6, "number": 1}], []]
    passed = Track([0, 100], [0, 100])
    _, state = Drive(histories((rows, others)), (passed, passed)).run(lambda: join(how, 2, 2), [1])
    assert state.values == {}


@hows
def test_what_is_of_no_more_use_goes_with_others_after_small_batches_only(how: str) -> None:
    """Both rows match nothing new from 86 on. Stored, they go at the next multiple of 10, a 16th of
    the window; a batch in which they come and are passed does not store them.
    """
    rows: Ticks = [[{"k": 1, "time": 5, "number": 0}], [], []]
    others: Ticks = [[{"k": 1, "time": 5, "number": 1}], [], []]

    def lived(horizons: list[int], cuts: list[int]) -> tuple[list[Row], MemoryState]:
        passed = Track(horizons, horizons)
        ticks = len(horizons)
        drive = Drive(histories((rows[:ticks], others[:ticks])), (passed, passed))
        return drive.run(lambda: join(how, 80, 80), cuts)

    (together, one_batch), (apart, two_batches) = lived([0, 86], []), lived([0, 86], [1])
    assert together == apart
    assert len(together) == 1
    assert one_batch.values == {}
    assert two_batches.values != {}
    _, later = lived([0, 86, 90], [1, 2])
    assert later.values == {}


def test_emitted_exactly_when_the_other_side_s_watermark_has_passed_all_it_could_match() -> None:
    rows: Ticks = [[{"k": 1, "time": 5, "number": 0}], [], [], []]
    watermarks = Track([9, 9, 9, 9], [9, 9, 9, 9])
    others = Track([6, 7, 8, 9], [6, 7, 8, 9])
    drive = Drive(histories((rows, [[], [], [], []])), (watermarks, others))
    emitted, _ = drive.run(lambda: join("left", 2, 2), [1, 2, 3])
    assert [(row["n"], row["_tick"]) for row in emitted] == [(0, 2)], (
        "a right row at 7 may come as long as the clock is not past 7"
    )


def test_how_far_the_result_s_clocks_are_held_back() -> None:
    assert [join(how, 3, 7).hold_us for how in ("inner", "left", "right", "full")] == [7, 7, 7, 7]
    assert [join(how, 7, 3).hold_us for how in ("inner", "left", "right", "full")] == [3, 3, 7, 7]
    assert join("inner", 3, -2).hold_us == 0


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(InputError, match="no two are"):
        join("inner", -3, 2)
    with pytest.raises(InputError, match="no event time"):
        StreamStreamJoin("j", Side(LEFT.schema, ("k",)), RIGHT, [], before_us=1, after_us=1)
    with pytest.raises(InputError, match="'inner', 'left', 'right', 'full'"):
        join("outer", 1, 1)
