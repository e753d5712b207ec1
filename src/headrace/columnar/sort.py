"""Keys as numbers in the same order: several parts put together into one number, and sorted as
numbers are, which is several times as fast as sorting keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, fixed_width

Codes = npt.NDArray[np.uint64]
_WORD_BITS = 64
_SAMPLE, _FEW = 4096, 0.97


def codes_of(keys: pa.Array) -> Codes:
    """A number for each key, in the order of the keys' bytes."""
    if pa.types.is_fixed_size_binary(keys.type):
        fixed = _as_numbers(keys) if keys.type.byte_width <= _WORD_BITS // 8 else _in_one_word(keys)
        if fixed is not None:
            return fixed
    encoded = keys.dictionary_encode()
    ranks = np.empty(len(encoded.dictionary), np.uint64)
    ranks[pc.sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(ranks), dtype=np.uint64)
    codes: Codes = ranks[encoded.indices.to_numpy()]
    return codes


def _as_numbers(keys: pa.FixedSizeBinaryArray) -> Codes:
    width: int = keys.type.byte_width
    data = fixed_width(keys, np.uint8)
    padded = data
    if width < 8:
        padded = np.zeros((len(keys), 8), np.uint8)
        padded[:, 8 - width :] = data.reshape(-1, width)
    return padded.view(">u8").astype(np.uint64).reshape(-1)


def _in_one_word(keys: pa.FixedSizeBinaryArray) -> Codes | None:
    """The bits in which longer keys differ, as one number; None if they are too many. Keys of
    several columns mostly differ in few.
    """
    width: int = keys.type.byte_width
    padded = np.zeros((len(keys), -(-width // 8) * 8), np.uint8)
    padded[:, :width] = fixed_width(keys, np.uint8).reshape(-1, width)
    codes, used = np.zeros(len(keys), np.uint64), 0
    for word in (
        padded.view(">u8").T[::-1] if len(keys) else ()
    ):  # the last is the least significant
        plain = word.astype(np.uint64)
        plain -= plain.min()
        differ = int(np.bitwise_or.reduce(plain))
        if not differ:
            continue
        empty = (differ & -differ).bit_length() - 1  # low bits that are alike
        bits = differ.bit_length() - empty
        if used + bits > _WORD_BITS:
            return None
        codes |= (plain >> np.uint64(empty)) << np.uint64(used)
        used += bits
    return codes


def stable_sort(codes: Codes) -> tuple[Ints, Codes]:
    """Where each code of the sorted sequence comes from, equal ones in their old order; and the
    sorted sequence, less the smallest of them.

    Sorting numbers is several times as fast as sorting positions by them: where both fit into one
    word, that is what is done.
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


def are_few(codes: Codes) -> bool:
    """Whether the distinct codes are so few that finding them by hashing is quicker than sorting
    all, by a sample.
    """
    sample = codes[:: max(1, len(codes) // _SAMPLE)]
    return len(np.unique(sample)) < _FEW * len(sample)


def ranked_by_hashing(codes: Codes) -> tuple[Ints, Ints]:
    """Where each distinct code is first, in order of the codes; and the place of each code among
    them.
    """
    encoded = pa.array(codes).dictionary_encode()
    numbers = encoded.indices.to_numpy()
    order = np.argsort(encoded.dictionary.to_numpy())
    ranks, firsts = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    firsts[numbers[::-1]] = np.arange(len(numbers))[::-1]
    return firsts[order], ranks[numbers]


# Several parts in one number


def joint(codes: Codes, numbers: Ints) -> Codes:
    """A number for each pair, in the order of the pairs."""
    distinct, places = ranked(numbers)
    return spread_out(codes, len(distinct)) + places.astype(np.uint64)


def spread_out(codes: Codes, room: int) -> Codes:
    """Numbers in the same order, from 0 on, so far apart that one below `room` can be added to
    each.
    """
    if not len(codes):
        return codes
    lowest = codes.min()
    if (int(codes.max()) - int(lowest) + 1) * max(room, 1) >= 1 << _WORD_BITS:
        codes, lowest = _dense(codes), np.uint64(0)
    spread: Codes = (codes - lowest) * np.uint64(room)
    return spread


def _dense(codes: Codes) -> Codes:
    """Numbers in the same order, without gaps."""
    return ranked_by_hashing(codes)[1].astype(np.uint64)


def ranked(numbers: Ints) -> tuple[Ints, Ints]:
    """The distinct numbers in order, and the place of each among them. Quickest where they lie
    close together.
    """
    if not len(numbers):
        return numbers, numbers
    lowest, highest = int(numbers.min()), int(numbers.max())
    if highest - lowest > 4 * len(numbers) + 1000:
        distinct, places = np.unique(numbers, return_inverse=True)
        return distinct, places
    there = np.zeros(highest - lowest + 1, np.bool_)
    there[numbers - lowest] = True
    return np.flatnonzero(there) + lowest, (np.cumsum(there) - 1)[numbers - lowest]


# Rows in order of several whole-number columns. Columns are put together into words, as many as
# fit: sorting words is several times as fast as a `lexsort`.

Column = npt.NDArray[np.integer[Any]]


def order_of(columns: Sequence[Column], *, likely: int = 0) -> Ints | None:
    """Where each row of the ordered sequence comes from, rows that are alike in their old order;
    None if rows lie in order as they are.

    The first column decides most. With `likely`, the others behind so many are tried first as they
    are: mostly rows that are alike in those lie in their order.
    """
    if not len(columns[0]):
        return None
    if likely:
        order, rest = order_of(columns[:likely]), words(columns[likely:])
        if not rest or (len(rest) == 1 and _stays(columns[:likely], rest[0], order)):
            return order
    found: Ints | None = None
    for word in words(columns):
        in_order = word if found is None else word[found]
        if (in_order[1:] >= in_order[:-1]).all():
            continue
        position, _ = stable_sort(in_order)
        found = position if found is None else found[position]
    return found


def words(columns: Sequence[Column]) -> list[Codes]:
    """Columns put together, the least significant first; with room left for a row's position.
    Columns with one value are left out.
    """
    room = _WORD_BITS - (len(columns[0]) - 1).bit_length()
    found: list[Codes] = []
    used = room
    for column in reversed(columns):
        low, high = int(column.min()), int(column.max())
        bits = (high - low).bit_length()
        if not bits:
            continue
        plain = column.astype(np.uint64) - np.uint64(low % 2**64)
        if used + bits > room:
            found.append(plain)
            used = bits
        else:
            found[-1] |= plain << np.uint64(used)
            used += bits
    return found


def _stays(columns: Sequence[Column], word: Codes, order: Ints | None) -> bool:
    """Whether rows that are alike in the columns lie in order of the word."""
    alike = np.ones(len(word) - 1, np.bool_)
    for column in columns:
        in_order = column if order is None else column[order]
        alike &= in_order[1:] == in_order[:-1]
    in_order = word if order is None else word[order]
    return bool((in_order[1:] >= in_order[:-1])[alike].all())
