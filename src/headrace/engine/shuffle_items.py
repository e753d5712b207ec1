"""Packed rows as items of an RDD's shuffle: bytes, of which Spark knows only the shard.

    (label 3, port 0, blob)   ->  shard, then  label | port | blob               any machine
                                               label | port | 0 | blob           this machine, small
                                               label | port | 1 | start, size, name of a file

Where all tasks are on one machine, a large blob goes into a file, and only its place goes through
Spark, which would copy and compress the blob on its way through two sockets and two more files. The
reader maps the file. It is removed with the other files of the job, mostly before the system has
written it to disk.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pyarrow as pa

from headrace.engine.shuffle import blobs_stay_here, packed_row, shard_of

MIN_FILED_BYTES = 64 << 10
_SHARD = struct.Struct("!q")
_HEADER = struct.Struct("!ii")
_PLACE = struct.Struct("!QQ")
_INLINE, _FILED = b"\0", b"\1"


def to_pairs(
    shards: int, directory: Path | None, batches: Iterable[pa.RecordBatch]
) -> Iterator[bytes]:
    """Each packed row as its shard, and then its item. With a directory, large blobs go there."""
    with ExitStack() as stack:
        file: BlobFile | None = None
        if directory is not None:
            file = stack.enter_context(BlobFile(directory))
            stack.enter_context(blobs_stay_here())
        for batch in batches:
            rows = zip(*(batch.column(name) for name in ("label", "port", "blob")), strict=True)
            for label, port, blob in rows:
                if not blob.is_valid:
                    continue
                content = blob.as_buffer()
                parts = [_HEADER.pack(label.as_py(), port.as_py())]
                if file is None:
                    parts.append(content)
                elif content.size < MIN_FILED_BYTES:
                    parts += [_INLINE, content]
                else:
                    parts += [_FILED, file.append(content)]
                yield _SHARD.pack(shard_of(label.as_py(), shards))
                yield b"".join(parts)


def from_items(directory: Path | None, items: Iterable[bytes]) -> Iterator[pa.RecordBatch]:
    """The packed rows of some items."""
    for item in items:
        label, port = _HEADER.unpack_from(item)
        blob = pa.py_buffer(item).slice(_HEADER.size)
        if directory is not None:
            is_filed = item[_HEADER.size : _HEADER.size + 1] == _FILED
            blob = blob.slice(1)
            if is_filed:
                blob = _read_blob(directory, blob.to_pybytes())
        yield packed_row(label, port, blob)


class BlobFile:
    """The large blobs of one task, one behind the other in a file of its own. Another attempt of
    the task makes another file.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._name = os.urandom(8).hex()
        self._file: pa.NativeFile | None = None

    def append(self, blob: pa.Buffer) -> bytes:
        """Write a blob. Returns its place."""
        if self._file is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = pa.OSFile(str(self._directory / self._name), "wb")
        start = self._file.tell()
        self._file.write(blob)
        return _PLACE.pack(start, blob.size) + self._name.encode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def _read_blob(directory: Path, place: bytes) -> pa.Buffer:
    start, size = _PLACE.unpack_from(place)
    with pa.memory_map(str(directory / place[_PLACE.size :].decode())) as file:
        file.seek(start)
        return file.read_buffer(size)
