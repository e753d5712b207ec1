"""A view's changes, pushed: its rows first, then one event for each tick that changed it, each tick once and in order.

The id of an event is its tick, with the version in front (`v2:57`) where one is served in place of the pipeline's own view. Who comes back with the last id it got goes on behind
it. If the view itself becomes another (a version is switched, a store rebuilt), its rows come again, as a new snapshot.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import IO

import pyarrow as pa
from starlette.concurrency import run_in_threadpool

from headrace.errors import ChangesGone, InputError, UnknownView
from headrace.log.api import CHANGE_TYPE
from headrace.serve.answers import quoted, rows_json
from headrace.serve.channels import Event, Hub, Moved, Select
from headrace.serve.events import event
from headrace.serve.stores import Place, Stores

_ID = re.compile(r"(?:([A-Za-z0-9._-]{1,200}):)?([0-9]{1,18})")
_ROWS_A_PART = 5_000
_IN_MEMORY_BYTES = 4 << 20
_BYTES_A_SEND = 64 << 10


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
        raise InputError(f"The Last-Event-ID {text[:80]!r} is none of this server's.", fix="send the id of the last event, such as 57, or none.")
    return Resume(found[1], int(found[2]))


def id_of(place: Place, tick: int) -> str:
    return str(tick) if place.version is None or place.name == place.stored else f"{place.version}:{tick}"


class ViewSource:
    """The changes of one view in its store."""

    def __init__(self, place: Place, stores: Stores) -> None:
        self.place, self._stores = place, stores
        self._commits: int | None = None

    def start(self) -> int:
        return self.place.store.reader.tick(self.place.stored)

    def read(self, after: int) -> tuple[int, list[Event]]:
        if self._stores.place(self.place.name) != self.place:
            raise Moved
        commits = self.place.store.commits()
        if commits == self._commits:
            return after, []
        try:
            with self.place.store.reader.snapshot() as snap:
                tick, changes = snap.tick(self.place.stored), snap.changes_since(self.place.stored, after)
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
        return id_of(self.place, position)

    def encode(self, id: str, rows: pa.Table) -> bytes:
        names = [CHANGE_TYPE, *(name for name in rows.schema.names if name != CHANGE_TYPE)]
        tick = id.rpartition(":")[2]
        return event("changes", f'{{"tick":{tick},"changes":{rows_json(rows.select(names))}}}', id)


class Subscription:
    """One subscriber of one view."""

    def __init__(self, stores: Stores, hub: Hub, name: str, select: Select | None) -> None:
        self.stores, self.hub, self.name, self.select = stores, hub, name, select

    def check(self, resume: Resume | None) -> Place:
        """Refuse what can be refused before anything is sent: an unknown view, a tick that is not kept, or that has not been yet."""
        place = self.stores.place(self.name)
        with place.store.reader.snapshot() as snap:
            info = snap.view(place.stored)
            if resume is not None and _is_same(resume, place):
                snap.changes_since(info.name, resume.tick)
        return place

    async def events(self, resume: Resume | None) -> AsyncGenerator[bytes, None]:
        after = resume.tick if resume is not None and _is_same(resume, self.stores.place(self.name)) else None
        while True:
            try:
                async for data in self._follow(after):
                    yield data
            except (Moved, ChangesGone):
                after = None
            except UnknownView:
                return

    async def _follow(self, after: int | None) -> AsyncGenerator[bytes, None]:
        place = self.stores.place(self.name)
        channel = await self.hub.channel(("view", place), lambda: ViewSource(place, self.stores))
        with self.hub.followed(channel):
            if after is None:
                after, written = await run_in_threadpool(write_snapshot, place, self.select)
                with written:
                    while part := await run_in_threadpool(written.read, _BYTES_A_SEND):
                        yield part
            async for data in self.hub.follow(channel, after, self.select):
                yield data


def _is_same(resume: Resume, place: Place) -> bool:
    """Whether it stopped in what is served now."""
    return resume.version == (None if place.name == place.stored else place.version)


def write_snapshot(place: Place, select: Select | None) -> tuple[int, IO[bytes]]:
    """A view's rows as events, in a file: a client that reads slowly must not hold on to a moment of the store. Only the last part has an id."""
    written = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115 - whoever sends it closes it
    waiting = "[]"
    with place.store.reader.snapshot() as snap:
        info = snap.view(place.stored)
        about = f'"view":{quoted(place.name)},"tick":{info.tick},"key":{json.dumps(info.key)}'
        for part in _parts(snap.batches(place.stored), select):
            if waiting != "[]":
                written.write(event("snapshot", f'{{{about},"last":false,"rows":{waiting}}}'))
            waiting = part
    written.write(event("snapshot", f'{{{about},"last":true,"rows":{waiting}}}', id_of(place, info.tick)))
    written.seek(0)
    return info.tick, written


def _parts(batches: Iterator[pa.RecordBatch], select: Select | None) -> Iterator[str]:
    for batch in batches:
        rows = pa.Table.from_batches([batch])
        rows = rows if select is None else select(rows)
        yield from (rows_json(rows.slice(start, _ROWS_A_PART)) for start in range(0, rows.num_rows, _ROWS_A_PART))
