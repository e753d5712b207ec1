"""What a task of a writing query does: it checks its rows against the topic and puts them aside in the log, where nobody sees them.

What it returns is small and goes to the driver, which makes the rows of all tasks visible in one transaction. All tasks of a job put their rows aside under one
group's name, by which the driver discards what is left in the end, also by tasks that failed or were killed. What a task leaves that outlives even that is swept
a day later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from headrace.errors import ConfigurationError
from headrace.log.api import Staged, TopicInfo
from headrace.log.rows import to_batch
from headrace.log.spark.columns import as_changes
from headrace.log.spark.digest import Digest, digest
from headrace.log.spark.handles import shared_log
from headrace.log.spark.options import WriteOptions

RUN_PROPERTY, QUERY_PROPERTY, BATCH_PROPERTY = "spark.jobGroup.id", "sql.streaming.queryId", "streaming.sql.batchId"
"""How Spark tells a task which streaming query it works for: a query's jobs are in a group that is named after its run."""


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


def task_property(name: str) -> str | None:
    task = TaskContext.get()
    return task.getLocalProperty(name) if task is not None else None


def stage(options: WriteOptions, batches: Iterable[pa.RecordBatch], *, group: str, digested: bool) -> TaskRows:
    """Put a task's rows aside; returns what the driver needs to make them visible."""
    log = shared_log(options.address)
    info = log.topic(options.topic)
    digests: list[Digest] = []
    rows = _fitted(batches, info, digests if digested else None)
    staged = log.stage(options.topic, rows, directory=options.staging_directory, group=group)
    return TaskRows(staged, sum(digests, Digest()), task_property(RUN_PROPERTY), task_property(QUERY_PROPERTY))


def group_name(*parts: object) -> str:
    """A name for what is staged together: short, and the same wherever it is asked for."""
    return blake2b("\0".join(map(str, parts)).encode(), digest_size=12).hexdigest()


def _fitted(batches: Iterable[pa.RecordBatch], info: TopicInfo, digests: list[Digest] | None) -> Iterator[pa.RecordBatch]:
    for rows in batches:
        batch = to_batch(as_changes(rows, info), info.arrow_schema, topic=info.name)
        if digests is not None:
            digests.append(digest(batch))
        yield batch


def finished(messages: Sequence[WriterCommitMessage | None]) -> list[TaskRows]:
    """What the tasks that succeeded wrote, in the order of the tasks: so a partition's rows keep their order."""
    return [message for message in messages if isinstance(message, TaskRows)]


def discard(options: WriteOptions, group: str) -> None:
    """Remove what a job put aside and no transaction took."""
    shared_log(options.address).discard_group(group, directory=options.staging_directory)
