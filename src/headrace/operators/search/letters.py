"""What each character is to words: whether it belongs to one, and how it is written when case and accents do not matter. `analysis` uses it, as tables.

Letters, digits, marks and `_` make words; each ideograph and each hiragana is a word of its own. Compatibility forms, case and diacritical marks are folded: `Ｅ́` is `e`,
`ß` is `ss`. Marks of other scripts, which tell words apart, stay.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

BREAK, WORD, ALONE = 0, 1, 2
_TABLE_END = 0x20000
_DIACRITICS = ((0x0300, 0x036F), (0x1AB0, 0x1AFF), (0x1DC0, 0x1DFF), (0x20D0, 0x20FF), (0xFE20, 0xFE2F))
_ALONE = ((0x3005, 0x3007), (0x3041, 0x309F), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF))

CodePoints = npt.NDArray[np.uint32]


def kind_of(character: str) -> int:
    """BREAK, WORD or ALONE."""
    if _within(ord(character), _ALONE):
        return ALONE
    if ord(character) >= _TABLE_END:
        return BREAK
    return WORD if character == "_" or unicodedata.category(character)[0] in "LNM" else BREAK


def folded(character: str) -> str:
    """The character without case, accents and compatibility forms: nothing, one character, or several."""
    if ord(character) >= _TABLE_END:
        return character
    apart = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", character).casefold())
    return unicodedata.normalize("NFC", "".join(each for each in apart if not _within(ord(each), _DIACRITICS)))


def _within(point: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(low <= point <= high for low, high in ranges)


@dataclass(frozen=True)
class Letters:
    """For each code point: its kind, and where in `text` its folded form begins and ends."""

    kinds: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    text: CodePoints

    def kinds_of(self, points: CodePoints) -> npt.NDArray[np.uint8]:
        return self.kinds[np.minimum(points, _TABLE_END)] if len(points) and points.max() < _TABLE_END else self._with_rare(points)

    def _with_rare(self, points: CodePoints) -> npt.NDArray[np.uint8]:
        """Beyond the table there are ideographs, and what is in no word."""
        kinds = self.kinds[np.minimum(points, _TABLE_END - 1)].copy()
        rare = points >= _TABLE_END
        kinds[rare] = np.where(points[rare] <= _ALONE[-1][1], ALONE, BREAK)
        return kinds

    def fold(self, points: CodePoints) -> tuple[CodePoints, npt.NDArray[np.int64]]:
        """The folded text, and where in it each of the characters begins; the last number is the text's length."""
        at = np.minimum(points, _TABLE_END - 1)
        rare = points >= _TABLE_END
        lengths = np.where(rare, 1, self.starts[at + 1] - self.starts[at])
        begins = np.append(0, np.cumsum(lengths))
        within = np.arange(int(begins[-1])) - np.repeat(begins[:-1], lengths)
        text = self.text[np.minimum(np.repeat(self.starts[at], lengths) + within, len(self.text) - 1)]
        return np.where(np.repeat(rare, lengths), np.repeat(points, lengths), text).astype(np.uint32), begins


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
    """The same for ASCII, where most text is quickest: which bytes belong to words, and each byte in lower case."""
    characters = [chr(point) for point in range(128)]
    return np.array([kind_of(each) == WORD for each in characters]), np.array([ord(each.lower()) for each in characters], np.uint8)
