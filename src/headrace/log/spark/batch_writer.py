"""Writing a DataFrame into a topic: `df.write.format("headrace").mode("append")`. All of its rows become visible at once, or none."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from headrace.errors import TransactionFenced
from headrace.log.api import Log
from headrace.log.spark.handles import forget, shared_log
from headrace.log.spark.options import WriteOptions
from headrace.log.spark.staging import TaskRows, discard, finished, group_name, stage

COMMIT_TIMEOUT = "10 minutes"
"""How long the driver's transaction may take. It begins when all rows are staged, so that only on Kafka, where rows are then sent, it takes long."""
TRANSACTION_IDS = 16
"""Concurrent writes need different transaction ids, and a log remembers every id it has seen: so there are a few, taken at random."""
ATTEMPTS = 5


class TopicWriter(DataSourceArrowWriter):
    """Made once for a query, then copied to its tasks and back to the driver."""

    def __init__(self, options: WriteOptions) -> None:
        self.options = options
        self.group = group_name(uuid4())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskRows:
        return stage(self.options, iterator, group=self.group, digested=False)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        parts = [part for part in finished(messages) if part.staged.rows]
        try:
            if parts:
                self._commit(shared_log(self.options.address), parts)
        except BaseException:
            forget(self.options.address)
            raise
        discard(self.options, self.group)

    def _commit(self, log: Log, parts: list[TaskRows]) -> None:
        """One transaction. Another write that took the same id at the same moment is no reason to fail: nothing was stored, so it is tried again."""
        for attempt in range(ATTEMPTS):
            try:
                with log.transaction(f"spark-batch.{random.randrange(TRANSACTION_IDS)}", timeout=COMMIT_TIMEOUT) as transaction:  # noqa: S311
                    for part in parts:
                        transaction.adopt(part.staged)
            except TransactionFenced:
                if attempt + 1 == ATTEMPTS:
                    raise
            else:
                return

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:  # noqa: ARG002
        discard(self.options, self.group)
