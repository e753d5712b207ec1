"""The aggregate kernel as a host sees it: what it emits, what it stores, what it refuses."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.columnar.keys import encode_keys
from headrace.errors import BugError, InputError, NewerFormat, UnknownColumn
from headrace.operators.aggregates import functions as agg
from headrace.operators.aggregates.float_sums import DoubleSum
from headrace.operators.aggregates.kernel import AggregateKernel
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.operators.changelog import check_ticks, fold
from headrace.testing.kernels import MemoryState
from tests.operators.aggregates.values import SCHEMA, rows
from tests.operators.histories import History, cuts, doubles, run, streams, tables, text
from tests.operators.oracle import Oracle
from tests.short_forms import examples


def sums(**more: AggregateSpec) -> AggregateKernel:
    return AggregateKernel(
        "totals", SCHEMA, ["k"], [("n", agg.count()), ("total", agg.sum("v")), *more.items()]
    )


def test_results_equal_plain_python() -> None:
    kernel = sums()
    result = kernel.step(MemoryState(), rows((2, 5, 1), (1, None, 1), (2, 6, 2), (1, None, 3)))
    assert result.schema == kernel.output.append(pa.field("_tick", pa.int64(), nullable=False))
    assert [tuple(row.values()) for row in result.to_pylist()] == [
        (1, 1, None, "insert", 1),
        (2, 1, 5, "insert", 1),
        (2, 1, 5, "update_preimage", 2),
        (2, 2, 11, "update_postimage", 2),
        (1, 1, None, "update_preimage", 3),
        (1, 2, None, "update_postimage", 3),
    ]


def test_a_tick_that_changes_nothing_emits_nothing() -> None:
    kernel = AggregateKernel("highest", SCHEMA, ["k"], [("top", agg.max("v"))])
    emitted = kernel.step(MemoryState(), rows((1, 9, 1), (1, 3, 2), (1, 9, 3), (1, 10, 4)))
    assert emitted["_tick"].to_pylist() == [1, 4, 4]


def test_no_rows_no_changes() -> None:
    kernel, state = sums(), MemoryState()
    result = kernel.step(state, rows((1, 1, 1)).slice(0, 0))
    assert (result.num_rows, result.schema.names) == (
        0,
        ["k", "n", "total", "_change_type", "_tick"],
    )
    assert state.changed == {}


def test_a_group_vanishes_with_its_last_row_and_may_come_back() -> None:
    history = rows(
        (1, 5, 1), (1, 5, 2), (1, 7, 3), _change_type=pa.array(["insert", "delete", "insert"])
    )
    kernel = AggregateKernel("totals", SCHEMA, ["k"], [("total", agg.sum("v"))], over_table=True)
    state = MemoryState()
    assert [tuple(row.values()) for row in kernel.step(state, history.slice(0, 2)).to_pylist()] == [
        (1, 5, "insert", 1),
        (1, 5, "delete", 2),
    ]
    assert state.values == {}
    assert set(state.take_changes().values()) == {None}
    assert [tuple(row.values()) for row in kernel.step(state, history.slice(2)).to_pylist()] == [
        (1, 7, "insert", 3)
    ]


def test_a_sum_that_does_not_fit_is_null_and_counted_until_it_fits() -> None:
    big = (1 << 63) - 1
    changes = rows(
        (1, big, 1), (1, 1, 2), (1, 1, 3), _change_type=pa.array(["insert", "insert", "delete"])
    )
    kernel = AggregateKernel("totals", SCHEMA, ["k"], [("total", agg.sum("v"))], over_table=True)
    emitted = kernel.step(MemoryState(), changes)
    assert [row["total"] for row in emitted.to_pylist()] == [big, big, None, None, big]
    assert kernel.unknown_results == {"total": 1}


@given(
    history=tables(doubles(), pa.float64()) | streams(doubles(), pa.float64()),
    where=cuts(),
    population=st.booleans(),
)
@settings(max_examples=examples(150), deadline=None)
def test_the_standard_deviation_is_near_and_does_not_depend_on_calls(
    history: History, where: list[int], population: bool
) -> None:
    spec = agg.stddev("v", population=population)
    kernel = AggregateKernel(
        "spread",
        history.schema,
        ["k"],
        [("a", spec)],
        over_table=history.is_table,
        row_key=["id"] if history.is_table else [],
    )
    emitted, state = run(kernel, history)
    again, other_state = run(kernel, history, where)
    assert text(emitted) == text(again)
    assert state.values == other_state.values
    oracle = Oracle(history.schema, ["k"], [("a", spec)])
    table: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, tick in enumerate(history.ticks):
        oracle.tick(number, tick)
        of_tick = pa.Table.from_pylist(
            [row for row in emitted if row["_tick"] == number],
            kernel.output.append(pa.field("_tick", pa.int64())),
        )
        check_ticks(of_tick, ["k"])
        table = fold(of_tick, ["k"], table)
        for group, row in table.items():
            exact = (oracle.result(group) or {})["a"]
            near = row["a"] == exact or (
                row["a"] is not None
                and exact is not None
                and math.isclose(row["a"], exact, rel_tol=1e-14)
            )
            assert near or (math.isnan(exact) and math.isnan(row["a"])), (row["a"], exact)


@pytest.mark.parametrize("key", [["s"], ["k", "s"], ["f"], ["k", "f", "s"], []])
@given(data=st.data(), where=cuts())
@settings(max_examples=examples(30), deadline=None)
def test_keys_of_other_types_and_several_columns(
    key: list[str], data: st.DataObject, where: list[int]
) -> None:
    schema = pa.schema(
        [("k", pa.int64()), ("s", pa.string()), ("f", pa.float64()), ("v", pa.int64())]
    )
    row = st.fixed_dictionaries(
        {
            "k": st.none() | st.integers(-2, 2),
            "s": st.none() | st.sampled_from(["", "a", "ab", "b", "ä"]),
            "f": st.none() | st.sampled_from([0.0, -0.0, math.nan, 1.5, -math.inf]),
            "v": st.integers(-9, 9),
        }
    )
    history = History(
        schema, data.draw(st.lists(st.lists(row, max_size=9), max_size=4)), is_table=False
    )
    aggregates = [("n", agg.count()), ("total", agg.sum("v"))]
    oracle = Oracle(schema, key, aggregates)
    expected = [
        change for number, tick in enumerate(history.ticks) for change in oracle.tick(number, tick)
    ]
    emitted, _ = run(AggregateKernel("totals", schema, key, aggregates), history, where)
    assert text(emitted) == text(expected)


def test_many_rows_of_many_keys() -> None:
    """Large enough for every fast path: against plain numpy."""
    chance = np.random.default_rng(11)
    count, kernel, state = 60_000, sums(top=agg.max("v")), MemoryState()
    key, value, tick = (
        chance.integers(-20_000, 20_000, count),
        chance.integers(-(1 << 62), 1 << 62, count),
        np.sort(chance.integers(0, 40, count)),
    )
    emitted = pa.concat_tables(
        [
            kernel.step(state, rows_of(key, value, tick, part))
            for part in (tick < 10, tick == 10, tick > 10)
        ]
    )
    check_ticks(emitted, ["k"])
    table = fold(emitted, ["k"])
    order = np.lexsort((np.arange(count), key))
    keys, starts, sizes = np.unique(key[order], return_index=True, return_counts=True)
    assert {group: (row["n"], row["top"]) for (group,), row in table.items()} == dict(
        zip(
            keys.tolist(),
            zip(sizes.tolist(), np.maximum.reduceat(value[order], starts).tolist(), strict=True),
            strict=True,
        )
    )
    exact = [sum(map(int, part)) for part in np.split(value[order], starts[1:])]
    assert [table[group,]["total"] for group in keys.tolist()] == [
        total if -(1 << 63) <= total < 1 << 63 else None for total in exact
    ]
    unknown = sum(
        row["total"] is None
        for row in emitted.to_pylist()
        if row["_change_type"] in {"insert", "update_postimage"}
    )
    assert kernel.unknown_results.get("total", 0) == unknown


def rows_of(key: Any, value: Any, tick: Any, part: Any) -> pa.Table:
    return pa.table({"k": key[part], "v": value[part], "_tick": tick[part]})


def test_wide_keys_are_sorted_too() -> None:
    """Keys too far apart to be sorted together with their positions."""
    chance = np.random.default_rng(13)
    key = np.repeat(chance.integers(-(1 << 63), (1 << 63) - 1, 3000), 3)
    emitted = sums().step(
        MemoryState(),
        pa.table({"k": key, "v": np.arange(len(key)), "_tick": np.zeros(len(key), np.int64)}),
    )
    assert emitted["k"].to_pylist() == sorted(set(key.tolist()))
    assert set(emitted["n"].to_pylist()) == {3}


def test_a_kernel_can_be_pickled() -> None:
    kernel: AggregateKernel = pickle.loads(
        pickle.dumps(
            sums(spread=agg.stddev("v"), some=agg.collect("v"), about=agg.approx_distinct("v"))
        )
    )
    assert kernel.step(MemoryState(), rows((1, 2, 3)))["total"].to_pylist() == [2]


@pytest.mark.parametrize(
    ("by", "aggregates", "message"),
    [
        (
            ["kk"],
            [("n", agg.count())],
            "input of step 'totals' has no column 'kk': did you mean 'k'",
        ),
        (["k"], [("n", agg.sum("w"))], "has no column 'w'"),
        (["k"], [("k", agg.count())], "two results named 'k'"),
    ],
)
def test_invalid_aggregates_are_refused_before_the_first_row(
    by: list[str], aggregates: list[tuple[str, AggregateSpec]], message: str
) -> None:
    with pytest.raises((InputError, UnknownColumn), match=message):
        AggregateKernel("totals", SCHEMA, by, aggregates)


def test_broken_promises_of_the_input_are_found() -> None:
    kernel = AggregateKernel("totals", SCHEMA, ["k"], [("n", agg.count())], over_table=True)
    with pytest.raises(
        BugError,
        match=r"'totals' received retractions of rows that it never received, in the group"
        r" \{'k': 7\}",
    ):
        kernel.step(
            MemoryState(), rows((1, 1, 1), (7, 1, 1), _change_type=pa.array(["insert", "delete"]))
        )
    with pytest.raises(BugError, match="not in the order of their ticks"):
        kernel.step(
            MemoryState(), rows((1, 1, 2), (1, 1, 1), _change_type=pa.array(["insert", "insert"]))
        )
    with pytest.raises(BugError, match="needs the table's key"):
        AggregateKernel("totals", SCHEMA, ["k"], [("n", agg.first("v"))], over_table=True)
    for kind in ("min", "first"):
        kernel = AggregateKernel(
            "totals",
            SCHEMA,
            ["k"],
            [("a", AggregateSpec(kind, "v"))],
            over_table=True,
            row_key=["v"],
        )
        with pytest.raises(BugError, match="is retracted that was never added"):
            kernel.step(
                MemoryState(),
                rows(
                    (1, 1, 1),
                    (1, 2, 1),
                    (1, 3, 1),
                    _change_type=pa.array(["insert", "insert", "delete"]),
                ),
            )


def test_a_newer_state_is_refused() -> None:
    state = MemoryState()
    sums().step(state, rows((1, 1, 1)))
    ((key, value),) = state.values.items()
    assert value[0] == 1
    assert key == encode_keys(rows((1, 1, 1)), ["k"])[0].as_py()
    state.values[key] = b"\x02" + value[1:]
    with pytest.raises(NewerFormat, match="version 2"):
        sums().step(state, rows((1, 1, 2)))


def test_the_layout_of_states_is_the_one_that_is_stored_already() -> None:
    """Version 1: changing any of these bytes orphans states on users' disks."""
    state = MemoryState()
    kernel = AggregateKernel(
        "totals",
        SCHEMA,
        ["k"],
        [
            ("n", agg.count()),
            ("total", agg.sum("v")),
            ("low", agg.min("v")),
            ("all", agg.collect("v")),
        ],
    )
    kernel.step(state, rows((1, -2, 1), (1, 5, 1)))
    (value,) = state.values.values()
    assert value == bytes.fromhex(
        "01"  # version
        "0200000000000000"  # rows
        "0200000000000000 0300000000000000 0000000000000000"  # sum: values, low word, high word
        "01 0100000000000080"  # min: there is one; its place in the order, turned round
        "1b000000"  # collect: the length of its tail
        # the tail: there, length, count, both there, -2, 5
        "01 16000000 02000000 0101 feffffffffffffff 0500000000000000"
    )


def test_a_sum_that_depended_on_its_grouping_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A harness that cannot fail proves nothing: with plain floating-point addition, cutting ticks
    differently shows in the state.
    """
    values = [0.1, 1e16, -1e16, 0.3, 1e16, 0.7, -1e16]
    history = History(
        pa.schema([("k", pa.int64()), ("v", pa.float64())]),
        [[{"k": 1, "v": value} for value in values[at:]] for at in range(6)],
        is_table=False,
    )
    aggregates = [("total", agg.sum("v"))]

    def outcome() -> list[str]:
        return text(run(AggregateKernel("totals", history.schema, ["k"], aggregates), history)[0])

    exact = outcome()
    monkeypatch.setattr(
        DoubleSum,
        "merge",
        lambda self, left, right: (left[0] + right[0], left[1] + right[1], left[2], left[3]),
    )
    assert outcome() != exact
