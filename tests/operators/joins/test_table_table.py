"""Two tables joined into a table, against the same query over two dictionaries, at every tick."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.columnar.keys import encode_keys
from headrace.errors import BugError, InputError
from headrace.operators.changelog import check_ticks, fold
from headrace.operators.joins import row_store
from headrace.operators.joins.sides import ResultColumn, SettleKernel, Side
from headrace.operators.joins.table_table import TableTableJoin
from headrace.testing.kernels import MemoryState
from tests.operators.histories import History, Row, changed
from tests.operators.joins.join_driver import (
    Drive,
    check_all_ways,
    cuts,
    restored,
    still,
    table_history,
)
from tests.short_forms import examples

Tables = tuple[dict[int, Row], dict[int, Row]]
SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.int64()), ("v", pa.int64())])


def join(left_on: str, right_on: str, how: str) -> TableTableJoin:
    columns: list[ResultColumn] = [
        ("key", left_on, "k"),
        ("left", "id", "lid"),
        ("left", "v", "lv"),
        ("right", "id", "rid"),
        ("right", "v", "rv"),
    ]
    return restored(
        TableTableJoin(
            "j",
            Side(SCHEMA, (left_on,), ("id",)),
            Side(SCHEMA, (right_on,), ("id",)),
            columns,
            how=how,
        )
    )


def folded(into: dict[int, Row], changes: list[Row]) -> None:
    for change in sorted(
        changes, key=lambda change: change["_change_type"] in {"insert", "update_postimage"}
    ):
        into.pop(change["id"], None)
        if change["_change_type"] in {"insert", "update_postimage"}:
            into[change["id"]] = change


def query(tables: Tables, left_on: str, right_on: str, how: str) -> list[Row]:
    """What a database would answer."""
    lefts, rights = tables
    pairs = [
        (left, right)
        for left in lefts.values()
        for right in rights.values()
        if left[left_on] is not None and left[left_on] == right[right_on]
    ]
    rows = [shown(left[left_on], left, right) for left, right in pairs]
    if how in {"left", "full"}:
        rows += [
            shown(left[left_on], left, None)
            for left in lefts.values()
            if left["id"] not in {each["id"] for each, _ in pairs}
        ]
    if how in {"right", "full"}:
        rows += [
            shown(right[right_on], None, right)
            for right in rights.values()
            if right["id"] not in {each["id"] for _, each in pairs}
        ]
    return rows


def shown(key: Any, left: Row | None, right: Row | None) -> Row:
    return {
        "k": key,
        "lid": left and left["id"],
        "lv": left and left["v"],
        "rid": right and right["id"],
        "rv": right and right["v"],
    }


def oracle(
    histories: tuple[History, History], kernel: TableTableJoin, left_on: str, right_on: str
) -> list[Row]:
    """The difference between the query's answers before and after each tick, join key by join
    key.
    """
    by = ["k", *(name for name in ("lid", "rid") if name in kernel.key)]
    tables: Tables = ({}, {})
    before: dict[tuple[Any, ...], Row] = {}
    emitted: list[Row] = []
    for tick in range(len(histories[0].ticks)):
        for table, history in zip(tables, histories, strict=True):
            folded(table, history.ticks[tick])
        after = {
            tuple(row[name] for name in by): row
            for row in query(tables, left_on, right_on, kernel.how)
        }
        key_pairs = sorted(
            {*before, *after},
            key=lambda key_pair: [-1 if part is None else part for part in key_pair],
        )
        changes = [
            change
            for key_pair in key_pairs
            if before.get(key_pair) != after.get(key_pair)
            for change in changed(before.get(key_pair), after.get(key_pair))
        ]
        keys = encode_keys(
            pa.table({"k": pa.array([row["k"] for row in changes], pa.int64())}), ["k"]
        ).to_pylist()
        emitted += [
            {**changes[at], "_tick": tick}
            for at in sorted(range(len(changes)), key=lambda at: keys[at])
        ]
        before = after
    return emitted


def check_settled(
    emitted: list[Row],
    kernel: TableTableJoin,
    histories: tuple[History, History],
    left_on: str,
    right_on: str,
) -> None:
    """By the result's key there is one change a tick, and at every tick the changes amount to the
    query's answer.
    """
    rows = pa.Table.from_pylist(emitted, kernel.output.append(pa.field("_tick", pa.int64())))
    settled = SettleKernel("s", kernel.output.remove(len(kernel.output) - 1), kernel.key).step(
        MemoryState(), rows
    )
    check_ticks(settled, kernel.key)
    tables: Tables = ({}, {})
    for tick in range(len(histories[0].ticks)):
        for table, history in zip(tables, histories, strict=True):
            folded(table, history.ticks[tick])
        view = fold(settled.filter(pa.compute.less_equal(settled["_tick"], tick)), kernel.key)
        answer = query(tables, left_on, right_on, kernel.how)
        assert sorted(map(repr, view.values())) == sorted(map(repr, answer))


def check(
    histories: tuple[History, History], left_on: str, right_on: str, how: str, cut: list[int]
) -> None:
    kernel = join(left_on, right_on, how)
    expected = oracle(histories, kernel, left_on, right_on)
    ticks = len(histories[0].ticks)
    drive = Drive(histories, [still(ticks), still(ticks)])
    state = check_all_ways(
        drive,
        lambda: join(left_on, right_on, how),
        expected,
        ("k", pa.int64()),
        [[left_on], [right_on]],
        cut,
    )
    check_settled(expected, kernel, histories, left_on, right_on)
    tables: Tables = ({}, {})
    for table, history in zip(tables, histories, strict=True):
        for changes in history.ticks:
            folded(table, changes)
    if all(
        row[on] is None
        for table, on in zip(tables, (left_on, right_on), strict=True)
        for row in table.values()
    ):
        assert state.values == {}, "nothing is kept of rows that are gone, or that have no key"


ways = [
    (left, right, how)
    for left in ("id", "k")
    for right in ("id", "k")
    for how in ("inner", "left", "right", "full")
]


@pytest.mark.parametrize(("left_on", "right_on", "how"), ways)
@given(data=st.data())
@settings(max_examples=examples(15))
def test_the_result_is_the_query_s_answer_at_every_tick(
    left_on: str, right_on: str, how: str, data: st.DataObject
) -> None:
    ticks = data.draw(st.integers(1, 6))
    keys = st.none() | st.integers(0, 2)
    histories = tuple(
        data.draw(table_history(ticks, ids=4, keys=keys, key_type=pa.int64())) for _ in range(2)
    )
    check(histories, left_on, right_on, how, data.draw(cuts(ticks)))  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["inner", "left", "full"])
@given(data=st.data())
@settings(max_examples=examples(15))
def test_many_rows_of_a_key_in_chunks(how: str, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_store, "MAX_CHUNK_ROWS", 3)
        patch.setattr(row_store, "_SPLIT_CHUNK_ROWS", 2)
        ticks = data.draw(st.integers(2, 6))
        keys = st.integers(0, 1)
        histories = tuple(
            data.draw(table_history(ticks, ids=9, keys=keys, key_type=pa.int64())) for _ in range(2)
        )
        check(histories, "k", "k", how, list(range(1, ticks)))  # type: ignore[arg-type]


def rows(*changes: tuple[int, int | None, int, str, int]) -> pa.Table:
    names = ("id", "k", "v", "_change_type", "_tick")
    kinds = (pa.int64(), pa.int64(), pa.int64(), pa.string(), pa.int64())
    columns = list(zip(*changes, strict=True)) or [()] * 5
    return pa.table(
        {
            name: pa.array(column, kind)
            for name, column, kind in zip(names, columns, kinds, strict=True)
        }
    )


def test_text_keys_of_several_columns() -> None:
    schema = pa.schema([("a", pa.string()), ("b", pa.int64()), ("x", pa.string())])
    columns: list[ResultColumn] = [
        ("left", "a", "a"),
        ("left", "b", "b"),
        ("right", "b", "other"),
        ("right", "a", "a2"),
        ("right", "x", "x"),
    ]
    kernel = TableTableJoin(
        "j", Side(schema, ("x",), ("a", "b")), Side(schema, ("x",), ("a", "b")), columns
    )
    assert kernel.key == ("a", "b", "a2", "other")
    changes = pa.table(
        {
            "a": ["p", "q", "p"],
            "b": [1, 1, 2],
            "x": ["t", "t", "u"],
            "_change_type": ["insert"] * 3,
            "_tick": [1, 1, 2],
        }
    )
    state = MemoryState()
    emitted = kernel.step_timed(state, [changes, changes], []).to_pylist()
    assert sorted(
        (row["a"], row["b"], row["a2"], row["other"], row["_tick"]) for row in emitted
    ) == [
        ("p", 1, "p", 1, 1),
        ("p", 1, "q", 1, 1),
        ("p", 2, "p", 2, 2),
        ("q", 1, "p", 1, 1),
        ("q", 1, "q", 1, 1),
    ]
    gone = (
        changes.slice(0, 1)
        .set_column(3, "_change_type", pa.array(["delete"]))
        .set_column(4, "_tick", pa.array([3]))
    )
    emitted = kernel.step_timed(state, [gone, gone.slice(0, 0)], []).to_pylist()
    assert sorted((row["a2"], row["_change_type"]) for row in emitted) == [
        ("p", "delete"),
        ("q", "delete"),
    ]


def test_an_update_that_no_one_sees_emits_nothing() -> None:
    kernel = TableTableJoin(
        "j",
        Side(SCHEMA, ("k",), ("id",)),
        Side(SCHEMA, ("k",), ("id",)),
        [("left", "id", "l"), ("right", "id", "r")],
    )
    left = rows(
        (1, 7, 0, "insert", 1), (1, 7, 0, "update_preimage", 2), (1, 7, 5, "update_postimage", 2)
    )
    emitted = kernel.step_timed(MemoryState(), [left, rows((2, 7, 0, "insert", 1))], [])
    assert emitted["_tick"].to_pylist() == [1]


def test_a_row_that_moves_between_keys_is_one_update_once_settled() -> None:
    kernel = join("k", "k", "left")
    left = rows(
        (1, 7, 0, "insert", 1), (1, 7, 0, "update_preimage", 2), (1, 8, 0, "update_postimage", 2)
    )
    emitted = kernel.step_timed(MemoryState(), [left, rows()], [])
    assert emitted["_change_type"].to_pylist() == ["insert", "delete", "insert"]
    settled = SettleKernel("s", kernel.output.remove(5), kernel.key).step(
        MemoryState(), emitted.take([0, 2, 1])
    )
    assert settled["_change_type"].to_pylist() == ["insert", "update_preimage", "update_postimage"]


def test_two_rows_of_one_key_in_a_tick_cannot_be_settled() -> None:
    twice = rows((1, 7, 0, "insert", 1), (1, 8, 0, "insert", 1))
    with pytest.raises(BugError, match="several rows of one key"):
        SettleKernel("s", SCHEMA, ("id",)).step(MemoryState(), twice)


def test_the_result_s_key() -> None:
    assert join("k", "k", "inner").key == ("lid", "rid")
    assert join("k", "id", "left").key == ("lid",)
    assert join("id", "k", "right").key == ("rid",)
    assert join("k", "id", "full").key == ("lid", "rid")
    assert join("id", "id", "full").key == ("k",)
    with pytest.raises(InputError, match="lacks 'id', which is part of its key"):
        TableTableJoin(
            "j",
            Side(SCHEMA, ("k",), ("id",)),
            Side(SCHEMA, ("k",), ("id",)),
            [("left", "id", "l"), ("right", "v", "v")],
        )


KINDS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.float64(), [math.nan, -math.nan, 0.0, -0.0, 1.5, -1.5, math.inf]),
    (pa.float32(), [math.nan, 0.0, -0.0, 1.5]),
    (pa.string(), ["", "a", "a\x00", "\x00", "ä", "ab"]),
    (pa.binary(), [b"", b"\x00", b"\x01", b"\x01\x00", b"\xff\xff\xff\xff"]),
    (pa.bool_(), [True, False]),
    (pa.decimal128(38, 2), [Decimal("-1.00"), Decimal("0.00"), Decimal("1.10"), Decimal(10**35)]),
    (pa.date32(), [date(1, 1, 1), date(1970, 1, 1), date(9999, 12, 31)]),
    (
        pa.timestamp("us", "UTC"),
        [
            datetime(1, 1, 1, tzinfo=UTC),
            datetime(1970, 1, 1, tzinfo=UTC),
            datetime(9999, 12, 31, tzinfo=UTC),
        ],
    ),
    (pa.int8(), [-128, -1, 0, 127]),
]


def as_key(value: Any) -> Any:
    """Zeros are equal, and so are NaNs, as Spark has it."""
    return (
        "NaN"
        if isinstance(value, float) and math.isnan(value)
        else 0.0
        if value == 0 and isinstance(value, float)
        else value
    )


@pytest.mark.parametrize(("kind", "values"), KINDS, ids=[str(kind) for kind, _ in KINDS])
@given(data=st.data())
@settings(max_examples=examples(12))
def test_keys_of_every_type_and_of_two_columns(
    kind: pa.DataType, values: list[Any], data: st.DataObject
) -> None:
    schema = pa.schema([("id", pa.int64()), ("a", kind), ("b", kind)])
    side = Side(schema, ("a", "b"), ("id",))
    kernel = restored(
        TableTableJoin("j", side, side, [("left", "id", "lid"), ("right", "id", "rid")], how="full")
    )
    keys, state = st.none() | st.sampled_from(values), MemoryState()
    tables: list[dict[int, tuple[Any, Any]]] = [{}, {}]
    emitted: list[pa.Table] = []
    for tick in range(data.draw(st.integers(1, 5))):
        inputs = [
            changed_rows(
                schema,
                table,
                data.draw(
                    st.dictionaries(
                        st.integers(0, 3), st.none() | st.tuples(keys, keys), max_size=3
                    )
                ),
                tick,
            )
            for table in tables
        ]
        emitted.append(kernel.step_timed(state, inputs, []))
        pairs = [
            (left, right)
            for left, mine in tables[0].items()
            for right, other in tables[1].items()
            if None not in mine
            and None not in other
            and tuple(map(as_key, mine)) == tuple(map(as_key, other))
        ]
        alone = [(left, None) for left in tables[0] if left not in {pair[0] for pair in pairs}]
        others = [(None, right) for right in tables[1] if right not in {pair[1] for pair in pairs}]
        settled = SettleKernel("s", kernel.output.remove(2), kernel.key).step(
            MemoryState(), pa.concat_tables(emitted)
        )
        assert sorted(fold(settled, kernel.key), key=str) == sorted(
            [*pairs, *alone, *others], key=str
        )


def changed_rows(
    schema: pa.Schema,
    table: dict[int, tuple[Any, Any]],
    wanted: dict[int, tuple[Any, Any] | None],
    tick: int,
) -> pa.Table:
    """Bring a table to what is wanted: its changes."""
    made: list[Row] = []
    for number, after in wanted.items():
        before = table.pop(number, None)
        rows = [each and {"id": number, "a": each[0], "b": each[1]} for each in (before, after)]
        made += changed(*rows) if before is not None or after is not None else []
        table |= {number: after} if after is not None else {}
    return pa.Table.from_pylist(
        [{**row, "_tick": tick} for row in made],
        pa.schema([*schema, ("_change_type", pa.string()), ("_tick", pa.int64())]),
    )
