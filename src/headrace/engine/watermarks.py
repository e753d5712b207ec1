"""Watermarks: how far event time has come in each input, tick by tick.

A read task reports the newest event time of each producer in each tick (`EventTimes`). From these
reports and the watermarks as of the tick before, everyone who needs watermarks computes the same
ones: the shards, to decide which windows are complete; the driver, to store the new state and to
show it in the status.

An input's watermark is the newest time of its slowest live producer, less `delay`. A producer that
is silent for longer than `idle` of tick time is no longer waited for; when no producer is live, the
watermark follows the ticks. An input that has not had a row yet has no watermark (`UNSTARTED`).

`operators.watermark` has the declarations (`WatermarkSpec`, `WatermarkPath`), `operators.kernel`
what a kernel sees (`Watermarks`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import CHANGE_TYPE, DELETE, ORDER_FIELDS, PARTITION_COLUMN, TICK
from headrace.durations import format_us
from headrace.engine.dead_letters import Diverter
from headrace.engine.reader import TopicRange
from headrace.engine.reports import JobFiles
from headrace.engine.state import files
from headrace.errors import TooManyProducers
from headrace.operators.kernel import UNSTARTED, Times, Watermarks
from headrace.operators.watermark_spec import NO_PRODUCER, WatermarkPath, WatermarkSpec

MAX_PRODUCERS = 100_000
_FEW_ROWS = 1000
_FEW_TICKS = 8
PARTS = pa.schema([("tick", pa.int64()), ("producer", pa.string()), ("newest_us", pa.int64())])
"""The rows of a read task's report: the newest event time of a producer in a tick."""


@dataclass(frozen=True)
class InputWatermark:
    """One input's watermark as of a tick, and its live producers: the newest event time of each,
    and the tick time at which each was last heard.
    """

    watermark_us: int = UNSTARTED
    producers: pa.Array = field(default_factory=lambda: pa.array([], pa.string()))
    newest_us: Times = field(default_factory=lambda: np.empty(0, np.int64))
    active_us: Times = field(default_factory=lambda: np.empty(0, np.int64))
    begun: bool = False

    def slowest_producers(self, limit: int = 3) -> list[tuple[str, int, int]]:
        """The producers that hold this watermark back, slowest first: (name, newest event time,
        tick time at which it was last heard).
        """
        order = np.argsort(self.newest_us, kind="stable")[:limit]
        return [
            (self.producers[int(at)].as_py(), int(self.newest_us[at]), int(self.active_us[at]))
            for at in order
        ]


@dataclass(frozen=True)
class WatermarkState:
    """The watermarks of all inputs as of a tick, whose time is `time_us`."""

    inputs: Mapping[str, InputWatermark] = field(default_factory=dict)
    time_us: int = UNSTARTED


# Computing watermarks


def advance(
    specs: Sequence[WatermarkSpec],
    state: WatermarkState,
    parts: Mapping[str, pa.Table],
    ticks: Times,
    times_us: Times,
) -> tuple[dict[str, Times], WatermarkState]:
    """Each input's watermark at the end of each tick, and the state after the last tick."""
    generators = {
        spec.name: _WatermarkGenerator(
            spec, state.inputs.get(spec.name, InputWatermark()), parts.get(spec.name), ticks
        )
        for spec in specs
        if not spec.follows_ticks
    }
    watermarks = {
        spec.name: times_us if spec.follows_ticks else generators[spec.name].run(times_us)
        for spec in specs
    }
    last_us = int(times_us[-1]) if len(times_us) else state.time_us
    inputs = {name: generator.now(last_us) for name, generator in generators.items()}
    return watermarks, WatermarkState(inputs, last_us)


class _WatermarkGenerator:
    """Advances the watermark of one input over some ticks."""

    def __init__(
        self, spec: WatermarkSpec, before: InputWatermark, parts: pa.Table | None, ticks: Times
    ) -> None:
        self.spec = spec
        self.watermark_us = before.watermark_us
        self.begun = before.begun
        table = sorted_by_tick(parts) if parts is not None else PARTS.empty_table()
        known = len(before.producers)
        encoded = (
            pa.chunked_array([before.producers, *table["producer"].chunks], pa.string())
            .combine_chunks()
            .dictionary_encode()
        )
        self.producers = encoded.dictionary  # known ones come first, each once
        self.newest_us = np.full(len(self.producers), UNSTARTED, np.int64)
        self.active_us = np.full(len(self.producers), UNSTARTED, np.int64)
        self.newest_us[:known] = before.newest_us
        self.active_us[:known] = before.active_us
        self._row_producers = encoded.indices.to_numpy()[known:]
        self._row_times_us = table["newest_us"].to_numpy()
        self._cuts = np.searchsorted(table["tick"].to_numpy(), np.append(ticks, ticks[-1:] + 1))
        # Without a new row, the watermark does not change before this time.
        self._quiet_until_us = UNSTARTED

    def run(self, times_us: Times) -> Times:
        """The watermark at the end of each tick."""
        watermarks = np.empty(len(times_us), np.int64)
        for index, time_us in enumerate(times_us.tolist()):
            self._add_rows(index, time_us)
            self._advance(time_us)
            watermarks[index] = self.watermark_us
        return watermarks

    def _add_rows(self, index: int, time_us: int) -> None:
        """Take in the rows of a tick. A producer that was given up as idle starts over."""
        first, last = self._cuts[index], self._cuts[index + 1]
        if first == last:
            return
        producers, row_times_us = self._row_producers[first:last], self._row_times_us[first:last]
        returning = producers[self.active_us[producers] < time_us - self.spec.idle_us]
        self.newest_us[returning] = UNSTARTED
        np.maximum.at(self.newest_us, producers, row_times_us)
        self.active_us[producers] = time_us
        self.begun = True
        self._quiet_until_us = UNSTARTED

    def _advance(self, time_us: int) -> None:
        """Move the watermark to the end of a tick; it never goes back."""
        if not self.begun or time_us <= self._quiet_until_us:
            return
        live = self._live(time_us)
        count = int(np.count_nonzero(live))
        if count > MAX_PRODUCERS:
            raise TooManyProducers(
                f"The input {self.spec.name!r} has {count:,} live producers; at most"
                f" {MAX_PRODUCERS:,} are tracked.",
                fix=(
                    "name a column with fewer values as producer=, such as the site instead of the"
                    " device, or a shorter idle=."
                ),
            )
        slowest_us = int(self.newest_us[live].min()) if count else time_us
        self.watermark_us = max(self.watermark_us, slowest_us - self.spec.delay_us)
        self._quiet_until_us = (
            int(self.active_us[live].min()) + self.spec.idle_us if count else UNSTARTED
        )

    def _live(self, time_us: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return self.active_us >= time_us - self.spec.idle_us

    def now(self, time_us: int) -> InputWatermark:
        """The watermark as of the last tick, without producers that were given up as idle."""
        live = self._live(time_us)
        everyone = bool(live.all())
        return InputWatermark(
            watermark_us=self.watermark_us,
            producers=self.producers if everyone else self.producers.filter(pa.array(live)),
            newest_us=self.newest_us if everyone else self.newest_us[live],
            active_us=self.active_us if everyone else self.active_us[live],
            begun=self.begun,
        )


def newest_times(parts: pa.Table) -> pa.Table:
    """One row for each tick and producer, with its newest event time."""
    parts = sorted_by_tick(parts).combine_chunks()
    if not parts.num_rows:
        return parts
    ticks = parts["tick"].to_numpy()
    starts = np.flatnonzero(np.concatenate([[True], ticks[1:] != ticks[:-1]]))
    if len(starts) > _FEW_TICKS and len(starts) * _FEW_ROWS > len(ticks):
        return (
            parts.group_by(["tick", "producer"])
            .aggregate([("newest_us", "max")])
            .rename_columns(["tick", "producer", "newest_us"])
            .cast(PARTS)
        )
    return pa.concat_tables(
        [
            _newest_times_of_tick(parts.slice(start, end - start))
            for start, end in pairwise([*starts.tolist(), len(ticks)])
        ]
    )


def _newest_times_of_tick(parts: pa.Table) -> pa.Table:
    """One row for each producer of a single tick: faster than grouping by tick and producer."""
    encoded = parts["producer"].combine_chunks().dictionary_encode()
    times_us = np.full(len(encoded.dictionary), UNSTARTED, np.int64)
    np.maximum.at(times_us, encoded.indices.to_numpy(), parts["newest_us"].to_numpy())
    ticks = np.full(len(times_us), parts["tick"][0].as_py(), np.int64)
    return pa.Table.from_arrays(
        [pa.array(ticks), encoded.dictionary, pa.array(times_us)], schema=PARTS
    )


def sorted_by_tick(parts: pa.Table) -> pa.Table:
    """Rows in order of tick, without tombstones, which have no event time."""
    if parts["newest_us"].null_count:
        parts = parts.filter(parts["newest_us"].is_valid())
    ticks = parts["tick"].to_numpy()
    if (ticks[1:] >= ticks[:-1]).all():
        return parts
    return parts.take(pa.array(np.argsort(ticks, kind="stable")))


@dataclass(frozen=True)
class BatchWatermarks:
    """The watermarks of a batch's inputs: at each of its ticks, and as of the tick before."""

    ticks: Times
    times_us: Times
    inputs: Mapping[str, Times]
    before: Mapping[str, int]

    def of(self, paths: Sequence[WatermarkPath]) -> Watermarks:
        """The watermark and the horizon of a step: the minimum over its paths, less the lag of each
        path.
        """
        watermarks = [_less(self.inputs[path.name], path.watermark_lag_us) for path in paths]
        horizons = [_less(self.inputs[path.name], path.horizon_lag_us) for path in paths]
        before = [(np.array([self.before[path.name]]), path) for path in paths]
        return Watermarks(
            ticks=self.ticks,
            times_us=self.times_us,
            watermark=np.minimum.reduce(watermarks),
            horizon=np.minimum.reduce(horizons),
            watermark_at_start=min(
                int(_less(start, path.watermark_lag_us)[0]) for start, path in before
            ),
            horizon_at_start=min(
                int(_less(start, path.horizon_lag_us)[0]) for start, path in before
            ),
        )


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
) -> tuple[BatchWatermarks, WatermarkState]:
    """The watermarks of a batch, and the state after it. See `advance`."""
    numbers, times = np.array(ticks, np.int64), np.array(times_us, np.int64)
    watermarks, after = advance(specs, state, parts, numbers, times)
    before = {
        spec.name: (
            state.time_us
            if spec.follows_ticks
            else state.inputs.get(spec.name, InputWatermark()).watermark_us
        )
        for spec in specs
    }
    return BatchWatermarks(numbers, times, watermarks, before), after


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

    def compute(
        self, directory: Path, job: JobFiles, names: Collection[str]
    ) -> tuple[BatchWatermarks, WatermarkState]:
        """The watermarks of some inputs, all of whose read tasks must have ended. Behind a shuffle,
        those upstream of it have.
        """
        specs = [spec for spec in self.specs if spec.name in names]
        parts = {spec.name: read_parts(job, spec.name) for spec in specs if not spec.follows_ticks}
        state = replace(read_watermarks(directory, self.id), time_us=self.before_us)
        return batch_watermarks(specs, state, parts, self.ticks, self.times_us)


# Watermarks on disk: one file per batch under a random id, durable before the id is in the ledger


VERSION = 1
_SUFFIX = ".clocks"
_SCHEMA = pa.schema(
    [
        ("input", pa.string()),
        ("producer", pa.string()),
        ("newest_us", pa.int64()),
        ("active_us", pa.int64()),
    ]
)


def write_watermarks(directory: Path, state: WatermarkState) -> str:
    """Store the watermarks of all inputs. Returns the file's id."""
    inputs = {
        name: {"complete_us": watermark.watermark_us, "begun": watermark.begun}
        for name, watermark in state.inputs.items()
    }
    tables = [_SCHEMA.empty_table()]
    for name, watermark in state.inputs.items():
        columns = [
            pa.repeat(pa.scalar(name), len(watermark.producers)),
            watermark.producers,
            pa.array(watermark.newest_us),
            pa.array(watermark.active_us),
        ]
        tables.append(pa.Table.from_arrays(columns, schema=_SCHEMA))
    content = {"version": VERSION, "inputs": inputs}
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
        inputs[input_name] = InputWatermark(
            watermark_us=stored["complete_us"],
            producers=rows["producer"].combine_chunks()
            if rows.num_rows
            else pa.array([], pa.string()),
            newest_us=np.array(rows["newest_us"].to_numpy()),
            active_us=np.array(rows["active_us"].to_numpy()),
            begun=stored["begun"],
        )
    return WatermarkState(inputs)


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


# Reports of read tasks, for the shards behind the shuffle and for the driver


def write_part(job: JobFiles, name: str, number: int, rows: pa.Table) -> None:
    """Write the newest event times that a read task found. A second attempt of the task replaces
    the file with the same content.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows)
    job.write(f"clock-{name}-{number}.part", sink.getvalue())


def read_parts(job: JobFiles, name: str) -> pa.Table:
    """The reports of all read tasks of an input."""
    tables = [
        pa.ipc.open_file(job.read(part)).read_all() for part in job.names(f"clock-{name}-", ".part")
    ]
    return pa.concat_tables(tables) if tables else PARTS.empty_table()


# Event times of rows, where they are read, or where a shard computes them (device time)
#
# A row whose time is null or absurdly far in the future becomes a dead letter: it must not move the
# watermark, which would make every other row late.


NO_TIME = "its event time is null"
NEVER = "its event time is before the year 1"
_YEAR_1_US = -62_135_596_800_000_000


class Ticks(Protocol):
    """The numbers and times of some ticks."""

    @property
    def ticks(self) -> tuple[int, ...]: ...

    @property
    def times_us(self) -> tuple[int, ...]: ...


class EventTimes:
    """Checks event times in one task. `usable` filters each batch; `finish` writes the report of
    the newest times and the dead letters.
    """

    def __init__(self, spec: WatermarkSpec, ticks: Ticks, number: int, job: JobFiles) -> None:
        self.spec = spec
        self.ticks = ticks
        self.number = number
        self.job = job
        self._diverter = Diverter(job, spec.name)
        self._newest: list[pa.Table] = []
        self._too_far_ahead = f"its event time is more than {format_us(spec.max_ahead_us)} ahead"

    def usable(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows with a usable event time; the others become dead letters. The tombstone of a
        table has no event time and needs none.
        """
        if self.spec.column is None or not rows.num_rows:
            return rows
        column = rows.column(self.spec.column)
        is_zoned = rows.schema.field(self.spec.column).type.tz is not None
        times = column.cast(pa.timestamp("us", "UTC") if is_zoned else pa.timestamp("us")).cast(
            pa.int64()
        )
        if times.null_count:
            no_time = pc.is_null(times)
            if CHANGE_TYPE in rows.schema.names:
                is_tombstone = pc.equal(rows.column(CHANGE_TYPE), DELETE)
                no_time = pc.and_(no_time, pc.invert(is_tombstone))
            rows, times = self._divert(rows, times, no_time, NO_TIME)
        rows, times = self._divert(rows, times, pc.less(times, _YEAR_1_US), NEVER)
        limits = pa.array(_tick_times(rows, self.ticks) + self.spec.max_ahead_us)
        rows, times = self._divert(rows, times, pc.greater(times, limits), self._too_far_ahead)
        if rows.num_rows:
            table = pa.table([rows.column(TICK), self._producers(rows), times], schema=PARTS)
            self._newest.append(newest_times(table))
        return rows

    def _divert(
        self, rows: pa.RecordBatch, times: pa.Array, is_bad: pa.Array, reason: str
    ) -> tuple[pa.RecordBatch, pa.Array]:
        """Make dead letters of bad rows; return the other rows and their times."""
        bad = is_bad.fill_null(False)
        if pc.any(bad).as_py():
            self._diverter.divert(rows.filter(bad), reason)
            rows, times = rows.filter(pc.invert(bad)), times.filter(pc.invert(bad))
        return rows, times

    def _producers(self, rows: pa.RecordBatch) -> pa.Array:
        """The producer of each row as text. Without a producer column, each partition is one."""
        if self.spec.producer is None:
            return rows.column(PARTITION_COLUMN).cast(pa.string())
        column = rows.column(self.spec.producer)
        text = _hex(column) if pa.types.is_binary(column.type) else column.cast(pa.string())
        return text.fill_null(NO_PRODUCER)

    def finish(self) -> None:
        self._diverter.finish(f"times-{self.number}")
        if self._newest:
            newest = newest_times(pa.concat_tables(self._newest))
            write_part(self.job, self.spec.name, self.number, newest)


def _tick_times(rows: pa.RecordBatch, ticks: Ticks) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The time of each row's tick."""
    times: np.ndarray[tuple[int], np.dtype[np.int64]] = np.array(ticks.times_us, np.int64)[
        np.searchsorted(ticks.ticks, rows.column(TICK).to_numpy())
    ]
    return times


def with_tick_times(rows: pa.RecordBatch, topic_range: TopicRange, name: str) -> pa.RecordBatch:
    """Rows with the time of their tick in a column behind the user's own."""
    return rows.add_column(
        len(topic_range.stored_columns),
        pa.field(name, pa.timestamp("us", "UTC")),
        pa.array(_tick_times(rows, topic_range)).cast(pa.timestamp("us", "UTC")),
    )


def _hex(column: pa.Array) -> pa.Array:
    """Bytes as hexadecimal text; each distinct producer is converted once."""
    encoded = column.dictionary_encode()
    return pa.array([value.hex() for value in encoded.dictionary.to_pylist()], pa.string()).take(
        encoded.indices
    )


def with_event_times(
    spec: WatermarkSpec, rows: pa.Table, source: pa.Table, ticks: Ticks, shard: int, job: JobFiles
) -> pa.Table:
    """Check the event times that a shard has computed for rows, as `EventTimes` does where rows are
    read. The rows keep the order columns of `source`, the rows as they came to the shard.
    """
    names = [field.name for field in ORDER_FIELDS]
    columns = {name: rows[name] for name in rows.column_names if name not in names}
    ordered = pa.table({**columns, **{name: source[name] for name in names}})
    times = EventTimes(spec, ticks, shard, job)
    usable = [times.usable(batch) for batch in ordered.to_batches()]
    times.finish()
    return pa.Table.from_batches(usable, ordered.schema)
