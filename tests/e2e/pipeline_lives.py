"""The life of a pipeline under test: ticks, batches, restarts, faults and late tasks, in any order.

Property tests draw lives with hypothesis; `live` goes through one and checks the outputs.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import strategies as st

import headrace as hr
from headrace.errors import HeadraceError
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import Fault, PlainSpark
from headrace.views.reader import ViewReader
from tests.e2e.everything import check, everything
from tests.e2e.faults import Faults

UNDISTURBED = "calm"
"""The version that replays the same ticks without faults."""
MAX_TRIES = 40
TickRows = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Move:
    """A batch of at most so many ticks; what happens before it."""

    max_ticks: int
    restart: bool
    shards: int
    lose_store: bool
    late_tasks: int


moves = st.builds(
    Move,
    max_ticks=st.integers(1, 5),
    restart=st.booleans(),
    shards=st.integers(1, 4),
    lose_store=st.integers(0, 4).map(lambda n: n == 0),
    late_tasks=st.integers(0, 3),
)


@dataclass(frozen=True)
class Life:
    """What happens to a pipeline, all of it."""

    ticks: list[TickRows]
    ahead: int
    moves: list[Move]
    faults: frozenset[int | str]
    repeats: float
    seed: int
    added_later: frozenset[str]


def live(life: Life, faults: Faults, root: Path) -> None:
    """Feed and run, whatever happens, and check what came out."""
    spark: Any = PlainSpark(chance=Random(life.seed), repeats=life.repeats)
    with PipelineTest(everything(without=life.added_later), root, spark, shards=1) as test:
        waiting = list(reversed(life.ticks))
        for _ in range(life.ahead):
            take_in(test, waiting, faults)
        for move in life.moves:
            take_in(test, waiting, faults)
            advance(test, move, faults, spark, everything())
        while waiting:
            take_in(test, waiting, faults)
        if life.added_later:
            test.pipeline = everything()
            test.restart()
        finish(test, faults)
        check(test)


def take_in(test: PipelineTest, waiting: list[TickRows], faults: Faults) -> None:
    """Feed the rows of a tick and cut it. If that fails, it may have happened, or the rows belong
    to the next one.
    """
    for topic, fed in waiting.pop().items() if waiting else ():
        if fed:
            test.feed(topic, fed)
    faults.resting = False
    with suppress(Fault):
        test.cut(forced=True)
    faults.resting = True


def advance(
    test: PipelineTest,
    move: Move,
    faults: Faults,
    spark: PlainSpark,
    pipeline: hr.Pipeline | None = None,
) -> None:
    """What happens before a batch, and the batch. A restart may bring an edited pipeline."""
    if move.restart:
        test.pipeline = pipeline or test.pipeline
        test.restart(shards=move.shards, lose_local_store=move.lose_store)
    if spark.zombies:
        for _ in range(move.late_tasks):
            with suppress(HeadraceError, OSError, Fault):
                spark.chance.choice(spark.zombies)()
    faults.resting = False
    with suppress(Fault):
        test.step(move.max_ticks)
    faults.resting = True


def finish(test: PipelineTest, faults: Faults) -> None:
    test.cut()
    faults.resting = False
    for _ in range(MAX_TRIES):
        with suppress(Fault):
            if not test.step(3):
                break
    else:
        raise AssertionError("it never came to its end")
    faults.resting = True


def emitted_changes(reader: ViewReader, view: str) -> list[tuple[int, list[dict[str, Any]]]]:
    """The changes of a view, by tick."""
    return [(tick, rows.to_pylist()) for tick, rows in reader.changes_since(view, 0)]
