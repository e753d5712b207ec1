"""What pipelines have made of rows that must be forgotten: who has taken them in, directly or
through other pipelines, and how all of that goes.

Nothing in a pipeline's state says which row it came from, so single values are not looked for.
State is given up as a whole: the next run computes it again, over the recorded ticks, from what is
left in the log. Views are emptied, and built again in the same go. Derived topics are histories
that others have read, with offsets that stay: they are not written again (`Arranged.again`); which
of their rows go is for the caller to say.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.atomic_file import sync_directory
from headrace.engine.ledger import MAIN_QUERY, Ledger
from headrace.engine.ticks import TickJournal
from headrace.log.api import Log
from headrace.runtime.arrangement import Arrangement, note_name
from headrace.runtime.status import FILE, read_status, running_elsewhere
from headrace.views.file import VIEWS_FILE, scrub

_TICKS = "__ticks."
_DERIVED = ("steps", "clocks", "jobs", "local")


@dataclass(frozen=True)
class Holder:
    """A pipeline, or a version of one, that has taken in some topics. `state` is where the log says
    its state is, or a directory given that is the same one.
    """

    pipeline: str
    inputs: frozenset[str]
    outputs: frozenset[str]
    id: str | None
    state: Path | None

    @property
    def local_stores(self) -> list[Path]:
        """Where its state is at hand on this machine, outside of its state directory: where that
        was told, and where a cluster's machines have it.
        """
        if self.state is None:
            return []
        told = read_status(self.state).local if (self.state / FILE).exists() else ""
        return [
            path
            for path in {
                Path(tempfile.gettempdir()) / f"headrace-{self.id}",
                *([Path(told)] if told else []),
            }
            if path.exists()
        ]

    @property
    def unreached(self) -> list[str]:
        """What it has elsewhere, by name."""
        if self.state is None or not (self.state / FILE).exists():
            return []
        told = read_status(self.state).local
        elsewhere = told and Path(told) == Path(tempfile.gettempdir()) / f"headrace-{self.id}"
        return (
            [
                f"the state at hand of the pipeline {self.pipeline!r} on other machines of its"  # noqa: ISC004
                f" cluster: headrace-{self.id} in their temporary directories"
            ]
            if elsewhere
            else []
        )


def holders(log: Log, topics: Collection[str], given: Iterable[Path] = ()) -> list[Holder]:
    """All that have taken in these topics, or what one of them made of them. `given` are
    directories among which one may be that was moved.
    """
    moved = {known: path for path in _state_directories(given) if (known := _id(path)) is not None}
    all_of_them = [
        _holder(log, name.removeprefix(_TICKS), moved)
        for name in log.topics()
        if name.startswith(_TICKS)
    ]
    reached, found = set(topics), list[Holder]()
    while more := [each for each in all_of_them if each not in found and each.inputs & reached]:
        found += more
        reached |= {output for each in more for output in each.outputs}
    return found


def _holder(log: Log, name: str, moved: dict[str, Path]) -> Holder:
    journal = TickJournal(log, name)
    inputs = frozenset(journal.last.ends if journal.last is not None else ())
    stored = Arrangement.from_json(log.note(note_name(name)))
    outputs = frozenset(
        output for each in stored.queries.values() for output in each.outputs
    ) & frozenset(log.topics())
    place = json.loads(log.note(f"state.{name}") or "null")
    if place is None:
        return Holder(name, inputs, outputs, None, None)
    path = Path(place["path"])
    return Holder(
        name,
        inputs,
        outputs,
        place["id"],
        path if _id(path) == place["id"] else moved.get(place["id"], path),
    )


def _state_directories(given: Iterable[Path]) -> Iterable[Path]:
    for path in given:
        yield path
        yield from (found.parent for found in path.rglob("state.json")) if path.is_dir() else ()


def _id(directory: Path) -> str | None:
    try:
        return str(json.loads((directory / "state.json").read_text())["id"])
    except (OSError, ValueError, KeyError):
        return None


def state_directories(notes: Mapping[str, str]) -> list[Path]:
    """Those of all pipelines that a log's notes know, as far as they are on this machine: also of
    pipelines whose ticks were deleted, of which nobody knows what they read.
    """
    places = {
        Path(json.loads(text)["path"]) for name, text in notes.items() if name.startswith("state.")
    }
    return sorted(path for path in places if path.exists())


def obstacles(log: Log, holder: Holder) -> list[str]:
    """Why what a pipeline has cannot be given up and built again, if it cannot."""
    found = []
    if holder.state is not None and _id(holder.state) != holder.id:
        found.append(
            f"the state of the pipeline {holder.pipeline!r} is not in {holder.state}, where it last"
            " ran: name its directory"
        )
    elif holder.state is not None and (other := running_elsewhere(holder.state)) is not None:
        found.append(
            f"the pipeline {holder.pipeline!r} is running, in process {other.process} on"
            f" {other.host}: stop it"
        )
    first = TickJournal(log, holder.pipeline).first
    for topic in sorted(holder.inputs & set(log.topics())):
        gone = [
            (p, offset)
            for p, offset in log.whole_from(topic).items()
            if first is not None and offset > first.end(topic, p)
        ]
        found += [
            f"the pipeline {holder.pipeline!r} cannot be built again: retention or compaction has"
            f" taken rows of {topic}[{p}] before offset {offset}"
            for p, offset in gone[:1]
        ]
    return found


def give_up(log: Log, holder: Holder, step: Callable[[str], None] = lambda _name: None) -> None:
    """Remove what a pipeline has made, for good. The steps, each harmless when repeated:

    1. in one commit, which an older runner does not survive: strike out what the ledger says, and
       note up to which tick topics have been told
    2. drop the ledger's older entries: they lead to files that go
    3. remove state files, clocks and what is at hand of them, and leave nothing in views
    """
    _begin_again(log, holder.pipeline)  # 1
    step(f"given up {holder.pipeline}")
    if (topic := Ledger(log, holder.pipeline).topic) in log.topics():  # 2
        log.delete_topic(topic)
    step(f"ledger {holder.pipeline}")
    if holder.state is None:
        return
    for path in [*(holder.state / name for name in _DERIVED), *holder.local_stores]:  # 3
        if path.exists():
            shutil.rmtree(path)
    sync_directory(holder.state)
    step(f"state {holder.pipeline}")
    scrub(holder.state / VIEWS_FILE)
    step(f"views {holder.pipeline}")


def _begin_again(log: Log, pipeline: str) -> None:
    ledger = Ledger(log, pipeline)
    ledger.take_over()
    stored = Arrangement.from_json(log.note(note_name(pipeline)))
    entries = {name: ledger.last(name) for name in {*stored.queries, MAIN_QUERY}}
    again = {
        name: max(each.again, entry.tick if (entry := entries[name]) is not None else 0)
        for name, each in stored.queries.items()
    }
    tx = ledger.transaction()
    for name in entries:
        ledger.strike_out(tx, name)
    tx.set_note(
        note_name(pipeline),
        Arrangement(
            {name: replace(each, again=again[name]) for name, each in stored.queries.items()}
        ).to_json(),
    )
    ledger.commit(tx)
