"""Metrics over windows: rates, moving averages, decayed sums and percentiles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import BadDuration, BugError, PlanError
from headrace.operators.aggregates import functions as agg
from headrace.operators.aggregates.kernel import AggregateKernel
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.operators.windows.factory import window_kernel
from headrace.operators.windows.kernel import WindowSettings
from headrace.operators.windows.late_policy import Correct
from headrace.operators.windows.specs import Hopping, Session, Sliding, Tumbling, tumbling
from headrace.testing.kernels import MemoryState
from tests.operators.histories import text
from tests.operators.windows.feeding import STREAM, Feed, cuts, feed_to, streams
from tests.operators.windows.oracle import Row, moment, us
from tests.short_forms import examples

SECOND = 1_000_000
HOUR = 3600 * SECOND


def row(time: int, v: float | None = 1.0, k: int | None = 0) -> Row:
    return {"k": k, "v": v, "t": moment(time), "device": None}


def results(
    window: Any,
    spec: AggregateSpec,
    times: list[int],
    values: list[float | None],
    watermark: int = 10**16,
) -> list[Any]:
    feed = Feed(
        [[row(time, value) for time, value in zip(times, values, strict=True)]], [watermark], [0]
    )
    return [
        each["a"]
        for each in feed_to(
            window_kernel, WindowSettings("w", STREAM, "t", window, ("k",), (("a", spec),)), feed
        ).emitted
    ]


@pytest.mark.parametrize(
    ("window", "spec", "wanted"),
    [
        (tumbling("1 minute"), agg.rate("v"), [0.1]),
        (tumbling("1 minute"), agg.rate("v", per="1 minute"), [6.0]),
        (tumbling("1 minute"), agg.rate(), [3 / 60]),
        (Session(10 * SECOND), agg.rate(per="1 hour"), [3 / (24 * SECOND) * HOUR]),
        (Sliding(10 * SECOND), agg.rate("v"), [0.1, 0.3, 0.5]),
        (Hopping(60 * SECOND, 30 * SECOND), agg.rate("v"), [0.1, 0.1]),
    ],
)
def test_rates_are_by_the_length_of_the_window(
    window: Any, spec: AggregateSpec, wanted: list[float]
) -> None:
    assert results(window, spec, [0, 7 * SECOND, 14 * SECOND], [1.0, 2.0, 3.0]) == pytest.approx(
        wanted
    )


def test_a_rate_in_a_day_of_25_hours() -> None:
    start = us(moment(1_792_879_200_000_000))  # 2026-10-24 22:00 UTC, midnight in Berlin
    assert results(
        tumbling("1 day", timezone="Europe/Berlin"), agg.rate(per="1 hour"), [start], [1.0]
    ) == [1 / 25]


def test_a_rate_of_nothing_is_null_and_without_a_window_there_is_none() -> None:
    assert results(Tumbling(SECOND), agg.rate("v"), [0], [None]) == [None]
    with pytest.raises(PlanError, match="the step has none"):
        AggregateKernel("s", STREAM, ["k"], [("r", agg.rate("v"))])


def test_a_moving_average_is_an_average_over_a_sliding_window() -> None:
    assert results(Sliding(10), agg.avg("v"), [0, 4, 8, 12, 30], [1.0, 2.0, 6.0, 4.0, 5.0]) == [
        1.0,
        1.5,
        3.0,
        4.0,
        5.0,
    ]


def test_percentiles_of_a_window() -> None:
    assert results(
        Tumbling(SECOND),
        agg.quantiles("v", [0.5, 1.0]),
        list(range(101)),
        [float(each) for each in range(101)],
    ) == [[50.0, 100.0]]


# Decay


def test_a_value_counts_half_for_every_half_life() -> None:
    spec = agg.decayed_sum("v", half_life="10 seconds")
    times = [0, 10 * SECOND, 30 * SECOND]
    assert results(tumbling("1 minute"), spec, times, [8.0, 4.0, 1.0]) == [8 / 8 + 4 / 4 + 1]
    assert results(tumbling("1 minute"), spec, times[::-1], [1.0, 4.0, 8.0]) == [3.0]
    assert results(tumbling("1 minute"), spec, times, [8.0, None, None]) == [8.0]
    assert results(tumbling("1 minute"), spec, times, [None, None, None]) == [None]
    assert results(Sliding(15 * SECOND), spec, times, [8.0, 4.0, 1.0]) == [8.0, 8.0, 1.0]


@given(
    feed=streams(),
    window=st.sampled_from([Tumbling(20), Hopping(20, 5), Session(9), Sliding(20)]),
    where=cuts(),
)
@settings(max_examples=examples(30))
def test_decay_does_not_depend_on_calls_and_equals_a_plain_sum(
    feed: Feed, window: Any, where: list[int]
) -> None:
    step = WindowSettings(
        "w",
        feed.schema,
        "t",
        window,
        ("k",),
        (("a", agg.decayed_sum("v", half_life="3 us")), ("n", agg.count())),
        Correct(1000),
        "changes",
    )
    output = feed_to(window_kernel, step, feed, where)
    assert text(output.emitted) == text(feed_to(window_kernel, step, feed).emitted)
    rows = [(each["k"], us(each["t"]), each["v"]) for tick in feed.ticks for each in tick]
    for each in output.emitted:
        low, high = us(each["window_start"]), us(each["window_end"])
        shift = 1 if isinstance(window, Sliding) else 0
        mine = [
            (time, value)
            for k, time, value in rows
            if k == each["k"] and low + shift <= time < high + shift
        ]
        if each["n"] == len(mine):  # all of its rows have come
            assert close(
                each["a"], decayed([(time, value) for time, value in mine if value is not None])
            )


def close(found: float | None, wanted: float | None) -> bool:
    """Rounding of values up to 1e16 may leave a few units."""
    if found is None or wanted is None or math.isnan(found):
        return found is wanted or (found is not None and wanted is not None and math.isnan(wanted))
    return math.isclose(found, wanted, rel_tol=1e-9, abs_tol=10.0)


def decayed(values: list[tuple[int, float]]) -> float | None:
    newest = max((time for time, _ in values), default=0)
    return sum(value * 2 ** (-(newest - time) / 3) for time, value in values) if values else None


def test_decay_of_a_running_group_goes_by_a_column() -> None:
    kernel = AggregateKernel(
        "s", STREAM, ["k"], [("a", agg.decayed_sum("v", half_life="10 us", time="t"))]
    )
    state = MemoryState()
    table = Feed(
        [[row(0, 8.0), row(1, 1.0, k=1)], [row(20, 1.0)], [row(10, 4.0)]], [0] * 3, [0] * 3
    )
    emitted = [
        each
        for tick in range(3)
        for each in kernel.step(state, table.table(tick, tick + 1)).to_pylist()
    ]
    assert [
        (each["_tick"], each["a"])
        for each in emitted
        if each["k"] == 0 and each["_change_type"] != "update_preimage"
    ] == [
        (0, 8.0),
        (1, 3.0),
        (2, 5.0),
    ]
    assert not kernel.combinable


def test_invalid_decay_is_refused() -> None:
    with pytest.raises(PlanError, match="which is zero"):
        agg.decayed_sum("v", half_life="0 seconds")
    with pytest.raises(BadDuration, match="per of rate"):
        agg.rate("v", per="often")
    assert not agg.decayed_sum("v", half_life="1 hour").takes_tables
    with pytest.raises(BugError, match="event time"):
        AggregateKernel("s", STREAM, ["k"], [("a", agg.decayed_sum("v", half_life="10 us"))])


def test_decay_over_years_is_not_lost() -> None:
    year = 365 * 24 * HOUR
    spec = agg.decayed_sum("v", half_life="1 microsecond")
    assert results(tumbling("3650 days"), spec, [0, 9 * year], [1e300, 1.0]) == [1.0]
    assert np.isfinite(results(tumbling("3650 days"), spec, [9 * year, 0], [1.0, 1e300])[0])
    assert pa.types.is_float64(
        window_kernel(WindowSettings("w", STREAM, "t", Tumbling(1), (), (("a", spec),)))
        .output.field("a")
        .type
    )
