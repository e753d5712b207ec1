"""Topics in Spark: `format("headrace")`, batch and streaming, reading and writing, over either
backend. The only part of the log that knows Spark.

`hr.spark()` registers it; for a session of your own, call `register(session)`. Then one row's way
through the files is:

    options       what the user asked for, checked handles       a log opened once per worker
    process columns       a topic's columns as Spark's, and whether a DataFrame's columns fit a
    topic positions     where a read begins and ends, and how much one batch takes ranges
    offsets from one to another, read as Arrow batches: what a task of a reading query does
    batch_reader  a read of what is there now stream_reader a read that goes on, batch after batch
    digest        what a batch's rows are, whatever their order: how a repeated batch is recognised
    staging       rows put aside in the log, invisibly: what a task of a writing query does
    batch_writer  everything a query wrote, visible at once stream_writer the same for each batch of
    a stream, exactly once source        the class that Spark knows; it hands out the readers and
    writers above

No row is ever a Python object on its way: Arrow batches go in and out.
"""

from __future__ import annotations

import os
from typing import Any

from headrace.log.spark.source import TopicSource

__all__ = ["register"]


def register(session: Any) -> None:
    """Make `format("headrace")` known to a session, also one of Spark Connect. A relative `file:`
    address means: from the present directory.
    """

    class Source(
        TopicSource
    ):  # pickled with the value below; Spark's workers run in directories of their own
        home = os.getcwd()  # noqa: PTH109 - as text, it is pickled

    session.dataSource.register(Source)
