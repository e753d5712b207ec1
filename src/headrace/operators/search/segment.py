"""Many queries as columns, filed under the rarest word that each needs. It does not change: what
goes is marked, what comes goes into another segment.

A document's words select candidates; the candidates' columns are then looked up among the
documents' bits, a column at a time for all that are still left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from headrace.columnar.buffers import Ints, Mask, runs
from headrace.operators.search.documents import Features, Words64
from headrace.operators.search.evaluator import Evaluator
from headrace.operators.search.syntax import (
    All,
    Any,
    Everything,
    Leaf,
    Node,
    Not,
    Phrase,
    Test,
    Word,
    leaves,
    told_leaves,
)
from headrace.operators.search.vocabulary import FALSE, TRUE, Vocabulary

# A query as the index keeps it: what every document must have and must not have, tests that cost
# more, and what is left of the tree.
#
# A document fits if it has all of `needs`, none of `without`, passes all of `late`, has one of
# `either`, and passes `rest`. The first part is cheap and decides most.


MAX_NEEDS, MAX_WITHOUT, MAX_LATE = 4, 2, 2


@dataclass
class Compiled:
    """`filing`: words of which every document that fits has at least one, if `needs` has none. All
    are features; those of `late` are doubled, odd ones negated.
    """

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
    """The parts of the conjunction, each where it is cheapest; every test is entered into the
    vocabulary.
    """
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
    elif (
        isinstance(part, Not)
        and isinstance(part.child, Leaf)
        and not isinstance(part.child.test, Everything)
    ):
        feature = vocabulary.feature(part.child.test)
        if isinstance(part.child.test, Word) and len(into.without) < MAX_WITHOUT:
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
    if len(into.late) < MAX_LATE:
        into.late.append(literal)
    else:
        into.rest.append(part)


def _words_only(part: Node) -> list[Word] | None:
    """The words of which one must be there, if that is all that a part asks for."""
    if not isinstance(part, Any) or part.least != 1:
        return None
    words = [
        child.test
        for child in part.children
        if isinstance(child, Leaf) and isinstance(child.test, Word)
    ]
    return words if len(words) == len(part.children) else None


def _one_needed(part: Node) -> list[Word] | None:
    """Words of which every document that passes has at least one; None if there are no such
    words.
    """
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
        return (
            [word for words in known[:enough] for word in words] if len(known) >= enough else None
        )
    return None


def _score(query: Node) -> float | None:
    """What a document that fits scores, if all that fit score the same: the sum of the boosts of
    everything that must be there.
    """
    told, needed = list(told_leaves(query)), list(_needed(query))
    return sum(leaf.boost for leaf in needed) if len(needed) == len(told) else None


def _needed(node: Node) -> Iterator[Leaf]:
    """The leaves that every document which fits has, and is told of."""
    if isinstance(node, Leaf):
        yield node
    elif isinstance(node, All):
        for child in node.children:
            yield from _needed(child)


# Compiled queries as columns: what a segment is made of, and what is put together when segments are
# folded. A query costs some numbers here, and no object of its own.


Numbers = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Lists:
    """A list of numbers for each query: all of them one after the other, and where each begins;
    behind them where the last ends.
    """

    starts: Ints
    values: Numbers

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Lists:
        starts = np.zeros(len(lists) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, lists), np.int64, len(lists)), out=starts[1:])
        return cls(starts, np.fromiter(chain.from_iterable(lists), np.int32, int(starts[-1])))

    @classmethod
    def together(cls, parts: Sequence[Lists]) -> Lists:
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(
            np.append(0, np.cumsum(lengths)), np.concatenate([part.values for part in parts])
        )

    @property
    def lengths(self) -> Ints:
        return np.diff(self.starts)

    @property
    def nbytes(self) -> int:
        return self.starts.nbytes + self.values.nbytes

    def take(self, which: Ints) -> Lists:
        lengths = self.lengths[which]
        return Lists(
            np.append(0, np.cumsum(lengths)), self.values[runs(self.starts[which], lengths)]
        )

    def padded(self, width: int, filler: int) -> Numbers:
        """As rows of a table; what is beyond its width is left out."""
        table = np.full((len(self.starts) - 1, width), filler, np.int32)
        row = np.repeat(np.arange(len(table)), self.lengths)
        column = np.arange(len(self.values)) - self.starts[row]
        inside = column < width
        table[row[inside], column[inside]] = self.values[inside]
        return table


@dataclass(frozen=True)
class Columns:
    """`told` and `boosts`: what a score is added up from, of queries whose score is not known
    before. `rest` and `filing`: of the few that have some.
    """

    needs: Lists
    without: Lists
    late: Lists
    either: Lists
    told: Lists
    boosts: Floats
    scores: Floats
    rest: Mapping[int, tuple[Node, ...]]
    filing: Mapping[int, tuple[tuple[int, ...], ...]]

    @classmethod
    def of(cls, queries: Sequence[Compiled]) -> Columns:
        return cls(
            needs=Lists.of([query.needs for query in queries]),
            without=Lists.of([query.without for query in queries]),
            late=Lists.of([query.late for query in queries]),
            either=Lists.of([query.either for query in queries]),
            told=Lists.of([[feature for feature, _ in query.told] for query in queries]),
            boosts=np.array([boost for query in queries for _, boost in query.told], np.float64),
            scores=np.array(
                [np.nan if query.score is None else query.score for query in queries], np.float64
            ),
            rest={at: tuple(query.rest) for at, query in enumerate(queries) if query.rest},
            filing={
                at: tuple(map(tuple, query.filing))
                for at, query in enumerate(queries)
                if query.filing and not query.needs
            },
        )

    @property
    def nbytes(self) -> int:
        return (
            self.boosts.nbytes
            + self.scores.nbytes
            + sum(
                each.nbytes
                for each in (self.needs, self.without, self.late, self.either, self.told)
            )
        )

    def take(self, which: Ints) -> Columns:
        """Some of the queries, in this order."""
        place = (
            dict(zip(which.tolist(), range(len(which)), strict=True))
            if self.rest or self.filing
            else {}
        )
        return Columns(
            self.needs.take(which),
            self.without.take(which),
            self.late.take(which),
            self.either.take(which),
            self.told.take(which),
            self.boosts[runs(self.told.starts[which], self.told.lengths[which])],
            self.scores[which],
            {place[at]: nodes for at, nodes in self.rest.items() if at in place},
            {place[at]: ways for at, ways in self.filing.items() if at in place},
        )


def together(parts: Sequence[Columns]) -> Columns:
    """The queries of several, one behind the other."""
    firsts = np.cumsum([0, *(len(part.scores) for part in parts)]).tolist()
    return Columns(
        Lists.together([part.needs for part in parts]),
        Lists.together([part.without for part in parts]),
        Lists.together([part.late for part in parts]),
        Lists.together([part.either for part in parts]),
        Lists.together([part.told for part in parts]),
        np.concatenate([part.boosts for part in parts]),
        np.concatenate([part.scores for part in parts]),
        {
            first + at: nodes
            for first, part in zip(firsts, parts, strict=False)
            for at, nodes in part.rest.items()
        },
        {
            first + at: ways
            for first, part in zip(firsts, parts, strict=False)
            for at, ways in part.filing.items()
        },
    )


_FILTER_WEIGHT = 1 << 40
"""A filter's value is in many documents: it is filed under only if there is no word."""


@dataclass(frozen=True)
class Found:
    """Queries that fit some document, by their slots, and which documents: a bit each. `run` counts
    those that were looked at.
    """

    slots: Ints
    bits: Words64
    run: int


class Segment:
    """`queries`: what to look for, in the order of their slots."""

    def __init__(self, queries: Columns, vocabulary: Vocabulary) -> None:
        self.count = len(queries.scores)
        weights = _weights(queries, vocabulary)
        needs = _rarest_first(queries.needs, weights)
        self.needs = needs.padded(MAX_NEEDS, TRUE)
        self.without = queries.without.padded(MAX_WITHOUT, FALSE)
        self.late = queries.late.padded(MAX_LATE, TRUE * 2)
        self.has_late = queries.late.lengths > 0
        self.trees = _trees(queries.rest, needs, vocabulary)
        self.has_tree = np.zeros(self.count, np.bool_)
        self.has_tree[list(self.trees)] = True
        self.either = queries.either
        self.has_either = self.either.lengths > 0
        self._file(queries.filing, weights, len(vocabulary))

    def _file(
        self, filing: Mapping[int, Sequence[Sequence[int]]], weights: Ints, features: int
    ) -> None:
        """Under the rarest word that a query needs, or under all of the rarest few of which it
        needs one; what needs none is kept apart.
        """
        needing = self.needs[:, 0] != TRUE
        slots = np.flatnonzero(needing)
        keys, filed, apart = [self.needs[slots, 0].astype(np.int64)], [slots], []
        for slot in np.flatnonzero(~needing).tolist():
            ways = filing.get(slot)
            if not ways:
                apart.append(slot)
                continue
            under = min(ways, key=lambda way: int(weights[list(way)].sum()))
            keys.append(np.array(under, np.int64))
            filed.append(np.full(len(under), slot))
        key, slot_of = np.concatenate(keys), np.concatenate(filed)
        order = np.argsort(key, kind="stable")
        self.filed = slot_of[order].astype(np.int32)
        self.filed_starts = np.append(0, np.cumsum(np.bincount(key, minlength=features))).astype(
            np.int32
        )
        self.apart = np.array(apart, np.int64)

    @property
    def nbytes(self) -> int:
        arrays = (
            self.needs,
            self.without,
            self.late,
            self.has_late,
            self.has_tree,
            self.has_either,
            self.filed,
            self.filed_starts,
            self.apart,
        )
        return sum(each.nbytes for each in arrays)

    def match(self, features: Features, evaluator: Evaluator, live: Mask | None) -> Found:
        """1. Candidates. 2. Words, the rarest first. 3. Words that may not be there; one of
        several. 4. Tests that cost more. 5. What is left of trees.
        """
        slots = self._candidates(features, live)
        run = len(slots)
        bits = features.bits
        masks = bits[self.needs[slots, 0]] & bits[self.needs[slots, 1]]
        slots, masks = _left(slots, masks)
        for column in range(2, MAX_NEEDS):
            masks &= bits[self.needs[slots, column]]
            slots, masks = _left(slots, masks)
        for column in range(MAX_WITHOUT):
            masks &= ~bits[self.without[slots, column]]
        slots, masks = _left(slots, masks)
        masks = self._with_either(features, slots, masks)
        slots, masks = _left(slots, masks)
        self._late(features, evaluator, slots, masks)
        slots, masks = _left(slots, masks)
        self._rest(evaluator, slots, masks)
        slots, masks = _left(slots, masks)
        return Found(slots, masks, run)

    def _candidates(self, features: Features, live: Mask | None) -> Ints:
        inside = features.present[features.present < len(self.filed_starts) - 1]
        starts = self.filed_starts[inside].astype(np.int64)
        chosen = np.zeros(self.count, np.bool_)
        chosen[self.filed[runs(starts, self.filed_starts[inside + 1] - starts)]] = True
        chosen[self.apart] = True
        if live is not None:
            chosen &= live
        return np.flatnonzero(chosen)

    def _with_either(self, features: Features, slots: Ints, masks: Words64) -> Words64:
        which = np.flatnonzero(self.has_either[slots])
        if len(which):
            starts = self.either.starts[slots[which]]
            lengths = self.either.starts[slots[which] + 1] - starts
            begins = np.append(0, np.cumsum(lengths))[:-1]
            masks[which] &= np.bitwise_or.reduceat(
                features.bits[self.either.values[runs(starts, lengths)]], begins, axis=0
            )
        return masks

    def _late(self, features: Features, evaluator: Evaluator, slots: Ints, masks: Words64) -> None:
        which = np.flatnonzero(self.has_late[slots])
        if not len(which):
            return
        literals = self.late[slots[which]]
        evaluator.ensure((literals >> 1).ravel().astype(np.int64))
        for column in range(MAX_LATE):
            has = features.bits[literals[:, column] >> 1]
            masks[which] &= np.where((literals[:, column] & 1)[:, None] != 0, ~has, has)

    def _rest(self, evaluator: Evaluator, slots: Ints, masks: Words64) -> None:
        which = np.flatnonzero(self.has_tree[slots])
        if not len(which):
            return
        nodes = [self.trees[slot] for slot in slots[which].tolist()]
        evaluator.ensure_trees(nodes)
        width = masks.shape[1] * 8
        found = b"".join(evaluator.mask(node).to_bytes(width, "little") for node in nodes)
        masks[which] &= np.frombuffer(found, np.uint64).reshape(len(nodes), -1)


def _left(slots: Ints, masks: Words64) -> tuple[Ints, Words64]:
    """Those that still fit some document."""
    there = masks[:, 0] != 0 if masks.shape[1] == 1 else masks.any(axis=1)
    return (slots, masks) if there.all() else (slots[there], masks[there])


def _rarest_first(needs: Lists, weights: Ints) -> Lists:
    row = np.repeat(np.arange(len(needs.starts) - 1), needs.lengths)
    return Lists(needs.starts, needs.values[np.lexsort((weights[needs.values], row))])


def _trees(
    rest: Mapping[int, tuple[Node, ...]], needs: Lists, vocabulary: Vocabulary
) -> dict[int, Node]:
    """What is left of queries, and what is beyond the columns."""
    trees = {slot: list(nodes) for slot, nodes in rest.items()}
    for slot in np.flatnonzero(needs.lengths > MAX_NEEDS).tolist():
        more = needs.values[needs.starts[slot] + MAX_NEEDS : needs.starts[slot + 1]].tolist()
        trees.setdefault(slot, []).extend(
            Leaf(test) for feature in more if (test := vocabulary.tests[feature]) is not None
        )
    return {
        slot: parts[0] if len(parts) == 1 else All(tuple(parts)) for slot, parts in trees.items()
    }


def _weights(queries: Columns, vocabulary: Vocabulary) -> Ints:
    """How common each word is, as far as the queries tell: people look for rare words less
    often.
    """
    weights = np.bincount(queries.needs.values, minlength=len(vocabulary)).astype(np.int64)
    weights[vocabulary.values] += _FILTER_WEIGHT
    return weights
