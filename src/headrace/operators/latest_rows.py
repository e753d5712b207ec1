"""The latest row of each key, as a table. Two kernels: `LatestKernel` keeps the row that arrived
last, `NewestKernel` the row with the latest event time.

Example of `LatestKernel`, with the key `user`:

    tick 1   (user=1, city="Bern")                    state of 1: (1, "Bern")
                                                      emits insert (1, "Bern")
    tick 2   (user=1, city="Genf"), (1, "Basel")      state of 1: (1, "Basel")
                                                      emits update (1, "Bern") -> (1, "Basel")
    tick 3   (user=1, city="Basel")                   emits nothing: the row is as it was
    tick 4   delete (user=1)                          state of 1: none
                                                      emits delete (1, "Basel")

Everything downstream of a table needs the old row as well as the new one. A table's topic has only
the new one: this is where the old one is remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar import row_codec
from headrace.columnar.buffers import Ints, Mask, take_bytes
from headrace.columnar.columns import (
    CHANGE_FIELD,
    CHANGE_TYPE,
    DELETE,
    MARKS,
    TICK_FIELD,
    UPDATE_PREIMAGE,
)
from headrace.columnar.keys import as_array, encode_keys
from headrace.columnar.lookup import group_start_mask, rank_keys, sort_order
from headrace.columnar.segments import Segments, segment_rows
from headrace.errors import NewerFormat
from headrace.operators.changelog import (
    differs,
    fill_unchanged_values,
    segment_changes,
    unchanged_mask,
)
from headrace.operators.joins.row_store import concat_bytes, slice_bytes
from headrace.operators.joins.sides import ticks_of
from headrace.operators.kernel import KeyedState, microseconds

_LATEST_VERSION = b"\x01"
_NEWEST_VERSION, _NEWEST_HEADER_BYTES = 1, 2
_MAX_ROW_BYTES = 2**31


class LatestKernel:
    """Keeps the last row of each key, of a stream or of a table's topic. A `delete` of a table's
    topic, which may have nothing but the key, removes the row.

    State of a key: version 1; the row.
    """

    def __init__(self, step: str, schema: pa.Schema, key: Sequence[str]) -> None:
        self.step_name, self.schema, self.key = step, schema, tuple(key)

    @cached_property
    def output(self) -> pa.Schema:
        return self.schema.append(CHANGE_FIELD)

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        """1. Fill in values that a captured change left out. 2. Find the row of each key after each
        tick. 3. Store. 4. Emit what changed.
        """
        if CHANGE_TYPE in rows.column_names:
            rows = rows.filter(pc.not_equal(rows[CHANGE_TYPE], UPDATE_PREIMAGE))
        if not rows.num_rows:
            return self.output.append(TICK_FIELD).empty_table()
        # 1. Rows of a captured table that are declared with `_marks`: a value that a change left
        # as it was is taken from the row before, if that is known.
        if (
            MARKS in self.schema.names
            and CHANGE_TYPE in rows.column_names
            and pc.any(unchanged_mask(rows)).as_py()
        ):
            rows = fill_unchanged_values(
                rows, list(self.key), lambda keys: self._stored_rows(state, keys)
            )
        # 2. The row before the batch and after each tick, as bytes; null where there is none.
        segments = segment_rows(rows, encode_keys(rows, self.key))
        last, structs = _last_rows(segments, self.schema)
        encoded = concat_bytes(
            [pa.scalar(_LATEST_VERSION, pa.large_binary()), row_codec.encode_array(structs)]
        ).cast(pa.binary())
        if CHANGE_TYPE in segments.rows.schema.names:
            is_delete = pc.equal(as_array(segments.rows.column(CHANGE_TYPE)).take(last), DELETE)
            encoded = pc.if_else(is_delete, pa.scalar(None, pa.binary()), encoded)
        versions = _interleave(segments, state.get_array(segments.keys), encoded)
        # 3. Store.
        state.put_array(segments.keys, take_bytes(versions, _last_versions(segments)))
        # 4. Emit.
        exists = versions.is_valid().to_numpy(zero_copy_only=False)
        emitted = segment_changes(segments, exists, _changed_mask(segments, versions))
        columns = self._decode(take_bytes(versions, emitted.versions))
        ticks = pa.array(segments.ticks[emitted.segments], pa.int64())
        return pa.Table.from_arrays(
            [*columns, emitted.names(), ticks], schema=self.output.append(TICK_FIELD)
        )

    def _stored_rows(self, state: KeyedState, keys: pa.Table) -> pa.Table:
        values = state.get_array(encode_keys(keys, self.key)).drop_null()
        return pa.Table.from_arrays(self._decode(values), schema=self.schema)

    def _decode(self, values: pa.Array) -> list[pa.Array]:
        """The columns of stored rows."""
        return _decode_rows(
            values, self.schema, _LATEST_VERSION, len(_LATEST_VERSION), self.step_name
        )

    @property
    def key_fields(self) -> list[pa.Field]:
        return [self.schema.field(name) for name in self.key]

    def describe(self, keys: pa.Array, values: pa.Array) -> pa.Table:  # noqa: ARG002
        """The latest row of each key, for people."""
        return pa.Table.from_arrays(self._decode(values), schema=self.schema)


class NewestKernel:
    """Keeps the row with the latest event time of each key. It runs behind a join that corrects
    what it emitted (`CorrectedJoin`), whose stream may bring a key more than once.

    `key` is the key of the result; `own` are the stream's columns, of which `time` is the event
    time. A row of the stream is recognized by its own columns, which corrections leave as they are.
    Once a later row of a key was emitted, changes of earlier rows are ignored, whatever arrives
    when. Of rows with equal times the one with the greater bytes counts, so that the result is
    always the same.

        tick 1   insert (1, at 10:00, 3 €)                  emits insert (1, 10:00, 3 €)
        tick 2   insert (1, at 11:00, 4 €)                  emits update 3 € -> 4 €, 10:00 -> 11:00
        tick 3   update (1, at 10:00, 3 €) -> (…, 5 €)      ignored: 11:00 is later
        tick 4   delete (1, at 11:00, 4 €)                  emits delete; the state remembers 11:00

    State of a key: version 1; 1 if the row was retracted, else 0; the row.
    """

    def __init__(
        self, step: str, schema: pa.Schema, key: Sequence[str], *, own: Sequence[str], time: str
    ) -> None:
        self.step_name, self.schema, self.time = step, schema, time
        self.key, self.own = tuple(key), tuple(own)

    @cached_property
    def output(self) -> pa.Schema:
        return self.schema.append(CHANGE_FIELD)

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        """1. Keep the changes of the newest row of each key. 2. Find the row after each tick. 3.
        Store. 4. Emit what changed.
        """
        # 1. Keep the changes of the newest row.
        rows = rows.filter(pc.not_equal(rows[CHANGE_TYPE], UPDATE_PREIMAGE))
        rows = self._newest_only(state, rows) if rows.num_rows else rows
        if not rows.num_rows:
            return self.output.append(TICK_FIELD).empty_table()
        # 2. The state before the batch and after each tick, as bytes.
        segments = segment_rows(rows, encode_keys(rows, self.key))
        last, structs = _last_rows(segments, self.schema)
        is_delete = _delete_mask(segments.rows)[last.to_numpy()]
        headers = np.column_stack(
            [np.full(len(segments), _NEWEST_VERSION, np.uint8), is_delete.astype(np.uint8)]
        )
        header_offsets = np.arange(len(segments) + 1) * _NEWEST_HEADER_BYTES
        encoded = concat_bytes(
            [slice_bytes(headers.reshape(-1), header_offsets), row_codec.encode_array(structs)]
        ).cast(pa.binary())
        versions = _interleave(segments, state.get_array(segments.keys), encoded)
        # 3. Store.
        state.put_array(segments.keys, take_bytes(versions, _last_versions(segments)))
        # 4. Emit.
        emitted = segment_changes(
            segments, _exists_mask(versions), _changed_mask(segments, versions)
        )
        columns = self._decode(take_bytes(versions, emitted.versions))
        ticks = pa.array(segments.ticks[emitted.segments], pa.int64())
        return pa.Table.from_arrays(
            [*columns, emitted.names(), ticks], schema=self.output.append(TICK_FIELD)
        )

    def _newest_only(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        """The changes of the row that is the newest of its key by then."""
        ranked = rank_keys([encode_keys(rows, self.key)])
        stored = state.get_array(ranked.keys)
        stored_keys = np.flatnonzero(stored.is_valid().to_numpy(zero_copy_only=False))
        stored_rows = pa.table(self._decode(stored.take(pa.array(stored_keys))), schema=self.schema)
        stored_ids, ids = rank_keys([self._row_ids(stored_rows), self._row_ids(rows)]).ranks
        inserted_ids = np.where(_delete_mask(rows), -1, ids)
        keys = np.concatenate([stored_keys, ranked.ranks[0]])
        ticks = np.concatenate([np.full(len(stored_keys), -1), ticks_of(rows)])
        order = sort_order(keys, ticks)
        newest = np.empty(len(order), np.int64)
        newest[order] = _running_maximum(
            keys[order], ticks[order], np.concatenate([stored_ids, inserted_ids])[order]
        )
        return rows.filter(pa.array(ids == newest[len(stored_keys) :]))

    def _row_ids(self, rows: pa.Table) -> pa.Array:
        """The time and the stream's columns of each row, as bytes that sort by time."""
        times = microseconds(rows.column(self.time)).view(np.uint64) ^ np.uint64(1 << 63)
        time_bytes = times.astype(">u8").view(np.uint8)
        own = pa.StructArray.from_arrays(
            [as_array(rows.column(name)) for name in self.own],
            fields=[self.schema.field(name) for name in self.own],
        )
        offsets = np.arange(len(times) + 1) * 8
        return concat_bytes([slice_bytes(time_bytes, offsets), row_codec.encode_array(own)]).cast(
            pa.binary()
        )

    def _decode(self, values: pa.Array) -> list[pa.Array]:
        """The columns of stored rows."""
        return _decode_rows(
            values, self.schema, bytes([_NEWEST_VERSION]), _NEWEST_HEADER_BYTES, self.step_name
        )

    @property
    def key_fields(self) -> list[pa.Field]:
        return [self.schema.field(name) for name in self.key]

    def describe(self, keys: pa.Array, values: pa.Array) -> pa.Table:  # noqa: ARG002
        """The newest row of each key and whether it was retracted, for people."""
        rows = pa.Table.from_arrays(self._decode(values), schema=self.schema)
        return rows.append_column("_taken_back", pa.array(~_exists_mask(values)))


# Versions of a key's row: the stored one, and the one after each tick


def _last_rows(segments: Segments, schema: pa.Schema) -> tuple[pa.Array, pa.StructArray]:
    """The last row of each key and tick: its index, and the row."""
    last = pa.array(segments.order[segments.starts + segments.sizes - 1])
    columns = [as_array(segments.rows.column(name)).take(last) for name in schema.names]
    return last, pa.StructArray.from_arrays(columns, fields=list(schema))


def _interleave(segments: Segments, stored: pa.Array, after: pa.Array) -> pa.Array:
    """The stored value of each key, followed by its value after each tick."""
    source = np.empty(segments.versions, np.int64)
    source[segments.initial_versions] = np.arange(len(stored))
    source[segments.after] = len(stored) + np.arange(len(segments))
    return take_bytes(pa.concat_arrays([stored, after]), source)


def _last_versions(segments: Segments) -> Ints:
    """The index of each key's version after its last tick."""
    return np.append(segments.initial_versions[1:], segments.versions) - 1


def _changed_mask(segments: Segments, versions: pa.Array) -> Mask:
    """Which ticks changed the value of their key."""
    after = segments.after
    return differs(take_bytes(versions, after - 1), take_bytes(versions, after))


def _decode_rows(
    values: pa.Array, schema: pa.Schema, version: bytes, header_bytes: int, step: str
) -> list[pa.Array]:
    """The columns of stored rows, which lie behind a header that begins with the version."""
    if pc.any(pc.greater(pc.binary_slice(values, 0, 1), version)).as_py():
        raise NewerFormat(
            f"The state of step {step!r} was written by a newer Headrace.", fix="upgrade Headrace."
        )
    row_bytes = pc.binary_slice(values.cast(pa.large_binary()), header_bytes, _MAX_ROW_BYTES)
    rows = row_codec.decode_array(row_bytes, pa.struct(list(schema)))
    return [pc.struct_field(rows, index) for index in range(len(schema))]


def _delete_mask(rows: pa.Table) -> Mask:
    mask: Mask = pc.equal(as_array(rows.column(CHANGE_TYPE)), DELETE).to_numpy(zero_copy_only=False)
    return mask


def _exists_mask(values: pa.Array) -> Mask:
    """Which values of the newest kernel hold a row that is not retracted."""
    is_retracted = pc.binary_slice(values, 1, _NEWEST_HEADER_BYTES)
    mask: Mask = pc.equal(is_retracted, b"\x00").fill_null(False).to_numpy(zero_copy_only=False)
    return mask


def _running_maximum(keys: Ints, ticks: Ints, numbers: Ints) -> Ints:
    """For each row, in order of key and tick, the greatest number of its key up to the end of its
    tick; -1 if there is none.
    """
    starts = np.flatnonzero(group_start_mask(keys, ticks))
    span = int(numbers.max(initial=-1)) + 2
    # Keys ascend, so the numbers of earlier keys are below those of later ones.
    greatest = np.maximum.accumulate(np.maximum.reduceat(numbers, starts) + 1 + keys[starts] * span)
    sizes = np.diff(starts, append=len(keys))
    return np.repeat(greatest - keys[starts] * span - 1, sizes)
