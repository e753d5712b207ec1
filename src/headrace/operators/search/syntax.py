"""A query as a tree: tests of a document, and what connects them. `parsing` builds it, `evaluating`
carries it out, `compiling` files it in the index.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from functools import cached_property

import pyarrow as pa

# What can be asked for: the text columns of documents and their filter columns, and a query's
# values in a filter column's own units.


TEXT, STRING, INTEGER, FLOAT, BOOLEAN, DATE, TIME = (
    "text",
    "string",
    "integer",
    "float",
    "boolean",
    "date",
    "time",
)
LOWEST, HIGHEST = -(2**63), 2**63 - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY_US = 86_400_000_000
Bound = int | float


class UnfitValue(Exception):
    """A value that a column cannot have; says what it can."""


@dataclass(frozen=True)
class Fields:
    """The fields of queries, by the columns' names: `text` columns, whose words are searched, and
    `filters` with their kinds.
    """

    text: tuple[str, ...]
    filters: tuple[tuple[str, str], ...] = ()

    @cached_property
    def kinds(self) -> dict[str, str]:
        return {**dict.fromkeys(self.text, TEXT), **dict(self.filters)}

    @cached_property
    def numbers(self) -> dict[str | None, int]:
        """A number for each field that has words or strings: 0 stands for any text."""
        named = [*self.text, *(name for name, kind in self.filters if kind == STRING)]
        if len(self.text) == 1:  # any text is that one
            return {None: 0, **{name: number for number, name in enumerate(named)}}
        return {None: 0, **{name: number for number, name in enumerate(named, 1)}}

    @property
    def words(self) -> int:
        """How many fields have words or strings."""
        return max(self.numbers.values()) + 1


def filter_kind(kind: pa.DataType) -> str | None:
    """How a filter column of a type is compared; None if it cannot be one."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return STRING
    if pa.types.is_integer(kind):
        return INTEGER
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return FLOAT
    if pa.types.is_boolean(kind):
        return BOOLEAN
    if pa.types.is_date(kind):
        return DATE
    return TIME if pa.types.is_timestamp(kind) else None


def closed(
    kind: str, low: str | None, high: str | None, *, with_low: bool = True, with_high: bool = True
) -> tuple[Bound, Bound]:
    """A range with both ends in it, in the column's units: whole numbers, doubles, days or
    microseconds since 1970. UnfitValue if an end is none of them.
    """
    if kind == FLOAT:
        return _closed_floats(low, high, with_low=with_low, with_high=with_high)
    least, most = LOWEST, HIGHEST
    if low is not None:
        first, last = _whole(kind, low)
        least = first if with_low else last + 1
    if high is not None:
        first, last = _whole(kind, high)
        most = last if with_high else first - 1
    return (
        (max(least, LOWEST), min(most, HIGHEST))
        if least <= HIGHEST and most >= LOWEST
        else (HIGHEST, LOWEST)
    )


def _closed_floats(
    low: str | None, high: str | None, *, with_low: bool, with_high: bool
) -> tuple[float, float]:
    least = -math.inf if low is None else _float(low)
    most = math.inf if high is None else _float(high)
    return (
        least if with_low or low is None else math.nextafter(least, math.inf),
        most if with_high or high is None else math.nextafter(most, -math.inf),
    )


def _float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UnfitValue("a number, such as 12 or 2.5") from None
    if math.isnan(value):
        raise UnfitValue("a number, such as 12 or 2.5")
    return value


def _whole(kind: str, text: str) -> tuple[int, int]:
    """The smallest and the largest value that a text stands for: 2.5 lies between two whole
    numbers, and a day has many microseconds.
    """
    if kind == INTEGER:
        return _between(text)
    if kind == BOOLEAN:
        if text.lower() not in {"true", "false"}:
            raise UnfitValue("true or false")
        return (int(text.lower() == "true"),) * 2
    if kind == DATE:
        day = _day(text)
        return day, day
    return _moment(text)


def _between(text: str) -> tuple[int, int]:
    try:
        value = Decimal(text)
        if abs(value) > 10**20:
            return (HIGHEST + 1, HIGHEST) if value > 0 else (LOWEST, LOWEST - 1)
        return math.ceil(value), math.floor(value)
    except (InvalidOperation, ValueError, OverflowError):
        raise UnfitValue("a number, such as 12") from None


def _day(text: str) -> int:
    try:
        return date.fromisoformat(text).toordinal() - date(1970, 1, 1).toordinal()
    except ValueError:
        raise UnfitValue("a day, such as 2026-03-01") from None


def _moment(text: str) -> tuple[int, int]:
    if len(text) == 10:
        start = _day(text) * _DAY_US
        return start, start + _DAY_US - 1
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UnfitValue("a time, such as 2026-03-01 or 2026-03-01T12:30:00") from None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    at_us = (moment - _EPOCH) // timedelta(microseconds=1)
    return at_us, at_us


@dataclass(frozen=True, slots=True)
class Word:
    """A word in a text field, or the value of a string column. `field` None: in any text field."""

    field: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Phrase:
    """Words at these places of one field, `slop` places moved in sum at most: the widest difference
    between where they stand and where they should.
    """

    field: str | None
    words: tuple[tuple[str, int], ...]
    slop: int = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    field: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Wildcard:
    """`*` stands for any characters, `?` for one. The parts are plain texts and, behind a zero
    byte, these two.
    """

    field: str | None
    parts: tuple[str, ...]

    @property
    def pattern(self) -> str:
        return "".join(self.parts).replace("\0", "")


@dataclass(frozen=True, slots=True)
class Fuzzy:
    """A word at most so many edits away: a character more, less, another, or two neighbours
    exchanged.
    """

    field: str | None
    text: str
    edits: int


@dataclass(frozen=True, slots=True)
class Range:
    """A filter column between two values, both included, in the column's units. `written`: as the
    query has it, for people.
    """

    field: str
    low: Bound
    high: Bound
    written: str = dataclasses.field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Exists:
    """A text field with a word in it, or a filter column that is not null."""

    field: str


@dataclass(frozen=True, slots=True)
class Everything:
    pass


Test = Word | Phrase | Prefix | Wildcard | Fuzzy | Range | Exists | Everything


@dataclass(frozen=True, slots=True)
class Leaf:
    test: Test
    boost: float = 1.0


@dataclass(frozen=True, slots=True)
class Not:
    child: Node


@dataclass(frozen=True, slots=True)
class All:
    """All of the children. Those in `maybe` decide nothing, and add to the score where they fit."""

    children: tuple[Node, ...]
    maybe: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Any:
    """At least so many of the children."""

    children: tuple[Node, ...]
    least: int = 1


Node = Leaf | Not | All | Any


def children_of(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Leaf):
        return ()
    return (
        (node.child,)
        if isinstance(node, Not)
        else (*node.children, *(node.maybe if isinstance(node, All) else ()))
    )


def leaves(node: Node) -> Iterator[Leaf]:
    """All leaves, also of what is not to be there."""
    if isinstance(node, Leaf):
        yield node
    for child in children_of(node):
        yield from leaves(child)


def told_leaves(node: Node) -> Iterator[Leaf]:
    """The leaves that can be a reason for a match: not those of what is not to be there."""
    if isinstance(node, Leaf):
        yield node
    elif not isinstance(node, Not):
        for child in children_of(node):
            yield from told_leaves(child)


def boosted(node: Node, factor: float) -> Node:
    if isinstance(node, Leaf):
        return Leaf(node.test, node.boost * factor)
    if isinstance(node, Not):
        return Not(boosted(node.child, factor))
    children = tuple(boosted(child, factor) for child in node.children)
    if isinstance(node, All):
        return All(children, tuple(boosted(child, factor) for child in node.maybe))
    return Any(children, node.least)


def as_text(test: Test) -> str:
    """A test as a query would write it, more or less: for explanations."""
    if isinstance(test, Everything):
        return "*:*"
    field = f"{test.field}:" if test.field is not None else ""
    if isinstance(test, Phrase):
        return (
            field
            + '"'
            + " ".join(word for word, _ in test.words)
            + '"'
            + (f"~{test.slop}" if test.slop else "")
        )
    if isinstance(test, Range):
        return field + test.written
    if isinstance(test, Exists):
        return f"{field}*"
    if isinstance(test, Wildcard):
        return field + test.pattern
    return (
        field
        + test.text
        + ("*" if isinstance(test, Prefix) else f"~{test.edits}" if isinstance(test, Fuzzy) else "")
    )
