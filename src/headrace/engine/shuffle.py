"""The shuffle: how rows reach their shards.

Spark would move a million small rows. Here, rows for one shard are packed into a few large Arrow
blobs (`pack`), Spark moves rows of (label, port, blob), and the shard unpacks them (`unpack`).
`port` says which input of the shard's first step the rows belong to.

Spark chooses a row's partition by the Murmur3 hash of its label. The labels 0, 1, 2, … collide (0
and 1 go to the same of two partitions, which leaves half the machine idle), so for each shard
`labels` searches a label that hashes to the partition of the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import count

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import MAX_BATCH_BYTES, split_table
from headrace.columnar.keys import KEY_GROUPS, encode_keys, key_groups
from headrace.errors import BugError

PACKED = "label INT, port INT, blob BINARY"
PACKED_SCHEMA = pa.schema([("label", pa.int32()), ("port", pa.int32()), ("blob", pa.binary())])
_HEARTBEAT_PORT = -1
_BLOB_ROWS = 200_000
_MAX_FILTERS = 4
_MIN_COMPRESSED_BYTES = 1 << 20
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4")
_HASH_SEED = 42
_MASK = 0xFFFFFFFF


# Labels


def spark_hash(label: int) -> int:
    """Spark's Murmur3 hash of an INT, as a signed 32-bit number."""
    mixed = _rotate(label * 0xCC9E2D51 & _MASK, 15) * 0x1B873593 & _MASK
    value = (_rotate(_HASH_SEED ^ mixed, 13) * 5 + 0xE6546B64) & _MASK
    value ^= 4  # an INT has four bytes
    value = (value ^ (value >> 16)) * 0x85EBCA6B & _MASK
    value = (value ^ (value >> 13)) * 0xC2B2AE35 & _MASK
    value ^= value >> 16
    return value - (1 << 32) if value >> 31 else value


def _rotate(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


@cache
def labels(shards: int) -> tuple[int, ...]:
    """For each shard the smallest label that `repartition(shards, "label")` sends to the partition
    of that number.
    """
    by_shard: dict[int, int] = {}
    for label in count():
        by_shard.setdefault(spark_hash(label) % shards, label)
        if len(by_shard) == shards:
            return tuple(by_shard[shard] for shard in range(shards))
    raise AssertionError


def shard_groups(shard: int, shards: int) -> range:
    """The key groups of a shard. Another number of shards regroups them."""
    return range(-(-shard * KEY_GROUPS // shards), -(-(shard + 1) * KEY_GROUPS // shards))


def shards_of(
    rows: pa.Table | pa.RecordBatch, key: Sequence[str], shards: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The shard of each row, by the key group of its key."""
    groups = key_groups(encode_keys(rows, list(key))).astype(np.int64)
    return groups * shards // KEY_GROUPS


# Packing


def pack(
    port: int,
    batches: Iterable[pa.RecordBatch],
    key: Sequence[str] | None,
    shards: int,
    transform: Callable[[pa.Table], pa.Table] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Pack rows into blobs of bounded size for their shards; without a key, for every shard.
    `transform` is what a kernel does to rows before the shuffle, such as partial aggregation.
    """
    for table in gather(batches):
        rows = table if transform is None else transform(table.combine_chunks())
        for batch in split_table(rows):
            if key is None:
                blob = to_blob(batch)
                yield from (packed_row(label, port, blob) for label in labels(shards))
            else:
                yield from _pack_by_key(port, batch, key, shards)


def without_unread(rows: pa.RecordBatch, unread: Sequence[str]) -> pa.RecordBatch:
    """Rows without the columns that nothing behind the shuffle reads."""
    return rows.drop_columns(list(unread)) if unread else rows


def gather(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Concatenate small batches into tables that are worth a blob per shard, bounded in rows and in
    bytes.
    """
    pending: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        pending.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= _BLOB_ROWS or size >= MAX_BATCH_BYTES:
            yield pa.Table.from_batches(pending)
            pending = []
            rows = size = 0
    if rows:
        yield pa.Table.from_batches(pending)


def _pack_by_key(
    port: int, rows: pa.RecordBatch, key: Sequence[str], shards: int
) -> Iterator[pa.RecordBatch]:
    """One blob for each shard that some of the rows belong to."""
    shard = shards_of(rows, key, shards)
    counts = np.bincount(shard, minlength=shards)
    present = np.flatnonzero(counts).tolist()
    if len(present) > _MAX_FILTERS:  # one sorted copy is cheaper than so many filters
        rows = rows.take(pa.array(np.argsort(shard, kind="stable")))
    stops = np.cumsum(counts)
    for number in present:
        count, stop = int(counts[number]), int(stops[number])
        if count == rows.num_rows:
            part = rows
        elif len(present) > _MAX_FILTERS:
            part = rows.slice(stop - count, count)
        else:
            part = rows.filter(pa.array(shard == number))
        yield packed_row(labels(shards)[number], port, to_blob(part))


def packed_row(label: int, port: int, blob: pa.Buffer) -> pa.RecordBatch:
    """One row of `PACKED_SCHEMA`, without copying its blob."""
    offsets = pa.array([0, blob.size], pa.int32()).buffers()[1]
    blobs = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, blob])
    return pa.RecordBatch.from_arrays(
        [pa.array([label], pa.int32()), pa.array([port], pa.int32()), blobs], schema=PACKED_SCHEMA
    )


def heartbeat(shards: int) -> pa.RecordBatch:
    """A row without a blob for each shard, so that a shard runs even if no row is for it."""
    return _heartbeats(labels(shards))


def heartbeat_of(shard: int, shards: int) -> pa.RecordBatch:
    """The heartbeat of one shard."""
    return _heartbeats([labels(shards)[shard]])


def _heartbeats(to_labels: Sequence[int]) -> pa.RecordBatch:
    count = len(to_labels)
    ports = pa.array([_HEARTBEAT_PORT] * count, pa.int32())
    return pa.RecordBatch.from_arrays(
        [pa.array(to_labels, pa.int32()), ports, pa.nulls(count, pa.binary())],
        schema=PACKED_SCHEMA,
    )


def shard_of(label: int, shards: int) -> int:
    """The shard that a label belongs to."""
    return labels(shards).index(label)


_stays_here: ContextVar[bool] = ContextVar("_stays_here", default=False)


@contextmanager
def blobs_stay_here() -> Iterator[None]:
    """Say that blobs do not leave this machine, which makes compressing them a waste."""
    token = _stays_here.set(True)
    try:
        yield
    finally:
        _stays_here.reset(token)


def to_blob(batch: pa.RecordBatch) -> pa.Buffer:
    """Encode a batch. A large one that is mostly text is compressed: blobs are copied several times
    on their way through Spark, and text shrinks to half.
    """
    size = batch.nbytes
    text_bytes = sum(
        column.nbytes
        for column in batch.columns
        if pa.types.is_string(column.type) or pa.types.is_binary(column.type)
    )
    is_large_text = size > _MIN_COMPRESSED_BYTES and 2 * text_bytes > size
    compress = is_large_text and not _stays_here.get()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_COMPRESSED if compress else None) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def unpack(batches: Iterable[pa.RecordBatch]) -> tuple[int | None, dict[int, list[pa.Table]]]:
    """The label of the shard that a task received, and the tables of each port. Rows of two shards
    in one task would mix their states, so that is checked.
    """
    label: int | None = None
    ports: dict[int, list[pa.Table]] = {}
    for batch in batches:
        blobs = batch.column("blob")
        row_labels, row_ports = batch.column("label").to_pylist(), batch.column("port").to_pylist()
        for row, (row_label, port) in enumerate(zip(row_labels, row_ports, strict=True)):
            if label not in {None, row_label}:
                raise BugError(
                    f"A task got rows of two shards (labels {label} and {row_label}): Spark did not"
                    " keep them apart."
                )
            label = row_label
            if port != _HEARTBEAT_PORT:
                table = pa.ipc.open_stream(blobs[row].as_buffer()).read_all()
                ports.setdefault(port, []).append(table)
    return label, ports
