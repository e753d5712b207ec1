"""The partition of each row of an append: named by the caller, chosen by the user's partitioner, by
key, or round-robin.

Keys are hashed as Kafka's Java client hashes them (murmur2 over the key's bytes), so the rows of a
topic are in the same partitions on the embedded log, on Kafka, and when Kafka's own clients append
them. Producers, transactions and staging of both backends use a `PartitionAssigner`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.columnar.murmur2 import murmur2, murmur2_array
from headrace.errors import BadPartition
from headrace.log.values import Partitioner, TopicInfo
from headrace.types.json_codec import array_text, json_text

PartitionNumbers = npt.NDArray[np.int32]
"""One partition number per row."""


class PartitionAssigner:
    """Chooses the partition of each row, for one producer or transaction.

    Round-robin goes on from one append to the next.
    """

    def __init__(self, partitioner: Partitioner | None = None) -> None:
        self._partitioner = partitioner
        self._next_partition = 0

    def assign(
        self, info: TopicInfo, batch: pa.RecordBatch, partition: int | None
    ) -> PartitionNumbers:
        """The partition of each row of a batch; `partition`, if given, is that of all rows."""
        rows = batch.num_rows
        if partition is not None:
            check_partition(info, partition)
            return np.full(rows, partition, np.int32)
        if self._partitioner is not None:
            return _check_chosen(self._partitioner(batch, info.partitions), info, rows)
        if info.key:
            return partitions_by_key(batch, info.key, info.partitions)
        first = self._next_partition
        self._next_partition = (first + rows) % info.partitions
        return ((first + np.arange(rows)) % info.partitions).astype(np.int32)


def check_partition(info: TopicInfo, partition: int) -> None:
    """Refuse a partition that the topic does not have."""
    if not 0 <= partition < info.partitions:
        raise BadPartition(
            f"The topic {info.name!r} has no partition {partition}.",
            fix=f"name one from 0 to {info.partitions - 1}.",
        )


def _check_chosen(chosen: Any, info: TopicInfo, rows: int) -> PartitionNumbers:
    """What a user's partitioner returned, as partition numbers."""
    numbers = np.asarray(chosen)
    if numbers.shape != (rows,) or numbers.dtype.kind not in "iu":
        raise BadPartition(
            f"The partitioner of {info.name!r} returned {type(chosen).__name__} of shape"
            f" {numbers.shape}.",
            fix=f"return {rows} whole numbers.",
        )
    if rows and not 0 <= numbers.min() <= numbers.max() < info.partitions:
        raise BadPartition(
            f"The partitioner of {info.name!r} chose a partition outside 0 to"
            f" {info.partitions - 1}.",
            fix="keep within the topic's.",
        )
    return numbers.astype(np.int32)


# Partitions by key


def key_bytes(batch: pa.RecordBatch, key: tuple[str, ...]) -> pa.BinaryArray:
    """The bytes of each row's key: STRING and BINARY as they are, other scalars as JSON text,
    several columns as a JSON array.

    A null in a key of one column gives null; in a key of several columns it is written as `null`.
    """
    columns = [batch.column(name) for name in key]
    if len(columns) > 1:
        return array_text(columns).cast(pa.binary())
    kind = columns[0].type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return columns[0].cast(pa.binary())
    return json_text(columns[0]).cast(pa.binary())


def partitions_by_key(
    batch: pa.RecordBatch, key: tuple[str, ...], partitions: int
) -> PartitionNumbers:
    """The partition of each row as Kafka's Java client chooses it. A null key counts as empty."""
    if partitions == 1:
        return np.zeros(batch.num_rows, np.int32)
    if batch.num_rows == 1:
        number = (murmur2(_single_key_bytes(batch, key)) & 0x7FFFFFFF) % partitions
        return np.array([number], np.int32)
    hashes = murmur2_array(key_bytes(batch, key)) & np.uint32(0x7FFFFFFF)
    return (hashes % np.uint32(partitions)).astype(np.int32)


def _single_key_bytes(batch: pa.RecordBatch, key: tuple[str, ...]) -> bytes:
    """The key of a batch of one row. Integers and strings avoid the cost of Arrow kernels."""
    array = batch.column(key[0])
    if len(key) == 1 and array.null_count == 0:
        if pa.types.is_integer(array.type):
            return b"%d" % array[0].as_py()
        if pa.types.is_string(array.type):
            return bytes(array[0].as_buffer())
    return key_bytes(batch, key)[0].as_py() or b""
