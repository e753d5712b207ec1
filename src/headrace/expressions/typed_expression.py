"""`TypedExpression`: a checked expression or part of one, as its type and three texts in Spark SQL.
They are composed from the leaves up; there is no tree of our own.

`sql` is the expression. `safe` is the expression with null where `sql` would fail. `failed` is a
condition, never null, that is true exactly when an operation fails although its operands are not
null; it is None where nothing can fail.

    a / b          sql     (`a` / `b`)
                   safe    try_divide(`a`, `b`)
                   failed  (`a` IS NOT NULL AND `b` IS NOT NULL AND try_divide(`a`, `b`) IS NULL)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

NOT_A_LITERAL: Any = object()
MAX_TEXT = 200_000
"""The most characters of a text. Operations that repeat their operands grow fast when nested."""


class ExpressionRefused(Exception):
    """An expression is not allowed. `parse_expression` adds the step and the expression."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix


@dataclass(frozen=True)
class TypedExpression:
    """A type and three texts, as the module describes. `value` is a literal's value, `column` the
    column's name of a plain column, and `whole_days` marks an interval literal of days.
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
    """A column or a literal, which cannot fail."""
    return TypedExpression(kind, sql, sql, **more)


def infallible(kind: pa.DataType, template: str, *operands: TypedExpression) -> TypedExpression:
    """An operation that cannot fail. `template` has `{0}`, `{1}`, … for its operands."""
    return TypedExpression(
        kind,
        _fill(template, (each.sql for each in operands)),
        _fill(template, (each.safe for each in operands)),
        failed_any(operands),
    )


def fallible(
    kind: pa.DataType,
    template: str,
    safe_template: str,
    *operands: TypedExpression,
    failed_if: str | None = None,
) -> TypedExpression:
    """An operation that can fail. `safe_template` is its form that gives null instead.

    The operation failed if it gives null although no operand is null. Where null can be a result as
    well, `failed_if` is the condition.
    """
    sql = _fill(template, (each.sql for each in operands))
    safe = _fill(safe_template, (each.safe for each in operands))
    not_null = [f"{each.safe} IS NOT NULL" for each in operands if not each.is_literal]
    own = (
        f"{safe} IS NULL"
        if failed_if is None
        else f"coalesce({_fill(failed_if, (each.safe for each in operands))}, false)"
    )
    return TypedExpression(
        kind, sql, safe, either(failed_any(operands), "(" + " AND ".join([*not_null, own]) + ")")
    )


def guarded(
    kind: pa.DataType, template: str, *operands: TypedExpression, allowed_if: str | None = None
) -> TypedExpression:
    """An operation that can fail and has no form of its own that gives null instead.

    Spark evaluates it within `try_to_binary`, which gives null for any error below it, and only
    where that succeeds for its value:

        sql     conv(`s`, 36, 10)
        safe    (CASE WHEN try_to_binary(hex(xxhash64(conv(`s`, 36, 10))), 'hex') IS NOT NULL
                 THEN conv(`s`, 36, 10) END)
        failed  (try_to_binary(…) IS NULL)

    Args:
        kind: The type of the result.
        template: The operation, with `{0}`, `{1}`, … for its operands.
        operands: Its operands.
        allowed_if: A condition over the operands. Where it is false, the operation is not
            evaluated and counts as failed: it would take more memory than a row may.
    """
    plain = _fill(template, (each.safe for each in operands))
    attempt = _attempt(plain, kind)
    safe = f"(CASE WHEN {attempt} IS NOT NULL THEN {plain} END)"
    own = f"({attempt} IS NULL)"
    if allowed_if is not None:
        allowed = f"coalesce({_fill(allowed_if, (each.safe for each in operands))}, true)"
        safe = f"(CASE WHEN {allowed} THEN {safe} END)"
        own = f"(CASE WHEN {allowed} THEN {own} ELSE true END)"
    sql = _fill(template, (each.sql for each in operands))
    return TypedExpression(kind, sql, check_length(safe), either(failed_any(operands), own))


def allowed(
    kind: pa.DataType, template: str, *operands: TypedExpression, allowed_if: str
) -> TypedExpression:
    """An operation that cannot fail, but is not evaluated where a condition is false."""
    condition = f"coalesce({_fill(allowed_if, (each.safe for each in operands))}, true)"
    plain = _fill(template, (each.safe for each in operands))
    return TypedExpression(
        kind,
        _fill(template, (each.sql for each in operands)),
        f"(CASE WHEN {condition} THEN {plain} END)",
        either(failed_any(operands), f"(NOT {condition})"),
    )


def _attempt(sql: str, kind: pa.DataType) -> str:
    """An expression that is null exactly if another one raises. A hash reads the whole value, so
    that Spark cannot leave its evaluation out.
    """
    if pa.types.is_map(kind):
        sql = f"map_entries({sql})"
        kind = pa.struct([pa.field("key", kind.key_type), pa.field("value", kind.item_type)])
    read = f"xxhash64({sql})" if _is_hashable(kind) else f"to_json(named_struct('x', {sql}))"
    return f"try_to_binary(hex({read}), 'hex')"


def _is_hashable(kind: pa.DataType) -> bool:
    """Whether Spark hashes values of a type: not maps, and not VARIANT and the like, which are
    structs with tagged members.
    """
    if pa.types.is_struct(kind):
        return all(not field.metadata and _is_hashable(field.type) for field in kind)
    if pa.types.is_list(kind):
        return _is_hashable(kind.value_type)
    return not pa.types.is_map(kind)


def failed_any(operands: Iterable[TypedExpression]) -> str | None:
    return either(*(each.failed for each in operands))


def either(*conditions: str | None) -> str | None:
    """A condition that is true if any of these is; None if there is none."""
    different = list(dict.fromkeys(each for each in conditions if each is not None))
    if len(different) < 2:
        return different[0] if different else None
    return f"({' OR '.join(different)})"


def when(condition: str, then: str | None, otherwise: str | None) -> str | None:
    """A condition for a failure that counts only if its branch is taken."""
    if then is None and otherwise is None:
        return None
    return f"(CASE WHEN {condition} THEN {then or 'false'} ELSE {otherwise or 'false'} END)"


def branches(
    kind: pa.DataType,
    conditions: Sequence[TypedExpression],
    results: Sequence[TypedExpression],
    default: TypedExpression | None,
) -> TypedExpression:
    """CASE WHEN …: conditions are evaluated in order, up to the first that is true."""

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


def check_length(text: str) -> str:
    """A text that is short enough. Raises ExpressionRefused if an expression has grown too long."""
    if len(text) > MAX_TEXT:
        raise ExpressionRefused("It is nested too deeply.", "split it with with_columns.")
    return text


def _fill(template: str, texts: Iterable[str]) -> str:
    operands = list(texts)
    length = len(template)
    for index, text in enumerate(operands):
        length += len(text) * template.count(f"{{{index}}}")
    if length > MAX_TEXT:
        raise ExpressionRefused("It is nested too deeply.", "split it with with_columns.")
    return template.format(*operands)
