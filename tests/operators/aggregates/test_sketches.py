"""Sketches: the same bytes however ticks come, within the error they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import BugError, CorruptionError, NewerFormat
from headrace.operators.aggregates import functions as agg
from headrace.operators.aggregates.kernel import AggregateKernel
from headrace.operators.aggregates.sketches import BloomFilter
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.testing.kernels import MemoryState
from tests.operators.aggregates.values import VALUES
from tests.operators.histories import History, cuts, run, streams, text
from tests.short_forms import examples

SKETCHES = [
    agg.approx_distinct("v"),
    agg.heavy_hitters("v", max_values=3, size=8),
    agg.bloom("v", expected=20, error=0.1),
]


def kernel(schema: pa.Schema, *specs: AggregateSpec) -> AggregateKernel:
    return AggregateKernel(
        "sketched", schema, ["k"], [(f"a{at}", spec) for at, spec in enumerate(specs)]
    )


def of_values(values: pa.Array, spec: AggregateSpec) -> Any:
    """One group, in three ticks."""
    table = pa.table(
        {
            "k": pa.array(np.zeros(len(values), np.int64)),
            "v": values,
            "_tick": pa.array(np.sort(np.arange(len(values)) % 3)),
        }
    )
    result = kernel(pa.schema([("k", pa.int64()), ("v", values.type)]), spec).step(
        MemoryState(), table
    )
    return result.column("a0")[-1].as_py()


@pytest.mark.parametrize("type_name", VALUES)
@given(data=st.data(), where=cuts())
@settings(max_examples=examples(15), deadline=None)
def test_ticks_may_come_one_by_one_or_all_at_once(
    type_name: str, data: st.DataObject, where: list[int]
) -> None:
    history: History = data.draw(streams(*VALUES[type_name]))
    numeric = (
        [agg.quantiles("v", at=[0.0, 0.5, 1.0])]
        if type_name.startswith(("BIGINT", "DOUBLE", "DECIMAL"))
        else []
    )
    emitted, state = run(kernel(history.schema, *SKETCHES, *numeric), history)
    again, other_state = run(kernel(history.schema, *SKETCHES, *numeric), history, where)
    assert text(emitted) == text(again)
    assert state.values == other_state.values


@pytest.mark.parametrize("error", [0.05, 0.01])
@pytest.mark.parametrize("kind", [pa.int64(), pa.string(), pa.float64()])
def test_approx_distinct_keeps_its_promise(error: float, kind: pa.DataType) -> None:
    """Two of three within the error, nearly all within three times it."""
    off = []
    for seed in range(12):
        values = pa.array(np.random.default_rng(seed).integers(0, 1 << 40, 20_000)).cast(kind)
        exact = len(values.unique())
        off.append(abs(of_values(values, agg.approx_distinct("v", error=error)) - exact) / exact)
    assert np.mean([each <= error for each in off]) >= 0.5
    assert max(off) <= 3 * error


def test_approx_distinct_is_exact_for_few_and_counts_the_empty_string() -> None:
    assert of_values(pa.array(["", "a", "\0", "a", None, ""]), agg.approx_distinct("v")) == 3
    assert (
        of_values(pa.array([0.0, -0.0, float("nan"), float("nan")]), agg.approx_distinct("v")) == 2
    )
    assert of_values(pa.array([None, None, None], pa.int64()), agg.approx_distinct("v")) == 0


def test_quantiles_are_near() -> None:
    values = np.random.default_rng(3).normal(size=30_000)
    found = of_values(pa.array(values), agg.quantiles("v", at=[0.0, 0.01, 0.5, 0.99, 1.0]))
    ranks = [float(np.mean(values <= each)) for each in found]
    assert found[0] == values.min()
    assert found[-1] == values.max()
    assert np.allclose(ranks[1:4], [0.01, 0.5, 0.99], atol=0.01)
    assert of_values(pa.array([3, 1, 2]), agg.quantiles("v", at=0.5)) == 2.0
    assert (
        of_values(pa.array([None, float("nan")], pa.float64()), agg.quantiles("v", at=[0.5]))
        is None
    )


def test_heavy_hitters_miss_nothing_heavy() -> None:
    values = np.random.default_rng(5).zipf(1.3, 30_000).clip(max=10**6)
    size = 64
    exact = Counter(values.tolist())
    found = of_values(pa.array(values), agg.heavy_hitters("v", max_values=20, size=size))
    listed = {each["value"]: each for each in found}
    assert all(
        value in listed
        for value, count in exact.items()
        if count > len(values) / size and count >= exact.most_common(20)[-1][1]
    )
    for value, each in listed.items():
        assert each["at_least"] <= exact[value] <= each["at_most"]
        assert each["at_most"] - each["at_least"] <= len(values) / size
    assert [each["count"] for each in found] == sorted(
        (each["count"] for each in found), reverse=True
    )


@pytest.mark.parametrize(
    "values", [["b", "a", "a"], [b"\xff", b"\x00", b"\x00"], [1.5, 2.5, 2.5], [False, True, True]]
)
def test_heavy_hitters_give_values_of_the_columns_type(values: list[Any]) -> None:
    found = of_values(pa.array(values), agg.heavy_hitters("v"))
    assert [(each["value"], each["count"]) for each in found] == [(values[1], 2), (values[0], 1)]
    assert of_values(pa.array([None], pa.array(values).type), agg.heavy_hitters("v")) == []


@pytest.mark.parametrize("kind", [pa.int64(), pa.string()])
def test_a_bloom_filter_knows_its_members_and_few_others(kind: pa.DataType) -> None:
    members, others = pa.array(range(5000)).cast(kind), pa.array(range(10_000, 30_000)).cast(kind)
    bloom = BloomFilter.from_bytes(of_values(members, agg.bloom("v", expected=5000, error=0.01)))
    assert bloom.might_contain(members).all()
    assert bloom.might_contain(others).mean() < 0.02
    assert bloom.might_contain(pa.array([None], kind)).tolist() == [False]


def test_an_empty_bloom_filter_has_no_members() -> None:
    bloom = BloomFilter.from_bytes(of_values(pa.array([None], pa.int64()), agg.bloom("v")))
    assert not bloom.might_contain(pa.array([1, 2, 3])).any()


def test_damaged_and_newer_bloom_filters_are_refused() -> None:
    data = BloomFilter.empty(10, 0.1).to_bytes()
    with pytest.raises(NewerFormat, match="version 2"):
        BloomFilter.from_bytes(b"\x02" + data[1:])
    with pytest.raises(CorruptionError, match="64 bits has"):
        BloomFilter.from_bytes(data[:-1])


def test_sketches_take_no_tables() -> None:
    with pytest.raises(BugError, match="cannot retract rows"):
        AggregateKernel(
            "sketched",
            pa.schema([("k", pa.int64()), ("v", pa.int64())]),
            ["k"],
            [("a", SKETCHES[0])],
            over_table=True,
        )


def test_sketches_have_equal_bytes_in_another_process() -> None:
    """Also when Python hashes strings otherwise."""
    script = (
        "import json, numpy as np, pyarrow as pa\nfrom"
        " headrace.operators.aggregates import functions as agg\nfrom"
        " headrace.operators.aggregates.kernel import AggregateKernel\nfrom"
        " headrace.testing.kernels import MemoryState\nvalues = [f'w{n % 37}' for n in"
        " range(2000)]\nspecs = [('d', agg.approx_distinct('v')), ('h', agg.heavy_hitters('v',"
        " max_values=8, size=8)), ('b', agg.bloom('v'))]\nstate = MemoryState()\ntable ="
        " pa.table({'k': [0] * 2000, 'v': values, '_tick': [n // 100 for n in"
        " range(2000)]})\nAggregateKernel('s',"
        " pa.schema([('k', pa.int64()), ('v', pa.string())]), ['k'], specs).step(state,"
        " table)\nprint(json.dumps([value.hex() for value in state.values.values()]))\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert json.loads(outputs[0]) == json.loads(outputs[1])
    assert len(json.loads(outputs[0])[0]) > 100
