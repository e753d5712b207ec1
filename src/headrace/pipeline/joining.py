"""Joins in a plan: `rows.join(other, …)`, the step it makes, and what is checked when it is declared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from headrace.durations import format_us, to_us
from headrace.errors import PlanError, StreamOnly
from headrace.log.schema import type_name
from headrace.operators.joins.sides import HOWS, ResultColumn, Side
from headrace.operators.joins.stream_stream import StreamStreamJoin
from headrace.operators.joins.stream_table import StreamTableJoin
from headrace.operators.joins.table_table import TableTableJoin
from headrace.operators.kernel import CHANGE_TYPE
from headrace.pipeline import columns as cols
from headrace.pipeline.plan import Step, TimeColumn, Times
from headrace.pipeline.timing import time_column

if TYPE_CHECKING:
    from headrace.pipeline.stream import Rows

Duration = str | timedelta
JoinKernel = StreamStreamJoin | StreamTableJoin | TableTableJoin


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

    @property
    def kind(self) -> str:
        left, right = self.inputs
        return f"{'table' if left.is_table else 'stream'}-{'table' if right.is_table else 'stream'}"

    def kernel(self) -> JoinKernel:
        if self.kind == "stream-stream":
            bounds = {"before_us": self.before_us, "after_us": self.after_us}
            return StreamStreamJoin(self.name, self.left, self.right, self.columns, **bounds, how=self.how)
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
    def timed_by(self) -> tuple[Step, ...]:
        """A stream that looks things up in a table goes by its own time."""
        return self.inputs[:1] if self.kind == "stream-table" else self.inputs

    def time(self, inputs: Times) -> TimeColumn | None:
        """The left row's."""
        before = inputs[0]
        named = {(kind, column): name for kind, column, name in self.columns}
        if before is None or self.is_table:
            return None
        name = named.get(("time", before.name)) or named.get(("left", before.name)) or named.get(("key", before.name))
        return None if name is None else TimeColumn(name, before.shift_us, named.get(("left", before.producer or "")))

    def details(self) -> dict[str, Any]:
        bounds = {"before_us": self.before_us, "after_us": self.after_us} if self.kind == "stream-stream" else {}
        return {"left_on": list(self.left.on), "right_on": list(self.right.on), "how": self.how, "columns": [list(each) for each in self.columns], **bounds}

    def summary(self) -> str:
        on = ", ".join(a if a == b else f"{a} = {b}" for a, b in zip(self.left.on, self.right.on, strict=True))
        within = f" within -{format_us(self.before_us)} to {format_us(self.after_us)}" if self.kind == "stream-stream" else ""
        return f"{self.how} on {on}{within}"


@dataclass(frozen=True)
class Bounds:
    """How far apart rows of two streams may be, as it was declared."""

    within: Duration | None = None
    before: Duration | None = None
    after: Duration | None = None

    def given(self) -> bool:
        return self.within is not None or self.before is not None or self.after is not None

    def us(self, *, where: str) -> tuple[int, int]:
        if not self.given():
            raise PlanError(
                f"The step {where} joins two streams without a bound: every row would have to be kept for ever.",
                fix='say how far apart rows may be: within="1 hour", or before= and after=.',
            )
        if self.within is not None and (self.before is not None or self.after is not None):
            raise PlanError(f"The step {where} has within= and before= or after=.", fix="give within=, or the two others.")
        if self.within is not None:
            within_us = to_us(self.within, what=f"within of the step {where}")
            return within_us, within_us
        given = {"before": self.before, "after": self.after}
        before_us, after_us = (0 if each is None else to_us(each, what=f"{name} of the step {where}") for name, each in given.items())
        return before_us, after_us


def joined(
    left: Rows, right: Any, names: Any, left_on: Any, right_on: Any, how: str, bounds: Bounds, suffix: str | None, name: str | None
) -> JoinStep:
    """`left.join(right, …)`, checked."""
    from headrace.pipeline.stream import Rows

    where = left._place("join", name)  # noqa: SLF001
    if not isinstance(right, Rows):
        raise PlanError(f"The step {where} was given a {type(right).__name__}.", fix="give it a stream or a table.")
    if right.pipeline is not left.pipeline:
        raise PlanError(f"The step {where} joins rows of two pipelines.", fix="write one of them to a topic, and read that topic here.")
    _check_kinds(left.step, right.step, how, bounds, where=where)
    mine, other = _on(left.step, right.step, names, left_on, right_on, where=where)
    before_us, after_us = bounds.us(where=where) if not left.step.is_table and not right.step.is_table else (0, 0)
    sides = _side(left.step, mine, where=where), _side(right.step, other, where=where)
    columns = _columns(*sides, how, suffix, where=where)
    step = JoinStep(
        name=name or "", inputs=(left.step, right.step), schema=pa.schema([]), key=(), is_table=left.step.is_table,
        left=sides[0], right=sides[1], columns=columns, how=how, before_us=before_us, after_us=after_us,
    )  # fmt: skip
    return _completed(step, where=where)


def _completed(step: JoinStep, *, where: str) -> JoinStep:
    """With the schema and the key that its kernel gives."""
    kernel = step.kernel()
    schema = cols.check_columns(pa.schema([field for field in kernel.output if field.name != CHANGE_TYPE]), where=f"The step {where}")
    key = tuple(kernel.key) if isinstance(kernel, TableTableJoin) else _stream_key(step)
    return replace(step, schema=schema, key=key)


def _stream_key(step: JoinStep) -> tuple[str, ...]:
    """A stream stays keyed as its left side was, if those columns are still there under their names."""
    names = {column: name for kind, column, name in step.columns if kind in {"left", "key", "time"}}
    return tuple(names[each] for each in step.inputs[0].key) if all(each in names for each in step.inputs[0].key) else ()


def _check_kinds(left: Step, right: Step, how: str, bounds: Bounds, *, where: str) -> None:
    if how not in HOWS:
        raise PlanError(f"The step {where} joins how={how!r}.", fix=f"choose one of {', '.join(map(repr, HOWS))}.")
    if left.is_table and not right.is_table:
        raise StreamOnly(
            f"The step {where} joins the table {left.place} with the stream {right.place}.",
            fix="turn it round: stream.join(table). Or make a table of the stream with to_table(key).",
        )
    if not left.is_table and right.is_table and how not in {"inner", "left"}:
        raise PlanError(
            f"The step {where} joins a stream with a table how={how!r}: rows of the table would have to be told at no particular time.",
            fix='choose how="inner" or how="left".',
        )
    if bounds.given() and (left.is_table or right.is_table):
        raise PlanError(f"The step {where} has a time bound, but a table has no end.", fix="leave out within=, before= and after=.")


def _on(left: Step, right: Step, names: Any, left_on: Any, right_on: Any, *, where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns of either side that must be equal."""
    if (names is None) == (left_on is None and right_on is None) or (left_on is None) != (right_on is None):
        raise PlanError(f"The step {where} does not say on what to join.", fix='write on="customer_id", or left_on= and right_on= where names differ.')
    mine = cols.key(names if names is not None else left_on, left.schema, where=where)
    other = cols.key(names if names is not None else right_on, right.schema, where=where)
    if len(mine) != len(other):
        raise PlanError(f"The step {where} joins {len(mine)} columns with {len(other)}.", fix="name as many in left_on= as in right_on=.")
    for a, b in zip(mine, other, strict=True):
        types = left.schema.field(a).type, right.schema.field(b).type
        if types[0] != types[1]:
            raise PlanError(
                f"The step {where} joins {a!r}, which is {type_name(types[0])}, with {b!r}, which is {type_name(types[1])}.",
                fix=f"make them alike first: with_columns({b}='CAST({b} AS {type_name(types[0])})').",
            )
    return mine, other


def _side(step: Step, on: tuple[str, ...], *, where: str) -> Side:
    time = time_column(step)
    if time is not None and time.shift_us and not step.is_table:
        raise PlanError(f"The step {where} joins {step.place}, whose event time is computed.", fix="write it to a topic and read that with an event time.")
    return Side(step.schema, on, step.key if step.is_table else (), None if time is None or step.is_table else time.name)


def _columns(left: Side, right: Side, how: str, suffix: str | None, *, where: str) -> tuple[ResultColumn, ...]:
    """The left's columns, then the right's; of a pair that is joined on under one name, one."""
    both = how in {"right", "full"}
    found: list[ResultColumn] = []
    for name in left.schema.names:
        kind = "time" if both and name == left.time and right.time else "key" if both and name in left.on else "left"
        found.append((kind, name, name))
    shared = {b for a, b in zip(left.on, right.on, strict=True) if a == b}
    others = [name for name in right.schema.names if name not in shared]
    return (*found, *(("right", name, _told_apart(name, left.schema.names, right.schema.names, suffix, where=where)) for name in others))


def _told_apart(name: str, left: Sequence[str], right: Sequence[str], suffix: str | None, *, where: str) -> str:
    if name not in left:
        return name
    if suffix is None:
        raise PlanError(f"Both sides of the step {where} have a column {name!r}.", fix='tell them apart with suffix="_right", or select or rename one first.')
    renamed = f"{name}{suffix}"
    if renamed in left or renamed in right:
        raise PlanError(f"The step {where} would have two columns {renamed!r}.", fix="choose another suffix=.")
    return renamed
