"""The checker finds each kind of anomaly in a history written by hand, and none in sound ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.history.checker import Kind, Rules, TopicRules, check, summary
from tests.history.history import (
    Action,
    Assign,
    History,
    Operation,
    Outcome,
    Partition,
    Poll,
    Recorder,
    Send,
)


class Script:
    """A history written by hand: operations one after the other, a microsecond apart."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._clock = count(1_000, 1_000)

    def add(
        self,
        process: str,
        kind: str,
        *actions: Action,
        outcome: str = "ok",
        during: Callable[[], object] | None = None,
        **details: Any,
    ) -> Operation:
        """An operation; `during` adds others between its invocation and its commit."""
        invoked_ns = next(self._clock)
        operation = Operation(
            process=process,
            kind=kind,
            outcome=Outcome(outcome),
            invoked_ns=invoked_ns,
            number=len(self.operations),
            **details,
        )
        self.operations.append(operation)
        if during is not None:
            during()
        operation.committing_ns = next(self._clock) if kind == "transaction" else invoked_ns
        now_ns = next(self._clock)
        operation.actions = [
            Poll(action.topic, action.partition, action.rows, action.time_ns or now_ns)
            if isinstance(action, Poll)
            else action
            for action in actions
        ]
        operation.completed_ns = now_ns if outcome != "info" else None
        return operation

    def send(self, value: str, offset: int | None, partition: int = 0, **details: Any) -> Operation:
        process = details.pop("process", "writer")
        return self.add(process, "send", sent(value, offset, partition), **details)

    def poll(
        self, rows: dict[int, str], partition: int = 0, *before: Action, **details: Any
    ) -> Operation:
        process = details.pop("process", "reader")
        actions = [*before, polled(rows, partition)]
        return self.add(process, "poll", *actions, group="readers", **details)

    def transaction(self, process: str, *actions: Action, **details: Any) -> Operation:
        return self.add(process, "transaction", *actions, **details)

    def audit(
        self,
        ends: dict[int, int],
        *,
        starts: dict[int, int] | None = None,
        rows: dict[int, dict[int, str]] | None = None,
        **details: Any,
    ) -> Operation:
        return self.add(
            "auditor",
            "audit",
            *(polled(some, partition) for partition, some in (rows or {}).items()),
            ends=of_topic(ends),
            starts=of_topic(starts or {}),
            **details,
        )

    def kinds(self, rules: Rules | None = None) -> set[Kind]:
        return {anomaly.kind for anomaly in check(History(self.operations), rules)}


def sent(value: str, offset: int | None = None, partition: int = 0, **details: Any) -> Send:
    return Send(details.pop("topic", "t"), partition, value, offset=offset, **details)


def polled(rows: dict[int, str], partition: int = 0, *, time_ns: int = 0, topic: str = "t") -> Poll:
    return Poll(topic, partition, tuple(rows.items()), time_ns)


def of_topic(offsets: dict[int, int]) -> dict[Partition, int]:
    return {("t", partition): offset for partition, offset in offsets.items()}


@pytest.fixture
def script() -> Script:
    return Script()


# Sound histories


def test_rows_sent_and_read_in_order_are_sound(script: Script) -> None:
    script.send("a", 0)
    script.send("b", 1)
    script.poll({0: "a", 1: "b"})
    script.send("c", 2)
    script.poll({2: "c"})
    script.audit({0: 3}, rows={0: {0: "a", 1: "b", 2: "c"}}, is_final=True)
    assert script.kinds(Rules(groups={"readers": ["t"]})) == set()


def test_a_send_without_an_answer_may_or_may_not_be_read(script: Script) -> None:
    script.send("seen", None, outcome="info")
    script.send("unseen", None, outcome="info", process="other")
    script.poll({0: "seen"})
    script.audit({0: 1}, rows={0: {0: "seen"}}, is_final=True)
    assert script.kinds(Rules(groups={"readers": ["t"]})) == set()


def test_a_failed_send_that_is_repeated_is_read_once(script: Script) -> None:
    script.send("a", None, outcome="fail")
    script.send("a", 0)
    script.poll({0: "a"})
    assert script.kinds() == set()


def test_a_repeat_is_told_the_offset_of_the_first_time(script: Script) -> None:
    script.send("a", 0)
    script.send("b", 1)
    script.send("a", 0, is_repeat=True)
    script.poll({0: "a", 1: "b"})
    assert script.kinds() == set()


def test_offsets_that_nobody_knows_are_no_gap(script: Script) -> None:
    """Transaction markers and aborted rows have offsets on Kafka."""
    script.transaction("mover", sent("aborted"), outcome="fail")
    script.send("a", 3)
    script.send("b", 7)
    script.poll({3: "a", 7: "b"})
    assert script.kinds() == set()


def test_a_consumer_goes_back_to_the_committed_offset_when_it_is_assigned_anew(
    script: Script,
) -> None:
    for offset, value in enumerate("abc"):
        script.send(value, offset)
    script.poll({0: "a", 1: "b"})
    script.poll({1: "b", 2: "c"}, 0, Assign("t", 0, 1))
    assert script.kinds() == set()


def test_two_consumers_have_positions_of_their_own(script: Script) -> None:
    for offset, value in enumerate("abc"):
        script.send(value, offset)
    script.poll({0: "a", 1: "b"}, process="one")
    script.poll({0: "a", 1: "b", 2: "c"}, process="two")
    script.poll({2: "c"}, process="one")
    script.poll({0: "a"}, process="one", member="reopened")
    assert script.kinds() == set()


def test_superseded_rows_of_a_compacted_topic_may_be_missing(script: Script) -> None:
    for offset, (key, value) in enumerate([("k", "a"), ("l", "b"), ("k", "c")]):
        script.add("writer", "send", sent(value, offset, key=key))
    script.poll({1: "b", 2: "c"}, 0, Assign("t", 0, 0))
    script.audit({0: 3}, rows={0: {1: "b", 2: "c"}}, is_final=True)
    rules = Rules(topics={"t": TopicRules(is_compacted=True)}, groups={"readers": ["t"]})
    assert script.kinds(rules) == set()
    assert Kind.POLL_SKIP in script.kinds()


def test_rows_that_retention_removed_may_be_missing(script: Script) -> None:
    for offset, value in enumerate("abcd"):
        script.send(value, offset)
    script.audit({0: 4}, starts={0: 2})
    script.poll({2: "c", 3: "d"}, 0, Assign("t", 0, 0))
    script.audit({0: 4}, starts={0: 2}, rows={0: {2: "c", 3: "d"}}, is_final=True)
    rules = Rules(topics={"t": TopicRules(newest_kept=2)}, groups={"readers": ["t"]})
    assert script.kinds(rules) == set()


def test_a_transaction_that_reads_and_writes_is_sound(script: Script) -> None:
    script.send("a", 0)
    script.transaction("copier", polled({0: "a"}), sent("A", 0, topic="out", source="a"))
    script.audit({0: 1}, rows={0: {0: "a"}})
    script.add("auditor", "audit", polled({0: "A"}, topic="out"), polled({0: "a"}), is_final=True)
    assert script.kinds(Rules(effects={"out": "t"})) == set()


def test_an_owner_that_opens_its_id_again_is_no_zombie(script: Script) -> None:
    script.add("one", "open", id="till")
    script.add("two", "open", id="till")
    script.add("one", "open", id="till")
    script.send("a", 0, process="one", id="till")
    script.poll({0: "a"})
    assert script.kinds() == set()


# One anomaly each


def test_a_row_of_an_aborted_transaction_that_is_read(script: Script) -> None:
    script.transaction("mover", sent("a"), outcome="fail")
    script.poll({0: "a"})
    assert script.kinds() == {Kind.ABORTED_READ}


def test_a_row_that_is_read_before_its_commit(script: Script) -> None:
    script.transaction("mover", sent("a", 0), during=lambda: script.poll({0: "a"}))
    assert script.kinds() == {Kind.PRECOMMITTED_READ}


def test_a_transaction_that_reads_its_own_rows(script: Script) -> None:
    script.transaction("mover", sent("a", 0), polled({0: "a"}))
    assert Kind.PRECOMMITTED_READ in script.kinds()


def test_a_row_that_nobody_sent(script: Script) -> None:
    script.poll({0: "a"})
    assert script.kinds() == {Kind.PHANTOM}


def test_an_offset_with_two_rows(script: Script) -> None:
    script.send("a", 0)
    script.send("b", 0, process="other")
    script.poll({0: "a"})
    script.poll({0: "b"}, process="second")
    assert script.kinds() == {Kind.INCONSISTENT_OFFSETS}


def test_a_row_with_two_offsets(script: Script) -> None:
    script.send("a", 0)
    script.poll({0: "a", 1: "a"})
    assert script.kinds() == {Kind.DUPLICATE}


def test_a_row_in_two_partitions(script: Script) -> None:
    script.send("a", 0)
    script.poll({0: "a"})
    script.poll({0: "a"}, 1)
    assert script.kinds() == {Kind.DUPLICATE}


def test_an_acknowledged_row_that_readers_went_past(script: Script) -> None:
    script.send("a", 0)
    script.send("b", 1)
    script.poll({1: "b"})
    assert script.kinds() == {Kind.LOST_WRITE}


def test_a_row_that_was_read_and_is_gone_at_the_end(script: Script) -> None:
    script.send("a", 0)
    script.send("b", 1)
    script.poll({0: "a", 1: "b"})
    script.audit({0: 2}, rows={0: {1: "b"}}, is_final=True)
    assert script.kinds() == {Kind.LOST_WRITE}


def test_a_half_of_a_transaction_whose_answer_never_came(script: Script) -> None:
    script.transaction("mover", sent("a"), sent("b", partition=1), outcome="info")
    script.poll({0: "a"})
    script.audit({0: 1, 1: 0}, rows={0: {0: "a"}}, is_final=True)
    assert script.kinds() == {Kind.LOST_WRITE}


def test_the_newest_row_of_a_key_that_compaction_removed(script: Script) -> None:
    for offset, value in enumerate("abc"):
        script.add("writer", "send", sent(value, offset, key="k" if value != "b" else "l"))
    script.audit({0: 3}, rows={0: {0: "a", 1: "b", 2: "c"}})
    script.audit({0: 3}, rows={0: {0: "a", 1: "b"}}, is_final=True)
    assert script.kinds(Rules(topics={"t": TopicRules(is_compacted=True)})) == {Kind.LOST_WRITE}


def test_an_acknowledged_row_that_nobody_has_read_yet(script: Script) -> None:
    script.send("a", 0)
    script.poll({0: "a"})
    script.send("b", 1)
    assert script.kinds() == {Kind.UNSEEN}


def test_a_row_that_a_group_never_got(script: Script) -> None:
    """A member committed ahead of what it was given, and its successor began there."""
    for offset, value in enumerate("abc"):
        script.send(value, offset)
    script.poll({0: "a"})
    script.poll({2: "c"}, 0, Assign("t", 0, 2), process="second")
    script.audit({0: 3}, rows={0: {0: "a", 1: "b", 2: "c"}}, is_final=True)
    assert script.kinds(Rules(groups={"readers": ["t"]})) == {Kind.UNSEEN}


def test_a_consumer_that_skips_a_row(script: Script) -> None:
    for offset, value in enumerate("abc"):
        script.send(value, offset)
    script.poll({0: "a", 1: "b", 2: "c"}, process="complete")
    script.poll({0: "a"})
    script.poll({2: "c"})
    assert script.kinds() == {Kind.POLL_SKIP}


def test_a_consumer_that_skips_the_row_it_was_assigned_at(script: Script) -> None:
    for offset, value in enumerate("ab"):
        script.send(value, offset)
    script.poll({0: "a", 1: "b"}, process="complete")
    script.poll({1: "b"}, 0, Assign("t", 0, 0))
    assert script.kinds() == {Kind.POLL_SKIP}


def test_a_consumer_that_skips_a_row_within_a_transaction(script: Script) -> None:
    for offset, value in enumerate("abc"):
        script.send(value, offset)
    script.poll({0: "a", 1: "b", 2: "c"}, process="complete")
    script.transaction("copier", polled({0: "a"}), polled({2: "c"}), group="copiers")
    assert script.kinds() == {Kind.INTERNAL_POLL_SKIP}


def test_a_consumer_that_goes_back(script: Script) -> None:
    for offset, value in enumerate("ab"):
        script.send(value, offset)
    script.poll({0: "a", 1: "b"})
    script.poll({1: "b"})
    assert script.kinds() == {Kind.NONMONOTONIC_POLL}


def test_a_consumer_that_goes_back_within_a_transaction(script: Script) -> None:
    for offset, value in enumerate("ab"):
        script.send(value, offset)
    script.transaction("copier", polled({0: "a", 1: "b"}), polled({0: "a"}), group="copiers")
    assert script.kinds() == {Kind.INTERNAL_NONMONOTONIC_POLL}


def test_appends_of_one_process_out_of_order(script: Script) -> None:
    script.send("a", 1)
    script.send("b", 0)
    script.poll({0: "b", 1: "a"})
    assert script.kinds() == {Kind.NONMONOTONIC_SEND}


def test_rows_of_one_transaction_out_of_order(script: Script) -> None:
    script.transaction("mover", sent("a"), sent("b"))
    script.poll({0: "b", 1: "a"})
    assert script.kinds() == {Kind.INTERNAL_NONMONOTONIC_SEND}


def test_transactions_in_front_of_each_other(script: Script) -> None:
    script.transaction("one", sent("a", 0), sent("b", 1, 1))
    script.transaction("two", sent("c", 1), sent("d", 0, 1))
    script.poll({0: "a", 1: "c"})
    script.poll({0: "d", 1: "b"}, 1)
    assert script.kinds() == {Kind.WRITE_CYCLE}
    assert script.kinds(Rules(orders_writes=False)) == set()


def test_transactions_that_read_each_others_rows(script: Script) -> None:
    seen_early = polled({0: "b"}, 1, time_ns=1_000_000)
    script.transaction("one", seen_early, sent("a", 0))
    script.transaction("two", polled({0: "a"}), sent("b", 0, 1))
    assert Kind.READ_CYCLE in script.kinds()


def test_a_long_cycle(script: Script) -> None:
    size = 3_000
    for number in range(size):
        script.transaction(
            f"p{number}",
            polled({number: f"v{number}"}, time_ns=1_000_000_000),
            sent(f"v{(number + 1) % size}", (number + 1) % size),
        )
    assert Kind.READ_CYCLE in script.kinds(Rules(orders_writes=False))


def test_half_of_a_transaction_in_an_audit(script: Script) -> None:
    script.audit({0: 0, 1: 0})
    script.transaction(
        "mover", sent("a", 0), sent("b", 0, 1), during=lambda: script.audit({0: 0, 1: 0})
    )
    script.operations[-1].ends = of_topic({0: 1, 1: 0})
    script.audit({0: 1, 1: 1}, rows={0: {0: "a"}, 1: {0: "b"}}, is_final=True)
    assert script.kinds() == {Kind.FRACTURED_READ}
    assert script.kinds(Rules(has_snapshots=False)) == set()


def test_an_audit_that_misses_what_was_acknowledged(script: Script) -> None:
    script.send("a", 0)
    script.audit({0: 0})
    script.poll({0: "a"})
    assert script.kinds() == {Kind.STALE_READ}
    assert script.kinds(Rules(shows_acknowledged=False)) == set()


def test_a_producer_that_goes_on_after_its_successor_was_let_in(script: Script) -> None:
    script.add("one", "open", id="till")
    script.send("a", 0, process="one", id="till")
    script.add("two", "open", id="till")
    script.send("b", 1, process="one", id="till")
    script.poll({0: "a", 1: "b"})
    assert script.kinds() == {Kind.ZOMBIE_WRITE}


def test_a_commit_that_was_requested_before_the_successor_was_let_in(script: Script) -> None:
    script.add("one", "open", id="till")
    operation = script.send("a", 0, process="one", id="till")
    script.add("two", "open", id="till")
    operation.completed_ns = script.operations[-1].completed_ns
    script.poll({0: "a"})
    assert script.kinds() == set()


def test_retention_that_removes_too_much(script: Script) -> None:
    for offset, value in enumerate("abcd"):
        script.send(value, offset)
    script.poll(dict(enumerate("abcd")))
    script.audit({0: 4}, starts={0: 3})
    assert script.kinds(Rules(topics={"t": TopicRules(newest_kept=2)})) == {Kind.EARLY_REMOVAL}
    assert Kind.EARLY_REMOVAL in script.kinds()


def test_a_row_that_was_processed_twice(script: Script) -> None:
    script.send("a", 0)
    script.transaction("one", polled({0: "a"}), sent("A1", 0, topic="out", source="a"))
    script.transaction("two", polled({0: "a"}), sent("A2", 1, topic="out", source="a"))
    script.poll({0: "a"})
    script.add("reader", "poll", polled({0: "A1", 1: "A2"}, topic="out"), group="readers")
    assert script.kinds(Rules(effects={"out": "t"})) == {Kind.DUPLICATE_EFFECT}


def test_a_row_that_was_never_processed(script: Script) -> None:
    script.send("a", 0)
    script.send("b", 1)
    script.transaction("one", polled({0: "a"}), sent("A", 0, topic="out", source="a"))
    script.add(
        "auditor",
        "audit",
        polled({0: "a", 1: "b"}),
        polled({0: "A"}, topic="out"),
        is_final=True,
    )
    assert script.kinds(Rules(effects={"out": "t"})) == {Kind.LOST_EFFECT}


def test_every_kind_has_a_history_here() -> None:
    written = Path(__file__).read_text()
    assert [kind.name for kind in Kind if f"Kind.{kind.name}" not in written] == []


def test_a_summary_names_each_kind_once_with_a_few_examples(script: Script) -> None:
    for offset in range(9):
        script.poll({offset: f"v{offset}"}, process=f"p{offset}")
    text = summary(check(History(script.operations)), limit=2)
    assert text.startswith("phantom (9):")
    assert len(text.splitlines()) == 3


# Recording


def test_a_recorded_history_is_read_back(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "mover-0.1.history", "mover-0.1")
    operation = recorder.invoke("transaction", id="mover-0", group="g", member="m")
    operation.step([sent("a"), polled({3: "x"}), Assign("t", 0, 3)])
    operation.committing()
    operation.ok([7])
    recorder.invoke("send", actions=[["send", "t", 1, "b", "k", ""]]).fail(ValueError("full"))
    (first, second) = History.load(tmp_path).operations
    assert (first.process, first.kind, first.outcome) == ("mover-0.1", "transaction", Outcome.OK)
    assert (first.id, first.group, first.member) == ("mover-0", "g", "m")
    assert first.sends == [sent("a", 7)]
    assert first.polls[0].rows == ((3, "x"),)
    assert first.actions[2] == Assign("t", 0, 3)
    assert first.committing_ns is not None
    assert first.invoked_ns < first.committing_ns < (first.completed_ns or 0)
    assert (second.outcome, second.sends) == (Outcome.FAIL, [sent("b", partition=1, key="k")])
    assert "full" in second.error


def test_a_killed_process_leaves_an_operation_without_an_answer(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.history", "a")
    recorder.invoke("send", actions=[["send", "t", 0, "in doubt", "", ""]])
    open_transaction = recorder.invoke("transaction")
    open_transaction.step([sent("never committed")])
    committing = recorder.invoke("transaction")
    committing.committing()
    outcomes = [operation.outcome for operation in History.load(tmp_path).operations]
    assert outcomes == [Outcome.INFO, Outcome.FAIL, Outcome.INFO]
