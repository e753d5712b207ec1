"""A Bloom filter of each key's values in a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from headrace.operators.accumulators.sketches import Sketch
from headrace.operators.bloom import BloomFilter, hashes_of


class Bloom(Sketch):
    """The filter itself is the answer; without values, an empty one."""

    def __init__(self, column: str, type: pa.DataType, *, expected: int, error: float) -> None:
        super().__init__(column, type)
        self._empty = BloomFilter.empty(expected, error).to_bytes()

    def items(self, values: pa.Array) -> Any:
        return hashes_of(values)

    def updated(self, data: bytes, items: Sequence[Any]) -> bytes:
        return BloomFilter.from_bytes(data or self._empty).with_hashes(items).to_bytes()  # type: ignore[arg-type]

    def read(self, data: bytes) -> bytes:
        return data or self._empty

    def array(self, answers: list[Any]) -> pa.Array:
        return pa.array(answers, pa.binary())
