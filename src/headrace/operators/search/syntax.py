"""A query as a tree: tests of a document, and what connects them. `parsing` builds it, `evaluating` carries it out, `compiling` files it in the index."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.operators.search.fields import Bound


@dataclass(frozen=True, slots=True)
class Word:
    """A word in a text field, or the value of a string column. `field` None: in any text field."""

    field: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Phrase:
    """Words at these places of one field, `slop` places moved in sum at most: the widest difference between where they stand and where they should."""

    field: str | None
    words: tuple[tuple[str, int], ...]
    slop: int = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    field: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Wildcard:
    """`*` stands for any characters, `?` for one. The parts are plain texts and, behind a zero byte, these two."""

    field: str | None
    parts: tuple[str, ...]

    @property
    def pattern(self) -> str:
        return "".join(self.parts).replace("\0", "")


@dataclass(frozen=True, slots=True)
class Fuzzy:
    """A word at most so many edits away: a character more, less, another, or two neighbours exchanged."""

    field: str | None
    text: str
    edits: int


@dataclass(frozen=True, slots=True)
class Range:
    """A filter column between two values, both included, in the column's units. `written`: as the query has it, for people."""

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
    return (node.child,) if isinstance(node, Not) else (*node.children, *(node.maybe if isinstance(node, All) else ()))


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
        return field + '"' + " ".join(word for word, _ in test.words) + '"' + (f"~{test.slop}" if test.slop else "")
    if isinstance(test, Range):
        return field + test.written
    if isinstance(test, Exists):
        return f"{field}*"
    if isinstance(test, Wildcard):
        return field + test.pattern
    return field + test.text + ("*" if isinstance(test, Prefix) else f"~{test.edits}" if isinstance(test, Fuzzy) else "")
