"""The latest row of each key, as a table. Two kernels: `LatestKernel` keeps the row that arrived
last, or the one with the greatest value of a column, such as its event time; `NewestKernel` does
so behind a join that corrects what it emitted.

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

from collections.abc import Callable, Sequence
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
from headrace.operators.aggregates.accumulator import rank_values
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

    With `by`, for streams, a row that is older than the stored one by that column changes nothing,
    and is counted (`older`). Of rows with equal values the last to arrive is the newest. Null is
    older than every value.

    State of a key: version 1; the row.
    """

    def __init__(
        self, step: str, schema: pa.Schema, key: Sequence[str], *, by: str | None = None
    ) -> None:
        self.step_name, self.schema, self.key, self.by = step, schema, tuple(key), by
        self.counts: dict[str, int] = {}

    @cached_property
    def output(self) -> pa.Schema:
        return self.schema.append(CHANGE_FIELD)

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        """1. Fill in values that a captured change left out; leave out older rows. 2. Find the row
        of each key after each tick. 3. Store. 4. Emit what changed.
        """
        self.counts = {}
        if CHANGE_TYPE in rows.column_names:
            rows = rows.filter(pc.not_equal(rows[CHANGE_TYPE], UPDATE_PREIMAGE))
        elif self.by is not None and rows.num_rows:
            rows = self._without_older(state, rows, self.by)
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
        versions = _RowVersions(segments, state.get_array(segments.keys), encoded)
        # 3. Store.
        state.put_array(segments.keys, versions.last())
        # 4. Emit.
        exists = versions.mask(_valid_mask)
        emitted = segment_changes(segments, exists, versions.changed_mask())
        columns = versions.columns(emitted.versions, structs, self._decode)
        ticks = pa.array(segments.ticks[emitted.segments], pa.int64())
        return pa.Table.from_arrays(
            [*columns, emitted.names(), ticks], schema=self.output.append(TICK_FIELD)
        )

    def _without_older(self, state: KeyedState, rows: pa.Table, by: str) -> pa.Table:
        """The rows that are the newest of their key when they arrive."""
        ranked = rank_keys([encode_keys(rows, self.key)])
        stored = state.get_array(ranked.keys)
        stored_keys = np.flatnonzero(stored.is_valid().to_numpy(zero_copy_only=False))
        index = self.schema.get_field_index(by)
        stored_by = self._decode(stored.take(pa.array(stored_keys)))[index]
        values = pa.concat_arrays([stored_by, as_array(rows.column(by))])
        ranks = np.full(len(values), -1)
        ranks[values.is_valid().to_numpy(zero_copy_only=False)] = rank_values(values.drop_null())[0]
        # Stored rows come first, and rows of one key in order of arrival: the newest so far is a
        # running maximum. The ranks of each key are shifted above those of the key before.
        keys = np.concatenate([stored_keys, ranked.ranks[0]])
        order = sort_order(keys, np.arange(len(keys)))
        shifted = (ranks + keys * (int(ranks.max()) + 2))[order]
        is_newest = np.empty(len(order), np.bool_)
        is_newest[order] = shifted == np.maximum.accumulate(shifted)
        is_newest = is_newest[len(stored_keys) :]
        if is_newest.all():
            return rows
        self.counts["older"] = int(np.count_nonzero(~is_newest))
        return rows.filter(pa.array(is_newest))

    # Expiry: see `headrace.operators.expiry`

    def forget(self, state: KeyedState, keys: pa.Array) -> None:
        """Delete the rows of some keys."""
        state.put_array(keys, pa.nulls(len(keys), pa.binary()))

    def stored_rows(self, state: KeyedState, keys: pa.Array) -> pa.Table:
        """The present rows of those of the keys that have one."""
        values = state.get_array(keys).drop_null()
        return pa.Table.from_arrays(self._decode(values), schema=self.schema)

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
        versions = _RowVersions(segments, state.get_array(segments.keys), encoded)
        # 3. Store.
        state.put_array(segments.keys, versions.last())
        # 4. Emit.
        exists = versions.mask(_exists_mask)
        emitted = segment_changes(segments, exists, versions.changed_mask())
        columns = versions.columns(emitted.versions, structs, self._decode)
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


class _RowVersions:
    """The values of each key: the stored one, followed by the one after each tick. They stay where
    they are: values of rows that are not compared are not copied.
    """

    def __init__(self, segments: Segments, stored: pa.Array, after: pa.Array) -> None:
        """Take the stored value of each key, and the value after each segment."""
        self.segments, self.stored, self.after = segments, stored, after
        self._source = np.empty(segments.versions, np.int64)
        self._source[segments.initial_versions] = np.arange(len(stored))
        self._source[segments.after] = len(stored) + np.arange(len(segments))

    def mask(self, exists: Callable[[pa.Array], Mask]) -> Mask:
        """For each version what a function says of its value."""
        return np.concatenate([exists(self.stored), exists(self.after)])[self._source]

    def changed_mask(self) -> Mask:
        """Which segments changed the value of their key."""
        count = len(self.stored)
        before = self._source[self.segments.after - 1]
        is_valid = np.concatenate([_valid_mask(self.stored), _valid_mask(self.after)])
        changed: Mask = is_valid[before] != is_valid[count:]
        compared = np.flatnonzero(is_valid[before] & is_valid[count:])
        is_stored = before[compared] < count
        for which, values, first in (
            (compared[is_stored], self.stored, 0),
            (compared[~is_stored], self.after, count),
        ):
            if len(which):
                changed[which] = differs(
                    take_bytes(values, before[which] - first), take_bytes(self.after, which)
                )
        return changed

    def last(self) -> pa.Array:
        """The value of each key after its last segment."""
        if len(self.segments) == len(self.stored):
            return self.after
        ends = np.append(self.segments.firsts[1:], len(self.segments)) - 1
        return take_bytes(self.after, ends)

    def columns(
        self,
        versions: Ints,
        rows: pa.StructArray,
        decode: Callable[[pa.Array], list[pa.Array]],
    ) -> list[pa.Array]:
        """The columns of some versions: of stored rows as `decode` gives them, of the others from
        `rows`, the row after each segment.
        """
        sources = self._source[versions]
        is_stored = sources < len(self.stored)
        stored = decode(take_bytes(self.stored, sources[is_stored]))
        count = len(stored[0]) if stored else 0
        index = np.where(is_stored, np.cumsum(is_stored) - 1, sources - len(self.stored) + count)
        indices = pa.array(index)
        return [
            pa.concat_arrays([column, pc.struct_field(rows, number)]).take(indices)
            if count
            else pc.struct_field(rows, number).take(indices)
            for number, column in enumerate(stored)
        ]


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


def _valid_mask(values: pa.Array) -> Mask:
    mask: Mask = values.is_valid().to_numpy(zero_copy_only=False)
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
