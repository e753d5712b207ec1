"""Writing DataFrames and streams into topics. All rows of a write become visible at once, or none.

Tasks check their rows against the topic and stage them in the log, where no reader sees them
(`stage_rows`). They return a small `TaskResult` to the driver, which adopts the rows of all tasks
in one transaction (`TopicWriter.commit`, `TopicStreamWriter.commit`). All tasks of a job stage
their rows under one group's name, by which the driver discards what is left over, also by tasks
that failed or were killed.

A stream is written exactly once. Each batch is one transaction of the log: its rows, and two notes.
One note records the writer's last batch and the digest of its rows, the other the run of the query
that writes under this name. Spark repeats a batch after a crash, and numbers batches anew with a
new checkpoint. So a batch

- with a higher number than the last one is new, and is stored;
- with the last number and the same rows is a repeat, and is skipped;
- with any other number comes from another checkpoint, and is refused: skipping it would lose rows,
  storing it would duplicate them.

Of two queries that write under one name, the newer one goes on, and the older one is refused at its
next batch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from headrace.errors import (
    BatchConflict,
    ConfigurationError,
    NewerFormat,
    NoteConflict,
    TransactionFenced,
)
from headrace.log.api import Log
from headrace.log.rows import to_batch
from headrace.log.spark.columns import with_default_change
from headrace.log.spark.digest import Digest, digest_rows
from headrace.log.spark.options import WriteOptions, close_shared_log, shared_log
from headrace.log.values import Staged

# Tasks

RUN_PROPERTY, QUERY_PROPERTY, BATCH_PROPERTY = (
    "spark.jobGroup.id",
    "sql.streaming.queryId",
    "streaming.sql.batchId",
)
"""The local properties by which a task knows its streaming query: the jobs of a query are in
a job group that is named after its run.
"""


@dataclass(frozen=True)
class TaskResult(WriterCommitMessage):
    """What one task has staged. `run` and `query` are Spark's ids of a streaming query."""

    staged: Staged
    digest: Digest
    run: str | None = None
    query: str | None = None


def check_staging(options: WriteOptions) -> None:
    if options.staging_directory is not None and not options.address.log.startswith("kafka://"):
        raise ConfigurationError(
            "The option 'stagingDirectory' is for a log on Kafka; the embedded log stages rows in"
            " its own directory.",
            fix="leave it out.",
        )


def task_property(name: str) -> str | None:
    task = TaskContext.get()
    return task.getLocalProperty(name) if task is not None else None


def stage_rows(
    options: WriteOptions, batches: Iterable[pa.RecordBatch], *, group: str, with_digest: bool
) -> TaskResult:
    """Stage the rows of a task. Returns what the driver needs to make them visible."""
    log = shared_log(options.address)
    info = log.topic(options.topic)
    digests: list[Digest] = []

    def fit_batches() -> Iterator[pa.RecordBatch]:
        for rows in batches:
            batch = to_batch(
                with_default_change(rows, info),
                info.arrow_schema,
                topic=info.name,
                history=info.schema_history,
            )
            if with_digest:
                digests.append(digest_rows(batch))
            yield batch

    staged = log.stage(
        options.topic, fit_batches(), directory=options.staging_directory, group=group
    )
    return TaskResult(
        staged=staged,
        digest=sum(digests, Digest()),
        run=task_property(RUN_PROPERTY),
        query=task_property(QUERY_PROPERTY),
    )


def group_name(*parts: object) -> str:
    """A short name for rows that are staged together, the same in every process."""
    return blake2b("\0".join(map(str, parts)).encode(), digest_size=12).hexdigest()


def task_results(messages: Sequence[WriterCommitMessage | None]) -> list[TaskResult]:
    """The results of the tasks that succeeded, in the order of the tasks, so that the rows of a
    partition keep their order.
    """
    return [message for message in messages if isinstance(message, TaskResult)]


def discard_staged(options: WriteOptions, group: str) -> None:
    """Remove what a job has staged and no transaction has adopted."""
    shared_log(options.address).discard_group(group, directory=options.staging_directory)


# Batch writes: `df.write.format("headrace").mode("append")`

COMMIT_TIMEOUT = "10 minutes"
"""The timeout of the driver's transaction. It begins when all rows are staged; only on Kafka, where
the rows are sent then, does it take long.
"""
TRANSACTION_IDS = 16
"""The number of transaction ids that batch writes choose from at random. Concurrent writes need
different ids, and a log stores every id it has seen.
"""
ATTEMPTS = 5


class TopicWriter(DataSourceArrowWriter):
    """The writer of one batch query. Spark copies it to the tasks and back to the driver."""

    def __init__(self, options: WriteOptions) -> None:
        self.options = options
        self.group = group_name(uuid4())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        return stage_rows(self.options, iterator, group=self.group, with_digest=False)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        parts = [part for part in task_results(messages) if part.staged.rows]
        try:
            if parts:
                self._commit(shared_log(self.options.address), parts)
        except BaseException:
            close_shared_log(self.options.address)
            raise
        discard_staged(self.options, self.group)

    def _commit(self, log: Log, parts: list[TaskResult]) -> None:
        """Adopt the rows of all tasks in one transaction. If a concurrent write with the same
        transaction id fences it, nothing is stored, and it is tried again.
        """
        for attempt in range(ATTEMPTS):
            try:
                with log.transaction(
                    f"spark-batch.{random.randrange(TRANSACTION_IDS)}",  # noqa: S311
                    timeout=COMMIT_TIMEOUT,
                ) as transaction:
                    for part in parts:
                        transaction.adopt(part.staged)
            except TransactionFenced:
                if attempt + 1 == ATTEMPTS:
                    raise
            else:
                return

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:  # noqa: ARG002
        discard_staged(self.options, self.group)


# Stream writes: `df.writeStream.format("headrace").option("writer", "a-unique-name")`

VERSION = 1
MAX_PAST_RUNS = 16
"""The number of replaced runs that an owner note lists."""


@dataclass(frozen=True)
class WriterBatch:
    """The note of a writer and topic: the last stored batch."""

    batch: int
    rows: int
    digest: str
    query: str | None = None
    version: int = VERSION


@dataclass(frozen=True)
class WriterOwner:
    """The note of a writer: the run that writes under this name, and the runs it replaced."""

    run: str
    past: tuple[str, ...] = ()
    version: int = VERSION


class TopicStreamWriter(DataSourceStreamArrowWriter):
    """The writer of one streaming query."""

    def __init__(self, options: WriteOptions) -> None:
        if options.writer is None:
            raise ConfigurationError(
                "A streaming write needs the option 'writer'.",
                fix=(
                    "give each query a name of its own, as in .option('writer', 'large-orders'),"
                    " and keep it: by it a repeated batch is recognised."
                ),
            )
        self.options, self.name = options, options.writer
        self.batch_note = f"spark-writer.{self.name}.{options.topic}"
        self.owner_note = f"spark-owner.{self.name}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        return stage_rows(
            self.options,
            iterator,
            group=self._group(task_property(BATCH_PROPERTY)),
            with_digest=True,
        )

    def _group(self, batch: int | str | None) -> str:
        return group_name(self.options.address.log, self.options.topic, self.name, batch)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803 - Spark's names
        discard_staged(self.options, self._group(batchId))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Commit a batch:

        1. read the notes of this writer
        2. refuse a replaced run, and a number that is neither new nor a repeat; skip a repeat
        3. in one transaction: adopt the rows of all tasks, and set the batch's and the owner's
           note, each on condition that it is still as read
        4. if that failed with an unknown outcome, read the batch's note: it shows the outcome
        5. discard what was staged and not adopted; if the commit failed, Spark calls `abort`, which
           does so
        """
        parts, log = task_results(messages), shared_log(self.options.address)
        total = sum((part.digest for part in parts), Digest())
        batch = WriterBatch(
            batch=batchId,
            rows=total.rows,
            digest=total.text,
            query=next((part.query for part in parts), None),
        )
        last, owner = log.note(self.batch_note), log.note(self.owner_note)  # 1
        new_owner = self._next_owner(owner, next((part.run for part in parts), None))  # 2
        if not self._is_repeat(batch, last):
            self._store(
                log,
                parts,
                batch,
                {self.batch_note: (last, _dump(batch)), self.owner_note: (owner, new_owner)},
            )
        discard_staged(self.options, self._group(batchId))  # 5

    def _store(
        self,
        log: Log,
        parts: list[TaskResult],
        batch: WriterBatch,
        notes: dict[str, tuple[str | None, str | None]],
    ) -> None:
        try:
            with log.transaction(self.name, timeout=COMMIT_TIMEOUT) as transaction:  # 3
                for part in parts:
                    if part.staged.rows:
                        transaction.adopt(part.staged)
                for name, (before, after) in notes.items():
                    transaction.set_note(name, after, expect=before)
        except (NoteConflict, TransactionFenced) as error:
            raise TransactionFenced(
                f"Another query wrote as {self.name!r} at the same moment. Nothing of this batch is"
                " stored.",
                fix="stop one of the two queries, or give each its own writer.",
            ) from error
        except BaseException:
            close_shared_log(self.options.address)
            if shared_log(self.options.address).note(self.batch_note) != _dump(batch):  # 4
                raise

    def _next_owner(self, owner: str | None, run: str | None) -> str | None:
        """The owner note after this commit. TransactionFenced if this run was replaced."""
        stored = WriterOwner(**_load(owner)) if owner is not None else None
        if run is None or (stored is not None and stored.run == run):
            return owner
        if stored is not None and run in stored.past:
            raise TransactionFenced(
                f"A newer query writes as {self.name!r}; this one (run {run}) was replaced by it"
                f" (run {stored.run}). Nothing of this batch is stored.",
                fix="stop one of the two queries, or give each its own writer.",
            )
        return _dump(
            WriterOwner(
                run, (stored.run, *stored.past)[:MAX_PAST_RUNS] if stored is not None else ()
            )
        )

    def _is_repeat(self, batch: WriterBatch, stored: str | None) -> bool:
        """Whether the batch is stored already. BatchConflict if its number was used for other rows,
        or is lower than the last one.
        """
        if stored is None:
            return False
        last = WriterBatch(**_load(stored))
        if batch.batch > last.batch:
            return False
        if (batch.batch, batch.rows, batch.digest) == (last.batch, last.rows, last.digest):
            return True
        raise self._conflict(batch, last)

    def _conflict(self, batch: WriterBatch, last: WriterBatch) -> BatchConflict:
        where = f"as {self.name!r} into {self.options.topic!r}"
        if batch.batch < last.batch:
            reason = (
                f"The query writes batch {batch.batch} {where}, but batch {last.batch} is stored"
                " already: it runs with another checkpoint than before."
            )
        else:
            reason = (
                f"Batch {batch.batch} {where} is stored already, with other rows ({last.rows} rows,"
                f" digest {last.digest}) than the query has now ({batch.rows} rows, digest"
                f" {batch.digest}): it runs with another checkpoint, or does not give the same rows"
                " when it is repeated."
            )
        return BatchConflict(
            f"{reason} Nothing of this batch is stored.",
            fix=(
                "restore the old checkpoint; or, if rows may be written again from where the query"
                " starts now, give it another writer name. A query that is repeated must not depend"
                " on chance or on the present time."
            ),
        )


def _dump(note: WriterBatch | WriterOwner) -> str:
    return json.dumps(asdict(note))


def _load(note: str) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(note)
    if stored["version"] != VERSION:
        raise NewerFormat(
            f"A streaming writer's note has format {stored['version']}; this Headrace knows"
            f" {VERSION}.",
            fix="upgrade Headrace.",
        )
    return stored
