"""The event store: the events of entities, on one topic of the embedded log. Deciders, projections
and the module for the `eventsourcing` library use it.

An append is decided under the log's lock, against the version that the entity has then, and is one
commit of the log: durable with one sync, all or nothing, also over several entities. The topic has
one partition, so an event's offset is its position in the global order: offsets are assigned and
become visible in the same order, without gaps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Literal, cast

from headrace.durations import to_time_us, to_us
from headrace.errors import BadEvent, EventIdConflict, InputError, NotSupported, VersionConflict
from headrace.events import event as event_module
from headrace.events.event import (
    ANY,
    EXISTS,
    METADATA_SCHEMA,
    SCHEMA,
    Change,
    Draft,
    Entry,
    Event,
    EventAppendResult,
    RecordedEvent,
    batch,
    entry,
    events_from_rows,
    is_event_schema,
    parse_events,
)
from headrace.events.index import EventIndex, IndexView, event_index
from headrace.events.subscription import EventFilter, EventSubscription
from headrace.log.api import Closeable, Log
from headrace.log.file.commit_draft import PreparedRows, StaleTopic
from headrace.log.file.segment import encode_rows
from headrace.log.values import AppendResult, Duration, OffsetRange
from headrace.retry import Backoff

if TYPE_CHECKING:
    from headrace.log.file.commit_draft import CommitDraft
    from headrace.log.file.log import FileLog
    from headrace.log.file.state import TopicState


_POLL_BACKOFF = Backoff(first_s=0.002, longest_s=0.05, jitter=0.0)
_BACKWARDS_OFFSETS = 1_000
"""How many offsets are read at a time, from the end on."""
Drafted = Sequence[tuple[str, int, Sequence[Draft]]]
"""(entity, expected version, events) of each entity in an append."""


def open_store(log: Log, name: str) -> EventStore:
    """Open an event store, and create it if it does not exist.

    Args:
        log: An embedded log.
        name: Of the store, and of its topic.

    Returns:
        The store. Close it when it is not needed any more; the log stays open.

    Raises:
        NotSupported: The log is on Kafka.
        InputError: There is a topic of that name that is not an event store.

    Example:
        >>> accounts = hr.events.open_store(log, "accounts")

    """
    check_log(log)
    if name not in log.topics():
        log.create_topic(name, SCHEMA, key="entity", partitions=1, exist_ok=True)
    info = log.topic(name)
    if (
        info.partitions != 1
        or info.is_table
        or not is_event_schema(info.arrow_schema)
        or info.compact
        or info.retention_us
        or info.retention_bytes
    ):
        raise InputError(
            f"The topic {name!r} is not an event store: that has one partition, the columns"
            f" {SCHEMA}, and no retention.",
            fix="give the event store another name.",
        )
    file_log = cast("FileLog", log)
    return EventStore(file_log, name, event_index(file_log, name), file_log.topic_state(name))


def check_log(log: Log) -> None:
    """Raise NotSupported for a log that cannot keep a store's promises."""
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
    """The events of entities. It is safe for threads, and for any number of processes."""

    def __init__(self, log: FileLog, name: str, index: EventIndex, topic_state: TopicState) -> None:
        self.log = log
        self.name = self.topic = name
        self._index = index
        self.topic_state = topic_state
        """The topic as it was last read. Each commit checks whether it is still so."""
        self._closed = False

    # Writing

    def append(
        self, entity: str, events: Event | Iterable[Event], *, expected: int = ANY
    ) -> EventAppendResult:
        """Append events to an entity. They are durable when this returns.

        Args:
            entity: The entity's name.
            events: One event, or several, which are stored together.
            expected: The version that the entity must have: the one that was loaded, `NEW` for an
                entity without events, `EXISTS` for one with events, or `ANY`.

        Returns:
            Where the events are, and the entity's new version.

        Raises:
            VersionConflict: The entity has another version.
            EventIdConflict: An event id was used before, for another event.
            BadEvent: An event cannot be stored.

        Example:
            >>> store.append("account-17", Event("Opened", {"owner": "ada"}), expected=NEW)

        """
        return self.commit(
            [Change(entity, [events] if isinstance(events, Event) else list(events), expected)]
        )

    def commit(
        self, changes: Iterable[Change], *, subscription: EventSubscription | None = None
    ) -> EventAppendResult:
        """Append events of several entities, all or none. See `append`.

        Args:
            changes: The events of each entity, with the version it must have.
            subscription: Its position is stored in the same commit, so that events made from
                others' are stored once however often their reader is killed.

        Raises:
            SubscriptionFenced: Another process has moved the subscription's position.

        """
        drafted = [
            (
                event_module.check_entity(change.entity),
                event_module.check_expected(change.expected, change.entity),
                [event_module.draft(event, change.entity) for event in change.events],
            )
            for change in changes
        ]
        return self.commit_drafted(drafted, subscription)

    def commit_drafted(
        self, drafted: Drafted, subscription: EventSubscription | None = None
    ) -> EventAppendResult:
        """Internal: append prepared events of several entities in one commit."""
        _check(drafted)
        if not any(events for _, _, events in drafted):
            if subscription is not None:
                subscription.commit()
            return self._nothing(drafted, self._index.refresh())
        if not self._index.is_near() or any(expected < 0 for _, expected, _ in drafted):
            self._index.refresh()
        if "metadata" not in self.topic_state.info.arrow_schema.names and any(
            event.has_metadata for _, _, events in drafted for event in events
        ):
            self._add_metadata_columns()
        writing = _PendingAppend(self, drafted, subscription)
        answer = writing.commit()
        self._index.flush_if_due()
        return answer

    def _add_metadata_columns(self) -> None:
        """A store of an earlier Headrace gets the columns for metadata when they are needed."""
        if "metadata" not in self.log.topic(self.topic).arrow_schema.names:
            self.log.alter_topic(self.topic, add_columns=METADATA_SCHEMA)
        self.reload()

    def _nothing(self, drafted: Drafted, end: int) -> EventAppendResult:
        with self._index.look(end=end) as look:
            heads = {entity: look.head(entity) for entity, _, _ in drafted}
        _check_versions(drafted, heads)
        return EventAppendResult(self.position(end), heads, range(end, end))

    # Reading

    def load(
        self,
        entity: str,
        *,
        after: int = 0,
        upto: int | None = None,
        backwards: bool = False,
        limit: int | None = None,
    ) -> list[RecordedEvent]:
        """Return an entity's events in order, after one version and up to another. The cost depends
        on the entity's own events only, and with a limit on those that are returned.

        Args:
            entity: The entity's name.
            after: The version after which to begin.
            upto: The last version; by default the newest.
            backwards: Whether the newest come first.
            limit: Return at most so many; by default all.

        Example:
            >>> for event in store.load("account-17"):
            ...     print(event.version, event.type)
            1 Opened
            2 Deposited

        """
        event_module.check_entity(entity)
        end = self._index.refresh()
        with self._index.look(end=end) as look:
            texts = look.texts(entity, after, upto, backwards=backwards, limit=_limit(limit))
        return parse_events(entity, texts)

    def version(self, entity: str) -> int:
        """Return an entity's newest version; 0 if it has no events."""
        event_module.check_entity(entity)
        return self._index.newest(entity, end=self._index.refresh()) or 0

    def version_at(self, entity: str, at: datetime | str | float) -> int:
        """Return the version that an entity had at a time. InputError if its events of then were
        truncated.
        """
        time_us = to_time_us(at)
        events = self.load(entity)
        versions = [event.version for event in events if event.time_us <= time_us]
        if not versions and events and events[0].version > 1:
            raise removed_before(entity, events[0].version, f"{at}")
        return versions[-1] if versions else 0

    def entities(self, prefix: str = "") -> list[tuple[str, int]]:
        """Return each entity with its version, in order of name."""
        end = self._index.refresh()
        with self._index.look(end=end) as look:
            return look.entities(prefix)

    def read(
        self,
        start: int | str = 0,
        stop: int | None = None,
        *,
        backwards: bool = False,
        limit: int | None = None,
    ) -> Iterator[RecordedEvent]:
        """Yield events in their order: of all entities, or of one.

        Args:
            start: The offset at which to begin, for all entities' events in the global order; or
                the name of an entity, for its events.
            stop: The offset, or the version, before which to end; by default the current end.
            backwards: Whether the newest come first.
            limit: Yield at most so many; by default all.

        Example:
            >>> newest = next(store.read("account-17", backwards=True, limit=1))

        """
        if isinstance(start, str):
            upto = None if stop is None else stop - 1
            yield from self.load(start, upto=upto, backwards=backwards, limit=limit)
            return
        batches = self._backwards(start, stop) if backwards else self._forwards(start, stop)
        yield from islice(batches, _limit(limit))

    def _forwards(self, start: int, stop: int | None) -> Iterator[RecordedEvent]:
        for rows in self.log.read(self.topic, 0, start, stop):
            yield from events_from_rows(rows)

    def _backwards(self, start: int, stop: int | None) -> Iterator[RecordedEvent]:
        at = self.end() if stop is None else min(stop, self.end())
        while at > start:
            first = max(start, at - _BACKWARDS_OFFSETS)
            yield from reversed(list(self._forwards(first, at)))
            at = first

    def follow(self, start: int = 0, *, idle: Duration | None = None) -> Iterator[RecordedEvent]:
        """Yield all entities' events in the global order, and wait for new ones. Ends when none
        came for `idle`, if that is given. No event is left out, repeated, or seen before it is
        durable.
        """
        idle_s = None if idle is None else to_us(idle, what="idle") / 1e6
        empty_polls = 0
        last_event_s = time.monotonic()
        while True:
            end = self.end()
            if end > start:
                yield from self.read(start, end)
                start = end
                empty_polls = 0
                last_event_s = time.monotonic()
                continue
            if idle_s is not None and time.monotonic() - last_event_s >= idle_s:
                return
            empty_polls += 1
            time.sleep(_POLL_BACKOFF.pause_s(empty_polls))

    def subscribe(
        self,
        name: str,
        *,
        start: int | Literal["beginning", "now"] = "beginning",
        category: str | None = None,
        entity: str | None = None,
        types: Iterable[str] = (),
    ) -> EventSubscription:
        """Open a subscription: it yields all events that fit, stored and new, and keeps its
        position in the log under a name.

        Args:
            name: Of the subscription; whoever opens it again goes on at its stored position.
            start: Where a new one begins: with the first event, with those to come, or at an
                offset.
            category: Only entities whose name begins with it and a hyphen.
            entity: Only this entity.
            types: Only these types of events.

        Returns:
            The subscription.

        Example:
            >>> subscription = store.subscribe("mailer", category="account")
            >>> for event in subscription.poll(timeout="1 second"):
            ...     send_mail(event)
            >>> subscription.commit()

        """
        return EventSubscription.open(
            self,
            name,
            start=start,
            event_filter=EventFilter(category=category, entity=entity, types=frozenset(types)),
        )

    def end(self) -> int:
        """Return the offset that the next event will have."""
        return self.log.end_offsets(self.topic)[0]

    def position(self, end: int | None = None) -> AppendResult:
        """Return a position after all events up to now, or up to an offset, to wait for in a
        view.
        """
        stop = self.end() if end is None else end
        return AppendResult({self.topic: {0: OffsetRange(stop, stop)}})

    def reload(self) -> None:
        """Read the topic again, after it was changed or events were excised."""
        self._index.refresh()
        self.topic_state = self.log.topic_state(self.topic)

    @property
    def by_entity(self) -> EventIndex:
        """The index, for what builds on the store."""
        return self._index

    def close(self) -> None:
        """Close the store. The index is written first; the log stays open."""
        if not self._closed:
            self._closed = True
            self._index.close()


def removed_before(entity: str, first_version: int, wanted: str) -> InputError:
    """The error for a state as of before an entity's first event that is left."""
    return InputError(
        f"The state of {entity!r} as of {wanted} is not known: its events before version"
        f" {first_version} were removed.",
        fix=f"ask for version {first_version} or a later one.",
    )


def _limit(limit: int | None) -> int | None:
    if limit is not None and limit < 0:
        raise InputError(f"The limit of events is {limit}.", fix="give 0 or more.")
    return limit


def prepare_rows(topic: TopicState, rows: Sequence[tuple[str, int, Draft]]) -> PreparedRows:
    """Encode rows of (entity, version, event) as the log stores them."""
    stored = batch(rows, topic.info.arrow_schema)
    frames = list(encode_rows(stored, compression=topic.info.compression))
    return PreparedRows(
        topic.name, topic.directory, topic.settings["ddl"], len(topic.partitions), {0: frames}
    )


class _PendingAppend:
    """An append before its commit. Rows are encoded before the log's lock is taken, for the
    versions that are likely; under the lock they are encoded again if those are wrong.
    """

    def __init__(
        self, store: EventStore, drafted: Drafted, subscription: EventSubscription | None
    ) -> None:
        self._subscription = subscription
        self.log, self.topic, self._index = store.log, store.topic, store.by_entity
        self._store, self.drafted = store, drafted
        self._heads = self._guess()
        self._rows = self._prepare()

    def _guess(self) -> dict[str, int]:
        return {
            entity: expected if expected >= 0 else self._index.newest(entity) or 0
            for entity, expected, _ in self.drafted
        }

    def _prepare(self) -> PreparedRows:
        return prepare_rows(
            self._store.topic_state,
            [
                (entity, self._heads[entity] + 1 + at, event)
                for entity, _, events in self.drafted
                for at, event in enumerate(events)
            ],
        )

    def commit(self) -> EventAppendResult:
        while True:
            try:
                result = self.log.committer.submit(self._decide, size=self._rows.size)
                if self._subscription is not None:
                    self._subscription.was_stored()
                return result
            except StaleTopic:
                self._store.reload()
                self._rows = self._prepare()

    def _decide(self, draft: CommitDraft) -> EventAppendResult:
        """Decide under the log's lock.

        1. Add everything to the index that was drafted before.
        2. If all events are stored already, by their ids, return where.
        3. Refuse versions other than the expected ones.
        4. Append, and add the events to the index for the next decision.
        """
        draft.check_fresh(self._rows)
        self._index.catch_up(draft)  # 1
        if self._subscription is not None:
            self._subscription.check(draft)
        if any(event.id is not None for _, _, events in self.drafted for event in events):
            with self._index.look() as look:
                repeated = self._repeated(look)  # 2
            if repeated is not None:
                if self._subscription is not None:
                    self._subscription.store_in(draft)
                return repeated
        heads = {entity: self._index.newest(entity) or 0 for entity, _, _ in self.drafted}
        _check_versions(self.drafted, heads)  # 3
        if heads != self._heads:
            self._heads = heads
            self._rows = self._prepare()
        draft.append(self._rows)  # 4
        if self._subscription is not None:
            self._subscription.store_in(draft)
        place = draft.offsets[self.topic][0]
        self._index.add(self._entries(place.start, draft.time_us))
        versions = {entity: heads[entity] + len(events) for entity, _, events in self.drafted}
        return EventAppendResult(draft.result(), versions, range(place.start, place.stop))

    def _entries(self, offset: int, time_us: int) -> list[Entry]:
        found: list[Entry] = []
        for entity, _, events in self.drafted:
            for at, event in enumerate(events):
                found.append(
                    entry(entity, self._heads[entity] + 1 + at, event, offset + len(found), time_us)
                )
        return found

    def _repeated(self, look: IndexView) -> EventAppendResult | None:
        """Return where this append was stored when it came first; None if it is new. Raises
        EventIdConflict if an id belongs to another event.
        """
        ids = [
            (entity, event)
            for entity, _, events in self.drafted
            for event in events
            if event.id is not None
        ]
        places = [look.locate(event.id) for _, event in ids if event.id is not None]
        known = [place for place in places if place is not None]
        if not known:
            return None
        total = sum(len(events) for _, _, events in self.drafted)
        for (entity, event), place in zip(ids, places, strict=True):
            _check_same_event(look, entity, event, place)
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
        return EventAppendResult(
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
        fits = expected in {ANY, heads[entity]} or (expected == EXISTS and heads[entity] > 0)
        if not fits:
            raise VersionConflict(entity, expected, heads[entity])


def _check_same_event(
    look: IndexView, entity: str, event: Draft, place: tuple[str, int, int] | None
) -> None:
    if place is None:
        return
    there, version, _ = place
    (stored,) = (
        parse_events(there, look.texts(there, version - 1, version)) if there == entity else (None,)
    )
    (meant,) = parse_events(entity, [entry(entity, version, event, 0, 0).text])
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
