"""Excision: remove what is stored about a person from a log, for good, and prove it. For what `vault` does not cover: events whose fields were not marked personal.

The log's offsets stay, and so does a record that something was excised. It can be repeated after a crash: every step finds what is left to do. What this cannot reach is named, never passed
over: whatever else has the values, in the log's directory or in those given, is an error that lists it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import InputError, NotForgotten, UnknownSubject
from headrace.events import forgetting
from headrace.events.indexed import generation_note
from headrace.events.scanning import Found, scan
from headrace.log.file.compaction import excise as excise_rows
from headrace.log.file.housekeeping import alone, make_checkpoint

if TYPE_CHECKING:
    from headrace.events.store import EventStore
    from headrace.log.file.draft import Draft

Kept = Callable[[pa.RecordBatch], pa.BooleanArray]
_MOST_ROUNDS = 10
_CHECKPOINTS = 2
"""The log keeps its two newest checkpoints, and the journal since the older one: after so many more, no record is left from before."""
_SHORTEST_VALUE = 4


@dataclass(frozen=True)
class Excised:
    """What went: events, and rows of other topics."""

    events: int
    derived: dict[str, int]


def excise(
    store: EventStore, subject: str, *, values: Sequence[str] = (), also: Iterable[str | Path] = (), step: Callable[[str], None] = lambda _name: None
) -> Excised:
    """Remove a subject's events. `values` are what must be found nowhere afterwards, in the log's directory and in those in `also`: rows of the log's other topics with one of them go too.

    The steps, each harmless when repeated:

    1. see that there is something to do, and write down that it has begun
    2. write segments anew without the subject's events, and other topics' without rows that have a value
    3. checkpoint until the journal has no record from before
    4. begin another index, and remove the older ones, with their snapshots
    5. write down that it is done
    6. scan every file
    """
    _check_values(values)
    if not _count(store, subject) and not forgetting.is_unfinished(store, "excise", subject):  # 1
        raise UnknownSubject(subject, f"the events of {store.name!r}")
    forgetting.note(store, "excise", subject, "begun")
    step("begun")
    events = _without(store, store.topic, lambda rows: pc.fill_null(pc.not_equal(rows.column("subject"), subject), fill_value=True), step)  # 2
    derived = {topic: gone for topic in _others(store) if (gone := _without(store, topic, lambda rows: _lacks(rows, values), step))} if values else {}
    step("rewritten")
    for _ in range(_CHECKPOINTS):  # 3
        make_checkpoint(store.log)
        step("checkpoint")
    _begin_index(store, step)  # 4
    forgetting.note(store, "excise", subject, "done", events=events, derived=derived)  # 5
    step("done")
    prove(store, values, also=also)  # 6
    return Excised(events, derived)


def prove(store: EventStore, values: Sequence[str], *, also: Iterable[str | Path] = ()) -> None:
    """NotForgotten, with the names of all files that have one of the values, or that cannot be looked into."""
    _check_values(values)
    roots = [store.log.store.root, *map(Path, also)]
    if missing := [root for root in roots if not root.exists()]:
        raise InputError(f"{missing[0]} does not exist.", fix="name the directories of states, views and backups.")
    found = scan(roots, values) if values else []
    if found:
        listed = "\n".join(f"    {each.file}: {each.why}" + _hint(each) for each in found)
        raise NotForgotten(
            f"{len(found)} files could not be cleaned of these values:\n{listed}",
            fix="rebuild views and states with `headrace replay`, remove the old versions and what is kept in quarantine, and run this again; it can be repeated.",
        )


def _check_values(values: Sequence[str]) -> None:
    for value in values:
        if len(value) < _SHORTEST_VALUE:
            raise InputError(f"The value {value!r} is too short to be looked for: it would be found everywhere.", fix=f"give values of at least {_SHORTEST_VALUE} characters.")


def _hint(found: Found) -> str:
    parts = found.file.parts
    if "quarantine" in parts:
        return " (a copy of damaged bytes: remove it)"
    if "topics" in parts:
        return f" (the topic {parts[parts.index('topics') + 1].rpartition('~')[0]!r})"
    return ""


def _count(store: EventStore, subject: str) -> int:
    return sum(pc.sum(pc.equal(rows.column("subject"), subject)).as_py() or 0 for rows in store.log.read(store.topic, 0, columns=["subject"]))


def _others(store: EventStore) -> list[str]:
    return [name for name in store.log.topics() if name not in {store.topic, forgetting.topic(store)}]


def _lacks(rows: pa.RecordBatch, values: Sequence[str]) -> pa.BooleanArray:
    """Rows in whose columns none of the values is."""
    kept = pa.array([True] * rows.num_rows)
    for column in rows.columns:
        if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            for value in values:
                has = pc.match_substring(column.cast(pa.binary()), value.encode())
                kept = pc.and_(kept, pc.invert(pc.fill_null(has, fill_value=False)))
        elif pa.types.is_nested(column.type):
            plain = pa.array([any(value in str(item) for value in values) for item in column.to_pylist()], pa.bool_())
            kept = pc.and_(kept, pc.invert(plain))
    return kept


def _without(store: EventStore, topic: str, kept: Kept, step: Callable[[str], None]) -> int:
    """Until no row is left that should go: somebody may be appending."""
    total = 0
    for _ in range(_MOST_ROUNDS):
        if not _has(store, topic, kept):
            return total
        _roll(store, topic)
        step(f"rolled {topic}")
        make_checkpoint(store.log)
        step(f"sealed {topic}")
        known = store.log.topic_state(topic)
        with alone(store.log, wait=True):  # compaction would put back what it had read before
            total += sum(excise_rows(store.log, known, number, kept) for number in range(len(known.partitions)))
        step(f"excised {topic}")
    raise NotForgotten(f"The topic {topic!r} gets rows that should go as quickly as they are removed.", fix="stop whoever writes them, and run this again.")


def _has(store: EventStore, topic: str, kept: Kept) -> bool:
    return any(pc.any(pc.invert(kept(rows))).as_py() for rows in store.log.read(topic, headers=True))


def _roll(store: EventStore, topic: str) -> None:
    def decide(draft: Draft) -> None:
        known = draft.state.topic(topic)
        for number in range(len(known.partitions)):
            draft.roll(known, number)

    store.log.committer.submit(decide)


def _begin_index(store: EventStore, step: Callable[[str], None]) -> None:
    def decide(draft: Draft) -> str:
        generation = str(int(draft.state.notes.get(generation_note(store.topic), "0")) + 1)
        draft.do("note", generation_note(store.topic), generation)
        return generation

    generation = store.log.committer.submit(decide)
    step("generation")
    store.by_entity.refresh()
    for path in forgetting.directory(store).glob("index-*"):
        if path.name != f"index-{generation}":
            shutil.rmtree(path)
    step("index")
