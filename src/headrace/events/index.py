"""The events of a store by entity: an index on disk (`Index`), and the recent events in memory
(`RecentEvents`), both kept up to date with the log by `EventIndex`.

There is one `EventIndex` a log and topic, for all threads. Readers see what is durable. A commit is
decided, under the log's lock, against everything that was drafted, durable or not; what it drafts
is added to the recent events at once. If a commit fails, the log drops its drafted state; the index
notices that, and drops the drafted events too.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from bisect import insort
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

import lmdb

from headrace.errors import CorruptionError, InputError, OffsetOutOfRange, ReadOnlyLog
from headrace.events.event import Entry, entries
from headrace.log.file.commit_draft import StaleTopic
from headrace.log.file.reader import PartitionReader, SegmentCache
from headrace.log.file.segment import CONTROL, SPARSE, decode_batch

if TYPE_CHECKING:
    from headrace.log.file.commit_draft import CommitDraft
    from headrace.log.file.log import FileLog
    from headrace.log.file.state import State


# Erasure records: the topic `<events>.forgotten` says what was erased, without saying whom, and
# which version an entity had reached, so that versions are never assigned twice.

EXCISED_VERSION = "version"


def hashed_name(topic_directory: str, name: str) -> str:
    """Return a hash of a subject's or an entity's name, which does not reveal the name."""
    return sha256(f"{topic_directory}\0{name}".encode()).hexdigest()


def erasure_topic(events: str) -> str:
    """Return the name of the topic with the erasure records of an event store."""
    return f"{events}.forgotten"


def retained_versions(log: FileLog, events: str) -> dict[str, int]:
    """Return the versions that entities had reached when events were excised, by their hashes."""
    if erasure_topic(events) not in log.store.view().topics:
        return {}
    versions: dict[str, int] = {}
    for row in log.read(erasure_topic(events)).to_pylist():
        if row["what"] == EXCISED_VERSION:
            name_hash = row["subject_sha256"]
            version = json.loads(row["details"])["version"]
            versions[name_hash] = max(versions.get(name_hash, 0), version)
    return versions


# The index on disk

VERSION = 1
_MAP_BYTES = 1 << 40
_DATABASES = 4
_NUMBER = 8
_open_indexes: dict[tuple[int, Path], tuple[Index, int]] = {}
_guard = threading.Lock()
_stores_guard = threading.Lock()


class Index:
    """An index of events by entity, for one topic and one generation (each excision begins a new
    one): all events of an entity are next to each other, so that loading it costs its own events
    only.

    It is an LMDB store next to the log's topics. It is written some thousand events at a time, only
    with what is durable in the log; `position` says how far it goes. It can be built again from the
    topic, and is discarded if it has another version, is damaged, or does not fit the topic.
    Snapshots are stored here too. Processes share it; a process opens it once (`open_index`), as
    LMDB demands.
    """

    def __init__(self, directory: Path, env: lmdb.Environment) -> None:
        self.directory = directory
        self._env = env
        self._events, self._ids, self._snapshots, self._about = (
            env.open_db(name) for name in (b"events", b"ids", b"snapshots", b"about")
        )

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open the index, or create it; one that cannot be used is discarded."""
        try:
            return cls._open_existing(directory)
        except lmdb.Error:
            shutil.rmtree(directory, ignore_errors=True)
            return cls._open_existing(directory)

    @classmethod
    def _open_existing(cls, directory: Path) -> Self:
        directory.mkdir(parents=True, exist_ok=True)
        env = lmdb.open(str(directory), map_size=_MAP_BYTES, max_dbs=_DATABASES, max_readers=1024)
        with ExitStack() as unusable:
            unusable.callback(env.close)
            # Reading behind the end of a file that was cut short would end the process.
            needed_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
            if needed_bytes > (directory / "data.mdb").stat().st_size:
                raise lmdb.CorruptedError(f"{directory} was cut short")
            env.reader_check()
            index = cls(directory, env)
            with env.begin(write=True) as txn:
                version = b"%d" % VERSION
                if (txn.get(b"version", db=index._about) or version) != version:
                    raise lmdb.VersionMismatchError(f"{directory} has another version")
                txn.put(b"version", version, db=index._about)
            unusable.pop_all()
            return index

    def position(self) -> int:
        """Everything before this offset is in it."""
        with self._env.begin() as txn:
            return self._position(txn)

    def _position(self, txn: Any) -> int:
        return int(txn.get(b"position", db=self._about) or 0)

    def reading(self) -> IndexReader:
        """One moment of it, to be closed. Whoever asks has seen to it that the index stays open
        (`retain`).
        """
        return IndexReader(self, self._env.begin())

    def put(
        self,
        entries: Iterable[Entry],
        position: int,
        snapshots: Iterable[tuple[str, str, bytes]] = (),
    ) -> int:
        """Add events up to a position, unless another process was quicker. Returns how far it
        reaches now.
        """
        with self._env.begin(write=True) as txn:
            before, last = self._position(txn), None
            for entry in entries:
                if entry.offset >= before:
                    last = entry
                    txn.put(_key(entry.entity, entry.version), entry.text.encode(), db=self._events)
                    if entry.id is not None:
                        txn.put(
                            _id_key(entry.id),
                            b"%d %d %s" % (entry.version, entry.offset, entry.entity.encode()),
                            db=self._ids,
                        )
            for entity, name, snapshot in snapshots:
                txn.put(_key(entity, 0) + name.encode(), snapshot, db=self._snapshots)
            if last is not None:
                txn.put(
                    b"last",
                    json.dumps([last.entity, last.version, last.offset]).encode(),
                    db=self._about,
                )
            if position > before:
                txn.put(b"position", b"%d" % position, db=self._about)
            return max(position, before)

    def last(self) -> tuple[str, int, int] | None:
        """(entity, version, offset) of the newest event in it: to be held against the topic."""
        with self._env.begin() as txn:
            found = txn.get(b"last", db=self._about)
        return None if found is None else tuple(json.loads(found))

    def close(self) -> None:
        self._env.close()


class IndexReader:
    """A read transaction: what the index holds at one moment."""

    def __init__(self, index: Index, txn: Any) -> None:
        self._index, self._txn = index, txn
        self.position = index._position(txn)  # noqa: SLF001 - one class in two

    def close(self) -> None:
        """End the transaction; the index stays open."""
        self._txn.abort()

    def newest(self, entity: str) -> int | None:
        """Return the newest version of an entity; None if it has none."""
        cursor = self._txn.cursor(db=self._index._events)  # noqa: SLF001
        prefix = entity.encode() + b"\0"
        found = cursor.prev() if cursor.set_range(prefix + b"\xff" * _NUMBER) else cursor.last()
        key = cursor.key()
        return int.from_bytes(key[-_NUMBER:], "big") if found and key[:-_NUMBER] == prefix else None

    def texts(
        self,
        entity: str,
        after: int,
        upto: int | None,
        *,
        backwards: bool = False,
        limit: int | None = None,
    ) -> list[str]:
        """Return the texts of an entity's events after one version, up to another."""
        cursor = self._txn.cursor(db=self._index._events)  # noqa: SLF001
        stop = (
            _key(entity, upto) if upto is not None else entity.encode() + b"\0" + b"\xff" * _NUMBER
        )
        found: list[str] = []
        first = _key(entity, after + 1)
        if backwards:
            # The first key behind the range, or none: the one before it is the newest in it.
            is_behind = cursor.set_range(stop + b"\0")
            if not (cursor.prev() if is_behind else cursor.last()):
                return found
            for key, value in cursor.iterprev():
                if key < first or (limit is not None and len(found) >= limit):
                    break
                found.append(value.decode())
            return found
        if cursor.set_range(first):
            for key, value in cursor.iternext():
                if key > stop or (limit is not None and len(found) >= limit):
                    break
                found.append(value.decode())
        return found

    def locate(self, id: str) -> tuple[str, int, int] | None:
        """Return entity, version and offset of an event id; None if it is unknown."""
        found = self._txn.get(_id_key(id), db=self._index._ids)  # noqa: SLF001
        if found is None:
            return None
        version, offset, entity = found.split(b" ", 2)
        return entity.decode(), int(version), int(offset)

    def snapshot(self, entity: str, name: str) -> bytes | None:
        found: bytes | None = self._txn.get(
            _key(entity, 0) + name.encode(),
            db=self._index._snapshots,  # noqa: SLF001
        )
        return found

    def entities(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Yield each entity with its newest version, in order of name."""
        cursor = self._txn.cursor(db=self._index._events)  # noqa: SLF001
        found = cursor.set_range(prefix.encode()) if prefix else cursor.first()
        while found and cursor.key().startswith(prefix.encode()):
            name = cursor.key()[: -_NUMBER - 1].decode()
            yield name, self.newest(name) or 0
            found = cursor.set_range(name.encode() + b"\0" + b"\xff" * _NUMBER)


def _key(entity: str, version: int) -> bytes:
    return entity.encode() + b"\0" + version.to_bytes(_NUMBER, "big")


def _id_key(id: str) -> bytes:
    return id.encode()


def open_index(directory: Path) -> Index:
    """Return the index in a directory, one object a process."""
    key = os.getpid(), directory
    with _guard:
        index, users = _open_indexes.get(key, (None, 0))
        if index is None:
            index = Index.open(directory)
        _open_indexes[key] = index, users + 1
        return index


def retain(index: Index) -> Index:
    """Keep an index open until it is released: LMDB must not unmap it while it is read."""
    key = os.getpid(), index.directory
    with _guard:
        known, users = _open_indexes.get(key, (None, 0))
        if known is index:  # one that was thrown away is never closed
            _open_indexes[key] = index, users + 1
    return index


def release_index(index: Index) -> None:
    """Release an index; the last user closes it."""
    key = os.getpid(), index.directory
    with _guard:
        known, users = _open_indexes.get(key, (None, 0))
        if known is not index:
            return
        if users <= 1:
            del _open_indexes[key]
            index.close()
        else:
            _open_indexes[key] = index, users - 1


def discard_index(index: Index) -> None:
    """Discard an index that does not fit its topic; it is built again when it is next opened. Other
    users in this process go on with what they see.
    """
    with _guard:
        _, users = _open_indexes.pop((os.getpid(), index.directory))
        if users <= 1:
            index.close()
        shutil.rmtree(index.directory, ignore_errors=True)


# The newest events, in memory: those that the index does not have yet. Bounded by how often they
# are moved there (`indexed`).


class RecentEvents:
    """Events in memory, from offset `start` up to `end`. It is not safe for threads: its owner has
    a lock.
    """

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.entries: list[Entry] = []
        self._of: dict[str, list[Entry]] = {}
        self._ids: dict[str, Entry] = {}

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        of_entity = self._of.setdefault(entry.entity, [])
        if of_entity and of_entity[-1].version > entry.version:  # a snapshot of an older version
            insort(of_entity, entry, key=lambda each: each.version)
        else:
            of_entity.append(entry)
        if entry.id is not None:
            self._ids[entry.id] = entry
        self.end = entry.offset + 1

    def since(self, entity: str, version: int, offset: int) -> list[Entry]:
        """Return an entity's events after a version, from an offset on, newest first."""
        newer = takewhile(lambda entry: entry.version > version, reversed(self._of.get(entity, ())))
        return [entry for entry in newer if entry.offset >= offset]

    def newest(self, entity: str) -> Entry | None:
        known = self._of.get(entity)
        return known[-1] if known else None

    def with_id(self, id: str) -> Entry | None:
        return self._ids.get(id)

    def entities(self) -> list[str]:
        return list(self._of)

    def between(self, start: int, end: int) -> RecentEvents:
        """Return a copy with the events between two offsets. Readers of this object are not
        affected.
        """
        tail = RecentEvents(start)
        for entry in self.entries:
            if start <= entry.offset < end:
                tail.add(entry)
        tail.end = max(start, min(self.end, end))
        return tail


logger = logging.getLogger("headrace.events")
FLUSH_ENTRIES = 4096
"""How many events are moved to the index at a time: a sync for each would cost as much as the
append.
"""
_READ_ENTRIES = 20_000
_NEAR_S = 0.1
_all: WeakKeyDictionary[FileLog, dict[str, EventIndex]] = WeakKeyDictionary()


def generation_note(topic: str) -> str:
    """Return the name of the note that counts a topic's excisions: each begins a new index."""
    return f"events.{topic}.generation"


def event_index(log: FileLog, topic: str) -> EventIndex:
    """Return the index of a log's topic, one object a log. Each caller closes it once."""
    with _stores_guard:
        known = _all.setdefault(log, {})
        if topic not in known:
            known[topic] = EventIndex(log, topic)
        known[topic].users += 1
        return known[topic]


class EventIndex:
    """The events of one topic by entity: the index on disk, and the recent events in memory that it
    does not have yet. `event_index` gives one object a log and topic; its callers count as `users`,
    and it is closed with the last of them.
    """

    def __init__(self, log: FileLog, topic: str) -> None:
        if not log.store.writable:
            raise ReadOnlyLog(
                f"The log in {log.store.root} cannot be written, and an event store keeps an index"
                " in it.",
                fix="check the directory's permissions.",
            )
        self._log, self._topic = log, topic
        self.users = 0
        self._lock = threading.RLock()
        self._flushing = threading.Lock()
        state = log.store.view()
        self._directory = state.topic(topic).directory
        self._begin(state.notes.get(generation_note(topic), "0"))

    def _begin(self, generation: str) -> None:
        self.generation = generation
        self._retained_versions = retained_versions(self._log, self._topic)
        self._index = open_index(self.place(self._log, self._directory, generation))
        if not self._fits():
            discard_index(self._index)
            self._index = open_index(self._index.directory)
        self._tail = RecentEvents(self._index.position())
        self._sure = self._tail.end  # durable up to here
        self._seen: State | None = None
        self._drafted = SegmentCache(self._log.store)
        self._durable = SegmentCache(self._log.store)
        self._snapshots: dict[tuple[str, str], bytes] = {}
        self._refreshed_s = 0.0

    @staticmethod
    def place(log: FileLog, directory: str, generation: str) -> Path:
        return log.store.root / "events" / directory / f"index-{generation}"

    def _fits(self) -> bool:
        """Whether the newest event of the index is where it says in the topic; not so if the log
        lost rows that were not synced, or was put back from a backup.
        """
        last = self._index.last()
        if last is None:
            return self._index.position() == 0
        entity, version, offset = last
        topic = self._log.store.view().topic(self._topic)
        if self._index.position() > topic.partitions[0].end:
            return False
        with suppress(CorruptionError, OffsetOutOfRange):
            reader = self._log.partition_reader(topic, 0)
            return any(
                (found.entity, found.version) == (entity, version)
                for found in _read(reader, offset, offset + 1)
            )
        return False

    # Keeping up

    def refresh(self) -> int:
        """Add everything that is durable. Returns the offset at which it ends."""
        state = self._log.store.view()
        topic = state.topic(self._topic)
        if topic.directory != self._directory:
            raise InputError(
                f"The topic {self._topic!r} was deleted and made again.",
                fix="open the event store again.",
            )
        end = topic.partitions[0].end
        generation = state.notes.get(generation_note(self._topic), "0")
        with self._lock:
            if generation != self.generation:
                # Begin a new index after events were excised: nothing of the old one may stay.
                release_index(self._index)
                self._log.cache.forget(self._directory, 0)
                self._begin(generation)
            if self._seen is not None and self._log.store.newest_state() is not self._seen:
                self._forget_drafted()
            if self._tail.end < end:
                # Read what others have written; if that is much, it is moved to the index on the
                # way.
                reached = self._index.position()
                if reached > self._tail.end:
                    self._tail = RecentEvents(reached)
                reader = PartitionReader(self._durable, topic, 0)
                while self._tail.end < end:
                    stop = min(end, self._tail.end + _READ_ENTRIES)
                    self._add(reader, stop)
                    if stop < end:
                        reached = self._index.put(self._tail.entries, stop)
                        self._tail = RecentEvents(reached)
            self._sure = max(self._sure, end)
            self._refreshed_s = time.monotonic()
        if (
            len(self._tail.entries) >= 2 * FLUSH_ENTRIES
        ):  # one who only reads must not gather what others write
            self.flush_if_due()
        return end

    def _forget_drafted(self) -> None:
        self._tail = self._tail.between(self._tail.start, self._sure)
        self._seen = None
        self._drafted = SegmentCache(self._log.store)

    def _add(self, reader: PartitionReader, stop: int) -> None:
        for entry in _read(reader, self._tail.end, stop):
            self._tail.add(entry)
        self._tail.end = stop

    def catch_up(self, draft: CommitDraft) -> None:
        """Under the log's lock: add everything that was drafted before. Raises StaleTopic if events
        were excised since; `refresh` handles that outside the lock.
        """
        with self._lock:
            if draft.state.notes.get(generation_note(self._topic), "0") != self.generation:
                raise StaleTopic(f"Events of {self._topic!r} were excised.")
            if draft.state is not self._seen:
                self._forget_drafted()
                self._seen = draft.state
            topic = draft.state.topic(self._topic)
            end = topic.partitions[0].end
            if self._tail.end < end:
                self._add(PartitionReader(self._drafted, topic, 0), end)

    def add(self, drafted: list[Entry]) -> None:
        """Under the log's lock: add the events that a commit will store."""
        with self._lock:
            for entry in drafted:
                self._tail.add(entry)

    # Moving on

    def flush_if_due(self) -> None:
        """Move durable events to the index on disk, if there are many."""
        if len(self._tail.entries) + len(
            self._snapshots
        ) >= FLUSH_ENTRIES and self._flushing.acquire(blocking=False):
            try:
                self._flush()
            except (lmdb.Error, OSError) as error:  # events are in the log, and stay in memory
                logger.warning("The index of %s could not be written: %s", self._topic, error)
            finally:
                self._flushing.release()

    def flush(self) -> None:
        self.refresh()
        with self._flushing:
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            index, sure = retain(self._index), self._sure
            found = [entry for entry in self._tail.entries if entry.offset < sure]
            snapshots = [
                (entity, name, content) for (entity, name), content in self._snapshots.items()
            ]
            self._snapshots = {}
        try:
            reached = index.put(found, sure, snapshots)
            with self._lock:
                if index is self._index:  # otherwise events were excised meanwhile
                    end = max(self._tail.end, sure)
                    self._tail = self._tail.between(min(reached, end), end)
        finally:
            release_index(index)

    def put_snapshot(self, entity: str, name: str, content: bytes) -> None:
        """Store a snapshot. It is in memory until the index is written next; a lost snapshot is
        taken again.
        """
        with self._lock:
            self._snapshots[entity, name] = content

    # Asking

    def look(self, *, end: int | None = None) -> IndexView:
        """Return a consistent view, for `with`: of everything drafted, or up to an offset."""
        return IndexView(self, end)

    def begin_view(self) -> tuple[Index, IndexReader, RecentEvents]:
        with self._lock:
            index = retain(self._index)
            return index, index.reading(), self._tail

    def newest(self, entity: str, *, end: int | None = None) -> int | None:
        """Return the newest version of an entity; None if it has none. Recent events are newer than
        the index on disk.
        """
        with self._lock:
            last = self._tail.newest(entity)
        if last is not None and (end is None or last.offset < end):
            return self.at_least_retained(entity, last.version)
        with self.look(end=end) as look:
            return look.newest(entity)

    def at_least_retained(self, entity: str, version: int | None) -> int | None:
        """Return a version, or the larger one that the entity had when events were excised."""
        if not self._retained_versions:
            return version
        retained = self._retained_versions.get(hashed_name(self._directory, entity))
        return version if retained is None else max(retained, version or 0)

    def is_near(self) -> bool:
        """Return whether the index was refreshed a moment ago, so that little is left to read under
        the log's lock.
        """
        return time.monotonic() - self._refreshed_s < _NEAR_S

    def since(self, tail: RecentEvents, entity: str, version: int, offset: int) -> list[Entry]:
        with self._lock:
            return tail.since(entity, version, offset)

    def snapshot_in_memory(self, entity: str, name: str) -> bytes | None:
        with self._lock:
            return self._snapshots.get((entity, name))

    def close(self) -> None:
        """Close the index for one user. The last one writes it for the next process."""
        with _stores_guard:
            self.users -= 1
            if self.users:
                return
            _all.get(self._log, {}).pop(self._topic, None)
        if len(self._tail.entries) > FLUSH_ENTRIES // 16:
            self.flush()
        release_index(self._index)


class IndexView:
    """The events by entity at one moment: index on disk and recent events."""

    _index: Index
    _reading: IndexReader
    _tail: RecentEvents

    def __init__(self, owner: EventIndex, end: int | None) -> None:
        self._owner, self._end = owner, end

    def __enter__(self) -> Self:
        self._index, self._reading, self._tail = self._owner.begin_view()
        return self

    def __exit__(self, *_: object) -> None:
        self._reading.close()
        release_index(self._index)

    def _newer(self, entity: str, after: int = -1) -> list[Entry]:
        """Return recent events that the index does not have and that may be seen, newest first."""
        found = self._owner.since(self._tail, entity, after, self._reading.position)
        return (
            found if self._end is None else [entry for entry in found if entry.offset < self._end]
        )

    def newest(self, entity: str) -> int | None:
        """Return the newest version that an entity has or had; None if it never had any."""
        return self._owner.at_least_retained(entity, self._newest_event(entity))

    def _newest_event(self, entity: str) -> int | None:
        last = self._tail.newest(entity)
        if last is not None and last.offset >= self._reading.position:
            if self._end is None or last.offset < self._end:
                return last.version
            if newer := self._newer(entity):
                return newer[0].version
        return self._reading.newest(entity)

    def head(self, entity: str) -> int:
        return self.newest(entity) or 0

    def texts(
        self,
        entity: str,
        after: int = 0,
        upto: int | None = None,
        *,
        backwards: bool = False,
        limit: int | None = None,
    ) -> list[str]:
        newest = [
            entry.text
            for entry in self._newer(entity, after)
            if upto is None or entry.version <= upto
        ]
        if backwards:
            left = None if limit is None else max(0, limit - len(newest))
            return newest[:limit] + self._reading.texts(
                entity, after, upto, backwards=True, limit=left
            )
        older = self._reading.texts(entity, after, upto, limit=limit)
        return (older + newest[::-1])[:limit]

    def locate(self, id: str) -> tuple[str, int, int] | None:
        found = self._tail.with_id(id)
        if found is not None and found.offset >= self._reading.position:
            return found.entity, found.version, found.offset
        return self._reading.locate(id)

    def snapshot(self, entity: str, name: str) -> bytes | None:
        return self._owner.snapshot_in_memory(entity, name) or self._reading.snapshot(entity, name)

    def entities(self, prefix: str = "") -> list[tuple[str, int]]:
        found = dict(self._reading.entities(prefix))
        for name in self._tail.entities():
            if name.startswith(prefix) and self._newer(name):
                found[name] = self.head(name)
        return sorted(found.items())


def _read(reader: PartitionReader, start: int, stop: int) -> Iterator[Entry]:
    for frame in reader.frames(start, stop, on_corrupt="raise"):
        if frame.header.kind == CONTROL:
            continue
        rows = decode_batch(frame.header, frame.body, frame.segment.header.schema)
        if frame.header.flags & SPARSE:
            offsets = rows.column("_offset").to_pylist()
            times = rows.column("_timestamp").cast("int64").to_pylist()
        else:
            offsets, times = (
                list(range(frame.first, frame.first + rows.num_rows)),
                [frame.time_us] * rows.num_rows,
            )
        yield from (
            entry for entry in entries(rows, offsets, times) if start <= entry.offset < stop
        )
