"""Many queries as columns, filed under the rarest word that each needs. It does not change: what goes is marked, what comes goes into another segment.

A document's words select candidates; the candidates' columns are then looked up among the documents' bits, a column at a time for all that are still left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.operators.buffers import Ints, Mask, runs
from headrace.operators.search.columns import Columns, Lists
from headrace.operators.search.compiling import MOST_LATE, MOST_NEEDS, MOST_WITHOUT
from headrace.operators.search.documents import Features, Words64
from headrace.operators.search.evaluating import Evaluator
from headrace.operators.search.syntax import All, Leaf, Node
from headrace.operators.search.vocabulary import FALSE, TRUE, Vocabulary

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

    def __init__(self, queries: Columns, vocabulary: Vocabulary) -> None:
        self.count = len(queries.scores)
        weights = _weights(queries, vocabulary)
        needs = _rarest_first(queries.needs, weights)
        self.needs = needs.padded(MOST_NEEDS, TRUE)
        self.without = queries.without.padded(MOST_WITHOUT, FALSE)
        self.late = queries.late.padded(MOST_LATE, TRUE * 2)
        self.has_late = queries.late.lengths > 0
        self.trees = _trees(queries.rest, needs, vocabulary)
        self.has_tree = np.zeros(self.count, np.bool_)
        self.has_tree[list(self.trees)] = True
        self.either = queries.either
        self.has_either = self.either.lengths > 0
        self._file(queries.filing, weights, len(vocabulary))

    def _file(self, filing: Mapping[int, Sequence[Sequence[int]]], weights: Ints, features: int) -> None:
        """Under the rarest word that a query needs, or under all of the rarest few of which it needs one; what needs none is kept apart."""
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
        self.filed_starts = np.append(0, np.cumsum(np.bincount(key, minlength=features))).astype(np.int32)
        self.apart = np.array(apart, np.int64)

    @property
    def nbytes(self) -> int:
        arrays = (self.needs, self.without, self.late, self.has_late, self.has_tree, self.has_either, self.filed, self.filed_starts, self.apart)
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
            starts = self.either.starts[slots[which]]
            lengths = self.either.starts[slots[which] + 1] - starts
            begins = np.append(0, np.cumsum(lengths))[:-1]
            masks[which] &= np.bitwise_or.reduceat(features.bits[self.either.values[runs(starts, lengths)]], begins, axis=0)
        return masks

    def _late(self, features: Features, evaluator: Evaluator, slots: Ints, masks: Words64) -> None:
        which = np.flatnonzero(self.has_late[slots])
        if not len(which):
            return
        literals = self.late[slots[which]]
        evaluator.ensure((literals >> 1).ravel().astype(np.int64))
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


def _rarest_first(needs: Lists, weights: Ints) -> Lists:
    row = np.repeat(np.arange(len(needs.starts) - 1), needs.lengths)
    return Lists(needs.starts, needs.values[np.lexsort((weights[needs.values], row))])


def _trees(rest: Mapping[int, tuple[Node, ...]], needs: Lists, vocabulary: Vocabulary) -> dict[int, Node]:
    """What is left of queries, and what is beyond the columns."""
    trees = {slot: list(nodes) for slot, nodes in rest.items()}
    for slot in np.flatnonzero(needs.lengths > MOST_NEEDS).tolist():
        more = needs.values[needs.starts[slot] + MOST_NEEDS : needs.starts[slot + 1]].tolist()
        trees.setdefault(slot, []).extend(Leaf(test) for feature in more if (test := vocabulary.tests[feature]) is not None)
    return {slot: parts[0] if len(parts) == 1 else All(tuple(parts)) for slot, parts in trees.items()}


def _weights(queries: Columns, vocabulary: Vocabulary) -> Ints:
    """How common each word is, as far as the queries tell: people look for rare words less often."""
    weights = np.bincount(queries.needs.values, minlength=len(vocabulary)).astype(np.int64)
    weights[vocabulary.values] += _FILTER_WEIGHT
    return weights
