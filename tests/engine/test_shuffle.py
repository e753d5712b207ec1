"""The shuffle: each shard's label leads to the partition of its number, and all rows arrive at
shards and topics, in blobs of bounded size.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from headrace.engine.context import TopicTarget
from headrace.engine.outputs import PackForTopic, count_tick_rows
from headrace.engine.shard import pack_by_partition
from headrace.engine.shuffle import blobs_stay_here, labels, pack, spark_hash, to_blob, unpack

ROWS = 1_000
BOUND = 20_000


def test_known_hashes_of_spark() -> None:
    # SELECT hash(CAST(n AS INT)) in Spark 4
    assert [spark_hash(n) for n in (0, 1, 2, 42)] == [933211791, -559580957, 1765031574, 29417773]


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 16, 128])
def test_there_is_one_label_for_each_shard(shards: int) -> None:
    assert [spark_hash(label) % shards for label in labels(shards)] == list(range(shards))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("headrace.columnar.buffers", "headrace.engine.shuffle"):
        monkeypatch.setattr(f"{module}.MAX_BATCH_BYTES", BOUND)


def rows() -> pa.Table:
    return pa.table(
        {
            "n": pa.array(range(ROWS)),
            "text": pa.array(["x" * 500] * ROWS),
            "_tick": pa.array([1] * ROWS),
            "_partition": pa.array([n % 3 for n in range(ROWS)], pa.int32()),
        }
    )


def arrived(packed: list[pa.RecordBatch]) -> list[int]:
    found: list[int] = []
    for label in {label for batch in packed for label in batch.column("label").to_pylist()}:
        _, ports = unpack(
            batch.filter(pa.array(np.array(batch.column("label")) == label)) for batch in packed
        )
        found += [
            number
            for tables in ports.values()
            for table in tables
            for number in table["n"].to_pylist()
        ]
    return sorted(found)


def largest_blob(packed: list[pa.RecordBatch]) -> int:
    return max(len(blob) for batch in packed for blob in batch.column("blob").to_pylist())


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("size", [7, ROWS])
def test_large_rows_go_to_their_shards_in_small_blobs(size: int) -> None:
    packed = list(pack(0, rows().to_batches(max_chunksize=size), ["n"], 3))
    assert arrived(packed) == list(range(ROWS))
    assert largest_blob(packed) < 2 * BOUND


@pytest.mark.usefixtures("small_pieces")
def test_what_is_combined_goes_in_small_blobs_too() -> None:
    packed = list(
        pack(
            0,
            rows().to_batches(),
            ["n"],
            2,
            lambda given: pa.concat_tables([given.slice(0, 100), given.slice(100)]),
        )
    )
    assert arrived(packed) == list(range(ROWS))
    assert largest_blob(packed) < 2 * BOUND


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("key", [(), ("n",)])
def test_no_row_of_a_topic_vanishes_where_they_do_not_fit_into_one_batch(
    key: tuple[str, ...],
) -> None:
    target = TopicTarget("t", key, 4)
    packed = list(pack_by_partition(0, target, rows(), 2))
    assert arrived(packed) == list(range(ROWS))
    assert largest_blob(packed) < 2 * BOUND
    assert arrived(list(PackForTopic(target, 2)(rows().to_batches(max_chunksize=9)))) == list(
        range(ROWS)
    )


def unmade_text(rows: int, bytes_a_row: int) -> pa.Array:
    """Text of zeros that nobody reads: its memory is only allocated when it is read."""
    offsets = (np.arange(rows + 1) * bytes_a_row).astype(np.int32)
    return pa.StringArray.from_buffers(
        rows, pa.py_buffer(offsets), pa.py_buffer(np.zeros(rows * bytes_a_row, np.uint8))
    )


def test_rows_with_more_than_two_gib_of_text_are_all_counted_to_their_ticks() -> None:
    text = unmade_text(1_100, 1_000_000)
    table = pa.table(
        {
            "text": pa.chunked_array([text, text]),
            "n": pa.array(range(2_200)),
            "_tick": pa.array([1] * 1_000 + [2] * 1_200),
        }
    )
    assert count_tick_rows(table, TopicTarget("t", (), 1)) == {"0": [[1, 1_000], [2, 1_200]]}
    counts = count_tick_rows(table, TopicTarget("t", ("n",), 3))
    assert sum(count for found in counts.values() for _, count in found) == 2_200


def test_large_blobs_of_text_are_compressed_where_they_leave_the_process() -> None:
    batch = pa.record_batch({"text": ["the same text again and again"] * 100_000})
    sent = to_blob(batch)
    with blobs_stay_here():
        kept = to_blob(batch)
    assert len(sent) < 0.5 * len(kept)
    assert to_blob(batch) == sent
    for blob in (sent, kept):
        assert pa.ipc.open_stream(blob).read_all().to_batches() == [batch]
