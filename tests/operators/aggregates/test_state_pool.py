"""States side by side: what each amounts to with all before it and behind it, and a pool of them
that grows.
"""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from headrace.columnar.segments import Segments
from headrace.operators.aggregates import functions as agg
from headrace.operators.aggregates.aggregation import AggregateSet
from headrace.operators.aggregates.state_pool import StateMerger, StatePool, States

SCHEMA = pa.schema([("v", pa.float64())])
SPECS = (("n", agg.count()), ("total", agg.sum("v")), ("most", agg.max("v")))
VALUES = (
    st.none()
    | st.sampled_from([1e300, -1e300, 0.1, 1e-300, math.inf, math.nan])
    | st.floats(-10, 10)
)


def lifted(merging: StateMerger, values: list[float | None]) -> States:
    rows = pa.table(
        {"v": pa.array(values, pa.float64()), "_tick": pa.array([0] * len(values), pa.int64())}
    )
    each = np.arange(len(values))
    return merging.lift(
        Segments(rows, each, each, np.zeros(len(values), np.int64), each, pa.array([], pa.binary()))
    )


def shown(merging: StateMerger, states: States) -> list[str]:
    return [
        repr(row)
        for row in zip(
            *(array.to_pylist() for array in merging.results(states).arrays), strict=True
        )
    ]


@given(st.lists(st.lists(VALUES, min_size=1, max_size=9), min_size=1, max_size=4))
def test_prefixes_and_suffixes_of_each_set_equal_ranges(sets: list[list[float | None]]) -> None:
    merging = StateMerger(AggregateSet("s", SCHEMA, (), SPECS))
    values = [value for each in sets for value in each]
    numbers = np.repeat(np.arange(len(sets)), [len(each) for each in sets])
    states = lifted(merging, values)
    before = shown(merging, merging.prefixes(states, numbers))
    behind = shown(merging, merging.suffixes(states, numbers))
    pool = StatePool(states)
    starts = np.cumsum([0, *(len(each) for each in sets)])
    for at, of in enumerate(numbers.tolist()):
        for found, (first, stop) in (
            (before, (starts[of], at + 1)),
            (behind, (at, starts[of + 1])),
        ):
            alone = merging.reduce(
                pool.take(np.arange(first, stop)), np.zeros(stop - first, np.int64)
            )
            assert found[at] == shown(merging, alone)[0]


@given(st.lists(st.lists(VALUES, max_size=5), min_size=1, max_size=6))
def test_a_pool_keeps_what_it_was_given_and_states_can_be_stored(
    pieces: list[list[float | None]],
) -> None:
    merging = StateMerger(AggregateSet("s", SCHEMA, (), SPECS))
    pool = StatePool(lifted(merging, pieces[0]))
    numbers = [
        np.arange(len(pieces[0])),
        *(pool.add(lifted(merging, piece)) for piece in pieces[1:]),
    ]
    everything = np.concatenate(numbers)
    assert everything.tolist() == list(range(len(pool)))
    wanted = shown(merging, lifted(merging, [value for piece in pieces for value in piece]))
    assert shown(merging, pool.take(everything)) == wanted
    stored = merging.close_states(pool.take(everything[::-1]))
    assert shown(merging, merging.open_states(stored)) == wanted[::-1]


WHOLE = pa.schema([("v", pa.int64())])
LARGE = 2**62


@given(
    st.lists(
        st.none() | st.integers(-9, 9) | st.sampled_from([LARGE, -LARGE]), min_size=1, max_size=12
    ),
    st.data(),
)
def test_ranges_by_taking_away_are_what_merging_gives(
    values: list[int | None], data: st.DataObject
) -> None:
    merging = StateMerger(
        AggregateSet(
            "s",
            WHOLE,
            (),
            (
                ("n", agg.count()),
                ("some", agg.count("v")),
                ("total", agg.sum("v")),
                ("mean", agg.avg("v")),
            ),
        )
    )
    rows = pa.table(
        {"v": pa.array(values, pa.int64()), "_tick": pa.array([0] * len(values), pa.int64())}
    )
    each = np.arange(len(values))
    states = merging.lift(
        Segments(rows, each, each, np.zeros(len(values), np.int64), each, pa.array([], pa.binary()))
    )
    first = data.draw(st.integers(0, len(values) - 1))
    stop = data.draw(st.integers(first + 1, len(values)))
    found = merging.over_ranges(states, np.array([first]), np.array([stop]))
    if found is None:
        assert any(value is not None and abs(value) == LARGE for value in values), (
            "then it might not be exact"
        )
    else:
        prefixes = merging.prefixes(
            StatePool(states).take(each[first:stop]), np.zeros(stop - first, np.int64)
        )
        assert shown(merging, found) == shown(
            merging, StatePool(prefixes).take(np.array([stop - first - 1]))
        )
