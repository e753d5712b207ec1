"""The HTTP interface: which paths there are, and what each does with a request. `description` says
the same as OpenAPI.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from headrace.errors import BugError, ConfigurationError, HeadraceError, UnknownView
from headrace.log import dead_letters
from headrace.log.api import Log
from headrace.serve import subscriptions, views
from headrace.serve.access import Access, veiled
from headrace.serve.ask import Asks
from headrace.serve.channels import EventStream, Hub
from headrace.serve.dashboard import Board, metrics, page_routes
from headrace.serve.lookups import Lookups, Shortcut
from headrace.serve.openapi import description
from headrace.serve.read_your_writes import Arrivals
from headrace.serve.requests import Asked, Limits, Reads, Refused, error_response, json_response
from headrace.serve.stores import Stores
from headrace.serve.subscriptions import Snapshots, Subscription, resume_from, selection

MAX_TAIL_ROWS = 10_000
LOOK_UNASKED_S = 5.0


class Service:
    """The views of a state directory, and the topics of a log, if there is one."""

    hub: Hub
    loop: asyncio.AbstractEventLoop

    def __init__(self, state: Path, log: Log | None, limits: Limits) -> None:
        self.limits, self.log = limits, log
        self.stores = Stores(state)
        self.lookups, self.snapshots = Lookups(self.stores), Snapshots()
        self.reads = Reads(limits)
        self.arrivals = Arrivals(log, self.reads)
        self.board = Board(state, log)
        self.asks = Asks(log, self.reads, limits)

    def end_streams(self) -> None:
        """Called from another thread, before the server waits for what is under way."""
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self.loop.call_soon_threadsafe(self.hub.end)

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self.loop, self.hub = asyncio.get_running_loop(), Hub(self.limits)
        looking = asyncio.create_task(self._keep_looking())
        try:
            yield
        finally:
            looking.cancel()
            await self.asks.close()
            await self.hub.close()
            self.reads.close()
            self.stores.close()

    async def _keep_looking(self) -> None:
        """Now and then, so that whoever opens the dashboard sees how it was before."""
        while True:
            with contextlib.suppress(HeadraceError, OSError):
                await self.reads.run(self.board.look)
            await asyncio.sleep(LOOK_UNASKED_S)

    # Views

    async def list_views(self, request: Request) -> Response:
        Asked(request, ())
        return await self.reads.run(views.list_views, self.stores)

    async def view(self, request: Request) -> Response:
        place = self.stores.place(request.path_params["name"])
        asked = Asked(request, views.PARAMETERS)
        if (position := asked.one("at_least")) is not None:
            await self.arrivals.wait(
                place.store,
                place.stored,
                position,
                asked.seconds("wait", self.limits.wait_s, self.limits.max_wait_s),
            )
        wanted = views.Range.of(asked, self.limits)
        tick = asked.number("at_tick", most=views.MAX_TICK)
        if tick is not None:
            return await self.reads.run(views.rows_at, place, tick, wanted, self.limits.undone_rows)
        if wanted.key:
            return json_response(self.lookups.row(place.name, wanted.key))
        return await self.reads.run(views.rows, place, wanted)

    async def changes(self, request: Request) -> ASGIApp:
        asked = Asked(request, ("key", "where"))
        name, resume = (
            request.path_params["name"],
            resume_from(request.headers.get("last-event-id")),
        )
        subscription = Subscription(self.stores, self.hub, self.snapshots, name)
        info = await subscription.info()
        subscription.select = selection(
            info.name, info.schema, info.key, asked.all("key"), asked.one("where")
        )
        await subscription.check(resume)
        return self._stream(subscription.events(resume))

    async def sql(self, request: Request) -> Response:
        asked = await views.read_query(request, self.limits)
        if asked.at_least is not None:
            await self.arrivals.wait(
                self.stores.store(asked.version), None, asked.at_least, asked.wait_s
            )
        return await self.reads.run(views.answer, self.stores, asked)

    # Topics

    async def tail(self, request: Request) -> ASGIApp:
        asked = Asked(request, ("where", "last"))
        if self.log is None:
            raise ConfigurationError(
                "This server was started without a log.", fix="start it with --log ADDRESS."
            )
        resume, last = (
            subscriptions.offsets_from(request.headers.get("last-event-id")),
            asked.number("last", most=MAX_TAIL_ROWS) or 0,
        )
        topic = await self.reads.run(self.log.topic, request.path_params["name"])
        select = selection(
            topic.name, topic.arrow_schema, (), [], asked.one("where"), as_changes=False
        )
        after = await self.reads.run(subscriptions.start_of, self.log, topic.name, resume, last)
        return self._stream(subscriptions.tail(self.log, self.hub, topic.name, after, select))

    def _stream(self, events: Any) -> EventStream:
        if self.hub.subscribers >= self.limits.subscribers:
            raise Refused(
                503,
                f"There are {self.limits.subscribers:,} subscribers, which is the most.",
                fix="come back later.",
            )
        return EventStream(events, self.limits.slow_s)

    # The dashboard

    async def facts(self, request: Request) -> Response:
        Asked(request, ())
        return json_response(await self.reads.run(self.board.facts))

    async def replay_letters(self, request: Request) -> Response:
        """Dead letters again, all or one: the only request that changes anything. A page of another
        origin cannot make it (`access`).
        """
        asked = Asked(request, ("offset",))
        if self.log is None:
            raise ConfigurationError(
                "This server was started without a log.", fix="start it with --log ADDRESS."
            )
        offset = asked.number("offset", most=views.MAX_TICK)
        result = await self.reads.run(
            dead_letters.replay,
            self.log,
            request.path_params["name"],
            None if offset is None else [offset],
        )
        failed = [
            {"partition": partition, "offset": at, "reason": reason}
            for partition, at, reason in result.failed
        ]
        return json_response({"replayed": result.replayed, "failed": failed})

    # The server itself

    async def metrics(self, request: Request) -> Response:
        Asked(request, ())
        text = await self.reads.run(metrics, self.stores, self.hub.subscribers)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def health(self, _request: Request) -> Response:
        """Whether views can be read. It tells nothing more, since it needs no token."""
        try:
            await self.reads.run(self.stores.views)
        except HeadraceError:
            return json_response({"status": "no views"}, 503)
        return json_response({"status": "ok"})

    async def failed(self, request: Request, error: Exception) -> Response:
        """What went wrong, as an answer. A view that is not there may be misspelt, and be one of a
        version.
        """
        assert isinstance(error, HeadraceError)
        if isinstance(error, UnknownView) and (name := request.path_params.get("name")):
            return error_response(await self.reads.run(self.stores.unknown, name))
        return error_response(error)

    async def describe(self, _request: Request) -> Response:
        return json_response(description(self.limits))


def make_app(service: Service, *, host: str, token: str | None) -> ASGIApp:
    routes = [
        Route("/views", service.list_views, methods=["GET"]),
        Route("/views/{name}", service.view, methods=["GET"]),
        Route("/views/{name}/changes", service.changes, methods=["GET"]),
        Route("/sql", service.sql, methods=["POST"]),
        Route("/ask/{name}", service.asks.ask, methods=["POST"]),
        Route("/topics/{name}/tail", service.tail, methods=["GET"]),
        Route("/dashboard/facts", service.facts, methods=["GET"]),
        Route("/dead/{name}/replay", service.replay_letters, methods=["POST"]),
        *page_routes(),
        Route("/metrics", service.metrics, methods=["GET"]),
        Route("/health", service.health, methods=["GET"]),
        Route("/openapi.json", service.describe, methods=["GET"]),
    ]
    handlers: dict[Any, Callable[..., Any]] = {
        HeadraceError: service.failed,
        HTTPException: _not_here,
        Exception: _broken,
    }
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=service.lifespan)
    return Access(veiled(Shortcut(app, service.lookups), service.log), host=host, token=token)


def _broken(_request: Request, error: Exception) -> Response:
    """An error of our own, which the server's log tells in full."""
    return error_response(
        BugError(
            f"The answer could not be made ({type(error).__name__}).",
            fix="see the server's log, and please report it.",
        )
    )


def _not_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    fix = "/openapi.json says what there is."
    return error_response(
        Refused(
            error.status_code,
            f"{error.detail}: {request.method} {request.url.path[:200]}.",
            fix=fix,
        )
    )
