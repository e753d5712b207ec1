"""Small values that are stored in the same transaction as rows: users' notes, the last numbers of
idempotent producers, the tokens of transactions.

They live in a compacted topic. Notes of users share partition 0, whose order makes compare-and-set
possible (see `Notes.await_turn`); the entries of producers are spread over the others, so that one
that died in the middle of an append holds up few.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from headrace.columnar.murmur2 import murmur2
from headrace.errors import CorruptionError, NewerFormat, RetryError
from headrace.log.kafka.cluster import Broker
from headrace.log.kafka.errors import code, doing
from headrace.log.kafka.sender import Record
from headrace.log.values import OffsetRange

# The newest value of every key of a compacted topic of our own: where topics are described
# (`topics.py`) and notes are kept (`notes.py`).
#
# Each partition is read when it is asked for, from where the last look ended, up to everything that
# was written by then.


PENDING_SECONDS = 90.0
SETTINGS = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.1",
    "segment.ms": str(24 * 3600 * 1000),
    "compression.type": "producer",
}


class CompactedPartition:
    """One partition, as a dictionary that catches up on demand."""

    def __init__(self, broker: Broker, topic: str, partition: int) -> None:
        self._broker, self._place = broker, (topic, partition)
        self._guard = Lock()
        self._position = -1
        self._values: dict[bytes, bytes] = {}

    def values(self) -> dict[bytes, bytes]:
        """All that is committed. Waits for transactions that were writing here when it was called:
        one of them may have committed already.
        """
        self._await_pending()
        with self._guard:
            return dict(self._values)

    def get(self, key: bytes) -> bytes | None:
        """As `values`, for one key."""
        self._await_pending()
        with self._guard:
            return self._values.get(key)

    def get_before(self, key: bytes, end: int) -> bytes | None:
        """The value of a key as of an offset up to which everything is decided. Does not wait for
        transactions behind it.
        """
        self._read_to(end)
        with self._guard:
            return self._values.get(key)

    def _await_pending(self) -> None:
        """Outside the lock: one of the transactions waited for may be ours, in another thread,
        about to look at a value itself.
        """
        end = self._broker.high_watermarks([self._place])[self._place]
        if end > self._position and not self._broker.await_ends(
            {self._place: end}, PENDING_SECONDS
        ):
            raise RetryError(
                f"A transaction that writes to {self._place[0]} has been open for"
                f" {PENDING_SECONDS:.0f} seconds.",
                fix="wait until it ends or times out, and try again.",
            )
        self._read_to(end)

    def _read_to(self, end: int) -> None:
        with self._guard:
            if end > self._position:
                self._apply_all(end)

    def _apply_all(self, end: int) -> None:
        if self._position < 0:
            self._position = self._broker.earliest([self._place])[self._place]
        with self._broker.fetchers.lease() as fetcher:
            for messages in fetcher.records(*self._place, self._position, end):
                for message in messages:
                    self._apply(message.key(), message.value())
        self._position = end

    def _apply(self, key: bytes | None, value: bytes | None) -> None:
        if key is None:
            return
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = value


def ensure_topic(broker: Broker, topic: str, partitions: int) -> int:
    """Create a compacted topic if it is not there; its number of partitions."""
    count = broker.partitions(topic)
    if count is not None:
        return count
    with doing(f"create the topic {topic!r}"):
        try:
            broker.create(topic, partitions, SETTINGS)
        except KafkaException as error:
            if code(error) != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
    return broker.partitions(topic) or partitions


NOTES_TOPIC = "__headrace.notes"
PARTITIONS = 8
VERSION = 1
RECENT_SEQUENCES = 8


@dataclass
class Ledger:
    """What is remembered of an idempotent producer: the last numbers it stored, and where those
    rows went.
    """

    epoch: int = 0
    last: int = -1
    recent: list[tuple[int, dict[int, OffsetRange]]] = field(default_factory=list)

    def with_append(self, sequence: int, places: dict[int, OffsetRange]) -> Ledger:
        return Ledger(
            self.epoch, sequence, [*self.recent[1 - RECENT_SEQUENCES :], (sequence, places)]
        )

    def place_of(self, sequence: int) -> dict[int, OffsetRange]:
        """Where the rows of a number went; nothing if that was too long ago."""
        return next((places for number, places in self.recent if number == sequence), {})

    def dump(self) -> bytes:
        recent = [
            [number, {str(p): [span.start, span.stop] for p, span in places.items()}]
            for number, places in self.recent
        ]
        return json.dumps(
            {"version": VERSION, "epoch": self.epoch, "last": self.last, "recent": recent}
        ).encode()

    @classmethod
    def load(cls, value: bytes) -> Ledger:
        stored = _load(value)
        recent = [
            (number, {int(p): OffsetRange(*span) for p, span in places.items()})
            for number, places in stored["recent"]
        ]
        return cls(stored["epoch"], stored["last"], recent)


class Notes:
    """Reads notes, and makes the records that store them. Safe for several threads."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._guard = Lock()
        self._partitions: list[CompactedPartition] = []

    def prepare(self) -> None:
        """Make sure that the topic is there."""
        with self._guard:
            if not self._partitions:
                count = ensure_topic(self._broker, NOTES_TOPIC, PARTITIONS)
                self._partitions = [
                    CompactedPartition(self._broker, NOTES_TOPIC, number) for number in range(count)
                ]

    # Users' notes

    def note(self, name: str) -> str | None:
        self.prepare()
        value = self._partitions[0].get(_note_key(name))
        return None if value is None else _load(value)["value"]

    def note_record(self, name: str, value: str | None) -> Record:
        stored = (
            None
            if value is None
            else json.dumps({"version": VERSION, "value": value}, ensure_ascii=False).encode()
        )
        return Record(NOTES_TOPIC, 0, _note_key(name), stored)

    def await_turn(self, first: int) -> None:
        """Wait until every transaction that wrote a note before offset `first`, where ours begins,
        is decided.

        Those after us wait for us in the same way, so between this and our commit nobody else's
        notes change: what is read now is what we replace.
        """
        if not self._broker.await_ends({(NOTES_TOPIC, 0): first}, PENDING_SECONDS):
            raise RetryError(
                "Another transaction that sets notes has been open for too long.",
                fix="wait until it ends or times out, and try again.",
            )

    def committed_before(self, name: str, first: int) -> str | None:
        """A note's value as of offset `first`; to be called after `await_turn`."""
        value = self._partitions[0].get_before(_note_key(name), first)
        return None if value is None else _load(value)["value"]

    # Idempotent producers

    def ledger(self, uid: str, producer_id: str) -> Ledger:
        self.prepare()
        key = _ledger_key(uid, producer_id)
        value = self._partitions[self._ledger_partition(key)].get(key)
        return Ledger() if value is None else Ledger.load(value)

    def ledger_record(self, uid: str, producer_id: str, ledger: Ledger) -> Record:
        key = _ledger_key(uid, producer_id)
        return Record(NOTES_TOPIC, self._ledger_partition(key), key, ledger.dump())

    # Transactions

    def outcome(self, transaction_id: str) -> str | None:
        """The token of the last transaction of an id that was committed."""
        self.prepare()
        key = _outcome_key(transaction_id)
        value = self._partitions[self._ledger_partition(key)].get(key)
        return None if value is None else _load(value)["token"]

    def outcome_record(self, transaction_id: str, token: str) -> Record:
        key = _outcome_key(transaction_id)
        return Record(
            NOTES_TOPIC,
            self._ledger_partition(key),
            key,
            json.dumps({"version": VERSION, "token": token}).encode(),
        )

    def _ledger_partition(self, key: bytes) -> int:
        spread = len(self._partitions) - 1
        return 1 + murmur2(key) % spread if spread else 0


def _note_key(name: str) -> bytes:
    return f"note:{name}".encode()


def _ledger_key(uid: str, producer_id: str) -> bytes:
    return f"producer:{uid}:{producer_id}".encode()


def _outcome_key(transaction_id: str) -> bytes:
    return f"transaction:{transaction_id}".encode()


def _load(value: bytes) -> dict[str, Any]:
    try:
        stored: dict[str, Any] = json.loads(value)
        version = stored["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptionError(
            f"A note in {NOTES_TOPIC} cannot be read: {error!r}.", fix="set it again."
        ) from error
    if version > VERSION:
        raise NewerFormat(
            f"A note was written by a newer Headrace (format {version}, this one reads {VERSION}).",
            fix="upgrade headrace.",
        )
    return stored
