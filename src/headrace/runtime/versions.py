"""A version of a pipeline beside it: the same ticks over again, with state, topics and views of its
own.

A version is a pipeline like any other, called `<pipeline>.<version>`: its steps and outputs carry
the version's name too, and it has a ledger and a journal of ticks. The journal begins with the
ticks that the pipeline has recorded, so an unchanged pipeline gives the same rows; behind them the
version cuts its own. What was decided when a version was begun stands in a note of the log, so that
it can be stopped at any moment and gone on with.
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
from headrace.log.topic_config import check_name
from headrace.plan.plan import PipelinePlan, Step, TopicStep, topological_order
from headrace.runtime.inputs import Sources

VERSION = 1
_TICKS_A_COMMIT = 5_000
_TICKS_AT_ONCE = 10_000


@dataclass(frozen=True)
class Beginning:
    """How a version begins: behind tick `after` of its pipeline, or, without one, at what is kept
    of its inputs; then come the recorded ticks up to `up_to`.
    """

    after: int | None
    up_to: int | None
    version: int = VERSION


class ReplayRefused(ConfigurationError):
    """A version that cannot be made, or not from there. Says from where it can."""


# What a version is called


def as_version(plan: PipelinePlan, version: str) -> PipelinePlan:
    """The same plan under the version's name: pipeline, steps and outputs; what it reads stays what
    it is.
    """
    check_name(version, what="version", error=PlanError)
    named: dict[int, Step] = {}
    for step in topological_order([*plan.inputs, *(output.input for output in plan.outputs)]):
        inputs = tuple(named[id(each)] for each in step.inputs)
        named[id(step)] = replace(
            step, name=f"{step.name}.{version}", inputs=inputs, **step.renamed(version)
        )
    outputs = tuple(
        replace(each, name=f"{each.name}.{version}", input=named[id(each.input)])
        for each in plan.outputs
    )
    taken = {step.topic for step in plan.inputs} | {output.name for output in plan.outputs}
    for output in outputs:
        if output.name in taken:
            raise PlanError(
                f"The pipeline {plan.name!r} has an input or output {output.name!r} of its own.",
                fix="choose another name for the version.",
            )
    read = tuple(
        step for step in (named[id(each)] for each in plan.inputs) if isinstance(step, TopicStep)
    )
    return PipelinePlan(f"{plan.name}.{version}", read, outputs)


def version_state(state: Path, version: str) -> Path:
    """Where a version keeps its state and views: inside its pipeline's state directory."""
    return state / "versions" / version


# Beginning one, and going on with it


def begin(
    log: Log,
    plan: PipelinePlan,
    version: str,
    *,
    since: int | str | None = None,
    retick: bool = False,
) -> PipelinePlan:
    """Make a version ready to run, and return its plan. `since`: a tick's number, or a time, whose
    first tick it is.

    The steps, each of which can be repeated after a crash:

    1. decide where it begins, once: what was decided before stands
    2. record the ticks that it shares with its pipeline, as far as they are not yet recorded
    """
    renamed, past = as_version(plan, version), _Past(log, plan)
    decided = _decided(log, renamed.name)
    if decided is None:
        chosen = past.beginning(since, retick=retick)
        _refuse_taken_topics(log, renamed)
    else:
        chosen = decided
        _refuse_another_beginning(version, decided, past, since, retick=retick)
    if chosen.up_to is not None:  # its ticks are of the topics that the pipeline read
        Sources(log, plan.name, [step.topic for step in plan.inputs])
    ledger, journal = Ledger(log, renamed.name), TickJournal(log, renamed.name)
    ledger.take_over()
    if decided is None:  # 1
        tx = ledger.transaction()
        tx.set_note(_note(renamed.name), json.dumps(asdict(chosen)))
        ledger.commit(tx)
    _record(ledger, journal, past.ticks(chosen, journal.last))  # 2
    return renamed


def _refuse_another_beginning(
    version: str, decided: Beginning, past: _Past, since: int | str | None, *, retick: bool
) -> None:
    """Whoever says again where a version begins, must say the same."""
    if since is None and not retick:
        return
    if (past.place(since, retick=retick), retick) != (decided.after, decided.up_to is None):
        raise ReplayRefused(
            f"The version {version!r} of {past.name!r} was begun {_described(decided)}.",
            fix=(
                "leave out --from and --retick to go on with it, or choose another name for a new"
                " version."
            ),
        )


def _described(decided: Beginning) -> str:
    where = (
        "at what was kept of its inputs"
        if decided.after is None
        else f"at tick {decided.after + 1}"
    )
    return f"{where}, {'with new ticks' if decided.up_to is None else 'with the recorded ticks'}"


def _decided(log: Log, name: str) -> Beginning | None:
    text = log.note(_note(name))
    if text is None:
        return None
    stored = json.loads(text)
    if stored["version"] > VERSION:
        raise NewerFormat(
            f"The version {name!r} has format {stored['version']}; this Headrace knows {VERSION}.",
            fix="upgrade Headrace.",
        )
    return Beginning(**stored)


def _note(name: str) -> str:
    return f"replay.{name}"


def _refuse_taken_topics(log: Log, plan: PipelinePlan) -> None:
    taken = sorted(
        {output.name for output in plan.outputs if output.kind == "topic"} & set(log.topics())
    )
    if taken:
        raise ReplayRefused(
            f"There is a topic {taken[0]!r} already, and not of this version.",
            fix="choose another name for the version, or delete the topic.",
        )


def _record(ledger: Ledger, journal: TickJournal, ticks: Iterator[Tick]) -> None:
    """In commits of bounded size."""
    while chunk := list(islice(ticks, _TICKS_A_COMMIT)):
        tx = ledger.transaction()
        journal.record(tx, chunk)
        journal.took(chunk, ledger.commit(tx))


class _Past:
    """The recorded ticks of a pipeline, for a plan over the same log that may read other inputs."""

    def __init__(self, log: Log, plan: PipelinePlan) -> None:
        known = [
            topic.removeprefix("__ticks.") for topic in log.topics() if topic.startswith("__ticks.")
        ]
        if plan.name not in known:
            raise ReplayRefused(
                f"The pipeline {plan.name!r} has never run on this log:"
                f" {nearest(plan.name, known)}",
                fix="run it first.",
            )
        self.log, self.name, self.journal = log, plan.name, TickJournal(log, plan.name)
        self.topics = sorted(
            {step.topic for step in plan.inputs} & set(log.topics())
        )  # one that is not there yet has no rows in these ticks

    # Where to begin

    def beginning(self, since: int | str | None, *, retick: bool) -> Beginning:
        after = self.place(since, retick=retick)
        if after is not None:
            self._refuse_what_is_gone(after)
        return Beginning(after, None if retick else self._ends()[1].number)

    def place(self, since: int | str | None, *, retick: bool) -> int | None:
        """The tick behind which a version begins; None, if at what is kept."""
        if since is not None:
            return self.tick_at(since) - 1
        return None if retick else self._ends()[0].number

    def _ends(self) -> tuple[Tick, Tick]:
        first, last = self.journal.first, self.journal.last
        if first is None or last is None:
            raise ReplayRefused(
                f"The pipeline {self.name!r} has no ticks yet.", fix="run it first."
            )
        return first, last

    def tick_at(self, since: int | str) -> int:
        """A tick by its number, or the first one at or after a time."""
        first, last = self._ends()
        if isinstance(since, str):
            time_us = to_time_us(since)
            found = next(
                (tick.number for tick in self._recorded(first.number) if tick.time_us >= time_us),
                None,
            )
        else:
            found = since if first.number < since <= last.number else None
        if found is None:
            newest = f"{last.number}, of {_time(last)}"
            raise ReplayRefused(
                f"The pipeline {self.name!r} has no tick"
                f" {'at or after ' if isinstance(since, str) else ''}{since}.",
                fix=(
                    f"choose one from {first.number + 1} to {newest}; what comes later it has not"
                    " seen either."
                ),
            )
        return found

    def _recorded(self, after: int, up_to: int | None = None) -> Iterator[Tick]:
        """The ticks (after, up_to], or up to the newest. There may be a great many, so they are
        read a few at a time.
        """
        last = self._ends()[1].number if up_to is None else up_to
        while after < last and (
            chunk := self.journal.between(after, min(last, after + _TICKS_AT_ONCE))
        ):
            yield from chunk
            after = chunk[-1].number

    def _refuse_what_is_gone(self, after: int) -> None:
        """Retention and compaction take rows away: a replay from before what they left would give
        other rows, silently.
        """
        whole = {topic: self.log.whole_from(topic) for topic in self.topics}
        gone = [
            (topic, p, offset)
            for topic, parts in whole.items()
            for p, offset in parts.items()
            if offset > self._at(after).end(topic, p)
        ]
        if not gone:
            return
        topic, partition, offset = gone[0]
        earliest = next(
            (tick for tick in self._recorded(after) if self._reaches(tick, whole)), None
        )
        possible = (
            [f"--from {earliest.number + 1} (behind {_time(earliest)}) is the earliest"]
            if earliest and earliest.number < self._ends()[1].number
            else []
        )
        raise ReplayRefused(
            f"A replay of {self.name!r} from tick {after + 1} needs rows of {topic}[{partition}]"
            f" that retention or compaction has taken away: it is whole from offset {offset} on.",
            fix="; ".join(
                [*possible, "--retick builds the version from what is kept, with new ticks."]
            ),
        )

    def _reaches(self, tick: Tick, whole: Mapping[str, Mapping[int, int]]) -> bool:
        ends = self._known(tick)
        return all(
            ends.get(topic, {}).get(p, 0) >= offset
            for topic, parts in whole.items()
            for p, offset in parts.items()
        )

    # The ticks

    def ticks(self, decided: Beginning, recorded: Tick | None) -> Iterator[Tick]:
        """Those that a version begins with, behind what it has recorded of them; the first only
        says where it begins. None if it cuts all of its own.
        """
        if decided.after is None:
            return
        after, last = (
            (decided.after - 1, {}) if recorded is None else (recorded.number, recorded.ends)
        )
        for tick in self._recorded(
            after, decided.after if decided.up_to is None else decided.up_to
        ):
            last = _no_less(self._known(tick), last)
            yield Tick(tick.number, tick.time_us, last, tick.shed)

    def _at(self, number: int) -> Tick:
        tick = self.journal.at(number)
        assert tick is not None
        return Tick(number, tick.time_us, self._known(tick), tick.shed)

    def _known(self, tick: Tick) -> Ends:
        """A tick's ends in the inputs of the plan. One that the tick does not know has its rows by
        the time they were appended.
        """
        return {
            topic: tick.ends[topic] if topic in tick.ends else self._by_time(topic, tick.time_us)
            for topic in self.topics
        }

    def _by_time(self, topic: str, time_us: int) -> Mapping[int, int]:
        if time_us <= 0:
            return dict.fromkeys(range(self.log.topic(topic).partitions), 0)
        return self.log.offsets_at(topic, from_us(time_us + 1))


def _no_less(ends: Ends, before: Ends) -> Ends:
    """An end never goes back."""
    return {
        topic: {p: max(end, before.get(topic, {}).get(p, 0)) for p, end in parts.items()}
        for topic, parts in ends.items()
    }


def _time(tick: Tick) -> str:
    return from_us(tick.time_us).isoformat(timespec="seconds")
