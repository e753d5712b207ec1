"""Deduplication: the first row of each key within a time; rows that repeat it are dropped.

A row repeats an earlier one of its key if their event times lie within `within` of each other,
before or after. Rows without an event time go by the time of their tick. With `within` = 10 s:

    rows in             state after        rows out
    tick 1: k=a at 0    k+a -> [0]         a at 0
    tick 2: k=a at 8    k+a -> [0]         (repeats the row at 0)
    tick 2: k=a at 12   k+a -> [0, 12]     a at 12

A time is forgotten once the horizon has passed it by `within`. A row behind the horizon could
repeat a forgotten one, so it is dropped as late, and counted.

State:
- `k`, key: version 1; the times of the rows that passed, 8 bytes each, big-endian, in order.
- `t`, expiry time (8 bytes, sortable), key: a timer; its value is the name of the entry above.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.columnar.columns import TICK, TICK_FIELD
from headrace.columnar.keys import as_array, encode_keys, key_groups, key_list
from headrace.errors import NewerFormat
from headrace.operators.kernel import (
    UNSTARTED,
    Groups,
    KeyedState,
    Times,
    Watermarks,
    big_endian,
    microseconds,
)

_VERSION = b"\x01"
_KEPT, _TIMER = b"k", b"t"
# Share of rows that a round may leave over; above it, going row by row is cheaper.
_MAX_ROUND_LEFTOVER = 0.9
Mask = npt.NDArray[np.bool_]


class DedupeKernel:
    """Passes on the first row of each key within a time.

    Args:
        step: The step's name, for errors.
        schema: The columns of the input.
        on: The columns that identify a row.
        within_us: How far apart two rows of a key must be for both to pass.
        time: The column with the event time; without one, a row has the time of its tick.

    """

    def __init__(
        self,
        step: str,
        schema: pa.Schema,
        on: Sequence[str],
        within_us: int,
        time: str | None = None,
    ) -> None:
        self.step_name = step
        self.schema = schema
        self.on = tuple(on)
        self.within_us = within_us
        self.time = time
        self.counts: dict[str, int] = {}

    @cached_property
    def output(self) -> pa.Schema:
        return self.schema

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """1. Drop late rows. 2. Pass on the first row of each key. 3. Forget times behind the
        horizon.
        """
        rows, own_watermarks = inputs[0], watermarks[0]
        self.counts = {"repeats": 0, "late": 0}
        result = self.schema.append(TICK_FIELD).empty_table()
        if rows.num_rows:
            tick_index = own_watermarks.tick_indices(as_array(rows[TICK]).to_numpy())
            times = (
                own_watermarks.times_us[tick_index]
                if self.time is None
                else microseconds(rows[self.time])
            )
            late = (
                times < own_watermarks.horizon_before[tick_index]
                if self.time is not None
                else np.zeros(rows.num_rows, np.bool_)
            )
            keys = encode_keys(rows, self.on)
            # Which rows pass. In each round, the first remaining row of each key passes and strikes
            # out the rows that repeat it. Rounds stop once they strike out few rows; the rest, of
            # keys with many distinct times, is processed row by row.
            encoded = keys.dictionary_encode()
            key_of, distinct = encoded.indices.to_numpy().astype(np.int64), encoded.dictionary
            groups = key_groups(distinct)
            names = [_KEPT + key for key in key_list(distinct)]
            known = [self._times(value) for value in state.get(names, groups)]
            rest = np.flatnonzero(~late & ~self._repeats_known(known, key_of, times))
            kept = np.zeros(len(times), np.bool_)
            last = np.zeros(len(distinct), np.int64)
            before = 2 * len(rest)
            while 0 < len(rest) <= before * _MAX_ROUND_LEFTOVER:
                before = len(rest)
                touched, first = np.unique(key_of[rest], return_index=True)
                chosen = rest[first]
                kept[chosen] = True
                last[touched] = times[chosen]
                rest = rest[np.abs(times[rest] - last[key_of[rest]]) > self.within_us]
            kept[rest[self._first_of_many(key_of[rest], times[rest])]] = True
            self._store_times(state, names, groups, known, key_of[kept], times[kept])
            self.counts["late"] = int(np.count_nonzero(late))
            self.counts["repeats"] = (
                rows.num_rows - self.counts["late"] - int(np.count_nonzero(kept))
            )
            result = rows.select([*self.schema.names, TICK]).filter(pa.array(kept))
        self._forget(state, own_watermarks)
        return result

    def _repeats_known(self, known: list[Times], key_of: Times, times: Times) -> Mask:
        """Which rows repeat one that passed in an earlier call: a stored time lies within `within`
        of theirs.
        """
        kept_us = np.concatenate([*known, np.empty(0, np.int64)])
        moments = np.unique(kept_us)
        room = len(moments) + 1
        tick_index = np.repeat(
            np.arange(len(known)), [len(each) for each in known]
        ) * room + np.searchsorted(moments, kept_us)
        ends = (
            np.searchsorted(moments, times - self.within_us),
            np.searchsorted(moments, times + self.within_us, side="right"),
        )
        begin, end = (np.searchsorted(tick_index, key_of * room + each) for each in ends)
        repeats: Mask = begin < end
        return repeats

    def _first_of_many(self, key_of: Times, times: Times) -> list[int]:
        """The rows that pass, row by row. Time is cut into spans in which at most one row of a key
        passes, so that only the row's own span and its two neighbours need a look.
        """
        span_us = self.within_us + 1
        seen: dict[tuple[int, int], int] = {}
        kept: list[int] = []
        for row, (key, at, span) in enumerate(
            zip(key_of.tolist(), times.tolist(), (times // span_us).tolist(), strict=True)
        ):
            near = (seen.get((key, each)) for each in (span - 1, span, span + 1))
            if all(other is None or abs(at - other) > self.within_us for other in near):
                seen[key, span] = at
                kept.append(row)
        return kept

    def _store_times(
        self,
        state: KeyedState,
        names: list[bytes],
        groups: Groups,
        known: list[Times],
        key_of: Times,
        times: Times,
    ) -> None:
        if not len(key_of):
            return
        order = np.argsort(key_of, kind="stable")
        touched, starts = np.unique(key_of[order], return_index=True)
        parts = np.split(times[order], starts[1:])
        values = [
            _VERSION + np.sort(np.concatenate([known[at], part])).astype(">i8").tobytes()
            for at, part in zip(touched, parts, strict=True)
        ]
        state.put([names[at] for at in touched], values, groups[touched])
        timers = [
            _TIMER + ends + names[at][1:]
            for at, ends in zip(key_of.tolist(), big_endian(times + self.within_us), strict=True)
        ]
        state.put(timers, [names[at] for at in key_of.tolist()], groups[key_of])

    def _times(self, value: bytes | None) -> Times:
        if value is None:
            return np.empty(0, np.int64)
        if value[:1] > _VERSION:
            raise NewerFormat(
                f"The state of step {self.step_name!r} was written by a newer Headrace.",
                fix="upgrade Headrace.",
            )
        return np.frombuffer(value[1:], ">i8").astype(np.int64)

    def _forget(self, state: KeyedState, own_watermarks: Watermarks) -> None:
        """Delete the times that are so far behind the horizon that a repeat would be late."""
        times = own_watermarks.times_us if self.time is None else own_watermarks.horizon
        horizon_us = int(times[-1]) if len(own_watermarks) else UNSTARTED
        if horizon_us == UNSTARTED:
            return
        (end,) = big_endian(np.array([horizon_us]))
        timers, names, groups = state.scan(_TIMER, _TIMER + end)
        if not timers:
            return
        state.put(timers, [None] * len(timers), groups)
        distinct, first = np.unique(np.array(names, object), return_index=True)
        stored = [self._times(value) for value in state.get(list(distinct), groups[first])]
        left = [times[times + self.within_us >= horizon_us] for times in stored]
        state.put(
            list(distinct),
            [_VERSION + times.astype(">i8").tobytes() if len(times) else None for times in left],
            groups[first],
        )

    def due(self, state: KeyedState) -> int | None:  # noqa: ARG002
        """Always None: no row is emitted when time passes, and what can be forgotten waits for the
        next call.
        """
        return None
