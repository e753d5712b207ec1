"""Erasure records: a topic next to the events' one says what was erased and when, without saying
whom.

The vault and excision write it, and read it to resume what was interrupted. It also has the version
that an entity had reached when events were excised, under a hash of its name, so that versions are
never assigned twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.events.index import EXCISED_VERSION, erasure_topic, hashed_name, retained_versions

if TYPE_CHECKING:
    from headrace.events.store import EventStore

SCHEMA = "what STRING, subject_sha256 STRING, step STRING, details STRING"


def store_directory(store: EventStore) -> Path:
    """Return the directory of what a store keeps outside its topic."""
    return store.log.store.root / "events" / store.log.topic_state(store.topic).directory


def subject_hash(store: EventStore, subject: str) -> str:
    return hashed_name(store.log.topic_state(store.topic).directory, subject)


def records_topic(store: EventStore) -> str:
    return erasure_topic(store.topic)


def add_record(store: EventStore, what: str, subject: str, step: str, **details: Any) -> None:
    """Add a record of a step of an erasure, durably."""
    _write(store, [(what, subject_hash(store, subject), step, details)])


def _write(store: EventStore, rows: list[tuple[str, str, str, dict[str, Any]]]) -> None:
    name = records_topic(store)
    if name not in store.log.topics():
        store.log.create_topic(name, SCHEMA, exist_ok=True)
    with store.log.producer(name) as producer:
        producer.append(
            [
                {
                    "what": what,
                    "subject_sha256": who,
                    "step": step,
                    "details": json.dumps(details, sort_keys=True),
                }
                for what, who, step, details in rows
            ]
        )


def records_of(store: EventStore, what: str, subject: str) -> list[dict[str, Any]]:
    """Return the recorded steps of a subject's erasure, in order."""
    if records_topic(store) not in store.log.topics():
        return []
    wanted = subject_hash(store, subject)
    return [
        row
        for row in store.log.read(records_topic(store)).to_pylist()
        if (row["what"], row["subject_sha256"]) == (what, wanted)
    ]


def unfinished_records(store: EventStore, what: str, subject: str) -> list[dict[str, Any]]:
    """Return the steps since an erasure was last complete; none if it is complete, or never
    began.
    """
    rows = records_of(store, what, subject)
    done = [index for index, row in enumerate(rows) if row["step"] == "done"]
    return rows[done[-1] + 1 :] if done else rows


def is_unfinished(store: EventStore, what: str, subject: str) -> bool:
    return bool(unfinished_records(store, what, subject))


def retain_versions(store: EventStore, versions: Mapping[str, int]) -> None:
    """Record the newest version of entities whose events are excised, so that it is not assigned
    again.
    """
    known = retained_versions(store.log, store.topic)
    directory_name = store.log.topic_state(store.topic).directory
    new = {
        who: version
        for entity, version in versions.items()
        if known.get(who := hashed_name(directory_name, entity), 0) < version
    }
    if new:
        _write(
            store,
            [(EXCISED_VERSION, who, "kept", {"version": version}) for who, version in new.items()],
        )
