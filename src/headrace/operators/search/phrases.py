"""Which documents have a phrase: words at their places, or moved by a few. Phrases without slop are looked for all at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.operators.buffers import Ints, Mask, runs
from headrace.operators.search.analysis import Tokens
from headrace.operators.search.documents import Features
from headrace.operators.search.syntax import Phrase
from headrace.operators.search.vocabulary import NONE, PhraseTable, Vocabulary


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
    """Which documents have the phrase with its words moved."""
    count = len(places.tokens.begins) - 1
    has = np.zeros(count, np.bool_)
    numbers = np.array(words, np.int64)
    first, last = places.runs_of(numbers)
    if NONE in words or (first == last).any():
        return has
    with_all = np.ones(count, np.bool_)
    for low, high in zip(first, last, strict=True):
        with_word = np.zeros(count, np.bool_)
        with_word[places.tokens.rows[places.tokens_at(np.arange(low, high))]] = True
        with_all &= with_word
    offsets = [place for _, place in test.words]
    for document in np.flatnonzero(with_all).tolist():
        found = [places.of_word(word, document).tolist() for word in words]
        has[document] = moved_at(found, offsets, test.slop) is not None
    return has


def moved_at(places: Sequence[Sequence[int]], offsets: Sequence[int], slop: int) -> list[int] | None:
    """One place for each word, no two the same, so that what they are moved by differs by at most `slop`; None if there are none. The first such, by where it begins."""
    starts = sorted({place - offset for found, offset in zip(places, offsets, strict=True) for place in found})
    for start in starts:
        near = [[place for place in found if start <= place - offset <= start + slop] for found, offset in zip(places, offsets, strict=True)]
        if all(near) and (chosen := _distinct(near)) is not None:
            return chosen
    return None


def _distinct(choices: Sequence[Sequence[int]]) -> list[int] | None:
    """One of each, all different: by augmenting paths, so that many equal words cost no more than their number squared."""
    owner: dict[int, int] = {}

    def place(which: int, tried: set[int]) -> bool:
        for choice in choices[which]:
            if choice not in tried:
                tried.add(choice)
                if choice not in owner or place(owner[choice], tried):
                    owner[choice] = which
                    return True
        return False

    if not all(place(which, set()) for which in range(len(choices))):
        return None
    of = {which: choice for choice, which in owner.items()}
    return [of[which] for which in range(len(choices))]
