"""Rows of many pgoutput messages, cut into columns at once: numpy walks all messages together, one column a step, and Arrow copies the texts.

A tuple is a count of columns (two bytes), then for each column a letter: `n` null, `u` unchanged (a large value that was not sent), `t` text with its length (four bytes) before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
_NULL, _UNCHANGED, _TEXT = b"nut"


@dataclass(frozen=True)
class Columns:
    """The tuples of some messages. `unchanged` says for each column which rows did not send it; nothing, if all did."""

    texts: list[pa.Array]
    unchanged: dict[int, Flags]
    ends: Ints


def read_ints(data: Bytes, at: Ints, size: int) -> Ints:
    """Big-endian numbers of some bytes at many places."""
    value = np.zeros(len(at), np.int64)
    for byte in range(size):
        value = (value << 8) | data[at + byte]
    return value


def read_tuples(data: Bytes, buffer: pa.Buffer, at: Ints, width: int) -> Columns:
    """The tuples that begin at these places, which are in ascending order, with `width` columns each."""
    counts = read_ints(data, at, 2)
    assert (counts == width).all(), "a row has another number of columns than its relation"
    at = at + 2
    texts: list[pa.Array] = []
    unchanged: dict[int, Flags] = {}
    for column in range(width):
        kinds = data[at]
        is_text = kinds == _TEXT
        if is_text.all():
            lengths = read_ints(data, at + 1, 4)
            starts = at + 5
        else:
            place = np.where(is_text, at + 1, 0)
            lengths = np.where(is_text, read_ints(data, place, 4), 0)
            starts = np.where(is_text, at + 5, at + 1)
            if (kinds == _UNCHANGED).any():
                unchanged[column] = kinds == _UNCHANGED
        texts.append(slices(buffer, starts, lengths, is_text))
        at = starts + lengths
    return Columns(texts, unchanged, at)


def slices(buffer: pa.Buffer, starts: Ints, lengths: Ints, valid: Flags) -> pa.Array:
    """Pieces of a buffer as an array of text. The pieces and the gaps between them are an Arrow array without any copy; taking every other element copies what is wanted."""
    count = len(starts)
    if not count:
        return pa.array([], pa.string())
    offsets = np.empty(2 * count, np.int32)
    offsets[0::2], offsets[1::2] = starts, starts + lengths
    everything = pa.Array.from_buffers(pa.string(), 2 * count - 1, [None, pa.py_buffer(offsets), buffer])
    wanted = np.arange(0, 2 * count, 2, dtype=np.int32)
    return everything.take(pa.array(wanted, mask=None if valid.all() else ~valid))
