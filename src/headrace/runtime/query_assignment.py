"""The arrangement of a pipeline: which outputs are computed by which query, and whether the stored
state fits the plan.

A note in the log has the arrangement of the last run: for each query its outputs with their
meanings, and the fingerprint of each of its steps. An output that was added later, or a view that
was lost or now means something else, is built from the first recorded tick in a query of its own. A
topic's rows cannot be taken back: one that means something else is refused, unless the edit is
accepted by name (`accepted`). A step whose fingerprint has changed must not go on with the state of
the old one. `PlanChanged` says so before anything is touched.

The number of shards is stored in a note of its own (`remembered_shards`). It changes how fast a
pipeline is and nothing else: state is divided into 128 key groups, and shards share them out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.columnar.keys import KEY_GROUPS
from headrace.engine.ledger import MAIN_QUERY, Ledger, LedgerEntry
from headrace.engine.ticks import TickJournal
from headrace.errors import ConfigurationError, NewerFormat, PlanChanged, nearest
from headrace.log.api import Log
from headrace.plan.fingerprints import (
    StepFingerprint,
    step_fingerprints,
    tables_fingerprint,
    with_known_names,
    with_stored_semantics,
)
from headrace.plan.meanings import Meaning, output_meanings, output_steps
from headrace.plan.plan import PipelinePlan, Step, TopicOutput, ViewOutput, topological_order
from headrace.runtime.query import Query, sub_plan
from headrace.views.file import VIEWS_FILE
from headrace.views.store import declared_tick

VERSION = 3  # 1: without meanings; 2: without Meaning.further
logger = logging.getLogger(__name__)


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
    meanings: dict[str, Meaning] = field(default_factory=dict)
    """The meaning of each output and side output; empty in what version 1 has stored."""
    parsed_tables: dict[str, str] = field(default_factory=dict)
    """`tables`, with expressions as they are parsed."""
    continued: frozenset[str] = frozenset()
    """Steps whose state goes on after an accepted edit upstream: it has rows of both definitions,
    so no other query can have the same.
    """
    output_steps: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The names of the steps with state behind each output, in the order of the plan."""
    former: frozenset[str] | None = frozenset()
    """Steps that go on with the results of an earlier Headrace; None if that was not stored."""

    def to_json(self) -> dict[str, Any]:
        return {
            "outputs": list(self.outputs),
            "steps": {name: asdict(fingerprint) for name, fingerprint in self.steps.items()},
            "tables": self.tables,
            "told": self.dead_letters_emitted_to,
            "again": self.rebuild_to,
            "meanings": {name: meaning.to_json() for name, meaning in self.meanings.items()},
            "parsed_tables": self.parsed_tables,
            "continued": sorted(self.continued),
            "output_steps": {name: list(steps) for name, steps in self.output_steps.items()},
            "former": None if self.former is None else sorted(self.former),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> QueryArrangement:
        former = stored.get("former")
        return cls(
            outputs=tuple(stored["outputs"]),
            steps={name: StepFingerprint(**step) for name, step in stored["steps"].items()},
            tables=stored["tables"],
            dead_letters_emitted_to=stored["told"],
            rebuild_to=stored.get("again", 0),
            meanings={
                name: Meaning.from_json(meaning)
                for name, meaning in stored.get("meanings", {}).items()
            },
            parsed_tables=stored.get("parsed_tables", {}),
            continued=frozenset(stored.get("continued", ())),
            output_steps={
                name: tuple(steps) for name, steps in stored.get("output_steps", {}).items()
            },
            former=None if former is None else frozenset(former),
        )

    @property
    def begun_before(self) -> Collection[str]:
        """The steps whose state an earlier Headrace may have begun, with other results."""
        return self.steps if self.former is None else self.former


@dataclass(frozen=True)
class Arrangement:
    """The queries of a pipeline, by name."""

    queries: dict[str, QueryArrangement] = field(default_factory=dict)
    accepted: Mapping[str, int] = field(default_factory=dict)
    """The outputs that go on under a new meaning, with the last tick of the old one. They are not
    stored.
    """

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
            query.name: arrange_query(
                query.plan, query.dead_letters_emitted_to, query.rebuild_to, query.continued
            )
            for query in queries
        }
    )


def arrange_query(
    plan: PipelinePlan,
    dead_letters_emitted_to: Mapping[str, int] | None = None,
    rebuild_to: int = 0,
    continued: Collection[str] = (),
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
        meanings=output_meanings(plan),
        parsed_tables={
            output.name: tables_fingerprint([output.input], parsed=True) for output in plan.outputs
        },
        continued=frozenset(continued),
        output_steps=output_steps(plan),
        former=frozenset(step.name for step in topological_order(inputs) if step.is_former),
    )


def known_names(plan: PipelinePlan, log: Log) -> PipelinePlan:
    """The plan, with the step names under which their state is stored, and with the results that
    each step began with.
    """
    steps: dict[str, StepFingerprint] = {}
    begun_before: set[str] = set()
    for query in stored_arrangement(log, plan.name).queries.values():
        steps |= query.steps
        begun_before |= set(query.begun_before)
    return with_known_names(with_stored_semantics(plan, steps, begun_before), steps)


def former_steps(declared: PipelinePlan, plan: PipelinePlan) -> list[str]:
    """The steps of a plan that go on with the results of an earlier Headrace, other than those that
    are declared.
    """
    signatures = {step.signature for step in declared.steps()}
    return [step.name for step in plan.steps() if step.signature not in signatures]


def log_former_steps(declared: PipelinePlan, plan: PipelinePlan) -> None:
    """Log a warning that names the `former_steps`."""
    if former := former_steps(declared, plan):
        logger.warning(
            "Steps of %s go on with the results that they began with under an earlier Headrace, in"
            " which null was no group, and the newest row was the last to arrive: %s. To have them"
            " as they are documented now, build a new version: headrace replay FILE --as v2.",
            plan.name,
            ", ".join(former),
        )


def arrange(
    plan: PipelinePlan,
    log: Log,
    ledger: Ledger,
    journal: TickJournal,
    view_tick: Callable[[str], int] | None,
    accepted: Collection[str] = (),
) -> Arrangement:
    """Decide which query computes which output of a plan.

    Queries that have begun keep their outputs that mean what they meant; a query that is being
    rebuilt keeps them too. All other outputs form one new query. `view_tick` returns the last tick
    that was written to a view, which shows whether it was lost. `accepted` are the outputs that go
    on under a new meaning. Raises PlanChanged if the stored state does not fit the plan.
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
    edited = dict[str, int]()
    for name, (query, entry) in begun.items():
        # A view that is behind its query was lost.
        intact = {view for view in views if view_tick is not None and view_tick(view) >= entry.tick}
        outputs = tuple(output for output in query.outputs if output in topics | intact)
        if not outputs:
            continue
        edit = _find_edit(sub_plan(plan, outputs), query)
        rebuilt = (edit.outputs & views) - set(accepted)
        outputs = tuple(output for output in outputs if output not in rebuilt)
        fitting = _check_unchanged(plan, replace(query, outputs=outputs))
        _check_edit(plan, log, edit, entry.tick, accepted)
        edited |= dict.fromkeys(edit.outputs & set(accepted), entry.tick)
        outputs = tuple(
            output for output in outputs if output not in edit.outputs or output in accepted
        )
        if outputs:
            queries[name] = arrange_query(
                sub_plan(plan, outputs),
                query.dead_letters_emitted_to,
                query.rebuild_to,
                (query.continued & fitting.steps.keys()) | edit.continued(edited),
            )
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
    return Arrangement(queries, edited)


def check_fits(plan: PipelinePlan, log: Log, state: Path, accepted: Collection[str] = ()) -> None:
    """Raise PlanChanged if a plan cannot go on from the stored state. Changes nothing, and does not
    disturb a runner at work.
    """
    _check_accepted(plan, accepted)
    if log.note(note_name(plan.name)) is None:
        return
    ticks = {
        view.name: declared_tick(state / VIEWS_FILE, view.name, view.input.schema, view_key(view))
        for view in plan.outputs
        if isinstance(view, ViewOutput)
    }
    ledger, journal = Ledger(log, plan.name), TickJournal.open(log, plan.name)
    arrange(plan, log, ledger, journal, ticks.__getitem__, accepted)


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
        sub_plan(plan, stored.outputs),
        stored.dead_letters_emitted_to,
        stored.rebuild_to,
        stored.continued,
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
        if not stored.steps[name].has_same_tables(fingerprint):
            raise _plan_changed(_tables_changed(f"The step {name!r}", plan.step(name).inputs))
    for output in plan.outputs:
        name = output.name
        if name not in now.tables or now.tables[name] == stored.tables[name]:
            continue
        if now.parsed_tables[name] != stored.parsed_tables.get(name):
            raise _plan_changed(_tables_changed(f"The output {name!r}", [output.input]))
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


# Edits that the stored state fits, and that change what outputs mean


@dataclass(frozen=True)
class Edit:
    """Which outputs of a query an edit has given another meaning."""

    plan: PipelinePlan
    outputs: frozenset[str]
    """Outputs and side outputs whose meaning has changed."""
    moved: frozenset[str]
    """Those that show the changes of another step than before."""
    renamed: frozenset[str]
    """Those that mean the same, but whose steps would find the state of other steps, since their
    names were exchanged.
    """
    steps: frozenset[str]
    """The steps with state that have something else upstream than before."""

    def continued(self, accepted: Collection[str]) -> set[str]:
        """The steps whose state goes on with rows of both definitions, if these outputs do."""
        edited = self.outputs & set(accepted)
        lasts = [output.input for output in self.plan.outputs if output.name in edited]
        return {step.name for step in topological_order(lasts)} & self.steps


def _find_edit(plan: PipelinePlan, stored: QueryArrangement) -> Edit:
    """Compare the outputs of a query with what they meant before. Version 1 has not stored what
    outputs meant: there, one with a step that has something else upstream has changed.
    """
    now = arrange_query(plan)
    steps = frozenset(
        name
        for name, fingerprint in now.steps.items()
        if name in stored.steps and not stored.steps[name].has_same_lineage(fingerprint)
    )
    changed, moved, renamed = set[str](), set[str](), set[str]()
    if stored.meanings:
        for name, meaning in now.meanings.items():
            before = stored.meanings.get(name)
            if before is None:
                continue
            if not before.is_same(meaning):
                changed.add(name)
                if before.reads != meaning.reads or before.kind != meaning.kind:
                    moved.add(name)
            elif steps & _renamed_steps(name, meaning, now, stored):
                renamed.add(name)
    else:
        for output in plan.outputs:
            if steps & {step.name for step in topological_order([output.input])}:
                changed.add(output.name)
    return Edit(
        plan=plan,
        outputs=frozenset(changed | renamed),
        moved=frozenset(moved | renamed),
        renamed=frozenset(renamed),
        steps=steps,
    )


def _renamed_steps(
    output: str, meaning: Meaning, now: QueryArrangement, stored: QueryArrangement
) -> set[str]:
    """The steps behind an output of unchanged meaning that had other names. The names may be those
    of other steps' state.
    """
    before = stored.output_steps.get(output)
    if before is None:  # it was not stored
        return set(meaning.reads) - set(stored.meanings[output].reads)
    names = now.output_steps[output]
    if len(names) != len(before):
        return set(names)
    return {name for name, old in zip(names, before, strict=True) if name != old}


def _check_edit(
    plan: PipelinePlan, log: Log, edit: Edit, tick: int, accepted: Collection[str]
) -> None:
    """Raise PlanChanged for an output that cannot be built again and is not accepted: a topic with
    rows. Raise it too for an accepted one that would go on with the changes of another step.
    """
    views = {output.name for output in plan.outputs if isinstance(output, ViewOutput)}
    inputs = {output.name: output.input for output in plan.outputs}
    for name in sorted(edit.outputs):
        if name in edit.renamed and name not in views and _has_rows(log, name):
            raise PlanChanged(
                f"The steps behind the topic {name!r} have exchanged names with others: each would"
                " go on with the state of another one.",
                fix="give them back the names that they had (name=…).",
            )
        if name in accepted and name in edit.moved:
            raise PlanChanged(
                f"The output {name!r} shows the rows of another step than before: it cannot go on"
                " with the rows that it has, which would never be retracted.",
                fix=(
                    "leave out its acceptance, and a view is built again; write to a new topic"
                    " instead of another step's."
                ),
            )
        if name in views or name in accepted or not _has_rows(log, name):
            continue
        what = inputs[name].summary() if name in inputs else ""
        raise PlanChanged(
            f"The topic {name!r} would be written by another definition than before"
            f"{f' ({what} now)' if what else ''}: its rows up to tick {tick} follow the old one,"
            " and a topic's rows cannot be taken back.",
            fix=(
                "write to a new topic, which is built from the beginning; or build everything as a"
                " new version: headrace replay FILE --as v2; or, if whoever reads the topic can"
                f" bear rows of the old definition up to tick {tick} and of the new one after it:"
                f" headrace run FILE --accept-edit {name}."
            ),
        )


def _has_rows(log: Log, topic: str) -> bool:
    return topic in log.topics() and any(log.end_offsets(topic).values())


def _check_accepted(plan: PipelinePlan, accepted: Collection[str]) -> None:
    known = output_meanings(plan)
    for name in accepted:
        if name not in known:
            raise ConfigurationError(
                f"The pipeline {plan.name!r} has no output {name!r} whose edit could be accepted:"
                f" {nearest(name, known)}"
            )


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
                fix="write to another topic: the rows of that one are others'.",
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
                        " FILE --as v2 --retick; or leave these outputs out. A view that was edited"
                        " can go on with its old rows: headrace run FILE --accept-edit NAME."
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
