"""Device time: event times of devices whose clocks are wrong, corrected.

A row has three times: when the event happened and when the row was sent, by the device's clock; and
when it was received, by ours. Received less sent is the offset of the device's clock (plus the
travel time). With a tolerance of 60 s and times in seconds:

    rows in (device d)                       state after      rows out
    tick 1: event 10 sent 12 received 112    d -> offset 100  event_time 110
    tick 2: event 20 sent 22 received 130    d -> offset 101  event_time 121
    tick 3: event 30 sent 30 received 930    d -> offset 101, event_time 930, flagged
                                             1 jump

The offset of a tick is the median of its rows' offsets, and moves the device's smoothed offset by
an eighth of the difference. A tick that differs by more than the tolerance does not move it, but
the third such tick in a row replaces it: the device's clock has been set. A row's corrected time is
its event time plus the smoothed offset, and never later than its receipt.

Implausible times are flagged, and corrected as far as possible: a row whose own offset is beyond
the tolerance is corrected by its own offset. A row whose clocks are thousands of years apart has no
time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask, as_binary
from headrace.columnar.columns import TICK, TICK_FIELD
from headrace.columnar.keys import as_array, encode_keys
from headrace.columnar.segments import Segments, segment_rows
from headrace.durations import format_us
from headrace.errors import InputError, NewerFormat, UnknownColumn
from headrace.operators.kernel import KeyedState, Times, microseconds

_VERSION = 1
_STATE = np.dtype([("version", "u1"), ("jumps", "u1"), ("offset", "<i8")])
_SMOOTHING = 8
_JUMPS = 3  # ticks in a row beyond the tolerance, which mean that the device's clock was set
_FARTHEST_US = 1 << 60
_EARLIEST_US, _LATEST_US = (
    -59_011_459_200_000_000,
    253_370_764_800_000_000,
)  # the years 100 to 9998, a margin inside what calendars support
_FINE, _NO_EVENT, _NO_YEAR, _NO_OFFSET, _AFTER_SENT, _OFF = range(6)


@dataclass(frozen=True)
class DeviceColumns:
    """The columns with the three times and the device, and the two that are added: the corrected
    time, and the reason why it may be wrong (null if it is plausible).
    """

    event: str
    sent: str
    received: str
    device: str
    time: str = "event_time"
    flag: str = "time_flag"


class DeviceTimeKernel:
    """Adds the corrected time to each row. State is keyed by device; rows stay in order."""

    def __init__(
        self, step: str, schema: pa.Schema, columns: DeviceColumns, tolerance_us: int = 60_000_000
    ) -> None:
        self.step_name = step
        self.schema = schema
        self.columns = columns
        self.tolerance_us = tolerance_us
        for name in (columns.event, columns.sent, columns.received, columns.device):
            if name not in schema.names:
                raise UnknownColumn(name, schema.names, where=f"The input of step {step!r}")
        for name in (columns.event, columns.sent, columns.received):
            if not pa.types.is_timestamp(schema.field(name).type):
                raise InputError(
                    f"The column {name!r} of step {step!r} is {schema.field(name).type}, and must"
                    " be a TIMESTAMP.",
                    fix="name columns of type TIMESTAMP.",
                )
        if taken := {columns.time, columns.flag} & set(schema.names):
            raise InputError(
                f"The input of step {step!r} has a column {min(taken)!r} already.",
                fix="give the corrected time and its flag other names.",
            )
        self.counts: dict[str, int] = {}

    @cached_property
    def output(self) -> pa.Schema:
        corrected = pa.field(self.columns.time, self.schema.field(self.columns.event).type)
        return pa.schema([*self.schema, corrected, pa.field(self.columns.flag, pa.string())])

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        """1. Cut rows by device and tick. 2. Read offsets. 3. Smooth tick by tick. 4. Store. 5.
        Correct.
        """
        schema = self.output.append(TICK_FIELD)
        self.counts = {"flagged": 0}
        if not rows.num_rows:
            return schema.empty_table()
        segments = segment_rows(rows, encode_keys(rows, [self.columns.device]))
        offsets = _Offsets.of(rows, self.columns)
        used, known = self._smoothed(state, segments, offsets)
        times, flags = self._corrected(rows, offsets, used, known)
        self.counts["flagged"] = len(flags) - flags.null_count
        columns = [
            *(rows.column(name) for name in self.schema.names),
            times,
            flags,
            rows.column(TICK),
        ]
        return pa.Table.from_arrays([as_array(column) for column in columns], schema=schema)

    # Offsets

    def _smoothed(
        self, state: KeyedState, segments: Segments, offsets: _Offsets
    ) -> tuple[Times, Mask]:
        """The offset of each row's device as of its tick, and whether there is one."""
        stored = self._read(state.get_array(segments.keys))
        known = stored["version"] > 0
        offset = stored["offset"].copy()
        jumps = stored["jumps"].astype(np.int64)
        medians, some = offsets.medians(segments)
        after, there = np.zeros(len(segments), np.int64), np.zeros(len(segments), np.bool_)
        for turn in segments.rounds():
            device = segments.key_of[turn]
            median = medians[turn]
            new = some[turn]
            away = median - offset[device]
            far = new & known[device] & (np.abs(away) > self.tolerance_us)
            jumps[device] = np.where(far, jumps[device] + 1, np.where(new, 0, jumps[device]))
            jumped = far & (jumps[device] >= _JUMPS)
            jumps[device[jumped]] = 0
            fresh = new & ~known[device] | jumped
            smooth = new & known[device] & ~far
            offset[device] = np.where(
                fresh, median, np.where(smooth, offset[device] + away // _SMOOTHING, offset[device])
            )
            known[device] |= new
            after[turn], there[turn] = offset[device], known[device]
        self._write(state, segments.keys, known, offset, jumps)
        of_row = np.empty(len(segments.order), np.int64)
        of_row[segments.order] = segments.segment_of
        return after[of_row], there[of_row]

    def _read(self, values: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        found = np.zeros(len(values), _STATE)
        there = values.drop_null()
        if len(there):
            found[values.is_valid().to_numpy(zero_copy_only=False)] = np.frombuffer(
                b"".join(there.to_pylist()), _STATE
            )
        if len(found) and int(found["version"].max()) > _VERSION:
            raise NewerFormat(
                f"The state of step {self.step_name!r} was written by a newer Headrace.",
                fix="upgrade Headrace.",
            )
        return found

    @staticmethod
    def _write(state: KeyedState, keys: pa.Array, known: Mask, offset: Ints, jumps: Ints) -> None:
        fresh = np.zeros(len(known), _STATE)
        fresh["version"] = _VERSION
        fresh["jumps"] = jumps
        fresh["offset"] = offset
        which = np.flatnonzero(known)
        state.put_array(
            keys.take(pa.array(which)), as_binary(fresh[which].view(f"V{_STATE.itemsize}"))
        )

    # Times

    def _corrected(
        self, rows: pa.Table, offsets: _Offsets, used: Times, known: Mask
    ) -> tuple[pa.Array, pa.Array]:
        event, has_event = _times(rows, self.columns.event)
        off = offsets.there & (np.abs(offsets.values - used) > self.tolerance_us)
        corrected = event + np.where(off, offsets.values, np.where(known, used, 0))
        corrected = np.where(
            offsets.has_received, np.minimum(corrected, offsets.received), corrected
        )
        in_years = (corrected >= _EARLIEST_US) & (corrected < _LATEST_US)
        reasons = [
            ~has_event,
            ~in_years,
            ~known | ~offsets.there,
            offsets.there & (event > offsets.sent),
            off,
        ]
        codes = np.select(reasons, [_NO_EVENT, _NO_YEAR, _NO_OFFSET, _AFTER_SENT, _OFF], _FINE)
        texts = pa.array(
            [
                None,
                "no event time",
                "no year from 100 to 9998",
                "no times of sending and receipt",
                "the event is after it was sent",
                f"the clock is off by more than {format_us(self.tolerance_us)} from what it was",
            ],
            pa.string(),
        )
        times = pa.array(corrected, mask=~(has_event & in_years)).cast(
            self.output.field(self.columns.time).type
        )
        return times, texts.take(pa.array(codes))


@dataclass(frozen=True)
class _Offsets:
    """The clock offset of each row, where both the sent and the received time are present."""

    values: Times
    there: Mask
    sent: Times
    received: Times
    has_received: Mask

    @staticmethod
    def of(rows: pa.Table, columns: DeviceColumns) -> _Offsets:
        (sent, has_sent), (received, has_received) = (
            _times(rows, name) for name in (columns.sent, columns.received)
        )
        return _Offsets(
            values=received - sent,
            there=has_sent & has_received,
            sent=sent,
            received=received,
            has_received=has_received,
        )

    def medians(self, segments: Segments) -> tuple[Times, Mask]:
        """The median offset of each segment (the lower one of two), and whether the segment has
        any.
        """
        there = self.there[segments.order]
        segment, values = segments.segment_of[there], self.values[segments.order][there]
        in_order = values[np.lexsort((values, segment))]
        count = np.bincount(segment, minlength=len(segments))
        middle = np.cumsum(count) - count + np.maximum(count - 1, 0) // 2
        some = count > 0
        found = np.zeros(len(segments), np.int64)
        found[some] = in_order[middle[some]]
        return found, some


def _times(rows: pa.Table, name: str) -> tuple[Times, Mask]:
    """A column of times with nulls as 0, and which are present. Extreme times are clipped, so that
    sums do not overflow.
    """
    column = as_array(rows.column(name))
    there = column.is_valid().to_numpy(zero_copy_only=False)
    return np.clip(microseconds(column.fill_null(0)), -_FARTHEST_US, _FARTHEST_US), there
