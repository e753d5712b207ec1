"""A table's key read back from a record's key bytes: all that a tombstone has. The inverse of `headrace.log.keys.key_bytes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from headrace.log.api import TopicInfo
from headrace.log.json_rows import Decoded, decode_exactly
from headrace.log.json_shape import Misshapen, parse


def key_columns(keys: Sequence[bytes | None], info: TopicInfo) -> Decoded:
    """The key's columns: text as it is, another scalar as JSON, several columns as a JSON array. A missing key is read as the empty one."""
    names = info.key
    schema = pa.schema([info.arrow_schema.field(name) for name in names])
    given = [key or b"" for key in keys]
    if len(names) > 1:
        return decode_exactly(given, schema, parser=lambda key: _named_parts(key, names))
    kind = schema.types[0]
    if pa.types.is_binary(kind):
        return Decoded(pa.RecordBatch.from_arrays([pa.array(given, kind)], schema=schema))
    parser = _text if pa.types.is_string(kind) else parse
    return decode_exactly(given, schema, parser=lambda key: {names[0]: parser(key)})


def _text(key: bytes) -> Any:
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise Misshapen("its key is not UTF-8") from None


def _named_parts(key: bytes, names: tuple[str, ...]) -> Any:
    parts = parse(key)
    if not isinstance(parts, list) or len(parts) != len(names):
        raise Misshapen(f"its key is not a JSON array of {', '.join(names)}")
    return dict(zip(names, parts, strict=True))
