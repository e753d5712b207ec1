"""Topics in Spark: `format("headrace")`, for batch and streaming reads and writes, on either log
backend. The only part of the log that depends on Spark.

In the order in which data flows:

- `session`: `hr.spark()`, a Spark session set up for topics. `settings` are its settings,
  `launcher`
  and `jvm` start its JVM, `class_archive` makes that faster.
- `source`: the data source class, which returns readers and writers.
- `options`: the options of reads and writes, checked; logs opened once per worker process.
- `columns`: a topic's columns as Spark's, and whether a DataFrame's columns fit a topic.
- `reader`: offsets of batches, and the tasks that read them as Arrow batches.
- `writer`: tasks that stage rows, and the driver's commit; streams exactly once.
- `digest`: a digest of a batch's rows, by which a repeated batch is recognised.

Rows are never Python objects on their way: Arrow batches go in and out. Spark finds the source
through the module `pyspark_headrace` in any session that can import it; `register` adds it to a
session of its own accord, as `hr.spark()` does. Pipelines on Spark are in `headrace.engine`.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["register"]


def register(session: Any) -> None:
    """Register `format("headrace")` with a session, which may also be one of Spark Connect.

    A relative `file:` address then starts from the current directory. If Spark has found the source
    by itself (see `pyspark_headrace`), it stays as it is, and a relative address starts from the
    directory in which Spark was started.

    Args:
        session: the Spark session.

    Example:
        >>> register(session)
        >>> session.read.format("headrace").options(log="file:data", topic="orders").load()

    """
    from pyspark.errors import PySparkException

    from headrace.log.spark.source import TopicSource

    class Source(TopicSource):
        # Pickled by value: Spark's workers may run in other directories.
        home = os.getcwd()  # noqa: PTH109

    try:
        session.dataSource.register(Source)
    except PySparkException as error:
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
