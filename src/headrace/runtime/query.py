"""A query: outputs of a pipeline that are computed and committed together, with their own position
in the ledger.

A pipeline has one query. Outputs that are added later form another one until it has caught up; the
runner then merges the two. `Query.compute` is one batch: choose the ticks, run the job;
`Query.commit` makes it visible.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.columnar.keys import KEY_GROUPS
from headrace.engine.commit import BatchOutput, commit_batch
from headrace.engine.context import BatchContext
from headrace.engine.job_graph import ShuffleNode, nodes, sql_steps
from headrace.engine.ledger import Ledger, LedgerEntry
from headrace.engine.outputs import dead_letters_of
from headrace.engine.reports import (
    STATE_BYTES,
    STATE_KEYS,
    BatchResult,
    JobDirectory,
    JobFiles,
    JobMemory,
    needs_spark,
    read_reports,
)
from headrace.engine.shard import ShardTooLarge
from headrace.engine.state.files import new_id
from headrace.engine.state.task_state import MAX_STEPS
from headrace.engine.ticks import Ends, Tick, TickJournal, control_record, rows_between
from headrace.engine.watermarks import (
    BatchWatermarks,
    InputWatermark,
    Ports,
    WatermarkInputs,
    WatermarkState,
    batch_watermarks,
    read_watermarks,
    write_watermarks,
)
from headrace.errors import ConfigurationError
from headrace.log.api import Log
from headrace.plan.answer_steps import AnswersStep, RequestsOutput
from headrace.plan.plan import (
    PipelinePlan,
    Step,
    TopicOutput,
    ViewOutput,
    topological_order,
    watermark_paths,
    watermark_spec,
)
from headrace.runtime.batch_size import (
    DEFAULT_TARGET_S,
    BatchSize,
    BatchWidth,
    Width,
    limit_rows,
)
from headrace.runtime.failures import failure_reason
from headrace.runtime.freshness import Freshness
from headrace.runtime.job_builder import JobBuilder
from headrace.runtime.spark_jobs import run_in_one_task, run_wide
from headrace.views.store import ViewStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


MAX_TICKS_A_BATCH = 2_000
ROWS_A_KEY_TO_COMBINE = 4
MAX_BYTES_OF_WHOLE_STORE = 256 << 20
MAX_BATCH_BYTES = 1 << 30


@dataclass
class RunContext:
    """What all queries of a run share."""

    log: Log
    spark: SparkSession
    state: Path
    """The pipeline's state directory."""
    local: Path
    """The directory for local stores on each machine."""
    cores: int
    shards: int
    ledger: Ledger
    journal: TickJournal
    views: ViewStore | None = None
    batch_target_s: float = DEFAULT_TARGET_S
    """How long a batch should take."""
    width: str = "auto"
    """How wide batches run: "one" task, "wide", or "auto"."""
    state_bytes: int = 0
    """About how large the state of all steps is."""
    is_answered: Callable[[str], bool] = lambda _call: False
    """Whether no row of a recorded call waits for its answer."""
    looked_us: dict[int, int] = field(default_factory=dict)
    """Tick that is not yet committed -> when the runner had last looked for rows before it cut
    it.
    """

    @property
    def watermark_directory(self) -> Path:
        return self.state / "clocks"


@dataclass
class ComputedBatch:
    """A batch that is computed, and not yet committed."""

    context: BatchContext
    before: Tick
    """The last tick of the batch before."""
    ticks: Sequence[Tick]
    files: JobFiles
    result: BatchResult
    watermarks: BatchWatermarks
    watermark_state: WatermarkState
    entry: LedgerEntry
    """The ledger entry that commits it."""
    rows: int = 0
    width: Width = "wide"
    seconds: float = 0.0
    """How long it took to compute."""


class Query:
    """One query of a run. `plan` has all inputs of the pipeline, and the outputs of this query."""

    def __init__(
        self,
        name: str,
        plan: PipelinePlan,
        run: RunContext,
        dead_letters_emitted_to: Mapping[str, int] | None = None,
        rebuild_to: int = 0,
        continued: Collection[str] = (),
    ) -> None:
        self.name = name
        self.plan = plan
        self.run = run
        self.dead_letters_emitted_to: Mapping[str, int] = dead_letters_emitted_to or {}
        """Per step, the last tick whose dead letters an earlier query has emitted. A batch never
        crosses it, so none is emitted twice.
        """
        self.rebuild_to = rebuild_to
        """Up to this tick, only state and views are built again; topics and dead letters have been
        emitted. A batch never crosses it.
        """
        self.continued = frozenset(continued)
        """Steps whose state has rows of a definition from before an accepted edit."""
        self.dead_letters_emitted_elsewhere: frozenset[str] = frozenset()
        """Steps that a query further ahead has too: it has emitted their dead letters."""
        self.watermark_state: WatermarkState = read_watermarks(
            run.watermark_directory, self.entry.watermarks
        )
        self.last_result: BatchResult | None = None
        self.batches = 0
        self.batch_rows = 0
        self.batch_seconds = 0.0
        self.width = BatchWidth(run.width)
        self.freshness = Freshness()
        self.view_ticks: dict[str, int] = {}
        """View -> the last tick of this run in which it changed."""
        self._size = BatchSize(run.batch_target_s)
        self._optimistic = True
        self._has_whole_store = False
        self._known_sql_steps: dict[bool, list[str]] = {}  # by whether it is optimistic

    @property
    def has_begun(self) -> bool:
        return self.run.ledger.last(self.name) is not None

    @property
    def entry(self) -> LedgerEntry:
        """The newest ledger entry; before the first batch, one at the first tick of the
        pipeline.
        """
        first = self.run.journal.first
        return self.run.ledger.last(self.name) or LedgerEntry(
            0, self.name, first.number if first else 0
        )

    @property
    def tick(self) -> int:
        """The last tick that is in the ledger."""
        return self.entry.tick

    @property
    def rows_per_second(self) -> float:
        return self.batch_rows / max(self.batch_seconds, 1e-9)

    @cached_property
    def steps(self) -> dict[str, Step]:
        """The steps that compute this query's outputs, by name. A declared input that none of them
        reads is not among them.
        """
        outputs = [output.input for output in self.plan.outputs]
        return {step.name: step for step in topological_order(outputs)}

    def own(self, entry: LedgerEntry) -> LedgerEntry:
        """The part of an entry that this query computes. The rest belongs to outputs that the query
        had once, and is stale.
        """
        return replace(
            entry,
            states={step: ids for step, ids in entry.states.items() if step in self.steps},
            due_us={step: due_us for step, due_us in entry.due_us.items() if step in self.steps},
            counts={name: count for name, count in entry.counts.items() if self._counts(name)},
        )

    def _counts(self, name: str) -> bool:
        """Whether a count is of this query: `STEP.METRIC` and `STEP.AGGREGATE.METRIC` of a step, or
        what a topic could not have (`dead_letters_of`).
        """
        counted = name.rpartition(".")[0]
        topics = (each.name for each in self.plan.outputs if isinstance(each, TopicOutput))
        return (
            counted in self.steps
            or counted.rpartition(".")[0] in self.steps
            or counted in {dead_letters_of(topic) for topic in topics}
        )

    @cached_property
    def _port_groups(self) -> list[Ports]:
        """The paths to the inputs of each step of this query, and of each output."""
        groups = [
            tuple(watermark_paths(source) for source in step.inputs)
            for step in self.steps.values()
            if step.inputs
        ]
        groups += [(watermark_paths(output.input),) for output in self.plan.outputs]
        return list(dict.fromkeys(groups))

    @property
    def own_watermarks(self) -> dict[str, InputWatermark]:
        """The watermarks of the inputs that this query reads; those of others do not move here."""
        read = {watermark_spec(step).name for step in self.plan.inputs if step.name in self.steps}
        return {
            name: watermark
            for name, watermark in self.watermark_state.inputs.items()
            if name in read
        }

    # A batch

    def step(self, up_to: int, max_ticks: int = MAX_TICKS_A_BATCH) -> bool:
        """Compute and commit one batch of ticks up to `up_to`, if there are any that the ledger
        does not have. Returns whether there were.
        """
        batch = self.compute(up_to, max_ticks)
        if batch is None:
            return False
        self.commit(batch)
        return True

    def compute(
        self, up_to: int, max_ticks: int = MAX_TICKS_A_BATCH, *, after: ComputedBatch | None = None
    ) -> ComputedBatch | None:
        """Compute one batch of ticks up to `up_to`, without committing it. None if there is none.

        `after` is the batch before, if it is not committed yet. Its state files are durable, and
        its ledger entry is known: nothing more is needed to go on from it.
        """
        entry = self.entry if after is None else after.entry
        journal = self.run.journal
        before = journal.at(entry.tick)
        if before is None:
            raise ConfigurationError(
                f"The ticks of {self.plan.name!r} do not reach back to {entry.tick}.",
                fix="replay the pipeline.",
            )
        boundaries = (*self.dead_letters_emitted_to.values(), self.rebuild_to)
        up_to = min(
            [
                up_to,
                entry.tick + max_ticks,
                *(boundary for boundary in boundaries if boundary > entry.tick),
            ]
        )
        max_rows = self._size.rows
        if self.width.row_bytes is not None:
            max_rows = min(max_rows, max(1, int(MAX_BATCH_BYTES / self.width.row_bytes)))
        ticks = limit_rows(before, journal.between(entry.tick, up_to), max_rows)
        if not ticks:
            return None
        started_s = time.monotonic()
        rows = rows_between(before.ends, ticks[-1].ends)
        width, shards = self._choose_width(rows), self.run.shards
        batch: ComputedBatch | None = None
        while batch is None:
            try:
                batch = self._try_batch(entry, before, ticks, width, shards)
            except Exception as error:
                is_too_large = failure_reason(error).startswith(ShardTooLarge.__name__)
                if is_too_large and width == "one":
                    width = "wide"
                elif is_too_large and shards < KEY_GROUPS:
                    shards = min(KEY_GROUPS, 4 * shards)  # each has less
                else:
                    self.width.avoid(width)
                    raise
            else:
                if batch is None:
                    # Some values need Spark: from now on, it computes them in this run.
                    self._optimistic = False
                    width = self._choose_width(rows)
        if batch.result.read_rows:
            self.width.row_bytes = batch.result.read_bytes / batch.result.read_rows
        batch.rows = rows
        batch.width = width
        batch.seconds = time.monotonic() - started_s
        self._size.adapt(rows, batch.seconds)
        self.width.learn(width, rows, batch.seconds)
        return batch

    def _choose_width(self, rows: int) -> Width:
        if sum(step.keeps_state for step in self.steps.values()) > MAX_STEPS:
            return "wide"  # more than the store of one task can tell apart
        return self.width.choose(rows, sql_steps=self._sql_steps)

    @property
    def _sql_steps(self) -> list[str]:
        """The steps that Spark SQL must compute."""
        if self._optimistic not in self._known_sql_steps:
            tick = self.run.journal.at(self.entry.tick)
            assert tick is not None
            context = self._batch_context(self.entry, tick, [tick], "wide", self.run.shards)
            builder = JobBuilder(
                self.plan, context, tick, [tick], cores=1, optimistic=self._optimistic
            )
            job = builder.job()
            self._known_sql_steps[self._optimistic] = sql_steps(job)
            self.width.expect(sum(isinstance(node, ShuffleNode) for node in nodes(job)))
        return self._known_sql_steps[self._optimistic]

    def _try_batch(
        self,
        entry: LedgerEntry,
        before: Tick,
        ticks: Sequence[Tick],
        width: Width,
        shards: int,
    ) -> ComputedBatch | None:
        """Run the job, read its reports, and compute the watermarks. None if the job was optimistic
        and some values need Spark. `shards` are those of a wide job.
        """
        context = self._batch_context(entry, before, ticks, width, shards)
        builder = JobBuilder(
            self.plan,
            context,
            before,
            ticks,
            cores=1 if width == "one" else self.run.cores,
            combined=() if width == "one" else self._steps_to_combine(),
            optimistic=self._optimistic,
        )
        job, files = builder.job(), context.files
        is_computed = False
        try:
            failures: dict[str, int] = {}
            if isinstance(files, JobMemory):
                files = run_in_one_task(self.run.spark, job, context)
            else:
                failures = run_wide(self.run.spark, job, context.job_directory)
            if needs_spark(files):
                return None
            result = read_reports(
                files, stages=builder.stages, shards=context.shards, ids=context.ids
            )
            result.counts |= {f"{step}.errors": count for step, count in failures.items() if count}
            watermarks, state = context.watermarks.compute(
                context.watermark_directory,
                files,
                [spec.name for spec in context.watermarks.specs],
            )
            state = replace(state, merged=watermarks.merged(self._port_groups))
            watermark_id = None
            if state.inputs or state.is_ended:
                watermark_id = write_watermarks(context.watermark_directory, state)
            is_computed = True
        finally:
            if not is_computed:
                self._remove_files(context, files)
        new_entry = LedgerEntry(
            epoch=self.run.ledger.epoch,
            query=self.name,
            tick=context.up_to,
            states=result.ids,
            watermarks=watermark_id,
            due_us=result.due_us,
            counts=_add_counts(self.own(entry), result.counts),
        )
        return ComputedBatch(
            context=context,
            before=before,
            ticks=ticks,
            files=files,
            result=result,
            watermarks=watermarks,
            watermark_state=state,
            entry=new_entry,
        )

    def _remove_files(self, context: BatchContext, files: JobFiles) -> None:
        files.remove()
        shutil.rmtree(context.job_directory, ignore_errors=True)
        self.run.log.discard_group(context.job)  # what failed attempts have staged

    def discard(self, batch: ComputedBatch) -> None:
        """Forget a batch that will not be committed: it never happened."""
        self._remove_files(batch.context, batch.files)

    def commit(self, batch: ComputedBatch) -> None:
        """Commit a batch. While a query is rebuilt, only its views are written again."""
        result, entry = batch.result, batch.entry
        if entry.tick <= self.rebuild_to:
            output = BatchOutput(views=result.views)
        else:
            self._drop_emitted(result, entry.tick)
            output = BatchOutput(
                views=result.views,
                topics=result.topics,
                controls=self._control_records(result, batch.watermarks),
                dead_letters=result.dead_letters,
                late_counts=result.late_counts,
                side_outputs=result.side_outputs,
            )
        views = [output.name for output in self.plan.outputs if isinstance(output, ViewOutput)]
        try:
            self.view_ticks |= commit_batch(self.run.ledger, self.run.views, entry, output, views)
        finally:
            self._remove_files(batch.context, batch.files)
        self.watermark_state = batch.watermark_state
        self.last_result = result
        self.batches += 1
        self.batch_rows = batch.rows
        self.batch_seconds = batch.seconds
        self.freshness.record(batch.before, batch.ticks, self.run.looked_us, time.time_ns() // 1000)
        for tick in batch.ticks:
            self.run.looked_us.pop(tick.number, None)

    def _batch_context(
        self, entry: LedgerEntry, before: Tick, ticks: Sequence[Tick], width: Width, shards: int
    ) -> BatchContext:
        """What the tasks of a batch need to know. `shards` are those of a wide job. One task has a
        local store of its own for all steps, which is filled from the state files when it is first
        used; if the state is large, it uses the stores of the shards instead.
        """
        job = new_id()
        files: JobFiles = JobMemory()
        if width == "wide":
            files = JobDirectory(self.run.state / "jobs" / job)
        limit = MAX_BYTES_OF_WHOLE_STORE * (2 if self._has_whole_store else 1)
        self._has_whole_store = width == "one" and self.run.state_bytes <= limit
        watermarks = WatermarkInputs(
            specs=tuple(watermark_spec(step) for step in self.plan.inputs),
            id=entry.watermarks,
            before_us=before.time_us,
            ticks=tuple(tick.number for tick in ticks),
            times_us=tuple(tick.time_us for tick in ticks),
            was_ended=before.is_ended,
            ended_from=next((tick.number for tick in ticks if tick.is_ended), None),
        )
        return BatchContext(
            pipeline=self.plan.name,
            log=self.run.log.address,
            state=self.run.state,
            local=self.run.local / self.name,
            job=job,
            shards=1 if self._has_whole_store else shards,
            after=entry.tick,
            up_to=ticks[-1].number,
            ids={step: dict(ids) for step, ids in self.own(entry).states.items()},
            files=files,
            watermarks=watermarks,
        )

    def _steps_to_combine(self) -> set[str]:
        """Steps that had many rows per key in the last batch, and are worth combining before the
        shuffle. Only the speed depends on it.
        """
        counts = self.last_result.counts if self.last_result else {}
        return {
            name
            for name in self.steps
            if counts.get(f"{name}.rows_in", 0)
            > ROWS_A_KEY_TO_COMBINE * counts.get(f"{name}.keys", 1)
        }

    def _drop_emitted(self, result: BatchResult, up_to: int) -> None:
        """Drop dead letters, late counts and side outputs that another query has emitted: each row
        becomes one once, however many queries meet it.
        """
        emitted = self.dead_letters_emitted_elsewhere | {
            step for step, tick in self.dead_letters_emitted_to.items() if tick >= up_to
        }
        emitted_topics = {
            side_output.topic
            for name in emitted
            if name in self.steps
            for side_output in self.steps[name].side_outputs
        }
        result.dead_letters = {
            step: files for step, files in result.dead_letters.items() if step not in emitted
        }
        result.late_counts = [late for late in result.late_counts if late[0] not in emitted]
        result.side_outputs = {
            topic: files
            for topic, files in result.side_outputs.items()
            if topic not in emitted_topics
        }

    def _control_records(
        self, result: BatchResult, watermarks: BatchWatermarks
    ) -> dict[tuple[str, int], bytes]:
        """The control record of each partition of each derived topic."""
        records = {}
        for output in self.plan.outputs:
            if isinstance(output, TopicOutput):
                step_watermarks = watermarks.of(watermark_paths(output.input))
                for partition in range(output.partitions):
                    tick_rows = result.topic_ticks.get((output.name, partition), {})
                    records[output.name, partition] = control_record(tick_rows, step_watermarks)
        return records

    # Time

    def waits_for(self, now_us: int, after: ComputedBatch | None = None) -> str | None:
        """The name of a step that would emit something if a tick were cut now without a new row:
        the watermark would reach what its state waits for. `after` is the last batch, if it is not
        committed yet.
        """
        entry = self.entry if after is None else after.entry
        state = self.watermark_state if after is None else after.watermark_state
        last = self.run.journal.at(entry.tick)
        if not entry.due_us:
            return None
        before_us = last.time_us if last else 0
        watermarks, _ = batch_watermarks(
            [watermark_spec(step) for step in self.plan.inputs],
            replace(state, time_us=before_us, is_ended=last is not None and last.is_ended),
            {},
            [entry.tick + 1],
            [max(now_us, before_us)],
        )
        watermarks = self._with_progress(watermarks)
        for name, due_us in entry.due_us.items():
            if name in self.steps and self.steps[name].goes_by_ticks:
                if before_us < due_us <= now_us:
                    return name
            elif name in self.steps:
                ports = [watermark_paths(source) for source in self.steps[name].inputs]
                for of_port in watermarks.of_ports(ports):
                    if of_port.watermark_at_start < due_us <= int(of_port.watermark[-1]):
                        return name
        return None

    def _with_progress(self, watermarks: BatchWatermarks) -> BatchWatermarks:
        """The watermarks when the callers have moved on those of recorded answers: where no row
        waits for one, answers are as complete as the rows. A tick lets them see how far those are.
        """
        outputs = {
            output.call: output
            for output in self.plan.outputs
            if isinstance(output, RequestsOutput)
        }
        for answers in self.plan.inputs:
            output = outputs.get(answers.name)
            if (
                isinstance(answers, AnswersStep)
                and answers.row_time is not None
                and output is not None
                and self.run.is_answered(answers.name)
            ):
                reached = watermarks.of(watermark_paths(output.input))
                watermarks = watermarks.moved_on(answers.name, int(reached.horizon[-1]))
        return watermarks

    # Status

    @property
    def state_sizes(self) -> dict[str, dict[str, int]]:
        """The keys and bytes of the state of each step, without the garbage in its files. A step
        whose state an older version began has none.
        """
        counts = self.own(self.entry).counts
        return {
            step: {"keys": counts[f"{step}{STATE_KEYS}"], "bytes": counts[f"{step}{STATE_BYTES}"]}
            for step in sorted(self.steps)
            if f"{step}{STATE_KEYS}" in counts
        }

    def status(self, ends: Ends) -> dict[str, Any]:
        """This query in the runner's status. `ends` are the present ends of the inputs."""
        entry = self.entry
        tick = self.run.journal.at(entry.tick)
        return {
            "tick": entry.tick,
            "outputs": [output.name for output in self.plan.outputs],
            "rows_behind": rows_between(tick.ends, ends) if tick is not None else 0,
            "batch_rows": self.batch_rows,
            "batch_seconds": self.batch_seconds,
            "batch_width": self.width.last,
            "rows_per_second": self.rows_per_second,
            "due_us": {
                step: due_us
                for step, due_us in entry.due_us.items()
                if step not in self.steps or not self.steps[step].goes_by_ticks
            },
            "batch_counts": dict(self.last_result.counts) if self.last_result else {},
        }

    def view_status(self) -> dict[str, dict[str, float | None]]:
        """The freshness of each view in the runner's status: when its newest change was cut into a
        tick, and how long rows take from append to visible.
        """
        p50_s, p99_s = self.freshness.quantiles_s(0.5, 0.99) or (None, None)
        views = {}
        for output in self.plan.outputs:
            if isinstance(output, ViewOutput):
                tick = self.run.journal.at(self.view_ticks.get(output.name, 0))
                changed = output.name in self.view_ticks and tick is not None
                views[output.name] = {
                    "newest": tick.time_us / 1e6 if changed and tick is not None else None,
                    "visible_p50_s": p50_s,
                    "visible_p99_s": p99_s,
                }
        return views

    @property
    def _has_ended(self) -> bool:
        """Whether event time ended with the last tick in the ledger or before."""
        tick = self.run.journal.at(self.entry.tick)
        return tick is not None and tick.is_ended

    def watermark_status(self) -> dict[str, dict[str, Any]]:
        """The watermarks of this query's inputs in the runner's status."""
        specs = {spec.name: spec for spec in map(watermark_spec, self.plan.inputs)}
        return {
            name: {
                "watermark_us": watermark.watermark_us if watermark.begun else None,
                "producers": len(watermark.producers),
                "ended": self._has_ended,
                "rows_ahead": self.entry.counts.get(f"{name}.ahead", 0),
                "held_back_by": [
                    {
                        "producer": specs[name].label(producer),
                        "newest_us": newest_us,
                        "heard_us": heard_us,
                    }
                    for producer, newest_us, heard_us in watermark.slowest_producers()
                ],
            }
            for name, watermark in self.watermark_state.inputs.items()
        }


def _add_counts(entry: LedgerEntry, batch: Mapping[str, int]) -> dict[str, int]:
    """Counts since the pipeline began. The number of keys that a batch changed is not summed: it
    means nothing over several batches. Nor is the size of a state that was there before sizes were
    counted.
    """
    before = entry.counts
    unknown = {
        f"{step}{end}"
        for step, ids in entry.states.items()
        for end in (STATE_KEYS, STATE_BYTES)
        if ids and f"{step}{end}" not in before
    }
    added = {
        name: count
        for name, count in batch.items()
        if not name.endswith(".keys") and name not in unknown
    }
    return {name: before.get(name, 0) + added.get(name, 0) for name in {**before, **added}}


def sub_plan(plan: PipelinePlan, outputs: Mapping[str, object] | Sequence[str]) -> PipelinePlan:
    """A pipeline's plan with some of its outputs. All inputs stay, so that rows keep their
    order.
    """
    names = set(outputs)
    return PipelinePlan(
        name=plan.name,
        inputs=plan.inputs,
        outputs=tuple(output for output in plan.outputs if output.name in names),
        ingests=plan.ingests,
    )
