"""The class that Spark knows as `format("headrace")`. It does little itself: it checks options and columns and hands out readers and writers.

Spark makes an instance in processes of its own, beside the driver and in the tasks; all that an instance has is the options.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from headrace.errors import NotSupported
from headrace.log.spark.batch_reader import TopicReader
from headrace.log.spark.batch_writer import TopicWriter
from headrace.log.spark.columns import check_readable, check_writable, spark_schema
from headrace.log.spark.handles import shared_log
from headrace.log.spark.options import ReadOptions, WriteOptions, read_options, write_options
from headrace.log.spark.staging import check_staging
from headrace.log.spark.stream_reader import TopicStreamReader
from headrace.log.spark.stream_writer import TopicStreamWriter


class TopicSource(DataSource):
    home = ""
    """The directory that a relative `file:` address starts from."""

    @classmethod
    def name(cls) -> str:
        return "headrace"

    def schema(self) -> str:
        options = read_options(self.options, home=self.home)
        return spark_schema(shared_log(options.address).topic(options.topic), options.columns, headers=options.headers)

    def reader(self, schema: StructType) -> TopicReader:
        return TopicReader(self._to_read(schema), schema)

    def streamReader(self, schema: StructType) -> TopicStreamReader:  # noqa: N802 - Spark's name
        return TopicStreamReader(self._to_read(schema), schema)

    def writer(self, schema: StructType, overwrite: bool) -> TopicWriter:
        return TopicWriter(self._to_write(schema, overwrite=overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> TopicStreamWriter:  # noqa: N802
        return TopicStreamWriter(self._to_write(schema, overwrite=overwrite))

    def _to_read(self, schema: StructType) -> ReadOptions:
        options = read_options(self.options, home=self.home)
        check_readable(schema, shared_log(options.address).topic(options.topic), headers=options.headers)
        return options

    def _to_write(self, schema: StructType, *, overwrite: bool) -> WriteOptions:
        if overwrite:
            raise NotSupported("A topic is appended to; it cannot be overwritten.", fix="use mode('append'), and outputMode('append') for a stream.")
        options = write_options(self.options, home=self.home)
        check_staging(options)
        check_writable(schema, shared_log(options.address).topic(options.topic))
        return options
