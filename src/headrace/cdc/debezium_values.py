"""Values as Debezium writes them in its JSON envelope, by the type that they are to have."""

from __future__ import annotations

import base64
import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa

_UNAVAILABLE = "__debezium_unavailable_value"
UNAVAILABLE = {_UNAVAILABLE, base64.b64encode(_UNAVAILABLE.encode()).decode()}
"""What stands for a large value that an update did not touch."""


def decoded(value: Any, kind: pa.DataType, *, precise: bool = True) -> Any:
    """A value as Debezium writes it, by the type that it is to have: numbers count days, milliseconds or microseconds since 1970, bytes are base64."""
    if value is None:
        return None
    if pa.types.is_date(kind) and isinstance(value, int):
        return date(1970, 1, 1) + timedelta(days=value)
    if pa.types.is_timestamp(kind):
        moment = _moment(value)
        return moment if kind.tz else moment.replace(tzinfo=None)
    if pa.types.is_decimal(kind):
        return _decimal(value, kind.scale, precise=precise)
    if pa.types.is_binary(kind):
        return base64.b64decode(value)
    if pa.types.is_string(kind) and not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return value


def _moment(value: Any) -> datetime:
    """Microseconds are told from milliseconds and nanoseconds by their size: a time between 1973 and 5138 has 12 to 14 digits in milliseconds."""
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    scale_us = 1000 if abs(value) < 10**14 else 1
    whole = value * scale_us if abs(value) < 10**17 else value // 1000
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=whole)


def _decimal(value: Any, scale: int, *, precise: bool) -> Decimal:
    """As Debezium's `decimal.handling.mode` has it: precise is base64 of a big-endian number without its point; otherwise text, or a number."""
    if isinstance(value, str) and precise and not {".", "-"} & set(value):
        return Decimal(int.from_bytes(base64.b64decode(value), "big", signed=True)).scaleb(-scale)
    return Decimal(str(value))
