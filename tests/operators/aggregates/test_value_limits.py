"""Aggregates with a limit on the values they keep: results are right or null, and rejected rows are
reported.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.operators.aggregates.kernel import AggregateKernel
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.operators.changelog import fold
from headrace.operators.kernel import GroupFull
from tests.operators.histories import History, changed, cuts, run, streams, tables, text
from tests.operators.oracle import Oracle
from tests.short_forms import examples

MAX_VALUES = 2
EXACT_OR_NULL = ("min", "max", "first", "last")
SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.int64()), ("v", pa.string())])


def kernel(
    history: History, kind: str, max_values: int = MAX_VALUES, **options: Any
) -> AggregateKernel:
    spec = AggregateSpec(kind, "v", (("most", max_values), *options.items()))
    return AggregateKernel(
        "bounded",
        history.schema,
        ["k"],
        [("a", spec)],
        over_table=history.is_table,
        row_key=["id"] if history.is_table else [],
    )


def table_of(*changes: tuple[int, str | None]) -> History:
    """A table in one group, one change a tick: the row with an id gets a value, or goes (None)."""
    rows: dict[int, dict[str, Any]] = {}
    ticks = []
    for number, value in changes:
        fresh = None if value is None else {"id": number, "k": 0, "v": value}
        ticks.append(changed(rows.get(number), fresh))
        rows[number] = fresh  # type: ignore[assignment]
    return History(SCHEMA, ticks, is_table=True)


def answers(of: AggregateKernel, history: History) -> list[Any]:
    """The group's result after each tick; a tick without a change repeats the last."""
    emitted, _ = run(of, history)
    current: Any = "no group"
    result = []
    for number in range(len(history.ticks)):
        for row in emitted:
            if row["_tick"] == number and row["_change_type"] in {
                "insert",
                "update_postimage",
                "delete",
            }:
                current = "no group" if row["_change_type"] == "delete" else row["a"]
        result.append(current)
    return result


@pytest.mark.parametrize("kind", EXACT_OR_NULL)
@given(history=tables(st.text("abcdefg", min_size=1, max_size=1), pa.string()), where=cuts())
@settings(max_examples=examples(60), deadline=None)
def test_right_or_null_and_never_wrong(kind: str, history: History, where: list[int]) -> None:
    emitted, state = run(kernel(history, kind), history)
    again, other_state = run(kernel(history, kind), history, where)
    assert text(emitted) == text(again)
    assert state.values == other_state.values
    oracle = Oracle(history.schema, ["k"], [("a", AggregateSpec(kind, "v"))], ["id"])
    table: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, rows in enumerate(history.ticks):
        oracle.tick(number, rows)
        table = fold(
            pa.Table.from_pylist(
                [row for row in emitted if row["_tick"] == number],
                kernel(history, kind).output.append(pa.field("_tick", pa.int64())),
            ),
            ["k"],
            table,
        )
        assert set(table) == {group for group, members in oracle.groups.items() if members}
        for group, row in table.items():
            exact = oracle.result(group)
            assert exact is not None
            assert row["a"] in {exact["a"], None}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("min", ["d", "c", "b", "a", "b", None, "0", None, None, "no group"]),
        ("max", ["d", "d", "d", "d", "d", "d", "d", "d", "c", "no group"]),
    ],
)
def test_the_farthest_are_forgotten_and_only_counted(kind: str, expected: list[Any]) -> None:
    history = table_of(
        (1, "d"),
        (2, "c"),
        (3, "b"),
        (4, "a"),
        (4, None),
        (3, None),
        (5, "0"),
        (5, None),
        (1, None),
        (2, None),
    )
    of = kernel(history, kind)
    assert answers(of, history) == expected
    assert of.unknown_results == ({"a": 2} if kind == "min" else {}), (
        "null is emitted once, until the result is known again"
    )


def test_first_and_last_keep_those_nearest_to_the_answer() -> None:
    history = table_of(
        (1, "a"), (2, "b"), (3, "c"), (4, "d"), (1, None), (2, None), (3, None), (4, None)
    )
    first, last = kernel(history, "first"), kernel(history, "last")
    assert answers(first, history) == ["a", "a", "a", "a", "b", None, None, "no group"]
    assert answers(last, history) == ["a", "b", "c", "d", "d", "d", "d", "no group"]
    assert first.unknown_results == {"a": 1}
    assert answers(
        kernel(history, "last"),
        table_of((1, "a"), (2, "b"), (3, "c"), (3, None), (2, None), (1, None)),
    )[3:] == ["b", None, "no group"]


def test_an_update_keeps_its_place_and_a_forgotten_row_stays_forgotten() -> None:
    history = table_of((1, "a"), (2, "b"), (3, "c"), (1, "A"), (3, "C"), (1, None), (2, None))
    assert answers(kernel(history, "first"), history) == ["a", "a", "a", "A", "A", "b", None]
    assert answers(kernel(history, "last"), history) == ["a", "b", "c", "c", "C", "C", "C"]


@given(history=streams(st.integers(0, 5), pa.int64()), where=cuts())
@settings(max_examples=examples(60), deadline=None)
def test_a_full_list_leaves_later_values_out(history: History, where: list[int]) -> None:
    of = kernel(history, "collect")
    emitted, state = run(of, history, where)
    assert state.values == run(kernel(history, "collect"), history)[1].values
    values: dict[Any, list[int]] = {}
    for row in (row for tick in history.ticks for row in tick if row["v"] is not None):
        values.setdefault(row["k"], []).append(row["v"])
    newest = {row["k"]: row["a"] for row in emitted if row["_change_type"] != "update_preimage"}
    assert all(newest[key] == of_key[:MAX_VALUES] for key, of_key in values.items())
    left_out = of.dead_letters.take().to_pylist()
    assert sorted((str(row["k"]), row["v"]) for row in left_out) == sorted(
        (str(key), value) for key, of_key in values.items() for value in of_key[MAX_VALUES:]
    )
    assert all(
        row["_reason"] == "the group has 2 values of 'v' already" and row["_aggregate"] == "a"
        for row in left_out
    )


@given(history=streams(st.integers(0, 5), pa.int64()), where=cuts())
@settings(max_examples=examples(60), deadline=None)
def test_a_full_set_leaves_new_values_out(history: History, where: list[int]) -> None:
    of = kernel(history, "count_distinct")
    emitted, state = run(of, history, where)
    assert state.values == run(kernel(history, "count_distinct"), history)[1].values
    distinct: dict[Any, list[int]] = {}
    left_out = []
    for row in (row for tick in history.ticks for row in tick if row["v"] is not None):
        known = distinct.setdefault(row["k"], [])
        if row["v"] not in known and len(known) == MAX_VALUES:
            left_out.append((str(row["k"]), row["v"]))
        elif row["v"] not in known:
            known.append(row["v"])
    newest = {row["k"]: row["a"] for row in emitted if row["_change_type"] != "update_preimage"}
    assert all(newest[key] == len(known) for key, known in distinct.items())
    assert sorted(
        (str(row["k"]), row["v"]) for row in of.dead_letters.take().to_pylist()
    ) == sorted(left_out)
    assert of.dead_letters.take().num_rows == 0


@pytest.mark.parametrize("kind", ["collect", "count_distinct"])
def test_a_row_beyond_the_limit_can_be_deleted(kind: str) -> None:
    history = table_of(
        (1, "a"), (2, "b"), (3, "c"), (3, None), (1, None), (4, "d"), (2, None), (4, None)
    )
    of = kernel(history, kind)
    expected = ["a", "ab", "ab", "ab", "b", "bd", "d", "no group"]
    found = answers(of, history)
    assert found == [
        each if each == "no group" else list(each) if kind == "collect" else len(each)
        for each in expected
    ]
    assert [(row["id"], row["v"], row["_tick"]) for row in of.dead_letters.take().to_pylist()] == [
        (3, "c", 2)
    ]


@pytest.mark.parametrize("kind", [*EXACT_OR_NULL, "collect", "count_distinct"])
def test_a_full_group_stops_the_query_if_asked(kind: str) -> None:
    history = table_of((1, "a"), (2, "b"), (3, "c"))
    with pytest.raises(
        GroupFull,
        match=(
            r"'a' of the step 'bounded' keeps up to 2 values a group, and the group \{'k': 0\} has"
            r" more"
        ),
    ):
        run(kernel(history, kind, when_full="stop"), history)
    assert answers(kernel(history, kind, max_values=3, when_full="stop"), history)[-1] is not None
