"""Two handles on one log do whatever comes to mind, and a plain model in memory does the same. They
never disagree.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.log.file.consumer import FileConsumer
from headrace.log.file.log import FileLog
from headrace.log.file.maintenance import create_checkpoint
from headrace.testing.power_loss import RebootedDisk
from tests.short_forms import examples

SCHEMA = "k INT, n BIGINT, text STRING"
TOPICS = ("a", "b")
HANDLES = st.integers(0, 1)
NAMES = st.sampled_from(TOPICS)
LIMITS = {  # so small that a few rows are inlined, synced on their own, spilled, copied or moved
    "committer.INLINE_BYTES": 1_000,
    "producer.MAX_COMMIT_BYTES": 2_000,
    "transaction.MAX_BYTES_IN_MEMORY": 1_500,
    "staging.MAX_COPIED_BYTES": 2_500,
}
CONTROL = None  # what stands in a model's partition for a control batch
Row = dict[str, Any]


@dataclass
class Topic:
    """A topic as a plain program would keep it."""

    partitions: list[list[Row | None]]
    starts: list[int]
    columns: list[str] = field(default_factory=lambda: ["k", "n", "text"])
    compact: bool = False

    def rows(
        self, partition: int, start: int = 0, stop: int | None = None
    ) -> list[tuple[int, Row]]:
        stop = len(self.partitions[partition]) if stop is None else stop
        start = max(start, self.starts[partition])
        return [
            (offset, row)
            for offset, row in enumerate(self.partitions[partition])
            if row is not None and start <= offset < stop
        ]


class LogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patches = pytest.MonkeyPatch()
        for limit, size in LIMITS.items():
            self.patches.setattr(f"headrace.log.file.{limit}", size)
        self.directory = Path(tempfile.mkdtemp())
        self.disk = RebootedDisk()
        self.logs = [self.opened(), self.opened()]
        self.topics: dict[str, Topic] = {}
        self.sequences: dict[
            str, list[dict[int, tuple[int, int]]]
        ] = {}  # topic -> what each number of producer "till" got
        self.committed: dict[str, dict[int, int]] = {}  # of group "readers"
        self.note: str | None = None
        self.consumers: dict[str, FileConsumer] = {}
        self.leased: dict[str, dict[tuple[int, int], Any]] = {}
        self.done: dict[str, set[tuple[int, int]]] = {}
        self.count = 0

    def opened(self) -> FileLog:
        return FileLog.open(self.directory / "log", disk=self.disk)

    def teardown(self) -> None:
        try:
            self.everything_agrees()
            assert [finding for finding in self.logs[0].verify() if finding.kind != "stale"] == []
        finally:
            self.close()
            shutil.rmtree(self.directory)
            self.patches.undo()

    def close(self) -> None:
        for consumer in self.consumers.values():
            consumer.close()
        self.consumers = {}
        for log in self.logs:
            log.close()

    def fresh(self, topic: str, count: int) -> list[Row]:
        """New rows, each with a number of its own."""
        self.count += count
        extra = dict.fromkeys(self.topics[topic].columns[3:])
        return [
            {"k": n % 4, "n": n, "text": "x" * (n % 200)} | extra
            for n in range(self.count - count, self.count)
        ]

    def stored(
        self, topic: str, partition: int, rows: Sequence[Row | None]
    ) -> dict[int, tuple[int, int]]:
        stored = self.topics[topic].partitions[partition]
        stored += rows
        return {partition: (len(stored) - len(rows), len(stored))}

    # Topics

    @initialize(partitions=st.integers(1, 2))
    def begin(self, partitions: int) -> None:
        self.create(0, "a", partitions, compact=False)

    @rule(handle=HANDLES, name=NAMES, partitions=st.integers(1, 3), compact=st.booleans())
    def create(self, handle: int, name: str, partitions: int, *, compact: bool) -> None:
        if name not in self.topics:
            self.logs[handle].create_topic(
                name,
                SCHEMA,
                key="k" if compact else None,
                partitions=partitions,
                compact=compact,
                segment_bytes=2500,
            )
            self.topics[name] = Topic(
                [[] for _ in range(partitions)], [0] * partitions, compact=compact
            )
            self.sequences[name], self.leased[name], self.done[name] = [], {}, set()

    @rule(handle=HANDLES)
    @precondition(lambda self: "b" in self.topics)
    def delete(self, handle: int) -> None:
        if "b" in self.consumers:
            self.consumers.pop("b").close()
        self.logs[handle].delete_topic("b")
        del self.topics["b"]
        self.committed.pop("b", None)

    @rule(handle=HANDLES, name=NAMES)
    def add_column(self, handle: int, name: str) -> None:
        if name in self.topics and len(self.topics[name].columns) < 6:
            column = f"more{len(self.topics[name].columns)}"
            self.logs[handle].alter_topic(name, add_columns=f"{column} DOUBLE")
            self.topics[name].columns.append(column)

    @rule(handle=HANDLES, name=NAMES)
    def add_partition(self, handle: int, name: str) -> None:
        topic = self.topics.get(name)
        if topic and len(topic.partitions) < 4:
            self.logs[handle].alter_topic(
                name, partitions=len(topic.partitions) + 1, allow_moving_keys=True
            )
            topic.partitions.append([])
            topic.starts.append(0)

    # Writing

    @rule(handle=HANDLES, name=NAMES, partition=st.integers(0, 3), count=st.integers(1, 20))
    def append(self, handle: int, name: str, partition: int, count: int) -> None:
        if name in self.topics:
            partition %= len(self.topics[name].partitions)
            rows = self.fresh(name, count)
            position = self.logs[handle].producer(name).append(rows, partition=partition)
            assert offsets_of(position) == self.stored(name, partition, rows)

    @rule(handle=HANDLES, name=NAMES, back=st.integers(0, 10))
    def append_numbered(self, handle: int, name: str, back: int) -> None:
        """Under the next number, or again under one that was used."""
        if name in self.topics:
            with self.logs[handle].producer(name, id="till") as till:
                assert till.last_sequence == len(self.sequences[name]) - 1
                sequence = till.last_sequence + 1 - back
                if (
                    0 <= sequence <= till.last_sequence
                    and not self.topics[name].compact
                    and not any(self.topics[name].starts)
                ):
                    repeated = till.append(self.fresh(name, 1), sequence=sequence, partition=0)
                    assert repeated.duplicate
                    assert offsets_of(repeated) == self.sequences[name][sequence]
                else:
                    rows = self.fresh(name, 2)
                    position = till.append(rows, sequence=till.last_sequence + 1, partition=0)
                    self.sequences[name].append(self.stored(name, 0, rows))
                    assert offsets_of(position) == self.sequences[name][-1]

    @rule(handle=HANDLES, name=NAMES, partition=st.integers(0, 3))
    def control(self, handle: int, name: str, partition: int) -> None:
        if name in self.topics:
            partition %= len(self.topics[name].partitions)
            self.logs[handle].append_control(name, partition, b"tick")
            self.stored(name, partition, [CONTROL])

    @rule(handle=HANDLES, commit=st.booleans(), count=st.integers(1, 40))
    def transaction(self, handle: int, commit: bool, count: int) -> None:
        tx = self.logs[handle].transaction("job")
        rows = {name: self.fresh(name, count) for name in self.topics}
        for name, some in rows.items():
            tx.append(name, some, partition=0)
        tx.set_note("last", str(self.count))
        if not commit:
            tx.abort()
            return
        tx.commit()
        self.note = str(self.count)
        for name, some in rows.items():
            self.stored(name, 0, some)

    # Reading in a group

    @rule(handle=HANDLES, name=NAMES, room=st.integers(1, 30), commit=st.booleans())
    def consume(self, handle: int, name: str, room: int, commit: bool) -> None:
        if name not in self.topics:
            return
        if name not in self.consumers:
            consumer = self.logs[handle].consumer(name, f"readers-{name}", on_lost="earliest")
            assert isinstance(consumer, FileConsumer)
            self.consumers[name] = consumer
        consumer = self.consumers[name]
        before = dict(consumer.positions().get(name, {}))
        batches = consumer.poll("0 seconds", max_rows=room)
        after = consumer.positions()[name]
        for partition, stop in after.items():
            first = max(
                before.get(partition, self.committed.get(name, {}).get(partition, 0)),
                self.topics[name].starts[partition],
            )
            found = [
                row
                for batch in batches
                for row in batch.to_pylist()
                if row["_partition"] == partition
            ]
            self.check_rows(name, partition, found, first, stop)
        if commit:
            consumer.commit()
            self.committed[name] = dict(after)

    @rule(name=NAMES)
    def stop_consuming(self, name: str) -> None:
        if name in self.consumers:
            self.consumers.pop(name).close()

    # A queue

    @rule(handle=HANDLES, name=NAMES, max_messages=st.integers(1, 5))
    def receive(self, handle: int, name: str, max_messages: int) -> None:
        if name in self.topics:
            for message in (
                self.logs[handle]
                .queue(name, "workers", delivery_limit=1000)
                .receive(max_messages, visibility="1 hour")
            ):
                message_position = message.partition, message.offset
                assert message_position not in self.leased[name]
                assert message_position not in self.done[name]
                row = self.topics[name].partitions[message.partition][message.offset]
                assert row is not None
                assert message.row["n"] == row["n"]
                self.leased[name][message_position] = message

    @rule(name=NAMES, acknowledge=st.booleans())
    def settle(self, name: str, acknowledge: bool) -> None:
        settable = [
            (message_position, message)
            for message_position, message in self.leased.get(name, {}).items()
            if message is not None
        ]
        if name in self.topics and settable:
            message_position, message = settable[0]
            del self.leased[name][message_position]
            if message_position[1] < self.topics[name].starts[message_position[0]]:
                return  # retention was faster
            if acknowledge:
                message.ack()
                self.done[name].add(message_position)
            else:
                message.nack()

    # Care

    @rule(handle=HANDLES)
    def checkpoint(self, handle: int) -> None:
        create_checkpoint(self.logs[handle])

    @rule(handle=HANDLES, name=NAMES, kept_bytes=st.sampled_from([None, 3000, 6000]))
    def clean(self, handle: int, name: str, kept_bytes: int | None) -> None:
        """Compaction, and retention by size. How much goes is the log's choice; that it goes from
        the front is not.
        """
        if name in self.topics:
            topic = self.topics[name]
            if not topic.compact:
                self.logs[handle].alter_topic(name, retention_bytes=kept_bytes)
            self.logs[handle].maintain(name)
            starts = self.logs[handle].start_offsets(name)
            assert all(
                topic.starts[n] <= start <= len(topic.partitions[n]) for n, start in starts.items()
            )
            assert kept_bytes is not None or topic.compact or list(starts.values()) == topic.starts
            topic.starts = list(starts.values())

    @rule(handle=HANDLES)
    def reopen_one(self, handle: int) -> None:
        for name, consumer in list(self.consumers.items()):
            if consumer.log is self.logs[handle]:
                self.consumers.pop(name).close()
        self.forget_messages([self.logs[handle]])
        self.logs[handle].close()
        self.logs[handle] = self.opened()

    def forget_messages(self, logs: list[FileLog]) -> None:
        """Messages taken through a closed log stay leased, and cannot be settled."""
        for held in self.leased.values():
            held |= {
                message_position: None
                for message_position, message in held.items()
                if message is not None and message.queue.log in logs
            }

    @rule()
    def reboot(self) -> None:
        self.forget_messages(self.logs)
        self.close()
        self.disk = RebootedDisk()
        self.logs = [self.opened(), self.opened()]

    # Agreement

    @invariant()
    def everything_agrees(self) -> None:
        for log in self.logs:
            assert log.topics() == sorted(self.topics)
            assert log.note("last") == self.note
            for name, topic in self.topics.items():
                assert log.topic(name).columns == topic.columns
                assert list(log.end_offsets(name).values()) == [
                    len(rows) for rows in topic.partitions
                ]
                assert list(log.start_offsets(name).values()) == topic.starts
                found = log.read(name).to_pylist()
                for partition in range(len(topic.partitions)):
                    self.check_rows(
                        name,
                        partition,
                        [row for row in found if row["_partition"] == partition],
                        0,
                        None,
                    )
                group = f"readers-{name}"
                if name in self.committed:
                    assert log.committed(group)[name] == self.committed[name]

    def check_rows(
        self, name: str, partition: int, found: list[Row], start: int, stop: int | None
    ) -> None:
        topic = self.topics[name]
        wanted = topic.rows(partition, start, stop)
        plain = [
            (row["_offset"], {column: row[column] for column in ("k", "n", "text")})
            for row in found
        ]
        expected = [
            (offset, {column: row[column] for column in ("k", "n", "text")})
            for offset, row in wanted
        ]
        if not topic.compact:
            assert plain == expected
            return
        newest = {row["k"]: offset for offset, row in topic.rows(partition)}
        assert [entry for entry in expected if entry in plain] == plain
        assert {offset for offset, row in wanted if newest[row["k"]] == offset} <= {
            offset for offset, _ in plain
        }


def offsets_of(position: Any) -> dict[int, tuple[int, int]]:
    return {
        partition: (found.start, found.stop) for partition, found in position.partitions().items()
    }


SHORT = settings(
    max_examples=examples(60),
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
LONG = settings(
    max_examples=examples(300),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

TestModel = LogMachine.TestCase
TestModel.settings = SHORT


@pytest.mark.slow
class TestModelAtLength(LogMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = LONG
