"""Runs users' code over the rows of a task, and traces what it fails on to a row.

    rows                1  2  3  4      the function raises on 3
    call of all         raises
    call of 1, 2        two rows
    call of 3, 4        raises
    call of 3           raises: null, a dead letter or the end of the run, by `errors`
    call of 4           one row

`runtime.job_builder` puts `RunUserCode` behind whatever has the rows; the code itself is in
`plan.function_steps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints
from headrace.columnar.columns import (
    CHANGE_TYPE,
    OFFSET_COLUMN,
    ORDER_FIELDS,
    PARTITION_COLUMN,
    RANK,
)
from headrace.engine.dead_letters import Diverter
from headrace.engine.map_tasks import KEEP, filter_rows
from headrace.engine.reports import JobFiles, write_report
from headrace.error_policy import DIVERT, NULL
from headrace.errors import FunctionFailed, user_trace
from headrace.types.values import Misfit, failure_text


@dataclass(frozen=True)
class RunUserCode:
    """Computes a step's rows by a user's code. `schema` has the step's rows, order columns
    included; `functions` is how errors call the code.
    """

    code: Any
    step: str
    functions: str
    schema: pa.Schema
    errors: str
    job: JobFiles

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        failures = _Failures(Diverter(self.job, self.step))
        computed = (
            part for batch in batches for part in self._compute(batch, failures) if part.num_rows
        )
        if self.errors == DIVERT:
            yield from filter_rows(computed)
            failures.diverter.finish(f"failed-{failures.diverter.first}")
        else:
            yield from computed
        if failures.nulls:
            # Named by its first row: Spark may compute these rows in several stages.
            counts = {f"{self.step}.errors": failures.nulls}
            write_report(self.job, f"errors-{self.step}-{failures.first}", {"counts": counts})

    def _compute(self, rows: pa.RecordBatch, failures: _Failures) -> Iterator[pa.RecordBatch]:
        """The step's rows of a batch, in parts. With dead letters, each has `_keep`."""
        if not rows.num_rows:
            return
        try:
            columns, indices = self.code(rows)
        except Exception as error:
            if rows.num_rows > 1:
                middle = rows.num_rows // 2
                yield from self._compute(rows.slice(0, middle), failures)
                yield from self._compute(rows.slice(middle), failures)
                return
            yield from self._failed(rows, error, failures)
            return
        yield self._assembled(rows, columns, indices, keep=True)

    def _failed(
        self, row: pa.RecordBatch, error: Exception, failures: _Failures
    ) -> Iterator[pa.RecordBatch]:
        """What becomes of a row for which the code fails."""
        columns = self.code.null_columns(row)
        if self.errors == NULL and columns is not None:
            failures.add(row)
            yield self._assembled(row, columns, None, keep=True)
        elif self.errors == DIVERT:
            failures.diverter.divert(row, f"{self.functions}: {failure_text(error)}")
            if columns is not None:  # an update is looked at as a whole
                yield self._assembled(row, columns, None, keep=False)
        else:
            self._fail(row, error)

    def _assembled(
        self, rows: pa.RecordBatch, columns: list[pa.Array], indices: Ints | None, *, keep: bool
    ) -> pa.RecordBatch:
        """The columns of the result, beside the order columns and the change types of the rows."""
        system = self.schema.names[len(columns) :]
        chosen = None if indices is None else pa.array(indices)
        kept = [rows.column(name) for name in system]
        kept = kept if chosen is None else [column.take(chosen) for column in kept]
        batch = pa.RecordBatch.from_arrays([*columns, *kept], schema=self.schema)
        if self.errors != DIVERT:
            return batch
        return batch.append_column(KEEP, pa.array(np.full(batch.num_rows, keep)))

    def _fail(self, rows: pa.RecordBatch, error: Exception) -> NoReturn:
        names = {field.name for field in ORDER_FIELDS} | {CHANGE_TYPE}
        (row,) = rows.to_pylist()
        is_read = row[RANK] >= 0
        raise FunctionFailed(
            step=self.step,
            function=self.functions,
            row={name: value for name, value in row.items() if name not in names},
            position=(row[PARTITION_COLUMN], row[OFFSET_COLUMN]) if is_read else None,
            cause=failure_text(error),
            trace="" if isinstance(error, Misfit) else user_trace(error),
        ) from error


@dataclass
class _Failures:
    """The rows for which the code failed: those that are null are counted."""

    diverter: Diverter
    nulls: int = 0
    first: str = ""

    def add(self, row: pa.RecordBatch) -> None:
        self.nulls += 1
        places = (str(row.column(field.name)[0].as_py()) for field in ORDER_FIELDS)
        self.first = self.first or ".".join(places)
