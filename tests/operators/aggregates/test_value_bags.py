"""`count_distinct`, `median`, `collect_set`, `min_by`, `max_by`, `count_if`, `variance`, and
`first` and `last` by a column, against plain Python: streams and tables, any split into calls.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.operators.aggregates import functions as agg
from headrace.operators.aggregates.kernel import AggregateKernel
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.operators.kernel import GroupFull
from tests.operators.histories import History, Row, changed, cuts, keys, run, text
from tests.short_forms import examples

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("t", pa.int64()), ("b", pa.bool_())])
TABLE_SCHEMA = pa.schema([("id", pa.int64()), *SCHEMA])
Rows = Sequence[Row]
"""The rows of a group, each with `_arrived`: when its `t` became what it is, in order."""


def values_of(rows: Rows) -> list[int]:
    return [row["v"] for row in rows if row["v"] is not None]


def best(largest: bool, latest: bool, ignore_nulls: bool = False) -> Callable[[Rows], Any]:
    def choose(rows: Rows) -> Any:
        counted = [
            row for row in rows if row["t"] is not None and not (ignore_nulls and row["v"] is None)
        ]
        ordered = sorted(
            counted,
            key=lambda row: (
                row["t"] if largest else -row["t"],
                row["_arrived"] if latest else -row["_arrived"],
            ),
        )
        return ordered[-1]["v"] if ordered else None

    return choose


def variance(rows: Rows) -> float | None:
    values = [Fraction(value) for value in values_of(rows)]
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    return float(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def median(rows: Rows) -> float | None:
    return float(statistics.median(values_of(rows))) if values_of(rows) else None


def pairs(rows: Rows) -> int:
    return len({(row["v"], row["t"]) for row in rows if None not in (row["v"], row["t"])})


AGGREGATES: dict[str, tuple[AggregateSpec, Callable[[Rows], Any]]] = {
    "count_distinct": (agg.count_distinct("v"), lambda rows: len(set(values_of(rows)))),
    "count_distinct_of_two": (agg.count_distinct("v", "t"), pairs),
    "collect_set": (agg.collect_set("v"), lambda rows: sorted(set(values_of(rows)))),
    "median": (agg.median("v"), median),
    "variance": (agg.variance("v"), variance),
    "count_if": (agg.count_if("b"), lambda rows: sum(row["b"] is True for row in rows)),
    "max_by": (agg.max_by("v", by="t"), best(largest=True, latest=True)),
    "min_by": (agg.min_by("v", by="t"), best(largest=False, latest=True)),
    "first": (agg.first("v", by="t"), best(largest=False, latest=False)),
    "last": (agg.last("v", by="t"), best(largest=True, latest=True)),
    "last_value": (
        agg.last("v", by="t", ignore_nulls=True),
        best(largest=True, latest=True, ignore_nulls=True),
    ),
}
BOUNDED = [
    "count_distinct",
    "count_distinct_of_two",
    "collect_set",
    "median",
    "max_by",
    "min_by",
    "first",
    "last",
]


def rows_of_a_stream() -> st.SearchStrategy[Row]:
    return st.fixed_dictionaries(
        {
            "k": keys(),
            "v": st.none() | st.integers(-3, 3),
            "t": st.none() | st.integers(0, 3),
            "b": st.none() | st.booleans(),
        }
    )


def streams() -> st.SearchStrategy[History]:
    ticks = st.lists(st.lists(rows_of_a_stream(), max_size=8), max_size=6)
    return ticks.map(lambda ticks: History(SCHEMA, ticks, is_table=False))


@st.composite
def tables(draw: st.DrawFn) -> History:
    rows: dict[int, Row] = {}
    ticks: list[list[Row]] = []
    for _ in range(draw(st.integers(0, 7))):
        tick: list[Row] = []
        # At most one change of a row in a tick, as tables have.
        for number in draw(st.lists(st.integers(0, 6), max_size=6, unique=True)):
            deletes = draw(st.integers(0, 3)) == 0
            fresh = None if deletes else {"id": number, **draw(rows_of_a_stream())}
            tick += changed(rows.get(number), fresh)
            rows[number] = fresh  # type: ignore[assignment]
        ticks.append(tick)
    return History(TABLE_SCHEMA, ticks, is_table=True)


def kernel(
    history: History, specs: dict[str, AggregateSpec], max_values: int | None = None
) -> AggregateKernel:
    if max_values is not None:
        specs = {name: limited(spec, max_values) for name, spec in specs.items()}
    return AggregateKernel(
        "groups",
        history.schema,
        ["k"],
        list(specs.items()),
        over_table=history.is_table,
        row_key=["id"] if history.is_table else [],
    )


def limited(spec: AggregateSpec, max_values: int) -> AggregateSpec:
    options = [(name, max_values if name == "most" else value) for name, value in spec.options]
    return AggregateSpec(spec.kind, spec.column, tuple(options))


def oracle(history: History) -> list[dict[Any, Rows]]:
    """The rows of each group after each tick."""
    groups: dict[Any, list[Row]] = {}
    clock = 0
    result: list[dict[Any, Rows]] = []
    for tick in history.ticks:
        removed: dict[Any, Row] = {}
        for row in tick:
            clock += 1
            members = groups.setdefault(row["k"], [])
            if row.get("_change_type") in {"delete", "update_preimage"}:
                old = next(each for each in members if each["id"] == row["id"])
                members.remove(old)
                removed[row["k"], row["id"]] = old
                continue
            before = removed.get((row["k"], row.get("id")))
            kept = before is not None and before["t"] == row["t"]
            members.append({**row, "_arrived": before["_arrived"] if before and kept else clock})
        result.append({group: list(rows) for group, rows in groups.items() if rows})
    return result


def results(emitted: Rows, ticks: int) -> list[dict[Any, Row]]:
    """The table of results after each tick."""
    table: dict[Any, Row] = {}
    found = []
    for number in range(ticks):
        for row in emitted:
            if row["_tick"] == number and row["_change_type"] in {"update_preimage", "delete"}:
                assert text([table.pop(row["k"])]) == text([plain(row)])
            elif row["_tick"] == number:
                table[row["k"]] = plain(row)
        found.append(dict(table))
    return found


def plain(row: Row) -> Row:
    return {name: value for name, value in row.items() if not name.startswith("_")}


@given(history=streams() | tables(), where=cuts())
@settings(max_examples=examples(60), deadline=None)
def test_results_are_those_of_plain_python(history: History, where: list[int]) -> None:
    specs = {name: spec for name, (spec, _) in AGGREGATES.items()}
    emitted, state = run(kernel(history, specs), history)
    again, other_state = run(kernel(history, specs), history, where)
    assert text(emitted) == text(again)
    assert state.values == other_state.values
    found = results(emitted, len(history.ticks))
    for table, groups in zip(found, oracle(history), strict=True):
        assert table == {
            group: {"k": group, **{name: of(rows) for name, (_, of) in AGGREGATES.items()}}
            for group, rows in groups.items()
        }


@given(history=streams() | tables(), where=cuts(), max_values=st.integers(1, 3))
@settings(max_examples=examples(60), deadline=None)
def test_beyond_the_limit_results_are_right_or_null(
    history: History, where: list[int], max_values: int
) -> None:
    specs = {name: AGGREGATES[name][0] for name in BOUNDED}
    emitted, state = run(kernel(history, specs, max_values), history)
    again, other_state = run(kernel(history, specs, max_values), history, where)
    assert text(emitted) == text(again)
    assert state.values == other_state.values
    found = results(emitted, len(history.ticks))
    for table, groups in zip(found, oracle(history), strict=True):
        assert table.keys() == groups.keys()
        for group, rows in groups.items():
            for name in BOUNDED:
                exact = AGGREGATES[name][1](rows)
                assert table[group][name] in (exact, None), name
                # The limit is on distinct values, of `max_by` and the like on rows.
                if len(rows) > max_values or table[group][name] is not None:
                    continue
                left_out = any(len(each.get(group, ())) > max_values for each in oracle(history))
                assert exact is None or left_out, name


def test_count_distinct_beyond_its_limit_looked_like_an_exact_number() -> None:
    rows = [{"k": 1, "v": value, "t": None, "b": None} for value in (1, 2, 3, 3, 1)]
    history = History(SCHEMA, [rows[:2], rows[2:]], is_table=False)
    of = kernel(history, {"n": agg.count_distinct("v", max_values=2)})
    emitted, _ = run(of, history)
    assert [row["n"] for row in emitted if row["_change_type"] != "update_preimage"] == [2, None]
    assert of.unknown_results == {"n": 1}
    assert of.left_out == {"n": 2}, "two rows have the value that was left out"
    assert of.dead_letters.take().num_rows == 0


def test_a_table_knows_its_distinct_values_again_when_the_others_are_gone() -> None:
    def row(number: int, value: int) -> Row:
        return {"id": number, "k": 1, "v": value, "t": None, "b": None}

    rows = [row(1, 1), row(2, 2), row(3, 3)]
    history = History(
        TABLE_SCHEMA,
        [*(changed(None, each) for each in rows), changed(rows[0], None), changed(rows[2], None)],
        is_table=True,
    )
    of = kernel(history, {"n": agg.count_distinct("v", max_values=2)})
    emitted, _ = run(of, history)
    shown = [row["n"] for row in emitted if row["_change_type"] != "update_preimage"]
    assert shown == [1, 2, None, 1]


@pytest.mark.parametrize("name", BOUNDED)
def test_a_query_can_stop_at_the_limit_instead(name: str) -> None:
    spec, _ = AGGREGATES[name]
    options = [
        (option, "stop" if option == "when_full" else value) for option, value in spec.options
    ]
    stopping = limited(AggregateSpec(spec.kind, spec.column, tuple(options)), 2)
    rows = [{"id": n, "k": 1, "v": n, "t": n, "b": None} for n in range(3)]
    history = History(TABLE_SCHEMA, [changed(None, row) for row in rows], is_table=True)
    with pytest.raises(GroupFull, match="keeps up to 2 values"):
        run(kernel(history, {"a": stopping}), history)


def test_nan_is_the_largest_number_of_a_set_and_zero_is_one_value() -> None:
    schema = pa.schema([("k", pa.int64()), ("v", pa.float64())])
    rows = [{"k": 1, "v": value} for value in (float("nan"), -0.0, 0.0, float("nan"), 3.0)]
    history = History(schema, [rows], is_table=False)
    specs = {"n": agg.count_distinct("v"), "all": agg.collect_set("v"), "middle": agg.median("v")}
    emitted, _ = run(kernel(history, specs), history)
    assert (emitted[0]["n"], repr(emitted[0]["all"])) == (3, "[0.0, 3.0, nan]")
    assert emitted[0]["middle"] == 3.0
