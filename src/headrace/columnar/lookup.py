"""Finding each other: keys of several columns as numbers, places in columns that are sorted key by
key, and all pairs of what was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask, runs
from headrace.columnar.segments import by_code, by_key
from headrace.columnar.sort import Codes, are_few, codes_of, ranked_by_hashing, stable_sort

_WORD_BITS = 63


@dataclass(frozen=True)
class Ranked:
    """The distinct keys of some columns, in order; for each column the place of each of its keys
    among them, and its rows in key order.
    """

    keys: pa.Array
    ranks: list[Ints]
    orders: list[Ints]


def ranked(columns: Sequence[pa.Array]) -> Ranked:
    """Keys of several columns as numbers, in the order of the keys' bytes."""
    together = _one_column(columns)
    order, new_key = by_key(together)
    ends = np.cumsum([len(each) for each in columns])
    orders = [
        _within(order, int(end) - len(each), int(end))
        for end, each in zip(ends, columns, strict=True)
    ]
    return Ranked(
        together.take(pa.array(order[new_key])), np.split(_ranks(order, new_key), ends[:-1]), orders
    )


def _ranks(order: Ints, new_key: Mask) -> Ints:
    """The place of each row's key among the distinct ones, from the rows in order of key."""
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.cumsum(new_key) - 1
    return ranks


def numbered(columns: Sequence[pa.Array]) -> tuple[pa.Array, list[Ints]]:
    """The distinct keys of some columns, in order, and for each column the place of each of its
    keys among them: as `ranked`, quicker where keys are few.
    """
    together = _one_column(columns)
    firsts, ranks = _numbered(codes_of(together))
    ends = np.cumsum([len(each) for each in columns])
    return together.take(pa.array(firsts)), np.split(ranks, ends[:-1])


def _numbered(codes: Codes) -> tuple[Ints, Ints]:
    if are_few(codes):
        return ranked_by_hashing(codes)
    order, new_key = by_code(codes)
    return order[new_key], _ranks(order, new_key)


def _within(order: Ints, first: int, end: int) -> Ints:
    return order if end - first == len(order) else order[(order >= first) & (order < end)] - first


def _one_column(columns: Sequence[pa.Array]) -> pa.Array:
    """Key bytes have a fixed size in one column and not in another, where a null is among them."""
    some = [each for each in columns if len(each)] or list(columns[:1])
    alike = all(each.type == some[0].type for each in some)
    return pa.concat_arrays(some if alike else [each.cast(pa.binary()) for each in some])


def search(
    values: npt.NDArray[Any], starts: Ints, ends: Ints, wanted: npt.NDArray[Any], *, right: bool
) -> Ints:
    """For each wanted value its place in values[start:end], which is sorted: before those that
    equal it, or, with `right`, behind them.
    """
    low, high = starts.copy(), ends.copy()
    left = np.flatnonzero(low < high)
    while len(left):
        middle = (low[left] + high[left]) >> 1
        below = values[middle] <= wanted[left] if right else values[middle] < wanted[left]
        low[left[below]] = middle[below] + 1
        high[left[~below]] = middle[~below]
        left = left[low[left] < high[left]]
    return low


def pairs(low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Every place from low to high of each, and whose it is."""
    lengths = np.maximum(high - low, 0)
    return np.repeat(np.arange(len(low)), lengths), runs(low, lengths)


def bounds(keys: Ints, count: int) -> Ints:
    """Where each of `count` keys begins in a sorted column of key numbers, and where the last
    ends.
    """
    return np.searchsorted(keys, np.arange(count + 1))


def hull(count: int, keys: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """For each of `count` keys the lowest first and the highest last; the lowest above the highest
    for a key that has none.
    """
    low, high = np.full(count, np.iinfo(np.int64).max), np.full(count, np.iinfo(np.int64).min)
    np.minimum.at(low, keys, first)
    np.maximum.at(high, keys, last)
    return low, high


def marked(count: int, which: Ints) -> Mask:
    """Of so many, these."""
    mask = np.zeros(count, np.bool_)
    mask[which] = True
    return mask


def sorting(*columns: npt.NDArray[Any], start: Ints | None = None) -> Ints:
    """The order by several columns of integers or bytes. Equal rows stay in their order, or in that
    of `start`: quick if that is nearly it.
    """
    columns = columns if start is None else tuple(column[start] for column in columns)
    (together,) = (
        _packed(columns) if all(column.dtype.kind == "i" for column in columns) else (None,)
    )
    if together is None:
        order = np.arange(len(columns[0])) if _are_in_order(columns) else np.lexsort(columns[::-1])
    elif (together[1:] >= together[:-1]).all():
        order = np.arange(len(together))
    else:
        order, _ = stable_sort(together.view(np.uint64))
    return order if start is None else start[order]


def _are_in_order(columns: Sequence[npt.NDArray[Any]]) -> bool:
    """Whether rows of integers are in order already: finding out costs little beside sorting
    them.
    """
    if not all(column.dtype.kind == "i" for column in columns):
        return False
    fine = np.ones(max(len(columns[0]) - 1, 0), np.bool_)
    for column in reversed(columns):
        fine = (column[1:] > column[:-1]) | ((column[1:] == column[:-1]) & fine)
    return bool(fine.all())


def _packed(*tables: Sequence[npt.NDArray[np.int64]]) -> tuple[npt.NDArray[np.int64] | None, ...]:
    """Several columns as one number that has their order, for each table the same way; None if they
    do not fit into one.
    """
    together, bits = [np.zeros(len(table[0]), np.int64) for table in tables], 0
    for columns in zip(*tables, strict=True):
        some = [column for column in columns if len(column)]
        lowest = min((int(column.min()) for column in some), default=0)
        width = (max((int(column.max()) for column in some), default=0) - lowest).bit_length()
        bits += width
        if bits > _WORD_BITS:
            return (None,) * len(tables)
        for each, column in zip(together, columns, strict=True):
            np.left_shift(each, width, out=each)
            np.bitwise_or(each, column - lowest, out=each)
    return tuple(together)


def last_before(keys: Ints, values: Ints, wanted_keys: Ints, wanted: Ints, begin: Ints) -> Ints:
    """For each wanted value of a key the place behind the last that is not above it, in columns
    sorted by both; `begin`: where keys begin.
    """
    packed, packed_wanted = _packed((keys, values), (wanted_keys, wanted))
    if packed is None or packed_wanted is None:
        return search(values, begin[wanted_keys], begin[wanted_keys + 1], wanted, right=True)
    return np.searchsorted(packed, packed_wanted, side="right")


def first_from(keys: Ints, values: Ints, wanted_keys: Ints, wanted: Ints) -> Ints:
    """For each wanted value of a key the place of the first that is not below it, in columns sorted
    by both; behind the key's last if there is none.
    """
    packed, packed_wanted = _packed((keys, values), (wanted_keys, wanted))
    if packed is None or packed_wanted is None:
        where = bounds(keys, int(max(keys.max(initial=-1), wanted_keys.max(initial=-1))) + 1)
        return search(values, where[wanted_keys], where[wanted_keys + 1], wanted, right=False)
    return np.searchsorted(packed, packed_wanted)


def merge_order(first: Sequence[Ints], second: Sequence[Ints]) -> Ints:
    """The order of two tables, each of which is sorted by these columns, put one behind the other.
    Of equal rows those of the first come first.
    """
    one, other = _packed(first, second)
    if one is None or other is None:
        return sorting(*(np.concatenate(pair) for pair in zip(first, second, strict=True)))
    order, of_first = (
        np.empty(len(one) + len(other), np.int64),
        np.ones(len(one) + len(other), np.bool_),
    )
    places = np.searchsorted(one, other, side="right") + np.arange(len(other))
    of_first[places] = False
    order[places], order[of_first] = len(one) + np.arange(len(other)), np.arange(len(one))
    return order


def begins(*columns: npt.NDArray[np.generic]) -> Mask:
    """Where a new combination of values begins, in columns that are sorted by them."""
    new = np.ones(len(columns[0]), np.bool_)
    if len(new):
        new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return new
