"""A view's changes, pushed: its rows first, then one event for each tick that changed it, each tick
once and in order.

The id of an event is its tick, with the version in front (`v2:57`) where one is served in place of
the pipeline's own view. Who comes back with the last id it got goes on behind it. If the view
itself becomes another (a version is switched, a store rebuilt), its rows come again, as a new
snapshot.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from starlette.concurrency import run_in_threadpool

from headrace.columnar.columns import CHANGE_TYPE, DELETE, INSERT, UPDATE, UPDATE_BEFORE
from headrace.errors import ChangesGone, InputError, OffsetOutOfRange, UnknownColumn, UnknownView
from headrace.log.api import Log
from headrace.serve.channels import Channel, Event, Hub, Moved, Select, event
from headrace.serve.requests import quoted, rows_json, typed
from headrace.serve.stores import Place, Stores
from headrace.types.schema import type_name
from headrace.views.file import ViewInfo

# A view's rows as events: what a subscriber is told first. Written once for all who come while
# nothing changes, so that a thousand who come back at once cost little more than one.


_ROWS_A_PART = 5_000
_SHARED_BYTES = 4 << 20
_SHARED_SNAPSHOTS = 8
_BYTES_A_SEND = 64 << 10


@dataclass(frozen=True)
class Written:
    """A snapshot as it is sent. A large one is in a file, which one subscriber alone reads."""

    tick: int
    data: bytes | IO[bytes]

    async def parts(self) -> AsyncGenerator[bytes, None]:
        if isinstance(self.data, bytes):
            for start in range(0, len(self.data), _BYTES_A_SEND):
                yield self.data[start : start + _BYTES_A_SEND]
            return
        with self.data as file:
            while part := await run_in_threadpool(file.read, _BYTES_A_SEND):
                yield part


class Snapshots:
    """Those written last. Used by the event loop's thread."""

    def __init__(self) -> None:
        self._known: dict[tuple[Place, Select | None], tuple[int, asyncio.Future[Written]]] = {}

    async def get(self, place: Place, select: Select | None) -> Written:
        """The view's rows as they are now, or as someone else has just got them, if nothing has
        been committed since.
        """
        commits, known = place.store.commits(), self._known.get((place, select))
        if known is not None and known[0] == commits and not _has_failed(known[1]):
            written = await asyncio.shield(known[1])
            return (
                written
                if isinstance(written.data, bytes)
                else await run_in_threadpool(write_snapshot, place, select)
            )
        writing = asyncio.ensure_future(run_in_threadpool(write_snapshot, place, select))
        self._known.pop((place, select), None)
        self._known[place, select] = commits, writing
        while len(self._known) > _SHARED_SNAPSHOTS:
            del self._known[next(iter(self._known))]
        return await asyncio.shield(writing)


def _has_failed(writing: asyncio.Future[Written]) -> bool:
    return writing.done() and (writing.cancelled() or writing.exception() is not None)


def write_snapshot(place: Place, select: Select | None) -> Written:
    """A view's rows as events. Not sent as they are read: a client that is slow must not hold on to
    a moment of the store. Only the last part has an id.
    """
    written = tempfile.SpooledTemporaryFile(_SHARED_BYTES)  # noqa: SIM115 - whoever sends it closes it
    waiting = "[]"
    with place.store.reader.snapshot() as snap:
        info = snap.view(place.stored)
        about = f'"view":{quoted(place.name)},"tick":{info.tick},"key":{json.dumps(info.key)}'
        for part in _parts(snap.batches(place.stored), select):
            if waiting != "[]":
                written.write(event("snapshot", f'{{{about},"last":false,"rows":{waiting}}}'))
            waiting = part
    written.write(
        event("snapshot", f'{{{about},"last":true,"rows":{waiting}}}', place.id(info.tick))
    )
    is_small = written.tell() <= _SHARED_BYTES
    written.seek(0)
    if not is_small:
        return Written(info.tick, written)
    with written:
        return Written(info.tick, written.read())


def _parts(batches: Iterator[pa.RecordBatch], select: Select | None) -> Iterator[str]:
    for batch in batches:
        rows = pa.Table.from_batches([batch])
        rows = rows if select is None else select(rows)
        yield from (
            rows_json(rows.slice(start, _ROWS_A_PART))
            for start in range(0, rows.num_rows, _ROWS_A_PART)
        )


_ID = re.compile(r"(?:([A-Za-z0-9._-]{1,200}):)?([0-9]{1,18})")


@dataclass(frozen=True)
class Resume:
    """Where a subscriber stopped."""

    version: str | None
    tick: int


def resume_from(text: str | None) -> Resume | None:
    """What a Last-Event-ID says; InputError if it is none of ours."""
    if not text:
        return None
    found = _ID.fullmatch(text)
    if found is None:
        raise InputError(
            f"The Last-Event-ID {text[:80]!r} is none of this server's.",
            fix="send the id of the last event, such as 57, or none.",
        )
    return Resume(found[1], int(found[2]))


class ViewSource:
    """The changes of one view in its store."""

    def __init__(self, place: Place, stores: Stores) -> None:
        self.place, self._stores = place, stores
        self._commits: int | None = None
        self.info: ViewInfo | None = None

    def start(self) -> int:
        with self.place.store.reader.snapshot() as snap:
            self.info = snap.view(self.place.stored)
        return self.info.tick

    def read(self, after: int) -> tuple[int, list[Event]]:
        if self._stores.place(self.place.name) != self.place:
            raise Moved
        commits = self.place.store.commits()
        if commits == self._commits:
            return after, []
        try:
            with self.place.store.reader.snapshot() as snap:
                tick, changes = (
                    snap.tick(self.place.stored),
                    snap.changes_since(self.place.stored, after),
                )
                events = [self._event(number, rows) for number, rows in changes]
        except ChangesGone:
            raise Moved from None
        self._commits = commits
        return tick, events

    def missed(self, after: int, up_to: int) -> Iterator[Event]:
        changes = self.place.store.reader.changes_since(self.place.stored, after)
        return (self._event(number, rows) for number, rows in changes if number <= up_to)

    def _event(self, tick: int, rows: pa.Table) -> Event:
        return Event(self.id(tick), rows, self.encode(self.id(tick), rows))

    def is_behind(self, position: int, wanted: int) -> bool:
        return position < wanted

    def id(self, position: int) -> str:
        return self.place.id(position)

    def encode(self, id: str, rows: pa.Table) -> bytes:
        names = [CHANGE_TYPE, *(name for name in rows.schema.names if name != CHANGE_TYPE)]
        tick = id.rpartition(":")[2]
        return event("changes", f'{{"tick":{tick},"changes":{rows_json(rows.select(names))}}}', id)


class Subscription:
    """One subscriber of one view."""

    def __init__(self, stores: Stores, hub: Hub, snapshots: Snapshots, name: str) -> None:
        self._stores, self._hub, self._snapshots, self._name = stores, hub, snapshots, name
        self.select: Select | None = None

    async def info(self) -> ViewInfo:
        """What the view is. UnknownView, if there is none."""
        source = (await self._channel(self._stores.place(self._name))).source
        assert isinstance(source, ViewSource)
        assert source.info is not None
        return source.info

    async def check(self, resume: Resume | None) -> None:
        """Refuse, before anything is sent, to resume behind a tick that is not kept, or that has
        not been yet.
        """
        if resume is not None:
            await self._hub.in_thread(self._check, resume)

    def _check(self, resume: Resume) -> None:
        place = self._stores.place(self._name)
        if _is_same(resume, place):
            place.store.reader.changes_since(place.stored, resume.tick)

    async def events(self, resume: Resume | None) -> AsyncGenerator[bytes, None]:
        after = (
            resume.tick
            if resume is not None and _is_same(resume, self._stores.place(self._name))
            else None
        )
        while True:
            try:
                async for data in self._follow(after):
                    yield data
            except (Moved, ChangesGone):
                after = None
            except UnknownView:
                return

    async def _follow(self, after: int | None) -> AsyncGenerator[bytes, None]:
        place = self._stores.place(self._name)
        channel = await self._channel(place)
        with self._hub.followed(channel):
            if after is None:
                written = await self._snapshots.get(place, self.select)
                after = written.tick
                async for part in written.parts():
                    yield part
            async for data in self._hub.follow(channel, after, self.select):
                yield data

    async def _channel(self, place: Place) -> Channel:
        return await self._hub.channel(("view", place), lambda: ViewSource(place, self._stores))


def _is_same(resume: Resume, place: Place) -> bool:
    """Whether it stopped in what is served now."""
    return resume.version == (None if place.name == place.stored else place.version)


# What a subscriber wants of a view's rows and changes: those of one key, or those that meet a
# simple condition such as `amount >= 100 and region = eu`.
#
# A condition is a comparison of a column with a value, or several joined by `and`. Of an update
# that crosses the condition only one half is wanted: the row appears (an insert) or disappears (a
# delete), so that whoever keeps the rows that meet the condition is told exactly what happens to
# them.


Condition = Callable[[pa.Table], pa.ChunkedArray]
_COMPARISON = re.compile(
    r"\s*(?:\"([^\"]+)\"|([^\s<>=!\"]+))\s*(<=|>=|!=|<>|=|<|>)\s*(?:'((?:[^']|'')*)'|(\S+))\s*"
)
_FUNCTIONS = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
MAX_TEXT = 1_000


def selection(
    name: str,
    schema: pa.Schema,
    key: Sequence[str],
    texts: Sequence[str],
    where: str | None,
    *,
    as_changes: bool = True,
) -> Select | None:
    """Of the rows of a view or a topic, those whose key begins with some values and that meet a
    condition. None if everything is wanted.
    """
    conditions = _key_conditions(name, schema, key, texts) if texts else []
    if where is not None:
        conditions += [_comparison(name, schema, part) for part in _condition_parts(where)]
    if not conditions:
        return None
    return Selection(name, tuple(texts), where, as_changes, tuple(conditions))


@dataclass(frozen=True)
class Selection:
    """What someone wants, by the text in which they said it."""

    name: str
    key: tuple[str, ...]
    where: str | None
    as_changes: bool
    conditions: tuple[Condition, ...] = field(compare=False, repr=False)

    def __call__(self, rows: pa.Table) -> pa.Table:
        wanted = self.conditions[0](rows)
        for condition in self.conditions[1:]:
            wanted = pc.and_(wanted, condition(rows))
        if not pc.any(wanted).as_py():
            return rows.slice(0, 0)  # the usual case for those who follow one key
        if not self.as_changes or CHANGE_TYPE not in rows.schema.names:
            return rows.filter(wanted)
        return _crossing(rows, wanted.to_numpy().astype(np.bool_)).filter(wanted)


def _key_conditions(
    name: str, schema: pa.Schema, key: Sequence[str], texts: Sequence[str]
) -> list[Condition]:
    if not key:
        raise InputError(
            f"The view {name!r} is a stream: its rows have no key.", fix="choose rows with where=."
        )
    if len(texts) > len(key):
        raise InputError(
            f"{len(texts)} values came for the key of the view {name!r}, which is"
            f" ({', '.join(key)}).",
            fix="give key= once for each.",
        )
    return [
        _compare(schema.field(column), "=", text) for column, text in zip(key, texts, strict=False)
    ]


def _condition_parts(where: str) -> list[str]:
    """Cut at `and`, but not inside quotes."""
    if len(where) > MAX_TEXT:
        raise InputError(f"The condition has {len(where):,} characters; the most is {MAX_TEXT:,}.")
    return re.split(r"\s+and\s+(?=(?:[^']*'[^']*')*[^']*$)", where, flags=re.IGNORECASE)


def _comparison(of: str, schema: pa.Schema, text: str) -> Condition:
    found = _COMPARISON.fullmatch(text)
    if found is None:
        raise InputError(
            f"{text!r} is no condition.",
            fix=(
                "write COLUMN = VALUE, with =, !=, <, <=, > or >=, joined by `and`; text with"
                " blanks in single quotes."
            ),
        )
    name = found[1] or found[2]
    if name not in schema.names:
        raise UnknownColumn(name, schema.names, where=repr(of))
    return _compare(
        schema.field(name),
        found[3],
        found[4].replace("''", "'") if found[4] is not None else found[5],
    )


def _compare(field: pa.Field, operator: str, text: str) -> Condition:
    if pa.types.is_nested(field.type):
        raise InputError(
            f"The column {field.name!r} is {type_name(field.type)}, which cannot be compared.",
            fix="choose another column.",
        )
    value, compare = typed(text, field), _FUNCTIONS[operator]
    if not value.is_valid:
        return _null(field, operator)
    return lambda rows: pc.fill_null(compare(rows[field.name], value), False)


def _null(field: pa.Field, operator: str) -> Condition:
    """A part of a key can be null, in an outer join's result."""
    if operator == "=":
        return lambda rows: rows[field.name].is_null()
    if operator in {"!=", "<>"}:
        return lambda rows: rows[field.name].is_valid()
    raise InputError(
        f"The column {field.name!r} is compared with null, which has no order.", fix="use = or !=."
    )


def _crossing(rows: pa.Table, wanted: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> pa.Table:
    """An update's halves stand side by side; one whose other half is not wanted becomes an insert
    or a delete.
    """
    kinds = rows[CHANGE_TYPE]
    before, after = (
        pc.equal(kinds, kind).to_numpy().astype(np.bool_) for kind in (UPDATE_BEFORE, UPDATE)
    )
    next_wanted, last_wanted = np.append(wanted[1:], False), np.insert(wanted[:-1], 0, False)
    disappears, appears = pa.array(before & ~next_wanted), pa.array(after & ~last_wanted)
    crossed = pc.if_else(disappears, DELETE, pc.if_else(appears, INSERT, kinds))
    return rows.set_column(rows.schema.get_field_index(CHANGE_TYPE), CHANGE_TYPE, crossed)


# A topic's rows, pushed as they are appended. The id of an event says how far each partition was
# read (`0:17,1:20`), so that one who comes back goes on behind it.


Offsets = Mapping[int, int]
_PART = re.compile(r"([0-9]{1,9}):([0-9]{1,18})")
_ROWS_A_READ = 5_000


def offsets_from(text: str | None) -> dict[int, int] | None:
    """What a Last-Event-ID says; InputError if it is none of ours."""
    if not text:
        return None
    found = [_PART.fullmatch(part) for part in text.split(",")]
    if not all(found):
        raise InputError(
            f"The Last-Event-ID {text[:80]!r} is none of this server's.",
            fix="send the id of the last event, such as 0:17,1:20, or none.",
        )
    return {int(match[1]): int(match[2]) for match in found if match}


class TopicSource:
    """The rows of one topic."""

    def __init__(self, log: Log, topic: str) -> None:
        self._log, self.topic = log, topic

    def start(self) -> Offsets:
        return self._log.end_offsets(self.topic)

    def read(self, after: Offsets) -> tuple[Offsets, list[Event]]:
        """A bounded part of what came; the rest is there at the next look."""
        reached, events = dict(after), []
        for partition, end in self._log.end_offsets(self.topic).items():
            start = reached.get(partition, 0)
            stop = min(end, start + _ROWS_A_READ)
            if stop > start:
                reached[partition] = stop
                events += self._events(partition, start, stop, reached)
        return reached, events

    def missed(self, after: Offsets, up_to: Offsets) -> Iterator[Event]:
        reached = dict(after)
        for partition, end in up_to.items():
            for start in range(reached.get(partition, 0), end, _ROWS_A_READ):
                stop = min(end, start + _ROWS_A_READ)
                reached[partition] = stop
                yield from self._events(partition, start, stop, reached)

    def _events(self, partition: int, start: int, stop: int, reached: Offsets) -> list[Event]:
        """One event for what one read gave, if that is anything: control batches take offsets
        too.
        """
        batches = list(self._log.read(self.topic, partition, start, stop))
        if not any(batch.num_rows for batch in batches):
            return []
        rows, place = pa.Table.from_batches(batches), self.id(reached)
        return [Event(place, rows, self.encode(place, rows))]

    def is_behind(self, position: Offsets, wanted: Offsets) -> bool:
        return any(position.get(partition, 0) < offset for partition, offset in wanted.items())

    def id(self, position: Offsets) -> str:
        return ",".join(f"{partition}:{offset}" for partition, offset in sorted(position.items()))

    def encode(self, id: str, rows: pa.Table) -> bytes:
        return event("rows", f'{{"topic":"{self.topic}","rows":{rows_json(rows)}}}', id)


def start_of(log: Log, topic: str, resume: Offsets | None, last: int) -> dict[int, int]:
    """Where to begin: behind what was got, or so many rows back in each partition. What is not
    there any more, or not yet, is refused.
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
    log: Log, hub: Hub, topic: str, after: Offsets, select: Select | None
) -> AsyncGenerator[bytes, None]:
    channel = await hub.channel(("topic", topic), lambda: TopicSource(log, topic))
    with hub.followed(channel):
        async for data in hub.follow(channel, after, select):
            yield data
