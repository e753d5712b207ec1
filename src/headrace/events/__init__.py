"""Event sourcing on the log: events are the truth, everything else is derived from them. See docs/concepts/event-sourcing.md."""

from __future__ import annotations

from headrace.errors import CommandRefused, VersionConflict
from headrace.events.codec import Codec, personal
from headrace.events.deciding import Decider, Handled, Handler
from headrace.events.digests import digest
from headrace.events.excising import Excised, excise, prove
from headrace.events.projecting import stream
from headrace.events.store import EventStore, open_store
from headrace.events.values import ANY, NEW, Appended, Change, Event, Recorded
from headrace.events.vault import Vault, open_vault

__all__ = [
    "ANY",
    "NEW",
    "Appended",
    "Change",
    "Codec",
    "CommandRefused",
    "Decider",
    "Event",
    "EventStore",
    "Excised",
    "Handled",
    "Handler",
    "Recorded",
    "Vault",
    "VersionConflict",
    "digest",
    "excise",
    "open_store",
    "open_vault",
    "personal",
    "prove",
    "stream",
]
