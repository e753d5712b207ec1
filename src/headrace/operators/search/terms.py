"""The different words of some texts, in no order, each by its code; and what is found out about them once, however many documents have them and queries ask."""

from __future__ import annotations

import re
from bisect import bisect_left
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.operators.buffers import Ints
from headrace.operators.search.edits import within_edits
from headrace.operators.search.syntax import Fuzzy, Prefix, Wildcard
from headrace.operators.search.vocabulary import NONE, Vocabulary

_BEYOND = "\U0010ffff"
_MOST_KEPT = 10_000


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
        """For each code the word's number in a vocabulary, NONE if no query has it; behind the last code, and so for -1, NONE."""
        known = vocabulary.words
        if self._numbers is None or self._numbers[0] is not vocabulary or self._numbers[1] != len(known):
            found = np.fromiter((known.get(word, NONE) for word in self.texts), np.int64, len(self))
            self._numbers = vocabulary, len(known), np.append(found, NONE)
        return self._numbers[2]

    def fitting(self, test: Prefix | Wildcard | Fuzzy) -> Ints:
        """The codes of the words that fit."""
        found = self._fitting.get(test)
        if found is None:
            if len(self._fitting) >= _MOST_KEPT:
                self._fitting.clear()
            found = self._fitting[test] = self._find(test)
        return found

    def _find(self, test: Prefix | Wildcard | Fuzzy) -> Ints:
        """Those with the right beginning are found quickly."""
        texts, codes = self._in_order
        if isinstance(test, Fuzzy):
            return codes[within_edits(test.text, texts, test.edits)]
        beginning = test.text if isinstance(test, Prefix) else test.parts[0] if not test.parts[0].startswith("\0") else ""
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
    """What stands between two * is taken where it comes first, once and for all: trying later places too finds nothing more, and could take forever."""
    runs = [""]
    for part in test.parts:
        if part == "\0*":
            runs.append("")
        else:
            runs[-1] += "." if part == "\0?" else re.escape(part)
    first, *between = runs
    last = f".*{between.pop()}" if between else ""
    return re.compile(first + "".join(f"(?>.*?{run})" for run in between if run) + last, re.DOTALL)
