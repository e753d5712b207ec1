"""Packing: rows to their shards as a handful of large Arrow blobs, where a shuffle of single rows
would move a million small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import count

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import PIECE_BYTES, pieces
from headrace.columnar.keys import encode_keys, key_groups
from headrace.engine.state.files import GROUPS
from headrace.errors import BugError

# Labels that Spark sends to a chosen partition.
#
# Spark places a row by the Murmur3 hash of its label. The labels 0, 1, 2, … collide (0 and 1 land
# in the same of two partitions, and half the machine is idle), so for each shard a label is
# searched that leads to the partition of the same number.


_SEED = 42
_MASK = 0xFFFFFFFF


def _rotated(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def spark_hash(label: int) -> int:
    """Spark's hash of an INT, as a signed 32-bit number."""
    mixed = _rotated(label * 0xCC9E2D51 & _MASK, 15) * 0x1B873593 & _MASK
    value = (_rotated(_SEED ^ mixed, 13) * 5 + 0xE6546B64) & _MASK
    value ^= 4  # an INT has four bytes
    value = (value ^ (value >> 16)) * 0x85EBCA6B & _MASK
    value = (value ^ (value >> 13)) * 0xC2B2AE35 & _MASK
    value ^= value >> 16
    return value - (1 << 32) if value >> 31 else value


@cache
def labels(shards: int) -> tuple[int, ...]:
    """For each shard the smallest label that `repartition(shards, "label")` sends to the partition
    of that number.
    """
    found: dict[int, int] = {}
    for label in count():
        found.setdefault(spark_hash(label) % shards, label)
        if len(found) == shards:
            return tuple(found[shard] for shard in range(shards))
    raise AssertionError


PACKED = "label INT, port INT, blob BINARY"
PACKED_SCHEMA = pa.schema([("label", pa.int32()), ("port", pa.int32()), ("blob", pa.binary())])
_BLOB_ROWS = 200_000
_WORTHWHILE_BYTES = 1 << 20
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4")


def shard_groups(shard: int, shards: int) -> range:
    """The key groups of a shard: more or fewer shards only regroup them."""
    return range(-(-shard * GROUPS // shards), -(-(shard + 1) * GROUPS // shards))


def shards_of(
    rows: pa.Table | pa.RecordBatch, key: Sequence[str], shards: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The shard of each row, by the key group of its key."""
    groups = key_groups(encode_keys(rows, list(key))).astype(np.int64)
    return groups * shards // GROUPS


def pack(
    port: int,
    batches: Iterable[pa.RecordBatch],
    key: Sequence[str] | None,
    shards: int,
    work: Callable[[pa.Table], pa.Table] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Blobs for each shard, of bounded size. `work`: what a kernel does to rows before, as
    combining them. Without a key every row goes to every shard.
    """
    for rows in gathered(batches):
        for piece in pieces(rows if work is None else work(rows.combine_chunks())):
            yield (
                packed_rows(labels(shards), port, [to_blob(piece)] * shards)
                if key is None
                else _sorted_out(port, piece, key, shards)
            )


def gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Rows together, as many as are worth a blob for each shard: bounded in number and in bytes."""
    waiting: list[pa.RecordBatch] = []
    count = size = 0
    for batch in batches:
        waiting.append(batch)
        count, size = count + batch.num_rows, size + batch.nbytes
        if count >= _BLOB_ROWS or size >= PIECE_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, count, size = [], 0, 0
    if count:
        yield pa.Table.from_batches(waiting)


def _sorted_out(port: int, rows: pa.RecordBatch, key: Sequence[str], shards: int) -> pa.RecordBatch:
    """A blob for each shard that some of the rows belong to."""
    shard = shards_of(rows, key, shards)
    order = np.argsort(shard, kind="stable")
    in_order = rows.take(pa.array(order))
    cuts = np.searchsorted(shard[order], np.arange(shards + 1))
    present = [number for number in range(shards) if cuts[number + 1] > cuts[number]]
    blobs = [
        to_blob(in_order.slice(int(cuts[number]), int(cuts[number + 1] - cuts[number])))
        for number in present
    ]
    return packed_rows([labels(shards)[number] for number in present], port, blobs)


def packed_rows(to: Sequence[int], port: int, blobs: Sequence[bytes | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            pa.array(to, pa.int32()),
            pa.array([port] * len(to), pa.int32()),
            pa.array(blobs, pa.binary()),
        ],
        schema=PACKED_SCHEMA,
    )


def heartbeat(shards: int) -> pa.RecordBatch:
    """A row for each shard, so that it runs also when no row is for it."""
    return packed_rows(labels(shards), -1, [None] * shards)


def to_blob(batch: pa.RecordBatch) -> bytes:
    """Large ones that are mostly text are compressed: they are copied several times on their way
    through Spark, and a text is half as long then.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(
        sink, batch.schema, options=_COMPRESSED if _is_text(batch) else None
    ) as writer:
        writer.write_batch(batch)
    blob: bytes = sink.getvalue().to_pybytes()
    return blob


def _is_text(batch: pa.RecordBatch) -> bool:
    size = batch.nbytes
    texts = sum(
        column.nbytes
        for column in batch.columns
        if pa.types.is_string(column.type) or pa.types.is_binary(column.type)
    )
    return bool(size > _WORTHWHILE_BYTES and 2 * texts > size)


def unpack(batches: Iterable[pa.RecordBatch]) -> tuple[int | None, dict[int, list[pa.Table]]]:
    """What a shard got: its label, and for each port its tables. Rows of two shards in one task
    would mix their states, so it is not believed but checked.
    """
    label: int | None = None
    ports: dict[int, list[pa.Table]] = {}
    for batch in batches:
        blobs = batch.column("blob")
        for row, (to, port) in enumerate(
            zip(batch.column("label").to_pylist(), batch.column("port").to_pylist(), strict=True)
        ):
            if label not in {None, to}:
                raise BugError(
                    f"A task got rows of two shards (labels {label} and {to}): Spark did not keep"
                    " them apart."
                )
            label = to
            if port >= 0:
                ports.setdefault(port, []).append(
                    pa.ipc.open_stream(blobs[row].as_buffer()).read_all()
                )
    return label, ports
