"""Rows that cannot be used: put aside with where and why, for the commit to make dead letters of
them. Counted, never lost, never in the way.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from headrace.columnar.columns import (
    CHANGE_TYPE,
    DELETE,
    INSERT,
    ORDER_FIELDS,
    RANK,
    TICK,
    UPDATE_BEFORE,
)
from headrace.engine.state.files import write_report
from headrace.log.dead_letters import ASIDE, letter_texts

# A condition on rows, and on a table's changes: there a row that no longer fits it goes, one that
# fits it now comes.
#
# Spark says for each row whether it fits; here the two images of an update, which lie side by side,
# are looked at together.


KEEP = "_keep"


def keep_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows without `_keep`: of a stream those that fit, of a table its changes as `keep_changes`
    has them.
    """
    given = iter(batches)
    first = next(given, None)
    if first is not None:
        every = chain([first], given)
        yield from (
            keep_changes(every) if CHANGE_TYPE in first.schema.names else map(_fitting, every)
        )


def _fitting(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.filter(batch.column(KEEP)).drop_columns([KEEP])


def keep_changes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Changes without `_keep`, as they are for a table of the rows that fit."""
    waiting: pa.RecordBatch | None = None
    for each in batches:
        batch = each if waiting is None else pa.concat_batches([waiting, each])
        whole = _whole_pairs(batch)
        waiting = batch.slice(whole) if whole < batch.num_rows else None
        if whole:
            yield _kept(batch.slice(0, whole))
    if waiting is not None:
        yield _kept(waiting)


def _whole_pairs(batch: pa.RecordBatch) -> int:
    """How many rows to look at now: a last row that is the first image of an update waits for the
    second.
    """
    count: int = batch.num_rows
    return (
        count - 1
        if count and batch.column(CHANGE_TYPE)[count - 1].as_py() == UPDATE_BEFORE
        else count
    )


def _kept(batch: pa.RecordBatch) -> pa.RecordBatch:
    kinds = np.array(batch.column(CHANGE_TYPE).to_pylist(), dtype=object)
    fits = batch.column(KEEP).fill_null(False).to_numpy(zero_copy_only=False)
    before = np.flatnonzero(kinds == UPDATE_BEFORE)
    kinds[before[fits[before] & ~fits[before + 1]]] = DELETE
    kinds[before[~fits[before] & fits[before + 1]] + 1] = INSERT
    changed = batch.set_column(
        batch.schema.get_field_index(CHANGE_TYPE),
        batch.schema.field(CHANGE_TYPE),
        pa.array(kinds.tolist(), pa.string()),
    )
    names = [name for name in batch.schema.names if name != KEEP]
    return changed.select(names).filter(pa.array(fits))


_ORDER = [field.name for field in ORDER_FIELDS]
NULL_KEY = "its key is null"


@dataclass
class DeadLetterFile:
    """Letters on their way to the commit, written as they come, so that a task holds few of them
    however many there are.
    """

    directory: Path
    name: str
    rows: int = 0
    _writer: pa.RecordBatchFileWriter | None = None

    def write(self, letters: pa.Table) -> None:
        if self._writer is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            # another attempt, which may come late, must not write into a file that is being read
            self.name += f"-{os.urandom(4).hex()}.letters"
            self._writer = pa.ipc.new_file(str(self.directory / self.name), ASIDE)
        self._writer.write_table(letters)
        self.rows += letters.num_rows

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


@dataclass
class Diverter:
    """What one task diverts for one step. `finish` leaves a file and a report; another attempt of
    the task replaces them.
    """

    directory: Path
    step: str
    first: str = ""
    """The place of the first row that was put aside: no other row of the step has it."""
    _letters: DeadLetterFile = field(init=False)

    def __post_init__(self) -> None:
        self._letters = DeadLetterFile(self.directory, f"diverted-{self.step}")

    def divert(self, rows: pa.RecordBatch, reason: str) -> None:
        """Put rows aside. One of a topic says where it stood there; one that a stage made has no
        such place.
        """
        rows = _that_come(rows)
        if not rows.num_rows:
            return
        self.first = self.first or ".".join(str(rows.column(name)[0].as_py()) for name in _ORDER)
        texts = letter_texts(
            rows.select([name for name in rows.schema.names if name not in _ORDER])
        )
        made = pc.less(rows.column(RANK), 0)
        partition, offset = (
            pc.if_else(made, None, rows.column(name)) for name in ("_partition", "_offset")
        )
        reasons = pa.repeat(pa.scalar(reason), rows.num_rows)
        self._letters.write(
            pa.Table.from_arrays(
                [texts, rows.column(TICK), reasons, partition, offset], schema=ASIDE
            )
        )

    def keyed(
        self, rows: pa.RecordBatch, key: tuple[str, ...] | None, *, nulls: bool
    ) -> pa.RecordBatch:
        """The rows that have a key: all, where keys may be null, or where rows go to every
        shard.
        """
        for name in () if nulls else key or ():
            column = rows.column(name)
            if column.null_count:
                self.divert(rows.filter(pc.is_null(column)), NULL_KEY)
                rows = rows.filter(pc.is_valid(column))
        return rows

    def finish(self, part: str) -> None:
        """`part` tells tasks apart where a task is not told by its number in the job: a topic may
        be read twice in a job, and its rows are diverted once.
        """
        self._letters.close()
        if self._letters.rows:
            counts = {f"{self.step}.diverted": self._letters.rows}
            write_report(
                self.directory,
                f"diverted-{self.step}-{part}",
                {"diverted": {self.step: self._letters.name}, "counts": counts},
            )


def _that_come(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Of the changes that a stage made, those that bring a row: one that goes was told of when it
    came. A topic's rows are all new.
    """
    if CHANGE_TYPE not in rows.schema.names:
        return rows
    goes = pc.is_in(rows.column(CHANGE_TYPE), pa.array([UPDATE_BEFORE, DELETE]))
    return rows.filter(pc.invert(pc.and_(goes, pc.less(rows.column(RANK), 0))))


def this_task() -> str:
    """The number of the running Spark task in its stage; a second attempt has the same."""
    task = TaskContext.get()
    return f"p{task.partitionId() if task else 0}"


@dataclass(frozen=True)
class DivertFailed:
    """Rows with `_keep`, which says whether a step's expressions can be computed for them: those go
    on, the others are put aside, in one pass.

    A table's row that can no longer be computed goes, as one that no longer fits a condition does.
    """

    directory: Path
    step: str
    reason: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        diverter = Diverter(self.directory, self.step)
        yield from keep_rows(self._put_aside(batches, diverter))
        diverter.finish(
            f"failed-{diverter.first}"
        )  # not the task: Spark may compute these rows in several stages

    def _put_aside(
        self, batches: Iterable[pa.RecordBatch], diverter: Diverter
    ) -> Iterator[pa.RecordBatch]:
        """All rows, when a letter has been written of those that fail."""
        for batch in batches:
            diverter.divert(
                batch.filter(pc.invert(batch.column(KEEP))).drop_columns([KEEP]), self.reason
            )
            yield batch
