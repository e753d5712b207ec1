"""Partial aggregation: whichever rows are combined, the results and the state are the same."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.operators.aggregates import functions as agg
from headrace.operators.aggregates.kernel import AggregateKernel
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.testing.kernels import MemoryState
from tests.operators.aggregates.values import NUMBERS, VALUES
from tests.operators.histories import History, streams, tables, text
from tests.short_forms import examples


def kernel(history: History, type_name: str) -> AggregateKernel:
    specs = [
        agg.count(),
        agg.count("v"),
        agg.sum("v"),
        agg.avg("v"),
        agg.stddev("v"),
        *([] if history.is_table else of_order(type_name)),
    ]
    named = [(f"a{at}", spec) for at, spec in enumerate(specs)]
    return AggregateKernel(
        "combined",
        history.schema,
        ["k"],
        named,
        over_table=history.is_table,
        row_key=["id"] if history.is_table else [],
    )


def of_order(type_name: str) -> list[AggregateSpec]:
    return [] if type_name.startswith("DECIMAL") else [agg.min("v"), agg.max("v")]


def in_pieces(rows: pa.Table, piece_of: list[int]) -> list[pa.Table]:
    """Rows dealt out to pieces, as the tasks of a job get them."""
    numbers = [piece_of[at % len(piece_of)] for at in range(rows.num_rows)]
    return [
        rows.filter(pa.array([number == piece for number in numbers]))
        for piece in sorted(set(numbers))
    ]


@pytest.mark.parametrize("type_name", NUMBERS)
@pytest.mark.parametrize("kind", [streams, tables])
@given(data=st.data(), piece_of=st.lists(st.integers(0, 3), min_size=1, max_size=7))
@settings(max_examples=examples(25), deadline=None)
def test_combined_or_not(
    type_name: str, kind: object, data: st.DataObject, piece_of: list[int]
) -> None:
    history: History = data.draw(kind(*VALUES[type_name]))  # type: ignore[operator]
    of = kernel(history, type_name)
    assert of.combinable
    plain, combined = MemoryState(), MemoryState()
    for first, stop in (
        (0, len(history.ticks) // 2),
        (len(history.ticks) // 2, len(history.ticks)),
    ):
        rows = history.table(first, stop)
        expected = of.step(plain, rows)
        partials = [of.combine(piece) for piece in in_pieces(rows, piece_of)]
        emitted = (
            of.step(combined, pa.concat_tables(partials).sort_by("_tick")) if partials else expected
        )
        assert text(emitted.to_pylist()) == text(expected.to_pylist())
        assert combined.values == plain.values


@pytest.mark.parametrize("type_name", ["BIGINT", "DOUBLE"])
@pytest.mark.parametrize("kind", [streams, tables])
@given(data=st.data(), piece_of=st.lists(st.integers(0, 3), min_size=1, max_size=7))
@settings(max_examples=examples(25), deadline=None)
def test_partially_combined_rows_give_equal_aggregates(
    type_name: str, kind: object, data: st.DataObject, piece_of: list[int]
) -> None:
    history: History = data.draw(kind(*VALUES[type_name]))  # type: ignore[operator]
    of = kernel(history, type_name)
    plain, mixed = MemoryState(), MemoryState()
    rows = history.table(0, len(history.ticks))
    pieces = in_pieces(rows, piece_of)
    some = [of.combine(piece) if at % 2 else piece for at, piece in enumerate(pieces)]
    expected = of.step(plain, rows)
    emitted = (
        of.step(mixed, pa.concat_tables(some, promote_options="default").sort_by("_tick"))
        if some
        else expected
    )
    assert text(emitted.to_pylist()) == text(expected.to_pylist())
    assert mixed.values == plain.values


@pytest.mark.parametrize(
    ("keys", "rows", "ticks", "worth"),
    [
        (10_000, 200_000, 1, True),
        (1_000_000, 200_000, 1, False),
        (10_000, 200_000, 100, False),
        (5, 100, 1, True),
        (90, 100, 1, False),
        (1, 1, 1, False),
    ],
)
def test_combining_where_it_pays(keys: int, rows: int, ticks: int, worth: bool) -> None:
    chance = np.random.default_rng(keys)
    table = pa.table(
        {
            "k": chance.integers(0, keys, rows),
            "v": np.arange(rows),
            "_tick": np.sort(np.arange(rows) % ticks),
        }
    )
    of = AggregateKernel(
        "combined",
        pa.schema([("k", pa.int64()), ("v", pa.int64())]),
        ["k"],
        [("total", agg.sum("v"))],
    )
    assert of.is_worth_combining(table) is worth
    assert (of.combine(table).num_rows <= rows / 2) is worth
    assert not AggregateKernel(
        "kept", of.schema, ["k"], [("all", agg.collect("v"))]
    ).is_worth_combining(table)


def test_combining_makes_fewer_rows_and_keeps_the_order_columns() -> None:
    schema = pa.schema([("k", pa.int64()), ("v", pa.int64())])
    rows = pa.table(
        {
            "k": [1, 1, 2, 1],
            "v": [10, 20, 30, 40],
            "_tick": [7, 7, 7, 8],
            "_rank": pa.array([0] * 4, pa.int32()),
            "_partition": pa.array([3] * 4, pa.int32()),
            "_offset": [5, 6, 7, 8],
        }
    )
    of = AggregateKernel("combined", schema, ["k"], [("total", agg.sum("v"))])
    combined = of.combine(rows)
    assert combined.drop_columns(["_partial"]).to_pylist() == [
        {"k": 1, "_tick": 7, "_rank": 0, "_partition": 3, "_offset": 5},
        {"k": 2, "_tick": 7, "_rank": 0, "_partition": 3, "_offset": 7},
        {"k": 1, "_tick": 8, "_rank": 0, "_partition": 3, "_offset": 8},
    ]
    assert (
        of.combine(
            combined.schema.empty_table().append_column("v", pa.array([], pa.int64()))
        ).num_rows
        == 0
    )


@pytest.mark.parametrize(
    "spec",
    [
        agg.first("v"),
        agg.collect("v"),
        agg.count_distinct("v"),
        agg.approx_distinct("v"),
        agg.quantiles("v"),
    ],
)
def test_aggregates_that_cannot_be_combined(spec: AggregateSpec) -> None:
    assert not AggregateKernel(
        "combined",
        pa.schema([("k", pa.int64()), ("v", pa.int64())]),
        ["k"],
        [("n", agg.count()), ("a", spec)],
    ).combinable
