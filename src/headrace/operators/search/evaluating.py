"""Tests that cost more than a look at a word's bits, made when a query that may still fit asks for them, each once for all documents at hand; and what connects tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from headrace.operators.buffers import Ints, Mask
from headrace.operators.search.documents import Features, pack_bits
from headrace.operators.search.phrases import find_phrases
from headrace.operators.search.syntax import All, Exists, Fuzzy, Leaf, Node, Not, Phrase, Prefix, Range, Wildcard, leaves


class Evaluator:
    """Finds out about features, and carries out what is left of a tree."""

    def __init__(self, features: Features) -> None:
        self.features = features

    def ensure(self, wanted: Ints) -> None:
        """Know these features."""
        missing = np.unique(wanted[~self.features.known[wanted]])
        tests = self.features.vocabulary.tests
        phrases: list[int] = []
        ranges: dict[str, list[int]] = {}
        for feature in missing.tolist():
            test = tests[feature]
            if isinstance(test, Phrase):
                phrases.append(feature)
            elif isinstance(test, Range):
                ranges.setdefault(test.field, []).append(feature)
            elif isinstance(test, Prefix | Wildcard | Fuzzy):
                self.features.set(feature, self._with_some(test))
            else:
                assert isinstance(test, Exists), test
                self.features.set(feature, self._existing(test))
        if phrases:
            find_phrases(self.features, np.array(phrases))
        self._compare(ranges)

    def _compare(self, ranges: Mapping[str, list[int]]) -> None:
        """All ranges of a column at once."""
        tests = self.features.vocabulary.tests
        for name, wanted in ranges.items():
            column = self.features.documents.columns[name]
            bounds = [test for feature in wanted if isinstance(test := tests[feature], Range)]
            low = np.array([test.low for test in bounds], column.values.dtype).reshape(-1, 1)
            high = np.array([test.high for test in bounds], column.values.dtype).reshape(-1, 1)
            inside = (column.values >= low) & (column.values <= high) & column.there
            self.features.bits[wanted] = pack_bits(inside, self.features.width)
            self.features.known[wanted] = True

    def _existing(self, test: Exists) -> Mask:
        documents = self.features.documents
        if test.field in documents.columns:
            return documents.columns[test.field].there
        return np.diff(documents.words[test.field].begins) > 0

    def _with_some(self, test: Prefix | Wildcard | Fuzzy) -> Mask:
        """Which documents have a word that fits."""
        documents = self.features.documents
        has = np.zeros(documents.count, np.bool_)
        for name in self.features.vocabulary.fields.text if test.field is None else (test.field,):
            tokens = documents.words[name]
            fits = np.zeros(len(tokens.terms) + 1, np.bool_)
            fits[tokens.terms.fitting(test)] = True
            has[tokens.rows[fits[tokens.codes]]] = True
        return has

    # Trees, for all documents at once: a bit a document

    def ensure_trees(self, nodes: Iterable[Node]) -> None:
        """Know everything that trees ask for."""
        features = self.features.vocabulary.feature
        self.ensure(np.array([features(leaf.test) for node in nodes for leaf in leaves(node)], np.int64))

    def mask(self, node: Node) -> int:
        """The documents that a tree fits, as bits of a whole number. Its features must be known."""
        if isinstance(node, Leaf):
            return self.features.mask(self.features.vocabulary.feature(node.test))
        if isinstance(node, Not):
            return self._everyone & ~self.mask(node.child)
        if isinstance(node, All):
            mask = self._everyone
            for child in node.children:
                mask &= self.mask(child)
            return mask
        return at_least(node.least, [self.mask(child) for child in node.children])

    @property
    def _everyone(self) -> int:
        return self.features.mask(0)


def at_least(least: int, masks: list[int]) -> int:
    """The bits that are set in so many of the masks: `reached[n]` has those seen more than n times."""
    reached = [0] * least
    for mask in masks:
        for level in range(least - 1, 0, -1):
            reached[level] |= reached[level - 1] & mask
        reached[0] |= mask
    return reached[-1]

