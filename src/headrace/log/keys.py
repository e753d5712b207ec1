"""From a row's key to its partition: the key's bytes, and the partition that Kafka's murmur2 over them gives, for whole columns at once.

Both backends partition with this, so a topic's rows land in the same partition on the embedded log, on Kafka, and from Kafka's Java clients.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.log.json_text import array_text, json_text
from headrace.murmur2 import murmur2, murmur2_array


def key_bytes(batch: pa.RecordBatch, key: tuple[str, ...]) -> pa.BinaryArray:
    """The bytes that stand for each row's key: a STRING or BINARY as it is, another scalar as JSON text, several columns as a JSON array.

    A key of one column that is null gives null; within several columns it is written as `null`.
    """
    columns = [batch.column(name) for name in key]
    if len(columns) > 1:
        return array_text(columns).cast(pa.binary())
    kind = columns[0].type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return columns[0].cast(pa.binary())
    return json_text(columns[0]).cast(pa.binary())


def partitions_by_key(batch: pa.RecordBatch, key: tuple[str, ...], partitions: int) -> npt.NDArray[np.int32]:
    """The partition of each row, as Kafka's Java client would choose it. Rows whose key is null go where the empty key goes."""
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
