"""The arrangement of a pipeline: which outputs are computed by which query, and whether the stored
state fits the plan.

A note in the log has the arrangement of the last run: for each query its outputs, and the
fingerprint of each of its steps. An output that was added later, or a view that was lost, is built
from the first recorded tick in a query of its own. A step whose fingerprint has changed must not go
on with the state of the old one: `PlanChanged` says so before anything is touched.

The number of shards is stored in a note of its own (`remembered_shards`). It changes how fast a
pipeline is and nothing else: state is divided into 128 key groups, and shards share them out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.columnar.keys import KEY_GROUPS
from headrace.engine.ledger import MAIN_QUERY, Ledger, LedgerEntry
from headrace.engine.ticks import TickJournal
from headrace.errors import ConfigurationError, NewerFormat, PlanChanged
from headrace.log.api import Log
from headrace.plan.fingerprints import (
    StepFingerprint,
    step_fingerprints,
    tables_fingerprint,
    with_known_names,
)
from headrace.plan.plan import PipelinePlan, Step, TopicOutput, ViewOutput, topological_order
from headrace.runtime.query import Query, sub_plan
from headrace.views.file import VIEWS_FILE
from headrace.views.store import declared_tick

VERSION = 1


@dataclass(frozen=True)
class QueryArrangement:
    """One query of an arrangement."""

    outputs: tuple[str, ...]
    steps: dict[str, StepFingerprint]
    """The fingerprint of each step that keeps state."""
    tables: dict[str, str]
    """The fingerprint of the tables that each output reads."""
    dead_letters_emitted_to: dict[str, int] = field(default_factory=dict)
    """Per step, the last tick whose dead letters an earlier query has emitted."""
    rebuild_to: int = 0
    """Up to this tick, the query was computed before and then erased (`erasure`): state and views
    are built again, while topics and dead letters are not written again.
    """

    def to_json(self) -> dict[str, Any]:
        return {
            "outputs": list(self.outputs),
            "steps": {name: asdict(fingerprint) for name, fingerprint in self.steps.items()},
            "tables": self.tables,
            "told": self.dead_letters_emitted_to,
            "again": self.rebuild_to,
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> QueryArrangement:
        return cls(
            outputs=tuple(stored["outputs"]),
            steps={name: StepFingerprint(**step) for name, step in stored["steps"].items()},
            tables=stored["tables"],
            dead_letters_emitted_to=stored["told"],
            rebuild_to=stored.get("again", 0),
        )


@dataclass(frozen=True)
class Arrangement:
    """The queries of a pipeline, by name."""

    queries: dict[str, QueryArrangement] = field(default_factory=dict)

    def to_json(self) -> str:
        queries = {name: query.to_json() for name, query in self.queries.items()}
        return json.dumps({"version": VERSION, "queries": queries})

    @classmethod
    def from_json(cls, text: str | None) -> Arrangement:
        stored = json.loads(text or '{"version": 1, "queries": {}}')
        if stored["version"] > VERSION:
            raise NewerFormat(
                f"The pipeline was last run by a newer Headrace (format {stored['version']}).",
                fix="upgrade Headrace.",
            )
        return cls(
            {name: QueryArrangement.from_json(query) for name, query in stored["queries"].items()}
        )


def note_name(pipeline: str) -> str:
    """The note with a pipeline's arrangement."""
    return f"plan.{pipeline}"


def stored_arrangement(log: Log, pipeline: str) -> Arrangement:
    """The arrangement of a pipeline's last run; an empty one if it has never run."""
    return Arrangement.from_json(log.note(note_name(pipeline)))


def arrangement_of(queries: Iterable[Query]) -> Arrangement:
    """The arrangement of queries at work."""
    return Arrangement(
        {
            query.name: arrange_query(query.plan, query.dead_letters_emitted_to, query.rebuild_to)
            for query in queries
        }
    )


def arrange_query(
    plan: PipelinePlan,
    dead_letters_emitted_to: Mapping[str, int] | None = None,
    rebuild_to: int = 0,
) -> QueryArrangement:
    """A query with all outputs of a plan."""
    # Only the steps that outputs need: a declared input that nothing reads is none of them.
    inputs = [output.input for output in plan.outputs]
    return QueryArrangement(
        outputs=tuple(output.name for output in plan.outputs),
        steps=step_fingerprints(inputs),
        tables={output.name: tables_fingerprint([output.input]) for output in plan.outputs},
        dead_letters_emitted_to=dict(dead_letters_emitted_to or {}),
        rebuild_to=rebuild_to,
    )


def known_names(plan: PipelinePlan, log: Log) -> PipelinePlan:
    """The plan, with the step names under which their state is stored."""
    steps: dict[str, StepFingerprint] = {}
    for query in stored_arrangement(log, plan.name).queries.values():
        steps |= query.steps
    return with_known_names(plan, steps)


def arrange(
    plan: PipelinePlan,
    log: Log,
    ledger: Ledger,
    journal: TickJournal,
    view_tick: Callable[[str], int] | None,
) -> Arrangement:
    """Decide which query computes which output of a plan.

    Queries that have begun keep their outputs; a query that is being rebuilt keeps them too. All
    other outputs form one new query. `view_tick` returns the last tick of a view, which shows
    whether it was lost. Raises PlanChanged if the stored state does not fit the plan.
    """
    stored = stored_arrangement(log, plan.name)
    views = {output.name for output in plan.outputs if isinstance(output, ViewOutput)}
    topics = {output.name for output in plan.outputs} - views
    begun = {
        name: (query, entry)
        for name, query in stored.queries.items()
        if (entry := ledger.last(name)) is not None
    }
    queries: dict[str, QueryArrangement] = {}
    for name, (query, entry) in begun.items():
        # A view that is behind its query was lost.
        intact = {view for view in views if view_tick is not None and view_tick(view) >= entry.tick}
        outputs = tuple(output for output in query.outputs if output in topics | intact)
        if outputs:
            queries[name] = _check_unchanged(plan, replace(query, outputs=outputs))
    for name, query in stored.queries.items():
        outputs = tuple(output for output in query.outputs if output in topics | views)
        if name not in begun and query.rebuild_to and outputs:
            queries[name] = arrange_query(
                sub_plan(plan, outputs), query.dead_letters_emitted_to, query.rebuild_to
            )
    arranged = {output for query in queries.values() for output in query.outputs}
    added = tuple(output.name for output in plan.outputs if output.name not in arranged)
    if added:
        is_new = not begun and MAIN_QUERY not in queries and ledger.last(MAIN_QUERY) is None
        if not is_new:
            _check_new_topics(plan, log, added)
            _check_history(sub_plan(plan, added), log, journal)
        name = MAIN_QUERY if is_new else f"added-{ledger.epoch}"
        emitted_to = _dead_letters_emitted_to(plan, begun, added)
        queries[name] = arrange_query(sub_plan(plan, added), emitted_to)
    return Arrangement(queries)


def check_fits(plan: PipelinePlan, log: Log, state: Path) -> None:
    """Raise PlanChanged if a plan cannot go on from the stored state. Changes nothing, and does not
    disturb a runner at work.
    """
    if log.note(note_name(plan.name)) is None:
        return
    ticks = {
        view.name: declared_tick(state / VIEWS_FILE, view.name, view.input.schema, view_key(view))
        for view in plan.outputs
        if isinstance(view, ViewOutput)
    }
    ledger, journal = Ledger(log, plan.name), TickJournal.open(log, plan.name)
    arrange(plan, log, ledger, journal, ticks.__getitem__)


def view_key(output: ViewOutput) -> tuple[str, ...]:
    """The key of a view. A view of a stream has none: it holds all rows, up to a number."""
    return output.input.key if output.input.is_table else ()


def _dead_letters_emitted_to(
    plan: PipelinePlan,
    begun: Mapping[str, tuple[QueryArrangement, LedgerEntry]],
    added: Collection[str],
) -> dict[str, int]:
    """For outputs that other queries had before (views that were lost): per step, the last tick
    whose dead letters those queries have emitted.
    """
    emitted_to: dict[str, int] = {}
    for query, entry in begun.values():
        lost = [
            output.input
            for output in plan.outputs
            if output.name in added and output.name in query.outputs
        ]
        for step in topological_order(lost):
            emitted_to[step.name] = max(entry.tick, emitted_to.get(step.name, 0))
    return emitted_to


# Checks


def _check_unchanged(plan: PipelinePlan, stored: QueryArrangement) -> QueryArrangement:
    """Check that the steps of a query are what they were, that none is new, and that the tables
    which its steps and outputs read are computed as before. Returns the query of the present plan.
    """
    now = arrange_query(
        sub_plan(plan, stored.outputs), stored.dead_letters_emitted_to, stored.rebuild_to
    )
    for name, fingerprint in now.steps.items():
        if name not in stored.steps:
            gone = sorted(stored.steps.keys() - now.steps.keys())
            old_names = (
                f"if it has had another name ({', '.join(gone)}), give it that with name=…; else "
                if gone
                else ""
            )
            raise _plan_changed(
                f"The step {name!r} is new, and what it feeds ({', '.join(stored.outputs)}) has"
                " been running without it.",
                old_names,
            )
        if stored.steps[name].signature != fingerprint.signature:
            raise _plan_changed(
                f"The step {name!r} is not what it was: its state was built by its old definition"
                f" (it is {plan.step(name).summary()} now)."
            )
        if stored.steps[name].tables != fingerprint.tables:
            raise _plan_changed(_tables_changed(f"The step {name!r}", plan.step(name).inputs))
    for output in plan.outputs:
        if output.name in now.tables and now.tables[output.name] != stored.tables[output.name]:
            raise _plan_changed(_tables_changed(f"The output {output.name!r}", [output.input]))
    return now


def _tables_changed(reader: str, inputs: Iterable[Step]) -> str:
    """The message for a table that is computed differently: it would retract rows that it never
    emitted, and never retract some that it did.
    """
    steps = [step for step in topological_order(inputs) if step.is_table and not step.keeps_state]
    now = "; ".join(f"{step.name}: {step.summary()}" for step in steps)
    return (
        f"{reader} reads a table that is computed differently than before: the rows that it has"
        f" would never be retracted ({now or 'directly'} now)."
    )


def _plan_changed(what: str, advice: str = "") -> PlanChanged:
    fix = (
        "give the output another name, and it is built from the beginning; or build everything as"
        " a new version: headrace replay FILE --as v2."
    )
    return PlanChanged(what, fix=f"{advice}{fix}")


def _check_new_topics(plan: PipelinePlan, log: Log, added: Collection[str]) -> None:
    """Check that the topics of added outputs are empty: their rows would be there twice."""
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


def _check_history(plan: PipelinePlan, log: Log, journal: TickJournal) -> None:
    """Check that the inputs of a plan still have all rows since the first tick."""
    first = journal.first
    if first is None:
        return
    needed = topological_order([output.input for output in plan.outputs])
    topics = {step.topic for step in plan.inputs if step in needed}
    for topic in sorted(topics & first.ends.keys()):
        for partition, offset in log.whole_from(topic).items():
            if offset > first.end(topic, partition):
                raise PlanChanged(
                    f"{', '.join(output.name for output in plan.outputs)} must be built from the"
                    " first tick on, and retention or compaction has taken rows of"
                    f" {topic}[{partition}] away: it is whole from offset {offset} on.",
                    fix=(
                        "build a new version of the pipeline from what is kept: headrace replay"
                        " FILE --as v2 --retick; or leave these outputs out."
                    ),
                )


# The number of shards


def remembered_shards(log: Log, pipeline: str) -> int | None:
    """The number of shards that was chosen with `headrace rescale`, if any."""
    stored = log.note(_shards_note(pipeline))
    return None if stored is None else int(stored)


def remember_shards(log: Log, pipeline: str, shards: int | None) -> None:
    """Choose the number of shards for the next run and for one at work, which adopts it between two
    batches. None leaves the choice to each run again.
    """
    if shards is not None and not 1 <= shards <= KEY_GROUPS:
        raise ConfigurationError(
            f"{shards} cannot be a number of shards.",
            fix=f"choose one from 1 to {KEY_GROUPS}, which is how many key groups there are.",
        )
    # Not the runner's own transaction id, which would fence the runner.
    with log.transaction(f"rescale.{pipeline}") as tx:
        tx.set_note(_shards_note(pipeline), None if shards is None else str(shards))


def _shards_note(pipeline: str) -> str:
    return f"shards.{pipeline}"
