"""Which outputs are computed in which query, and whether the state that is there fits the plan.

A note in the log says how it was: for each query its outputs, and the meaning of each of its steps.
An output that was added later, or a view that was lost, is built from the first recorded tick in a
query of its own. A step whose meaning changed must not go on with the state of the old one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.engine.ledger import MAIN_QUERY, Ledger, LedgerEntry
from headrace.engine.state.files import GROUPS
from headrace.engine.ticks import TickJournal
from headrace.errors import ConfigurationError, NewerFormat, PlanChanged
from headrace.log.api import Log
from headrace.plan.names import StepFingerprint, step_fingerprints, tables_fingerprint, with_known_names
from headrace.plan.plan import PipelinePlan, Step, TopicOutput, ViewOutput, topological_order
from headrace.runtime.query import Query, sub_plan
from headrace.views.file import VIEWS_FILE
from headrace.views.store import declared_tick

VERSION = 1


@dataclass(frozen=True)
class Arranged:
    """One query: its outputs, what its steps that keep state mean, how the outputs' tables come
    about, and up to which tick an earlier query has told of rows that its steps could not use.

    `again`: up to this tick all of it was computed before (`pipeline.forgetting`). State and views
    are built anew; topics and dead letters have what they were told.
    """

    outputs: tuple[str, ...]
    steps: dict[str, StepFingerprint]
    tables: dict[str, str]
    told: dict[str, int] = field(default_factory=dict)
    again: int = 0


@dataclass(frozen=True)
class Arrangement:
    queries: dict[str, Arranged] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": VERSION,
                "queries": {name: asdict(each) for name, each in self.queries.items()},
            }
        )

    @classmethod
    def from_json(cls, text: str | None) -> Arrangement:
        stored = json.loads(text or '{"version": 1, "queries": {}}')
        if stored["version"] > VERSION:
            raise NewerFormat(
                f"The pipeline was last run by a newer Headrace (format {stored['version']}).",
                fix="upgrade Headrace.",
            )
        return cls({name: _arranged(each) for name, each in stored["queries"].items()})


def _arranged(stored: Mapping[str, Any]) -> Arranged:
    steps = {name: StepFingerprint(**each) for name, each in stored["steps"].items()}
    return Arranged(
        tuple(stored["outputs"]), steps, stored["tables"], stored["told"], stored.get("again", 0)
    )


def note_name(pipeline: str) -> str:
    return f"plan.{pipeline}"


def arrangement_of(queries: Iterable[Query]) -> Arrangement:
    return Arrangement(
        {each.name: plan_query(each.plan, each.told, each.again) for each in queries}
    )


def plan_query(
    plan: PipelinePlan, told: Mapping[str, int] | None = None, again: int = 0
) -> Arranged:
    inputs = [output.input for output in plan.outputs]  # a declared input that nothing uses is none
    tables = {output.name: tables_fingerprint([output.input]) for output in plan.outputs}
    return Arranged(
        tuple(output.name for output in plan.outputs),
        step_fingerprints(inputs),
        tables,
        dict(told or {}),
        again,
    )


def known_names(plan: PipelinePlan, log: Log) -> PipelinePlan:
    """The plan with the names under which its steps' state is known."""
    stored = Arrangement.from_json(log.note(note_name(plan.name)))
    return with_known_names(
        plan,
        {name: meaning for each in stored.queries.values() for name, meaning in each.steps.items()},
    )


def arranged(
    plan: PipelinePlan,
    log: Log,
    ledger: Ledger,
    journal: TickJournal,
    view_tick: Callable[[str], int] | None,
) -> Arrangement:
    """How the plan's outputs are to be computed now. `view_tick` says how far a view is.
    PlanChanged if what is stored does not fit.
    """
    stored = Arrangement.from_json(log.note(note_name(plan.name)))
    views = {output.name for output in plan.outputs if isinstance(output, ViewOutput)}
    topics = {output.name for output in plan.outputs} - views
    begun = {
        name: (each, entry)
        for name, each in stored.queries.items()
        if (entry := ledger.last(name)) is not None
    }
    queries: dict[str, Arranged] = {}
    for name, (each, entry) in begun.items():
        there = {
            view for view in views if view_tick is not None and view_tick(view) >= entry.tick
        }  # the others were lost
        if outputs := tuple(output for output in each.outputs if output in topics | there):
            queries[name] = _checked(plan, replace(each, outputs=outputs))
    for name, each in stored.queries.items():
        if (
            name not in begun
            and each.again
            and (outputs := tuple(output for output in each.outputs if output in topics | views))
        ):
            queries[name] = plan_query(sub_plan(plan, outputs), each.told, each.again)
    known = {output for each in queries.values() for output in each.outputs}
    if added := tuple(output.name for output in plan.outputs if output.name not in known):
        is_new = not begun and MAIN_QUERY not in queries and ledger.last(MAIN_QUERY) is None
        if not is_new:
            _check_new_topics(plan, log, added)
            _check_history(sub_plan(plan, added), log, journal)
        name = MAIN_QUERY if is_new else f"added-{ledger.epoch}"
        queries[name] = plan_query(sub_plan(plan, added), _told(plan, begun, added))
    return Arrangement(queries)


def check_fits(plan: PipelinePlan, log: Log, state: Path) -> None:
    """PlanChanged if a plan cannot go on from what is stored. Nothing is changed by asking, and a
    runner at work is not disturbed.
    """
    if log.note(note_name(plan.name)) is None:
        return
    views = [output for output in plan.outputs if isinstance(output, ViewOutput)]
    ticks = {
        each.name: declared_tick(state / VIEWS_FILE, each.name, each.input.schema, view_key(each))
        for each in views
    }
    arranged(plan, log, Ledger(log, plan.name), TickJournal(log, plan.name), ticks.__getitem__)


def view_key(output: ViewOutput) -> tuple[str, ...]:
    """A stream's rows have no key in a view: all are kept, up to a number."""
    return output.input.key if output.input.is_table else ()


def _told(
    plan: PipelinePlan, begun: Mapping[str, tuple[Arranged, LedgerEntry]], added: Collection[str]
) -> dict[str, int]:
    """How far the queries that had these outputs before, views that were lost, have told of rows
    that could not be used.
    """
    told: dict[str, int] = {}
    for each, entry in begun.values():
        lost = [
            output.input
            for output in plan.outputs
            if output.name in added and output.name in each.outputs
        ]
        told.update({step.name: max(entry.tick, told.get(step.name, 0)) for step in topological_order(lost)})
    return told


def _check_history(plan: PipelinePlan, log: Log, journal: TickJournal) -> None:
    """What is built from the beginning needs its inputs from the beginning."""
    first = journal.first
    needed = sorted(
        {
            step.topic
            for step in plan.inputs
            if step in topological_order([output.input for output in plan.outputs])
        }
    )
    for topic in [topic for topic in needed if first is not None and topic in first.ends]:
        assert first is not None
        gone = [
            (p, offset)
            for p, offset in log.whole_from(topic).items()
            if offset > first.end(topic, p)
        ]
        if gone:
            partition, offset = gone[0]
            raise PlanChanged(
                f"{', '.join(output.name for output in plan.outputs)} must be built from the first"
                f" tick on, and retention or compaction has taken rows of {topic}[{partition}]"
                f" away: it is whole from offset {offset} on.",
                fix=(
                    "build the pipeline beside the old one from what is kept: headrace replay FILE"
                    " --as v2 --retick; or leave these outputs out."
                ),
            )


def _checked(plan: PipelinePlan, known: Arranged) -> Arranged:
    """That the steps of a query are what they were, and none is new; and that the tables that they
    and the outputs are given come about as they did.
    """
    now = plan_query(sub_plan(plan, known.outputs), known.told, known.again)
    for name, meaning in now.steps.items():
        if name not in known.steps:
            gone = sorted(known.steps.keys() - now.steps.keys())
            had = (
                f"if it has had another name ({', '.join(gone)}), give it that with name=…; else "
                if gone
                else ""
            )
            raise _changed(
                f"The step {name!r} is new, and what it feeds ({', '.join(known.outputs)}) has been"
                " running without it.",
                had,
            )
        if known.steps[name].signature != meaning.signature:
            raise _changed(
                f"The step {name!r} is not what it was: its state belongs to its old meaning"
                f" ({plan.step(name).summary()} now)."
            )
        if known.steps[name].tables != meaning.tables:
            raise _changed(_other_tables(f"The step {name!r}", plan.step(name).inputs))
    for output in plan.outputs:
        if output.name in now.tables and now.tables[output.name] != known.tables[output.name]:
            raise _changed(_other_tables(f"The output {output.name!r}", [output.input]))
    return now


def _other_tables(who: str, inputs: Iterable[Step]) -> str:
    """A table that is computed otherwise would take back rows that it never told of, and keep some
    that nobody takes back.
    """
    way = [step for step in topological_order(inputs) if step.is_table and not step.keeps_state]
    now = "; ".join(f"{step.name}: {step.summary()}" for step in way)
    return (
        f"{who} is given a table that comes about otherwise than before: the rows that it has would"
        f" never be taken back ({now or 'directly'} now)."
    )


def _changed(what: str, had: str = "") -> PlanChanged:
    fix = (
        "give the output another name, and it is built from the beginning; or build everything"
        " beside the old: headrace replay FILE --as v2."
    )
    return PlanChanged(what, fix=f"{had}{fix}")


def _check_new_topics(plan: PipelinePlan, log: Log, added: Collection[str]) -> None:
    """A topic that is built from the beginning must be empty: what is in it would be there
    twice.
    """
    for output in plan.outputs:
        if (
            output.name in added
            and isinstance(output, TopicOutput)
            and any(log.end_offsets(output.name).values())
        ):
            raise PlanChanged(
                f"The output {output.name!r} is new to the pipeline, but its topic has rows"
                " already.",
                fix=(
                    "write to another topic, or delete it first: headrace topic delete"
                    f" {output.name}."
                ),
            )


# How many shards a pipeline is to have: a note in the log, which the next run uses and a run under
# way takes on between two batches.
#
# The number of shards changes how fast a pipeline is and nothing else: state lies in 128 key
# groups, and shards only share them out.


def remembered_shards(log: Log, pipeline: str) -> int | None:
    """The number that was chosen with `headrace rescale`, if one was."""
    stored = log.note(_note(pipeline))
    return None if stored is None else int(stored)


def remember_shards(log: Log, pipeline: str, shards: int | None) -> None:
    """Choose a number; None leaves it to each run again."""
    if shards is not None and not 1 <= shards <= GROUPS:
        raise ConfigurationError(
            f"{shards} cannot be a number of shards.",
            fix=f"choose one from 1 to {GROUPS}: there are {GROUPS} key groups to share out.",
        )
    with log.transaction(
        f"rescale.{pipeline}"
    ) as tx:  # not the runner's own transaction, or it would be fenced
        tx.set_note(_note(pipeline), None if shards is None else str(shards))


def _note(pipeline: str) -> str:
    return f"shards.{pipeline}"
