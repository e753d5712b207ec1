"""Versions: a pipeline over the same ticks again, with state, topics and views of its own.

A version is a pipeline like any other, called `<pipeline>.<version>`: its steps and outputs have
the version's name too, and it has its own ledger and journal of ticks. The journal starts with the
ticks that the pipeline has recorded, so that an unchanged pipeline gives the same rows; after them,
the version cuts its own. Where a version starts is decided once and stored in a note of the log, so
that it can be stopped at any moment and resumed.

`run.replay` runs a version; `start_version` prepares it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from headrace.durations import from_us, to_time_us
from headrace.engine.ledger import Ledger
from headrace.engine.ticks import Ends, Tick, TickJournal
from headrace.errors import ConfigurationError, NewerFormat, PlanError, nearest
from headrace.log.api import Log
from headrace.names import check_name
from headrace.plan.answer_steps import AnswersStep, RequestsOutput
from headrace.plan.plan import PipelinePlan, Step, TopicStep, topological_order
from headrace.runtime.inputs import InputTopics

VERSION = 1
_TICKS_A_COMMIT = 5_000
_TICKS_A_READ = 10_000


class ReplayRefused(ConfigurationError):
    """A version cannot be made, or not from there. The message says from where it can."""


@dataclass(frozen=True)
class VersionStart:
    """Where a version starts."""

    after: int | None
    """After this tick of its pipeline; None starts at what its inputs still have."""
    up_to: int | None
    """The last recorded tick that the version shares; None if it cuts all ticks itself."""
    version: int = VERSION

    def __str__(self) -> str:
        start = (
            "at what was kept of its inputs" if self.after is None else f"at tick {self.after + 1}"
        )
        ticks = "with new ticks" if self.up_to is None else "with the recorded ticks"
        return f"{start}, {ticks}"


def as_version(plan: PipelinePlan, version: str) -> PipelinePlan:
    """A plan under a version's name: the pipeline, its steps and its outputs. Its inputs stay."""
    check_name(version, what="version", error=PlanError)
    renamed: dict[int, Step] = {}
    for step in topological_order([*plan.inputs, *(output.input for output in plan.outputs)]):
        renamed[id(step)] = replace(
            step,
            name=f"{step.name}.{version}",
            inputs=tuple(renamed[id(source)] for source in step.inputs),
            **step.version_fields(version),
        )
    # A version calls nobody: it has the recorded answers, and needs no requests.
    own = [output for output in plan.outputs if not isinstance(output, RequestsOutput)]
    outputs = tuple(
        replace(output, name=f"{output.name}.{version}", input=renamed[id(output.input)])
        for output in own or plan.outputs
    )
    taken = {step.topic for step in plan.inputs} | {output.name for output in plan.outputs}
    for output in outputs:
        if output.name in taken:
            raise PlanError(
                f"The pipeline {plan.name!r} has an input or output {output.name!r} of its own.",
                fix="choose another name for the version.",
            )
    steps = (renamed[id(step)] for step in plan.inputs)
    inputs = tuple(step for step in steps if isinstance(step, TopicStep))
    return PipelinePlan(f"{plan.name}.{version}", inputs, outputs)


def version_state(state: Path, version: str) -> Path:
    """The state directory of a version: inside that of its pipeline."""
    return state / "versions" / version


def start_version(
    log: Log,
    plan: PipelinePlan,
    version: str,
    *,
    since: int | str | None = None,
    retick: bool = False,
) -> PipelinePlan:
    """Prepare a version to run, and return its plan. `since` is the number of its first tick, or a
    time. The steps, each of which can be repeated after a crash:

    1. Decide where the version starts, once: an earlier decision stands.
    2. Record the ticks that it shares with its pipeline, as far as they are not recorded yet.
    """
    renamed, recorded = as_version(plan, version), RecordedTicks(log, plan)
    _check_answers_exist(log, plan, version)
    decided = _read_start(log, renamed.name)
    if decided is None:
        start = recorded.find_start(since, retick=retick)
        _check_topics_are_free(log, renamed)
    else:
        start = decided
        _check_same_start(version, decided, recorded, since, retick=retick)
    if start.up_to is not None:  # the shared ticks refer to the topics that the pipeline read
        InputTopics.find(log, plan.name, [step.topic for step in plan.inputs])
    ledger, journal = Ledger.open(log, renamed.name), TickJournal.open(log, renamed.name)
    ledger.take_over()
    if decided is None:  # 1
        tx = ledger.transaction()
        tx.set_note(_note(renamed.name), json.dumps(asdict(start)))
        ledger.commit(tx)
    ticks = recorded.shared_ticks(start, journal.last)  # 2
    while chunk := list(islice(ticks, _TICKS_A_COMMIT)):
        tx = ledger.transaction()
        journal.record(tx, chunk)
        journal.note_commit(chunk, ledger.commit(tx))
    return renamed


def _check_answers_exist(log: Log, plan: PipelinePlan, version: str) -> None:
    """Refuse a version with a call that the pipeline has never run: nobody would answer."""
    topics = set(log.topics())
    for step in plan.inputs:
        if isinstance(step, AnswersStep) and step.topic not in topics:
            raise ReplayRefused(
                f"The version {version!r} has the call {step.name!r}, which the pipeline"
                f" {plan.name!r} has never run: there are no recorded answers, and a version calls"
                " nobody.",
                fix=(
                    "run the pipeline with it first (headrace run FILE): it asks about all rows,"
                    " and what it records is what the version replays."
                ),
            )


def _note(name: str) -> str:
    return f"replay.{name}"


def _read_start(log: Log, name: str) -> VersionStart | None:
    text = log.note(_note(name))
    if text is None:
        return None
    stored = json.loads(text)
    if stored["version"] > VERSION:
        raise NewerFormat(
            f"The version {name!r} has format {stored['version']}; this Headrace knows {VERSION}.",
            fix="upgrade Headrace.",
        )
    return VersionStart(**stored)


def _check_same_start(
    version: str,
    decided: VersionStart,
    recorded: RecordedTicks,
    since: int | str | None,
    *,
    retick: bool,
) -> None:
    """Check that a version which is resumed with --from or --retick was started with the same."""
    if since is None and not retick:
        return
    after = recorded.tick_before(since, retick=retick)
    if (after, retick) != (decided.after, decided.up_to is None):
        raise ReplayRefused(
            f"The version {version!r} of {recorded.pipeline!r} was begun {decided}.",
            fix=(
                "leave out --from and --retick to go on with it, or choose another name for a new"
                " version."
            ),
        )


def _check_topics_are_free(log: Log, plan: PipelinePlan) -> None:
    derived = {output.name for output in plan.outputs if output.kind == "topic"}
    taken = sorted(derived & set(log.topics()))
    if taken:
        raise ReplayRefused(
            f"There is a topic {taken[0]!r} already, and not of this version.",
            fix="choose another name for the version.",
        )


class RecordedTicks:
    """The recorded ticks of a pipeline, for a plan over the same log that may read other inputs."""

    def __init__(self, log: Log, plan: PipelinePlan) -> None:
        topics = log.topics()
        pipelines = [
            topic.removeprefix("__ticks.") for topic in topics if topic.startswith("__ticks.")
        ]
        if plan.name not in pipelines:
            raise ReplayRefused(
                f"The pipeline {plan.name!r} has never run on this log:"
                f" {nearest(plan.name, pipelines)}",
                fix="run it first.",
            )
        self.log = log
        self.pipeline = plan.name
        self.journal = TickJournal.open(log, plan.name)
        # A topic that does not exist yet has no rows in these ticks.
        self.topics = sorted({step.topic for step in plan.inputs} & set(topics))

    # Where to start

    def find_start(self, since: int | str | None, *, retick: bool) -> VersionStart:
        after = self.tick_before(since, retick=retick)
        if after is not None:
            self.check_history(after)
        return VersionStart(after, None if retick else self._first_and_last()[1].number)

    def tick_before(self, since: int | str | None, *, retick: bool) -> int | None:
        """The tick after which a version starts; None to start at what the inputs still have."""
        if since is not None:
            return self.find_tick(since) - 1
        return None if retick else self._first_and_last()[0].number

    def _first_and_last(self) -> tuple[Tick, Tick]:
        first, last = self.journal.first, self.journal.last
        if first is None or last is None:
            raise ReplayRefused(
                f"The pipeline {self.pipeline!r} has no ticks yet.", fix="run it first."
            )
        return first, last

    def find_tick(self, since: int | str) -> int:
        """The number of a tick: given as a number, or the first one at or after a time."""
        first, last = self._first_and_last()
        number: int | None = None
        if isinstance(since, str):
            time_us = to_time_us(since)
            later = (tick.number for tick in self._read(first.number) if tick.time_us >= time_us)
            number = next(later, None)
        elif first.number < since <= last.number:
            number = since
        if number is None:
            at_or_after = "at or after " if isinstance(since, str) else ""
            raise ReplayRefused(
                f"The pipeline {self.pipeline!r} has no tick {at_or_after}{since}.",
                fix=(
                    f"choose one from {first.number + 1} to {last.number}, of {_time_text(last)};"
                    " what comes later it has not seen either."
                ),
            )
        return number

    def check_history(self, after: int) -> None:
        """Check that retention and compaction have left all rows after a tick. Without them, a
        replay would silently give other rows.
        """
        whole_from = {topic: self.log.whole_from(topic) for topic in self.topics}
        tick = self.journal.at(after)
        assert tick is not None
        ends = self._ends_of(tick)
        gone = [
            (topic, partition, offset)
            for topic, parts in whole_from.items()
            for partition, offset in parts.items()
            if offset > ends.get(topic, {}).get(partition, 0)
        ]
        if not gone:
            return
        topic, partition, offset = gone[0]
        fixes = ["--retick builds the version from what is kept, with new ticks."]
        earliest = next((tick for tick in self._read(after) if self._has(tick, whole_from)), None)
        if earliest is not None and earliest.number < self._first_and_last()[1].number:
            first = f"--from {earliest.number + 1} (behind {_time_text(earliest)}) is the earliest"
            fixes.insert(0, first)
        raise ReplayRefused(
            f"A replay of {self.pipeline!r} from tick {after + 1} needs rows of"
            f" {topic}[{partition}] that retention or compaction has taken away: it is whole from"
            f" offset {offset} on.",
            fix="; ".join(fixes),
        )

    def _has(self, tick: Tick, whole_from: Mapping[str, Mapping[int, int]]) -> bool:
        """Whether all rows after a tick are still there."""
        ends = self._ends_of(tick)
        return all(
            ends.get(topic, {}).get(partition, 0) >= offset
            for topic, parts in whole_from.items()
            for partition, offset in parts.items()
        )

    # The ticks

    def _read(self, after: int, up_to: int | None = None) -> Iterator[Tick]:
        """The ticks (after, up_to], or up to the newest. There may be many, so they are read in
        chunks.
        """
        last = self._first_and_last()[1].number if up_to is None else up_to
        while after < last and (
            chunk := self.journal.between(after, min(last, after + _TICKS_A_READ))
        ):
            yield from chunk
            after = chunk[-1].number

    def shared_ticks(self, start: VersionStart, last: Tick | None) -> Iterator[Tick]:
        """The ticks that a version shares with its pipeline, after the `last` one that it has
        recorded. The first one only says where the version starts. A version that cuts all ticks
        itself shares none.
        """
        if start.after is None:
            return
        after, ends = (start.after - 1, {}) if last is None else (last.number, last.ends)
        for tick in self._read(after, start.after if start.up_to is None else start.up_to):
            ends = _advance_ends(self._ends_of(tick), ends)
            yield replace(tick, ends=ends)

    def _ends_of(self, tick: Tick) -> Ends:
        """A tick's ends in the plan's inputs. For an input that the tick does not have, by the time
        at which rows were appended.
        """
        ends: dict[str, Mapping[int, int]] = {}
        for topic in self.topics:
            if topic in tick.ends:
                ends[topic] = tick.ends[topic]
            elif tick.time_us <= 0:
                ends[topic] = dict.fromkeys(range(self.log.topic(topic).partitions), 0)
            else:
                ends[topic] = self.log.offsets_at(topic, from_us(tick.time_us + 1))
        return ends


def _advance_ends(ends: Ends, before: Ends) -> Ends:
    """The ends, or those before where they are higher: an end never goes back."""
    return {
        topic: {p: max(end, before.get(topic, {}).get(p, 0)) for p, end in parts.items()}
        for topic, parts in ends.items()
    }


def _time_text(tick: Tick) -> str:
    return from_us(tick.time_us).isoformat(timespec="seconds")
