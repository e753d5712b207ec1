"""Records of others that are taken as they are: those of a topic that was declared with nothing but a STRING or BINARY column `value`. Debezium's topics are read so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from headrace.log.api import TopicInfo
from headrace.log.json_rows import Decoded, decode

WHOLE = "value"
_OURS = b'{"value":'
"""How our own records of such a topic begin."""


def takes_anything(info: TopicInfo) -> bool:
    """A topic that has nothing but a text, or bytes, called `value` takes the records of others as they are: connectors', say."""
    return not info.is_table and info.arrow_schema.names == [WHOLE] and (pa.types.is_string(kind := info.arrow_schema.field(0).type) or pa.types.is_binary(kind))


def decode_anything(info: TopicInfo, values: Sequence[bytes | None]) -> Decoded:
    """Our own records are JSON with that one name; whatever else came is the value itself, or null."""
    ours = [row for row, value in enumerate(values) if value is not None and value.startswith(_OURS)]
    decoded = decode([values[row] or b"" for row in ours], info.arrow_schema)
    kept = ours if decoded.kept is None else [ours[row] for row in decoded.kept]
    found: list[Any] = list(values)
    for row, value in zip(kept, decoded.batch.column(0).to_pylist(), strict=True):
        found[row] = value
    kind = info.arrow_schema.field(0).type
    misfits = {} if pa.types.is_binary(kind) else {row: "it is no UTF-8" for row, value in enumerate(found) if isinstance(value, bytes) and not _is_text(value)}
    usable = [row for row in range(len(found)) if row not in misfits]
    column = pa.array([found[row].decode() if isinstance(found[row], bytes) and not pa.types.is_binary(kind) else found[row] for row in usable], kind)
    return Decoded(pa.RecordBatch.from_arrays([column], schema=info.arrow_schema), usable if misfits else None, misfits)


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
