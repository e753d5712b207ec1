"""What was forgotten, and when: a topic beside the events' says so, without saying who. Written by the vault and by excision, read to resume what was interrupted.

It also keeps the version that an entity had reached when its newest events were excised, under a hash of its name, so that versions are never given out twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.events.store import EventStore
    from headrace.log.file.log import FileLog

SCHEMA = "what STRING, subject_sha256 STRING, step STRING, details STRING"
_VERSION = "version"


def directory(store: EventStore) -> Path:
    """Where a store keeps what is not in its topic."""
    return store.log.store.root / "events" / store.log.topic_state(store.topic).directory


def hashed(topic_directory: str, name: str) -> str:
    """A name for a subject or an entity that says nothing about it to whoever does not know it."""
    return sha256(f"{topic_directory}\0{name}".encode()).hexdigest()


def subject_hash(store: EventStore, subject: str) -> str:
    return hashed(store.log.topic_state(store.topic).directory, subject)


def topic_of(events: str) -> str:
    return f"{events}.forgotten"


def topic(store: EventStore) -> str:
    return topic_of(store.topic)


def note(store: EventStore, what: str, subject: str, step: str, **details: Any) -> None:
    """Write down a step, durably."""
    _write(store, [(what, subject_hash(store, subject), step, details)])


def _write(store: EventStore, rows: list[tuple[str, str, str, dict[str, Any]]]) -> None:
    name = topic(store)
    if name not in store.log.topics():
        store.log.create_topic(name, SCHEMA, exist_ok=True)
    with store.log.producer(name) as producer:
        producer.append(
            [{"what": what, "subject_sha256": who, "step": step, "details": json.dumps(details, sort_keys=True)} for what, who, step, details in rows]
        )


def steps(store: EventStore, what: str, subject: str) -> list[dict[str, Any]]:
    """What was done for a subject, in order."""
    if topic(store) not in store.log.topics():
        return []
    wanted = subject_hash(store, subject)
    return [row for row in store.log.read(topic(store)).to_pylist() if (row["what"], row["subject_sha256"]) == (what, wanted)]


def unfinished(store: EventStore, what: str, subject: str) -> list[dict[str, Any]]:
    """The steps since it was last done; none if it was done, or never begun."""
    found = steps(store, what, subject)
    last = max((at for at, row in enumerate(found) if row["step"] == "done"), default=-1)
    return found[last + 1 :]


def is_unfinished(store: EventStore, what: str, subject: str) -> bool:
    return bool(unfinished(store, what, subject))


# Versions that are not given out again


def keep_versions(store: EventStore, versions: Mapping[str, int]) -> None:
    """Entities whose events go, each with the newest version among those."""
    known, where = kept_versions(store.log, store.topic), store.log.topic_state(store.topic).directory
    new = {who: version for entity, version in versions.items() if known.get(who := hashed(where, entity), 0) < version}
    if new:
        _write(store, [(_VERSION, who, "kept", {"version": version}) for who, version in new.items()])


def kept_versions(log: FileLog, events: str) -> dict[str, int]:
    """By an entity's hash."""
    if topic_of(events) not in log.store.view().topics:
        return {}
    found: dict[str, int] = {}
    for row in log.read(topic_of(events)).to_pylist():
        if row["what"] == _VERSION:
            found[row["subject_sha256"]] = max(found.get(row["subject_sha256"], 0), json.loads(row["details"])["version"])
    return found
