"""The bounded queue between receivers and the log, with a log that is as slow as the test wants."""

from threading import Event, Thread
from time import monotonic, sleep

import pytest

from headrace.errors import DiskFull, ProducerFenced
from headrace.gateways.inbox import (
    Fate,
    GatewayCounters,
    Inbox,
    JsonLines,
    Submission,
    SubmissionResult,
    overload_policy,
)


class SlowLog:
    """Appends nothing until it is let go."""

    def __init__(self) -> None:
        self.go, self.began = Event(), Event()
        self.stored: list[int] = []
        self.failing: list[Exception] = []

    def write(self, submissions: list[Submission]) -> list[SubmissionResult]:
        self.began.set()
        self.go.wait(20)
        if self.failing:
            raise self.failing.pop(0)
        self.stored += [each.received_us for each in submissions]
        return [SubmissionResult(Fate.stored)] * len(submissions)


def submission(number: int, rows: int = 1, size: int = 10) -> Submission:
    return Submission("t", JsonLines([b"{}"] * rows), rows, size, number)


def filled(policy: str, count: int, log: SlowLog, **bounds: int) -> tuple[Inbox, GatewayCounters]:
    """An inbox that is appending the first delivery, and was handed more."""
    counts = GatewayCounters("g", "test")
    limits = overload_policy(policy, **bounds)  # type: ignore[arg-type]
    inbox = Inbox(limits, counts, log.write, retries_appends=True).start()
    inbox.submit(submission(0), Event())
    assert log.began.wait(10)
    for number in range(1, count):
        inbox.submit(submission(number), Event())
    return inbox, counts


@pytest.mark.parametrize(
    ("policy", "stored", "dropped", "refused"),
    [
        ("buffer", [0, 1, 2], 0, 7),
        ("drop newest", [0, 1, 2], 7, 0),
        ("drop oldest", [0, 7, 8, 9], 6, 0),
    ],
)
@pytest.mark.parametrize("bounds", [{"max_rows": 3}, {"max_bytes": 30}])
def test_beyond_the_bound_the_policy_decides(
    policy: str, stored: list[int], dropped: int, refused: int, bounds: dict[str, int]
) -> None:
    log = SlowLog()
    inbox, counts = filled(policy, 10, log, **bounds)
    log.go.set()
    inbox.close()
    status = counts.status()
    assert log.stored == stored
    assert (status.dropped, status.refused, status.received, status.waiting_rows) == (
        dropped,
        refused,
        10,
        0,
    )


def test_block_makes_the_sender_wait_until_there_is_room() -> None:
    log = SlowLog()
    inbox, counts = filled("block", 3, log, max_rows=3)
    waiting = Thread(target=inbox.submit, args=(submission(3), Event()))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    log.go.set()
    waiting.join(10)
    inbox.close()
    assert (log.stored, counts.status().stored) == ([0, 1, 2, 3], 4)


def test_a_sender_that_waits_is_let_go_when_the_gateway_stops() -> None:
    log, stopped = SlowLog(), Event()
    inbox, counts = filled("block", 3, log, max_rows=3)
    stopped.set()
    assert inbox.submit(submission(3), stopped) is False
    log.go.set()
    inbox.close()
    assert (counts.status().stored, counts.status().reasons) == (3, {"stopping": 1})


def test_an_item_larger_than_the_bound_is_admitted_alone() -> None:
    log = SlowLog()
    log.go.set()
    counts = GatewayCounters("g", "test")
    inbox = Inbox(
        overload_policy("buffer", max_rows=3), counts, log.write, retries_appends=True
    ).start()
    assert inbox.submit(submission(0, rows=100), Event())
    inbox.close()
    assert counts.status().stored == 100


def test_a_transient_failure_is_retried_and_counted_once() -> None:
    log = SlowLog()
    log.failing = [DiskFull("no room"), DiskFull("no room")]
    inbox, counts = filled("block", 5, log)
    log.go.set()
    deadline = monotonic() + 10
    while counts.status().stored < 5 and monotonic() < deadline:
        sleep(0.01)
    inbox.close()
    assert log.stored == [0, 1, 2, 3, 4]
    assert (counts.status().stored, counts.status().error) == (5, None)


def test_a_permanent_failure_ends_the_inbox_and_refuses_waiting_items() -> None:
    log, heard = SlowLog(), list[SubmissionResult]()
    log.failing = [ProducerFenced("taken over")]
    inbox, counts = filled("block", 5, log)
    last = submission(5)
    last.done = heard.append
    inbox.submit(last, Event())
    log.go.set()
    assert inbox.ended.wait(10)
    with pytest.raises(ProducerFenced):
        inbox.check()
    assert (counts.status().refused, log.stored) == (6, [])
    assert [(each.fate, each.is_temporary) for each in heard] == [(Fate.refused, True)]
