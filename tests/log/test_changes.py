"""Headers and changes: the columns that a topic's own rows do not have."""

from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from headrace.columnar.columns import CHANGE_TYPES, HEADERS_TYPE
from headrace.errors import BadRows
from headrace.log.rows import (
    check_changes,
    to_batch,
    tombstones,
    upserts,
    with_change_type,
    with_headers,
)
from headrace.types.schema import parse_schema, table_schema

DECLARED = parse_schema("id BIGINT, name VARCHAR(5) NOT NULL, note STRING")
TABLE = table_schema(DECLARED, ("id",))
PAIRS = table_schema(parse_schema("region STRING, note STRING, id BIGINT"), ("id", "region"))


def batch(rows: int) -> pa.RecordBatch:
    return to_batch(
        [{"id": number, "name": "n", "note": None} for number in range(rows)],
        DECLARED,
        topic="customers",
    )


def test_headers_are_one_entry_a_row() -> None:
    with_them = with_headers(batch(4), [[("trace", b"1"), ("trace", None)], {"a": b"x"}, None, []])
    assert with_them.schema.field("_headers").type == HEADERS_TYPE
    expected = [
        [{"key": "trace", "value": b"1"}, {"key": "trace", "value": None}],
        [{"key": "a", "value": b"x"}],
        None,
        [],
    ]
    assert with_them.column("_headers").to_pylist() == expected
    with_them.validate(full=True)
    plain = batch(2)
    assert with_headers(plain, None) is plain


@pytest.mark.parametrize(
    "headers",
    [
        [None],
        [None] * 3,
        [[("a", "text")], None],
        [[(b"a", b"x")], None],
        [[("a",)], None],
        [["ab"], None],
        [{"a": 1}, None],
    ],
)
def test_headers_that_do_not_fit_are_refused(headers: Any) -> None:
    with pytest.raises(BadRows, match="header"):
        with_headers(batch(2), headers)


def test_upserts_are_changes_of_the_stored_schema() -> None:
    changes = upserts([{"id": 1, "name": "Ada", "note": None}], TABLE, topic="customers")
    assert changes.schema.equals(TABLE, check_metadata=True)
    assert changes.to_pylist() == [
        {"id": 1, "name": "Ada", "note": None, "_change_type": "update_postimage"}
    ]
    check_changes(changes)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"id": None, "name": "Ada", "note": None}, "column 'id': it is null"),
        (
            {"id": 1, "name": None, "note": None},
            "column 'name': it is null, but the column is NOT NULL",
        ),
        ({"id": 1, "name": "Adalbert", "note": None}, "column 'name': it has 8 characters"),
        ({"id": 1, "name": "Ada"}, "the column 'note' is missing"),
        (
            {"id": 1, "name": "Ada", "note": None, "_change_type": "insert"},
            "no column '_change_type'",
        ),
    ],
)
def test_upserts_keep_to_the_declaration(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRows, match="customers") as caught:
        upserts(row, TABLE, topic="customers")
    assert reason in caught.value.message
    with pytest.raises(BadRows, match="customers"):
        upserts(pa.Table.from_pylist([row]), TABLE, topic="customers")


def test_changes_that_users_write_themselves_are_checked() -> None:
    rows = [
        {"id": 1, "name": "Ada", "note": None, "_change_type": change} for change in CHANGE_TYPES
    ]
    check_changes(to_batch(rows, TABLE, topic="customers"))
    check_changes(
        to_batch(
            {"id": 1, "name": None, "note": None, "_change_type": "delete"},
            TABLE,
            topic="customers",
        )
    )
    check_changes(to_batch([], TABLE, topic="customers"))


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        ("updated", "Ada", "Row 1 for customers, column '_change_type': 'updated' is not a change"),
        ("DELETE", "Ada", "'DELETE' is not a change"),
        ("inser", "Ada", "did you mean 'insert'"),
        (
            "insert",
            None,
            "Row 1 for customers, column 'name': it is null, but the column is NOT NULL",
        ),
        ("update_preimage", None, "column 'name': it is null"),
    ],
)
def test_changes_that_do_not_exist_are_refused(change: str, name: str | None, reason: str) -> None:
    rows = [
        {"id": 1, "name": None, "note": None, "_change_type": "delete"},
        {"id": 1, "name": name, "note": None, "_change_type": change},
    ]
    with pytest.raises(BadRows) as caught:
        check_changes(to_batch(rows, TABLE, topic="customers"), topic="customers")
    assert reason in caught.value.message


def test_a_change_without_a_type_is_refused() -> None:
    with pytest.raises(BadRows, match="column '_change_type': it is null"):
        to_batch(
            {"id": 1, "name": "Ada", "note": None, "_change_type": None}, TABLE, topic="customers"
        )


def test_the_change_type_is_set_or_replaced() -> None:
    first = with_change_type(batch(2), "insert")
    assert first.schema.names == TABLE.names
    assert with_change_type(first, "delete").column("_change_type").to_pylist() == [
        "delete",
        "delete",
    ]
    assert with_change_type(batch(0), "insert").num_rows == 0


@pytest.mark.parametrize(
    "keys",
    [
        [1, 2],
        (1, 2),
        iter([1, 2]),
        [{"id": 1}, {"id": 2}],
        pa.array([1, 2]),
        pa.chunked_array([[1], [2]]),
        pa.table({"id": [1, 2]}),
        pa.record_batch({"id": pa.array([1, 2], pa.int8())}),
        pd.DataFrame({"id": [1, 2]}),
    ],
)
def test_tombstones_hold_the_key_alone(keys: Any) -> None:
    changes = tombstones(keys, TABLE, ("id",), topic="customers")
    changes.validate(full=True)
    assert changes.schema.equals(TABLE, check_metadata=True)
    assert changes.to_pylist() == [
        {"id": number, "name": None, "note": None, "_change_type": "delete"} for number in (1, 2)
    ]
    check_changes(changes)


@pytest.mark.parametrize(
    "keys",
    [(5, "eu"), [(5, "eu")], [[5, "eu"]], {"region": "eu", "id": 5}, [{"id": 5, "region": "eu"}]],
)
def test_tombstones_of_several_columns_follow_the_key(keys: Any) -> None:
    changes = tombstones(keys, PAIRS, ("id", "region"), topic="pairs")
    assert changes.to_pylist() == [
        {"region": "eu", "note": None, "id": 5, "_change_type": "delete"}
    ]


def test_one_plain_value_is_one_key() -> None:
    assert tombstones(7, TABLE, ("id",), topic="customers").column("id").to_pylist() == [7]
    texts = table_schema(parse_schema("code STRING, n INT"), ("code",))
    assert tombstones("abc", texts, ("code",), topic="t").column("code").to_pylist() == ["abc"]
    assert tombstones({"code": "abc"}, texts, ("code",), topic="t").column("code").to_pylist() == [
        "abc"
    ]
    assert tombstones([], texts, ("code",), topic="t").num_rows == 0


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["1"], "Row 0 for customers, column 'id': '1' is a str"),
        ([1, None], "Row 1 for customers, column 'id': it is null"),
        ([{"id": 1, "name": "Ada"}], "no column 'name'"),
        ([{"name": "Ada"}], "no column 'name'"),
        ([{}], "the column 'id' is missing"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: Any, reason: str) -> None:
    with pytest.raises(BadRows) as caught:
        tombstones(keys, TABLE, ("id",), topic="customers")
    assert reason in caught.value.message


@pytest.mark.parametrize("keys", [[5], [(5,)], [(5, "eu", 1)], ["eu"]])
def test_keys_of_several_columns_must_have_them_all(keys: Any) -> None:
    with pytest.raises(BadRows, match="does not have the columns id, region"):
        tombstones(keys, PAIRS, ("id", "region"), topic="pairs")
