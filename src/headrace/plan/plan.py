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
from headrace.expressions.expression import Expression, parse_expression, parsed_text
from headrace.operators.aggregates.custom import CustomAggregate
from headrace.operators.aggregates.specs import NEVER_REJECTING, AggregateSpec
from headrace.operators.kernel import Kernel, TimedKernel
from headrace.operators.load_shedding import ShedPolicy
from headrace.operators.watermark_spec import WatermarkPath, WatermarkSpec
from headrace.plan.code_fingerprints import code_fingerprint
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
SettledColumns = tuple[TimeColumn, ...]
"""Columns by any one of which a table's rows are settled, the end of a window before its start."""


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
    is_former: bool = False
    """Whether it goes on with the results of an earlier Headrace (`former`)."""

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

    def hosted_kernel(self) -> Kernel | TimedKernel:
        """The kernel as batches run it: with expiry around it, where the step's state expires."""
        kernel, keys = self.kernel(), self.settled_keys()
        if not keys:
            return kernel
        from headrace.operators.expiry import ForgettingKernel, SettledKey

        inputs = [SettledKey(columns, time.name, time.shift_us) for columns, time in keys]
        return ForgettingKernel(kernel, inputs)

    def settled_keys(self) -> Sequence[tuple[tuple[str, ...], TimeColumn]]:
        """Per input, the columns by which its rows are stored, and the one of them by which they
        are settled: once the horizon has passed it, no row of the key can change, and its state can
        be forgotten. Empty if there is none.
        """
        return ()

    def settled_by(self, inputs: Sequence[SettledColumns]) -> SettledColumns:  # noqa: ARG002
        """The columns by which this table's rows are settled, given those of the inputs: none of
        its rows changes any more once the horizon has passed one of them. `settled_columns` calls
        this for all steps upstream.
        """
        return ()

    @property
    def ttl(self) -> int | None:
        """How long a key lives after its newest row, in tick time and microseconds; None for
        ever.
        """
        return None

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
    def goes_by_ticks(self) -> bool:
        """Whether what this step waits for is a time of ticks, and not a watermark."""
        return self.ttl is not None

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

    @property
    def user_code(self) -> tuple[tuple[str, Any], ...]:
        """Users' objects with code that tasks run, each with what errors call it."""
        return ()

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
            if step.operation not in {
                "settle",
                "newest",
                "late_moves",
                "output",
                "upserts",
            }:  # which users do not declare
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

    def former(self) -> Step:
        """This step as Headrace computed it before its results changed: its state goes on as it
        began (`fingerprints.with_stored_semantics`). The step itself if nothing changed.
        """
        return self

    @property
    def former_can_be_declared(self) -> bool:
        """Whether a user can still declare what `former` returns, so that its state may be as it
        was meant.
        """
        return True

    def parsed_identity(self) -> dict[str, Any]:
        """The identity, with expressions as they are parsed: spaces, brackets and the case of
        keywords do not count.
        """
        return self.identity()

    def read_columns(self, port: int) -> frozenset[str]:
        """The columns of an input that the kernel reads, and dead letters have. By default all."""
        return frozenset((self.inputs or (self,))[port].schema.names)

    def column_needs(self, needed: frozenset[str]) -> tuple[frozenset[str], ...]:  # noqa: ARG002
        """Per input, the columns that decide the `needed` columns of this step's rows, and which
        rows there are. By default all of them.
        """
        return tuple(frozenset(source.schema.names) for source in self.inputs)

    def meaning(self, needed: frozenset[str], *, parsed: bool) -> Any | None:  # noqa: ARG002
        """What this step does to its input's rows, as far as the `needed` columns go, in plain
        values; None if nothing. `parsed`: with expressions as they are parsed.
        """
        identity = self.parsed_identity() if parsed else self.identity()
        errors = self.details().get("errors")
        return identity if errors is None else {**identity, "errors": errors}

    def further_meaning(self) -> dict[str, Any]:
        """What else decides this step's rows: settings that `meaning` lacked when meanings were
        first stored. They have a digest of their own, so that what was stored before goes on.
        """
        return {}

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

    @cached_property
    def parsed_lineage(self) -> str:
        """The lineage, with expressions as they are parsed."""
        digests: dict[int, str] = {}
        for step in topological_order([self]):
            upstream = [digests[id(source)] for source in step.inputs]
            digests[id(step)] = digest([digest(step.parsed_identity()), upstream])
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
    metadata: tuple[tuple[str, str], ...] = ()
    """Columns that are added when rows are read, and the column of the log that each one has."""
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
        names = {*(column.name for column in added), *(name for name, _ in self.metadata)}
        return pa.schema([field for field in self.schema if field.name not in names])

    @property
    def created_schema(self) -> pa.Schema:
        """The columns with which the topic is created if it is missing."""
        return self.stored_schema

    def details(self) -> dict[str, Any]:
        times = {} if self.event_time is None else {"event_time": str(self.event_time)}
        captured = {} if self.captured_by is None else {"captured_by": self.captured_by}
        shed = {} if self.shed is None else {"shed": str(self.shed)}
        metadata = {"metadata": dict(self.metadata)} if self.metadata else {}
        return {
            "topic": self.topic,
            "partitions": self.partitions,
            **captured,
            **times,
            **metadata,
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
            **({"metadata": [list(each) for each in self.metadata]} if self.metadata else {}),
        }

    def meaning(self, needed: frozenset[str], *, parsed: bool) -> Any | None:  # noqa: ARG002
        """The topic, and what its event time is: how far rows may be out of order decides which
        ones are late. When a producer counts as idle, and how far ahead a row may be, can change.
        """
        times: list[Any] = []
        if self.event_time is not None:
            times = [type(self.event_time).__name__, self.event_time.column]
        if isinstance(self.event_time, EventTime):
            times += [self.event_time.delay_us, self.event_time.producer]
        types = {name: str(self.schema.field(name).type) for name in sorted(needed)}
        return {**self.identity(), "types": types, "event_time": times}

    def further_meaning(self) -> dict[str, Any]:
        """How devices' clocks are corrected, and whether a table's watermark follows its rows."""
        times = self.device_time
        corrected = {} if times is None else {"device": [times.event, times.tolerance_us]}
        column = watermark_spec(self).column if self.is_table else None
        return {**corrected, **({} if column is None else {"watermark_of": column})}

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

    def settled_by(self, inputs: Sequence[SettledColumns]) -> SettledColumns:
        """The input's columns, under each name that they have here."""
        pairs = list(zip(self.columns, self.expressions, strict=True))
        return tuple(
            replace(time, name=name, producer=None)
            for time in inputs[0]
            for (name, _), expression in pairs
            if expression.column == time.name
        )

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

    def parsed_identity(self) -> dict[str, Any]:
        return {**self.identity(), "columns": self._parsed_columns}

    @cached_property
    def _parsed_columns(self) -> dict[str, Any]:
        names = self.input.schema.names
        return {name: parsed_text(text, names, where=self.path) for name, text in self.columns}

    def _decisive_columns(self, needed: frozenset[str]) -> frozenset[str]:
        """The columns that decide the needed ones, and which rows there are: all of them, if a row
        on which one fails is left out.
        """
        return needed if self.errors == NULL else frozenset(self.schema.names)

    def column_needs(self, needed: frozenset[str]) -> tuple[frozenset[str], ...]:
        decisive = self._decisive_columns(needed)
        return (
            frozenset(
                column
                for (name, _), expression in zip(self.columns, self.expressions, strict=True)
                if name in decisive or (self.is_table and name in self.key)
                for column in expression.columns
            ),
        )

    def meaning(self, needed: frozenset[str], *, parsed: bool) -> Any | None:
        """None if the needed columns are those of the input."""
        decisive = self._decisive_columns(needed)
        pairs = zip(self.columns, self.expressions, strict=True)
        is_same = all(each.column == name for (name, _), each in pairs if name in decisive)
        if self.errors == NULL and is_same:
            return None
        texts = self._parsed_columns if parsed else dict(self.columns)
        columns = {name: texts[name] for name, _ in self.columns if name in decisive}
        types = {name: str(self.schema.field(name).type) for name in sorted(columns)}
        return {"operation": "select", "columns": columns, "types": types, "errors": self.errors}

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

    def settled_by(self, inputs: Sequence[SettledColumns]) -> SettledColumns:
        return inputs[0]

    @cached_property
    def expression(self) -> Expression:
        return parse_expression(self.condition, self.input.schema, where=self.path)

    def row_step(self, *, optimistic: bool) -> RowStep | None:
        from headrace.expressions.spark_subset import compile_to_arrow

        condition = compile_to_arrow(self.expression, self.input.schema, optimistic=optimistic)
        return None if condition is None else Filter(condition)

    def details(self) -> dict[str, Any]:
        return {"condition": self.condition, "errors": self.errors}

    def parsed_identity(self) -> dict[str, Any]:
        return {**self.identity(), "condition": self._parsed_condition}

    @cached_property
    def _parsed_condition(self) -> Any:
        return parsed_text(self.condition, self.input.schema.names, where=self.path)

    def column_needs(self, needed: frozenset[str]) -> tuple[frozenset[str], ...]:
        key = frozenset(self.key) if self.is_table else frozenset[str]()
        return (needed | frozenset(self.expression.columns) | key,)

    def meaning(self, needed: frozenset[str], *, parsed: bool) -> Any | None:  # noqa: ARG002
        condition = self._parsed_condition if parsed else self.condition
        return {"operation": self.operation, "condition": condition, "errors": self.errors}

    def summary(self) -> str:
        return self.condition


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyByStep(Step):
    """The input's rows under another key."""

    operation: ClassVar[str] = "key_by"

    def column_needs(self, needed: frozenset[str]) -> tuple[frozenset[str], ...]:
        return (needed | frozenset(self.key) | frozenset(self.input.key),)

    def meaning(self, needed: frozenset[str], *, parsed: bool) -> Any | None:  # noqa: ARG002
        return {"operation": self.operation, "key": self.key}

    def settled_by(self, inputs: Sequence[SettledColumns]) -> SettledColumns:
        return inputs[0]

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
    null_groups: bool = True
    """Whether null is a group. If not, rows with a null group become dead letters."""
    ttl_us: int | None = None

    @property
    def ttl(self) -> int | None:
        return self.ttl_us

    def hosted_kernel(self) -> Kernel | TimedKernel:
        return super().hosted_kernel() if self.ttl_us is None else expiring(self, self.ttl_us)

    def settled_keys(self) -> Sequence[tuple[tuple[str, ...], TimeColumn]]:
        return settled_keys_of(self.input, self.by)

    def settled_by(self, inputs: Sequence[SettledColumns]) -> SettledColumns:
        return among(inputs[0], self.by)

    def meaning(self, needed: frozenset[str], *, parsed: bool) -> Any | None:
        content = super().meaning(needed, parsed=parsed)
        return content if self.ttl_us is None else [content, {"ttl_us": self.ttl_us}]

    @property
    def shard_key(self) -> tuple[str, ...]:
        return self.by

    @property
    def allows_null_keys(self) -> bool:
        return self.null_groups

    @property
    def key_may_be_null(self) -> bool:
        return self.null_groups and has_nullable(self.schema, self.by)

    def former(self) -> Step:
        """Before, null was no group, and `first` and `last` went by arrival."""
        return replace(self, null_groups=False, aggregates=former_aggregates(self.aggregates))

    def details(self) -> dict[str, Any]:
        return {
            "by": list(self.by),
            "aggregates": {name: str(spec) for name, spec in self.aggregates},
            "errors": self.errors,
            **_ttl_detail(self.ttl_us),
        }

    def column_needs(self, needed: frozenset[str]) -> tuple[frozenset[str], ...]:  # noqa: ARG002
        return (frozenset(aggregated_columns(self.input, self.by, self.aggregates)),)

    def read_columns(self, port: int) -> frozenset[str]:
        if self.input.is_table or may_reject(self.aggregates):
            return super().read_columns(port)
        return self.column_needs(frozenset(self.schema.names))[port]

    def further_meaning(self) -> dict[str, Any]:
        return code_of_aggregates(self.aggregates)

    @property
    def user_code(self) -> tuple[tuple[str, Any], ...]:
        return code_to_send(self.aggregates)

    def identity(self) -> dict[str, Any]:
        """State depends on the types that are read. Bounds of state may change."""
        identity = {name: value for name, value in super().identity().items() if name != "ttl"}
        return {
            **identity,
            **aggregates_identity(self.input.schema, self.aggregates),
            **null_groups_identity(self.schema, self.by, self.null_groups),
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


def may_reject(aggregates: Iterable[tuple[str, AggregateSpec]]) -> bool:
    """Whether rows may become dead letters, which are whole rows."""
    return any(spec.kind not in NEVER_REJECTING for _, spec in aggregates)


def custom_aggregates(results: Iterable[tuple[str, Any]]) -> list[tuple[str, CustomAggregate]]:
    """The users' own aggregates of a step, by the columns of their results."""
    return [
        (name, spec.option("aggregate"))
        for name, spec in results
        if isinstance(spec, AggregateSpec) and spec.kind == "custom"
    ]


def code_of_aggregates(results: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The code of users' own aggregates, of which the identity of a step has the names and the
    settings: an edit of it is an edit of what is computed.
    """
    codes = {name: aggregate_code(aggregate) for name, aggregate in custom_aggregates(results)}
    return {"code": codes} if codes else {}


def aggregate_code(aggregate: CustomAggregate, *, where: str = "an aggregate") -> str:
    """The fingerprint of an aggregate's class, or the version that it declares. Raises
    NoFingerprint.
    """
    cls = type(aggregate)
    if cls.version is not None:
        return f"version {cls.version}"
    return code_fingerprint(cls, where=where)


def code_to_send(results: Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """Users' own aggregates as `Step.user_code` has them."""
    return tuple(
        (f"the aggregate {type(aggregate).__qualname__} of {name!r}", aggregate)
        for name, aggregate in custom_aggregates(results)
    )


def aggregated_columns(
    source: Step, by: Iterable[str], aggregates: Iterable[tuple[str, AggregateSpec]]
) -> set[str]:
    """The columns that decide the groups of some aggregates, and their results: every column that
    an aggregate names.
    """
    names = {*by, *(source.key if source.is_table else ())}
    for _, spec in aggregates:
        options = [value for _, value in spec.options]
        named = [value if isinstance(value, tuple) else (value,) for value in options]
        names |= {*spec.reads, *(each for values in named for each in values if type(each) is str)}
    return names & set(source.schema.names)


@dataclass(frozen=True, kw_only=True, eq=False)
class UnionStep(Step):
    """The rows of all inputs, which have the same columns. The first input decides their order."""

    operation: ClassVar[str] = "union"

    def settled_by(self, inputs: Sequence[SettledColumns]) -> SettledColumns:
        return tuple(time for time in inputs[0] if all(time in other for other in inputs))

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
    null_groups: bool = True
    """Whether null is a value like others. If not, rows with a null become dead letters."""

    @property
    def shard_key(self) -> tuple[str, ...]:
        return self.on

    @property
    def allows_null_keys(self) -> bool:
        return self.null_groups

    def former(self) -> Step:
        return replace(self, null_groups=False)

    def details(self) -> dict[str, Any]:
        return {"on": list(self.on), "within_us": self.within_us}

    def identity(self) -> dict[str, Any]:
        """State has the compared columns only, so other columns may change."""
        kept = pa.schema([self.schema.field(name) for name in self.on])
        return {
            "operation": self.operation,
            "schema": to_ddl(kept),
            **self.details(),
            **null_groups_identity(self.schema, self.on, self.null_groups),
        }

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
    """The newest row of each `key`: the one with the greatest `by`, and of those with equal ones
    the last to arrive; without `by`, the last to arrive.
    """

    operation: ClassVar[str] = "to_table"
    stateful: ClassVar[bool] = True

    by: str | None = None
    ttl_us: int | None = None
    null_groups: bool = False
    """Whether null is a group, as in `Stream.last`. If not, the key is a primary key: rows with a
    null in it become dead letters.
    """

    @property
    def allows_null_keys(self) -> bool:
        return self.null_groups

    @property
    def ttl(self) -> int | None:
        return self.ttl_us

    def hosted_kernel(self) -> Kernel | TimedKernel:
        return super().hosted_kernel() if self.ttl_us is None else expiring(self, self.ttl_us)

    def identity(self) -> dict[str, Any]:
        identity = {name: value for name, value in super().identity().items() if name != "ttl"}
        return {**identity, **null_groups_identity(self.schema, self.key, self.null_groups)}

    def meaning(self, needed: frozenset[str], *, parsed: bool) -> Any | None:
        content = super().meaning(needed, parsed=parsed)
        return content if self.ttl_us is None else [content, {"ttl_us": self.ttl_us}]

    @property
    def key_may_be_null(self) -> bool:
        return self.null_groups and has_nullable(self.schema, self.key)

    def details(self) -> dict[str, Any]:
        by = {} if self.by is None else {"by": self.by}
        return {**by, **_ttl_detail(self.ttl_us)}

    def summary(self) -> str:
        return f"key {', '.join(self.key)}" + (f", newest by {self.by}" if self.by else "")

    def former(self) -> Step:
        """Before, the newest row was the last to arrive."""
        return self if self.by is None else replace(self, by=None)

    def kernel(self) -> Kernel:
        from headrace.operators.latest_rows import LatestKernel

        return LatestKernel(self.name, self.schema, self.key, by=self.by)


@dataclass(frozen=True, kw_only=True, eq=False)
class KeepStep(Step):
    """A table without its old rows: those whose time, or else whose newest change, is longer ago
    than `keep_us`.
    """

    operation: ClassVar[str] = "keep"
    stateful: ClassVar[bool] = True

    keep_us: int

    @property
    def allows_null_keys(self) -> bool:
        return True

    @property
    def time_of_key(self) -> TimeColumn | None:
        """The column of the key with the ends of windows, by which rows grow old; None if they do
        by their changes.
        """
        ends = (time for time in settled_columns(self.input) if time.shift_us <= 0)
        return next((time for time in ends if time.name in self.key), None)

    @property
    def ttl(self) -> int | None:
        return self.keep_us if self.time_of_key is None else None

    def kernel(self) -> Kernel:
        from headrace.operators.latest_rows import LatestKernel

        return LatestKernel(self.name, self.schema, self.key)

    def hosted_kernel(self) -> Kernel | TimedKernel:
        return expiring(self, self.keep_us, self.time_of_key)

    def details(self) -> dict[str, Any]:
        return {"keep_us": self.keep_us}

    def identity(self) -> dict[str, Any]:
        return {name: value for name, value in super().identity().items() if name != "keep_us"}

    def meaning(self, needed: frozenset[str], *, parsed: bool) -> Any | None:
        return [super().meaning(needed, parsed=parsed), {"keep_us": self.keep_us}]

    def summary(self) -> str:
        time = self.time_of_key
        since = "of its newest change" if time is None else f"in {time.name}"
        return f"{format_us(self.keep_us)} after the time {since}"


def expiring(step: Step, ttl_us: int, time: TimeColumn | None = None) -> TimedKernel:
    """A step's kernel with expiry around it."""
    from headrace.operators.expiry import ExpiringKernel

    kernel: Any = step.kernel()
    if time is None:
        return ExpiringKernel(kernel, step.key, ttl_us)
    return ExpiringKernel(kernel, step.key, ttl_us, time=time.name, shift_us=time.shift_us)


def _ttl_detail(ttl_us: int | None) -> dict[str, Any]:
    return {} if ttl_us is None else {"ttl": format_us(ttl_us)}


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

    @property
    def step_prefix(self) -> str:
        """What the derived names of the steps that feed only this output begin with."""
        return self.name

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
    kind = "table" if isinstance(step, TopicStep) and step.is_table else step.operation
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


def has_nullable(schema: pa.Schema, names: Iterable[str]) -> bool:
    """Whether a value of these columns may be null."""
    return any(schema.field(name).nullable for name in names)


def null_groups_identity(schema: pa.Schema, by: Iterable[str], null_groups: bool) -> dict[str, Any]:
    """The part of an identity that says that null is a group, if a group can be null."""
    return {"null_groups": True} if null_groups and has_nullable(schema, by) else {}


def aggregates_identity(
    schema: pa.Schema, aggregates: Iterable[tuple[str, AggregateSpec]]
) -> dict[str, Any]:
    """The part of an identity that is about aggregates: what they are, without bounds of their
    state, and the types that they read.
    """
    aggregates = list(aggregates)
    read = {
        name: str(schema.field(spec.column).type)
        for name, spec in aggregates
        if spec.column is not None
    }
    more = {
        f"{name}.{column}": str(schema.field(column).type)
        for name, spec in aggregates
        for column in spec.compared
    }
    return {
        "aggregates": {name: str(spec.without_bounds()) for name, spec in aggregates},
        "read": {**read, **more},
    }


def former_aggregates(
    aggregates: Iterable[tuple[str, AggregateSpec]],
) -> tuple[tuple[str, AggregateSpec], ...]:
    """Aggregates as Headrace computed them before their results changed."""
    return tuple((name, spec.former()) for name, spec in aggregates)


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
    return times.watermark_spec(step.name)


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


def settled_columns(step: Step) -> SettledColumns:
    """The columns by which a table's rows are settled; none if they may change for ever."""
    columns: dict[int, SettledColumns] = {}
    for current in topological_order([step]):
        inputs = [columns[id(source)] for source in current.inputs]
        columns[id(current)] = current.settled_by(inputs) if current.is_table else ()
    return columns[id(step)]


def among(times: SettledColumns, columns: Sequence[str]) -> SettledColumns:
    """Those that are among some columns."""
    return tuple(time for time in times if time.name in columns)


def settled_keys_of(
    table: Step, columns: tuple[str, ...]
) -> Sequence[tuple[tuple[str, ...], TimeColumn]]:
    """`Step.settled_keys` of a step that stores the rows of one table by some columns."""
    return [(columns, time) for time in among(settled_columns(table), columns)[:1]]
