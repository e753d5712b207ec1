"""The analyzer: texts to words, the same for queries and documents. Unicode words, lower case,
accents folded; stop words and stems by choice; whole columns at once.

    Analyzer().words("Crème brûlée, 2 €")  →  ["creme", "brulee", "2"]
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints
from headrace.errors import ConfigurationError, MissingExtra, nearest
from headrace.operators.search.vocabulary import Terms

# Characters: whether each belongs to a word, and its form without case and accents.
#
# Letters, digits, marks and `_` make words; each ideograph and each hiragana is a word of its own.
# Compatibility forms, case and diacritical marks are folded: `Ｅ́` is `e`, `ß` is `ss`. Marks of
# other scripts, which distinguish words, stay.


BREAK, WORD, ALONE = 0, 1, 2
_TABLE_END = 0x20000
_DIACRITICS = (
    (0x0300, 0x036F),
    (0x1AB0, 0x1AFF),
    (0x1DC0, 0x1DFF),
    (0x20D0, 0x20FF),
    (0xFE20, 0xFE2F),
)
_ALONE = (
    (0x3005, 0x3007),
    (0x3041, 0x309F),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x323AF),
)

CodePoints = npt.NDArray[np.uint32]


def character_kind(character: str) -> int:
    """The kind of a character: BREAK, WORD or ALONE."""
    if _within(ord(character), _ALONE):
        return ALONE
    if ord(character) >= _TABLE_END:
        return BREAK
    return WORD if character == "_" or unicodedata.category(character)[0] in "LNM" else BREAK


def fold_character(character: str) -> str:
    """The character without case, accents and compatibility forms: nothing, one character, or
    several.
    """
    if ord(character) >= _TABLE_END:
        return character
    apart = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", character).casefold())
    return unicodedata.normalize(
        "NFC", "".join(each for each in apart if not _within(ord(each), _DIACRITICS))
    )


def _within(point: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(low <= point <= high for low, high in ranges)


@dataclass(frozen=True)
class CharacterTable:
    """For each code point: its kind, and where in `text` its folded form begins and ends."""

    kinds: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    text: CodePoints

    def kinds_of(self, points: CodePoints) -> npt.NDArray[np.uint8]:
        """The kinds of code points. Beyond the table are ideographs, and what is in no word."""
        if len(points) and points.max() < _TABLE_END:
            return self.kinds[np.minimum(points, _TABLE_END)]
        kinds = self.kinds[np.minimum(points, _TABLE_END - 1)].copy()
        rare = points >= _TABLE_END
        kinds[rare] = np.where(points[rare] <= _ALONE[-1][1], ALONE, BREAK)
        return kinds

    def fold(self, points: CodePoints) -> tuple[CodePoints, npt.NDArray[np.int64]]:
        """The folded text, and where in it each of the characters begins; the last number is the
        text's length.
        """
        at = np.minimum(points, _TABLE_END - 1)
        rare = points >= _TABLE_END
        lengths = np.where(rare, 1, self.starts[at + 1] - self.starts[at])
        folded_starts = np.append(0, np.cumsum(lengths))
        within = np.arange(int(folded_starts[-1])) - np.repeat(folded_starts[:-1], lengths)
        text = self.text[
            np.minimum(np.repeat(self.starts[at], lengths) + within, len(self.text) - 1)
        ]
        return (
            np.where(np.repeat(rare, lengths), np.repeat(points, lengths), text).astype(np.uint32),
            folded_starts,
        )


@cache
def character_table() -> CharacterTable:
    """The table of all characters; built once a process, in a fifth of a second."""
    kinds = np.zeros(_TABLE_END + 1, np.uint8)
    forms = []
    for point in range(_TABLE_END):
        character = chr(point)
        if 0xD800 <= point <= 0xDFFF or (kind := character_kind(character)) == BREAK:
            forms.append(character if point < 0xD800 or point > 0xDFFF else "")
            continue
        kinds[point] = kind
        forms.append(fold_character(character))
    starts = np.append(0, np.cumsum([len(form) for form in forms]))
    return CharacterTable(
        kinds, starts, np.frombuffer("".join(forms).encode("utf-32-le"), np.uint32)
    )


@cache
def ascii_table() -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint8]]:
    """The table of ASCII, which is quicker: which bytes belong to words, and each byte in lower
    case.
    """
    characters = [chr(point) for point in range(128)]
    return np.array([character_kind(each) == WORD for each in characters]), np.array(
        [ord(each.lower()) for each in characters], np.uint8
    )


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
    of that.
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
    return (
        starts,
        ends,
        _slice_words(
            encoded, byte_offsets[folded_starts[starts]], byte_offsets[folded_starts[ends]]
        ),
    )


def _word_edges(kinds: npt.NDArray[np.uint8], offsets: Ints) -> tuple[Ints, Ints]:
    """Where words begin and end: no word goes on from one text to the next, nor beyond a character
    that is a word of its own.
    """
    if not len(kinds):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    before = np.append(np.uint8(BREAK), kinds[:-1])
    new = (kinds != before) | (kinds == ALONE)
    new[offsets[:-1][offsets[:-1] < len(kinds)]] = True
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
