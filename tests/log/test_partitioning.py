"""Key bytes, Kafka's murmur2 over them, and the partitions that follow."""

import time
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.columnar.murmur2 import murmur2, murmur2_array
from headrace.log.partitioning import key_bytes, partitions_by_key

# From the tests of Kafka's Java client.
KAFKA_HASHES = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize(("data", "signed"), KAFKA_HASHES.items())
def test_the_hash_is_that_of_kafkas_java_client(data: bytes, signed: int) -> None:
    assert murmur2(data) == signed & 0xFFFFFFFF
    assert (
        murmur2_array(pa.array([data] * 100, pa.binary())).tolist() == [signed & 0xFFFFFFFF] * 100
    )


def hashes(array: pa.Array) -> list[int]:
    return [murmur2(value or b"") for value in array.cast(pa.binary()).to_pylist()]


@settings(deadline=None)
@given(
    st.lists(
        st.none() | st.binary(max_size=40) | st.binary(min_size=200, max_size=300),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 5),
)
def test_a_column_hashes_as_its_values_do(values: list[bytes | None], cut: int) -> None:
    array = pa.array(values * 10, pa.binary())
    for part in (array, array.slice(cut), array.slice(cut, max(len(array) - 7, 0))):
        assert murmur2_array(part).tolist() == hashes(part)


@given(
    st.lists(
        st.none() | st.text(st.characters(exclude_categories=["Cs"])), min_size=30, max_size=60
    )
)
def test_texts_hash_as_their_utf_8(values: list[str | None]) -> None:
    array = pa.array(values, pa.string())
    assert murmur2_array(array).tolist() == hashes(array)


@pytest.mark.parametrize(
    "values", [[], [None], [b""], [None] * 50, [b""] * 50, [b"a"] * 24, [b"abcd"] * 24], ids=str
)
def test_small_and_empty_columns(values: list[bytes | None]) -> None:
    array = pa.array(values, pa.binary())
    result = murmur2_array(array)
    assert result.dtype == np.uint32
    assert result.tolist() == hashes(array)


def test_bytes_beneath_a_null_do_not_count() -> None:
    visible = pa.array([b"hidden", b"seen"] * 20, pa.binary())
    _, offsets, values = visible.buffers()
    validity = pa.array([0b10101010] * 5, pa.uint8()).buffers()[1]
    masked = pa.Array.from_buffers(pa.binary(), 40, [validity, offsets, values])
    assert masked.to_pylist() == [None, b"seen"] * 20
    assert murmur2_array(masked).tolist() == [murmur2(b""), murmur2(b"seen")] * 20


def test_one_long_key_among_many_short_ones_costs_only_its_own_bytes() -> None:
    short = [b"%d" % number for number in range(10_000)]
    array = pa.array([*short, b"x" * 1_000_003], pa.binary())
    start = time.perf_counter()
    result = murmur2_array(array)
    seconds = time.perf_counter() - start
    assert result[-1] == murmur2(b"x" * 1_000_003)
    assert result[:3].tolist() == [murmur2(each) for each in short[:3]]
    assert seconds < 2, "ten thousand rows times 250,000 words would take minutes"


def one_column(values: list[Any], kind: pa.DataType) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, kind)], names=["k"])


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (pa.string(), 'as "it" is', b'as "it" is'),
        (pa.string(), "ü", "ü".encode()),
        (pa.string(), "", b""),
        (pa.binary(), b"\x00\xff", b"\x00\xff"),
        (pa.int64(), -42, b"-42"),
        (pa.int8(), 7, b"7"),
        (pa.bool_(), True, b"true"),
        (pa.float64(), 1.0, b"1.0"),
        (pa.float64(), float("nan"), b'"NaN"'),
        (pa.float32(), 0.1, b"0.1"),
        (pa.decimal128(10, 2), Decimal("1.5"), b'"1.50"'),
        (pa.date32(), date(2024, 1, 2), b'"2024-01-02"'),
        (
            pa.timestamp("us", tz="UTC"),
            datetime(2024, 1, 2, 3, 4, 5, 6, UTC),
            b'"2024-01-02T03:04:05.000006Z"',
        ),
        (pa.timestamp("us"), datetime(2024, 1, 2), b'"2024-01-02T00:00:00.000000"'),  # noqa: DTZ001
    ],
)
def test_key_bytes(kind: pa.DataType, value: Any, expected: bytes) -> None:
    assert key_bytes(one_column([value], kind), ("k",)).to_pylist() == [expected]
    assert key_bytes(one_column([None, value], kind), ("k",)).to_pylist() == [None, expected]
    single = partitions_by_key(one_column([value], kind), ("k",), 1000)
    assert (
        single.tolist()
        == partitions_by_key(one_column([value] * 30, kind), ("k",), 1000)[:1].tolist()
    )
    assert single.tolist() == [(murmur2(expected) & 0x7FFFFFFF) % 1000]


def test_several_columns_are_a_json_array() -> None:
    batch = pa.record_batch({"region": ["eu", 'u"s', None], "id": [1, None, 3], "other": [0, 0, 0]})
    expected = [b'["eu",1]', b'["u\\"s",null]', b"[null,3]"]
    assert key_bytes(batch, ("region", "id")).to_pylist() == expected
    assert key_bytes(batch, ("id", "region")).to_pylist()[0] == b'[1,"eu"]'
    assert partitions_by_key(batch, ("region", "id"), 7).tolist() == [
        (murmur2(each) & 0x7FFFFFFF) % 7 for each in expected
    ]
    assert partitions_by_key(batch.slice(1, 1), ("region", "id"), 7).tolist() == [
        (murmur2(expected[1]) & 0x7FFFFFFF) % 7
    ]


@pytest.mark.parametrize("kind", [pa.string(), pa.int64(), pa.binary(), pa.date32()], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 100])
def test_rows_without_a_key_go_where_the_empty_key_goes(kind: pa.DataType, rows: int) -> None:
    empty = (murmur2(b"") & 0x7FFFFFFF) % 16
    assert partitions_by_key(one_column([None] * rows, kind), ("k",), 16).tolist() == [empty] * rows


def test_partitions_are_numbers_below_the_count() -> None:
    batch = one_column(list(range(1000)), pa.int64())
    for count in (2, 3, 16):
        partitions = partitions_by_key(batch, ("k",), count)
        assert partitions.dtype == np.int32
        assert set(partitions.tolist()) == set(range(count))
    assert partitions_by_key(batch, ("k",), 1).tolist() == [0] * 1000
    assert partitions_by_key(batch.slice(0, 0), ("k",), 4).tolist() == []


def test_kafkas_own_choice_of_partition() -> None:
    """Kafka's producer takes the hash without its sign bit, modulo the partitions; here -790332482
    becomes 1357151166.
    """
    assert partitions_by_key(one_column(["foobar"], pa.string()), ("k",), 10).tolist() == [6]


def test_a_million_keys_take_a_fraction_of_a_second() -> None:
    batch = pa.record_batch({"k": np.arange(1_000_000) * 7919})
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        partitions_by_key(batch, ("k",), 8)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1.0, "0.1 s on an idle core; a loop over rows would take several"
