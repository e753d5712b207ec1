"""Values from a request's text, by a column's type: in the same form in which JSON answers give them, without the quotes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from headrace.errors import InputError
from headrace.log.json_rows import decode_exactly
from headrace.log.json_wire import is_text
from headrace.log.schema import type_name
from headrace.sinks.view_file import ViewInfo


def typed(text: str, field: pa.Field) -> pa.Scalar:
    """A text as a value of a column. InputError says what was expected."""
    is_string = is_written_as_text(field) or text in {"NaN", "Infinity", "-Infinity"}
    written = json.dumps({field.name: text}) if is_string else f"{{{json.dumps(field.name)}:{text}}}"
    decoded = decode_exactly([written.encode()], pa.schema([field.with_nullable(True)]))
    if decoded.misfits or decoded.batch.num_rows != 1:
        raise InputError(f"{text[:80]!r} is no value of the column {field.name!r}, which is {type_name(field.type)}.", fix="write it as answers do, without quotes.")
    return decoded.batch.column(0)[0]


def is_written_as_text(field: pa.Field) -> bool:
    """Whether a column's values are texts in JSON, so that `null` in a URL is not null."""
    return bool(pa.types.is_string(field.type)) or is_text(field.type)


def typed_key(info: ViewInfo, texts: Sequence[str], *, whole: bool) -> tuple[Any, ...]:
    """The columns of a key, or the first of them; ticks, for a stream's range. Values as the view's reader takes them."""
    if info.is_stream and whole:
        raise InputError(f"The view {info.name!r} is a stream: its rows have no key.", fix="read it with from= and to=, which are ticks.")
    fields = [pa.field("tick", pa.int64())] if info.is_stream else [info.schema.field(name) for name in info.key]
    if len(texts) > len(fields) or (whole and len(texts) < len(fields)):
        wanted = ", ".join(field.name for field in fields)
        raise InputError(
            f"{len(texts)} {'value' if len(texts) == 1 else 'values'} came for the key of the view {info.name!r}, which is ({wanted}).",
            fix="give key= once for each, in order.",
        )
    return tuple(typed(text, field).as_py() for text, field in zip(texts, fields, strict=False))
