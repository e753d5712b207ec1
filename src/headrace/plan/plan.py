"""The inert plan of a pipeline: the steps that `Pipeline`, `Stream` and `Table` build, and that the
runtime turns into Spark jobs.

Steps are frozen values without a JVM or a log, so they can be printed, compared and drawn. A step
knows its inputs, the schema of its rows (the user's columns, as Arrow types), whether it is a
table, its kernel, and which state fits it (`identity`). Its name is stable: `names` derives one
where the user gave none.

This module has the base class, the steps over single rows, aggregation, outputs, the plan itself,
and event time in a plan. Windows, joins, patterns and search are in `window_steps`, `join_steps`,
`match_steps` and `search_steps`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import pyarrow as pa

from headrace.durations import format_us
from headrace.error_policy import DIVERT, NULL
from headrace.errors import CyclicPlan, NotSupported, PlanError, nearest
from headrace.expressions.evaluator import Filter, Projection, RowStep
from headrace.expressions.expression import Expression, parse_expression
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.operators.kernel import Kernel, TimedKernel
from headrace.operators.load_shedding import ShedPolicy
from headrace.operators.watermark_spec import WatermarkPath, WatermarkSpec
from headrace.plan.event_time import DeviceTime, EventTime, ProcessingTime
from headrace.types.schema import to_ddl

Settings = tuple[tuple[str, Any], ...]
_MAX_SHOWN = 4


@dataclass(frozen=True)
class TimeColumn:
    """The column that has a step's event time, which is its value plus `shift_us`. `producer` is
    the column that says who sent a row.
    """

    name: str
    shift_us: int = 0
    producer: str | None = None


Times = Sequence[TimeColumn | None]


@dataclass(frozen=True)
class SideOutput:
    """A topic that a step writes besides its result, such as late rows; with the rows' columns and
    key. `what` is a verb phrase for messages, such as "diverts late rows".
    """

    topic: str
    schema: pa.Schema
    key: tuple[str, ...]
    what: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One operation of a plan.

    `name` is empty until the plan is made, unless the user gave one. `key` is a table's primary
    key, or the columns that a stream is keyed by.
    """

    operation: ClassVar[str] = "step"
    stateful: ClassVar[bool] = False

    name: str = ""
    inputs: tuple[Step, ...] = ()
    schema: pa.Schema
    key: tuple[str, ...] = ()
    is_table: bool = False
    name_is_derived: bool = False

    @property
    def input(self) -> Step:
        return self.inputs[0]

    @property
    def watermark_delay_us(self) -> int:
        """How far this step's rows can be behind the watermark of its inputs."""
        return 0

    @property
    def keeps_state(self) -> bool:
        """Whether this step has state between batches."""
        return self.stateful

    def kernel(self) -> Kernel | TimedKernel:
        """The kernel that computes this step. Raises NotSupported if there is none."""
        raise NotSupported(
            f"The step {self.name!r} ({self.operation}) can be declared and drawn, but not run"
            " yet.",
            fix="leave it out.",
        )

    @property
    def key_may_be_null(self) -> bool:
        """Whether columns of a table's key can be null, as those of distinct values and of outer
        joins can.
        """
        return any(source.key_may_be_null for source in self.inputs)

    def diagram(self) -> list[str]:
        """Further lines for the tree of the plan, such as a pattern's automaton; empty by
        default.
        """
        return []

    @property
    def watermark_inputs(self) -> tuple[Step, ...]:
        """The inputs from whose watermarks this step's watermark follows."""
        return self.inputs

    @property
    def versioned_inputs(self) -> tuple[int, ...]:
        """The indices of inputs of which every version is needed, not only the last one of each
        tick. Such a table is read directly from its topic.
        """
        return ()

    @property
    def allowed_lateness_us(self) -> int:
        """How long after the watermark has passed them this step still corrects rows that it has
        emitted.
        """
        return 0

    @property
    def side_outputs(self) -> tuple[SideOutput, ...]:
        """The topics that this step writes besides its result."""
        return ()

    @property
    def shard_key(self) -> tuple[str, ...]:
        """The columns by which this step's state is sharded; none if one shard has all of it."""
        return self.key

    @property
    def input_keys(self) -> tuple[tuple[str, ...] | None, ...]:
        """For each input, the columns that decide to which shard a row goes; None sends every row
        to every shard.
        """
        return (self.shard_key,) * max(1, len(self.inputs))

    @property
    def allows_null_keys(self) -> bool:
        """Whether rows with a null shard key are processed. If not, they become dead letters."""
        return False

    @property
    def computes_event_time(self) -> bool:
        """Whether the event time of this step's rows is known only after its kernel has run. Steps
        that go by its watermark run behind another shuffle.
        """
        return False

    @property
    def late_topic(self) -> str | None:
        """The topic that late rows are written to, if any."""
        return None

    @property
    def timeout_topic(self) -> str | None:
        """The topic that partial matches are written to when they time out, if any."""
        return None

    def row_step(self, *, optimistic: bool) -> RowStep | None:  # noqa: ARG002
        """This step as a function over Arrow batches, where rows are read; None if Spark must
        compute it. `optimistic`: also if some values may turn out to need Spark.
        """
        return None

    def version_fields(self, version: str) -> dict[str, Any]:  # noqa: ARG002
        """The fields that name topics, with the names that the topics have in another version of
        the pipeline.
        """
        return {}

    def time(self, inputs: Times) -> TimeColumn | None:
        """The event time of this step's rows, given that of its inputs; None if it has none.
        `time_column` calls this for all steps upstream.
        """
        if inputs and inputs[0] is not None and inputs[0].name in self.schema.names:
            return inputs[0]
        return None

    @property
    def path(self) -> str:
        """How errors call this step before it has a name: the operations that lead to it, such as
        `orders.where.select`.
        """
        step = self
        operations = []
        while not step.name and step.inputs:
            if step.operation not in {"settle", "newest"}:  # which users do not declare
                operations.append(step.operation)
            step = step.input
        if len(operations) > _MAX_SHOWN + 1:
            operations = [*operations[:_MAX_SHOWN], "…"]
        return ".".join([step.name, *reversed(operations)])

    def details(self) -> dict[str, Any]:
        """What this step does, in plain values: what distinguishes it from others of its
        operation.
        """
        return {}

    def summary(self) -> str:
        """What this step does, in a few words."""
        return ", ".join(f"{name}: {value}" for name, value in self.details().items())

    def describe(self) -> dict[str, Any]:
        """Everything about this step, in plain values; inputs by name."""
        return {
            "step": self.name,
            "operation": self.operation,
            "inputs": [each.name for each in self.inputs],
            "is_table": self.is_table,
            "key": list(self.key),
            "schema": to_ddl(self.schema),
            **self.details(),
        }

    def identity(self) -> dict[str, Any]:
        """What this step's state depends on. State fits a step of the same identity only."""
        details = {name: value for name, value in self.details().items() if name != "errors"}
        return {
            "operation": self.operation,
            "is_table": self.is_table,
            "key": self.key,
            "schema": to_ddl(self.schema),
            **details,
        }

    @cached_property
    def signature(self) -> str:
        """A digest of the identity, in which names of steps do not count."""
        return digest(self.identity())

    @cached_property
    def lineage(self) -> str:
        """A digest of this step and everything upstream of it, in which names of steps do not
        count.
        """
        digests: dict[int, str] = {}
        for step in topological_order([self]):
            digests[id(step)] = digest([step.signature, [digests[id(up)] for up in step.inputs]])
        return digests[id(self)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Step):
            return NotImplemented
        if self is other:
            return True
        mine, theirs = topological_order([self]), topological_order([other])
        return [step.describe() for step in mine] == [step.describe() for step in theirs]

    def __hash__(self) -> int:
        return hash((self.operation, self.name))


@dataclass(frozen=True, kw_only=True, eq=False)
class TopicStep(Step):
    """An input: a topic of the log, or a table's topic."""

    operation: ClassVar[str] = "topic"

    topic: str
    event_time: EventTime | ProcessingTime | None = None
    partitions: int = 1
    settings: Settings = ()
    shed: ShedPolicy | None = None
    """Which rows are dropped when too many wait."""
    captured_by: str | None = None
    """The capture that creates and fills it. The topic may have more columns than are declared."""

    def time(self, inputs: Times) -> TimeColumn | None:  # noqa: ARG002
        if self.event_time is None:
            return None
        return TimeColumn(
            self.event_time.column,
            producer=self.event_time.producer if isinstance(self.event_time, EventTime) else None,
        )

    @property
    def processed_at(self) -> str | None:
        """The column with the time of processing, which is added when rows are read."""
        return self.event_time.column if isinstance(self.event_time, ProcessingTime) else None

    @property
    def device_time(self) -> DeviceTime | None:
        """How the devices' clocks are corrected, with state per device; None if they are not."""
        return self.event_time if isinstance(self.event_time, DeviceTime) else None

    @property
    def stored_schema(self) -> pa.Schema:
        """The columns of the topic itself, without those added when rows are read."""
        event_time = self.event_time
        added = [] if event_time is None else event_time.added_columns(self.schema)
        names = {column.name for column in added}
        return pa.schema([field for field in self.schema if field.name not in names])

    def details(self) -> dict[str, Any]:
        times = {} if self.event_time is None else {"event_time": str(self.event_time)}
        captured = {} if self.captured_by is None else {"captured_by": self.captured_by}
        shed = {} if self.shed is None else {"shed": str(self.shed)}
        return {
            "topic": self.topic,
            "partitions": self.partitions,
            **captured,
            **times,
            **shed,
            **dict(self.settings),
        }

    def identity(self) -> dict[str, Any]:
        corrected = {}
        if (times := self.device_time) is not None:
            device_type = str(self.schema.field(times.device).type)
            corrected = {"device": [times.device, times.sent, times.received, device_type]}
        return {
            "operation": self.operation,
            "topic": self.topic,
            "is_table": self.is_table,
            "key": self.key,
            **corrected,
        }

    def summary(self) -> str:
        parts = [f"key {', '.join(self.key)}"] if self.key else []
        return "; ".join([*parts, *([f"event time {self.event_time}"] if self.event_time else [])])

    @property
    def keeps_state(self) -> bool:
        """A table's topic keeps state: its records carry only new values, and downstream steps need
        the old value to retract. So does one whose device clocks are corrected.
        """
        return self.is_table or self.device_time is not None

    @property
    def shard_key(self) -> tuple[str, ...]:
        return self.key if self.device_time is None else (self.device_time.device,)

    @property
    def computes_event_time(self) -> bool:
        return self.device_time is not None

    def kernel(self) -> Kernel | TimedKernel:
        from headrace.operators.device_time import DeviceColumns, DeviceTimeKernel
        from headrace.operators.latest_rows import LatestKernel

        if self.is_table:
            return LatestKernel(self.name, self.schema, self.key)
        if (times := self.device_time) is not None:
            columns = DeviceColumns(
                event=times.event,
                sent=times.sent,
                received=times.received,
                device=times.device,
                time=times.column,
                flag=times.flag,
            )
            return DeviceTimeKernel(self.name, self.stored_schema, columns, times.tolerance_us)
        return super().kernel()


@dataclass(frozen=True, kw_only=True, eq=False)
class SelectStep(Step):
    """Columns computed from each row alone. `columns` has each one's name and Spark SQL."""

    operation: ClassVar[str] = "select"

    columns: tuple[tuple[str, str], ...]
    errors: str = NULL

    @cached_property
    def expressions(self) -> tuple[Expression, ...]:
        """The columns' expressions, parsed over the input's schema."""
        return tuple(
            parse_expression(text, self.input.schema, where=self.path) for _, text in self.columns
        )

    def time(self, inputs: Times) -> TimeColumn | None:
        """The input's event time, if a column of the result is its column."""
        (before,) = inputs
        names = {
            expression.column: name
            for (name, _), expression in zip(
                reversed(self.columns), reversed(self.expressions), strict=True
            )
        }
        if before is None or before.name not in names:
            return None
        keeps_name = dict(self.columns).get(before.name) == before.name
        name = before.name if keeps_name else names[before.name]
        return replace(before, name=name, producer=names.get(before.producer))

    def row_step(self, *, optimistic: bool) -> RowStep | None:
        from headrace.expressions.spark_subset import compile_to_arrow

        columns = []
        for (name, _), expression in zip(self.columns, self.expressions, strict=True):
            node = compile_to_arrow(expression, self.input.schema, optimistic=optimistic)
            if node is None:
                return None
            columns.append((name, node))
        return Projection(tuple(columns), self.schema)

    def details(self) -> dict[str, Any]:
        return {"columns": dict(self.columns), "errors": self.errors}

    def summary(self) -> str:
        return ", ".join(
            name if name == text else f"{name} = {text}" for name, text in self.columns
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class WhereStep(Step):
    """The rows for which a condition is true."""

    operation: ClassVar[str] = "where"

    condition: str
    errors: str = NULL

    @cached_property
    def expression(self) -> Expression:
        return parse_expression(self.condition, self.input.schema, where=self.path)

    def row_step(self, *, optimistic: bool) -> RowStep | None:
        from headrace.expressions.spark_subset import compile_to_arrow

        condition = compile_to_arrow(self.expression, self.input.schema, optimistic=optimistic)
        return None if condition is None else Filter(condition)

    def details(self) -> dict[str, Any]:
        return {"condition": self.condition, "errors": self.errors}

    def summary(self) -> str:
        return self.condition


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyByStep(Step):
    """The input's rows under another key."""

    operation: ClassVar[str] = "key_by"

    def summary(self) -> str:
        return ", ".join(self.key)


@dataclass(frozen=True, kw_only=True, eq=False)
class AggregateStep(Step):
    """A table keyed by `by`, with one row for each group that has rows."""

    operation: ClassVar[str] = "aggregate"
    stateful: ClassVar[bool] = True

    by: tuple[str, ...]
    aggregates: tuple[tuple[str, AggregateSpec], ...]
    errors: str = NULL
    """What becomes of a row on which a custom aggregate raises: "divert" sends it to dead letters,
    anything else stops the query.
    """

    @property
    def shard_key(self) -> tuple[str, ...]:
        return self.by

    @property
    def key_may_be_null(self) -> bool:
        return False

    def details(self) -> dict[str, Any]:
        return {
            "by": list(self.by),
            "aggregates": {name: str(spec) for name, spec in self.aggregates},
            "errors": self.errors,
        }

    def identity(self) -> dict[str, Any]:
        """State depends on the types that are read. Bounds of state may change."""
        read = {
            name: str(self.input.schema.field(spec.column).type)
            for name, spec in self.aggregates
            if spec.column is not None
        }
        return {
            **super().identity(),
            "aggregates": {name: str(spec.without_bounds()) for name, spec in self.aggregates},
            "read": read,
        }

    def summary(self) -> str:
        return f"by {', '.join(self.by)}: " + ", ".join(
            f"{name} = {spec}" for name, spec in self.aggregates
        )

    def time(self, inputs: Times) -> TimeColumn | None:  # noqa: ARG002
        return None

    def kernel(self) -> Kernel:
        from headrace.operators.aggregates.kernel import AggregateKernel

        source = self.input
        row_key = source.key if source.is_table else ()
        return AggregateKernel(
            self.name,
            source.schema,
            self.by,
            self.aggregates,
            over_table=source.is_table,
            row_key=row_key,
            divert=self.errors == DIVERT,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class UnionStep(Step):
    """The rows of all inputs, which have the same columns. The first input decides their order."""

    operation: ClassVar[str] = "union"

    def time(self, inputs: Times) -> TimeColumn | None:
        return inputs[0] if len(set(inputs)) == 1 else None

    def summary(self) -> str:
        return f"{len(self.inputs)} inputs"


@dataclass(frozen=True, kw_only=True, eq=False)
class DedupeStep(Step):
    """The first row of each value of `on`; repetitions within a time are dropped."""

    operation: ClassVar[str] = "dedupe"
    stateful: ClassVar[bool] = True

    on: tuple[str, ...]
    within_us: int

    @property
    def shard_key(self) -> tuple[str, ...]:
        return self.on

    def details(self) -> dict[str, Any]:
        return {"on": list(self.on), "within_us": self.within_us}

    def identity(self) -> dict[str, Any]:
        """State has the compared columns only, so other columns may change."""
        kept = pa.schema([self.schema.field(name) for name in self.on])
        return {"operation": self.operation, "schema": to_ddl(kept), **self.details()}

    def summary(self) -> str:
        return f"on {', '.join(self.on)} within {format_us(self.within_us)}"

    def kernel(self) -> TimedKernel:
        from headrace.operators.deduplication import DedupeKernel

        time = time_column(self)
        return DedupeKernel(
            self.name, self.schema, self.on, self.within_us, None if time is None else time.name
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ToTableStep(Step):
    """The newest row of each `key`."""

    operation: ClassVar[str] = "to_table"
    stateful: ClassVar[bool] = True

    @property
    def key_may_be_null(self) -> bool:
        return False

    def summary(self) -> str:
        return f"key {', '.join(self.key)}"

    def kernel(self) -> Kernel:
        from headrace.operators.latest_rows import LatestKernel

        return LatestKernel(self.name, self.schema, self.key)


@dataclass(frozen=True, kw_only=True, eq=False)
class ChangesStep(Step):
    """A table's changes as a stream: its columns and, in `column`, the kind of change."""

    operation: ClassVar[str] = "changes"

    column: str = "change_type"

    def details(self) -> dict[str, Any]:
        return {"column": self.column}


@dataclass(frozen=True, kw_only=True, eq=False)
class Output:
    """An output: where a step's rows go."""

    kind: ClassVar[str] = "output"

    name: str
    input: Step

    def details(self) -> dict[str, Any]:
        return {}

    def describe(self) -> dict[str, Any]:
        return {"output": self.name, "kind": self.kind, "input": self.input.name, **self.details()}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Output):
            return NotImplemented
        return self is other or (self.describe() == other.describe() and self.input == other.input)

    def __hash__(self) -> int:
        return hash((self.kind, self.name))


@dataclass(frozen=True, kw_only=True, eq=False)
class TopicOutput(Output):
    """A derived topic; of a table, a table's topic."""

    kind: ClassVar[str] = "topic"

    partitions: int = 1
    settings: Settings = ()

    def details(self) -> dict[str, Any]:
        return {"partitions": self.partitions, **dict(self.settings)}


@dataclass(frozen=True, kw_only=True, eq=False)
class ViewOutput(Output):
    """A view: a table that is read by key, and its newest changes for readers that follow it or
    read an earlier tick.
    """

    kind: ClassVar[str] = "view"

    keep_changes: int | None = None


@dataclass(frozen=True)
class Ingest:
    """A streaming DataFrame whose rows are appended to a topic. The DataFrame itself is not part of
    the plan.
    """

    name: str
    topic: str


@dataclass(frozen=True)
class PipelinePlan:
    """A whole pipeline: its inputs, used or not, and its outputs, from which the steps between are
    reached.

    Example:
        ```python
        shop.view("revenue", revenue)
        plan = shop.plan()
        [step.name for step in plan.steps()]
        ```
    """

    name: str
    inputs: tuple[TopicStep, ...]
    outputs: tuple[Output, ...]
    ingests: tuple[Ingest, ...] = ()
    _steps: dict[str, Step] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._steps.update(
            (each.name, each)
            for each in topological_order(
                [*self.inputs, *(output.input for output in self.outputs)]
            )
        )

    def steps(self) -> tuple[Step, ...]:
        """All steps, each after its inputs.

        Returns:
            The steps, inputs among them.
        """
        return tuple(self._steps.values())

    def step(self, name: str) -> Step:
        """Get a step by name.

        Args:
            name: The step's name, as `headrace plan` shows it.

        Returns:
            The step.

        Raises:
            PlanError: There is no step of that name.
        """
        if name not in self._steps:
            raise PlanError(
                f"The pipeline {self.name!r} has no step {name!r}: {nearest(name, self._steps)}"
            )
        return self._steps[name]

    def consumers(self, step: Step) -> tuple[Step | Output, ...]:
        """Internal: the steps and outputs that a step feeds. A step that is joined with itself
        feeds the join twice.
        """
        steps = [each for each in self.steps() for source in each.inputs if source is step]
        return (*steps, *(output for output in self.outputs if output.input is step))

    def describe(self) -> dict[str, Any]:
        """The plan in plain values.

        Returns:
            Steps, outputs and ingests as dictionaries that can be written as JSON.
        """
        return {
            "pipeline": self.name,
            "steps": [each.describe() for each in self.steps()],
            "outputs": [each.describe() for each in self.outputs],
            "ingests": [{"ingest": each.name, "topic": each.topic} for each in self.ingests],
        }

    def check_kernels(self) -> None:
        """Internal: raise NotSupported if a step that keeps state has no kernel."""
        for step in self.steps():
            if step.keeps_state:
                step.kernel()

    def __str__(self) -> str:
        return tree(self)


def tree(plan: PipelinePlan) -> str:
    """The plan as text: each output, and below it the steps that lead to it. A step that stands
    above already is only named.
    """
    lines = [f"pipeline {plan.name}"]
    drawn: set[str] = set()
    unused = [each.name for each in plan.inputs if not plan.consumers(each)]
    for position, output in enumerate(plan.outputs):
        last = position == len(plan.outputs) - 1 and not unused
        lines.append(f"{_branch(last)}{output.kind} {output.name}")
        lines += _below(output.input, _indent(last), drawn)
    if unused:
        lines.append(f"{_branch(last=True)}not used: {', '.join(unused)}")
    return "\n".join(lines)


def _below(first: Step, indent: str, drawn: set[str]) -> list[str]:
    """The lines of a step and everything upstream of it, depth first and without recursion."""
    lines: list[str] = []
    stack: list[tuple[Step, str, bool]] = [(first, indent, True)]
    while stack:
        step, indent, last = stack.pop()
        known = step.name in drawn and bool(step.inputs)
        text = "(as above)" if known else step_text(step)
        state = "" if known or not step.stateful else "  [keeps state]"
        lines.append(f"{indent}{_branch(last)}{step.name}  {text}{state}".rstrip())
        if not known:
            lines += [f"{indent}{_indent(last)}    {line}" for line in step.diagram()]
            drawn.add(step.name)
            stack += [
                (each, indent + _indent(last), position == len(step.inputs) - 1)
                for position, each in enumerate(step.inputs)
            ][::-1]
    return lines


def step_text(step: Step) -> str:
    """A step in one line: its operation and its summary."""
    kind = (
        ("table" if step.is_table else "topic") if isinstance(step, TopicStep) else step.operation
    )
    return f"{kind} {step.summary()}".rstrip()


def _branch(last: bool) -> str:
    return "└─ " if last else "├─ "


def _indent(last: bool) -> str:
    return "   " if last else "│  "


def topological_order(last: Iterable[Step]) -> list[Step]:
    """These steps and all upstream of them, each once and after its inputs. Raises CyclicPlan if a
    step needs its own result.

    The search is depth first without recursion, since a plan may have thousands of steps.
    """
    done: dict[int, Step] = {}
    for final in last:
        path: list[tuple[Step, Iterator[Step]]] = [(final, iter(final.inputs))]
        on_path = {id(final)}
        while path:
            step, rest = path[-1]
            following = next((each for each in rest if id(each) not in done), None)
            if following is None:
                done.setdefault(id(step), step)
                on_path.discard(id(step))
                path.pop()
            elif id(following) in on_path:
                raise CyclicPlan(
                    f"The step {following.name or following.operation!r} needs its own result.",
                    fix="break the cycle with a topic of another pipeline.",
                )
            else:
                on_path.add(id(following))
                path.append((following, iter(following.inputs)))
    return list(done.values())


def digest(value: Any) -> str:
    """A short digest of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


# Event time in a plan


def watermark_spec(step: TopicStep) -> WatermarkSpec:
    """How an input's watermark moves. A table's follows the ticks unless its event time declares a
    delay or a producer, and so does that of a topic without event time.
    """
    times = step.event_time
    if not isinstance(times, EventTime) or (
        step.is_table and not times.delay_given and times.producer is None
    ):
        return WatermarkSpec(step.name)
    return WatermarkSpec(
        name=step.name,
        column=times.column,
        producer=times.producer,
        delay_us=times.delay_us,
        idle_us=times.idle_us,
        max_ahead_us=times.max_ahead_us,
    )


def read_watermark_spec(step: TopicStep) -> WatermarkSpec:
    """How an input's watermark moves where its rows are read: by nothing but ticks, if event times
    are known only behind a kernel.
    """
    return watermark_spec(step) if step.device_time is None else WatermarkSpec(step.name)


def watermark_paths(step: Step) -> tuple[WatermarkPath, ...]:
    """How a step's watermark follows from those of the inputs: delays and allowed lateness of the
    steps between add up, and of several paths to one input the longest counts.
    """
    paths: dict[int, dict[str, WatermarkPath]] = {}
    for current in topological_order([step]):
        if isinstance(current, TopicStep):
            paths[id(current)] = {current.name: WatermarkPath(current.name)}
            continue
        longest: dict[str, WatermarkPath] = {}
        for source in current.watermark_inputs:
            for path in paths[id(source)].values():
                known = longest.get(path.name, WatermarkPath(path.name))
                watermark_us = path.watermark_lag_us + current.watermark_delay_us
                horizon_us = (
                    path.horizon_lag_us + current.watermark_delay_us + current.allowed_lateness_us
                )
                longest[path.name] = WatermarkPath(
                    path.name,
                    max(known.watermark_lag_us, watermark_us),
                    max(known.horizon_lag_us, horizon_us),
                )
        paths[id(current)] = longest
    return tuple(paths[id(step)].values())


def time_column(step: Step) -> TimeColumn | None:
    """The event time of a step's rows; None if it has none."""
    times: dict[int, TimeColumn | None] = {}
    for current in topological_order([step]):
        times[id(current)] = current.time([times[id(source)] for source in current.inputs])
    return times[id(step)]
