"""Keys as integer codes in the same order, and sorting by them.

Sorting 64-bit integers is several times as fast as sorting byte strings or a `lexsort` over several
columns. So keys become codes, several columns are packed into one word, and the row index is packed
into the low bits where it fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, fixed_width_values

Codes = npt.NDArray[np.uint64]
_WORD_BITS = 64
_SAMPLE_ROWS = 4096
_FEW_RATIO = 0.97


def key_codes(keys: pa.Array) -> Codes:
    """A code for each key: codes compare as the keys' bytes do."""
    if pa.types.is_fixed_size_binary(keys.type):
        fixed = (
            _short_codes(keys) if keys.type.byte_width <= _WORD_BITS // 8 else _packed_codes(keys)
        )
        if fixed is not None:
            return fixed
    encoded = keys.dictionary_encode()
    ranks = np.empty(len(encoded.dictionary), np.uint64)
    ranks[pc.sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(ranks), dtype=np.uint64)
    codes: Codes = ranks[encoded.indices.to_numpy()]
    return codes


def _short_codes(keys: pa.FixedSizeBinaryArray) -> Codes:
    """Keys of at most eight bytes as big-endian integers."""
    width: int = keys.type.byte_width
    data = fixed_width_values(keys, np.uint8)
    padded = data
    if width < 8:
        padded = np.zeros((len(keys), 8), np.uint8)
        padded[:, 8 - width :] = data.reshape(-1, width)
    return padded.view(">u8").astype(np.uint64).reshape(-1)


def _packed_codes(keys: pa.FixedSizeBinaryArray) -> Codes | None:
    """The bits in which longer keys differ, packed into one word; None if they do not fit. Keys of
    several columns mostly differ in few bits.
    """
    width: int = keys.type.byte_width
    padded = np.zeros((len(keys), -(-width // 8) * 8), np.uint8)
    padded[:, :width] = fixed_width_values(keys, np.uint8).reshape(-1, width)
    codes, used = np.zeros(len(keys), np.uint64), 0
    least_significant_first = padded.view(">u8").T[::-1] if len(keys) else ()
    for word in least_significant_first:
        values = word.astype(np.uint64)
        values -= values.min()
        differing = int(np.bitwise_or.reduce(values))
        if not differing:
            continue
        equal_low_bits = (differing & -differing).bit_length() - 1
        bits = differing.bit_length() - equal_low_bits
        if used + bits > _WORD_BITS:
            return None
        codes |= (values >> np.uint64(equal_low_bits)) << np.uint64(used)
        used += bits
    return codes


def stable_sort(codes: Codes) -> tuple[Ints, Codes]:
    """The stable sort order of codes, and the sorted codes minus the smallest code.

    Sorting integers is several times as fast as sorting indices by them, so code and index are
    sorted together in one word where both fit.
    """
    if not len(codes):
        return np.zeros(0, np.int64), codes
    lowest, highest = int(codes.min()), int(codes.max())
    position_bits = (len(codes) - 1).bit_length()
    if (highest - lowest).bit_length() + position_bits > _WORD_BITS:
        order = np.argsort(codes, kind="stable")
        return order, codes[order] - np.uint64(lowest)
    shift = np.uint64(position_bits)
    together = np.sort(
        ((codes - np.uint64(lowest)) << shift) | np.arange(len(codes), dtype=np.uint64)
    )
    return (together & np.uint64((1 << position_bits) - 1)).astype(np.int64), together >> shift


def has_few_distinct(codes: Codes) -> bool:
    """Whether hashing is likely to be faster than sorting, judged by the distinct codes of a
    sample.
    """
    sample = codes[:: max(1, len(codes) // _SAMPLE_ROWS)]
    return len(np.unique(sample)) < _FEW_RATIO * len(sample)


def rank_by_hashing(codes: Codes) -> tuple[Ints, Ints]:
    """The index of the first occurrence of each distinct code, in order of the codes; and the rank
    of each code among the distinct ones.
    """
    encoded = pa.array(codes).dictionary_encode()
    numbers = encoded.indices.to_numpy()
    order = np.argsort(encoded.dictionary.to_numpy())
    ranks, firsts = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    firsts[numbers[::-1]] = np.arange(len(numbers))[::-1]
    return firsts[order], ranks[numbers]


# Several parts in one code


def pair_codes(codes: Codes, numbers: Ints) -> Codes:
    """A code for each pair of code and number, in the order of the pairs."""
    distinct, ranks = rank_integers(numbers)
    return spread_codes(codes, len(distinct)) + ranks.astype(np.uint64)


def spread_codes(codes: Codes, gap: int) -> Codes:
    """Codes in the same order, from 0, at least `gap` apart: a number below `gap` can be added to
    each.
    """
    if not len(codes):
        return codes
    lowest = codes.min()
    if (int(codes.max()) - int(lowest) + 1) * max(gap, 1) >= 1 << _WORD_BITS:
        codes, lowest = rank_by_hashing(codes)[1].astype(np.uint64), np.uint64(0)
    spread: Codes = (codes - lowest) * np.uint64(gap)
    return spread


def rank_integers(numbers: Ints) -> tuple[Ints, Ints]:
    """The distinct numbers in order, and the rank of each number among them. Fastest where the
    numbers are close together.
    """
    if not len(numbers):
        return numbers, numbers
    lowest, highest = int(numbers.min()), int(numbers.max())
    if highest - lowest > 4 * len(numbers) + 1000:
        distinct, ranks = np.unique(numbers, return_inverse=True)
        return distinct, ranks
    occurs = np.zeros(highest - lowest + 1, np.bool_)
    occurs[numbers - lowest] = True
    return np.flatnonzero(occurs) + lowest, (np.cumsum(occurs) - 1)[numbers - lowest]


# Rows in the order of several integer columns

IntegerColumn = npt.NDArray[np.integer[Any]]


def row_order(columns: Sequence[IntegerColumn], *, likely: int = 0) -> Ints | None:
    """The stable sort order of rows by several columns, the first being the most significant; None
    if the rows are in order already.

    With `likely`, rows are first sorted by that many leading columns only: rows that are equal in
    those are mostly in the order of the others already.
    """
    if not len(columns[0]):
        return None
    if likely:
        likely_order, rest = row_order(columns[:likely]), pack_words(columns[likely:])
        if not rest or (
            len(rest) == 1 and _is_ordered_within_ties(columns[:likely], rest[0], likely_order)
        ):
            return likely_order
    order: Ints | None = None
    for word in pack_words(columns):
        ordered = word if order is None else word[order]
        if (ordered[1:] >= ordered[:-1]).all():
            continue
        step, _ = stable_sort(ordered)
        order = step if order is None else order[step]
    return order


def pack_words(columns: Sequence[IntegerColumn]) -> list[Codes]:
    """Columns packed into as few words as possible, the least significant word first. Each word
    leaves room for a row index; columns with a single value are left out.
    """
    available = _WORD_BITS - (len(columns[0]) - 1).bit_length()
    packed: list[Codes] = []
    used = available
    for column in reversed(columns):
        low, high = int(column.min()), int(column.max())
        bits = (high - low).bit_length()
        if not bits:
            continue
        values = column.astype(np.uint64) - np.uint64(low % 2**64)
        if used + bits > available:
            packed.append(values)
            used = bits
        else:
            packed[-1] |= values << np.uint64(used)
            used += bits
    return packed


def _is_ordered_within_ties(
    columns: Sequence[IntegerColumn], word: Codes, order: Ints | None
) -> bool:
    """Whether rows that are equal in the columns are in the order of the word."""
    is_tie = np.ones(len(word) - 1, np.bool_)
    for column in columns:
        ordered = column if order is None else column[order]
        is_tie &= ordered[1:] == ordered[:-1]
    ordered = word if order is None else word[order]
    return bool((ordered[1:] >= ordered[:-1])[is_tie].all())
