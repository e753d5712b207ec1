"""The HTTP gateway: `POST /topics/NAME`, answered when the rows are durable.

A request passes `http.connections` (what a connection may cost before its request is complete),
`http.access.AccessMiddleware` (who may send), then the numbered steps of `PostHandler._store`: its
head, its body, its signature, its rows, room for them, and the wait for the log. Requests that wait
together are appended together. Nothing is reserved in the inbox before a request is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import HeadraceError, nearest
from headrace.gateways.base import GatewayServer, GatewaySpec, now_us, row_count
from headrace.gateways.http_bodies import (
    CSV,
    IDENTITY,
    RAW,
    TSV,
    BodyFormat,
    ClientDisconnected,
    RequestMetadata,
    body_content,
    check_length,
    decompress,
    digest,
    hold,
    read_body,
)
from headrace.gateways.idempotency import OTHER_BODY
from headrace.gateways.inbox import (
    FULL,
    Admission,
    Content,
    Fate,
    Submission,
    SubmissionResult,
)
from headrace.gateways.metrics import metrics
from headrace.gateways.signatures import BadSignature, Hook, SignatureCheck
from headrace.http.access import (
    HEALTH_PATHS,
    AccessMiddleware,
    check_listening,
    find_token,
    is_loopback,
)
from headrace.http.connections import ConnectionLimits, GuardedConnection, connection_of
from headrace.http.prometheus import MEDIA_TYPE
from headrace.http.proxies import PathPrefix, PublicUrl, TrustedProxies
from headrace.http.responses import JSON_HEADERS, Refused, error_response, json_response
from headrace.http.server import HttpServer, listen
from headrace.log.api import Log

_ID_HEADERS = ("idempotency-key", "webhook-id", "x-github-delivery")
MAX_ID_CHARACTERS = 255
CONVERTERS = 2
"""How many large bodies are decompressed and parsed at a time, in threads of their own."""
SMALL_BYTES = 64 << 10
"""A body up to this size is parsed at once, without a thread."""


def request_id(headers: Headers) -> tuple[str | None, bool]:
    """Return the id by which a repeat of a request is recognised, if it has one, and whether the
    sender promises the same body with it.
    """
    for name in _ID_HEADERS:
        if value := headers.get(name):
            if len(value) > MAX_ID_CHARACTERS:
                raise Refused(
                    400,
                    f"The id of the request has more than {MAX_ID_CHARACTERS} characters.",
                    fix="send a shorter one.",
                )
            return value, name == _ID_HEADERS[0]
    return None, False


@dataclass(frozen=True)
class RequestHead:
    """What the head of a request says, as far as it matters here."""

    topic: str
    format: BodyFormat
    id: str | None
    is_digested: bool
    """Whether the same id with another body is a conflict."""
    headers: Headers
    query: bytes


_PREFIX = "/topics/"
_PEER_TIMEOUT_S = 30.0


class HttpGatewayServer(GatewayServer):
    """Serves `POST /topics/NAME`, `GET /health` and `GET /metrics`."""

    retries_appends = False
    has_ids = True
    _server: HttpServer
    is_draining = False

    def __init__(self, gateway: GatewaySpec, log: Log) -> None:
        super().__init__(gateway, log)
        self._host: str = gateway.options["host"]
        self._hooks: dict[str, Hook] = gateway.options["hooks"]
        self._token = find_token(gateway.options["token_file"])
        self._public: PublicUrl | None = gateway.options["public_url"]
        self._proxies: TrustedProxies = gateway.options["proxies"]
        self._drain_s: float = gateway.options["drain_s"]
        checks = {name: SignatureCheck(hook) for name, hook in self._hooks.items()}
        self._posts = PostHandler(self, checks)
        open_topics = [name for name in gateway.topics if name not in self._signed]
        if open_topics or not is_loopback(self._host):
            check_listening(
                self._host if self._public is None else self._public.host,
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
                Route("/health/live", self._health, methods=["GET"]),
                Route("/health/ready", self._readiness, methods=["GET"]),
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
                public=self._public,
                open_paths=HEALTH_PATHS,
            )
            prefix = "" if self._public is None else self._public.path
            self._server = HttpServer(
                PathPrefix(RejectionCounter(app, self), prefix),
                listening,
                host=self._host,
                name=f"gateway {self.gateway.name}",
                limits=self._limits(),
                grace_s=self.gateway.policy.patience_s + 1,
            )
            self._server.start()
        except BaseException:
            listening.close()
            raise
        self.address = self._server.address

    def _limits(self) -> ConnectionLimits:
        options, policy = self.gateway.options, self.gateway.policy
        held_bytes = max(policy.bytes, 4 * options["body_bytes"])
        return ConnectionLimits(
            connections=options["connections"],
            client_connections=options["client_connections"],
            head_s=options["head_s"],
            body_s=options["body_s"],
            body_bytes=options["body_bytes"],
            held_bytes=held_bytes,
            client_held_bytes=max(held_bytes // 2, options["body_bytes"]),
            proxies=self._proxies,
        )

    def stop(self) -> None:
        """Say that this gateway is not ready any more, and accept requests for `drain`, in which
        whoever balances the load notices; then finish those that have begun.
        """
        self.is_draining = True
        if self._drain_s and self.failure is None and not self.inbox.ended.is_set():
            time.sleep(self._drain_s)
        self._server.stop()

    def details(self) -> dict[str, int]:
        if not hasattr(self, "_server"):
            return {}
        guard = self._server.guard
        return {"connections": guard.open_connections, "connections_closed": guard.closed}

    async def _health(self, _request: Request) -> Response:
        """Whether the process works: if not, a new one should take its place."""
        is_running = not self.inbox.ended.is_set()
        status = "ok" if is_running else "ended"
        return json_response({"status": status}, 200 if is_running else 503)

    async def _readiness(self, _request: Request) -> Response:
        """Whether requests should be sent here."""
        if self.inbox.ended.is_set():
            return json_response({"status": "ended"}, 503)
        if self.is_draining:
            return json_response({"status": "draining"}, 503)
        failures = self.counters.failures
        return json_response(
            {"status": "log fails" if failures else "ok"}, 503 if failures else 200
        )

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
        self._converters = asyncio.Semaphore(CONVERTERS)

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
                    "headers": [
                        *JSON_HEADERS,
                        (b"content-length", b"%d" % len(body)),
                        # Whoever keeps connections open, such as a proxy, moves on while it drains.
                        *([(b"connection", b"close")] if self._server.is_draining else []),
                    ],
                }
            )
            await send({"type": "http.response.body", "body": body})

    async def _store(self, scope: Scope, receive: Receive) -> bytes:
        """Store the rows of a request, and return the body of the response.

        1. Check the head: the topic, the format, and what of a signature is there.
        2. Receive the body. The connection's guard bounds how slow and how large it may be, and
           counts its bytes until step 5.
        3. Check its signature, decompress it, and parse its rows.
        4. Reserve room for the rows and their bytes in the inbox.
        5. Wait until the rows are durable.
        """
        connection = connection_of(scope)
        try:
            try:
                head = self._check_head(scope)  # 1
                if connection is not None:
                    connection.set_client(head.headers)
                body = await read_body(receive, connection, self._max_bytes, self._patience_s)  # 2
                submission = await self._submission(head, body, connection)  # 3
            except HeadraceError as error:
                self._counters.record_rejected(1, _reason(error))
                raise
            self._counters.record_received(submission.rows)
            admission = await self._reserve(submission.rows, submission.size)  # 4
            if admission is not Admission.accepted:
                self._server.inbox.reject(submission, admission)
                raise _no_room()
        finally:
            if connection is not None:
                connection.release()
        return await self._append(submission)  # 5

    def _check_head(self, scope: Scope) -> RequestHead:
        headers = Headers(scope=scope)
        topic = self._topic(scope["path"][len(_PREFIX) :])
        is_raw = topic in self._hooks and self._hooks[topic].raw
        body_format = BodyFormat(RAW) if is_raw else BodyFormat.of(headers)
        check_length(headers, self._max_bytes)
        sender_id, is_digested = request_id(headers)
        if topic in self._checks:
            try:
                self._checks[topic].check_head(headers)
            except BadSignature as error:
                raise _unsigned(error) from None
        return RequestHead(
            topic, body_format, sender_id, is_digested, headers, scope["query_string"]
        )

    def _topic(self, name: str) -> str:
        topics = self._server.gateway.topics
        if name not in topics:
            raise Refused(
                404,
                f"This gateway has no topic {name[:100]!r}: {nearest(name, topics)}",
                fix="name the topic when the gateway is started.",
            )
        return name

    async def _submission(
        self, head: RequestHead, body: bytes, connection: GuardedConnection | None
    ) -> Submission:
        received_us = now_us()
        topic = head.topic
        signed_id = None
        if topic in self._checks:
            try:
                signed_id = self._checks[topic].check(head.headers, body)
            except BadSignature as error:
                raise _unsigned(error) from None
        if (
            head.format.encoding == IDENTITY
            and len(body) <= SMALL_BYTES
            and (head.format.kind not in {CSV, TSV})
        ):
            rows_body, content = self._parse(head, body)
        else:
            async with self._converters:
                rows_body, content = await asyncio.to_thread(self._parse, head, body)
        if connection is not None and len(rows_body) > len(body):
            more = len(rows_body) - len(body)
            await hold(connection, more, self._patience_s, is_last=True)
        rows = row_count(content)
        if not rows:
            raise Refused(400, "The body has no row.", fix="send at least one.", reason="empty")
        is_digested = head.is_digested and signed_id is None and head.id is not None
        return Submission(
            topic=topic,
            content=content,
            rows=rows,
            size=len(rows_body),
            received_us=received_us,
            id=signed_id or head.id,
            digest=digest(head.format, rows_body) if is_digested else None,
        )

    def _parse(self, head: RequestHead, body: bytes) -> tuple[bytes, Content]:
        """Return the decompressed body and its rows."""
        body = decompress(body, head.format.encoding, self._max_bytes)
        metadata: dict[str, Any] = {}
        columns: list[str] = []
        if head.format.kind == RAW:
            metadata = asdict(RequestMetadata.of(head.headers, head.query))
        elif head.format.kind == CSV:
            columns = self._server.log.topic(head.topic).columns
        return body, body_content(head.format.kind, body, metadata=metadata, columns=columns)

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


def _unsigned(error: BadSignature) -> Refused:
    return Refused(
        401,
        str(error),
        fix="sign the body with the secret that this hook has, and send it at once.",
        reason="signature",
    )


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
    if result.reason == OTHER_BODY:
        raise Refused(
            409, result.message, fix="send other rows under another key; nothing was stored."
        )
    raise Refused(
        404 if result.reason == "unknown topic" else 400,
        result.message,
        fix="correct the request, and send it again; nothing of it was stored.",
    )


_REASONS = {
    400: "malformed",
    404: "unknown topic",
    413: "too large",
    415: "content type",
    503: FULL,
}


def _reason(error: HeadraceError) -> str:
    if not isinstance(error, Refused):
        return type(error).__name__
    return error.reason or _REASONS.get(error.status, f"HTTP {error.status}")
