"""Small values that are stored in the same transaction as rows: users' notes, the last numbers of idempotent producers, the tokens of transactions.

They live in a compacted topic. Notes of users share partition 0, whose order makes compare-and-set possible (see `Notes.await_turn`); the entries of
producers are spread over the others, so that one that died in the middle of an append holds up few.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from headrace.errors import CorruptionError, NewerFormat, RetryError
from headrace.log.api import OffsetRange
from headrace.log.kafka.cluster import Broker
from headrace.log.kafka.compacted import PENDING_SECONDS, CompactedPartition, ensure_topic
from headrace.log.kafka.sending import Record
from headrace.murmur2 import murmur2

NOTES_TOPIC = "__headrace.notes"
PARTITIONS = 8
VERSION = 1
RECENT_SEQUENCES = 8


@dataclass
class Ledger:
    """What is remembered of an idempotent producer: the last numbers it stored, and where those rows went."""

    epoch: int = 0
    last: int = -1
    recent: list[tuple[int, dict[int, OffsetRange]]] = field(default_factory=list)

    def with_append(self, sequence: int, places: dict[int, OffsetRange]) -> Ledger:
        return Ledger(self.epoch, sequence, [*self.recent[1 - RECENT_SEQUENCES :], (sequence, places)])

    def place_of(self, sequence: int) -> dict[int, OffsetRange]:
        """Where the rows of a number went; nothing if that was too long ago."""
        return next((places for number, places in self.recent if number == sequence), {})

    def dump(self) -> bytes:
        recent = [[number, {str(p): [span.start, span.stop] for p, span in places.items()}] for number, places in self.recent]
        return json.dumps({"version": VERSION, "epoch": self.epoch, "last": self.last, "recent": recent}).encode()

    @classmethod
    def load(cls, value: bytes) -> Ledger:
        stored = _load(value)
        recent = [(number, {int(p): OffsetRange(*span) for p, span in places.items()}) for number, places in stored["recent"]]
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
                self._partitions = [CompactedPartition(self._broker, NOTES_TOPIC, number) for number in range(count)]

    # Users' notes

    def note(self, name: str) -> str | None:
        self.prepare()
        value = self._partitions[0].get(_note_key(name))
        return None if value is None else _load(value)["value"]

    def note_record(self, name: str, value: str | None) -> Record:
        stored = None if value is None else json.dumps({"version": VERSION, "value": value}, ensure_ascii=False).encode()
        return Record(NOTES_TOPIC, 0, _note_key(name), stored)

    def await_turn(self, first: int) -> None:
        """Wait until every transaction that wrote a note before offset `first`, where ours begins, is decided.

        Those after us wait for us in the same way, so between this and our commit nobody else's notes change: what is read now is what we replace.
        """
        if not self._broker.await_ends({(NOTES_TOPIC, 0): first}, PENDING_SECONDS):
            raise RetryError("Another transaction that sets notes has been open for too long.", fix="wait until it ends or times out, and try again.")

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
        return Record(NOTES_TOPIC, self._ledger_partition(key), key, json.dumps({"version": VERSION, "token": token}).encode())

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
        raise CorruptionError(f"A note in {NOTES_TOPIC} cannot be read: {error!r}.", fix="set it again.") from error
    if version > VERSION:
        raise NewerFormat(f"A note was written by a newer Headrace (format {version}, this one reads {VERSION}).", fix="upgrade headrace.")
    return stored
