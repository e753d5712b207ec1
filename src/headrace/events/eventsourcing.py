"""A persistence module for the `eventsourcing` library: set
PERSISTENCE_MODULE=headrace.events.eventsourcing, and its applications keep their events in an
embedded log.

HEADRACE_LOG says which log (`file:PATH`). Each application has a topic of its own, whose offsets,
counted from 1, are its notification ids; snapshots have another. How far a process application has
come is a note of the log, stored in the same commit as its events. Versions of an aggregate must
ascend; those of its snapshots need not, so that `take_snapshot(id, version=…)` works for any.

HEADRACE_SUBJECT says whom an event is about, so that `headrace events excise` finds it:
`originator` for the aggregate's id, or a topic of the library (`module:function`) that takes a
StoredEvent and returns a text, or None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast
from uuid import UUID

from headrace.errors import BadEvent, HeadraceError, MissingExtra
from headrace.events.event import Draft, RecordedEvent, entry, parse_events
from headrace.events.store import EventStore, open_store, prepare_rows
from headrace.log import open_log
from headrace.log.file.commit_draft import PreparedRows, StaleTopic

if TYPE_CHECKING:
    from headrace.log.file.commit_draft import CommitDraft
    from headrace.log.file.log import FileLog


try:
    from eventsourcing.persistence import (
        AggregateRecorder,
        ApplicationRecorder,
        InfrastructureFactory,
        IntegrityError,
        ListenNotifySubscription,
        Notification,
        ProcessRecorder,
        StoredEvent,
        Subscription,
        Tracking,
        TrackingRecorder,
    )
    from eventsourcing.utils import Environment, EnvType, resolve_topic
except ImportError as missing:
    raise MissingExtra("eventsourcing", "events") from missing

IdType = Literal["uuid", "text"]
R = TypeVar(
    "R", "HeadraceApplicationRecorder", "HeadraceTrackingRecorder", "HeadraceProcessRecorder"
)
_POLL_S = 0.05
_AT_ONCE = 1000


class _Refused(HeadraceError):
    """Raised under the log's lock; becomes the library's IntegrityError."""


SubjectFunction = Callable[[StoredEvent], str | None]
"""Whom an event is about; None if it is about nobody."""


class HeadraceAggregateRecorder(AggregateRecorder):
    """Events of aggregates, or their snapshots, in one topic."""

    def __init__(
        self,
        store: EventStore,
        *,
        id_type: IdType = "uuid",
        subject: SubjectFunction | None = None,
        is_ascending: bool = True,
    ) -> None:
        self._store, self._id_type = store, id_type
        self._subject = subject
        self._is_ascending = is_ascending
        """Whether a version must be newer than those before it; otherwise it must be another."""

    def insert_events(
        self, stored_events: Sequence[StoredEvent], **kwargs: Any
    ) -> Sequence[int] | None:
        self._insert(stored_events, **kwargs)
        return None

    def _insert(
        self, stored_events: Sequence[StoredEvent], *, tracking: Tracking | None = None, **_: Any
    ) -> Sequence[int]:
        if not stored_events and tracking is None:
            return []
        rows = [
            (
                str(event.originator_id),
                event.originator_version,
                Draft(event.topic, 1, None, self._subject_of(event), None, event.state),
            )
            for event in stored_events
        ]
        self._store.by_entity.refresh()
        while True:
            frames = prepare_rows(self._store.topic_state, rows) if rows else None
            try:
                offsets = self._store.log.committer.submit(
                    partial(self._decide, rows, frames, tracking), size=frames.size if frames else 0
                )
            except StaleTopic:
                self._store.reload()
                continue
            except _Refused as refused:
                raise IntegrityError(refused.message) from None
            self._store.by_entity.flush_if_due()
            return [offset + 1 for offset in offsets]

    def _decide(
        self,
        rows: Sequence[tuple[str, int, Draft]],
        frames: PreparedRows | None,
        tracking: Tracking | None,
        draft: CommitDraft,
    ) -> range:
        """Under the log's lock: everything that can refuse it comes first."""
        by_entity, topic = self._store.by_entity, self._store.topic
        if frames is not None:
            draft.check_fresh(frames)
            by_entity.catch_up(draft)
            self._check_versions(rows)
        if tracking is not None:
            check_tracking(draft, topic, tracking)
        offsets = range(0)
        if frames is not None:
            draft.append(frames)
            place = draft.offsets[topic][0]
            offsets = range(place.start, place.stop)
            by_entity.add(
                [
                    entry(entity, version, event, offset, draft.time_us)
                    for offset, (entity, version, event) in zip(offsets, rows, strict=True)
                ]
            )
        if tracking is not None:
            draft.do(
                "note",
                tracking_note(topic, tracking.application_name),
                str(tracking.notification_id),
            )
        return offsets

    def _subject_of(self, event: StoredEvent) -> str | None:
        subject = None if self._subject is None else self._subject(event)
        if subject is not None and not isinstance(subject, str):
            raise BadEvent(
                f"The subject of the event {event.topic!r} is {subject!r}.",
                fix="let the function that HEADRACE_SUBJECT names return a text, or None.",
            )
        return subject or None

    def _check_new(self, rows: Sequence[tuple[str, int, Draft]]) -> None:
        """Snapshots may be taken as of any version, each once."""
        seen: set[tuple[str, int]] = set()
        with self._store.by_entity.look() as look:
            for entity, version, _ in rows:
                if (entity, version) in seen or look.texts(entity, version - 1, version):
                    raise _Refused(f"There is a snapshot of {entity!r} at version {version}.")
                seen.add((entity, version))

    def _check_versions(self, rows: Sequence[tuple[str, int, Draft]]) -> None:
        if not self._is_ascending:
            self._check_new(rows)
            return
        newest: dict[str, int] = {}
        with self._store.by_entity.look() as look:
            for entity, version, _ in rows:
                if entity not in newest:
                    known = look.newest(entity)
                    newest[entity] = -1 if known is None else known
                if version <= newest[entity]:
                    raise _Refused(
                        f"Version {version} of {entity!r} is not new: it is at version"
                        f" {newest[entity]}."
                    )
                newest[entity] = version

    def select_events(
        self,
        originator_id: UUID | str,
        *,
        gt: int | None = None,
        lte: int | None = None,
        desc: bool = False,
        limit: int | None = None,
    ) -> Sequence[StoredEvent]:
        entity = str(originator_id)
        end = self._store.by_entity.refresh()
        with self._store.by_entity.look(end=end) as look:
            texts = (
                look.texts(entity, -1 if gt is None else gt, lte) if lte is None or lte >= 0 else []
            )
        events = parse_events(entity, texts)
        if not self._is_ascending:
            events.sort(key=lambda event: event.version)
        return [
            StoredEvent(self._id(event), event.version, event.type, _state(event))
            for event in (events[::-1] if desc else events)[:limit]
        ]

    def _id(self, event: RecordedEvent) -> UUID | str:
        return UUID(event.entity) if self._id_type == "uuid" else event.entity


class HeadraceApplicationRecorder(HeadraceAggregateRecorder, ApplicationRecorder):
    """An aggregate recorder whose notifications are the topic's events, in their global order."""

    def insert_events(
        self, stored_events: Sequence[StoredEvent], **kwargs: Any
    ) -> Sequence[int] | None:
        return self._insert(stored_events, **kwargs)

    def select_notifications(
        self,
        start: int | None,
        limit: int,
        stop: int | None = None,
        topics: Sequence[str] = (),
        *,
        inclusive_of_start: bool = True,
    ) -> Sequence[Notification]:
        first = max(
            0, (0 if start is None else start) - 1 + (not inclusive_of_start and start is not None)
        )
        end = self._store.end() if stop is None else min(stop, self._store.end())
        found: list[Notification] = []
        for event in self._between(first, end, limit):
            if not topics or event.type in topics:
                found.append(
                    Notification(
                        self._id(event),
                        event.version,
                        event.type,
                        _state(event),
                        id=event.offset + 1,
                    )
                )
                if len(found) == limit:
                    break
        return found

    def _between(self, first: int, end: int, limit: int) -> Iterator[RecordedEvent]:
        while first < end:
            stop = min(end, first + max(limit, _AT_ONCE))
            yield from self._store.read(first, stop)
            first = stop

    def max_notification_id(self) -> int | None:
        return self._store.end() or None

    def subscribe(
        self, gt: int | None = None, topics: Sequence[str] = ()
    ) -> Subscription[ApplicationRecorder]:
        return HeadraceSubscription(recorder=self, gt=gt, topics=topics)


class HeadraceSubscription(ListenNotifySubscription[HeadraceApplicationRecorder]):
    """Looks for new events of any process."""

    def _loop_on_pull(self) -> None:
        try:
            while not self._has_been_stopped:
                self._pull()
                self._has_been_notified.wait(timeout=_POLL_S)
        except BaseException as error:
            self._thread_error = self._thread_error or error
            self.stop()


class HeadraceTrackingRecorder(TrackingRecorder):
    """How far others' notifications were processed, as notes of the log."""

    def __init__(
        self,
        store: EventStore,
        *,
        id_type: IdType = "uuid",
        subject: SubjectFunction | None = None,
    ) -> None:
        self._store, self._id_type = store, id_type
        self._subject = subject
        self._is_ascending = True

    def insert_tracking(self, tracking: Tracking) -> None:
        def decide(draft: CommitDraft) -> None:
            check_tracking(draft, self._store.topic, tracking)
            draft.do(
                "note",
                tracking_note(self._store.topic, tracking.application_name),
                str(tracking.notification_id),
            )

        try:
            self._store.log.committer.submit(decide)
        except _Refused as refused:
            raise IntegrityError(refused.message) from None

    def max_tracking_id(self, application_name: str) -> int | None:
        note = self._store.log.note(tracking_note(self._store.topic, application_name))
        return None if note is None else int(note)


class HeadraceProcessRecorder(
    HeadraceTrackingRecorder, HeadraceApplicationRecorder, ProcessRecorder
):
    """Both, in one commit."""


class HeadraceFactory(InfrastructureFactory[HeadraceTrackingRecorder]):
    """Opens the log that HEADRACE_LOG names, and gives each application its topics."""

    HEADRACE_LOG = "HEADRACE_LOG"
    HEADRACE_SUBJECT = "HEADRACE_SUBJECT"
    ORIGINATOR_ID_TYPE = "ORIGINATOR_ID_TYPE"

    def __init__(self, env: Environment | EnvType | None) -> None:
        super().__init__(env)
        address = self.env.get(self.HEADRACE_LOG)
        if not address:
            raise OSError(
                "The log's address is not in the environment: set"
                f" {' or '.join(self.env.create_keys(self.HEADRACE_LOG))} to file:PATH."
            )
        self._id_type = cast(IdType, self.env.get(self.ORIGINATOR_ID_TYPE, "uuid").lower())
        if self._id_type not in {"uuid", "text"}:
            raise OSError(f"{self.ORIGINATOR_ID_TYPE} is {self._id_type!r}; use 'uuid' or 'text'.")
        self._subject = self._subject_function()
        self.log = cast("FileLog", open_log(address))
        self._stores: dict[str, EventStore] = {}

    def _subject_function(self) -> SubjectFunction | None:
        topic = self.env.get(self.HEADRACE_SUBJECT)
        if not topic:
            return None
        if topic.lower() == "originator":
            return lambda event: str(event.originator_id)
        function = resolve_topic(topic)
        if not callable(function):
            raise OSError(f"{self.HEADRACE_SUBJECT} is {topic!r}, which is no function.")
        return cast("SubjectFunction", function)

    def _store(self, purpose: str) -> EventStore:
        name = re.sub(r"[^A-Za-z0-9._-]", "_", f"{self.env.name.lower() or 'stored'}_{purpose}")
        if name not in self._stores:
            self._stores[name] = open_store(self.log, name)
        return self._stores[name]

    def aggregate_recorder(self, purpose: str = "events") -> AggregateRecorder:
        return HeadraceAggregateRecorder(
            self._store(purpose),
            id_type=self._id_type,
            subject=self._subject,
            is_ascending=purpose != "snapshots",
        )

    def application_recorder(self) -> ApplicationRecorder:
        return self._chosen(self.APPLICATION_RECORDER_TOPIC, HeadraceApplicationRecorder)

    def tracking_recorder(
        self, tracking_recorder_class: type[HeadraceTrackingRecorder] | None = None
    ) -> HeadraceTrackingRecorder:
        return self._chosen(
            self.TRACKING_RECORDER_TOPIC,
            tracking_recorder_class or HeadraceTrackingRecorder,
            given=tracking_recorder_class is not None,
        )

    def process_recorder(self) -> ProcessRecorder:
        return self._chosen(self.PROCESS_RECORDER_TOPIC, HeadraceProcessRecorder)

    def _chosen(self, variable: str, kind: type[R], *, given: bool = False) -> R:
        topic = None if given else self.env.get(variable)
        chosen: type[R] = resolve_topic(topic) if topic else kind
        if not issubclass(chosen, kind):
            raise OSError(f"{variable} is {topic!r}, which is no {kind.__name__}.")
        return chosen(self._store("events"), id_type=self._id_type, subject=self._subject)

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        self._stores.clear()
        self.log.close()


def tracking_note(topic: str, application: str) -> str:
    return f"events.{topic}.tracking.{application}"


def check_tracking(draft: CommitDraft, topic: str, tracking: Tracking) -> None:
    """Under the log's lock: a notification is processed once, and in order."""
    known = draft.state.notes.get(tracking_note(topic, tracking.application_name))
    if known is not None and int(known) >= tracking.notification_id:
        raise _Refused(
            f"Notification {tracking.notification_id} of {tracking.application_name!r} was"
            f" processed: it is at {known}."
        )


def _state(event: RecordedEvent) -> bytes:
    return (event.state or "").encode("latin-1")
