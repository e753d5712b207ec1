"""The evaluator: tests that cost more than a look at the bits of a word, such as phrases, prefixes
and ranges. Each is evaluated when a query that may still match needs it, once for all documents of
a batch. Also here: the trees of queries over bits, and highlights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from headrace.columnar.buffers import Ints, Mask, expand_ranges
from headrace.operators.search.analyzer import Tokens
from headrace.operators.search.documents import Features, pack_bits, unpack_bits
from headrace.operators.search.syntax import (
    AllOf,
    Exists,
    Fuzzy,
    Leaf,
    Node,
    Not,
    Phrase,
    Prefix,
    Range,
    Regex,
    Test,
    Wildcard,
    Word,
    as_text,
    leaves,
    scoring_leaves,
)
from headrace.operators.search.vocabulary import ABSENT, PhraseTable, Vocabulary

# Phrases: words at their positions, or moved by a few (slop). Phrases without slop are searched for
# all at once.


_NO_POSITION = np.iinfo(np.int64).max


class PositionIndex:
    """Where the words of one text field stand in some documents."""

    def __init__(self, tokens: Tokens, vocabulary: Vocabulary) -> None:
        self.tokens = tokens
        # The code of a stop word is -1, and the last number is that of no word.
        self.words = tokens.terms.word_numbers(vocabulary)[tokens.codes]
        self._order = np.argsort(self.words, kind="stable")
        self._sorted = self.words[self._order]

    def runs_of(self, words: Ints) -> tuple[Ints, Ints]:
        """For each word the first and the end of the run of its occurrences."""
        first = np.searchsorted(self._sorted, words)
        return first, np.searchsorted(self._sorted, words, side="right")

    def tokens_at(self, occurrences: Ints) -> Ints:
        """The tokens of some occurrences."""
        tokens: Ints = self._order[occurrences]
        return tokens

    def tokens_of_word(self, word: int) -> Ints:
        """All tokens of a word, in order."""
        first, end = self.runs_of(np.array([word]))
        tokens: Ints = self._order[int(first[0]) : int(end[0])]
        return tokens

    def positions_in(self, word: int, document: int) -> Ints:
        """The positions of a word in a document."""
        tokens = self.tokens_of_word(word)
        tokens = tokens[self.tokens.rows[tokens] == document]
        positions: Ints = tokens - self.tokens.row_starts[document]
        return positions


def find_phrases(features: Features, wanted: Ints) -> None:
    """Set the bits of some phrases, given by their features."""
    vocabulary = features.vocabulary
    phrases = [
        test for feature in wanted.tolist() if isinstance(test := vocabulary.tests[feature], Phrase)
    ]
    slop = np.array([phrase.slop for phrase in phrases])
    has = np.zeros((len(wanted), features.documents.count), np.bool_)
    for name in vocabulary.fields.text:
        in_field = np.flatnonzero([phrase.field in {None, name} for phrase in phrases])
        if not len(in_field):
            continue
        index = PositionIndex(features.documents.words[name], vocabulary)
        exact = in_field[slop[in_field] == 0]
        _find_exact(index, vocabulary.phrases(), wanted[exact], exact, has)
        for row in in_field[slop[in_field] > 0].tolist():
            words = [vocabulary.words[word] for word, _ in phrases[row].words]
            has[row] |= _sloppy_matches(index, words, phrases[row])
    for row, feature in enumerate(wanted.tolist()):
        features.set(feature, has[row])


def _find_exact(
    index: PositionIndex, table: PhraseTable, wanted: Ints, rows: Ints, has: Mask
) -> None:
    """1. Of each phrase take the word that occurs least. 2. Take all its occurrences. 3. Keep those
    where the other words stand as they should. 4. Set the phrase's row of `has`.
    """
    if not len(wanted):
        return
    # 1. `anchor` is the rarest word of each phrase, as an index of the table's words.
    phrases = table.row_of[wanted]
    starts, lengths = table.starts[phrases], table.starts[phrases + 1] - table.starts[phrases]
    in_table = expand_ranges(starts, lengths)
    first, end = index.runs_of(table.words[in_table])
    counts = end - first
    phrase_starts = np.append(0, np.cumsum(lengths))[:-1]
    fewest = np.repeat(np.minimum.reduceat(counts, phrase_starts), lengths)
    rarest = np.flatnonzero(counts == fewest)
    of_phrase = np.repeat(np.arange(len(wanted)), lengths)[rarest]
    rarest = rarest[np.append(True, of_phrase[1:] != of_phrase[:-1])]
    anchor = in_table[rarest]
    # 2. and 3. Candidates: a phrase, and the token that its anchor takes.
    phrase = np.repeat(np.arange(len(wanted)), counts[rarest])
    token = index.tokens_at(expand_ranges(first[rarest], counts[rarest]))
    rows_of, words = index.tokens.rows, index.words
    for number in range(int(lengths.max())):
        has_word = lengths[phrase] > number
        word = starts[phrase] + np.where(has_word, number, 0)
        neighbor = token + table.positions[word] - table.positions[anchor[phrase]]
        is_inside = (neighbor >= 0) & (neighbor < len(words))
        neighbor = np.where(is_inside, neighbor, 0)
        is_same_text = rows_of[neighbor] == rows_of[token]
        fits = is_inside & is_same_text & (words[neighbor] == table.words[word])
        stays = fits | ~has_word
        phrase, token = phrase[stays], token[stays]
    # 4.
    has[rows[phrase], rows_of[token]] = True


def _sloppy_matches(index: PositionIndex, words: Sequence[int], phrase: Phrase) -> Mask:
    """Which documents have a phrase with its words moved. The positions of documents are put so far
    apart that no phrase goes on from one to the next.
    """
    has = np.zeros(len(index.tokens.row_starts) - 1, np.bool_)
    if ABSENT in words:
        return has
    tokens = {word: index.tokens_of_word(word) for word in set(words)}
    if not all(map(len, tokens.values())):
        return has
    gap = phrase.slop + phrase.words[-1][1] + 1
    positions = {word: token + index.tokens.rows[token] * gap for word, token in tokens.items()}
    offsets = [position for _, position in phrase.words]
    matches = sloppy_positions(positions, words, offsets, phrase.slop)
    ends = index.tokens.row_starts[1:] + np.arange(len(has)) * gap
    has[np.searchsorted(ends, matches[:, 0], side="right")] = True
    return has


def sloppy_positions(
    positions: Mapping[int, Ints], words: Sequence[int], offsets: Sequence[int], slop: int
) -> Ints:
    """Every way in which a phrase matches: a row with one position for each word, no two the same,
    so that the distances by which they are moved differ by at most `slop`.

    `positions` says where each word stands, in order. All starts are tried at once, the rarest
    words first. A word that occurs several times takes, in the phrase's order, the first position
    that is free: all of them may be moved equally far, so no other choice leaves more to those
    behind.
    """
    starts = distinct_sorted(
        np.concatenate(
            [positions[word] - offset for word, offset in zip(words, offsets, strict=True)]
        )
    )
    chosen = np.zeros((len(starts), len(words)), np.int64)
    for word in sorted(positions, key=lambda each: len(positions[each])):
        at_end = np.append(positions[word], _NO_POSITION)
        last = np.full(len(starts), -1)
        for number in (number for number, each in enumerate(words) if each == word):
            first = starts + offsets[number]
            nearest = at_end[np.searchsorted(positions[word], np.maximum(first, last + 1))]
            fits = nearest <= first + slop
            starts, chosen, last = starts[fits], chosen[fits], nearest[fits]
            chosen[:, number] = last
    return chosen


def distinct_sorted(numbers: Ints) -> Ints:
    """The distinct numbers, in order. The input consists of sorted runs, of which a stable sort
    makes use and `np.unique` does not.
    """
    in_order = np.sort(numbers, kind="stable")
    return in_order[np.append(True, in_order[1:] != in_order[:-1])] if len(in_order) else in_order


class Evaluator:
    """Evaluates features that are not known yet, and the trees of queries."""

    def __init__(self, features: Features) -> None:
        self.features = features

    def ensure(self, wanted: Ints) -> None:
        """Evaluate some features, unless they are known."""
        missing = np.unique(wanted[~self.features.is_known[wanted]])
        tests = self.features.vocabulary.tests
        phrases: list[int] = []
        ranges: dict[str, list[int]] = {}
        for feature in missing.tolist():
            test = tests[feature]
            if isinstance(test, Phrase):
                phrases.append(feature)
            elif isinstance(test, Range):
                ranges.setdefault(test.field, []).append(feature)
            elif isinstance(test, Prefix | Wildcard | Fuzzy | Regex):
                # Which documents have a word that matches a test.
                documents = self.features.documents
                has = np.zeros(documents.count, np.bool_)
                for name in (
                    self.features.vocabulary.fields.text if test.field is None else (test.field,)
                ):
                    tokens = documents.words[name]
                    fits = np.zeros(len(tokens.terms) + 1, np.bool_)
                    fits[tokens.terms.matching_codes(test)] = True
                    has[tokens.rows[fits[tokens.codes]]] = True
                self.features.set(feature, has)
            else:
                assert isinstance(test, Exists), test
                self.features.set(feature, self._exists_mask(test))
        if phrases:
            find_phrases(self.features, np.array(phrases))
        self._compare(ranges)

    def _compare(self, ranges: Mapping[str, list[int]]) -> None:
        """Evaluate all ranges of a column at once."""
        tests = self.features.vocabulary.tests
        for name, wanted in ranges.items():
            column = self.features.documents.columns[name]
            bounds = [test for feature in wanted if isinstance(test := tests[feature], Range)]
            low = np.array([test.low for test in bounds], column.values.dtype).reshape(-1, 1)
            high = np.array([test.high for test in bounds], column.values.dtype).reshape(-1, 1)
            inside = (column.values >= low) & (column.values <= high) & column.is_valid
            self.features.bits[wanted] = pack_bits(inside, self.features.width)
            self.features.is_known[wanted] = True

    def _exists_mask(self, test: Exists) -> Mask:
        documents = self.features.documents
        if test.field in documents.columns:
            return documents.columns[test.field].is_valid
        return np.diff(documents.words[test.field].row_starts) > 0

    # Trees, for all documents at once: a bit a document

    def ensure_trees(self, nodes: Iterable[Node]) -> None:
        """Evaluate all features that some trees use."""
        features = self.features.vocabulary.feature
        self.ensure(
            np.array([features(leaf.test) for node in nodes for leaf in leaves(node)], np.int64)
        )

    def mask(self, node: Node) -> int:
        """The documents that a tree matches, as bits of an integer. Its features must be known."""
        if isinstance(node, Leaf):
            return self.features.mask(self.features.vocabulary.feature(node.test))
        if isinstance(node, Not):
            return self._all_documents & ~self.mask(node.child)
        if isinstance(node, AllOf):
            mask = self._all_documents
            for child in node.children:
                mask &= self.mask(child)
            return mask
        return at_least(node.min_count, [self.mask(child) for child in node.children])

    @property
    def _all_documents(self) -> int:
        return self.features.mask(0)


def at_least(min_count: int, masks: list[int]) -> int:
    """The bits that are set in at least so many of the masks: `reached[n]` has those seen more than
    n times.
    """
    reached = [0] * min_count
    for mask in masks:
        for level in range(min_count - 1, 0, -1):
            reached[level] |= reached[level - 1] & mask
        reached[0] |= mask
    return reached[-1]


# Highlights: which tests of a query match a document, and where in the text. One match at a time,
# since people read the answer.


Highlight = tuple[str, int, int]
"""A column, and where in its text a match begins and ends, in characters."""
MAX_HIGHLIGHTS = 1_000
_NO_POSITIONS = np.zeros(0, np.int64)


class Highlighter:
    """Explains matches of some analyzed documents."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator, self._features = evaluator, evaluator.features
        self._places: dict[str, PositionIndex] = {}
        self._known: dict[tuple[Test, int], list[Highlight]] = {}

    def explain(self, node: Node, document: int) -> tuple[list[Highlight], str]:
        """The highlights, in order, and the tests that match, as text."""
        tests = list(dict.fromkeys(leaf.test for leaf in scoring_leaves(node)))
        self._evaluator.ensure_trees(scoring_leaves(node))
        fitting = [test for test in tests if self._fits(test, document)]
        found = sorted(
            {position for test in fitting for position in self._highlights(test, document)}
        )
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

    def _highlights(self, test: Test, document: int) -> list[Highlight]:
        if not isinstance(test, Word | Phrase | Prefix | Wildcard | Fuzzy | Regex):
            return []
        if (test, document) not in self._known:
            text_fields = self._features.vocabulary.fields.text
            self._known[test, document] = [
                position
                for name in (text_fields if test.field is None else (test.field,))
                if name in text_fields
                for position in self._field_highlights(test, name, document)
            ]
        return self._known[test, document]

    def _field_highlights(
        self, test: Word | Phrase | Prefix | Wildcard | Fuzzy | Regex, name: str, document: int
    ) -> list[Highlight]:
        tokens = self._features.documents.words[name]
        first, last = int(tokens.row_starts[document]), int(tokens.row_starts[document + 1])
        if isinstance(test, Phrase):
            words = [self._features.vocabulary.words[word] for word, _ in test.words]
            positions = {
                word: self._position_index(name).positions_in(word, document) for word in set(words)
            }
            offsets = [offset for _, offset in test.words]
            matches = sloppy_positions(positions, words, offsets, test.slop)
            at = distinct_sorted(matches[:MAX_HIGHLIGHTS].ravel())
        elif isinstance(test, Word):
            number = self._features.vocabulary.words.get(test.text, ABSENT)
            at = (
                self._position_index(name).positions_in(number, document)
                if number != ABSENT
                else _NO_POSITIONS
            )
        else:
            at = np.flatnonzero(
                np.isin(tokens.codes[first:last], tokens.terms.matching_codes(test))
            )
        return [
            (name, int(tokens.starts[position]), int(tokens.ends[position]))
            for position in (first + at[:MAX_HIGHLIGHTS]).tolist()
        ]

    def _position_index(self, name: str) -> PositionIndex:
        if name not in self._places:
            self._places[name] = PositionIndex(
                self._features.documents.words[name], self._features.vocabulary
            )
        return self._places[name]
