"""Of rows with one key the latest by event time, as a table: behind a join that corrects what it
told, whose stream may bring a key more than once.

A row of the stream is known again by its own columns, which corrections leave as they are. Once a
later row of the key was told, changes of earlier ones count no more, whatever comes when; that the
latest itself was taken back is remembered, too. Of rows with equal times that with the greater
bytes counts, so that there is always one answer.

State of a key: version 1; 1 if the row was taken back, else 0; the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar import row_codec
from headrace.columnar.buffers import Ints, Mask, take_bytes
from headrace.columnar.columns import CHANGE_FIELD, CHANGE_TYPE, TICK_FIELD
from headrace.columnar.keys import encode_keys, whole
from headrace.columnar.lookup import begins, ranked, sorting
from headrace.columnar.segments import Segments, cut
from headrace.errors import NewerFormat
from headrace.operators.changelog import (
    DELETE,
    MARKS,
    UPDATE_PREIMAGE,
    changes,
    differs,
    marked_unchanged,
    with_unchanged,
)
from headrace.operators.joins.row_store import joined, pieces
from headrace.operators.joins.sides import ticks_of
from headrace.operators.kernel import KeyedState, microseconds

_VERSION, _HEADER = 1, 2
_LONGEST = 2**31  # longer than any row


class NewestKernel:
    """`key` is the result's; `own` are the stream's columns, of which `time` is the event time."""

    def __init__(
        self, step: str, schema: pa.Schema, key: Sequence[str], *, own: Sequence[str], time: str
    ) -> None:
        self.step_name, self.schema, self.key, self.own, self.time = (
            step,
            schema,
            tuple(key),
            tuple(own),
            time,
        )
        self._struct = pa.struct(list(schema))

    @cached_property
    def output(self) -> pa.Schema:
        return self.schema.append(CHANGE_FIELD)

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        """1. Leave out what is not of the latest row of its key. 2. Of that, see what each tick
        made of it. 3. Store. 4. Tell.
        """
        rows = self._of_the_latest(
            state, rows.filter(pc.not_equal(rows[CHANGE_TYPE], UPDATE_PREIMAGE))
        )
        if not rows.num_rows:
            return self.output.append(TICK_FIELD).empty_table()
        segments = cut(rows, encode_keys(rows, self.key))
        versions = self._versions(segments, state.get_array(segments.keys))
        after, there = segments.after, _there(versions)
        told = changes(
            segments, there, differs(take_bytes(versions, after - 1), take_bytes(versions, after))
        )
        state.put_array(
            segments.keys,
            take_bytes(versions, np.append(segments.before_all[1:], segments.versions) - 1),
        )
        columns = self._decoded(take_bytes(versions, told.versions))
        return pa.Table.from_arrays(
            [*columns, told.names(), pa.array(segments.ticks[told.segments], pa.int64())],
            schema=self.output.append(TICK_FIELD),
        )

    def _of_the_latest(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        """The changes of the row that is the latest of its key by then."""
        if not rows.num_rows:
            return rows
        found = ranked([encode_keys(rows, self.key)])
        stored = state.get_array(found.keys)
        known = np.flatnonzero(stored.is_valid().to_numpy(zero_copy_only=False))
        stored_ids, ids = ranked(
            [
                self._ids(
                    pa.table(self._decoded(stored.take(pa.array(known))), schema=self.schema)
                ),
                self._ids(rows),
            ]
        ).ranks
        came = np.where(_goes(rows), -1, ids)
        keys, ticks = np.concatenate([known, found.ranks[0]]), ticks_of(rows)
        ticks = np.concatenate([np.full(len(known), -1), ticks])
        order = sorting(keys, ticks)
        latest = np.empty(len(order), np.int64)
        latest[order] = _running(
            keys[order], ticks[order], np.concatenate([stored_ids, came])[order]
        )
        return rows.filter(pa.array(ids == latest[len(known) :]))

    def _ids(self, rows: pa.Table) -> pa.Array:
        """The time and the stream's columns of each row, as bytes in the order of time."""
        times = (microseconds(rows.column(self.time)).view(np.uint64) ^ np.uint64(1 << 63)).astype(
            ">u8"
        )
        own = pa.StructArray.from_arrays(
            [whole(rows.column(name)) for name in self.own],
            fields=[self.schema.field(name) for name in self.own],
        )
        return joined(
            [
                pieces(times.view(np.uint8), np.arange(len(times) + 1) * 8),
                row_codec.encode_array(own),
            ]
        ).cast(pa.binary())

    def _versions(self, segments: Segments, stored: pa.Array) -> pa.Array:
        """What is stored of each key before all, and after each of its ticks; null where nothing
        is.
        """
        last = pa.array(segments.order[segments.starts + segments.sizes - 1])
        rows = pa.StructArray.from_arrays(
            [whole(segments.rows.column(name)).take(last) for name in self.schema.names],
            fields=list(self.schema),
        )
        headers = np.column_stack(
            [
                np.full(len(segments), _VERSION, np.uint8),
                _goes(segments.rows)[last.to_numpy()].astype(np.uint8),
            ]
        )
        encoded = joined(
            [
                pieces(headers.reshape(-1), np.arange(len(segments) + 1) * _HEADER),
                row_codec.encode_array(rows),
            ]
        ).cast(pa.binary())
        place = np.empty(segments.versions, np.int64)
        place[segments.before_all] = np.arange(len(stored))
        place[segments.after] = len(stored) + np.arange(len(segments))
        return take_bytes(pa.concat_arrays([stored, encoded]), place)

    def _decoded(self, values: pa.Array) -> list[pa.Array]:
        """The columns of stored rows."""
        if pc.any(pc.greater(pc.binary_slice(values, 0, 1), bytes([_VERSION]))).as_py():
            raise NewerFormat(
                f"The state of step {self.step_name!r} was written by a newer Headrace.",
                fix="upgrade Headrace.",
            )
        rows = row_codec.decode_array(
            pc.binary_slice(values.cast(pa.large_binary()), _HEADER, _LONGEST), self._struct
        )
        return [pc.struct_field(rows, at) for at in range(self._struct.num_fields)]

    # Looking at what is stored

    @property
    def key_fields(self) -> list[pa.Field]:
        return [self.schema.field(name) for name in self.key]

    def describe(self, keys: pa.Array, values: pa.Array) -> pa.Table:  # noqa: ARG002 - the row has the key's columns
        """The latest row of each key, and whether it was taken back."""
        gone = pa.array(~_there(values))
        return pa.Table.from_arrays(self._decoded(values), schema=self.schema).append_column(
            "_taken_back", gone
        )


def _goes(rows: pa.Table) -> Mask:
    gone: Mask = pc.equal(whole(rows.column(CHANGE_TYPE)), DELETE).to_numpy(zero_copy_only=False)
    return gone


def _there(values: pa.Array) -> Mask:
    shown: Mask = (
        pc.equal(pc.binary_slice(values, 1, _HEADER), b"\x00")
        .fill_null(False)
        .to_numpy(zero_copy_only=False)
    )
    return shown


def _running(keys: Ints, ticks: Ints, numbers: Ints) -> Ints:
    """For each row, in order of key and tick, the greatest number of its key so far, that of its
    whole tick included; -1 if there is none.
    """
    starts = np.flatnonzero(begins(keys, ticks))
    span = int(numbers.max(initial=-1)) + 2
    greatest = np.maximum.accumulate(
        np.maximum.reduceat(numbers, starts) + 1 + keys[starts] * span
    )  # keys ascend: those before are below
    sizes = np.diff(starts, append=len(keys))
    return np.repeat(greatest - keys[starts] * span - 1, sizes)


# The newest row of each key, as a table: from a stream of rows, or from a table's topic, whose rows
# say what is now and not what was.
#
# Everything downstream of a table needs the row that goes as well as the row that comes; this is
# where it is remembered.


_LATEST_VERSION = b"\x01"
_NOTHING = pa.scalar(b"", pa.large_binary())


class LatestKernel:
    """Keeps the last row of each key. A `delete` of a table's topic, which may have nothing but the
    key, removes it.
    """

    def __init__(self, step: str, schema: pa.Schema, key: Sequence[str]) -> None:
        self.step_name, self.schema, self.key = step, schema, tuple(key)
        self._struct = pa.struct(list(schema))

    @cached_property
    def output(self) -> pa.Schema:
        return self.schema.append(CHANGE_FIELD)

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        if CHANGE_TYPE in rows.column_names:
            rows = rows.filter(pc.not_equal(rows[CHANGE_TYPE], UPDATE_PREIMAGE))
        if not rows.num_rows:
            return self.output.append(TICK_FIELD).empty_table()
        rows = self._whole(state, rows)
        segments = cut(rows, encode_keys(rows, self.key))
        versions = self._versions(segments, state.get_array(segments.keys))
        after = segments.after
        unlike = differs(take_bytes(versions, after - 1), take_bytes(versions, after))
        told = changes(segments, versions.is_valid().to_numpy(zero_copy_only=False), unlike)
        newest = np.append(segments.before_all[1:], segments.versions) - 1
        state.put_array(segments.keys, take_bytes(versions, newest))
        return self._told(
            take_bytes(versions, told.versions), told.names(), segments.ticks[told.segments]
        )

    def _whole(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        """Rows of a captured table that are declared with `_marks`: what a change left as it was is
        as in the row before, if that is known.
        """
        if (
            MARKS not in self.schema.names
            or CHANGE_TYPE not in rows.column_names
            or not pc.any(marked_unchanged(rows)).as_py()
        ):
            return rows
        return with_unchanged(rows, list(self.key), lambda keys: self._stored(state, keys))

    def _stored(self, state: KeyedState, keys: pa.Table) -> pa.Table:
        values = state.get_array(encode_keys(keys, self.key)).drop_null()
        return pa.Table.from_arrays(self._decoded(values), schema=self.schema)

    def _versions(self, segments: Segments, stored: pa.Array) -> pa.Array:
        """Each key's row before all, and after each of its ticks, as bytes; null where it has
        none.
        """
        last = pa.array(segments.order[segments.starts + segments.sizes - 1])
        rows = pa.StructArray.from_arrays(
            [whole(segments.rows.column(name)).take(last) for name in self.schema.names],
            fields=list(self.schema),
        )
        encoded = pc.binary_join_element_wise(
            pa.scalar(_LATEST_VERSION, pa.large_binary()), row_codec.encode_array(rows), _NOTHING
        ).cast(pa.binary())
        if CHANGE_TYPE in segments.rows.schema.names:
            gone = pc.equal(whole(segments.rows.column(CHANGE_TYPE)).take(last), DELETE)
            encoded = pc.if_else(gone, pa.scalar(None, pa.binary()), encoded)
        place = np.empty(segments.versions, np.int64)
        place[segments.before_all] = np.arange(len(stored))
        place[segments.after] = len(stored) + np.arange(len(segments))
        return take_bytes(pa.concat_arrays([stored, encoded]), place)

    def _told(self, values: pa.Array, kinds: pa.Array, ticks: Ints) -> pa.Table:
        columns = self._decoded(values)
        return pa.Table.from_arrays(
            [*columns, kinds, pa.array(ticks, pa.int64())], schema=self.output.append(TICK_FIELD)
        )

    def _decoded(self, values: pa.Array) -> list[pa.Array]:
        """The columns of stored rows."""
        if pc.any(pc.greater(pc.binary_slice(values, 0, 1), _LATEST_VERSION)).as_py():
            raise NewerFormat(
                f"The state of step {self.step_name!r} was written by a newer Headrace.",
                fix="upgrade Headrace.",
            )
        plain = pc.binary_slice(values.cast(pa.large_binary()), len(_LATEST_VERSION), _LONGEST)
        rows = row_codec.decode_array(plain, self._struct)
        return [pc.struct_field(rows, at) for at in range(self._struct.num_fields)]

    # Looking at what is stored

    @property
    def key_fields(self) -> list[pa.Field]:
        return [self.schema.field(name) for name in self.key]

    def describe(self, keys: pa.Array, values: pa.Array) -> pa.Table:  # noqa: ARG002 - the row has the key's columns
        """The newest row of each key."""
        return pa.Table.from_arrays(self._decoded(values), schema=self.schema)
