"""Words that are a few edits away from a word, among many at once.

Example: `storm~1` among 5,000 words. Those of 4 to 6 characters are left by their lengths; of these
the words that lack at most one of its characters, and have at most one that it lacks, by one word
of bits each; for the few that are left (`storm`, `storms`, `stork`, `motors`) the table of edit
distances is computed, of which only the diagonals within one edit matter.

An edit is a character more, less, another, or two neighbours exchanged, none of them edited twice
(optimal string alignment, as Lucene's fuzzy queries have it). Characters are code points.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.columnar.buffers import Ints, expand_ranges

CodePoints = npt.NDArray[np.uint32]
_NO_CHARACTER = np.uint32(0xFFFFFFFF)
_FIRST_PART = 64
"""The characters that are compared first: few long words begin alike."""


class WordList:
    """Words, prepared for comparisons with others."""

    def __init__(self, words: Sequence[str]) -> None:
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        # By length, so that the words of some lengths are a range.
        self._order = np.argsort(lengths, kind="stable")
        self._lengths = lengths[self._order]
        self._points = _code_points("".join(words))
        starts = np.cumsum(lengths) - lengths
        self._starts = starts[self._order]
        self._characters = self._bits_of_characters(starts, lengths)[self._order]

    def _bits_of_characters(self, starts: Ints, lengths: Ints) -> npt.NDArray[np.uint64]:
        """For each word a bit for each of its characters, by its code point modulo 64."""
        bits = np.zeros(len(lengths), np.uint64)
        filled = np.flatnonzero(lengths > 0)
        if len(filled):
            bits[filled] = np.bitwise_or.reduceat(_bit_of(self._points), starts[filled])
        return bits

    def near(self, word: str, max_edits: int) -> Ints:
        """The indices of the words that are at most so many edits away from a word, in order."""
        points = _code_points(word)
        bounds = np.searchsorted(
            self._lengths, [len(points) - max_edits, len(points) + max_edits + 1]
        )
        candidates = np.arange(bounds[0], bounds[1])
        own = np.bitwise_or.reduce(_bit_of(points)) if len(points) else np.uint64(0)
        others = self._characters[bounds[0] : bounds[1]]
        is_near = np.bitwise_count(others & ~own) <= max_edits
        is_near &= np.bitwise_count(own & ~others) <= max_edits
        candidates = candidates[is_near]
        # Long words by their first characters: what is too far apart there stays so.
        if len(points) > 2 * _FIRST_PART:
            candidates = self._within(candidates, points, max_edits, _FIRST_PART)
        candidates = self._within(candidates, points, max_edits, len(points))
        return np.sort(self._order[candidates])

    def _within(self, candidates: Ints, points: CodePoints, max_edits: int, rows: int) -> Ints:
        """Which candidates are within reach of the first characters of a word, or of all."""
        if not len(candidates):
            return candidates
        lengths = self._lengths[candidates]
        # Characters of candidates, with so many in front and behind that are none.
        width = rows + 2 * max_edits + 2
        texts = np.full((len(candidates), width), _NO_CHARACTER, np.uint32)
        taken = np.minimum(lengths, rows + max_edits)
        place = np.repeat(np.arange(len(candidates)) * width + max_edits + 1, taken)
        offsets = expand_ranges(np.zeros(len(taken), np.int64), taken)
        source = np.repeat(self._starts[candidates], taken) + offsets
        texts.reshape(-1)[place + offsets] = self._points[source]
        distance = _banded_distances(points[:rows], texts, max_edits)
        if rows < len(points):
            beginning: Ints = candidates[distance.min(axis=1) <= max_edits]
            return beginning
        # The diagonal on which the whole candidate has been read.
        diagonal = lengths - len(points) + max_edits
        whole: Ints = candidates[distance[np.arange(len(candidates)), diagonal] <= max_edits]
        return whole


def _banded_distances(
    word: CodePoints, texts: npt.NDArray[np.uint32], max_edits: int
) -> npt.NDArray[np.int16]:
    """The last row of the tables of edit distances: for each text the distances of the word to its
    beginnings of `len(word) - max_edits` to `len(word) + max_edits` characters. `texts` have
    `max_edits + 1` characters in front that are none.
    """
    count, diagonals = len(texts), 2 * max_edits + 1
    far = max_edits + 1
    # Diagonal d stands for texts of `row + d - max_edits` characters; one more on either side.
    last = np.full((count, diagonals + 2), far, np.int16)
    last[:, max_edits + 1 : diagonals + 1] = np.arange(max_edits + 1)
    before = np.full_like(last, far)
    for row, character in enumerate(word.tolist(), 1):
        # The text's characters of the diagonals, and those in front of them.
        here = texts[:, row : row + diagonals] == character
        now = np.full_like(last, far)
        inner = now[:, 1:-1]
        np.minimum(last[:, 1:-1] + ~here, last[:, 2:] + 1, out=inner)
        if row > 1:
            exchanged = here[:, :-1]
            exchanged = exchanged & (texts[:, row + 1 : row + diagonals] == word[row - 2])
            np.minimum(
                inner[:, 1:], np.where(exchanged, before[:, 2:-1] + 1, far), out=inner[:, 1:]
            )
        if row <= max_edits:
            inner[:, max_edits - row] = row
            inner[:, : max_edits - row] = far
        for diagonal in range(1, diagonals):
            np.minimum(inner[:, diagonal], inner[:, diagonal - 1] + 1, out=inner[:, diagonal])
        before, last = last, now
    return last[:, 1:-1]


def _code_points(text: str) -> CodePoints:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _bit_of(points: CodePoints) -> npt.NDArray[np.uint64]:
    return np.left_shift(np.uint64(1), (points % 64).astype(np.uint64))
