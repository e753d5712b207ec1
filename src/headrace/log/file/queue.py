"""The embedded log's queues: leases on single messages of a topic, stored in the journal.

`receive` leases messages in a commit and then reads their rows. Offsets without a row (control
records, rows that compaction removed) are marked as done. A message that was delivered too often,
or whose bytes are damaged, becomes a dead letter in the same commit that marks it as done, so that
it is neither lost nor doubled. The leases themselves are `state.QueueState`.

A lease goes by the monotonic clock of the machine on which it was taken, so a wall clock that jumps
neither ends nor prolongs it. On another machine, or after a restart, it is over when append time
says so, or when a receiver has watched it for as long as it had to last when it first saw it.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from headrace.columnar.columns import (
    HEADERS_COLUMN,
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    TIMESTAMP_COLUMN,
)
from headrace.durations import to_us
from headrace.errors import CorruptBatch, InputError, LeaseLost
from headrace.log.api import Message, Queue
from headrace.log.dead_letters import DeadLetter, dead_letters_to_rows, rows_to_json
from headrace.log.file.commit_draft import CommitDraft
from headrace.log.file.liveness import machine_clock, monotonic_us
from headrace.log.file.producer import prepare, rows_to_batch
from headrace.log.file.reader import FileBatches
from headrace.log.file.state import MAX_LEASED, MessageLease, PartitionQueue, QueueState, State
from headrace.log.partitioning import PartitionAssigner
from headrace.log.rows import to_batch
from headrace.log.values import Duration, PeekedMessage, QueueStats
from headrace.names import check_name

if TYPE_CHECKING:
    from headrace.log.file.handle import LogHandle


logger = logging.getLogger("headrace.log")
_SLEEP_S = 0.01
_MAX_WATCHED = 100_000
_MAX_PEEKED = 100_000  # offsets of a partition that a look at the queue goes through
_Leased = dict[int, list[tuple[int, int]]]
"""Partition -> (offset, deliveries) of the messages that a receive has leased."""


@dataclass
class FileMessage(Message):
    """A message leased from a queue of the embedded log."""

    queue: FileQueue = field(repr=False)
    topic: str
    partition: int
    offset: int
    timestamp: datetime
    deliveries: int
    row: dict[str, Any]
    headers: list[tuple[str, bytes | None]]
    receipt: str

    def ack(self) -> None:
        self.queue.ack([self.receipt])

    def nack(self, delay: Duration = "0 seconds") -> None:
        self.queue.nack([self.receipt], delay)

    def renew(self, visibility: Duration = "30 seconds") -> None:
        self.queue.renew([self.receipt], visibility)


class FileQueue(Queue):
    """A topic of the embedded log as a queue. `dead_topic` creates the topic of dead letters, if it
    is missing, and returns its name.
    """

    def __init__(
        self,
        log: LogHandle,
        topic: str,
        group: str,
        delivery_limit: int,
        dead_topic: Callable[[], str],
    ) -> None:
        if delivery_limit < 1:
            raise InputError(f"delivery_limit is {delivery_limit}.", fix="use 1 or more.")
        self.log = log
        self.topic = topic
        self.group = check_name(group, what="group")
        self.delivery_limit = delivery_limit
        self._dead_topic = dead_topic
        log.topic_state(topic)
        self._receiver = os.urandom(6).hex()
        self._rotation = 0
        # (partition, offset) -> a lease of another clock, and when it is over by our clock.
        self._watched: dict[tuple[int, int], tuple[tuple[int, int, str], int]] = {}
        self._has_warned = False

    # Leases

    def _partitions(self, state: State) -> Iterator[tuple[int, PartitionQueue, int]]:
        """(number, queue, end) of each partition, to look at and not to change."""
        topic_queue = state.queues.get(f"{self.group}\0{self.topic}") or QueueState()
        for number, partition in enumerate(state.topic(self.topic).partitions):
            queue = topic_queue.partitions.get(number) or PartitionQueue()
            if queue.floor < partition.start:  # retention has removed what is below
                queue = queue.from_floor(partition.start)
            yield number, queue, partition.end

    def _is_over(self, time_us: int, number: int, offset: int, lease: MessageLease) -> bool:
        """Whether a lease is over, given the log's append time."""
        return self._remaining_us(time_us, number, offset, lease) <= 0

    def _remaining_us(self, time_us: int, number: int, offset: int, lease: MessageLease) -> int:
        """For how long a lease lasts; 0 or less if it is over."""
        if lease.clock == machine_clock():
            return lease.deadline_us - monotonic_us()
        identity = (lease.deliveries, lease.visible_us, lease.receiver)
        watched = self._watched.get((number, offset))
        if watched is None or watched[0] != identity:
            if len(self._watched) >= _MAX_WATCHED:
                self._watched.clear()
            watched = (identity, monotonic_us() + lease.visible_us - time_us)
            self._watched[number, offset] = watched
        return min(watched[1] - monotonic_us(), lease.visible_us - time_us)

    # Receiving

    def receive(
        self,
        max_messages: int = 1,
        *,
        visibility: Duration = "30 seconds",
        wait: Duration = "0 seconds",
    ) -> Sequence[FileMessage]:
        visibility_us = to_us(visibility, what="visibility")
        deadline_s = time.monotonic() + to_us(wait, what="wait") / 1e6
        while True:
            if self._has_available():
                leased = self.log.committer.submit(
                    lambda draft: self._lease(draft, max_messages, visibility_us)
                )
                messages = self._read_messages(leased)
                if messages:
                    return messages
                if leased:
                    continue  # only dead letters or offsets without a row: look again
            if time.monotonic() >= deadline_s:
                return []
            time.sleep(min(_SLEEP_S, max(0.0, deadline_s - time.monotonic())))

    def _has_available(self) -> bool:
        """Whether there seem to be messages to lease, found out without the lock."""
        with self.log.store.frozen_view() as state:
            time_us = self.log.store.clock.now_us()
            for number, queue, end in self._partitions(state):
                if queue.available(end, partial(self._is_over, time_us, number), 1):
                    return True
                if len(queue.leases) >= MAX_LEASED and queue.next < end:
                    self._warn_once(number)
        return False

    def _warn_once(self, number: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The queue %s of group %s delivers no new messages of partition %d: %d messages are"
                " delivered and neither acknowledged nor due again.",
                self.topic,
                self.group,
                number,
                MAX_LEASED,
            )

    def _lease(self, draft: CommitDraft, limit: int, visibility_us: int) -> _Leased:
        """Lease available messages. Another partition comes first each time."""
        topic = draft.state.topic(self.topic)
        self._rotation += 1
        leased: _Leased = {}
        for index in range(len(topic.partitions)):
            number = (index + self._rotation) % len(topic.partitions)
            partition = topic.partitions[number]
            queue = self._partition_queue(draft, number)
            if queue.floor < partition.start:  # retention has removed what is below
                draft.do("queue", self.group, self.topic, "begin", number, partition.start)
                queue = self._partition_queue(draft, number)
            room = limit - sum(map(len, leased.values()))
            offsets = queue.available(
                partition.end, partial(self._is_over, draft.time_us, number), room
            )
            if offsets:
                draft.do(
                    "queue",
                    self.group,
                    self.topic,
                    "take",
                    number,
                    offsets,
                    draft.time_us + visibility_us,
                    self._receiver,
                    machine_clock(),
                    monotonic_us() + visibility_us,
                )
                queue = self._partition_queue(draft, number)
                leased[number] = [(offset, queue.leases[offset].deliveries) for offset in offsets]
        return leased

    def _partition_queue(self, draft: CommitDraft, number: int) -> PartitionQueue:
        queue = draft.state.queues.get(f"{self.group}\0{self.topic}") or QueueState()
        return queue.partitions.get(number) or PartitionQueue()

    def _read_messages(self, leased: _Leased) -> list[FileMessage]:
        """The messages of leased offsets. Offsets without a row are settled, and messages that were
        delivered too often become dead letters.
        """
        messages: list[FileMessage] = []
        poison: list[FileMessage] = []
        for number, leases in leased.items():
            rows = self._read_rows(number, sorted(offset for offset, _ in leases))
            missing = sorted(offset for offset, _ in leases if offset not in rows)
            if missing:
                self._settle_missing(number, missing)
            for offset, deliveries in leases:
                if offset in rows:
                    message = self._message(number, rows[offset], deliveries)
                    (poison if deliveries > self.delivery_limit else messages).append(message)
        if poison:
            self._divert_poison(poison)
        return messages

    def _read_rows(self, number: int, offsets: list[int]) -> dict[int, dict[str, Any]]:
        topic = self.log.topic_state(self.topic)
        reader = self.log.partition_reader(topic, number)
        rows: dict[int, dict[str, Any]] = {}
        for start, stop in _ranges(offsets):
            for batch in FileBatches(
                topic.info, [(reader, start, stop)], headers=True, on_corrupt="skip"
            ):
                rows |= {row[OFFSET_COLUMN]: row for row in batch.to_pylist()}
        return rows

    def _message(self, number: int, row: dict[str, Any], deliveries: int) -> FileMessage:
        offset, timestamp = row.pop(OFFSET_COLUMN), row.pop(TIMESTAMP_COLUMN)
        row.pop(PARTITION_COLUMN)
        headers = [(entry["key"], entry["value"]) for entry in row.pop(HEADERS_COLUMN) or []]
        return FileMessage(
            queue=self,
            topic=self.topic,
            partition=number,
            offset=offset,
            timestamp=timestamp,
            deliveries=deliveries,
            row=row,
            headers=headers,
            receipt=f"{number}:{offset}:{deliveries}:{self._receiver}",
        )

    # Dead letters

    def _settle_missing(self, number: int, offsets: list[int]) -> None:
        """Settle offsets without a row: damaged rows become dead letters; control records and rows
        that compaction removed are done.
        """
        damage = self._find_damage(number, offsets)
        if damage:
            self._divert(
                [
                    DeadLetter(
                        place=f"queue {self.group}",
                        reason=reason,
                        partition=number,
                        offset=offset,
                    )
                    for offset, reason in damage.items()
                ]
            )
        done = [offset for offset in offsets if offset not in damage]
        if done:
            self.log.committer.submit(
                lambda draft: draft.do("queue", self.group, self.topic, "done", number, done)
            )

    def _find_damage(self, number: int, offsets: list[int]) -> dict[int, str]:
        """The offsets whose batch is damaged, and how."""
        topic = self.log.topic_state(self.topic)
        reader = self.log.partition_reader(topic, number)
        damage: dict[int, str] = {}
        for first, stop in _ranges(offsets):
            start = first
            while start < stop:
                try:
                    deque(FileBatches(topic.info, [(reader, start, stop)]), maxlen=0)
                    break
                except CorruptBatch as error:
                    damaged = range(max(start, error.first), min(stop, error.stop))
                    damage |= dict.fromkeys(damaged, error.message)
                    start = max(start + 1, error.stop)
        return damage

    def _divert_poison(self, poison: list[FileMessage]) -> None:
        info = self.log.topic_state(self.topic).info
        batch = to_batch(
            [message.row for message in poison],
            info.arrow_schema,
            topic=self.topic,
            history=info.schema_history,
        )
        self._divert(
            [
                DeadLetter(
                    place=f"queue {self.group}",
                    reason=f"delivered {self.delivery_limit} times without being acknowledged",
                    partition=message.partition,
                    offset=message.offset,
                    row=text,
                )
                for message, text in zip(poison, rows_to_json(batch), strict=True)
            ]
        )

    def _divert(self, letters: list[DeadLetter]) -> None:
        """Append dead letters and mark their messages as done, in one commit."""
        topic = self.log.topic_state(self._dead_topic())
        batch = rows_to_batch(dead_letters_to_rows(letters), topic, None)
        rows = prepare(topic, batch, PartitionAssigner().assign(topic.info, batch, None))

        def decide(draft: CommitDraft) -> None:
            draft.check_fresh(rows)
            draft.append(rows)
            for letter in letters:
                draft.do("queue", self.group, self.topic, "done", letter.partition, [letter.offset])

        self.log.committer.submit(decide, size=rows.size)

    # Settling

    def ack(self, receipts: Iterable[str]) -> None:
        self._settle(receipts, "done")

    def nack(self, receipts: Iterable[str], delay: Duration = "0 seconds") -> None:
        self._settle(receipts, "return", after_us=to_us(delay, what="delay"))

    def renew(self, receipts: Iterable[str], visibility: Duration = "30 seconds") -> None:
        self._settle(receipts, "renew", after_us=to_us(visibility, what="visibility"))

    def _settle(
        self, receipts: Iterable[str], operation: str, *, after_us: int | None = None
    ) -> None:
        """Apply a queue operation to all messages, or to none if a lease was lost. `after_us` is
        when the messages become visible, counted from the commit.
        """
        parsed = [_parse_receipt(receipt) for receipt in receipts]

        def decide(draft: CommitDraft) -> None:
            for number, offset, deliveries, receiver in parsed:
                lease = self._partition_queue(draft, number).leases.get(offset)
                if lease is None or (lease.deliveries, lease.receiver) != (deliveries, receiver):
                    raise LeaseLost(
                        f"The message at {self.topic}[{number}] offset {offset} is no longer leased"
                        " under this receipt.",
                        fix=(
                            "it was settled already, or its visibility ran out and it was given to"
                            " someone else; ask for more visibility, or renew in time."
                        ),
                    )
            times: list[int | str] = []
            if after_us is not None:
                times = [draft.time_us + after_us, machine_clock(), monotonic_us() + after_us]
            for number, offset, _, _ in parsed:
                draft.do("queue", self.group, self.topic, operation, number, [offset], *times)

        if parsed:
            self.log.committer.submit(decide)

    # Looking

    def peek(self, max_messages: int = 10) -> list[PeekedMessage]:
        with self.log.store.frozen_view() as state:
            time_us = self.log.store.clock.now_us()
            partitions = [
                (number, list(islice(queue.undone(end), _MAX_PEEKED)), dict(queue.leases))
                for number, queue, end in self._partitions(state)
            ]
        found: list[PeekedMessage] = []
        for number, offsets, leases in partitions:
            for first in range(0, len(offsets), max(1, max_messages)):
                chunk = offsets[first : first + max_messages]
                if len(found) >= max_messages:
                    return found[:max_messages]
                rows = self._read_rows(number, chunk)
                for offset in chunk:
                    if offset in rows:
                        lease = leases.get(offset)
                        message = self._message(number, rows[offset], 0)
                        found.append(
                            PeekedMessage(
                                topic=self.topic,
                                partition=number,
                                offset=offset,
                                timestamp=message.timestamp,
                                deliveries=lease.deliveries if lease else 0,
                                status=self._status(time_us, number, offset, lease),
                                row=message.row,
                                headers=message.headers,
                            )
                        )
        return found[:max_messages]

    def _status(self, time_us: int, number: int, offset: int, lease: MessageLease | None) -> str:
        if lease is None or self._is_over(time_us, number, offset, lease):
            return "ready"
        return "leased" if lease.receiver else "delayed"

    def stats(self) -> list[QueueStats]:
        stats = []
        with self.log.store.frozen_view() as state:
            time_us = self.log.store.clock.now_us()
            for number, queue, end in self._partitions(state):
                statuses = Counter(
                    self._status(time_us, number, offset, lease)
                    for offset, lease in queue.leases.items()
                )
                stats.append(
                    QueueStats(
                        topic=self.topic,
                        group=self.group,
                        partition=number,
                        ready=statuses["ready"] + max(0, end - queue.next),
                        leased=statuses["leased"],
                        delayed=statuses["delayed"],
                        oldest=next(queue.undone(end), None),
                    )
                )
        return stats

    def purge(self) -> int:
        def decide(draft: CommitDraft) -> int:
            purged = 0
            for number, queue, end in list(self._partitions(draft.state)):
                purged += queue.waiting(end)
                draft.do("queue", self.group, self.topic, "reset", number, end)
            return purged

        return self.log.committer.submit(decide)

    def close(self) -> None:
        """Nothing to do: leases end by themselves."""


def _parse_receipt(receipt: str) -> tuple[int, int, int, str]:
    """(partition, offset, deliveries, receiver) of a receipt."""
    try:
        number, offset, deliveries, receiver = receipt.split(":")
        return int(number), int(offset), int(deliveries), receiver
    except ValueError:
        raise InputError(
            f"{receipt!r} is not a receipt.",
            fix="use message.receipt, or what `headrace queue receive` printed.",
        ) from None


def _ranges(offsets: list[int]) -> Iterator[tuple[int, int]]:
    """Sorted offsets as (start, stop) ranges."""
    start = stop = None
    for offset in offsets:
        if start is None or stop is None:
            start = offset
        elif offset != stop:
            yield start, stop
            start = offset
        stop = offset + 1
    if start is not None and stop is not None:
        yield start, stop
