"""Segments of the index: many queries as columns, with postings under the rarest word that each
needs. A segment does not change: removed queries are masked, new ones go into another segment.

    queries   0: storm AND wind    1: storm    2: "cold front" OR hail    3: NOT rain
    postings  wind -> 0;  storm -> 1;  front -> 2;  hail -> 2
    unindexed 3: it needs no word, and is always a candidate

    document "storm": candidate 1 (posting storm) and 3; both match

The words of documents select candidates; the candidates' columns are then looked up among the
documents' bits, a column at a time for all that are still left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from headrace.columnar.buffers import Ints, Mask, expand_ranges
from headrace.operators.search.documents import Features, Words64
from headrace.operators.search.evaluator import Evaluator
from headrace.operators.search.syntax import (
    AllOf,
    AtLeast,
    Everything,
    Leaf,
    Node,
    Not,
    Phrase,
    Word,
    leaves,
    scoring_leaves,
)
from headrace.operators.search.vocabulary import FALSE, TRUE, Vocabulary

# Compiled queries: a document matches if it has all of `must`, none of `must_not`, passes all of
# `costly`, has one of `should`, and passes `remainder`. The first part is cheap and decides most.


MAX_MUST, MAX_MUST_NOT, MAX_COSTLY = 4, 2, 2


@dataclass
class CompiledQuery:
    """A query taken apart. All numbers are features; those of `costly` are doubled, odd ones
    negated. `posting_choices` are lists of words of which every document that matches has at least
    one, for queries without `must`.
    """

    must: list[int] = field(default_factory=list)
    must_not: list[int] = field(default_factory=list)
    costly: list[int] = field(default_factory=list)
    should: list[int] = field(default_factory=list)
    remainder: list[Node] = field(default_factory=list)
    posting_choices: list[list[int]] = field(default_factory=list)
    score: float | None = 0.0
    """The score of each document that matches; None if it depends on the document."""
    scored: list[tuple[int, float]] = field(default_factory=list)
    """The features whose boosts are added up, if the score depends on the document."""


def compile_query(query: Node, vocabulary: Vocabulary) -> CompiledQuery:
    """Take a query apart: each part of the conjunction goes where it is cheapest. Every test is
    added to the vocabulary.
    """
    result = CompiledQuery()
    for part in _conjunction(query):
        _add_part(part, result, vocabulary)
    result.must = list(dict.fromkeys(result.must))
    result.score = _score(query)
    if result.score is None:
        result.scored = [
            (vocabulary.feature(leaf.test), leaf.boost) for leaf in scoring_leaves(query)
        ]
    return result


def _conjunction(node: Node) -> Iterator[Node]:
    """The parts of a node that must all match."""
    if isinstance(node, AllOf):
        for child in node.children:
            yield from _conjunction(child)
    elif isinstance(node, Not) and isinstance(node.child, Not):
        yield from _conjunction(node.child.child)
    elif isinstance(node, Not) and isinstance(node.child, AtLeast) and node.child.min_count == 1:
        for child in node.child.children:
            yield from _conjunction(Not(child))
    else:
        yield node


def _add_part(part: Node, into: CompiledQuery, vocabulary: Vocabulary) -> None:
    if isinstance(part, Leaf):
        test = part.test
        if isinstance(test, Word):
            into.must.append(vocabulary.feature(test))
        elif not isinstance(test, Everything):
            feature = vocabulary.feature(test)
            if isinstance(test, Phrase):
                into.must += [vocabulary.feature(Word(test.field, text)) for text, _ in test.words]
            _add_costly(feature * 2, Leaf(test), into)
    elif (
        isinstance(part, Not)
        and isinstance(part.child, Leaf)
        and not isinstance(part.child.test, Everything)
    ):
        feature = vocabulary.feature(part.child.test)
        if isinstance(part.child.test, Word) and len(into.must_not) < MAX_MUST_NOT:
            into.must_not.append(feature)
        else:
            _add_costly(feature * 2 + 1, part, into)
    elif not into.should and (words := _alternative_words(part)) is not None:
        into.should = [vocabulary.feature(word) for word in words]
        into.posting_choices.append(into.should)
    else:
        into.remainder.append(part)
        for leaf in leaves(part):
            vocabulary.feature(leaf.test)
        if (words := _guaranteed_words(part)) is not None:
            into.posting_choices.append([vocabulary.feature(word) for word in words])


def _add_costly(literal: int, part: Node, into: CompiledQuery) -> None:
    if len(into.costly) < MAX_COSTLY:
        into.costly.append(literal)
    else:
        into.remainder.append(part)


def _alternative_words(part: Node) -> list[Word] | None:
    """The words of which one must be there, if that is all that a part demands; else None."""
    if not isinstance(part, AtLeast) or part.min_count != 1:
        return None
    words = [
        child.test
        for child in part.children
        if isinstance(child, Leaf) and isinstance(child.test, Word)
    ]
    return words if len(words) == len(part.children) else None


def _guaranteed_words(part: Node) -> list[Word] | None:
    """Words of which every document that matches has at least one; None if there are no such
    words.
    """
    if isinstance(part, Leaf):
        if isinstance(part.test, Phrase):
            return [Word(part.test.field, max((text for text, _ in part.test.words), key=len))]
        return [part.test] if isinstance(part.test, Word) else None
    if isinstance(part, AllOf):
        options = [
            words for child in part.children if (words := _guaranteed_words(child)) is not None
        ]
        return min(options, key=len, default=None)
    if isinstance(part, AtLeast):
        sides = [_guaranteed_words(child) for child in part.children]
        known = sorted((words for words in sides if words is not None), key=len)
        spare = part.min_count - 1  # so many may be missing, and one of the others still fits
        enough = len(part.children) - spare
        return (
            [word for words in known[:enough] for word in words] if len(known) >= enough else None
        )
    return None


def _score(query: Node) -> float | None:
    """The score of a document that matches, if it is the same for all: the sum of the boosts of
    everything that must be there; else None.
    """
    scored, needed = list(scoring_leaves(query)), list(_certain_leaves(query))
    return sum(leaf.boost for leaf in needed) if len(needed) == len(scored) else None


def _certain_leaves(node: Node) -> Iterator[Leaf]:
    """The leaves that every document that matches has, and that count for the score."""
    if isinstance(node, Leaf):
        yield node
    elif isinstance(node, AllOf):
        for child in node.children:
            yield from _certain_leaves(child)


# Columns of queries: a query costs some numbers here, and no object of its own


Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class IntLists:
    """A list of numbers for each query: all lists concatenated, where each begins, and where the
    last ends.
    """

    starts: Ints
    values: Int32s

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> IntLists:
        starts = np.zeros(len(lists) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, lists), np.int64, len(lists)), out=starts[1:])
        return cls(starts, np.fromiter(chain.from_iterable(lists), np.int32, int(starts[-1])))

    @classmethod
    def concat(cls, parts: Sequence[IntLists]) -> IntLists:
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

    def take(self, which: Ints) -> IntLists:
        lengths = self.lengths[which]
        return IntLists(
            np.append(0, np.cumsum(lengths)),
            self.values[expand_ranges(self.starts[which], lengths)],
        )

    def padded(self, width: int, filler: int) -> Int32s:
        """The lists as rows of a table; what is beyond its width is left out."""
        table = np.full((len(self.starts) - 1, width), filler, np.int32)
        row = np.repeat(np.arange(len(table)), self.lengths)
        column = np.arange(len(self.values)) - self.starts[row]
        inside = column < width
        table[row[inside], column[inside]] = self.values[inside]
        return table


@dataclass(frozen=True)
class QueryColumns:
    """Compiled queries as columns. `scored` and `boosts` are those of queries whose score depends
    on the document; `remainder` and `posting_choices` those of the few queries that have some.
    """

    must: IntLists
    must_not: IntLists
    costly: IntLists
    should: IntLists
    scored: IntLists
    boosts: Floats
    scores: Floats
    remainder: Mapping[int, tuple[Node, ...]]
    posting_choices: Mapping[int, tuple[tuple[int, ...], ...]]

    @classmethod
    def of(cls, queries: Sequence[CompiledQuery]) -> QueryColumns:
        return cls(
            must=IntLists.of([query.must for query in queries]),
            must_not=IntLists.of([query.must_not for query in queries]),
            costly=IntLists.of([query.costly for query in queries]),
            should=IntLists.of([query.should for query in queries]),
            scored=IntLists.of([[feature for feature, _ in query.scored] for query in queries]),
            boosts=np.array([boost for query in queries for _, boost in query.scored], np.float64),
            scores=np.array(
                [np.nan if query.score is None else query.score for query in queries], np.float64
            ),
            remainder={
                slot: tuple(query.remainder)
                for slot, query in enumerate(queries)
                if query.remainder
            },
            posting_choices={
                slot: tuple(map(tuple, query.posting_choices))
                for slot, query in enumerate(queries)
                if query.posting_choices and not query.must
            },
        )

    @property
    def nbytes(self) -> int:
        return (
            self.boosts.nbytes
            + self.scores.nbytes
            + sum(
                each.nbytes
                for each in (self.must, self.must_not, self.costly, self.should, self.scored)
            )
        )

    def take(self, which: Ints) -> QueryColumns:
        """Some of the queries, in this order."""
        new_slots: dict[int, int] = {}
        if self.remainder or self.posting_choices:
            new_slots = {slot: new_slot for new_slot, slot in enumerate(which.tolist())}
        boosts = expand_ranges(self.scored.starts[which], self.scored.lengths[which])
        return QueryColumns(
            must=self.must.take(which),
            must_not=self.must_not.take(which),
            costly=self.costly.take(which),
            should=self.should.take(which),
            scored=self.scored.take(which),
            boosts=self.boosts[boosts],
            scores=self.scores[which],
            remainder={
                new_slots[slot]: nodes
                for slot, nodes in self.remainder.items()
                if slot in new_slots
            },
            posting_choices={
                new_slots[slot]: choices
                for slot, choices in self.posting_choices.items()
                if slot in new_slots
            },
        )


def concat_columns(parts: Sequence[QueryColumns]) -> QueryColumns:
    """The queries of several segments, concatenated."""
    first_slots = np.cumsum([0, *(len(part.scores) for part in parts)]).tolist()
    return QueryColumns(
        must=IntLists.concat([part.must for part in parts]),
        must_not=IntLists.concat([part.must_not for part in parts]),
        costly=IntLists.concat([part.costly for part in parts]),
        should=IntLists.concat([part.should for part in parts]),
        scored=IntLists.concat([part.scored for part in parts]),
        boosts=np.concatenate([part.boosts for part in parts]),
        scores=np.concatenate([part.scores for part in parts]),
        remainder={
            first + slot: nodes
            for first, part in zip(first_slots, parts, strict=False)
            for slot, nodes in part.remainder.items()
        },
        posting_choices={
            first + slot: choices
            for first, part in zip(first_slots, parts, strict=False)
            for slot, choices in part.posting_choices.items()
        },
    )


_FILTER_WEIGHT = 1 << 40
"""The value of a filter is in many documents: it gets a posting only if there is no word."""


@dataclass(frozen=True)
class SegmentMatches:
    """The queries that match some document, by their slots, and which documents: a bit each.
    `queries_run` counts the candidates.
    """

    slots: Ints
    bits: Words64
    queries_run: int


class IndexSegment:
    """The columns and postings of some queries, in the order of their slots."""

    def __init__(self, queries: QueryColumns, vocabulary: Vocabulary) -> None:
        self.count = len(queries.scores)
        # How common each word is, judged by the queries: people look for rare words less often.
        weights = np.bincount(queries.must.values, minlength=len(vocabulary)).astype(np.int64)
        weights[vocabulary.values] += _FILTER_WEIGHT
        row = np.repeat(np.arange(len(queries.must.starts) - 1), queries.must.lengths)
        must = IntLists(
            queries.must.starts,
            queries.must.values[np.lexsort((weights[queries.must.values], row))],
        )
        self.must = must.padded(MAX_MUST, TRUE)
        self.must_not = queries.must_not.padded(MAX_MUST_NOT, FALSE)
        self.costly = queries.costly.padded(MAX_COSTLY, TRUE * 2)
        self.has_costly = queries.costly.lengths > 0
        self.trees = _trees(queries.remainder, must, vocabulary)
        self.has_tree = np.zeros(self.count, np.bool_)
        self.has_tree[list(self.trees)] = True
        self.should = queries.should
        self.has_should = self.should.lengths > 0
        self._build_postings(queries.posting_choices, weights, len(vocabulary))

    def _build_postings(
        self, posting_choices: Mapping[int, Sequence[Sequence[int]]], weights: Ints, features: int
    ) -> None:
        """Build the postings: under the rarest word that a query needs, or under all of the rarest
        few of which it needs one. Queries that need no word stay unindexed.
        """
        needing = self.must[:, 0] != TRUE
        slots = np.flatnonzero(needing)
        keys, postings, unindexed = [self.must[slots, 0].astype(np.int64)], [slots], []
        for slot in np.flatnonzero(~needing).tolist():
            choices = posting_choices.get(slot)
            if not choices:
                unindexed.append(slot)
                continue
            under = min(choices, key=lambda words: int(weights[list(words)].sum()))
            keys.append(np.array(under, np.int64))
            postings.append(np.full(len(under), slot))
        key, slot_of = np.concatenate(keys), np.concatenate(postings)
        order = np.argsort(key, kind="stable")
        self.postings = slot_of[order].astype(np.int32)
        self.posting_starts = np.append(0, np.cumsum(np.bincount(key, minlength=features))).astype(
            np.int32
        )
        self.unindexed = np.array(unindexed, np.int64)

    @property
    def nbytes(self) -> int:
        arrays = (
            self.must,
            self.must_not,
            self.costly,
            self.has_costly,
            self.has_tree,
            self.has_should,
            self.postings,
            self.posting_starts,
            self.unindexed,
        )
        return sum(each.nbytes for each in arrays)

    def match(self, features: Features, evaluator: Evaluator, live: Mask | None) -> SegmentMatches:
        """1. Candidates. 2. Words that must be there, the rarest first. 3. Words that must not be
        there; one of several. 4. Costly tests. 5. What remains of trees.
        """
        # 1.
        slots = self._candidates(features, live)
        queries_run = len(slots)
        # 2.
        bits = features.bits
        masks = bits[self.must[slots, 0]] & bits[self.must[slots, 1]]
        slots, masks = _matching_slots(slots, masks)
        for column in range(2, MAX_MUST):
            masks &= bits[self.must[slots, column]]
            slots, masks = _matching_slots(slots, masks)
        # 3.
        for column in range(MAX_MUST_NOT):
            masks &= ~bits[self.must_not[slots, column]]
        slots, masks = _matching_slots(slots, masks)
        which = np.flatnonzero(self.has_should[slots])
        if len(which):
            starts = self.should.starts[slots[which]]
            lengths = self.should.starts[slots[which] + 1] - starts
            begins = np.append(0, np.cumsum(lengths))[:-1]
            masks[which] &= np.bitwise_or.reduceat(
                bits[self.should.values[expand_ranges(starts, lengths)]], begins, axis=0
            )
            slots, masks = _matching_slots(slots, masks)
        # 4.
        which = np.flatnonzero(self.has_costly[slots])
        if len(which):
            literals = self.costly[slots[which]]
            evaluator.ensure((literals >> 1).ravel().astype(np.int64))
            for column in range(MAX_COSTLY):
                has = features.bits[literals[:, column] >> 1]
                masks[which] &= np.where((literals[:, column] & 1)[:, None] != 0, ~has, has)
            slots, masks = _matching_slots(slots, masks)
        # 5.
        which = np.flatnonzero(self.has_tree[slots])
        if len(which):
            nodes = [self.trees[slot] for slot in slots[which].tolist()]
            evaluator.ensure_trees(nodes)
            width = masks.shape[1] * 8
            found = b"".join(evaluator.mask(node).to_bytes(width, "little") for node in nodes)
            masks[which] &= np.frombuffer(found, np.uint64).reshape(len(nodes), -1)
            slots, masks = _matching_slots(slots, masks)
        return SegmentMatches(slots, masks, queries_run)

    def _candidates(self, features: Features, live: Mask | None) -> Ints:
        inside = features.present[features.present < len(self.posting_starts) - 1]
        starts = self.posting_starts[inside].astype(np.int64)
        chosen = np.zeros(self.count, np.bool_)
        chosen[self.postings[expand_ranges(starts, self.posting_starts[inside + 1] - starts)]] = (
            True
        )
        chosen[self.unindexed] = True
        if live is not None:
            chosen &= live
        return np.flatnonzero(chosen)


def _matching_slots(slots: Ints, masks: Words64) -> tuple[Ints, Words64]:
    """The slots that still match some document, and their masks."""
    there = masks[:, 0] != 0 if masks.shape[1] == 1 else masks.any(axis=1)
    return (slots, masks) if there.all() else (slots[there], masks[there])


def _trees(
    remainder: Mapping[int, tuple[Node, ...]], must: IntLists, vocabulary: Vocabulary
) -> dict[int, Node]:
    """What remains of queries, and the words beyond the columns."""
    trees = {slot: list(nodes) for slot, nodes in remainder.items()}
    for slot in np.flatnonzero(must.lengths > MAX_MUST).tolist():
        more = must.values[must.starts[slot] + MAX_MUST : must.starts[slot + 1]].tolist()
        trees.setdefault(slot, []).extend(
            Leaf(test) for feature in more if (test := vocabulary.tests[feature]) is not None
        )
    return {
        slot: parts[0] if len(parts) == 1 else AllOf(tuple(parts)) for slot, parts in trees.items()
    }
