"""Calls of a processor's methods for many keys, with what they emit and set checked, and with
whatever they fail on traced to a key or row.

Three keys, of which the method raises on `b`, with errors="divert":

    on_rows(rows of a, b, c)    raises
    on_rows(rows of a)          emits 1 row; a is set
    on_rows(rows of b, c)       raises
    on_rows(rows of b)          raises: the rows of b are rejected, and b stays as it was
    on_rows(rows of c)          emits 2 rows; c is set

So a bad row never affects other keys. By key, a method is called for one row at a time, and only
the row that it fails on is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints
from headrace.columnar.keys import as_array, encode_keys
from headrace.errors import HeadraceError, ProcessorFailed, nearest, user_trace
from headrace.operators.processors.context import (
    ColumnContext,
    Columns,
    KeyContext,
    KeyFrame,
    Moment,
    SlotTypes,
)
from headrace.operators.processors.processor import (
    ON_TIMER,
    ROW,
    ROWS,
    Declaration,
    Processor,
)
from headrace.types.values import Misfit, column_converter, failure_text, find_misfit, fit_column


@dataclass
class CallOutcome:
    """What calls did: the rows that they emitted, the values and timers of the keys afterwards, and
    what they rejected: indices of rows (of keys, for timers) with the reason.
    """

    columns: Columns
    emitted: list[pa.Table] = field(default_factory=list)
    rejected: list[tuple[int, str]] = field(default_factory=list)


class ProcessorCalls:
    """Calls a processor's methods.

    Args:
        step: The step's name, for errors.
        processor: The processor.
        declaration: What it declares.
        key: The columns of the key.
        diverts: Whether rows on which it fails are rejected, instead of ending the batch.
    """

    def __init__(
        self,
        step: str,
        processor: Processor,
        declaration: Declaration,
        key: Sequence[str],
        *,
        diverts: bool,
    ) -> None:
        self.step_name, self.processor, self.key = step, processor, tuple(key)
        self.output = declaration.output
        self.slots = SlotTypes(declaration)
        self.diverts = diverts
        self._converters = [column_converter(column) for column in self.output]

    def call_for_rows(
        self, input_name: str | None, rows: pa.Table, key_of: Ints, frame: KeyFrame, moment: Moment
    ) -> CallOutcome:
        """Call the method of an input for the rows of one tick.

        Args:
            input_name: The input; None for the first one.
            rows: The rows, in order.
            key_of: For each row, the index of its key.
            frame: The keys.
            moment: The time.
        """
        if type(self.processor).each_key:
            method = ROW if input_name is None else f"on_{input_name}"
            return self._call_by_row(method, rows.to_pylist(), key_of, frame, moment)
        method = ROWS if input_name is None else f"on_{input_name}"
        return self._call_by_columns(method, rows, key_of, frame, moment)

    def call_for_timer(
        self, timer: str, fired_at: pa.Array, frame: KeyFrame, moment: Moment
    ) -> CallOutcome:
        """Call `on_timer` for keys of which a timer has fired, at these times."""
        own = np.arange(len(frame))
        if type(self.processor).each_key:
            keys = frame.keys.to_pylist()
            return self._call_by_row(ON_TIMER, keys, own, frame, moment, timer, fired_at)
        return self._call_by_columns(ON_TIMER, frame.keys, own, frame, moment, timer, fired_at)

    # By columns

    def _call_by_columns(
        self,
        method: str,
        rows: pa.Table,
        key_of: Ints,
        frame: KeyFrame,
        moment: Moment,
        timer: str | None = None,
        fired_at: pa.Array | None = None,
    ) -> CallOutcome:
        """Call a method for all keys. If it fails, call it for halves of them, down to one key."""
        context = ColumnContext(
            self.slots, frame, moment, key_of=key_of, timer=timer, fired_at=fired_at
        )
        try:
            returned = getattr(self.processor, method)(rows, context)
            return CallOutcome(context.take_columns(), self._emitted_table(returned, frame))
        except Exception as error:
            if len(frame) == 1:
                if not self.diverts:
                    self._fail(method, error, frame.keys.to_pylist()[0])
                reason = _reason(method, error)
                rejected = [(row, reason) for row in range(rows.num_rows)]
                return CallOutcome(frame.columns, [], rejected)
        middle = len(frame) // 2
        parts = []
        for first, stop in ((0, middle), (middle, len(frame))):
            which = np.flatnonzero((key_of >= first) & (key_of < stop))
            part = self._call_by_columns(
                method,
                rows.take(pa.array(which)),
                key_of[which] - first,
                frame.take(np.arange(first, stop)),
                moment,
                timer,
                None if fired_at is None else fired_at.slice(first, stop - first),
            )
            part.rejected = [(int(which[row]), reason) for row, reason in part.rejected]
            parts.append(part)
        return CallOutcome(
            {
                name: pa.concat_arrays([part.columns[name] for part in parts])
                for name in frame.columns
            },
            [table for part in parts for table in part.emitted],
            [rejected for part in parts for rejected in part.rejected],
        )

    def _emitted_table(self, returned: Any, frame: KeyFrame) -> list[pa.Table]:
        """What a method by columns returned, as rows of the output. Raises Misfit."""
        if returned is None:
            return []
        if isinstance(returned, list):
            return self._table_of(returned, frame)
        if isinstance(returned, pa.RecordBatch):
            returned = pa.Table.from_batches([returned])
        if not isinstance(returned, pa.Table):
            raise Misfit(f"it returned a {type(returned).__name__}, not an Arrow table")
        self._check_names(returned.column_names)
        columns = []
        for column in self.output:
            array = as_array(returned[column.name])
            try:
                columns.append(fit_column(array, column))
            except (Misfit, pa.ArrowException) as error:
                row, reason = find_misfit(array, column, error)
                raise Misfit(
                    f"row {row} of the table that it returned: {column.name!r}: {reason}"
                ) from None
        table = pa.Table.from_arrays(columns, schema=self.output)
        if not table.num_rows:
            return []
        own = encode_keys(table, self.key).cast(pa.binary())
        if pc.index_in(own, frame.key_bytes.cast(pa.binary())).null_count:
            raise Misfit("it returned a row of a key that the call is not about")
        return [table]

    def _check_names(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.output.names:
                raise Misfit(f"it emitted a column {name!r}: {nearest(name, self.output.names)}")
        for name in self.output.names:
            if name not in names:
                raise Misfit(f"it emitted a row without the column {name!r}")

    # By key

    def _call_by_row(
        self,
        method: str,
        rows: Sequence[dict[str, Any]],
        key_of: Ints,
        frame: KeyFrame,
        moment: Moment,
        timer: str | None = None,
        fired_at: pa.Array | None = None,
    ) -> CallOutcome:
        """Call a method for each row (for each key, if a timer fired)."""
        context = KeyContext(self.slots, frame, moment, timer=timer, fired_at=fired_at)
        call = getattr(self.processor, method)
        outcome = CallOutcome({})
        emitted: list[Mapping[str, Any]] = []
        for number, (row, index) in enumerate(zip(rows, key_of.tolist(), strict=True)):
            context.move_to(index)
            before = context.snapshot() if self.diverts else None
            try:
                emitted_by_row = context.take_emitted(call(row, context))
                for each in emitted_by_row:
                    self._check_row(each, context.key)
                if before is not None:
                    context.check_values()
                    self._table_of(emitted_by_row, None)
            except Exception as error:
                if before is None:
                    self._fail(method, error, row)
                context.take_emitted(None)
                context.restore(before)
                outcome.rejected.append((number, _reason(method, error)))
            else:
                emitted += emitted_by_row
        try:
            outcome.emitted = self._table_of(emitted, None)
            outcome.columns = context.take_columns()
        except Exception as error:
            self._fail(method, error, None)
        return outcome

    def _check_row(self, row: Mapping[str, Any], key: Mapping[str, Any]) -> None:
        if row.keys() != set(self.output.names):
            self._check_names(list(row))
        if any(row[name] != value and value == value for name, value in key.items()):  # noqa: PLR0124
            other = {name: row[name] for name in key}
            raise Misfit(f"it emitted a row of the key {other!r} in a call for {dict(key)!r}")

    def _table_of(
        self, rows: Sequence[Mapping[str, Any]], frame: KeyFrame | None
    ) -> list[pa.Table]:
        """Rows that are dictionaries, as rows of the output. Raises Misfit."""
        if not rows:
            return []
        columns = []
        for converter in self._converters:
            values = [row.get(converter.name) for row in rows]
            try:
                columns.append(converter.array(values))
            except (Misfit, pa.ArrowException, OverflowError, ValueError, TypeError):
                at, reason = converter.find_misfit(values)
                raise Misfit(
                    f"it emitted {dict(rows[at])!r}: {converter.name!r}: {reason}"
                ) from None
        table = pa.Table.from_arrays(columns, schema=self.output)
        return [table] if frame is None else self._emitted_table(table, frame)

    def _fail(self, method: str, error: Exception, row: dict[str, Any] | None) -> NoReturn:
        where = type(self.processor).__qualname__
        raise ProcessorFailed(
            step=self.step_name,
            method=f"{where}.{method}",
            row=row,
            cause=str(error) if isinstance(error, HeadraceError) else failure_text(error),
            trace="" if isinstance(error, Misfit) else user_trace(error),
        ) from error


def _reason(method: str, error: Exception) -> str:
    return f"{method}: {failure_text(error)}"
