"""Joins in a plan: `rows.join(other, …)`, the step it makes, and what is checked when it is declared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from headrace.durations import format_us, to_us
from headrace.errors import PlanError, StreamOnly
from headrace.operators.kernel import CHANGE_TYPE
from headrace.pipeline import columns as cols
from headrace.pipeline.join_checks import Bounds, Duration, check_kinds, on_columns, result_columns
from headrace.pipeline.plan import AggregateStep, KeyByStep, Step, TimeColumn, Times, TopicStep, ToTableStep
from headrace.pipeline.table_ops import DistinctStep, NewestStep, settled
from headrace.pipeline.timing import time_column

if TYPE_CHECKING:  # kernels are loaded when a join is declared, and not by those who declare none
    from headrace.operators.joins.corrected import CorrectedJoin
    from headrace.operators.joins.history import HistoryKernel
    from headrace.operators.joins.sides import ResultColumn, Side
    from headrace.operators.joins.stream_stream import StreamStreamJoin
    from headrace.operators.joins.stream_table import StreamTableJoin
    from headrace.operators.joins.table_table import TableTableJoin
    from headrace.operators.joins.versioned import VersionedJoin
    from headrace.pipeline.stream import Rows

    JoinKernel = StreamStreamJoin | StreamTableJoin | TableTableJoin | VersionedJoin | CorrectedJoin

WAIT, CORRECT = "wait", "correct"


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinStep(Step):
    """Two inputs, joined. `columns` says where each of the result's columns comes from."""

    operation: ClassVar[str] = "join"
    stateful: ClassVar[bool] = True

    left: Side
    right: Side
    columns: tuple[ResultColumn, ...]
    how: str
    before_us: int = 0
    after_us: int = 0
    history_us: int | None = None
    """With versions: for how long old ones are kept."""
    late_versions: str = WAIT

    @property
    def kind(self) -> str:
        left, right = self.inputs
        return f"{'table' if left.is_table else 'stream'}-{'table' if right.is_table else 'stream'}"

    def kernel(self) -> JoinKernel:
        from headrace.operators.joins.corrected import CorrectedJoin
        from headrace.operators.joins.stream_stream import StreamStreamJoin
        from headrace.operators.joins.stream_table import StreamTableJoin
        from headrace.operators.joins.table_table import TableTableJoin
        from headrace.operators.joins.versioned import VersionedJoin

        if self.kind == "stream-stream":
            bounds = {"before_us": self.before_us, "after_us": self.after_us}
            return StreamStreamJoin(self.name, self.left, self.right, self.columns, **bounds, how=self.how)
        if self.history_us is not None:
            versioned = VersionedJoin if self.late_versions == WAIT else CorrectedJoin
            return versioned(self.name, self.left, self.right, self.columns, history_us=self.history_us, how=self.how)
        if self.kind == "stream-table":
            return StreamTableJoin(self.name, self.left, self.right, self.columns, how=self.how)
        return TableTableJoin(self.name, self.left, self.right, self.columns, how=self.how)

    @cached_property
    def _hold_us(self) -> int:
        return self.kernel().hold_us

    @property
    def holds_back_us(self) -> int:
        return self._hold_us

    @property
    def allows_late_us(self) -> int:
        """A join that corrects what it told does so as far back as versions are kept."""
        return self.history_us or 0 if self.late_versions == CORRECT else 0

    @property
    def timed_by(self) -> tuple[Step, ...]:
        """A stream that looks things up in a table goes by its own time."""
        return self.inputs[:1] if self.kind == "stream-table" and self.history_us is None else self.inputs

    @property
    def versioned_inputs(self) -> tuple[int, ...]:
        return (1,) if self.history_us is not None else ()

    def time(self, inputs: Times) -> TimeColumn | None:
        """The left row's."""
        before = inputs[0]
        named = {(kind, column): name for kind, column, name in self.columns}
        if before is None or self.is_table:
            return None
        name = named.get(("time", before.name)) or named.get(("left", before.name)) or named.get(("key", before.name))
        return None if name is None else TimeColumn(name, before.shift_us, named.get(("left", before.producer or "")))

    def details(self) -> dict[str, Any]:
        bounds: dict[str, Any] = {"before_us": self.before_us, "after_us": self.after_us} if self.kind == "stream-stream" else {}
        if self.history_us is not None:
            bounds = {"history_us": self.history_us, "late_versions": self.late_versions}
        return {"left_on": list(self.left.on), "right_on": list(self.right.on), "how": self.how, "columns": [list(each) for each in self.columns], **bounds}

    def summary(self) -> str:
        on = ", ".join(a if a == b else f"{a} = {b}" for a, b in zip(self.left.on, self.right.on, strict=True))
        within = f", {_bounds_text(self.before_us, self.after_us)}" if self.kind == "stream-stream" else ""
        versions = "" if self.history_us is None else f" as of {self.left.time}, history {format_us(self.history_us)}, late versions {self.late_versions}"
        return f"{self.how} on {on}{within}{versions}"

    def identity(self) -> dict[str, Any]:
        """How much of the past is kept can be changed."""
        return {name: value for name, value in super().identity().items() if name != "history_us"}


def _bounds_text(before_us: int, after_us: int) -> str:
    if before_us == after_us:
        return f"within {format_us(before_us)}"
    return f"from {format_us(before_us)} before to {format_us(after_us)} after"


@dataclass(frozen=True)
class AsOf:
    """What `table.as_of(column)` gives, for `stream.join`: the table's versions, looked up at the time in the stream's column."""

    table: Rows
    column: str
    history_us: int


@dataclass(frozen=True, kw_only=True, eq=False)
class HistoryStep(Step):
    """Each version of a table's rows, with the time until which it was valid."""

    operation: ClassVar[str] = "history"
    stateful: ClassVar[bool] = True

    valid_from: str
    valid_to: str
    history_us: int

    @property
    def versioned_inputs(self) -> tuple[int, ...]:
        return (0,)

    @property
    def by(self) -> tuple[str, ...]:
        return self.input.key

    def kernel(self) -> HistoryKernel:
        from headrace.operators.joins.history import HistoryKernel
        from headrace.operators.joins.sides import Side

        table = self.input
        return HistoryKernel(self.name, Side(table.schema, table.key, table.key, self.valid_from), history_us=self.history_us, valid_to=self.valid_to)

    def time(self, inputs: Times) -> TimeColumn | None:  # noqa: ARG002
        return None

    def details(self) -> dict[str, Any]:
        return {"valid_from": self.valid_from, "valid_to": self.valid_to, "history_us": self.history_us}

    def summary(self) -> str:
        return f"from {self.valid_from} to {self.valid_to}, of {format_us(self.history_us)}"

    def identity(self) -> dict[str, Any]:
        return {name: value for name, value in super().identity().items() if name != "history_us"}


def as_of(table: Rows, column: str, history: Duration | None, *, where: str) -> AsOf:
    return AsOf(table, column, _history_us(table.step, history, where=where))


def history(table: Rows, kept: Duration | None, valid_to: str, name: str | None) -> HistoryStep:
    """`table.history()`, checked."""
    where = table._place("history", name)  # noqa: SLF001
    if valid_to in table.schema.names:
        raise PlanError(f"The step {where} would have two columns {valid_to!r}.", fix="name another: history(valid_to='until').")
    valid_from = _valid_from(table.step, where=where)
    kind = table.schema.field(valid_from).type
    schema = cols.check_columns(table.schema.append(pa.field(valid_to, kind)), where=f"The step {where}")
    return HistoryStep(
        name=name or "", inputs=(table.step,), schema=schema, key=(*table.key, valid_from), is_table=True, valid_from=valid_from, valid_to=valid_to,
        history_us=_history_us(table.step, kept, where=where),
    )  # fmt: skip


def _valid_from(table: Step, *, where: str) -> str:
    time = time_column(table)
    if time is None or time.shift_us:
        raise PlanError(
            f"The step {where} needs the versions of {table.place}, which has no event time.",
            fix='declare the table with event_time=hr.EventTime("valid_from").',
        )
    while isinstance(table, KeyByStep):
        table = table.input
    if not isinstance(table, TopicStep):
        raise PlanError(
            f"The step {where} needs every version, and {table.place} has only what each tick left of its rows.",
            fix="use the table as it is declared, and select or filter behind this step; where a topic's rows are the versions, declare it with table(…).",
        )
    return time.name


def _history_us(table: Step, given: Duration | None, *, where: str) -> int:
    """For how long versions are kept: as it is said here, or where the table is declared."""
    declared = dict(table.settings).get("history") if isinstance(table, TopicStep) else None
    chosen = given if given is not None else declared
    if chosen is None:
        raise PlanError(
            f"The step {where} would keep every version of {table.place} for ever.",
            fix='say how far back rows may look: as_of(column, history="30 days"), or table(…, history="30 days").',
        )
    return to_us(chosen, what=f"history of the step {where}")


def joined(
    left: Rows, right: Any, names: Any, left_on: Any, right_on: Any, how: str, bounds: Bounds, suffix: str | None, name: str | None,
    late_versions: str = WAIT,
) -> Step:
    """`left.join(right, …)`, checked."""
    from headrace.pipeline.stream import Rows

    where = left._place("join", name)  # noqa: SLF001
    versions = right if isinstance(right, AsOf) else None
    right = versions.table if versions is not None else right
    if not isinstance(right, Rows):
        raise PlanError(f"The step {where} was given a {type(right).__name__}.", fix="give it a stream or a table.")
    if right.pipeline is not left.pipeline:
        raise PlanError(f"The step {where} joins rows of two pipelines.", fix="write one of them to a topic, and read that topic here.")
    check_kinds(left.step, right.step, how, bounds, where=where)
    mine, other = on_columns(left.step, right.step, names, left_on, right_on, where=where)
    if versions is None and late_versions != WAIT:
        raise PlanError(f"The step {where} has late_versions={late_versions!r}, and no versions.", fix='join a table as of a time: table.as_of("placed_at").')
    of_streams = not left.step.is_table and not right.step.is_table
    before_us, after_us = bounds.us(where=where) if of_streams else (0, 0)
    sides = _side(left.step, mine, needs_time=of_streams, where=where), _side(right.step, other, needs_time=of_streams, where=where)
    if versions is not None:
        sides = _versioned(left.step, right.step, sides, versions, late_versions, where=where)
    columns = result_columns(*sides, how, suffix, where=where)
    step = JoinStep(
        name=name or "", inputs=(left.step, right.step), schema=pa.schema([]), key=(),
        is_table=left.step.is_table or (versions is not None and late_versions == CORRECT), left=sides[0], right=sides[1], columns=columns, how=how,
        before_us=before_us, after_us=after_us, history_us=None if versions is None else versions.history_us, late_versions=late_versions,
    )  # fmt: skip
    complete = _completed(step, where=where)
    _check_null_keys(complete, where=where)
    if versions is not None and late_versions == CORRECT:
        return NewestStep(inputs=(complete,), schema=complete.schema, key=complete.key, is_table=True, own=tuple(left.schema.names), row_time=versions.column)
    return settled(complete) if complete.kind == "table-table" and not _on_in_key(complete) else complete


def _on_in_key(step: JoinStep) -> bool:
    """Whether the result's key holds all that is joined on: else a row may leave one join key and come under another in the same tick.

    A column of a side that may be missing does not count: it is null for rows that are alone, whatever their join key.
    """
    names = {(kind, column): name for kind, column, name in step.columns}

    def held(mine: str, other: str) -> bool:
        always = [("key", mine), *([("left", mine)] if step.how in {"inner", "left"} else []), *([("right", other)] if step.how in {"inner", "right"} else [])]
        return any(names.get(each) in step.key for each in always if each in names)

    return all(held(mine, other) for mine, other in zip(step.left.on, step.right.on, strict=True))


def _check_null_keys(step: JoinStep, *, where: str) -> None:
    """Rows with a null in their join key meet nothing. Where that key is the result's too, one of either side would have the same."""
    merged = {name for kind, _, name in step.columns if kind == "key"}
    if step.kind == "table-table" and step.how == "full" and set(step.key) <= merged and all(_has_null_keys(each) for each in step.inputs):
        raise PlanError(
            f"The step {where} joins tables in whose keys there can be nulls, which meet nothing: of either side there could be a row with the same key.",
            fix='choose how="left", or join tables whose keys have no nulls.',
        )


def _has_null_keys(step: Step) -> bool:
    """Whether a table's key can have nulls: of distinct values, or of a side that is missing in an outer join."""
    if isinstance(step, DistinctStep):
        return True
    if isinstance(step, JoinStep) and step.kind == "table-table":
        missing = {"inner": set(), "left": {"right"}, "right": {"left"}, "full": {"left", "right"}}[step.how]
        if any(kind in missing and name in step.key for kind, _, name in step.columns):
            return True
    return not isinstance(step, AggregateStep | ToTableStep | HistoryStep) and any(map(_has_null_keys, step.inputs))


def _completed(step: JoinStep, *, where: str) -> JoinStep:
    """With the schema and the key that its kernel gives."""
    kernel = step.kernel()
    schema = cols.check_columns(pa.schema([field for field in kernel.output if field.name != CHANGE_TYPE]), where=f"The step {where}")
    key = tuple(getattr(kernel, "key", ())) if step.is_table else _stream_key(step)
    return replace(step, schema=schema, key=key)


def _stream_key(step: JoinStep) -> tuple[str, ...]:
    """A stream stays keyed as its left side was, if those columns are still there under their names."""
    names = {column: name for kind, column, name in step.columns if kind in {"left", "key", "time"}}
    return tuple(names[each] for each in step.inputs[0].key) if all(each in names for each in step.inputs[0].key) else ()


def _side(step: Step, on: tuple[str, ...], *, needs_time: bool, where: str) -> Side:
    from headrace.operators.joins.sides import Side

    time = time_column(step)
    if time is None and needs_time:
        raise PlanError(f"The step {where} joins two streams, and {step.place} has no event time.", fix='declare its topic with event_time=hr.EventTime("placed_at").')
    if time is not None and time.shift_us and not step.is_table:
        raise PlanError(f"The step {where} joins {step.place}, whose event time is computed.", fix="write it to a topic and read that with an event time.")
    return Side(step.schema, on, step.key if step.is_table else (), None if time is None or step.is_table else time.name)


def _versioned(
    left: Step, right: Step, sides: tuple[Side, Side], versions: AsOf, late_versions: str, *, where: str
) -> tuple[Side, Side]:
    """The sides of a join with versions: rows look at their own time, versions are valid from theirs."""
    if left.is_table:
        raise StreamOnly(f"The step {where} joins the table {left.place} as of a time.", fix="join a stream, or its changes(), as of a time.")
    if late_versions not in {WAIT, CORRECT}:
        raise PlanError(f"The step {where} has late_versions={late_versions!r}.", fix='choose "wait" or "correct".')
    if sides[0].time != versions.column:
        raise PlanError(
            f"The step {where} looks up as of {versions.column!r}, and the event time of {left.place} is {sides[0].time!r}.",
            fix="look up at the stream's event time, or declare that column as its event time.",
        )
    if set(sides[1].on) != set(right.key):
        raise PlanError(
            f"The step {where} joins versions of {right.place} on {', '.join(sides[1].on)}, and its key is {', '.join(right.key)}.",
            fix="join on the table's whole key.",
        )
    if late_versions == CORRECT and not left.key:
        raise PlanError(
            f"The step {where} corrects what it told, so it must know rows again, and {left.place} has no key.",
            fix='say what identifies a row: key_by("order_id").join(…).',
        )
    return replace(sides[0], key=left.key), replace(sides[1], time=_valid_from(right, where=where))
