"""Sketches over streams, from Apache DataSketches: small states that answer about. Deterministic: the same values in the same ticks, the same bytes.

A state is read, brought up to date and written once for each key and tick, so that it does not matter how many ticks come in a call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import datasketches
import numpy as np
import pyarrow as pa

from headrace.operators.accumulators.accumulator import Accumulator, Advanced, Columns, Tails
from headrace.operators.accumulators.arrays import doubles
from headrace.operators.accumulators.ordered import from_ordered, has_order_in_64_bits, to_ordered
from headrace.operators.buffers import Ints
from headrace.operators.keys import canonical
from headrace.operators.segments import Segments


class Sketch(Accumulator):
    """A sketch for each key that has had a value."""

    fields = (("size", "<u4"),)

    def __init__(self, column: str, type: pa.DataType) -> None:
        self.column, self.type = column, type

    def tail_sizes(self, columns: Columns) -> Ints | None:
        sizes: Ints = columns[0].astype(np.int64)
        return sizes if sizes.any() else None

    @abstractmethod
    def items(self, values: pa.Array) -> Sequence[Any]:
        """Values, none null, as the sketch takes them."""

    @abstractmethod
    def updated(self, data: bytes, items: Sequence[Any]) -> bytes:
        """A sketch (empty bytes: a new one) with more values."""

    @abstractmethod
    def read(self, data: bytes) -> Any:
        """What a sketch says; of empty bytes, what is said of no values."""

    @abstractmethod
    def array(self, answers: list[Any]) -> pa.Array:
        """Answers as a column."""

    def advance(self, columns: Columns, tails: Tails | None, segments: Segments) -> Advanced:  # noqa: ARG002
        column = segments.column(self.column)
        items = self.items(column.drop_null())
        count = np.add.reduceat(column.is_valid().to_numpy(zero_copy_only=False).astype(np.int64), segments.starts)
        ends = [0, *np.cumsum(count).tolist()]
        states = [b""] * len(segments.firsts) if tails is None else list(tails)
        answers: list[Any] = []
        stops = [*segments.firsts[1:].tolist(), len(segments)]
        for key, (first, stop) in enumerate(zip(segments.firsts.tolist(), stops, strict=True)):
            answers.append(self.read(states[key]))
            for segment in range(first, stop):
                if ends[segment + 1] > ends[segment]:
                    states[key] = self.updated(states[key], items[ends[segment] : ends[segment + 1]])
                answers.append(self.read(states[key]))
        sizes = np.fromiter(map(len, states), np.uint32, len(states))
        return Advanced(self.array(answers), (sizes,), states)


def take_all(update: Any, items: Sequence[Any]) -> None:
    """Call for each item, with the loop in C."""
    deque(map(update, items), maxlen=0)


class ApproxDistinct(Sketch):
    """HyperLogLog: how many different values, with a relative standard error of at most `error`."""

    def __init__(self, column: str, type: pa.DataType, *, error: float) -> None:
        super().__init__(column, type)
        self.error = error

    @cached_property
    def lg_k(self) -> int:
        """The fewest registers that keep the promise, as a power of two."""
        return next(lg_k for lg_k in range(7, 22) if lg_k == 21 or self._error(lg_k) <= self.error)

    @staticmethod
    def _error(lg_k: int) -> float:
        return max(abs(float(datasketches.hll_sketch.get_rel_err(upper, False, lg_k, 1))) for upper in (True, False))

    def items(self, values: pa.Array) -> Sequence[Any]:
        values = canonical(values)
        if has_order_in_64_bits(values.type):
            numbers: list[int] = to_ordered(values).view(np.int64).tolist()
            return numbers
        return [item if item and item[0] != "\0" else "\0" + item for item in texts(values)]  # the sketch passes over empty strings

    def updated(self, data: bytes, items: Sequence[Any]) -> bytes:
        sketch = datasketches.hll_sketch.deserialize(data) if data else datasketches.hll_sketch(self.lg_k, datasketches.tgt_hll_type.HLL_4)
        take_all(sketch.update, items)
        return bytes(sketch.serialize_compact())

    def read(self, data: bytes) -> int:
        return round(datasketches.hll_sketch.deserialize(data).get_estimate()) if data else 0

    def array(self, answers: list[Any]) -> pa.Array:
        return pa.array(answers, pa.int64())


class Quantiles(Sketch):
    """A t-digest: about the values below which given fractions lie. NaN is passed over."""

    def __init__(self, column: str, type: pa.DataType, *, at: float | tuple[float, ...], compression: int) -> None:
        super().__init__(column, type)
        self.at, self.compression = at, compression

    def items(self, values: pa.Array) -> Any:
        return np.array(doubles(values))  # the sketch takes no read-only memory

    def updated(self, data: bytes, items: Sequence[Any]) -> bytes:
        sketch = datasketches.tdigest_double.deserialize(data) if data else datasketches.tdigest_double(self.compression)
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
        return pa.array(answers, pa.list_(pa.float64()) if isinstance(self.at, tuple) else pa.float64())


class HeavyHitters(Sketch):
    """Frequent items: the most frequent values, each with the least and the most it can have come."""

    def __init__(self, column: str, type: pa.DataType, result: pa.DataType, *, most: int, size: int) -> None:
        super().__init__(column, type)
        self.result, self.most, self.size = result, most, size

    @cached_property
    def lg_size(self) -> int:
        """The smallest map whose error is below one in `size`."""
        sketch = datasketches.frequent_strings_sketch
        return next(lg_size for lg_size in range(3, 31) if lg_size == 30 or sketch.get_epsilon_for_lg_size(lg_size) <= 1 / self.size)

    def items(self, values: pa.Array) -> Sequence[Any]:
        values = canonical(values)
        return list(map(str, to_ordered(values).tolist())) if has_order_in_64_bits(values.type) else texts(values)

    def updated(self, data: bytes, items: Sequence[Any]) -> bytes:
        sketch = datasketches.frequent_strings_sketch.deserialize(data) if data else datasketches.frequent_strings_sketch(self.lg_size)
        take_all(sketch.update, items)
        return bytes(sketch.serialize())

    def read(self, data: bytes) -> list[tuple[str, int, int, int]]:
        if not data:
            return []
        found = datasketches.frequent_strings_sketch.deserialize(data).get_frequent_items(datasketches.frequent_items_error_type.NO_FALSE_NEGATIVES)
        return sorted(found, key=lambda item: (-item[1], item[0]))[: self.most]

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
    """STRING, BINARY and DECIMAL as strings, different ones for different values."""
    if pa.types.is_binary(values.type):
        return [value.decode("latin-1") for value in values.to_pylist()]
    listed: list[str] = values.cast(pa.string()).to_pylist()
    return listed
