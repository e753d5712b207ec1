"""What the operations of `stream` ask about columns: what a selection makes of a schema, which
columns are a key, which schemas are the same.

Every check names the step (`where`) and, for an unknown column, the nearest one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from headrace.errors import BadExpression, PlanError, UnfitColumn, UnknownColumn, nearest
from headrace.log.topic_config import check_name
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.plan.expressions import Expression, read, read_named
from headrace.plan.plan import ERRORS, Step
from headrace.types.schema import RESERVED_COLUMNS, check_key, type_name

SYSTEM_COLUMNS = (*RESERVED_COLUMNS, "_tick", "_rank")
"""Columns that ride with rows inside a job or lie beside them in the log."""


@dataclass(frozen=True)
class Selection:
    """The columns of a select: what they are called, how they are computed, what they are."""

    expressions: tuple[tuple[str, Expression], ...]
    schema: pa.Schema

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, expression.text) for name, expression in self.expressions)

    def key_of(self, step: Step, *, where: str) -> tuple[str, ...]:
        """The key under its names after the selection. A table must keep it; a stream that does not
        has none.
        """
        kept = {
            expression.column: name
            for name, expression in reversed(self.expressions)
            if expression.column is not None
        }
        missing = [name for name in step.key if name not in kept]
        if not missing:
            return tuple(kept[name] for name in step.key)
        if step.is_table:
            raise PlanError(
                f"The step {where} leaves out or changes {', '.join(map(repr, missing))} of the"
                " table's primary key.",
                fix="select the key's columns as they are, under any name.",
            )
        return ()


def selected(
    step: Step, columns: Sequence[str], named: Mapping[str, str], *, where: str
) -> Selection:
    """The columns of `select`: positional ones first, then those by keyword."""
    chosen: list[tuple[str, Expression]] = []
    for text in columns:
        chosen += (
            _all_columns(step, where=where)
            if text == "*"
            else [_positional(text, step.schema, where=where)]
        )
    chosen += [
        (name, read(text, step.schema, where=f"{where}, column {name!r}"))
        for name, text in named.items()
    ]
    if not chosen:
        raise PlanError(
            f"The step {where} selects no columns.", fix="name at least one, or leave the step out."
        )
    return _selection(chosen, step.schema, where=where)


def added(step: Step, columns: Sequence[str], named: Mapping[str, str], *, where: str) -> Selection:
    """The columns of `with_columns`: those there are, each replaced where it stands if it is given
    anew, then the new ones.
    """
    given = dict(selected(step, columns, named, where=where).expressions)
    folded = {name.lower(): name for name in given}
    kept = [
        (name, given.pop(folded[name.lower()]) if name.lower() in folded else all_)
        for name, all_ in _all_columns(step, where=where)
    ]
    return _selection([*kept, *given.items()], step.schema, where=where)


def _all_columns(step: Step, *, where: str) -> list[tuple[str, Expression]]:
    return [(name, read(name, step.schema, where=where)) for name in step.schema.names]


def _positional(text: str, schema: pa.Schema, *, where: str) -> tuple[str, Expression]:
    name, expression = read_named(text, schema, where=where)
    if name is None:
        raise BadExpression(
            f"The step {where} has the expression {text!r}, which has no name.",
            fix=f"write {f'{text} AS total'!r}, or total={text!r}.",
        )
    return name, expression


def _selection(
    chosen: Sequence[tuple[str, Expression]], schema: pa.Schema, *, where: str
) -> Selection:
    fields = [_field(name, expression, schema, where=where) for name, expression in chosen]
    return Selection(tuple(chosen), check_columns(pa.schema(fields), where=f"The step {where}"))


def _field(name: str, expression: Expression, schema: pa.Schema, *, where: str) -> pa.Field:
    if expression.column is not None:
        return schema.field(expression.column).with_name(name)
    if expression.type is None:
        raise UnfitColumn(
            f"The type of the column {name!r} of the step {where} cannot be told from"
            f" {expression.text!r}.",
            fix=f"say it: CAST({expression.text} AS STRING), or whichever type it has.",
        )
    return pa.field(name, expression.type)


def check_columns(schema: pa.Schema, *, where: str) -> pa.Schema:
    """That no two columns have one name, whatever the case (Spark does not tell case apart), and
    none has a reserved one.
    """
    seen: dict[str, str] = {}
    for name in schema.names:
        if name.lower() in SYSTEM_COLUMNS:
            raise PlanError(
                f"{where} has a column {name!r}, a name that is reserved.",
                fix=f"rename it; reserved are {', '.join(SYSTEM_COLUMNS)}.",
            )
        if name.lower() in seen:
            raise PlanError(
                f"{where} has the column {name!r} twice (first as {seen[name.lower()]!r}).",
                fix="rename one; Spark does not tell case apart.",
            )
        seen[name.lower()] = name
    return schema


def with_column(schema: pa.Schema, field: pa.Field, *, where: str) -> pa.Schema:
    return check_columns(schema.append(field), where=f"The step {where}")


def condition(text: str, schema: pa.Schema, *, where: str) -> Expression:
    """A condition, which must be true or false."""
    expression = read(text, schema, where=where)
    if expression.type is not None and not pa.types.is_boolean(expression.type):
        raise UnfitColumn(
            f"The condition {text!r} of the step {where} is {type_name(expression.type)}, not"
            " BOOLEAN.",
            fix="compare it with something, as in 'amount > 0'.",
        )
    return expression


def key(columns: str | Iterable[str], schema: pa.Schema, *, where: str) -> tuple[str, ...]:
    """The columns of a key: there, plain, each once, at least one."""
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    if not names:
        raise PlanError(f"The step {where} names no key columns.", fix="name at least one.")
    return check_key(schema, names, where=f"The step {where}")


def shared_key(steps: Sequence[Step]) -> tuple[str, ...]:
    """The key that all have, or none."""
    keys = {step.key for step in steps}
    return steps[0].key if len(keys) == 1 else ()


def shared_schema(steps: Sequence[Step]) -> pa.Schema:
    """The columns of the first; what not all declare alike (NOT NULL, a length, a comment) is
    dropped.
    """
    return pa.schema(
        [
            _shared_field([step.schema.field(field.name) for step in steps])
            for field in steps[0].schema
        ]
    )


def _shared_field(fields: Sequence[pa.Field]) -> pa.Field:
    first = fields[0]
    alike = all(first.equals(each, check_metadata=True) for each in fields)
    return first if alike else pa.field(first.name, first.type)


def check_same_columns(one: Step, other: Step, *, where: str) -> None:
    """That two schemas have the same columns with the same types, in any order."""
    for step, against in ((other, one), (one, other)):
        for name in step.schema.names:
            if name not in against.schema.names:
                raise UnknownColumn(
                    name,
                    against.schema.names,
                    where=f"The step {where} unites different schemas: {against.path}",
                )
    for name in one.schema.names:
        kinds = [each.schema.field(name).type for each in (one, other)]
        if kinds[0] != kinds[1]:
            raise UnfitColumn(
                f"The step {where} unites different schemas: {name!r} is {type_name(kinds[0])} in"
                f" {one.path} and {type_name(kinds[1])} in {other.path}.",
                fix=(
                    f"cast it in one of them: with_columns({name}='CAST({name} AS"
                    f" {type_name(kinds[0])})')."
                ),
            )


def check_errors(errors: str, *, where: str) -> str:
    if errors not in ERRORS:
        raise PlanError(
            f"The step {where} has errors={errors!r}: {nearest(str(errors), ERRORS)}",
            fix="'null' makes the result null, 'divert' sends the row to dead letters.",
        )
    return errors


def check_step_name(name: Any) -> str:
    """A step's name must do as part of a topic's name, since its dead letters are in one."""
    if name is None:
        return ""
    hint = (
        "use letters, digits, dots, hyphens and underscores. (name= names the step; for a column"
        f" of that name, write {'… AS name'!r}.)"
    )
    if isinstance(name, AggregateSpec):
        raise PlanError(
            f"name= names the step, so an aggregate ({name.kind}) cannot be called 'name' here.",
            fix="call it something else, and rename it behind: select('… AS name').",
        )
    if not isinstance(name, str):
        raise PlanError(f"{name!r} cannot be the name of a step.", fix=hint)
    try:
        return check_name(name, what="step name")
    except ValueError:
        raise PlanError(f"{name!r} cannot be the name of a step.", fix=hint) from None
