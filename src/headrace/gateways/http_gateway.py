"""The HTTP gateway: `POST /topics/NAME`, answered when the rows are durable.

A request goes through numbered steps (`Posts._take`): who may send, how the body is written, room for it, the body, its signature, its rows, and the wait for the log. Requests that wait
together are appended together.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import HeadraceError, nearest
from headrace.gateways import http_bodies as bodies
from headrace.gateways.declared import Gateway
from headrace.gateways.deliveries import Delivery, Fate, Outcome
from headrace.gateways.inbox import FULL, Admission
from headrace.gateways.metrics import metrics
from headrace.gateways.receiving import Receiving, now_us
from headrace.gateways.signatures import BadSignature, Hook, SignatureCheck
from headrace.log.api import Log
from headrace.serve.access import Access, check_listening, find_token, is_loopback
from headrace.serve.answers import JSON_HEADERS, Refused, error_response, json_response
from headrace.serve.listening import HttpServer, listen
from headrace.serve.prometheus import MEDIA_TYPE

_PREFIX = "/topics/"
_SLOW_S = 30.0


class HttpReceiving(Receiving):
    patient = False
    _server: HttpServer

    def __init__(self, gateway: Gateway, log: Log) -> None:
        super().__init__(gateway, log)
        self._host: str = gateway.options["host"]
        self._hooks: dict[str, Hook] = gateway.options["hooks"]
        self._token = find_token(gateway.options["token_file"])
        self._posts = Posts(self, {name: SignatureCheck(each) for name, each in self._hooks.items()})
        open_topics = [name for name in gateway.topics if name not in self._signed]
        if open_topics or not is_loopback(self._host):
            check_listening(self._host, self._token if open_topics else "signed", what=f"append to {', '.join(open_topics)}")

    @property
    def _signed(self) -> set[str]:
        return {name for name, each in self._hooks.items() if each.signature is not None}

    def on_room(self) -> Callable[[], None]:
        return self._posts.room_was_made

    def begin(self) -> None:
        listening = listen(self._host, self.gateway.options["port"], slow_s=_SLOW_S)
        try:
            routes = [Route("/health", self._health, methods=["GET"]), Route("/metrics", self._metrics, methods=["GET"])]
            rest = Starlette(routes=routes, exception_handlers={HTTPException: _not_here}, lifespan=self._posts.lifespan)
            signed = frozenset(_PREFIX + name for name in self._signed)
            app = Access(Shortcut(rest, self._posts), host=self._host, token=self._token, signed=signed)
            self._server = HttpServer(Counting(app, self), listening, host=self._host, name=f"gateway {self.gateway.name}")
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
        return error_response(Refused(405, f"{request.method} means nothing here.", fix=f"send rows with POST {request.url.path}."))
    return error_response(Refused(error.status_code, "There is nothing here.", fix=f"send rows with POST {_PREFIX}NAME; there is GET /health and GET /metrics too."))


class Counting:
    """Counts requests that are turned away before they reach `Posts`: without a token, say."""

    def __init__(self, app: ASGIApp, receiving: HttpReceiving) -> None:
        self._app, self._counts = app, receiving.counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in {401, 403, 404, 405} and "headrace.counted" not in scope:
                self._counts.turned_away(1, f"HTTP {message['status']}")
            await send(message)

        await self._app(scope, receive, counted)


class Shortcut:
    """Hands posted rows to `Posts`, before anything else looks at the request, and passes every other request on."""

    def __init__(self, app: ASGIApp, posts: Posts) -> None:
        self._app, self._posts = app, posts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith(_PREFIX):
            scope["headrace.counted"] = True
            await self._posts(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class Posts:
    """Rows on their way in. It lives in the event loop's thread; the inbox calls it from its own."""

    def __init__(self, receiving: HttpReceiving, checks: dict[str, SignatureCheck]) -> None:
        gateway = receiving.gateway
        self._receiving, self._counts, self._checks = receiving, receiving.counts, checks
        self._hooks: dict[str, Hook] = gateway.options["hooks"]
        self._most_bytes: int = gateway.options["body_bytes"]
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
        except bodies.BrokenOff:
            self._counts.turned_away(1, "broken off")
        else:
            await send({"type": "http.response.start", "status": 200, "headers": [*JSON_HEADERS, (b"content-length", b"%d" % len(body))]})
            await send({"type": "http.response.body", "body": body})

    async def _take(self, scope: Scope, receive: Receive) -> bytes:
        """1. which topic, and how the body is written; 2. room for the body; 3. the body, and its signature; 4. room for its rows; 5. durable."""
        headers = Headers(scope=scope)
        try:
            topic = self._topic(unquote(scope["path"][len(_PREFIX) :]))
            kind = bodies.RAW if topic in self._hooks and self._hooks[topic].raw else bodies.kind_of(headers)  # 1
            size, identity = bodies.length_of(headers, self._most_bytes), bodies.id_of(headers)
        except HeadraceError as error:
            self._counts.turned_away(1, _reason(error))
            raise
        if (answer := await self._room(0, size)) is not Admission.taken:  # 2
            rows = await bodies.count(receive, kind, self._most_bytes)
            self._counts.turned_away(rows, FULL, Fate.dropped if answer is Admission.dropped else Fate.refused)
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
            raise Refused(404, f"This gateway has no topic {name[:100]!r}: {nearest(name, topics)}", fix="name it when the gateway is started, if it is to have it.")
        return name

    async def _delivery(self, scope: Scope, receive: Receive, headers: Headers, topic: str, kind: str, id: str | None) -> Delivery:
        try:
            body = await bodies.read(receive, self._most_bytes)
            received_us = now_us()
            vouched = self._checks[topic].check(headers, body) if topic in self._checks else None
            content = bodies.content_of(kind, body, asdict(bodies.Known.of(headers, scope["query_string"])) if kind == bodies.RAW else {})
        except BadSignature as error:
            self._counts.turned_away(1, "signature")
            raise Refused(401, str(error), fix="sign the body with the secret that this hook has, and send it at once.") from None
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
        return Refused(503, "The log is slower than those who send: there is no room.", fix="come back in a moment.")

    async def _stored(self, delivery: Delivery) -> bytes:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Outcome] = loop.create_future()
        delivery.done = lambda outcome: _tell(loop, done, outcome)
        self._receiving.inbox.put(delivery)
        try:
            async with asyncio.timeout(self._patience_s):
                outcome = await done
        except TimeoutError:
            is_signed = delivery.topic in self._hooks and self._hooks[delivery.topic].signature is not None
            fix = "send it again, as it is: then it is stored once." if is_signed else "send it again, under the same Idempotency-Key: then it is stored once."
            raise Refused(503, f"The rows are not durable after {self._patience_s:g} seconds; they may yet be.", fix=fix) from None
        return _answer(delivery, outcome)


def _tell(loop: asyncio.AbstractEventLoop, done: asyncio.Future[Outcome], outcome: Outcome) -> None:
    def settle() -> None:
        if not done.done():
            done.set_result(outcome)

    with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
        loop.call_soon_threadsafe(settle)


def _answer(delivery: Delivery, outcome: Outcome) -> bytes:
    if outcome.fate in {Fate.stored, Fate.repeated}:
        known = {"position": outcome.position} if outcome.fate is Fate.stored else {"repeated": True}
        return json.dumps({"topic": delivery.topic, "rows": delivery.rows, **known}).encode()
    if outcome.passing:
        raise Refused(503, outcome.message, fix="come back in a moment.")
    raise Refused(404 if outcome.reason == "unknown topic" else 400, outcome.message, fix="nothing of this request was stored: mend it, and send it again.")


_REASONS = {400: "malformed", 404: "unknown topic", 413: "too large", 415: "content type"}


def _reason(error: HeadraceError) -> str:
    return _REASONS.get(error.status, f"HTTP {error.status}") if isinstance(error, Refused) else type(error).__name__
