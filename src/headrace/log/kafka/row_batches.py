"""What users append, made into batches that fit a topic: the same checks for producers, transactions and staged rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from headrace.errors import InputError
from headrace.log.api import Headers, Rows, TopicInfo
from headrace.log.rows import check_changes, to_batch, tombstones, upserts, with_headers


def appended(rows: Rows, info: TopicInfo, headers: Headers | None) -> pa.RecordBatch:
    """Rows as they are; on a table's topic each says what kind of change it is."""
    batch = to_batch(rows, info.arrow_schema, topic=info.name)
    if info.is_table:
        check_changes(batch, topic=info.name)
    return with_headers(batch, headers)


def upserted(rows: Rows, info: TopicInfo, headers: Headers | None) -> pa.RecordBatch:
    _check_table(info, "upsert")
    return with_headers(upserts(rows, info.arrow_schema, topic=info.name), headers)


def deleted(keys: Any, info: TopicInfo) -> pa.RecordBatch:
    _check_table(info, "delete")
    return tombstones(keys, info.arrow_schema, info.key, topic=info.name)


def _check_table(info: TopicInfo, what: str) -> None:
    if not info.is_table:
        raise InputError(f"{what} needs a table, and {info.name!r} is a plain topic.", fix="use append, or create it with create_table.")


def repeatable(rows: Rows) -> Rows:
    """Rows that can be looked at twice: an iterator is taken whole."""
    if isinstance(rows, pa.Table | pa.RecordBatch | dict | list) or hasattr(rows, "columns"):
        return rows
    return rows if isinstance(rows, str | bytes) or not hasattr(rows, "__iter__") else list(rows)
