"""Subscriptions to the changes of a view (`GET /views/NAME/changes`) and to the rows of a topic
(`GET /topics/NAME/tail`). `channels.py` delivers the events.

A subscriber of a view receives its rows first, then one event for each tick that changed it, in
order and each once. The id of an event is its tick, with the version in front (`v2:57`) if a
version is served instead of the pipeline's own view. A subscriber that reconnects with the last id
it received continues after it. If another version is served, or the store was rebuilt, the
subscriber receives a new snapshot.

A subscriber of a topic receives the rows as they are appended. The id of an event says how far each
partition was read (`0:17,1:20`).
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import pyarrow as pa
from starlette.concurrency import run_in_threadpool

from headrace.columnar.columns import CHANGE_TYPE
from headrace.errors import ChangesGone, InputError, OffsetOutOfRange, UnknownView
from headrace.log.api import Log
from headrace.serve.channels import (
    Channel,
    Hub,
    SourceReset,
    StreamEvent,
    encode_event,
    encode_heartbeat,
)
from headrace.serve.requests import json_quote, row_objects, rows_json
from headrace.serve.selections import RowSelection
from headrace.serve.stores import ViewLocation, ViewStores
from headrace.views.file import ViewInfo

# Snapshots


_PART_ROWS = 5_000
_SHARED_BYTES = 4 << 20
_SHARED_SNAPSHOTS = 8
_SEND_BYTES = 64 << 10


@dataclass(frozen=True)
class EncodedSnapshot:
    """A snapshot of a view as encoded events. A large one is in a file, which only one subscriber
    reads.
    """

    tick: int
    data: bytes | IO[bytes]

    async def parts(self) -> AsyncGenerator[bytes, None]:
        if isinstance(self.data, bytes):
            for start in range(0, len(self.data), _SEND_BYTES):
                yield self.data[start : start + _SEND_BYTES]
            return
        with self.data as file:
            while part := await run_in_threadpool(file.read, _SEND_BYTES):
                yield part


class SnapshotCache:
    """The last few encoded snapshots, shared by all subscribers that arrive while nothing changes:
    a thousand that reconnect at once cost little more than one. For the event loop's thread.
    """

    def __init__(self) -> None:
        self._cache: dict[
            tuple[ViewLocation, RowSelection | None], tuple[int, asyncio.Future[EncodedSnapshot]]
        ] = {}

    async def get(self, location: ViewLocation, select: RowSelection | None) -> EncodedSnapshot:
        """The current rows of a view; those that another subscriber was sent, if nothing has been
        committed since.
        """
        data_version, cached = location.store.data_version(), self._cache.get((location, select))
        if cached is not None and cached[0] == data_version and not _has_failed(cached[1]):
            snapshot = await asyncio.shield(cached[1])
            if isinstance(snapshot.data, bytes):
                return snapshot
            return await run_in_threadpool(encode_snapshot, location, select)
        encoding = asyncio.ensure_future(run_in_threadpool(encode_snapshot, location, select))
        self._cache.pop((location, select), None)
        self._cache[location, select] = data_version, encoding
        while len(self._cache) > _SHARED_SNAPSHOTS:
            del self._cache[next(iter(self._cache))]
        return await asyncio.shield(encoding)


def _has_failed(encoding: asyncio.Future[EncodedSnapshot]) -> bool:
    return encoding.done() and (encoding.cancelled() or encoding.exception() is not None)


def encode_snapshot(location: ViewLocation, select: RowSelection | None) -> EncodedSnapshot:
    """The rows of a view as events, of which only the last has an id. They are not sent while they
    are read, because a slow client must not hold a snapshot of the store open.
    """
    file = tempfile.SpooledTemporaryFile(_SHARED_BYTES)  # noqa: SIM115 - the sender closes it
    pending = "[]"
    with location.store.reader.snapshot() as snap:
        info = snap.view(location.stored_name)
        head = f'"view":{json_quote(location.name)},"tick":{info.tick},"key":{json.dumps(info.key)}'
        for batch in snap.batches(location.stored_name):
            rows = pa.Table.from_batches([batch])
            rows = rows if select is None else select(rows)
            for start in range(0, rows.num_rows, _PART_ROWS):
                if pending != "[]":
                    content = f'{{{head},"last":false,"rows":{pending}}}'
                    file.write(encode_event("snapshot", content))
                pending = rows_json(rows.slice(start, _PART_ROWS))
    content = f'{{{head},"last":true,"rows":{pending}}}'
    file.write(encode_event("snapshot", content, location.event_id(info.tick)))
    is_small = file.tell() <= _SHARED_BYTES
    file.seek(0)
    if not is_small:
        return EncodedSnapshot(info.tick, file)
    with file:
        return EncodedSnapshot(info.tick, file.read())


# Subscriptions to views


_ID = re.compile(r"(?:([A-Za-z0-9._-]{1,200}):)?([0-9]{1,18})")


@dataclass(frozen=True)
class ResumePoint:
    """The last event that a subscriber of a view received."""

    version: str | None
    tick: int


def parse_resume_id(text: str | None) -> ResumePoint | None:
    """The Last-Event-ID of a view's subscriber. InputError if this server never sends such an
    id.
    """
    if not text:
        return None
    match = _ID.fullmatch(text)
    if match is None:
        raise InputError(
            f"The Last-Event-ID {text[:80]!r} is none of this server's.",
            fix="send the id of the last event, such as 57, or none.",
        )
    return ResumePoint(match[1], int(match[2]))


class ViewEventSource:
    """The changes of one view, as the events of a channel."""

    def __init__(self, location: ViewLocation, stores: ViewStores) -> None:
        self.location = location
        self._stores = stores
        self._data_version: int | None = None
        self.info: ViewInfo | None = None

    def start(self) -> int:
        with self.location.store.reader.snapshot() as snap:
            self.info = snap.view(self.location.stored_name)
        return self.info.tick

    def read(self, after: int) -> tuple[int, list[StreamEvent]]:
        if self._stores.locate(self.location.name) != self.location:
            raise SourceReset
        data_version = self.location.store.data_version()
        if data_version == self._data_version:
            return after, []
        try:
            with self.location.store.reader.snapshot() as snap:
                view = snap.view(self.location.stored_name)
                if self.info is not None and view.generation != self.info.generation:
                    raise SourceReset  # it was emptied, or created again
                newest_tick = view.tick
                changes = snap.changes_since(self.location.stored_name, after)
                events = [self._event(tick, rows) for tick, rows in changes]
        except ChangesGone:
            raise SourceReset from None
        self._data_version = data_version
        return newest_tick, events

    def read_missed(self, after: int, up_to: int) -> Iterator[StreamEvent]:
        changes = self.location.store.reader.changes_since(self.location.stored_name, after)
        return (self._event(tick, rows) for tick, rows in changes if tick <= up_to)

    def _event(self, tick: int, rows: pa.Table) -> StreamEvent:
        return StreamEvent(self.id(tick), rows, self.encode(self.id(tick), self.objects(rows)))

    def is_behind(self, position: int, target: int) -> bool:
        return position < target

    def id(self, position: int) -> str:
        return self.location.event_id(position)

    def objects(self, rows: pa.Table) -> list[Any]:
        names = [CHANGE_TYPE, *(name for name in rows.schema.names if name != CHANGE_TYPE)]
        return row_objects(rows.select(names))

    def heartbeat(self, id: str) -> bytes:
        return encode_heartbeat(id)

    def encode(self, id: str, objects: Sequence[Any]) -> bytes:
        tick = id.rpartition(":")[2]
        return encode_event("changes", f'{{"tick":{tick},"changes":[{",".join(objects)}]}}', id)


class Subscription:
    """One subscriber of one view."""

    def __init__(self, stores: ViewStores, hub: Hub, snapshots: SnapshotCache, name: str) -> None:
        self._stores = stores
        self._hub = hub
        self._snapshots = snapshots
        self._name = name
        self.select: RowSelection | None = None

    async def info(self) -> ViewInfo:
        """The description of the view. UnknownView if there is none."""
        source = (await self._channel(self._stores.locate(self._name))).source
        assert isinstance(source, ViewEventSource)
        assert source.info is not None
        return source.info

    async def check(self, resume: ResumePoint | None) -> None:
        """Refuse, before anything is sent, to resume after a tick whose changes are no longer
        retained, or that has not come yet.
        """
        if resume is not None:
            await self._hub.run_in_thread(self._check, resume)

    def _check(self, resume: ResumePoint) -> None:
        location = self._stores.locate(self._name)
        if _is_served(resume, location):
            location.store.reader.changes_since(location.stored_name, resume.tick)

    async def events(self, resume: ResumePoint | None) -> AsyncGenerator[bytes, None]:
        after = (
            resume.tick
            if resume is not None and _is_served(resume, self._stores.locate(self._name))
            else None
        )
        while True:
            try:
                async for data in self._follow(after):
                    yield data
            except (SourceReset, ChangesGone):
                after = None
            except UnknownView:
                return

    async def _follow(self, after: int | None) -> AsyncGenerator[bytes, None]:
        location = self._stores.locate(self._name)
        channel = await self._channel(location)
        with self._hub.subscribed(channel):
            if after is None:
                snapshot = await self._snapshots.get(location, self.select)
                after = snapshot.tick
                async for part in snapshot.parts():
                    yield part
            async for data in self._hub.follow(channel, after, self.select):
                yield data

    async def _channel(self, location: ViewLocation) -> Channel:
        return await self._hub.channel(
            ("view", location), lambda: ViewEventSource(location, self._stores)
        )


def _is_served(resume: ResumePoint, location: ViewLocation) -> bool:
    """Whether a subscriber's last event came from the version that is served now."""
    return resume.version == (None if location.name == location.stored_name else location.version)


# Subscriptions to topics


Offsets = Mapping[int, int]
_PART = re.compile(r"([0-9]{1,9}):([0-9]{1,18})")
_READ_ROWS = 5_000


def parse_offsets_id(text: str | None) -> dict[int, int] | None:
    """The Last-Event-ID of a topic's subscriber. InputError if this server never sends such an
    id.
    """
    if not text:
        return None
    matches = [_PART.fullmatch(part) for part in text.split(",")]
    if not all(matches):
        raise InputError(
            f"The Last-Event-ID {text[:80]!r} is none of this server's.",
            fix="send the id of the last event, such as 0:17,1:20, or none.",
        )
    return {int(match[1]): int(match[2]) for match in matches if match}


class TopicEventSource:
    """The rows of one topic, as the events of a channel."""

    def __init__(self, log: Log, topic: str) -> None:
        self._log = log
        self.topic = topic

    def start(self) -> Offsets:
        return self._log.end_offsets(self.topic)

    def read(self, after: Offsets) -> tuple[Offsets, list[StreamEvent]]:
        """A bounded number of new rows; the next read returns the rest."""
        reached, events = dict(after), []
        for partition, end in self._log.end_offsets(self.topic).items():
            start = reached.get(partition, 0)
            stop = min(end, start + _READ_ROWS)
            if stop > start:
                reached[partition] = stop
                events += self._events(partition, start, stop, reached)
        return reached, events

    def read_missed(self, after: Offsets, up_to: Offsets) -> Iterator[StreamEvent]:
        reached = dict(after)
        for partition, end in up_to.items():
            for start in range(reached.get(partition, 0), end, _READ_ROWS):
                stop = min(end, start + _READ_ROWS)
                reached[partition] = stop
                yield from self._events(partition, start, stop, reached)

    def _events(self, partition: int, start: int, stop: int, reached: Offsets) -> list[StreamEvent]:
        """One event with the rows of one read, or none if there are no rows: control batches take
        offsets too.
        """
        batches = list(self._log.read(self.topic, partition, start, stop))
        if not any(batch.num_rows for batch in batches):
            return []
        rows, location = pa.Table.from_batches(batches), self.id(reached)
        return [StreamEvent(location, rows, self.encode(location, self.objects(rows)))]

    def is_behind(self, position: Offsets, target: Offsets) -> bool:
        return any(position.get(partition, 0) < offset for partition, offset in target.items())

    def id(self, position: Offsets) -> str:
        return ",".join(f"{partition}:{offset}" for partition, offset in sorted(position.items()))

    def objects(self, rows: pa.Table) -> list[str]:
        return row_objects(rows)

    def heartbeat(self, id: str) -> bytes:
        return encode_heartbeat(id)

    def encode(self, id: str, objects: Sequence[str]) -> bytes:
        return encode_event("rows", f'{{"topic":"{self.topic}","rows":[{",".join(objects)}]}}', id)


def tail_start(log: Log, topic: str, resume: Offsets | None, last: int) -> dict[int, int]:
    """The offsets at which a subscriber starts: where it stopped, or `last` rows before the end of
    each partition. OffsetOutOfRange if it stopped at an offset that the topic does not have.
    """
    earliest, end = log.start_offsets(topic), log.end_offsets(topic)
    if resume is None:
        return {partition: max(earliest[partition], stop - last) for partition, stop in end.items()}
    for partition, offset in resume.items():
        if not earliest.get(partition, 0) <= offset <= end.get(partition, -1):
            raise OffsetOutOfRange(
                topic, partition, offset, earliest.get(partition, 0), end.get(partition, 0)
            )
    return {partition: resume.get(partition, earliest[partition]) for partition in end}


async def tail(
    log: Log, hub: Hub, topic: str, after: Offsets, select: RowSelection | None
) -> AsyncGenerator[bytes, None]:
    channel = await hub.channel(("topic", topic), lambda: TopicEventSource(log, topic))
    with hub.subscribed(channel):
        async for data in hub.follow(channel, after, select):
            yield data
