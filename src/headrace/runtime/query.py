"""A query: some outputs of a pipeline that are computed and committed together, with a place of
their own in the ledger.

A pipeline has one, and for outputs that were added later another until it has caught up.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import errors
from headrace.engine.commit import BatchOutput, commit_batch
from headrace.engine.context import BatchContext, BatchResult
from headrace.engine.job import clean_up, read_reports, needs_spark
from headrace.engine.ledger import Ledger, LedgerEntry
from headrace.engine.state.files import new_id
from headrace.engine.ticks import Tick, TickJournal, rows_between, control_record
from headrace.engine.watermarks import (
    BatchWatermarks,
    InputWatermark,
    WatermarkInputs,
    WatermarkState,
    batch_watermarks,
    read_watermarks,
    write_watermarks,
)
from headrace.errors import ConfigurationError
from headrace.log.api import Log
from headrace.plan.plan import (
    PipelinePlan,
    Step,
    TopicOutput,
    ViewOutput,
    topological_order,
    watermark_paths,
    watermark_spec,
)
from headrace.runtime.job_builder import JobBuilder
from headrace.views.store import ViewStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.engine.ticks import Ends


# The runner: cuts ticks, runs batches, commits them, until it is told to stop.
#
# It alone writes a pipeline's ticks and ledger. It holds nothing that is not in the log or the
# state directory: killed at any moment, the next one goes on at the ledger's tick.


# How many rows the next batch takes in, so that a batch takes about as long as it should: a batch
# that took too long makes the next one smaller, one that was quick makes it larger.
#
# What is computed does not depend on it: an answer is defined tick by tick, whatever the batches. A
# batch has at least one tick, which has at most a million rows.


MAX_ROWS, MIN_ROWS = 4_000_000, 1_000
_TOO_LONG, _QUICK = 1.25, 0.5


# What a runner tells of itself: a small file in its state directory, written after each batch and
# every few seconds. `headrace status` shows it.


def query_status(query: Query, ends: Ends) -> dict[str, Any]:
    entry = query.entry
    at = query.workshop.journal.at(entry.tick)
    return {
        "tick": entry.tick,
        "outputs": [each.name for each in query.plan.outputs],
        "rows_behind": rows_between(at.ends, ends) if at is not None else 0,
        "batch_rows": query.batch_rows,
        "batch_seconds": query.batch_seconds,
        "rows_per_second": query.rows_per_second,
        "due_us": dict(entry.due_us),
        "batch_counts": dict(query.last_result.counts) if query.last_result else {},
    }


def watermark_status(query: Query) -> dict[str, dict[str, Any]]:
    """The clocks of a query's inputs, as people want to know them."""
    found = {}
    specs = {spec.name: spec for spec in map(watermark_spec, query.plan.inputs)}
    for name, clock in query.watermark_state.inputs.items():
        holding = [
            {"producer": specs[name].label(who), "newest_us": newest_us, "heard_us": heard_us}
            for who, newest_us, heard_us in clock.holding()
        ]
        watermark_us = clock.watermark_us if clock.begun else None
        found[name] = {
            "watermark_us": watermark_us,
            "producers": len(clock.producers),
            "held_back_by": holding,
        }
    return found


# The runner: cuts ticks, runs batches, commits them, until it is told to stop.
#
# It alone writes a pipeline's ticks and ledger. It holds nothing that is not in the log or the
# state directory: killed at any moment, the next one goes on at the ledger's tick.

DEFAULT_TARGET_S = 30.0


class BatchSize:
    """It begins at the most there may be: what every batch costs, however small, would make a first
    small one look slow.
    """

    def __init__(self, target_s: float = DEFAULT_TARGET_S) -> None:
        self.target_s, self.rows = target_s, MAX_ROWS

    def took(self, rows: int, seconds: float) -> None:
        if seconds > _TOO_LONG * self.target_s:
            self.rows = max(MIN_ROWS, min(self.rows, int(rows * self.target_s / seconds)))
        elif seconds < _QUICK * self.target_s:
            self.rows = min(MAX_ROWS, 2 * self.rows)


MAX_TICKS_A_BATCH = 2_000
ROWS_A_KEY_TO_COMBINE = 4


@dataclass
class RunContext:
    """What all queries of a run share."""

    log: Log
    spark: SparkSession
    state: Path
    local: Path
    cores: int
    shards: int
    ledger: Ledger
    journal: TickJournal
    views: ViewStore | None = None
    batch_target_s: float = DEFAULT_TARGET_S
    """How long a batch should take."""

    @property
    def watermark_directory(self) -> Path:
        return self.state / "clocks"


class Query:
    """`plan` has all inputs of the pipeline and this query's outputs. `step()` does one batch."""

    def __init__(
        self,
        name: str,
        plan: PipelinePlan,
        workshop: RunContext,
        told: Mapping[str, int] | None = None,
        again: int = 0,
    ) -> None:
        self.name, self.plan, self.workshop, self.again = name, plan, workshop, again
        self.told: Mapping[str, int] = told or {}
        """Up to which tick a step's rows that could not be used have been told, by a query that had
        the step before. A batch ends there at the latest.
        """
        self.watermark_state: WatermarkState = read_watermarks(
            workshop.watermark_directory, self.entry.watermarks
        )
        self.last_result: BatchResult | None = None
        self.batches, self.batch_rows, self.batch_seconds = 0, 0, 0.0
        self._size = BatchSize(workshop.batch_target_s)
        self._optimistic = True
        self.told_elsewhere: frozenset[str] = frozenset()
        """Steps that another query, further than this one, has too: it has told of their rows that
        could not be used.
        """

    @property
    def has_begun(self) -> bool:
        return self.workshop.ledger.last(self.name) is not None

    @property
    def entry(self) -> LedgerEntry:
        """The newest one; before the first batch, one that says where the pipeline begins."""
        first = self.workshop.journal.first
        return self.workshop.ledger.last(self.name) or LedgerEntry(
            0, self.name, first.number if first else 0
        )

    @property
    def tick(self) -> int:
        """The last tick that is in the ledger."""
        return self.entry.tick

    @cached_property
    def steps(self) -> dict[str, Step]:
        """What this query's outputs are computed by. A declared input that none of them reads is
        not among them.
        """
        return {step.name: step for step in topological_order([output.input for output in self.plan.outputs])}

    def own(self, entry: LedgerEntry) -> LedgerEntry:
        """Of an entry only what this query computes: the rest is of outputs that it had once, and
        would be stale.
        """
        return replace(
            entry,
            states={step: ids for step, ids in entry.states.items() if step in self.steps},
            due_us={step: due_us for step, due_us in entry.due_us.items() if step in self.steps},
            counts={
                name: count
                for name, count in entry.counts.items()
                if name.rpartition(".")[0] in self.steps
            },
        )

    @property
    def own_watermarks(self) -> dict[str, InputWatermark]:
        """The clocks of the inputs that this query reads; those of others stand still here."""
        read = {watermark_spec(step).name for step in self.plan.inputs if step.name in self.steps}
        return {name: clock for name, clock in self.watermark_state.inputs.items() if name in read}

    def step(self, up_to: int, max_ticks: int = MAX_TICKS_A_BATCH) -> bool:
        """One batch of ticks up to `up_to`, if there are any that the ledger does not have. Returns
        whether there were.
        """
        entry, journal = self.entry, self.workshop.journal
        before = journal.at(entry.tick)
        if before is None:
            raise ConfigurationError(
                f"The ticks of {self.plan.name!r} do not reach back to {entry.tick}.",
                fix="replay the pipeline.",
            )
        up_to = min(
            [
                up_to,
                entry.tick + max_ticks,
                *(told for told in (*self.told.values(), self.again) if told > entry.tick),
            ]
        )
        ticks = _bounded(before, journal.between(entry.tick, up_to), self._size.rows)
        if ticks:
            started = time.monotonic()
            self._batch(entry, before, ticks)
            self.batch_rows, self.batch_seconds = (
                rows_between(before.ends, ticks[-1].ends),
                time.monotonic() - started,
            )
            self._size.took(self.batch_rows, self.batch_seconds)
        return bool(ticks)

    @property
    def rows_per_second(self) -> float:
        return self.batch_rows / max(self.batch_seconds, 1e-9)

    def _batch(self, entry: LedgerEntry, before: Tick, ticks: Sequence[Tick]) -> None:
        """The job, and once more if rows turned out to be Spark's, which in this run they then are
        from the beginning.
        """
        if not self._try_batch(entry, before, ticks):
            self._optimistic = False
            self._try_batch(entry, before, ticks)

    def _try_batch(self, entry: LedgerEntry, before: Tick, ticks: Sequence[Tick]) -> bool:
        """The job, its reports, the clocks, the commit."""
        context = self._context(entry, before, ticks)
        builder = JobBuilder(
            self.workshop.spark,
            self.plan,
            context,
            before,
            ticks,
            self.workshop.cores,
            self._worth_combining(),
            optimistic=self._optimistic,
        )
        try:
            builder.job().collect()
            if needs_spark(context):
                return False
            result = read_reports(context, builder.stages)
            result.counts |= builder.failure_counts()
            watermarks, state = context.time.watermarks(
                context.watermark_directory,
                context.job_directory,
                [spec.name for spec in context.time.specs],
            )
            self._commit(context, result, watermarks, state)
            self.watermark_state, self.last_result = state, result
            self.batches += 1
            return True
        finally:
            builder.forget()
            clean_up(context)
            self.workshop.log.discard_group(context.job)  # what attempts that failed put aside

    def _context(self, entry: LedgerEntry, before: Tick, ticks: Sequence[Tick]) -> BatchContext:
        shop = self.workshop
        specs = tuple(watermark_spec(step) for step in self.plan.inputs)
        time = WatermarkInputs(
            specs,
            entry.watermarks,
            before.time_us,
            tuple(tick.number for tick in ticks),
            tuple(tick.time_us for tick in ticks),
        )
        ids = {step: dict(found) for step, found in self.own(entry).states.items()}
        return BatchContext(
            self.plan.name,
            shop.log.address,
            shop.state,
            shop.local / self.name,
            new_id(),
            shop.shards,
            entry.tick,
            ticks[-1].number,
            ids,
            time,
        )

    def _commit(
        self,
        context: BatchContext,
        result: BatchResult,
        watermarks: BatchWatermarks,
        state: WatermarkState,
    ) -> None:
        shop = self.workshop
        stored = write_watermarks(context.watermark_directory, state) if state.inputs else None
        counts = _added(self.own(self.entry).counts, result.counts)
        entry = LedgerEntry(
            shop.ledger.epoch, self.name, context.up_to, result.ids, stored, result.due_us, counts
        )
        views = [each.name for each in self.plan.outputs if isinstance(each, ViewOutput)]
        self._leave_out_told(result, context.up_to)
        made = BatchOutput(
            result.views,
            result.topics,
            self._controls(result, watermarks),
            result.diverted,
            result.late,
            result.late_rows,
        )
        if context.up_to <= self.again:
            made = BatchOutput(result.views)
        commit_batch(shop.ledger, shop.views, entry, made, views)

    def _leave_out_told(self, result: BatchResult, up_to: int) -> None:
        """A row becomes a dead letter, or goes to a topic for late rows, once, however many queries
        meet it.
        """
        told = self.told_elsewhere | {step for step, tick in self.told.items() if tick >= up_to}
        topics = {
            aside.topic for name in told if name in self.steps for aside in self.steps[name].aside
        }
        result.diverted = {
            step: letters for step, letters in result.diverted.items() if step not in told
        }
        result.late = [counted for counted in result.late if counted[0] not in told]
        result.late_rows = {
            topic: files for topic, files in result.late_rows.items() if topic not in topics
        }

    def _controls(
        self, result: BatchResult, watermarks: BatchWatermarks
    ) -> dict[tuple[str, int], bytes]:
        """Each derived topic carries the ticks of its rows and its step's clocks."""
        found = {}
        for output in self.plan.outputs:
            if isinstance(output, TopicOutput):
                of_step = watermarks.of(watermark_paths(output.input))
                for partition in range(output.partitions):
                    found[output.name, partition] = control_record(
                        result.topic_ticks.get((output.name, partition), {}), of_step
                    )
        return found

    def _worth_combining(self) -> set[str]:
        """Steps that had many rows a key in the last batch. What they compute does not depend on
        it, only how fast.
        """
        counts = self.last_result.counts if self.last_result else {}
        many = ROWS_A_KEY_TO_COMBINE
        return {
            name
            for name in self.steps
            if counts.get(f"{name}.rows_in", 0) > many * counts.get(f"{name}.keys", 1)
        }

    # Time

    def waits_for(self, now_us: int) -> str | None:
        """The step that would have something to tell if a tick were cut now, though no row came."""
        entry = self.entry
        if not entry.due_us:
            return None
        last = self.workshop.journal.at(entry.tick)
        specs = [watermark_spec(step) for step in self.plan.inputs]
        before_us = last.time_us if last else 0
        watermarks, _ = batch_watermarks(
            specs,
            WatermarkState(self.watermark_state.inputs, before_us),
            {},
            [entry.tick + 1],
            [max(now_us, before_us)],
        )
        return next(
            (
                name
                for name, due_us in entry.due_us.items()
                if name in self.steps and self._reaches(watermarks, self.steps[name], due_us)
            ),
            None,
        )

    @staticmethod
    def _reaches(watermarks: BatchWatermarks, step: Step, due_us: int) -> bool:
        each = [watermarks.of(watermark_paths(given)) for given in step.inputs]
        return any(clock.watermark_at_start < due_us <= int(clock.complete[-1]) for clock in each)


def _added(before: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    """Counts since the beginning. How many keys a batch touched says nothing in sum."""
    summed = {name: count for name, count in more.items() if not name.endswith(".keys")}
    return {name: before.get(name, 0) + summed.get(name, 0) for name in {**before, **summed}}


def _bounded(before: Tick, ticks: Sequence[Tick], max_rows: int) -> Sequence[Tick]:
    """As many ticks as make a batch of bounded size; at least one."""
    for count, tick in enumerate(ticks):
        rows = sum(
            end - before.end(topic, p)
            for topic, parts in tick.ends.items()
            for p, end in parts.items()
        )
        if rows > max_rows and count:
            return ticks[:count]
    return ticks


def sub_plan(plan: PipelinePlan, outputs: Mapping[str, object] | Sequence[str]) -> PipelinePlan:
    """The same pipeline with some of its outputs: all inputs stay, so rows keep their order."""
    return PipelinePlan(
        plan.name,
        plan.inputs,
        tuple(each for each in plan.outputs if each.name in set(outputs)),
        plan.ingests,
    )


# Why a batch failed, in a few lines: what a worker raised, without the traces of all that stood
# between it and the runner.


LASTING = (
    errors.BadPartition,
    errors.BadRows,
    errors.BadSchema,
    errors.InputReplaced,
    errors.MissingExtra,
    errors.NewerFormat,
    errors.NotSupported,
    errors.PlanChanged,
    errors.PlanError,
    errors.TopicExists,
)
"""What does not pass by itself: the same batch would fail again."""
_TRACE = "Traceback (most recent call last):"
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(: |$)")
_END = re.compile(r"^\s*$|^\s+at [\w$.]+[(/]|^\s*SQLSTATE:")
_MAX_CHARACTERS = 2_000


def reason(error: BaseException) -> str:
    """What a person needs to know about an error that ended a batch."""
    if isinstance(error, errors.HeadraceError):
        return f"{type(error).__name__}: {error}"
    text = str(error)
    found = _raised_in_worker(text) if _TRACE in text else f"{type(error).__name__}: {text.strip()}"
    return found if len(found) <= _MAX_CHARACTERS else f"{found[:_MAX_CHARACTERS]} …"


def is_lasting(error: BaseException) -> bool:
    """Whether it is of no use to try again, also if it was raised in a worker."""
    kind = getattr(errors, reason(error).partition(":")[0], None)
    return isinstance(kind, type) and issubclass(kind, LASTING)


def _raised_in_worker(text: str) -> str:
    """The error at the end of a worker's traceback: of several the last, but one of ours before all
    others, since it says what to do. Up to the JVM's part.
    """
    lines = text[text.index(_TRACE) :].splitlines()
    raised = [
        number
        for number, line in enumerate(lines)
        if _RAISED.match(line) and number and lines[number - 1].startswith("  ")
    ]
    if not raised:
        return text.strip()
    begin = next(
        (number for number in reversed(raised) if lines[number].startswith("headrace.")), raised[-1]
    )
    end = next(
        (number for number in range(begin + 1, len(lines)) if _END.match(lines[number])), len(lines)
    )
    name, colon, rest = lines[begin].partition(":")
    return "\n".join([f"{name.rsplit('.', 1)[-1]}{colon}{rest}", *lines[begin + 1 : end]])
