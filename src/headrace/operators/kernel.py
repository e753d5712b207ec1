"""What a kernel is, and what it sees of its state and of time. Kernels compute; the engine hosts
them on Spark, tests and users' tests host them in memory.

A kernel is pure: its answer follows from its state, its rows and the clocks, never from a wall
clock, from chance, or from how ticks were put into calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.columnar.buffers import Ints
from headrace.columnar.columns import CHANGE_TYPE, TICK
from headrace.columnar.keys import whole
from headrace.columnar.segments import Segments
from headrace.errors import InputError

Times = npt.NDArray[np.int64]
Groups = npt.NDArray[np.uint8]
UNSTARTED = -(2**63)
"""A clock that has not begun: nothing has happened yet."""


@dataclass(frozen=True)
class Watermarks:
    """An input's clocks at the end of each tick of a call, rows or not; and as they were before the
    first of them. All times are microseconds.

    A row of the tick `ticks[i]` is judged by the clocks before that tick (`closed_before(i)`); what
    a tick completes is told with that tick's number. `complete`: no row before it is expected.
    `closed`: a row before it is too late for anyone.
    """

    ticks: Times
    times_us: Times
    complete: Times
    closed: Times
    watermark_at_start: int = UNSTARTED
    horizon_at_start: int = UNSTARTED

    def __len__(self) -> int:
        return len(self.ticks)

    @property
    def watermark_before(self) -> Times:
        """The complete clock as it was before each tick."""
        return (
            np.concatenate([[np.int64(self.watermark_at_start)], self.complete[:-1]])
            if len(self)
            else self.complete
        )

    @property
    def horizon_before(self) -> Times:
        """The closed clock as it was before each tick."""
        return (
            np.concatenate([[np.int64(self.horizon_at_start)], self.closed[:-1]])
            if len(self)
            else self.closed
        )

    def at(self, row_ticks: Times) -> npt.NDArray[np.intp]:
        """The place of each row's tick in these arrays."""
        return np.searchsorted(self.ticks, row_ticks)


class KeyedState(Protocol):
    """A kernel's memory: bytes by key. The host makes it durable, and knows what changed.

    A key belongs to a key group, by which state is spread over shards: the group of the key's own
    bytes, or the one given. A kernel that keeps several entries for one user's key (its windows,
    its buffered rows, its timers) must file them all under the group of the user's key:
    `key_groups(encode_keys(rows, by))`.
    """

    @property
    def at_hand(self) -> Sequence[int]:
        """The key groups that are here: what every shard must know is filed under each of them."""
        ...

    def get(self, keys: Sequence[bytes], groups: Groups | None = None) -> list[bytes | None]:
        """The values of many keys at once; None for a key that has none."""
        ...

    def put(
        self, keys: Sequence[bytes], values: Sequence[bytes | None], groups: Groups | None = None
    ) -> None:
        """Store the values of many keys at once; None deletes. A later `get` or `scan` sees it."""
        ...

    def get_array(self, keys: pa.Array, groups: Groups | None = None) -> pa.Array:
        """As `get`, for columns: keys are BINARY or fixed-size, none null; values come as BINARY,
        null for a key that has none.
        """
        ...

    def put_array(self, keys: pa.Array, values: pa.Array, groups: Groups | None = None) -> None:
        """As `put`, for columns: no key twice in a call. Costs least with the very `keys` that
        `get_array` was last called with.
        """
        ...

    def scan(self, low: bytes, high: bytes) -> tuple[list[bytes], list[bytes], Groups]:
        """Keys from `low` up to but not including `high`, of all groups at hand, with their values
        and groups. Sorted by key within a group only.

        Costs what it finds and a seek a group. Keys above 400 bytes come back as the store has them
        (a prefix and a digest): keep the whole key in the value.
        """
        ...

    def first(self, low: bytes, high: bytes) -> bytes | None:
        """The smallest key from `low` up to but not including `high`, over all groups at hand."""
        ...


class Kernel(Protocol):
    """An operator over the rows of one shard."""

    @property
    def output(self) -> pa.Schema:
        """The user's columns of the result, and `_change_type` if the result is a table."""
        ...

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        """Take in the rows of some ticks, whole ones, in the pipeline's order; give the result's
        rows, each with its `_tick`.

        The result is sorted by tick, key and change. Ticks may come one at a time or many in a
        call: the rows are the same.
        """
        ...


@runtime_checkable
class TimedKernel(Protocol):
    """An operator that also goes by its inputs' clocks, and is called for every tick, rows or
    not.
    """

    @property
    def output(self) -> pa.Schema: ...

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """As `step`, with the rows and clocks of each input. An input without rows comes as an
        empty table with its columns.
        """
        ...

    def due(self, state: KeyedState) -> int | None:
        """The earliest time that something in the state waits for: a complete clock at or past it
        would give rows or let state go. None if nothing waits.
        """
        ...


@runtime_checkable
class Gauged(Protocol):
    """A kernel of whose state people want to know how many entries there are: by the name of the
    figure, what the names of those entries begin with.
    """

    gauges: Mapping[str, bytes]


@runtime_checkable
class PutsAside(Protocol):
    """A kernel with a second result, which goes to a topic of its own, if to any."""

    def take_aside(self) -> pa.Table:
        """The rows of it since the last time, in order of their ticks."""
        ...


@runtime_checkable
class Preparing(Protocol):
    """A kernel with an input whose rows go to every shard: what each shard would have to find out
    about them is found out before.
    """

    def prepare(self, rows: pa.Table) -> pa.Table:
        """The same rows with columns of the kernel's own."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """State with a place for something that a kernel made of it and would have to make again in
    another process. It is no state: it may be gone, or older.
    """

    def recall(self) -> bytes | None: ...

    def remember(self, content: bytes) -> None: ...


# Stored state for people: what a kernel can tell of the bytes it keeps under a key. `headrace state
# show` asks; nothing else needs it.


@runtime_checkable
class Describing(Protocol):
    """A kernel that can show its state."""

    @property
    def key_fields(self) -> list[pa.Field]:
        """The columns of a key, in order."""
        ...

    def describe(self, keys: pa.Array, values: pa.Array) -> pa.Table:
        """A row for each entry: the key's columns, and what the state amounts to."""
        ...


def no_rows(schema: pa.Schema, keys: int, *, over_table: bool) -> Segments:
    """Segments of keys of which no row came: their only versions are what is stored."""
    nothing = np.zeros(0, np.int64)
    system = [
        pa.field(TICK, pa.int64()),
        *([pa.field(CHANGE_TYPE, pa.string())] if over_table else []),
    ]
    rows = pa.schema([*schema, *system]).empty_table()
    return Segments(
        rows, nothing, nothing, nothing, np.zeros(keys, np.int64), pa.array([], pa.binary())
    )


# Rows that an aggregate could not take in, with which and why: the host sends them to dead letters.


AGGREGATE = "_aggregate"
REASON = "_reason"


class Diverted:
    """Collects rows until the host takes them, after each step."""

    def __init__(self, schema: pa.Schema) -> None:
        system = [
            pa.field(TICK, pa.int64()),
            pa.field(CHANGE_TYPE, pa.string()),
            pa.field(AGGREGATE, pa.string()),
            pa.field(REASON, pa.string()),
        ]
        self.schema = pa.schema([*schema, *system])
        self._tables: list[pa.Table] = []

    def add(self, rows: pa.Table, which: Ints, aggregate: str, reason: str) -> None:
        chosen = rows.take(pa.array(which))
        known = {name: chosen.column(name) for name in chosen.schema.names}
        known[AGGREGATE], known[REASON] = (
            pa.repeat(pa.scalar(text), len(which)) for text in (aggregate, reason)
        )
        arrays = [known.get(field.name, pa.nulls(len(which), field.type)) for field in self.schema]
        self._tables.append(pa.Table.from_arrays(arrays, schema=self.schema))

    def take(self) -> pa.Table:
        """What was diverted since the last time: the rows, `_tick`, `_change_type`, and which
        aggregate left them out and why.
        """
        tables, self._tables = self._tables, []
        return pa.concat_tables(tables).sort_by(TICK) if tables else self.schema.empty_table()


# What stops a kernel: a user's own aggregate that raises, and a group with more values than it may
# keep.


class AggregateFailed(InputError):
    """A user's own aggregate raised, or gave back something else than it promised. `row` is the row
    it raised on, where that can be told.
    """

    def __init__(
        self, *, step: str, aggregate: str, row: dict[str, Any] | None, cause: str, trace: str
    ) -> None:
        place = "" if row is None else f" on the row {row!r}"
        super().__init__(
            f"The aggregate {aggregate!r} of the step {step!r} failed{place}: {cause}\n{trace}".rstrip(),
            fix='mend it and run again, or let such rows go to dead letters with errors="divert".',
        )
        self.step, self.aggregate, self.row, self.trace = step, aggregate, row, trace


class GroupFull(InputError):
    """A group has as many values as an aggregate may keep, and another came."""

    def __init__(self, *, step: str, aggregate: str, group: dict[str, Any], most: int) -> None:
        super().__init__(
            f"The aggregate {aggregate!r} of the step {step!r} keeps up to {most:,} values a group,"
            f" and the group {group!r} has more.",
            fix=(
                "give it a larger most=, or let what is too much go to dead letters with"
                ' when_full="divert".'
            ),
        )
        self.step, self.aggregate, self.group, self.most = step, aggregate, group, most


# Times in kernels: microseconds as integers, and as bytes that keep their order.


_SIGN = np.uint64(1 << 63)


def microseconds(column: pa.Array | pa.ChunkedArray) -> Times:
    """A column of timestamps without nulls."""
    array = whole(column)
    times: Times = array.cast(pa.timestamp("us", array.type.tz)).cast(pa.int64()).to_numpy()
    return times


def big_endian(times_us: Times) -> list[bytes]:
    """Eight bytes a time, in the order of the times."""
    raw = (times_us.astype(np.int64).view(np.uint64) ^ _SIGN).astype(">u8").tobytes()
    return [raw[at : at + 8] for at in range(0, len(raw), 8)]
