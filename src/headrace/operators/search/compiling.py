"""A query as the index keeps it: what every document must have and must not have, tests that cost more, and what is left of the tree.

A document fits if it has all of `needs`, none of `without`, passes all of `late`, has one of `either`, and passes `rest`. The first part is cheap and decides most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.operators.search.syntax import All, Any, Everything, Leaf, Node, Not, Phrase, Test, Word, leaves, told_leaves
from headrace.operators.search.vocabulary import Vocabulary

MOST_NEEDS, MOST_WITHOUT, MOST_LATE = 4, 2, 2


@dataclass
class Compiled:
    """`filing`: words of which every document that fits has at least one, if `needs` has none. All are features; those of `late` are doubled, odd ones negated."""

    needs: list[int] = field(default_factory=list)
    without: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    either: list[int] = field(default_factory=list)
    rest: list[Node] = field(default_factory=list)
    filing: list[list[int]] = field(default_factory=list)
    score: float | None = 0.0
    """Of each document that fits; None if that depends on the document."""
    told: list[tuple[int, float]] = field(default_factory=list)
    """What it is added up from then, each with its boost."""


def compiled(query: Node, vocabulary: Vocabulary) -> Compiled:
    """The parts of the conjunction, each where it is cheapest; every test is entered into the vocabulary."""
    result = Compiled()
    for part in _conjunction(query):
        _file(part, result, vocabulary)
    result.needs = list(dict.fromkeys(result.needs))
    result.score = _score(query)
    if result.score is None:
        result.told = [(vocabulary.feature(leaf.test), leaf.boost) for leaf in told_leaves(query)]
    return result


def _conjunction(node: Node) -> Iterator[Node]:
    """Parts that must all fit."""
    if isinstance(node, All):
        for child in node.children:
            yield from _conjunction(child)
    elif isinstance(node, Not) and isinstance(node.child, Not):
        yield from _conjunction(node.child.child)
    elif isinstance(node, Not) and isinstance(node.child, Any) and node.child.least == 1:
        for child in node.child.children:
            yield from _conjunction(Not(child))
    else:
        yield node


def _file(part: Node, into: Compiled, vocabulary: Vocabulary) -> None:
    if isinstance(part, Leaf):
        _file_test(part.test, into, vocabulary)
    elif isinstance(part, Not) and isinstance(part.child, Leaf) and not isinstance(part.child.test, Everything):
        feature = vocabulary.feature(part.child.test)
        if isinstance(part.child.test, Word) and len(into.without) < MOST_WITHOUT:
            into.without.append(feature)
        else:
            _file_late(feature * 2 + 1, part, into)
    elif not into.either and (words := _words_only(part)) is not None:
        into.either = [vocabulary.feature(word) for word in words]
        into.filing.append(into.either)
    else:
        into.rest.append(part)
        for leaf in leaves(part):
            vocabulary.feature(leaf.test)
        if (words := _one_needed(part)) is not None:
            into.filing.append([vocabulary.feature(word) for word in words])


def _file_test(test: Test, into: Compiled, vocabulary: Vocabulary) -> None:
    if isinstance(test, Everything):
        return
    feature = vocabulary.feature(test)
    if isinstance(test, Word):
        into.needs.append(feature)
        return
    if isinstance(test, Phrase):
        into.needs += [vocabulary.feature(Word(test.field, text)) for text, _ in test.words]
    _file_late(feature * 2, Leaf(test), into)


def _file_late(literal: int, part: Node, into: Compiled) -> None:
    if len(into.late) < MOST_LATE:
        into.late.append(literal)
    else:
        into.rest.append(part)


def _words_only(part: Node) -> list[Word] | None:
    """The words of which one must be there, if that is all that a part asks for."""
    if not isinstance(part, Any) or part.least != 1:
        return None
    words = [child.test for child in part.children if isinstance(child, Leaf) and isinstance(child.test, Word)]
    return words if len(words) == len(part.children) else None


def _one_needed(part: Node) -> list[Word] | None:
    """Words of which every document that passes has at least one; None if there are no such words."""
    if isinstance(part, Leaf):
        if isinstance(part.test, Phrase):
            return [Word(part.test.field, max((text for text, _ in part.test.words), key=len))]
        return [part.test] if isinstance(part.test, Word) else None
    if isinstance(part, All):
        found = [words for child in part.children if (words := _one_needed(child)) is not None]
        return min(found, key=len, default=None)
    if isinstance(part, Any):
        sides = [_one_needed(child) for child in part.children]
        known = sorted((words for words in sides if words is not None), key=len)
        spare = part.least - 1  # so many may be missing, and one of the others still fits
        enough = len(part.children) - spare
        return [word for words in known[:enough] for word in words] if len(known) >= enough else None
    return None


def _score(query: Node) -> float | None:
    """What a document that fits scores, if all that fit score the same: the sum of the boosts of everything that must be there."""
    told, needed = list(told_leaves(query)), list(_needed(query))
    return sum(leaf.boost for leaf in needed) if len(needed) == len(told) else None


def _needed(node: Node) -> Iterator[Leaf]:
    """The leaves that every document which fits has, and is told of."""
    if isinstance(node, Leaf):
        yield node
    elif isinstance(node, All):
        for child in node.children:
            yield from _needed(child)
