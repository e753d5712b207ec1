"""A piece of an expression, read: its type, and its three texts in Spark SQL. Pieces are put
together from the leaves up; there is no tree of our own.

`sql` is what the piece means. `safe` means the same, with null where `sql` would fail. `failed` is
a condition, never null, that is true exactly when an operation in the piece fails although its
operands are not null; it is None where nothing can fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

NOT_A_LITERAL: Any = object()
MAX_TEXT = 200_000
"""The most characters of a spelled-out form: what repeats its operands grows fast when it is
nested.
"""


class ExpressionRefused(Exception):
    """Something an expression must not do; the reader adds the step and the expression."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.message, self.fix = message, fix


@dataclass(frozen=True)
class TypedExpression:
    """See the module. `value` is a literal's value; `column` the column that the piece is;
    `whole_days` marks an interval literal of days.
    """

    type: pa.DataType
    sql: str
    safe: str
    failed: str | None = None
    value: Any = NOT_A_LITERAL
    column: str | None = None
    whole_days: bool = False

    @property
    def is_literal(self) -> bool:
        return self.value is not NOT_A_LITERAL

    @property
    def is_null(self) -> bool:
        return bool(pa.types.is_null(self.type))


def leaf(kind: pa.DataType, sql: str, **more: Any) -> TypedExpression:
    """A column or a literal: nothing in it can fail."""
    return TypedExpression(kind, sql, sql, **more)


def total(kind: pa.DataType, template: str, *pieces: TypedExpression) -> TypedExpression:
    """An operation that cannot fail. `template` has `{0}`, `{1}`, … for its operands."""
    return TypedExpression(
        kind,
        _filled(template, (each.sql for each in pieces)),
        _filled(template, (each.safe for each in pieces)),
        failed_any(pieces),
    )


def partial(
    kind: pa.DataType,
    template: str,
    safe_template: str,
    *pieces: TypedExpression,
    failed_if: str | None = None,
) -> TypedExpression:
    """An operation that can fail, and its form that gives null instead.

    It failed if it gives null although no operand is null; where null can be a result as well,
    `failed_if` is the condition.
    """
    sql, safe = (
        _filled(template, (each.sql for each in pieces)),
        _filled(safe_template, (each.safe for each in pieces)),
    )
    given = [f"{each.safe} IS NOT NULL" for each in pieces if not each.is_literal]
    own = (
        f"{safe} IS NULL"
        if failed_if is None
        else f"coalesce({_filled(failed_if, (each.safe for each in pieces))}, false)"
    )
    return TypedExpression(
        kind, sql, safe, either(failed_any(pieces), "(" + " AND ".join([*given, own]) + ")")
    )


def renamed(piece: TypedExpression, kind: pa.DataType) -> TypedExpression:
    """The same texts, known to have another type."""
    return replace(piece, type=kind)


def failed_any(pieces: Iterable[TypedExpression]) -> str | None:
    return either(*(each.failed for each in pieces))


def either(*conditions: str | None) -> str | None:
    """True if any is."""
    given = list(dict.fromkeys(each for each in conditions if each is not None))
    if len(given) < 2:
        return given[0] if given else None
    return f"({' OR '.join(given)})"


def when(condition: str, then: str | None, otherwise: str | None) -> str | None:
    """A failure that counts only if its branch is taken."""
    if then is None and otherwise is None:
        return None
    return f"(CASE WHEN {condition} THEN {then or 'false'} ELSE {otherwise or 'false'} END)"


def branches(
    kind: pa.DataType,
    conditions: Sequence[TypedExpression],
    results: Sequence[TypedExpression],
    default: TypedExpression | None,
) -> TypedExpression:
    """CASE WHEN …: conditions are looked at in order, up to the first that is true."""

    def text(form: str) -> str:
        arms = "".join(
            f" WHEN {getattr(if_, form)} THEN {getattr(then, form)}"
            for if_, then in zip(conditions, results, strict=True)
        )
        return f"(CASE{arms}{'' if default is None else f' ELSE {getattr(default, form)}'} END)"

    failed = None if default is None else default.failed
    for condition, result in zip(reversed(conditions), reversed(results), strict=True):
        failed = either(condition.failed, when(condition.safe, result.failed, failed))
    return TypedExpression(kind, text("sql"), text("safe"), failed)


def _filled(template: str, texts: Iterable[str]) -> str:
    given = list(texts)
    if (
        len(template)
        + sum(len(text) * template.count(f"{{{position}}}") for position, text in enumerate(given))
        > MAX_TEXT
    ):
        raise ExpressionRefused("It is nested too deeply.", "split it with with_columns.")
    return template.format(*given)
