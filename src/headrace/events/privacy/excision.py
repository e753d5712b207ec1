"""Excision: removes what is stored about a person from a log and from what pipelines derived from
it, for good, and proves it. It is for what `vault` does not cover: events whose fields were not
marked personal.

The log's offsets stay, and so does a record that something was excised. It can be repeated after a
crash: every step finds what is left to do. What it cannot reach is always named: obstacles are
refused before anything is changed, sinks and other machines that may have rows are listed, and a
file that still has one of the values is an error that names it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.atomic_file import sync_directory
from headrace.errors import ExcisionRefused, InputError, NotForgotten, UnknownSubject
from headrace.events import index
from headrace.events.event import ARROW
from headrace.events.index import generation_note
from headrace.events.privacy import erasure_records
from headrace.events.privacy.scan import ScanHit, encodings, scan
from headrace.log.file.compaction import excise as excise_rows
from headrace.log.file.maintenance import create_checkpoint, maintenance_lock
from headrace.log.partitioning import key_bytes

if TYPE_CHECKING:
    from headrace.events.store import EventStore
    from headrace.log.file.commit_draft import CommitDraft
    from headrace.log.file.log import FileLog
    from headrace.runtime.erasure import Holder


# Which rows are removed. From the events' own topic: the subject's. From topics that pipelines
# derived from it: rows that name the subject, or an entity of which no event is left, in columns
# called `subject` and `entity`. From every topic: rows that have one of the given values. In a
# table's topic all changes of a key are removed together, so that no older row takes the place of a
# newer one.

RowPredicate = Callable[[pa.RecordBatch], pa.BooleanArray]
"""Returns for each row whether it is removed; never null."""


def has_subject(subject: str) -> RowPredicate:
    return lambda rows: _equal(rows, "subject", subject)


def has_values(values: Sequence[str]) -> RowPredicate:
    """Match rows that have one of the values in a column, in any form."""
    patterns = sorted({pattern for value in values for pattern in encodings(value)})
    return lambda rows: reduce(
        pc.or_, (_has(column, patterns) for column in rows.columns if patterns), _none(rows)
    )


def has_erased_entity(store: EventStore) -> RowPredicate:
    """Match rows that name an entity of which no event is left."""
    where = store.log.topic_state(store.topic).directory
    gone = index.retained_versions(store.log, store.topic).keys() - {
        index.hashed_name(where, entity) for entity in _entities(store)
    }

    def marked(rows: pa.RecordBatch) -> pa.BooleanArray:
        if (
            not gone
            or "entity" not in rows.schema.names
            or rows.column("entity").type != pa.string()
        ):
            return _none(rows)
        column = rows.column("entity")
        names = [
            name
            for name in pc.unique(column).to_pylist()
            if name is not None and index.hashed_name(where, name) in gone
        ]
        return pc.is_in(column, value_set=pa.array(names, pa.string()))

    return marked


def any_of(*marks: RowPredicate) -> RowPredicate:
    return lambda rows: reduce(pc.or_, (mark(rows) for mark in marks))


def _entities(store: EventStore) -> Iterator[str]:
    for rows in store.log.read(store.topic, 0, columns=["entity"]):
        yield from pc.unique(rows.column("entity")).to_pylist()


def _none(rows: pa.RecordBatch) -> pa.BooleanArray:
    return pa.repeat(pa.scalar(value=False), rows.num_rows)


def _equal(rows: pa.RecordBatch, name: str, value: str) -> pa.BooleanArray:
    if name not in rows.schema.names or rows.column(name).type != pa.string():
        return _none(rows)
    return pc.fill_null(pc.equal(rows.column(name), value), fill_value=False)


def _has(column: pa.Array, patterns: Collection[bytes]) -> pa.BooleanArray:
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        plain = column.cast(pa.binary())
        found = reduce(pc.or_, (pc.match_substring(plain, pattern) for pattern in patterns))
        return pc.fill_null(found, fill_value=False)
    if pa.types.is_nested(column.type):
        texts = (_text(item) for item in column.to_pylist())
        return pa.array(
            [any(pattern in text for pattern in patterns) for text in texts], pa.bool_()
        )
    return pa.repeat(pa.scalar(value=False), len(column))


def _text(item: Any) -> bytes:
    """Return all texts and bytes of a nested value, one after the other."""
    if isinstance(item, bytes):
        return item
    if isinstance(item, dict):
        return b"\0".join(_text(each) for pair in item.items() for each in pair)
    if isinstance(item, list | tuple):
        return b"\0".join(map(_text, item))
    return item.encode() if isinstance(item, str) else json.dumps(item, default=str).encode()


@dataclass(frozen=True)
class ErasurePlan:
    """Which rows of a topic are removed. In a table's topic, `keys` are the keys of those rows:
    other changes of the same keys are removed first, as long as the keys are known by the rows.
    """

    topic: str
    marked: RowPredicate
    keys: pa.Array | None = None
    key: tuple[str, ...] = ()

    def keep_passes(self) -> list[RowPredicate]:
        """Return what is kept, by pass over the topic: other changes of the keys go first."""
        others: list[RowPredicate] = (
            []
            if self.keys is None
            else [
                lambda rows: pc.invert(
                    pc.and_not(
                        pc.fill_null(
                            pc.is_in(key_bytes(rows, self.key), value_set=self.keys),
                            fill_value=False,
                        ),
                        self.marked(rows),
                    )
                )
            ]
        )
        return [*others, lambda rows: pc.invert(self.marked(rows))]


def plan_erasure(log: FileLog, topic: str, marked: RowPredicate) -> ErasurePlan | None:
    """Return which rows of a topic are removed; None if none is."""
    info = log.topic(topic)
    keys: list[pa.Array] = []
    for rows in log.read(topic, headers=True):
        goes = marked(rows)
        if pc.any(goes).as_py():
            if not info.is_table:
                return ErasurePlan(topic, marked)
            keys.append(key_bytes(rows.filter(goes), info.key).drop_null())
    return (
        ErasurePlan(topic, marked, pa.concat_arrays(keys).unique(), tuple(info.key))
        if keys
        else None
    )


Step = Callable[[str], None]
_MAX_ROUNDS = 10
_CHECKPOINTS = 2
"""The log retains its two newest checkpoints, and the journal since the older one: after so many
more, no earlier record is left.
"""
_SHORTEST_VALUE = 4


@dataclass(frozen=True)
class ExcisionResult:
    """What was removed: events, rows of other topics, and the state and views of pipelines, which
    their next run builds again. `unreached` names who else may have rows.
    """

    events: int
    derived: dict[str, int]
    pipelines: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()


def excise(
    store: EventStore,
    subject: str,
    *,
    values: Sequence[str] = (),
    also: Iterable[str | Path] = (),
    step: Step = lambda _name: None,
) -> ExcisionResult:
    """Remove a subject's events, and what was derived from them.

    Each step is harmless when it is repeated:

    1. Check that there is something to remove and no obstacle, and record the beginning.
    2. Rewrite segments: the events' without the subject's, other topics' without rows that go with
       them or have a value.
    3. Checkpoint until the journal has no earlier record.
    4. Begin new indexes, and remove the older ones with their snapshots; remove the subject's key.
    5. Drop what pipelines derived: state, watermarks, views.
    6. Scan every file.
    7. Record the end.

    Args:
        store: The event store.
        subject: Whose events are removed.
        values: What must not be found afterwards: in the log's directory, in those of pipelines
            that read the events, and in those of `also`.
        also: Further directories to scan.
        step: Called with the name of each step, for progress.

    Returns:
        What was removed, and who else may have rows.

    Raises:
        UnknownSubject: The store has no events of that subject.
        ExcisionRefused: There are obstacles; nothing was changed.
        NotForgotten: Some files still have one of the values.

    Example:
        >>> hr.events.excise(store, "customer-8", values=["ada@example.com"]).events
        12

    """
    _check_values(values)
    case = _Excision(store, subject, list(values), [Path(each) for each in also], step)
    case.begin()  # 1
    events, derived = case.rewrite()  # 2
    for _ in range(_CHECKPOINTS):  # 3
        create_checkpoint(store.log)
        step("checkpoint")
    case.rebuild_indexes()  # 4
    case.drop_derived()  # 5
    case.prove()  # 6
    erasure_records.add_record(
        store, "excise", subject, "done", events=events, derived=derived, unreached=case.unreached
    )  # 7
    step("done")
    return ExcisionResult(
        events, derived, tuple(holder.pipeline for holder in case.holders), tuple(case.unreached)
    )


def prove(store: EventStore, values: Sequence[str], *, also: Iterable[str | Path] = ()) -> None:
    """Check that values are in no file of the log's directory and of those in `also`.

    Raises:
        NotForgotten: Names all files that have one of the values, or that cannot be searched.

    """
    _check_values(values)
    _prove([store.log.store.root, *map(Path, also)], values)


def _prove(roots: Sequence[Path], values: Sequence[str]) -> None:
    if missing := [root for root in roots if not root.exists()]:
        raise InputError(
            f"{missing[0]} does not exist.",
            fix="name the directories of states, views and backups.",
        )
    found = scan(roots, values) if values else []
    if found:
        listed = "\n".join(f"    {each.file}: {each.reason}" + _file_hint(each) for each in found)
        raise NotForgotten(
            f"{len(found)} files could not be cleaned of these values:\n{listed}",
            fix=(
                "erase the values from each of these files, and run this again; it can be repeated."
            ),
        )


def _check_values(values: Sequence[str]) -> None:
    for value in values:
        if len(value) < _SHORTEST_VALUE:
            raise InputError(
                f"The value {value!r} is too short to be looked for: it would be found everywhere.",
                fix=f"give values of at least {_SHORTEST_VALUE} characters.",
            )


def _file_hint(found: ScanHit) -> str:
    parts = found.file.parts
    if "quarantine" in parts:
        return " (a copy of damaged bytes: remove it)"
    if "topics" in parts:
        return f" (the topic {parts[parts.index('topics') + 1].rpartition('~')[0]!r})"
    return ""


@dataclass
class _Excision:
    """The state of one excision."""

    store: EventStore
    subject: str
    values: list[str]
    also: list[Path]
    step: Step
    topics: set[str] = field(default_factory=set)
    """Topics, other than the events' own, of which rows go."""
    holders: list[Holder] = field(default_factory=list)

    def begin(self) -> None:
        from headrace.runtime.erasure import find_holders, obstacles

        if missing := [path for path in self.also if not path.exists()]:
            raise InputError(
                f"{missing[0]} does not exist; nothing was done.",
                fix="name the directories of states, views and backups.",
            )
        before = erasure_records.unfinished_records(self.store, "excise", self.subject)
        if (
            not before
            and plan_erasure(self.store.log, self.store.topic, has_subject(self.subject)) is None
        ):
            raise UnknownSubject(self.subject, f"the events of {self.store.name!r}")
        self.topics = {
            topic for row in before for topic in json.loads(row["details"]).get("topics", ())
        } & set(self.store.log.topics())
        by_value = has_values(self.values)
        self.topics |= {
            topic
            for topic in self._others()
            if self.values and plan_erasure(self.store.log, topic, by_value) is not None
        }
        self.holders = find_holders(self.store.log, {self.store.topic, *self.topics}, self.also)
        in_the_way = [each for holder in self.holders for each in obstacles(self.store.log, holder)]
        if in_the_way:
            raise ExcisionRefused(self.subject, in_the_way)
        erasure_records.add_record(
            self.store, "excise", self.subject, "begun", topics=sorted(self.topics)
        )
        self.step("begun")

    def _others(self) -> list[str]:
        return [
            name
            for name in self.store.log.topics()
            if name not in {self.store.topic, erasure_records.records_topic(self.store)}
        ]

    def rewrite(self) -> tuple[int, dict[str, int]]:
        """Returns how many events went, and how many rows of other topics."""
        by_value = has_values(self.values)
        events = _remove_rows(
            self.store, self.store.topic, any_of(has_subject(self.subject), by_value), self.step
        )
        derived = {output for holder in self.holders for output in holder.outputs}
        by_name = any_of(has_subject(self.subject), has_erased_entity(self.store), by_value)
        gone = {
            topic: _remove_rows(
                self.store, topic, by_name if topic in derived else by_value, self.step
            )
            for topic in self._others()
            if topic in derived or self.values
        }
        self.step("rewritten")
        return events, {topic: count for topic, count in gone.items() if count}

    def rebuild_indexes(self) -> None:
        from headrace.events.store import open_store

        _rebuild_index(self.store, self.step)
        for topic in self.topics:
            if _is_of_events(self.store, topic):
                with open_store(self.store.log, topic) as other:
                    _rebuild_index(other, self.step)
        from headrace.events.privacy.vault import remove_key

        remove_key(self.store, self.subject)
        self.step("key")

    def drop_derived(self) -> None:
        from headrace.runtime.erasure import erase_pipeline

        for holder in self.holders:
            erase_pipeline(self.store.log, holder, self.step)

    def prove(self) -> None:
        from headrace.runtime.erasure import state_directories

        states = [
            path
            for holder in self.holders
            if holder.state is not None
            for path in (holder.state, *holder.local_stores)
        ]
        others = state_directories(self.store.log.store.view().notes)
        _prove([self.store.log.store.root, *states, *others, *self.also], self.values)

    @property
    def unreached(self) -> list[str]:
        from headrace.sinks.sync import describe_followers

        read = sorted(
            {
                self.store.topic,
                *self.topics,
                *(output for holder in self.holders for output in holder.outputs),
            }
        )
        return [each for topic in read for each in describe_followers(self.store.log, topic)] + [
            each for holder in self.holders for each in holder.unreached
        ]


def _is_of_events(store: EventStore, topic: str) -> bool:
    return topic in store.log.topics() and bool(store.log.topic(topic).arrow_schema.equals(ARROW))


def _remove_rows(store: EventStore, topic: str, marked: RowPredicate, step: Step) -> int:
    """Until no row is left that should go: somebody may be appending."""
    total = 0
    for _ in range(_MAX_ROUNDS):
        goes = plan_erasure(store.log, topic, marked)
        if goes is None:
            return total
        _roll(store, topic)
        step(f"rolled {topic}")
        create_checkpoint(store.log)
        if _is_of_events(store, topic):
            # Which versions entities had reached: everything that goes now is sealed, so nothing
            # goes that is not looked at here.
            from headrace.events.store import open_store

            versions: dict[str, int] = {}
            for rows in store.log.read(topic, 0):
                gone = rows.filter(marked(rows)).select(["entity", "version"]).to_pylist()
                for row in gone:
                    versions[row["entity"]] = max(row["version"], versions.get(row["entity"], 0))
            with open_store(store.log, topic) as owner:
                erasure_records.retain_versions(owner, versions)
        step(f"sealed {topic}")
        total += _rewrite(store, goes)
        step(f"excised {topic}")
    raise NotForgotten(
        f"The topic {topic!r} gets rows that should go as quickly as they are removed.",
        fix="stop whoever writes them, and run this again.",
    )


def _rewrite(store: EventStore, goes: ErasurePlan) -> int:
    known, total = store.log.topic_state(goes.topic), 0
    for kept in goes.keep_passes():
        with maintenance_lock(
            store.log, wait=True
        ):  # compaction would put back what it had read before
            total += sum(
                excise_rows(store.log, known, number, kept)
                for number in range(len(known.partitions))
            )
    return total


def _roll(store: EventStore, topic: str) -> None:
    def decide(draft: CommitDraft) -> None:
        known = draft.state.topic(topic)
        for number in range(len(known.partitions)):
            draft.roll(known, number)

    store.log.committer.submit(decide)


def _rebuild_index(store: EventStore, step: Step) -> None:
    def decide(draft: CommitDraft) -> str:
        generation = str(int(draft.state.notes.get(generation_note(store.topic), "0")) + 1)
        draft.do("note", generation_note(store.topic), generation)
        return generation

    generation = store.log.committer.submit(decide)
    step("generation")
    store.reload()
    home = erasure_records.store_directory(store)
    for path in home.glob("index-*"):
        if path.name != f"index-{generation}":
            shutil.rmtree(path)
    sync_directory(home)
    step("index")
