"""Excision: remove what is stored about a person from a log and from what pipelines made of it, for good, and prove it. For what `vault` does not cover: events whose fields were not marked personal.

The log's offsets stay, and so does a record that something was excised. It can be repeated after a crash: every step finds what is left to do. What this cannot reach is named, never passed
over: what stands in its way is refused before anything is done; sinks and other machines that may have rows are listed; whatever file still has one of the values is an error that lists it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ExcisionRefused, InputError, NotForgotten, UnknownSubject
from headrace.events import condemned, forgetting
from headrace.events.condemned import Condemned, Marked
from headrace.events.indexed import generation_note
from headrace.events.rows import ARROW
from headrace.events.scanning import Found, scan
from headrace.log.file.compaction import excise as excise_rows
from headrace.log.file.disk import Disk
from headrace.log.file.housekeeping import alone, make_checkpoint

if TYPE_CHECKING:
    from headrace.events.store import EventStore
    from headrace.log.file.draft import Draft
    from headrace.pipeline.forgetting import Holder

Step = Callable[[str], None]
_MOST_ROUNDS = 10
_CHECKPOINTS = 2
"""The log keeps its two newest checkpoints, and the journal since the older one: after so many more, no record is left from before."""
_SHORTEST_VALUE = 4


@dataclass(frozen=True)
class Excised:
    """What went: events, rows of other topics, and the state and views of pipelines, which their next run builds again. `unreached` names who else may have something."""

    events: int
    derived: dict[str, int]
    pipelines: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()


def excise(store: EventStore, subject: str, *, values: Sequence[str] = (), also: Iterable[str | Path] = (), step: Step = lambda _name: None) -> Excised:
    """Remove a subject's events. `values` are what must be found nowhere afterwards: in the log's directory, in those of pipelines that took the events in, and in those in `also`.

    The steps, each harmless when repeated:

    1. see that there is something to do and nothing in the way, and write down that it has begun
    2. write segments anew: the events' without the subject's, other topics' without rows that go with them or have a value
    3. checkpoint until the journal has no record from before
    4. begin other indexes, and remove the older ones, with their snapshots; remove the subject's key
    5. give up what pipelines made of all that: state, clocks, views
    6. scan every file
    7. write down that it is done
    """
    _check_values(values)
    case = _Case(store, subject, list(values), [Path(each) for each in also], step)
    case.begin()  # 1
    events, derived = case.rewrite()  # 2
    for _ in range(_CHECKPOINTS):  # 3
        make_checkpoint(store.log)
        step("checkpoint")
    case.begin_indexes()  # 4
    case.give_up()  # 5
    case.prove()  # 6
    forgetting.note(store, "excise", subject, "done", events=events, derived=derived, unreached=case.unreached)  # 7
    step("done")
    return Excised(events, derived, tuple(holder.pipeline for holder in case.holders), tuple(case.unreached))


def prove(store: EventStore, values: Sequence[str], *, also: Iterable[str | Path] = ()) -> None:
    """NotForgotten, with the names of all files that have one of the values, or that cannot be looked into: in the log's directory and in those in `also`."""
    _check_values(values)
    _prove([store.log.store.root, *map(Path, also)], values)


def _prove(roots: Sequence[Path], values: Sequence[str]) -> None:
    if missing := [root for root in roots if not root.exists()]:
        raise InputError(f"{missing[0]} does not exist.", fix="name the directories of states, views and backups.")
    found = scan(roots, values) if values else []
    if found:
        listed = "\n".join(f"    {each.file}: {each.why}" + _hint(each) for each in found)
        raise NotForgotten(
            f"{len(found)} files could not be cleaned of these values:\n{listed}", fix="remove them, or what they have, and run this again; it can be repeated."
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


@dataclass
class _Case:
    """One excision on its way."""

    store: EventStore
    subject: str
    values: list[str]
    also: list[Path]
    step: Step
    topics: set[str] = field(default_factory=set)
    """Topics, other than the events' own, of which rows go."""
    holders: list[Holder] = field(default_factory=list)

    def begin(self) -> None:
        from headrace.pipeline.forgetting import holders, obstacles

        _check_there(self.also)
        before = forgetting.unfinished(self.store, "excise", self.subject)
        if not before and condemned.found(self.store.log, self.store.topic, condemned.with_subject(self.subject)) is None:
            raise UnknownSubject(self.subject, f"the events of {self.store.name!r}")
        self.topics = {topic for row in before for topic in json.loads(row["details"]).get("topics", ())} & set(self.store.log.topics())
        by_value = condemned.with_values(self.values)
        self.topics |= {topic for topic in self._others() if self.values and condemned.found(self.store.log, topic, by_value) is not None}
        self.holders = holders(self.store.log, {self.store.topic, *self.topics}, self.also)
        in_the_way = [each for holder in self.holders for each in obstacles(self.store.log, holder)]
        if in_the_way:
            raise ExcisionRefused(self.subject, in_the_way)
        forgetting.note(self.store, "excise", self.subject, "begun", topics=sorted(self.topics))
        self.step("begun")

    def _others(self) -> list[str]:
        return [name for name in self.store.log.topics() if name not in {self.store.topic, forgetting.topic(self.store)}]

    def rewrite(self) -> tuple[int, dict[str, int]]:
        """Returns how many events went, and how many rows of other topics."""
        by_value = condemned.with_values(self.values)
        events = _without(self.store, self.store.topic, condemned.any_of(condemned.with_subject(self.subject), by_value), self.step)
        derived = {output for holder in self.holders for output in holder.outputs}
        by_name = condemned.any_of(condemned.with_subject(self.subject), condemned.with_gone_entities(self.store), by_value)
        gone = {topic: _without(self.store, topic, by_name if topic in derived else by_value, self.step) for topic in self._others() if topic in derived or self.values}
        self.step("rewritten")
        return events, {topic: count for topic, count in gone.items() if count}

    def begin_indexes(self) -> None:
        from headrace.events.store import open_store

        _begin_index(self.store, self.step)
        for topic in self.topics:
            if _is_of_events(self.store, topic):
                with open_store(self.store.log, topic) as other:
                    _begin_index(other, self.step)
        _remove_key(self.store, self.subject)
        self.step("key")

    def give_up(self) -> None:
        from headrace.pipeline.forgetting import give_up

        for holder in self.holders:
            give_up(self.store.log, holder, self.step)

    def prove(self) -> None:
        from headrace.pipeline.forgetting import state_directories

        states = [path for holder in self.holders if holder.state is not None for path in (holder.state, *holder.local_stores)]
        others = state_directories(self.store.log.store.view().notes)
        _prove([self.store.log.store.root, *states, *others, *self.also], self.values)

    @property
    def unreached(self) -> list[str]:
        from headrace.sinks.followers import of_topic

        read = sorted({self.store.topic, *self.topics, *(output for holder in self.holders for output in holder.outputs)})
        return [each for topic in read for each in of_topic(self.store.log, topic)] + [each for holder in self.holders for each in holder.unreached]


def _check_there(paths: Iterable[Path]) -> None:
    if missing := [path for path in paths if not path.exists()]:
        raise InputError(f"{missing[0]} does not exist; nothing was done.", fix="name the directories of states, views and backups.")


def _is_of_events(store: EventStore, topic: str) -> bool:
    return topic in store.log.topics() and bool(store.log.topic(topic).arrow_schema.equals(ARROW))


def _without(store: EventStore, topic: str, marked: Marked, step: Step) -> int:
    """Until no row is left that should go: somebody may be appending."""
    total = 0
    for _ in range(_MOST_ROUNDS):
        goes = condemned.found(store.log, topic, marked)
        if goes is None:
            return total
        _roll(store, topic)
        step(f"rolled {topic}")
        make_checkpoint(store.log)
        if _is_of_events(store, topic):
            _keep_versions(store, topic, marked)
        step(f"sealed {topic}")
        total += _rewritten(store, goes)
        step(f"excised {topic}")
    raise NotForgotten(f"The topic {topic!r} gets rows that should go as quickly as they are removed.", fix="stop whoever writes them, and run this again.")


def _rewritten(store: EventStore, goes: Condemned) -> int:
    known, total = store.log.topic_state(goes.topic), 0
    for kept in goes.passes():
        with alone(store.log, wait=True):  # compaction would put back what it had read before
            total += sum(excise_rows(store.log, known, number, kept) for number in range(len(known.partitions)))
    return total


def _keep_versions(store: EventStore, topic: str, marked: Marked) -> None:
    """Which versions entities had reached: everything that goes now is sealed, so nothing goes that is not looked at here."""
    from headrace.events.store import open_store

    versions: dict[str, int] = {}
    for rows in store.log.read(topic, 0):
        gone = rows.filter(marked(rows)).select(["entity", "version"]).to_pylist()
        for row in gone:
            versions[row["entity"]] = max(row["version"], versions.get(row["entity"], 0))
    with open_store(store.log, topic) as owner:
        forgetting.keep_versions(owner, versions)


def _roll(store: EventStore, topic: str) -> None:
    def decide(draft: Draft) -> None:
        known = draft.state.topic(topic)
        for number in range(len(known.partitions)):
            draft.roll(known, number)

    store.log.committer.submit(decide)


def _begin_index(store: EventStore, step: Step) -> None:
    def decide(draft: Draft) -> str:
        generation = str(int(draft.state.notes.get(generation_note(store.topic), "0")) + 1)
        draft.do("note", generation_note(store.topic), generation)
        return generation

    generation = store.log.committer.submit(decide)
    step("generation")
    store.look_again()
    home = forgetting.directory(store)
    for path in home.glob("index-*"):
        if path.name != f"index-{generation}":
            shutil.rmtree(path)
    Disk().sync_directory(home)
    step("index")


def _remove_key(store: EventStore, subject: str) -> None:
    from headrace.events.vault import remove_key

    remove_key(store, subject)
