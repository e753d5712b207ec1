"""Small values that are stored in the same transaction as rows, in the compacted topic
`__headrace.notes`: the notes of users, the progress of idempotent producers, and the owners of
transaction ids with the tokens of their committed transactions.

The notes of users share partition 0, whose order makes compare-and-set possible (see
`Notes.await_turn`). The entries of producers are spread over the other partitions, so that a
producer that died in the middle of an append holds back few others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from headrace.columnar.murmur2 import murmur2
from headrace.errors import CorruptionError, NewerFormat, RetryError
from headrace.log.kafka.cluster import ClusterAdmin
from headrace.log.kafka.compacted_topic import (
    PENDING_SECONDS,
    CompactedPartition,
    ensure_compacted_topic,
)
from headrace.log.kafka.sender import Record
from headrace.log.sequences import StoredSequences
from headrace.log.values import OffsetRange

NOTES_TOPIC = "__headrace.notes"
PARTITIONS = 8
VERSION = 1
RECENT_SEQUENCES = 8


@dataclass
class ProducerProgress:
    """How far an idempotent producer has come: its epoch, the last sequence number it stored, the
    offsets of its most recent appends, and the numbers of all.
    """

    epoch: int = 0
    last: int = -1
    recent: list[tuple[int, dict[int, OffsetRange]]] = field(default_factory=list)
    stored: StoredSequences = field(default_factory=StoredSequences)

    def with_append(self, sequence: int, ranges: dict[int, OffsetRange]) -> ProducerProgress:
        recent = [*self.recent[1 - RECENT_SEQUENCES :], (sequence, ranges)]
        return ProducerProgress(self.epoch, sequence, recent, self.stored.with_number(sequence))

    def ranges_of(self, sequence: int) -> dict[int, OffsetRange]:
        """The offsets of the append with a sequence number; empty if it is not among the most
        recent.
        """
        return next((ranges for number, ranges in self.recent if number == sequence), {})

    def dump(self) -> bytes:
        recent = [
            [
                number,
                {str(partition): [each.start, each.stop] for partition, each in ranges.items()},
            ]
            for number, ranges in self.recent
        ]
        return json.dumps(
            {
                "version": VERSION,
                "epoch": self.epoch,
                "last": self.last,
                "recent": recent,
                "stored": self.stored.dump(),
            }
        ).encode()

    @classmethod
    def load(cls, value: bytes) -> ProducerProgress:
        stored = _load(value)
        recent = [
            (number, {int(partition): OffsetRange(*each) for partition, each in ranges.items()})
            for number, ranges in stored["recent"]
        ]
        sequences = (
            StoredSequences.load(stored["stored"])
            if "stored" in stored  # older ones have only the most recent appends
            else StoredSequences.of(number for number, _ in recent)
        )
        return cls(stored["epoch"], stored["last"], recent, sequences)


class Notes:
    """Reads notes, and makes the records that store them. Thread-safe."""

    def __init__(self, admin: ClusterAdmin) -> None:
        self._admin = admin
        self._guard = Lock()
        self._partitions: list[CompactedPartition] = []

    def prepare(self) -> None:
        """Create the topic if it does not exist."""
        with self._guard:
            if not self._partitions:
                count = ensure_compacted_topic(self._admin, NOTES_TOPIC, PARTITIONS)
                self._partitions = [
                    CompactedPartition(self._admin, NOTES_TOPIC, number) for number in range(count)
                ]

    # Users' notes

    def note(self, name: str) -> str | None:
        self.prepare()
        value = self._partitions[0].get(_note_key(name))
        return None if value is None else _load(value)["value"]

    def notes(self, prefix: str) -> dict[str, str]:
        """Notes by name, of those whose names begin with a prefix."""
        self.prepare()
        first = _note_key(prefix)
        own = len(_note_key(""))
        return {
            key[own:].decode(): _load(value)["value"]
            for key, value in self._partitions[0].values().items()
            if key.startswith(first)
        }

    def note_record(self, name: str, value: str | None) -> Record:
        stored = (
            None
            if value is None
            else json.dumps({"version": VERSION, "value": value}, ensure_ascii=False).encode()
        )
        return Record(NOTES_TOPIC, 0, _note_key(name), stored)

    def await_turn(self, first: int) -> None:
        """Wait until every transaction that wrote a note before offset `first`, the first note of
        this transaction, is decided.

        Transactions that write notes later wait for this one in the same way. So no note changes
        between this wait and the commit: the value read now is the value that is replaced.
        """
        if not self._admin.await_ends({(NOTES_TOPIC, 0): first}, PENDING_SECONDS):
            raise RetryError(
                "Another transaction that sets notes has been open for"
                f" {PENDING_SECONDS:.0f} seconds.",
                fix="wait until it ends or times out, and try again.",
            )

    def committed_before(self, name: str, first: int) -> str | None:
        """The value of a note as of offset `first`. To be called after `await_turn`."""
        value = self._partitions[0].get_before(_note_key(name), first)
        return None if value is None else _load(value)["value"]

    # Idempotent producers

    def progress(self, uid: str, producer_id: str) -> ProducerProgress:
        self.prepare()
        key = _progress_key(uid, producer_id)
        value = self._partitions[self._partition_of(key)].get(key)
        return ProducerProgress() if value is None else ProducerProgress.load(value)

    def progress_record(self, uid: str, producer_id: str, progress: ProducerProgress) -> Record:
        key = _progress_key(uid, producer_id)
        return Record(NOTES_TOPIC, self._partition_of(key), key, progress.dump())

    # Transactions

    def transaction(self, id: str) -> tuple[str | None, str | None]:
        """The owner of a transaction id, and the token of its last committed transaction. The owner
        is None if an older Headrace, which records none, has the id.
        """
        self.prepare()
        key = _transaction_key(id)
        value = self._partitions[self._partition_of(key)].get(key)
        stored = {} if value is None else _load(value)
        return stored.get("owner"), stored.get("token")

    def transaction_record(self, id: str, owner: str, token: str | None) -> Record:
        key = _transaction_key(id)
        value = json.dumps({"version": VERSION, "owner": owner, "token": token}).encode()
        return Record(NOTES_TOPIC, self._partition_of(key), key, value)

    def _partition_of(self, key: bytes) -> int:
        others = len(self._partitions) - 1
        return 1 + murmur2(key) % others if others else 0


def _note_key(name: str) -> bytes:
    return f"note:{name}".encode()


def _progress_key(uid: str, producer_id: str) -> bytes:
    return f"producer:{uid}:{producer_id}".encode()


def _transaction_key(id: str) -> bytes:
    return f"transaction:{id}".encode()


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
