"""What all window kernels have in common: their settings, their result's columns, and the account
of rows that came too late.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import CHANGE_FIELD, TICK_FIELD
from headrace.columnar.keys import decode_keys
from headrace.columnar.lookup import sorting
from headrace.errors import BugError, InputError, UnknownColumn
from headrace.operators.aggregates.aggregation import Aggregation
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.operators.changelog import Changes
from headrace.operators.kernel import UNSTARTED, KeyedState, Times, Watermarks, microseconds
from headrace.operators.windows.late import Divert, Drop, LatePolicy
from headrace.operators.windows.late_rows import LateRows, bound
from headrace.operators.windows.specs import WindowSpec, check_emit
from headrace.operators.windows.state import (
    NO_WINDOWS,
    TOLD,
    WAITING,
    Windows,
    first_end,
    scan_until,
)

# What to tell of rows that a table of windows showed before a tick, and shows after it.


NOTHING = -1


@dataclass(frozen=True)
class Shown:
    """For each window that something may be told of, in a tick: the version of its results that was
    shown before and the one shown after, or NOTHING.
    """

    places: Ints  # of the tick
    windows: Ints
    was: Ints
    now: Ints

    @staticmethod
    def of(places: Ints, windows: Ints, was: Ints, now: Ints) -> Shown:
        """Without those that are not shown at all, and in the order of tick and window."""
        shown = np.flatnonzero((was != NOTHING) | (now != NOTHING))
        order = shown[sorting(places[shown], windows[shown])]
        return Shown(places[order], windows[order], was[order], now[order])


def over_lifetimes(windows: Ints, born: Ints, died: Ints, told_from: Ints, ticks: int) -> Shown:
    """From versions of windows, each of which holds from one tick of a call until another takes its
    place: born at -1 it was there before, died at FOR_EVER it stays.

    A version is shown from its birth on, but not before its window is told.
    """
    begins = np.maximum(born, told_from)
    lives = begins < np.minimum(died, ticks)
    comes, goes = np.flatnonzero(lives & (begins >= 0)), np.flatnonzero(lives & (died < ticks))
    if (
        not len(goes) and (np.diff(windows) > 0).all()
    ):  # each window has one version: it comes, or is there already
        return Shown.of(begins[comes], windows[comes], np.full(len(comes), NOTHING), comes)
    places, of = (
        np.concatenate([begins[comes], died[goes]]),
        np.concatenate([windows[comes], windows[goes]]),
    )
    nothing = np.full(len(places), NOTHING)
    now, was = nothing.copy(), nothing
    now[: len(comes)], was[len(comes) :] = comes, goes
    order = sorting(places, of)
    places, of, now, was = places[order], of[order], now[order], was[order]
    new = np.ones(len(order), np.bool_)
    new[1:] = (places[1:] != places[:-1]) | (of[1:] != of[:-1])
    starts = np.flatnonzero(new)
    if not len(starts):
        return Shown(places, of, was, now)
    return Shown(
        places[starts],
        of[starts],
        np.maximum.reduceat(was, starts),
        np.maximum.reduceat(now, starts),
    )


def tell(shown: Shown, differs: Callable[[Ints, Ints], Mask]) -> Changes:
    """The changes, in order; their `segments` are positions in what is shown."""
    was, now = shown.was != NOTHING, shown.now != NOTHING
    updated = was & now
    both = np.flatnonzero(updated)
    updated[both] = differs(shown.was[both], shown.now[both])
    count = np.where(updated, 2, (was != now).astype(np.int64))
    which = np.repeat(np.arange(len(count)), count)
    second = np.zeros(len(which), np.int64)
    second[1:] = which[1:] == which[:-1]
    kinds = np.where(updated[which], 1 + second, np.where(now[which], 0, 3))
    versions = np.where((kinds == 0) | (kinds == 2), shown.now[which], shown.was[which])
    return Changes(kinds, which, versions)


WINDOW_START, WINDOW_END = "window_start", "window_end"


@dataclass(frozen=True)
class WindowStep:
    """A window step as a plan has it. `time` is the column with a row's event time, `time_shift_us`
    what to add to it: the event time of a row of a window's result is its last microsecond, so over
    a table of windows it is `window_end` and -1 (over sliding ones, 0).

    `producer` is the column that tells who sent a row, for the account of late rows.
    `divert_errors` is as in AggregateKernel.
    """

    name: str
    schema: pa.Schema
    time: str
    window: WindowSpec
    by: tuple[str, ...]
    aggregates: tuple[tuple[str, AggregateSpec], ...]
    late: LatePolicy = Drop()  # noqa: RUF009
    emit: str = "final"
    over_table: bool = False
    row_key: tuple[str, ...] = ()
    producer: str | None = None
    time_shift_us: int = 0
    divert_errors: bool = False

    def __post_init__(self) -> None:
        check_emit(self.emit)
        if self.time not in self.schema.names:
            raise UnknownColumn(
                self.time, self.schema.names, where=f"The input of step {self.name!r}"
            )
        if taken := {WINDOW_START, WINDOW_END} & {*self.by, *(name for name, _ in self.aggregates)}:
            raise InputError(
                f"Step {self.name!r} has a result named {min(taken)!r}, as the windows' own.",
                fix="give it another name, or rename the column first.",
            )

    @property
    def timed_aggregates(self) -> tuple[tuple[str, AggregateSpec], ...]:
        """With the windows' time for those that go by event time and name none."""
        return tuple((name, self._timed(spec)) for name, spec in self.aggregates)

    def _timed(self, spec: AggregateSpec) -> AggregateSpec:
        options = tuple(
            (name, self.time if name == "time" and value is None else value)
            for name, value in spec.options
        )
        return replace(spec, options=options)


class Results(Protocol):
    """What windows amount to, by version."""

    def differs(self, before: Ints, after: Ints) -> Mask: ...

    def results(self, versions: Ints) -> list[pa.Array]: ...


class Windowed(ABC):
    """A kernel of windows.

    After a step its host finds: in `late` the rows that came too late, counted and, with `divert`,
    whole; in `diverted` and `lost` what `AggregateKernel` has there; in `counts` how many rows were
    late, and, of tumbling and hopping windows, how many were taken in when a window of theirs was
    complete already (`corrected`). `lateness_us` is what downstream must take off the closed clock;
    the complete clock passes on as it is.
    """

    gauges: Mapping[str, bytes] = {"windows_waiting": WAITING, "windows_kept": TOLD}
    """Windows that wait to be told, and those that were told and are kept for corrections. Of
    sliding windows, and of those that keep rows: groups that have such.
    """

    end_shown_us = 0
    """What is added to a window's end where it is shown."""

    def __init__(self, step: WindowStep) -> None:
        self.settings = step
        self.step_name, self.by, self.final = step.name, step.by, step.emit == "final"
        self.lateness_us = step.late.lateness_us
        self.aggregation = self.aggregating(step)
        self.diverted, self.lost = self.aggregation.diverted, self.aggregation.lost
        self.late = LateRows(step.schema, step.producer, divert=isinstance(step.late, Divert))
        self.counts: dict[str, int] = {}

    def aggregating(self, step: WindowStep) -> Aggregation:
        return Aggregation(
            step.name,
            step.schema,
            step.by,
            step.timed_aggregates,
            over_table=step.over_table,
            row_key=step.row_key,
            divert=step.divert_errors,
        )

    @cached_property
    def output(self) -> pa.Schema:
        keys = [self.settings.schema.field(name) for name in self.by]
        kind = self.settings.schema.field(self.settings.time).type
        bounds = [pa.field(name, kind, nullable=False) for name in (WINDOW_START, WINDOW_END)]
        return pa.schema(
            [
                *keys,
                *bounds,
                *self.aggregation.fields,
                CHANGE_FIELD,
            ]
        )

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """Take in the rows of some ticks, tell what they change and what the clocks complete, and
        let go of what the clocks close.
        """
        (rows,), (clock,) = inputs, watermarks
        self.counts = {"late": 0}
        if not len(clock):
            return self.nothing()
        return self.advance(state, rows, clock)

    @abstractmethod
    def advance(self, state: KeyedState, rows: pa.Table, clock: Watermarks) -> pa.Table:
        """The step, for at least one tick."""

    def due(self, state: KeyedState) -> int | None:
        """The earliest end of a window that waits to be told."""
        return first_end(state, WAITING) if self.final else None

    # Combining before the shuffle, for the kinds that can

    @property
    def combinable(self) -> bool:
        """Whether rows may be combined before the shuffle."""
        return False

    def worth_combining(self, rows: pa.Table) -> bool:  # noqa: ARG002
        """Whether `combine` would make these rows far fewer. It decides about speed alone."""
        return False

    def combine(self, rows: pa.Table) -> pa.Table:
        """Rows as fewer rows, that the step takes in their stead."""
        raise BugError(
            f"The rows of step {self.step_name!r} cannot be combined: {rows.num_rows} were to be."
        )

    # Time

    def times(self, rows: pa.Table) -> Times:
        """The event time of each row."""
        return microseconds(rows.column(self.settings.time)) + self.settings.time_shift_us

    def bounds(self, closed: Times) -> Times:
        """What ends at or before this is closed."""
        return bound(closed, self.lateness_us)

    def told_from(self, ends: Times, clock: Watermarks) -> Ints:
        """From which tick on windows with these ends are shown: its place in the call's ticks, -1
        if they were before, the number of ticks if they are not yet.
        """
        if not self.final:
            return np.full(len(ends), -1)
        return np.where(ends <= clock.watermark_at_start, -1, np.searchsorted(clock.complete, ends))

    def completed(self, state: KeyedState, clock: Watermarks) -> Windows:
        """The stored windows that these ticks complete."""
        complete = int(clock.complete[-1])
        if not self.final or complete == clock.watermark_at_start:
            return NO_WINDOWS
        return scan_until(state, WAITING, clock.watermark_at_start, complete)[1]

    def forget(self, state: KeyedState, clock: Watermarks) -> None:
        """Let go of the windows that no row can reach any more."""
        (until,) = self.bounds(clock.closed[-1:]).tolist()
        if until > self.bounds(np.array([clock.horizon_at_start]))[0]:
            names, windows = scan_until(state, TOLD, UNSTARTED, until)
            if names:
                state.put(names, [None] * len(names), windows.groups)

    # The result

    def nothing(self) -> pa.Table:
        return self.output.append(TICK_FIELD).empty_table()

    def told(
        self, windows: Windows, shown: Shown, outcome: Results, clock: Watermarks
    ) -> tuple[pa.Table, Changes]:
        """The rows to tell, and which versions they show. Windows are in order of group, start and
        end.
        """
        changes = tell(shown, outcome.differs)
        window = shown.windows[changes.segments]
        columns = decode_keys(windows.by.take(pa.array(window)), list(self.output)[: len(self.by)])
        bounds = windows.starts[window], windows.ends[window] + self.end_shown_us
        columns += [pa.array(times).cast(self.output.field(WINDOW_START).type) for times in bounds]
        columns += self._by_length(outcome.results(changes.versions), bounds[1] - bounds[0])
        columns += [changes.names(), pa.array(clock.ticks[shown.places[changes.segments]])]
        return pa.Table.from_arrays(columns, schema=self.output.append(TICK_FIELD)), changes

    def _by_length(self, results: list[pa.Array], lengths_us: Times) -> list[pa.Array]:
        """Rates are sums until the window is known."""
        specs = [spec for _, spec in self.settings.aggregates]
        return [
            (
                pc.divide(array.cast(pa.float64()), pa.array(lengths_us / spec.option("per_us")))
                if spec.kind == "rate"
                else array
            )
            for array, spec in zip(results, specs, strict=True)
        ]
