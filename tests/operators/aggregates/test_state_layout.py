"""States as bytes, in a list or a column, with and without tails, nulls and rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.operators.aggregates import functions as agg
from headrace.operators.aggregates.aggregation import (
    AggregateSet,
    StateLayout,
    delete_empty,
    delete_empty_array,
)
from headrace.operators.aggregates.kernel import AggregateKernel
from headrace.testing.kernels import MemoryState
from tests.operators.aggregates.values import SCHEMA, rows

KINDS = {
    "fixed": [("s", agg.sum("v"))],
    "with a tail": [("s", agg.sum("v")), ("all", agg.collect("v"))],
    "rows alone": [("n", agg.count())],
}


def layout(kind: str) -> StateLayout:
    return AggregateSet("step", SCHEMA, ["k"], KINDS[kind]).layout


def states(kind: str, count: int) -> list[bytes]:
    state = MemoryState()
    AggregateKernel("step", SCHEMA, ["k"], KINDS[kind]).step(
        state, rows(*[(key, key * n, 1) for key in range(count) for n in range(1 + key % 3)])
    )
    return list(state.values.values())


def plain(unpack: Any) -> Any:
    counts, parts = unpack
    return counts.tolist(), [
        ([column.tolist() for column in columns], None if tails is None else list(tails))
        for columns, tails in parts
    ]


@pytest.mark.parametrize("kind", KINDS)
@given(there=st.lists(st.booleans(), max_size=12))
def test_a_list_and_a_column_are_read_alike(kind: str, there: list[bool]) -> None:
    known = states(kind, 12)[: len(there)]
    values = [value if known_one else None for value, known_one in zip(known, there, strict=True)]
    read = plain(layout(kind).unpack(values))
    assert read == plain(layout(kind).unpack_array(pa.array([b"x", *values], pa.binary()).slice(1)))
    assert [count > 0 for count in read[0]] == there


@pytest.mark.parametrize("kind", KINDS)
def test_state_round_trips_byte_for_byte(kind: str) -> None:
    known = states(kind, 12)
    counts, parts = layout(kind).unpack(known)
    assert (
        layout(kind).pack(counts, parts)
        == layout(kind).pack_array(counts, parts).to_pylist()
        == known
    )
    gone = np.where(np.arange(12) % 2, counts, 0)
    assert (
        delete_empty(known, gone)
        == delete_empty_array(pa.array(known, pa.binary()), gone).to_pylist()
        == [value if at % 2 else None for at, value in enumerate(known)]
    )
