"""Streaming DataFrames that are brought in: for each a Spark query that writes into its topic, as long as the run goes on.

A query has a checkpoint in the state directory, and writes under a name of its own, by which the log recognises a repeated batch: each row comes in once. One that fails is
started again, after a while that grows; the status says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigurationError
from headrace.pipeline.failures import reason

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from headrace.pipeline.pipeline import Pipeline

logger = logging.getLogger("headrace.pipeline")
EVERY = "200 milliseconds"
LONGEST_PAUSE_S = 60.0
MOST_FAILURES = 20


@dataclass
class IngestQuery:
    """One of them. `given` is the DataFrame, or a function that makes it from the session."""

    name: str
    topic: str
    writer: str
    given: Any
    checkpoint: Path
    query: StreamingQuery | None = None
    failures: int = 0
    error: str | None = None
    is_done: bool = False
    start_after_s: float = 0.0

    def start(self, spark: SparkSession, log: str, *, until_caught_up: bool) -> None:
        rows = self._rows(spark)
        writing = rows.writeStream.format("headrace").option("log", log).option("topic", self.topic).option("writer", self.writer)
        writing = writing.option("checkpointLocation", str(self.checkpoint)).queryName(self.writer)
        triggered = writing.trigger(availableNow=True) if until_caught_up else writing.trigger(processingTime=EVERY)
        self.query = triggered.start()

    def _rows(self, spark: SparkSession) -> DataFrame:
        rows: DataFrame = self.given(spark) if callable(self.given) else self.given
        if not getattr(rows, "isStreaming", False):
            raise ConfigurationError(
                f"What is to be ingested as {self.name!r} is no streaming DataFrame.",
                fix="read it with spark.readStream; a batch is written once, with df.write.format('headrace').",
            )
        return rows

    def has_failed(self, error: BaseException) -> None:
        self.failures += 1
        self.error, self.query = reason(error), None
        if self.failures > MOST_FAILURES:
            raise error
        pause_s = min(LONGEST_PAUSE_S, 2.0 ** min(self.failures, 10))
        self.start_after_s = time.monotonic() + pause_s
        logger.warning("The ingest %s failed (%d in a row): %s\nTrying again in %.0f s.", self.name, self.failures, self.error, pause_s)

    def about(self) -> str:
        """How it is doing, in a few words."""
        if self.error is not None:
            return f"failed ({self.failures} in a row): {self.error}"
        if self.is_done:
            return "done"
        progress = self.query.lastProgress if self.query is not None else None
        return "starting" if progress is None else f"running, batch {progress.batchId}, {progress.processedRowsPerSecond:,.0f} rows/s"


class Ingests:
    """All of a run. `attend` is called between batches."""

    def __init__(
        self, pipeline: Pipeline, spark: SparkSession, log: str, state: Path, *, until_caught_up: bool, on_change: Callable[[], None]
    ) -> None:
        self.spark, self.log, self.until_caught_up, self.on_change = spark, log, until_caught_up, on_change
        self.queries = [
            IngestQuery(each.name, each.topic, f"{pipeline.name}.{each.name}", pipeline.ingested[each.name], state.absolute() / "ingest" / each.name)
            for each in pipeline.plan().ingests
        ]

    def attend(self) -> bool:
        """Start what is to be started, notice what has ended. Returns whether rows may still come before a run that is to catch up may end."""
        changed = [self._attend_one(query) for query in self.queries]
        if any(changed):
            self.on_change()
        return any(not query.is_done for query in self.queries)

    def _attend_one(self, each: IngestQuery) -> bool:
        """Returns whether there is something to tell."""
        if each.is_done or (each.query is None and time.monotonic() < each.start_after_s):
            return False
        if each.query is None:
            return self._start(each)
        if each.query.isActive:
            return self._went_well(each)
        error = each.query.exception()
        if error is not None:
            each.has_failed(error)
        else:
            each.is_done = True
        return True

    def _start(self, each: IngestQuery) -> bool:
        try:
            each.start(self.spark, self.log, until_caught_up=self.until_caught_up)
        except ConfigurationError:
            raise
        except Exception as error:
            each.has_failed(error)
        return True

    @staticmethod
    def _went_well(each: IngestQuery) -> bool:
        """A query that was started again is well when it has done a batch."""
        if each.error is None or each.query is None or each.query.lastProgress is None:
            return False
        each.error, each.failures = None, 0
        return True

    def status(self) -> dict[str, str]:
        return {query.name: query.about() for query in self.queries}

    def stop(self) -> None:
        for each in self.queries:
            if each.query is not None and each.query.isActive:
                each.query.stop()
