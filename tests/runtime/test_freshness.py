"""Freshness: from append to visible, as the ticks say."""

from __future__ import annotations

import pytest

from headrace.engine.ticks import Tick
from headrace.runtime.freshness import Freshness

SECOND_US = 1_000_000


def tick(number: int, seconds: float, rows: int) -> Tick:
    return Tick(number, int(seconds * SECOND_US), {"orders": {0: rows}})


def test_rows_were_appended_between_two_looks_and_are_visible_together() -> None:
    freshness = Freshness()
    assert freshness.quantiles_s(0.5) is None
    freshness.record(
        tick(0, 0.0, 0),
        [tick(1, 100.0, 10)],
        since_us={1: 99 * SECOND_US},
        visible_us=102 * SECOND_US,
    )
    p50_s, p99_s = freshness.quantiles_s(0.5, 0.99) or [0.0, 0.0]
    assert p50_s == pytest.approx(2.5)
    assert p99_s == pytest.approx(2.9)


def test_a_backlog_does_not_count() -> None:
    freshness = Freshness()
    freshness.record(tick(0, 0.0, 0), [tick(1, 100.0, 10)], {}, 102 * SECOND_US)
    assert freshness.quantiles_s(0.5) is None


def test_ticks_count_by_their_rows() -> None:
    freshness = Freshness()
    freshness.record(
        tick(0, 0.0, 0),
        [tick(1, 10.0, 1), tick(2, 11.0, 100)],
        since_us={1: 10 * SECOND_US, 2: 11 * SECOND_US},
        visible_us=12 * SECOND_US,
    )
    p50_s, p99_s = freshness.quantiles_s(0.5, 0.999) or [0.0, 0.0]
    assert p50_s == pytest.approx(1.0)
    assert p99_s == pytest.approx(2.0)
