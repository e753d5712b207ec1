"""Rows for pattern kernels, in order or not, cut into ticks, calls and shards; and what a kernel
and the oracle make of them.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.columnar.keys import KEY_GROUPS, encode_keys, key_groups
from headrace.operators.kernel import UNSTARTED, Watermarks
from headrace.operators.patterns.compiled_pattern import PatternSpec, compile_pattern
from headrace.operators.patterns.kernel import PatternKernel
from headrace.operators.patterns.parser import ONE_ROW
from headrace.operators.patterns.settings import MatchSettings
from headrace.testing.kernels import MemoryState
from tests.operators.windows.feeding import spread

TIME = pa.timestamp("us", "UTC")
SYMBOLS = ("a", "b", "c", "x")
SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("t", TIME), ("id", pa.int64())])
INPUT = pa.schema([*SCHEMA, *((f"_{name}", pa.bool_()) for name in SYMBOLS), ("_tick", pa.int64())])
MEASURES = (
    ("first_id", "first(id)"),
    ("last_id", "last(id)"),
    ("n", "count(*)"),
    ("total", "sum(v)"),
    ("bs", "count(b.*)"),
)
Row = dict[str, Any]


def row(key: int, at: int, fits: str, number: int, value: int = 1) -> Row:
    """A row that fits these symbols."""
    return {
        "k": key,
        "v": value,
        "t": at,
        "id": number,
        **{f"_{name}": name in fits for name in SYMBOLS},
    }


@dataclass(frozen=True)
class Feed:
    """Rows tick by tick, with the closed clock at the end of each."""

    ticks: list[list[Row]]
    closed: list[int]

    def table(self, first: int, stop: int) -> pa.Table:
        return pa.Table.from_pylist(
            [
                {**each, "_tick": number}
                for number in range(first, stop)
                for each in self.ticks[number]
            ],
            INPUT,
        )

    def watermarks(self, first: int, stop: int) -> Watermarks:
        numbers, before = np.arange(first, stop), self.closed[first - 1] if first else UNSTARTED
        closed = np.array(self.closed[first:stop], np.int64)
        return Watermarks(numbers, numbers * 20_000_000, closed, closed, before, before)

    @property
    def in_time(self) -> list[Row]:
        """The rows that are not late, as they came."""
        befores = [UNSTARTED, *self.closed[:-1]]
        return [
            each
            for rows, before in zip(self.ticks, befores, strict=True)
            for each in rows
            if each["t"] >= before
        ]


def settings(
    spec: PatternSpec, *, rows: str = ONE_ROW, timed_out: bool = False, **more: Any
) -> MatchSettings:
    pattern = compile_pattern(spec, SCHEMA, where="test")
    fits = tuple(
        (name, at) for at, name in enumerate(SYMBOLS) if name in pattern.automaton.pattern.symbols
    )
    bits = tuple(f"_{name}" for name in SYMBOLS)
    return MatchSettings(
        "test",
        SCHEMA,
        ("k",),
        "t",
        (("p", pattern),),
        bits,
        (fits,),
        rows=rows,
        timed_out=timed_out,
        **more,
    )


@dataclass
class Fed:
    emitted: list[Row]
    timed_out_rows: list[Row]
    state: dict[bytes, bytes]
    due: list[int | None]
    counts: dict[str, int]


def feed_to(
    given: MatchSettings, feed: Feed, cuts: Sequence[int] = (), shards: Sequence[int] = (1,)
) -> Fed:
    """In calls, each with a number of shards of its own; the kernel is made anew each time."""
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(feed.ticks)}), len(feed.ticks)]
    states, fed = [MemoryState()], Fed([], [], {}, [], {})
    for call, (first, stop) in enumerate(pairwise(bounds)):
        states = spread(states, shards[call % len(shards)])
        rows, watermarks = feed.table(first, stop), feed.watermarks(first, stop)
        of_row = key_groups(encode_keys(rows, ["k"])).astype(np.int64) * len(states) // KEY_GROUPS
        for number, state in enumerate(states):
            kernel = PatternKernel(pickle.loads(pickle.dumps(given)))
            fed.emitted += kernel.step_timed(
                state, [rows.filter(pa.array(of_row == number))], [watermarks]
            ).to_pylist()
            fed.timed_out_rows += kernel.take_side_output().to_pylist()
            for name, count in kernel.counts.items():
                fed.counts[name] = fed.counts.get(name, 0) + count
        fed.due.append(
            min(
                (due for state in states if (due := PatternKernel(given).due(state)) is not None),
                default=None,
            )
        )
    fed.state = {key: value for state in states for key, value in state.values.items()}
    return fed
