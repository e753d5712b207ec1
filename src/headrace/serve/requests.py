"""What the handlers of requests share: limits, parameters and bodies, rows as JSON, a pool of
reading threads, and values parsed by a column's type.

The handlers themselves are in `app.py`; responses and errors in `headrace.http.responses`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar
from urllib.parse import unquote_plus

import pyarrow as pa
from starlette.requests import Request

from headrace.durations import to_us
from headrace.errors import (
    InputError,
    nearest,
)
from headrace.http.responses import Refused
from headrace.types.json_codec import decode_rows_exactly, is_text_encoded, object_text
from headrace.types.schema import type_name
from headrace.views.file import ViewInfo


@dataclass(frozen=True)
class Limits:
    """The bounds of a server. The defaults fit a laptop and a small machine alike."""

    poll_s: float = 0.05
    """How often a view store or topic with subscribers is polled."""
    heartbeat_s: float = 15.0
    subscribers: int = 10_000
    slow_s: float = 30.0
    """A subscriber that does not accept an event in this time is dropped."""
    ring_events: int = 1_024
    """How many events a channel buffers. A subscriber that falls behind them is dropped, and can
    resume from the changes that the store retains.
    """
    ring_bytes: int = 16 << 20
    resuming: int = 8
    """How many subscribers at once are sent the events they missed; others wait."""
    resuming_s: float = 120.0
    """A subscriber that takes longer to catch up is dropped, and can resume where it stopped."""
    rows: int = 1_000
    """The size of a page of rows, if the request names none."""
    max_rows: int = 100_000
    sql_s: float = 10.0
    max_sql_s: float = 60.0
    sql_memory_bytes: int = 512 << 20
    """What one query may take beyond the views themselves."""
    sql_result_bytes: int = 64 << 20
    queries: int = 4
    """Threads that wait for queries, so that long ones do not delay other reads."""
    body_bytes: int = 1 << 20
    reads: int = 4
    """Threads that scan and query."""
    waiting_reads: int = 64
    """Reads that may wait for one of these threads; more are refused with status 503."""
    wait_s: float = 10.0
    """How long `at_least` waits, if the request names no time."""
    max_wait_s: float = 60.0
    max_undo_rows: int = 1_000_000
    """A view with more rows can be read at an earlier tick only key by key."""


# Responses


_BATCH_ROWS = 65_536
NULL_KEY = "\\N"
"""Null in a key that is written as text."""
_LOOKS_LIKE_NULL = re.compile(r"\\+N")


class NoSuchRow(Refused):
    """A view has no row for a key."""

    def __init__(self, view: str, key: Sequence[str], tick: int, *, is_past: bool = False) -> None:
        verb = "had" if is_past else "has"
        super().__init__(
            404, f"The view {view!r} {verb} no row for the key {', '.join(key)} at tick {tick}."
        )


def head_json(view: str, version: str | None, tick: int) -> str:
    """The first members of a response about a view."""
    version_member = "" if version is None else f'"version":{json_quote(version)},'
    return f'"view":{json_quote(view)},{version_member}"tick":{tick}'


def rows_json(rows: pa.Table) -> str:
    """A JSON array with an object for each row."""
    return f"[{','.join(row_objects(rows))}]"


def row_objects(rows: pa.Table) -> list[str]:
    """A JSON object for each row."""
    objects: list[str] = []
    for batch in rows.to_batches(max_chunksize=_BATCH_ROWS):
        if batch.num_rows and batch.num_columns:
            objects += object_text(list(batch.schema.names), batch.columns).to_pylist()
    return objects


def json_quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def parse_key_only(query: bytes) -> list[str]:
    """The values of `key=` if a query string has no other parameter, else nothing. It serves the
    most frequent request without the cost of parsing all parameters.
    """
    parts = query.split(b"&")
    if not all(part.startswith(b"key=") for part in parts):
        return []
    return [unquote_plus(part[4:].decode("latin-1"), errors="replace") for part in parts]


async def read_json(request: Request, limits: Limits, *, what: str, example: str) -> Any:
    """The JSON in the body of a request. See `read_body`."""
    body = await read_body(request, limits, what=what, example=example)
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise InputError("The request is not JSON.", fix=f"send {example}.") from None


async def read_body(request: Request, limits: Limits, *, what: str, example: str) -> bytes:
    """The body of a request that is sent as JSON, of bounded size. Errors name `what` the body is,
    and an `example`.
    """
    if (
        request.headers.get("content-type", "").partition(";")[0].strip().lower()
        != "application/json"
    ):
        raise Refused(
            415,
            f"{what} must be sent as JSON.",
            fix=f"send {example} with Content-Type: application/json.",
        )
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > limits.body_bytes:
            raise Refused(
                413, f"The request is larger than {limits.body_bytes:,} bytes.", fix="shorten it."
            )
    return body


class RequestParameters:
    """The query parameters of one request. InputError if there is one that `allowed` does not
    list.
    """

    def __init__(self, request: Request, allowed: Collection[str]) -> None:
        self._parameters = request.query_params
        for name in self._parameters:
            if name not in allowed:
                raise InputError(f"There is no parameter {name!r} here: {nearest(name, allowed)}")

    def all(self, name: str) -> list[str]:
        """All values of a parameter that may be repeated."""
        return self._parameters.getlist(name)

    def one(self, name: str) -> str | None:
        """The value of a parameter that may be given once."""
        values = self._parameters.getlist(name)
        if len(values) > 1:
            raise InputError(
                f"The parameter {name!r} came {len(values)} times.", fix="give it once."
            )
        return values[0] if values else None

    def number(self, name: str, *, min_value: int = 0, max_value: int) -> int | None:
        text = self.one(name)
        if text is None:
            return None
        is_number = text.isascii() and text.isdecimal() and len(text) < 19
        if not is_number or not min_value <= int(text) <= max_value:
            raise InputError(
                f"{name}={text[:40]!r} is not a number from {min_value:,} to {max_value:,}.",
                fix="give one, in digits alone.",
            )
        return int(text)

    def choice(self, name: str, choices: Collection[str]) -> str | None:
        text = self.one(name)
        if text is not None and text not in choices:
            raise InputError(
                f"{name}={text[:40]!r} is not one of {', '.join(choices)}.",
                fix="choose one of them.",
            )
        return text

    def seconds(self, name: str, default_s: float, max_s: float) -> float:
        """A length of time such as "5 seconds", bounded."""
        text = self.one(name)
        return default_s if text is None else bounded_seconds(name, text, max_s)


def bounded_seconds(name: str, text: str, max_s: float) -> float:
    seconds = to_us(text, what=name) / 1_000_000
    if not 0 <= seconds <= max_s:
        raise InputError(
            f"{name}={text!r} is longer than the limit of {max_s:g} seconds.",
            fix="give a shorter time.",
        )
    return seconds


# Reading threads


P = ParamSpec("P")
T = TypeVar("T")


class ReadPool:
    """The threads that scan and query, for use by the event loop's thread. Few reads run at once,
    few wait, and any more are refused with status 503.
    """

    def __init__(self, threads: int, max_waiting: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="headrace-read")
        self._max_reads = threads + max_waiting
        self._active_reads = 0

    async def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        if self._active_reads >= self._max_reads:
            raise Refused(
                503,
                f"{self._max_reads} reads are running or waiting, the largest number allowed.",
                fix="try again in a moment.",
            )
        self._active_reads += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: function(*arguments, **named)
            )
        finally:
            self._active_reads -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


# Values


def parse_value(text: str, field: pa.Field) -> pa.Scalar:
    """The value of a column that a request writes as text: as in JSON responses, without quotes.
    InputError names the type that was expected.
    """
    if text == "null" and not is_plain_text(field):
        return pa.scalar(None, field.type)
    is_string = (
        is_plain_text(field)
        or is_text_encoded(field.type)
        or text in {"NaN", "Infinity", "-Infinity"}
    )
    written = (
        json.dumps({field.name: text}) if is_string else f"{{{json.dumps(field.name)}:{text}}}"
    )
    decoded = decode_rows_exactly([written.encode()], pa.schema([field.with_nullable(True)]))
    if decoded.misfits or decoded.batch.num_rows != 1:
        raise InputError(
            f"{text[:80]!r} is no value of the column {field.name!r}, which is"
            f" {type_name(field.type)}.",
            fix="write it as responses do, without quotes.",
        )
    return decoded.batch.column(0)[0]


def is_plain_text(field: pa.Field) -> bool:
    """Whether `null` in a URL is a value of the column: as a text, or as bytes in base64."""
    return bool(pa.types.is_string(field.type) or pa.types.is_binary(field.type))


def key_value_text(text: str) -> str | None:
    r"""What a key's value is written as: `\N` is null, whatever the column's type; the text `\N`
    itself has one more backslash, and so on.
    """
    if text == NULL_KEY:
        return None
    return text[1:] if _LOOKS_LIKE_NULL.fullmatch(text) else text


def parse_key_value(text: str, field: pa.Field) -> pa.Scalar:
    """`parse_value` for a column of a key, which may be null in the form of `key_value_text`."""
    value = key_value_text(text)
    return pa.scalar(None, field.type) if value is None else parse_value(value, field)


def written_key_value(value: str | None, *, is_plain: bool) -> str:
    """What `parse_key_value` reads as null, or as a value's text in a response."""
    if value is None:
        return NULL_KEY if is_plain else "null"
    return "\\" + value if _LOOKS_LIKE_NULL.fullmatch(value) else value


def parse_key(info: ViewInfo, texts: Sequence[str], *, whole: bool) -> tuple[Any, ...]:
    """The values of a key, as the view's reader takes them, or with `whole=False` of its first
    columns. For a stream, the tick that bounds a range.
    """
    if info.is_stream and whole:
        raise InputError(
            f"The view {info.name!r} is a stream: its rows have no key.",
            fix="read it with from= and to=, which are ticks.",
        )
    fields = (
        [pa.field("tick", pa.int64())]
        if info.is_stream
        else [info.schema.field(name) for name in info.key]
    )
    if len(texts) > len(fields) or (whole and len(texts) < len(fields)):
        columns = ", ".join(field.name for field in fields)
        raise InputError(
            f"{len(texts)} {'value' if len(texts) == 1 else 'values'} came for the key of the view"
            f" {info.name!r}, which is ({columns}).",
            fix="give key= once for each, in order.",
        )
    return tuple(
        parse_key_value(text, field).as_py() for text, field in zip(texts, fields, strict=False)
    )
