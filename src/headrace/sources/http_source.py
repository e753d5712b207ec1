"""The source `poll`: an HTTP API that is asked for JSON again and again.

    GET /orders?after=41    If-None-Match: "7"      with a cursor, and by ETag
    200  {"data": [{"id": 42}], "next": "42"}       rows, and the cursor of the next request
    304                                             nothing is new
    429  Retry-After: 30                            the next request is made in 30 seconds

The position has the cursor, the ETag and the time of change, and what of the last page is stored:
where an API adds rows to its last page, only those behind the known ones are new. Without a cursor
an answer is stored as a whole, when it differs from the one before.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from threading import Event, Timer
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from headrace._version import __version__
from headrace.errors import ConfigurationError, RetryError, TargetUnavailable
from headrace.log.dead_letters import DeadLetter
from headrace.log.values import TopicInfo
from headrace.retry import retry_after_s
from headrace.secrets import secret
from headrace.sources.base import RowSource, Source, SourceRows
from headrace.types.json_codec import JsonMismatch, parse_json

READ_BYTES = 1 << 16
_TEMPORARY = {408, 425, 429}


@dataclass(frozen=True)
class PollPosition:
    """Where a source is behind its last rows.

    Attributes:
        cursor: What the next request sends; None at the beginning.
        etag: Of the last answer, and `modified`, its time of change.
        taken: How many rows of the page of this cursor are stored.
        digest: Of these rows.
    """

    cursor: str | int | float | None = None
    etag: str | None = None
    modified: str | None = None
    taken: int = 0
    digest: str = ""


class HttpSource(RowSource):
    """Polls one URL."""

    def __init__(self, source: Source, topic: TopicInfo) -> None:
        super().__init__(source, topic)
        options = source.options
        self._url: str = options["url"]
        self._items: str | None = options["items"]
        self._cursor: str | None = options["cursor"]
        self._column: str | None = options["column"]
        self._parameter: str = options["parameter"]
        self._every_s: float = options["every_s"]
        self._timeout_s: float = options["timeout_s"]
        self._max_bytes: int = options["body_bytes"]
        self._headers = {
            name: secret(f"header {name}", value) for name, value in options["headers"].items()
        }
        self._position = PollPosition()
        self._next_s = 0.0
        self._requests = self._unchanged = 0

    def start(self, position: Any) -> None:
        self._position = PollPosition() if position is None else PollPosition(**position)

    def status(self) -> dict[str, Any]:
        return {
            "requests": self._requests,
            "unchanged": self._unchanged,
            "cursor": self._position.cursor,
        }

    def read(self, timeout_s: float) -> SourceRows | None:
        left_s = self._next_s - time.monotonic()
        if left_s > 0:
            time.sleep(min(left_s, timeout_s))
            if left_s > timeout_s:
                return None
        status, headers, body = self._get()
        self._requests += 1
        self._next_s = time.monotonic() + self._every_s
        if status == http.client.NOT_MODIFIED:
            self._unchanged += 1
            return None
        return self._rows(headers, body)

    def _rows(self, headers: http.client.HTTPMessage, body: bytes) -> SourceRows | None:
        """Return what is new in an answer, and go on behind it."""
        before = self._position
        answer, rows = self._parse(body)
        taken = before.taken if _digest(rows[: before.taken]) == before.digest else 0
        has_cursor = self._cursor is not None or self._column is not None
        is_known = taken == len(rows) and before.digest != ""
        new = rows[taken:] if has_cursor or is_known else rows
        cursor = self._next_cursor(answer, rows)
        position = PollPosition(
            cursor=before.cursor,
            etag=headers.get("ETag"),
            modified=headers.get("Last-Modified"),
            taken=len(rows),
            digest=_digest(rows),
        )
        if cursor is not None and cursor != before.cursor:
            position = PollPosition(cursor=cursor)
            if rows:
                self._next_s = 0.0
        self._position = position
        if not new and position == before:
            self._unchanged += 1
            return None
        is_row = [isinstance(row, dict) for row in new]
        letters = tuple(
            DeadLetter(
                f"source {self.source.name}",
                f"An item is no object: {type(row).__name__}.",
                row=json.dumps(row, default=str),
            )
            for row, fits in zip(new, is_row, strict=True)
            if not fits
        )
        return SourceRows(
            [row for row, fits in zip(new, is_row, strict=True) if fits],
            position=asdict(position),
            are_json=True,
            dead_letters=letters,
        )

    def _parse(self, body: bytes) -> tuple[Any, list[Any]]:
        """Return an answer, and the rows in it."""
        if not body.strip():
            return None, []
        try:
            if self._items is None and body.lstrip()[:1] == b"{" and b"\n" in body.strip():
                with suppress(JsonMismatch):  # lines, or one object over several lines
                    return None, [parse_json(line) for line in body.splitlines() if line.strip()]
            answer = parse_json(body)
        except JsonMismatch as error:
            raise ConfigurationError(
                f"The answer of {self._shown} is not JSON: {error}.",
                fix="check the URL, and what it answers.",
            ) from None
        rows = answer if self._items is None else self._find(answer, self._items)
        if rows is None:
            return answer, []
        return answer, rows if isinstance(rows, list) else [rows]

    def _find(self, answer: Any, path: str) -> Any:
        value = answer
        for name in path.split("."):
            if not isinstance(value, dict):
                raise ConfigurationError(
                    f"The answer of {self._shown} has no {path!r}: what is in front of {name!r} is"
                    f" no object but a {type(value).__name__}.",
                    fix="correct items= or cursor=.",
                )
            value = value.get(name)
        return value

    def _next_cursor(self, answer: Any, rows: list[Any]) -> str | int | float | None:
        cursor = None
        if self._cursor is not None:
            cursor = self._find(answer, self._cursor) if answer is not None else None
        elif self._column is not None and rows and isinstance(rows[-1], dict):
            cursor = rows[-1].get(self._column)
        if cursor is None or isinstance(cursor, str | int | float):
            return cursor
        return str(cursor)

    # The request

    @property
    def _shown(self) -> str:
        """The URL without its query, which may have secrets."""
        return self._url.partition("?")[0]

    def _get(self) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Make one request.

        Raises:
            TargetUnavailable: The server is away or busy; it may say for how long.
            ConfigurationError: It refuses the request, or answers too much.
        """
        parts = urlsplit(self._url)
        assert parts.hostname is not None
        query = parse_qsl(parts.query, keep_blank_values=True)
        headers = {
            "Accept": "application/json, application/x-ndjson",
            "Accept-Encoding": "identity",
            "User-Agent": f"headrace/{__version__}",
            **self._headers,
        }
        if self._position.cursor is not None:
            query = [(name, value) for name, value in query if name != self._parameter]
            query.append((self._parameter, str(self._position.cursor)))
        if self._position.etag is not None:
            headers["If-None-Match"] = self._position.etag
        if self._position.modified is not None:
            headers["If-Modified-Since"] = self._position.modified
        target = (parts.path or "/") + (f"?{urlencode(query)}" if query else "")
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(
                parts.hostname,
                parts.port,
                timeout=self._timeout_s,
                context=ssl.create_default_context(),
            )
        else:
            connection = http.client.HTTPConnection(
                parts.hostname, parts.port, timeout=self._timeout_s
            )
        try:
            with _deadline(connection, self._timeout_s):
                connection.request("GET", target, headers=headers)
                response = connection.getresponse()
                body = self._read_body(response)
        except (OSError, http.client.HTTPException) as error:
            raise RetryError(
                f"{self._shown} cannot be read: {str(error) or type(error).__name__}.",
                fix="nothing, if it comes back: it is tried again.",
            ) from error
        finally:
            connection.close()
        self._check(response)
        return response.status, response.headers, body

    def _read_body(self, response: http.client.HTTPResponse) -> bytes:
        body = bytearray()
        while part := response.read(READ_BYTES):
            body += part
            if len(body) > self._max_bytes:
                raise ConfigurationError(
                    f"The answer of {self._shown} has more than {self._max_bytes:,} bytes.",
                    fix="ask for fewer rows at a time, or raise body_bytes.",
                )
        if response.length:  # http.client does not say that the rest is missing
            raise http.client.IncompleteRead(bytes(body), response.length)
        return bytes(body)

    def _check(self, response: http.client.HTTPResponse) -> None:
        status = response.status
        if status in {http.client.OK, http.client.NOT_MODIFIED, http.client.NO_CONTENT}:
            return
        said = f"{self._shown} answers {status} {response.reason}."
        if status in _TEMPORARY or status >= http.client.INTERNAL_SERVER_ERROR:
            wait_s = retry_after_s(response.headers.get("Retry-After"))
            raise TargetUnavailable(said, fix="nothing: it is tried again.", wait_s=wait_s)
        fix = "check the URL and the headers."
        if location := response.headers.get("Location"):
            fix = f"redirects are not followed: poll {location.partition('?')[0]} if you trust it."
        raise ConfigurationError(said, fix=fix)


@contextmanager
def _deadline(connection: http.client.HTTPConnection, timeout_s: float) -> Iterator[None]:
    """Cut a connection whose request takes too long. Its own timeout is not enough: a server that
    sends a byte now and then never exceeds it. Raises TimeoutError, also where the end of the
    connection looks like the end of the answer.
    """
    was_cut = Event()

    def cut() -> None:
        was_cut.set()
        if connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    timer = Timer(timeout_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if was_cut.is_set():
            raise TimeoutError(f"no whole answer came within {timeout_s:g} seconds")


def _digest(rows: list[Any]) -> str:
    text = json.dumps(rows, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
