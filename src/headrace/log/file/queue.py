"""The embedded log's queues: per-message leases over a topic, kept in the journal like everything
else.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
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
from headrace.log.dead_letters import DeadLetter, letters_to_rows, row_to_text
from headrace.log.file.commit_draft import Draft
from headrace.log.file.producer import prepare, rows_to_batch
from headrace.log.file.reader import FileBatches
from headrace.log.file.state import PartitionQueue, QueueState
from headrace.log.file.store import now_us
from headrace.log.partitioning import Chooser
from headrace.log.rows import to_batch
from headrace.log.topic_config import check_name
from headrace.log.values import Duration

if TYPE_CHECKING:
    from headrace.log.file.handle import LogHandle


_NAP_S = 0.01
Taken = dict[int, list[tuple[int, int]]]  # partition -> (offset, deliveries)


@dataclass
class FileMessage(Message):
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
        self._dead_topic = dead_topic
        self.log, self.topic, self.group, self.delivery_limit = (
            log,
            topic,
            check_name(group, what="group"),
            delivery_limit,
        )
        log.topic_state(topic)
        self._receiver = os.urandom(6).hex()
        self._turn = 0

    def receive(
        self,
        max_messages: int = 1,
        *,
        visibility: Duration = "30 seconds",
        wait: Duration = "0 seconds",
    ) -> Sequence[FileMessage]:
        visibility_us = to_us(visibility, what="visibility")
        deadline = time.monotonic() + to_us(wait, what="wait") / 1e6
        while True:
            if self._may_have_some():
                taken = self.log.committer.submit(
                    lambda draft: self._take(draft, max_messages, visibility_us)
                )
                messages = self._messages(taken)
                if messages:
                    return messages
                if taken:
                    continue  # only poison or gaps: look again
            if time.monotonic() >= deadline:
                return []
            time.sleep(min(_NAP_S, max(0.0, deadline - time.monotonic())))

    def _may_have_some(self) -> bool:
        """A look without the lock."""
        state = self.log.store.view()
        queue = state.queues.get(f"{self.group}\0{self.topic}")
        now = now_us()
        for number, partition in enumerate(state.topic(self.topic).partitions):
            known = queue.partitions.get(number) if queue else None
            if (known or PartitionQueue(partition.start, partition.start)).available(
                partition.end, now, 1
            ):
                return True
        return False

    def _take(self, draft: Draft, most: int, visibility_us: int) -> Taken:
        """Lease what can be had, partitions in turn."""
        topic = draft.state.topic(self.topic)
        self._turn += 1
        taken: Taken = {}
        for index in range(len(topic.partitions)):
            number = (index + self._turn) % len(topic.partitions)
            partition = topic.partitions[number]
            queue = self._partition_queue(draft, number)
            if queue.floor < partition.start:
                draft.do("queue", self.group, self.topic, "begin", number, partition.start)
                queue = self._partition_queue(draft, number)
            offsets = queue.available(
                partition.end, draft.time_us, most - sum(map(len, taken.values()))
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
                )
                queue = self._partition_queue(draft, number)
                taken[number] = [(offset, queue.given[offset].deliveries) for offset in offsets]
        return taken

    def _partition_queue(self, draft: Draft, number: int) -> PartitionQueue:
        known = draft.state.queues.get(f"{self.group}\0{self.topic}") or QueueState()
        return known.partitions.get(number) or PartitionQueue()

    def _messages(self, taken: Taken) -> list[FileMessage]:
        """Rows for what was leased. Offsets without a row are done; what was delivered too often,
        or is damaged, goes to the dead letters.
        """
        messages: list[FileMessage] = []
        poison: list[FileMessage] = []
        for number, leases in taken.items():
            rows = self._rows(number, [offset for offset, _ in leases])
            empty = [offset for offset, _ in leases if offset not in rows]
            if empty:
                self._clear_away(number, sorted(empty))
            for offset, deliveries in leases:
                if offset in rows:
                    message = self._message(number, rows[offset], deliveries)
                    (poison if deliveries > self.delivery_limit else messages).append(message)
        if poison:
            self._bury(self._letters(poison))
        return messages

    def _rows(self, number: int, offsets: list[int]) -> dict[int, dict[str, Any]]:
        topic = self.log.topic_state(self.topic)
        reader = self.log.partition_reader(topic, number)
        wanted = sorted(offsets)
        found: dict[int, dict[str, Any]] = {}
        for start, stop in _runs(wanted):
            for batch in FileBatches(
                topic.info, [(reader, start, stop)], headers=True, on_corrupt="skip"
            ):
                found |= {row[OFFSET_COLUMN]: row for row in batch.to_pylist()}
        return found

    def _message(self, number: int, row: dict[str, Any], deliveries: int) -> FileMessage:
        offset, timestamp = row.pop(OFFSET_COLUMN), row.pop(TIMESTAMP_COLUMN)
        row.pop(PARTITION_COLUMN)
        headers = [(entry["key"], entry["value"]) for entry in row.pop(HEADERS_COLUMN) or []]
        receipt = f"{number}:{offset}:{deliveries}:{self._receiver}"
        return FileMessage(
            self, self.topic, number, offset, timestamp, deliveries, row, headers, receipt
        )

    def _clear_away(self, number: int, offsets: list[int]) -> None:
        """Offsets without a row: control batches and what compaction removed are done, damaged rows
        become letters that say where they were.
        """
        damage = self._damage(number, offsets)
        if damage:
            place = f"queue {self.group}"
            self._bury(
                [
                    DeadLetter(place=place, reason=reason, partition=number, offset=offset)
                    for offset, reason in damage.items()
                ]
            )
        rest = [offset for offset in offsets if offset not in damage]
        if rest:
            self.log.committer.submit(
                lambda draft: draft.do("queue", self.group, self.topic, "done", number, rest)
            )

    def _damage(self, number: int, offsets: list[int]) -> dict[int, str]:
        """Which offsets are missing because their batch is damaged, and how."""
        topic = self.log.topic_state(self.topic)
        reader = self.log.partition_reader(topic, number)
        damage: dict[int, str] = {}
        for first, stop in _runs(offsets):
            start = first
            while start < stop:
                try:
                    deque(FileBatches(topic.info, [(reader, start, stop)]), maxlen=0)
                    break
                except CorruptBatch as error:
                    damage |= dict.fromkeys(
                        range(max(start, error.first), min(stop, error.stop)), error.message
                    )
                    start = max(start + 1, error.stop)
        return damage

    def _letters(self, poison: list[FileMessage]) -> list[DeadLetter]:
        reason = f"delivered {self.delivery_limit} times without being acknowledged"
        texts = row_to_text(
            to_batch(
                [message.row for message in poison],
                self.log.topic_state(self.topic).info.arrow_schema,
                topic=self.topic,
            )
        )
        return [
            DeadLetter(
                place=f"queue {self.group}",
                reason=reason,
                partition=message.partition,
                offset=message.offset,
                row=text,
            )
            for message, text in zip(poison, texts, strict=True)
        ]

    def _bury(self, letters: list[DeadLetter]) -> None:
        """Dead letters and their acknowledgement in one commit: neither lost nor doubled."""
        dead = self._dead_topic()
        topic = self.log.topic_state(dead)
        batch = rows_to_batch(letters_to_rows(letters), topic, None)
        rows = prepare(topic, batch, Chooser().partitions(topic.info, batch, None))

        def decide(draft: Draft) -> None:
            draft.check_fresh(rows)
            draft.append(rows)
            for letter in letters:
                draft.do("queue", self.group, self.topic, "done", letter.partition, [letter.offset])

        self.log.committer.submit(decide, size=rows.size)

    # By receipt

    def ack(self, receipts: Iterable[str]) -> None:
        self._settle(
            receipts,
            lambda draft, number, offset: draft.do(
                "queue", self.group, self.topic, "done", number, [offset]
            ),
        )

    def nack(self, receipts: Iterable[str], delay: Duration = "0 seconds") -> None:
        delay_us = to_us(delay, what="delay")
        self._settle(
            receipts,
            lambda draft, number, offset: draft.do(
                "queue",
                self.group,
                self.topic,
                "return",
                number,
                [offset],
                draft.time_us + delay_us,
            ),
        )

    def renew(self, receipts: Iterable[str], visibility: Duration = "30 seconds") -> None:
        visibility_us = to_us(visibility, what="visibility")
        self._settle(
            receipts,
            lambda draft, number, offset: draft.do(
                "queue",
                self.group,
                self.topic,
                "renew",
                number,
                [offset],
                draft.time_us + visibility_us,
            ),
        )

    def _settle(self, receipts: Iterable[str], settle: Callable[[Draft, int, int], None]) -> None:
        parsed = [_parse_receipt(receipt) for receipt in receipts]

        def decide(draft: Draft) -> None:
            for number, offset, deliveries, receiver in parsed:
                lease = self._partition_queue(draft, number).given.get(offset)
                if lease is None or (lease.deliveries, lease.receiver) != (deliveries, receiver):
                    raise LeaseLost(
                        f"The message at {self.topic}[{number}] offset {offset} is no longer leased"
                        " under this receipt.",
                        fix=(
                            "it was settled already, or its visibility ran out and it was given to"
                            " someone else; ask for more visibility, or renew in time."
                        ),
                    )
            for number, offset, _, _ in parsed:
                settle(draft, number, offset)

        if parsed:
            self.log.committer.submit(decide)

    def close(self) -> None:
        """Leases run out by themselves."""


def _parse_receipt(receipt: str) -> tuple[int, int, int, str]:
    try:
        number, offset, deliveries, receiver = receipt.split(":")
        return int(number), int(offset), int(deliveries), receiver
    except ValueError:
        raise InputError(
            f"{receipt!r} is not a receipt.",
            fix="use message.receipt, or what `headrace queue receive` printed.",
        ) from None


def _runs(offsets: list[int]) -> Iterable[tuple[int, int]]:
    """Sorted offsets as ranges."""
    start = previous = None
    for offset in offsets:
        if previous is None or offset != previous + 1:
            if start is not None and previous is not None:
                yield start, previous + 1
            start = offset
        previous = offset
    if start is not None and previous is not None:
        yield start, previous + 1
