"""Any split of ticks into batches, any number of shards, restarts, failures anywhere, tasks that
run twice or far too late: the same rows with the same ticks.

The jobs run in this process (`headrace/testing/plain_spark.py`), so that there can be many; what
they run is the engine. `test_engine.py` has a few through Spark.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.errors import HeadraceError
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import Fault, PlainSpark
from tests.e2e.everything import TOPICS, VIEWS, check, everything
from tests.e2e.faults import Faults

pytestmark = pytest.mark.usefixtures("no_syncs")
MAX_TRIES = 40
TickRows = dict[str, list[dict[str, Any]]]
orders = st.lists(
    st.fixed_dictionaries(
        {
            "k": st.none() | st.integers(0, 5),
            "v": st.none() | st.integers(-3, 3),
            "note": st.none() | st.sampled_from(["a", "b", "ünï", ""]),
        }
    ),
    max_size=8,
)
people = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.integers(0, 4),
            "city": st.none() | st.sampled_from(["Oslo", "Rome"]),
            "age": st.none() | st.integers(1, 90),
            "_change_type": st.sampled_from(["insert", "update_postimage", "delete"]),
        }
    ),
    max_size=5,
)
tick_rows = st.fixed_dictionaries({"orders": orders, "late_orders": orders, "people": people})


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


lives = st.builds(
    Life,
    ticks=st.lists(tick_rows, min_size=1, max_size=6),
    ahead=st.integers(0, 4),
    moves=st.lists(moves, max_size=6),
    faults=st.frozensets(st.integers(1, 200), max_size=6),
    repeats=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 3),
    added_later=st.just(frozenset[str]())
    | st.frozensets(st.sampled_from([*VIEWS, *TOPICS]), max_size=3),
)


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


def lived(life: Life, faults: list[Faults]) -> None:
    faults[0] = Faults(life.faults)
    with TemporaryDirectory() as root:
        live(life, faults[0], Path(root))
    for point in faults[0].struck:
        event(f"struck: {point}")


@given(life=lives)
@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_whatever_happens_the_rows_and_their_ticks_are_the_same(
    life: Life, faults: list[Faults]
) -> None:
    lived(life, faults)


@pytest.mark.slow
@given(life=lives)
@settings(
    max_examples=1000,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_the_same_a_thousand_times(life: Life, faults: list[Faults]) -> None:
    lived(life, faults)
