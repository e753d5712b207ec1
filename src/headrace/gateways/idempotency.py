"""Repeats are recognised: the ids of requests and messages, remembered with the rows they brought.

The ids of a topic's senders are rows of a topic of their own, `__gateway_keys.TOPIC`, and are
committed in the same transaction as the rows. So there is never one without the other, whoever is
killed, and however many rows a request has:

    Idempotency-Key: k1    one commit    orders                 the rows of the request
                                         __gateway_keys.orders  {n: 7, id: hash of k1, …}
                                         note                   {count: 7, …}, if it was 6

Any number of gateways append to a topic. Each knows the ids up to some count, and its commit is
refused if the note does not have that count any more (`NoteConflict`). Then it reads the ids that
came in between, and decides anew. With one gateway nothing is ever read but at its start.

An id is remembered until `max_keys` newer ones have come, or `keep` has passed. Only hashes of ids
and bodies are kept, so an id costs the same however long it is: about 300 bytes in memory, and at
most 1 KiB on disk.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pyarrow as pa

from headrace.durations import from_us, to_time_us, to_us
from headrace.errors import InputError, NewerFormat, NoteConflict, RetryError
from headrace.log.api import Log, Transaction
from headrace.log.values import AppendResult, Duration, Headers, TopicInfo

DEFAULT_KEYS, DEFAULT_KEEP = 500_000, "24 hours"
MAX_KEYS = 10_000_000
MARGIN_US = 24 * 3600 * 1_000_000
"""How much longer ids stay in the log than they are remembered."""
OTHER_BODY = "other body"
"""The reason of a submission whose id came before, with something else."""
KEY_BYTES = 1 << 10
VERSION = 1
_SCHEMA = "n BIGINT, topic STRING, id BINARY, digest BINARY, `at` TIMESTAMP"
_ARROW_SCHEMA = pa.schema(
    [
        ("n", pa.int64()),
        ("topic", pa.string()),
        ("id", pa.binary()),
        ("digest", pa.binary()),
        ("at", pa.timestamp("us", "UTC")),
    ]
)
_SEGMENT_BYTES = 16 << 20
_VISIBLE_S = 60.0
_LONGEST_TOPIC = 150


@dataclass(frozen=True)
class KeyRetention:
    """How many ids of a topic are remembered, and for how long."""

    max_keys: int
    keep_us: int


def key_retention(max_keys: int, keep: Duration) -> KeyRetention:
    """Return the retention of those settings. Raises InputError if it is not possible."""
    keep_us = to_us(keep, what="keep_keys")
    if not 1 <= max_keys <= MAX_KEYS or keep_us < 1_000_000:
        raise InputError(
            f"Ids cannot be remembered for {keep} up to {max_keys:,} of them.",
            fix=f"choose at least 1 second, and from 1 to {MAX_KEYS:,} ids.",
        )
    return KeyRetention(max_keys, keep_us)


def keys_topic(topic: str) -> str:
    """Return the name of the topic with the ids of another topic's senders."""
    if len(topic) > _LONGEST_TOPIC:
        topic = f"{topic[:_LONGEST_TOPIC]}.{_hash(topic).hex()}"
    return f"__gateway_keys.{topic}"


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


@dataclass(frozen=True)
class Count:
    """How many ids a topic has had, as its note says."""

    count: int = 0
    topic_id: str = ""
    """The topic that they are of: one that was deleted and created again has none of them."""
    keys_id: str = ""
    """The topic that they are in."""
    at_us: int = 0
    """When the newest came."""

    @classmethod
    def parse(cls, text: str | None) -> Count:
        if text is None:
            return cls()
        stored: dict[str, Any] = json.loads(text)
        if stored["version"] > VERSION:
            raise NewerFormat(
                f"The ids of a gateway were written by a newer Headrace (format"
                f" {stored['version']}, this one reads {VERSION}).",
                fix="upgrade headrace.",
            )
        return cls(stored["count"], stored["topic_id"], stored["keys_id"], stored["at_us"])

    def dump(self) -> str:
        """Return the note's text. No two are the same."""
        fields = {"version": VERSION, **self.__dict__, "commit": uuid.uuid4().hex}
        return json.dumps(fields, sort_keys=True)


class KeyRegister:
    """The ids of one topic that one gateway knows, and the transactions that add to them."""

    def __init__(self, log: Log, topic: TopicInfo, gateway: str, retention: KeyRetention) -> None:
        self._log = log
        self._topic = topic
        self._retention = retention
        self._keys_topic = keys_topic(topic.name)
        self._note = f"__gateway_keys.{topic.name}"
        self._keys_id = ""
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        """By the hash of an id, in the order of their commits: the digest of what was sent, and
        when, in eight bytes.
        """
        self._count = 0
        self._newest_us = 0
        self._next_offset: int | None = None
        self._expected: str | None = None
        """The note's text up to which the ids are known."""
        self._is_current = False
        owner = f"{gateway}\0{topic.name}"
        self._transaction: Transaction = log.transaction(f"gateway.{_hash(owner).hex()}")

    # What is known

    def digest(self, id: str) -> bytes | None:
        """Return the digest that came with an id, empty if it had none; None if the id is new."""
        stored = self._known.get(_hash(id))
        return None if stored is None else stored[8:]

    def refresh(self) -> None:
        """Read the ids that others have committed, unless nothing can be new:

        1. read the note: how many ids there are
        2. read ids until the last of these has been seen

        Raises:
            InputError: The topic was deleted and created again: the new one needs another register.
        """
        if self._log.topic(self._topic.name).id != self._topic.id:
            raise InputError(
                f"The topic {self._topic.name!r} was deleted and created again.",
                fix="send the request again.",
            )
        if self._is_current:
            return
        self._open_topic()
        self._expected = self._log.note(self._note)  # 1
        count = Count.parse(self._expected)
        if count.keys_id != self._keys_id:  # others may have created the topic of ids anew
            self._keys_id = ""
            self._next_offset = None
            self._open_topic()
        if (count.topic_id, count.keys_id) != (self._topic.id, self._keys_id):
            self._known.clear()
            self._count = count.count
        elif count.count > self._count:
            self._read_to(count)  # 2
        self._is_current = True

    def _open_topic(self) -> None:
        if self._keys_id:
            return
        settings: dict[str, Any] = {
            "retention": timedelta(microseconds=self._retention.keep_us + MARGIN_US),
            "retention_bytes": max(
                4 * _SEGMENT_BYTES, KEY_BYTES * self._retention.max_keys + _SEGMENT_BYTES
            ),
        }
        info = self._log.create_topic(
            self._keys_topic,
            _SCHEMA,
            segment_bytes=_SEGMENT_BYTES,
            segment_age="1 day",
            exist_ok=True,
            **settings,
        )
        wanted_us = self._retention.keep_us + MARGIN_US
        if (info.retention_us or wanted_us) < wanted_us or (
            (info.retention_bytes or settings["retention_bytes"]) < settings["retention_bytes"]
        ):  # it was created for a gateway that remembers fewer
            info = self._log.alter_topic(self._keys_topic, **settings)
        self._keys_id = info.id

    def _read_to(self, count: Count) -> None:
        """Read ids up to a count that a note says. On Kafka the note may be visible a moment before
        the ids of the same transaction.
        """
        oldest_us = time.time_ns() // 1_000 - self._retention.keep_us
        deadline_s = time.monotonic() + _VISIBLE_S
        while self._count < count.count:
            start = self._log.start_offsets(self._keys_topic)[0]
            stop = self._log.end_offsets(self._keys_topic)[0]
            if self._next_offset is None:
                since = self._log.offsets_at(self._keys_topic, max(0, oldest_us) / 1e6)[0]
                # On Kafka the end of a transaction has an offset too.
                self._next_offset = max(since, stop - 2 * self._retention.max_keys)
            self._next_offset = max(self._next_offset, start)
            if self._next_offset < stop:
                for batch in self._log.read(self._keys_topic, 0, self._next_offset, stop):
                    self._add(batch)
                self._next_offset = stop
            if count.at_us < oldest_us:
                self._count = count.count  # even the newest is forgotten
            if self._count < count.count:
                if time.monotonic() > deadline_s:
                    raise RetryError(
                        f"The ids of {self._topic.name!r} in {self._keys_topic!r} cannot be read:"
                        f" there are {count.count:,}, and the newest seen is {self._count:,}.",
                        fix="try again; if it stays so, look for damage with: headrace log verify.",
                    )
                time.sleep(0.02)

    def _add(self, batch: pa.RecordBatch) -> None:
        now_us = time.time_ns() // 1_000
        numbers, topics, ids, digests, times = (
            batch.column(name).to_pylist() for name in _ARROW_SCHEMA.names
        )
        for number, topic_id, hashed, digest, at in zip(
            numbers, topics, ids, digests, times, strict=True
        ):
            self._count = max(self._count, number)
            if topic_id == self._topic.id:
                # The clock of another gateway may be wrong: it must not make this one forget.
                self._newest_us = min(max(to_time_us(at), self._newest_us), now_us)
                self._remember(hashed, digest, self._newest_us)

    def _remember(self, id: bytes, digest: bytes, at_us: int) -> None:
        self._known[id] = at_us.to_bytes(8, "big", signed=True) + digest
        self._known.move_to_end(id)
        oldest_us = at_us - self._retention.keep_us
        while len(self._known) > self._retention.max_keys or (
            int.from_bytes(next(iter(self._known.values()))[:8], "big", signed=True) < oldest_us
        ):
            self._known.popitem(last=False)

    # Commits

    def append(
        self,
        batch: pa.RecordBatch,
        headers: Headers | None,
        ids: Sequence[tuple[str, bytes]],
        now_us: int,
    ) -> AppendResult | None:
        """Commit rows together with the ids that brought them, each with its digest. Returns None,
        and stores nothing, if others have committed ids since the last `refresh`: look again which
        ids are new.

        Raises:
            RetryError: The outcome is not known; the next `refresh` finds out.
            TransactionFenced: A newer process of the same gateway appends to the topic.
        """
        first = self._count + 1
        hashes = [_hash(name) for name, _ in ids]
        keys = pa.RecordBatch.from_arrays(
            [
                pa.array(range(first, first + len(ids)), pa.int64()),
                pa.array([self._topic.id] * len(ids), pa.string()),
                pa.array(hashes, pa.binary()),
                pa.array([digest for _, digest in ids], pa.binary()),
                pa.array([from_us(now_us)] * len(ids), _ARROW_SCHEMA.field("at").type),
            ],
            schema=_ARROW_SCHEMA,
        )
        count = Count(self._count + len(ids), self._topic.id, self._keys_id, now_us)
        text = count.dump()
        self._is_current = False
        transaction = self._transaction = self._transaction.next()
        try:
            transaction.append(self._topic.name, batch, headers=headers)
            transaction.append(self._keys_topic, keys)
            transaction.set_note(self._note, text, expect=self._expected)
            result = transaction.commit()
        except NoteConflict:
            return None
        finally:
            transaction.abort()  # harmless after a commit
        self._expected = text
        self._count = count.count
        self._is_current = True
        for hashed, (_, digest) in zip(hashes, ids, strict=True):
            self._remember(hashed, digest, now_us)
        name = self._topic.name
        return AppendResult({name: result.partitions(name)}, result.commit)
