"""Windows over combined rows, in any pieces and mixed with plain ones: the same results, and the
same counts of late rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.operators.aggregates import functions as agg
from headrace.operators.windows.fixed_window import FixedWindows
from headrace.operators.windows.kernel import WindowSettings
from headrace.operators.windows.late_policy import Correct, Divert, Drop, LatePolicy
from headrace.operators.windows.specs import Hopping, Tumbling
from headrace.testing.kernels import MemoryState
from tests.operators.windows.feeding import (
    STREAM,
    TIME,
    Feed,
    check_same,
    cuts,
    feed_to,
    late_by_minute,
    streams,
    tables,
)
from tests.short_forms import examples

AGGREGATES = (
    ("n", agg.count()),
    ("total", agg.sum("v")),
    ("mean", agg.avg("v")),
    ("spread", agg.stddev("v")),
)


def step_of(feed: Feed, **settings: Any) -> WindowSettings:
    given = {
        "window": Tumbling(10),
        "by": ("k",),
        "aggregates": AGGREGATES,
        "producer": "device",
        **settings,
    }
    return WindowSettings(
        "w",
        feed.schema,
        "t",
        over_table=feed.is_table,
        row_key=("id",) if feed.is_table else (),
        **given,
    )


@given(
    feed=streams() | tables(),
    window=st.sampled_from([Tumbling(10), Hopping(10, 5), Hopping(10, 4, 1), Hopping(12, 3)]),
    late=st.sampled_from([Drop(), Correct(12)]),
    emit=st.sampled_from(["final", "changes"]),
    by=st.sampled_from([("k",), (), ("k", "device")]),
    producer=st.sampled_from(["device", None]),
    where=cuts(),
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=3),
)
@settings(max_examples=examples(60))
def test_combined_rows_give_what_rows_give(
    feed: Feed,
    window: Any,
    late: LatePolicy,
    emit: str,
    by: tuple[str, ...],
    producer: str | None,
    where: list[int],
    sizes: list[int],
) -> None:
    step = step_of(feed, window=window, late=late, emit=emit, by=by, producer=producer)
    plain, combined = (
        feed_to(FixedWindows, step, feed, where),
        feed_to(FixedWindows, step, feed, where, combine=sizes),
    )
    check_same(combined.emitted, plain.emitted)
    assert combined.state == plain.state
    assert late_by_minute(combined.late_counts) == late_by_minute(plain.late_counts)
    assert combined.corrected == plain.corrected


def many(rows: int, keys: int) -> pa.Table:
    random = np.random.default_rng(1)
    times = pa.array(random.integers(0, 50, rows)).cast(TIME)
    columns = {
        "k": pa.array(random.integers(0, keys, rows)),
        "v": pa.array(random.random(rows)),
        "t": times,
        "device": pa.nulls(rows, pa.string()),
    }
    return pa.table({**columns, "_tick": pa.array(np.zeros(rows, np.int64))})


def test_a_row_for_each_group_pane_and_tick() -> None:
    kernel = FixedWindows(step_of(Feed([], [], []), window=Hopping(10, 4)))
    rows = many(5_000, 3)
    combined = kernel.combine(rows)
    panes = {
        (k, t // 4, (t - 10) // 4)
        for k, t in zip(rows["k"].to_pylist(), rows["t"].cast(pa.int64()).to_pylist(), strict=True)
    }
    assert combined.num_rows == len(panes)
    assert sum(each["rows"] for row in combined["_producers"].to_pylist() for each in row) == 5_000


def test_partial_windows_are_chosen_for_few_groups_and_panes() -> None:
    kernel = FixedWindows(step_of(Feed([], [], [])))
    assert kernel.is_worth_combining(many(20_000, 10))
    assert not kernel.is_worth_combining(many(20_000, 1_000_000))
    assert not FixedWindows(step_of(Feed([], [], []), window=Tumbling(1))).is_worth_combining(
        many(20, 20)
    )
    assert not kernel.is_worth_combining(many(0, 10))


@pytest.mark.parametrize(
    "settings", [{"late": Divert("late")}, {"aggregates": (("all", agg.collect("v")),)}]
)
def test_aggregates_of_whole_rows_are_not_combined(settings: dict[str, Any]) -> None:
    kernel = FixedWindows(
        WindowSettings(
            "w", STREAM, "t", Tumbling(10), ("k",), **{"aggregates": AGGREGATES, **settings}
        )
    )
    assert not kernel.combinable
    assert not kernel.is_worth_combining(many(20_000, 1))


def test_rows_in_many_windows_are_combined_on_their_way() -> None:
    """Whether that happens or not, the result is the same."""
    rows = [{"k": 0, "v": 0.1 * at, "t": at, "device": None} for at in range(40)]
    table = pa.Table.from_pylist(
        [{**row, "_tick": 0} for row in rows * 3], pa.schema([*STREAM, ("_tick", pa.int64())])
    )
    feed = Feed([[]], [30], [30])
    emitted = []
    for spec in (AGGREGATES, (*AGGREGATES, ("all", agg.collect("v")))):
        kernel = FixedWindows(step_of(feed, window=Hopping(12, 2), aggregates=spec))
        emitted.append(
            kernel.step_timed(MemoryState(), [table], [feed.watermarks(0, 1)]).select(
                ["window_start", "n", "total", "mean", "spread"]
            )
        )
    assert emitted[0] == emitted[1]
    assert emitted[0].num_rows > 10
