"""What all window kernels share: settings, use of watermarks, and emission of results.

A window kernel keeps the aggregates of each group and window, and emits them when the watermark
passes the window's end (`emit="final"`) or on every change (`emit="changes"`). `count` over
tumbling windows of 10 s, with `late=correct("5 s")`; times in seconds:

    rows in           watermark    state after            rows out
    tick 1: k=a at 3  at 8         w a [0,10) -> 1
    tick 2: k=a at 9  at 12        p a [0,10) -> 2        tick 2: insert a [0,10) 2
    tick 3: k=a at 4  at 13        p a [0,10) -> 3        tick 3: update a [0,10) 2 -> 3
    tick 4: k=a at 6  at 16        (forgotten: 16-5>10)   tick 4: update a [0,10) 3 -> 4
    tick 5: k=a at 7  at 17                               late row, counted

`w` entries wait to be emitted, `p` entries have been emitted and are kept for corrections. The
kernels differ in how they find the windows of a row: `fixed_window`, `session_window`,
`sliding_window` and `buffered_window`. They describe the outcome of a call as versions of windows,
each of which holds from one tick to another; this module turns those into changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import CHANGE_FIELD, TICK_FIELD
from headrace.columnar.keys import decode_keys
from headrace.columnar.lookup import sort_order
from headrace.errors import BugError, InputError, UnknownColumn
from headrace.operators.aggregates.aggregation import AggregateSet
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.operators.changelog import EmittedChanges
from headrace.operators.kernel import UNSTARTED, KeyedState, Times, Watermarks, microseconds
from headrace.operators.windows.late_policy import Divert, Drop, LatePolicy
from headrace.operators.windows.late_rows import LateRowCounter, step_horizon
from headrace.operators.windows.specs import WindowSpec, check_emit
from headrace.operators.windows.state import (
    EMITTED,
    NO_WINDOWS,
    WAITING,
    Windows,
    first_end,
    scan_windows,
)

# From versions of windows to changes

NOTHING = -1
"""Stands for "no version"."""


@dataclass(frozen=True)
class ShownVersions:
    """Windows that may change in a tick, with the version of the results that is visible before it
    and after it, or NOTHING.
    """

    tick_index: Ints
    windows: Ints
    was: Ints
    now: Ints

    @staticmethod
    def of(tick_index: Ints, windows: Ints, was: Ints, now: Ints) -> ShownVersions:
        """The windows that are visible before or after the tick, in order of tick and window."""
        shown = np.flatnonzero((was != NOTHING) | (now != NOTHING))
        order = shown[sort_order(tick_index[shown], windows[shown])]
        return ShownVersions(
            tick_index=tick_index[order], windows=windows[order], was=was[order], now=now[order]
        )


def shown_over_lifetimes(
    windows: Ints, born: Ints, died: Ints, emitted_from: Ints, ticks: int
) -> ShownVersions:
    """The visible versions, from the lifetimes of versions within a call.

    Args:
        windows: The window of each version.
        born: The index of the tick that made it; -1 if it existed before the call.
        died: The index of the tick that replaced it; FOREVER if none did.
        emitted_from: The index of the tick from which its window is visible.
        ticks: The number of ticks in the call.

    """
    begins = np.maximum(born, emitted_from)
    lives = begins < np.minimum(died, ticks)
    appearing = np.flatnonzero(lives & (begins >= 0))
    vanishing = np.flatnonzero(lives & (died < ticks))
    if not len(vanishing) and (np.diff(windows) > 0).all():  # each window has only one version
        return ShownVersions.of(
            begins[appearing], windows[appearing], np.full(len(appearing), NOTHING), appearing
        )
    tick_index = np.concatenate([begins[appearing], died[vanishing]])
    of = np.concatenate([windows[appearing], windows[vanishing]])
    now = np.concatenate([appearing, np.full(len(vanishing), NOTHING)])
    was = np.concatenate([np.full(len(appearing), NOTHING), vanishing])
    order = sort_order(tick_index, of)
    tick_index = tick_index[order]
    of = of[order]
    now = now[order]
    was = was[order]
    new = np.ones(len(order), np.bool_)
    new[1:] = (tick_index[1:] != tick_index[:-1]) | (of[1:] != of[:-1])
    starts = np.flatnonzero(new)
    if not len(starts):
        return ShownVersions(tick_index=tick_index, windows=of, was=was, now=now)
    return ShownVersions(
        tick_index=tick_index[starts],
        windows=of[starts],
        was=np.maximum.reduceat(was, starts),
        now=np.maximum.reduceat(now, starts),
    )


def emitted_changes(shown: ShownVersions, differs: Callable[[Ints, Ints], Mask]) -> EmittedChanges:
    """The changes between the versions before and after; `segments` index into `shown`."""
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
    return EmittedChanges(kinds, which, versions)


# Settings and the base of window kernels

WINDOW_START, WINDOW_END = "window_start", "window_end"


@dataclass(frozen=True)
class WindowSettings:
    """The settings of a window step.

    `time` is the column with the event time, and `time_shift_us` is added to it: a row of a
    windowed table happens in the last microsecond of its window, so over such a table they are
    `window_end` and -1 (over sliding windows, 0). `producer` is the column with a row's producer,
    for counting late rows. With `divert_errors`, rows that a user's own aggregate raises on go to
    dead letters.
    """

    name: str
    schema: pa.Schema
    time: str
    window: WindowSpec
    by: tuple[str, ...]
    aggregates: tuple[tuple[str, AggregateSpec], ...]
    late: LatePolicy = field(default_factory=Drop)
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
                f"Step {self.name!r} has a result named {min(taken)!r}, which is the name of a"
                " window's bound.",
                fix="give it another name, or rename the column first.",
            )

    @property
    def timed_aggregates(self) -> tuple[tuple[str, AggregateSpec], ...]:
        """The aggregates; those that need an event time and name none get the windows' time."""
        return tuple((name, self._timed(spec)) for name, spec in self.aggregates)

    def _timed(self, spec: AggregateSpec) -> AggregateSpec:
        """The aggregate, with the windows' time in place of a missing `time` option."""
        options = tuple(
            (name, self.time if name == "time" and value is None else value)
            for name, value in spec.options
        )
        return replace(spec, options=options)


class WindowResults(Protocol):
    """The results of windows, by version."""

    def differs(self, before: Ints, after: Ints) -> Mask:
        """Which pairs of versions have different results."""
        ...

    def results(self, versions: Ints) -> list[pa.Array]:
        """One column of results per aggregate, for the given versions."""
        ...


class WindowKernel(ABC):
    """The base of all window kernels.

    After each call, the host reads: `late_rows`; `dead_letters`, `unknown_results` and `left_out`,
    as of `AggregateKernel`; and `counts`, with the number of late rows and, for tumbling and
    hopping windows, of rows that arrived after a window of theirs was complete (`corrected`).
    Downstream steps lower their horizon by `lateness_us`; the watermark passes through unchanged.
    """

    gauges: Mapping[str, bytes] = {"windows_waiting": WAITING, "windows_kept": EMITTED}
    """Windows that wait to be emitted, and emitted windows that are kept for corrections. For
    sliding and buffered windows: groups that have such windows.
    """

    shown_end_shift_us = 0
    """Added to a window's end when it is emitted."""

    def __init__(self, settings: WindowSettings) -> None:
        self.settings = settings
        self.step_name = settings.name
        self.by = settings.by
        self.emits_final = settings.emit == "final"
        self.lateness_us = settings.late.lateness_us
        self.aggregation = self.build_aggregation(settings)
        self.dead_letters = self.aggregation.dead_letters
        self.unknown_results = self.aggregation.unknown_results
        self.left_out = self.aggregation.left_out
        self.late_rows = LateRowCounter(
            settings.schema, settings.producer, divert=isinstance(settings.late, Divert)
        )
        self.counts: dict[str, int] = {}

    def build_aggregation(self, settings: WindowSettings) -> AggregateSet:
        """The aggregates of the step."""
        return AggregateSet(
            settings.name,
            settings.schema,
            settings.by,
            settings.timed_aggregates,
            over_table=settings.over_table,
            row_key=settings.row_key,
            divert=settings.divert_errors,
        )

    @cached_property
    def output(self) -> pa.Schema:
        keys = [self.settings.schema.field(name) for name in self.by]
        kind = self.settings.schema.field(self.settings.time).type
        bounds = [pa.field(name, kind, nullable=False) for name in (WINDOW_START, WINDOW_END)]
        return pa.schema([*keys, *bounds, *self.aggregation.fields, CHANGE_FIELD])

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """Process the rows of some ticks, emit what they and the watermarks change, and forget
        expired windows.
        """
        rows, input_watermarks = inputs[0], watermarks[0]
        self.counts = {"late": 0}
        if not len(input_watermarks):
            return self.empty_output()
        return self.advance(state, rows, input_watermarks)

    @abstractmethod
    def advance(self, state: KeyedState, rows: pa.Table, watermarks: Watermarks) -> pa.Table:
        """Process a call with at least one tick."""

    def due(self, state: KeyedState) -> int | None:
        """The earliest end of a window that waits to be emitted."""
        return first_end(state, WAITING) if self.emits_final else None

    # Partial aggregation before the shuffle, for the kernels that support it

    @property
    def combinable(self) -> bool:
        """Whether rows may be combined before the shuffle."""
        return False

    def is_worth_combining(self, rows: pa.Table) -> bool:  # noqa: ARG002
        """Whether `combine` would leave far fewer rows. The answer affects speed only."""
        return False

    def combine(self, rows: pa.Table) -> pa.Table:
        """Combine rows into fewer rows, which the step accepts instead."""
        raise BugError(
            f"Step {self.step_name!r} was asked to combine {rows.num_rows} rows, but does not"
            " support it."
        )

    # Time

    def times(self, rows: pa.Table) -> Times:
        """The event time of each row."""
        return microseconds(rows.column(self.settings.time)) + self.settings.time_shift_us

    def step_horizon(self, horizon: Times) -> Times:
        """The horizon of this step. A window that ends at or before it takes no more rows."""
        return step_horizon(horizon, self.lateness_us)

    def emitted_from(self, ends: Times, watermarks: Watermarks) -> Ints:
        """The index of the tick from which windows with these ends are visible: -1 if they were
        before the call, the number of ticks if they are not yet.
        """
        if not self.emits_final:
            return np.full(len(ends), -1)
        return np.where(
            ends <= watermarks.watermark_at_start, -1, np.searchsorted(watermarks.watermark, ends)
        )

    def scan_completed(self, state: KeyedState, watermarks: Watermarks) -> Windows:
        """The stored windows that the watermarks of these ticks complete."""
        watermark = int(watermarks.watermark[-1])
        if not self.emits_final or watermark == watermarks.watermark_at_start:
            return NO_WINDOWS
        return scan_windows(state, WAITING, watermarks.watermark_at_start, watermark)[1]

    def scan_expired(self, state: KeyedState, watermarks: Watermarks) -> pa.Array:
        """The keys of groups with emitted windows that the step's horizon passes in this call."""
        (until,) = self.step_horizon(watermarks.horizon[-1:]).tolist()
        if until == self.step_horizon(np.array([watermarks.horizon_at_start]))[0]:
            return NO_WINDOWS.group_keys
        return scan_windows(state, EMITTED, UNSTARTED, until)[1].group_keys

    def expire_windows(self, state: KeyedState, watermarks: Watermarks) -> None:
        """Delete the emitted windows that end behind the step's horizon."""
        (until,) = self.step_horizon(watermarks.horizon[-1:]).tolist()
        if until > self.step_horizon(np.array([watermarks.horizon_at_start]))[0]:
            names, windows = scan_windows(state, EMITTED, UNSTARTED, until)
            if names:
                state.put(names, [None] * len(names), windows.groups)

    # The result

    def empty_output(self) -> pa.Table:
        """An empty table with the columns of the output."""
        return self.output.append(TICK_FIELD).empty_table()

    def emit_rows(
        self, windows: Windows, shown: ShownVersions, outcome: WindowResults, watermarks: Watermarks
    ) -> tuple[pa.Table, EmittedChanges]:
        """The rows to emit, and the changes that they show. Windows are in order of group, start
        and end.
        """
        changes = emitted_changes(shown, outcome.differs)
        window = shown.windows[changes.segments]
        columns = decode_keys(
            windows.group_keys.take(pa.array(window)), list(self.output)[: len(self.by)]
        )
        bounds = windows.starts[window], windows.ends[window] + self.shown_end_shift_us
        columns += [pa.array(times).cast(self.output.field(WINDOW_START).type) for times in bounds]
        columns += self._by_length(outcome.results(changes.versions), bounds[1] - bounds[0])
        columns += [changes.names(), pa.array(watermarks.ticks[shown.tick_index[changes.segments]])]
        return pa.Table.from_arrays(columns, schema=self.output.append(TICK_FIELD)), changes

    def _by_length(self, results: list[pa.Array], lengths_us: Times) -> list[pa.Array]:
        """The results, with rates, which are kept as sums, divided by the length of the window."""
        specs = [spec for _, spec in self.settings.aggregates]
        return [
            (
                pc.divide(array.cast(pa.float64()), pa.array(lengths_us / spec.option("per_us")))
                if spec.kind == "rate"
                else array
            )
            for array, spec in zip(results, specs, strict=True)
        ]
