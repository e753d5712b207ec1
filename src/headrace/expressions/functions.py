"""Calls of functions: by a signature of `catalogue`, or by a rule of their own (alternatives,
elements, casts by name, patterns with groups, structs).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import pyarrow as pa

from headrace.errors import BadSchema, nearest
from headrace.expressions import arithmetic, casts, literals, type_rules
from headrace.expressions.catalogue import (
    AGGREGATES,
    FUNCTIONS,
    GENERATORS,
    NON_DETERMINISTIC,
    WINDOW_FUNCTIONS,
)
from headrace.expressions.type_rules import BOOLEAN, INT, STRING
from headrace.expressions.typed_expression import (
    ExpressionRefused,
    TypedExpression,
    branches,
    either,
    failed_any,
    fallible,
    infallible,
    leaf,
    when,
)
from headrace.types.ddl import parse_columns
from headrace.types.schema import type_name

# Calls by a signature of the catalogue


_LINE = re.compile(
    r"(?P<name>\w+)\((?P<parameters>.*?)\) -> (?P<result>[^=]+?)(?: = (?P<safe>.+))?"
)
_WITHIN = re.compile(r"\{(\d):within\}")
MAX_MICROS = 9_223 * 10**15
"""The largest timestamp for safe forms: twelve years before the last microsecond of Spark."""
_CLASSES = {
    "NUMBER": type_rules.is_number,
    "INTEGER": type_rules.is_integer,
    "TIME": type_rules.is_time,
    "ANY": type_rules.is_comparable,
}
_SMALL_INTEGERS = (pa.int8(), pa.int16(), type_rules.INT)


@dataclass(frozen=True)
class Parameter:
    """One parameter: the types it takes, as text, and the check that a literal must pass."""

    takes: tuple[str, ...]
    check: str | None
    optional: bool


@dataclass(frozen=True)
class Signature:
    """One line of the catalogue."""

    name: str
    parameters: tuple[Parameter, ...]
    repeats: bool
    result: str
    safe: str | None

    def accepts(self, count: int) -> bool:
        required = sum(not each.optional for each in self.parameters)
        return required <= count and (self.repeats or count <= len(self.parameters))

    def parameter(self, position: int) -> Parameter:
        return self.parameters[min(position, len(self.parameters) - 1)]

    def __str__(self) -> str:
        shown = [
            "|".join(each.takes) if not each.optional else f"[{'|'.join(each.takes)}]"
            for each in self.parameters
        ]
        return f"{self.name}({', '.join(shown)}{', …' if self.repeats else ''})"


@dataclass
class Binding:
    """The types that T, K and V stand for in one call."""

    types: dict[str, pa.DataType] = field(default_factory=dict)

    def fit(self, operand: TypedExpression, pattern: str) -> TypedExpression | None:
        """The argument as a parameter takes it, maybe with a cast that cannot fail; None if it does
        not fit.
        """
        if pattern in _CLASSES:
            return operand if _CLASSES[pattern](operand.type) else None
        if pattern in self.types or len(pattern) == 1:
            bound = self.types.setdefault(pattern, operand.type)
            if operand.type == bound:
                return operand
            return (
                casts.cast(operand, bound)
                if type_rules.least_common_type([operand.type, bound]) == bound
                and not casts.can_fail(operand.type, bound)
                else None
            )
        if "<" in pattern:
            return operand if self._nested(operand.type, pattern) else None
        kind = _type(pattern)
        if operand.type == kind or (kind == type_rules.INT and operand.type in _SMALL_INTEGERS):
            return operand
        if kind == type_rules.DOUBLE and type_rules.is_number(operand.type):
            return casts.cast(operand, kind)
        return (
            casts.cast(operand, kind)
            if type_rules.is_time(kind) and type_rules.is_time(operand.type)
            else None
        )

    def _nested(self, kind: pa.DataType, pattern: str) -> bool:
        inner = pattern[pattern.index("<") + 1 : -1]
        if pattern.startswith("ARRAY"):
            return bool(pa.types.is_list(kind)) and self._inner(kind.value_type, inner)
        keys, values = (each.strip() for each in inner.split(","))
        return (
            bool(pa.types.is_map(kind))
            and self._inner(kind.key_type, keys)
            and self._inner(kind.item_type, values)
        )

    def _inner(self, kind: pa.DataType, pattern: str) -> bool:
        if "<" in pattern:
            return self._nested(kind, pattern)
        return bool(
            (self.types.setdefault(pattern, kind) if len(pattern) == 1 else _type(pattern)) == kind
        )

    def result(self, pattern: str) -> pa.DataType:
        if pattern in self.types:
            return self.types[pattern]
        if pattern.startswith("ARRAY<"):
            return pa.list_(self.result(pattern[6:-1]))
        return _type(pattern)


def call_by_signature(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """A call of a function of the catalogue. Raises ExpressionRefused, with what the function
    takes, if the arguments do not fit.
    """
    matching = signatures().get(name)
    if matching is None:
        raise _unknown_function(name)
    for signature in matching:
        if signature.accepts(len(arguments)):
            result = _match_signature(signature, arguments)
            if result is not None:
                return result
    types = ", ".join(type_name(each.type) for each in arguments)
    raise ExpressionRefused(
        f"{name}({types}) does not fit.",
        f"it takes {' or '.join(map(str, matching))}; cast what does not fit, as in CAST(… AS"
        " STRING).",
    )


def _match_signature(
    signature: Signature, arguments: Sequence[TypedExpression]
) -> TypedExpression | None:
    binding = Binding()
    fitted: list[TypedExpression] = []
    for position, argument in enumerate(arguments):
        options = (
            binding.fit(argument, pattern) for pattern in signature.parameter(position).takes
        )
        operand = next((each for each in options if each is not None), None)
        if operand is None:
            return None
        fitted.append(operand)
    for position, argument in enumerate(arguments):
        if wanted := signature.parameter(position).check:
            literals.check(wanted, argument, function=signature.name)
    kind = binding.result(signature.result)
    slots = ", ".join(f"{{{index}}}" for index in range(len(fitted)))
    template = f"{signature.name}({slots})"
    if signature.safe is None:
        return infallible(kind, template, *fitted)
    safe = _WITHIN.sub(
        rf"unix_micros({{\1}}) BETWEEN -{MAX_MICROS} AND {MAX_MICROS}",
        signature.safe.replace("{*}", slots),
    )
    return fallible(kind, template, safe, *fitted)


def _unknown_function(name: str) -> ExpressionRefused:
    if name in NON_DETERMINISTIC:
        return ExpressionRefused(
            f"{name} is not deterministic, and a replay must give the same rows.",
            "put the time or the number into the rows when they are appended.",
        )
    if name in AGGREGATES:
        return ExpressionRefused(
            f"{name} looks at more than one row.",
            "use group_by(…).aggregate(…) with hr.agg, as in"
            f" hr.agg.{'sum' if name != 'count' else 'count'}(…).",
        )
    if name in WINDOW_FUNCTIONS:
        return ExpressionRefused(
            f"{name} looks at more than one row.", "use window(…) on the stream."
        )
    if name in GENERATORS:
        return ExpressionRefused(
            f"{name} makes several rows of one, and an expression gives one value.",
            "use the operation of a stream: explode('tags', 'tag'), posexplode or inline, or"
            " flat_map with a function.",
        )
    return ExpressionRefused(
        f"There is no function {name!r} for expressions:"
        f" {nearest(name, [*signatures(), *SPECIAL_NAMES])}",
        "use another, or Stream.df() for anything Spark can do.",
    )


SPECIAL_NAMES: set[str] = set()
"""The names of functions with rules of their own, for suggestions."""


@cache
def signatures() -> dict[str, tuple[Signature, ...]]:
    """The catalogue's signatures, by function."""
    by_name: dict[str, tuple[Signature, ...]] = {}
    for text in FUNCTIONS.replace("\n    = ", " = ").splitlines():
        if text and not text.startswith("#"):
            signature = _parse_signature(text)
            by_name[signature.name] = (*by_name.get(signature.name, ()), signature)
    return by_name


def _parse_signature(text: str) -> Signature:
    match = _LINE.fullmatch(text)
    assert match is not None, f"a line of the catalogue cannot be read: {text}"
    parameters = match["parameters"]
    repeats = parameters.endswith("...")
    return Signature(
        match["name"],
        tuple(_parameters(parameters.removesuffix("..."))),
        repeats,
        match["result"],
        match["safe"],
    )


def _parameters(text: str) -> Iterator[Parameter]:
    for part in re.findall(r"(?:[^,<]|<(?:[^<>]|<[^<>]*>)*>)+", text):
        stripped = part.strip()
        optional = stripped.startswith("[")
        takes, _, check = stripped.strip("[]").partition("#")
        yield Parameter(tuple(takes.split("|")), check or None, optional)


@cache
def _type(name: str) -> pa.DataType:
    return parse_columns(f"x {name}")[0].type


Handler = Callable[[str, Sequence[TypedExpression]], TypedExpression]
NULL = leaf(type_rules.VOID, "NULL", value=None)


def call(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """A call of any function but struct, if and CASE, which the type checker handles."""
    if name not in _SPECIAL:
        return call_by_signature(name, arguments)
    handler, min_arguments, max_arguments = _SPECIAL[name]
    if not min_arguments <= len(arguments) <= max_arguments:
        if min_arguments == max_arguments:
            expected = f"{min_arguments}"
        elif max_arguments == _MANY:
            expected = f"{min_arguments} or more"
        else:
            expected = f"{min_arguments} to {max_arguments}"
        raise ExpressionRefused(
            f"{name} was given {len(arguments)} arguments.", f"it takes {expected}."
        )
    return handler(name, arguments)


def common_type(operands: Sequence[TypedExpression], *, what: str) -> pa.DataType:
    kind = type_rules.least_common_type(each.type for each in operands)
    if kind is None:
        shown = ", ".join(dict.fromkeys(type_name(each.type) for each in operands))
        raise ExpressionRefused(
            f"The values of {what} have no type in common: {shown}.",
            "cast them to the same type, as in CAST(… AS STRING).",
        )
    return kind


def alternatives(
    operands: Sequence[TypedExpression], *, what: str
) -> tuple[pa.DataType, list[TypedExpression]]:
    """Values of which one is the result, and their type. Times are cast to it; numbers are widened
    by Spark.
    """
    kind = common_type(operands, what=what)
    return kind, [
        (
            casts.cast(each, kind, explicit=False)
            if type_rules.is_time(kind) and not each.is_null
            else each
        )
        for each in operands
    ]


def coalesce(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """COALESCE: values are evaluated in order, up to the first that is not null."""
    kind, operands = alternatives(arguments, what=name)
    failed = None
    for operand in reversed(operands):
        failed = either(operand.failed, when(f"{operand.safe} IS NULL", failed, None))
    return TypedExpression(
        kind,
        f"coalesce({', '.join(each.sql for each in operands)})",
        f"coalesce({', '.join(each.safe for each in operands)})",
        failed,
    )


def if_expression(
    condition: TypedExpression,
    then: TypedExpression,
    otherwise: TypedExpression,
    *,
    what: str = "if",
) -> TypedExpression:
    check_boolean(condition, what=what)
    kind, (then, otherwise) = alternatives([then, otherwise], what=what)
    return branches(kind, [condition], [then], otherwise)


def check_boolean(operand: TypedExpression, *, what: str) -> TypedExpression:
    if operand.type not in (BOOLEAN, type_rules.VOID):
        raise ExpressionRefused(
            f"A condition of {what} is {type_name(operand.type)}, not BOOLEAN.",
            "compare it with something, as in 'amount > 0'.",
        )
    return operand


def comparison(sign: str, left: TypedExpression, right: TypedExpression) -> TypedExpression:
    """A comparison. A bare NULL on either side is refused, but for <=>."""
    left, right = comparable_sides(left, right, what=sign)
    return infallible(BOOLEAN, f"({{0}} {sign} {{1}})", left, right)


def comparable_sides(
    left: TypedExpression, right: TypedExpression, *, what: str
) -> tuple[TypedExpression, TypedExpression]:
    """Two values that are compared, with a text literal converted to the other side's type."""
    if what != "<=>" and (left.is_null or right.is_null):
        raise ExpressionRefused(
            f"Nothing is {what} NULL: the result is always null.", "write IS NULL or IS NOT NULL."
        )
    if left.type == STRING and left.is_literal and right.type not in (STRING, type_rules.VOID):
        left = casts.literal_as(left, right.type)
    elif right.type == STRING and right.is_literal and left.type not in (STRING, type_rules.VOID):
        right = casts.literal_as(right, left.type)
    kind = type_rules.least_common_type([left.type, right.type])
    if kind is None or not type_rules.is_comparable(kind):
        raise ExpressionRefused(
            f"{type_name(left.type)} {what} {type_name(right.type)} cannot be compared.",
            "cast one side to the other's type.",
        )
    if type_rules.is_time(kind):
        return casts.cast(left, kind, explicit=False), casts.cast(right, kind, explicit=False)
    return left, right


def element(
    sequence: TypedExpression, index: TypedExpression, *, from_zero: bool
) -> TypedExpression:
    """`items[0]` and `element_at(items, 1)`. An index outside of an array is a failure; a key that
    a map does not have gives null.
    """
    if pa.types.is_map(sequence.type):
        key = Binding({"K": sequence.type.key_type}).fit(index, "K")
        if key is None:
            raise ExpressionRefused(
                f"The map's keys are {type_name(sequence.type.key_type)}, not"
                f" {type_name(index.type)}.",
                "cast the key.",
            )
        return infallible(
            sequence.type.item_type,
            "{0}[{1}]" if from_zero else "element_at({0}, {1})",
            sequence,
            key,
        )
    if (
        not pa.types.is_list(sequence.type)
        or not type_rules.is_integer(index.type)
        or index.type == type_rules.BIGINT
    ):
        raise ExpressionRefused(
            f"{type_name(sequence.type)} has no element at a {type_name(index.type)}.",
            "take elements of an ARRAY by an INT, of a MAP by its key.",
        )
    if from_zero:
        outside = "({1} < 0 OR {1} >= size({0}))"
        return fallible(
            sequence.type.value_type,
            "{0}[{1}]",
            "get({0}, {1})",
            sequence,
            index,
            failed_if=outside,
        )
    outside = "({1} = 0 OR abs(CAST({1} AS BIGINT)) > size({0}))"
    return fallible(
        sequence.type.value_type,
        "element_at({0}, {1})",
        "try_element_at({0}, nullif({1}, 0))",
        sequence,
        index,
        failed_if=outside,
    )


def concat(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """Texts, bytes or arrays, concatenated; null if one is null."""
    kind = common_type(arguments, what=name)
    if kind not in (STRING, type_rules.BINARY) and not pa.types.is_list(kind):
        raise ExpressionRefused(
            f"{name} takes texts, bytes or arrays, not {type_name(kind)}.",
            "cast numbers and times: CAST(… AS STRING).",
        )
    return infallible(
        kind,
        f"concat({', '.join(f'{{{position}}}' for position in range(len(arguments)))})",
        *arguments,
    )


def _same_type(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """`greatest`, `least` and `array`, whose arguments have one type."""
    kind, operands = alternatives(arguments, what=name)
    slots = ", ".join(f"{{{index}}}" for index in range(len(operands)))
    return infallible(pa.list_(kind) if name == "array" else kind, f"{name}({slots})", *operands)


def _nullif(_: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    left, right = comparable_sides(*arguments, what="=")
    return infallible(left.type, "nullif({0}, {1})", left, right)


def _nvl2(_: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    condition = infallible(BOOLEAN, "({0} IS NOT NULL)", arguments[0])
    return if_expression(condition, arguments[1], arguments[2], what="nvl2")


def _is_null(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    return infallible(BOOLEAN, f"({{0}} IS {'' if name == 'isnull' else 'NOT '}NULL)", arguments[0])


def _round(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    return arithmetic.round_number(name, arguments[0], arguments[1] if len(arguments) > 1 else None)


def _try_arithmetic(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """`try_add` and others, whose null is no failure."""
    sign = {
        "try_add": "+",
        "try_subtract": "-",
        "try_multiply": "*",
        "try_divide": "/",
        "try_mod": "%",
    }[name]
    result = arithmetic.arithmetic(sign, *arguments)
    return TypedExpression(result.type, result.safe, result.safe, failed_any(arguments))


def _cast_by_name(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    return casts.cast(arguments[0], parse_columns(f"x {name}")[0].type)


def _regexp_extract(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    group = arguments[2] if len(arguments) > 2 else leaf(INT, "1", value=1)
    for each in (arguments[1], group):
        literals.check("literal", each, function=name)
    groups = literals.count_groups(arguments[1].value)
    if not isinstance(group.value, int) or not 0 <= group.value <= groups:
        raise ExpressionRefused(
            f"The pattern {arguments[1].value!r} has {groups} groups, and {name} asks for"
            f" {group.value!r}.",
            "0 is the whole match.",
        )
    check_strings(name, arguments[:2])
    return infallible(STRING, f"{name}({{0}}, {{1}}, {group.value})", *arguments[:2])


def _regexp_replace(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    for each in arguments[1:]:
        literals.check("literal", each, function=name)
    literals.replacement(arguments[2].value, literals.count_groups(arguments[1].value))
    check_strings(name, arguments)
    return infallible(STRING, f"{name}({{0}}, {{1}}, {{2}})", *arguments)


def check_strings(name: str, arguments: Sequence[TypedExpression]) -> Sequence[TypedExpression]:
    for each in arguments:
        if each.type != STRING:
            raise ExpressionRefused(
                f"{name} takes texts, not {type_name(each.type)}.", "cast it: CAST(… AS STRING)."
            )
    return arguments


def _from_json(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    check_strings(name, arguments)
    literals.check("literal", arguments[1], function=name)
    try:
        fields = parse_columns(str(arguments[1].value))
    except BadSchema as error:
        raise ExpressionRefused(
            f"The schema of {name} cannot be read: {error.message}", error.fix
        ) from None
    return infallible(pa.struct(fields), f"{name}({{0}}, {{1}})", *arguments)


def _to_json(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    if not pa.types.is_nested(arguments[0].type):
        raise ExpressionRefused(
            f"{name} takes structs, arrays and maps, not {type_name(arguments[0].type)}.",
            "wrap it: to_json(struct(…)).",
        )
    return infallible(STRING, f"{name}({{0}})", *arguments)


def _named_struct(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    if len(arguments) % 2:
        raise ExpressionRefused(
            f"{name} was given {len(arguments)} arguments.",
            "give names and values in turn: named_struct('a', 1, 'b', 2).",
        )
    for each in arguments[::2]:
        literals.check("literal", each, function=name)
    return struct_of(
        [
            (str(each.value), value)
            for each, value in zip(arguments[::2], arguments[1::2], strict=True)
        ]
    )


def struct_of(members: Sequence[tuple[str, TypedExpression]]) -> TypedExpression:
    """A struct of named values."""
    fields = [pa.field(name, operand.type) for name, operand in members]
    inner = ", ".join(
        f"{literals.quoted_text(name).replace('{', '{{').replace('}', '}}')}, {{{position}}}"
        for position, (name, _) in enumerate(members)
    )
    return infallible(
        pa.struct(fields), f"named_struct({inner})", *(operand for _, operand in members)
    )


def _positive_remainder(_: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    return arithmetic.positive_remainder(*arguments)


_MANY = 1000
_SPECIAL: dict[str, tuple[Handler, int, int]] = {
    "coalesce": (coalesce, 1, _MANY),
    "ifnull": (coalesce, 2, 2),
    "nvl": (coalesce, 2, 2),
    "nvl2": (_nvl2, 3, 3),
    "nullif": (_nullif, 2, 2),
    "isnull": (_is_null, 1, 1),
    "isnotnull": (_is_null, 1, 1),
    "equal_null": (lambda _, arguments: comparison("<=>", *arguments), 2, 2),
    "greatest": (_same_type, 2, _MANY),
    "least": (_same_type, 2, _MANY),
    "array": (_same_type, 1, _MANY),
    "concat": (concat, 1, _MANY),
    "element_at": (lambda _, arguments: element(*arguments, from_zero=False), 2, 2),
    "abs": (lambda _, arguments: arithmetic.absolute_value(arguments[0]), 1, 1),
    "negative": (lambda _, arguments: arithmetic.negate(arguments[0]), 1, 1),
    "mod": (lambda _, arguments: arithmetic.arithmetic("%", *arguments), 2, 2),
    "pmod": (_positive_remainder, 2, 2),
    "round": (_round, 1, 2),
    "bround": (_round, 1, 2),
    "floor": (lambda name, arguments: arithmetic.floor_or_ceil(name, arguments[0]), 1, 1),
    "ceil": (lambda name, arguments: arithmetic.floor_or_ceil(name, arguments[0]), 1, 1),
    "ceiling": (lambda name, arguments: arithmetic.floor_or_ceil(name, arguments[0]), 1, 1),
    "regexp_extract": (_regexp_extract, 2, 3),
    "regexp_replace": (_regexp_replace, 3, 3),
    "from_json": (_from_json, 2, 2),
    "to_json": (_to_json, 1, 1),
    "named_struct": (_named_struct, 2, _MANY),
    **dict.fromkeys(
        ("try_add", "try_subtract", "try_multiply", "try_divide", "try_mod"),
        (_try_arithmetic, 2, 2),
    ),
    **dict.fromkeys(
        (
            "boolean",
            "tinyint",
            "smallint",
            "int",
            "bigint",
            "float",
            "double",
            "string",
            "binary",
            "date",
            "timestamp",
            "decimal",
        ),
        (_cast_by_name, 1, 1),
    ),
}
SPECIAL_NAMES.update(_SPECIAL, ("if", "struct", "case", "cast", "try_cast", "extract"))
