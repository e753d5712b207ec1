"""What a task of a writing query does: it checks its rows against the topic and puts them aside in the log, where nobody sees them.

What it returns is small and goes to the driver, which makes the rows of all tasks visible in one transaction, or discards them. A task that fails leaves
nothing behind; what a task that was killed leaves is swept a day later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from headrace.errors import ConfigurationError
from headrace.log.api import Log, Staged, TopicInfo
from headrace.log.rows import to_batch
from headrace.log.spark.columns import as_changes
from headrace.log.spark.digest import Digest, digest
from headrace.log.spark.handles import shared_log
from headrace.log.spark.options import WriteOptions

RUN_PROPERTY = "spark.jobGroup.id"
"""A streaming query runs its jobs in a group that is named after its run."""
QUERY_PROPERTY = "sql.streaming.queryId"


@dataclass(frozen=True)
class TaskRows(WriterCommitMessage):
    """The rows of one task. `run` and `query` are Spark's ids of the streaming query, if it is one."""

    staged: Staged
    digest: Digest
    run: str | None = None
    query: str | None = None


def check_staging(options: WriteOptions) -> None:
    if options.staging_directory is not None and not options.address.log.startswith("kafka://"):
        raise ConfigurationError(
            "The option 'stagingDirectory' is for a log on Kafka; the embedded log puts rows aside in itself.", fix="leave it out."
        )


def stage(options: WriteOptions, batches: Iterable[pa.RecordBatch], *, digested: bool) -> TaskRows:
    """Put a task's rows aside; returns what the driver needs to make them visible."""
    log = shared_log(options.address)
    info = log.topic(options.topic)
    digests: list[Digest] = []
    staged = log.stage(options.topic, _fitted(batches, info, digests if digested else None), directory=options.staging_directory)
    task = TaskContext.get()
    run, query = (task.getLocalProperty(name) if task is not None else None for name in (RUN_PROPERTY, QUERY_PROPERTY))
    return TaskRows(staged, sum(digests, Digest()), run, query)


def _fitted(batches: Iterable[pa.RecordBatch], info: TopicInfo, digests: list[Digest] | None) -> Iterator[pa.RecordBatch]:
    for rows in batches:
        batch = to_batch(as_changes(rows, info), info.arrow_schema, topic=info.name)
        if digests is not None:
            digests.append(digest(batch))
        yield batch


def finished(messages: Sequence[WriterCommitMessage | None]) -> list[TaskRows]:
    """What the tasks that succeeded wrote, in the order of the tasks: so a partition's rows keep their order."""
    return [message for message in messages if isinstance(message, TaskRows)]


def discard(log: Log, parts: Iterable[TaskRows]) -> None:
    for part in parts:
        log.discard_staged(part.staged)


def discard_after_failure(options: WriteOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Clean up when tasks failed. If all succeeded, it was the commit that failed, and it has cleaned up, or its outcome is unknown and nothing may go."""
    parts = finished(messages)
    if len(parts) < len(messages):
        discard(shared_log(options.address), parts)
