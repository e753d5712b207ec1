"""What was forgotten, and when: a topic beside the events' says so, without saying who. Written by the vault and by excision, read to resume what was interrupted."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.events.store import EventStore

SCHEMA = "what STRING, subject_sha256 STRING, step STRING, details STRING"


def directory(store: EventStore) -> Path:
    """Where a store keeps what is not in its topic."""
    return store.log.store.root / "events" / store.log.topic_state(store.topic).directory


def subject_hash(store: EventStore, subject: str) -> str:
    """A name for a subject that says nothing about it to whoever does not know it."""
    return sha256(f"{store.log.topic_state(store.topic).directory}\0{subject}".encode()).hexdigest()


def topic(store: EventStore) -> str:
    return f"{store.topic}.forgotten"


def note(store: EventStore, what: str, subject: str, step: str, **details: Any) -> None:
    """Write down a step, durably."""
    name = topic(store)
    if name not in store.log.topics():
        store.log.create_topic(name, SCHEMA, exist_ok=True)
    row = {"what": what, "subject_sha256": subject_hash(store, subject), "step": step, "details": json.dumps(details, sort_keys=True)}
    with store.log.producer(name) as producer:
        producer.append(row)


def steps(store: EventStore, what: str, subject: str) -> list[dict[str, Any]]:
    """What was done for a subject, in order."""
    if topic(store) not in store.log.topics():
        return []
    wanted = subject_hash(store, subject)
    return [row for row in store.log.read(topic(store)).to_pylist() if (row["what"], row["subject_sha256"]) == (what, wanted)]


def is_unfinished(store: EventStore, what: str, subject: str) -> bool:
    done = steps(store, what, subject)
    return bool(done) and done[-1]["step"] != "done"
