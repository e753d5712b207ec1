"""Tests that cost more than a look at a word's bits, made when a query that may still fit asks for
them, each once for all documents at hand; and what connects tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from headrace.columnar.buffers import Ints, Mask, runs
from headrace.operators.search.analyzer import Tokens
from headrace.operators.search.documents import Features, pack_bits, unpack_bits
from headrace.operators.search.syntax import (
    All,
    Exists,
    Fuzzy,
    Leaf,
    Node,
    Not,
    Phrase,
    Prefix,
    Range,
    Test,
    Wildcard,
    Word,
    as_text,
    leaves,
    told_leaves,
)
from headrace.operators.search.vocabulary import NONE, PhraseTable, Vocabulary

# Which documents have a phrase: words at their places, or moved by a few. Phrases without slop are
# looked for all at once.


_NOWHERE = np.iinfo(np.int64).max


class WordPlaces:
    """Where the words of one text field stand in some documents."""

    def __init__(self, tokens: Tokens, vocabulary: Vocabulary) -> None:
        self.tokens = tokens
        self.words = tokens.terms.numbers(vocabulary)[
            tokens.codes
        ]  # the code of a stop word is the last one, which is no word
        self._order = np.argsort(self.words, kind="stable")
        self._sorted = self.words[self._order]

    def runs_of(self, words: Ints) -> tuple[Ints, Ints]:
        """For each word, the run of its occurrences."""
        return np.searchsorted(self._sorted, words), np.searchsorted(
            self._sorted, words, side="right"
        )

    def tokens_at(self, occurrences: Ints) -> Ints:
        tokens: Ints = self._order[occurrences]
        return tokens

    def of_word(self, word: int, document: int) -> Ints:
        """The places of a word in a document."""
        first, last = (int(each[0]) for each in self.runs_of(np.array([word])))
        found: Ints = self._order[first:last]
        found = found[self.tokens.rows[found] == document]
        places: Ints = found - self.tokens.begins[document]
        return places


def find_phrases(features: Features, wanted: Ints) -> None:
    """Set the bits of some phrases."""
    table = features.vocabulary.phrases()
    tests = features.vocabulary.tests
    has = np.zeros((len(wanted), features.documents.count), np.bool_)
    scopes = [_fields_of(features, tests[feature]) for feature in wanted.tolist()]
    for name in features.vocabulary.fields.text:
        in_field = np.flatnonzero([name in scope for scope in scopes])
        if not len(in_field):
            continue
        places = WordPlaces(features.documents.words[name], features.vocabulary)
        slop = np.array(
            [
                test.slop
                for feature in wanted[in_field].tolist()
                if isinstance(test := tests[feature], Phrase)
            ]
        )
        _find_exact(places, table, wanted[in_field[slop == 0]], in_field[slop == 0], has)
        for at in in_field[slop > 0].tolist():
            test = tests[wanted[at]]
            assert isinstance(test, Phrase)
            has[at] |= _moved(
                places, [features.vocabulary.words[word] for word, _ in test.words], test
            )
    for at, feature in enumerate(wanted.tolist()):
        features.set(feature, has[at])


def _fields_of(features: Features, test: object) -> Sequence[str]:
    assert isinstance(test, Phrase)
    return features.vocabulary.fields.text if test.field is None else (test.field,)


def _find_exact(
    places: WordPlaces, table: PhraseTable, wanted: Ints, rows: Ints, has: Mask
) -> None:
    """1. Of each phrase, the word that occurs least. 2. All its occurrences. 3. Those where the
    other words stand as they should.
    """
    if not len(wanted):
        return
    phrases = table.row_of[wanted]
    starts, lengths = table.starts[phrases], table.starts[phrases + 1] - table.starts[phrases]
    at = runs(starts, lengths)
    first, last = places.runs_of(table.words[at])
    counts = last - first
    begins = np.append(0, np.cumsum(lengths))[:-1]
    fewest = np.flatnonzero(counts == np.repeat(np.minimum.reduceat(counts, begins), lengths))
    of_phrase = np.repeat(np.arange(len(wanted)), lengths)[fewest]
    chosen = fewest[np.append(True, of_phrase[1:] != of_phrase[:-1])]
    anchor = at[chosen]
    phrase = np.repeat(np.arange(len(wanted)), counts[chosen])
    token = places.tokens_at(runs(first[chosen], counts[chosen]))
    rows_of, words = places.tokens.rows, places.words
    for number in range(int(lengths.max())):
        inside = lengths[phrase] > number
        word = starts[phrase] + np.where(inside, number, 0)
        other = token + table.places[word] - table.places[anchor[phrase]]
        fits = (other >= 0) & (other < len(words))
        other = np.where(fits, other, 0)
        fits &= (words[other] == table.words[word]) & (rows_of[other] == rows_of[token])
        keep = fits | ~inside
        phrase, token = phrase[keep], token[keep]
    has[rows[phrase], rows_of[token]] = True


def _moved(places: WordPlaces, words: Sequence[int], test: Phrase) -> Mask:
    """Which documents have the phrase with its words moved. Documents stand so far apart that no
    phrase goes on from one to the next.
    """
    has = np.zeros(len(places.tokens.begins) - 1, np.bool_)
    gap = test.slop + test.words[-1][1] + 1
    tokens = {
        word: places.tokens_at(
            np.arange(*(int(end[0]) for end in places.runs_of(np.array([word]))))
        )
        for word in set(words)
        if word != NONE
    }
    if NONE not in words and all(map(len, tokens.values())):
        apart = {word: found + places.tokens.rows[found] * gap for word, found in tokens.items()}
        ends = places.tokens.begins[1:] + np.arange(len(has)) * gap
        has[
            np.searchsorted(
                ends,
                moved_places(apart, words, [place for _, place in test.words], test.slop)[:, 0],
                side="right",
            )
        ] = True
    return has


def moved_places(
    places: Mapping[int, Ints], words: Sequence[int], offsets: Sequence[int], slop: int
) -> Ints:
    """Every way in which a phrase begins: a row, with one place for each word, no two the same, so
    that what they are moved by differs by at most `slop`.

    `places`: where each word stands, in order. All beginnings are tried at once, the rarest words
    first. A word that comes several times takes, in the phrase's order, the first place that is
    free: all of them may be moved equally far, so no other choice leaves more to those behind.
    """
    starts = distinct(
        np.concatenate([places[word] - offset for word, offset in zip(words, offsets, strict=True)])
    )
    chosen = np.zeros((len(starts), len(words)), np.int64)
    for word in sorted(places, key=lambda each: len(places[each])):
        at_end = np.append(places[word], _NOWHERE)
        last = np.full(len(starts), -1)
        for number in (number for number, each in enumerate(words) if each == word):
            first = starts + offsets[number]
            found = at_end[np.searchsorted(places[word], np.maximum(first, last + 1))]
            fits = found <= first + slop
            starts, chosen, last = starts[fits], chosen[fits], found[fits]
            chosen[:, number] = last
    return chosen


def distinct(numbers: Ints) -> Ints:
    """Each number once, in order. These are runs that lie in order already, which a stable sort
    makes use of and `np.unique` does not.
    """
    in_order = np.sort(numbers, kind="stable")
    return in_order[np.append(True, in_order[1:] != in_order[:-1])] if len(in_order) else in_order


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
        self.ensure(
            np.array([features(leaf.test) for node in nodes for leaf in leaves(node)], np.int64)
        )

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
    """The bits that are set in so many of the masks: `reached[n]` has those seen more than n
    times.
    """
    reached = [0] * least
    for mask in masks:
        for level in range(least - 1, 0, -1):
            reached[level] |= reached[level - 1] & mask
        reached[0] |= mask
    return reached[-1]


# Why a query fits a document: which of its tests do, and where in the text. One match at a time: it
# is asked for where people read the answer.


Highlight = tuple[str, int, int]
"""A column, and where in its text something that fits begins and ends, in characters."""
MAX_HIGHLIGHTS = 1_000
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
        return (
            found[:MAX_HIGHLIGHTS],
            ", ".join(map(as_text, fitting)) or "nothing that it must not have",
        )

    def _fits(self, test: Test, document: int) -> bool:
        features = self._features
        return bool(
            unpack_bits(
                features.bits[[features.vocabulary.feature(test)]], features.documents.count
            )[0][document]
        )

    def _where(self, test: Test, document: int) -> list[Highlight]:
        if (test, document) not in self._known:
            self._known[test, document] = self._found(test, document)
        return self._known[test, document]

    def _found(self, test: Test, document: int) -> list[Highlight]:
        if not isinstance(test, Word | Phrase | Prefix | Wildcard | Fuzzy):
            return []
        fields = self._features.vocabulary.fields
        names = [
            name
            for name in (fields.text if test.field is None else (test.field,))
            if name in fields.text
        ]
        return [place for name in names for place in self._in_field(test, name, document)]

    def _in_field(
        self, test: Word | Phrase | Prefix | Wildcard | Fuzzy, name: str, document: int
    ) -> list[Highlight]:
        tokens = self._features.documents.words[name]
        first, last = int(tokens.begins[document]), int(tokens.begins[document + 1])
        if isinstance(test, Phrase):
            at = self._phrase(test, name, document)
        elif isinstance(test, Word):
            number = self._features.vocabulary.words.get(test.text, NONE)
            at = self._of(name).of_word(number, document) if number != NONE else _NO_PLACES
        else:
            at = np.flatnonzero(np.isin(tokens.codes[first:last], tokens.terms.fitting(test)))
        return [
            (name, int(tokens.starts[place]), int(tokens.ends[place]))
            for place in (first + at[:MAX_HIGHLIGHTS]).tolist()
        ]

    def _phrase(self, test: Phrase, name: str, document: int) -> Ints:
        words = [self._features.vocabulary.words[word] for word, _ in test.words]
        places = {word: self._of(name).of_word(word, document) for word in set(words)}
        return distinct(
            moved_places(places, words, [place for _, place in test.words], test.slop)[
                :MAX_HIGHLIGHTS
            ].ravel()
        )

    def _of(self, name: str) -> WordPlaces:
        if name not in self._places:
            self._places[name] = WordPlaces(
                self._features.documents.words[name], self._features.vocabulary
            )
        return self._places[name]
