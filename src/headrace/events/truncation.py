"""Truncation: removes an entity's events before a version, for good, and frees their room. It is
for entities that live long, once an event says all that those before it said.

    account-17   1 Opened   2 Deposited   ...   900 Withdrawn   901 BalanceCarried(50)   902 ...
    truncate(…, "account-17", before=901)
    account-17                                                  901 BalanceCarried(50)   902 ...

The versions and offsets of other events stay. The segments of the topic are written anew without
the events that go, and marked as compacted: whoever must read a topic from its first row on, such
as a view that is added to a pipeline, is refused from then on. Then a new index begins, since the
old one and its snapshots have events that are gone.

Each step is harmless when it is repeated, so a truncation that was interrupted is called again. It
uses what excision (`privacy.excision`) uses to rewrite a topic.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from headrace.atomic_file import sync_directory
from headrace.errors import InputError, UnknownEntity
from headrace.events.event import check_entity
from headrace.events.index import EventIndex, generation_note
from headrace.log.file.compaction import excise as remove_rows
from headrace.log.file.maintenance import create_checkpoint, maintenance_lock
from headrace.log.file.segment import COMPACTED

if TYPE_CHECKING:
    from headrace.events.store import EventStore
    from headrace.log.file.commit_draft import CommitDraft

Step = Callable[[str], None]


def truncate(
    store: EventStore, entity: str, *, before: int, step: Step = lambda _name: None
) -> int:
    """Remove an entity's events before a version, for good. The event of that version should say
    all that those before it said; `Handler.truncate` checks that.

    Versions go on as before. States as of an earlier version are refused from then on, and so are
    new views over the store: they would lack the events. An id of an event that went can be used
    again. Pipelines and subscriptions that have not read the events do not see them any more. All
    events of the store are read and written once, so truncate rarely.

    Args:
        store: The event store.
        entity: The entity's name.
        before: The first version that stays, at most the newest one.
        step: Called with the name of each step, for progress.

    Returns:
        How many events were removed.

    Raises:
        UnknownEntity: The entity has no events.
        InputError: `before` is not a version of the entity.

    Example:
        >>> hr.events.truncate(store, "account-17", before=901)
        900

    """
    check_entity(entity)
    newest = store.version(entity)
    if not newest:
        raise UnknownEntity(entity, store.name)
    if not 1 <= before <= newest:
        raise InputError(
            f"The events of {entity!r} before version {before} cannot be removed: it is at version"
            f" {newest}, and its newest event stays.",
            fix=f"give 1 to {newest}.",
        )

    def is_kept(rows: pa.RecordBatch) -> pa.BooleanArray:
        goes = pc.and_(
            pc.equal(rows.column("entity"), entity), pc.less(rows.column("version"), before)
        )
        return pc.invert(pc.fill_null(goes, fill_value=False))

    roll_segments(store, store.topic)
    step("rolled")
    create_checkpoint(store.log)
    step("sealed")
    known = store.log.topic_state(store.topic)
    with maintenance_lock(store.log, wait=True):
        removed = remove_rows(store.log, known, 0, is_kept, flag=COMPACTED)
    step("removed")
    rebuild_index(store, step)
    return removed


# What is done to the topic and the index of a store; excision does it too


def roll_segments(store: EventStore, topic: str) -> None:
    """Begin new segments, so that all rows so far are in sealed ones."""

    def decide(draft: CommitDraft) -> None:
        known = draft.state.topic(topic)
        for number in range(len(known.partitions)):
            draft.roll(known, number)

    store.log.committer.submit(decide)


def rebuild_index(store: EventStore, step: Step) -> None:
    """Begin a new index, in every process, and remove the older ones with their snapshots."""

    def decide(draft: CommitDraft) -> str:
        generation = str(int(draft.state.notes.get(generation_note(store.topic), "0")) + 1)
        draft.do("note", generation_note(store.topic), generation)
        return generation

    generation = store.log.committer.submit(decide)
    step("generation")
    store.reload()
    directory = store.log.topic_state(store.topic).directory
    newest = EventIndex.place(store.log, directory, generation)
    for path in newest.parent.glob("index-*"):
        if path != newest:
            shutil.rmtree(path)
    sync_directory(newest.parent)
    step("index")
