"""A stream joined with the versions of a table, against a list of all versions, and against
pandas.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InputError
from headrace.operators.joins import row_store, timers
from headrace.operators.joins.sides import ResultColumn, Side
from headrace.operators.joins.versioned_join import VersionedJoin
from headrace.operators.kernel import UNSTARTED, Watermarks
from headrace.testing.kernels import MemoryState
from tests.operators.histories import History, Row
from tests.operators.joins.join_driver import (
    Drive,
    Track,
    check_all_ways,
    cuts,
    in_key_order,
    restored,
    tracks,
)
from tests.operators.joins.versions_oracle import (
    STREAM,
    TABLE,
    Known,
    horizon,
    moment,
    row_history,
    stored,
    version_history,
)
from tests.short_forms import examples

COLUMNS: list[ResultColumn] = [
    ("left", "n", "n"),
    ("left", "k", "k"),
    ("left", "t", "t"),
    ("right", "v", "v"),
    ("right", "since", "since"),
]


def join(how: str, history: int) -> VersionedJoin:
    return restored(VersionedJoin("j", STREAM, TABLE, COLUMNS, history_us=history, how=how))


class Oracle:
    """Rows wait in a list; versions are looked up in a list."""

    def __init__(self, how: str, history: int, watermarks: tuple[Track, Track]) -> None:
        self.how, self.history, self.watermarks = how, history, watermarks
        self.known, self.waiting = Known(history), list[Row]()
        self.counts = {"late_versions": 0, "too_old": 0}

    def tick(self, number: int, rows: list[Row], changes: list[Row]) -> list[Row]:
        table = self.watermarks[1]
        came = self.known.take_in(
            number, changes, horizon(self.watermarks, number - 1, self.history)
        )
        self.counts["late_versions"] += sum(
            version.at < table.watermark_before(number) for version in came
        )
        fresh = [
            row for row in rows if row["t"] >= horizon(self.watermarks, number - 1, self.history)
        ]
        self.counts["too_old"] += len(rows) - len(fresh)
        self.waiting += fresh
        ready = [
            row for row in self.waiting if row["k"] is None or row["t"] < table.complete[number]
        ]
        self.waiting = [row for row in self.waiting if row not in ready]
        emitted = [
            answer
            for row in sorted(ready, key=lambda row: row["t"])
            if (answer := self._answer(row, number)) is not None
        ]
        self.known.forget(horizon(self.watermarks, number, self.history))
        return in_key_order(emitted, [row["k"] for row in emitted], pa.int64())

    def _answer(self, row: Row, tick: int) -> Row | None:
        version = self.known.valid(row["k"], row["t"])
        there = version is not None and version.value is not None
        if not there and self.how == "inner":
            return None
        found = (
            {"v": version.value, "since": moment(version.at)}
            if there and version
            else {"v": None, "since": None}
        )
        return {"n": row["n"], "k": row["k"], "t": moment(row["t"]), **found, "_tick": tick}


def check(
    stream: History,
    table: History,
    watermarks: tuple[Track, Track],
    how: str,
    history: int,
    cut: list[int],
    *,
    exact: bool = True,
) -> None:
    oracle = Oracle(how, history, watermarks)
    expected = [
        row
        for number, each in enumerate(zip(stream.ticks, table.ticks, strict=True))
        for row in oracle.tick(number, *each)
    ]
    drive = Drive([stream, table], watermarks)
    state = check_all_ways(
        drive, lambda: join(how, history), expected, ("k", pa.int64()), [["k"], ["k"]], cut
    )
    assert stored(state, 0) == oracle.known.count, (
        "versions are kept as long as a row may ask for them, and no longer"
    )
    assert stored(state, 1) == len([row for row in oracle.waiting if row["k"] is not None])
    due = join(how, history).due(state)
    if exact:
        assert due == min(
            (row["t"] + 1 for row in oracle.waiting if row["k"] is not None), default=None
        )
    assert due is None or due > watermarks[1].complete[-1]
    kernel = join(how, history)
    kernel.step_timed(
        MemoryState(),
        [each.table(0, drive.ticks) for each in drive.inputs],
        [each.watermarks(0, drive.ticks) for each in watermarks],
    )
    assert kernel.counts == oracle.counts


@pytest.mark.parametrize("how", ["inner", "left"])
@given(data=st.data())
@settings(max_examples=examples(80))
def test_each_row_meets_what_was_valid_at_its_time(how: str, data: st.DataObject) -> None:
    ticks = data.draw(st.integers(1, 6))
    watermarks = data.draw(tracks(ticks)), data.draw(tracks(ticks))
    check(
        data.draw(row_history(ticks)),
        data.draw(version_history(ticks)),
        watermarks,
        how,
        data.draw(st.integers(0, 6)),
        data.draw(cuts(ticks)),
    )


@given(data=st.data())
@settings(max_examples=examples(40))
def test_many_versions_of_a_key_in_chunks(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_store, "MAX_CHUNK_ROWS", 2)
        patch.setattr(row_store, "_SPLIT_CHUNK_ROWS", 1)
        ticks = data.draw(st.integers(4, 10))
        watermarks = data.draw(tracks(ticks, max_step=2)), data.draw(tracks(ticks, max_step=2))
        stream, table = (
            data.draw(row_history(ticks, keys=0)),
            data.draw(version_history(ticks, keys=0)),
        )
        check(
            stream,
            table,
            watermarks,
            "left",
            data.draw(st.integers(0, 6)),
            list(range(1, ticks)),
            exact=False,
        )


def test_against_pandas() -> None:
    """Nothing comes late: then the answer is pandas' merge_asof, however rows and versions were
    spread over ticks.
    """
    random = np.random.default_rng(7)
    ticks, size = 20, 400
    rows = pd.DataFrame(
        {
            "n": np.arange(size),
            "k": random.integers(0, 5, size),
            "t": random.integers(0, 1000, size),
        }
    )
    versions = pd.DataFrame(
        {
            "k": random.integers(0, 5, 100),
            "v": random.integers(0, 99, 100),
            "since": random.permutation(1000)[:100],
        }
    )
    rows["_tick"] = np.sort(random.integers(0, ticks, size))
    versions["_tick"] = (
        versions["since"] * ticks // 1000
    )  # in order of time, so never behind the clock
    complete = np.append((np.arange(1, ticks) * 1000) // ticks, 2000)
    table = versions.sort_values("since", kind="stable")
    changes = pa.table(
        {
            "k": table["k"],
            "v": table["v"],
            "since": pa.array(table["since"].to_numpy(), TABLE.schema.field("since").type),
            "_change_type": ["update_postimage"] * 100,
            "_tick": table["_tick"],
        }
    )
    stream = pa.table(
        {
            "n": rows["n"],
            "k": rows["k"],
            "t": pa.array(rows["t"].to_numpy(), STREAM.schema.field("t").type),
            "_tick": rows["_tick"],
        }
    )
    numbers = np.arange(ticks)
    still = Watermarks(numbers, numbers, np.full(ticks, UNSTARTED), np.full(ticks, UNSTARTED))
    result = join("left", 100).step_timed(
        MemoryState(), [stream, changes], [still, Watermarks(numbers, numbers, complete, complete)]
    )
    mine = result.select(["n", "v"]).to_pandas().sort_values("n").reset_index(drop=True)
    theirs = pd.merge_asof(
        rows.sort_values("t"), table.drop(columns="_tick"), left_on="t", right_on="since", by="k"
    ).sort_values("n")
    assert mine["n"].tolist() == theirs["n"].tolist()
    assert mine["v"].fillna(-1).tolist() == theirs["v"].fillna(-1).tolist()


def changes(*rows: tuple[int, int, int, str]) -> list[Row]:
    return [
        {"k": key, "v": value, "since": since, "_change_type": kind}
        for key, value, since, kind in rows
    ]


def test_a_late_version_lets_the_past_be_and_holds_from_then_on() -> None:
    table = History(
        TABLE.schema,
        [changes((1, 10, 0, "insert")), [], changes((1, 20, 3, "update_postimage")), []],
        is_table=True,
    )
    stream = History(
        STREAM.schema,
        [[], [{"n": 0, "k": 1, "t": 4}], [], [{"n": 1, "k": 1, "t": 5}]],
        is_table=False,
    )
    clock = Track([1, 5, 6, 7], [1, 5, 6, 7])
    emitted, _ = Drive([stream, table], (clock, clock)).run(lambda: join("inner", 100), [1, 2, 3])
    assert [(row["n"], row["v"]) for row in emitted] == [(0, 10), (1, 20)]


def test_state_of_a_deleted_row_is_dropped_behind_the_horizon() -> None:
    gone = changes((1, 10, 0, "delete"))
    table = History(TABLE.schema, [changes((1, 10, 0, "insert")), gone, []], is_table=True)
    stream = History(STREAM.schema, [[{"n": 0, "k": 2, "t": 0}], [], []], is_table=False)
    clock = Track([1, 2, 50], [1, 2, 50])
    _, state = Drive([stream, table], (clock, clock)).run(lambda: join("left", 10), [1, 2])
    assert state.first(b"", b"\xff") is None
    assert timers.earliest_timer(state, 1) is None


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(InputError, match="the table's key is 'k'(.|\n)*whole key"):
        VersionedJoin(
            "j",
            Side(STREAM.schema, ("n",), time="t"),
            Side(TABLE.schema, ("v",), ("k",), time="since"),
            COLUMNS,
            history_us=1,
        )
    with pytest.raises(InputError, match="no event time"):
        VersionedJoin("j", STREAM, Side(TABLE.schema, ("k",), ("k",)), COLUMNS, history_us=1)
    with pytest.raises(InputError, match="as_of"):
        VersionedJoin("j", Side(STREAM.schema, ("k",)), TABLE, COLUMNS, history_us=1)
    with pytest.raises(InputError, match="'full'"):
        join("full", 1)
