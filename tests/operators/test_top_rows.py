"""The first rows of each group, and different rows, against sorting and sets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.columnar.keys import encode_keys, key_groups
from headrace.errors import InputError, UnknownColumn
from headrace.operators import top_rows
from headrace.operators.changelog import check_ticks, fold
from headrace.operators.joins import row_store
from headrace.operators.joins.sides import SettleKernel
from headrace.operators.top_rows import (
    Order,
    TopKernel,
    distinct_kernel,
    order_bytes,
    order_sort_keys,
)
from headrace.testing.kernels import MemoryState
from tests.operators.histories import History, Row, changed
from tests.operators.joins.join_driver import cuts, restored, table_history
from tests.short_forms import examples

SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.int64()), ("v", pa.int64())])


def folded(into: dict[int, Row], changes: list[Row]) -> None:
    for change in sorted(
        changes, key=lambda change: change["_change_type"] in {"insert", "update_postimage"}
    ):
        into.pop(change["id"], None)
        if change["_change_type"] in {"insert", "update_postimage"}:
            into[change["id"]] = {name: change[name] for name in SCHEMA.names}


def answer(rows: dict[int, Row], n: int, down: bool, per: bool) -> dict[tuple[Any, int], Row]:
    """Sort each group, take the first."""
    found: dict[tuple[Any, int], Row] = {}
    for group in {row["k"] for row in rows.values()} if per else {None}:
        mine = [row for row in rows.values() if not per or row["k"] == group]
        mine.sort(key=lambda row: ((-row["v"] if down else row["v"]), row["id"]))
        found |= {(group, row["id"]): row for row in mine[:n]}
    return found


def oracle(history: History, n: int, down: bool, per: bool) -> list[Row]:
    rows: dict[int, Row] = {}
    before: dict[tuple[Any, int], Row] = {}
    emitted: list[Row] = []
    for tick, changes in enumerate(history.ticks):
        folded(rows, changes)
        after = answer(rows, n, down, per)
        places = sorted(
            {*before, *after}, key=lambda place: (-1 if place[0] is None else place[0], place[1])
        )
        different = [
            change
            for place in places
            if before.get(place) != after.get(place)
            for change in changed(before.get(place), after.get(place))
        ]
        emitted += [{**change, "_tick": tick} for change in different]
        before = after
    return emitted


def run(
    kernel: TopKernel, history: History, bounds: Sequence[int], shard: int | None = None
) -> tuple[list[Row], MemoryState]:
    state, emitted = MemoryState(), []
    for first, stop in pairwise(
        [0, *sorted({cut for cut in bounds if cut < len(history.ticks)}), len(history.ticks)]
    ):
        rows = history.table(first, stop)
        if shard is not None:
            rows = rows.filter(pa.array(key_groups(encode_keys(rows, kernel.per)) % 2 == shard))
        result = restored(kernel).step(state := state.copy(), rows)
        result.validate(full=True)
        emitted += result.to_pylist()
    return emitted, state


@given(
    data=st.data(), n=st.integers(1, 4), down=st.booleans(), per=st.booleans(), small=st.booleans()
)
@settings(max_examples=examples(150))
def test_the_first_rows_of_each_group_at_every_tick(
    data: st.DataObject, n: int, down: bool, per: bool, small: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(row_store, "MAX_CHUNK_ROWS", 3)
            patch.setattr(row_store, "_SPLIT_CHUNK_ROWS", 2)
            patch.setattr(top_rows, "MAX_CHUNK_ROWS", 3)
        ticks = data.draw(st.integers(1, 7))
        history = data.draw(
            table_history(
                ticks, ids=12, keys=st.none() | st.integers(0, 1), key_type=pa.int64(), values=3
            )
        )
        kernel = TopKernel("t", SCHEMA, ["id"], n=n, by=[("v", down)], per=["k"] if per else [])
        expected = oracle(history, n, down, per)
        bounds = data.draw(cuts(ticks))
        assert run(kernel, history, [])[0] == expected
        emitted, state = run(kernel, history, bounds)
        assert emitted == expected
        parts = [run(kernel, history, bounds, shard) for shard in range(2)]
        assert sorted(map(repr, [row for emitted, _ in parts for row in emitted])) == sorted(
            map(repr, expected)
        )
        assert {
            name: value for _, part in parts for name, value in part.values.items()
        } == state.values
        check_settled(kernel, expected, history, n, down, per)


def check_settled(
    kernel: TopKernel, emitted: list[Row], history: History, n: int, down: bool, per: bool
) -> None:
    changes = pa.Table.from_pylist(emitted, kernel.output.append(pa.field("_tick", pa.int64())))
    settled = SettleKernel("s", SCHEMA, kernel.key).step(MemoryState(), changes)
    check_ticks(settled, ["id"])
    rows: dict[int, Row] = {}
    for changes_of_tick in history.ticks:
        folded(rows, changes_of_tick)
    assert sorted(map(repr, fold(settled, ["id"]).values())) == sorted(
        map(repr, answer(rows, n, down, per).values())
    )


def changes(rows: list[tuple[int, int, int, str]], tick: int) -> pa.Table:
    names = ("id", "k", "v", "_change_type")
    return pa.Table.from_pylist(
        [{**dict(zip(names, row, strict=True)), "_tick": tick} for row in rows],
        pa.schema([*SCHEMA, ("_change_type", pa.string()), ("_tick", pa.int64())]),
    )


def test_a_change_far_from_the_top_looks_at_little_of_a_large_group() -> None:
    kernel, state = TopKernel("t", SCHEMA, ["id"], n=3, by=[("v", True)]), CountingState()
    kernel.step(state, changes([(at, 0, 7, "insert") for at in range(5000)], 1))
    state.got = 0
    emitted = kernel.step(state, changes([(4999, 0, 7, "delete")], 2))
    assert (emitted.num_rows, state.got <= 3) == (0, True)
    emitted = kernel.step(state, changes([(0, 0, 7, "delete"), (6000, 0, 9, "insert")], 3))
    assert [(row["id"], row["_change_type"]) for row in emitted.to_pylist()] == [
        (0, "delete"),
        (6000, "insert"),
    ]
    assert state.got <= 8


class CountingState(MemoryState):
    """Counts the entries that are looked at."""

    got = 0

    def get(self, keys: Sequence[bytes], groups: Any = None) -> list[bytes | None]:
        self.got += len(keys)
        return super().get(keys, groups)


VALUES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.string(), st.text("ab\x00", max_size=4)),
    (
        pa.float64(),
        st.floats(allow_nan=False).filter(lambda value: value != 0 or math.copysign(1, value) > 0),
    ),
    (
        pa.decimal128(9, 2),
        st.integers(-(10**8), 10**8).map(lambda units: Decimal(units).scaleb(-2)),
    ),
    (pa.binary(), st.binary(max_size=4)),
    (pa.bool_(), st.booleans()),
]


@pytest.mark.parametrize(
    ("kind", "values"), VALUES, ids=lambda each: str(each) if isinstance(each, pa.DataType) else ""
)
@given(data=st.data())
@settings(max_examples=examples(40))
def test_the_order_of_bytes_is_the_order_of_rows(
    kind: pa.DataType, values: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    rows = data.draw(st.lists(st.tuples(st.none() | values, st.none() | values), max_size=8))
    down = data.draw(st.tuples(st.booleans(), st.booleans()))
    table = pa.table(
        {
            "a": pa.array([row[0] for row in rows], kind),
            "b": pa.array([row[1] for row in rows], kind),
            "id": pa.array(range(len(rows)), pa.int64()),
        }
    )
    by: list[Order] = [("a", down[0]), ("b", down[1])]
    ordered = order_bytes(table, by, ["id"])
    places = list(range(len(rows)))
    for column in (
        1,
        0,
    ):  # the last one first: sorting keeps what is equal in its order, reversed or not
        there = [at for at in places if rows[at][column] is not None]
        there.sort(key=[row[column] for row in rows].__getitem__, reverse=down[column])
        places = there + [at for at in places if rows[at][column] is None]
    timer_list_entries = ordered.to_pylist()
    assert sorted(range(len(rows)), key=lambda at: timer_list_entries[at]) == places
    first = order_sort_keys(ordered)
    assert all(first[one] <= first[other] for one, other in pairwise(places))


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(UnknownColumn, match="'w'"):
        TopKernel("t", SCHEMA, ["id"], n=1, by=[("w", True)])
    with pytest.raises(InputError, match="1 to 10,000"):
        TopKernel("t", SCHEMA, ["id"], n=0, by=[("v", True)])


@given(data=st.data())
@settings(max_examples=examples(40))
def test_different_rows(data: st.DataObject) -> None:
    ticks = data.draw(st.integers(1, 6))
    history = data.draw(
        table_history(ticks, keys=st.none() | st.integers(0, 1), key_type=pa.int64())
    )
    schema = pa.schema([SCHEMA.field("k"), SCHEMA.field("v")])
    state, emitted, rows = MemoryState(), [], dict[int, Row]()
    for tick in range(ticks):
        emitted.append(
            distinct_kernel("d", schema, ()).step(
                state, history.table(tick, tick + 1).drop_columns(["id"])
            )
        )
        folded(rows, history.ticks[tick])
        view = fold(pa.concat_tables(emitted), ["k", "v"])
        assert set(view) == {(row["k"], row["v"]) for row in rows.values()}


def test_ties_of_composite_keys_went_by_the_length_of_their_values() -> None:
    schema = pa.schema([("name", pa.string()), ("part", pa.string()), ("v", pa.int64())])
    names = ["Google", "Facebook", "", None, "Go", "Facebook"]
    rows = [
        {"name": name, "part": part, "v": 1, "_tick": 1, "_change_type": "insert"}
        for name, part in zip(names, ["a", "b", "c", "d", "e", "a"], strict=True)
    ]
    fields = [*schema, pa.field("_tick", pa.int64()), pa.field("_change_type", pa.string())]
    changes = pa.Table.from_pylist(rows, pa.schema(fields))

    def first(count: int, **options: Any) -> set[tuple[Any, Any]]:
        kernel = TopKernel("top", schema, ["name", "part"], n=count, by=[("v", True)], **options)
        emitted = kernel.step(MemoryState(), changes).to_pylist()
        return {(row["name"], row["part"]) for row in emitted}

    in_order = [
        (None, "d"), ("", "c"), ("Facebook", "a"), ("Facebook", "b"), ("Go", "e"), ("Google", "a"),
    ]  # fmt: skip
    for count in range(1, len(in_order) + 1):
        assert first(count) == set(in_order[:count])
    assert ("Google", "a") in first(3, key_by_length=True), "as state of earlier versions has it"
