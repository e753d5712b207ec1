"""The steps that run users' functions over rows: `CallStep` for the functions that expressions
call, `MapStep` for `map_batches` and `flat_map`, `ExplodeStep` for lists; and `SampleStep`, which
keeps some of the rows.

A step's `code` turns a batch of rows into the columns of its result; `engine.user_code` runs it,
and traces what it fails on to a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar import row_codec
from headrace.columnar.buffers import Ints
from headrace.columnar.columns import OFFSET_COLUMN, PARTITION_COLUMN, RANK
from headrace.columnar.keys import as_array, encode_keys
from headrace.columnar.murmur2 import hash64, mix64
from headrace.errors import nearest
from headrace.expressions.function_calls import FunctionCallColumn
from headrace.plan.plan import SettledColumns, Step
from headrace.types.values import (
    Misfit,
    column_converter,
    find_misfit,
    fit_column,
    plain_copy,
)

ROW_INDEX = "_row"
"""The column by which a function of `map_batches` says which row each row of its result is from."""


class RowCode(Protocol):
    """What a step computes of a batch."""

    def __call__(self, rows: pa.RecordBatch) -> tuple[list[pa.Array], Ints | None]:
        """The columns of the step's schema, and for each row of the result the index of the row
        that it is from; None if there is one for each row, in order.
        """
        ...

    def null_columns(self, rows: pa.RecordBatch) -> list[pa.Array] | None:
        """The columns of rows for which it failed; None if there is no such row in the result."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class UserCodeStep(Step):
    """A step that runs a user's code over batches of rows."""

    computation: RowCode
    functions: tuple[tuple[str, str], ...]
    """The names and fingerprints of the functions."""
    errors: str

    def details(self) -> dict[str, Any]:
        return {"functions": dict(self.functions), "errors": self.errors}

    @property
    def function_names(self) -> str:
        """How errors call the code."""
        return ", ".join(f"{name}()" for name, _ in self.functions) or self.operation

    @property
    def user_code(self) -> tuple[tuple[str, Any], ...]:
        called: list[Any] = [call.function for call in getattr(self.computation, "calls", ())]
        function = getattr(self.computation, "function", None)
        named = [(each.name, each.function) for each in called]
        named += [] if function is None else [(self.functions[0][0], function)]
        return tuple((f"the function {name}()", function) for name, function in named)


# Functions in expressions


@dataclass(frozen=True)
class CallCode:
    """Adds the columns of calls to the rows."""

    given: tuple[str, ...]
    calls: tuple[FunctionCallColumn, ...]

    def __call__(self, rows: pa.RecordBatch) -> tuple[list[pa.Array], Ints | None]:
        columns = [rows.column(name) for name in self.given]
        for call in self.calls:
            arguments = [rows.column(name) for name in call.arguments]
            try:
                columns.append(call.function.compute(arguments, rows.num_rows))
            except Exception as error:
                error.add_note(f"in the function {call.function.name}")
                raise
        return columns, None

    def null_columns(self, rows: pa.RecordBatch) -> list[pa.Array] | None:
        """Null for each function that fails."""
        columns = [rows.column(name) for name in self.given]
        for call in self.calls:
            arguments = [rows.column(name) for name in call.arguments]
            try:
                columns.append(call.function.compute(arguments, rows.num_rows))
            except Exception:
                columns.append(pa.nulls(rows.num_rows, call.function.result.type))
        return columns


@dataclass(frozen=True, kw_only=True, eq=False)
class CallStep(UserCodeStep):
    """The input's columns, and one for each call of a user's function."""

    operation: ClassVar[str] = "call"

    calls: tuple[FunctionCallColumn, ...]

    def settled_by(self, inputs: Sequence[SettledColumns]) -> SettledColumns:
        return inputs[0]

    def details(self) -> dict[str, Any]:
        calls = {call.name: [call.function.name, *call.arguments] for call in self.calls}
        return {**super().details(), "calls": calls}

    def summary(self) -> str:
        return ", ".join(
            f"{call.name} = {call.function.name}({', '.join(call.arguments)})"
            for call in self.calls
        )


# Functions over rows


@dataclass(frozen=True)
class BatchCode:
    """The function of `map_batches`: rows as an Arrow table in, a table out."""

    function: Callable[[pa.Table], Any]
    given: tuple[str, ...]
    schema: pa.Schema
    time: str | None = None

    def __call__(self, rows: pa.RecordBatch) -> tuple[list[pa.Array], Ints | None]:
        given = pa.Table.from_batches([rows.select(list(self.given))])
        returned = self.function(given)
        if isinstance(returned, pa.RecordBatch):
            returned = pa.Table.from_batches([returned])
        elif hasattr(returned, "columns") and hasattr(returned, "to_numpy"):
            returned = pa.Table.from_pandas(returned, preserve_index=False)
        if not isinstance(returned, pa.Table):
            raise Misfit(f"it returned a {type(returned).__name__}, not a table")
        indices = None
        if ROW_INDEX in returned.column_names:
            indices = _row_indices(returned[ROW_INDEX], rows.num_rows)
            returned = returned.drop_columns([ROW_INDEX])
        elif returned.num_rows != rows.num_rows:
            raise Misfit(
                f"it returned {returned.num_rows:,} rows for {rows.num_rows:,}, without a column"
                f" {ROW_INDEX!r} that says which row each is from"
            )
        return _fitted(returned, self.schema, self.time), indices

    def null_columns(self, rows: pa.RecordBatch) -> list[pa.Array] | None:  # noqa: ARG002
        return None


@dataclass(frozen=True)
class RowsCode:
    """The function of `flat_map`: a row as a dictionary in, dictionaries out."""

    function: Callable[[dict[str, Any]], Any]
    given: tuple[str, ...]
    schema: pa.Schema
    time: str | None = None

    def __call__(self, rows: pa.RecordBatch) -> tuple[list[pa.Array], Ints | None]:
        emitted: list[dict[str, Any]] = []
        counts = []
        # A function may yield one dictionary, or list, again and again.
        is_nested = any(pa.types.is_nested(column.type) for column in self.schema)
        copied = plain_copy if is_nested else dict
        for row in rows.select(list(self.given)).to_pylist():
            before = len(emitted)
            returned = self.function(row)
            for made in [returned] if isinstance(returned, dict) else returned or ():
                if not isinstance(made, dict):
                    raise Misfit(f"it returned a {type(made).__name__}, not a dictionary")
                emitted.append(copied(made))
            counts.append(len(emitted) - before)
        for row in emitted:
            if row.keys() != set(self.schema.names):
                _check_names(list(row), self.schema)
        columns = []
        for column in self.schema:
            converter = column_converter(column)
            values = [row[column.name] for row in emitted]
            try:
                columns.append(converter.array(values))
            except (Misfit, pa.ArrowException, OverflowError, ValueError, TypeError):
                raise Misfit(f"{column.name!r}: {converter.find_misfit(values)[1]}") from None
        _check_times(columns, self.schema, self.time)
        return columns, np.repeat(np.arange(rows.num_rows), counts)

    def null_columns(self, rows: pa.RecordBatch) -> list[pa.Array] | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class MapStep(UserCodeStep):
    """The rows that a user's function makes of the input's rows."""

    operation: ClassVar[str] = "map"

    def summary(self) -> str:
        return ", ".join(name for name, _ in self.functions)


def _fitted(table: pa.Table, schema: pa.Schema, time: str | None) -> list[pa.Array]:
    _check_names(table.column_names, schema)
    columns = []
    for column in schema:
        array = as_array(table[column.name])
        try:
            columns.append(fit_column(array, column))
        except (Misfit, pa.ArrowException) as error:
            row, reason = find_misfit(array, column, error)
            raise Misfit(f"row {row} of the table, {column.name!r}: {reason}") from None
    _check_times(columns, schema, time)
    return columns


def _check_names(names: Sequence[str], schema: pa.Schema) -> None:
    for name in names:
        if name not in schema.names:
            raise Misfit(f"it returned a column {name!r}: {nearest(name, schema.names)}")
    for name in schema.names:
        if name not in names:
            raise Misfit(f"it returned rows without the column {name!r}")


def _check_times(columns: Sequence[pa.Array], schema: pa.Schema, time: str | None) -> None:
    if time is not None and columns[schema.get_field_index(time)].null_count:
        raise Misfit(f"{time!r} is null, and it is the event time of the rows")


def _row_indices(column: pa.ChunkedArray, count: int) -> Ints:
    array = as_array(column)
    if not pa.types.is_integer(array.type) or array.null_count:
        raise Misfit(f"its column {ROW_INDEX!r} is {array.type}, with {array.null_count} nulls")
    indices: Ints = array.cast(pa.int64()).to_numpy()
    if len(indices) and not (indices.min() >= 0 and indices.max() < count):
        raise Misfit(
            f"its column {ROW_INDEX!r} names rows that are not there: {count:,} were given"
        )
    if np.any(np.diff(indices) < 0):
        raise Misfit(f"its column {ROW_INDEX!r} is not in order")
    return indices


# Lists


@dataclass(frozen=True)
class ExplodeCode:
    """A row for each element of a list or entry of a map."""

    column: str
    kept: tuple[str, ...]
    is_map: bool
    is_inline: bool
    has_position: bool
    outer: bool

    def __call__(self, rows: pa.RecordBatch) -> tuple[list[pa.Array], Ints | None]:
        lists = rows.column(self.column)
        if self.is_map:
            lists = lists.cast(pa.list_(lists.type.field(0)))
        lengths = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
        counts = np.maximum(lengths, 1) if self.outer else lengths
        indices = np.repeat(np.arange(rows.num_rows), counts)
        position = np.arange(len(indices)) - np.repeat(np.cumsum(counts) - counts, counts)
        is_missing = lengths[indices] == 0
        element = np.repeat(np.cumsum(lengths) - lengths, counts) + position
        elements = lists.flatten().take(pa.array(element, mask=is_missing))
        columns = [rows.column(name).take(pa.array(indices)) for name in self.kept]
        if self.has_position:
            columns.append(pa.array(position.astype(np.int32), mask=is_missing))
        if self.is_map or self.is_inline:
            kind = elements.type
            columns += [pc.struct_field(elements, at) for at in range(kind.num_fields)]
        else:
            columns.append(elements)
        return columns, indices

    def null_columns(self, rows: pa.RecordBatch) -> list[pa.Array] | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class ExplodeStep(UserCodeStep):
    """A row for each element of a list, with the other columns of its row."""

    operation: ClassVar[str] = "explode"

    column: str
    outer: bool

    def details(self) -> dict[str, Any]:
        return {"column": self.column, "outer": self.outer, "columns": list(self.schema.names)}

    def summary(self) -> str:
        return self.column


# Samples


@dataclass(frozen=True)
class SampleCode:
    """Some of the rows, by a hash of what a row is: of its columns `by`; without them, of the
    partition and offset at which it was read, or, where a step with state made it, of its values.

        fraction 0.5, seed 0
        row       partition 0, offset 7     hash 0x2f… of 2**64: below half, kept
        row       partition 0, offset 8     hash 0xc1…: left out, in every replay

    Rows that were made of one row, as by `explode`, are kept or left out together.
    """

    given: tuple[str, ...]
    by: tuple[str, ...]
    fraction: float
    seed: int

    def __call__(self, rows: pa.RecordBatch) -> tuple[list[pa.Array], Ints | None]:
        words = hash64(encode_keys(rows, self.by)) if self.by else self._row_words(rows)
        with np.errstate(over="ignore"):
            words += np.uint64(self.seed % 2**64) * np.uint64(0x9E3779B97F4A7C15)
        # 53 bits are what a float has.
        kept = (mix64(words) >> np.uint64(11)) < np.uint64(round(self.fraction * 2**53))
        indices = np.flatnonzero(kept)
        chosen = pa.array(indices)
        return [rows.column(name).take(chosen) for name in self.given], indices

    def _row_words(self, rows: pa.RecordBatch) -> np.ndarray[Any, np.dtype[np.uint64]]:
        partition = rows.column(PARTITION_COLUMN).to_numpy().astype(np.uint64)
        offset = rows.column(OFFSET_COLUMN).to_numpy().astype(np.uint64)
        words: np.ndarray[Any, np.dtype[np.uint64]] = (partition << np.uint64(48)) ^ offset
        derived = np.flatnonzero(rows.column(RANK).to_numpy() < 0)
        if len(derived):
            own = rows.select(list(self.given)).take(pa.array(derived))
            words[derived] = hash64(row_codec.encode_array(own.to_struct_array()))
        return words

    def null_columns(self, rows: pa.RecordBatch) -> list[pa.Array] | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleStep(UserCodeStep):
    """Some of the rows, the same ones in every replay."""

    operation: ClassVar[str] = "sample"

    by: tuple[str, ...]
    fraction: float
    seed: int

    def settled_by(self, inputs: Sequence[SettledColumns]) -> SettledColumns:
        return inputs[0]

    def details(self) -> dict[str, Any]:
        return {"fraction": self.fraction, "by": list(self.by), "seed": self.seed}

    def summary(self) -> str:
        by = f" by {', '.join(self.by)}" if self.by else ""
        return f"{self.fraction:g}{by}"
