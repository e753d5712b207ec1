"""From the plan to one Spark job: the DataFrame whose single action computes all outputs of a
pipeline for some ticks.

Rows stay in Python where the plan allows it: a topic, with row-local steps that need no Spark, is
read and packed in one go, a stage hands blobs to the next, and writes its views itself. Where Spark
SQL stands between, rows go through Spark. A step with several consumers is kept, so that it is not
computed again for each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, TypeGuard

import pyarrow as pa

from headrace.columnar.columns import CHANGE_FIELD, CHANGE_TYPE, ORDER_FIELDS, RANK
from headrace.columnar.expressions import Compute, Keep, RowStep
from headrace.engine.context import (
    BatchContext,
    HostedInput,
    HostedStep,
    StageSpec,
    StageTarget,
    TopicTarget,
)
from headrace.engine.dead_letters import KEEP, DivertFailed, keep_changes
from headrace.engine.job import Chained, Combining, Heartbeat, PackRows, ReadAndPack, Reading, ReadRows
from headrace.engine.outputs import PackForTopic, WriteTopic, WriteView
from headrace.engine.reader import min_rows, ranges
from headrace.engine.shard import ShardFunction
from headrace.engine.shuffle import PACKED
from headrace.engine.ticks import Tick
from headrace.operators.kernel import Preparing
from headrace.operators.load_shedding import Shedding
from headrace.operators.windows.late import Divert
from headrace.plan.expressions import Expression
from headrace.plan.expressions.arrow_evaluator import compile_to_arrow
from headrace.plan.join_steps import DistinctStep, JoinStep, SettleStep, TopStep
from headrace.plan.match_steps import MatchStep, RuledMatchStep
from headrace.plan.plan import (
    DIVERT,
    ChangesStep,
    KeyByStep,
    Output,
    PipelinePlan,
    SelectStep,
    Step,
    TopicOutput,
    TopicStep,
    UnionStep,
    ViewOutput,
    WhereStep,
    read_watermark_spec,
    watermark_paths,
    watermark_spec,
)
from headrace.plan.search_steps import GatherStep, SearchStep
from headrace.plan.window_steps import CompareStep, WindowStep
from headrace.types.schema import to_spark_ddl

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Observation, SparkSession


# Which row-local steps need not go through Spark: those behind a topic whose expressions Python can
# compute with the same results.


Behind = tuple[TopicStep, tuple[RowStep, ...]]
"""A stream's topic, and what is done to its rows where they are read."""


def local_steps(step: Step, *, optimistic: bool) -> Behind | None:
    """How a step's rows come from a topic without Spark; None if they do not. Where several steps
    use them, each reads for itself: that costs less than keeping them.

    `hopeful`: also where some rows may turn out to be Spark's (`json_fields.Inexact`); the batch is
    then done again without.
    """
    done: list[RowStep] = []
    while not isinstance(step, TopicStep):
        if not isinstance(step, KeyByStep):
            made = _row_step(step, optimistic)
            if made is None:
                return None
            done.insert(0, made)
        step = step.input
    return None if step.is_table or step.device_time is not None else (step, tuple(done))


@lru_cache(maxsize=1000)
def _row_step(step: Step, optimistic: bool) -> RowStep | None:
    """Steps are compared by identity, so each is looked at once."""
    if step.is_table:
        return None
    if isinstance(step, WhereStep):
        condition = compile_to_arrow(step.expression, step.input.schema, optimistic=optimistic)
        return None if condition is None else Keep(condition)
    if isinstance(step, SelectStep):
        nodes = [compile_to_arrow(each, step.input.schema, optimistic=optimistic) for each in step.expressions]
        columns = tuple(
            (name, node)
            for (name, _), node in zip(step.columns, nodes, strict=True)
            if node is not None
        )
        return Compute(columns, step.schema) if len(columns) == len(nodes) else None
    return None


ROWS_WORTH_A_TASK = 10_000
_ORDER = [f"`{field.name}`" for field in ORDER_FIELDS]


class JobBuilder:
    """Builds one batch's job. `ticks` are those after `before`."""

    def __init__(
        self,
        spark: SparkSession,
        plan: PipelinePlan,
        context: BatchContext,
        before: Tick,
        ticks: Sequence[Tick],
        cores: int,
        combined: Collection[str] = (),
        *,
        optimistic: bool = False,
    ) -> None:
        self.spark, self.plan, self.context, self.before, self.ticks, self.cores = (
            spark,
            plan,
            context,
            before,
            ticks,
            cores,
        )
        self._combined = combined  # steps whose rows are worth combining before the shuffle
        self._optimistic = optimistic
        self._rows: dict[str, DataFrame] = {}
        self._kept: list[DataFrame] = []
        self.failures: dict[str, Observation] = {}
        self.stages: list[str] = []
        self._ranks = {
            step.name: rank
            for rank, step in enumerate(
                sorted(plan.inputs, key=lambda each: (not each.is_table, each.topic))
            )
        }

    def job(self) -> DataFrame:
        """All outputs in one DataFrame without rows: computing it writes the files that the commit
        refers to.
        """
        leaves: list[DataFrame] = []
        for step in self.plan.steps():
            outputs = [each for each in self.plan.outputs if each.input is step]
            if outputs:
                leaves += self._leaves(step, outputs)
        return reduce(lambda left, right: left.unionAll(right), leaves)

    def failure_counts(self) -> dict[str, int]:
        """After the job has run: on how many rows each step's expressions failed and gave null."""
        found = {
            step: int(observation.get["rows"] or 0) for step, observation in self.failures.items()
        }
        return {f"{step}.errors": count for step, count in found.items() if count}

    def forget(self) -> None:
        for rows in self._kept:
            rows.unpersist()

    # Outputs

    def _leaves(self, step: Step, outputs: list[Output]) -> list[DataFrame]:
        """Where a stage feeds nothing but views and at most one topic, it serves them itself."""
        views = [each for each in outputs if isinstance(each, ViewOutput)]
        topics = [each for each in outputs if isinstance(each, TopicOutput)]
        if step.keeps_state and len(topics) <= 1 and len(self.plan.consumers(step)) == len(outputs):
            target = self._target(topics[0]) if topics else None
            packed = self._stage(step, tuple(view.name for view in views), target)
            return [self._written(packed, target) if target else packed]
        if not views and (behind := self._local(step)) is not None:
            return [self._read_for_topic(behind, self._target(output)) for output in topics]
        rows = self.rows(step)
        written = [rows.mapInArrow(WriteView(view.name, self.context), PACKED) for view in views]
        for output in topics:
            target = self._target(output)
            packed = rows.mapInArrow(PackForTopic(target, self.context.shards), PACKED)
            written.append(self._written(packed.unionAll(self._greeting()), target))
        return written

    def _read_for_topic(self, behind: Behind, target: TopicTarget) -> DataFrame:
        """From topic to topic without Spark's columns: rows are read, computed and packed in one
        task.
        """
        reading = self._reading(*behind)
        work = Chained(ReadRows(reading), PackForTopic(target, self.context.shards))
        return self._written(
            self._read_tasks(reading).mapInArrow(work, PACKED).unionAll(self._greeting()), target
        )

    @staticmethod
    def _target(output: TopicOutput) -> TopicTarget:
        return TopicTarget(output.name, output.input.key, output.partitions)

    def _written(self, packed: DataFrame, target: TopicTarget) -> DataFrame:
        return packed.repartition(self.context.shards, "label").mapInArrow(
            WriteTopic(target, self.context), PACKED
        )

    # Rows

    def rows(self, step: Step) -> DataFrame:
        """A step's rows as Spark has them: the user's columns, a table's `_change_type`, and the
        pipeline's order.
        """
        if step.name not in self._rows:
            made = self._make_rows(step)
            if len(self.plan.consumers(step)) > 1 and (
                step.keeps_state or self._local(step) is None
            ):
                made = made.persist()
                self._kept.append(made)
            self._rows[step.name] = made
        return self._rows[step.name]

    def _local(self, step: Step) -> Behind | None:
        return local_steps(step, optimistic=self._optimistic)

    def _make_rows(self, step: Step) -> DataFrame:
        if (behind := self._local(step)) is not None:
            return self._read_rows(step, behind)
        if isinstance(step, SelectStep):
            return self._selected(step)
        if isinstance(step, WhereStep):
            return self._filtered(step)
        if isinstance(step, KeyByStep):
            return self.rows(step.input)
        if isinstance(step, UnionStep):
            first, *others = (
                self._ranked(each, number, len(step.inputs))
                for number, each in enumerate(step.inputs)
            )
            return reduce(lambda left, right: left.unionByName(right), others, first)
        if isinstance(step, ChangesStep):
            names = [f"`{name}`" for name in step.input.schema.names]
            return self.rows(step.input).selectExpr(
                *names, f"`{CHANGE_TYPE}` AS `{step.column}`", *_ORDER
            )
        return self._stage(step, (), "rows", schema=self._spark_schema(step))

    def _ranked(self, step: Step, number: int, of: int) -> DataFrame:
        """An input of a union: rows that stand at the same place of several inputs come in the
        order of the inputs. A rank below zero stays there.
        """
        names = [f"`{field.name}`" for field in shard_schema(step) if field.name != RANK]
        return self.rows(step).selectExpr(
            *names, f"CAST(`{RANK}` * {of} + {number} AS INT) AS `{RANK}`"
        )

    def _selected(self, step: SelectStep) -> DataFrame:
        columns = [
            f"{expression.safe} AS `{name}`"
            for (name, _), expression in zip(step.columns, step.expressions, strict=True)
        ]
        change = [f"`{CHANGE_TYPE}`"] if step.is_table else []
        return self._guarded(step, step.expressions).selectExpr(*columns, *change, *_ORDER)

    def _filtered(self, step: WhereStep) -> DataFrame:
        """Of a table, an update may make a row fit, or no longer fit: both its images are looked at
        together.
        """
        rows = self._guarded(step, [step.expression])
        if not step.is_table:
            return rows.where(step.expression.safe)
        return rows.selectExpr(
            *_columns(step.input), f"{step.expression.safe} AS `{KEEP}`"
        ).mapInArrow(keep_changes, self._spark_schema(step))

    def _guarded(
        self, step: SelectStep | WhereStep, expressions: Sequence[Expression]
    ) -> DataFrame:
        """A step's input without the rows on which its expressions fail, if they are to be
        diverted; with a count of them, if not.
        """
        rows = self.rows(step.input)
        failing = [f"({each.failed})" for each in expressions if each.failed is not None]
        if not failing:
            return rows
        failed = f"coalesce({' OR '.join(failing)}, false)"
        if step.errors == DIVERT:
            divert = DivertFailed(
                self.context.job_directory, step.name, f"an expression failed: {step.summary()}"
            )
            return rows.selectExpr(*_columns(step.input), f"NOT {failed} AS `{KEEP}`").mapInArrow(
                divert, self._spark_schema(step.input)
            )
        from pyspark.sql import Observation
        from pyspark.sql.functions import expr

        self.failures[step.name] = Observation(f"failed.{step.name}")
        return rows.observe(self.failures[step.name], expr(f"count_if({failed})").alias("rows"))

    def _spark_schema(self, step: Step) -> str:
        return to_spark_ddl(shard_schema(step))

    def _reading(self, step: TopicStep, steps: tuple[RowStep, ...] = ()) -> Reading:
        columns = [*step.stored_schema.names, *([CHANGE_TYPE] if step.is_table else [])]
        least = min_rows(self.context.log)
        found = ranges(
            step.topic,
            self._ranks[step.name],
            columns,
            self.before,
            self.ticks,
            parts=self.cores,
            least=least,
        )
        return Reading(
            tuple(found),
            read_watermark_spec(step),
            self.context.log,
            self.context.job_directory,
            step.processed_at,
            steps,
            self._shedding(step),
        )

    def _shedding(self, step: TopicStep) -> Shedding | None:
        ticks = frozenset(tick.number for tick in self.ticks if step.topic in tick.shed)
        return None if step.shed is None or not ticks else Shedding(step.shed, ticks)

    def _tasks(self, count: int) -> DataFrame:
        return self.spark.range(0, count, 1, max(1, count))

    def _read_tasks(self, reading: Reading) -> DataFrame:
        """The numbers of the ranges. A task has one of them, or several where they are so small
        that tasks would cost more than they gain.
        """
        count, rows = len(reading.ranges), sum(each.stop - each.start for each in reading.ranges)
        return self.spark.range(
            0, count, 1, max(1, min(count, max(self.cores, rows // ROWS_WORTH_A_TASK)))
        )

    def _read_rows(self, step: Step, behind: Behind) -> DataFrame:
        reading = self._reading(*behind)
        return self._read_tasks(reading).mapInArrow(ReadRows(reading), self._spark_schema(step))

    # Stages

    def _stage(
        self,
        step: Step,
        views: tuple[str, ...],
        following: str | StageTarget | TopicTarget | None,
        *,
        schema: str = PACKED,
    ) -> DataFrame:
        chain = self._fused(step)
        hosted = tuple(_hosted(each) for each in chain)
        stage = StageSpec(step.name, hosted, _order_key(step), views, following)
        self.stages.append(stage.name)
        first = chain[0]
        inputs = [
            self._packed(each, key, first, port, hosted[0])
            for port, (each, key) in enumerate(
                zip(first.inputs or (first,), input_keys(first), strict=True)
            )
        ]
        packed = reduce(lambda left, right: left.unionAll(right), inputs)
        return packed.repartition(self.context.shards, "label").mapInArrow(
            ShardFunction(stage, self.context), schema
        )

    def _fused(self, step: Step) -> list[Step]:
        """A step and those before it that work on the same key and feed nothing else: one shuffle
        and one stage for all of them.
        """
        chain = [step]
        while len(chain[0].inputs) == 1 and not chain[0].versioned_inputs:
            before, alone = self._behind_key_by(chain[0].input)
            if not (
                alone and before.keeps_state and stage_key(before) == stage_key(step) == before.key
            ) or _tells_times(before):
                break
            chain.insert(0, before)
        return chain

    def _behind_key_by(self, step: Step) -> tuple[Step, bool]:
        """The step whose rows these are, and whether nobody else uses them."""
        alone = len(self.plan.consumers(step)) == 1
        while isinstance(step, KeyByStep):
            step = step.input
            alone = alone and len(self.plan.consumers(step)) == 1
        return step, alone

    def _combining(self, hosted: HostedStep) -> Combining | None:
        kernel = hosted.kernel
        return (
            kernel
            if hosted.name in self._combined and isinstance(kernel, Combining) and kernel.combinable
            else None
        )

    def _packed(
        self, given: Step, key: tuple[str, ...] | None, of: Step, port: int, hosted: HostedStep
    ) -> DataFrame:
        """A step's rows on their way to the shards of the stage whose first step is `of`. A join
        meets null keys itself; elsewhere rows with one are put aside.
        """
        nulls = isinstance(of, JoinStep | SettleStep | DistinctStep | TopStep | GatherStep)
        prepare = hosted.kernel if key is None and isinstance(hosted.kernel, Preparing) else None
        step, alone = self._behind_key_by(given)
        is_read = isinstance(step, TopicStep) and (step is of or port in of.versioned_inputs)
        behind = (step, ()) if isinstance(step, TopicStep) and is_read else self._local(step)
        if behind is not None:
            reading = self._reading(*behind)
            if not reading.ranges:
                return self._greeting()
            read = ReadAndPack(
                reading,
                port,
                of.name,
                key,
                self.context.shards,
                self._combining(hosted),
                nulls,
                prepare,
            )
            return self._read_tasks(reading).mapInArrow(read, PACKED).unionAll(self._greeting())
        if step.keeps_state and alone:
            return self._stage(step, (), StageTarget(of.name, key, port, nulls, prepare))
        packed = PackRows(
            port, of.name, key, self.context.shards, self.context.job_directory, nulls, prepare
        )
        return self.rows(step).mapInArrow(packed, PACKED).unionAll(self._greeting())

    def _greeting(self) -> DataFrame:
        return self._tasks(1).mapInArrow(Heartbeat(self.context.shards), PACKED)


def shard_schema(step: Step) -> pa.Schema:
    """The columns of a step's rows inside a job: the user's, a table's `_change_type`, and the
    pipeline's order.
    """
    return pa.schema([*step.schema, *([CHANGE_FIELD] if step.is_table else []), *ORDER_FIELDS])


def _columns(step: Step) -> list[str]:
    """The same in SQL, in the order in which a function over Arrow must give them back: a union has
    them in another.
    """
    return [f"`{field.name}`" for field in shard_schema(step)]


def _hosted(step: Step) -> HostedStep:
    inputs = tuple(
        HostedInput(shard_schema(given), watermark_paths(given)) for given in step.inputs or (step,)
    )
    clock = watermark_spec(step) if _tells_times(step) else None
    return HostedStep(
        step.name,
        step.kernel(),
        inputs,
        late_topic_of(step),
        clock,
        step.timed_out if isinstance(step, MatchStep) else None,
    )


def _tells_times(step: Step) -> TypeGuard[TopicStep]:
    """Whether only this step's shards know when rows happened: what goes by its clock stands behind
    another shuffle.
    """
    return isinstance(step, TopicStep) and step.device_time is not None


def late_topic_of(step: Step) -> str | None:
    """Where a step's late rows go, if it sends them somewhere."""
    return (
        step.late.topic
        if isinstance(step, WindowStep | MatchStep) and isinstance(step.late, Divert)
        else None
    )


def _order_key(step: Step) -> tuple[str, ...] | None:
    """The columns by which a stage's rows are put into order within a tick: those by which rows
    came to its shards, where they are still there.

    None for rows that keep the place which they have in their topic.
    """
    if _tells_times(step):
        return None
    key = stage_key(step)
    return key if all(name in step.schema.names for name in key) else step.key


def input_keys(step: Step) -> tuple[tuple[str, ...] | None, ...]:
    """What the rows of each input are sent to shards by; None if every shard gets all of them."""
    if isinstance(step, SearchStep):
        return None, step.inputs[1].key
    if isinstance(step, RuledMatchStep):
        return step.by, None
    if isinstance(step, JoinStep):
        return step.left.on, step.right.on
    return (stage_key(step),) * max(1, len(step.inputs))


def stage_key(step: Step) -> tuple[str, ...]:
    """What a stateful step's rows are sent to shards by; nothing, if all go to one."""
    if isinstance(step, WindowStep | CompareStep | MatchStep):
        return step.by
    if isinstance(step, JoinStep):
        return step.left.on
    if isinstance(step, SearchStep):
        return step.query_key
    if isinstance(step, TopStep):
        return step.per
    if _tells_times(step):
        return (step.device_time.device,) if step.device_time else ()
    return tuple(getattr(step, "by", None) or getattr(step, "on", None) or step.key)
