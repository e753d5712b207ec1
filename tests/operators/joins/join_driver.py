"""Driving kernels with two inputs: histories and clocks in, in calls of any number of ticks, after
restarts, on any number of shards.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from headrace.columnar.keys import encode_keys, key_groups
from headrace.operators.kernel import UNSTARTED, TimedKernel, Watermarks
from headrace.testing.kernels import MemoryState
from tests.operators.histories import History, Row, changed

Make = Callable[[], TimedKernel]
K = TypeVar("K")


def restored(kernel: K) -> K:
    """As a kernel comes to a worker."""
    again: K = pickle.loads(pickle.dumps(kernel))
    return again


@dataclass(frozen=True)
class Track:
    """An input's clocks at the end of each tick."""

    complete: list[int]
    closed: list[int]

    def watermarks(self, first: int, stop: int) -> Watermarks:
        complete, closed = (
            np.array(each[first:stop], np.int64) for each in (self.complete, self.closed)
        )
        ticks = np.arange(first, stop)
        before = (
            (self.complete[first - 1], self.closed[first - 1]) if first else (UNSTARTED, UNSTARTED)
        )
        return Watermarks(ticks, self.time_of(ticks), complete, closed, *before)

    @staticmethod
    def time_of(tick: Any) -> Any:
        return 2 * tick

    def horizon_before(self, tick: int) -> int:
        return self.closed[tick - 1] if tick else UNSTARTED

    def watermark_before(self, tick: int) -> int:
        return self.complete[tick - 1] if tick else UNSTARTED


def still(ticks: int) -> Track:
    """Clocks that never begin."""
    return Track([UNSTARTED] * ticks, [UNSTARTED] * ticks)


@dataclass(frozen=True)
class Drive:
    """A history of each input, and its clocks."""

    inputs: Sequence[History]
    tracks: Sequence[Track]

    @property
    def ticks(self) -> int:
        return len(self.inputs[0].ticks)

    def run(
        self,
        make: Make,
        cuts: Sequence[int] = (),
        only: Callable[[pa.Table, int], pa.Table] = lambda rows, _: rows,
    ) -> tuple[list[Row], MemoryState]:
        """The result's rows and the final state. Between calls everything but the state's bytes is
        forgotten.
        """
        state, emitted = MemoryState(), []
        bounds = [0, *sorted({cut for cut in cuts if cut < self.ticks}), self.ticks]
        for first, stop in pairwise(bounds):
            if first == stop:
                continue
            state = state.copy()
            tables = [
                only(history.table(first, stop), number)
                for number, history in enumerate(self.inputs)
            ]
            kernel = make()
            result = kernel.step_timed(
                state, tables, [track.watermarks(first, stop) for track in self.tracks]
            )
            assert result.schema == kernel.output.append(
                pa.field("_tick", pa.int64(), nullable=False)
            )
            result.validate(full=True)
            emitted += result.to_pylist()
        return emitted, state

    def on_shards(
        self, make: Make, ons: Sequence[Sequence[str]], shards: int, cuts: Sequence[int]
    ) -> list[tuple[list[Row], MemoryState]]:
        """The rows that each of some shards emits, of which each has the rows of its key groups."""

        def of_shard(shard: int) -> Callable[[pa.Table, int], pa.Table]:
            return lambda rows, number: rows.filter(
                pa.array(key_groups(encode_keys(rows, list(ons[number]))) % shards == shard)
            )

        return [self.run(make, cuts, of_shard(shard)) for shard in range(shards)]


def shard_of(rows: Sequence[Row], key: str, kind: pa.DataType, shards: int) -> list[int]:
    """The shard that each result row belongs to, by its join key."""
    table = pa.table({"k": pa.array([row[key] for row in rows], kind)})
    groups: list[int] = (key_groups(encode_keys(table, ["k"])) % shards).tolist()
    return groups


def check_all_ways(
    drive: Drive,
    make: Make,
    expected: Sequence[Row],
    key: tuple[str, pa.DataType],
    ons: Sequence[Sequence[str]],
    cuts: Sequence[int],
) -> MemoryState:
    """In one call, in many, and on two shards: always the rows that are expected. Returns the final
    state of the one with many calls.
    """
    emitted, _ = drive.run(make)
    assert emitted == expected
    emitted, state = drive.run(make, cuts)
    assert emitted == expected
    shards = drive.on_shards(make, ons, 2, cuts)
    mine = shard_of(expected, *key, 2)
    for shard, (emitted, part) in enumerate(shards):
        assert emitted == [row for row, of in zip(expected, mine, strict=True) if of == shard]
        assert all(group % 2 == shard for group in part.groups.values()), (
            "entries are filed under their key's group"
        )
    together = {name: value for _, part in shards for name, value in part.values.items()}
    assert together == state.values
    return state


def in_key_order(rows: Sequence[Row], keys: Sequence[Any], kind: pa.DataType) -> list[Row]:
    """Rows of a tick in order of their join keys' bytes; those of one key stay in their order."""
    encoded = encode_keys(pa.table({"k": pa.array(list(keys), kind)}), ["k"]).to_pylist()
    return [rows[at] for at in sorted(range(len(rows)), key=lambda at: encoded[at])]


# Histories


@st.composite
def table_history(
    draw: st.DrawFn,
    ticks: int,
    *,
    ids: int = 5,
    keys: st.SearchStrategy[Any],
    key_type: pa.DataType,
    values: int = 2,
) -> History:
    """A table with the key `id`, a foreign key `k` and a value `v`: in a tick a row has at most one
    change.
    """
    schema = pa.schema([("id", pa.int64()), ("k", key_type), ("v", pa.int64())])
    rows: dict[int, Row | None] = {}
    emitted: list[list[Row]] = []
    for _ in range(ticks):
        emitted.append(changes := [])
        for number in draw(st.lists(st.integers(0, ids - 1), max_size=4, unique=True)):
            fresh = (
                None
                if draw(st.integers(0, 2)) == 0
                else {"id": number, "k": draw(keys), "v": draw(st.integers(0, values))}
            )
            if fresh != rows.get(number):
                changes += changed(rows.get(number), fresh)
            rows[number] = fresh
        if draw(st.booleans()):
            # what goes and what comes may be far from each other, as when they come from different
            # shards
            changes.sort(key=lambda change: change["_change_type"] in {"delete", "update_preimage"})
    return History(schema, emitted, is_table=True)


@st.composite
def tracks(draw: st.DrawFn, ticks: int, *, late: bool = True, max_step: int = 4) -> Track:
    """Clocks that begin at some tick and move on by small steps; closed is at or behind
    complete.
    """
    now, behind = UNSTARTED, UNSTARTED
    complete, closed = [], []
    for _ in range(ticks):
        if now == UNSTARTED:
            now = draw(st.sampled_from([UNSTARTED, -2, 0, 2]))
        else:
            now += draw(st.integers(0, max_step))
        if now != UNSTARTED:
            behind = max(behind, now - (draw(st.integers(0, 3)) if late else 0))
        complete.append(now)
        closed.append(behind)
    return Track(complete, closed)


def cuts(ticks: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, max(ticks - 1, 1)), max_size=4)
