"""Finds the line of `catalogue` that a call fits, and makes the call's piece of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import pyarrow as pa

from headrace.errors import nearest
from headrace.log.ddl import parse_columns
from headrace.log.schema import type_name
from headrace.pipeline.expressions import casts, kinds, literals
from headrace.pipeline.expressions.catalogue import AGGREGATES, FUNCTIONS, NOT_THE_SAME_EACH_TIME, ROW_MAKERS, WINDOW_FUNCTIONS
from headrace.pipeline.expressions.piece import Piece, Refused, partial, total

_LINE = re.compile(r"(?P<name>\w+)\((?P<parameters>.*?)\) -> (?P<result>[^=]+?)(?: = (?P<safe>.+))?")
_WITHIN = re.compile(r"\{(\d):within\}")
MOST_MICROS = 9_223 * 10**15  # twelve years short of the last microsecond there is
_CLASSES = {
    "NUMBER": kinds.is_number,
    "INTEGER": kinds.is_integer,
    "TIME": kinds.is_time,
    "ANY": kinds.comparable,
}
_SMALL_INTEGERS = (pa.int8(), pa.int16(), kinds.INT)


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
        shown = ["|".join(each.takes) if not each.optional else f"[{'|'.join(each.takes)}]" for each in self.parameters]
        return f"{self.name}({', '.join(shown)}{', …' if self.repeats else ''})"


@dataclass
class Binding:
    """What T, K and V stand for in one call."""

    types: dict[str, pa.DataType] = field(default_factory=dict)

    def fit(self, piece: Piece, pattern: str) -> Piece | None:
        """The argument as a parameter takes it, with a cast added that cannot fail unseen; None if it does not fit."""
        if pattern in _CLASSES:
            return piece if _CLASSES[pattern](piece.type) else None
        if pattern in self.types or len(pattern) == 1:
            return self._variable(piece, pattern)
        if "<" in pattern:
            return piece if self._nested(piece.type, pattern) else None
        return _plain(piece, _type(pattern))

    def _variable(self, piece: Piece, name: str) -> Piece | None:
        bound = self.types.setdefault(name, piece.type)
        if piece.type == bound:
            return piece
        return casts.cast(piece, bound) if kinds.common([piece.type, bound]) == bound and not casts.can_fail(piece.type, bound) else None

    def _nested(self, kind: pa.DataType, pattern: str) -> bool:
        inner = pattern[pattern.index("<") + 1 : -1]
        if pattern.startswith("ARRAY"):
            return bool(pa.types.is_list(kind)) and self._inner(kind.value_type, inner)
        keys, values = (each.strip() for each in inner.split(","))
        return bool(pa.types.is_map(kind)) and self._inner(kind.key_type, keys) and self._inner(kind.item_type, values)

    def _inner(self, kind: pa.DataType, pattern: str) -> bool:
        if "<" in pattern:
            return self._nested(kind, pattern)
        return bool((self.types.setdefault(pattern, kind) if len(pattern) == 1 else _type(pattern)) == kind)

    def result(self, pattern: str) -> pa.DataType:
        if pattern in self.types:
            return self.types[pattern]
        if pattern.startswith("ARRAY<"):
            return pa.list_(self.result(pattern[6:-1]))
        return _type(pattern)


def _plain(piece: Piece, kind: pa.DataType) -> Piece | None:
    if piece.type == kind or (kind == kinds.INT and piece.type in _SMALL_INTEGERS):
        return piece
    if kind == kinds.DOUBLE and kinds.is_number(piece.type):
        return casts.cast(piece, kind)
    return casts.cast(piece, kind) if kinds.is_time(kind) and kinds.is_time(piece.type) else None


def call(name: str, arguments: Sequence[Piece]) -> Piece:
    """The piece of a call, or Refused with what the function takes."""
    lines = signatures().get(name)
    if lines is None:
        raise _unknown(name)
    for line in lines:
        if line.accepts(len(arguments)) and (made := _called(line, arguments)) is not None:
            return made
    given = ", ".join(type_name(each.type) for each in arguments)
    raise Refused(f"{name}({given}) does not fit.", f"it takes {' or '.join(map(str, lines))}; cast what does not fit, as in CAST(… AS STRING).")


def _called(line: Signature, arguments: Sequence[Piece]) -> Piece | None:
    binding = Binding()
    fitted: list[Piece] = []
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


def _made(line: Signature, kind: pa.DataType, pieces: Sequence[Piece]) -> Piece:
    places = ", ".join(f"{{{position}}}" for position in range(len(pieces)))
    template = f"{line.name}({places})"
    if line.safe is None:
        return total(kind, template, *pieces)
    safe = _WITHIN.sub(rf"unix_micros({{\1}}) BETWEEN -{MOST_MICROS} AND {MOST_MICROS}", line.safe.replace("{*}", places))
    return partial(kind, template, safe, *pieces)


def _unknown(name: str) -> Refused:
    if name in NOT_THE_SAME_EACH_TIME:
        return Refused(
            f"{name} is not the same each time, and a replay must give the same rows.",
            "put the time or the number into the rows when they are appended.",
        )
    if name in AGGREGATES:
        return Refused(
            f"{name} looks at more than one row.",
            f"use group_by(…).aggregate(…) with hr.agg, as in hr.agg.{'sum' if name != 'count' else 'count'}(…).",
        )
    if name in WINDOW_FUNCTIONS:
        return Refused(f"{name} looks at more than one row.", "use window(…) on the stream.")
    if name in ROW_MAKERS:
        return Refused(f"{name} makes several rows of one, and an expression gives one value.", "use Stream.df() for it, and ingest the result.")
    return Refused(
        f"There is no function {name!r} for expressions: {nearest(name, [*signatures(), *SPECIAL_NAMES])}",
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
    return Signature(match["name"], tuple(_parameters(parameters.removesuffix("..."))), repeats, match["result"], match["safe"])


def _parameters(text: str) -> Iterator[Parameter]:
    for part in re.findall(r"(?:[^,<]|<(?:[^<>]|<[^<>]*>)*>)+", text):
        stripped = part.strip()
        optional = stripped.startswith("[")
        takes, _, check = stripped.strip("[]").partition("#")
        yield Parameter(tuple(takes.split("|")), check or None, optional)


@cache
def _type(name: str) -> pa.DataType:
    return parse_columns(f"x {name}")[0].type
