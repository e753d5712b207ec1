"""Watermarks: how far event time has come in each input, tick by tick.

A read task reports the newest event time of each producer in each tick (`engine.event_times`). From
these reports and the watermarks as of the tick before, everyone who needs watermarks computes the
same ones: the shards, to decide which windows are complete; the driver, to store the new state and
to show it in the status.

An input's watermark is the newest time of its slowest live producer, less `delay`. A producer that
is silent for longer than `idle` of tick time is no longer waited for. When none is live, the
watermark moves on with tick time from the newest event time, however old that is:

    delay 0, idle 1 min; a backfill of last year, times of day
    tick 12:00:00  rows up to 08:00:30    watermark 08:00:30
    tick 12:01:00  no row                 watermark 08:00:30    silent for 1 min, and waited for
    tick 12:01:20  no row                 watermark 08:00:50    idle for 20 s
    tick 12:01:25  rows up to 08:05:00    watermark 08:05:00

A step with several inputs takes the minimum of those that are not idle: an idle input keeps pace
with the live ones (`BatchWatermarks.of_ports`). An input that has not had a row yet has no
watermark (`UNSTARTED`), and counts as idle after `idle` from the first tick. From the tick on with
which event time ends, every watermark is `ENDED`.

`operators.watermark_spec` has the declarations (`WatermarkSpec`, `WatermarkPath`),
`operators.kernel` what a kernel sees (`Watermarks`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask
from headrace.engine.event_times import PARTS, furthest_ahead, newest_rows, read_parts
from headrace.engine.reports import JobFiles
from headrace.engine.state import files
from headrace.errors import TooManyProducers
from headrace.operators.kernel import ENDED, UNSTARTED, Times, Watermarks
from headrace.operators.watermark_spec import WatermarkPath, WatermarkSpec

MAX_PRODUCERS = 100_000
_SOURCE_COLUMNS = ("event_us", "appended_us", "partition", "offset")


@dataclass(frozen=True)
class TimeSource:
    """The row that an event time comes from: its producer, its own event time, when it was
    appended, and where it is; partition and offset are -1 if that is not known.
    """

    producer: str
    event_us: int
    appended_us: int
    partition: int = -1
    offset: int = -1

    @property
    def ahead_us(self) -> int:
        """How far its event time lies ahead of its append time; negative if it is behind."""
        return self.event_us - self.appended_us


@dataclass(frozen=True)
class InputWatermark:
    """One input's watermark as of a tick, and its live producers: the newest event time of each,
    the tick time at which each was last heard, and the row that each newest time is of.
    """

    watermark_us: int = UNSTARTED
    producers: pa.Array = field(default_factory=lambda: pa.array([], pa.string()))
    newest_us: Times = field(default_factory=lambda: np.empty(0, np.int64))
    active_us: Times = field(default_factory=lambda: np.empty(0, np.int64))
    sources: Ints = field(default_factory=lambda: np.empty((0, 4), np.int64))
    """By producer: event time, append time, partition and offset of its newest row."""
    begun: bool = False
    newest_ever_us: int = UNSTARTED
    """The newest event time of any producer, idle ones too."""
    heard_us: int = UNSTARTED
    """The time of the last tick with a row."""
    since_us: int = UNSTARTED
    """The time of the first tick, from which on a row is waited for."""
    moved_by: TimeSource | None = None
    """The row that the watermark was last moved by; after that it may have moved with tick time."""
    furthest: TimeSource | None = None
    """The row that was furthest ahead of its append time, of those beyond `max_ahead`."""

    def slowest_producers(self, limit: int = 3) -> list[tuple[str, int, int]]:
        """The producers that hold this watermark back, slowest first: (name, newest event time,
        tick time at which it was last heard).
        """
        order = np.argsort(self.newest_us, kind="stable")[:limit]
        return [
            (self.producers[int(at)].as_py(), int(self.newest_us[at]), int(self.active_us[at]))
            for at in order
        ]

    def is_waited_for(self, spec: WatermarkSpec, time_us: int) -> bool:
        """Whether steps wait for this input at a tick time: not if all its producers are idle, or
        if it has not had a row for too long.
        """
        if self.begun:
            return len(self.producers) > 0
        return self.since_us == UNSTARTED or time_us - self.since_us <= spec.idle_us


@dataclass(frozen=True)
class WatermarkState:
    """The watermarks of all inputs as of a tick, whose time is `time_us`."""

    inputs: Mapping[str, InputWatermark] = field(default_factory=dict)
    time_us: int = UNSTARTED
    is_ended: bool = False
    """Whether event time ended with that tick or an earlier one."""
    merged: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Watermark and horizon where several inputs meet: see `BatchWatermarks.of_ports`."""


# Computing watermarks


@dataclass(frozen=True)
class _InputTimes:
    """One input in a batch. The first entry is as of the tick before, then one for each tick."""

    watermark: Times
    is_waited_for: Mask | None
    """None for an input whose watermark follows the ticks."""


def advance(
    specs: Sequence[WatermarkSpec],
    state: WatermarkState,
    parts: Mapping[str, pa.Table],
    ticks: Times,
    times_us: Times,
    ended_from: int | None = None,
) -> tuple[dict[str, _InputTimes], WatermarkState]:
    """Each input's watermark before the first tick and at the end of each, and the state after the
    last one. Event time ends with the tick `ended_from`.
    """
    ended = np.full(len(ticks) + 1, state.is_ended)
    if ended_from is not None:
        ended[1:] |= ticks >= ended_from
    inputs: dict[str, _InputTimes] = {}
    after: dict[str, InputWatermark] = {}
    last_us = int(times_us[-1]) if len(times_us) else state.time_us
    for spec in specs:
        waited_for: Mask | None = None
        if spec.follows_ticks:
            watermark = np.concatenate([[np.int64(state.time_us)], times_us])
        else:
            before = state.inputs.get(spec.name, InputWatermark())
            generator = _WatermarkGenerator(
                spec, before, state.time_us, parts.get(spec.name), ticks
            )
            watermark, waited_for = generator.run(times_us)
            watermark = np.concatenate([[np.int64(before.watermark_us)], watermark])
            is_first = before.is_waited_for(spec, state.time_us)
            waited_for = np.concatenate([[is_first], waited_for]) | ended
            after[spec.name] = generator.now(last_us)
        inputs[spec.name] = _InputTimes(np.where(ended, ENDED, watermark), waited_for)
    return inputs, WatermarkState(after, last_us, bool(ended[-1]), state.merged)


class _WatermarkGenerator:
    """Advances the watermark of one input over some ticks."""

    def __init__(
        self,
        spec: WatermarkSpec,
        before: InputWatermark,
        before_us: int,
        parts: pa.Table | None,
        ticks: Times,
    ) -> None:
        self.spec = spec
        self.watermark_us = before.watermark_us
        self.begun = before.begun
        self.since_us = before.since_us
        self.moved_by = before.moved_by
        self.newest_ever_us, self.heard_us = before.newest_ever_us, before.heard_us
        if self.begun and self.newest_ever_us == UNSTARTED:  # stored by format 1
            has_live = len(before.producers) > 0
            self.newest_ever_us = (
                int(before.newest_us.max()) if has_live else self.watermark_us + spec.delay_us
            )
            self.heard_us = int(before.active_us.max()) if has_live else before_us - spec.idle_us
        table = PARTS.empty_table() if parts is None else parts
        self.furthest = _further(before.furthest, table.filter(table["is_ahead"]))
        table = newest_rows(table.filter(pc.invert(table["is_ahead"])))
        known = len(before.producers)
        encoded = (
            pa.chunked_array([before.producers, *table["producer"].chunks], pa.string())
            .combine_chunks()
            .dictionary_encode()
        )
        self.producers = encoded.dictionary  # known ones come first, each once
        self.newest_us = np.full(len(self.producers), UNSTARTED, np.int64)
        self.active_us = np.full(len(self.producers), UNSTARTED, np.int64)
        self.sources = np.full((len(self.producers), 4), -1, np.int64)
        self.newest_us[:known] = before.newest_us
        self.active_us[:known] = before.active_us
        self.sources[:known] = before.sources
        self._row_producers = encoded.indices.to_numpy()[known:]
        self._row_times_us = table["newest_us"].to_numpy()
        self._row_sources = np.stack([table[name].to_numpy() for name in _SOURCE_COLUMNS], axis=1)
        self._cuts = np.searchsorted(table["tick"].to_numpy(), np.append(ticks, ticks[-1:] + 1))
        # Without a new row, the watermark does not change before this time.
        self._quiet_until_us = UNSTARTED

    def run(self, times_us: Times) -> tuple[Times, Mask]:
        """The watermark at the end of each tick, and whether the input is waited for then."""
        watermarks = np.empty(len(times_us), np.int64)
        waited_for = np.empty(len(times_us), np.bool_)
        for index, time_us in enumerate(times_us.tolist()):
            self._add_rows(index, time_us)
            waited_for[index] = self._advance(time_us)
            watermarks[index] = self.watermark_us
        return watermarks, waited_for

    def _add_rows(self, index: int, time_us: int) -> None:
        """Take in the rows of a tick. A producer that was given up as idle starts over."""
        if self.since_us == UNSTARTED:
            self.since_us = time_us
        first, last = self._cuts[index], self._cuts[index + 1]
        if first == last:
            return
        producers, row_times_us = self._row_producers[first:last], self._row_times_us[first:last]
        returning = producers[self.active_us[producers] < time_us - self.spec.idle_us]
        self.newest_us[returning] = UNSTARTED
        newer = np.flatnonzero(row_times_us > self.newest_us[producers])
        self.newest_us[producers[newer]] = row_times_us[newer]
        self.sources[producers[newer]] = self._row_sources[first:last][newer]
        self.active_us[producers] = time_us
        self.newest_ever_us = max(self.newest_ever_us, int(row_times_us.max()))
        self.heard_us = time_us
        self.begun = True
        self._quiet_until_us = UNSTARTED

    def _advance(self, time_us: int) -> bool:
        """Move the watermark to the end of a tick; it never goes back. Returns whether the input is
        waited for.
        """
        if not self.begun:
            return time_us - self.since_us <= self.spec.idle_us
        if time_us <= self._quiet_until_us:
            return True
        live = np.flatnonzero(self._live(time_us))
        if len(live) > MAX_PRODUCERS:
            raise TooManyProducers(
                f"The input {self.spec.name!r} has {len(live):,} live producers; at most"
                f" {MAX_PRODUCERS:,} are tracked.",
                fix=(
                    "name a column with fewer values as producer=, such as the site instead of the"
                    " device, or a shorter idle=."
                ),
            )
        if not len(live):
            idle_for_us = time_us - self.heard_us - self.spec.idle_us
            reached_us = self.newest_ever_us + idle_for_us - self.spec.delay_us
            self.watermark_us = max(self.watermark_us, reached_us)
            return False
        slowest = int(live[np.argmin(self.newest_us[live])])
        reached_us = int(self.newest_us[slowest]) - self.spec.delay_us
        if reached_us > self.watermark_us:
            self.watermark_us = reached_us
            self.moved_by = TimeSource(
                self.producers[slowest].as_py(), *self.sources[slowest].tolist()
            )
        self._quiet_until_us = int(self.active_us[live].min()) + self.spec.idle_us
        return True

    def _live(self, time_us: int) -> Mask:
        is_live: Mask = self.active_us >= time_us - self.spec.idle_us
        return is_live

    def now(self, time_us: int) -> InputWatermark:
        """The watermark as of the last tick, without producers that were given up as idle."""
        live = self._live(time_us)
        everyone = bool(live.all())
        return InputWatermark(
            watermark_us=self.watermark_us,
            producers=self.producers if everyone else self.producers.filter(pa.array(live)),
            newest_us=self.newest_us if everyone else self.newest_us[live],
            active_us=self.active_us if everyone else self.active_us[live],
            sources=self.sources if everyone else self.sources[live],
            begun=self.begun,
            newest_ever_us=self.newest_ever_us,
            heard_us=self.heard_us,
            since_us=self.since_us,
            moved_by=self.moved_by,
            furthest=self.furthest,
        )


def _further(before: TimeSource | None, rows: pa.Table) -> TimeSource | None:
    """The row that is further ahead of its append time; of two alike, the one before."""
    if not rows.num_rows:
        return before
    (row,) = furthest_ahead(rows).to_pylist()
    now = TimeSource(row["producer"], *(row[name] for name in _SOURCE_COLUMNS))
    return now if before is None or now.ahead_us > before.ahead_us else before


Ports = Sequence[Sequence[WatermarkPath]]
"""The paths to each input of a step."""


@dataclass(frozen=True)
class BatchWatermarks:
    """The watermarks of a batch's inputs: at each of its ticks, and as of the tick before."""

    ticks: Times
    times_us: Times
    times: Mapping[str, _InputTimes]
    merged_before: Mapping[str, tuple[int, int]]

    @property
    def inputs(self) -> Mapping[str, Times]:
        """Input -> its watermark at the end of each tick."""
        return {name: times.watermark[1:] for name, times in self.times.items()}

    @property
    def before(self) -> Mapping[str, int]:
        """Input -> its watermark before the first tick."""
        return {name: int(times.watermark[0]) for name, times in self.times.items()}

    def moved_on(self, name: str, watermark_us: int) -> BatchWatermarks:
        """These watermarks, in which the last one of an input is at least that late."""
        times = self.times[name]
        watermark = times.watermark.copy()
        watermark[-1] = max(int(watermark[-1]), watermark_us)
        moved = _InputTimes(watermark, times.is_waited_for)
        return replace(self, times={**self.times, name: moved})

    def of(self, paths: Sequence[WatermarkPath]) -> Watermarks:
        """The watermark and the horizon of a step with one input. See `of_ports`."""
        return self.of_ports([paths])[0]

    def of_ports(self, ports: Ports) -> list[Watermarks]:
        """The watermark and the horizon of each input of a step: the minimum over its paths, less
        the lag of each path.

        Where several inputs with event time meet, idle ones are not waited for: an input of the
        step all of whose paths are idle keeps pace with the others. When all are idle, the one that
        is furthest decides. What a step has been given is never taken back, so where inputs meet,
        the result of the batch before is stored (`merged`): the rows of an input that returns from
        idleness may be late.
        """
        meets = _meets(ports, self.times)
        whole_watermark = self._not_idle(ports, "watermark_lag_us") if meets else None
        whole_horizon = self._not_idle(ports, "horizon_lag_us") if meets else None
        found = []
        for number, paths in enumerate(ports):
            watermark = self._of_paths(paths, "watermark_lag_us", whole_watermark)
            horizon = self._of_paths(paths, "horizon_lag_us", whole_horizon)
            if meets:
                key = merged_key(ports, number)
                if key in self.merged_before:
                    watermark[0], horizon[0] = self.merged_before[key]
                watermark = np.maximum.accumulate(watermark)
                horizon = np.maximum.accumulate(horizon)
            found.append(
                Watermarks(
                    ticks=self.ticks,
                    times_us=self.times_us,
                    watermark=watermark[1:],
                    horizon=horizon[1:],
                    watermark_at_start=int(watermark[0]),
                    horizon_at_start=int(horizon[0]),
                )
            )
        return found

    def _of_paths(self, paths: Sequence[WatermarkPath], lag: str, whole: Times | None) -> Times:
        """The times of one input of a step, the one before the first tick included; `whole` are
        those of all inputs of the step together.
        """
        if whole is None:
            least: Times = np.minimum.reduce(
                [_less(self.times[path.name].watermark, getattr(path, lag)) for path in paths]
            )
            return least
        followers = [path for path in paths if self.times[path.name].is_waited_for is None]
        result = np.full(len(self.ticks) + 1, ENDED)
        if len(followers) < len(paths):
            result, is_waited_for = self._minimum([paths], lag)
            result = np.where(is_waited_for, result, whole)
        for path in followers:
            result = np.minimum(result, _less(self.times[path.name].watermark, getattr(path, lag)))
        return result

    def _minimum(self, ports: Ports, lag: str) -> tuple[Times, Mask]:
        """The minimum over the inputs with event time that are waited for, and whether any is."""
        result = np.full(len(self.ticks) + 1, ENDED)
        any_waited_for = np.zeros(len(self.ticks) + 1, np.bool_)
        for path in (path for paths in ports for path in paths):
            times = self.times[path.name]
            if times.is_waited_for is not None:
                own = _less(times.watermark, getattr(path, lag))
                result = np.where(times.is_waited_for, np.minimum(result, own), result)
                any_waited_for |= times.is_waited_for
        return result, any_waited_for

    def _not_idle(self, ports: Ports, lag: str) -> Times:
        """The minimum over the inputs that are waited for; where none is, the furthest of all."""
        result, any_waited_for = self._minimum(ports, lag)
        furthest = np.maximum.reduce(
            [
                _less(self.times[path.name].watermark, getattr(path, lag))
                for paths in ports
                for path in paths
                if self.times[path.name].is_waited_for is not None
            ]
        )
        merged: Times = np.where(any_waited_for, result, furthest)
        return merged

    def merged(self, steps: Sequence[Ports]) -> dict[str, tuple[int, int]]:
        """What is stored for the next batch about steps in which several inputs meet."""
        stored = {}
        for ports in steps:
            if _meets(ports, self.times):
                for number, watermarks in enumerate(self.of_ports(ports)):
                    last = int(watermarks.watermark[-1]), int(watermarks.horizon[-1])
                    stored[merged_key(ports, number)] = last
        return stored


def _meets(ports: Ports, times: Mapping[str, _InputTimes]) -> bool:
    """Whether several inputs with event time meet in a step."""
    names = {path.name for paths in ports for path in paths}
    return sum(times[name].is_waited_for is not None for name in names) > 1


def merged_key(ports: Ports, number: int) -> str:
    """The name under which the watermark of one input of a step is stored."""
    texts = [
        "+".join(
            f"{path.name}-{path.watermark_lag_us}-{path.horizon_lag_us}"
            for path in sorted(paths, key=lambda path: path.name)
        )
        for paths in ports
    ]
    return f"{number} of {' | '.join(texts)}"


def _less(watermarks: Times, lag_us: int) -> Times:
    if lag_us == 0:
        return watermarks
    return np.where(watermarks == UNSTARTED, UNSTARTED, watermarks - lag_us)


def batch_watermarks(
    specs: Sequence[WatermarkSpec],
    state: WatermarkState,
    parts: Mapping[str, pa.Table],
    ticks: Sequence[int],
    times_us: Sequence[int],
    ended_from: int | None = None,
) -> tuple[BatchWatermarks, WatermarkState]:
    """The watermarks of a batch, and the state after it. See `advance`."""
    numbers, times = np.array(ticks, np.int64), np.array(times_us, np.int64)
    inputs, after = advance(specs, state, parts, numbers, times, ended_from)
    return BatchWatermarks(numbers, times, inputs, state.merged), after


@dataclass(frozen=True)
class WatermarkInputs:
    """What the watermarks of a batch are computed from: the inputs' declarations, the stored
    watermarks as of the tick before, and the batch's ticks.
    """

    specs: tuple[WatermarkSpec, ...] = ()
    id: str | None = None
    before_us: int = UNSTARTED
    ticks: tuple[int, ...] = ()
    times_us: tuple[int, ...] = ()
    was_ended: bool = False
    """Whether event time ended before the batch."""
    ended_from: int | None = None
    """The tick of the batch with which event time ends."""

    def compute(
        self, directory: Path, job: JobFiles, names: Collection[str]
    ) -> tuple[BatchWatermarks, WatermarkState]:
        """The watermarks of some inputs, all of whose read tasks must have ended. Behind a shuffle,
        those upstream of it have.
        """
        specs = [spec for spec in self.specs if spec.name in names]
        parts = {spec.name: read_parts(job, spec.name) for spec in specs if not spec.follows_ticks}
        state = replace(
            read_watermarks(directory, self.id), time_us=self.before_us, is_ended=self.was_ended
        )
        return batch_watermarks(specs, state, parts, self.ticks, self.times_us, self.ended_from)


# Watermarks on disk: one file per batch under a random id, durable before the id is in the ledger


VERSION = 2  # 1: no sources, and a watermark followed the ticks when all producers were idle
_SUFFIX = ".clocks"
_SCHEMA = pa.schema(
    [
        ("input", pa.string()),
        ("producer", pa.string()),
        ("newest_us", pa.int64()),
        ("active_us", pa.int64()),
        *((name, pa.int64()) for name in _SOURCE_COLUMNS),
    ]
)


def write_watermarks(directory: Path, state: WatermarkState) -> str:
    """Store the watermarks of all inputs. Returns the file's id."""
    inputs = {
        name: {
            "complete_us": watermark.watermark_us,
            "begun": watermark.begun,
            "newest_ever_us": watermark.newest_ever_us,
            "heard_us": watermark.heard_us,
            "since_us": watermark.since_us,
            "moved_by": watermark.moved_by and asdict(watermark.moved_by),
            "furthest": watermark.furthest and asdict(watermark.furthest),
        }
        for name, watermark in state.inputs.items()
    }
    tables = [_SCHEMA.empty_table()]
    for name, watermark in state.inputs.items():
        columns = [
            pa.repeat(pa.scalar(name), len(watermark.producers)),
            watermark.producers,
            pa.array(watermark.newest_us),
            pa.array(watermark.active_us),
            *(pa.array(column) for column in watermark.sources.T),
        ]
        tables.append(pa.Table.from_arrays(columns, schema=_SCHEMA))
    content = {"version": VERSION, "inputs": inputs, "merged": dict(state.merged)}
    return files.store(directory, _SUFFIX, pa.concat_tables(tables), content)


@lru_cache(maxsize=4)
def read_watermarks(directory: Path, name: str | None) -> WatermarkState:
    """The watermarks of an id. Without an id, those of a pipeline that has not begun. Every stage
    of a batch reads them, and a file never changes.
    """
    if name is None:
        return WatermarkState()
    table, about = files.read(directory / f"{name}{_SUFFIX}", newest_version=VERSION)
    inputs = {}
    for input_name, stored in about["inputs"].items():
        rows = table.filter(pc.equal(table["input"], input_name)).combine_chunks()
        sources = np.full((rows.num_rows, len(_SOURCE_COLUMNS)), -1, np.int64)
        for index, column in enumerate(_SOURCE_COLUMNS):
            if column in rows.column_names:
                sources[:, index] = rows[column].to_numpy()
        inputs[input_name] = InputWatermark(
            watermark_us=stored["complete_us"],
            producers=rows["producer"].combine_chunks()
            if rows.num_rows
            else pa.array([], pa.string()),
            newest_us=np.array(rows["newest_us"].to_numpy()),
            active_us=np.array(rows["active_us"].to_numpy()),
            sources=sources,
            begun=stored["begun"],
            newest_ever_us=stored.get("newest_ever_us", UNSTARTED),
            heard_us=stored.get("heard_us", UNSTARTED),
            since_us=stored.get("since_us", UNSTARTED),
            moved_by=_source(stored.get("moved_by")),
            furthest=_source(stored.get("furthest")),
        )
    merged = {key: (low, high) for key, (low, high) in about.get("merged", {}).items()}
    return WatermarkState(inputs, merged=merged)


def _source(stored: dict[str, Any] | None) -> TimeSource | None:
    return None if stored is None else TimeSource(**stored)


def sweep_watermarks(
    directory: Path, kept: set[str], *, begun_s: float, older_than_s: float = 60.0
) -> None:
    """Delete files that no ledger entry refers to and that were old when the runner's last commit
    began. A newer runner's files are younger than that, however long this runner was suspended.
    """
    for path in directory.glob(f"*{_SUFFIX}"):
        if (
            path.name.removesuffix(_SUFFIX) not in kept
            and path.stat().st_mtime < begun_s - older_than_s
        ):
            path.unlink(missing_ok=True)
