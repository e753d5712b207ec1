"""The HTTP gateway: `POST /topics/NAME`, answered when the rows are durable.

A request goes through numbered steps (`Posts._take`): who may send, how the body is written, room
for it, the body, its signature, its rows, and the wait for the log. Requests that wait together are
appended together.
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
from headrace.gateways.base import GatewaySpec, Receiving, now_us
from headrace.gateways.inbox import (
    FULL,
    Admission,
    Content,
    Delivery,
    Fate,
    Lines,
    Outcome,
    Parsed,
    Plain,
)
from headrace.gateways.metrics import metrics
from headrace.gateways.signatures import BadSignature, Hook, SignatureCheck
from headrace.http_server import MEDIA_TYPE, HttpServer, listen
from headrace.log.api import Log
from headrace.serve.access import Access, check_listening, find_token, is_loopback
from headrace.serve.requests import JSON_HEADERS, Refused, error_response, json_response
from headrace.types.json_codec import Misshapen, parse

# A request's body: how its sender says that it is written, how it is read within bounds, and what
# rows it has.


LINES, JSON, RAW = "lines", "json", "raw"
_LINES = {
    "application/x-ndjson",
    "application/ndjson",
    "application/jsonl",
    "application/x-jsonlines",
    "application/json-lines",
}
_ID_HEADERS = ("idempotency-key", "webhook-id", "x-github-delivery")
_SECRET_HEADERS = {"authorization", "proxy-authorization", "cookie"}
LONGEST_ID = 255


class BrokenOff(Exception):
    """The sender went away before its body was there."""


def kind_of(headers: Headers) -> str:
    """By the content type: JSON, or JSON lines."""
    if headers.get("content-encoding", "identity") != "identity":
        raise Refused(
            415,
            f"The content encoding {headers['content-encoding'][:40]!r} is not read here.",
            fix="send the body as it is.",
        )
    given = headers.get("content-type", "").partition(";")[0].strip().lower()
    if given in _LINES:
        return LINES
    if given == "application/json" or given.endswith("+json"):
        return JSON
    raise Refused(
        415,
        f"The content type {given[:80]!r} is not read here.",
        fix="send application/json, or application/x-ndjson for JSON lines.",
    )


def length_of(headers: Headers, max_bytes: int) -> int:
    """The bytes to make room for: as many as the sender says, or, if it does not say, as there may
    be.
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


async def read(receive: Receive, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BrokenOff
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def count(receive: Receive, kind: str, max_bytes: int) -> int:
    """The rows of a body for which there is no room: lines are counted as they pass, anything else
    is one.
    """
    lines = size = 0
    last = b"\n"
    while True:
        message = await receive()
        part: bytes = message.get("body", b"")
        lines, size = lines + part.count(b"\n"), size + len(part)
        last = part[-1:] or last
        if (
            message["type"] == "http.disconnect"
            or size > max_bytes
            or not message.get("more_body", False)
        ):
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
        raise Refused(
            400, f"The body cannot be used: {error}.", fix="send an object, or an array of objects."
        ) from None
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
        raise Refused(
            400,
            f"The id of the request has more than {LONGEST_ID} characters.",
            fix="send a shorter one.",
        )
    return given


_PREFIX = "/topics/"
_SLOW_S = 30.0


class HttpReceiving(Receiving):
    patient = False
    _server: HttpServer

    def __init__(self, gateway: GatewaySpec, log: Log) -> None:
        super().__init__(gateway, log)
        self._host: str = gateway.options["host"]
        self._hooks: dict[str, Hook] = gateway.options["hooks"]
        self._token = find_token(gateway.options["token_file"])
        self._posts = Posts(
            self, {name: SignatureCheck(each) for name, each in self._hooks.items()}
        )
        open_topics = [name for name in gateway.topics if name not in self._signed]
        if open_topics or not is_loopback(self._host):
            check_listening(
                self._host,
                self._token if open_topics else "signed",
                what=f"append to {', '.join(open_topics)}",
            )

    @property
    def _signed(self) -> set[str]:
        return {name for name, each in self._hooks.items() if each.signature is not None}

    def on_room(self) -> Callable[[], None]:
        return self._posts.room_was_made

    def begin(self) -> None:
        listening = listen(self._host, self.gateway.options["port"], slow_s=_SLOW_S)
        try:
            routes = [
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
            ]
            rest = Starlette(
                routes=routes,
                exception_handlers={HTTPException: _not_here},
                lifespan=self._posts.lifespan,
            )
            signed = frozenset(_PREFIX + name for name in self._signed)
            app = Access(
                Shortcut(rest, self._posts), host=self._host, token=self._token, signed=signed
            )
            self._server = HttpServer(
                Counting(app, self), listening, host=self._host, name=f"gateway {self.gateway.name}"
            )
            self._server.begin()
        except BaseException:
            listening.close()
            raise
        self.address = self._server.address

    def end(self) -> None:
        self._server.stop()

    async def _health(self, _request: Request) -> Response:
        works = not self.inbox.ended.is_set()
        return json_response({"status": "ok" if works else "ended"}, 200 if works else 503)

    async def _metrics(self, _request: Request) -> Response:
        return PlainTextResponse(metrics([self.status()]), media_type=MEDIA_TYPE)


def _not_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if request.url.path.startswith(_PREFIX):
        return error_response(
            Refused(
                405,
                f"{request.method} means nothing here.",
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


class Counting:
    """Counts requests that are turned away before they reach `Posts`: without a token, say."""

    def __init__(self, app: ASGIApp, receiving: HttpReceiving) -> None:
        self._app, self._counts = app, receiving.counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if (
                message["type"] == "http.response.start"
                and message["status"] in {401, 403, 404, 405}
                and "headrace.counted" not in scope
            ):
                self._counts.turned_away(1, f"HTTP {message['status']}")
            await send(message)

        await self._app(scope, receive, counted)


class Shortcut:
    """Hands posted rows to `Posts`, before anything else looks at the request, and passes every
    other request on.
    """

    def __init__(self, app: ASGIApp, posts: Posts) -> None:
        self._app, self._posts = app, posts

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


class Posts:
    """Rows on their way in. It lives in the event loop's thread; the inbox calls it from its
    own.
    """

    def __init__(self, receiving: HttpReceiving, checks: dict[str, SignatureCheck]) -> None:
        gateway = receiving.gateway
        self._receiving, self._counts, self._checks = receiving, receiving.counts, checks
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
            body = await self._take(scope, receive)
        except HeadraceError as error:
            await error_response(error)(scope, receive, send)
        except BrokenOff:
            self._counts.turned_away(1, "broken off")
        else:
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [*JSON_HEADERS, (b"content-length", b"%d" % len(body))],
                }
            )
            await send({"type": "http.response.body", "body": body})

    async def _take(self, scope: Scope, receive: Receive) -> bytes:
        """1. which topic, and how the body is written; 2. room for the body; 3. the body, and its
        signature; 4. room for its rows; 5. durable.
        """
        headers = Headers(scope=scope)
        try:
            topic = self._topic(unquote(scope["path"][len(_PREFIX) :]))
            kind = RAW if topic in self._hooks and self._hooks[topic].raw else kind_of(headers)  # 1
            size, identity = length_of(headers, self._max_bytes), id_of(headers)
        except HeadraceError as error:
            self._counts.turned_away(1, _reason(error))
            raise
        if (answer := await self._room(0, size)) is not Admission.taken:  # 2
            rows = await count(receive, kind, self._max_bytes)
            self._counts.turned_away(
                rows, FULL, Fate.dropped if answer is Admission.dropped else Fate.refused
            )
            raise self._full()
        try:
            delivery = await self._delivery(scope, receive, headers, topic, kind, identity)  # 3
            self._counts.came(delivery.rows)
            await self._room_for_rows(delivery)  # 4
        except BaseException:
            self._receiving.inbox.give_back(0, size)
            raise
        delivery.size = size
        return await self._stored(delivery)  # 5

    def _topic(self, name: str) -> str:
        topics = self._receiving.gateway.topics
        if name not in topics:
            raise Refused(
                404,
                f"This gateway has no topic {name[:100]!r}: {nearest(name, topics)}",
                fix="name it when the gateway is started, if it is to have it.",
            )
        return name

    async def _delivery(
        self,
        scope: Scope,
        receive: Receive,
        headers: Headers,
        topic: str,
        kind: str,
        id: str | None,
    ) -> Delivery:
        try:
            body = await read(receive, self._max_bytes)
            received_us = now_us()
            vouched = self._checks[topic].check(headers, body) if topic in self._checks else None
            content = content_of(
                kind, body, asdict(Known.of(headers, scope["query_string"])) if kind == RAW else {}
            )
        except BadSignature as error:
            self._counts.turned_away(1, "signature")
            raise Refused(
                401,
                str(error),
                fix="sign the body with the secret that this hook has, and send it at once.",
            ) from None
        except HeadraceError as error:
            self._counts.turned_away(1, _reason(error))
            raise
        if not content.values:  # type: ignore[union-attr]
            self._counts.turned_away(1, "empty")
            raise Refused(400, "The body has no row.", fix="send at least one.")
        return Delivery(topic, content, len(content.values), len(body), received_us, vouched or id)  # type: ignore[union-attr]

    async def _room(self, rows: int, size: int) -> Admission:
        """Room by the policy; one that blocks is waited for, in the order in which they came."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._patience_s
        while (answer := self._receiving.inbox.admit(rows, size)) is Admission.wait:
            waiter = loop.create_future()
            self._waiters.append(waiter)
            try:
                async with asyncio.timeout_at(deadline_s):
                    await waiter
            except TimeoutError:
                with contextlib.suppress(ValueError):  # it was woken just now
                    self._waiters.remove(waiter)
                return Admission.refused
        return answer

    async def _room_for_rows(self, delivery: Delivery) -> None:
        if (answer := await self._room(delivery.rows, 0)) is not Admission.taken:
            self._receiving.inbox.turn_away(delivery, answer)
            raise self._full()

    def room_was_made(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        waiting, self._waiters = self._waiters, deque()
        for each in waiting:
            if not each.done():
                each.set_result(None)

    def _full(self) -> Refused:
        return Refused(
            503,
            "The log is slower than those who send: there is no room.",
            fix="come back in a moment.",
        )

    async def _stored(self, delivery: Delivery) -> bytes:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Outcome] = loop.create_future()
        delivery.done = lambda outcome: _tell(loop, done, outcome)
        self._receiving.inbox.put(delivery)
        try:
            async with asyncio.timeout(self._patience_s):
                outcome = await done
        except TimeoutError:
            is_signed = (
                delivery.topic in self._hooks and self._hooks[delivery.topic].signature is not None
            )
            fix = (
                "send it again, as it is: then it is stored once."
                if is_signed
                else "send it again, under the same Idempotency-Key: then it is stored once."
            )
            raise Refused(
                503,
                f"The rows are not durable after {self._patience_s:g} seconds; they may yet be.",
                fix=fix,
            ) from None
        return _answer(delivery, outcome)


def _tell(loop: asyncio.AbstractEventLoop, done: asyncio.Future[Outcome], outcome: Outcome) -> None:
    def settle() -> None:
        if not done.done():
            done.set_result(outcome)

    with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
        loop.call_soon_threadsafe(settle)


def _answer(delivery: Delivery, outcome: Outcome) -> bytes:
    if outcome.fate in {Fate.stored, Fate.repeated}:
        known = (
            {"position": outcome.position} if outcome.fate is Fate.stored else {"repeated": True}
        )
        return json.dumps({"topic": delivery.topic, "rows": delivery.rows, **known}).encode()
    if outcome.passing:
        raise Refused(503, outcome.message, fix="come back in a moment.")
    raise Refused(
        404 if outcome.reason == "unknown topic" else 400,
        outcome.message,
        fix="nothing of this request was stored: mend it, and send it again.",
    )


_REASONS = {400: "malformed", 404: "unknown topic", 413: "too large", 415: "content type"}


def _reason(error: HeadraceError) -> str:
    return (
        _REASONS.get(error.status, f"HTTP {error.status}")
        if isinstance(error, Refused)
        else type(error).__name__
    )
