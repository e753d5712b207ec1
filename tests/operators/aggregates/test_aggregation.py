"""Aggregates against a naive computation over streams and tables: the same changes and the same
state, however ticks are grouped into calls.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.operators.aggregates.kernel import AggregateKernel
from headrace.operators.aggregates.specs import AggregateSpec
from tests.operators.aggregates.values import NUMBERS, VALUES
from tests.operators.histories import History, cuts, run, streams, tables, text
from tests.operators.oracle import Oracle
from tests.short_forms import examples

TAKES = {"count": tuple(VALUES), "sum": (*NUMBERS, "INTERVAL"), "avg": (*NUMBERS, "INTERVAL")}
OF_ANY_TYPE = [
    AggregateSpec("min", "v"),
    AggregateSpec("max", "v"),
    AggregateSpec("first", "v"),
    AggregateSpec("first", "v", (("ignore_nulls", True),)),
    AggregateSpec("last", "v"),
    AggregateSpec("last", "v", (("ignore_nulls", True),)),
    AggregateSpec("collect", "v"),
    AggregateSpec("count_distinct", "v"),
]
QUICK = settings(max_examples=examples(25), deadline=None)


def kernel(history: History, *specs: AggregateSpec) -> AggregateKernel:
    named = [("n", AggregateSpec("count")), *((f"a{at}", spec) for at, spec in enumerate(specs))]
    return AggregateKernel(
        "totals",
        history.schema,
        ["k"],
        named,
        over_table=history.is_table,
        row_key=["id"] if history.is_table else [],
    )


def oracle_of(of: AggregateKernel, row_key: tuple[str, ...] = ()) -> Oracle:
    return Oracle(of.schema, of.by, of.aggregates, row_key)


def check(history: History, where: list[int], *specs: AggregateSpec) -> None:
    """In one call, in one call a tick, and cut anywhere: the oracle's changes, and the same
    state.
    """
    oracle = oracle_of(kernel(history, *specs), ("id",) if history.is_table else ())
    expected = [
        change for number, rows in enumerate(history.ticks) for change in oracle.tick(number, rows)
    ]
    states = []
    for each in ([], where, range(1, len(history.ticks))):
        emitted, state = run(kernel(history, *specs), history, each)
        assert text(emitted) == text(expected)
        states.append(state.values)
    assert states[0] == states[1] == states[2]


def specs_of(type_name: str) -> list[AggregateSpec]:
    return [
        *(AggregateSpec(kind, "v") for kind, takes in TAKES.items() if type_name in takes),
        *OF_ANY_TYPE,
    ]


@pytest.mark.parametrize("type_name", VALUES)
@given(data=st.data(), where=cuts())
@QUICK
def test_over_a_stream(type_name: str, data: st.DataObject, where: list[int]) -> None:
    check(data.draw(streams(*VALUES[type_name])), where, *specs_of(type_name))


@pytest.mark.parametrize("type_name", VALUES)
@given(data=st.data(), where=cuts())
@QUICK
def test_over_a_table(type_name: str, data: st.DataObject, where: list[int]) -> None:
    check(data.draw(tables(*VALUES[type_name])), where, *specs_of(type_name))


NESTED: dict[str, tuple[st.SearchStrategy[Any], pa.DataType]] = {
    "STRUCT": (
        st.tuples(st.none() | st.integers(0, 3), st.none() | st.text(max_size=2)).map(
            lambda pair: {"a": pair[0], "b": pair[1]}
        ),
        pa.struct([("a", pa.int32()), ("b", pa.string())]),
    ),
    "ARRAY": (st.lists(st.none() | st.text(max_size=2), max_size=3), pa.list_(pa.string())),
    "MAP": (
        st.dictionaries(st.text(max_size=2), st.integers(0, 3), max_size=2).map(
            lambda each: list(each.items())
        ),
        pa.map_(pa.string(), pa.int64()),
    ),
}


@pytest.mark.parametrize("type_name", NESTED)
@pytest.mark.parametrize("kind", [streams, tables])
@given(data=st.data(), where=cuts())
@QUICK
def test_first_last_and_collect_take_nested_values(
    type_name: str, kind: Any, data: st.DataObject, where: list[int]
) -> None:
    check(
        data.draw(kind(*NESTED[type_name])),
        where,
        *(spec for spec in OF_ANY_TYPE if spec.kind in {"first", "last", "collect"}),
        AggregateSpec("count", "v"),
    )
