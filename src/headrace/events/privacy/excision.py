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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.atomic_file import sync_directory
from headrace.errors import ExcisionRefused, InputError, NotForgotten, UnknownSubject
from headrace.events import index
from headrace.events.event import is_event_schema
from headrace.events.privacy import erasure_records
from headrace.events.privacy.log_state import (
    RowTest,
    checkpoint_places,
    json_rows,
    obstacles,
    scrub,
)
from headrace.events.privacy.scan import ScanHit, scan
from headrace.events.privacy.spellings import Spellings
from headrace.events.truncation import rebuild_index, roll_segments
from headrace.log.file.checkpoint import CHECKPOINT_SUFFIX, load_checkpoint
from headrace.log.file.compaction import excise as excise_rows
from headrace.log.file.maintenance import create_checkpoint, maintenance_lock
from headrace.log.partitioning import key_bytes

if TYPE_CHECKING:
    from headrace.events.store import EventStore
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


def has_values(spellings: Spellings) -> RowPredicate:
    """Match rows that have one of the values in a column, in any spelling."""
    return spellings.mask_rows


def names_in_alerts(pipelines: Collection[str], is_named: RowTest) -> RowPredicate:
    """Match messages of pipelines' alerts with a row that names the person or an erased entity."""

    def marked(rows: pa.RecordBatch) -> pa.BooleanArray:
        found = [
            pipeline in pipelines and any(map(is_named, json_rows(content or "")))
            for pipeline, content in zip(
                rows.column("pipeline").to_pylist(), rows.column("content").to_pylist(), strict=True
            )
        ]
        return pa.array(found, pa.bool_())

    return marked


def erased_entities(store: EventStore) -> Callable[[str], bool]:
    """Whether an entity had events, and has none any more."""
    where = store.log.topic_state(store.topic).directory
    gone = index.retained_versions(store.log, store.topic).keys() - {
        index.hashed_name(where, entity) for entity in _entities(store)
    }
    return lambda entity: bool(gone) and index.hashed_name(where, entity) in gone


def has_erased_entity(store: EventStore) -> RowPredicate:
    """Match rows that name an entity of which no event is left."""
    is_gone = erased_entities(store)

    def marked(rows: pa.RecordBatch) -> pa.BooleanArray:
        if "entity" not in rows.schema.names or rows.column("entity").type != pa.string():
            return _none(rows)
        column = rows.column("entity")
        names = [name for name in pc.unique(column).to_pylist() if name and is_gone(name)]
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
    retire: Iterable[str] = (),
    step: Step = lambda _name: None,
) -> ExcisionResult:
    """Remove a subject's events, and what was derived from them.

    Each step is harmless when it is repeated:

    1. Check that there is something to remove and no obstacle, and record the beginning.
    2. Rewrite segments: the events' without the subject's, other topics' without rows that go with
       them or have a value. Clean what the log knows besides rows: notes of alerts, producers' ids.
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
        retire: Pipelines to give up, with their state and views: those that cannot be built again
            from the rows that are left.
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
    case = _Excision(
        store=store,
        subject=subject,
        values=list(values),
        also=[Path(each) for each in also],
        retired=frozenset(retire),
        step=step,
    )
    case.begin()  # 1
    events, derived = case.rewrite()  # 2
    case.scrub()
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
        listed = "\n".join(
            f"    {each.file}: {each.reason}{_file_hint(each, values)}" for each in found
        )
        raise NotForgotten(
            f"{len(found)} files still have one of these values:\n{listed}",
            fix=(
                "do what each line says, and run this again. The log writes its own files anew:"
                " leave them alone, since rows are lost with them."
            ),
        )


def _check_values(values: Sequence[str]) -> None:
    for value in values:
        if len(value) < _SHORTEST_VALUE:
            raise InputError(
                f"The value {value!r} is too short to be looked for: it would be found everywhere.",
                fix=f"give values of at least {_SHORTEST_VALUE} characters.",
            )


def _file_hint(found: ScanHit, values: Sequence[str]) -> str:
    """Which part of a file has a value, and what to do about it."""
    parts = found.file.parts
    if "quarantine" in parts:
        return " (a copy of damaged bytes: `headrace events excise` removes it)"
    if found.file.suffix == CHECKPOINT_SUFFIX:
        content = load_checkpoint(found.file.parent, int(found.file.stem))
        places = [] if content is None else checkpoint_places(content, Spellings(values))
        return f" ({', '.join(places) or 'a part that is not known'}: excise the values)"
    if "topics" in parts:
        topic = parts[parts.index("topics") + 1].rpartition("~")[0]
        return f" (the topic {topic!r}: excise the values)"
    if "journal" in parts or "events" in parts:
        return " (excise the values)"
    if "staging" in parts:
        return " (rows of a transaction that did not commit: maintenance removes them in a day)"
    return " (no file of the log: have the program that wrote it erase the value)"


@dataclass
class _Excision:
    """The state of one excision."""

    store: EventStore
    subject: str
    values: list[str]
    also: list[Path]
    retired: frozenset[str]
    step: Step
    topics: set[str] = field(default_factory=set)
    """Topics, other than the events' own, of which rows go."""
    holders: list[Holder] = field(default_factory=list)

    @cached_property
    def spellings(self) -> Spellings:
        return Spellings(self.values)

    def begin(self) -> None:
        from headrace.runtime.erasure import clean_note, find_holders
        from headrace.runtime.erasure import obstacles as pipeline_obstacles

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
        by_value = has_values(self.spellings)
        self.topics |= {
            topic
            for topic in self._others()
            if self.values and plan_erasure(self.store.log, topic, by_value) is not None
        }
        self.holders = find_holders(self.store.log, {self.store.topic, *self.topics}, self.also)
        in_the_way = [
            *obstacles(self.store.log.store.view(), self.spellings, clean_note),
            *(
                each
                for holder in self.holders
                for each in pipeline_obstacles(
                    self.store.log, holder, is_retired=holder.pipeline in self.retired
                )
            ),
        ]
        if unknown := self.retired - {holder.pipeline for holder in self.holders}:
            raise InputError(
                f"The pipeline {min(unknown)!r} has read none of these events; nothing was done.",
                fix="name a pipeline that stands in the way.",
            )
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
        by_value = has_values(self.spellings)
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
        self._rewrite_alerts(gone)
        self.step("rewritten")
        return events, {topic: count for topic, count in gone.items() if count}

    def _rewrite_alerts(self, gone: dict[str, int]) -> None:
        """Remove messages about rows that name the subject: they are texts, not columns."""
        from headrace.runtime.erasure import ALERTS

        if ALERTS in self._others() and self.holders:
            pipelines = {holder.pipeline for holder in self.holders}
            marked = names_in_alerts(pipelines, self._is_named())
            gone[ALERTS] = gone.get(ALERTS, 0) + _remove_rows(self.store, ALERTS, marked, self.step)

    def _is_named(self) -> RowTest:
        """Whether a row, as JSON, names the subject or an entity of which no event is left."""
        is_gone = erased_entities(self.store)

        def is_named(row: Mapping[str, Any]) -> bool:
            entity = row.get("entity")
            return row.get("subject") == self.subject or (
                isinstance(entity, str) and is_gone(entity)
            )

        return is_named

    def scrub(self) -> None:
        """Clean notes and producers' ids, and remove copies of damaged bytes with a value."""
        from headrace.runtime.erasure import clean_note

        is_named = self._is_named() if self.holders else _names_nobody
        scrub(self.store.log, self.spellings, is_named, clean_note)
        self.step("notes")
        quarantine = self.store.log.store.root / "quarantine"
        if self.values and quarantine.exists():
            for hit in scan([quarantine], self.values):
                hit.file.unlink(missing_ok=True)
            sync_directory(quarantine)
        self.step("quarantine")

    def rebuild_indexes(self) -> None:
        from headrace.events.store import open_store

        rebuild_index(self.store, self.step)
        for topic in self.topics:
            if _is_of_events(self.store, topic):
                with open_store(self.store.log, topic) as other:
                    rebuild_index(other, self.step)
        from headrace.events.privacy.vault import remove_key

        remove_key(self.store, self.subject)
        self.step("key")

    def drop_derived(self) -> None:
        from headrace.runtime.erasure import erase_pipeline, retire_pipeline

        for holder in self.holders:
            erase_pipeline(self.store.log, holder, self.step)
            if holder.pipeline in self.retired:
                retire_pipeline(self.store.log, holder)

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


def _names_nobody(_row: Mapping[str, Any]) -> bool:
    return False


def _is_of_events(store: EventStore, topic: str) -> bool:
    return topic in store.log.topics() and is_event_schema(store.log.topic(topic).arrow_schema)


def _remove_rows(store: EventStore, topic: str, marked: RowPredicate, step: Step) -> int:
    """Until no row is left that should go: somebody may be appending."""
    total = 0
    for _ in range(_MAX_ROUNDS):
        goes = plan_erasure(store.log, topic, marked)
        if goes is None:
            return total
        roll_segments(store, topic)
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
