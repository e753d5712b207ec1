"""Which partition each row of an append goes to: named by the caller, by key, by a function of the
user's, or in turn.
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

# From a row's key to its partition: the key's bytes, and the partition that Kafka's murmur2 over
# them gives, for whole columns at once.
#
# Both backends partition with this, so a topic's rows land in the same partition on the embedded
# log, on Kafka, and from Kafka's Java clients.


def key_bytes(batch: pa.RecordBatch, key: tuple[str, ...]) -> pa.BinaryArray:
    """The bytes that stand for each row's key: a STRING or BINARY as it is, another scalar as JSON
    text, several columns as a JSON array.

    A key of one column that is null gives null; within several columns it is written as `null`.
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
) -> npt.NDArray[np.int32]:
    """The partition of each row, as Kafka's Java client would choose it. Rows whose key is null go
    where the empty key goes.
    """
    if partitions == 1:
        return np.zeros(batch.num_rows, np.int32)
    if batch.num_rows == 1:
        return np.array([(murmur2(_one_key(batch, key)) & 0x7FFFFFFF) % partitions], np.int32)
    hashed = murmur2_array(key_bytes(batch, key)) & np.uint32(0x7FFFFFFF)
    return (hashed % np.uint32(partitions)).astype(np.int32)


def _one_key(batch: pa.RecordBatch, key: tuple[str, ...]) -> bytes:
    """The key of a batch of one row, without Arrow's cost per call where the text is plain."""
    array = batch.column(key[0])
    if len(key) == 1 and array.null_count == 0:
        if pa.types.is_integer(array.type):
            return b"%d" % array[0].as_py()
        if pa.types.is_string(array.type):
            return bytes(array[0].as_buffer())
    return key_bytes(batch, key)[0].as_py() or b""


Numbers = npt.NDArray[np.int32]


class Chooser:
    """Chooses partitions for one producer; rows without a key go round in turn, across appends
    too.
    """

    def __init__(self, partitioner: Partitioner | None = None) -> None:
        self._partitioner = partitioner
        self._turn = 0

    def partitions(self, info: TopicInfo, batch: pa.RecordBatch, partition: int | None) -> Numbers:
        rows = batch.num_rows
        if partition is not None:
            check_partition(info, partition)
            return np.full(rows, partition, np.int32)
        if self._partitioner is not None:
            return _checked(self._partitioner(batch, info.partitions), info, rows)
        if info.key:
            return partitions_by_key(batch, info.key, info.partitions)
        turn, self._turn = self._turn, (self._turn + rows) % info.partitions
        return ((turn + np.arange(rows)) % info.partitions).astype(np.int32)


def check_partition(info: TopicInfo, partition: int) -> None:
    if not 0 <= partition < info.partitions:
        raise BadPartition(
            f"The topic {info.name!r} has no partition {partition}.",
            fix=f"name one from 0 to {info.partitions - 1}.",
        )


def _checked(chosen: Any, info: TopicInfo, rows: int) -> Numbers:
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
