"""The rows of a call, stored ones and new ones, in order of key and time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headrace.operators.buffers import Ints, runs
from headrace.operators.joins.matching import sorting
from headrace.operators.kernel import Groups, Times
from headrace.operators.patterns.row_buffer import Bits


@dataclass(frozen=True)
class Batch:
    """The rows of a call, stored and new, in order of key and time: where in `rows` each is, its key's number, its time, and its conditions. `certain`: how many keys' rows are."""

    by: pa.Array
    groups: Groups
    names: pa.Array
    rows: pa.Table
    order: Ints
    keys: Ints
    times: Times
    bits: Bits
    stored: Ints
    timers: Times
    certain: Ints  # positions of rows that the clock has passed


def merged(counts: Ints, keys: Ints, order: Ints) -> tuple[Ints, Ints]:
    """Stored rows, so many for each key, and new ones, of these keys, as one sequence in order of key; new ones, which `order` has in that order, come behind stored ones."""
    fresh = np.bincount(keys, minlength=len(counts))
    stored = int(counts.sum())
    ends = np.cumsum(counts + fresh)
    order_of = np.empty(stored + len(keys), np.int64)
    order_of[runs(ends - fresh - counts, counts)] = np.arange(stored)
    order_of[runs(ends - fresh, fresh)] = stored + order
    return order_of, np.repeat(np.arange(len(counts)), counts + fresh)


def by_time(order: Ints, keys: Ints, times: Times) -> tuple[Ints, Times]:
    """Rows that are in order of key and arrival, put into order of key and time. Most keys' rows are already."""
    in_order = times[order]
    wrong = np.flatnonzero((in_order[1:] < in_order[:-1]) & (keys[1:] == keys[:-1]))
    if len(wrong):
        mixed = np.zeros(int(keys[-1]) + 1, np.bool_)
        mixed[keys[wrong]] = True
        where = np.flatnonzero(mixed[keys])
        again = where[sorting(keys[where], in_order[where])]
        order[where] = order[again]
        in_order[where] = in_order[again]
    return order, in_order
