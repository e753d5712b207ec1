"""The event store: entities' events on one topic of the embedded log. Who builds on it: deciders,
projections, the `eventsourcing` library's module.

An append is decided under the log's lock, against the version that the entity has then, and is one
commit of the log: durable with one sync, all or nothing, also over several entities. The topic has
one partition, so an event's offset is its place in the global order: offsets are given out and
become visible in the same order, without gaps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, cast

from headrace.durations import to_time_us, to_us
from headrace.errors import BadEvent, EventIdConflict, InputError, NotSupported, VersionConflict
from headrace.events import event as event_module
from headrace.events.event import (
    ANY,
    ARROW,
    SCHEMA,
    Appended,
    Change,
    Draft,
    Entry,
    Event,
    Recorded,
    batch,
    entry,
    recorded,
    recorded_rows,
)
from headrace.events.index import Indexed, Look, indexed
from headrace.log.api import Closeable, Log
from headrace.log.file.commit_draft import PreparedRows, StaleTopic
from headrace.log.file.segment import encode_rows
from headrace.log.values import AppendResult, Duration, OffsetRange

if TYPE_CHECKING:
    from headrace.log.file.commit_draft import CommitDraft
    from headrace.log.file.log import FileLog
    from headrace.log.file.state import TopicState


_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.002, 0.05
Drafted = Sequence[tuple[str, int, Sequence[Draft]]]
"""(entity, expected version, events) of each entity in an append."""


def open_store(log: Log, name: str) -> EventStore:
    """The event store of that name in a log; made if it is not there yet. Its topic has the same
    name.
    """
    return EventStore(log, name)


def check_log(log: Log) -> None:
    """NotSupported for a log that cannot keep what a store promises."""
    if not hasattr(log, "committer"):
        raise NotSupported(
            f"The log {log.address} cannot keep an event store: Kafka appends whatever it is sent,"
            " and cannot refuse an append because an entity has another version by now. So it can"
            " promise neither expected versions nor gap-free versions nor one append of each"
            " event id.",
            fix=(
                "keep the events in an embedded log (file:PATH); what is needed on Kafka can be"
                " copied there, see docs/concepts/event-sourcing.md."
            ),
        )


class EventStore(Closeable):
    """Safe for threads, and for any number of processes with the same log."""

    def __init__(self, log: Log, name: str) -> None:
        check_log(log)
        self.log = cast("FileLog", log)
        self.name = self.topic = name
        if name not in log.topics():
            log.create_topic(name, SCHEMA, key="entity", partitions=1, exist_ok=True)
        self._check_topic()
        self._indexed: Indexed = indexed(self.log, name)
        self.topic_state: TopicState = self.log.topic_state(name)
        """As it was when it was last looked at: whether it is still so is checked in each
        commit.
        """
        self._closed = False

    def _check_topic(self) -> None:
        info = self.log.topic(self.topic)
        if (
            info.partitions != 1
            or info.is_table
            or not info.arrow_schema.equals(ARROW)
            or info.compact
            or info.retention_us
            or info.retention_bytes
        ):
            raise InputError(
                f"The topic {self.topic!r} is not one of events: they have one partition, the"
                f" columns {SCHEMA}, and no retention.",
                fix="give the event store another name.",
            )

    # Writing

    def append(
        self, entity: str, events: Event | Iterable[Event], *, expected: int = ANY
    ) -> Appended:
        """Store events behind an entity's others; VersionConflict if it is not at the expected
        version. Durable when this returns.
        """
        return self.commit(
            [Change(entity, [events] if isinstance(events, Event) else list(events), expected)]
        )

    def commit(self, changes: Iterable[Change]) -> Appended:
        """Events of several entities, all or none."""
        drafted = [
            (
                event_module.check_entity(change.entity),
                event_module.check_expected(change.expected, change.entity),
                [event_module.draft(event, change.entity) for event in change.events],
            )
            for change in changes
        ]
        return self.commit_drafted(drafted)

    def commit_drafted(self, drafted: Drafted) -> Appended:
        _check(drafted)
        if not any(events for _, _, events in drafted):
            return self._nothing(drafted, self._indexed.refresh())
        if not self._indexed.is_near() or any(expected == ANY for _, expected, _ in drafted):
            self._indexed.refresh()
        writing = _Writing(self, drafted)
        answer = writing.commit()
        self._indexed.flush_if_due()
        return answer

    def _nothing(self, drafted: Drafted, end: int) -> Appended:
        with self._indexed.look(end=end) as look:
            heads = {entity: look.head(entity) for entity, _, _ in drafted}
        _check_versions(drafted, heads)
        return Appended(self.position(end), heads, range(end, end))

    # Reading

    def load(self, entity: str, *, after: int = 0, upto: int | None = None) -> list[Recorded]:
        """An entity's events in order, behind one version and up to another. Costs what they cost,
        however many others there are.
        """
        event_module.check_entity(entity)
        end = self._indexed.refresh()
        with self._indexed.look(end=end) as look:
            texts = look.texts(entity, after, upto)
        return recorded(entity, texts)

    def version(self, entity: str) -> int:
        """An entity's newest version; 0 if it has no events."""
        event_module.check_entity(entity)
        return self._indexed.newest(entity, end=self._indexed.refresh()) or 0

    def version_at(self, entity: str, at: datetime | str | float) -> int:
        """The version that an entity had at a time."""
        time_us = to_time_us(at)
        found = [event.version for event in self.load(entity) if event.time_us <= time_us]
        return found[-1] if found else 0

    def entities(self, prefix: str = "") -> list[tuple[str, int]]:
        """Each entity with its version, in order of name."""
        end = self._indexed.refresh()
        with self._indexed.look(end=end) as look:
            return look.entities(prefix)

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[Recorded]:
        """All entities' events in the global order, from one offset up to another (the end as of
        now).
        """
        for rows in self.log.read(self.topic, 0, start, stop):
            yield from recorded_rows(rows)

    def follow(self, start: int = 0, *, idle: Duration | None = None) -> Iterator[Recorded]:
        """The same, and then those that come; ends when none came for `idle`, if that is given. No
        event is left out, doubled or shown before it is durable.
        """
        idle_s = None if idle is None else to_us(idle, what="idle") / 1e6
        wait_s, since = _SHORTEST_WAIT_S, time.monotonic()
        while True:
            end = self.end()
            if end > start:
                yield from self.read(start, end)
                start, wait_s, since = end, _SHORTEST_WAIT_S, time.monotonic()
                continue
            if idle_s is not None and time.monotonic() - since >= idle_s:
                return
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def end(self) -> int:
        """The offset that the next event will have."""
        return self.log.end_offsets(self.topic)[0]

    def position(self, end: int | None = None) -> AppendResult:
        """Everything up to now (or an offset), as a position to wait for."""
        stop = self.end() if end is None else end
        return AppendResult({self.topic: {0: OffsetRange(stop, stop)}})

    def look_again(self) -> None:
        """The topic changed, or events were excised."""
        self._indexed.refresh()
        self.topic_state = self.log.topic_state(self.topic)

    @property
    def by_entity(self) -> Indexed:
        """For what builds on the store: its index."""
        return self._indexed

    def close(self) -> None:
        """The log stays open; the index is left so that the next process finds it complete."""
        if not self._closed:
            self._closed = True
            self._indexed.close()


def prepared(topic: TopicState, rows: Sequence[tuple[str, int, Draft]]) -> PreparedRows:
    """Rows of (entity, version, event) as the log stores them."""
    frames = list(encode_rows(batch(rows), compression=topic.info.compression))
    return PreparedRows(
        topic.name, topic.directory, topic.settings["ddl"], len(topic.partitions), {0: frames}
    )


class _Writing:
    """One append on its way. Rows are prepared outside the lock, for the versions that are most
    likely; under it they are prepared again if that was wrong.
    """

    def __init__(self, store: EventStore, drafted: Drafted) -> None:
        self.log, self.topic, self._indexed = store.log, store.topic, store.by_entity
        self._store, self.drafted = store, drafted
        self._heads = self._guess()
        self._rows = self._prepare()

    def _guess(self) -> dict[str, int]:
        return {
            entity: expected if expected != ANY else self._indexed.newest(entity) or 0
            for entity, expected, _ in self.drafted
        }

    def _prepare(self) -> PreparedRows:
        return prepared(
            self._store.topic_state,
            [
                (entity, self._heads[entity] + 1 + at, event)
                for entity, _, events in self.drafted
                for at, event in enumerate(events)
            ],
        )

    def commit(self) -> Appended:
        while True:
            try:
                return self.log.committer.submit(self._decide, size=self._rows.size)
            except StaleTopic:
                self._store.look_again()
                self._rows = self._prepare()

    def _decide(self, draft: CommitDraft) -> Appended:
        """Under the log's lock. The steps:

        1. know everything that was drafted before
        2. if all of it is stored already, by event id, say where
        3. refuse other versions than expected
        4. append, and let the next one know
        """
        draft.check_fresh(self._rows)
        self._indexed.catch_up(draft)  # 1
        if any(event.id is not None for _, _, events in self.drafted for event in events):
            with self._indexed.look() as look:
                repeated = self._repeated(look)  # 2
            if repeated is not None:
                return repeated
        heads = {entity: self._indexed.newest(entity) or 0 for entity, _, _ in self.drafted}
        _check_versions(self.drafted, heads)  # 3
        if heads != self._heads:
            self._heads = heads
            self._rows = self._prepare()
        draft.append(self._rows)  # 4
        place = draft.offsets[self.topic][0]
        self._indexed.add(self._entries(place.start, draft.time_us))
        versions = {entity: heads[entity] + len(events) for entity, _, events in self.drafted}
        return Appended(draft.result(), versions, range(place.start, place.stop))

    def _entries(self, offset: int, time_us: int) -> list[Entry]:
        found: list[Entry] = []
        for entity, _, events in self.drafted:
            for at, event in enumerate(events):
                found.append(
                    entry(entity, self._heads[entity] + 1 + at, event, offset + len(found), time_us)
                )
        return found

    def _repeated(self, look: Look) -> Appended | None:
        """Where this append went when it came first. Refuses ids that stand for something else."""
        ids = [
            (entity, event)
            for entity, _, events in self.drafted
            for event in events
            if event.id is not None
        ]
        places = [look.place_of(event.id) for _, event in ids if event.id is not None]
        known = [place for place in places if place is not None]
        if not known:
            return None
        total = sum(len(events) for _, _, events in self.drafted)
        for (entity, event), place in zip(ids, places, strict=True):
            _check_same(look, entity, event, place)
        if len(known) < total:
            raise EventIdConflict(
                f"Of {total} events for {', '.join(repr(name) for name, _, _ in self.drafted)},"
                f" {len(known)} are stored already, by their ids.",
                fix="repeat an append as it was; nothing was stored.",
            )
        versions = {
            entity: max(version for name, version, _ in known if name == entity)
            for entity, _, _ in self.drafted
        }
        offsets = [offset for _, _, offset in known]
        span = range(min(offsets), max(offsets) + 1)
        return Appended(
            AppendResult({self.topic: {0: OffsetRange(span.start, span.stop)}}, duplicate=True),
            versions,
            span,
            duplicate=True,
        )


def _check(drafted: Drafted) -> None:
    names = [entity for entity, _, _ in drafted]
    if len(set(names)) < len(names):
        raise BadEvent("One append has an entity twice.", fix="put its events together.")
    ids = [event.id for _, _, events in drafted for event in events if event.id is not None]
    if len(set(ids)) < len(ids):
        raise BadEvent("One append has an event id twice.", fix="give each event an id of its own.")
    if sum(len(events) for _, _, events in drafted) > event_module.MAX_EVENTS_AN_APPEND:
        raise BadEvent(
            f"One append has more than {event_module.MAX_EVENTS_AN_APPEND:,} events.",
            fix="append them in parts.",
        )


def _check_versions(drafted: Drafted, heads: Mapping[str, int]) -> None:
    for entity, expected, _ in drafted:
        if expected not in {ANY, heads[entity]}:
            raise VersionConflict(entity, expected, heads[entity])


def _check_same(look: Look, entity: str, event: Draft, place: tuple[str, int, int] | None) -> None:
    if place is None:
        return
    there, version, _ = place
    (stored,) = (
        recorded(there, look.texts(there, version - 1, version)) if there == entity else (None,)
    )
    (meant,) = recorded(entity, [entry(entity, version, event, 0, 0).text])
    if stored is None or (stored.type, stored.type_version, stored.data) != (
        meant.type,
        meant.type_version,
        meant.data,
    ):
        raise EventIdConflict(
            f"The event id {event.id!r} is that of version {version} of {there!r}, which is another"
            " event.",
            fix="give each event an id of its own; nothing was stored.",
        )
