"""Writing a stream into a topic, exactly once: `df.writeStream.format("headrace").option("writer", "a name of its own")`.

Each batch is one transaction of the log: its rows, and two notes. One says which batch of this writer came last and what its rows were (its digest); the
other, which run of a query writes under this name. Spark repeats a batch after a crash, and numbers batches anew with a new checkpoint. So:

    a higher number than the last     is new, and stored
    the last number, the same rows    is a repeat, and skipped
    anything else                     means another checkpoint, and is refused: skipping it would lose rows, storing it would double them

Of two queries that write under one name, the newer goes on and the older is refused at its next batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from headrace.errors import BatchConflict, ConfigurationError, NewerFormat, NoteConflict, TransactionFenced
from headrace.log.api import Log
from headrace.log.spark.batch_writer import COMMIT_TIMEOUT
from headrace.log.spark.digest import Digest
from headrace.log.spark.handles import forget, shared_log
from headrace.log.spark.options import WriteOptions
from headrace.log.spark.staging import BATCH_PROPERTY, TaskRows, discard, finished, group_name, stage, task_property

VERSION = 1
PAST_RUNS = 16
"""So many runs are remembered as replaced by a newer one."""


@dataclass(frozen=True)
class LastBatch:
    """The note of a writer and topic: the last batch stored."""

    batch: int
    rows: int
    digest: str
    query: str | None = None
    version: int = VERSION


@dataclass(frozen=True)
class Owner:
    """The note of a writer: the run that writes under this name, and those before it."""

    run: str
    past: tuple[str, ...] = ()
    version: int = VERSION


class TopicStreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: WriteOptions) -> None:
        if options.writer is None:
            raise ConfigurationError(
                "A streaming write needs the option 'writer'.",
                fix="give each query a name of its own, as in .option('writer', 'large-orders'), and keep it: by it a repeated batch is recognised.",
            )
        self.options, self.name = options, options.writer
        self.batch_note = f"spark-writer.{self.name}.{options.topic}"
        self.owner_note = f"spark-owner.{self.name}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskRows:
        return stage(self.options, iterator, group=self._group(task_property(BATCH_PROPERTY)), digested=True)

    def _group(self, batch: int | str | None) -> str:
        return group_name(self.options.address.log, self.options.topic, self.name, batch)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803 - Spark's names
        discard(self.options, self._group(batchId))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """The commit, step by step:

        1. read what is stored of this writer
        2. refuse an older run and a number that is neither new nor a repeat; skip a repeat
        3. in one transaction: the rows of all tasks, the batch's note, the owner's note, each note on condition that it is still as read
        4. if that failed and nobody can say whether it happened, look: the note says it
        5. discard what was staged and not taken; if the commit failed, Spark calls `abort`, which does it
        """
        parts, log = finished(messages), shared_log(self.options.address)
        batch = LastBatch(batchId, *_total(parts), next((part.query for part in parts), None))
        last, owner = log.note(self.batch_note), log.note(self.owner_note)  # 1
        new_owner = self._owned(owner, next((part.run for part in parts), None))  # 2
        if not self._is_repeat(batch, last):
            self._store(log, parts, batch, {self.batch_note: (last, _dump(batch)), self.owner_note: (owner, new_owner)})
        discard(self.options, self._group(batchId))  # 5

    def _store(self, log: Log, parts: list[TaskRows], batch: LastBatch, notes: dict[str, tuple[str | None, str | None]]) -> None:
        try:
            with log.transaction(self.name, timeout=COMMIT_TIMEOUT) as transaction:  # 3
                for part in parts:
                    if part.staged.rows:
                        transaction.adopt(part.staged)
                for name, (before, after) in notes.items():
                    transaction.set_note(name, after, expect=before)
        except (NoteConflict, TransactionFenced) as error:
            raise TransactionFenced(
                f"Another query wrote as {self.name!r} at the same moment. Nothing of this batch is stored.",
                fix="stop one of the two queries, or give each its own writer.",
            ) from error
        except BaseException:
            forget(self.options.address)
            if not self._happened(batch):  # 4
                raise

    def _owned(self, owner: str | None, run: str | None) -> str | None:
        """The owner's note after this commit. TransactionFenced if this run was replaced."""
        known = Owner(**_load(owner)) if owner is not None else None
        if run is None or (known is not None and known.run == run):
            return owner
        if known is not None and run in known.past:
            raise TransactionFenced(
                f"A newer query writes as {self.name!r}; this one (run {run}) was replaced by it (run {known.run}). Nothing of this batch is stored.",
                fix="stop one of the two queries, or give each its own writer.",
            )
        return _dump(Owner(run, (known.run, *known.past)[:PAST_RUNS] if known is not None else ()))

    def _is_repeat(self, batch: LastBatch, stored: str | None) -> bool:
        """Whether the batch is stored already. BatchConflict if its number is taken by other rows, or was passed long ago."""
        if stored is None:
            return False
        last = LastBatch(**_load(stored))
        if batch.batch > last.batch:
            return False
        if (batch.batch, batch.rows, batch.digest) == (last.batch, last.rows, last.digest):
            return True
        raise self._conflict(batch, last)

    def _conflict(self, batch: LastBatch, last: LastBatch) -> BatchConflict:
        where = f"as {self.name!r} into {self.options.topic!r}"
        if batch.batch < last.batch:
            found = f"The query writes batch {batch.batch} {where}, but batch {last.batch} is stored already: it runs with another checkpoint than before."
        else:
            found = (
                f"Batch {batch.batch} {where} is stored already, with other rows ({last.rows} rows, digest {last.digest}) than the query has now "
                f"({batch.rows} rows, digest {batch.digest}): it runs with another checkpoint, or does not give the same rows when it is repeated."
            )
        return BatchConflict(
            f"{found} Nothing of this batch is stored.",
            fix="restore the old checkpoint; or, if rows may be written again from where the query starts now, give it another writer name. "
            "A query that is repeated must not depend on chance or on the present time.",
        )

    def _happened(self, batch: LastBatch) -> bool:
        """Whether a commit that failed was stored after all."""
        return shared_log(self.options.address).note(self.batch_note) == _dump(batch)


def _total(parts: list[TaskRows]) -> tuple[int, str]:
    total = sum((part.digest for part in parts), Digest())
    return total.rows, total.text


def _dump(note: LastBatch | Owner) -> str:
    return json.dumps(asdict(note))


def _load(note: str) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(note)
    if stored["version"] != VERSION:
        raise NewerFormat(f"A streaming writer's note has format {stored['version']}; this Headrace knows {VERSION}.", fix="upgrade Headrace.")
    return stored
