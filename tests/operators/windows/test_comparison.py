"""Window comparison against a naive computation, also on days when clocks change."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InputError
from headrace.operators.changelog import check_ticks
from headrace.operators.kernel import UNSTARTED, TimedKernel, Watermarks
from headrace.operators.windows.assignment import assign
from headrace.operators.windows.comparison import CompareKernel
from headrace.operators.windows.late_policy import DAY_US
from headrace.operators.windows.specs import tumbling
from headrace.testing.kernels import MemoryState
from tests.operators.histories import changed, text
from tests.operators.windows.feeding import TIME, cuts
from tests.operators.windows.oracle import Row, moment, us
from tests.short_forms import examples

SCHEMA = pa.schema(
    [
        ("k", pa.int64()),
        ("window_start", TIME),
        ("window_end", TIME),
        ("n", pa.int64()),
        ("name", pa.string()),
    ]
)
SIZE, PERIOD = 10, 20
Ticks = list[list[Row]]


def window(k: int | None, start: int, n: int | None, name: str | None = None) -> Row:
    return {
        "k": k,
        "window_start": moment(start),
        "window_end": moment(start + SIZE),
        "n": n,
        "name": name,
    }


@st.composite
def histories(draw: st.DrawFn) -> Ticks:
    """Changes of windows, one of each in a tick."""
    there: dict[tuple[Any, int], Row | None] = {}
    ticks: Ticks = []
    for _ in range(draw(st.integers(1, 6))):
        ticks.append([])
        keys = st.tuples(st.sampled_from([0, 1, None]), st.sampled_from([0, 10, 20, 30, 40]))
        for key in draw(st.lists(keys, max_size=5, unique=True)):
            fresh = (
                None
                if draw(st.integers(0, 3)) == 0
                else window(
                    *key, draw(st.none() | st.integers(0, 2)), draw(st.sampled_from(["a", None]))
                )
            )
            ticks[-1] += changed(there.get(key), fresh)
            there[key] = fresh
    return ticks


def reference(ticks: Ticks) -> list[Row]:
    table: dict[tuple[Any, int], Row] = {}
    shown: dict[tuple[Any, int], Row] = {}
    emitted: list[Row] = []
    for number, rows in enumerate(ticks):
        for row in rows:
            key = (row["k"], us(row["window_start"]))
            table.pop(key, None)
            if row["_change_type"] in {"insert", "update_postimage"}:
                table[key] = {name: row[name] for name in SCHEMA.names}
        now = {}
        for (k, start), row in table.items():
            earlier = table.get((k, start - PERIOD), {})
            now[k, start] = {
                **row,
                "previous_n": earlier.get("n"),
                "previous_name": earlier.get("name"),
            }
        for key in sorted(
            {*shown, *now}, key=lambda each: (each[0] is not None, each[0] or 0, each[1])
        ):
            if repr(shown.get(key)) != repr(now.get(key)):
                emitted += [
                    {**change, "_tick": number} for change in changed(shown.get(key), now.get(key))
                ]
        shown = now
    return emitted


def table_of(ticks: Ticks, first: int, stop: int) -> pa.Table:
    rows = [{**row, "_tick": number} for number in range(first, stop) for row in ticks[number]]
    return pa.Table.from_pylist(
        rows, pa.schema([*SCHEMA, ("_change_type", pa.string()), ("_tick", pa.int64())])
    )


def watermarks(first: int, stop: int, horizon: list[int] | None = None) -> Watermarks:
    times = np.arange(first, stop)
    at_end = np.full(stop - first, UNSTARTED) if horizon is None else np.array(horizon[first:stop])
    start = UNSTARTED if horizon is None or not first else horizon[first - 1]
    return Watermarks(times, times, at_end, at_end, start, start)


@given(ticks=histories(), where=cuts(), by=st.just(("k",)))
@settings(max_examples=examples(60))
def test_results_equal_the_oracle(ticks: Ticks, where: list[int], by: tuple[str, ...]) -> None:
    kernel, state, emitted = CompareKernel("c", SCHEMA, by, PERIOD), MemoryState(), []
    bounds = [0, *sorted({cut for cut in where if cut < len(ticks)}), len(ticks)]
    for first, stop in pairwise(bounds):
        table = kernel.step_timed(state, [table_of(ticks, first, stop)], [watermarks(first, stop)])
        check_ticks(table, ("k", "window_start"))
        emitted += table.to_pylist()
    assert text(emitted) == text(reference(ticks))


def test_a_row_is_kept_until_the_window_a_period_later_is_closed() -> None:
    ticks = [
        [{**window(0, 0, 5), "_change_type": "insert"}],
        [],
        [],
        [{**window(0, 20, 6), "_change_type": "insert"}],
    ]
    for horizon, previous in ([0, 10, 29, 29], 5), ([0, 10, 30, 30], None):
        kernel, state, emitted = CompareKernel("c", SCHEMA, ["k"], PERIOD), MemoryState(), []
        for tick in range(4):
            emitted += kernel.step_timed(
                state, [table_of(ticks, tick, tick + 1)], [watermarks(tick, tick + 1, horizon)]
            ).to_pylist()
        assert [(each["n"], each["previous_n"]) for each in emitted] == [(5, None), (6, previous)]
        assert len(state.values) == (1 if previous is None else 2)


def test_seven_days_back_from_a_midnight_is_a_midnight() -> None:
    hour = 3_600_000_000
    before = us(moment(1_792_274_400_000_000))  # 2026-10-17 22:00 UTC, midnight in Berlin
    after = (
        before + (7 * 24 + 1) * hour
    )  # a week later, when the clock has been put back: 2026-10-25 23:00 UTC
    rows = [window(0, before + 24 * hour, 1), window(0, after + 24 * hour, 2)]
    for row, length in zip(rows, (24, 24), strict=True):
        row["window_end"] = moment(us(row["window_start"]) + length * hour)
    kernel = CompareKernel(
        "c", SCHEMA, ["k"], 7 * 24 * hour, tumbling("1 day", timezone="Europe/Berlin")
    )
    emitted = kernel.step_timed(
        MemoryState(),
        [table_of([[{**row, "_change_type": "insert"} for row in rows]], 0, 1)],
        [watermarks(0, 1)],
    ).to_pylist()
    assert [(each["n"], each["previous_n"]) for each in emitted] == [(1, None), (2, 1)]


def compared(zone: str, size: str, period_us: int, moments: list[str]) -> dict[int, int | None]:
    """Each window that holds one of these moments, by its index among them, with the one a period
    earlier.
    """
    spec = tumbling(size, timezone=zone)
    assigned = assign(spec, np.array([us(datetime.fromisoformat(each)) for each in moments]))
    starts, ends = assigned.bounds(assigned.last)
    rows = [
        {**window(0, start, at), "window_end": moment(end), "_change_type": "insert"}
        for at, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True))
    ]
    emitted = (
        CompareKernel("c", SCHEMA, ["k"], period_us, spec)
        .step_timed(MemoryState(), [table_of([rows], 0, 1)], [watermarks(0, 1)])
        .to_pylist()
    )
    return {each["n"]: each["previous_n"] for each in emitted}


def test_a_day_that_begins_at_one_because_midnight_is_left_out_has_a_day_a_week_earlier() -> None:
    days = [
        "2018-10-27T12:00-03:00",
        "2018-10-28T12:00-03:00",
        "2018-11-03T12:00-03:00",
        "2018-11-04T12:00-02:00",
        "2018-11-11T12:00-02:00",
    ]
    assert compared("America/Sao_Paulo", "1 day", 7 * DAY_US, days) == {
        0: None,
        1: None,
        2: 0,
        3: 1,
        4: 3,
    }


def test_a_day_that_was_left_out_stands_next_to_none() -> None:
    days = ["2011-12-29T12:00-10:00", "2011-12-31T12:00+14:00", "2012-01-01T12:00+14:00"]
    assert compared("Pacific/Apia", "1 day", DAY_US, days) == {0: None, 1: None, 2: 1}


@pytest.mark.parametrize(
    ("hours", "expected"),
    [
        # 29 March has no 02:00: what ends there is compared with what ends at 02:00 all the same,
        # and 30 March's 02:00 with none.
        (
            [
                "2026-03-28T01:30+01:00",
                "2026-03-28T02:30+01:00",
                "2026-03-28T03:30+01:00",
                "2026-03-29T01:30+01:00",
                "2026-03-29T03:30+02:00",
                "2026-03-30T02:30+02:00",
            ],
            {0: None, 1: None, 2: None, 3: 0, 4: 2, 5: None},
        ),
        # 25 October has 02:00 twice: the first is the one that is meant.
        (
            [
                "2026-10-24T02:30+02:00",
                "2026-10-25T02:30+02:00",
                "2026-10-25T02:30+01:00",
                "2026-10-26T02:30+01:00",
            ],
            {0: None, 1: 0, 2: None, 3: 1},
        ),
    ],
)
def test_hours_next_to_those_of_the_day_before_when_clocks_are_changed(
    hours: list[str], expected: dict[int, int | None]
) -> None:
    assert compared("Europe/Berlin", "1 hour", DAY_US, hours) == expected


def test_is_a_timed_kernel_and_refuses_taken_names() -> None:
    assert isinstance(CompareKernel("c", SCHEMA, ["k"], PERIOD), TimedKernel)
    with pytest.raises(InputError, match="two columns named 'previous_n'"):
        CompareKernel("c", SCHEMA.append(pa.field("previous_n", pa.int64())), ["k"], PERIOD)
