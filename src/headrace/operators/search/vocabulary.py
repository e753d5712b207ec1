"""Everything that stored queries ask for, each thing once and with a number: its *feature*. Of a document it is then known which features it has.

It only grows; an index that is folded starts a new one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.operators.buffers import Ints
from headrace.operators.search.fields import Fields
from headrace.operators.search.syntax import Everything, Phrase, Test, Word

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
        """The features of some words in a field; NONE where no query asks for it there. A word may be NONE itself."""
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
        found = [(number, test) for number, test in enumerate(self.tests) if isinstance(test, Phrase)]
        row_of = np.full(len(self.tests), NONE, np.int32)
        row_of[[number for number, _ in found]] = np.arange(len(found))
        lengths = [len(test.words) for _, test in found]
        pairs = [(self.words[text], place) for _, test in found for text, place in test.words]
        table = np.array(pairs, np.int64).reshape(-1, 2)
        return PhraseTable(row_of, np.append(0, np.cumsum(lengths, dtype=np.int64)), table[:, 0].copy(), table[:, 1].copy())
