"""JSON responses, and errors as HTTP statuses."""

from __future__ import annotations

import json
from typing import Any

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

JSON_HEADERS = [(b"cache-control", b"no-store"), (b"content-type", b"application/json")]


class Refused(HeadraceError):
    """A request is refused with a certain HTTP status."""

    def __init__(self, status: int, message: str, *, fix: str = "", reason: str = "") -> None:
        super().__init__(message, fix=fix)
        self.status = status
        self.reason = reason
        """A few words for counters, if the status does not say enough."""


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
    status = http_status(error)
    headers = {"retry-after": "1"} if status == 503 else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(
        {"error": type(error).__name__, "message": error.message, "fix": error.fix}, status, headers
    )


def http_status(error: HeadraceError) -> int:
    """The HTTP status of an error, by what the caller can do: request something else, correct the
    request, or retry.
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
