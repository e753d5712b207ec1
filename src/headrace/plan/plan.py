"""The inert plan of a pipeline: what `Pipeline`, `Stream` and `Table` build, and what the planner,
the drawings and the tests read.

Plain frozen values, without a JVM or a log: they can be printed, compared and drawn. A step knows
its inputs, the schema of its rows (the user's columns, in Arrow's types as `log/schema` gives them)
and whether it is a table. Its name is stable; `names` gives one where the user gave none.
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
from headrace.errors import CyclicPlan, NotSupported, PlanError, nearest
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.operators.kernel import Kernel, TimedKernel
from headrace.operators.load_shedding import Shed
from headrace.operators.watermark import WatermarkPath, WatermarkSpec
from headrace.plan.event_time import DeviceTime, EventTime, ProcessingTime
from headrace.plan.expressions import Expression, read
from headrace.types.schema import to_ddl

NULL, DIVERT = "null", "divert"
ERRORS = (NULL, DIVERT)
"""What becomes of a row on which an expression fails: the result is null, or the row goes to dead
letters.
"""

Settings = tuple[tuple[str, Any], ...]
_MAX_SHOWN = 4


@dataclass(frozen=True)
class TimeColumn:
    """The column that says when a row happened: its value and `shift_us` is the event time.
    `producer`: the column that says who sent it.
    """

    name: str
    shift_us: int = 0
    producer: str | None = None


Times = Sequence[TimeColumn | None]


@dataclass(frozen=True)
class SideOutput:
    """A topic of its own that a step writes beside its rows, with their columns and key; and how
    people call that.
    """

    topic: str
    schema: pa.Schema
    key: tuple[str, ...]
    what: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One operation. `name` is empty until the plan is made, unless the user gave one. `key`: a
    table's primary key, or what a stream is keyed by.
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
        """How far behind its inputs' time this step's rows can be."""
        return 0

    @property
    def keeps_state(self) -> bool:
        """Whether this step needs state between batches."""
        return self.stateful

    def kernel(self) -> Kernel | TimedKernel:
        """The kernel that computes this step. NotSupported if there is none."""
        raise NotSupported(
            f"The step {self.name!r} ({self.operation}) can be declared and drawn, but not run"
            " yet.",
            fix="leave it out.",
        )

    def drawn(self) -> list[str]:
        """Further lines for the tree of the plan, such as a pattern's automaton."""
        return []

    @property
    def watermark_inputs(self) -> tuple[Step, ...]:
        """The inputs by whose clocks this step's rows go."""
        return self.inputs

    @property
    def versioned_inputs(self) -> tuple[int, ...]:
        """The inputs of which every version is needed, not only what each tick left: such a table
        is read as it lies in its topic.
        """
        return ()

    @property
    def allowed_lateness_us(self) -> int:
        """For how long after its time has passed this step still corrects what it told."""
        return 0

    @property
    def side_outputs(self) -> tuple[SideOutput, ...]:
        """What this step writes beside its rows: late ones, for example."""
        return ()

    def renamed(self, version: str) -> dict[str, Any]:  # noqa: ARG002
        """The fields that name topics, under the names that they have in another version of the
        pipeline.
        """
        return {}

    def time(self, inputs: Times) -> TimeColumn | None:
        """The event time of this step's rows, given that of its inputs; None if it has none.
        `timing.time_column` asks all steps on the way.
        """
        return (
            inputs[0]
            if inputs and inputs[0] is not None and inputs[0].name in self.schema.names
            else None
        )

    @property
    def path(self) -> str:
        """How errors call this step before it has a name: the way that leads to it, such as
        `orders.where.select`.
        """
        step, way = self, []
        while not step.name and step.inputs:
            if step.operation not in {"settle", "newest"}:  # which nobody declares
                way.append(step.operation)
            step = step.input
        shown = way if len(way) <= _MAX_SHOWN + 1 else [*way[:_MAX_SHOWN], "…"]
        return ".".join([step.name, *reversed(shown)])

    def details(self) -> dict[str, Any]:
        """What this step does, in plain values: the part that makes it differ from another of its
        kind.
        """
        return {}

    def summary(self) -> str:
        """What this step does, in a few words for people."""
        return ", ".join(f"{name}: {value}" for name, value in self.details().items())

    def describe(self) -> dict[str, Any]:
        """Everything there is to know, flat: inputs by their names."""
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
        """What this step's state depends on: with another identity, the state is another's."""
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
        """A digest of the identity, whatever this step and others are called."""
        return digest(self.identity())

    @cached_property
    def lineage(self) -> str:
        """A digest of this step and everything upstream of it, whatever the steps are called."""
        digests: dict[int, str] = {}
        for each in topological_order([self]):
            digests[id(each)] = digest(
                [each.signature, [digests[id(given)] for given in each.inputs]]
            )
        return digests[id(self)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Step):
            return NotImplemented
        return self is other or _flat([self]) == _flat([other])

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
    shed: Shed | None = None
    """What is left out when too much of it waits."""
    captured_by: str | None = None
    """The capture that fills it, and makes it: the topic may have more columns than are
    declared.
    """

    def time(self, inputs: Times) -> TimeColumn | None:  # noqa: ARG002
        if self.event_time is None:
            return None
        return TimeColumn(
            self.event_time.column,
            producer=self.event_time.producer if isinstance(self.event_time, EventTime) else None,
        )

    @property
    def processed_at(self) -> str | None:
        """The column with the time of processing, which is put in when rows are read."""
        return self.event_time.column if isinstance(self.event_time, ProcessingTime) else None

    @property
    def device_time(self) -> DeviceTime | None:
        """How the devices' clocks are put right, if they are: that is done by device, with
        state.
        """
        return self.event_time if isinstance(self.event_time, DeviceTime) else None

    @property
    def stored_schema(self) -> pa.Schema:
        """The columns that the topic has."""
        added = (
            []
            if self.event_time is None
            else [each.name for each in self.event_time.added(self.schema)]
        )
        return pa.schema([field for field in self.schema if field.name not in added])

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
        times = self.device_time
        corrected = (
            {}
            if times is None
            else {
                "device": [
                    times.device,
                    times.sent,
                    times.received,
                    str(self.schema.field(times.device).type),
                ]
            }
        )
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

    def kernel(self) -> Kernel | TimedKernel:
        from headrace.operators.device_time import DeviceColumns, DeviceTimeKernel
        from headrace.operators.joins.latest import LatestKernel

        if self.is_table:
            return LatestKernel(self.name, self.schema, self.key)
        if (times := self.device_time) is not None:
            columns = DeviceColumns(
                times.event, times.sent, times.received, times.device, times.column, times.flag
            )
            return DeviceTimeKernel(self.name, self.stored_schema, columns, times.tolerance_us)
        return super().kernel()


@dataclass(frozen=True, kw_only=True, eq=False)
class SelectStep(Step):
    """Columns computed from each row alone. `columns`: (result's name, Spark SQL)."""

    operation: ClassVar[str] = "select"

    columns: tuple[tuple[str, str], ...]
    errors: str = NULL

    @cached_property
    def expressions(self) -> tuple[Expression, ...]:
        """The columns' expressions, read over the input's schema: their types, what they read, and
        the forms that cannot fail.
        """
        return tuple(read(text, self.input.schema, where=self.path) for _, text in self.columns)

    def time(self, inputs: Times) -> TimeColumn | None:
        """It lives on in a column that is taken over as it is."""
        (before,) = inputs
        names = {
            expression.column: name
            for (name, _), expression in zip(
                reversed(self.columns), reversed(self.expressions), strict=True
            )
        }
        if before is None or before.name not in names:
            return None
        same = (
            before.name
            if dict(self.columns).get(before.name) == before.name
            else names[before.name]
        )
        return replace(before, name=same, producer=names.get(before.producer))

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
        return read(self.condition, self.input.schema, where=self.path)

    def details(self) -> dict[str, Any]:
        return {"condition": self.condition, "errors": self.errors}

    def summary(self) -> str:
        return self.condition


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyByStep(Step):
    """The same rows under another key, which is `key`."""

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
    """What becomes of a row on which a user's own aggregate raises: with "null" the query stops and
    says why, with "divert" the row goes to dead letters.
    """

    def details(self) -> dict[str, Any]:
        return {
            "by": list(self.by),
            "aggregates": {name: str(spec) for name, spec in self.aggregates},
            "errors": self.errors,
        }

    def identity(self) -> dict[str, Any]:
        """What is kept depends on the types that are read; how much may be kept can be changed."""
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
    """The rows of all inputs, which have the same columns (in any order; the first input's is
    kept).
    """

    operation: ClassVar[str] = "union"

    def time(self, inputs: Times) -> TimeColumn | None:
        return inputs[0] if len(set(inputs)) == 1 else None

    def summary(self) -> str:
        return f"{len(self.inputs)} inputs"


@dataclass(frozen=True, kw_only=True, eq=False)
class DedupeStep(Step):
    """The first row of each `on` within a time."""

    operation: ClassVar[str] = "dedupe"
    stateful: ClassVar[bool] = True

    on: tuple[str, ...]
    within_us: int

    def details(self) -> dict[str, Any]:
        return {"on": list(self.on), "within_us": self.within_us}

    def identity(self) -> dict[str, Any]:
        """Only what it compares is kept, so other columns may come and go."""
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

    def summary(self) -> str:
        return f"key {', '.join(self.key)}"

    def kernel(self) -> Kernel:
        from headrace.operators.joins.latest import LatestKernel

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
    """Where a step's rows go."""

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
    """A table kept where it can be asked by key, and its newest changes for those who follow it or
    ask for an earlier tick.
    """

    kind: ClassVar[str] = "view"

    keep_changes: int | None = None


@dataclass(frozen=True)
class Ingest:
    """A streaming DataFrame that is brought in through a topic. The DataFrame itself is no part of
    the plan.
    """

    name: str
    topic: str


@dataclass(frozen=True)
class PipelinePlan:
    """A whole pipeline: its inputs, used or not, and its outputs, which hold on to the steps
    between.
    """

    name: str
    inputs: tuple[TopicStep, ...]
    outputs: tuple[Output, ...]
    ingests: tuple[Ingest, ...] = ()
    _steps: dict[str, Step] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._steps.update(
            (each.name, each)
            for each in topological_order([*self.inputs, *(output.input for output in self.outputs)])
        )

    def steps(self) -> tuple[Step, ...]:
        """All steps, each after its inputs."""
        return tuple(self._steps.values())

    def step(self, name: str) -> Step:
        if name not in self._steps:
            raise PlanError(
                f"The pipeline {self.name!r} has no step {name!r}: {nearest(name, self._steps)}"
            )
        return self._steps[name]

    def consumers(self, step: Step) -> tuple[Step | Output, ...]:
        """The steps and outputs that a step feeds."""
        feeds = [
            each for each in self.steps() for given in each.inputs if given is step
        ]  # a step joined with itself feeds the join twice
        return (*feeds, *(each for each in self.outputs if each.input is step))

    def describe(self) -> dict[str, Any]:
        """The plan in plain values, for programs."""
        return {
            "pipeline": self.name,
            "steps": [each.describe() for each in self.steps()],
            "outputs": [each.describe() for each in self.outputs],
            "ingests": [{"ingest": each.name, "topic": each.topic} for each in self.ingests],
        }

    def check_kernels(self) -> None:
        """Raise NotSupported before anything starts if a step that keeps state has no kernel."""
        for step in self.steps():
            if step.keeps_state:
                step.kernel()

    def __str__(self) -> str:
        return tree(self)


def tree(plan: PipelinePlan) -> str:
    """Each output, and below it the steps that lead to it. A step that was drawn already is only
    named.
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
    """Depth first, with a list of what is left to draw instead of recursion."""
    lines: list[str] = []
    left: list[tuple[Step, str, bool]] = [(first, indent, True)]
    while left:
        step, indent, last = left.pop()
        known = step.name in drawn and bool(step.inputs)
        lines.append(
            f"{indent}{_branch(last)}{step.name} "
            f" {'(as above)' if known else step_text(step)}{'' if known or not step.stateful else '  [keeps state]'}".rstrip()
        )
        if not known:
            lines += [f"{indent}{_indent(last)}    {line}" for line in step.drawn()]
            drawn.add(step.name)
            left += [
                (each, indent + _indent(last), position == len(step.inputs) - 1)
                for position, each in enumerate(step.inputs)
            ][::-1]
    return lines


def step_text(step: Step) -> str:
    """A step in one line: what it is, and what it does."""
    kind = (
        ("table" if step.is_table else "topic") if isinstance(step, TopicStep) else step.operation
    )
    return f"{kind} {step.summary()}".rstrip()


def _branch(last: bool) -> str:
    return "└─ " if last else "├─ "


def _indent(last: bool) -> str:
    return "   " if last else "│  "


def topological_order(last: Iterable[Step]) -> list[Step]:
    """These steps and all upstream of them, each once and after its inputs. CyclicPlan if a step
    needs itself.
    """
    done: dict[int, Step] = {}
    for step in last:
        _visit(step, done)
    return list(done.values())


def _visit(last: Step, done: dict[int, Step]) -> None:
    """Depth first, without recursion: a pipeline of a thousand steps is no reason to fail."""
    path: list[tuple[Step, Iterator[Step]]] = [(last, iter(last.inputs))]
    on_path = {id(last)}
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


def _flat(steps: Iterable[Step]) -> list[dict[str, Any]]:
    return [each.describe() for each in topological_order(steps)]


def digest(value: Any) -> str:
    """Of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


# Time in a plan: how each input's clock goes, which way leads from there to a step's clocks, and
# which column of a step is its event time.


def watermark_spec(step: TopicStep) -> WatermarkSpec:
    """A table's clock follows the ticks unless its event time names a delay or a producer; so does
    that of a topic without event time.
    """
    times = step.event_time
    if not isinstance(times, EventTime) or (
        step.is_table and not times.delay_given and times.producer is None
    ):
        return WatermarkSpec(step.name)
    return WatermarkSpec(
        step.name, times.column, times.producer, times.delay_us, times.idle_us, times.max_ahead_us
    )


def read_watermark_spec(step: TopicStep) -> WatermarkSpec:
    """What tasks that read a topic tell of its clock: nothing, if times are known only behind
    them.
    """
    return watermark_spec(step) if step.device_time is None else WatermarkSpec(step.name)


def watermark_paths(step: Step) -> tuple[WatermarkPath, ...]:
    """From the inputs' clocks to this step's: what all steps on the way hold back and allow for
    adds up; of several ways to one input the longest counts.
    """
    found: dict[int, dict[str, WatermarkPath]] = {}
    for each in topological_order([step]):
        if isinstance(each, TopicStep):
            found[id(each)] = {each.name: WatermarkPath(each.name)}
            continue
        paths: dict[str, WatermarkPath] = {}
        for path in (path for given in each.watermark_inputs for path in found[id(given)].values()):
            known = paths.get(path.name, WatermarkPath(path.name))
            complete, closed = (
                path.complete_back_us + each.watermark_delay_us,
                path.closed_back_us + each.watermark_delay_us + each.allowed_lateness_us,
            )
            paths[path.name] = WatermarkPath(
                path.name, max(known.complete_back_us, complete), max(known.closed_back_us, closed)
            )
        found[id(each)] = paths
    return tuple(found[id(step)].values())


def time_column(step: Step) -> TimeColumn | None:
    """The event time of a step's rows, if it has one."""
    found: dict[int, TimeColumn | None] = {}
    for each in topological_order([step]):
        found[id(each)] = each.time([found[id(given)] for given in each.inputs])
    return found[id(step)]
