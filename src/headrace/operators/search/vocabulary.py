"""The vocabulary: every word and other test that stored queries use, each once and with a number,
its *feature*. Of a document it is then known which features it has.

A vocabulary only grows; an index that is rebuilt starts a new one.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints
from headrace.operators.search.edit_distance import WordList
from headrace.operators.search.syntax import (
    Everything,
    Fields,
    Fuzzy,
    Phrase,
    Prefix,
    Regex,
    Test,
    Wildcard,
    Word,
)

Int32s = npt.NDArray[np.int32]
TRUE, FALSE = 0, 1
ABSENT = -1


@dataclass(frozen=True)
class PhraseTable:
    """The phrases of a vocabulary: the row of each phrase's feature, and its words with their
    positions, from `starts[row]` to `starts[row + 1]`.
    """

    row_of: Int32s
    """By feature; ABSENT for other kinds of tests."""
    starts: Ints
    words: Ints
    positions: Ints


class Vocabulary:
    """Words and other tests, by number."""

    BUILT_IN = 2
    """The number of tests that every vocabulary has: always true, and always false."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.words: dict[str, int] = {}
        self.tests: list[Test | None] = [Everything(), None]
        self._features: dict[Test, int] = {Everything(): TRUE}
        self.values: list[int] = []
        """The features that are values of string columns."""
        self._of_word = [np.full(1024, ABSENT, np.int32) for _ in range(fields.words)]
        self._phrases: PhraseTable | None = None
        self._costly_features: list[int] = []
        self._costly_array = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.tests)

    def feature(self, test: Test) -> int:
        """The feature of a test, which is added if it is new."""
        number = self._features.get(test)
        return self._add(test) if number is None else number

    def _add(self, test: Test) -> int:
        number = self._features[test] = len(self.tests)
        self.tests.append(test)
        if isinstance(test, Word):
            word, field = self.word(test.text), self.fields.numbers[test.field]
            table = self._of_word[field]
            if word >= len(table):
                grown = np.full(max(2 * len(table), 2 * word), ABSENT, np.int32)
                grown[: len(table)] = table
                table = self._of_word[field] = grown
            table[word] = number
            if test.field is not None and test.field not in self.fields.text:
                self.values.append(number)
        else:
            self._costly_features.append(number)
        if isinstance(test, Phrase):
            for text, _ in test.words:
                self.word(text)
        return number

    def word(self, text: str) -> int:
        return self.words.setdefault(text, len(self.words))

    def word_features(self, field: int, words: Ints) -> Int32s:
        """The features of some words in a field; ABSENT where no query uses the word there. A word
        may be ABSENT itself.
        """
        table = self._of_word[field]
        inside = (words >= 0) & (words < len(table))
        return np.where(inside, table[np.where(inside, words, 0)], np.int32(ABSENT))

    def costly_features(self) -> Ints:
        """The features that are no words: they are evaluated when a query needs them."""
        if len(self._costly_array) != len(self._costly_features):
            self._costly_array = np.array(self._costly_features, np.int64)
        return self._costly_array

    def phrases(self) -> PhraseTable:
        if self._phrases is None or len(self._phrases.row_of) != len(self.tests):
            self._phrases = self._phrase_table()
        return self._phrases

    def _phrase_table(self) -> PhraseTable:
        phrases = [
            (number, test) for number, test in enumerate(self.tests) if isinstance(test, Phrase)
        ]
        row_of = np.full(len(self.tests), ABSENT, np.int32)
        row_of[[number for number, _ in phrases]] = np.arange(len(phrases))
        lengths = [len(test.words) for _, test in phrases]
        pairs = [
            (self.words[text], position) for _, test in phrases for text, position in test.words
        ]
        table = np.array(pairs, np.int64).reshape(-1, 2)
        return PhraseTable(
            row_of,
            np.append(0, np.cumsum(lengths, dtype=np.int64)),
            table[:, 0].copy(),
            table[:, 1].copy(),
        )


# Terms: the distinct words of some texts


_AFTER_ALL_TEXTS = "\U0010ffff"
_MAX_CACHED_TESTS = 10_000


class Terms:
    """The distinct words of some texts, each with a code, its index in `array`; -1 stands for a
    stop word. What is known of a word is found once, however many documents have it and queries use
    it.
    """

    def __init__(self, array: pa.Array) -> None:
        self.array = array
        self._word_numbers: tuple[Vocabulary, int, Ints] | None = None
        self._matching_codes: dict[Prefix | Wildcard | Fuzzy | Regex, Ints] = {}

    def __len__(self) -> int:
        return len(self.array)

    @cached_property
    def texts(self) -> list[str]:
        texts: list[str] = self.array.to_pylist()
        return texts

    def word_numbers(self, vocabulary: Vocabulary) -> Ints:
        """For each code the number of the word in a vocabulary, ABSENT if no query has it; with an
        ABSENT behind the last, which is the one of code -1.
        """
        known = vocabulary.words
        if (
            self._word_numbers is None
            or self._word_numbers[0] is not vocabulary
            or self._word_numbers[1] != len(known)
        ):
            found = np.fromiter(
                (known.get(word, ABSENT) for word in self.texts), np.int64, len(self)
            )
            self._word_numbers = vocabulary, len(known), np.append(found, ABSENT)
        return self._word_numbers[2]

    def matching_codes(self, test: Prefix | Wildcard | Fuzzy | Regex) -> Ints:
        """The codes of the words that match a test."""
        codes = self._matching_codes.get(test)
        if codes is None:
            if len(self._matching_codes) >= _MAX_CACHED_TESTS:
                self._matching_codes.clear()
            codes = self._matching_codes[test] = self._find_codes(test)
        return codes

    def _find_codes(self, test: Prefix | Wildcard | Fuzzy | Regex) -> Ints:
        """The codes of the words that match a test; only words with the right prefix are
        compared.
        """
        if isinstance(test, Fuzzy):
            return self._word_list.near(test.text, test.edits)
        if isinstance(test, Regex):
            fits = pc.match_substring_regex(self.array, whole_word(test.text))
            return np.flatnonzero(fits.to_numpy(zero_copy_only=False))
        texts, codes = self._in_order
        beginning = (
            test.text
            if isinstance(test, Prefix)
            else test.parts[0]
            if not test.parts[0].startswith("\0")
            else ""
        )
        low, high = bisect_left(texts, beginning), bisect_left(texts, beginning + _AFTER_ALL_TEXTS)
        if isinstance(test, Prefix):
            return codes[low:high]
        within = codes[low:high]
        fits = pc.match_substring_regex(self.array.take(pa.array(within)), wildcard_regex(test))
        fitting: Ints = within[fits.to_numpy(zero_copy_only=False)]
        return fitting

    @cached_property
    def _word_list(self) -> WordList:
        return WordList(self.texts)

    @cached_property
    def _in_order(self) -> tuple[list[str], Ints]:
        order = sorted(range(len(self)), key=self.texts.__getitem__)
        return [self.texts[at] for at in order], np.array(order, np.int64)


def wildcard_regex(test: Wildcard) -> str:
    """The regular expression of a wildcard."""
    signs = {"\0*": ".*", "\0?": "."}
    return whole_word("".join(signs.get(part) or re.escape(part) for part in test.parts))


def whole_word(regex: str) -> str:
    """The regular expression of RE2, which takes linear time, for whole words."""
    return rf"(?s)\A(?:{regex})\z"
