"""Deliveries as rows of their topic, all at once where they fit; those that do not are found, and say why."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, cast

import pyarrow as pa

from headrace.errors import BadRows
from headrace.gateways.deliveries import Columns, Delivery, Lines, Parsed, Plain
from headrace.log.json_rows import Decoded, decode, decode_exactly
from headrace.log.rows import to_batch


@dataclass
class DecodedDeliveries:
    """Rows of the deliveries that fit, in their order, and how many each has; for the others the reason."""

    fitting: list[Delivery] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    batches: list[pa.RecordBatch] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    """By the identity of the delivery."""

    def add(self, deliveries: Sequence[Delivery], batch: pa.RecordBatch) -> None:
        self.fitting += deliveries
        self.counts += [_count(each) for each in deliveries]
        self.batches.append(batch)


def _count(delivery: Delivery) -> int:
    content = delivery.content
    return content.batch.num_rows if isinstance(content, Columns) else len(content.values)


def decoded(deliveries: Sequence[Delivery], schema: pa.Schema, *, ignored: Collection[str], topic: str) -> DecodedDeliveries:
    """`schema` is what senders give; `ignored` are columns they may give although we know better."""
    result = DecodedDeliveries()
    for kind, run in groupby(deliveries, key=lambda each: type(each.content)):
        together = list(run)
        if kind in {Lines, Parsed}:
            _decode_json(together, schema, ignored, result)
        else:
            for each in together:
                _decode_plain(each, schema, topic, result)
    return result


def _decode_json(deliveries: list[Delivery], schema: pa.Schema, ignored: Collection[str], result: DecodedDeliveries) -> None:
    """Together; if some do not fit, each of these is refused as a whole, and the others are decoded again."""
    parts = _decode(deliveries, schema, ignored)
    if not parts.misfits:
        result.add(deliveries, parts.batch)
        return
    first, fitting = 0, []
    for each in deliveries:
        count = _count(each)
        reasons = [(index, why) for index, why in parts.misfits.items() if first <= index < first + count]
        if reasons:
            result.refused[id(each)] = f"Row {reasons[0][0] - first}: {reasons[0][1]}"
        else:
            fitting.append(each)
        first += count
    if fitting:
        result.add(fitting, _decode(fitting, schema, ignored).batch)


def _decode(deliveries: Sequence[Delivery], schema: pa.Schema, ignored: Collection[str]) -> Decoded:
    values = [value for each in deliveries for value in cast("Lines | Parsed", each.content).values]
    if isinstance(deliveries[0].content, Lines):
        return decode(values, schema, ignored=ignored)
    return decode_exactly(values, schema, ignored=ignored, parser=_as_it_is)


def _as_it_is(value: Any) -> Any:
    return value


def _decode_plain(delivery: Delivery, schema: pa.Schema, topic: str, result: DecodedDeliveries) -> None:
    content = cast("Plain | Columns", delivery.content)
    try:
        rows = _aligned(content.batch, schema) if isinstance(content, Columns) else [{name: row.get(name) for name in schema.names} for row in content.values]
        result.add([delivery], to_batch(rows, schema, topic=topic))
    except BadRows as error:
        result.refused[id(delivery)] = error.message


def _aligned(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns that the topic has; what the batch lacks is null."""
    arrays = [batch.column(each.name) if each.name in batch.schema.names else pa.nulls(batch.num_rows, each.type) for each in schema]
    return pa.RecordBatch.from_arrays(arrays, names=schema.names)
