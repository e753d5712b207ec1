"""Event sourcing on the log: events are the truth, everything else is derived from them. See
docs/concepts/event-sourcing.md.
"""

from __future__ import annotations

from headrace.errors import CommandRefused, VersionConflict
from headrace.events.codec import Codec, personal
from headrace.events.decider import Decider, Handled, Handler, digest
from headrace.events.event import ANY, NEW, Appended, Change, Event, Recorded
from headrace.events.privacy.excision import Excised, excise, prove
from headrace.events.privacy.vault import Vault, open_vault
from headrace.events.projection import stream
from headrace.events.store import EventStore, open_store

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
