"""Bloom filters: a set of values in a few bits each, which answers "certainly not" or "probably". `hr.agg.bloom` makes them, users ask them.

A filter as bytes: version (1), number of probes (1), number of bits (8, little-endian), then the bits. Probes follow from 64 bits of a value's
key bytes (`keys.py`), so filters over columns of the same type can be compared, merged and asked anywhere.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import CorruptionError, NewerFormat
from headrace.murmur2 import murmur2_array
from headrace.operators.buffers import Mask
from headrace.operators.keys import encode_keys

VERSION = 1
_HEADER = struct.Struct("<BBQ")
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class BloomFilter:
    """`bits` is a multiple of 8; `data` are those bits."""

    probes: int
    bits: int
    data: bytes

    @classmethod
    def empty(cls, expected: int, error: float) -> BloomFilter:
        """Room for so many different values at such a rate of false positives."""
        bits = max(64, math.ceil(-expected * math.log(error) / math.log(2) ** 2))
        bits += -bits % 64
        probes = min(32, max(1, round(bits / expected * math.log(2))))
        return cls(probes, bits, bytes(bits // 8))

    @classmethod
    def from_bytes(cls, filter: bytes) -> BloomFilter:
        version, probes, bits = _HEADER.unpack_from(filter)
        if version > VERSION:
            raise NewerFormat(
                f"A Bloom filter has version {version}, and this Headrace knows up to {VERSION}.", fix="use the newer Headrace that made it."
            )
        if len(filter) != _HEADER.size + bits // 8:
            raise CorruptionError(f"A Bloom filter of {bits} bits has {len(filter)} bytes.")
        return cls(probes, bits, filter[_HEADER.size :])

    def to_bytes(self) -> bytes:
        return _HEADER.pack(VERSION, self.probes, self.bits) + self.data

    def with_hashes(self, hashes: Hashes) -> BloomFilter:
        places = self._places(hashes).reshape(-1)
        data = np.frombuffer(self.data, np.uint8).copy()
        np.bitwise_or.at(data, places >> np.uint64(3), (np.uint64(1) << (places & np.uint64(7))).astype(np.uint8))
        return BloomFilter(self.probes, self.bits, data.tobytes())

    def might_contain(self, values: pa.Array) -> Mask:
        """For each value: False, it is certainly not a member; True, it probably is. A null is no member."""
        answer = np.zeros(len(values), np.bool_)
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        places = self._places(hashes_of(values.drop_null()))
        data = np.frombuffer(self.data, np.uint8)
        found = data[places >> np.uint64(3)] >> (places & np.uint64(7)).astype(np.uint8) & 1
        answer[valid] = found.all(axis=1)
        return answer

    def _places(self, hashes: Hashes) -> Hashes:
        """The bits of each value: a first one and an odd step."""
        step = (hashes >> np.uint64(32)) | np.uint64(1)
        return (hashes[:, None] + np.arange(self.probes, dtype=np.uint64) * step[:, None]) % np.uint64(self.bits)


def hashes_of(values: pa.Array) -> Hashes:
    """64 bits of each value, none null: two hashes of its key bytes, mixed."""
    keys = encode_keys(pa.table({"value": values}), ["value"]).cast(pa.binary())
    salted = pc.binary_join_element_wise(pa.scalar(b"bloom", pa.binary()), keys, pa.scalar(b"", pa.binary()))
    mixed: Hashes = murmur2_array(keys).astype(np.uint64) << np.uint64(32) | murmur2_array(salted)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
