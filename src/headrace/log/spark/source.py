"""The class that Spark knows as `format("headrace")`. It does little itself: it checks options and
columns and hands out readers and writers.

Spark makes an instance in processes of its own, beside the driver and in the tasks; all that an
instance has is the options.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from headrace.errors import NotSupported
from headrace.log.spark.columns import check_readable, check_writable, spark_schema
from headrace.log.spark.options import (
    ReadOptions,
    WriteOptions,
    read_options,
    shared_log,
    write_options,
)
from headrace.log.spark.reader import TopicReader, TopicStreamReader
from headrace.log.spark.writer import TopicStreamWriter, TopicWriter, check_staging


class TopicSource(DataSource):
    """Options of both: `log` (an address), `topic`, and with the prefix `kafka.` whatever Kafka's
    client takes.

    Reading
        columns           some columns, separated by commas; without it the topic's and
        `_partition`, `_offset`, `_timestamp` startingOffsets   earliest (the default), latest, a
        time, or JSON of partitions and offsets; a stream with a checkpoint goes on from there
        endingOffsets     latest (the default) or as above; not for a stream maxRowsPerBatch   of a
        stream, counted in offsets and shared out evenly over partitions; it may cut a transaction
        in two splitRows         more than one task for a partition: at most so many offsets each
        includeHeaders    true adds `_headers` onCorrupt         fail (the default) or skip what is
        damaged onLost            fail (the default) when retention removed what the stream had not
        read yet, or go on from the earliest that is kept

    Writing (a batch with `mode("append")`)
        writer            of a stream: a name of its own, by which a repeated batch is recognised
        stagingDirectory  on Kafka: where tasks put rows aside; on a cluster, storage that all
        machines share
    """

    home = ""
    """The directory that a relative `file:` address starts from."""

    @classmethod
    def name(cls) -> str:
        return "headrace"

    def schema(self) -> str:
        options = read_options(self.options, home=self.home)
        return spark_schema(
            shared_log(options.address).topic(options.topic),
            options.columns,
            headers=options.headers,
        )

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
        check_readable(
            schema, shared_log(options.address).topic(options.topic), headers=options.headers
        )
        return options

    def _to_write(self, schema: StructType, *, overwrite: bool) -> WriteOptions:
        if overwrite:
            raise NotSupported(
                "A topic is appended to; it cannot be overwritten.",
                fix="use mode('append'), and outputMode('append') for a stream.",
            )
        options = write_options(self.options, home=self.home)
        check_staging(options)
        check_writable(schema, shared_log(options.address).topic(options.topic))
        return options
