"""The digest of rows: the same for the same rows in any order and split, and another one for any
other rows.
"""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.log.spark.digest import Digest, digest_rows

SCHEMA = pa.schema(
    [
        ("number", pa.int64()),
        ("small", pa.int8()),
        ("flag", pa.bool_()),
        ("real", pa.float64()),
        ("price", pa.decimal128(20, 3)),
        ("at", pa.timestamp("us", tz="UTC")),
        ("text", pa.string()),
        ("blob", pa.binary()),
        ("list", pa.list_(pa.string())),
        ("map", pa.map_(pa.string(), pa.int32())),
        ("part", pa.struct([("x", pa.int32()), ("y", pa.list_(pa.int16()))])),
    ]
)
texts = st.text(max_size=20)
rows = st.fixed_dictionaries(
    {
        "number": st.none() | st.integers(-(2**63), 2**63 - 1),
        "small": st.none() | st.integers(-128, 127),
        "flag": st.none() | st.booleans(),
        "real": st.none() | st.floats(allow_nan=False),
        "price": st.none() | st.decimals(-1000, 1000, places=3),
        "at": st.none() | st.datetimes(timezones=st.just(UTC)),
        "text": st.none() | texts,
        "blob": st.none() | st.binary(max_size=20),
        "list": st.none() | st.lists(st.none() | texts, max_size=3),
        "map": (
            st.none()
            | st.dictionaries(texts, st.none() | st.integers(0, 9), max_size=3).map(
                lambda each: list(each.items())
            )
        ),
        "part": (
            st.none()
            | st.fixed_dictionaries(
                {
                    "x": st.none() | st.integers(0, 9),
                    "y": st.none() | st.lists(st.integers(0, 9), max_size=3),
                }
            )
        ),
    }
)


def batch(values: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(values, SCHEMA)


@given(st.lists(rows, max_size=12), st.randoms(use_true_random=False), st.integers(0, 12))
def test_order_and_split_do_not_matter(values: list[dict[str, Any]], chance: Any, at: int) -> None:
    whole = batch(values)
    shuffled = chance.sample(values, len(values))
    assert digest_rows(batch(shuffled[:at])) + digest_rows(batch(shuffled[at:])) == digest_rows(
        whole
    )
    assert digest_rows(whole.slice(0, at)) + digest_rows(whole.slice(at)) == digest_rows(whole), (
        "also of slices, whose buffers begin elsewhere"
    )


@given(rows, rows)
def test_other_rows_have_another_digest(one: dict[str, Any], other: dict[str, Any]) -> None:
    same = batch([one]).equals(batch([other]))
    assert (digest_rows(batch([one])) == digest_rows(batch([other]))) == same


def pair(kind: pa.DataType, *values: Any) -> list[Digest]:
    return [
        digest_rows(pa.RecordBatch.from_arrays([pa.array([value], kind)], ["c"]))
        for value in values
    ]


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        (pa.string(), "", None),
        (pa.string(), "a", "a\0"),
        (pa.string(), "12345678", "12345678\0"),
        (pa.string(), "abcdefgh12345678", "12345678abcdefgh"),
        (pa.binary(), b"\0", b"\0\0"),
        (pa.bool_(), False, None),
        (pa.int32(), 0, None),
        (pa.decimal128(38, 0), Decimal(1), Decimal(2**64)),
        (pa.list_(pa.int32()), [1, 2], [2, 1]),
        (pa.list_(pa.int32()), [None], []),
        (pa.list_(pa.int32()), [], None),
        (pa.list_(pa.list_(pa.int32())), [[1], [2]], [[1, 2], []]),
        (
            pa.struct([("x", pa.int32()), ("y", pa.int32())]),
            {"x": 1, "y": None},
            {"x": None, "y": 1},
        ),
        (pa.struct([("x", pa.int32())]), {"x": None}, None),
        (
            pa.timestamp("us"),
            datetime(2026, 1, 1),  # noqa: DTZ001
            datetime(2026, 1, 1, 0, 0, 0, 1),  # noqa: DTZ001
        ),
    ],
)
def test_values_that_are_easily_confused(kind: pa.DataType, one: Any, other: Any) -> None:
    first, second = pair(kind, one, other)
    assert first != second


def test_a_row_twice_is_not_a_row_once_and_columns_are_not_exchanged() -> None:
    one = pa.record_batch({"a": [1], "b": [2]})
    assert digest_rows(one) + digest_rows(one) != digest_rows(one)
    assert digest_rows(pa.record_batch({"a": [2], "b": [1]})) != digest_rows(one)
    assert digest_rows(pa.record_batch({"a": [1, 3], "b": [2, 4]})) != digest_rows(
        pa.record_batch({"a": [1, 3], "b": [4, 2]})
    )


def test_a_column_added_to_the_topic_does_not_change_the_digest_of_older_rows() -> None:
    before = pa.record_batch({"a": [1, 2]})
    assert digest_rows(before.append_column("b", pa.nulls(2, pa.string()))) == digest_rows(before)


def test_a_digest_of_an_older_version_is_recognised() -> None:
    known = batch(
        [
            dict.fromkeys(SCHEMA.names)
            | {
                "number": 7,
                "text": "grüße",
                "list": ["a", None],
                "real": 0.5,
            }
        ]
    )
    assert digest_rows(known).text == "17f080c844a128a9be068d0f0b6ce78d", (
        "with another one, a batch repeated after an upgrade would be refused"
    )
