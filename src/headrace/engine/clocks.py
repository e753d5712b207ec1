"""Clocks: how far event time has come in each input, tick by tick.

Read tasks tell the newest event time of each producer in each tick (`event_times`). From that and from the clocks' state as of the tick before, everyone who
needs the clocks computes the same ones: the shards, to know which windows are complete; the driver, to write the clocks' new state and to show them.
A producer that is silent for longer than `idle` of tick time is forgotten; when all are, time follows the ticks. An input without a first row has no time yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pyarrow as pa

from headrace.errors import TooManyProducers
from headrace.operators.kernel import UNSTARTED, Clocks, Times

MOST_PRODUCERS = 100_000
NO_PRODUCER = "\x00null"
"""Who sent the rows whose producer is null: a name that nobody has."""
_FEW_ROWS = 1000
PARTS = pa.schema([("tick", pa.int64()), ("producer", pa.string()), ("newest_us", pa.int64())])
"""What read tasks tell: the newest event time of a producer in a tick."""


@dataclass(frozen=True)
class ClockSpec:
    """How the clock of one input goes. Without a column it follows the ticks."""

    name: str
    column: str | None = None
    producer: str | None = None
    delay_us: int = 0
    idle_us: int = 60_000_000
    most_ahead_us: int = 86_400_000_000

    @property
    def follows_ticks(self) -> bool:
        return self.column is None

    def label(self, producer: str) -> str:
        """What people call a producer: without a column that names them, partitions are."""
        return f"partition {producer}" if self.producer is None else "(null)" if producer == NO_PRODUCER else producer


@dataclass(frozen=True)
class InputClock:
    """One input's clock as of a tick: its live producers, the newest time of each, and when (in tick time) each was last heard."""

    complete_us: int = UNSTARTED
    producers: pa.Array = field(default_factory=lambda: pa.array([], pa.string()))
    newest_us: Times = field(default_factory=lambda: np.empty(0, np.int64))
    active_us: Times = field(default_factory=lambda: np.empty(0, np.int64))
    begun: bool = False

    def holding(self, most: int = 3) -> list[tuple[str, int, int]]:
        """The producers that hold this clock back most: name, newest time, when it was last heard."""
        order = np.argsort(self.newest_us, kind="stable")[:most]
        return [(self.producers[int(at)].as_py(), int(self.newest_us[at]), int(self.active_us[at])) for at in order]


@dataclass(frozen=True)
class ClockState:
    """All inputs' clocks as of a tick."""

    inputs: Mapping[str, InputClock] = field(default_factory=dict)
    time_us: int = UNSTARTED
    """The time of the tick that these clocks are of."""


@dataclass(frozen=True)
class ClockPath:
    """From an input's clock to a step's: how far the steps between hold time back, and how much lateness they allow."""

    name: str
    complete_back_us: int = 0
    closed_back_us: int = 0


def advance(
    specs: Sequence[ClockSpec], state: ClockState, parts: Mapping[str, pa.Table], ticks: Times, times_us: Times
) -> tuple[dict[str, Times], ClockState]:
    """Each input's complete clock at the end of each tick, and the state after the last."""
    moving = {spec.name: _Moving(spec, state.inputs.get(spec.name, InputClock()), parts.get(spec.name), ticks) for spec in specs if not spec.follows_ticks}
    clocks = {spec.name: times_us if spec.follows_ticks else moving[spec.name].through(times_us) for spec in specs}
    last_us = int(times_us[-1]) if len(times_us) else state.time_us
    return clocks, ClockState({name: each.now(last_us) for name, each in moving.items()}, last_us)


class _Moving:
    """One input's clock on its way through some ticks."""

    def __init__(self, spec: ClockSpec, clock: InputClock, parts: pa.Table | None, ticks: Times) -> None:
        self.spec, self.complete_us, self.begun = spec, clock.complete_us, clock.begun
        table = in_order(parts) if parts is not None else PARTS.empty_table()
        known = len(clock.producers)
        everyone = pa.chunked_array([clock.producers, *table["producer"].chunks], pa.string()).combine_chunks().dictionary_encode()
        self.producers = everyone.dictionary  # those known before come first: each is there once
        self.newest_us = np.full(len(self.producers), UNSTARTED, np.int64)
        self.active_us = np.full(len(self.producers), UNSTARTED, np.int64)
        self.newest_us[:known], self.active_us[:known] = clock.newest_us, clock.active_us
        self._who = everyone.indices.to_numpy()[known:]
        self._when_us = table["newest_us"].to_numpy()
        self._cuts = np.searchsorted(table["tick"].to_numpy(), np.append(ticks, ticks[-1:] + 1))
        self._quiet_until_us = UNSTARTED  # as long as no row comes, nothing changes before this time

    def through(self, times_us: Times) -> Times:
        clock = np.empty(len(times_us), np.int64)
        for at, time_us in enumerate(times_us.tolist()):
            self._take_in(at, time_us)
            self._move(time_us)
            clock[at] = self.complete_us
        return clock

    def _take_in(self, at: int, time_us: int) -> None:
        """The rows of a tick: a producer that was given up starts anew, whatever it had said."""
        first, last = self._cuts[at], self._cuts[at + 1]
        if first == last:
            return
        who, when_us = self._who[first:last], self._when_us[first:last]
        self.newest_us[who[self.active_us[who] < time_us - self.spec.idle_us]] = UNSTARTED
        np.maximum.at(self.newest_us, who, when_us)
        self.active_us[who] = time_us
        self.begun, self._quiet_until_us = True, UNSTARTED

    def _live(self, time_us: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return self.active_us >= time_us - self.spec.idle_us

    def _move(self, time_us: int) -> None:
        """The clock at the end of a tick; it never goes back."""
        if not self.begun or time_us <= self._quiet_until_us:
            return
        live = self._live(time_us)
        count = int(np.count_nonzero(live))
        if count > MOST_PRODUCERS:
            raise TooManyProducers(
                f"The input {self.spec.name!r} has {count:,} producers at once; at most {MOST_PRODUCERS:,} can be told apart.",
                fix="name a column with fewer values as producer=, such as the site instead of the device, or a shorter idle=.",
            )
        slowest_us = int(self.newest_us[live].min()) if count else time_us
        self.complete_us = max(self.complete_us, slowest_us - self.spec.delay_us)
        self._quiet_until_us = int(self.active_us[live].min()) + self.spec.idle_us if count else UNSTARTED

    def now(self, time_us: int) -> InputClock:
        """As of the last tick, without the producers that were given up."""
        live = self._live(time_us)
        if live.all():
            return InputClock(self.complete_us, self.producers, self.newest_us, self.active_us, self.begun)
        return InputClock(self.complete_us, self.producers.filter(pa.array(live)), self.newest_us[live], self.active_us[live], self.begun)


def newest(parts: pa.Table) -> pa.Table:
    """One row for each producer and tick."""
    parts = in_order(parts).combine_chunks()
    if not parts.num_rows:
        return parts
    ticks = parts["tick"].to_numpy()
    starts = np.flatnonzero(np.concatenate([[True], ticks[1:] != ticks[:-1]]))
    if len(starts) * _FEW_ROWS > len(ticks):  # many ticks, each with few rows
        return parts.group_by(["tick", "producer"]).aggregate([("newest_us", "max")]).rename_columns(["tick", "producer", "newest_us"]).cast(PARTS)
    return pa.concat_tables([_newest_of_one(parts.slice(start, end - start)) for start, end in pairwise([*starts.tolist(), len(ticks)])])


def in_order(parts: pa.Table) -> pa.Table:
    """By tick, without rows that have no time: those are tombstones."""
    if parts["newest_us"].null_count:
        parts = parts.filter(parts["newest_us"].is_valid())
    ticks = parts["tick"].to_numpy()
    return parts if (ticks[1:] >= ticks[:-1]).all() else parts.take(pa.array(np.argsort(ticks, kind="stable")))


def _newest_of_one(parts: pa.Table) -> pa.Table:
    """Of one tick: quicker than grouping by tick and producer."""
    encoded = parts["producer"].combine_chunks().dictionary_encode()
    times_us = np.full(len(encoded.dictionary), UNSTARTED, np.int64)
    np.maximum.at(times_us, encoded.indices.to_numpy(), parts["newest_us"].to_numpy())
    ticks = np.full(len(times_us), parts["tick"][0].as_py(), np.int64)
    return pa.Table.from_arrays([pa.array(ticks), encoded.dictionary, pa.array(times_us)], schema=PARTS)


@dataclass(frozen=True)
class BatchClocks:
    """The clocks of a batch: of its inputs at each of its ticks, and as of the tick before."""

    ticks: Times
    times_us: Times
    inputs: Mapping[str, Times]
    before: Mapping[str, int]

    def of(self, paths: Sequence[ClockPath]) -> Clocks:
        """A step's clocks: as far as the slowest of its inputs, less what is held back on the way."""
        complete = [_back(self.inputs[path.name], path.complete_back_us) for path in paths]
        closed = [_back(self.inputs[path.name], path.closed_back_us) for path in paths]
        before = [(self.before[path.name], path) for path in paths]
        return Clocks(
            self.ticks, self.times_us, np.minimum.reduce(complete), np.minimum.reduce(closed),
            min(_one_back(start, path.complete_back_us) for start, path in before), min(_one_back(start, path.closed_back_us) for start, path in before),
        )  # fmt: skip


def batch_clocks(
    specs: Sequence[ClockSpec], state: ClockState, parts: Mapping[str, pa.Table], ticks: Sequence[int], times_us: Sequence[int]
) -> tuple[BatchClocks, ClockState]:
    """What `advance` gives, with the clocks as they were before."""
    numbers, times = np.array(ticks, np.int64), np.array(times_us, np.int64)
    clocks, after = advance(specs, state, parts, numbers, times)
    before = {spec.name: state.time_us if spec.follows_ticks else state.inputs.get(spec.name, InputClock()).complete_us for spec in specs}
    return BatchClocks(numbers, times, clocks, before), after


def _back(clock: Times, by_us: int) -> Times:
    return clock if by_us == 0 else np.where(clock == UNSTARTED, UNSTARTED, clock - by_us)


def _one_back(clock: int, by_us: int) -> int:
    return clock if clock == UNSTARTED else clock - by_us
