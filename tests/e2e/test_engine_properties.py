"""Any split of ticks into batches, any number of shards, restarts, failures anywhere, tasks that
run twice or far too late: the same rows with the same ticks.

The jobs run in this process (`headrace/testing/plain_spark.py`), so that there can be many; what
they run is the engine. `test_engine.py` has a few through Spark.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.e2e.everything import TOPICS, VIEWS
from tests.e2e.faults import Faults
from tests.e2e.pipeline_lives import Life, live, moves
from tests.short_forms import examples

pytestmark = pytest.mark.usefixtures("no_syncs")
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


def lived(life: Life, faults: list[Faults]) -> None:
    faults[0] = Faults(life.faults)
    with TemporaryDirectory() as root:
        live(life, faults[0], Path(root))
    for point in faults[0].struck:
        event(f"struck: {point}")


@given(life=lives)
@settings(
    max_examples=examples(15),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_rows_and_ticks_do_not_depend_on_batches_shards_or_faults(
    life: Life, faults: list[Faults]
) -> None:
    lived(life, faults)


@pytest.mark.slow
@given(life=lives)
@settings(
    max_examples=examples(1000),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_rows_and_ticks_of_a_thousand_lives(life: Life, faults: list[Faults]) -> None:
    lived(life, faults)
