"""The contract between kernels and hosts: what a kernel is, and what it sees of state and time.

A kernel is the computation of one stateful step over the rows of one shard. The engine hosts
kernels on Spark (`engine/shard.py`), `headrace.testing` hosts them in memory. A kernel is pure: its
output follows from its state, its rows and the watermarks, never from the wall clock, from
randomness, or from how the host groups ticks into calls.

A count per key `k`, over two ticks:

    rows in                  state after             rows out
    tick 7: k=a, k=b, k=a    a -> 2, b -> 1          tick 7: insert a 2; insert b 1
    tick 8: k=a              a -> 3, b -> 1          tick 8: update_preimage a 2;
                                                             update_postimage a 3

Called with tick 7 and then tick 8, or with both at once, the kernel emits the same rows and leaves
the same state. `Kernel` is the interface of kernels that react to rows alone. A `TimedKernel` also
reads the watermarks of its inputs, and is called for every tick, with rows or without: a window is
emitted by a watermark that passes its end. The remaining protocols are optional abilities of a
kernel that the host checks for.
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
from headrace.columnar.keys import as_array
from headrace.columnar.segments import Segments
from headrace.errors import InputError

Times = npt.NDArray[np.int64]
"""Event times or tick times, in microseconds since 1970 UTC."""

Groups = npt.NDArray[np.uint8]
"""Key groups: the unit in which state is spread over shards."""

UNSTARTED = -(2**63)
"""The watermark of an input that has had no row yet."""

ENDED = 2**62
"""The watermark when event time has ended: later than any event time, with room to add to it."""


@dataclass(frozen=True)
class Watermarks:
    """The watermark and horizon of one input, at the end of each tick of a call.

    `watermark[i]`: after tick `ticks[i]`, no row with an earlier event time is expected.
    `horizon[i]`: the watermark less the allowed lateness of the steps before; an earlier row is
    late for every step, and state about it may be forgotten. A row of tick `ticks[i]` is late or
    not by the horizon *before* that tick (`horizon_before[i]`); what the tick's watermark completes
    is emitted with that tick's number.

    There is an entry for every tick of the call, with rows or without. `*_at_start` are the values
    before the first of them. All times are microseconds.
    """

    ticks: Times
    times_us: Times
    watermark: Times
    horizon: Times
    watermark_at_start: int = UNSTARTED
    horizon_at_start: int = UNSTARTED

    def __len__(self) -> int:
        return len(self.ticks)

    @property
    def watermark_before(self) -> Times:
        """The watermark before each tick."""
        if not len(self):
            return self.watermark
        return np.concatenate([[np.int64(self.watermark_at_start)], self.watermark[:-1]])

    @property
    def horizon_before(self) -> Times:
        """The horizon before each tick."""
        if not len(self):
            return self.horizon
        return np.concatenate([[np.int64(self.horizon_at_start)], self.horizon[:-1]])

    def tick_indices(self, row_ticks: Times) -> npt.NDArray[np.intp]:
        """The index of each row's tick in these arrays."""
        return np.searchsorted(self.ticks, row_ticks)


class KeyedState(Protocol):
    """A kernel's state: bytes by key. The host makes it durable and tracks what changed.

    Every key belongs to a key group, by which state is spread over shards: by default the group
    that its own bytes hash to, otherwise the one passed in `groups`. A kernel that stores several
    entries for one user key (windows, buffered rows, timers) must put them all under the group of
    the user key, `key_groups(encode_keys(rows, by))`, so that they move between shards together.
    """

    @property
    def owned_groups(self) -> Sequence[int]:
        """The key groups of this shard. What every shard must know is stored under each of them."""
        ...

    def get(self, keys: Sequence[bytes], groups: Groups | None = None) -> list[bytes | None]:
        """The values of many keys; None for a key without one."""
        ...

    def put(
        self, keys: Sequence[bytes], values: Sequence[bytes | None], groups: Groups | None = None
    ) -> None:
        """Store the values of many keys; None deletes. Later calls of `get` and `scan` see them."""
        ...

    def get_array(self, keys: pa.Array, groups: Groups | None = None) -> pa.Array:
        """The values of a column of keys, as BINARY; null for a key without one.

        Keys are BINARY or fixed-size binary, and not null.
        """
        ...

    def put_array(self, keys: pa.Array, values: pa.Array, groups: Groups | None = None) -> None:
        """Store a column of values under a column of distinct keys; null deletes.

        Cheapest with the very `keys` array that `get_array` was last called with.
        """
        ...

    def scan(self, low: bytes, high: bytes) -> tuple[list[bytes], list[bytes], Groups]:
        """Keys in [low, high) of all owned groups, with their values and groups.

        Keys are sorted within a group only. The cost is one seek per group plus the entries
        returned. Keys above 400 bytes come back shortened to a prefix and a digest, as the store
        holds them: a kernel that needs the whole key keeps it in the value.
        """
        ...

    def first(self, low: bytes, high: bytes) -> bytes | None:
        """The smallest key in [low, high), over all owned groups; None if there is none."""
        ...


class Kernel(Protocol):
    """A stateful step over the rows of one shard."""

    @property
    def output(self) -> pa.Schema:
        """The user's columns of the output, and `_change_type` if the output is a table."""
        ...

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        """Process the rows of one or more whole ticks and return the output rows.

        `rows` are in the pipeline's order. The output has a `_tick` for each row, and is sorted by
        tick, key and change. It does not depend on how ticks are grouped into calls.
        """
        ...


@runtime_checkable
class TimedKernel(Protocol):
    """A stateful step that also depends on watermarks, and is called for every tick."""

    @property
    def output(self) -> pa.Schema:
        """The user's columns of the output, and `_change_type` if the output is a table."""
        ...

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """Process the rows and watermarks of each input and return the output rows.

        An input without rows is an empty table with its columns. The output is sorted as that of
        `Kernel.step`, and does not depend on how ticks are grouped into calls.
        """
        ...

    def due(self, state: KeyedState) -> int | None:
        """The earliest time that the state waits for, in microseconds; None if it waits for none.

        A watermark at or past it emits rows or frees state, so the host runs a batch for it even
        when no row arrives.
        """
        ...


# Optional abilities of kernels and of state


@runtime_checkable
class GaugedKernel(Protocol):
    """A kernel whose entries are counted in status and metrics.

    `gauges` maps the name of a metric to the key prefix of the entries that it counts.
    """

    gauges: Mapping[str, bytes]


@runtime_checkable
class SideOutputKernel(Protocol):
    """A kernel with a second output, which goes to a topic of its own if the plan names one."""

    def take_side_output(self) -> pa.Table:
        """The rows of the second output since the last call, in order of tick."""
        ...


@runtime_checkable
class BroadcastKernel(Protocol):
    """A kernel with an input that is broadcast to every shard.

    What every shard would compute from those rows alone is computed once, before the broadcast.
    """

    def prepare(self, rows: pa.Table) -> pa.Table:
        """The rows, with columns that the kernel adds for itself."""
        ...


@runtime_checkable
class CachingState(Protocol):
    """State with room for one cached value that a kernel derives from it.

    The cache saves another process from deriving the value again. It is not state: it may be absent
    or out of date, and the kernel must check it.
    """

    def read_cache(self) -> bytes | None:
        """The cached value, if there is one."""
        ...

    def write_cache(self, content: bytes) -> None:
        """Replace the cached value."""
        ...


@runtime_checkable
class InspectableKernel(Protocol):
    """A kernel that can render its stored state for people: `headrace state show` uses it. A
    kernel with several kinds of entries has an `inspected_prefix`, by which the names of those
    that are rendered begin; `keys` are without it.
    """

    @property
    def key_fields(self) -> list[pa.Field]:
        """The columns of a key, in order."""
        ...

    def describe(self, keys: pa.Array, values: pa.Array) -> pa.Table:
        """One row per entry: the columns of its key, and what its value amounts to."""
        ...


def empty_segments(schema: pa.Schema, keys: int, *, over_table: bool) -> Segments:
    """Segments of keys that received no rows: each key has its stored version only."""
    nothing = np.zeros(0, np.int64)
    system = [pa.field(TICK, pa.int64())]
    if over_table:
        system.append(pa.field(CHANGE_TYPE, pa.string()))
    rows = pa.schema([*schema, *system]).empty_table()
    return Segments(
        rows=rows,
        order=nothing,
        starts=nothing,
        ticks=nothing,
        firsts=np.zeros(keys, np.int64),
        keys=pa.array([], pa.binary()),
    )


# Rows that a kernel rejects

AGGREGATE = "_aggregate"
REASON = "_reason"


class DeadLetterBuffer:
    """Rows that a kernel could not process, until the host takes them after each call.

    The host writes them to the dead-letter topic of the step.
    """

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
        """Add the rows at the given positions, with the aggregate that rejected them and why."""
        rejected = rows.take(pa.array(which))
        columns = {name: rejected.column(name) for name in rejected.schema.names}
        columns[AGGREGATE] = pa.repeat(pa.scalar(aggregate), len(which))
        columns[REASON] = pa.repeat(pa.scalar(reason), len(which))
        arrays = [
            columns.get(field.name, pa.nulls(len(which), field.type)) for field in self.schema
        ]
        self._tables.append(pa.Table.from_arrays(arrays, schema=self.schema))

    def take(self) -> pa.Table:
        """The rows added since the last call, in order of tick, with `_aggregate` and `_reason`."""
        tables, self._tables = self._tables, []
        return pa.concat_tables(tables).sort_by(TICK) if tables else self.schema.empty_table()


class AggregateFailed(InputError):
    """A user's own aggregate raised, or returned something that its types do not allow.

    `row` is the row that it raised on, if one row could be singled out.
    """

    def __init__(
        self, *, step: str, aggregate: str, row: dict[str, Any] | None, cause: str, trace: str
    ) -> None:
        where = "" if row is None else f" on the row {row!r}"
        what = f"The aggregate {aggregate!r} of the step {step!r} failed{where}: {cause}\n{trace}"
        super().__init__(
            what.rstrip(),
            fix=(
                "correct the aggregate and run again, or send such rows to dead letters with"
                ' errors="divert".'
            ),
        )
        self.step = step
        self.aggregate = aggregate
        self.row = row
        self.trace = trace


class PatternFull(InputError):
    """A match in the making has as many rows, or goes on in as many ways, as it may."""

    def __init__(self, *, step: str) -> None:
        super().__init__(
            f"The step {step!r} has a match in the making that goes on for more rows, or in more"
            " ways, than it may.",
            fix=(
                "allow more with max_rows= or max_matches=, say within=, or let such"
                ' beginnings be given up and counted with when_full="drop".'
            ),
        )


class GroupFull(InputError):
    """A group has as many values as an aggregate may keep, and another one arrived."""

    def __init__(
        self, *, step: str, aggregate: str, group: dict[str, Any], max_values: int
    ) -> None:
        super().__init__(
            f"The aggregate {aggregate!r} of the step {step!r} keeps up to {max_values:,} values a"
            f" group, and the group {group!r} has more.",
            fix=(
                "give it a larger max_values=, or send the values above the limit to dead letters"
                " with"
                ' when_full="divert".'
            ),
        )
        self.step = step
        self.aggregate = aggregate
        self.group = group
        self.max_values = max_values


# Times as integers and as sortable bytes

_SIGN = np.uint64(1 << 63)


def microseconds(column: pa.Array | pa.ChunkedArray) -> Times:
    """A column of timestamps without nulls, as microseconds since 1970 UTC."""
    array = as_array(column)
    times: Times = array.cast(pa.timestamp("us", array.type.tz)).cast(pa.int64()).to_numpy()
    return times


def big_endian(times_us: Times) -> list[bytes]:
    """Each time as eight bytes that sort as the times do."""
    raw = (times_us.astype(np.int64).view(np.uint64) ^ _SIGN).astype(">u8").tobytes()
    return [raw[at : at + 8] for at in range(0, len(raw), 8)]
