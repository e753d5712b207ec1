"""Stored state shown to people: it shows what the kernel emitted last, for every aggregate, over
streams and tables.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from headrace.operators.aggregates import functions as agg
from headrace.operators.aggregates.kernel import AggregateKernel
from headrace.operators.kernel import InspectableKernel
from headrace.operators.latest_rows import LatestKernel
from headrace.testing.kernels import MemoryState

SCHEMA = pa.schema(
    [
        ("k", pa.string()),
        ("j", pa.int64()),
        ("v", pa.int64()),
        ("d", pa.float64()),
        ("s", pa.string()),
    ]
)
EXACT = {
    "n": agg.count(),
    "values": agg.count("v"),
    "total": agg.sum("v"),
    "doubles": agg.sum("d"),
    "mean": agg.avg("v"),
    "least": agg.min("v"),
    "greatest": agg.max("s"),
    "first": agg.first("s"),
    "last": agg.last("v"),
    "all": agg.collect("v"),
    "distinct": agg.count_distinct("s"),
    "spread": agg.stddev("d"),
}
SKETCHES = {
    "about": agg.approx_distinct("s"),
    "middle": agg.quantiles("d", [0.5]),
    "heavy": agg.heavy_hitters("s"),
}


def rows(*, over_table: bool) -> pa.Table:
    columns: dict[str, Any] = {
        "k": ["a", "b", "a", None],
        "j": [1, 2, 1, 3],
        "v": [1, 2, 3, 4],
        "d": [0.5, 1.5, 2.5, 3.5],
        "s": ["x", "y", "z", "w"],
        "_tick": [1, 1, 2, 2],
    }
    return pa.table(columns | ({"_change_type": ["insert"] * 4} if over_table else {}))


@pytest.mark.parametrize("by", [("k",), ("j",), ("k", "j")])
@pytest.mark.parametrize("over_table", [False, True])
def test_an_aggregates_state_is_shown_as_its_result(over_table: bool, by: tuple[str, ...]) -> None:
    aggregates = EXACT if over_table else EXACT | SKETCHES
    kernel = AggregateKernel(
        "step",
        SCHEMA,
        by,
        list(aggregates.items()),
        over_table=over_table,
        row_key=("v",) if over_table else (),
    )
    assert isinstance(kernel, InspectableKernel)
    assert [field.name for field in kernel.key_fields] == list(by)
    state = MemoryState()
    emitted = kernel.step(state, rows(over_table=over_table)).to_pylist()
    newest = {
        tuple(row[name] for name in by): row
        for row in emitted
        if row["_change_type"] in {"insert", "update_postimage"}
    }
    keys = sorted(state.values)
    shown = kernel.describe(
        pa.array(keys, pa.binary()), pa.array([state.values[key] for key in keys], pa.binary())
    ).to_pylist()
    assert {tuple(row[name] for name in by) for row in shown} == set(newest)
    for row in shown:
        last = newest[tuple(row[name] for name in by)]
        assert row.pop("_rows") == last["n"]
        assert row == {name: last[name] for name in row}


def test_the_newest_rows_are_shown_as_they_are() -> None:
    kernel = LatestKernel("step", SCHEMA, ("k",))
    assert isinstance(kernel, InspectableKernel)
    state = MemoryState()
    kernel.step(state, rows(over_table=False))
    keys = sorted(state.values)
    shown = kernel.describe(
        pa.array(keys, pa.binary()), pa.array([state.values[key] for key in keys], pa.binary())
    ).to_pylist()
    assert [(row["k"], row["v"]) for row in shown] == [(None, 4), ("a", 3), ("b", 2)]
