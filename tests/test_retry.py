from __future__ import annotations

import pytest

from headrace.retry import Backoff, CircuitBreaker


@pytest.mark.parametrize(
    ("failures", "longest_s"), [(1, 0.2), (2, 0.4), (5, 3.2), (9, 30.0), (2_000, 30.0)]
)
def test_pauses_double_up_to_the_longest(failures: int, longest_s: float) -> None:
    backoff = Backoff(first_s=0.2, longest_s=30.0)
    pauses_s = [backoff.pause_s(failures) for _ in range(100)]
    assert all(longest_s / 2 <= pause_s <= longest_s for pause_s in pauses_s)
    assert len(set(pauses_s)) > 50
    assert Backoff(0.2, 30.0, jitter=0.0).pause_s(failures) == pytest.approx(longest_s)
    assert backoff.pause_s(failures, min_s=100.0) == 100.0


def test_the_circuit_opens_after_failures_and_lets_one_try_through() -> None:
    now = [0.0]
    breaker = CircuitBreaker(lambda: now[0])
    for _ in range(CircuitBreaker.FAILURES_TO_OPEN - 1):
        breaker.record_failure()
        assert breaker.wait_s() < 10
        assert not breaker.is_open
    breaker.record_failure()
    assert breaker.is_open
    assert 15 <= breaker.wait_s() <= 30
    now[0] = 31.0
    assert breaker.wait_s() == 0.0
    breaker.record_failure()
    assert 30 <= breaker.wait_s() <= 60
    breaker.record_failure(min_s=500)
    assert breaker.wait_s() >= 500
    breaker.record_success()
    assert (breaker.is_open, breaker.wait_s()) == (False, 0.0)
