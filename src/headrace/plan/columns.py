"""Checks of columns when a step is declared: the columns of a selection, the columns of a key,
conditions, and whether two schemas are the same.

The operations of `headrace.pipeline` use them. Every check names the step (`where`) and, for an
unknown column, the nearest one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from headrace.errors import BadExpression, PlanError, UnfitColumn, UnknownColumn
from headrace.expressions.expression import Expression, parse_expression, parse_named_expression
from headrace.expressions.function_calls import is_call_column
from headrace.names import check_name
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.plan.plan import Step
from headrace.types.schema import RESERVED_COLUMNS, check_key, type_name

SYSTEM_COLUMNS = (*RESERVED_COLUMNS, "_tick", "_rank")
"""Columns that accompany rows inside a job, or in the log."""


@dataclass(frozen=True)
class Selection:
    """The columns of a select: their names, expressions and types."""

    expressions: tuple[tuple[str, Expression], ...]
    schema: pa.Schema

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, expression.text) for name, expression in self.expressions)

    def key_of(self, step: Step, *, where: str) -> tuple[str, ...]:
        """The step's key, under the names that its columns have after the selection. A table must
        keep its key; a stream that does not keep it has none.
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


def select_columns(
    step: Step, columns: Sequence[str], named: Mapping[str, str], *, where: str
) -> Selection:
    """The columns of `select`: positional ones first, then those by keyword."""
    chosen: list[tuple[str, Expression]] = []
    for text in columns:
        star = _STAR.match(text)
        chosen += (
            [_positional(text, step.schema, where=where)]
            if star is None
            else _all_columns(step, star["left_out"], where=where)
        )
    chosen += [
        (name, parse_expression(text, step.schema, where=f"{where}, column {name!r}"))
        for name, text in named.items()
    ]
    if not chosen:
        raise PlanError(
            f"The step {where} selects no columns.", fix="name at least one, or leave the step out."
        )
    return _selection(chosen, step.schema, where=where)


def add_columns(
    step: Step, columns: Sequence[str], named: Mapping[str, str], *, where: str
) -> Selection:
    """The columns of `with_columns`: the step's columns, each replaced in its position if it is
    declared anew, then the new ones.
    """
    added = dict(select_columns(step, columns, named, where=where).expressions)
    folded = {name.lower(): name for name in added}
    kept = [
        (name, added.pop(folded[name.lower()]) if name.lower() in folded else expression)
        for name, expression in _all_columns(step, where=where)
    ]
    return _selection([*kept, *added.items()], step.schema, where=where)


def _all_columns(
    step: Step, left_out: str | None = None, *, where: str
) -> list[tuple[str, Expression]]:
    """All columns, but for those that `* EXCEPT (…)` names."""
    names = [] if left_out is None else [_unquoted(name) for name in left_out.split(",")]
    exact = {name.lower(): name for name in step.schema.names}
    for name in names:
        if name.lower() not in exact:
            raise UnknownColumn(name, step.schema.names, where=f"The input of the step {where}")
    without = {exact[name.lower()] for name in names}
    return [
        (name, parse_expression(name, step.schema, where=where))
        for name in step.schema.names
        if name not in without and not is_call_column(name)
    ]


_STAR = re.compile(r"^\s*\*\s*(?:EXCEPT\s*\((?P<left_out>[^()]*)\)\s*)?$", re.IGNORECASE)


def _unquoted(name: str) -> str:
    """The name of a column, which may stand in backticks."""
    name = name.strip()
    is_quoted = len(name) > 1 and name[0] == name[-1] == "`"
    return name[1:-1].replace("``", "`") if is_quoted else name


def is_expression(text: object) -> bool:
    """Whether a text that names a column or is an expression can only be the latter."""
    return isinstance(text, str) and not text.isidentifier()


def split_computed(
    step: Step, columns: str | Iterable[str], *, where: str, fix: str
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Names of columns, each of which may be an expression: the columns' names, and the texts of
    those that are expressions with a name, as in `"date(placed_at) AS day"`, by that name.
    """
    names: list[str] = []
    computed: dict[str, str] = {}
    for text in (columns,) if isinstance(columns, str) else columns:
        if text in step.schema.names or not is_expression(text):
            names.append(text)
            continue
        name, expression = parse_named_expression(text, step.schema, where=where)
        is_named = name is not None and not is_call_column(name)
        if expression.column is None or not is_named or name != expression.column:
            if name is None or not is_named:
                raise BadExpression(
                    f"The step {where} has the expression {text!r}, which has no name.", fix=fix
                )
            computed[name] = expression.text
        names.append(name or text)
    return tuple(names), computed


def _positional(text: str, schema: pa.Schema, *, where: str) -> tuple[str, Expression]:
    name, expression = parse_named_expression(text, schema, where=where)
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
            f"The type of the column {name!r} of the step {where} is not known: it is"
            f" {expression.text!r}.",
            fix=f"say it: CAST({expression.text} AS STRING), or whichever type it has.",
        )
    return pa.field(name, expression.type)


def check_columns(schema: pa.Schema, *, where: str) -> pa.Schema:
    """Return the schema. Raise PlanError if two columns have one name, whatever the case (Spark
    ignores case), or one has a reserved name.
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
                fix="rename one; Spark ignores case.",
            )
        seen[name.lower()] = name
    return schema


def with_column(schema: pa.Schema, field: pa.Field, *, where: str) -> pa.Schema:
    """The schema with one more column, checked."""
    return check_columns(schema.append(field), where=f"The step {where}")


def parse_condition(text: str, schema: pa.Schema, *, where: str) -> Expression:
    """A condition over a schema. Raises UnfitColumn if it is not BOOLEAN."""
    expression = parse_expression(text, schema, where=where)
    if expression.type is not None and not pa.types.is_boolean(expression.type):
        raise UnfitColumn(
            f"The condition {text!r} of the step {where} is {type_name(expression.type)}, not"
            " BOOLEAN.",
            fix="compare it with something, as in 'amount > 0'.",
        )
    return expression


def key_columns(columns: str | Iterable[str], schema: pa.Schema, *, where: str) -> tuple[str, ...]:
    """The columns of a key, of which there is at least one. Each exists, has a type that can be
    compared, and is named once.
    """
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    if not names:
        raise PlanError(f"The step {where} names no key columns.", fix="name at least one.")
    return check_key(schema, names, where=f"The step {where}")


def shared_key(steps: Sequence[Step]) -> tuple[str, ...]:
    """The key that all steps have, or none if their keys differ."""
    keys = {step.key for step in steps}
    return steps[0].key if len(keys) == 1 else ()


def shared_schema(steps: Sequence[Step]) -> pa.Schema:
    """The first step's columns. What the steps declare differently (NOT NULL, a length, a comment)
    is dropped.
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


def check_same_columns(first: Step, second: Step, *, where: str) -> None:
    """Raise if two steps have different columns, or types of columns. Their order may differ."""
    for step, against in ((second, first), (first, second)):
        for name in step.schema.names:
            if name not in against.schema.names:
                raise UnknownColumn(
                    name,
                    against.schema.names,
                    where=f"The step {where} unites different schemas: {against.path}",
                )
    for name in first.schema.names:
        first_type = first.schema.field(name).type
        second_type = second.schema.field(name).type
        if first_type != second_type:
            raise UnfitColumn(
                f"The step {where} unites different schemas: {name!r} is {type_name(first_type)} in"
                f" {first.path} and {type_name(second_type)} in {second.path}.",
                fix=(
                    f"cast it in one of them: with_columns({name}='CAST({name} AS"
                    f" {type_name(first_type)})')."
                ),
            )


def check_step_name(name: Any) -> str:
    """The step's name, or "" if it has none. It must be usable as part of a topic's name, since the
    step's dead letters are in a topic named after it.
    """
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
