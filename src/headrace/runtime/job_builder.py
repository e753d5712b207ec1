"""From the plan to the job of one batch: the graph whose nodes compute all outputs of a query for
some ticks.

Rows stay in Python where the plan allows it: a topic, with row-local steps that Python computes as
Spark would, is read and packed in one task; a stage passes packed rows to the next one, and writes
its views itself. Only where Spark SQL must compute a step do rows go through Spark. A step with
several consumers is shared, so that it is not computed again for each of them.

`engine.job_graph` has the nodes and `runtime.spark_jobs` runs them; `engine.map_tasks`,
`engine.shard` and `engine.outputs` have the functions that run in tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

import pyarrow as pa

from headrace.columnar.columns import CHANGE_FIELD, CHANGE_TYPE, ORDER_FIELDS, TIMESTAMP_COLUMN
from headrace.engine.context import (
    BatchContext,
    HostedInput,
    HostedStep,
    StageSpec,
    StageTarget,
    TopicTarget,
)
from headrace.engine.job_graph import (
    HeartbeatNode,
    JobNode,
    MapNode,
    RangesNode,
    ShuffleNode,
    SqlNode,
    UnionNode,
)
from headrace.engine.map_tasks import (
    KEEP,
    ApplyRowStep,
    CombiningKernel,
    DivertFailed,
    InputReader,
    PackRows,
    RankRows,
    ReadAndPack,
    ReadRows,
    RenameChangeType,
    StopAtFailed,
    filter_changes,
)
from headrace.engine.outputs import (
    CopyToTopic,
    PackForTopic,
    WriteTopic,
    WriteView,
    copies_in_parallel,
)
from headrace.engine.reader import min_range_rows, topic_ranges
from headrace.engine.shard import ShardFunction
from headrace.engine.shuffle import PACKED
from headrace.engine.ticks import Tick
from headrace.engine.user_code import RunUserCode
from headrace.error_policy import DIVERT, STOP
from headrace.expressions.evaluator import RowStep
from headrace.expressions.expression import Expression
from headrace.operators.kernel import BroadcastKernel
from headrace.operators.load_shedding import LoadShedder
from headrace.plan.function_steps import UserCodeStep
from headrace.plan.join_steps import LookupStep
from headrace.plan.plan import (
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
from headrace.types.schema import to_spark_ddl

LocalSource = tuple[TopicStep, tuple[RowStep, ...]]
"""A topic, and the row-local steps that are computed where its rows are read."""
_MIN_ROWS_PER_TASK = 10_000
_ORDER = [f"`{field.name}`" for field in ORDER_FIELDS]


def local_source(step: Step, *, optimistic: bool) -> LocalSource | None:
    """How a step's rows come from a topic without Spark; None if they do not. If several steps use
    them, each reads for itself: that costs less than persisting them.

    `optimistic`: also if some values may turn out to need Spark (`NeedsSpark`). The batch is then
    computed again without optimism.
    """
    row_steps: list[RowStep] = []
    while not isinstance(step, TopicStep):
        if not isinstance(step, KeyByStep):
            row_step = None if step.is_table else _row_step(step, optimistic)
            if row_step is None:
                return None
            row_steps.insert(0, row_step)
        step = step.input
    if step.keeps_state:
        return None
    return step, tuple(row_steps)


@lru_cache(maxsize=1000)
def _row_step(step: Step, optimistic: bool) -> RowStep | None:
    return step.row_step(optimistic=optimistic)


class JobBuilder:
    """Builds the job of one batch, for the `ticks` after `before`.

    `combined` are the steps whose rows are worth combining before the shuffle. After `job`,
    `stages` has the names of its stages.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        context: BatchContext,
        before: Tick,
        ticks: Sequence[Tick],
        cores: int,
        combined: Collection[str] = (),
        *,
        optimistic: bool = False,
    ) -> None:
        self.plan = plan
        self.context = context
        self.before = before
        self.ticks = ticks
        self.cores = cores
        self.stages: list[str] = []
        self._combined = combined
        self._optimistic = optimistic
        self._rows: dict[str, JobNode] = {}
        inputs = sorted(plan.inputs, key=lambda step: (not step.is_table, step.topic))
        self._ranks = {step.name: rank for rank, step in enumerate(inputs)}

    def job(self) -> JobNode:
        """All outputs in one node without rows. Computing it writes what the commit refers to."""
        outputs_of = {
            step: [output for output in self.plan.outputs if output.input is step]
            for step in self.plan.steps()
        }
        written = [
            node
            for step, outputs in outputs_of.items()
            if outputs
            for node in self._write_outputs(step, outputs)
        ]
        return UnionNode(tuple(written))

    # Outputs

    def _write_outputs(self, step: Step, outputs: list[Output]) -> list[JobNode]:
        """The nodes that write a step's outputs. A stage that feeds nothing but views and at most
        one topic writes them itself.
        """
        views = [output for output in outputs if isinstance(output, ViewOutput)]
        topics = [output for output in outputs if isinstance(output, TopicOutput)]
        targets = [
            TopicTarget(output.name, output.input.key, output.partitions) for output in topics
        ]
        if step.keeps_state and len(topics) <= 1 and len(self.plan.consumers(step)) == len(outputs):
            target = targets[0] if targets else None
            packed = self._stage(step, tuple(view.name for view in views), target)
            return [self._write_topic(packed, target) if target else packed]
        written: list[JobNode] = []
        if not views and (source := self._local_source(step)) is not None:
            # From topic to topic: rows are read, computed and written or packed in one task.
            reader = self._input_reader(*source)
            copied = [each for each in targets if copies_in_parallel(reader, each, self.cores)]
            written += [self._copy_to_topic(reader, target) for target in copied]
            targets = [target for target in targets if target not in copied]
            rows: JobNode = MapNode(self._read_tasks(reader), ReadRows(reader), _spark_schema(step))
        else:
            rows = self.rows(step)
        written += [MapNode(rows, WriteView(view.name, self.context), PACKED) for view in views]
        for target in targets:
            packed = MapNode(rows, PackForTopic(target, self.context.shards), PACKED)
            written.append(self._write_topic(self._with_heartbeats(packed), target))
        return written

    def _copy_to_topic(self, reader: InputReader, target: TopicTarget) -> JobNode:
        written = {each.partition % target.partitions for each in reader.ranges}
        numbers = RangesNode(target.partitions, max(1, min(self.cores, len(written))))
        return MapNode(numbers, CopyToTopic(reader, target, self.context), PACKED)

    def _write_topic(self, packed: JobNode, target: TopicTarget) -> JobNode:
        return MapNode(
            ShuffleNode(packed, self.context.shards), WriteTopic(target, self.context), PACKED
        )

    # Rows

    def rows(self, step: Step) -> JobNode:
        """A step's rows: the user's columns, a table's `_change_type`, and the order columns."""
        if step.name not in self._rows:
            rows = self._compute_rows(step)
            is_read_again = self._local_source(step) is not None and not step.keeps_state
            if len(self.plan.consumers(step)) > 1 and not is_read_again:
                rows.is_shared = True
            self._rows[step.name] = rows
        return self._rows[step.name]

    def _local_source(self, step: Step) -> LocalSource | None:
        return local_source(step, optimistic=self._optimistic)

    def _compute_rows(self, step: Step) -> JobNode:
        if (source := self._local_source(step)) is not None:
            reader = self._input_reader(*source)
            return MapNode(self._read_tasks(reader), ReadRows(reader), _spark_schema(step))
        match step:
            case SelectStep() | WhereStep():
                row_step = _row_step(step, self._optimistic)
                if row_step is not None:
                    apply = ApplyRowStep(row_step, shard_schema(step), self.context.files)
                    return MapNode(self.rows(step.input), apply, _spark_schema(step))
                return self._select(step) if isinstance(step, SelectStep) else self._filter(step)
            case LookupStep():
                look_up = step.row_step(optimistic=self._optimistic)
                assert look_up is not None
                apply = ApplyRowStep(look_up, shard_schema(step), self.context.files)
                return MapNode(self.rows(step.input), apply, _spark_schema(step))
            case KeyByStep():
                return self.rows(step.input)
            case UnionStep():
                names = tuple(shard_schema(step).names)
                return UnionNode(
                    tuple(
                        MapNode(
                            self.rows(source),
                            RankRows(index, len(step.inputs), names),
                            _spark_schema(step),
                        )
                        for index, source in enumerate(step.inputs)
                    )
                )
            case UserCodeStep():
                run = RunUserCode(
                    code=step.computation,
                    step=step.name,
                    functions=", ".join(f"{name}()" for name, _ in step.functions)
                    or step.summary(),
                    schema=shard_schema(step),
                    errors=step.errors,
                    job=self.context.files,
                )
                return MapNode(self.rows(step.input), run, _spark_schema(step))
            case ChangesStep():
                rename = RenameChangeType(step.column, tuple(step.input.schema.names))
                return MapNode(self.rows(step.input), rename, _spark_schema(step))
            case _:
                return self._stage(step, (), "rows", schema=_spark_schema(step))

    def _select(self, step: SelectStep) -> JobNode:
        columns = [
            f"{expression.safe} AS `{name}`"
            for (name, _), expression in zip(step.columns, step.expressions, strict=True)
        ]
        change = [f"`{CHANGE_TYPE}`"] if step.is_table else []
        rows = self._guard(step, step.expressions)
        return SqlNode(rows, step.name, select=(*columns, *change, *_ORDER))

    def _filter(self, step: WhereStep) -> JobNode:
        """The rows that fit a condition. Of a table, both rows of an update are looked at together:
        see `filter_changes`.
        """
        rows = self._guard(step, [step.expression])
        if not step.is_table:
            return SqlNode(rows, step.name, where=step.expression.safe)
        keep = f"{step.expression.safe} AS `{KEEP}`"
        judged = SqlNode(rows, step.name, select=(*_sql_columns(step.input), keep))
        return MapNode(judged, filter_changes, _spark_schema(step))

    def _guard(self, step: SelectStep | WhereStep, expressions: Sequence[Expression]) -> JobNode:
        """A step's input. Rows for which an expression fails are removed and become dead letters
        with errors="divert", end the batch with errors="stop", and are counted otherwise.
        """
        rows = self.rows(step.input)
        conditions = [f"({each.failed})" for each in expressions if each.failed is not None]
        if not conditions:
            return rows
        failed = f"coalesce({' OR '.join(conditions)}, false)"
        if step.errors in (DIVERT, STOP):
            check = (
                StopAtFailed(step.name, step.summary())
                if step.errors == STOP
                else DivertFailed(
                    self.context.files, step.name, f"an expression failed: {step.summary()}"
                )
            )
            keep = f"NOT {failed} AS `{KEEP}`"
            judged = SqlNode(rows, step.name, select=(*_sql_columns(step.input), keep))
            return MapNode(judged, check, _spark_schema(step.input))
        return SqlNode(rows, step.name, failed=failed)

    # Reading

    def _input_reader(self, step: TopicStep, row_steps: tuple[RowStep, ...] = ()) -> InputReader:
        columns = [*step.stored_schema.names, *([CHANGE_TYPE] if step.is_table else [])]
        watermark = read_watermark_spec(step)
        ranges = topic_ranges(
            step.topic,
            self._ranks[step.name],
            columns,
            self.before,
            self.ticks,
            parts=self.cores,
            min_rows=min_range_rows(self.context.log),
            declared=step.stored_schema,
            append_times=not watermark.follows_ticks
            or TIMESTAMP_COLUMN in dict(step.metadata).values(),
        )
        shed_ticks = frozenset(tick.number for tick in self.ticks if step.topic in tick.shed)
        shedding = LoadShedder(step.shed, shed_ticks) if step.shed and shed_ticks else None
        return InputReader(
            ranges=tuple(ranges),
            watermark=watermark,
            log=self.context.log,
            job=self.context.files,
            time_column=step.processed_at,
            metadata=step.metadata,
            steps=row_steps,
            shedding=shedding,
        )

    def _read_tasks(self, reader: InputReader) -> JobNode:
        """The numbers of the ranges. Small ranges share a task, where starting one would cost more
        than it gains.
        """
        count = len(reader.ranges)
        rows = sum(each.stop - each.start for each in reader.ranges)
        tasks = max(1, min(count, max(self.cores, rows // _MIN_ROWS_PER_TASK)))
        return RangesNode(count, tasks)

    def _with_heartbeats(self, packed: JobNode) -> JobNode:
        return UnionNode((packed, HeartbeatNode(self.context.shards)))

    # Stages

    def _stage(
        self,
        step: Step,
        views: tuple[str, ...],
        target: str | StageTarget | TopicTarget | None,
        *,
        schema: str = PACKED,
    ) -> JobNode:
        """The stage that computes a step, with the steps before it that can run in the same
        stage.
        """
        chain = self._fuse(step)
        hosted = tuple(_host(each) for each in chain)
        stage = StageSpec(
            name=step.name, steps=hosted, key=_order_key(step), views=views, next=target
        )
        self.stages.append(stage.name)
        first = chain[0]
        sources = first.inputs or (first,)
        inputs = [
            self._pack_input(source, key, first, port, hosted[0])
            for port, (source, key) in enumerate(zip(sources, first.input_keys, strict=True))
        ]
        shuffle = ShuffleNode(UnionNode(tuple(inputs)), self.context.shards)
        return MapNode(shuffle, ShardFunction(stage, self.context), schema)

    def _fuse(self, step: Step) -> list[Step]:
        """A step and the steps before it that have the same shard key and feed nothing else: one
        shuffle and one stage serve them all.
        """
        chain = [step]
        while len(chain[0].inputs) == 1 and not chain[0].versioned_inputs:
            before, is_exclusive = self._behind_key_by(chain[0].input)
            if not (
                is_exclusive
                and before.keeps_state
                and before.shard_key == step.shard_key == before.key
                and not before.computes_event_time
            ):
                break
            chain.insert(0, before)
        return chain

    def _behind_key_by(self, step: Step) -> tuple[Step, bool]:
        """The step whose rows these are, and whether they have no other consumer."""
        is_exclusive = len(self.plan.consumers(step)) == 1
        while isinstance(step, KeyByStep):
            step = step.input
            is_exclusive = is_exclusive and len(self.plan.consumers(step)) == 1
        return step, is_exclusive

    def _pack_input(
        self,
        source: Step,
        key: tuple[str, ...] | None,
        consumer: Step,
        port: int,
        hosted: HostedStep,
    ) -> JobNode:
        """The rows of `source`, packed for the shards of the stage whose first step is
        `consumer`.
        """
        kernel = hosted.kernel
        nulls = consumer.allows_null_keys
        read = consumer.read_columns(port)
        unread = tuple(name for name in source.schema.names if name not in read)
        prepare = kernel if key is None and isinstance(kernel, BroadcastKernel) else None
        step, is_exclusive = self._behind_key_by(source)
        if isinstance(step, TopicStep) and (step is consumer or port in consumer.versioned_inputs):
            local: LocalSource | None = (step, ())
        else:
            local = self._local_source(step)
        if local is not None:
            reader = self._input_reader(*local)
            if not reader.ranges:
                return HeartbeatNode(self.context.shards)
            combine: CombiningKernel | None = None
            if hosted.name in self._combined and isinstance(kernel, CombiningKernel):
                combine = kernel if kernel.combinable else None
            read_and_pack = ReadAndPack(
                reader=reader,
                port=port,
                step=consumer.name,
                key=key,
                shards=self.context.shards,
                combine=combine,
                nulls=nulls,
                prepare=prepare,
                unread=unread,
            )
            return self._with_heartbeats(MapNode(self._read_tasks(reader), read_and_pack, PACKED))
        if step.keeps_state and is_exclusive:
            target = StageTarget(
                step=consumer.name,
                key=key,
                port=port,
                nulls=nulls,
                prepare=prepare,
                unread=unread,
            )
            return self._stage(step, (), target)
        pack_rows = PackRows(
            port=port,
            step=consumer.name,
            key=key,
            shards=self.context.shards,
            job=self.context.files,
            nulls=nulls,
            prepare=prepare,
            unread=unread,
        )
        return self._with_heartbeats(MapNode(self.rows(step), pack_rows, PACKED))


def shard_schema(step: Step) -> pa.Schema:
    """The columns of a step's rows inside a job: the user's, a table's `_change_type`, and the
    order columns.
    """
    return pa.schema([*step.schema, *([CHANGE_FIELD] if step.is_table else []), *ORDER_FIELDS])


def _spark_schema(step: Step) -> str:
    return to_spark_ddl(shard_schema(step))


def _sql_columns(step: Step) -> list[str]:
    """The columns of `shard_schema`, in that order, as SQL: a function over Arrow must return them
    so, and a union has them in another order.
    """
    return [f"`{field.name}`" for field in shard_schema(step)]


def _host(step: Step) -> HostedStep:
    sources = step.inputs or (step,)
    watermark = None
    if isinstance(step, TopicStep) and step.computes_event_time:
        watermark = watermark_spec(step)
    return HostedStep(
        name=step.name,
        kernel=step.hosted_kernel(),
        inputs=tuple(
            HostedInput(shard_schema(source), watermark_paths(source)) for source in sources
        ),
        late_topic=step.late_topic,
        watermark=watermark,
        timeout_topic=step.timeout_topic,
    )


def _order_key(step: Step) -> tuple[str, ...] | None:
    """The columns that order a stage's rows within a tick: the shard key if the rows still have it,
    otherwise the step's key. None keeps the order that rows have in their topic.
    """
    if step.computes_event_time:
        return None
    key = step.shard_key
    return key if all(name in step.schema.names for name in key) else step.key
