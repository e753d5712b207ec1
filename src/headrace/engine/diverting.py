"""Rows that cannot be used: put aside with where and why, for the commit to make dead letters of them. Counted, never lost, never in the way."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from headrace.engine.reports import write_report
from headrace.engine.tasks import ORDER_FIELDS
from headrace.log.dead import row_to_text

_ORDER = [field.name for field in ORDER_FIELDS]
NULL_KEY = "its key is null"


@dataclass
class Diverter:
    """What one task diverts for one step. `finish` leaves a file and a report; another attempt of the task replaces them."""

    directory: Path
    step: str
    _letters: list[dict[str, object]] = field(default_factory=list)

    def divert(self, rows: pa.RecordBatch, reason: str) -> None:
        """Put rows aside. One of a topic says where it stood there; one that a stage made has no such place."""
        names = [name for name in rows.schema.names if name not in _ORDER]
        places = zip(*(rows.column(name).to_pylist() for name in _ORDER), strict=True)
        for text, (tick, rank, partition, offset) in zip(row_to_text(rows.select(names)), places, strict=True):
            place = {} if rank < 0 else {"partition": partition, "offset": offset}
            self._letters.append({"row": text, "tick": tick, "reason": reason, **place})

    def without_null_keys(self, rows: pa.RecordBatch, key: tuple[str, ...]) -> pa.RecordBatch:
        """The rows that have a key."""
        for name in key:
            column = rows.column(name)
            if column.null_count:
                self.divert(rows.filter(pc.is_null(column)), NULL_KEY)
                rows = rows.filter(pc.is_valid(column))
        return rows

    def finish(self, part: str) -> None:
        """`part` tells tasks apart where a task is not told by its number in the job: a topic may be read twice in a job, and its rows are diverted once."""
        if not self._letters:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        name = f"diverted-{self.step}-{part}"
        file = f"{name}-{os.urandom(4).hex()}.letters"  # another attempt, which may come late, must not write into a file that is being read
        (self.directory / file).write_text("\n".join(map(json.dumps, self._letters)))
        write_report(self.directory, name, {"diverted": {self.step: file}, "counts": {f"{self.step}.diverted": len(self._letters)}})


def this_task() -> str:
    """The number of the running Spark task in its stage; a second attempt has the same."""
    task = TaskContext.get()
    return f"p{task.partitionId() if task else 0}"


@dataclass(frozen=True)
class DivertRows:
    """All rows that come: those on which an expression of a step failed."""

    directory: Path
    step: str
    reason: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        diverter = Diverter(self.directory, self.step)
        for batch in batches:
            diverter.divert(batch, self.reason)
        diverter.finish(f"failed-{this_task()}")
        yield from ()
