"""Histories with event times and watermarks for window kernels, and ways to feed them: cut into
calls, spread over a changing number of shards, restarted each time.
"""

from __future__ import annotations

import math
import pickle
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from headrace.columnar.keys import KEY_GROUPS, encode_keys, key_groups
from headrace.operators.kernel import UNSTARTED, Watermarks
from headrace.operators.windows.kernel import WindowKernel, WindowSettings
from headrace.testing.kernels import MemoryState
from tests.operators.histories import changed, text
from tests.operators.windows.oracle import Row, TickWatermarks, moment, us

TIME = pa.timestamp("us", "UTC")
STREAM = pa.schema([("k", pa.int64()), ("v", pa.float64()), ("t", TIME), ("device", pa.string())])
TABLE = pa.schema([("id", pa.int64()), *STREAM])
LATEST = 60
MINUTE = 60_000_000


@dataclass(frozen=True)
class Feed:
    """Rows tick by tick, with the watermark and horizon at the end of each."""

    ticks: list[list[Row]]
    watermark: list[int]
    horizon: list[int]
    is_table: bool = False

    @property
    def schema(self) -> pa.Schema:
        return TABLE if self.is_table else STREAM

    def table(self, first: int, stop: int) -> pa.Table:
        rows = [
            {**row, "_tick": number} for number in range(first, stop) for row in self.ticks[number]
        ]
        extra = [
            pa.field("_tick", pa.int64()),
            *([pa.field("_change_type", pa.string())] if self.is_table else []),
        ]
        return pa.Table.from_pylist(rows, pa.schema([*self.schema, *extra]))

    def watermarks(self, first: int, stop: int) -> Watermarks:
        numbers = np.arange(first, stop)
        before = (
            (self.watermark[first - 1], self.horizon[first - 1])
            if first
            else (UNSTARTED, UNSTARTED)
        )
        return Watermarks(
            numbers,
            numbers * 20_000_000,
            np.array(self.watermark[first:stop]),
            np.array(self.horizon[first:stop]),
            *before,
        )

    def tick_watermarks(self, number: int) -> TickWatermarks:
        before = (
            (self.watermark[number - 1], self.horizon[number - 1])
            if number
            else (UNSTARTED, UNSTARTED)
        )
        return TickWatermarks(*before, self.watermark[number], self.horizon[number])


class WindowOracle(Protocol):
    late: list[Row]

    def tick(
        self, number: int, rows: Sequence[Row], tick_watermarks: TickWatermarks
    ) -> list[Row]: ...


class Build(Protocol):
    def __call__(self, settings: WindowSettings) -> WindowKernel: ...


@dataclass
class FeedOutput:
    """What a kernel emits for a feed, what it counts, and what is left in its state."""

    emitted: list[Row]
    late: list[Row]
    late_counts: list[Row]
    state: dict[bytes, bytes]
    due: list[int | None]
    corrected: int = 0


def expected(oracle: WindowOracle, feed: Feed) -> list[Row]:
    return [
        row
        for number, rows in enumerate(feed.ticks)
        for row in oracle.tick(number, rows, feed.tick_watermarks(number))
    ]


def feed_to(
    build: Build,
    step: WindowSettings,
    feed: Feed,
    cuts: Sequence[int] = (),
    shards: Sequence[int] = (1,),
    combine: Sequence[int] | None = None,
) -> FeedOutput:
    """Feed it in calls, each with a number of shards of its own. With `combine`, rows are combined
    before, in pieces of these sizes, in turn.
    """
    bounds = [0, *sorted({cut for cut in cuts if cut < len(feed.ticks)}), len(feed.ticks)]
    states = [MemoryState()]
    output = FeedOutput([], [], [], {}, [])
    for call, (first, stop) in enumerate(pairwise(bounds)):
        states = spread(states, shards[call % len(shards)])
        rows, watermarks = feed.table(first, stop), feed.watermarks(first, stop)
        of_row = (
            key_groups(encode_keys(rows, list(step.by))).astype(np.int64)
            * len(states)
            // KEY_GROUPS
        )
        emitted: list[Row] = []
        for number, state in enumerate(states):
            kernel = pickle.loads(pickle.dumps(build(step)))
            mine = rows.filter(pa.array(of_row == number))
            emitted += kernel.step_timed(
                state, [mine if combine is None else combined(kernel, mine, combine)], [watermarks]
            ).to_pylist()
            output.late += kernel.late_rows.take_rows().to_pylist()
            output.late_counts += kernel.late_rows.take_counts().to_pylist()
            output.corrected += kernel.counts.get("corrected", 0)
        output.emitted += in_order(emitted) if len(states) > 1 else emitted
        output.due.append(
            min(
                (due for state in states if (due := build(step).due(state)) is not None),
                default=None,
            )
        )
    output.state = {key: value for state in states for key, value in state.values.items()}
    return output


def combined(kernel: Any, rows: pa.Table, sizes: Sequence[int]) -> pa.Table:
    """Rows combined piece by piece; a piece of size 0 stands for one row that is left as it is."""
    pieces, at, turn = [], 0, 0
    while at < rows.num_rows:
        size = sizes[turn % len(sizes)]
        piece = rows.slice(at, max(size, 1))
        pieces.append(kernel.combine(piece) if size else piece)
        at, turn = at + max(size, 1), turn + 1
    if not pieces:
        return rows
    return pa.concat_tables(pieces, promote_options="default").sort_by("_tick")


def in_order(emitted: list[Row]) -> list[Row]:
    """Rows of several shards, in an order that does not tell the shards apart; the halves of an
    update stay together.
    """
    return sorted(
        emitted,
        key=lambda row: (
            row["_tick"],
            repr([row.get("k"), row.get("device"), row["window_start"], row["window_end"]]),
        ),
    )


def spread(states: Sequence[MemoryState], shards: int) -> list[MemoryState]:
    """Redistribute the state to another number of shards and restart all of them."""
    fresh = [
        MemoryState(
            owned_groups=[
                group for group in range(KEY_GROUPS) if group * shards // KEY_GROUPS == shard
            ]
        )
        for shard in range(shards)
    ]
    for state in states:
        names, values, groups = state.scan(b"", b"\xff" * 2000)
        for name, value, group in zip(names, values, groups, strict=True):
            fresh[int(group) * shards // KEY_GROUPS].put(
                [name], [value], np.array([group], np.uint8)
            )
    return fresh


def check_same(output: Sequence[Row], wanted: Sequence[Row], shards: Sequence[int] = (2,)) -> None:
    """Check for equal rows; with one shard, in equal order too."""
    one = list(shards) == [1]
    assert text(output if one else in_order(list(output))) == text(
        wanted if one else in_order(list(wanted))
    )


# Drawn


def values() -> st.SearchStrategy[Any]:
    return (
        st.none()
        | st.sampled_from([0.1, 0.2, -0.3, 1e16, -1e16, math.nan, 0.0])
        | st.floats(-100, 100)
    )


def rows() -> st.SearchStrategy[Row]:
    return st.fixed_dictionaries(
        {
            "k": st.integers(0, 2) | st.none(),
            "v": values(),
            "t": st.integers(0, LATEST).map(moment),
            "device": st.sampled_from(["a", "b", None]),
        }
    )


@st.composite
def watermarks(draw: st.DrawFn, count: int) -> tuple[list[int], list[int]]:
    """Clocks that may not begin at once, never go back, and of which closed is never ahead."""
    unstarted = draw(st.integers(0, count))
    watermark = sorted(
        draw(
            st.lists(
                st.integers(-5, LATEST + 40), min_size=count - unstarted, max_size=count - unstarted
            )
        )
    )
    behind = draw(st.sampled_from([0, 0, 7]))
    return [UNSTARTED] * unstarted + watermark, [UNSTARTED] * unstarted + [
        each - behind for each in watermark
    ]


@st.composite
def streams(draw: st.DrawFn, max_ticks: int = 6) -> Feed:
    ticks = draw(st.lists(st.lists(rows(), max_size=6), min_size=1, max_size=max_ticks))
    return Feed(ticks, *draw(watermarks(len(ticks))))


@st.composite
def tables(draw: st.DrawFn, max_ticks: int = 6) -> Feed:
    """Changes of a table with the key `id`: each row put or deleted some times in a tick."""
    there: dict[int, Row | None] = {}
    ticks: list[list[Row]] = []
    for _ in range(draw(st.integers(1, max_ticks))):
        ticks.append(changes := [])
        for _ in range(draw(st.integers(0, 6))):
            number = draw(st.integers(0, 4))
            fresh = None if draw(st.integers(0, 3)) == 0 else {"id": number, **draw(rows())}
            changes += changed(there.get(number), fresh)
            there[number] = fresh
    return Feed(ticks, *draw(watermarks(len(ticks))), is_table=True)


def cuts() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, 5), max_size=4)


def shard_counts() -> st.SearchStrategy[list[int]]:
    return st.sampled_from([[1], [1], [2], [1, 3, 2]])


def late_by_minute(counts: list[Row]) -> Counter[tuple[int, str | None]]:
    """The number of late rows by minute and producer."""
    totals: Counter[tuple[int, str | None]] = Counter()
    for count in counts:
        totals[us(count["minute"]) // 60_000_000, count["producer"]] += count["rows"]
    return totals


def random_feed(seed: int) -> Feed:
    """Rows that arrive up to 35 late, with a watermark that follows the newest of them."""
    chance = random.Random(seed)
    ticks: list[list[Row]] = []
    watermark, newest = [], 0
    for tick in range(40):
        times = [max(tick * 10 - chance.randrange(35), 0) for _ in range(chance.randrange(6))]
        ticks.append(
            [
                {
                    "k": chance.randrange(2),
                    "v": chance.randrange(100) / 10,
                    "t": moment(time),
                    "device": None,
                }
                for time in times
            ]
        )
        newest = max([newest, *times])
        watermark.append(newest)
    return Feed([*ticks, []], [*watermark, 10_000], [*watermark, 10_000])


class ShorteningState(MemoryState):
    """State that shortens long names, as a store does."""

    def get(self, keys: Any, groups: Any = None) -> Any:
        return super().get(list(map(self.shorten, keys)), groups)

    def put(self, keys: Any, values: Any, groups: Any = None) -> None:
        super().put(list(map(self.shorten, keys)), values, groups)

    @staticmethod
    def shorten(key: bytes) -> bytes:
        return key if len(key) <= 400 else key[:368] + blake2b(key, digest_size=32).digest()
