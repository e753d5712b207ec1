"""Windows over windows: corrections reach the top, and the final result is that of all rows at
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headrace.operators.aggregates import functions as agg
from headrace.operators.changelog import check_ticks, fold
from headrace.operators.kernel import UNSTARTED, Watermarks
from headrace.operators.windows.factory import window_kernel
from headrace.operators.windows.kernel import WindowSettings
from headrace.operators.windows.late_policy import Correct
from headrace.operators.windows.specs import Hopping, Session, Sliding, Tumbling, WindowSpec
from headrace.testing.kernels import MemoryState
from tests.operators.windows.feeding import STREAM, Feed, random_feed
from tests.operators.windows.oracle import us

LATENESS = 40
KEY = ("k", "window_start", "window_end")


def bottom(emit: str) -> WindowSettings:
    aggregates = (("n", agg.count()), ("total", agg.sum("v")))
    return WindowSettings(
        "minutes", STREAM, "t", Tumbling(10), ("k",), aggregates, late=Correct(LATENESS), emit=emit
    )


def on_top(
    name: str, below: pa.Schema, window: WindowSpec, aggregates: Any, shift: int = -1
) -> WindowSettings:
    schema = pa.schema([field for field in below if field.name != "_change_type"])
    return WindowSettings(
        name,
        schema,
        "window_end",
        window,
        ("k",),
        aggregates,
        late=Correct(LATENESS),
        over_table=True,
        row_key=KEY,
        time_shift_us=shift,
    )


def run(steps: Sequence[WindowSettings], feed: Feed, sizes: Sequence[int]) -> pa.Table:
    """Feed a chain of steps, in calls of some numbers of ticks; each step's clocks are those before
    it, less what it allows.
    """
    states, emitted, at, turn = [MemoryState() for _ in steps], [], 0, 0
    while at < len(feed.ticks):
        stop = min(at + sizes[turn % len(sizes)], len(feed.ticks))
        rows, watermarks = feed.table(at, stop), feed.watermarks(at, stop)
        for step, state in zip(steps, states, strict=True):
            kernel = window_kernel(step)
            rows = kernel.step_timed(state, [rows], [watermarks])
            assert kernel.counts["late"] == 0
            watermarks = behind(watermarks, kernel.lateness_us)
        emitted.append(rows)
        at, turn = stop, turn + 1
    return pa.concat_tables(emitted)


def behind(watermarks: Watermarks, lateness_us: int) -> Watermarks:
    start = watermarks.horizon_at_start
    return Watermarks(
        watermarks.ticks,
        watermarks.times_us,
        watermarks.watermark,
        np.where(watermarks.horizon == UNSTARTED, UNSTARTED, watermarks.horizon - lateness_us),
        watermarks.watermark_at_start,
        start if start == UNSTARTED else start - lateness_us,
    )


def totals(feed: Feed) -> dict[tuple[int, int], int]:
    """How many rows each group has in each minute, by the minute's last moment."""
    found: dict[tuple[int, int], int] = {}
    for row in (row for tick in feed.ticks for row in tick):
        key = (row["k"], us(row["t"]) // 10 * 10 + 9)
        found[key] = found.get(key, 0) + 1
    return found


def hours_of(minutes: dict[tuple[int, int], int]) -> dict[tuple[int, int, int], int]:
    found: dict[tuple[int, int, int], int] = {}
    for (k, time), count in minutes.items():
        for start in (time // 30 * 30, time // 30 * 30 - 30):
            found[k, start, start + 60] = found.get((k, start, start + 60), 0) + count
    return found


def days_of(hours: dict[tuple[int, int, int], int]) -> dict[tuple[int, int, int], int]:
    found: dict[tuple[int, int, int], int] = {}
    for (k, _, end), count in hours.items():
        start = (end - 1) // 240 * 240
        found[k, start, start + 240] = found.get((k, start, start + 240), 0) + count
    return found


def sessions_of(minutes: dict[tuple[int, int], int]) -> dict[tuple[int, int, int], int]:
    found: dict[tuple[int, int, int], int] = {}
    for (k, time), count in sorted(minutes.items()):
        last = next((key for key in found if key[0] == k and time < key[2]), None)
        start, before = (last[1], found.pop(last)) if last else (time, 0)
        found[k, start, time + 15] = before + count
    return found


def sliding_of(minutes: dict[tuple[int, int], int]) -> dict[tuple[int, int, int], int]:
    return {
        (k, time - 50, time): sum(
            n for (other, at), n in minutes.items() if other == k and time - 50 < at <= time
        )
        for k, time in minutes
    }


def counts(emitted: pa.Table) -> dict[tuple[int, int, int], int]:
    return {
        (k, us(start), us(end)): row["n"] for (k, start, end), row in fold(emitted, KEY).items()
    }


SUMS = (("n", agg.sum("n")), ("total", agg.sum("total")), ("parts", agg.count()))


@pytest.mark.parametrize("emit", ["final", "changes"])
@pytest.mark.parametrize("seed", [1, 2])
def test_minutes_to_hours_to_days(seed: int, emit: str) -> None:
    feed, minutes = random_feed(seed), bottom(emit)
    hours = on_top("hours", window_kernel(minutes).output, Hopping(60, 30), SUMS)
    days = on_top("days", window_kernel(hours).output, Tumbling(240), SUMS)
    emitted = run([minutes, hours, days], feed, [1])
    check_ticks(emitted, KEY)
    assert emitted.equals(run([minutes, hours, days], feed, [7, 1, 3]))
    assert set(emitted["_change_type"].to_pylist()) >= {
        "insert",
        "update_preimage",
        "update_postimage",
    }
    assert counts(emitted) == days_of(hours_of(totals(feed)))


@pytest.mark.parametrize("emit", ["final", "changes"])
@pytest.mark.parametrize(
    ("window", "wanted"), [(Session(15), sessions_of), (Sliding(50), sliding_of)]
)
def test_windows_that_depend_on_rows_over_minutes(
    window: WindowSpec, wanted: Any, emit: str
) -> None:
    for seed in range(2):
        feed, minutes = random_feed(seed), bottom(emit)
        top = on_top("top", window_kernel(minutes).output, window, SUMS)
        emitted = run([minutes, top], feed, [1])
        check_ticks(emitted, KEY)
        assert emitted.equals(run([minutes, top], feed, [7, 1, 3]))
        assert counts(emitted) == wanted(totals(feed))
