"""Looking up rows by key: ranks of keys that several columns share, binary search within sorted
segments, merging sorted tables, and expanding ranges into pairs. Joins, windows and patterns are
built from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask, expand_ranges
from headrace.columnar.segments import order_by_code, order_by_key
from headrace.columnar.sort import has_few_distinct, key_codes, rank_by_hashing, row_order

_WORD_BITS = 63


@dataclass(frozen=True)
class KeyRanks:
    """The distinct keys of several columns, in order; and for each column the rank of each of its
    keys among them, and its row indices in key order.
    """

    keys: pa.Array
    ranks: list[Ints]
    orders: list[Ints]


def rank_keys(columns: Sequence[pa.Array]) -> KeyRanks:
    """Rank the keys of several columns together, in the order of the keys' bytes."""
    all_keys = _concatenate(columns)
    order, new_key = order_by_key(all_keys)
    ends = np.cumsum([len(column) for column in columns])
    orders = [
        _restrict(order, int(end) - len(column), int(end))
        for end, column in zip(ends, columns, strict=True)
    ]
    return KeyRanks(
        all_keys.take(pa.array(order[new_key])), np.split(_ranks(order, new_key), ends[:-1]), orders
    )


def _ranks(order: Ints, new_key: Mask) -> Ints:
    """The rank of each row's key, from the rows in key order."""
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.cumsum(new_key) - 1
    return ranks


def number_keys(columns: Sequence[pa.Array]) -> tuple[pa.Array, list[Ints]]:
    """The distinct keys of several columns, in order, and for each column the rank of each of its
    keys among them. Faster than `rank_keys` where there are few distinct keys, but without the row
    order.
    """
    all_keys = _concatenate(columns)
    codes = key_codes(all_keys)
    if has_few_distinct(codes):
        firsts, ranks = rank_by_hashing(codes)
    else:
        order, new_key = order_by_code(codes)
        firsts, ranks = order[new_key], _ranks(order, new_key)
    ends = np.cumsum([len(column) for column in columns])
    return all_keys.take(pa.array(firsts)), np.split(ranks, ends[:-1])


def _restrict(order: Ints, first: int, end: int) -> Ints:
    """The indices from `first` up to `end` of an order, counted from `first`."""
    return order if end - first == len(order) else order[(order >= first) & (order < end)] - first


def _concatenate(columns: Sequence[pa.Array]) -> pa.Array:
    """All keys in one column. Key bytes are fixed-size binary in one column and binary in another
    that has a null.
    """
    non_empty = [column for column in columns if len(column)] or list(columns[:1])
    if any(column.type != non_empty[0].type for column in non_empty):
        non_empty = [column.cast(pa.binary()) for column in non_empty]
    return pa.concat_arrays(non_empty)


def search_within(
    values: npt.NDArray[Any], starts: Ints, ends: Ints, wanted: npt.NDArray[Any], *, right: bool
) -> Ints:
    """Binary search of each wanted value in values[start:end], which is sorted. Returns the
    insertion point before equal values, or, with `right`, after them.
    """
    low, high = starts.copy(), ends.copy()
    open_searches = np.flatnonzero(low < high)
    while len(open_searches):
        middle = (low[open_searches] + high[open_searches]) >> 1
        target = wanted[open_searches]
        below = values[middle] <= target if right else values[middle] < target
        low[open_searches[below]] = middle[below] + 1
        high[open_searches[~below]] = middle[~below]
        open_searches = open_searches[low[open_searches] < high[open_searches]]
    return low


def expand_pairs(low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """All pairs of a range's index and an index in that range, low to high exclusive: first the
    owners, then the indices.
    """
    lengths = np.maximum(high - low, 0)
    return np.repeat(np.arange(len(low)), lengths), expand_ranges(low, lengths)


def key_bounds(keys: Ints, count: int) -> Ints:
    """The start of each of `count` keys in a sorted column of key ranks, and the end of the
    last.
    """
    return np.searchsorted(keys, np.arange(count + 1))


def key_extents(count: int, keys: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """For each of `count` keys the smallest `first` and the largest `last`. For a key without rows
    the smallest is above the largest.
    """
    low, high = np.full(count, np.iinfo(np.int64).max), np.full(count, np.iinfo(np.int64).min)
    np.minimum.at(low, keys, first)
    np.maximum.at(high, keys, last)
    return low, high


def mask_at(length: int, indices: Ints) -> Mask:
    """Boolean mask of the given length, true at the given indices."""
    mask = np.zeros(length, np.bool_)
    mask[indices] = True
    return mask


def sort_order(*columns: npt.NDArray[Any], start: Ints | None = None) -> Ints:
    """The sort order by several columns of integers or bytes, the first being the most significant.
    Equal rows keep their order, or the order of `start`, which is fast if it is nearly sorted.
    """
    columns = columns if start is None else tuple(column[start] for column in columns)
    if all(column.dtype.kind == "i" for column in columns):
        order = row_order(columns)
        if order is None:
            order = np.arange(len(columns[0]))
    else:
        order = np.lexsort(columns[::-1])
    return order if start is None else start[order]


def _pack(*tables: Sequence[npt.NDArray[np.int64]]) -> tuple[npt.NDArray[np.int64] | None, ...]:
    """The columns of each table packed into one integer that has their order, with the same layout
    for all tables; None for each if they do not fit.
    """
    packed_tables = [np.zeros(len(table[0]), np.int64) for table in tables]
    bits = 0
    for columns in zip(*tables, strict=True):
        non_empty = [column for column in columns if len(column)]
        lowest = min((int(column.min()) for column in non_empty), default=0)
        width = (max((int(column.max()) for column in non_empty), default=0) - lowest).bit_length()
        bits += width
        if bits > _WORD_BITS:
            return (None,) * len(tables)
        for packed, column in zip(packed_tables, columns, strict=True):
            np.left_shift(packed, width, out=packed)
            np.bitwise_or(packed, column - lowest, out=packed)
    return tuple(packed_tables)


def upper_bound(keys: Ints, values: Ints, wanted_keys: Ints, wanted: Ints, begin: Ints) -> Ints:
    """For each wanted key and value the index after that key's last value that is not greater, in
    columns sorted by key and value. `begin` are the starts of the keys.
    """
    packed, packed_wanted = _pack((keys, values), (wanted_keys, wanted))
    if packed is None or packed_wanted is None:
        return search_within(values, begin[wanted_keys], begin[wanted_keys + 1], wanted, right=True)
    return np.searchsorted(packed, packed_wanted, side="right")


def lower_bound(keys: Ints, values: Ints, wanted_keys: Ints, wanted: Ints) -> Ints:
    """For each wanted key and value the index of that key's first value that is not less, in
    columns sorted by key and value; the key's end if there is none.
    """
    packed, packed_wanted = _pack((keys, values), (wanted_keys, wanted))
    if packed is None or packed_wanted is None:
        where = key_bounds(keys, int(max(keys.max(initial=-1), wanted_keys.max(initial=-1))) + 1)
        return search_within(
            values, where[wanted_keys], where[wanted_keys + 1], wanted, right=False
        )
    return np.searchsorted(packed, packed_wanted)


def merge_order(first: Sequence[Ints], second: Sequence[Ints]) -> Ints:
    """The sort order of the concatenation of two tables that are each sorted by these columns.
    Equal rows of the first table come before those of the second.
    """
    packed_first, packed_second = _pack(first, second)
    if packed_first is None or packed_second is None:
        return sort_order(*(np.concatenate(pair) for pair in zip(first, second, strict=True)))
    count_first, count_second = len(packed_first), len(packed_second)
    order = np.empty(count_first + count_second, np.int64)
    is_first = np.ones(count_first + count_second, np.bool_)
    targets = np.searchsorted(packed_first, packed_second, side="right") + np.arange(count_second)
    is_first[targets] = False
    order[targets] = count_first + np.arange(count_second)
    order[is_first] = np.arange(count_first)
    return order


def group_start_mask(*columns: npt.NDArray[np.generic]) -> Mask:
    """Mask of the rows that start a new combination of values, in columns sorted by them."""
    new = np.ones(len(columns[0]), np.bool_)
    if len(new):
        new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return new
