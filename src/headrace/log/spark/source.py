"""The data source class behind `format("headrace")`. It checks options and columns and returns
readers and writers.

Spark creates instances in processes of its own, next to the driver and in the tasks; an instance
has only the options.
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
    """The data source `headrace`.

    Options of reads and writes: `log` (the log's address), `topic`, and with the prefix `kafka.`
    every option of Kafka's client.

    Options of reads:

    - `columns`: column names separated by commas; by default the topic's columns and `_partition`,
      `_offset` and `_timestamp`.
    - `startingOffsets`: earliest (the default), latest, a time, or JSON of partitions and offsets.
      A
      stream with a checkpoint goes on from the checkpoint.
    - `endingOffsets`: latest (the default), or as above. Not for streams.
    - `maxRowsPerBatch`: for streams, counted in offsets and divided evenly between the partitions.
      It
      may split a transaction.
    - `splitRows`: the most offsets of one task, for more than one task per partition.
    - `includeHeaders`: true adds the column `_headers`.
    - `onCorrupt`: fail (the default), or skip damaged rows.
    - `onLost`: fail (the default) when retention removed rows that the stream had not read, or
      earliest, to go on with the earliest rows.

    Options of writes (batches with `mode("append")`):

    - `writer`: for streams, a unique name, by which a repeated batch is recognised.
    - `stagingDirectory`: on Kafka, where tasks stage rows; on a cluster, storage that all machines
      share.
    """

    home = ""
    """The directory from which a relative `file:` address starts."""

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
        return TopicReader(self._read_options(schema), schema)

    def streamReader(self, schema: StructType) -> TopicStreamReader:  # noqa: N802 - Spark's name
        return TopicStreamReader(self._read_options(schema), schema)

    def writer(self, schema: StructType, overwrite: bool) -> TopicWriter:
        return TopicWriter(self._write_options(schema, overwrite=overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> TopicStreamWriter:  # noqa: N802
        return TopicStreamWriter(self._write_options(schema, overwrite=overwrite))

    def _read_options(self, schema: StructType) -> ReadOptions:
        options = read_options(self.options, home=self.home)
        check_readable(
            schema, shared_log(options.address).topic(options.topic), headers=options.headers
        )
        return options

    def _write_options(self, schema: StructType, *, overwrite: bool) -> WriteOptions:
        if overwrite:
            raise NotSupported(
                "A topic is appended to; it cannot be overwritten.",
                fix="use mode('append'), and outputMode('append') for a stream.",
            )
        options = write_options(self.options, home=self.home)
        check_staging(options)
        check_writable(schema, shared_log(options.address).topic(options.topic))
        return options
