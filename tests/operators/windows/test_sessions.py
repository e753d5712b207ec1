"""Sessions against the obvious computation, made from kept rows and from states, whatever the calls and the shards; and how they grow, merge and part."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.operators import agg
from headrace.operators.windows.base import WindowStep
from headrace.operators.windows.session_rows import SessionRows
from headrace.operators.windows.specs import Correct, Divert, Drop, LatePolicy, Session
from tests.operators.windows.feeding import Feed, check_same, cuts, expected, feed_to, shard_counts, streams, tables
from tests.operators.windows.oracle import SessionOracle
from tests.operators.windows.test_fixed import late_by_minute

LATE: list[LatePolicy] = [Drop(), Correct(0), Correct(12), Divert("late")]
MERGEABLE = (("n", agg.count()), ("total", agg.sum("v")), ("low", agg.min("v")), ("mean", agg.avg("v")))
AGGREGATES = (*MERGEABLE, ("all", agg.collect("v")), ("first", agg.first("device")), ("last", agg.last("v")))


def step_of(feed: Feed, **settings: Any) -> WindowStep:
    given = {"window": Session(8), "by": ("k",), "aggregates": AGGREGATES, "producer": "device", **settings}
    return WindowStep("w", feed.schema, "t", over_table=feed.is_table, row_key=("id",) if feed.is_table else (), **given)


@pytest.mark.parametrize("emit", ["final", "changes"])
@given(
    feed=streams() | tables(),
    gap=st.sampled_from([1, 5, 12]),
    late=st.sampled_from(LATE),
    by=st.sampled_from([("k",), (), ("k", "device")]),
    where=cuts(),
    shards=shard_counts(),
)
@settings(max_examples=80)
def test_kept_rows_give_the_obvious_rows(
    emit: str, feed: Feed, gap: int, late: LatePolicy, by: tuple[str, ...], where: list[int], shards: list[int]
) -> None:
    step = step_of(feed, window=Session(gap), late=late, by=by, emit=emit)
    oracle = SessionOracle(step)
    wanted = expected(oracle, feed)
    fed = feed_to(SessionRows, step, feed, where, shards)
    check_same(fed.told, wanted, shards)
    assert late_by_minute(fed.late_counts) == Counter((each["_tick"] * 20 // 60, each["device"]) for each in oracle.late)
