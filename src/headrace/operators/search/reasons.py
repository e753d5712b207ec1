"""Why a query fits a document: which of its tests do, and where in the text. One match at a time: it is asked for where people read the answer."""

from __future__ import annotations

import numpy as np

from headrace.operators.buffers import Ints
from headrace.operators.search.documents import unpack_bits
from headrace.operators.search.evaluating import Evaluator
from headrace.operators.search.phrases import WordPlaces, distinct, moved_places
from headrace.operators.search.syntax import Fuzzy, Node, Phrase, Prefix, Test, Wildcard, Word, as_text, told_leaves
from headrace.operators.search.vocabulary import NONE

Highlight = tuple[str, int, int]
"""A column, and where in its text something that fits begins and ends, in characters."""
MOST_HIGHLIGHTS = 1_000
_NO_PLACES = np.zeros(0, np.int64)


class Reasons:
    """Looks closely at some analysed documents."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator, self._features = evaluator, evaluator.features
        self._places: dict[str, WordPlaces] = {}
        self._known: dict[tuple[Test, int], list[Highlight]] = {}

    def of(self, node: Node, document: int) -> tuple[list[Highlight], str]:
        """The places, in order, and the tests that fit, as text."""
        tests = list(dict.fromkeys(leaf.test for leaf in told_leaves(node)))
        self._evaluator.ensure_trees(told_leaves(node))
        fitting = [test for test in tests if self._fits(test, document)]
        found = sorted({place for test in fitting for place in self._where(test, document)})
        return found[:MOST_HIGHLIGHTS], ", ".join(map(as_text, fitting)) or "nothing that it must not have"

    def _fits(self, test: Test, document: int) -> bool:
        features = self._features
        return bool(unpack_bits(features.bits[[features.vocabulary.feature(test)]], features.documents.count)[0][document])

    def _where(self, test: Test, document: int) -> list[Highlight]:
        if (test, document) not in self._known:
            self._known[test, document] = self._found(test, document)
        return self._known[test, document]

    def _found(self, test: Test, document: int) -> list[Highlight]:
        if not isinstance(test, Word | Phrase | Prefix | Wildcard | Fuzzy):
            return []
        fields = self._features.vocabulary.fields
        names = [name for name in (fields.text if test.field is None else (test.field,)) if name in fields.text]
        return [place for name in names for place in self._in_field(test, name, document)]

    def _in_field(self, test: Word | Phrase | Prefix | Wildcard | Fuzzy, name: str, document: int) -> list[Highlight]:
        tokens = self._features.documents.words[name]
        first, last = int(tokens.begins[document]), int(tokens.begins[document + 1])
        if isinstance(test, Phrase):
            at = self._phrase(test, name, document)
        elif isinstance(test, Word):
            number = self._features.vocabulary.words.get(test.text, NONE)
            at = self._of(name).of_word(number, document) if number != NONE else _NO_PLACES
        else:
            at = np.flatnonzero(np.isin(tokens.codes[first:last], tokens.terms.fitting(test)))
        return [(name, int(tokens.starts[place]), int(tokens.ends[place])) for place in (first + at[:MOST_HIGHLIGHTS]).tolist()]

    def _phrase(self, test: Phrase, name: str, document: int) -> Ints:
        words = [self._features.vocabulary.words[word] for word, _ in test.words]
        places = {word: self._of(name).of_word(word, document) for word in set(words)}
        return distinct(moved_places(places, words, [place for _, place in test.words], test.slop)[:MOST_HIGHLIGHTS].ravel())

    def _of(self, name: str) -> WordPlaces:
        if name not in self._places:
            self._places[name] = WordPlaces(self._features.documents.words[name], self._features.vocabulary)
        return self._places[name]
