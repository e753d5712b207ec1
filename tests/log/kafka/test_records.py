"""Raw topics, whose only column is `value`: records of other producers are read unparsed, next to
Headrace's own.
"""

import pyarrow as pa
import pytest

from headrace.log.kafka.records import decode_raw_values, is_raw_topic
from headrace.log.topic_config import declared_topic
from headrace.log.values import TopicInfo
from headrace.types.json_codec import encode_rows


def topic(schema: str, *, is_table: bool = False) -> TopicInfo:
    return declared_topic(
        "t", schema, "value" if is_table else None, partitions=1, is_table=is_table, options={}
    )


def test_anything_is_a_value() -> None:
    info = topic("value STRING")
    (ours,) = encode_rows(pa.record_batch({"value": ['our "own"']}))
    given = [b'{"op": "c"}', None, b"plain", ours, b'{"value": 5}', b'{"value":null}', b"\xff\xfe"]
    decoded = decode_raw_values(info, given)
    assert decoded.batch.column(0).to_pylist() == [
        '{"op": "c"}',
        None,
        "plain",
        'our "own"',
        '{"value": 5}',
        None,
    ]
    assert (decoded.rows, decoded.misfits) == ([0, 1, 2, 3, 4, 5], {6: "it is no UTF-8"})


def test_bytes_are_always_a_value() -> None:
    info = topic("value BINARY")
    (ours,) = encode_rows(pa.record_batch({"value": pa.array([b"\x00ours"], pa.binary())}))
    decoded = decode_raw_values(info, [b"\xff\xfe", ours, None])
    assert decoded.batch.column(0).to_pylist() == [b"\xff\xfe", b"\x00ours", None]
    assert decoded.rows is None


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ("value STRING", True),
        ("value BINARY", True),
        ("value BIGINT", False),
        ("value STRING, x INT", False),
        ("text STRING", False),
    ],
)
def test_which_topics_do(schema: str, expected: bool) -> None:
    assert is_raw_topic(topic(schema)) is expected


def test_a_table_does_not() -> None:
    assert not is_raw_topic(topic("value STRING", is_table=True))
