"""Calls by a signature. Signatures come from two places:

    spark_functions.txt   what Spark's functions take and return, as Spark itself said
                          (`scripts/spark_functions.py` writes the file)
    catalogue             what Spark cannot be asked: literals that would fail on every row, forms
                          that give null on failure, and which functions cannot fail at all

A function that is neither known not to fail nor has a form of its own is guarded: an error on a row
gives null, and is counted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pyarrow as pa

from headrace.errors import NewerFormat
from headrace.expressions import casts, literals, type_rules
from headrace.expressions.catalogue import CANNOT_FAIL, COMPARING, FUNCTIONS
from headrace.expressions.refusals import SYNONYMS, refusal, unknown_function
from headrace.expressions.typed_expression import (
    ExpressionRefused,
    TypedExpression,
    allowed,
    fallible,
    guarded,
    infallible,
)
from headrace.types.ddl import parse_columns
from headrace.types.schema import is_spatial, type_name

TABLE = Path(__file__).with_name("spark_functions.txt")
TABLE_FORMAT = 1
MAX_MICROS = 9_223 * 10**15
"""The largest timestamp for safe forms: twelve years before the last microsecond of Spark."""
_LINE = re.compile(
    r"(?P<name>\w+)\((?P<parameters>.*?)\) -> (?P<result>[^=]+?)"
    r"(?: if (?P<allowed>.+?))?(?: = (?P<safe>.+))?"
)
_WITHIN = re.compile(r"\{(\d):within\}")
_CLASSES = {
    "NUMBER": type_rules.is_number,
    "INTEGER": type_rules.is_integer,
    "DECIMAL": pa.types.is_decimal,
    "TIME": type_rules.is_time,
    "ANY": type_rules.is_comparable,
    "GEOMETRY": is_spatial,
    "GEOGRAPHY": is_spatial,
}
_SMALL_INTEGERS = (pa.int8(), pa.int16(), type_rules.INT)
_VARIABLE = re.compile(r"\b[TKV]\b(?!:)")


@dataclass(frozen=True)
class Parameter:
    """One parameter: the types it takes, as text, and the check that a literal must pass."""

    takes: tuple[str, ...]
    check: str | None
    optional: bool


@dataclass(frozen=True)
class Signature:
    """One line of the table or of the catalogue."""

    name: str
    parameters: tuple[Parameter, ...]
    repeats: bool
    result: str
    safe: str | None
    """The form that gives null on failure; None if there is none of its own."""
    allowed: str | None
    """A condition without which the function is not called: it would take too much memory."""
    guarded: bool
    """Whether errors are caught."""

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
        """The argument as a parameter takes it, maybe with a cast; None if it does not fit. Casts
        are written out: one that Spark added by itself could fail where nobody expects it.
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
        if operand.type == kind or _is_widened(operand.type, kind):
            return operand
        takes_any_number = kind in (type_rules.DOUBLE, type_rules.FLOAT)
        if (
            operand.is_null
            or (takes_any_number and type_rules.is_number(operand.type))
            or (kind == type_rules.BINARY and operand.type == type_rules.STRING)
            or (type_rules.is_time(kind) and type_rules.is_time(operand.type))
            or (pa.types.is_decimal(kind) and type_rules.is_number(operand.type))
            or (kind == type_rules.INT and operand.type == type_rules.BIGINT)
        ):
            return casts.cast(operand, kind)
        return None

    def _nested(self, kind: pa.DataType, pattern: str) -> bool:
        inner = pattern[pattern.index("<") + 1 : -1]
        if pattern.startswith("ARRAY"):
            return bool(pa.types.is_list(kind)) and self._inner(kind.value_type, inner)
        parts = [part.strip().partition(": ") for part in inner.split(",")]
        if pattern.startswith("STRUCT"):
            return (
                bool(pa.types.is_struct(kind))
                and kind.num_fields == len(parts)
                and all(
                    self._inner(member.type, part[2])
                    for member, part in zip(kind, parts, strict=True)
                )
            )
        return (
            bool(pa.types.is_map(kind))
            and self._inner(kind.key_type, parts[0][0])
            and self._inner(kind.item_type, parts[1][0])
        )

    def _inner(self, kind: pa.DataType, pattern: str) -> bool:
        if "<" in pattern:
            return self._nested(kind, pattern)
        return bool(
            (self.types.setdefault(pattern, kind) if len(pattern) == 1 else _type(pattern)) == kind
        )

    def result(self, pattern: str) -> pa.DataType:
        """The type of the result, with the types that the letters stand for."""
        if pattern in self.types:
            return self.types[pattern]
        if pattern.startswith("ARRAY<"):
            return pa.list_(self.result(pattern[6:-1]))
        return _type(_VARIABLE.sub(lambda match: type_name(self.types[match[0]]), pattern))


def call_by_signature(
    name: str, arguments: Sequence[TypedExpression], *, others: Collection[str] = ()
) -> TypedExpression:
    """A call of a function by its signatures.

    Args:
        name: The function.
        arguments: What it is given.
        others: Functions that have no signature, for suggestions.

    Raises:
        ExpressionRefused: There is no such function, or the arguments do not fit.
    """
    kind = function_kinds().get(name)
    if (refused := refusal(name, kind)) is not None:
        raise refused
    matching = signatures().get(name)
    if matching is None:
        meant = SYNONYMS.get(name, "")
        if (refused := refusal(meant, function_kinds().get(meant))) is not None:
            raise ExpressionRefused(
                f"{name} is {meant} in Spark SQL. {refused.message}", refused.fix
            )
        raise unknown_function(name, {*signatures(), *others})
    for exact in (True, False):
        for signature in matching:
            if signature.accepts(len(arguments)):
                result = _match_signature(signature, arguments, exact=exact)
                if result is not None:
                    return result
    types = ", ".join(type_name(each.type) for each in arguments)
    raise ExpressionRefused(
        f"{name}({types}) does not fit.",
        f"it takes {' or '.join(map(str, matching))}; cast what does not fit, as in CAST(… AS"
        " STRING).",
    )


def _match_signature(
    signature: Signature, arguments: Sequence[TypedExpression], *, exact: bool
) -> TypedExpression | None:
    """The call by one signature; None if the arguments do not fit, or not without a cast."""
    binding = Binding()
    fitted: list[TypedExpression] = []
    for position, argument in enumerate(arguments):
        options = (
            binding.fit(argument, pattern) for pattern in signature.parameter(position).takes
        )
        fitting = [each for each in options if each is not None and (each is argument or not exact)]
        if not fitting:
            return None
        operand = argument if argument in fitting else fitting[0]
        fitted.append(operand)
    for position, argument in enumerate(arguments):
        if wanted := signature.parameter(position).check:
            literals.check(wanted, argument, function=signature.name)
    if signature.name in COMPARING and not all(
        type_rules.is_comparable(kind) for kind in binding.types.values()
    ):
        return None
    kind = binding.result(signature.result)
    slots = ", ".join(f"{{{index}}}" for index in range(len(fitted)))
    template = f"{signature.name}({slots})"
    if signature.safe is not None:
        safe = _WITHIN.sub(
            rf"unix_micros({{\1}}) BETWEEN -{MAX_MICROS} AND {MAX_MICROS}",
            signature.safe.replace("{*}", slots),
        )
        return fallible(kind, template, safe, *fitted)
    if signature.guarded:
        return guarded(kind, template, *fitted, allowed_if=signature.allowed)
    if signature.allowed is not None:
        return allowed(kind, template, *fitted, allowed_if=signature.allowed)
    return infallible(kind, template, *fitted)


@cache
def signatures() -> dict[str, tuple[Signature, ...]]:
    """The signatures by function; those of the catalogue come before what Spark said."""
    by_name: dict[str, tuple[Signature, ...]] = {}
    for text in FUNCTIONS.replace("\n    ", " ").splitlines():
        if text and not text.startswith("#"):
            signature = _parse_signature(text, may_fail=False)
            by_name[signature.name] = (*by_name.get(signature.name, ()), signature)
    known = set(by_name)
    for text in _table()[1]:
        name = text.partition("(")[0]
        if "(" in text and name not in known:
            signature = _parse_signature(text, may_fail=name not in CANNOT_FAIL)
            by_name[name] = (*by_name.get(name, ()), signature)
    return by_name


@cache
def function_kinds() -> dict[str, str]:
    """What each function of Spark's is that has no signature: an aggregate, a generator, …"""
    lines = (line.partition(": ") for line in _table()[1] if "(" not in line)
    return {name: kind for name, _, kind in lines}


def table_version() -> str:
    """The version of Spark that was asked."""
    return _table()[0]


@cache
def _table() -> tuple[str, tuple[str, ...]]:
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    if lines[0] != f"format {TABLE_FORMAT}":
        raise NewerFormat(
            f"The table of functions has {lines[0]}; this Headrace knows format {TABLE_FORMAT}.",
            fix="install Headrace again.",
        )
    return lines[1].removeprefix("spark "), tuple(lines[2:])


def _parse_signature(text: str, *, may_fail: bool) -> Signature:
    match = _LINE.fullmatch(text)
    assert match is not None, f"a signature cannot be read: {text}"
    parameters = match["parameters"]
    repeats = parameters.endswith("...")
    safe = match["safe"]
    return Signature(
        name=match["name"],
        parameters=tuple(_parameters(parameters.removesuffix("..."))),
        repeats=repeats,
        result=match["result"],
        safe=None if safe == "null" else safe,
        allowed=match["allowed"],
        guarded=may_fail or safe == "null",
    )


def _parameters(text: str) -> Iterator[Parameter]:
    for part in re.findall(r"(?:[^,<(]|\([^)]*\)|<(?:[^<>]|<[^<>]*>)*>)+", text):
        stripped = part.strip()
        optional = stripped.startswith("[")
        takes, _, check = stripped.strip("[]").partition("#")
        yield Parameter(tuple(takes.split("|")), check or None, optional)


def _is_widened(source: pa.DataType, kind: pa.DataType) -> bool:
    """Whether Spark widens an integer to another type by itself."""
    if kind == type_rules.BIGINT:
        return source in _SMALL_INTEGERS
    return bool(kind == type_rules.INT and source in _SMALL_INTEGERS)


@cache
def _type(name: str) -> pa.DataType:
    if name == "INTERVAL YEAR TO MONTH":
        return type_rules.MONTHS
    return type_rules.VOID if name == "VOID" else parse_columns(f"x {name}")[0].type
