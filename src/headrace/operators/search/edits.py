"""How many edits lie between a word and many others: a character more, less, another, or two neighbours exchanged (optimal string alignment)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.operators.buffers import Mask


def within_edits(word: str, others: Sequence[str], most: int) -> Mask:
    """Which of the others are at most so many edits away. All of similar length are compared at once."""
    near = np.zeros(len(others), np.bool_)
    lengths = np.array([len(each) for each in others], np.int64)
    for length in range(max(0, len(word) - most), len(word) + most + 1):
        which = np.flatnonzero(lengths == length)
        if len(which):
            texts = np.array([[ord(character) for character in others[at]] for at in which.tolist()], np.int64).reshape(len(which), length)
            near[which] = _distances(word, texts) <= most
    return near


def _distances(word: str, texts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The table of edit distances, row by row, for texts of one length."""
    count, length = texts.shape
    before: np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None = None
    last = np.tile(np.arange(length + 1), (count, 1))
    for row, character in enumerate(map(ord, word), 1):
        now = np.empty_like(last)
        now[:, 0] = row
        for column in range(1, length + 1):
            same = texts[:, column - 1] == character
            best = np.minimum(np.minimum(last[:, column], now[:, column - 1]) + 1, last[:, column - 1] + ~same)
            if before is not None and column > 1:
                exchanged = (texts[:, column - 2] == character) & (texts[:, column - 1] == ord(word[row - 2]))
                best = np.where(exchanged, np.minimum(best, before[:, column - 2] + 1), best)
            now[:, column] = best
        before, last = last, now
    return last[:, -1]
