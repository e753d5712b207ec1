"""Ranges of offsets: what one task of a reading query gets, and how it reads them. Used by the batch reader and by the stream reader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from headrace.log.api import HEADERS_COLUMN
from headrace.log.spark.columns import arrow_schema, labelled
from headrace.log.spark.handles import shared_log
from headrace.log.spark.options import ReadOptions
from headrace.log.spark.positions import Offsets, pieces


@dataclass
class OffsetSlice(InputPartition):
    """Offsets of one partition of the topic, from `start` up to, not including, `stop`."""

    partition: int
    start: int
    stop: int


def slices(begin: Offsets, ends: Offsets, options: ReadOptions) -> list[OffsetSlice]:
    return [OffsetSlice(*piece) for piece in pieces(begin, ends, options.split_rows)]


def read_slice(options: ReadOptions, schema: StructType, piece: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of a slice, in Arrow batches as they lie in the log. Spark asks once with no slice at all when there is none."""
    if not isinstance(piece, OffsetSlice):
        return
    log, wanted, start = shared_log(options.address), arrow_schema(schema), piece.start
    if options.on_lost == "earliest":
        start = max(start, log.start_offsets(options.topic)[piece.partition])
    if start >= piece.stop:
        return
    batches = log.read(
        options.topic,
        piece.partition,
        start,
        piece.stop,
        columns=schema.names,
        headers=HEADERS_COLUMN in schema.names,
        on_corrupt=options.on_corrupt,
    )
    for batch in batches:
        yield labelled(batch, wanted)
