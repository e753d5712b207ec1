"""Operations on tables alone: the first rows of each group, the different rows, and settling what was told under two keys or more than once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from headrace.errors import PlanError
from headrace.pipeline import columns as cols
from headrace.pipeline.expressions.literals import quoted_name
from headrace.pipeline.plan import SelectStep, Step, UnionStep

if TYPE_CHECKING:  # kernels are loaded where they are used, and not by those who declare nothing of the kind
    from headrace.operators.aggregate import AggregateKernel
    from headrace.operators.joins.newest import NewestKernel
    from headrace.operators.joins.ordering import Order
    from headrace.operators.joins.settling import SettleKernel
    from headrace.operators.joins.top import TopKernel
    from headrace.pipeline.stream import Rows

_NUMBER = "_table"
_ORDERED = re.compile(r"^\s*(?P<column>.+?)(?:\s+(?P<way>asc|desc))?\s*$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, eq=False)
class TopStep(Step):
    """The first `n` rows of each group of `per`."""

    operation: ClassVar[str] = "top"
    stateful: ClassVar[bool] = True

    n: int
    order: tuple[Order, ...]
    per: tuple[str, ...]

    def kernel(self) -> TopKernel:
        from headrace.operators.joins.top import TopKernel

        return TopKernel(self.name, self.schema, self.key, n=self.n, by=self.order, per=self.per)

    def details(self) -> dict[str, Any]:
        return {"n": self.n, "by": [list(each) for each in self.order], "per": list(self.per)}

    def summary(self) -> str:
        by = ", ".join(f"{name} {'desc' if largest else 'asc'}" for name, largest in self.order)
        return f"{self.n} by {by}" + (f" per {', '.join(self.per)}" if self.per else "")


@dataclass(frozen=True, kw_only=True, eq=False)
class DistinctStep(Step):
    """The different rows, or the different values of some columns: those it is keyed by."""

    operation: ClassVar[str] = "distinct"
    stateful: ClassVar[bool] = True

    def kernel(self) -> AggregateKernel:
        from headrace.operators.joins.distinct import distinct

        return distinct(self.name, self.input.schema, self.input.key, self.key)

    def summary(self) -> str:
        return ", ".join(self.key)


@dataclass(frozen=True, kw_only=True, eq=False)
class SettleStep(Step):
    """A table's changes, of which those of one key may come from different shards, as one change for each key and tick."""

    operation: ClassVar[str] = "settle"
    stateful: ClassVar[bool] = True

    def kernel(self) -> SettleKernel:
        from headrace.operators.joins.settling import SettleKernel

        return SettleKernel(self.name, self.schema, self.key)


@dataclass(frozen=True, kw_only=True, eq=False)
class NewestStep(Step):
    """Of rows with one key the latest by event time: behind a join that corrects what it told of a stream, which may bring a key more than once."""

    operation: ClassVar[str] = "newest"
    stateful: ClassVar[bool] = True

    own: tuple[str, ...]
    """The stream's columns."""
    row_time: str

    def kernel(self) -> NewestKernel:
        from headrace.operators.joins.newest import NewestKernel

        return NewestKernel(self.name, self.schema, self.key, own=self.own, time=self.row_time)

    def details(self) -> dict[str, Any]:
        return {"own": list(self.own), "row_time": self.row_time}

    def summary(self) -> str:
        return f"of each {', '.join(self.key)} by {self.row_time}"


def top(table: Rows, n: int, by: str | Sequence[str], per: str | Sequence[str] | None, name: str | None) -> Step:
    """`table.top(…)`, checked."""
    from headrace.operators.joins.top import MOST

    where = table._place("top", name)  # noqa: SLF001
    if not 1 <= n <= MOST:
        raise PlanError(f"The step {where} asks for the first {n!r} rows.", fix=f"ask for 1 to {MOST:,}.")
    order = tuple(_order(each, table, where=where) for each in ([by] if isinstance(by, str) else by))
    if not order:
        raise PlanError(f"The step {where} names no order.", fix='say by what rows are ordered: by="revenue", or by="name ASC".')
    groups = () if per is None else cols.key(per, table.schema, where=where)
    step = TopStep(name=name or "", inputs=(table.step,), schema=table.schema, key=table.key, is_table=True, n=n, order=order, per=groups)
    return step if set(groups) <= set(table.key) else settled(step)


def _order(text: str, table: Rows, *, where: str) -> Order:
    """A column, the largest first unless it says ASC."""
    found = _ORDERED.match(text)
    if found is None:
        raise PlanError(f"The step {where} is ordered by {text!r}.", fix='name a column: by="revenue", or by="name ASC".')
    (column,) = cols.key(found["column"], table.schema, where=where)
    return column, (found["way"] or "desc").lower() == "desc"


def distinct(table: Rows, columns: Sequence[str], name: str | None) -> Step:
    """`table.distinct(…)`, checked."""
    key = cols.key(columns or table.schema.names, table.schema, where=table._place("distinct", name))  # noqa: SLF001
    schema = pa.schema([table.schema.field(each) for each in key])
    return DistinctStep(name=name or "", inputs=(table.step,), schema=schema, key=key, is_table=True)


def first_of_each(union: Step, name: str | None) -> Step:
    """Of tables that are united, for each key the row of the first table that has one: rows are told apart by the number of their table until it is settled."""
    schema = union.schema.append(pa.field(_NUMBER, pa.int32(), nullable=False))
    own, key = tuple((column, quoted_name(column)) for column in union.schema.names), union.key
    numbered = [
        SelectStep(inputs=(table,), schema=schema, key=(*key, _NUMBER), is_table=True, columns=(*own, (_NUMBER, str(number))))
        for number, table in enumerate(union.inputs)
    ]
    together = UnionStep(inputs=tuple(numbered), schema=schema, key=(*key, _NUMBER), is_table=True)
    first = TopStep(name=name or "", inputs=(together,), schema=schema, key=together.key, is_table=True, n=1, order=((_NUMBER, False),), per=key)
    return settled(SelectStep(inputs=(first,), schema=union.schema, key=key, is_table=True, columns=own))


def settled(step: Step) -> SettleStep:
    return SettleStep(inputs=(step,), schema=step.schema, key=step.key, is_table=True)
