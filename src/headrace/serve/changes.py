"""A view's changes, pushed: its rows first, then one event for each tick that changed it, each tick once and in order.

The id of an event is its tick, with the version in front (`v2:57`) where one is served in place of the pipeline's own view. Who comes back with the last id it got goes on behind
it. If the view itself becomes another (a version is switched, a store rebuilt), its rows come again, as a new snapshot.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

import pyarrow as pa

from headrace.errors import ChangesGone, InputError, UnknownView
from headrace.log.api import CHANGE_TYPE
from headrace.serve.answers import rows_json
from headrace.serve.channels import Channel, Event, Hub, Moved, Select
from headrace.serve.events import event
from headrace.serve.snapshots import Snapshots
from headrace.serve.stores import Place, Stores
from headrace.sinks.view_file import ViewInfo

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
        raise InputError(f"The Last-Event-ID {text[:80]!r} is none of this server's.", fix="send the id of the last event, such as 57, or none.")
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
        """Refuse, before anything is sent, to resume behind a tick that is not kept, or that has not been yet."""
        if resume is not None:
            await self._hub.in_thread(self._check, resume)

    def _check(self, resume: Resume) -> None:
        place = self._stores.place(self._name)
        if _is_same(resume, place):
            place.store.reader.changes_since(place.stored, resume.tick)

    async def events(self, resume: Resume | None) -> AsyncGenerator[bytes, None]:
        after = resume.tick if resume is not None and _is_same(resume, self._stores.place(self._name)) else None
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
