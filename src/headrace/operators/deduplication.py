"""The first row of each key within a time; rows that repeat it are left out.

A row is a repeat if a row of its key that was kept lies within `within` of it, before or after.
Times are the event times of rows, or the times of their ticks where rows have none. What was kept
is forgotten once the closed clock has passed it by `within`; a row behind the closed clock could be
a repeat of something forgotten, and is left out as too late, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.columnar.columns import TICK, TICK_FIELD
from headrace.columnar.keys import encode_keys, key_groups, key_list, whole
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
# rows that a round leaves, of those there were, above which it costs more than looking at each
_WORTH_A_ROUND = 0.9
Mask = npt.NDArray[np.bool_]


class DedupeKernel:
    """`on`: the columns that tell rows apart. `time`: the column with a row's time; without one,
    its tick's time.
    """

    def __init__(
        self,
        step: str,
        schema: pa.Schema,
        on: Sequence[str],
        within_us: int,
        time: str | None = None,
    ) -> None:
        self.step_name, self.schema, self.on, self.within_us, self.time = (
            step,
            schema,
            tuple(on),
            within_us,
            time,
        )
        self.counts: dict[str, int] = {}

    @cached_property
    def output(self) -> pa.Schema:
        return self.schema

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """1. Leave out what is too late. 2. Keep the first of each key. 3. Forget what no row can
        repeat any more.
        """
        (rows,), (clock,) = inputs, watermarks
        self.counts = {"repeats": 0, "late": 0}
        result = self.schema.append(TICK_FIELD).empty_table()
        if rows.num_rows:
            result = self._first(state, rows, clock)
        self._forget(state, clock)
        return result

    def _first(self, state: KeyedState, rows: pa.Table, clock: Watermarks) -> pa.Table:
        places = clock.at(whole(rows[TICK]).to_numpy())
        times = clock.times_us[places] if self.time is None else microseconds(rows[self.time])
        late = (
            times < clock.horizon_before[places]
            if self.time is not None
            else np.zeros(rows.num_rows, np.bool_)
        )
        keys = encode_keys(rows, self.on)
        kept = self._kept(state, keys, times, late)
        self.counts["late"] = int(np.count_nonzero(late))
        self.counts["repeats"] = rows.num_rows - self.counts["late"] - int(np.count_nonzero(kept))
        return rows.select([*self.schema.names, TICK]).filter(pa.array(kept))

    def _kept(self, state: KeyedState, keys: pa.Array, times: Times, late: Mask) -> Mask:
        """Which rows are kept. Round by round: what was kept strikes out its repeats, the first row
        that is left of each key is kept next.

        Rounds end when they strike out few: of a key that keeps many rows, the rest is gone through
        row by row.
        """
        encoded = keys.dictionary_encode()
        key_of, distinct = encoded.indices.to_numpy().astype(np.int64), encoded.dictionary
        groups = key_groups(distinct)
        names = [_KEPT + key for key in key_list(distinct)]
        known = [self._times(value) for value in state.get(names, groups)]
        rest = np.flatnonzero(~late & ~self._repeats_known(known, key_of, times))
        kept = np.zeros(len(times), np.bool_)
        last = np.zeros(len(distinct), np.int64)
        before = 2 * len(rest)
        while 0 < len(rest) <= before * _WORTH_A_ROUND:
            before = len(rest)
            found, first = np.unique(key_of[rest], return_index=True)
            chosen = rest[first]
            kept[chosen] = True
            last[found] = times[chosen]
            rest = rest[np.abs(times[rest] - last[key_of[rest]]) > self.within_us]
        kept[rest[self._first_of_many(key_of[rest], times[rest])]] = True
        self._remember(state, names, groups, known, key_of[kept], times[kept])
        return kept

    def _repeats_known(self, known: list[Times], key_of: Times, times: Times) -> Mask:
        """Rows that repeat what an earlier call kept: some of it lies between the two ends of their
        time.
        """
        kept_us = np.concatenate([*known, np.empty(0, np.int64)])
        moments = np.unique(kept_us)
        room = len(moments) + 1
        places = np.repeat(
            np.arange(len(known)), [len(each) for each in known]
        ) * room + np.searchsorted(moments, kept_us)
        ends = (
            np.searchsorted(moments, times - self.within_us),
            np.searchsorted(moments, times + self.within_us, side="right"),
        )
        begin, end = (np.searchsorted(places, key_of * room + each) for each in ends)
        repeats: Mask = begin < end
        return repeats

    def _first_of_many(self, key_of: Times, times: Times) -> list[int]:
        """The rows that are kept, one by one. Time is cut into spans so short that each has one
        kept row at most: only three of them need a look.
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

    def _remember(
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
        found, starts = np.unique(key_of[order], return_index=True)
        parts = np.split(times[order], starts[1:])
        values = [
            _VERSION + np.sort(np.concatenate([known[at], part])).astype(">i8").tobytes()
            for at, part in zip(found, parts, strict=True)
        ]
        state.put([names[at] for at in found], values, groups[found])
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

    def _forget(self, state: KeyedState, clock: Watermarks) -> None:
        """What lies so far behind the closed clock that a repeat would be too late."""
        times = clock.times_us if self.time is None else clock.closed
        horizon_us = int(times[-1]) if len(clock) else UNSTARTED
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
        """Nothing is told when time passes; what can be forgotten waits for the next rows."""
        return None
