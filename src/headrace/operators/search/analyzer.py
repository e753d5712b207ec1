"""The analyzer: texts to words, the same for queries and documents. Unicode words, lower case,
accents folded; stop words and stems by choice; whole columns at once.

    Analyzer().words("Crème brûlée, 2 €")  →  ["creme", "brulee", "2"]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints
from headrace.errors import ConfigurationError, MissingExtra, nearest
from headrace.operators.search.character_table import (
    ALONE,
    BREAK,
    JOINED,
    ascii_table,
    character_table,
)
from headrace.operators.search.vocabulary import Terms

MAX_CACHED_STEMS = 200_000
NO_WORD = -1
_ASCII_WORDS = re.compile("[a-z0-9_]+")


@dataclass(frozen=True)
class Tokens:
    """The words of many texts, in order. Per word: the row of its text, where it starts and ends in
    the text, in characters, and its code, an index of `terms`.

    A stop word keeps its position, and has the code NO_WORD.
    """

    rows: Ints
    starts: Ints
    ends: Ints
    codes: Ints
    terms: Terms
    row_starts: Ints
    """Where the words of each row begin, and where those of the last row end."""

    def slice(self, first: int, count: int) -> Tokens:
        """The words of some of the texts."""
        low, high = int(self.row_starts[first]), int(self.row_starts[first + count])
        rows, row_starts = (
            self.rows[low:high] - first,
            self.row_starts[first : first + count + 1] - low,
        )
        return Tokens(
            rows=rows,
            starts=self.starts[low:high],
            ends=self.ends[low:high],
            codes=self.codes[low:high],
            terms=self.terms,
            row_starts=row_starts,
        )


@dataclass(frozen=True)
class Analyzer:
    """How texts become words. `language` is that of the stemmer, such as "english"; without one
    words are not stemmed. `stop_words` are left out of queries and documents.
    """

    language: str | None = None
    stop_words: frozenset[str] = frozenset()
    _stems: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def words(self, text: str) -> list[str | None]:
        """The words of one text; None where a stop word stands."""
        if text.isascii():
            return [
                None if word in self._folded_stop_words else self._stem(word)
                for word in _ASCII_WORDS.findall(text.lower())
            ]
        tokens = self.tokens(pa.array([text], pa.string()))
        terms: list[str | None] = [*tokens.terms.texts, None]
        return [terms[code] for code in tokens.codes]

    def tokens(self, texts: pa.Array) -> Tokens:
        """The words of a column of strings; a null has none."""
        texts = texts.cast(pa.large_string()).fill_null("")
        offsets = (
            np.frombuffer(
                texts.buffers()[1], np.int64, count=len(texts) + 1, offset=texts.offset * 8
            )
            if len(texts)
            else np.zeros(1, np.int64)
        )
        data = (
            np.frombuffer(texts.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
            if len(texts)
            else np.zeros(0, np.uint8)
        )
        offsets = offsets - offsets[0]
        if not len(data) or data.max() < 128:
            is_word, lower = ascii_table()
            starts, ends = _word_edges(is_word[data].astype(np.uint8), offsets)
            words = _slice_words(lower[data], starts, ends)
        else:
            offsets = np.append(0, np.cumsum(pc.utf8_length(texts).to_numpy(zero_copy_only=False)))
            starts, ends, words = _unicode_words(data, offsets)
        return self._as_tokens(offsets, starts, ends, words)

    def _as_tokens(self, offsets: Ints, starts: Ints, ends: Ints, words: pa.Array) -> Tokens:
        distinct = words.dictionary_encode()
        codes, terms = distinct.indices.to_numpy().astype(np.int64), distinct.dictionary
        if self.language is not None or self.stop_words:
            codes, terms = self._stem_terms(codes, terms)
        row_starts = np.searchsorted(starts, offsets)
        rows = np.repeat(np.arange(len(offsets) - 1), np.diff(row_starts))
        return Tokens(
            rows=rows,
            starts=starts - offsets[rows],
            ends=ends - offsets[rows],
            codes=codes,
            terms=Terms(terms),
            row_starts=row_starts,
        )

    def _stem_terms(self, codes: Ints, terms: pa.Array) -> tuple[Ints, pa.Array]:
        """Leave out stop words and stem the others; several words may have one stem."""
        words = terms.to_pylist()
        stems: dict[str, int] = {}
        new_codes = [
            NO_WORD
            if word in self._folded_stop_words
            else stems.setdefault(self._stem(word), len(stems))
            for word in words
        ]
        return np.array([*new_codes, NO_WORD], np.int64)[codes], pa.array(list(stems), pa.string())

    @cached_property
    def _folded_stop_words(self) -> frozenset[str]:
        """Stop words, folded as words are."""
        plain = Analyzer()
        return (
            frozenset(
                word for each in self.stop_words for word in plain.words(each) if word is not None
            )
            if self.stop_words
            else frozenset()
        )

    def _stem(self, word: str) -> str:
        if self.language is None:
            return word
        stem = self._stems.get(word)
        if stem is None:
            if len(self._stems) >= MAX_CACHED_STEMS:
                self._stems.clear()
            stem = self._stems[word] = self._stemmer(word)
        return stem

    @cached_property
    def _stemmer(self) -> Callable[[str], str]:
        stemming: Callable[[str], str] = _snowball(self.language or "").stemWord
        return stemming

    def check(self) -> Analyzer:
        """Return the analyzer, or raise `ConfigurationError` if there is no stemmer for its
        language.
        """
        if self.language is not None:
            _snowball(self.language)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Another process gets the settings, and not the cached stems."""
        return {"language": self.language, "stop_words": self.stop_words, "_stems": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _snowball(language: str) -> Any:
    try:
        import snowballstemmer
    except ImportError as error:
        raise MissingExtra("Stems of words", "search") from error
    known: Iterable[str] = snowballstemmer.algorithms()
    if language not in known:
        raise ConfigurationError(
            f"There is no stemmer for {language!r}: {nearest(language, known)}",
            fix="choose one of them, or leave out the language.",
        )
    return snowballstemmer.stemmer(language)


def _unicode_words(data: npt.NDArray[np.uint8], offsets: Ints) -> tuple[Ints, Ints, pa.Array]:
    """The words of any text: characters are folded first, some into several, and words are cut out
    of that. Characters that were written in several parts become one.
    """
    points = np.frombuffer(data.tobytes().decode("utf-8").encode("utf-32-le"), np.uint32)
    table = character_table()
    starts, ends = _word_edges(table.kinds_of(points), offsets)
    text, folded_starts = table.fold(points)
    is_word = folded_starts[ends] > folded_starts[starts]  # a mark alone is no word
    starts, ends = starts[is_word], ends[is_word]
    widths = 1 + (text >= 0x80).astype(np.int64) + (text >= 0x800) + (text >= 0x10000)
    byte_offsets = np.append(0, np.cumsum(widths))
    encoded = np.frombuffer(
        text.astype("<u4").tobytes().decode("utf-32-le").encode("utf-8"), np.uint8
    )
    words = _slice_words(
        encoded, byte_offsets[folded_starts[starts]], byte_offsets[folded_starts[ends]]
    )
    if not table.is_composed(text):
        words = pc.utf8_normalize(words, form="NFC")
    return starts, ends, words


def _word_edges(kinds: npt.NDArray[np.uint8], offsets: Ints) -> tuple[Ints, Ints]:
    """Where words begin and end: no word goes on from one text to the next, nor beyond a character
    that is a word of its own.
    """
    if not len(kinds):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    is_first = np.zeros(len(kinds), np.bool_)
    is_first[offsets[:-1][offsets[:-1] < len(kinds)]] = True
    is_joined = kinds == JOINED
    if is_joined.any():  # they have the kind of the character that they belong to
        owns = ~is_joined | is_first
        kinds = kinds[np.maximum.accumulate(np.where(owns, np.arange(len(kinds)), 0))]
        kinds = np.where(kinds == JOINED, np.uint8(BREAK), kinds)
    before = np.append(np.uint8(BREAK), kinds[:-1])
    new = (kinds != before) | ((kinds == ALONE) & ~is_joined) | is_first
    edges = np.flatnonzero(new)
    inside = kinds[edges] != BREAK
    ends = np.append(edges[1:], len(kinds))
    return edges[inside], ends[inside]


def _slice_words(data: npt.NDArray[np.uint8], starts: Ints, ends: Ints) -> pa.Array:
    """The words as strings: every second piece of the text."""
    offsets = np.empty(2 * len(starts), np.int64)
    offsets[0::2], offsets[1::2] = starts, ends
    pieces = pa.LargeStringArray.from_buffers(
        max(len(offsets) - 1, 0), pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(data))
    )
    return pieces.take(pa.array(np.arange(0, len(offsets), 2))).cast(pa.string())
