"""Timers: entries in the state that are found by time, and name the keys to visit then.

A kernel that moves the timer of a key must know when it was set to: it keeps that time in a
register of the key (`row_store.py`), whose number is the kind of the timer. Two forms are stored:

    timer   `t`, kind, time, key               version 1; the key
    list    `s`, kind, time, key group, tick   version 1; number of keys, 4 bytes; their sizes,
                                               4 bytes each; the keys

Where rows are emitted at that time, each key has a timer of its own, which moves when the register
does. Where state is only dropped at that time, the keys of a batch share an entry (a list), which
costs far less. A list is not changed when the timer of one of its keys moves: a key that is visited
too early sets its timer again.

    register 0 of key "a":  HIGHEST -> 1000      put    t 0 1000 a
    register 0 of key "a":  1000 -> 3000         delete t 0 1000 a;  put t 0 3000 a
    watermark 3000:         due_keys(kind=0)     ["a"]
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask, expand_ranges
from headrace.columnar.lookup import group_start_mask, sort_order
from headrace.columnar.row_codec import gather_ranges
from headrace.errors import NewerFormat
from headrace.operators.joins.row_store import (
    HIGHEST,
    Data,
    KeyedRowStore,
    StateEntries,
    concat_bytes,
    entry_names,
    large_offsets,
    slice_bytes,
    struct_bytes,
    value_bytes,
)
from headrace.operators.kernel import UNSTARTED, KeyedState, big_endian

_VERSION = 1
_TIMER, _LIST = b"t", b"s"
_LIST_HEADER = np.dtype([("version", "u1"), ("count", "<u4")])


def due_keys(state: KeyedState, kind: int, watermark_us: int) -> pa.Array:
    """The keys whose timers of a kind the watermark has reached."""
    prefix = _TIMER + bytes([kind])
    (end,) = big_endian(np.array([min(watermark_us, HIGHEST - 1) + 1]))
    values = [] if watermark_us == UNSTARTED else state.scan(prefix, prefix + end)[1]
    if not values:
        return pa.array([], pa.binary())
    data, starts, lengths = _concatenate(values)
    return gather_ranges(data, starts + 1, lengths - 1).cast(pa.binary())


def due_listed_keys(
    state: KeyedState, kind: int, watermark_us: int
) -> tuple[pa.Array, StateEntries]:
    """The keys of the lists of a kind that the watermark has reached, some perhaps twice; and the
    entries that delete these lists.
    """
    prefix = _LIST + bytes([kind])
    (end,) = big_endian(np.array([min(watermark_us, HIGHEST - 1) + 1]))
    names, values, groups = (
        ([], [], np.zeros(0, np.uint8))
        if watermark_us == UNSTARTED
        else state.scan(prefix, prefix + end)
    )
    deletes = pa.array(names, pa.binary()), pa.nulls(len(names), pa.binary()), groups
    if not values:
        return pa.array([], pa.binary()), deletes
    data, starts, _ = _concatenate(values)
    count_bytes = np.ascontiguousarray(data[starts[:, None] + np.arange(1, 5)])
    counts = count_bytes.view("<u4").reshape(-1).astype(np.int64)
    sizes_start = starts + _LIST_HEADER.itemsize
    sizes = data[expand_ranges(sizes_start, 4 * counts)].view("<u4").astype(np.int64)
    ends = np.cumsum(sizes)
    bytes_of_earlier_lists = np.append(0, ends)[np.cumsum(counts) - counts]
    keys_start = sizes_start + 4 * counts - bytes_of_earlier_lists
    keys = gather_ranges(data, np.repeat(keys_start, counts) + ends - sizes, sizes)
    return keys.cast(pa.binary()), deletes


def earliest_timer(state: KeyedState, kind: int) -> int | None:
    """The time of the first timer of a kind, or None if there is none."""
    name = state.first(_TIMER + bytes([kind]), _TIMER + bytes([kind + 1]))
    return None if name is None else int.from_bytes(name[2:10], "big") - (1 << 63)


def unloaded_timer_bound(
    row_store: KeyedRowStore, section: int, kind: int, due: Mask, delay_us: int
) -> Ints:
    """Per key a time before which no row that is not loaded needs a timer; HIGHEST if all are
    loaded.

    The bound may be too early, since a key that is visited too early sets its timer again.

    Args:
        row_store: the rows, sorted by time.
        section: the section that the timer is for.
        kind: the kind of the timer.
        due: the keys whose timers are due: what was not loaded of them lies behind what was.
        delay_us: how long after its own time a row needs the timer.
    """
    part, before = row_store.sections[section], row_store.registers_before[kind]
    bound = np.full(len(before), HIGHEST)
    unloaded = np.flatnonzero(~part.is_loaded)
    keys = part.chunk_keys[unloaded]
    times = np.where(due[keys], part.lows[unloaded] + delay_us, before[keys])
    np.minimum.at(bound, keys, times)
    return bound


def timer_entries(row_store: KeyedRowStore, kind: int) -> StateEntries:
    """The entries that move the timers of a kind to the times in their registers; HIGHEST: no
    timer.
    """
    before, after = row_store.registers_before[kind], row_store.registers[kind]
    deleted = np.flatnonzero((before != after) & (before != HIGHEST))
    added = np.flatnonzero((before != after) & (after != HIGHEST))
    which = np.concatenate([deleted, added])
    keys = row_store.keys.take(pa.array(which))
    version = pa.scalar(bytes([_VERSION]), pa.large_binary())
    values = concat_bytes([version, keys.slice(len(deleted))]).cast(pa.binary())
    times = np.concatenate([before[deleted], after[added]])
    return (
        entry_names(_TIMER + bytes([kind]), times, keys),
        pa.concat_arrays([pa.nulls(len(deleted), pa.binary()), values]),
        row_store.groups[which],
    )


def timer_list_entries(row_store: KeyedRowStore, kind: int, tick: int) -> StateEntries:
    """New lists of the keys whose register of a kind has moved to another time; HIGHEST: no timer.
    `tick` is the last tick of the batch.
    """
    after = row_store.registers[kind]
    which = np.flatnonzero((row_store.registers_before[kind] != after) & (after != HIGHEST))
    which = which[sort_order(row_store.groups[which].astype(np.int64), after[which])]
    first = np.flatnonzero(group_start_mask(row_store.groups[which], after[which]))
    list_bounds = np.append(first, len(which))
    keys = row_store.keys.take(pa.array(which))
    offsets = large_offsets(keys)
    headers = np.zeros(len(first), _LIST_HEADER)
    headers["version"], headers["count"] = _VERSION, np.diff(list_bounds)
    values = concat_bytes(
        [
            struct_bytes(headers),
            slice_bytes(np.diff(offsets).astype("<u4").view(np.uint8), 4 * list_bounds),
            slice_bytes(value_bytes(keys), offsets[list_bounds]),
        ]
    )
    groups, (tick_bytes,) = row_store.groups[which[first]], big_endian(np.array([tick]))
    group_and_tick = concat_bytes([struct_bytes(groups), pa.scalar(tick_bytes, pa.large_binary())])
    return (
        entry_names(_LIST + bytes([kind]), after[which[first]], group_and_tick),
        values.cast(pa.binary()),
        groups,
    )


def _concatenate(values: list[bytes]) -> tuple[Data, Ints, Ints]:
    """The values of timer entries in one array, where each begins, and their lengths."""
    data = np.frombuffer(b"".join(values), np.uint8)
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    starts = np.cumsum(lengths) - lengths
    if int(data[starts].max()) > _VERSION:
        raise NewerFormat(
            "A timer was written by a newer Headrace.", fix="run the newer Headrace that wrote it."
        )
    return data, starts, lengths
