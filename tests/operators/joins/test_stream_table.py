"""A stream joined with a table, against a dictionary."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import BugError, InputError, UnknownColumn
from headrace.operators.joins import row_store
from headrace.operators.joins.sides import ResultColumn, Side
from headrace.operators.joins.stream_table import StreamTableJoin
from headrace.testing.kernels import MemoryState
from tests.operators.histories import History, Row, Ticks
from tests.operators.joins.join_driver import (
    Drive,
    check_all_ways,
    cuts,
    in_key_order,
    restored,
    still,
    table_history,
)
from tests.short_forms import examples

COLUMNS: list[ResultColumn] = [
    ("left", "n", "n"),
    ("left", "k", "k"),
    ("right", "id", "id"),
    ("right", "v", "v"),
]


def rows_of(keys: st.SearchStrategy[Any], ticks: int) -> st.SearchStrategy[Ticks]:
    row = st.fixed_dictionaries({"n": st.integers(0, 9), "k": keys})
    return st.lists(st.lists(row, max_size=5), min_size=ticks, max_size=ticks)


def oracle(stream: History, table: History, on: str, how: str) -> list[Row]:
    """Apply the tick's changes to a dictionary, then look up each row."""
    there: dict[int, Row] = {}
    emitted: list[Row] = []
    for tick, (rows, changes) in enumerate(zip(stream.ticks, table.ticks, strict=True)):
        for change in sorted(
            changes, key=lambda change: change["_change_type"] in {"insert", "update_postimage"}
        ):
            there.pop(change["id"], None)
            if change["_change_type"] in {"insert", "update_postimage"}:
                there[change["id"]] = change
        found: list[Row] = []
        for row in rows:
            met = [
                there[number]
                for number in sorted(there)
                if row["k"] is not None and there[number][on] == row["k"]
            ]
            found += [{**row, "id": each["id"], "v": each["v"], "_tick": tick} for each in met]
            found += (
                [{**row, "id": None, "v": None, "_tick": tick}] if how == "left" and not met else []
            )
        emitted += in_key_order(found, [row["k"] for row in found], stream.schema.field("k").type)
    return emitted


@given(data=st.data())
@settings(max_examples=examples(50))
@pytest.mark.parametrize("on", ["id", "k"])
def test_each_row_meets_the_table_as_of_its_tick(on: str, data: st.DataObject) -> None:
    ticks = data.draw(st.integers(1, 6))
    text = on == "k" and data.draw(st.booleans())
    keys = st.none() | (st.sampled_from(["", "a", "b"]) if text else st.integers(0, 3))
    kind = pa.string() if text else pa.int64()
    table = data.draw(table_history(ticks, keys=keys, key_type=kind))
    stream = History(
        pa.schema([("n", pa.int64()), ("k", kind)]), data.draw(rows_of(keys, ticks)), is_table=False
    )
    how = data.draw(st.sampled_from(["inner", "left"]))

    def make() -> StreamTableJoin:
        return restored(
            StreamTableJoin(
                "j",
                Side(stream.schema, ("k",)),
                Side(table.schema, (on,), ("id",)),
                COLUMNS,
                how=how,
            )
        )

    drive = Drive([stream, table], [still(ticks), still(ticks)])
    check_all_ways(
        drive,
        make,
        oracle(stream, table, on, how),
        ("k", kind),
        [["k"], [on]],
        data.draw(cuts(ticks)),
    )


def test_many_rows_of_a_key_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_store, "MAX_CHUNK_ROWS", 8)
    monkeypatch.setattr(row_store, "_SPLIT_CHUNK_ROWS", 4)
    table = History(
        pa.schema([("id", pa.int64()), ("k", pa.int64()), ("v", pa.int64())]),
        [
            [
                {"id": number, "k": number % 2, "v": number, "_change_type": "insert"}
                for number in range(100)
            ],
            [{"id": 40, "k": 0, "v": 40, "_change_type": "delete"}],
            [],
        ],
        is_table=True,
    )
    stream = History(
        pa.schema([("n", pa.int64()), ("k", pa.int64())]),
        [[], [], [{"n": 1, "k": 0}]],
        is_table=False,
    )
    kernel = StreamTableJoin(
        "j", Side(stream.schema, ("k",)), Side(table.schema, ("k",), ("id",)), COLUMNS
    )
    for cut in ([], [1, 2]):
        emitted, _ = Drive([stream, table], [still(3), still(3)]).run(lambda: kernel, cut)
        assert [row["id"] for row in emitted] == [
            number for number in range(0, 100, 2) if number != 40
        ]


def test_state_goes_with_the_table_s_rows() -> None:
    table = History(
        pa.schema([("id", pa.int64()), ("k", pa.int64()), ("v", pa.int64())]),
        [
            [{"id": 1, "k": 1, "v": 1, "_change_type": "insert"}],
            [{"id": 1, "k": 1, "v": 1, "_change_type": "delete"}],
        ],
        is_table=True,
    )
    stream = History(
        pa.schema([("n", pa.int64()), ("k", pa.int64())]), [[{"n": 1, "k": 2}], []], is_table=False
    )
    _, state = Drive([stream, table], [still(2), still(2)]).run(
        lambda: StreamTableJoin(
            "j", Side(stream.schema, ("k",)), Side(table.schema, ("k",), ("id",)), COLUMNS
        ),
        [1],
    )
    assert state.values == {}


STREAM = Side(pa.schema([("n", pa.int64()), ("k", pa.int64())]), ("k",))
TABLE = Side(pa.schema([("k", pa.int64()), ("n", pa.string())]), ("k",), ("k",))


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(InputError, match=r'how="left"'):
        StreamTableJoin("j", STREAM, TABLE, [], how="full")
    with pytest.raises(
        InputError, match=r"Both inputs of step 'j' have a column 'n'(.|\n)*suffix="
    ):
        StreamTableJoin("j", STREAM, TABLE, [("left", "n", "n"), ("right", "n", "n")])
    with pytest.raises(InputError, match=r"joins 'n' \(int64\) with 'n' \(string\)"):
        StreamTableJoin("j", Side(STREAM.schema, ("n",)), Side(TABLE.schema, ("n",), ("k",)), [])
    with pytest.raises(UnknownColumn, match=r"right input of step 'j' has no column 'kk'"):
        StreamTableJoin("j", STREAM, Side(TABLE.schema, ("kk",), ("k",)), [])


def test_a_row_that_goes_and_was_not_there_is_a_bug_upstream() -> None:
    kernel = StreamTableJoin("j", STREAM, TABLE, [("left", "n", "n")])
    changes = pa.table({"k": [1], "n": ["x"], "_change_type": ["delete"], "_tick": [1]})
    with pytest.raises(BugError, match="step 'j'|Step 'j'"):
        kernel.step_timed(
            MemoryState(),
            [
                pa.table(
                    {
                        "n": pa.array([], pa.int64()),
                        "k": pa.array([], pa.int64()),
                        "_tick": pa.array([], pa.int64()),
                    }
                ),
                changes,
            ],
            [],
        )
