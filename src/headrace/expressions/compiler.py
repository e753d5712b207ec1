"""Compiles sqlglot's tree to the typed tree of `evaluator`.

Operators, literals, CASE, CAST and a few functions mean the same wherever they stand. What does
not, the caller resolves: what a column is, which functions there are besides, and what may not be
used. `spark_subset` does it for the steps of a plan, `operators/patterns/condition_parser` for the
rows of a match.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pyarrow as pa
from sqlglot import exp

from headrace.durations import to_us
from headrace.expressions.evaluator import Constant, Node, cast, operation
from headrace.expressions.parser import COMPARISONS, to_sql
from headrace.expressions.refusals import suggestion
from headrace.expressions.typed_expression import ExpressionRefused

Resolve = Callable[[exp.Expr], Node | None]
"""Called with every node of sqlglot's tree before its children: what it is, None if it means what
it always does. Raises ExpressionRefused if it may not be used.
"""
_OPERATORS: dict[type[exp.Expr], str] = {
    exp.Add: "+",
    exp.Sub: "-",
    exp.Mul: "*",
    exp.Div: "/",
    exp.Mod: "%",
    **COMPARISONS,
}
_CASTS = {
    "DOUBLE": pa.float64(),
    "FLOAT": pa.float32(),
    "BIGINT": pa.int64(),
    "INT": pa.int32(),
    "STRING": pa.string(),
    "BOOLEAN": pa.bool_(),
}
FUNCTIONS = {
    "abs": (1, 1),
    "coalesce": (1, 20),
    "least": (2, 20),
    "greatest": (2, 20),
    "lower": (1, 1),
    "upper": (1, 1),
    "length": (1, 1),
    "floor": (1, 1),
    "sqrt": (1, 1),
}
"""The functions that can be called, and how many arguments each takes."""


class Compiler:
    """Compiles one expression. What has no handler here, and is not resolved, is refused."""

    def __init__(
        self,
        resolve: Resolve,
        *,
        over: str = "over Arrow columns",
        functions: tuple[str, ...] = (),
        max_depth: int | None = None,
    ) -> None:
        """For errors: `over` says what the expression is computed over, and `functions` are those
        that `resolve` knows.
        """
        self._resolve = resolve
        self._over = over
        self._functions = functions
        self._max_depth = max_depth
        self._depth = 0

    def node(self, tree: exp.Expr) -> Node:
        """The typed tree of a node.

        Raises:
            ExpressionRefused: it cannot be computed.
            pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError: types do not fit.
        """
        if (resolved := self._resolve(tree)) is not None:
            return resolved
        handler = self._handlers.get(type(tree))
        if handler is None:
            raise ExpressionRefused(
                f"{type(tree).__name__} ({to_sql(tree)}) is not among what can be computed"
                f" {self._over}."
            )
        self._depth += 1
        if self._max_depth is not None and self._depth > self._max_depth:
            raise ExpressionRefused(
                f"it is nested more than {self._max_depth} deep.", "write it with fewer parts."
            )
        result = handler(self, tree)
        self._depth -= 1
        return result

    def _paren(self, tree: exp.Paren) -> Node:
        return self.node(tree.this)

    # Literals

    def _literal(self, tree: exp.Literal) -> Node:
        text = str(tree.this)
        if tree.is_string:
            return Constant(text, pa.string())
        if text.isdigit() and int(text) < 2**63:
            return Constant(int(text), pa.int64())
        return Constant(float(text), pa.float64())

    def _boolean(self, tree: exp.Boolean) -> Node:
        return Constant(bool(tree.this), pa.bool_())

    def _null(self, _: exp.Null) -> Node:
        return Constant(None, pa.null())

    def _interval(self, tree: exp.Interval) -> Node:
        number, unit = tree.this, tree.args.get("unit")
        if not isinstance(number, exp.Literal) or unit is None:
            raise ExpressionRefused(
                "an interval must be a number and one unit.", "write it as in INTERVAL '90' MINUTE."
            )
        interval_us = to_us(f"{number.this} {unit.name.lower()}", what="interval")
        return Constant(interval_us, pa.duration("us"))

    # Operators

    def _operator(self, tree: exp.Binary) -> Node:
        return operation(_OPERATORS[type(tree)], self.node(tree.this), self.node(tree.expression))

    def _logic(self, tree: exp.Connector) -> Node:
        name = "and" if isinstance(tree, exp.And) else "or"
        return operation(name, *(self.node(operand) for operand in tree.flatten()))

    def _not(self, tree: exp.Not) -> Node:
        return operation("not", self.node(tree.this))

    def _negative(self, tree: exp.Neg) -> Node:
        return operation("negative", self.node(tree.this))

    def _is(self, tree: exp.Is) -> Node:
        operand = self.node(tree.this)
        if isinstance(tree.expression, exp.Null):
            return operation("is null", operand)
        if isinstance(tree.expression, exp.Boolean):
            return operation(
                "is true", operand if tree.expression.this else operation("not", operand)
            )
        raise ExpressionRefused(f"{to_sql(tree)!r} is not IS NULL, IS TRUE or IS FALSE.")

    def _in(self, tree: exp.In) -> Node:
        if not tree.expressions:
            raise ExpressionRefused("IN takes a list of values.")
        value = self.node(tree.this)
        return operation(
            "or", *(operation("=", value, self.node(item)) for item in tree.expressions)
        )

    def _between(self, tree: exp.Between) -> Node:
        value = self.node(tree.this)
        low, high = self.node(tree.args["low"]), self.node(tree.args["high"])
        return operation("and", operation(">=", value, low), operation("<=", value, high))

    def _like(self, tree: exp.Like) -> Node:
        pattern = self.node(tree.expression)
        if not (isinstance(pattern, Constant) and pattern.type == pa.string()):
            raise ExpressionRefused("LIKE takes a text in quotes.")
        return operation("like", self.node(tree.this), pattern)

    # CASE, CAST and functions

    def _case(self, tree: exp.Case) -> Node:
        value = None if tree.this is None else self.node(tree.this)
        parts: list[Node] = []
        for branch in tree.args["ifs"]:
            test = self.node(branch.this)
            parts.append(test if value is None else operation("=", value, test))
            parts.append(self.node(branch.args["true"]))
        default = tree.args.get("default")
        parts.append(Constant(None, pa.null()) if default is None else self.node(default))
        return operation("case", *parts)

    def _cast(self, tree: exp.Cast) -> Node:
        kind = _CASTS.get(tree.to.sql("spark").upper())
        if kind is None:
            raise ExpressionRefused(
                f"a cast to {tree.to.sql('spark')} is not among what can be computed {self._over}.",
                f"cast to one of {', '.join(_CASTS)}.",
            )
        return cast(self.node(tree.this), kind)

    def _call(self, tree: exp.Anonymous) -> Node:
        name = str(tree.this).lower()
        if name not in FUNCTIONS:
            raise ExpressionRefused(
                f"there is no function {name}() {self._over}.", self._what_there_is(name)
            )
        least, most = FUNCTIONS[name]
        if not least <= len(tree.expressions) <= most:
            raise ExpressionRefused(
                f"{name}() takes {least} {'argument' if most == least else 'or more arguments'}."
            )
        return operation(name, *map(self.node, tree.expressions))

    def _what_there_is(self, name: str) -> str:
        known = sorted((*FUNCTIONS, *self._functions))
        close = suggestion(name, known)
        if close is not None and close.partition("(")[0] in known:
            return f"did you mean {close.partition('(')[0]!r}?"
        return f"there is {', '.join(known)}."

    _handlers: ClassVar[dict[type[exp.Expr], Callable[[Compiler, Any], Node]]] = {
        exp.Paren: _paren,
        exp.Literal: _literal,
        exp.Boolean: _boolean,
        exp.Null: _null,
        exp.Interval: _interval,
        **dict.fromkeys(_OPERATORS, _operator),
        exp.And: _logic,
        exp.Or: _logic,
        exp.Not: _not,
        exp.Neg: _negative,
        exp.Is: _is,
        exp.In: _in,
        exp.Between: _between,
        exp.Like: _like,
        exp.Case: _case,
        exp.Cast: _cast,
        exp.TryCast: _cast,
        exp.Anonymous: _call,
    }
