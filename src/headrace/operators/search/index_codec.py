"""An index of queries as bytes, for the cache next to a shard's local store.

The index consists of frozen dataclasses over numpy arrays, tuples and plain values. `encode` turns
such a value into bytes, `decode` turns them back; only the dataclasses of this package that
`encode` is given are ever built, so reading a file runs no code that the file chooses.

Layout, version 1: the magic `HRQI`, one byte with the version, the length of the header (4 bytes,
little endian), the header as JSON, and the buffers that the header refers to, one after the other.
Arrays, and long tuples of texts or bytes, are buffers; everything else stands in the header.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

MAGIC = b"HRQI"
VERSION = 1
_HEADER_START = len(MAGIC) + 5
_MIN_BUFFERED = 16
"""Tuples of texts or bytes from this length on are stored as buffers."""


class UnreadableIndex(Exception):
    """Bytes that are no index of this version: the caller builds the index again."""


def encode(value: Any) -> bytes:
    """A value made of dataclasses, arrays, tuples, dictionaries and plain values, as bytes."""
    buffers: list[bytes] = []
    header = json.dumps(_to_plain(value, buffers), separators=(",", ":")).encode()
    parts = [MAGIC, bytes([VERSION]), len(header).to_bytes(4, "little"), header, *buffers]
    return b"".join(parts)


def decode(content: bytes, classes: Mapping[str, type]) -> Any:
    """The value that `encode` was given. `classes` are the dataclasses that it may consist of.

    Raises:
        UnreadableIndex: The bytes are of another version, cut off, or name another class.
    """
    try:
        if content[: len(MAGIC)] != MAGIC or content[len(MAGIC)] != VERSION:
            raise UnreadableIndex
        length = int.from_bytes(content[len(MAGIC) + 1 : _HEADER_START], "little")
        header = json.loads(content[_HEADER_START : _HEADER_START + length])
        buffers = memoryview(content)[_HEADER_START + length :]
        return _from_plain(header, buffers, classes)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise UnreadableIndex from error


def _to_plain(value: Any, buffers: list[bytes]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        return {"array": [value.dtype.str, _add(np.ascontiguousarray(value).tobytes(), buffers)]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Mapping):
        pairs = [[_to_plain(each, buffers) for each in pair] for pair in value.items()]
        return {"mapping": pairs}
    if is_dataclass(value) and not isinstance(value, type):
        content = [_to_plain(getattr(value, field.name), buffers) for field in fields(value)]
        return {"class": type(value).__name__, "fields": content}
    if isinstance(value, Sequence):
        for kind, name in ((str, "texts"), (bytes, "blobs")):
            if len(value) >= _MIN_BUFFERED and all(type(each) is kind for each in value):
                encoded = [each.encode() if kind is str else each for each in value]
                lengths = np.fromiter(map(len, encoded), "<u4", len(encoded))
                return {name: [_add(lengths.tobytes(), buffers), _add(b"".join(encoded), buffers)]}
        return {"tuple": [_to_plain(each, buffers) for each in value]}
    raise TypeError(f"An index has no {type(value).__name__}.")


def _add(content: bytes, buffers: list[bytes]) -> list[int]:
    start = sum(map(len, buffers))
    buffers.append(content)
    return [start, len(content)]


def _from_plain(value: Any, buffers: memoryview, classes: Mapping[str, type]) -> Any:
    if not isinstance(value, dict):
        return value
    if "array" in value:
        dtype, extent = value["array"]
        return np.frombuffer(_buffer(extent, buffers), np.dtype(dtype))
    if "bytes" in value:
        return bytes.fromhex(value["bytes"])
    if "mapping" in value:
        return {
            _from_plain(key, buffers, classes): _from_plain(content, buffers, classes)
            for key, content in value["mapping"]
        }
    if "class" in value:
        content = [_from_plain(each, buffers, classes) for each in value["fields"]]
        return classes[value["class"]](*content)
    if "tuple" in value:
        return tuple(_from_plain(each, buffers, classes) for each in value["tuple"])
    (kind, (lengths_extent, data_extent)), *_ = value.items()
    ends = np.cumsum(np.frombuffer(_buffer(lengths_extent, buffers), "<u4")).tolist()
    data = bytes(_buffer(data_extent, buffers))
    pieces = [data[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return tuple(piece.decode() for piece in pieces) if kind == "texts" else tuple(pieces)


def _buffer(extent: Sequence[int], buffers: memoryview) -> memoryview:
    start, length = extent
    if start + length > len(buffers):
        raise UnreadableIndex
    return buffers[start : start + length]
