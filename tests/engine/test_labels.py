"""Each shard's label leads to the partition of its number."""

from __future__ import annotations

import pytest

from headrace.engine.shuffle import labels, spark_hash


def test_known_hashes_of_spark() -> None:
    # SELECT hash(CAST(n AS INT)) in Spark 4
    assert [spark_hash(n) for n in (0, 1, 2, 42)] == [933211791, -559580957, 1765031574, 29417773]


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 16, 128])
def test_there_is_one_label_for_each_shard(shards: int) -> None:
    assert [spark_hash(label) % shards for label in labels(shards)] == list(range(shards))
