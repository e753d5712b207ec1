"""Functions that take a lambda: `transform(items, x -> x + 1)`, `filter`, `aggregate` and others.

A failure in the body gives null where it happens, and is counted for the row, as everywhere: the
condition for it is the body's, evaluated for each element.

    transform(xs, x -> 10 / x)
        safe    transform(`xs`, `x` -> try_divide(10, `x`))
        failed  coalesce(exists(transform(`xs`, `x` -> (… try_divide(10, `x`) IS NULL)), …), false)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa
from sqlglot import exp

from headrace.expressions import type_rules
from headrace.expressions.literals import quoted_name
from headrace.expressions.nested_values import distinct_keys
from headrace.expressions.type_rules import BOOLEAN, INT
from headrace.expressions.typed_expression import (
    ExpressionRefused,
    TypedExpression,
    check_length,
    either,
    failed_any,
    guarded,
    infallible,
    leaf,
)
from headrace.types.schema import type_name

Variables = dict[str, TypedExpression]
Check = Callable[[exp.Expr, Variables], TypedExpression]
"""Checks a node in which these variables are known besides the columns."""


@dataclass(frozen=True)
class Body:
    """A lambda: the names of its variables and its checked body."""

    names: tuple[str, ...]
    body: TypedExpression

    def text(self, form: str) -> str:
        """The lambda in Spark SQL, with one of the body's three forms."""
        return self._arrow(str(getattr(self.body, form)))

    def failures(self) -> str:
        """The lambda that says of an element whether the body fails."""
        return self._arrow(self.body.failed or "false")

    def _arrow(self, body: str) -> str:
        names = ", ".join(map(quoted_name, self.names))
        return f"{names} -> {body}" if len(self.names) == 1 else f"({names}) -> {body}"


def call(name: str, arguments: Sequence[exp.Expr], check: Check) -> TypedExpression:
    """A call of one of the functions of `LAMBDA_FUNCTIONS`.

    Raises:
        ExpressionRefused: It is given no lambda, or one that does not fit.
    """
    count, rule = _RULES[name]
    if len(arguments) not in count:
        raise ExpressionRefused(
            f"{name} was given {len(arguments)} arguments.", f"write it as in {EXAMPLES[name]}."
        )
    return rule(name, arguments, check)


def _lambda(
    name: str, node: exp.Expr, kinds: Sequence[pa.DataType], check: Check, *, least: int = 0
) -> Body:
    """A checked lambda over variables of these types; the last ones may be left out."""
    if not isinstance(node, exp.Lambda):
        raise ExpressionRefused(
            f"{name} takes a lambda, not {node.sql('spark')!r}.",
            f"write it as in {EXAMPLES[name]}.",
        )
    names = tuple(each.name for each in node.expressions)
    if not (least or len(kinds)) <= len(names) <= len(kinds) or len(set(names)) < len(names):
        raise ExpressionRefused(
            f"The lambda of {name} has the parameters ({', '.join(names)}).",
            f"write it as in {EXAMPLES[name]}.",
        )
    variables = {
        each.lower(): leaf(kind, quoted_name(each))
        for each, kind in zip(names, kinds, strict=False)
    }
    return Body(names, check(node.this, variables))


def _array(name: str, operand: TypedExpression) -> pa.DataType:
    """The type of an array's elements."""
    if not pa.types.is_list(operand.type):
        raise ExpressionRefused(
            f"{name} takes an array, not {type_name(operand.type)}.",
            f"write it as in {EXAMPLES[name]}.",
        )
    return operand.type.value_type


def _map(name: str, operand: TypedExpression) -> pa.DataType:
    if not pa.types.is_map(operand.type):
        raise ExpressionRefused(
            f"{name} takes a map, not {type_name(operand.type)}.",
            f"write it as in {EXAMPLES[name]}.",
        )
    return operand.type


def _is_boolean(name: str, body: Body) -> None:
    if body.body.type not in (BOOLEAN, type_rules.VOID):
        raise ExpressionRefused(
            f"The lambda of {name} gives {type_name(body.body.type)}, not BOOLEAN.",
            f"write it as in {EXAMPLES[name]}.",
        )


def _has_type(name: str, body: Body) -> None:
    if body.body.is_null:
        raise ExpressionRefused(
            f"The lambda of {name} gives nothing but null.", f"write it as in {EXAMPLES[name]}."
        )


def _over(
    kind: pa.DataType, template: str, body: Body, *operands: TypedExpression, failures: str
) -> TypedExpression:
    """An operation with a lambda: `{0}`, … are the operands and `{body}` is the lambda. `failures`
    is the operation that gives an array of which elements fail.
    """

    def fill(text: str, form: str, arrow: str) -> str:
        texts = (str(getattr(each, form)) for each in operands)
        return check_length(text.format(*texts, body=arrow))

    failed = None
    if body.body.failed is not None:
        flags = fill(failures, "safe", body.failures())
        failed = f"coalesce(exists({flags}, `__failed` -> `__failed`), false)"
    return TypedExpression(
        kind,
        fill(template, "sql", body.text("sql")),
        fill(template, "safe", body.text("safe")),
        either(failed_any(operands), failed),
    )


_EACH = "transform({0}, {body})"
_ENTRIES = "map_values(transform_values({0}, {body}))"


def _transform(name: str, arguments: Sequence[exp.Expr], check: Check) -> TypedExpression:
    items = check(arguments[0], {})
    body = _lambda(name, arguments[1], [_array(name, items), INT], check, least=1)
    _has_type(name, body)
    return _over(pa.list_(body.body.type), _EACH, body, items, failures=_EACH)


def _filter(name: str, arguments: Sequence[exp.Expr], check: Check) -> TypedExpression:
    items = check(arguments[0], {})
    kinds = [_array(name, items), INT] if name == "filter" else [_array(name, items)]
    body = _lambda(name, arguments[1], kinds, check, least=1)
    _is_boolean(name, body)
    kind = items.type if name == "filter" else BOOLEAN
    return _over(kind, f"{name}({{0}}, {{body}})", body, items, failures=_EACH)


def _of_map(name: str, arguments: Sequence[exp.Expr], check: Check) -> TypedExpression:
    """map_filter, transform_values and transform_keys."""
    items = check(arguments[0], {})
    kind = _map(name, items)
    body = _lambda(name, arguments[1], [kind.key_type, kind.item_type], check)
    template = f"{name}({{0}}, {{body}})"
    if name == "map_filter":
        _is_boolean(name, body)
        return _over(items.type, template, body, items, failures=_ENTRIES)
    _has_type(name, body)
    if name == "transform_values":
        result = pa.map_(kind.key_type, body.body.type)
        return _over(result, template, body, items, failures=_ENTRIES)
    result = pa.map_(body.body.type, kind.item_type)
    return _with_distinct_keys(_over(result, template, body, items, failures=_ENTRIES), body, items)


def _with_distinct_keys(
    changed: TypedExpression, body: Body, items: TypedExpression
) -> TypedExpression:
    """`transform_keys`, where neither two keys become one nor one becomes null. A map with the same
    keys and the new ones as values says so.
    """
    keys = f"map_values(transform_values({items.safe}, {body.text('safe')}))"
    condition = f"coalesce({distinct_keys(keys)}, true)"
    safe = check_length(f"(CASE WHEN {condition} THEN {changed.safe} END)")
    return TypedExpression(
        changed.type, changed.sql, safe, either(changed.failed, f"(NOT {condition})")
    )


def _checked(operand: TypedExpression) -> TypedExpression:
    """An operation whose result may be refused by Spark as well: errors are caught."""
    outer = guarded(operand.type, "{0}", TypedExpression(operand.type, operand.sql, operand.safe))
    return TypedExpression(
        operand.type, operand.sql, outer.safe, either(operand.failed, outer.failed)
    )


def _zip_with(name: str, arguments: Sequence[exp.Expr], check: Check) -> TypedExpression:
    left, right = (check(each, {}) for each in arguments[:2])
    body = _lambda(name, arguments[2], [_array(name, left), _array(name, right)], check)
    _has_type(name, body)
    template = "zip_with({0}, {1}, {body})"
    return _over(pa.list_(body.body.type), template, body, left, right, failures=template)


def _map_zip_with(name: str, arguments: Sequence[exp.Expr], check: Check) -> TypedExpression:
    left, right = (check(each, {}) for each in arguments[:2])
    first, second = _map(name, left), _map(name, right)
    if first.key_type != second.key_type:
        raise ExpressionRefused(
            f"The keys of the maps of {name} are {type_name(first.key_type)} and"
            f" {type_name(second.key_type)}.",
            "transform_keys makes them the same.",
        )
    kinds = [first.key_type, first.item_type, second.item_type]
    body = _lambda(name, arguments[2], kinds, check)
    _has_type(name, body)
    template = "map_zip_with({0}, {1}, {body})"
    return _over(
        pa.map_(first.key_type, body.body.type),
        template,
        body,
        left,
        right,
        failures=f"map_values({template})",
    )


def _aggregate(name: str, arguments: Sequence[exp.Expr], check: Check) -> TypedExpression:
    """A fold. What fails on the way is carried along in a struct beside the value."""
    items, start = (check(each, {}) for each in arguments[:2])
    element = _array(name, items)
    merge = _lambda(name, arguments[2], [start.type, element], check)
    if merge.body.type != start.type:
        raise ExpressionRefused(
            f"The lambda of {name} makes {type_name(merge.body.type)} of"
            f" {type_name(start.type)}, with which it starts.",
            f"start with CAST({arguments[1].sql('spark')} AS {type_name(merge.body.type)}), or"
            " cast in the lambda.",
        )
    finish = _lambda(name, arguments[3], [start.type], check) if len(arguments) > 3 else None
    kind = start.type if finish is None else finish.body.type

    def text(form: str) -> str:
        last = "" if finish is None else f", {finish.text(form)}"
        return check_length(
            f"aggregate({getattr(items, form)}, {getattr(start, form)}, {merge.text(form)}{last})"
        )

    failed = either(items.failed, start.failed)
    if merge.body.failed is not None or (finish is not None and finish.body.failed is not None):
        failed = either(failed, _fold_failed(arguments, items, start, element, check))
    return TypedExpression(kind, text("sql"), text("safe"), failed)


def _fold_failed(
    arguments: Sequence[exp.Expr],
    items: TypedExpression,
    start: TypedExpression,
    element: pa.DataType,
    check: Check,
) -> str:
    """The condition that a fold fails at an element, or at its end."""

    def with_value(node: exp.Expr, *kinds: pa.DataType) -> tuple[list[str], TypedExpression]:
        names = [each.name for each in node.expressions]
        variables = {names[0].lower(): leaf(start.type, "`__fold`.`value`")}
        variables |= {
            each.lower(): leaf(kind, quoted_name(each))
            for each, kind in zip(names[1:], kinds, strict=True)
        }
        return names, check(node.this, variables)

    names, merge = with_value(arguments[2], element)
    first = f"named_struct('value', {start.safe}, 'failed', false)"
    step = (
        f"named_struct('value', {merge.safe}, 'failed',"
        f" `__fold`.`failed` OR {merge.failed or 'false'})"
    )
    fold = f"{items.safe}, {first}, (`__fold`, {quoted_name(names[1])}) -> {step}"
    end = "`__fold`.`failed`"
    if len(arguments) > 3:
        _, finish = with_value(arguments[3])
        end = f"{end} OR {finish.failed or 'false'}"
    return check_length(f"coalesce(aggregate({fold}, `__fold` -> {end}), false)")


def _array_sort(name: str, arguments: Sequence[exp.Expr], check: Check) -> TypedExpression:
    items = check(arguments[0], {})
    element = _array(name, items)
    if len(arguments) == 1:
        if not type_rules.is_comparable(element):
            raise ExpressionRefused(f"{type_name(element)} cannot be compared.")
        return infallible(items.type, "array_sort({0})", items)
    body = _lambda(name, arguments[1], [element, element], check)
    if body.body.type != INT:
        raise ExpressionRefused(
            f"The lambda of {name} gives {type_name(body.body.type)}, not INT.",
            f"write it as in {EXAMPLES[name]}.",
        )
    # Whether the body fails depends on which elements are compared: all pairs stand for them.
    outer, inner = (_escaped(quoted_name(each)) for each in body.names)
    fails = _escaped(body.body.failed or "false")
    pairs = f"flatten(transform({{0}}, {outer} -> transform({{0}}, {inner} -> {fails})))"
    return _checked(_over(items.type, "array_sort({0}, {body})", body, items, failures=pairs))


def _escaped(text: str) -> str:
    """A text that stays as it is when a template is filled."""
    return text.replace("{", "{{").replace("}", "}}")


_RULES: dict[
    str, tuple[tuple[int, ...], Callable[[str, Sequence[exp.Expr], Check], TypedExpression]]
] = {
    "transform": ((2,), _transform),
    "filter": ((2,), _filter),
    "exists": ((2,), _filter),
    "forall": ((2,), _filter),
    "aggregate": ((3, 4), _aggregate),
    "reduce": ((3, 4), _aggregate),
    "zip_with": ((3,), _zip_with),
    "map_filter": ((2,), _of_map),
    "transform_keys": ((2,), _of_map),
    "transform_values": ((2,), _of_map),
    "map_zip_with": ((3,), _map_zip_with),
    "array_sort": ((1, 2), _array_sort),
}
LAMBDA_FUNCTIONS = frozenset(_RULES)
EXAMPLES = {
    "transform": "transform(items, x -> x + 1)",
    "filter": "filter(items, x -> x > 0)",
    "exists": "exists(items, x -> x > 0)",
    "forall": "forall(items, x -> x > 0)",
    "aggregate": "aggregate(items, 0, (sum, x) -> sum + x)",
    "reduce": "reduce(items, 0, (sum, x) -> sum + x)",
    "zip_with": "zip_with(prices, amounts, (price, amount) -> price * amount)",
    "map_filter": "map_filter(tags, (key, value) -> value > 0)",
    "transform_keys": "transform_keys(tags, (key, value) -> upper(key))",
    "transform_values": "transform_values(tags, (key, value) -> value + 1)",
    "map_zip_with": "map_zip_with(before, after, (key, old, new) -> coalesce(new, old))",
    "array_sort": "array_sort(items, (a, b) -> CASE WHEN a < b THEN -1 ELSE 1 END)",
}
"""A call of each, for errors and the reference."""
