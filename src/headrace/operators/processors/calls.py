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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints
from headrace.columnar.columns import CHANGE_FIELD, CHANGE_TYPE, CHANGE_TYPES, INSERT
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
    OUTPUT_COLUMN,
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


class OutputType:
    """The columns of an output, and how rows of it become rows of the step, which has the columns
    of all outputs and, of a table, the kind of change.

    Args:
        name: The side output; None for the main one.
        schema: Its columns.
        emitted: The columns of the step.
    """

    def __init__(self, name: str | None, schema: pa.Schema, emitted: pa.Schema) -> None:
        self.name, self.schema, self.emitted = name, schema, emitted
        self.names = set(schema.names)
        self.has_changes = name is None and CHANGE_TYPE in emitted.names
        self._converters = [column_converter(column) for column in schema]

    def check_names(self, names: Iterable[str]) -> None:
        """Raise Misfit unless these are the columns, with or without the kind of change. Of a row
        that is deleted the key is enough.
        """
        names = set(names)
        is_change = self.has_changes and CHANGE_TYPE in names
        for name in sorted(names - {CHANGE_TYPE} if is_change else names):
            if name not in self.names:
                raise Misfit(f"it emitted a column {name!r}: {nearest(name, self.schema.names)}")
        if is_change:
            return
        for name in self.schema.names:
            if name not in names:
                raise Misfit(f"it emitted a row without the column {name!r}")

    def table_of(self, emitted: Any) -> pa.Table:
        """Rows of the step, of an Arrow table. Raises Misfit."""
        if isinstance(emitted, pa.RecordBatch):
            emitted = pa.Table.from_batches([emitted])
        if not isinstance(emitted, pa.Table):
            raise Misfit(f"it returned a {type(emitted).__name__}, not an Arrow table")
        self.check_names(emitted.column_names)
        columns = []
        for column in self.schema:
            if column.name not in emitted.column_names:
                columns.append(pa.nulls(emitted.num_rows, column.type))
                continue
            array = as_array(emitted[column.name])
            try:
                columns.append(fit_column(array, column))
            except (Misfit, pa.ArrowException) as error:
                row, reason = find_misfit(array, column, error)
                raise Misfit(
                    f"row {row} of the table that it returned: {column.name!r}: {reason}"
                ) from None
        changes = None
        if self.has_changes and CHANGE_TYPE in emitted.column_names:
            changes = as_array(emitted[CHANGE_TYPE])
        return self._widened(columns, changes, emitted.num_rows)

    def table_of_rows(self, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
        """Rows of the step, of dictionaries. Raises Misfit."""
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
        changes = None
        if self.has_changes:
            changes = pa.array([row.get(CHANGE_TYPE, INSERT) for row in rows], pa.string())
        return self._widened(columns, changes, len(rows))

    def _widened(self, columns: list[pa.Array], changes: pa.Array | None, count: int) -> pa.Table:
        if self.emitted is self.schema or self.emitted.equals(self.schema):
            return pa.Table.from_arrays(columns, schema=self.schema)
        given = dict(zip(self.schema.names, columns, strict=True))
        if changes is None:
            changes = pa.repeat(pa.scalar(INSERT), count)
        elif unknown := set(changes.unique().to_pylist()) - {*CHANGE_TYPES}:
            shown = min(map(str, unknown))
            raise Misfit(f"it emitted the {CHANGE_TYPE} {shown!r}: {nearest(shown, CHANGE_TYPES)}")
        given[CHANGE_TYPE] = changes
        given[OUTPUT_COLUMN] = pa.repeat(pa.scalar(self.name, pa.string()), count)
        return pa.Table.from_arrays(
            [
                given[field.name] if field.name in given else pa.nulls(count, field.type)
                for field in self.emitted
            ],
            schema=self.emitted,
        )


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
        self.slots = SlotTypes(declaration)
        self.diverts = diverts
        self.emitted_schema = declaration.emitted
        if declaration.table_key:
            self.emitted_schema = self.emitted_schema.append(CHANGE_FIELD)
        self._main = OutputType(None, declaration.output, self.emitted_schema)
        self._outputs: dict[str | None, OutputType] = {
            None: self._main,
            **{
                side.name: OutputType(side.name, side.schema, self.emitted_schema)
                for side in declaration.sides
            },
        }

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
            self.slots,
            frame,
            moment,
            key_of=key_of,
            timer=timer,
            fired_at=fired_at,
            source=method,
        )
        try:
            returned = getattr(self.processor, method)(rows, context)
            emitted = [
                table
                for output, rows_of_output in (*context.take_emitted(), (None, returned))
                for table in self._emitted_table(output, rows_of_output, frame)
            ]
            return CallOutcome(context.take_columns(), emitted)
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

    def _emitted_table(self, output: str | None, emitted: Any, frame: KeyFrame) -> list[pa.Table]:
        """What a method by columns emitted to an output, as rows of it. Raises Misfit."""
        if emitted is None:
            return []
        kind = self._output(output)
        is_list = isinstance(emitted, list)
        table = kind.table_of_rows(emitted) if is_list else kind.table_of(emitted)
        if not table.num_rows:
            return []
        own = encode_keys(table, self.key).cast(pa.binary())
        if pc.index_in(own, frame.key_bytes.cast(pa.binary())).null_count:
            raise Misfit("it returned a row of a key that the call is not about")
        return [table]

    def _output(self, name: str | None) -> OutputType:
        if name not in self._outputs:
            known = [each for each in self._outputs if each is not None]
            declared = nearest(str(name), known) if known else "there is none"
            raise Misfit(f"it emitted a row to the side output {name!r}: {declared}")
        return self._outputs[name]

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
        context = KeyContext(
            self.slots, frame, moment, timer=timer, fired_at=fired_at, source=method
        )
        call = getattr(self.processor, method)
        outcome = CallOutcome({})
        emitted: list[Mapping[str, Any]] = []
        aside: dict[str, list[Mapping[str, Any]]] = {}
        for number, (row, index) in enumerate(zip(rows, key_of.tolist(), strict=True)):
            context.move_to(index)
            before = context.snapshot() if self.diverts else None
            try:
                emitted_by_row = context.take_emitted(call(row, context))
                aside_by_row = context.take_aside()
                for each in emitted_by_row:
                    self._check_row(self._main, each, context.key)
                for output, each in aside_by_row:
                    self._check_row(self._output(output), each, context.key)
                if before is not None:
                    context.check_values()
                    self._main.table_of_rows(emitted_by_row)
                    for output, each in aside_by_row:
                        self._output(output).table_of_rows([each])
            except Exception as error:
                if before is None:
                    self._fail(method, error, row)
                context.take_main()
                context.take_aside()
                context.restore(before)
                outcome.rejected.append((number, _reason(method, error)))
            else:
                emitted += emitted_by_row
                for output, each in aside_by_row:
                    aside.setdefault(output, []).append(each)
        try:
            tables = [self._main.table_of_rows(emitted)] if emitted else []
            tables += [self._output(name).table_of_rows(each) for name, each in aside.items()]
            outcome.emitted = tables
            outcome.columns = context.take_columns()
        except Exception as error:
            self._fail(method, error, None)
        return outcome

    def _check_row(
        self, output: OutputType, row: Mapping[str, Any], key: Mapping[str, Any]
    ) -> None:
        if row.keys() != output.names:
            output.check_names(row)
        if any(row[name] != value and value == value for name, value in key.items()):  # noqa: PLR0124
            other = {name: row[name] for name in key}
            raise Misfit(f"it emitted a row of the key {other!r} in a call for {dict(key)!r}")

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
