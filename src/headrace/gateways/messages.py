"""A message's body as rows, for gateways whose senders cannot be told what is wrong with it: JSON, JSON lines, or the body as it is. What cannot be read becomes a dead letter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import InputError, nearest
from headrace.gateways.deliveries import Content, Lines, Parsed, Plain
from headrace.log.json_shape import Misshapen, parse

JSON, RAW = "json", "raw"
FORMATS = (JSON, RAW)


def check_format(name: str) -> str:
    if name not in FORMATS:
        raise InputError(f"There is no format {name!r}: {nearest(name, FORMATS)}", fix=f"choose one of {', '.join(FORMATS)}.")
    return name


def content_of(body: bytes, format: str, extra: Mapping[str, Any]) -> Content:
    """`extra` is what is known of a raw body. An array is many rows, and so are lines; what is neither is one row, whatever comes of it."""
    if format == RAW:
        return Plain([{"body": body, **extra}])
    if body.lstrip()[:1] == b"[":
        try:
            parsed = parse(body)
        except Misshapen:
            return Lines([body])
        return Parsed(parsed) if parsed else Lines([body])
    return Lines(_objects(body) or [body])


def _objects(body: bytes) -> list[bytes]:
    """Each line an object; but an object that was written over several lines is one."""
    lines = [line for line in body.split(b"\n") if line and not line.isspace()]
    return lines if all(line.strip().startswith(b"{") and line.strip().endswith(b"}") for line in lines) else [body]


def rows_of(content: Content) -> int:
    assert isinstance(content, Lines | Parsed | Plain)
    return len(content.values)
