"""Functions whose result or failure follows a rule of its own: alternatives, elements, casts by
name, patterns with groups, structs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import pyarrow as pa

from headrace.errors import BadSchema, nearest
from headrace.plan.expressions import arithmetic, casts, literals, type_rules
from headrace.plan.expressions.catalogue import (
    AGGREGATES,
    FUNCTIONS,
    NOT_THE_SAME_EACH_TIME,
    ROW_MAKERS,
    WINDOW_FUNCTIONS,
)
from headrace.plan.expressions.type_rules import BOOLEAN, INT, STRING
from headrace.plan.expressions.typed_expression import (
    ExpressionRefused,
    TypedExpression,
    branches,
    either,
    failed_any,
    leaf,
    partial,
    total,
    when,
)
from headrace.types.ddl import parse_columns
from headrace.types.schema import type_name

# Finds the line of `catalogue` that a call fits, and makes the call's piece of it.


_LINE = re.compile(
    r"(?P<name>\w+)\((?P<parameters>.*?)\) -> (?P<result>[^=]+?)(?: = (?P<safe>.+))?"
)
_WITHIN = re.compile(r"\{(\d):within\}")
MAX_MICROS = 9_223 * 10**15  # twelve years short of the last microsecond there is
_CLASSES = {
    "NUMBER": type_rules.is_number,
    "INTEGER": type_rules.is_integer,
    "TIME": type_rules.is_time,
    "ANY": type_rules.comparable,
}
_SMALL_INTEGERS = (pa.int8(), pa.int16(), type_rules.INT)


@dataclass(frozen=True)
class Parameter:
    """One argument: the types it takes, as text, and the check of a literal that it must pass."""

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
        least = sum(not each.optional for each in self.parameters)
        return least <= count and (self.repeats or count <= len(self.parameters))

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
    """What T, K and V stand for in one call."""

    types: dict[str, pa.DataType] = field(default_factory=dict)

    def fit(self, piece: TypedExpression, pattern: str) -> TypedExpression | None:
        """The argument as a parameter takes it, with a cast added that cannot fail unseen; None if
        it does not fit.
        """
        if pattern in _CLASSES:
            return piece if _CLASSES[pattern](piece.type) else None
        if pattern in self.types or len(pattern) == 1:
            return self._variable(piece, pattern)
        if "<" in pattern:
            return piece if self._nested(piece.type, pattern) else None
        return _plain(piece, _type(pattern))

    def _variable(self, piece: TypedExpression, name: str) -> TypedExpression | None:
        bound = self.types.setdefault(name, piece.type)
        if piece.type == bound:
            return piece
        return (
            casts.cast(piece, bound)
            if type_rules.common([piece.type, bound]) == bound
            and not casts.can_fail(piece.type, bound)
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


def _plain(piece: TypedExpression, kind: pa.DataType) -> TypedExpression | None:
    if piece.type == kind or (kind == type_rules.INT and piece.type in _SMALL_INTEGERS):
        return piece
    if kind == type_rules.DOUBLE and type_rules.is_number(piece.type):
        return casts.cast(piece, kind)
    return (
        casts.cast(piece, kind)
        if type_rules.is_time(kind) and type_rules.is_time(piece.type)
        else None
    )


def call_by_signature(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """The piece of a call, or Refused with what the function takes."""
    lines = signatures().get(name)
    if lines is None:
        raise _unknown(name)
    for line in lines:
        if line.accepts(len(arguments)) and (made := _called(line, arguments)) is not None:
            return made
    given = ", ".join(type_name(each.type) for each in arguments)
    raise ExpressionRefused(
        f"{name}({given}) does not fit.",
        f"it takes {' or '.join(map(str, lines))}; cast what does not fit, as in CAST(… AS"
        " STRING).",
    )


def _called(line: Signature, arguments: Sequence[TypedExpression]) -> TypedExpression | None:
    binding = Binding()
    fitted: list[TypedExpression] = []
    for position, argument in enumerate(arguments):
        options = (binding.fit(argument, pattern) for pattern in line.parameter(position).takes)
        piece = next((each for each in options if each is not None), None)
        if piece is None:
            return None
        fitted.append(piece)
    for position, argument in enumerate(arguments):
        if wanted := line.parameter(position).check:
            literals.check(wanted, argument, function=line.name)
    return _made(line, binding.result(line.result), fitted)


def _made(line: Signature, kind: pa.DataType, pieces: Sequence[TypedExpression]) -> TypedExpression:
    places = ", ".join(f"{{{position}}}" for position in range(len(pieces)))
    template = f"{line.name}({places})"
    if line.safe is None:
        return total(kind, template, *pieces)
    safe = _WITHIN.sub(
        rf"unix_micros({{\1}}) BETWEEN -{MAX_MICROS} AND {MAX_MICROS}",
        line.safe.replace("{*}", places),
    )
    return partial(kind, template, safe, *pieces)


def _unknown(name: str) -> ExpressionRefused:
    if name in NOT_THE_SAME_EACH_TIME:
        return ExpressionRefused(
            f"{name} is not the same each time, and a replay must give the same rows.",
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
    if name in ROW_MAKERS:
        return ExpressionRefused(
            f"{name} makes several rows of one, and an expression gives one value.",
            "use Stream.df() for it, and ingest the result.",
        )
    return ExpressionRefused(
        f"There is no function {name!r} for expressions:"
        f" {nearest(name, [*signatures(), *SPECIAL_NAMES])}",
        "use another, or Stream.df() for anything Spark can do.",
    )


SPECIAL_NAMES: set[str] = set()
"""Functions that `functions` reads by rules of their own, for suggestions."""


@cache
def signatures() -> dict[str, tuple[Signature, ...]]:
    found: dict[str, tuple[Signature, ...]] = {}
    for text in FUNCTIONS.splitlines():
        if text and not text.startswith("#"):
            line = _parsed(text)
            found[line.name] = (*found.get(line.name, ()), line)
    return found


def _parsed(text: str) -> Signature:
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


Maker = Callable[[str, Sequence[TypedExpression]], TypedExpression]
NULL = leaf(type_rules.VOID, "NULL", value=None)


def call(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """Any function but those that read their arguments in another way (struct, if and CASE are the
    reader's).
    """
    if name not in _SPECIAL:
        return call_by_signature(name, arguments)
    maker, least, most = _SPECIAL[name]
    if not least <= len(arguments) <= most:
        wanted = (
            f"{least}"
            if least == most
            else f"{least} or more"
            if most > 9
            else f"{least} to {most}"
        )
        raise ExpressionRefused(
            f"{name} was given {len(arguments)} arguments.", f"it takes {wanted}."
        )
    return maker(name, arguments)


def common_type(pieces: Sequence[TypedExpression], *, what: str) -> pa.DataType:
    kind = type_rules.common(each.type for each in pieces)
    if kind is None:
        shown = ", ".join(dict.fromkeys(type_name(each.type) for each in pieces))
        raise ExpressionRefused(
            f"The values of {what} have no type in common: {shown}.",
            "cast them to the same type, as in CAST(… AS STRING).",
        )
    return kind


def alternatives(
    pieces: Sequence[TypedExpression], *, what: str
) -> tuple[pa.DataType, list[TypedExpression]]:
    """Values of which one is taken, all with the same type. Numbers are left to Spark, which widens
    them.
    """
    kind = common_type(pieces, what=what)
    return kind, [
        (
            casts.cast(each, kind, written=False)
            if type_rules.is_time(kind) and not each.is_null
            else each
        )
        for each in pieces
    ]


def coalesce(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """Values are looked at in order, up to the first that is not null."""
    kind, pieces = alternatives(arguments, what=name)
    failed = None
    for piece in reversed(pieces):
        failed = either(piece.failed, when(f"{piece.safe} IS NULL", failed, None))
    return TypedExpression(
        kind,
        f"coalesce({', '.join(each.sql for each in pieces)})",
        f"coalesce({', '.join(each.safe for each in pieces)})",
        failed,
    )


def chosen(
    condition: TypedExpression,
    then: TypedExpression,
    otherwise: TypedExpression,
    *,
    what: str = "if",
) -> TypedExpression:
    truth(condition, what=what)
    kind, (then, otherwise) = alternatives([then, otherwise], what=what)
    return branches(kind, [condition], [then], otherwise)


def truth(piece: TypedExpression, *, what: str) -> TypedExpression:
    if piece.type not in (BOOLEAN, type_rules.VOID):
        raise ExpressionRefused(
            f"A condition of {what} is {type_name(piece.type)}, not BOOLEAN.",
            "compare it with something, as in 'amount > 0'.",
        )
    return piece


def compared(sign: str, left: TypedExpression, right: TypedExpression) -> TypedExpression:
    """A comparison; NULL on either side is a mistake, but for <=>."""
    left, right = sides(left, right, what=sign)
    return total(BOOLEAN, f"({{0}} {sign} {{1}})", left, right)


def sides(
    left: TypedExpression, right: TypedExpression, *, what: str
) -> tuple[TypedExpression, TypedExpression]:
    """Two values that are compared, with a text that is written out read as what it stands
    beside.
    """
    if what != "<=>" and (left.is_null or right.is_null):
        raise ExpressionRefused(
            f"Nothing is {what} NULL: the result is always null.", "write IS NULL or IS NOT NULL."
        )
    if left.type == STRING and left.is_literal and right.type not in (STRING, type_rules.VOID):
        left = casts.literal_as(left, right.type)
    elif right.type == STRING and right.is_literal and left.type not in (STRING, type_rules.VOID):
        right = casts.literal_as(right, left.type)
    kind = type_rules.common([left.type, right.type])
    if kind is None or not type_rules.comparable(kind):
        raise ExpressionRefused(
            f"{type_name(left.type)} {what} {type_name(right.type)} cannot be compared.",
            "cast one side to the other's type.",
        )
    if type_rules.is_time(kind):
        return casts.cast(left, kind, written=False), casts.cast(right, kind, written=False)
    return left, right


def element(
    sequence: TypedExpression, index: TypedExpression, *, from_zero: bool
) -> TypedExpression:
    """`items[0]` and `element_at(items, 1)`. Outside of an array is a failure, a key that a map
    does not have is null.
    """
    if pa.types.is_map(sequence.type):
        key = Binding({"K": sequence.type.key_type}).fit(index, "K")
        if key is None:
            raise ExpressionRefused(
                f"The map's keys are {type_name(sequence.type.key_type)}, not"
                f" {type_name(index.type)}.",
                "cast the key.",
            )
        return total(
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
        return partial(
            sequence.type.value_type,
            "{0}[{1}]",
            "get({0}, {1})",
            sequence,
            index,
            failed_if=outside,
        )
    outside = "({1} = 0 OR abs(CAST({1} AS BIGINT)) > size({0}))"
    return partial(
        sequence.type.value_type,
        "element_at({0}, {1})",
        "try_element_at({0}, nullif({1}, 0))",
        sequence,
        index,
        failed_if=outside,
    )


def concatenated(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """Texts, bytes or arrays, one behind the other; null if one is."""
    kind = common_type(arguments, what=name)
    if kind not in (STRING, type_rules.BINARY) and not pa.types.is_list(kind):
        raise ExpressionRefused(
            f"{name} takes texts, bytes or arrays, not {type_name(kind)}.",
            "cast numbers and times: CAST(… AS STRING).",
        )
    return total(
        kind,
        f"concat({', '.join(f'{{{position}}}' for position in range(len(arguments)))})",
        *arguments,
    )


def _same_type(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """For greatest and least, and for arrays of values."""
    kind, pieces = alternatives(arguments, what=name)
    places = ", ".join(f"{{{position}}}" for position in range(len(pieces)))
    return total(pa.list_(kind) if name == "array" else kind, f"{name}({places})", *pieces)


def _nullif(_: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    left, right = sides(*arguments, what="=")
    return total(left.type, "nullif({0}, {1})", left, right)


def _nvl2(_: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    given = total(BOOLEAN, "({0} IS NOT NULL)", arguments[0])
    return chosen(given, arguments[1], arguments[2], what="nvl2")


def _is_null(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    return total(BOOLEAN, f"({{0}} IS {'' if name == 'isnull' else 'NOT '}NULL)", arguments[0])


def _rounded(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    return arithmetic.rounded(name, arguments[0], arguments[1] if len(arguments) > 1 else None)


def _tried(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """A user's own try_add and its like: null is what was asked for."""
    sign = {
        "try_add": "+",
        "try_subtract": "-",
        "try_multiply": "*",
        "try_divide": "/",
        "try_mod": "%",
    }[name]
    made = arithmetic.arithmetic(sign, *arguments)
    return TypedExpression(made.type, made.safe, made.safe, failed_any(arguments))


def _cast_by_name(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    return casts.cast(arguments[0], parse_columns(f"x {name}")[0].type)


def _regexp_extract(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    group = arguments[2] if len(arguments) > 2 else leaf(INT, "1", value=1)
    for each in (arguments[1], group):
        literals.check("literal", each, function=name)
    groups = literals.groups_in(arguments[1].value)
    if not isinstance(group.value, int) or not 0 <= group.value <= groups:
        raise ExpressionRefused(
            f"The pattern {arguments[1].value!r} has {groups} groups, and {name} asks for"
            f" {group.value!r}.",
            "0 is the whole match.",
        )
    texts(name, arguments[:2])
    return total(STRING, f"{name}({{0}}, {{1}}, {group.value})", *arguments[:2])


def _regexp_replace(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    for each in arguments[1:]:
        literals.check("literal", each, function=name)
    literals.replacement(arguments[2].value, literals.groups_in(arguments[1].value))
    texts(name, arguments)
    return total(STRING, f"{name}({{0}}, {{1}}, {{2}})", *arguments)


def texts(name: str, arguments: Sequence[TypedExpression]) -> Sequence[TypedExpression]:
    for each in arguments:
        if each.type != STRING:
            raise ExpressionRefused(
                f"{name} takes texts, not {type_name(each.type)}.", "cast it: CAST(… AS STRING)."
            )
    return arguments


def _from_json(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    texts(name, arguments)
    literals.check("literal", arguments[1], function=name)
    try:
        fields = parse_columns(str(arguments[1].value))
    except BadSchema as error:
        raise ExpressionRefused(
            f"The schema of {name} cannot be read: {error.message}", error.fix
        ) from None
    return total(pa.struct(fields), f"{name}({{0}}, {{1}})", *arguments)


def _to_json(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    if not pa.types.is_nested(arguments[0].type):
        raise ExpressionRefused(
            f"{name} takes structs, arrays and maps, not {type_name(arguments[0].type)}.",
            "wrap it: to_json(struct(…)).",
        )
    return total(STRING, f"{name}({{0}})", *arguments)


def _named_struct(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    if len(arguments) % 2:
        raise ExpressionRefused(
            f"{name} was given {len(arguments)} arguments.",
            "give names and values in turn: named_struct('a', 1, 'b', 2).",
        )
    for each in arguments[::2]:
        literals.check("literal", each, function=name)
    return structure(
        [
            (str(each.value), value)
            for each, value in zip(arguments[::2], arguments[1::2], strict=True)
        ]
    )


def structure(members: Sequence[tuple[str, TypedExpression]]) -> TypedExpression:
    """A struct of named values."""
    fields = [pa.field(name, piece.type) for name, piece in members]
    inner = ", ".join(
        f"{literals.quoted_text(name).replace('{', '{{').replace('}', '}}')}, {{{position}}}"
        for position, (name, _) in enumerate(members)
    )
    return total(pa.struct(fields), f"named_struct({inner})", *(piece for _, piece in members))


def _positive_remainder(_: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    return arithmetic.positive_remainder(*arguments)


_MANY = 1000
_SPECIAL: dict[str, tuple[Maker, int, int]] = {
    "coalesce": (coalesce, 1, _MANY),
    "ifnull": (coalesce, 2, 2),
    "nvl": (coalesce, 2, 2),
    "nvl2": (_nvl2, 3, 3),
    "nullif": (_nullif, 2, 2),
    "isnull": (_is_null, 1, 1),
    "isnotnull": (_is_null, 1, 1),
    "equal_null": (lambda _, given: compared("<=>", *given), 2, 2),
    "greatest": (_same_type, 2, _MANY),
    "least": (_same_type, 2, _MANY),
    "array": (_same_type, 1, _MANY),
    "concat": (concatenated, 1, _MANY),
    "element_at": (lambda _, given: element(*given, from_zero=False), 2, 2),
    "abs": (lambda _, given: arithmetic.absolute(given[0]), 1, 1),
    "negative": (lambda _, given: arithmetic.negated(given[0]), 1, 1),
    "mod": (lambda _, given: arithmetic.arithmetic("%", *given), 2, 2),
    "pmod": (_positive_remainder, 2, 2),
    "round": (_rounded, 1, 2),
    "bround": (_rounded, 1, 2),
    "floor": (lambda name, given: arithmetic.whole(name, given[0]), 1, 1),
    "ceil": (lambda name, given: arithmetic.whole(name, given[0]), 1, 1),
    "ceiling": (lambda name, given: arithmetic.whole(name, given[0]), 1, 1),
    "regexp_extract": (_regexp_extract, 2, 3),
    "regexp_replace": (_regexp_replace, 3, 3),
    "from_json": (_from_json, 2, 2),
    "to_json": (_to_json, 1, 1),
    "named_struct": (_named_struct, 2, _MANY),
    **dict.fromkeys(
        ("try_add", "try_subtract", "try_multiply", "try_divide", "try_mod"), (_tried, 2, 2)
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
