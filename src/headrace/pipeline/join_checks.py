"""What is checked when a join is declared: how far apart rows may be, what can be joined with what, on which columns, and what the result's are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from headrace.durations import to_us
from headrace.errors import PlanError, StreamOnly
from headrace.log.schema import type_name
from headrace.pipeline import columns as cols
from headrace.pipeline.plan import Step

if TYPE_CHECKING:  # kernels are loaded when a join is declared, and not by those who declare none
    from headrace.operators.joins.sides import ResultColumn, Side

Duration = str | timedelta


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
        before_us, after_us = (0 if each is None else _signed_us(each, what=f"{name} of the step {where}") for name, each in given.items())
        if before_us + after_us < 0:
            raise PlanError(f"The step {where} joins rows from {self.before} before to {self.after} after: no two are.", fix="let before= and after= leave some time between them.")
        return before_us, after_us


def _signed_us(given: Duration, *, what: str) -> int:
    """A bound may lie on the other side of the left row: after="-1 second" means that right rows end a second before it."""
    if isinstance(given, timedelta):
        return to_us(given, what=what) if given >= timedelta(0) else -to_us(-given, what=what)
    text = str(given).strip()
    return -to_us(text.removeprefix("-"), what=what) if text.startswith("-") else to_us(given, what=what)


def check_kinds(left: Step, right: Step, how: str, bounds: Bounds, *, where: str) -> None:
    from headrace.operators.joins.sides import HOWS

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


def on_columns(left: Step, right: Step, names: Any, left_on: Any, right_on: Any, *, where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
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


def result_columns(left: Side, right: Side, how: str, suffix: str | None, *, where: str) -> tuple[ResultColumn, ...]:
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
    taken = {each.lower() for each in left}
    if name.lower() not in taken:  # Spark does not tell case apart
        return name
    if suffix is None:
        raise PlanError(f"Both sides of the step {where} have a column {name!r}.", fix='tell them apart with suffix="_right", or select or rename one first.')
    renamed = f"{name}{suffix}"
    if renamed.lower() in taken | {each.lower() for each in right}:
        raise PlanError(f"The step {where} would have two columns {renamed!r}.", fix="choose another suffix=.")
    return renamed
