"""Rows of a table that have been there for a while, as a table: `for_` of alerts.

A row is emitted once its key has been in the table for `for_us` of tick time, whatever its other
columns did meanwhile. A key that leaves the table before that emits nothing, and starts over when
it returns. With 5 minutes and the key `room`:

    12:00  insert (room=7, heat=90)     state of 7: pending since 12:00
    12:03  update (room=7, heat=95)     state of 7: pending since 12:00, another row
    12:05  no row                       state of 7: emitted             insert (7, 95)
    12:06  update (room=7, heat=97)                                     update (7, 95) -> (7, 97)
    12:07  delete (room=7)              state of 7: none                delete (7, 97)
    12:08  insert (room=7, heat=91)     state of 7: pending since 12:08
    12:09  delete (room=7)              state of 7: none

A tick is a moment: a key that leaves and returns in one tick has been there all the time, and one
that leaves in the very tick in which its time is up is not emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar import row_codec
from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import (
    CHANGE_FIELD,
    CHANGE_TYPE,
    CHANGE_TYPES,
    DELETE,
    TICK_FIELD,
    UPDATE_PREIMAGE,
)
from headrace.columnar.keys import as_array, encode_keys, key_groups
from headrace.columnar.lookup import group_start_mask, rank_keys, sort_order
from headrace.errors import NewerFormat
from headrace.operators.changelog import differs
from headrace.operators.joins.row_store import concat_bytes, slice_bytes, struct_bytes
from headrace.operators.joins.sides import ticks_of
from headrace.operators.kernel import KeyedState, Times, Watermarks, big_endian

_VERSION = 1
_ROW, _TIMER = b"r", b"t"
_HEADER = np.dtype([("version", "u1"), ("is_emitted", "u1"), ("since_us", "<i8")])
_MAX_ROW_BYTES = 2**31
_BEFORE = -1  # the tick index of what was stored


class HoldKernel:
    """Emits the rows of a table that have been there for `for_us` of tick time.

    State of a key: version 1; whether it is emitted; the time of the tick in which it came; the
    row. A timer for each key that is pending: its value is the key.
    """

    def __init__(self, step: str, schema: pa.Schema, key: Sequence[str], *, for_us: int) -> None:
        self.step_name, self.schema, self.key, self.for_us = step, schema, tuple(key), for_us

    @cached_property
    def output(self) -> pa.Schema:
        return self.schema.append(CHANGE_FIELD)

    def due(self, state: KeyedState) -> int | None:
        """The tick time at which the next pending row is emitted, if it stays."""
        name = state.first(_TIMER, bytes([_TIMER[0] + 1]))
        return None if name is None else int.from_bytes(name[1:9], "big") - (1 << 63)

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """1. Load the keys that changed and those whose time is up. 2. Put what is stored and what
        came in order of key and tick. 3. Find when each stay in the table began, when it is
        emitted, and when it ended. 4. Store. 5. Emit.
        """
        rows, times_us = inputs[0], watermarks[0].times_us
        rows = rows.filter(pc.not_equal(rows[CHANGE_TYPE], UPDATE_PREIMAGE))
        # 1. Load.
        due = self._due_keys(state, times_us)
        if not rows.num_rows and not len(due):
            return self.output.append(TICK_FIELD).empty_table()
        ranked = rank_keys([encode_keys(rows, self.key).cast(pa.binary()), due])
        keys, groups = ranked.keys, key_groups(ranked.keys)
        names = _prefixed(_ROW, keys)
        stored = state.get_array(names, groups)
        was_stored = stored.is_valid().to_numpy(zero_copy_only=False)
        headers = self._headers(stored)
        # 2. The rows: first the stored one of each key (all null if there is none), then the new
        # ones, of which the last one of each key and tick counts.
        tick_index = watermarks[0].tick_indices(ticks_of(rows))
        of_key = np.concatenate([np.arange(len(keys)), ranked.ranks[0]])
        at = np.concatenate([np.full(len(keys), _BEFORE), tick_index])
        is_delete = pc.equal(as_array(rows[CHANGE_TYPE]), DELETE).to_numpy(zero_copy_only=False)
        is_there = np.concatenate([was_stored, ~is_delete])
        order = sort_order(of_key, at)
        is_last = np.append(group_start_mask(of_key[order], at[order])[1:], True)
        entries = order[is_last]
        of_key, at, is_there = of_key[entries], at[entries], is_there[entries]
        encoded = pa.concat_arrays([self._row_bytes(stored), self._encode(rows)])
        # 3. Stays.
        since_us = np.where(at == _BEFORE, headers["since_us"][of_key], _times_at(times_us, at))
        emitted_at, first_us = self._stays(
            of_key, at, is_there, since_us, headers["is_emitted"][of_key] == 1, times_us
        )
        # 4. Store.
        last = np.append(np.diff(of_key) != 0, True)
        is_emitted = is_there[last] & (emitted_at[last] < len(times_us))
        values = self._values(
            encoded.take(pa.array(entries[last])), first_us[last], is_emitted, is_there[last]
        )
        self._store(state, (keys, names, groups), (values, first_us[last], is_emitted), headers)
        # 5. Emit.
        return self._emit((of_key, at, is_there, emitted_at), entries, encoded, watermarks[0].ticks)

    # Stays in the table

    def _stays(
        self,
        of_key: Ints,
        at: Ints,
        is_there: Mask,
        since_us: Times,
        was_emitted: Mask,
        times_us: Times,
    ) -> tuple[Ints, Times]:
        """For each entry the index of the tick in which the stay that it belongs to is emitted, or
        the number of ticks if it is not; and the time at which that stay began.
        """
        ticks = len(times_us)
        new_key = group_start_mask(of_key)
        begins = is_there & (new_key | ~np.append(False, is_there[:-1]))
        beginning = np.maximum.accumulate(np.where(begins | ~is_there, np.arange(len(at)), 0))
        first_us = since_us[beginning]
        emitted_at = np.searchsorted(times_us, first_us + self.for_us, side="left")
        emitted_at = np.maximum(emitted_at, at[beginning])
        was_before = (at[beginning] == _BEFORE) & was_emitted[beginning]
        emitted_at = np.where(was_before, _BEFORE, emitted_at)
        # A stay ends with the next entry of its key, which is not there.
        stays = np.cumsum(begins | ~is_there | new_key) - 1
        last_of_stay = np.append(np.diff(stays) != 0, True)
        after = np.append(np.arange(1, len(at)), len(at) - 1)
        is_cut = last_of_stay & is_there & (of_key[after] == of_key) & ~is_there[after]
        ended_at = np.where(is_cut, at[after], ticks + 1)[last_of_stay][stays]
        return np.where(is_there & (emitted_at < ended_at), emitted_at, ticks), first_us

    def _emit(
        self,
        timeline: tuple[Ints, Ints, Mask, Ints],
        entries: Ints,
        encoded: pa.Array,
        ticks: Times,
    ) -> pa.Table:
        """The changes of what is emitted. A stay whose time is up between two of its entries gets
        an entry of its own there, with the row before.
        """
        of_key, at, is_there, emitted_at = timeline
        following = np.append(np.where(np.diff(of_key) == 0, at[1:], len(ticks)), len(ticks))
        extra = np.flatnonzero(is_there & (emitted_at > at) & (emitted_at < following))
        which = np.concatenate([np.arange(len(at)), extra])
        when = np.concatenate([at, emitted_at[extra]])
        order = sort_order(of_key[which], when)
        which, when = which[order], when[order]
        key, shown = of_key[which], is_there[which] & (when >= emitted_at[which])
        row = encoded.take(pa.array(entries[which]))
        same_key = np.append(False, key[1:] == key[:-1])
        was = same_key & np.append(False, shown[:-1])
        before = np.append(0, np.arange(len(which) - 1))
        changed = differs(row.take(pa.array(before)), row)
        is_new = when != _BEFORE
        updated = np.flatnonzero(is_new & was & shown & changed)
        inserted, deleted = (
            np.flatnonzero(is_new & ~was & shown),
            np.flatnonzero(is_new & was & ~shown),
        )
        position = np.concatenate([inserted, updated, updated, deleted])
        kinds = np.repeat(np.arange(4), [len(inserted), len(updated), len(updated), len(deleted)])
        source = np.concatenate([inserted, before[updated], updated, before[deleted]])
        in_order = np.lexsort((kinds, key[position], when[position]))
        position, kinds, source = position[in_order], kinds[in_order], source[in_order]
        columns = self._decode(row.take(pa.array(source)))
        names = pa.array(CHANGE_TYPES).take(pa.array(kinds))
        emitted_ticks = pa.array(ticks[when[position]], pa.int64())
        return pa.Table.from_arrays(
            [*columns, names, emitted_ticks], schema=self.output.append(TICK_FIELD)
        )

    # State

    def _due_keys(self, state: KeyedState, times_us: Times) -> pa.Array:
        """The pending keys whose time is up with the last tick."""
        if not len(times_us):
            return pa.array([], pa.binary())
        (end,) = big_endian(times_us[-1:] + 1)
        return pa.array(state.scan(_TIMER, _TIMER + end)[1], pa.binary())

    def _headers(self, stored: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """The header of each stored value; zeros where there is none."""
        empty = pa.scalar(bytes(_HEADER.itemsize), pa.binary())
        heads = pc.binary_slice(stored, 0, _HEADER.itemsize).fill_null(empty)
        headers: np.ndarray[tuple[int], np.dtype[np.void]] = np.frombuffer(
            b"".join(heads.to_pylist()), _HEADER
        )
        if len(headers) and int(headers["version"].max()) > _VERSION:
            raise NewerFormat(
                f"The state of step {self.step_name!r} was written by a newer Headrace.",
                fix="upgrade Headrace.",
            )
        return headers

    def _row_bytes(self, stored: pa.Array) -> pa.Array:
        return pc.binary_slice(stored.cast(pa.large_binary()), _HEADER.itemsize, _MAX_ROW_BYTES)

    def _encode(self, rows: pa.Table) -> pa.Array:
        columns = [as_array(rows[name]) for name in self.schema.names]
        structs = pa.StructArray.from_arrays(columns, fields=list(self.schema))
        return row_codec.encode_array(structs).cast(pa.large_binary())

    def _decode(self, encoded: pa.Array) -> list[pa.Array]:
        rows = row_codec.decode_array(encoded, pa.struct(list(self.schema)))
        return [pc.struct_field(rows, index) for index in range(len(self.schema))]

    def _values(
        self, encoded: pa.Array, since_us: Times, is_emitted: Mask, is_there: Mask
    ) -> pa.Array:
        """What is stored of each key; null of one that is not in the table."""
        headers = np.zeros(len(since_us), _HEADER)
        headers["version"], headers["is_emitted"] = _VERSION, is_emitted
        headers["since_us"] = since_us
        values = concat_bytes([struct_bytes(headers), encoded]).cast(pa.binary())
        return pc.if_else(pa.array(is_there), values, pa.scalar(None, pa.binary()))

    def _store(
        self,
        state: KeyedState,
        stored_as: tuple[pa.Array, pa.Array, np.ndarray[tuple[int], np.dtype[np.uint8]]],
        after: tuple[pa.Array, Times, Mask],
        headers: np.ndarray[tuple[int], np.dtype[np.void]],
    ) -> None:
        """Store the rows, and move the timers of those that are pending."""
        keys, names, groups = stored_as
        values, since_us, is_emitted = after
        state.put_array(names, values, groups)
        had_timer = (headers["version"] > 0) & (headers["is_emitted"] == 0)
        has_timer = values.is_valid().to_numpy(zero_copy_only=False) & ~is_emitted
        moved = had_timer & has_timer & (headers["since_us"] != since_us)
        for which, is_set in (
            (np.flatnonzero((had_timer & ~has_timer) | moved), False),
            (np.flatnonzero((has_timer & ~had_timer) | moved), True),
        ):
            if len(which):
                began_us = since_us[which] if is_set else headers["since_us"][which]
                own_keys = keys.take(pa.array(which))
                timer = _prefixed(_TIMER, own_keys, began_us + self.for_us)
                value = own_keys if is_set else pa.nulls(len(which), pa.binary())
                state.put_array(timer, value, groups[which])


def _prefixed(prefix: bytes, keys: pa.Array, times_us: Times | None = None) -> pa.Array:
    """The names of entries: a prefix, a time that sorts as bytes do, and the key."""
    parts: list[pa.Array | pa.Scalar] = [pa.scalar(prefix, pa.large_binary())]
    if times_us is not None:
        unsigned = np.ascontiguousarray(times_us, np.int64).view(np.uint64) ^ np.uint64(1 << 63)
        data = unsigned.astype(">u8").view(np.uint8)
        parts.append(slice_bytes(data, np.arange(len(times_us) + 1) * 8))
    return concat_bytes([*parts, keys.cast(pa.large_binary())]).cast(pa.binary())


def _times_at(times_us: Times, at: Ints) -> Times:
    """The time of each tick index; of what was stored, anything."""
    return times_us[np.maximum(at, 0)] if len(times_us) else np.zeros(len(at), np.int64)
