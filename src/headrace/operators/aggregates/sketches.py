"""Sketches over streams, from Apache DataSketches: small states with approximate results.

Sketches are deterministic: the same values in the same ticks give the same bytes. A state is read,
updated and written once per group and tick, so that it does not matter how ticks are grouped into
calls. `approx_distinct(user)`, over one group:

    stored state            segments                 state after             result
    HLL of {u1}, 1 value    tick 7: u2, u3, u1       HLL of {u1, u2, u3}     about 3

Sketches cannot retract, so they are for streams only.
"""

from __future__ import annotations

import math
import struct
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.keys import canonicalize, encode_keys
from headrace.columnar.murmur2 import murmur2_array
from headrace.columnar.segments import Segments
from headrace.errors import ConfigurationError, CorruptionError, NewerFormat
from headrace.operators.aggregates.accumulator import (
    Accumulator,
    AccumulatorOutcome,
    Columns,
    Tails,
    doubles,
    from_ordered,
    has_order_in_64_bits,
    to_ordered,
)

try:
    import datasketches
except ImportError as error:
    raise ConfigurationError(
        "The sketch aggregates need the package 'datasketches', which is not installed.",
        fix="pip install datasketches (it has no wheel for Python 3.14; use an older Python).",
    ) from error


class Sketch(Accumulator):
    """The base of sketches: one sketch for each group that has had a value."""

    fields = (("size", "<u4"),)

    def __init__(self, column: str, type: pa.DataType) -> None:
        self.column, self.type = column, type

    def tail_sizes(self, columns: Columns) -> Ints | None:
        sizes: Ints = columns[0].astype(np.int64)
        return sizes if sizes.any() else None

    @abstractmethod
    def items(self, values: pa.Array) -> Sequence[Any]:
        """The values, none null, in the form that the sketch accepts."""

    @abstractmethod
    def update(self, data: bytes, items: Sequence[Any]) -> bytes:
        """A sketch with more values; empty bytes stand for a new sketch."""

    @abstractmethod
    def read(self, data: bytes) -> Any:
        """The result of a sketch; of empty bytes, the result without values."""

    @abstractmethod
    def array(self, answers: list[Any]) -> pa.Array:
        """The results as a column."""

    def advance(
        self,
        columns: Columns,  # noqa: ARG002
        tails: Tails | None,
        segments: Segments,
    ) -> AccumulatorOutcome:
        column = segments.column(self.column)
        items = self.items(column.drop_null())
        count = np.add.reduceat(
            column.is_valid().to_numpy(zero_copy_only=False).astype(np.int64), segments.starts
        )
        ends = [0, *np.cumsum(count).tolist()]
        states = [b""] * len(segments.firsts) if tails is None else list(tails)
        answers: list[Any] = []
        stops = [*segments.firsts[1:].tolist(), len(segments)]
        for key, (first, stop) in enumerate(zip(segments.firsts.tolist(), stops, strict=True)):
            answers.append(self.read(states[key]))
            for segment in range(first, stop):
                if ends[segment + 1] > ends[segment]:
                    states[key] = self.update(states[key], items[ends[segment] : ends[segment + 1]])
                answers.append(self.read(states[key]))
        sizes = np.fromiter(map(len, states), np.uint32, len(states))
        return AccumulatorOutcome(self.array(answers), (sizes,), states)


def take_all(update: Any, items: Sequence[Any]) -> None:
    """Call `update` for each item, with the loop in C."""
    deque(map(update, items), maxlen=0)


class ApproxDistinct(Sketch):
    """HyperLogLog: the number of distinct values, with a relative standard error of at most
    `error`.
    """

    def __init__(self, column: str, type: pa.DataType, *, error: float) -> None:
        super().__init__(column, type)
        self.error = error

    @cached_property
    def lg_k(self) -> int:
        """The smallest number of registers with that error, as a power of two."""
        for lg_k in range(7, 21):
            errors = [
                abs(float(datasketches.hll_sketch.get_rel_err(upper, False, lg_k, 1)))
                for upper in (True, False)
            ]
            if max(errors) <= self.error:
                return lg_k
        return 21

    def items(self, values: pa.Array) -> Sequence[Any]:
        values = canonicalize(values)
        if has_order_in_64_bits(values.type):
            numbers: list[int] = to_ordered(values).view(np.int64).tolist()
            return numbers
        return [
            item if item and item[0] != "\0" else "\0" + item for item in texts(values)
        ]  # the sketch ignores empty strings

    def update(self, data: bytes, items: Sequence[Any]) -> bytes:
        sketch = (
            datasketches.hll_sketch.deserialize(data)
            if data
            else datasketches.hll_sketch(self.lg_k, datasketches.tgt_hll_type.HLL_4)
        )
        take_all(sketch.update, items)
        return bytes(sketch.serialize_compact())

    def read(self, data: bytes) -> int:
        return round(datasketches.hll_sketch.deserialize(data).get_estimate()) if data else 0

    def array(self, answers: list[Any]) -> pa.Array:
        return pa.array(answers, pa.int64())


class Quantiles(Sketch):
    """A t-digest: approximate quantiles. NaN is ignored."""

    def __init__(
        self, column: str, type: pa.DataType, *, at: float | tuple[float, ...], compression: int
    ) -> None:
        super().__init__(column, type)
        self.at, self.compression = at, compression

    def items(self, values: pa.Array) -> Any:
        return np.array(doubles(values))  # the sketch does not accept read-only memory

    def update(self, data: bytes, items: Sequence[Any]) -> bytes:
        sketch = (
            datasketches.tdigest_double.deserialize(data)
            if data
            else datasketches.tdigest_double(self.compression)
        )
        sketch.update(items)
        return bytes(sketch.serialize())

    def read(self, data: bytes) -> Any:
        sketch = datasketches.tdigest_double.deserialize(data) if data else None
        if sketch is None or sketch.is_empty():
            return None
        if isinstance(self.at, tuple):
            return [sketch.get_quantile(point) for point in self.at]
        return sketch.get_quantile(self.at)

    def array(self, answers: list[Any]) -> pa.Array:
        return pa.array(
            answers, pa.list_(pa.float64()) if isinstance(self.at, tuple) else pa.float64()
        )


class HeavyHitters(Sketch):
    """The most frequent values, each with a lower and an upper bound of its count."""

    def __init__(
        self, column: str, type: pa.DataType, result: pa.DataType, *, limit: int, size: int
    ) -> None:
        super().__init__(column, type)
        self.result = result
        self.limit = limit
        self.size = size

    @cached_property
    def lg_size(self) -> int:
        """The smallest map with an error below one in `size`, as a power of two."""
        sketch = datasketches.frequent_strings_sketch
        return next(
            lg_size
            for lg_size in range(3, 31)
            if lg_size == 30 or sketch.get_epsilon_for_lg_size(lg_size) <= 1 / self.size
        )

    def items(self, values: pa.Array) -> Sequence[Any]:
        values = canonicalize(values)
        return (
            list(map(str, to_ordered(values).tolist()))
            if has_order_in_64_bits(values.type)
            else texts(values)
        )

    def update(self, data: bytes, items: Sequence[Any]) -> bytes:
        sketch = (
            datasketches.frequent_strings_sketch.deserialize(data)
            if data
            else datasketches.frequent_strings_sketch(self.lg_size)
        )
        take_all(sketch.update, items)
        return bytes(sketch.serialize())

    def read(self, data: bytes) -> list[tuple[str, int, int, int]]:
        if not data:
            return []
        found = datasketches.frequent_strings_sketch.deserialize(data).get_frequent_items(
            datasketches.frequent_items_error_type.NO_FALSE_NEGATIVES
        )
        return sorted(found, key=lambda item: (-item[1], item[0]))[: self.limit]

    def array(self, answers: list[Any]) -> pa.Array:
        flat = [item for answer in answers for item in answer]
        values = self._values([item[0] for item in flat])
        counts = [pa.array([item[at] for item in flat], pa.int64()) for at in (1, 2, 3)]
        structs = pa.StructArray.from_arrays([values, *counts], fields=list(self.result.value_type))
        offsets = np.append(0, np.cumsum([len(answer) for answer in answers])).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), structs, type=self.result)

    def _values(self, items: list[str]) -> pa.Array:
        if has_order_in_64_bits(self.type):
            codes = np.array(list(map(int, items)), np.uint64)
            return from_ordered(codes, np.ones(len(codes), np.bool_), self.type)
        if pa.types.is_binary(self.type):
            return pa.array([item.encode("latin-1") for item in items], self.type)
        return pa.array(items, pa.string()).cast(self.type)


def texts(values: pa.Array) -> list[str]:
    """STRING, BINARY and DECIMAL values as strings, distinct for distinct values."""
    if pa.types.is_binary(values.type):
        return [value.decode("latin-1") for value in values.to_pylist()]
    listed: list[str] = values.cast(pa.string()).to_pylist()
    return listed


# Bloom filters

VERSION = 1
_HEADER = struct.Struct("<BBQ")
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class BloomFilter:
    """A set of values in a few bits each, which answers "certainly not" or "probably".

    `hr.agg.bloom` builds filters. As bytes, a filter is a version (1 byte), the number of probes
    (1), the number of bits (8, little-endian, a multiple of 8), and the bits. Probes are computed
    from a hash of the value's key bytes, so that filters over columns of the same type can be
    compared and merged.

    Example:
        ```python
        users = BloomFilter.from_bytes(row["users"])
        users.might_contain(pa.array(["alice", "bob"]))
        ```
    """

    probes: int
    bits: int
    data: bytes

    @classmethod
    def empty(cls, expected: int, error: float) -> BloomFilter:
        """An empty filter for so many distinct values, with the given share of false positives."""
        bits = max(64, math.ceil(-expected * math.log(error) / math.log(2) ** 2))
        bits += -bits % 64
        probes = min(32, max(1, round(bits / expected * math.log(2))))
        return cls(probes, bits, bytes(bits // 8))

    @classmethod
    def from_bytes(cls, filter: bytes) -> BloomFilter:
        """The filter from its bytes.

        Args:
            filter: The result of `hr.agg.bloom`.

        Raises:
            NewerFormat: A newer Headrace built the filter.
            CorruptionError: The bytes are not a filter.
        """
        version, probes, bits = _HEADER.unpack_from(filter)
        if version > VERSION:
            raise NewerFormat(
                f"A Bloom filter has version {version}, and this Headrace supports up to"
                f" {VERSION}.",
                fix="use the newer Headrace that built it.",
            )
        if len(filter) != _HEADER.size + bits // 8:
            raise CorruptionError(f"A Bloom filter of {bits} bits has {len(filter)} bytes.")
        return cls(probes, bits, filter[_HEADER.size :])

    def to_bytes(self) -> bytes:
        """The filter as bytes."""
        return _HEADER.pack(VERSION, self.probes, self.bits) + self.data

    def with_hashes(self, hashes: Hashes) -> BloomFilter:
        """The filter with more values, given by their hashes."""
        positions = self._bit_positions(hashes).reshape(-1)
        data = np.frombuffer(self.data, np.uint8).copy()
        np.bitwise_or.at(
            data,
            positions >> np.uint64(3),
            (np.uint64(1) << (positions & np.uint64(7))).astype(np.uint8),
        )
        return BloomFilter(self.probes, self.bits, data.tobytes())

    def might_contain(self, values: pa.Array) -> Mask:
        """For each value, False if it is certainly not in the set, True if it probably is.

        Args:
            values: Values of the same type as the filter's column. A null is never in the set.

        Returns:
            A boolean for each value.
        """
        answer = np.zeros(len(values), np.bool_)
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        positions = self._bit_positions(hashes_of(values.drop_null()))
        data = np.frombuffer(self.data, np.uint8)
        found = data[positions >> np.uint64(3)] >> (positions & np.uint64(7)).astype(np.uint8) & 1
        answer[valid] = found.all(axis=1)
        return answer

    def _bit_positions(self, hashes: Hashes) -> Hashes:
        """The bits of each value: a first one and an odd step."""
        step = (hashes >> np.uint64(32)) | np.uint64(1)
        return (
            hashes[:, None] + np.arange(self.probes, dtype=np.uint64) * step[:, None]
        ) % np.uint64(self.bits)


def hashes_of(values: pa.Array) -> Hashes:
    """A 64-bit hash of each value, none null: two hashes of its key bytes, mixed."""
    keys = encode_keys(pa.table({"value": values}), ["value"]).cast(pa.binary())
    salted = pc.binary_join_element_wise(
        pa.scalar(b"bloom", pa.binary()), keys, pa.scalar(b"", pa.binary())
    )
    mixed: Hashes = murmur2_array(keys).astype(np.uint64) << np.uint64(32) | murmur2_array(salted)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


class Bloom(Sketch):
    """A Bloom filter of each group's values; the filter itself is the result."""

    def __init__(self, column: str, type: pa.DataType, *, expected: int, error: float) -> None:
        super().__init__(column, type)
        self._empty = BloomFilter.empty(expected, error).to_bytes()

    def items(self, values: pa.Array) -> Any:
        return hashes_of(values)

    def update(self, data: bytes, items: Sequence[Any]) -> bytes:
        hashes = np.asarray(items, np.uint64)
        return BloomFilter.from_bytes(data or self._empty).with_hashes(hashes).to_bytes()

    def read(self, data: bytes) -> bytes:
        return data or self._empty

    def array(self, answers: list[Any]) -> pa.Array:
        return pa.array(answers, pa.binary())
