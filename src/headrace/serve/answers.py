"""Answers as HTTP: JSON made of Arrow columns, and what each kind of error is to a program that asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from starlette.responses import Response

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
)
from headrace.log.json_text import object_text

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
        super().__init__(404, f"The view {view!r} {'had' if was else 'has'} no row for the key {', '.join(key)} at tick {tick}.")


def json_response(content: bytes | dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = content if isinstance(content, bytes) else json.dumps(content, ensure_ascii=False).encode()
    return Response(body, status, headers={"cache-control": "no-store", **(headers or {})}, media_type="application/json")


def error_response(error: HeadraceError) -> Response:
    status = status_of(error)
    headers = {"retry-after": "1"} if status == 503 else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response({"error": type(error).__name__, "message": error.message, "fix": error.fix}, status, headers)


def status_of(error: HeadraceError) -> int:
    """What the caller can do, in HTTP's terms: ask for something else, ask otherwise, or come back."""
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
    parts = [text for batch in rows.to_batches(max_chunksize=_ROWS_AT_ONCE) if batch.num_rows for text in _objects(batch)]
    return f"[{','.join(parts)}]"


def _objects(batch: pa.RecordBatch) -> list[str]:
    if not batch.num_columns:
        return []
    texts: list[str] = object_text(list(batch.schema.names), batch.columns).to_pylist()
    return texts


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
