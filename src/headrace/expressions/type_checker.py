"""Checks sqlglot's tree over a schema. Every kind of node that is allowed has a method here; any
other is refused.

Each node becomes a typed expression from those of its children, so types and failures are known
from the leaves up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa
from sqlglot import exp

from headrace.errors import BadSchema, UnknownColumn
from headrace.expressions import (
    arithmetic,
    casts,
    functions,
    lambdas,
    literals,
    nested_values,
    time_units,
    type_rules,
)
from headrace.expressions.parser import COMPARISONS
from headrace.expressions.refusals import NOT_DETERMINISTIC
from headrace.expressions.type_rules import (
    BINARY,
    BOOLEAN,
    DOUBLE,
    INT,
    INTERVAL,
    STRING,
    VOID,
)
from headrace.expressions.typed_expression import (
    ExpressionRefused,
    TypedExpression,
    branches,
    either,
    infallible,
    leaf,
    when,
)
from headrace.types.ddl import TYPE_KEY, parse_columns
from headrace.types.schema import is_spatial, is_variant, type_name

_ARITHMETIC = {exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/", exp.Mod: "%"}
_BITWISE = {exp.BitwiseAnd: "&", exp.BitwiseOr: "|", exp.BitwiseXor: "^"}
_SHIFTS = {exp.BitwiseLeftShift: "<<", exp.BitwiseRightShift: ">>"}
_OPERATORS: dict[type[exp.Expr], Callable[[TypedExpression, TypedExpression], TypedExpression]] = {
    **{kind: partial(arithmetic.arithmetic, sign) for kind, sign in _ARITHMETIC.items()},
    exp.IntDiv: arithmetic.whole_division,
    **{kind: partial(arithmetic.bitwise, sign) for kind, sign in _BITWISE.items()},
    **{kind: partial(arithmetic.shift, sign) for kind, sign in _SHIFTS.items()},
    exp.DPipe: lambda left, right: functions.concat("||", (left, right)),
}
_COMPARISONS = {**COMPARISONS, exp.NullSafeEQ: "<=>"}
_OTHER_PRECEDENCE = (*_BITWISE, *_SHIFTS, exp.DPipe)
_PREDICATES = (
    exp.Is,
    exp.In,
    exp.Between,
    exp.Like,
    exp.ILike,
    exp.RegexpLike,
    exp.Not,
    exp.NullSafeNEQ,
)
_DAY_UNITS = ("DAY", "WEEK")
_TIME_UNITS = (*_DAY_UNITS, "HOUR", "MINUTE", "SECOND", "MILLISECOND", "MICROSECOND")
_MONTH_UNITS = ("YEAR", "MONTH")


class TypeChecker:
    """Checks one expression over one schema. `columns` has those it reads, in the order of their
    occurrence.
    """

    def __init__(self, schema: pa.Schema, *, where: str) -> None:
        self.schema = schema
        self.where = where
        self.columns: dict[str, None] = {}
        self._fields = {field.name.lower(): field for field in schema}
        self._variables: dict[str, TypedExpression] = {}

    def check(self, node: exp.Expr) -> TypedExpression:
        """The typed expression of a node. Raises ExpressionRefused if it is not allowed."""
        handler = self._handlers.get(type(node))
        if handler is None:
            raise _not_allowed(_node_text(node))
        return handler(self, node)

    def _both(self, node: exp.Expr) -> tuple[TypedExpression, TypedExpression]:
        return self.check(node.this), self.check(node.expression)

    # Leaves

    def _column(self, node: exp.Column) -> TypedExpression:
        """A column, a parameter of a lambda, or a member of either: `address.city`."""
        parts = node.parts
        name = parts[0].name
        field = self._fields.get(name.lower())
        variable = self._variables.get(name.lower())
        if field is None and name.lower() in NOT_DETERMINISTIC and len(parts) == 1:
            raise _not_allowed(f"{name.lower()}, which is not deterministic,")
        if variable is not None:
            operand = variable
        elif field is None or not isinstance(parts[0], exp.Identifier):
            raise UnknownColumn(name, self.schema.names, where=self.where)
        else:
            self.columns[field.name] = None
            operand = leaf(field.type, literals.quoted_name(field.name), column=field.name)
        for part in parts[1:]:
            operand = self._member(operand, part.name)
        return operand

    def _variable(self, node: exp.Identifier) -> TypedExpression:
        """A parameter of a lambda, in its body."""
        operand = self._variables.get(node.name.lower())
        if operand is None:
            raise UnknownColumn(node.name, self.schema.names, where=self.where)
        return operand

    def _with_variables(self, node: exp.Expr, variables: lambdas.Variables) -> TypedExpression:
        """A node within a lambda: its parameters hide columns and outer parameters."""
        outer = self._variables
        self._variables = {**outer, **variables}
        try:
            return self.check(node)
        finally:
            self._variables = outer

    def _member(self, operand: TypedExpression, name: str) -> TypedExpression:
        kind = operand.type
        if not pa.types.is_struct(kind) or is_variant(kind) or is_spatial(kind):
            raise ExpressionRefused(
                f"{type_name(kind)} has no member {name!r}.", "only a STRUCT has members."
            )
        member = next((field for field in kind if field.name.lower() == name.lower()), None)
        if member is None:
            raise UnknownColumn(
                name, [field.name for field in kind], where=f"{self.where}: {operand.sql}"
            )
        return infallible(
            member.type,
            "{0}." + literals.quoted_name(member.name).replace("{", "{{").replace("}", "}}"),
            operand,
        )

    def _dot(self, node: exp.Dot) -> TypedExpression:
        if not isinstance(node.expression, exp.Identifier):
            raise ExpressionRefused(
                f"{node.sql('spark')} is no column.", "call functions by their plain name."
            )
        return self._member(self.check(node.this), node.expression.name)

    def _literal(self, node: exp.Literal) -> TypedExpression:
        if node.is_string:
            return leaf(STRING, literals.quoted_text(node.this), value=node.this)
        return _number(str(node.this))

    def _boolean(self, node: exp.Boolean) -> TypedExpression:
        return leaf(BOOLEAN, "true" if node.this else "false", value=bool(node.this))

    def _null(self, _: exp.Null) -> TypedExpression:
        return functions.NULL

    def _hex(self, node: exp.HexString) -> TypedExpression:
        digits = str(node.this)
        return leaf(
            BINARY,
            f"X'{digits}'",
            value=bytes.fromhex(digits if len(digits) % 2 == 0 else f"0{digits}"),
        )

    def _raw(self, node: exp.RawString) -> TypedExpression:
        return leaf(STRING, literals.quoted_text(node.this), value=node.this)

    def _interval(self, node: exp.Interval) -> TypedExpression:
        """An interval of one unit, such as INTERVAL '1' DAY."""
        unit = node.args.get("unit")
        value = node.this
        if (
            not isinstance(unit, exp.Var)
            or not isinstance(value, exp.Literal)
            or not re.fullmatch(r"[+-]?\d{1,12}(\.\d{1,6})?", value.this)
        ):
            raise ExpressionRefused(
                "An interval must be a number and one unit, written out.",
                "write it as in INTERVAL '90' MINUTE; add up what has several units.",
            )
        name = unit.name.upper().removesuffix("S")
        if name not in _TIME_UNITS and name not in _MONTH_UNITS:
            raise ExpressionRefused(
                f"An interval has no unit {unit.name!r}.",
                f"use one of {', '.join((*_MONTH_UNITS, *_TIME_UNITS)).lower()}.",
            )
        if "." in value.this and name != "SECOND":
            raise ExpressionRefused(
                f"An interval of {value.this} {name.lower()}s is not whole.", "use a smaller unit."
            )
        kind = type_rules.MONTHS if name in _MONTH_UNITS else INTERVAL
        return leaf(
            kind, f"INTERVAL {value.this} {name}", value=value.this, whole_days=name in _DAY_UNITS
        )

    # Operators

    def _paren(self, node: exp.Paren) -> TypedExpression:
        return self.check(node.this)

    def _negative(self, node: exp.Neg) -> TypedExpression:
        if isinstance(node.this, exp.Literal) and not node.this.is_string:
            return _number(f"-{node.this.this}")
        return arithmetic.negate(self.check(node.this))

    def _operator(self, node: exp.Binary) -> TypedExpression:
        if isinstance(node, _OTHER_PRECEDENCE):
            _require_parentheses(node)
        return _OPERATORS[type(node)](*self._both(node))

    def _bitwise_not(self, node: exp.BitwiseNot) -> TypedExpression:
        operand = self.check(node.this)
        if not type_rules.is_integer(operand.type):
            raise ExpressionRefused(f"~ takes whole numbers, not {type_name(operand.type)}.")
        return infallible(operand.type, "(~ {0})", operand)

    def _comparison(self, node: exp.Binary) -> TypedExpression:
        for operand in (node.this, node.expression):
            if isinstance(operand, (*_PREDICATES, *_COMPARISONS)):
                raise ExpressionRefused(
                    f"What {node.sql('spark')!r} compares is not plain.",
                    "put parentheses around the inner comparison.",
                )
        return functions.comparison(_COMPARISONS[type(node)], *self._both(node))

    def _distinct(self, node: exp.NullSafeNEQ) -> TypedExpression:
        return infallible(BOOLEAN, "(NOT {0})", functions.comparison("<=>", *self._both(node)))

    def _and(self, node: exp.And) -> TypedExpression:
        """A failure of the right side counts only if the left side does not decide."""
        left, right = (functions.check_boolean(each, what="AND") for each in self._both(node))
        return _logical(
            "AND", left, right, when(f"coalesce({left.safe}, true)", right.failed, None)
        )

    def _or(self, node: exp.Or) -> TypedExpression:
        left, right = (functions.check_boolean(each, what="OR") for each in self._both(node))
        return _logical(
            "OR", left, right, when(f"coalesce({left.safe}, false)", None, right.failed)
        )

    def _not(self, node: exp.Not) -> TypedExpression:
        return infallible(
            BOOLEAN, "(NOT {0})", functions.check_boolean(self.check(node.this), what="NOT")
        )

    def _is(self, node: exp.Is) -> TypedExpression:
        operand = self.check(node.this)
        if isinstance(node.expression, exp.Null):
            return infallible(BOOLEAN, "({0} IS NULL)", operand)
        if isinstance(node.expression, exp.Boolean):
            return infallible(
                BOOLEAN,
                f"({{0}} IS {str(bool(node.expression.this)).upper()})",
                functions.check_boolean(operand, what="IS"),
            )
        raise ExpressionRefused(
            f"{node.sql('spark')!r} is not allowed.", "write IS NULL, IS TRUE or IS FALSE."
        )

    def _in(self, node: exp.In) -> TypedExpression:
        if not node.expressions:
            raise ExpressionRefused(
                "IN takes a list of values, not a query.",
                "write the values out, or join with a table.",
            )
        value = self.check(node.this)
        pairs = [
            functions.comparable_sides(value, self.check(each), what="=")
            for each in node.expressions
        ]
        casts.common_type([value, *(right for _, right in pairs)], what="IN")
        items = ", ".join(f"{{{position}}}" for position in range(1, len(pairs) + 1))
        widest = next((left for left, _ in pairs if left is not value), value)
        return infallible(BOOLEAN, f"({{0}} IN ({items}))", widest, *(right for _, right in pairs))

    def _between(self, node: exp.Between) -> TypedExpression:
        value = self.check(node.this)
        low, high = self.check(node.args["low"]), self.check(node.args["high"])
        above, below = (
            functions.comparison(">=", value, low),
            functions.comparison("<=", value, high),
        )
        return _logical(
            "AND", above, below, when(f"coalesce({above.safe}, true)", high.failed, None)
        )

    def _like(self, node: exp.Like | exp.ILike | exp.RegexpLike) -> TypedExpression:
        word = {exp.Like: "LIKE", exp.ILike: "ILIKE", exp.RegexpLike: "RLIKE"}[type(node)]
        negated = bool(node.args.get("negate"))
        quantifier = node.expression
        if not isinstance(quantifier, exp.Any | exp.All):
            return functions.like(
                word, self.check(node.this), self.check(quantifier), negated=negated
            )
        if word == "RLIKE":
            raise ExpressionRefused("RLIKE takes one pattern.", "write 'a|b' for either of two.")
        inner = quantifier.this
        patterns = inner.expressions if isinstance(inner, exp.Tuple) else [inner.unnest()]
        value = self.check(node.this)
        checked = [self.check(each) for each in patterns]
        for each in checked:
            functions.like(word, value, each, negated=negated)
        slots = ", ".join(f"{{{position}}}" for position in range(1, len(checked) + 1))
        either_or_all = "ANY" if isinstance(quantifier, exp.Any) else "ALL"
        no = "NOT " if negated else ""
        return infallible(BOOLEAN, f"({{0}} {no}{word} {either_or_all} ({slots}))", value, *checked)

    def _escape(self, node: exp.Escape) -> TypedExpression:
        """`text LIKE pattern ESCAPE '/'`."""
        like, character = node.this, node.expression
        if not isinstance(like, exp.Like | exp.ILike) or not (
            isinstance(character, exp.Literal) and len(character.this) == 1
        ):
            raise ExpressionRefused(
                f"{node.sql('spark')!r} is not allowed.",
                "write it as in \"name LIKE '10/%' ESCAPE '/'\".",
            )
        value, pattern = self.check(like.this), self.check(like.expression)
        if value.type != STRING or not isinstance(pattern.value, str):
            raise ExpressionRefused(
                "LIKE takes a text and a pattern that is written out.",
                "cast what is no text: CAST(… AS STRING).",
            )
        literals.escaped_pattern(pattern.value, character.this)
        word = "LIKE" if isinstance(like, exp.Like) else "ILIKE"
        no = "NOT " if like.args.get("negate") else ""
        quoted = literals.quoted_text(character.this)
        return infallible(BOOLEAN, f"({{0}} {no}{word} {{1}} ESCAPE {quoted})", value, pattern)

    def _any(self, _: exp.Any) -> TypedExpression:
        return functions.call("any", [])

    def _bracket(self, node: exp.Bracket) -> TypedExpression:
        if len(node.expressions) != 1 or isinstance(node.expressions[0], exp.Slice):
            raise ExpressionRefused(
                "Brackets take one index.", "use slice(items, 1, 3) for several elements."
            )
        operand = self.check(node.this)
        index = node.expressions[0]
        if pa.types.is_struct(operand.type) and isinstance(index, exp.Literal) and index.is_string:
            return self._member(operand, index.this)
        return functions.element(operand, self.check(index), from_zero=True)

    # Conditions, casts and calls

    def _case(self, node: exp.Case) -> TypedExpression:
        value = None if node.this is None else self.check(node.this)
        conditions = [self._condition(value, each) for each in node.args["ifs"]]
        default = node.args.get("default")
        results = [self.check(each.args["true"]) for each in node.args["ifs"]]
        others = [] if default is None else [self.check(default)]
        kind, operands = functions.alternatives([*results, *others], what="CASE")
        return branches(
            kind, conditions, operands[: len(results)], operands[-1] if others else None
        )

    def _condition(self, value: TypedExpression | None, node: exp.If) -> TypedExpression:
        test = self.check(node.this)
        return (
            functions.check_boolean(test, what="CASE")
            if value is None
            else functions.comparison("=", value, test)
        )

    def _if(self, node: exp.If) -> TypedExpression:
        otherwise = node.args.get("false")
        return functions.if_expression(
            self.check(node.this),
            self.check(node.args["true"]),
            functions.NULL if otherwise is None else self.check(otherwise),
        )

    def _cast(self, node: exp.Cast) -> TypedExpression:
        """CAST and TRY_CAST. sqlglot parses `DATE '2026-01-31'` as Cast, CAST as TryCast, and
        TRY_CAST as TryCast with `safe`.
        """
        try:
            field = parse_columns(f"x {node.to.sql('spark')}")[0]
        except BadSchema as error:
            raise ExpressionRefused(
                f"The type {node.to.sql('spark')} is not known.", error.fix
            ) from None
        spelled = (field.metadata or {}).get(TYPE_KEY, b"").decode()
        if spelled not in ("", type_name(field.type)) or field.type == VOID:
            raise ExpressionRefused(
                f"A cast to {node.to.sql('spark')} is not allowed.",
                "use STRING, or a type without a length.",
            )
        kind = field.type
        operand = self.check(node.this)
        if not isinstance(node, exp.TryCast) and isinstance(node.this, exp.Literal):
            return casts.typed_literal(operand, kind)
        return casts.try_cast(operand, kind) if node.args.get("safe") else casts.cast(operand, kind)

    def _extract(self, node: exp.Extract) -> TypedExpression:
        return time_units.part(node.this.name, self.check(node.expression), what="EXTRACT")

    def _substring(self, node: exp.Substring) -> TypedExpression:
        return functions.call(
            "substring",
            [
                self.check(each)
                for each in (node.this, node.args.get("start"), node.args.get("length"))
                if each is not None
            ],
        )

    def _trim(self, node: exp.Trim) -> TypedExpression:
        text = functions.call("trim", [self.check(node.this)])
        if node.expression is None:
            return text
        side = str(node.args.get("position") or "BOTH").upper()
        return infallible(
            STRING,
            f"trim({side} {{1}} FROM {{0}})",
            *functions.check_strings("trim", [self.check(node.this), self.check(node.expression)]),
        )

    def _call(self, node: exp.Anonymous) -> TypedExpression:
        name = str(node.this).lower()
        arguments = node.expressions
        if name in lambdas.LAMBDA_FUNCTIONS:
            return lambdas.call(name, arguments, self._with_variables)
        if any(isinstance(each, exp.Lambda) for each in arguments):
            raise ExpressionRefused(
                f"{name} takes no lambda.",
                f"functions that do are {', '.join(sorted(lambdas.LAMBDA_FUNCTIONS))}.",
            )
        if name == "struct":
            return nested_values.struct_of(
                [self._struct_member(position, each) for position, each in enumerate(arguments, 1)]
            )
        if time_units.is_call(name, len(arguments)):
            unit, *others = arguments
            return time_units.call(name, unit.name, [self.check(each) for each in others])
        if name == "position" and arguments and isinstance(arguments[0], exp.In):
            arguments = [arguments[0].this, arguments[0].args["field"]]
        name = {"position": "locate", "substr": "substring"}.get(name, name)
        return functions.call(name, [self.check(argument) for argument in arguments])

    def _transform(self, node: exp.Transform) -> TypedExpression:
        """Sqlglot reads this one function as a node of its own."""
        arguments = [each for each in (node.this, node.expression) if each is not None]
        return lambdas.call("transform", arguments, self._with_variables)

    def _struct_member(self, position: int, node: exp.Expr) -> tuple[str, TypedExpression]:
        if isinstance(node, exp.Alias):
            return node.alias, self.check(node.this)
        operand = self.check(node)
        return operand.column or f"col{position}", operand

    _handlers: ClassVar[dict[type[exp.Expr], Callable[[TypeChecker, Any], TypedExpression]]] = {
        exp.Column: _column,
        exp.Identifier: _variable,
        exp.Dot: _dot,
        exp.Literal: _literal,
        exp.Boolean: _boolean,
        exp.Null: _null,
        exp.HexString: _hex,
        exp.RawString: _raw,
        exp.Interval: _interval,
        exp.Paren: _paren,
        exp.Neg: _negative,
        **dict.fromkeys(_OPERATORS, _operator),
        exp.BitwiseNot: _bitwise_not,
        **dict.fromkeys(_COMPARISONS, _comparison),
        exp.NullSafeNEQ: _distinct,
        exp.And: _and,
        exp.Or: _or,
        exp.Not: _not,
        exp.Is: _is,
        exp.In: _in,
        exp.Between: _between,
        exp.Like: _like,
        exp.ILike: _like,
        exp.RegexpLike: _like,
        exp.Escape: _escape,
        exp.Any: _any,
        exp.Bracket: _bracket,
        exp.Case: _case,
        exp.If: _if,
        exp.Cast: _cast,
        exp.TryCast: _cast,
        exp.Extract: _extract,
        exp.Substring: _substring,
        exp.Trim: _trim,
        exp.Anonymous: _call,
        exp.Transform: _transform,
    }


def _number(text: str) -> TypedExpression:
    """A number with the type that Spark gives it: INT or BIGINT if it fits, else DECIMAL; DOUBLE if
    it has an exponent.
    """
    if "e" in text.lower():
        return leaf(DOUBLE, f"({text})", value=float(text))
    value = Decimal(text)
    if "." in text or not -(2**63) <= value < 2**63:
        kind = type_rules.literal_decimal_type(value)
        if kind.precision > type_rules.MAX_DECIMAL_DIGITS:
            raise ExpressionRefused(f"The number {text} has more than 38 digits.")
        return leaf(kind, f"({text})", value=value)
    return leaf(
        INT if -(2**31) <= value < 2**31 else type_rules.BIGINT,
        f"({text})" if value < 0 else text,
        value=int(value),
    )


def _logical(
    word: str, left: TypedExpression, right: TypedExpression, right_failed: str | None
) -> TypedExpression:
    return TypedExpression(
        BOOLEAN,
        f"({left.sql} {word} {right.sql})",
        f"({left.safe} {word} {right.safe})",
        either(left.failed, right_failed),
    )


def _require_parentheses(node: exp.Expr) -> None:
    """Raise where operators are mixed whose precedence Spark and sqlglot disagree on."""
    for operand in (node.this, node.expression):
        mixed = isinstance(operand, (*_OTHER_PRECEDENCE, *_ARITHMETIC, exp.IntDiv)) and type(
            operand
        ) is not type(node)
        if mixed:
            raise ExpressionRefused(
                f"{node.sql('spark')!r} can be understood in two ways.",
                "put parentheses around its parts.",
            )


def _not_allowed(what: str) -> ExpressionRefused:
    return ExpressionRefused(
        f"{what} is not allowed in an expression.",
        "use columns, literals, operators and functions of one row; Stream.df() does the rest.",
    )


def _node_text(node: exp.Expr) -> str:
    """How errors call a node that is not allowed."""
    names: Sequence[tuple[Any, str]] = (
        ((exp.Subquery, exp.Select, exp.Exists), "A subquery"),
        (exp.Window, "A window function"),
        (exp.Star, "*"),
        (exp.Lambda, "A lambda outside of a function that takes one"),
        (exp.Alias, "A name (AS)"),
        (exp.Distinct, "DISTINCT"),
        (exp.Concat, "Two texts side by side"),
        (exp.Array, "A bracket behind array(…), for which there is get(array(…), 0),"),
    )
    return next(
        (name for kind, name in names if isinstance(node, kind)),
        f"{type(node).__name__} ({node.sql('spark')})",
    )
