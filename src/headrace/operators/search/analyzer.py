"""Texts to words, the same for queries and documents: Unicode words, lower case, accents folded;
stop words and stems by choice. Whole columns at once.

Analysis().words("Crème brûlée, 2 €")  →  ["creme", "brulee", "2"]
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

# What each character is to words: whether it belongs to one, and how it is written when case and
# accents do not matter. `analysis` uses it, as tables.
#
# Letters, digits, marks and `_` make words; each ideograph and each hiragana is a word of its own.
# Compatibility forms, case and diacritical marks are folded: `Ｅ́` is `e`, `ß` is `ss`. Marks of
# other scripts, which tell words apart, stay.


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


def kind_of(character: str) -> int:
    """BREAK, WORD or ALONE."""
    if _within(ord(character), _ALONE):
        return ALONE
    if ord(character) >= _TABLE_END:
        return BREAK
    return WORD if character == "_" or unicodedata.category(character)[0] in "LNM" else BREAK


def folded(character: str) -> str:
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
class Letters:
    """For each code point: its kind, and where in `text` its folded form begins and ends."""

    kinds: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    text: CodePoints

    def kinds_of(self, points: CodePoints) -> npt.NDArray[np.uint8]:
        return (
            self.kinds[np.minimum(points, _TABLE_END)]
            if len(points) and points.max() < _TABLE_END
            else self._with_rare(points)
        )

    def _with_rare(self, points: CodePoints) -> npt.NDArray[np.uint8]:
        """Beyond the table there are ideographs, and what is in no word."""
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
        begins = np.append(0, np.cumsum(lengths))
        within = np.arange(int(begins[-1])) - np.repeat(begins[:-1], lengths)
        text = self.text[
            np.minimum(np.repeat(self.starts[at], lengths) + within, len(self.text) - 1)
        ]
        return (
            np.where(np.repeat(rare, lengths), np.repeat(points, lengths), text).astype(np.uint32),
            begins,
        )


@cache
def letters() -> Letters:
    """The tables; made once a process, in a fifth of a second."""
    kinds = np.zeros(_TABLE_END + 1, np.uint8)
    forms = []
    for point in range(_TABLE_END):
        character = chr(point)
        if 0xD800 <= point <= 0xDFFF or (kind := kind_of(character)) == BREAK:
            forms.append(character if point < 0xD800 or point > 0xDFFF else "")
            continue
        kinds[point] = kind
        forms.append(folded(character))
    starts = np.append(0, np.cumsum([len(form) for form in forms]))
    return Letters(kinds, starts, np.frombuffer("".join(forms).encode("utf-32-le"), np.uint32))


@cache
def ascii_letters() -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint8]]:
    """The same for ASCII, where most text is quickest: which bytes belong to words, and each byte
    in lower case.
    """
    characters = [chr(point) for point in range(128)]
    return np.array([kind_of(each) == WORD for each in characters]), np.array(
        [ord(each.lower()) for each in characters], np.uint8
    )


MAX_STEMS_KEPT = 200_000
NO_WORD = -1
_ASCII_WORDS = re.compile("[a-z0-9_]+")


@dataclass(frozen=True)
class Tokens:
    """The words of many texts, in their order. `rows`: whose they are; `starts` and `ends`: where
    in the text, in characters; `codes`: which of `terms`.

    A stop word keeps its place, and has the code NO_WORD.
    """

    rows: Ints
    starts: Ints
    ends: Ints
    codes: Ints
    terms: Terms
    begins: Ints
    """Where each row's words begin, and where the last row's end."""

    def slice(self, first: int, count: int) -> Tokens:
        """The words of some of the texts."""
        low, high = int(self.begins[first]), int(self.begins[first + count])
        rows, begins = self.rows[low:high] - first, self.begins[first : first + count + 1] - low
        return Tokens(
            rows,
            self.starts[low:high],
            self.ends[low:high],
            self.codes[low:high],
            self.terms,
            begins,
        )


@dataclass(frozen=True)
class Analysis:
    """How texts become words. `language`: of the stemmer, such as "english"; without one words stay
    as they are. `stop_words`: left out on both sides.
    """

    language: str | None = None
    stop_words: frozenset[str] = frozenset()
    _stems: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def words(self, text: str) -> list[str | None]:
        """One text's words; None where a stop word stood."""
        if text.isascii():
            return [
                None if word in self._left_out else self._stem(word)
                for word in _ASCII_WORDS.findall(text.lower())
            ]
        found = self.tokens(pa.array([text], pa.string()))
        terms: list[str | None] = [*found.terms.texts, None]
        return [terms[code] for code in found.codes]

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
            starts, ends, words = _ascii_words(data, offsets)
        else:
            offsets = np.append(0, np.cumsum(pc.utf8_length(texts).to_numpy(zero_copy_only=False)))
            starts, ends, words = _words(data, offsets)
        return self._told_apart(offsets, starts, ends, words)

    def _told_apart(self, offsets: Ints, starts: Ints, ends: Ints, words: pa.Array) -> Tokens:
        distinct = words.dictionary_encode()
        codes, terms = distinct.indices.to_numpy().astype(np.int64), distinct.dictionary
        if self.language is not None or self.stop_words:
            codes, terms = self._chosen(codes, terms)
        begins = np.searchsorted(starts, offsets)
        rows = np.repeat(np.arange(len(offsets) - 1), np.diff(begins))
        return Tokens(
            rows, starts - offsets[rows], ends - offsets[rows], codes, Terms(terms), begins
        )

    def _chosen(self, codes: Ints, terms: pa.Array) -> tuple[Ints, pa.Array]:
        """Stop words out, the others as their stems; several words may have one."""
        given = terms.to_pylist()
        known: dict[str, int] = {}
        place = [
            NO_WORD if word in self._left_out else known.setdefault(self._stem(word), len(known))
            for word in given
        ]
        return np.array([*place, NO_WORD], np.int64)[codes], pa.array(list(known), pa.string())

    @cached_property
    def _left_out(self) -> frozenset[str]:
        """Stop words, in the spelling that words have here."""
        plain = Analysis()
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
            if len(self._stems) >= MAX_STEMS_KEPT:
                self._stems.clear()
            stem = self._stems[word] = self._stemmer(word)
        return stem

    @cached_property
    def _stemmer(self) -> Callable[[str], str]:
        stemming: Callable[[str], str] = _snowball(self.language or "").stemWord
        return stemming

    def check(self) -> Analysis:
        """The same, if its language is one that there is."""
        if self.language is not None:
            _snowball(self.language)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """To another process goes what was chosen, and not what was found out."""
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


def _ascii_words(data: npt.NDArray[np.uint8], offsets: Ints) -> tuple[Ints, Ints, pa.Array]:
    is_word, lower = ascii_letters()
    starts, ends = _edges(is_word[data].astype(np.uint8), offsets)
    return starts, ends, _cut(lower[data], starts, ends)


def _words(data: npt.NDArray[np.uint8], offsets: Ints) -> tuple[Ints, Ints, pa.Array]:
    """The same for any text: characters are folded first, one into several perhaps, and words are
    cut out of that.
    """
    points = np.frombuffer(data.tobytes().decode("utf-8").encode("utf-32-le"), np.uint32)
    table = letters()
    starts, ends = _edges(table.kinds_of(points), offsets)
    text, begins = table.fold(points)
    there = begins[ends] > begins[starts]  # a mark alone is no word
    starts, ends = starts[there], ends[there]
    widths = 1 + (text >= 0x80).astype(np.int64) + (text >= 0x800) + (text >= 0x10000)
    places = np.append(0, np.cumsum(widths))
    encoded = np.frombuffer(
        text.astype("<u4").tobytes().decode("utf-32-le").encode("utf-8"), np.uint8
    )
    return starts, ends, _cut(encoded, places[begins[starts]], places[begins[ends]])


def _edges(kinds: npt.NDArray[np.uint8], offsets: Ints) -> tuple[Ints, Ints]:
    """Where words begin and end: no word goes on from one text to the next, nor beyond a character
    that is one alone.
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


def _cut(data: npt.NDArray[np.uint8], starts: Ints, ends: Ints) -> pa.Array:
    """The words as strings: every second piece of the text."""
    offsets = np.empty(2 * len(starts), np.int64)
    offsets[0::2], offsets[1::2] = starts, ends
    pieces = pa.LargeStringArray.from_buffers(
        max(len(offsets) - 1, 0), pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(data))
    )
    return pieces.take(pa.array(np.arange(0, len(offsets), 2))).cast(pa.string())
