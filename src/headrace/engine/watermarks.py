"""Clocks: how far event time has come in each input, tick by tick.

Read tasks tell the newest event time of each producer in each tick (`event_times`). From that and
from the clocks' state as of the tick before, everyone who needs the clocks computes the same ones:
the shards, to know which windows are complete; the driver, to write the clocks' new state and to
show them. A producer that is silent for longer than `idle` of tick time is forgotten; when all are,
time follows the ticks. An input without a first row has no time yet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.atomic_file import write_atomically
from headrace.columnar.columns import CHANGE_TYPE, DELETE, ORDER_FIELDS, PARTITION_COLUMN, TICK
from headrace.durations import format_us
from headrace.engine.dead_letters import Diverter
from headrace.engine.reader import TopicRange
from headrace.engine.state import files
from headrace.errors import TooManyProducers
from headrace.operators.kernel import UNSTARTED, Times, Watermarks
from headrace.operators.watermark import NO_PRODUCER, WatermarkPath, WatermarkSpec

MAX_PRODUCERS = 100_000
_FEW_ROWS = 1000
PARTS = pa.schema([("tick", pa.int64()), ("producer", pa.string()), ("newest_us", pa.int64())])
"""What read tasks tell: the newest event time of a producer in a tick."""


@dataclass(frozen=True)
class InputWatermark:
    """One input's clock as of a tick: its live producers, the newest time of each, and when (in
    tick time) each was last heard.
    """

    watermark_us: int = UNSTARTED
    producers: pa.Array = field(default_factory=lambda: pa.array([], pa.string()))
    newest_us: Times = field(default_factory=lambda: np.empty(0, np.int64))
    active_us: Times = field(default_factory=lambda: np.empty(0, np.int64))
    begun: bool = False

    def holding(self, most: int = 3) -> list[tuple[str, int, int]]:
        """The producers that hold this clock back most: name, newest time, when it was last
        heard.
        """
        order = np.argsort(self.newest_us, kind="stable")[:most]
        return [
            (self.producers[int(at)].as_py(), int(self.newest_us[at]), int(self.active_us[at]))
            for at in order
        ]


@dataclass(frozen=True)
class WatermarkState:
    """All inputs' clocks as of a tick."""

    inputs: Mapping[str, InputWatermark] = field(default_factory=dict)
    time_us: int = UNSTARTED
    """The time of the tick that these clocks are of."""


def advance(
    specs: Sequence[WatermarkSpec],
    state: WatermarkState,
    parts: Mapping[str, pa.Table],
    ticks: Times,
    times_us: Times,
) -> tuple[dict[str, Times], WatermarkState]:
    """Each input's complete clock at the end of each tick, and the state after the last."""
    moving = {
        spec.name: _Moving(
            spec, state.inputs.get(spec.name, InputWatermark()), parts.get(spec.name), ticks
        )
        for spec in specs
        if not spec.follows_ticks
    }
    watermarks = {
        spec.name: times_us if spec.follows_ticks else moving[spec.name].through(times_us)
        for spec in specs
    }
    last_us = int(times_us[-1]) if len(times_us) else state.time_us
    return watermarks, WatermarkState(
        {name: each.now(last_us) for name, each in moving.items()}, last_us
    )


class _Moving:
    """One input's clock on its way through some ticks."""

    def __init__(
        self, spec: WatermarkSpec, clock: InputWatermark, parts: pa.Table | None, ticks: Times
    ) -> None:
        self.spec, self.watermark_us, self.begun = spec, clock.watermark_us, clock.begun
        table = in_order(parts) if parts is not None else PARTS.empty_table()
        known = len(clock.producers)
        everyone = (
            pa.chunked_array([clock.producers, *table["producer"].chunks], pa.string())
            .combine_chunks()
            .dictionary_encode()
        )
        self.producers = everyone.dictionary  # those known before come first: each is there once
        self.newest_us = np.full(len(self.producers), UNSTARTED, np.int64)
        self.active_us = np.full(len(self.producers), UNSTARTED, np.int64)
        self.newest_us[:known], self.active_us[:known] = clock.newest_us, clock.active_us
        self._who = everyone.indices.to_numpy()[known:]
        self._when_us = table["newest_us"].to_numpy()
        self._cuts = np.searchsorted(table["tick"].to_numpy(), np.append(ticks, ticks[-1:] + 1))
        self._quiet_until_us = (
            UNSTARTED  # as long as no row comes, nothing changes before this time
        )

    def through(self, times_us: Times) -> Times:
        clock = np.empty(len(times_us), np.int64)
        for at, time_us in enumerate(times_us.tolist()):
            self._take_in(at, time_us)
            self._move(time_us)
            clock[at] = self.watermark_us
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
        if count > MAX_PRODUCERS:
            raise TooManyProducers(
                f"The input {self.spec.name!r} has {count:,} producers at once; at most"
                f" {MAX_PRODUCERS:,} can be told apart.",
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

    def now(self, time_us: int) -> InputWatermark:
        """As of the last tick, without the producers that were given up."""
        live = self._live(time_us)
        if live.all():
            return InputWatermark(
                self.watermark_us, self.producers, self.newest_us, self.active_us, self.begun
            )
        return InputWatermark(
            self.watermark_us,
            self.producers.filter(pa.array(live)),
            self.newest_us[live],
            self.active_us[live],
            self.begun,
        )


def newest(parts: pa.Table) -> pa.Table:
    """One row for each producer and tick."""
    parts = in_order(parts).combine_chunks()
    if not parts.num_rows:
        return parts
    ticks = parts["tick"].to_numpy()
    starts = np.flatnonzero(np.concatenate([[True], ticks[1:] != ticks[:-1]]))
    if len(starts) * _FEW_ROWS > len(ticks):  # many ticks, each with few rows
        return (
            parts.group_by(["tick", "producer"])
            .aggregate([("newest_us", "max")])
            .rename_columns(["tick", "producer", "newest_us"])
            .cast(PARTS)
        )
    return pa.concat_tables(
        [
            _newest_of_one(parts.slice(start, end - start))
            for start, end in pairwise([*starts.tolist(), len(ticks)])
        ]
    )


def in_order(parts: pa.Table) -> pa.Table:
    """By tick, without rows that have no time: those are tombstones."""
    if parts["newest_us"].null_count:
        parts = parts.filter(parts["newest_us"].is_valid())
    ticks = parts["tick"].to_numpy()
    return (
        parts
        if (ticks[1:] >= ticks[:-1]).all()
        else parts.take(pa.array(np.argsort(ticks, kind="stable")))
    )


def _newest_of_one(parts: pa.Table) -> pa.Table:
    """Of one tick: quicker than grouping by tick and producer."""
    encoded = parts["producer"].combine_chunks().dictionary_encode()
    times_us = np.full(len(encoded.dictionary), UNSTARTED, np.int64)
    np.maximum.at(times_us, encoded.indices.to_numpy(), parts["newest_us"].to_numpy())
    ticks = np.full(len(times_us), parts["tick"][0].as_py(), np.int64)
    return pa.Table.from_arrays(
        [pa.array(ticks), encoded.dictionary, pa.array(times_us)], schema=PARTS
    )


@dataclass(frozen=True)
class BatchWatermarks:
    """The clocks of a batch: of its inputs at each of its ticks, and as of the tick before."""

    ticks: Times
    times_us: Times
    inputs: Mapping[str, Times]
    before: Mapping[str, int]

    def of(self, paths: Sequence[WatermarkPath]) -> Watermarks:
        """A step's clocks: as far as the slowest of its inputs, less what is held back on the
        way.
        """
        complete = [_back(self.inputs[path.name], path.complete_back_us) for path in paths]
        closed = [_back(self.inputs[path.name], path.closed_back_us) for path in paths]
        before = [(self.before[path.name], path) for path in paths]
        return Watermarks(
            self.ticks,
            self.times_us,
            np.minimum.reduce(complete),
            np.minimum.reduce(closed),
            min(_one_back(start, path.complete_back_us) for start, path in before),
            min(_one_back(start, path.closed_back_us) for start, path in before),
        )


def batch_watermarks(
    specs: Sequence[WatermarkSpec],
    state: WatermarkState,
    parts: Mapping[str, pa.Table],
    ticks: Sequence[int],
    times_us: Sequence[int],
) -> tuple[BatchWatermarks, WatermarkState]:
    """What `advance` gives, with the clocks as they were before."""
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


def _back(clock: Times, by_us: int) -> Times:
    return clock if by_us == 0 else np.where(clock == UNSTARTED, UNSTARTED, clock - by_us)


def _one_back(clock: int, by_us: int) -> int:
    return clock if clock == UNSTARTED else clock - by_us


# The clocks' state on disk: one file a batch under a random id, durable before the id is in the
# ledger, like any state. And the parts that read tasks leave.


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
    """Store the clocks; returns their id."""
    inputs = {
        name: {"complete_us": clock.watermark_us, "begun": clock.begun}
        for name, clock in state.inputs.items()
    }
    table = pa.concat_tables(
        [_rows(name, clock) for name, clock in state.inputs.items()] or [_SCHEMA.empty_table()]
    )
    return files.store(directory, _SUFFIX, table, {"version": VERSION, "inputs": inputs})


def _rows(name: str, clock: InputWatermark) -> pa.Table:
    count = len(clock.producers)
    columns = [
        pa.repeat(pa.scalar(name), count),
        clock.producers,
        pa.array(clock.newest_us),
        pa.array(clock.active_us),
    ]
    return pa.Table.from_arrays(columns, schema=_SCHEMA)


def read_watermarks(directory: Path, name: str | None) -> WatermarkState:
    """The clocks of an id; without one, those of a pipeline that has not begun."""
    if name is None:
        return WatermarkState()
    table, about = files.read(directory / f"{name}{_SUFFIX}", newest_version=VERSION)
    return WatermarkState(
        {name: _clock(table, name, known) for name, known in about["inputs"].items()}
    )


def _clock(table: pa.Table, name: str, known: dict[str, Any]) -> InputWatermark:
    rows = table.filter(pc.equal(table["input"], name)).combine_chunks()
    producers = rows["producer"].combine_chunks() if rows.num_rows else pa.array([], pa.string())
    newest, active = (np.array(rows[column].to_numpy()) for column in ("newest_us", "active_us"))
    return InputWatermark(known["complete_us"], producers, newest, active, known["begun"])


def sweep_watermarks(
    directory: Path, kept: set[str], *, begun_s: float, older_than_s: float = 60.0
) -> None:
    """Remove the clocks that no ledger entry refers to and that were old when the runner's last
    commit began. Those of a newer runner are younger, however long this one was held up since.
    """
    for path in directory.glob(f"*{_SUFFIX}"):
        if (
            path.name.removesuffix(_SUFFIX) not in kept
            and path.stat().st_mtime < begun_s - older_than_s
        ):
            path.unlink(missing_ok=True)


# What read tasks leave for the shards behind the shuffle, and for the driver


def write_part(directory: Path, name: str, number: int, rows: pa.Table) -> None:
    """The newest times that one read task found. Another attempt of the task replaces it by the
    same.
    """
    directory.mkdir(parents=True, exist_ok=True)
    content = pa.BufferOutputStream()
    with pa.ipc.new_file(content, rows.schema) as writer:
        writer.write_table(rows)
    path = directory / f"clock-{name}-{number}.part"
    write_atomically(path, content.getvalue(), durable=False)


def read_parts(directory: Path, name: str) -> pa.Table:
    found = [
        pa.ipc.open_file(pa.BufferReader(path.read_bytes())).read_all()
        for path in sorted(directory.glob(f"clock-{name}-*.part"))
    ]
    return pa.concat_tables(found) if found else PARTS.empty_table()


@dataclass(frozen=True)
class WatermarkInputs:
    """What the clocks of a batch are computed from: how each input's clock goes, the clocks as of
    the tick before, and the ticks.
    """

    specs: tuple[WatermarkSpec, ...] = ()
    id: str | None = None
    before_us: int = UNSTARTED
    ticks: tuple[int, ...] = ()
    times_us: tuple[int, ...] = ()

    def watermarks(
        self, directory: Path, job_directory: Path, names: Collection[str]
    ) -> tuple[BatchWatermarks, WatermarkState]:
        """The clocks of some inputs, which must all have been read: behind a shuffle those upstream
        have.
        """
        specs = [spec for spec in self.specs if spec.name in names]
        parts = {
            spec.name: read_parts(job_directory, spec.name)
            for spec in specs
            if not spec.follows_ticks
        }
        return batch_watermarks(
            specs,
            replace(read_watermarks(directory, self.id), time_us=self.before_us),
            parts,
            self.ticks,
            self.times_us,
        )


# Event times of the rows that one task reads, or that a shard finds them for: rows without a usable
# time are put aside, of the others the newest of each producer is told.
#
# A time that is null, or absurdly far in the future, must not move the clock: everything else would
# then be late.


NO_TIME = "its event time is null"
NEVER = "its event time is before the year 1"
_YEAR_1_US = -62_135_596_800_000_000


class Ticks(Protocol):
    """Numbers and times of some ticks."""

    @property
    def ticks(self) -> tuple[int, ...]: ...

    @property
    def times_us(self) -> tuple[int, ...]: ...


class EventTimes:
    """For one task: `taken` gives a batch's usable rows, `finish` leaves what was found. `ticks`
    have numbers and times.
    """

    def __init__(self, spec: WatermarkSpec, ticks: Ticks, number: int, directory: Path) -> None:
        self.spec, self.ticks, self.number, self.directory = spec, ticks, number, directory
        self._diverter = Diverter(directory, spec.name)
        self._found: list[pa.Table] = []
        self._ahead = f"its event time is more than {format_us(spec.max_ahead_us)} ahead"

    def taken(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if self.spec.column is None or not rows.num_rows:
            return rows
        usable, times = self._usable(rows)
        if usable.num_rows:
            self._found.append(self._newest(usable, times))
        return usable

    def _usable(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.Array]:
        """Without rows that have no time, or one that cannot be. The tombstone of a table has none,
        and needs none.
        """
        times = (
            rows.column(self.spec.column)
            .cast(pa.timestamp("us", "UTC") if _zoned(rows, self.spec) else pa.timestamp("us"))
            .cast(pa.int64())
        )
        if times.null_count:
            gone = (
                pc.equal(rows.column(CHANGE_TYPE), DELETE)
                if CHANGE_TYPE in rows.schema.names
                else pa.repeat(pa.scalar(False), rows.num_rows)
            )
            rows, times = self._without(
                rows, times, pc.and_(pc.is_null(times), pc.invert(gone)), NO_TIME
            )
        rows, times = self._without(rows, times, pc.less(times, _YEAR_1_US), NEVER)
        return self._without(rows, times, pc.greater(times, self._limits(rows)), self._ahead)

    def _without(
        self, rows: pa.RecordBatch, times: pa.Array, which: pa.Array, reason: str
    ) -> tuple[pa.RecordBatch, pa.Array]:
        bad = which.fill_null(False)
        if pc.any(bad).as_py():
            self._diverter.divert(rows.filter(bad), reason)
            rows, times = rows.filter(pc.invert(bad)), times.filter(pc.invert(bad))
        return rows, times

    def _limits(self, rows: pa.RecordBatch) -> pa.Array:
        return pa.array(_tick_times(rows, self.ticks) + self.spec.max_ahead_us)

    def _newest(self, rows: pa.RecordBatch, times: pa.Array) -> pa.Table:
        table = pa.table([rows.column(TICK), self._producers(rows), times], schema=PARTS)
        return newest(table)

    def _producers(self, rows: pa.RecordBatch) -> pa.Array:
        """As text: without a producer column, each partition is one."""
        if self.spec.producer is None:
            return rows.column(PARTITION_COLUMN).cast(pa.string())
        column = rows.column(self.spec.producer)
        text = _hex(column) if pa.types.is_binary(column.type) else column.cast(pa.string())
        return text.fill_null(NO_PRODUCER)

    def finish(self) -> None:
        self._diverter.finish(f"times-{self.number}")
        if self._found:
            write_part(
                self.directory, self.spec.name, self.number, newest(pa.concat_tables(self._found))
            )


def _tick_times(rows: pa.RecordBatch, piece: Ticks) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    times: np.ndarray[tuple[int], np.dtype[np.int64]] = np.array(piece.times_us, np.int64)[
        np.searchsorted(piece.ticks, rows.column(TICK).to_numpy())
    ]
    return times


def with_tick_times(rows: pa.RecordBatch, piece: TopicRange, name: str) -> pa.RecordBatch:
    """Rows with the time of their tick in a column behind the user's own."""
    at = len(piece.stored_columns)
    return rows.add_column(
        at,
        pa.field(name, pa.timestamp("us", "UTC")),
        pa.array(_tick_times(rows, piece)).cast(pa.timestamp("us", "UTC")),
    )


def _zoned(rows: pa.RecordBatch, spec: WatermarkSpec) -> bool:
    return rows.schema.field(spec.column).type.tz is not None


def _hex(column: pa.Array) -> pa.Array:
    """Bytes as text: producers are few, so each is spelled once."""
    encoded = column.dictionary_encode()
    return pa.array([value.hex() for value in encoded.dictionary.to_pylist()], pa.string()).take(
        encoded.indices
    )


def corrected(
    spec: WatermarkSpec, rows: pa.Table, given: pa.Table, ticks: Ticks, shard: int, directory: Path
) -> pa.Table:
    """Rows whose times a shard has found, `given` as they came to it: usable ones, in the places
    that they have in their topic; the rest is done as where rows are read.
    """
    names = [field.name for field in ORDER_FIELDS]
    placed = pa.table(
        {
            **{name: rows[name] for name in rows.column_names if name not in names},
            **{name: given[name] for name in names},
        }
    )
    times = EventTimes(spec, ticks, shard, directory)
    usable = [times.taken(batch) for batch in placed.to_batches()]
    times.finish()
    return pa.Table.from_batches(usable, placed.schema)
