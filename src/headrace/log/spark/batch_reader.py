"""Reading a topic as it is now: `spark.read.format("headrace")`. The ends are taken once, when the query is planned."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from headrace.errors import ConfigurationError
from headrace.log.spark.handles import shared_log
from headrace.log.spark.options import ReadOptions
from headrace.log.spark.positions import resolve
from headrace.log.spark.ranges import OffsetSlice, read_slice, slices


class TopicReader(DataSourceReader):
    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options, self.schema = options, schema

    def partitions(self) -> list[OffsetSlice]:
        log, topic = shared_log(self.options.address), self.options.topic
        begin = resolve(log, topic, self.options.starting, option="startingOffsets")
        ends = resolve(log, topic, self.options.ending, option="endingOffsets")
        for partition in sorted(begin):
            if begin[partition] > ends[partition]:
                raise ConfigurationError(
                    f"The read of {topic}[{partition}] would begin at {begin[partition]} and end at {ends[partition]}.",
                    fix="let startingOffsets come before endingOffsets.",
                )
        return slices(begin, ends, self.options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_slice(self.options, self.schema, partition)
