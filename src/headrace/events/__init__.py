"""Event sourcing on the log: events are stored, and everything else is derived from them.

In the order in which a command flows:

- `decider`: business rules (`Decider`), and what runs them (`Handler`); digests.
- `codec`: dataclasses as events and back; upcasters; personal fields. `value_codec`: their values
  as JSON by type hints; `snapshot`: states as bytes.
- `event`: events before and after they are stored, as rows and as index entries.
- `store`: appends with expected versions, and reads (`EventStore`).
- `index`: events by entity, on disk and in memory; snapshots.
- `subscription`: readers with a position of their own; `process`: processes over many entities,
  with deadlines.
- `truncation`: removal of an entity's events before a version.
- `projection`: events as a stream of a pipeline.
- `privacy`: keys that can be deleted (`vault`), removal of events (`excision`), and its proof
  (`scan`).
- `eventsourcing`: the persistence module for the library of that name. Users configure it by name.

`docs/concepts/event-sourcing.md` says what is promised.
"""

from __future__ import annotations

from headrace.errors import CommandRefused, VersionConflict
from headrace.events.codec import Codec, personal
from headrace.events.decider import CommandResult, Decider, Handler, digest
from headrace.events.event import (
    ANY,
    EXISTS,
    NEW,
    Change,
    Event,
    EventAppendResult,
    RecordedEvent,
)
from headrace.events.privacy.excision import ExcisionResult, excise, prove
from headrace.events.privacy.vault import Vault, open_vault
from headrace.events.process import (
    DeadlineReached,
    Process,
    ProcessManager,
    Reaction,
    RefusedCommand,
    Send,
)
from headrace.events.projection import stream
from headrace.events.store import EventStore, open_store
from headrace.events.subscription import EventSubscription
from headrace.events.truncation import truncate

__all__ = [
    "ANY",
    "EXISTS",
    "NEW",
    "Change",
    "Codec",
    "CommandRefused",
    "CommandResult",
    "DeadlineReached",
    "Decider",
    "Event",
    "EventAppendResult",
    "EventStore",
    "EventSubscription",
    "ExcisionResult",
    "Handler",
    "Process",
    "ProcessManager",
    "Reaction",
    "RecordedEvent",
    "RefusedCommand",
    "Send",
    "Vault",
    "VersionConflict",
    "digest",
    "excise",
    "open_store",
    "open_vault",
    "personal",
    "prove",
    "stream",
    "truncate",
]
