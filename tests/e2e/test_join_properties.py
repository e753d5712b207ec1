"""Every kind of join under faults, restarts and rescaling, against an undisturbed replay of the
same ticks; and tables that are joined against the query, tick by tick.

As in `test_engine_properties.py` the jobs run in this process, so that there can be many.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from headrace.runtime.runner import Runner
from headrace.runtime.versions import start_version, version_state
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import Fault, PlainSpark
from headrace.views.reader import ViewReader
from tests.e2e.faults import Faults
from tests.e2e.joined import TOPICS, VIEWS, Feed, joined, shown
from tests.e2e.pipeline_lives import UNDISTURBED as VERSION
from tests.e2e.pipeline_lives import Move, advance, emitted_changes, finish, moves
from tests.short_forms import examples

pytestmark = pytest.mark.usefixtures("no_syncs")
SETTINGS = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    phases=[
        Phase.explicit,
        Phase.reuse,
        Phase.generate,
    ],  # rows come by chance, from a seed: there is nothing to shrink
)
LIFE = {
    "seed": st.integers(0, 2**32),
    "ticks": st.integers(1, 7),
    "happening": st.lists(moves, max_size=7),
    "strikes": st.frozensets(st.integers(1, 400), max_size=5),
    "repeats": st.sampled_from([0.0, 0.3]),
}


def live(
    root: Path, seed: int, ticks: int, happening: list[Move], faults: Faults, repeats: float
) -> None:
    spark: Any = PlainSpark(chance=Random(1), repeats=repeats)
    feed = Feed(Random(seed))
    with PipelineTest(joined(), root, spark, shards=1) as test:
        for number in range(ticks):
            feed.tick(test)
            faults.resting = False
            with suppress(Fault):
                test.cut(forced=True)
            faults.resting = True
            if number < len(happening):
                advance(test, happening[number], faults, spark)
        finish(test, faults)
        faults.resting = True
        for view, rows in feed.expected().items():
            assert shown(test.view(view)) == rows, view
        check_against_a_replay(test)


def check_against_a_replay(test: PipelineTest) -> None:
    """Run a life's ticks in one batch, on one shard, without a fault: the same rows in the same
    order, with the same ticks.
    """
    plan, state = (
        start_version(test.log, test.pipeline.plan(), VERSION),
        version_state(test.root / "state", VERSION),
    )
    session: Any = PlainSpark()
    calm, up_to = Runner.start(plan, test.log, session, state, shards=1), test.runner.tick
    while calm.tick < up_to:
        assert calm.step(up_to - calm.tick)
    calm.close()
    for topic in TOPICS:
        assert test.rows(topic) == test.rows(f"{topic}.{VERSION}"), topic
    with (
        ViewReader(test.root / "state" / "views.db") as mine,
        ViewReader(state / "views.db") as theirs,
    ):
        for view in VIEWS:
            assert emitted_changes(mine, view) == emitted_changes(theirs, f"{view}.{VERSION}"), view


def lived(
    seed: int,
    ticks: int,
    happening: list[Move],
    strikes: frozenset[int],
    repeats: float,
    faults: list[Faults],
) -> None:
    faults[0] = Faults(strikes)
    with TemporaryDirectory() as root:
        live(Path(root), seed, ticks, happening, faults[0], repeats)


@given(**LIFE)
@settings(SETTINGS, max_examples=examples(6))
def test_joins_go_the_same_way_whatever_happens(
    seed: int,
    ticks: int,
    happening: list[Move],
    strikes: frozenset[int],
    repeats: float,
    faults: list[Faults],
) -> None:
    lived(seed, ticks, happening, strikes, repeats, faults)


@pytest.mark.slow
@given(**LIFE)
@settings(SETTINGS, max_examples=examples(300))
def test_three_hundred_times(
    seed: int,
    ticks: int,
    happening: list[Move],
    strikes: frozenset[int],
    repeats: float,
    faults: list[Faults],
) -> None:
    lived(seed, ticks, happening, strikes, repeats, faults)


@pytest.mark.parametrize(
    "seed", [0, 1, 9575]
)  # the last: a row without a partner that moves from one join key to another
def test_views_show_the_query_over_the_tables_at_every_tick(seed: int, tmp_path: Path) -> None:
    session: Any = PlainSpark()
    feed = Feed(Random(seed))
    with PipelineTest(joined(), tmp_path, session) as test:
        for _ in range(8):
            feed.tick(test)
            test.settle(1)
            for view, rows in feed.expected().items():
                assert shown(test.view(view)) == rows, (view, feed.number)
