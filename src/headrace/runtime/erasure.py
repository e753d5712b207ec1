"""Erasure: what pipelines have computed from rows that must be forgotten. Who has read the rows,
directly or through other pipelines (`find_holders`), and how all of it is erased
(`erase_pipeline`).

Nothing in a pipeline's state says which row it came from, so single values cannot be looked for.
State is erased as a whole: the next run computes it again, over the recorded ticks, from what is
left in the log. Views are emptied and built again with it. Derived topics are histories that others
have read, with offsets that stay: they are not written again (`QueryArrangement.rebuild_to`), and
the caller decides which of their rows go. `headrace.events.privacy` calls this.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.alerts.alert import TOPIC
from headrace.alerts.decision import erase_rows
from headrace.atomic_file import sync_directory
from headrace.engine.ledger import MAIN_QUERY, Ledger
from headrace.engine.ticks import TickJournal
from headrace.errors import CorruptionError
from headrace.log.api import Log
from headrace.run_status import FILE, read_status, running_elsewhere
from headrace.runtime.query_assignment import Arrangement, note_name, stored_arrangement
from headrace.views.file import VIEWS_FILE, scrub

ALERTS = TOPIC
"""The topic of the messages of alerts."""
_TICKS = "__ticks."
_ERASED = ("steps", "clocks", "jobs", "local")


@dataclass(frozen=True)
class Holder:
    """A pipeline, or a version of one, that has read some topics."""

    pipeline: str
    inputs: frozenset[str]
    outputs: frozenset[str]
    id: str | None
    """The id of its state directory."""
    state: Path | None
    """Its state directory, where the log says it is or where it was moved to."""

    @property
    def local_stores(self) -> list[Path]:
        """Its directories for local stores on this machine, outside of the state directory."""
        if self.state is None:
            return []
        paths = {self._cluster_local}
        if self._status_local:
            paths.add(Path(self._status_local))
        return [path for path in paths if path.exists()]

    @property
    def unreached(self) -> list[str]:
        """What it has on other machines, in words."""
        if not self._status_local or Path(self._status_local) != self._cluster_local:
            return []
        return [
            (
                f"the local stores of the pipeline {self.pipeline!r} on other machines of its"
                f" cluster: headrace-{self.id} in their temporary directories"
            )
        ]

    @property
    def _cluster_local(self) -> Path:
        """Where each machine of a cluster has its local stores."""
        return Path(tempfile.gettempdir()) / f"headrace-{self.id}"

    @property
    def _status_local(self) -> str:
        """The directory for local stores of its last run, if that is known."""
        if self.state is None or not (self.state / FILE).exists():
            return ""
        return read_status(self.state).local


def find_holders(
    log: Log, topics: Collection[str], directories: Iterable[Path] = ()
) -> list[Holder]:
    """All pipelines that have read these topics, or topics that one of them derived from them. A
    state directory that was moved is searched among `directories`.
    """
    moved = {
        state_id: path
        for path in _candidate_directories(directories)
        if (state_id := _state_id(path)) is not None
    }
    candidates = [
        _holder(log, name.removeprefix(_TICKS), moved)
        for name in log.topics()
        if name.startswith(_TICKS)
    ]
    reached, holders = set(topics), list[Holder]()
    while more := [each for each in candidates if each not in holders and each.inputs & reached]:
        holders += more
        reached |= {output for holder in more for output in holder.outputs}
    return holders


def _holder(log: Log, pipeline: str, moved: Mapping[str, Path]) -> Holder:
    last = TickJournal.open(log, pipeline).last
    queries = stored_arrangement(log, pipeline).queries.values()
    outputs = frozenset(output for query in queries for output in query.outputs)
    note = json.loads(log.note(f"state.{pipeline}") or "null")
    state_id, state = None, None
    if note is not None:
        state_id, state = note["id"], Path(note["path"])
        if _state_id(state) != state_id:
            state = moved.get(state_id, state)
    return Holder(
        pipeline=pipeline,
        inputs=frozenset(last.ends if last is not None else ()),
        outputs=outputs & frozenset(log.topics()),
        id=state_id,
        state=state,
    )


def _candidate_directories(directories: Iterable[Path]) -> Iterator[Path]:
    for path in directories:
        yield path
        if path.is_dir():
            yield from (file.parent for file in path.rglob("state.json"))


def _state_id(directory: Path) -> str | None:
    try:
        return str(json.loads((directory / "state.json").read_text())["id"])
    except (OSError, ValueError, KeyError):
        return None


def state_directories(notes: Mapping[str, str]) -> list[Path]:
    """The state directories of all pipelines in a log's notes that are on this machine. They
    include pipelines whose ticks were deleted, of which nobody knows what they read.
    """
    paths = {
        Path(json.loads(text)["path"]) for name, text in notes.items() if name.startswith("state.")
    }
    return sorted(path for path in paths if path.exists())


def obstacles(log: Log, holder: Holder, *, is_retired: bool = False) -> list[str]:
    """Why a pipeline cannot be erased and built again, in words. Empty if it can. A retired one
    need not be built again.
    """
    reasons = []
    if holder.state is not None and _state_id(holder.state) != holder.id:
        reasons.append(
            f"the state of the pipeline {holder.pipeline!r} is not in {holder.state}, where it last"
            " ran: name its directory"
        )
    elif holder.state is not None:
        reasons += _running(holder.pipeline, holder.state)
    first = TickJournal.open(log, holder.pipeline).first
    for topic in () if is_retired else sorted(holder.inputs & set(log.topics())):
        gone = [
            (partition, offset)
            for partition, offset in log.whole_from(topic).items()
            if first is not None and offset > first.end(topic, partition)
        ]
        if gone:
            partition, offset = gone[0]
            reasons.append(
                f"the pipeline {holder.pipeline!r} cannot be built again: retention or compaction"
                f" has taken rows of {topic}[{partition}] before offset {offset}"
            )
    return reasons


def _running(pipeline: str, state: Path) -> list[str]:
    """That a pipeline is running, or that nobody can tell, in words."""
    try:
        other = running_elsewhere(state)
    except CorruptionError as damaged:
        return [
            (
                f"whether the pipeline {pipeline!r} is running cannot be seen. {damaged.message}"
                " Run it once, and stop it"
            )
        ]
    if other is None:
        return []
    return [
        f"the pipeline {pipeline!r} is running, in process {other.process} on {other.host}: stop it"
    ]


def erase_pipeline(
    log: Log, holder: Holder, on_step: Callable[[str], None] = lambda _name: None
) -> None:
    """Erase what a pipeline has computed, for good. The steps, each harmless when repeated:

    1. In one commit, which fences older runners, remove the ledger's newest entries and store up to
       which tick topics have been emitted.
    2. Delete the ledger's older entries: they lead to files that go.
    3. Remove state files, watermarks and local stores.
    4. Scrub the views.
    """
    _remove_entries(log, holder.pipeline)  # 1
    on_step(f"given up {holder.pipeline}")
    ledger_topic = Ledger(log, holder.pipeline).topic  # 2
    if ledger_topic in log.topics():
        log.delete_topic(ledger_topic)
    on_step(f"ledger {holder.pipeline}")
    if holder.state is None:
        return
    for path in [*(holder.state / name for name in _ERASED), *holder.local_stores]:  # 3
        if path.exists():
            shutil.rmtree(path)
    sync_directory(holder.state)
    on_step(f"state {holder.pipeline}")
    scrub(holder.state / VIEWS_FILE)  # 4
    on_step(f"views {holder.pipeline}")


def clean_note(name: str, text: str, is_erased: Callable[[str], bool]) -> str:
    """A note without the rows, as JSON, that are erased: the states of pipelines' alerts and of
    `headrace watch` have some.
    """
    if name.startswith("alerting.") and text.startswith("{"):
        return erase_rows(text, is_erased)
    if not name.startswith("watching."):
        return text
    firing = json.loads(text)
    kept = [item for item in firing if not is_erased(json.dumps(item))]
    return text if len(kept) == len(firing) else json.dumps(kept)


def retire_pipeline(log: Log, holder: Holder) -> None:
    """Give up a pipeline that was erased: its recorded ticks go, so that nobody expects it to be
    built again. Run once more, it begins with the rows that are left.
    """
    if (ticks := f"{_TICKS}{holder.pipeline}") in log.topics():
        log.delete_topic(ticks)


def _remove_entries(log: Log, pipeline: str) -> None:
    ledger = Ledger.open(log, pipeline)
    ledger.take_over()
    stored = stored_arrangement(log, pipeline)
    entries = {name: ledger.last(name) for name in {*stored.queries, MAIN_QUERY}}
    queries = {}
    for name, query in stored.queries.items():
        entry = entries[name]
        rebuild_to = max(query.rebuild_to, entry.tick if entry is not None else 0)
        queries[name] = replace(query, rebuild_to=rebuild_to)
    tx = ledger.transaction()
    for name in entries:
        ledger.remove(tx, name)
    tx.set_note(note_name(pipeline), Arrangement(queries).to_json())
    ledger.commit(tx)
