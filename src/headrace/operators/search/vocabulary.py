"""Everything that stored queries ask for, each thing once and with a number: its *feature*. Of a
document it is then known which features it has.

It only grows; an index that is folded starts a new one.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask
from headrace.operators.search.syntax import (
    Everything,
    Fields,
    Fuzzy,
    Phrase,
    Prefix,
    Test,
    Wildcard,
    Word,
)

Numbers = npt.NDArray[np.int32]
TRUE, FALSE = 0, 1
NONE = -1


@dataclass(frozen=True)
class PhraseTable:
    """The phrases of a vocabulary: of each its feature, and a run of words with their places."""

    row_of: Numbers
    """By feature; NONE for other kinds."""
    starts: Ints
    words: Ints
    places: Ints


class Vocabulary:
    """Words and other tests, by number."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.words: dict[str, int] = {}
        self.tests: list[Test | None] = [Everything(), None]
        self._features: dict[Test, int] = {Everything(): TRUE}
        self.values: list[int] = []
        """The features that are values of string columns."""
        self._of_word = [np.full(1024, NONE, np.int32) for _ in range(fields.words)]
        self._phrases: PhraseTable | None = None
        self._costly: list[int] = []
        self._costly_array = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.tests)

    def feature(self, test: Test) -> int:
        found = self._features.get(test)
        return self._add(test) if found is None else found

    def _add(self, test: Test) -> int:
        number = self._features[test] = len(self.tests)
        self.tests.append(test)
        if isinstance(test, Word):
            word, field = self.word(test.text), self.fields.numbers[test.field]
            table = self._of_word[field]
            if word >= len(table):
                grown = np.full(max(2 * len(table), 2 * word), NONE, np.int32)
                grown[: len(table)] = table
                table = self._of_word[field] = grown
            table[word] = number
            if test.field is not None and test.field not in self.fields.text:
                self.values.append(number)
        else:
            self._costly.append(number)
        if isinstance(test, Phrase):
            for text, _ in test.words:
                self.word(text)
        return number

    def word(self, text: str) -> int:
        return self.words.setdefault(text, len(self.words))

    def word_features(self, field: int, words: Ints) -> Numbers:
        """The features of some words in a field; NONE where no query asks for it there. A word may
        be NONE itself.
        """
        table = self._of_word[field]
        inside = (words >= 0) & (words < len(table))
        return np.where(inside, table[np.where(inside, words, 0)], np.int32(NONE))

    def costly(self) -> Ints:
        """The features that are no words: they are looked at when somebody asks."""
        if len(self._costly_array) != len(self._costly):
            self._costly_array = np.array(self._costly, np.int64)
        return self._costly_array

    def phrases(self) -> PhraseTable:
        if self._phrases is None or len(self._phrases.row_of) != len(self.tests):
            self._phrases = self._phrase_table()
        return self._phrases

    def _phrase_table(self) -> PhraseTable:
        found = [
            (number, test) for number, test in enumerate(self.tests) if isinstance(test, Phrase)
        ]
        row_of = np.full(len(self.tests), NONE, np.int32)
        row_of[[number for number, _ in found]] = np.arange(len(found))
        lengths = [len(test.words) for _, test in found]
        pairs = [(self.words[text], place) for _, test in found for text, place in test.words]
        table = np.array(pairs, np.int64).reshape(-1, 2)
        return PhraseTable(
            row_of,
            np.append(0, np.cumsum(lengths, dtype=np.int64)),
            table[:, 0].copy(),
            table[:, 1].copy(),
        )


# How many edits lie between a word and many others: a character more, less, another, or two
# neighbours exchanged (optimal string alignment).


def within_edits(word: str, others: Sequence[str], most: int) -> Mask:
    """Which of the others are at most so many edits away. All of similar length are compared at
    once.
    """
    near = np.zeros(len(others), np.bool_)
    lengths = np.array([len(each) for each in others], np.int64)
    for length in range(max(0, len(word) - most), len(word) + most + 1):
        which = np.flatnonzero(lengths == length)
        if len(which):
            texts = np.array(
                [[ord(character) for character in others[at]] for at in which.tolist()], np.int64
            ).reshape(len(which), length)
            near[which] = _distances(word, texts) <= most
    return near


def _distances(
    word: str, texts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The table of edit distances, row by row, for texts of one length."""
    count, length = texts.shape
    before: np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None = None
    last = np.tile(np.arange(length + 1), (count, 1))
    for row, character in enumerate(map(ord, word), 1):
        now = np.empty_like(last)
        now[:, 0] = row
        for column in range(1, length + 1):
            same = texts[:, column - 1] == character
            best = np.minimum(
                np.minimum(last[:, column], now[:, column - 1]) + 1, last[:, column - 1] + ~same
            )
            if before is not None and column > 1:
                exchanged = (texts[:, column - 2] == character) & (
                    texts[:, column - 1] == ord(word[row - 2])
                )
                best = np.where(exchanged, np.minimum(best, before[:, column - 2] + 1), best)
            now[:, column] = best
        before, last = last, now
    return last[:, -1]


# The different words of some texts, in no order, each by its code; and what is found out about them
# once, however many documents have them and queries ask.


_BEYOND = "\U0010ffff"
_MAX_KEPT = 10_000


class Terms:
    """`array`: the words; a word's code is its place there. -1 stands for no word, a stop word."""

    def __init__(self, array: pa.Array) -> None:
        self.array = array
        self._numbers: tuple[Vocabulary, int, Ints] | None = None
        self._fitting: dict[Prefix | Wildcard | Fuzzy, Ints] = {}

    def __len__(self) -> int:
        return len(self.array)

    @cached_property
    def texts(self) -> list[str]:
        texts: list[str] = self.array.to_pylist()
        return texts

    def numbers(self, vocabulary: Vocabulary) -> Ints:
        """For each code the word's number in a vocabulary, NONE if no query has it; behind the last
        code, and so for -1, NONE.
        """
        known = vocabulary.words
        if (
            self._numbers is None
            or self._numbers[0] is not vocabulary
            or self._numbers[1] != len(known)
        ):
            found = np.fromiter((known.get(word, NONE) for word in self.texts), np.int64, len(self))
            self._numbers = vocabulary, len(known), np.append(found, NONE)
        return self._numbers[2]

    def fitting(self, test: Prefix | Wildcard | Fuzzy) -> Ints:
        """The codes of the words that fit."""
        found = self._fitting.get(test)
        if found is None:
            if len(self._fitting) >= _MAX_KEPT:
                self._fitting.clear()
            found = self._fitting[test] = self._find(test)
        return found

    def _find(self, test: Prefix | Wildcard | Fuzzy) -> Ints:
        """Those with the right beginning are found quickly."""
        texts, codes = self._in_order
        if isinstance(test, Fuzzy):
            return codes[within_edits(test.text, texts, test.edits)]
        beginning = (
            test.text
            if isinstance(test, Prefix)
            else test.parts[0]
            if not test.parts[0].startswith("\0")
            else ""
        )
        low, high = bisect_left(texts, beginning), bisect_left(texts, beginning + _BEYOND)
        if isinstance(test, Prefix):
            return codes[low:high]
        pattern = wildcard_pattern(test)
        return codes[[at for at in range(low, high) if pattern.fullmatch(texts[at])]]

    @cached_property
    def _in_order(self) -> tuple[list[str], Ints]:
        order = sorted(range(len(self)), key=self.texts.__getitem__)
        return [self.texts[at] for at in order], np.array(order, np.int64)


def wildcard_pattern(test: Wildcard) -> re.Pattern[str]:
    """What stands between two * is taken where it comes first, once and for all: trying later
    places too finds nothing more, and could take forever.
    """
    runs = [""]
    for part in test.parts:
        if part == "\0*":
            runs.append("")
        else:
            runs[-1] += "." if part == "\0?" else re.escape(part)
    first, *between = runs
    last = f".*{between.pop()}" if between else ""
    return re.compile(first + "".join(f"(?>.*?{run})" for run in between if run) + last, re.DOTALL)
