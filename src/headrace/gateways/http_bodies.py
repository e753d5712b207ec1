"""A request's body: how its sender says that it is written, how it is read within bounds, and what rows it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive

from headrace.gateways.deliveries import Content, Lines, Parsed, Plain
from headrace.log.json_shape import Misshapen, parse
from headrace.serve.answers import Refused

LINES, JSON, RAW = "lines", "json", "raw"
_LINES = {"application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines", "application/json-lines"}
_ID_HEADERS = ("idempotency-key", "webhook-id", "x-github-delivery")
_SECRET_HEADERS = {"authorization", "proxy-authorization", "cookie"}
LONGEST_ID = 255


class BrokenOff(Exception):
    """The sender went away before its body was there."""


def kind_of(headers: Headers) -> str:
    """By the content type: JSON, or JSON lines."""
    if headers.get("content-encoding", "identity") != "identity":
        raise Refused(415, f"The content encoding {headers['content-encoding'][:40]!r} is not read here.", fix="send the body as it is.")
    given = headers.get("content-type", "").partition(";")[0].strip().lower()
    if given in _LINES:
        return LINES
    if given == "application/json" or given.endswith("+json"):
        return JSON
    raise Refused(415, f"The content type {given[:80]!r} is not read here.", fix="send application/json, or application/x-ndjson for JSON lines.")


def length_of(headers: Headers, most_bytes: int) -> int:
    """The bytes to make room for: as many as the sender says, or, if it does not say, as there may be."""
    text = headers.get("content-length")
    if text is None:
        return most_bytes
    length = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else most_bytes + 1
    if length > most_bytes:
        raise too_large(most_bytes)
    return length


def too_large(most_bytes: int) -> Refused:
    return Refused(413, f"The body has more than {most_bytes:,} bytes.", fix="send it in parts.")


async def read(receive: Receive, most_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BrokenOff
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > most_bytes:
            raise too_large(most_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def count(receive: Receive, kind: str, most_bytes: int) -> int:
    """The rows of a body for which there is no room: lines are counted as they pass, anything else is one."""
    lines = size = 0
    last = b"\n"
    while True:
        message = await receive()
        part: bytes = message.get("body", b"")
        lines, size = lines + part.count(b"\n"), size + len(part)
        last = part[-1:] or last
        if message["type"] == "http.disconnect" or size > most_bytes or not message.get("more_body", False):
            break
    return max(1, lines + (last != b"\n")) if kind == LINES else 1


def content_of(kind: str, body: bytes, extra: Mapping[str, Any]) -> Content:
    if kind == RAW:
        return Plain([{"body": body, **extra}])
    if kind == LINES:
        return Lines([line for line in body.split(b"\n") if line and not line.isspace()])
    if body.lstrip()[:1] != b"[":
        return Lines([body.strip()])
    try:
        parsed = parse(body)
    except Misshapen as error:
        raise Refused(400, f"The body cannot be used: {error}.", fix="send an object, or an array of objects.") from None
    return Parsed(parsed)


@dataclass(frozen=True)
class Known:
    """What a raw body comes with."""

    content_type: str | None
    headers: dict[str, str]
    query: str

    @classmethod
    def of(cls, headers: Headers, query: bytes) -> Known:
        kept = {name: value for name, value in headers.items() if name not in _SECRET_HEADERS}
        return cls(headers.get("content-type"), kept, query.decode("latin-1"))


def id_of(headers: Headers) -> str | None:
    """The id by which a repeat is known: of the convention, or of GitHub."""
    given = next((value for name in _ID_HEADERS if (value := headers.get(name))), None)
    if given is not None and len(given) > LONGEST_ID:
        raise Refused(400, f"The id of the request has more than {LONGEST_ID} characters.", fix="send a shorter one.")
    return given
