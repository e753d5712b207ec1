"""The tree of a query: tests of a document, and what connects them. `parser.py` builds it,
`segment.py` compiles it for the index, `evaluator.py` evaluates it.
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

# Fields: the text and filter columns of documents, and values in the units of a filter column


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
    """A value that a column cannot have; the message says what it can have."""


@dataclass(frozen=True)
class Fields:
    """The fields of queries, by the names of columns: text columns, whose words are searched, and
    filter columns with their kinds.
    """

    text: tuple[str, ...]
    filters: tuple[tuple[str, str], ...] = ()

    @cached_property
    def kinds(self) -> dict[str, str]:
        return {**dict.fromkeys(self.text, TEXT), **dict(self.filters)}

    @cached_property
    def numbers(self) -> dict[str | None, int]:
        """A number for each field that has words or strings; 0 stands for any text field."""
        named = [*self.text, *(name for name, kind in self.filters if kind == STRING)]
        if len(self.text) == 1:  # any text is that one
            return {None: 0, **{name: number for number, name in enumerate(named)}}
        return {None: 0, **{name: number for number, name in enumerate(named, 1)}}

    @property
    def words(self) -> int:
        """The number of fields that have words or strings."""
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


def closed_range(
    kind: str, low: str | None, high: str | None, *, with_low: bool = True, with_high: bool = True
) -> tuple[Bound, Bound]:
    """A range with both ends included, in the column's units: integers, doubles, days or
    microseconds since 1970.

    Raises:
        UnfitValue: an end is no such value.
    """
    if kind == FLOAT:
        return _closed_floats(low, high, with_low=with_low, with_high=with_high)
    lowest, highest = LOWEST, HIGHEST
    if low is not None:
        first, last = _whole(kind, low)
        lowest = first if with_low else last + 1
    if high is not None:
        first, last = _whole(kind, high)
        highest = last if with_high else first - 1
    return (
        (max(lowest, LOWEST), min(highest, HIGHEST))
        if lowest <= HIGHEST and highest >= LOWEST
        else (HIGHEST, LOWEST)
    )


def _closed_floats(
    low: str | None, high: str | None, *, with_low: bool, with_high: bool
) -> tuple[float, float]:
    lowest = -math.inf if low is None else _float(low)
    highest = math.inf if high is None else _float(high)
    return (
        lowest if with_low or low is None else math.nextafter(lowest, math.inf),
        highest if with_high or high is None else math.nextafter(highest, -math.inf),
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
    """The smallest and the largest value that a text stands for: 2.5 lies between two integers, and
    a day has many microseconds.
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
    """A word in a text field, or the value of a string column; with `field` None in any text
    field.
    """

    field: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Phrase:
    """Words at these positions of one field. `slop` is the widest difference allowed between where
    they stand and where they should.
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
    """A word in which `*` stands for any characters and `?` for one. The parts are plain texts and,
    behind a zero byte, these two.
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
class Regex:
    """A word that a regular expression fits as a whole."""

    field: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Range:
    """A filter column between two values, both included, in the column's units. `source_text` is
    the range as the query has it, for people.
    """

    field: str
    low: Bound
    high: Bound
    source_text: str = dataclasses.field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Exists:
    """A text field with a word in it, or a filter column that is not null."""

    field: str


@dataclass(frozen=True, slots=True)
class Everything:
    pass


Test = Word | Phrase | Prefix | Wildcard | Fuzzy | Regex | Range | Exists | Everything


@dataclass(frozen=True, slots=True)
class Leaf:
    test: Test
    boost: float = 1.0


@dataclass(frozen=True, slots=True)
class Not:
    child: Node


@dataclass(frozen=True, slots=True)
class AllOf:
    """All of the children match. The optional ones decide nothing, and add to the score where they
    match.
    """

    children: tuple[Node, ...]
    optional: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class AtLeast:
    """At least so many of the children match."""

    children: tuple[Node, ...]
    min_count: int = 1


Node = Leaf | Not | AllOf | AtLeast


def children_of(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Leaf):
        return ()
    return (
        (node.child,)
        if isinstance(node, Not)
        else (*node.children, *(node.optional if isinstance(node, AllOf) else ()))
    )


def leaves(node: Node) -> Iterator[Leaf]:
    """All leaves, also those of negations."""
    if isinstance(node, Leaf):
        yield node
    for child in children_of(node):
        yield from leaves(child)


def scoring_leaves(node: Node) -> Iterator[Leaf]:
    """The leaves that can be a reason for a match: not those of negations."""
    if isinstance(node, Leaf):
        yield node
    elif not isinstance(node, Not):
        for child in children_of(node):
            yield from scoring_leaves(child)


def with_boost(node: Node, factor: float) -> Node:
    """The tree with all boosts multiplied by a factor."""
    if isinstance(node, Leaf):
        return Leaf(node.test, node.boost * factor)
    if isinstance(node, Not):
        return Not(with_boost(node.child, factor))
    children = tuple(with_boost(child, factor) for child in node.children)
    if isinstance(node, AllOf):
        return AllOf(children, tuple(with_boost(child, factor) for child in node.optional))
    return AtLeast(children, node.min_count)


def as_text(test: Test) -> str:
    """A test about as a query would write it, for explanations."""
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
        return field + test.source_text
    if isinstance(test, Exists):
        return f"{field}*"
    if isinstance(test, Wildcard):
        return field + test.pattern
    if isinstance(test, Regex):
        return f"{field}/{test.text.replace('/', chr(92) + '/')}/"
    return (
        field
        + test.text
        + ("*" if isinstance(test, Prefix) else f"~{test.edits}" if isinstance(test, Fuzzy) else "")
    )
