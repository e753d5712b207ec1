"""Subscriptions: readers of an event store that keep their position in the log, under a name.

The position is a note of the log. It is stored by itself (`commit`: an event may be seen again
after a crash, by an effect outside of the log), or in one commit with what the reader has
made of the events: rows in a transaction (`commit(tx)`) or other events
(`EventStore.commit(subscription=)`). Then each event has its effect once, however often the reader
is killed.

    offset   0  1  2  3  4  5
    stored         |              position 2: what was read before has had its effect
    polled               |        read up to 4, not committed: read again after a crash
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import pyarrow as pa
import pyarrow.compute as pc

from headrace.durations import to_us
from headrace.errors import InputError, NewerFormat, SubscriptionFenced
from headrace.events.event import RecordedEvent, events_from_rows
from headrace.names import check_name
from headrace.retry import Backoff

if TYPE_CHECKING:
    from headrace.log.api import Transaction
    from headrace.log.file.commit_draft import CommitDraft
    from headrace.log.file.log import FileLog
    from headrace.log.values import Duration

FORMAT = 1
_READ_OFFSETS = 10_000
_POLL_BACKOFF = Backoff(first_s=0.002, longest_s=0.05, jitter=0.0)


@dataclass(frozen=True)
class EventFilter:
    """Which events a subscription yields: those of a category (what is before the first hyphen of
    an entity's name), of an entity, of some types.
    """

    category: str | None = None
    entity: str | None = None
    types: frozenset[str] = frozenset()

    def mask(self, rows: pa.RecordBatch) -> pa.BooleanArray | None:
        """Which rows fit; None if all do."""
        masks = []
        if self.category is not None:
            masks.append(pc.starts_with(rows.column("entity"), f"{self.category}-"))
        if self.entity is not None:
            masks.append(pc.equal(rows.column("entity"), self.entity))
        if self.types:
            types = pa.array(sorted(self.types), pa.string())
            masks.append(pc.is_in(rows.column("type"), value_set=types))
        mask = masks[0] if masks else None
        for other in masks[1:]:
            mask = pc.and_(mask, other)
        return mask


class SubscribedStore(Protocol):
    """What a subscription needs of an event store."""

    @property
    def log(self) -> FileLog: ...

    @property
    def name(self) -> str: ...

    @property
    def topic(self) -> str: ...

    def end(self) -> int:
        """Return the offset that the next event will have."""
        ...


def subscription_note(topic: str, name: str) -> str:
    """The name of the note with a subscription's position."""
    return f"events.{topic}.subscription.{name}"


class EventSubscription:
    """A reader of an event store. One process at a time moves its position; another one that does
    is fenced off. It is not safe for threads.
    """

    def __init__(
        self, store: SubscribedStore, name: str, event_filter: EventFilter, stored: str
    ) -> None:
        self.store, self.name = store, name
        self._filter = event_filter
        self._note = subscription_note(store.topic, name)
        self._stored = stored
        self._next = stored
        self.position = _position(stored)
        """The offset of the next event that is polled."""

    @classmethod
    def open(
        cls,
        store: SubscribedStore,
        name: str,
        *,
        start: int | Literal["beginning", "now"],
        event_filter: EventFilter,
    ) -> Self:
        """Open a subscription at its stored position, or store where a new one begins."""
        check_name(name, what="subscription")
        if isinstance(start, bool) or (isinstance(start, int) and start < 0):
            raise InputError(
                f"A subscription cannot start at {start!r}.",
                fix="give an offset, 'beginning' or 'now'.",
            )
        if isinstance(start, str) and start not in {"beginning", "now"}:
            raise InputError(
                f"A subscription cannot start at {start!r}.",
                fix="give an offset, 'beginning' or 'now'.",
            )
        note = subscription_note(store.topic, name)

        def decide(draft: CommitDraft) -> str:
            known: str | None = draft.state.notes.get(note)
            if known is None:
                end = draft.state.topic(store.topic).partitions[0].end
                known = _text(
                    {"beginning": 0, "now": end}[start] if isinstance(start, str) else start
                )
                draft.do("note", note, known)
            return known

        return cls(store, name, event_filter, store.log.committer.submit(decide))

    @property
    def committed(self) -> int:
        """The stored position."""
        self._settle()
        return _position(self._stored)

    def poll(
        self, max_events: int = 1000, *, timeout: Duration | None = None
    ) -> list[RecordedEvent]:
        """Return the next events that fit, and move on behind them; none if there are none in time.

        Args:
            max_events: Return at most so many.
            timeout: How long to wait for the first one; by default not at all.
        """
        if max_events < 1:
            raise InputError(f"max_events is {max_events}.", fix="give 1 or more.")
        wait_s = 0.0 if timeout is None else to_us(timeout, what="timeout") / 1e6
        began_s = time.monotonic()
        empty = 0
        while True:
            events = self._read(max_events)
            if events:
                return events
            left_s = began_s + wait_s - time.monotonic()
            if left_s <= 0:
                return []
            empty += 1
            time.sleep(min(left_s, _POLL_BACKOFF.pause_s(empty)))

    def _read(self, max_events: int) -> list[RecordedEvent]:
        end = self.store.end()
        while self.position < end:
            stop = min(end, self.position + _READ_OFFSETS)
            events: list[RecordedEvent] = []
            for rows in self.store.log.read(self.store.topic, 0, self.position, stop):
                mask = self._filter.mask(rows)
                fitting = rows if mask is None else rows.filter(mask)
                events += events_from_rows(fitting.slice(0, max_events - len(events)))
                if len(events) >= max_events:
                    break
            if len(events) >= max_events:
                self.position = events[-1].offset + 1
                return events
            self.position = stop
            if events:
                return events
        return []

    def __iter__(self) -> Iterator[RecordedEvent]:
        """Yield the events that there are now, without committing."""
        while events := self.poll():
            yield from events

    # The position

    def commit(self, tx: Transaction | None = None) -> None:
        """Store the position: everything that was polled has had its effect.

        Args:
            tx: A transaction of the same log, with the effect. The position is stored if it
                commits.

        Raises:
            SubscriptionFenced: Another process has moved the position.

        """
        self._settle()
        if tx is not None:
            self._next = _text(self.position)
            tx.set_note(self._note, self._next, expect=self._stored)
            return

        def decide(draft: CommitDraft) -> None:
            self.check(draft)
            self.store_in(draft)

        if self.position != self.committed:
            self.store.log.committer.submit(decide)
            self.was_stored()

    def _settle(self) -> None:
        """Find out whether a transaction with the position has committed."""
        if self._next != self._stored and self.store.log.note(self._note) == self._next:
            self._stored = self._next

    def rewind(self) -> None:
        """Go back to the stored position: what was polled since is polled again."""
        self._stored = self._next = self.store.log.note(self._note) or self._stored
        self.position = _position(self._stored)

    def check(self, draft: CommitDraft) -> None:
        """Internal: under the log's lock, refuse a position that another process has moved."""
        if self._next != self._stored and draft.state.notes.get(self._note) == self._next:
            self._stored = self._next
        if draft.state.notes.get(self._note) != self._stored:
            raise SubscriptionFenced(
                f"The subscription {self.name!r} of {self.store.name!r} was moved by another"
                " process; nothing was stored.",
                fix="stop one of them, or open the subscription again to go on where it is.",
            )

    def store_in(self, draft: CommitDraft) -> None:
        """Internal: store the position in a commit."""
        self._next = _text(self.position)
        draft.do("note", self._note, self._next)

    def was_stored(self) -> None:
        """Internal: a commit with the position is durable."""
        self._stored = self._next


def _text(position: Any) -> str:
    return json.dumps({"format": FORMAT, "position": position})


def _position(text: str) -> int:
    stored = json.loads(text)
    if stored["format"] > FORMAT:
        raise NewerFormat(
            f"The position of a subscription has format {stored['format']}; this Headrace knows"
            f" {FORMAT}.",
            fix="upgrade Headrace.",
        )
    return int(stored["position"])
