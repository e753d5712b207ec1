"""Rows of a table that move from window to window: the kernel that holds back late moves, followed
by the window kernel, against plain Python.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.operators.aggregates import functions as agg
from headrace.operators.kernel import Watermarks
from headrace.operators.windows.factory import window_kernel
from headrace.operators.windows.kernel import WindowSettings
from headrace.operators.windows.late_moves import LateMoveKernel, LateMoveSettings
from headrace.operators.windows.late_policy import Correct, Drop
from headrace.operators.windows.specs import Hopping, Session, Sliding, Tumbling, WindowSpec
from headrace.testing.kernels import MemoryState
from tests.operators.histories import changed, cuts
from tests.short_forms import examples

Row = dict[str, Any]
SECOND = 1_000_000
TIME = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.string()), ("at", TIME)])
ZERO = datetime(1970, 1, 1, tzinfo=UTC)


def row(number: int, seconds: int, group: str | None = "a") -> Row:
    return {"id": number, "k": group, "at": ZERO + timedelta(seconds=seconds)}


def seconds_of(row: Row) -> int:
    return int((row["at"] - ZERO).total_seconds())


class Windows:
    """Both kernels, one behind the other."""

    def __init__(self, window: WindowSpec, lateness: int = 0) -> None:
        late = Correct(lateness * SECOND) if lateness else Drop()
        self.moves = LateMoveKernel(
            LateMoveSettings(
                name="late_moves",
                schema=SCHEMA,
                key=("id",),
                time="at",
                time_shift_us=0,
                by=("k",),
                window=window,
                late=late,
            )
        )
        self.window = window_kernel(
            WindowSettings(
                name="window",
                schema=SCHEMA,
                time="at",
                window=window,
                by=("k",),
                aggregates=(("ids", agg.collect_set("id")),),
                late=late,
                emit="changes",
                over_table=True,
                row_key=("id",),
            )
        )
        self.states = MemoryState(), MemoryState()
        self.shown: dict[tuple[Any, ...], Row] = {}
        self.late = 0

    def call(self, ticks: list[list[Row]], first: int, horizons: list[int]) -> list[Row]:
        """Process some ticks at once; `horizons` has that before the first and after each."""
        numbers = np.arange(first, first + len(ticks))
        times = np.array(horizons) * SECOND
        watermarks = Watermarks(
            ticks=numbers,
            times_us=numbers * SECOND,
            watermark_at_start=int(times[0]),
            watermark=times[1:],
            horizon_at_start=int(times[0]),
            horizon=times[1:],
        )
        rows = [{**change, "_tick": first + n} for n, tick in enumerate(ticks) for change in tick]
        schema = pa.schema(
            [*SCHEMA, pa.field("_change_type", pa.string()), pa.field("_tick", pa.int64())]
        )
        table = pa.Table.from_pylist(rows, schema)
        passed = self.moves.step_timed(self.states[0], [table], [watermarks])
        self.late += self.moves.counts["late"]
        emitted: list[Row] = self.window.step_timed(
            self.states[1], [passed], [watermarks]
        ).to_pylist()
        return [*passed.to_pylist(), *emitted]

    def take(self, emitted: list[Row]) -> None:
        for change in emitted:
            if "window_start" in change:
                key = change["k"], change["window_start"], change["window_end"]
                if change["_change_type"] in {"delete", "update_preimage"}:
                    assert self.shown.pop(key)["ids"] == change["ids"]
                else:
                    self.shown[key] = change

    @property
    def members(self) -> dict[tuple[Any, int], list[int]]:
        """The ids in each window, by group and the second at which it starts."""
        return {
            (key[0], int((key[1] - ZERO).total_seconds())): value["ids"]
            for key, value in self.shown.items()
        }


def run(windows: Windows, ticks: list[list[Row]], horizons: list[int], at: list[int]) -> list[Row]:
    bounds = [0, *sorted({cut for cut in at if cut < len(ticks)}), len(ticks)]
    emitted = []
    for first, stop in pairwise(bounds):
        emitted += windows.call(ticks[first:stop], first, horizons[first : stop + 1])
    windows.take(sorted(emitted, key=lambda change: change["_tick"]))
    return emitted


def test_a_row_that_left_a_closed_window_was_counted_twice() -> None:
    windows = Windows(Tumbling(10 * SECOND))
    first, moved, on = row(1, 3), row(1, 17), row(1, 25, "b")
    ticks = [changed(None, first), changed(first, moved), changed(moved, on), changed(on, None)]
    run(windows, ticks, [0, 12, 12, 12, 12], [])
    assert windows.members == {("a", 0): [1]}, "where it was when the window closed"
    assert windows.late == 2
    assert windows.states[0].values == {}, "nothing is kept of a row that is gone"


def test_a_row_that_came_too_late_is_counted_where_it_moves_to() -> None:
    windows = Windows(Tumbling(10 * SECOND))
    late, moved = row(1, 3), row(1, 17)
    run(windows, [changed(None, late), changed(late, moved)], [12, 12, 12], [])
    assert windows.members == {("a", 10): [1]}


def test_a_value_that_changes_in_a_closed_window_does_not_hold_its_row() -> None:
    windows = Windows(Tumbling(10 * SECOND))
    first, other = row(1, 3), row(1, 3, "b")
    run(windows, [changed(None, first), changed(first, other)], [0, 12, 12], [])
    assert (windows.members, windows.late) == ({("a", 0): [1]}, 0)
    assert windows.states[0].values == {}


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[list[Row]], list[int]]:
    rows: dict[int, Row] = {}
    ticks: list[list[Row]] = []
    horizons = [0]
    for _ in range(draw(st.integers(1, 8))):
        tick: list[Row] = []
        for number in draw(st.lists(st.integers(0, 3), max_size=4, unique=True)):
            fresh = None
            if draw(st.integers(0, 4)):
                group = draw(st.sampled_from(["a", "b", None]))
                fresh = row(number, draw(st.integers(0, 40)), group)
            tick += changed(rows.get(number), fresh)
            rows[number] = fresh  # type: ignore[assignment]
        ticks.append(tick)
        horizons.append(horizons[-1] + draw(st.sampled_from([0, 0, 3, 9])))
    return ticks, horizons


def tumbling_oracle(
    ticks: list[list[Row]], horizons: list[int], size: int, lateness: int
) -> dict[tuple[Any, int], list[int]]:
    """Windows as sets of ids. What a closed one has stays there, and is in no other."""
    members: dict[tuple[Any, int], set[int]] = {}
    seat: dict[int, tuple[Any, int] | None] = {}  # the window that has a row, if any has
    for tick, horizon in zip(ticks, horizons, strict=False):

        def is_open(window: tuple[Any, int], limit: int = horizon - lateness) -> bool:
            return window[1] + size > limit

        for change in tick:
            number = change["id"]
            window = change["k"], seconds_of(change) // size * size
            if change["_change_type"] == "update_preimage":
                continue
            old = seat.get(number)
            if change["_change_type"] == "delete":
                if old is not None and is_open(old):
                    members[old].discard(number)
                seat.pop(number, None)
            elif old is not None and not is_open(old):
                continue  # it stays where it is, whatever becomes of it
            else:
                if old is not None:
                    members[old].discard(number)
                seat[number] = window if is_open(window) else None
                if is_open(window):
                    members.setdefault(window, set()).add(number)
    return {window: sorted(ids) for window, ids in members.items() if ids}


@given(history=histories(), at=cuts(), lateness=st.sampled_from([0, 5]))
@settings(max_examples=examples(150), deadline=None)
def test_tumbling_windows_have_each_row_at_most_once(
    history: tuple[list[list[Row]], list[int]], at: list[int], lateness: int
) -> None:
    ticks, horizons = history
    whole, cut = (Windows(Tumbling(10 * SECOND), lateness) for _ in range(2))
    emitted = run(whole, ticks, horizons, [])
    again = run(cut, ticks, horizons, at)
    assert sorted(map(repr, emitted)) == sorted(map(repr, again))
    assert [state.values for state in whole.states] == [state.values for state in cut.states]
    assert whole.members == tumbling_oracle(ticks, horizons, 10, lateness)


WINDOWS: list[WindowSpec] = [
    Hopping(10 * SECOND, 5 * SECOND),
    Session(4 * SECOND),
    Sliding(10 * SECOND),
]


@given(history=histories(), at=cuts(), window=st.sampled_from(WINDOWS))
@settings(max_examples=examples(150), deadline=None)
def test_what_passes_is_a_changelog_however_it_is_cut(
    history: tuple[list[list[Row]], list[int]], at: list[int], window: WindowSpec
) -> None:
    ticks, horizons = history
    whole, cut = Windows(window), Windows(window)
    emitted = run(whole, ticks, horizons, [])
    again = run(cut, ticks, horizons, at)
    assert sorted(map(repr, emitted)) == sorted(map(repr, again))
    assert whole.states[0].values == cut.states[0].values
    table: dict[int, Row] = {}
    for change in emitted:
        if "window_start" not in change:
            plain = {name: change[name] for name in SCHEMA.names}
            if change["_change_type"] in {"delete", "update_preimage"}:
                assert table.pop(change["id"], plain) == plain
            else:
                # A row that came too late is in no window: it may be inserted once more.
                assert change["id"] not in table or change["_change_type"] == "insert"
                table[change["id"]] = plain
