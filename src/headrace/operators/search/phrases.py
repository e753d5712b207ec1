"""Which documents have a phrase: words at their places, or moved by a few. Phrases without slop are looked for all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headrace.operators.buffers import Ints, Mask, runs
from headrace.operators.search.analysis import Tokens
from headrace.operators.search.documents import Features
from headrace.operators.search.syntax import Phrase
from headrace.operators.search.vocabulary import NONE, PhraseTable, Vocabulary

_NOWHERE = np.iinfo(np.int64).max


class WordPlaces:
    """Where the words of one text field stand in some documents."""

    def __init__(self, tokens: Tokens, vocabulary: Vocabulary) -> None:
        self.tokens = tokens
        self.words = tokens.terms.numbers(vocabulary)[tokens.codes]  # the code of a stop word is the last one, which is no word
        self._order = np.argsort(self.words, kind="stable")
        self._sorted = self.words[self._order]

    def runs_of(self, words: Ints) -> tuple[Ints, Ints]:
        """For each word, the run of its occurrences."""
        return np.searchsorted(self._sorted, words), np.searchsorted(self._sorted, words, side="right")

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
        slop = np.array([test.slop for feature in wanted[in_field].tolist() if isinstance(test := tests[feature], Phrase)])
        _find_exact(places, table, wanted[in_field[slop == 0]], in_field[slop == 0], has)
        for at in in_field[slop > 0].tolist():
            test = tests[wanted[at]]
            assert isinstance(test, Phrase)
            has[at] |= _moved(places, [features.vocabulary.words[word] for word, _ in test.words], test)
    for at, feature in enumerate(wanted.tolist()):
        features.set(feature, has[at])


def _fields_of(features: Features, test: object) -> Sequence[str]:
    assert isinstance(test, Phrase)
    return features.vocabulary.fields.text if test.field is None else (test.field,)


def _find_exact(places: WordPlaces, table: PhraseTable, wanted: Ints, rows: Ints, has: Mask) -> None:
    """1. Of each phrase, the word that occurs least. 2. All its occurrences. 3. Those where the other words stand as they should."""
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
    """Which documents have the phrase with its words moved. Documents stand so far apart that no phrase goes on from one to the next."""
    has = np.zeros(len(places.tokens.begins) - 1, np.bool_)
    gap = test.slop + test.words[-1][1] + 1
    tokens = {word: places.tokens_at(np.arange(*(int(end[0]) for end in places.runs_of(np.array([word]))))) for word in set(words) if word != NONE}
    if NONE not in words and all(map(len, tokens.values())):
        apart = {word: found + places.tokens.rows[found] * gap for word, found in tokens.items()}
        ends = places.tokens.begins[1:] + np.arange(len(has)) * gap
        has[np.searchsorted(ends, moved_places(apart, words, [place for _, place in test.words], test.slop)[:, 0], side="right")] = True
    return has


def moved_places(places: Mapping[int, Ints], words: Sequence[int], offsets: Sequence[int], slop: int) -> Ints:
    """Every way in which a phrase begins: a row, with one place for each word, no two the same, so that what they are moved by differs by at most `slop`.

    `places`: where each word stands, in order. All beginnings are tried at once, the rarest words first. A word that comes several times takes, in the phrase's order, the first place that is
    free: all of them may be moved equally far, so no other choice leaves more to those behind.
    """
    starts = distinct(np.concatenate([places[word] - offset for word, offset in zip(words, offsets, strict=True)]))
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
    """Each number once, in order. These are runs that lie in order already, which a stable sort makes use of and `np.unique` does not."""
    in_order = np.sort(numbers, kind="stable")
    return in_order[np.append(True, in_order[1:] != in_order[:-1])] if len(in_order) else in_order
