"""A user's own aggregate: right over streams and tables, whatever the calls, and when it raises,
the row is found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.operators.aggregates import functions as agg
from headrace.operators.aggregates.kernel import AggregateKernel
from headrace.operators.kernel import AggregateFailed
from headrace.testing.kernels import MemoryState
from tests.operators.histories import History, cuts, run, streams, tables, text
from tests.operators.oracle import Oracle
from tests.short_forms import examples


class Longest(agg.CustomAggregate):
    """The longest text, the first of several; over streams only. Refuses texts with a dot."""

    state_type = pa.string()
    result_type = pa.string()

    def add(self, states: pa.Array, groups: pa.Array, values: pa.Array) -> pa.Array:
        if pc.any(pc.match_substring(values, ".")).as_py():
            raise ValueError("no dots, please")
        current = states.to_pylist()
        for group, value in zip(groups.to_pylist(), values.to_pylist(), strict=True):
            if value is not None and (current[group] is None or len(value) > len(current[group])):
                current[group] = value
        return pa.array(current, pa.string())

    def result(self, states: pa.Array) -> pa.Array:
        return states


class Mean(agg.CustomAggregate):
    """With a state of two parts, and able to take values back."""

    state_type = pa.struct([("count", pa.int64()), ("total", pa.int64())])
    result_type = pa.float64()

    def add(self, states: pa.Array, groups: pa.Array, values: pa.Array) -> pa.Array:
        return self._change(states, groups, values, 1)

    def retract(self, states: pa.Array, groups: pa.Array, values: pa.Array) -> pa.Array:
        return self._change(states, groups, values, -1)

    def _change(self, states: pa.Array, groups: pa.Array, values: pa.Array, sign: int) -> pa.Array:
        count, total = (pc.struct_field(states, at).fill_null(0).to_numpy().copy() for at in (0, 1))
        np.add.at(
            count,
            groups.to_numpy(),
            np.where(values.is_valid().to_numpy(zero_copy_only=False), sign, 0),
        )
        np.add.at(
            total, groups.to_numpy(), sign * values.fill_null(0).to_numpy(zero_copy_only=False)
        )
        return pa.StructArray.from_arrays([pa.array(count), pa.array(total)], ["count", "total"])

    def result(self, states: pa.Array) -> pa.Array:
        count, total = (pc.struct_field(states, at).to_numpy(zero_copy_only=False) for at in (0, 1))
        return pa.array(total / np.maximum(count, 1), mask=count == 0)


def kernel(
    history: History, aggregate: agg.CustomAggregate, *, divert: bool = False
) -> AggregateKernel:
    named = [("n", agg.count()), ("a", agg.custom(aggregate, "v"))]
    row_key = ["id"] if history.is_table else []
    return AggregateKernel(
        "mine",
        history.schema,
        ["k"],
        named,
        over_table=history.is_table,
        row_key=row_key,
        divert=divert,
    )


@given(data=st.data(), where=cuts())
@settings(max_examples=examples(50), deadline=None)
@pytest.mark.parametrize("kind", [streams, tables])
def test_as_the_builtin(kind: Any, data: st.DataObject, where: list[int]) -> None:
    history: History = data.draw(kind(st.integers(-1000, 1000), pa.int64()))
    oracle = Oracle(history.schema, ["k"], [("n", agg.count()), ("a", agg.avg("v"))])
    expected = [
        change for number, rows in enumerate(history.ticks) for change in oracle.tick(number, rows)
    ]
    emitted, state = run(kernel(history, Mean()), history)
    again, other_state = run(kernel(history, Mean()), history, where)
    assert text(emitted) == text(again) == text(expected)
    assert state.values == other_state.values


@given(history=streams(st.text("ab.", max_size=4), pa.string()), where=cuts())
@settings(max_examples=examples(50), deadline=None)
def test_rows_it_raises_on_are_rejected_and_reported(history: History, where: list[int]) -> None:
    of = kernel(history, Longest(), divert=True)
    emitted, state = run(of, history)
    assert text(emitted) == text(run(kernel(history, Longest(), divert=True), history, where)[0])
    assert state.values == run(kernel(history, Longest(), divert=True), history, where)[1].values
    rows = [(row, number) for number, tick in enumerate(history.ticks) for row in tick]
    bad = sorted(
        (str(row["k"]), row["v"], number)
        for row, number in rows
        if row["v"] is not None and "." in row["v"]
    )
    left_out = of.dead_letters.take().to_pylist()
    assert sorted((str(row["k"]), row["v"], row["_tick"]) for row in left_out) == bad
    assert all(
        row["_reason"] == "ValueError: no dots, please" and row["_aggregate"] == "a"
        for row in left_out
    )
    newest = {row["k"]: row["a"] for row in emitted if row["_change_type"] != "update_preimage"}
    for key, longest in newest.items():
        good = [
            row["v"]
            for row, _ in rows
            if row["k"] == key and row["v"] is not None and "." not in row["v"]
        ]
        assert longest == (max(good, key=len) if good else None)


def test_an_error_names_the_step_the_row_and_the_line() -> None:
    schema = pa.schema([("k", pa.int64()), ("v", pa.string())])
    history = History(
        schema,
        [
            [{"k": number % 7, "v": f"{number}"} for number in range(50)],
            [{"k": 3, "v": "fine"}, {"k": 4, "v": "3.14"}],
        ],
        is_table=False,
    )
    with pytest.raises(AggregateFailed) as caught:
        run(kernel(history, Longest()), history)
    message = str(caught.value)
    assert (
        "The aggregate 'a' of the step 'mine' failed on the row {'k': 4, 'v': '3.14', '_tick': 1}:"
        " ValueError: no dots, please" in message
    )
    assert "test_custom.py" in message
    assert "To fix: correct the aggregate" in message
    assert caught.value.row == {"k": 4, "v": "3.14", "_tick": 1}


class Unreadable(Longest):
    """As with a file on a disk that is away for a moment."""

    def add(self, states: pa.Array, groups: pa.Array, values: pa.Array) -> pa.Array:
        raise ConnectionError("the disk is away")


@pytest.mark.parametrize("divert", [False, True])
def test_rows_were_refused_because_of_errors_of_the_machine(divert: bool) -> None:
    """Another batch will succeed: no row may become a dead letter, and the run goes on trying."""
    schema = pa.schema([("k", pa.int64()), ("v", pa.string())])
    history = History(schema, [[{"k": 1, "v": "a"}]], is_table=False)
    with pytest.raises(ConnectionError, match="the disk is away"):
        run(kernel(history, Unreadable(), divert=divert), history)


class Broken(Longest):
    def __init__(self, what: str) -> None:
        self.what = what

    def add(self, states: pa.Array, groups: pa.Array, values: pa.Array) -> pa.Array:
        return {
            "short": states.slice(1),
            "list": states.to_pylist(),
            "typed": pa.array([[1]] * len(states)),
        }.get(self.what, values.slice(0, len(states)))

    def result(self, states: pa.Array) -> pa.Array:
        raise RuntimeError("no result today")


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("short", "ValueError: add returned 0 elements, expected 1"),
        ("list", "TypeError: add returned a list, not an Arrow array"),
        ("typed", "Unsupported cast from list<item: int64>"),
        ("result", "RuntimeError: no result today"),
    ],
)
def test_results_of_a_custom_aggregate_are_checked(what: str, cause: str) -> None:
    history = History(
        pa.schema([("k", pa.int64()), ("v", pa.string())]), [[{"k": 1, "v": "a"}]], is_table=False
    )
    with pytest.raises(AggregateFailed, match=cause):
        run(kernel(history, Broken(what)), history)


def test_state_is_stored_between_steps() -> None:
    history = History(
        pa.schema([("k", pa.int64()), ("v", pa.int64())]),
        [[{"k": 1, "v": 4}], [{"k": 1, "v": 8}]],
        is_table=False,
    )
    state = MemoryState()
    first = kernel(history, Mean()).step(state, history.table(0, 1)).to_pylist()
    second = kernel(history, Mean()).step(state, history.table(1, 2)).to_pylist()
    assert [row["a"] for row in first + second] == [4.0, 4.0, 6.0]
