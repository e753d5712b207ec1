"""Fields of JSON texts, extracted from whole columns: what Python's parser gives, and NeedsSpark
wherever Spark might give something else.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.columnar.json_fields import NeedsSpark, field, floating_numbers, whole_numbers

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), max_size=5)
)
OBJECTS = st.dictionaries(
    st.sampled_from(["a", "b", "amount", "x amount", 'quo"te', "ü"]),
    PLAIN
    | st.lists(PLAIN, max_size=2)
    | st.dictionaries(st.sampled_from(["amount", "y"]), PLAIN, max_size=2),
)


def as_text(value: Any) -> str | None:
    return (
        None
        if value is None
        else ("true" if value else "false")
        if isinstance(value, bool)
        else str(value)
    )


@given(objects=st.lists(OBJECTS, max_size=8), compact=st.booleans(), ascii_only=st.booleans())
def test_a_field_is_what_the_parser_says(
    objects: list[dict[str, Any]], compact: bool, ascii_only: bool
) -> None:
    texts = pa.array(
        [
            json.dumps(each, separators=(",", ":") if compact else None, ensure_ascii=ascii_only)
            for each in objects
        ],
        pa.string(),
    )
    if any(isinstance(each.get("amount"), list | dict) for each in objects):
        with pytest.raises(NeedsSpark):
            field(texts, "amount", floating=False)
    else:
        assert field(texts, "amount", floating=False).to_pylist() == [
            as_text(each.get("amount")) for each in objects
        ]


@pytest.mark.parametrize(
    "text",
    [
        '{"amount":1',
        '{"amount":1}x',
        "{'amount':1}",
        '{"amount":1,"amount":2}',
        '{"amount":1.50}',
        '{"amount":-0}',
        '{"amount":1e3}',
        '{"amount":{}}',
        '{"amount":NaN}',
        "[1]",
        "5",
        "",
        '{"amount":' + "9" * 30 + "}",
    ],
)
def test_paths_that_might_differ_from_spark_are_left_to_spark(text: str) -> None:
    with pytest.raises(NeedsSpark):
        field(pa.array(['{"amount":1}', text]), "amount", floating=False)


def test_numbers() -> None:
    texts = field(
        pa.array(
            [
                '{"amount":1.50}',
                '{"amount":-2}',
                None,
                "{}",
                '{"amount":null,"b":[1]}',
                '{"amount":2e3, "b":1}',
            ]
        ),
        "amount",
        floating=True,
    )
    assert floating_numbers(texts).to_pylist() == [1.5, -2.0, None, None, None, 2000.0]
    assert whole_numbers(pa.array(["5", "-17", None]), pa.int64()).to_pylist() == [5, -17, None]
    for wrong in ("x", "1.5", "true", ""):
        with pytest.raises(NeedsSpark):
            whole_numbers(pa.array([wrong]), pa.int64())
    with pytest.raises(NeedsSpark):
        whole_numbers(pa.array(["3000000000"]), pa.int32())
