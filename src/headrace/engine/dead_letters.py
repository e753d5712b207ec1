"""Dead letters of a task: rows that a step cannot use, with their position and the reason.

A `Diverter` writes them to a file of the job; `commit` appends them to the step's
dead-letter topic in the transaction of the batch. So each bad row is counted once, is never lost
and never stops the pipeline. `headrace.log.dead_letters` has the topics, and what users do with
them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from headrace.columnar.columns import (
    CHANGE_TYPE,
    DELETE,
    OFFSET_COLUMN,
    ORDER_FIELDS,
    PARTITION_COLUMN,
    RANK,
    TICK,
    UPDATE_PREIMAGE,
)
from headrace.engine.reports import JobFiles, write_report
from headrace.log.dead_letters import PENDING_SCHEMA, dead_letter_json

NULL_KEY = "its key is null"
_ORDER = [order_field.name for order_field in ORDER_FIELDS]


@dataclass
class DeadLetterFile:
    """A file of dead letters that is written as they come, so that a task holds few of them in
    memory.
    """

    job: JobFiles
    name: str
    rows: int = 0
    _file: pa.NativeFile | None = None
    _writer: pa.RecordBatchFileWriter | None = None

    def write(self, rows: pa.Table) -> None:
        if self._writer is None:
            # A late second attempt must not write into a file that is being read.
            self.name += f"-{os.urandom(4).hex()}.letters"
            self._file = self.job.output(self.name)
            self._writer = pa.ipc.new_file(self._file, PENDING_SCHEMA)
        self._writer.write_table(rows)
        self.rows += rows.num_rows

    def close(self) -> None:
        if self._writer is not None and self._file is not None:
            self._writer.close()
            self._file.close()


@dataclass
class Diverter:
    """Collects the dead letters of one step in one task. `finish` writes the report; a second
    attempt of the task replaces it.
    """

    job: JobFiles
    step: str
    first: str = ""
    """The order columns of the first diverted row, as text: unique among the rows of the step."""
    _file: DeadLetterFile = field(init=False)

    def __post_init__(self) -> None:
        self._file = DeadLetterFile(self.job, f"diverted-{self.step}")

    def divert(self, rows: pa.RecordBatch, reason: str) -> None:
        """Make dead letters of rows. A row that was read from a topic keeps its partition and
        offset; a row that a stage emitted has none.
        """
        rows = _without_retractions(rows)
        if not rows.num_rows:
            return
        self.first = self.first or ".".join(str(rows.column(name)[0].as_py()) for name in _ORDER)
        texts = dead_letter_json(
            rows.select([name for name in rows.schema.names if name not in _ORDER])
        )
        is_derived = pc.less(rows.column(RANK), 0)
        partitions = pc.if_else(is_derived, None, rows.column(PARTITION_COLUMN))
        offsets = pc.if_else(is_derived, None, rows.column(OFFSET_COLUMN))
        reasons = pa.repeat(pa.scalar(reason), rows.num_rows)
        columns = [texts, rows.column(TICK), reasons, partitions, offsets]
        self._file.write(pa.Table.from_arrays(columns, schema=PENDING_SCHEMA))

    def divert_null_keys(
        self, rows: pa.RecordBatch, key: tuple[str, ...] | None, *, nulls: bool
    ) -> pa.RecordBatch:
        """Make dead letters of rows with a null key, and return the others. With `nulls`, or
        without a key, all rows are returned.
        """
        for name in () if nulls else key or ():
            column = rows.column(name)
            if column.null_count:
                self.divert(rows.filter(pc.is_null(column)), NULL_KEY)
                rows = rows.filter(pc.is_valid(column))
        return rows

    def finish(self, part: str) -> None:
        """Write the report. `part` identifies the rows that this task works on: a topic may be read
        twice in a job, and its dead letters are reported once.
        """
        self._file.close()
        if self._file.rows:
            report = {
                "dead_letters": {self.step: self._file.name},
                "counts": {f"{self.step}.diverted": self._file.rows},
            }
            write_report(self.job, f"diverted-{self.step}-{part}", report)


def _without_retractions(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Without the deletes and old values that a stage emitted: the row became a dead letter when it
    was inserted. Rows that were read from a topic are all new.
    """
    if CHANGE_TYPE not in rows.schema.names:
        return rows
    is_retraction = pc.is_in(rows.column(CHANGE_TYPE), pa.array([UPDATE_PREIMAGE, DELETE]))
    return rows.filter(pc.invert(pc.and_(is_retraction, pc.less(rows.column(RANK), 0))))


def this_task() -> str:
    """The index of the running Spark task in its stage; a second attempt has the same."""
    task = TaskContext.get()
    return f"p{task.partitionId() if task else 0}"
