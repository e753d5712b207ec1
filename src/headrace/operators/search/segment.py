"""Many queries as columns, filed under the rarest word that each needs. It does not change: what goes is marked, what comes goes into another segment.

A document's words select candidates; the candidates' columns are then looked up among the documents' bits, a column at a time for all that are still left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.operators.buffers import Ints, Mask, runs
from headrace.operators.search.compiling import MOST_LATE, MOST_NEEDS, MOST_WITHOUT, Compiled
from headrace.operators.search.documents import Features, Words64
from headrace.operators.search.evaluating import Evaluator
from headrace.operators.search.syntax import All, Leaf, Node, Word
from headrace.operators.search.vocabulary import FALSE, TRUE, Vocabulary

Columns = npt.NDArray[np.int32]
_FILTER_WEIGHT = 1 << 40
"""A filter's value is in many documents: it is filed under only if there is no word."""


@dataclass(frozen=True)
class Found:
    """Queries that fit some document, by their slots, and which documents: a bit each. `run` counts those that were looked at."""

    slots: Ints
    bits: Words64
    run: int


class Segment:
    """`queries`: what to look for, in the order of their slots."""

    def __init__(self, queries: Sequence[Compiled], vocabulary: Vocabulary) -> None:
        self.count = len(queries)
        weights = _weights(queries, vocabulary)
        trees = {slot: list(query.rest) for slot, query in enumerate(queries) if query.rest}
        self.needs = self._needs(queries, weights, vocabulary, trees)
        self.without = _padded([query.without for query in queries], MOST_WITHOUT, FALSE)
        self.late = _padded([query.late for query in queries], MOST_LATE, TRUE * 2)
        self.has_late = (self.late != TRUE * 2).any(axis=1)
        self.trees = {slot: parts[0] if len(parts) == 1 else All(tuple(parts)) for slot, parts in trees.items()}
        self.has_tree = np.zeros(self.count, np.bool_)
        self.has_tree[list(self.trees)] = True
        self.either_starts = np.append(0, np.cumsum([len(query.either) for query in queries], dtype=np.int64))
        self.either = np.array([feature for query in queries for feature in query.either], np.int32)
        self.has_either = np.diff(self.either_starts) > 0
        self.scores = np.array([np.nan if query.score is None else query.score for query in queries], np.float64)
        self._file(queries, weights, len(vocabulary))

    @staticmethod
    def _needs(queries: Sequence[Compiled], weights: Ints, vocabulary: Vocabulary, trees: dict[int, list[Node]]) -> Columns:
        """The rarest first. What is beyond the columns goes to the tree."""
        chosen = []
        for slot, query in enumerate(queries):
            needs = query.needs
            if len(needs) > 1:
                needs = sorted(needs, key=weights.__getitem__)
            if len(needs) > MOST_NEEDS:
                more = [test for feature in needs[MOST_NEEDS:] if (test := vocabulary.tests[feature]) is not None]
                trees.setdefault(slot, []).extend(Leaf(test) for test in more)
                needs = needs[:MOST_NEEDS]
            chosen.append(needs)
        return _padded(chosen, MOST_NEEDS, TRUE)

    def _file(self, queries: Sequence[Compiled], weights: Ints, features: int) -> None:
        """Under the rarest word that a query needs, or under all of the rarest few of which it needs one; what needs none is kept apart."""
        slots = np.flatnonzero(self.needs[:, 0] != TRUE) if self.count else np.zeros(0, np.int64)
        keys = [self.needs[slots, 0].astype(np.int64)]
        filed = [slots]
        apart = []
        for slot in np.flatnonzero(self.needs[:, 0] == TRUE).tolist():
            ways = queries[slot].filing
            if not ways:
                apart.append(slot)
                continue
            under = min(ways, key=lambda way: int(weights[way].sum()))
            keys.append(np.array(under, np.int64))
            filed.append(np.full(len(under), slot))
        key, slot_of = np.concatenate(keys), np.concatenate(filed)
        order = np.argsort(key, kind="stable")
        self.filed = slot_of[order].astype(np.int32)
        self.filed_starts = np.searchsorted(key[order], np.arange(features + 1)).astype(np.int32)
        self.apart = np.array(apart, np.int64)

    @property
    def nbytes(self) -> int:
        arrays = (self.needs, self.without, self.late, self.has_late, self.has_tree, self.either_starts, self.either, self.scores, self.filed, self.filed_starts)
        return sum(each.nbytes for each in arrays)

    def match(self, features: Features, evaluator: Evaluator, live: Mask | None) -> Found:
        """1. Candidates. 2. Words, the rarest first. 3. Words that may not be there; one of several. 4. Tests that cost more. 5. What is left of trees."""
        slots = self._candidates(features, live)
        run = len(slots)
        bits = features.bits
        masks = bits[self.needs[slots, 0]] & bits[self.needs[slots, 1]]
        slots, masks = _left(slots, masks)
        for column in range(2, MOST_NEEDS):
            masks &= bits[self.needs[slots, column]]
            slots, masks = _left(slots, masks)
        for column in range(MOST_WITHOUT):
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
            starts = self.either_starts[slots[which]]
            lengths = self.either_starts[slots[which] + 1] - starts
            begins = np.append(0, np.cumsum(lengths))[:-1]
            masks[which] &= np.bitwise_or.reduceat(features.bits[self.either[runs(starts, lengths)]], begins, axis=0)
        return masks

    def _late(self, features: Features, evaluator: Evaluator, slots: Ints, masks: Words64) -> None:
        which = np.flatnonzero(self.has_late[slots])
        if not len(which):
            return
        literals = self.late[slots[which]]
        evaluator.ensure(np.unique(literals >> 1).astype(np.int64))
        for column in range(MOST_LATE):
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


def _padded(rows: Sequence[Sequence[int]], width: int, filler: int) -> Columns:
    table = np.full((len(rows), width), filler, np.int32)
    lengths = np.array([len(row) for row in rows], np.int64)
    flat = np.array([value for row in rows for value in row], np.int32)
    begins = np.append(0, np.cumsum(lengths))[:-1] if len(rows) else lengths
    row = np.repeat(np.arange(len(rows)), lengths)
    table[row, np.arange(len(flat)) - np.repeat(begins, lengths)] = flat
    return table


def _weights(queries: Sequence[Compiled], vocabulary: Vocabulary) -> Ints:
    """How common each word is, as far as the queries tell: people look for rare words less often."""
    used = np.array([feature for query in queries for feature in query.needs], np.int64)
    weights = np.bincount(used, minlength=len(vocabulary)).astype(np.int64)
    text = {None, *vocabulary.fields.text}
    filters = [number for number, test in enumerate(vocabulary.tests) if isinstance(test, Word) and test.field not in text]
    weights[filters] += _FILTER_WEIGHT
    return weights
