"""When keys are to be woken: entries in the state that are found by time.

| under | bytes |
|---|---|
| `t`, kind of timer, time, key | version 1, key |
| `s`, kind of timer, time, key group, tick | version 1; count, 4 bytes; the sizes of the keys, 4 bytes each; they |

A kernel that moves a key's timer must know where it was: it keeps that as a mark in the key's pile.

Where nothing is to be told at that time, only forgotten, many keys share an entry (a *list*), which costs far less. It is not changed when a key's timer moves: who is woken
for nothing goes on waiting.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headrace.errors import NewerFormat
from headrace.operators.buffers import Ints, Mask, runs
from headrace.operators.joins.matching import begins, sorting
from headrace.operators.joins.piles import NONE, Data, Piles, data_of, joined, names, pieces
from headrace.operators.kernel import UNSTARTED, Groups, KeyedState
from headrace.operators.row_codec import cut_out
from headrace.operators.times import big_endian

_VERSION = 1
_TIMER, _LIST = b"t", b"s"
_LIST_HEADER = np.dtype([("version", "u1"), ("count", "<u4")])
Entries = tuple[pa.Array, pa.Array, Groups]
"""Names, values (null: deleted) and key groups."""


def fired(state: KeyedState, kind: int, clock_us: int) -> pa.Array:
    """The keys whose timers of a kind the clock has reached."""
    prefix = _prefix(kind)
    (end,) = big_endian(np.array([min(clock_us, NONE - 1) + 1]))
    values = [] if clock_us == UNSTARTED else state.scan(prefix, prefix + end)[1]
    if not values:
        return pa.array([], pa.binary())
    data, starts, lengths = _side_by_side(values)
    return cut_out(data, starts + 1, lengths - 1).cast(pa.binary())


def _side_by_side(values: list[bytes]) -> tuple[Data, Ints, Ints]:
    """Values of entries as they follow each other, where each begins, and their lengths."""
    data, lengths = np.frombuffer(b"".join(values), np.uint8), np.fromiter(map(len, values), np.int64, len(values))
    starts = np.cumsum(lengths) - lengths
    if int(data[starts].max()) > _VERSION:
        raise NewerFormat("A timer was written by a newer Headrace.", fix="run the newer Headrace that wrote it.")
    return data, starts, lengths


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


# Lists


def fired_lists(state: KeyedState, kind: int, clock_us: int) -> tuple[pa.Array, Entries]:
    """The keys of the lists of a kind that the clock has reached, some of them perhaps twice; and the entries that take these lists away."""
    prefix = _LIST + bytes([kind])
    (end,) = big_endian(np.array([min(clock_us, NONE - 1) + 1]))
    found, values, groups = ([], [], np.zeros(0, np.uint8)) if clock_us == UNSTARTED else state.scan(prefix, prefix + end)
    gone = pa.array(found, pa.binary()), pa.nulls(len(found), pa.binary()), groups
    if not values:
        return pa.array([], pa.binary()), gone
    data, starts, _ = _side_by_side(values)
    counts = np.ascontiguousarray(data[starts[:, None] + np.arange(1, 5)]).view("<u4").reshape(-1).astype(np.int64)
    sizes_at = starts + _LIST_HEADER.itemsize
    sizes = data[runs(sizes_at, 4 * counts)].view("<u4").astype(np.int64)
    ends = np.cumsum(sizes)
    before = np.append(0, ends)[np.cumsum(counts) - counts]  # the bytes of the keys of all lists before
    return cut_out(data, np.repeat(sizes_at + 4 * counts - before, counts) + ends - sizes, sizes).cast(pa.binary()), gone


def listed(piles: Piles, kind: int, tick: int) -> Entries:
    """New lists of the keys whose mark of that number has moved to another time; a mark of NONE is no timer. `tick`: the last of the call."""
    after = piles.marks[kind]
    which = np.flatnonzero((piles.marks_before[kind] != after) & (after != NONE))
    which = which[sorting(piles.groups[which].astype(np.int64), after[which])]
    first = np.flatnonzero(begins(piles.groups[which], after[which]))
    bounds = np.append(first, len(which))
    keys = piles.keys.take(pa.array(which))
    offsets = np.frombuffer(keys.buffers()[1], np.int64, count=len(keys) + 1, offset=keys.offset * 8) if len(keys) else np.zeros(1, np.int64)
    headers = np.zeros(len(first), _LIST_HEADER)
    headers["version"], headers["count"] = _VERSION, np.diff(bounds)
    sizes = np.diff(offsets).astype("<u4").view(np.uint8)
    parts = [pieces(headers.view(np.uint8), np.arange(len(first) + 1) * headers.itemsize), pieces(sizes, 4 * bounds), pieces(data_of(keys), offsets[bounds])]
    groups, (suffix,) = piles.groups[which[first]], big_endian(np.array([tick]))
    behind = joined([pieces(groups, np.arange(len(groups) + 1)), pa.scalar(suffix, pa.large_binary())])
    return names(_LIST + bytes([kind]), after[which[first]], behind), joined(parts).cast(pa.binary()), groups


def _prefix(kind: int) -> bytes:
    return _TIMER + bytes([kind])
