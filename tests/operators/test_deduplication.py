"""Deduplication against a naive computation, with and without event times."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.operators.deduplication import DedupeKernel
from headrace.operators.kernel import UNSTARTED, Watermarks
from headrace.testing.kernels import MemoryState

SCHEMA = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us")), ("n", pa.int64())])
WITHIN = 10


@dataclass
class Feed:
    """Ticks of rows (id, time), and the clock at the end of each tick."""

    ticks: list[list[tuple[int, int]]]
    horizon: list[int]
    _numbers: list[int] = field(default_factory=list)

    def rows(self, first: int, last: int) -> pa.Table:
        found = [(tick, row) for tick in range(first, last) for row in self.ticks[tick]]
        count = sum(len(tick) for tick in self.ticks[:first])
        columns = {
            "id": pa.array([row[0] for _, row in found], pa.int64()),
            "at": pa.array([row[1] for _, row in found], pa.timestamp("us")),
            "n": pa.array(range(count, count + len(found)), pa.int64()),
            "_tick": pa.array([tick + 1 for tick, _ in found], pa.int64()),
        }
        return pa.table(columns)

    def watermarks(self, first: int, last: int) -> Watermarks:
        horizon = np.array(self.horizon[first:last], np.int64)
        before = self.horizon[first - 1] if first else UNSTARTED
        numbers = np.arange(first + 1, last + 1)
        return Watermarks(numbers, numbers * 7, horizon, horizon, before, before)


def reference(feed: Feed) -> list[int]:
    """Row by row: kept unless too late, or within the time of one that was kept."""
    kept: list[tuple[int, int]] = []
    found: list[int] = []
    number = 0
    for tick, rows in enumerate(feed.ticks):
        before = feed.horizon[tick - 1] if tick else UNSTARTED
        for key, at in rows:
            if at >= before and not any(
                other == key and abs(at - when) <= WITHIN for other, when in kept
            ):
                kept.append((key, at))
                found.append(number)
            number += 1
    return found


@st.composite
def feeds(draw: st.DrawFn) -> Feed:
    ticks = draw(
        st.lists(
            st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=6),
            min_size=1,
            max_size=6,
        )
    )
    horizon = sorted(draw(st.lists(st.integers(-5, 70), min_size=len(ticks), max_size=len(ticks))))
    return Feed(ticks, horizon)


@pytest.mark.parametrize("worth_a_round", [0.0, 0.9, 1.0])
@given(feed=feeds(), data=st.data())
def test_any_split_of_ticks_gives_the_rows_of_the_reference(
    worth_a_round: float, feed: Feed, data: st.DataObject
) -> None:
    """Row by row from the start, in rounds and then row by row, and in rounds alone."""
    with patch("headrace.operators.deduplication._MAX_ROUND_LEFTOVER", worth_a_round):
        check_split(feed, data)


def check_split(feed: Feed, data: st.DataObject) -> None:
    cuts = sorted(
        {0, len(feed.ticks), *data.draw(st.lists(st.integers(0, len(feed.ticks)), max_size=3))}
    )
    kernel, state, found, accounted = (
        DedupeKernel("d", SCHEMA, ["id"], WITHIN, "at"),
        MemoryState(),
        [],
        0,
    )
    for first, last in pairwise(cuts):
        rows = kernel.step_timed(state, [feed.rows(first, last)], [feed.watermarks(first, last)])
        found += rows["n"].to_pylist()
        accounted += rows.num_rows + kernel.counts["repeats"] + kernel.counts["late"]
        state = state.copy()
    assert found == reference(feed)
    assert accounted == sum(map(len, feed.ticks))


def test_expired_ids_are_dropped() -> None:
    feed = Feed([[(1, 5), (2, 6)], [], []], [5, 16, 17])
    kernel, state = DedupeKernel("d", SCHEMA, ["id"], WITHIN, "at"), MemoryState()
    kernel.step_timed(state, [feed.rows(0, 2)], [feed.watermarks(0, 2)])
    assert len(state.values) == 2, (
        "of the first row nothing is left, of the second one its time and its timer"
    )
    kernel.step_timed(state, [feed.rows(2, 3)], [feed.watermarks(2, 3)])
    assert state.values == {}


def test_without_a_time_column_the_ticks_time_counts() -> None:
    kernel, state = DedupeKernel("d", SCHEMA, ["id"], WITHIN), MemoryState()
    feed = Feed([[(1, 0)], [(1, 0)], [(1, 0)]], [UNSTARTED] * 3)
    assert kernel.step_timed(state, [feed.rows(0, 3)], [feed.watermarks(0, 3)])[
        "n"
    ].to_pylist() == [
        0,
        2,
    ], "ticks are 7 apart"


@pytest.mark.parametrize("order", ["in time", "mixed"])
def test_a_key_that_keeps_many_rows_costs_no_more_for_each(order: str) -> None:
    """30,000 kept rows of one key, and 30,000 that repeat them; it took a pass over all rows for
    each that was kept.
    """
    count = 30_000
    times = np.repeat(np.arange(count) * (WITHIN + 1), 2)
    if order == "mixed":
        times = np.random.default_rng(1).permutation(times)
    feed = Feed(
        [[(1, int(at)) for at in times], [(1, int(at)) for at in times[:1000]]],
        [UNSTARTED, UNSTARTED],
    )
    kernel, state = DedupeKernel("d", SCHEMA, ["id"], WITHIN, "at"), MemoryState()
    rows = feed.rows(0, 1)
    began = time.process_time()
    kept = kernel.step_timed(state, [rows], [feed.watermarks(0, 1)])
    took_s = time.process_time() - began
    assert sorted(kept["at"].cast(pa.int64()).to_pylist()) == list(
        range(0, count * (WITHIN + 1), WITHIN + 1)
    )
    assert kernel.counts == {"repeats": count, "late": 0}
    began = time.process_time()
    assert kernel.step_timed(state, [feed.rows(1, 2)], [feed.watermarks(1, 2)]).num_rows == 0, (
        "all of them repeat what is known"
    )
    assert took_s + time.process_time() - began < 3, (
        "a small part of a second; many seconds where cost grows with the square"
    )
