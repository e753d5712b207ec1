"""What a request asks for: its parameters, by name, each once unless it is a list, and nothing that
is not known.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar
from urllib.parse import unquote_plus

import pyarrow as pa
from starlette.requests import Request
from starlette.responses import Response

from headrace.durations import to_us
from headrace.errors import (
    ChangesGone,
    ConfigurationError,
    HeadraceError,
    InputError,
    OffsetOutOfRange,
    RetryError,
    UnknownTopic,
    UnknownVersion,
    UnknownView,
    nearest,
)
from headrace.types.json_codec import decode_exactly, is_text, object_text
from headrace.types.schema import type_name
from headrace.views.file import ViewInfo

# The bounds of what a server does for others: waiting, sending, keeping. Each has a value that fits
# a laptop and a small machine alike.


@dataclass(frozen=True)
class Limits:
    """Tests and `bench_serve.py` choose others; users have these."""

    poll_s: float = 0.05
    """How often a view store or topic that someone follows is looked at."""
    heartbeat_s: float = 15.0
    subscribers: int = 10_000
    slow_s: float = 30.0
    """A subscriber that does not take one event in this time is dropped."""
    ring_events: int = 1_024
    """So many ticks are at hand for those who follow; one that falls behind them is dropped, and
    can resume from what the store keeps.
    """
    ring_bytes: int = 16 << 20
    resuming: int = 8
    """So many subscribers at once are sent what they missed; others wait."""
    resuming_s: float = 120.0
    """One that needs longer for it makes room for others, and resumes where it is."""
    rows: int = 1_000
    """A page of rows, unless another size is asked for."""
    max_rows: int = 100_000
    sql_s: float = 10.0
    max_sql_s: float = 60.0
    body_bytes: int = 1 << 20
    reads: int = 4
    """Threads that scan and query."""
    waiting_reads: int = 64
    """Reads that wait for one of them; more are told to come back."""
    wait_s: float = 10.0
    """How long `at_least` waits, unless told."""
    max_wait_s: float = 60.0
    undone_rows: int = 1_000_000
    """A view with more rows is not brought back to an earlier tick as a whole, only key by key."""


# Answers as HTTP: JSON made of Arrow columns, and what each kind of error is to a program that
# asked.


JSON_HEADERS = [(b"cache-control", b"no-store"), (b"content-type", b"application/json")]
_ROWS_AT_ONCE = 65_536


class Refused(HeadraceError):
    """A request that is turned away with a status of its own."""

    def __init__(self, status: int, message: str, *, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.status = status


class NoSuchRow(Refused):
    """A key that has no row."""

    def __init__(self, view: str, key: Sequence[str], tick: int, *, was: bool = False) -> None:
        super().__init__(
            404,
            f"The view {view!r} {'had' if was else 'has'} no row for the key {', '.join(key)} at"
            f" tick {tick}.",
        )


def json_response(
    content: bytes | dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    body = (
        content if isinstance(content, bytes) else json.dumps(content, ensure_ascii=False).encode()
    )
    return Response(
        body,
        status,
        headers={"cache-control": "no-store", **(headers or {})},
        media_type="application/json",
    )


def error_response(error: HeadraceError) -> Response:
    status = status_of(error)
    headers = {"retry-after": "1"} if status == 503 else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(
        {"error": type(error).__name__, "message": error.message, "fix": error.fix}, status, headers
    )


def status_of(error: HeadraceError) -> int:
    """What the caller can do, in HTTP's terms: ask for something else, ask otherwise, or come
    back.
    """
    if isinstance(error, Refused):
        return error.status
    if isinstance(error, UnknownView | UnknownVersion | UnknownTopic):
        return 404
    if isinstance(error, ChangesGone | OffsetOutOfRange):
        return 410
    if isinstance(error, InputError):
        return 400
    return 503 if isinstance(error, RetryError | ConfigurationError) else 500


def head_json(view: str, version: str | None, tick: int) -> str:
    """What an answer about a view begins with."""
    shown = "" if version is None else f'"version":{quoted(version)},'
    return f'"view":{quoted(view)},{shown}"tick":{tick}'


def rows_json(rows: pa.Table) -> str:
    """A JSON array with an object for each row."""
    parts = [
        text
        for batch in rows.to_batches(max_chunksize=_ROWS_AT_ONCE)
        if batch.num_rows
        for text in _objects(batch)
    ]
    return f"[{','.join(parts)}]"


def _objects(batch: pa.RecordBatch) -> list[str]:
    if not batch.num_columns:
        return []
    texts: list[str] = object_text(list(batch.schema.names), batch.columns).to_pylist()
    return texts


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def only_key(query: bytes) -> list[str]:
    """The values of key=, if a request asks for nothing else: what is asked most, without building
    what the other questions need.
    """
    parts = query.split(b"&")
    if not all(part.startswith(b"key=") for part in parts):
        return []
    return [unquote_plus(part[4:].decode("latin-1"), errors="replace") for part in parts]


async def read_json(request: Request, limits: Limits, *, what: str, example: str) -> Any:
    """The body of a request that comes as JSON, bounded. `what` it is, and an `example`, for those
    who send something else.
    """
    if (
        request.headers.get("content-type", "").partition(";")[0].strip().lower()
        != "application/json"
    ):
        raise Refused(
            415,
            f"{what} comes as JSON.",
            fix=f"send {example} with Content-Type: application/json.",
        )
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > limits.body_bytes:
            raise Refused(
                413, f"The request is larger than {limits.body_bytes:,} bytes.", fix="shorten it."
            )
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise InputError("The request is not JSON.", fix=f"send {example}.") from None


class Asked:
    """The parameters of one request."""

    def __init__(self, request: Request, known: Collection[str]) -> None:
        self._given = request.query_params
        for name in self._given:
            if name not in known:
                raise InputError(f"There is no parameter {name!r} here: {nearest(name, known)}")

    def all(self, name: str) -> list[str]:
        return self._given.getlist(name)

    def one(self, name: str) -> str | None:
        given = self._given.getlist(name)
        if len(given) > 1:
            raise InputError(
                f"The parameter {name!r} came {len(given)} times.", fix="give it once."
            )
        return given[0] if given else None

    def number(self, name: str, *, least: int = 0, most: int) -> int | None:
        text = self.one(name)
        if text is None:
            return None
        if not (
            text.isascii() and text.isdecimal() and len(text) < 19 and least <= int(text) <= most
        ):
            raise InputError(
                f"{name}={text[:40]!r} is not a number from {least:,} to {most:,}.",
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
            f"{name}={text!r} is longer than {max_s:g} seconds, which is the most.",
            fix="give a shorter time.",
        )
    return seconds


# Threads for what takes time: scans and queries. Few of them, and few that wait for one; who comes
# then is told to come back.


P = ParamSpec("P")
T = TypeVar("T")


class Reads:
    """Used by the event loop's thread."""

    def __init__(self, limits: Limits) -> None:
        self._threads = ThreadPoolExecutor(limits.reads, thread_name_prefix="headrace-read")
        self._most, self._under_way = limits.reads + limits.waiting_reads, 0

    async def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        if self._under_way >= self._most:
            raise Refused(
                503,
                f"{self._most} reads are under way or wait, which is the most.",
                fix="come back in a moment.",
            )
        self._under_way += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: function(*arguments, **named)
            )
        finally:
            self._under_way -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


# Values from a request's text, by a column's type: in the same form in which JSON answers give
# them, without the quotes.


def typed(text: str, field: pa.Field) -> pa.Scalar:
    """A text as a value of a column. InputError says what was expected."""
    is_string = is_written_as_text(field) or text in {"NaN", "Infinity", "-Infinity"}
    written = (
        json.dumps({field.name: text}) if is_string else f"{{{json.dumps(field.name)}:{text}}}"
    )
    decoded = decode_exactly([written.encode()], pa.schema([field.with_nullable(True)]))
    if decoded.misfits or decoded.batch.num_rows != 1:
        raise InputError(
            f"{text[:80]!r} is no value of the column {field.name!r}, which is"
            f" {type_name(field.type)}.",
            fix="write it as answers do, without quotes.",
        )
    return decoded.batch.column(0)[0]


def is_written_as_text(field: pa.Field) -> bool:
    """Whether a column's values are texts in JSON, so that `null` in a URL is not null."""
    return bool(pa.types.is_string(field.type)) or is_text(field.type)


def typed_key(info: ViewInfo, texts: Sequence[str], *, whole: bool) -> tuple[Any, ...]:
    """The columns of a key, or the first of them; ticks, for a stream's range. Values as the view's
    reader takes them.
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
        wanted = ", ".join(field.name for field in fields)
        raise InputError(
            f"{len(texts)} {'value' if len(texts) == 1 else 'values'} came for the key of the view"
            f" {info.name!r}, which is ({wanted}).",
            fix="give key= once for each, in order.",
        )
    return tuple(typed(text, field).as_py() for text, field in zip(texts, fields, strict=False))
