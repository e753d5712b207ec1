"""Reading a topic as it grows: `spark.readStream.format("headrace")`. Spark asks how far a batch may go, then for the tasks that read it.

A batch takes everything committed by then, and so never half of a transaction of the embedded log; with `maxRowsPerBatch` it takes an even share of every
partition instead. With the trigger `availableNow` it ends where the topic ended when the query started.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from headrace.log.api import Log
from headrace.log.spark.handles import shared_log
from headrace.log.spark.options import ReadOptions
from headrace.log.spark.positions import Offsets, beginning, cut, from_json, latest, resolve, still_there, to_json
from headrace.log.spark.ranges import OffsetSlice, read_slice, slices


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in one process beside Spark's driver while the query runs, and is copied to the tasks for `read`."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options, self.schema = options, schema
        self._first: dict[str, Any] | None = None
        self._target: Offsets | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Asked several times; what "latest" means must not change in between."""
        if self._first is None:
            self._first = to_json(resolve(self._log(), self.options.topic, self.options.starting, option="startingOffsets"))
        return self._first

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadAllAvailable() if self.options.max_rows is None else ReadMaxRows(self.options.max_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = latest(self._log(), self.options.topic)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Up to where the next batch goes. `start` itself, if there is nothing new: that is how `availableNow` ends."""
        ends = self._target or latest(self._log(), self.options.topic)
        begin = still_there(self._log(), self.options.topic, from_json(start), ends, on_lost=self.options.on_lost)
        if isinstance(limit, ReadMaxRows):
            ends = cut(begin, ends, limit.max_rows)
        if start == self._first:
            return to_json(ends, began_at=from_json(start))
        return start if ends == from_json(start) else to_json(ends)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return to_json(latest(self._log(), self.options.topic))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[OffsetSlice]:
        ends = from_json(end)
        begin = still_there(self._log(), self.options.topic, beginning(start, end), ends, on_lost=self.options.on_lost)
        return slices(begin, ends, self.options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_slice(self.options, self.schema, partition)

    def _log(self) -> Log:
        return shared_log(self.options.address)
