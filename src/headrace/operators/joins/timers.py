"""When keys are to be woken: entries in the state that are found by time.

| under | bytes |
|---|---|
| `t`, kind of timer, time, key | version 1, key |

A kernel that moves a key's timer must know where it was: it keeps that as a mark in the key's pile.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headrace.errors import NewerFormat
from headrace.operators.buffers import Ints, Mask
from headrace.operators.joins.piles import NONE, Piles, joined, names
from headrace.operators.kernel import UNSTARTED, Groups, KeyedState
from headrace.operators.row_codec import cut_out
from headrace.operators.times import big_endian

_VERSION = 1
_TIMER = b"t"
Entries = tuple[pa.Array, pa.Array, Groups]
"""Names, values (null: deleted) and key groups."""


def fired(state: KeyedState, kind: int, clock_us: int) -> pa.Array:
    """The keys whose timers of a kind the clock has reached."""
    prefix = _prefix(kind)
    (end,) = big_endian(np.array([min(clock_us, NONE - 1) + 1]))
    values = [] if clock_us == UNSTARTED else state.scan(prefix, prefix + end)[1]
    if not values:
        return pa.array([], pa.binary())
    data, lengths = np.frombuffer(b"".join(values), np.uint8), np.fromiter(map(len, values), np.int64, len(values))
    starts = np.cumsum(lengths) - lengths
    if int(data[starts].max()) > _VERSION:
        raise NewerFormat("A timer was written by a newer Headrace.", fix="run the newer Headrace that wrote it.")
    return cut_out(data, starts + 1, lengths - 1).cast(pa.binary())


def earliest(state: KeyedState, kind: int) -> int | None:
    """The time of the first timer of a kind."""
    prefix = _prefix(kind)
    found = state.first(prefix, _prefix(kind + 1))
    return None if found is None else int.from_bytes(found[2:10], "big") - (1 << 63)


def of_the_rest(piles: Piles, section: int, kind: int, woken: Mask, later: int) -> Ints:
    """For each key a time before which nothing that was not loaded is to be woken: `later` than its number. It need not be exact: who is woken too
    early sets the timer again. Where a key was woken, what was not loaded lies behind what was.
    """
    part, before = piles.sections[section], piles.marks_before[kind]
    bound = np.full(len(before), NONE)
    left = np.flatnonzero(~part.loaded)
    keys = part.leaf_keys[left]
    np.minimum.at(bound, keys, np.where(woken[keys], part.lows[left] + later, before[keys]))
    return bound


def moved(piles: Piles, kind: int) -> Entries:
    """The entries that move a kind of timer to where the marks of that number have gone; a mark of NONE is no timer."""
    before, after = piles.marks_before[kind], piles.marks[kind]
    differs = before != after
    goes, comes = np.flatnonzero(differs & (before != NONE)), np.flatnonzero(differs & (after != NONE))
    which = np.concatenate([goes, comes])
    keys = piles.keys.take(pa.array(which))
    values = joined([pa.scalar(bytes([_VERSION]), pa.large_binary()), keys.slice(len(goes))]).cast(pa.binary())
    times = np.concatenate([before[goes], after[comes]])
    return names(_prefix(kind), times, keys), pa.concat_arrays([pa.nulls(len(goes), pa.binary()), values]), piles.groups[which]


def _prefix(kind: int) -> bytes:
    return _TIMER + bytes([kind])
