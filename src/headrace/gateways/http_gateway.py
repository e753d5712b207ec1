"""The HTTP gateway: `POST /topics/NAME`, answered when the rows are durable.

A request passes `http.access.AccessMiddleware` (who may send), then the numbered steps of
`PostHandler._store`: the format of the body, room for it, the body, its signature, its rows, and
the wait for the log. Requests that wait together are appended together.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import HeadraceError, nearest
from headrace.gateways.base import GatewayServer, GatewaySpec, now_us, row_count
from headrace.gateways.inbox import (
    FULL,
    Admission,
    Content,
    Fate,
    JsonLines,
    JsonRows,
    PlainRows,
    Submission,
    SubmissionResult,
)
from headrace.gateways.metrics import metrics
from headrace.gateways.signatures import BadSignature, Hook, SignatureCheck
from headrace.http.access import AccessMiddleware, check_listening, find_token, is_loopback
from headrace.http.prometheus import MEDIA_TYPE
from headrace.http.responses import JSON_HEADERS, Refused, error_response, json_response
from headrace.http.server import HttpServer, listen
from headrace.log.api import Log
from headrace.types.json_codec import JsonMismatch, parse_json

# Bodies of requests

LINES, JSON, RAW = "lines", "json", "raw"
_LINES_TYPES = {
    "application/x-ndjson",
    "application/ndjson",
    "application/jsonl",
    "application/x-jsonlines",
    "application/json-lines",
}
_ID_HEADERS = ("idempotency-key", "webhook-id", "x-github-delivery")
_SECRET_HEADERS = {"authorization", "proxy-authorization", "cookie"}
MAX_ID_CHARACTERS = 255


class ClientDisconnected(Exception):
    """The sender closed the connection before its body was complete."""


def body_format(headers: Headers) -> str:
    """Return the format of a body by its content type: JSON, or JSON lines."""
    if headers.get("content-encoding", "identity") != "identity":
        raise Refused(
            415,
            f"The content encoding {headers['content-encoding'][:40]!r} is not supported.",
            fix="send the body without encoding.",
        )
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type in _LINES_TYPES:
        return LINES
    if content_type == "application/json" or content_type.endswith("+json"):
        return JSON
    raise Refused(
        415,
        f"The content type {content_type[:80]!r} is not supported.",
        fix="send application/json, or application/x-ndjson for JSON lines.",
    )


def reserved_bytes(headers: Headers, max_bytes: int) -> int:
    """Return how many bytes to reserve for a body: its content length, or the most that is allowed
    if the sender does not say.
    """
    text = headers.get("content-length")
    if text is None:
        return max_bytes
    length = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else max_bytes + 1
    if length > max_bytes:
        raise too_large(max_bytes)
    return length


def too_large(max_bytes: int) -> Refused:
    return Refused(413, f"The body has more than {max_bytes:,} bytes.", fix="send it in parts.")


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def count_rows(receive: Receive, format: str, max_bytes: int) -> int:
    """Read a body for which there is no room, and return how many rows it has: lines are counted,
    anything else is one row.
    """
    lines = size = 0
    last = b"\n"
    while True:
        message = await receive()
        part: bytes = message.get("body", b"")
        lines += part.count(b"\n")
        size += len(part)
        last = part[-1:] or last
        if (
            message["type"] == "http.disconnect"
            or size > max_bytes
            or not message.get("more_body", False)
        ):
            break
    return max(1, lines + (last != b"\n")) if format == LINES else 1


def body_content(format: str, body: bytes, metadata: Mapping[str, Any]) -> Content:
    """Return the rows of a body; a raw one with its metadata."""
    if format == RAW:
        return PlainRows([{"body": body, **metadata}])
    if format == LINES:
        return JsonLines([line for line in body.split(b"\n") if line and not line.isspace()])
    if body.lstrip()[:1] != b"[":
        return JsonLines([body.strip()])
    try:
        parsed = parse_json(body)
    except JsonMismatch as error:
        raise Refused(
            400, f"The body cannot be read: {error}.", fix="send an object, or an array of objects."
        ) from None
    return JsonRows(parsed)


@dataclass(frozen=True)
class RequestMetadata:
    """Columns of a raw body that come from its request."""

    content_type: str | None
    headers: dict[str, str]
    query: str

    @classmethod
    def of(cls, headers: Headers, query: bytes) -> RequestMetadata:
        public = {name: value for name, value in headers.items() if name not in _SECRET_HEADERS}
        return cls(headers.get("content-type"), public, query.decode("latin-1"))


def request_id(headers: Headers) -> str | None:
    """Return the id by which a repeat of a request is recognised, if it has one."""
    header = next((value for name in _ID_HEADERS if (value := headers.get(name))), None)
    if header is not None and len(header) > MAX_ID_CHARACTERS:
        raise Refused(
            400,
            f"The id of the request has more than {MAX_ID_CHARACTERS} characters.",
            fix="send a shorter one.",
        )
    return header


_PREFIX = "/topics/"
_PEER_TIMEOUT_S = 30.0


class HttpGatewayServer(GatewayServer):
    """Serves `POST /topics/NAME`, `GET /health` and `GET /metrics`."""

    retries_appends = False
    _server: HttpServer

    def __init__(self, gateway: GatewaySpec, log: Log) -> None:
        super().__init__(gateway, log)
        self._host: str = gateway.options["host"]
        self._hooks: dict[str, Hook] = gateway.options["hooks"]
        self._token = find_token(gateway.options["token_file"])
        checks = {name: SignatureCheck(hook) for name, hook in self._hooks.items()}
        self._posts = PostHandler(self, checks)
        open_topics = [name for name in gateway.topics if name not in self._signed]
        if open_topics or not is_loopback(self._host):
            check_listening(
                self._host,
                self._token if open_topics else "signed",
                what=f"append to {', '.join(open_topics)}",
            )

    @property
    def _signed(self) -> set[str]:
        return {name for name, hook in self._hooks.items() if hook.signature is not None}

    def on_room(self) -> Callable[[], None]:
        return self._posts.wake_waiters

    def start(self) -> None:
        listening = listen(self._host, self.gateway.options["port"], peer_timeout_s=_PEER_TIMEOUT_S)
        try:
            routes = [
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
            ]
            other_routes = Starlette(
                routes=routes,
                exception_handlers={HTTPException: _not_found},
                lifespan=self._posts.lifespan,
            )
            signed = frozenset(_PREFIX + name for name in self._signed)
            app = AccessMiddleware(
                PostRouter(other_routes, self._posts),
                host=self._host,
                token=self._token,
                signed=signed,
            )
            self._server = HttpServer(
                RejectionCounter(app, self),
                listening,
                host=self._host,
                name=f"gateway {self.gateway.name}",
            )
            self._server.start()
        except BaseException:
            listening.close()
            raise
        self.address = self._server.address

    def stop(self) -> None:
        self._server.stop()

    async def _health(self, _request: Request) -> Response:
        is_running = not self.inbox.ended.is_set()
        status = "ok" if is_running else "ended"
        return json_response({"status": status}, 200 if is_running else 503)

    async def _metrics(self, _request: Request) -> Response:
        return PlainTextResponse(metrics([self.status()]), media_type=MEDIA_TYPE)


def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if request.url.path.startswith(_PREFIX):
        return error_response(
            Refused(
                405,
                f"{request.method} is not supported here.",
                fix=f"send rows with POST {request.url.path}.",
            )
        )
    return error_response(
        Refused(
            error.status_code,
            "There is nothing here.",
            fix=f"send rows with POST {_PREFIX}NAME; there is GET /health and GET /metrics too.",
        )
    )


class RejectionCounter:
    """Counts requests that are rejected before they reach `PostHandler`, such as those without a
    token.
    """

    def __init__(self, app: ASGIApp, server: HttpGatewayServer) -> None:
        self._app = app
        self._counters = server.counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return

        async def send_counted(message: Message) -> None:
            if (
                message["type"] == "http.response.start"
                and message["status"] in {401, 403, 404, 405}
                and "headrace.counted" not in scope
            ):
                self._counters.record_rejected(1, f"HTTP {message['status']}")
            await send(message)

        await self._app(scope, receive, send_counted)


class PostRouter:
    """Passes posted rows to `PostHandler` directly, which saves routing, and every other request to
    the application.
    """

    def __init__(self, app: ASGIApp, posts: PostHandler) -> None:
        self._app = app
        self._posts = posts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and scope["path"].startswith(_PREFIX)
        ):
            scope["headrace.counted"] = True
            await self._posts(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class PostHandler:
    """Handles posted rows, in the event loop's thread. The inbox calls it from its own."""

    def __init__(self, server: HttpGatewayServer, checks: dict[str, SignatureCheck]) -> None:
        gateway = server.gateway
        self._server = server
        self._counters = server.counters
        self._checks = checks
        self._hooks: dict[str, Hook] = gateway.options["hooks"]
        self._max_bytes: int = gateway.options["body_bytes"]
        self._patience_s = gateway.policy.patience_s
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: Starlette):  # type: ignore[no-untyped-def]  # noqa: ANN201 - Starlette's own form
        self._loop = asyncio.get_running_loop()
        yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._store(scope, receive)
        except HeadraceError as error:
            await error_response(error)(scope, receive, send)
        except ClientDisconnected:
            self._counters.record_rejected(1, "broken off")
        else:
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [*JSON_HEADERS, (b"content-length", b"%d" % len(body))],
                }
            )
            await send({"type": "http.response.body", "body": body})

    async def _store(self, scope: Scope, receive: Receive) -> bytes:
        """Store the rows of a request, and return the body of the response.

        1. Find the topic and the format of the body.
        2. Reserve room for the body.
        3. Read the body, and check its signature.
        4. Reserve room for its rows.
        5. Wait until the rows are durable.
        """
        headers = Headers(scope=scope)
        try:
            topic = self._topic(unquote(scope["path"][len(_PREFIX) :]))
            is_raw = topic in self._hooks and self._hooks[topic].raw
            body_kind = RAW if is_raw else body_format(headers)  # 1
            size = reserved_bytes(headers, self._max_bytes)
            sender_id = request_id(headers)
        except HeadraceError as error:
            self._counters.record_rejected(1, _reason(error))
            raise
        admission = await self._reserve(0, size)  # 2
        if admission is not Admission.accepted:
            rows = await count_rows(receive, body_kind, self._max_bytes)
            fate = Fate.dropped if admission is Admission.dropped else Fate.refused
            self._counters.record_rejected(rows, FULL, fate)
            raise _no_room()
        try:
            submission = await self._read_submission(
                scope, receive, headers, topic, body_kind, sender_id
            )  # 3
            self._counters.record_received(submission.rows)
            admission = await self._reserve(submission.rows, 0)  # 4
            self._check_admitted(submission, admission)
        except BaseException:
            self._server.inbox.release(0, size)
            raise
        submission.size = size
        return await self._append(submission)  # 5

    def _topic(self, name: str) -> str:
        topics = self._server.gateway.topics
        if name not in topics:
            raise Refused(
                404,
                f"This gateway has no topic {name[:100]!r}: {nearest(name, topics)}",
                fix="name the topic when the gateway is started.",
            )
        return name

    async def _read_submission(
        self,
        scope: Scope,
        receive: Receive,
        headers: Headers,
        topic: str,
        format: str,
        id: str | None,
    ) -> Submission:
        try:
            body = await read_body(receive, self._max_bytes)
            received_us = now_us()
            signed_id = self._checks[topic].check(headers, body) if topic in self._checks else None
            metadata: dict[str, Any] = {}
            if format == RAW:
                metadata = asdict(RequestMetadata.of(headers, scope["query_string"]))
            content = body_content(format, body, metadata)
        except BadSignature as error:
            self._counters.record_rejected(1, "signature")
            raise Refused(
                401,
                str(error),
                fix="sign the body with the secret that this hook has, and send it at once.",
            ) from None
        except HeadraceError as error:
            self._counters.record_rejected(1, _reason(error))
            raise
        rows = row_count(content)
        if not rows:
            self._counters.record_rejected(1, "empty")
            raise Refused(400, "The body has no row.", fix="send at least one.")
        return Submission(
            topic=topic,
            content=content,
            rows=rows,
            size=len(body),
            received_us=received_us,
            id=signed_id or id,
        )

    async def _reserve(self, rows: int, size: int) -> Admission:
        """Reserve room in the inbox. Where the policy blocks, requests wait in the order in which
        they came.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._patience_s
        while (admission := self._server.inbox.admit(rows, size)) is Admission.wait:
            waiter = loop.create_future()
            self._waiters.append(waiter)
            try:
                async with asyncio.timeout_at(deadline_s):
                    await waiter
            except TimeoutError:
                with contextlib.suppress(ValueError):  # it was woken just now
                    self._waiters.remove(waiter)
                return Admission.refused
        return admission

    def _check_admitted(self, submission: Submission, admission: Admission) -> None:
        if admission is not Admission.accepted:
            self._server.inbox.reject(submission, admission)
            raise _no_room()

    def wake_waiters(self) -> None:
        """Wake requests that wait for room. Called by the inbox, from its thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _append(self, submission: Submission) -> bytes:
        """Hand a submission to the inbox, and return the response when it is settled."""
        loop = asyncio.get_running_loop()
        settled: asyncio.Future[SubmissionResult] = loop.create_future()
        submission.done = lambda result: _set_result(loop, settled, result)
        self._server.inbox.put(submission)
        try:
            async with asyncio.timeout(self._patience_s):
                result = await settled
        except TimeoutError:
            is_signed = (
                submission.topic in self._hooks
                and self._hooks[submission.topic].signature is not None
            )
            fix = (
                "send it again, as it is: then it is stored once."
                if is_signed
                else "send it again, under the same Idempotency-Key: then it is stored once."
            )
            raise Refused(
                503,
                f"The rows are not durable after {self._patience_s:g} seconds; they may be later.",
                fix=fix,
            ) from None
        return _response(submission, result)


def _set_result(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[SubmissionResult],
    result: SubmissionResult,
) -> None:
    """Set a future's result from another thread."""

    def settle() -> None:
        if not future.done():
            future.set_result(result)

    with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
        loop.call_soon_threadsafe(settle)


def _no_room() -> Refused:
    return Refused(
        503,
        "The log is slower than the senders: there is no room.",
        fix="come back in a moment.",
    )


def _response(submission: Submission, result: SubmissionResult) -> bytes:
    body: dict[str, Any] = {"topic": submission.topic, "rows": submission.rows}
    if result.fate is Fate.stored:
        return json.dumps({**body, "position": result.position}).encode()
    if result.fate is Fate.repeated:
        return json.dumps({**body, "repeated": True}).encode()
    if result.is_temporary:
        raise Refused(503, result.message, fix="come back in a moment.")
    raise Refused(
        404 if result.reason == "unknown topic" else 400,
        result.message,
        fix="correct the request, and send it again; nothing of it was stored.",
    )


_REASONS = {400: "malformed", 404: "unknown topic", 413: "too large", 415: "content type"}


def _reason(error: HeadraceError) -> str:
    return (
        _REASONS.get(error.status, f"HTTP {error.status}")
        if isinstance(error, Refused)
        else type(error).__name__
    )
