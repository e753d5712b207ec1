"""The HTTP interface: its paths and their handlers. `openapi.py` describes it as OpenAPI.

`make_app` builds the ASGI application: access control, then the redaction of deleted people's
values, then the fast path for single rows, then the routes.
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
from headrace.http.access import HEALTH_PATHS, AccessMiddleware
from headrace.http.responses import Refused, error_response, json_response
from headrace.log import dead_letters
from headrace.log.api import Log
from headrace.serve import subscriptions, views
from headrace.serve.ask import AskHandler
from headrace.serve.channels import EventStream, Hub
from headrace.serve.dashboard import PAGE_PATHS, Dashboard, page_routes
from headrace.serve.lookups import LookupMiddleware, RowLookups
from headrace.serve.metrics import render_metrics
from headrace.serve.openapi import description
from headrace.serve.postgres.listener import PostgresListener
from headrace.serve.read_your_writes import OffsetWaiter
from headrace.serve.redaction import redact_responses
from headrace.serve.requests import Limits, ReadPool, RequestParameters
from headrace.serve.selections import parse_selection
from headrace.serve.stores import ViewStores
from headrace.serve.subscriptions import (
    SnapshotCache,
    Subscription,
    parse_resume_id,
)

MAX_TAIL_ROWS = 10_000
SAMPLE_EVERY_S = 5.0


class Service:
    """The handlers of all requests: for the views of a state directory, and the topics of a log if
    there is one.
    """

    hub: Hub
    loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        state: Path,
        log: Log | None,
        limits: Limits,
        postgres: PostgresListener | None = None,
    ) -> None:
        self.limits = limits
        self.postgres = postgres
        self.log = log
        self.stores = ViewStores(state)
        self.lookups = RowLookups(self.stores)
        self.snapshots = SnapshotCache()
        self.reads = ReadPool(limits.reads, limits.waiting_reads)
        self.queries = ReadPool(limits.queries, limits.waiting_reads)
        self.offset_waiter = OffsetWaiter(log, self.reads)
        self.dashboard = Dashboard(state, log)
        self.ask_handler = AskHandler(log, self.reads, limits, state)

    def end_streams(self) -> None:
        """End all subscriptions. Another thread calls this before it waits for open requests."""
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self.loop.call_soon_threadsafe(self.hub.end_streams)

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self.loop = asyncio.get_running_loop()
        self.hub = Hub(self.limits)
        self.hub.start()
        if self.postgres is not None:
            await self.postgres.start(self)
        sampling = asyncio.create_task(self._sample_dashboard())
        try:
            yield
        finally:
            sampling.cancel()
            if self.postgres is not None:
                await self.postgres.close()
            await self.ask_handler.close()
            await self.hub.close()
            self.reads.close()
            self.queries.close()
            self.stores.close()

    async def _sample_dashboard(self) -> None:
        """Take samples while nobody looks, so that the dashboard opens with a history."""
        while True:
            with contextlib.suppress(HeadraceError, OSError):
                await self.reads.run(self.dashboard.sample)
            await asyncio.sleep(SAMPLE_EVERY_S)

    # Views

    async def list_views(self, request: Request) -> Response:
        RequestParameters(request, ())
        return await self.reads.run(views.list_views, self.stores)

    async def view(self, request: Request) -> Response:
        location = self.stores.locate(request.path_params["name"])
        parameters = RequestParameters(request, views.PARAMETERS)
        if (offsets := parameters.one("at_least")) is not None:
            wait_s = parameters.seconds("wait", self.limits.wait_s, self.limits.max_wait_s)
            await self.offset_waiter.wait(location.store, location.stored_name, offsets, wait_s)
        row_range = views.RowRange.from_parameters(parameters, self.limits)
        tick = parameters.number("at_tick", max_value=views.MAX_TICK)
        if tick is not None:
            return await self.reads.run(
                views.read_rows_at, location, tick, row_range, self.limits.max_undo_rows
            )
        if row_range.key:
            return json_response(self.lookups.row(location.name, row_range.key))
        return await self.reads.run(views.read_rows, location, row_range)

    async def changes(self, request: Request) -> ASGIApp:
        parameters = RequestParameters(request, ("key", "where"))
        name = request.path_params["name"]
        resume = parse_resume_id(request.headers.get("last-event-id"))
        subscription = Subscription(self.stores, self.hub, self.snapshots, name)
        info = await subscription.info()
        subscription.select = parse_selection(
            info.name, info.schema, info.key, parameters.all("key"), parameters.one("where")
        )
        await subscription.check(resume)
        return self._stream(subscription.events(resume))

    async def sql(self, request: Request) -> Response:
        query = await views.read_query(request, self.limits)
        if query.at_least is not None:
            store = self.stores.store(query.version)
            await self.offset_waiter.wait(store, None, query.at_least, query.wait_s)
        return await self.queries.run(views.answer_query, self.stores, query, self.limits)

    # Topics

    async def tail(self, request: Request) -> ASGIApp:
        parameters = RequestParameters(request, ("where", "last"))
        log = self._require_log()
        resume = subscriptions.parse_offsets_id(request.headers.get("last-event-id"))
        last = parameters.number("last", max_value=MAX_TAIL_ROWS) or 0
        topic = await self.reads.run(log.topic, request.path_params["name"])
        select = parse_selection(
            topic.name, topic.arrow_schema, (), [], parameters.one("where"), as_changes=False
        )
        after = await self.reads.run(subscriptions.tail_start, log, topic.name, resume, last)
        return self._stream(subscriptions.tail(log, self.hub, topic.name, after, select))

    def _require_log(self) -> Log:
        if self.log is None:
            raise ConfigurationError(
                "This server was started without a log.", fix="start it with --log ADDRESS."
            )
        return self.log

    def _stream(self, events: Any) -> EventStream:
        if self.hub.subscribers >= self.limits.subscribers:
            raise Refused(
                503,
                f"There are {self.limits.subscribers:,} subscribers, the largest number allowed.",
                fix="try again later.",
            )
        return EventStream(events, self.limits.slow_s)

    # The dashboard

    async def dashboard_measurements(self, request: Request) -> Response:
        RequestParameters(request, ())
        return json_response(await self.reads.run(self.dashboard.measurements))

    async def replay_dead_letters(self, request: Request) -> Response:
        """Append all dead letters of a topic, or one, to their topic again: the only request that
        changes anything. A page of another origin cannot send it (`access.py`).
        """
        parameters = RequestParameters(request, ("offset",))
        log = self._require_log()
        offset = parameters.number("offset", max_value=views.MAX_TICK)
        result = await self.reads.run(
            dead_letters.replay,
            log,
            request.path_params["name"],
            None if offset is None else [offset],
        )
        failed = [
            {"partition": partition, "offset": failed_offset, "reason": reason}
            for partition, failed_offset, reason in result.failed
        ]
        return json_response({"replayed": result.replayed, "failed": failed})

    # The server itself

    async def metrics(self, request: Request) -> Response:
        RequestParameters(request, ())
        text = await self.reads.run(render_metrics, self.stores, self.hub.subscribers, self.log)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def health(self, _request: Request) -> Response:
        """Whether views can be read. The response says no more, because it needs no token."""
        try:
            await self.reads.run(self.stores.views)
        except HeadraceError:
            return json_response({"status": "no views"}, 503)
        return json_response({"status": "ok"})

    async def error(self, request: Request, error: Exception) -> Response:
        """The response to a failed request. For an unknown view it names the nearest one, also
        among the views of versions.
        """
        assert isinstance(error, HeadraceError)
        if isinstance(error, UnknownView) and (name := request.path_params.get("name")):
            return error_response(await self.reads.run(self.stores.unknown_view, name))
        return error_response(error)

    async def describe(self, _request: Request) -> Response:
        return json_response(description(self.limits))


def make_app(service: Service, *, host: str, token: str | None) -> ASGIApp:
    """The ASGI application of a service."""
    routes = [
        Route("/views", service.list_views, methods=["GET"]),
        Route("/views/{name}", service.view, methods=["GET"]),
        Route("/views/{name}/changes", service.changes, methods=["GET"]),
        Route("/sql", service.sql, methods=["POST"]),
        Route("/ask/{name}", service.ask_handler.ask, methods=["POST"]),
        Route("/topics/{name}/tail", service.tail, methods=["GET"]),
        Route("/dashboard/facts", service.dashboard_measurements, methods=["GET"]),
        Route("/dead/{name}/replay", service.replay_dead_letters, methods=["POST"]),
        *page_routes(),
        Route("/metrics", service.metrics, methods=["GET"]),
        Route("/health", service.health, methods=["GET"]),
        Route("/openapi.json", service.describe, methods=["GET"]),
    ]
    handlers: dict[Any, Callable[..., Any]] = {
        HeadraceError: service.error,
        HTTPException: _http_error,
        Exception: _internal_error,
    }
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=service.lifespan)
    return AccessMiddleware(
        redact_responses(LookupMiddleware(app, service.lookups), service.log),
        host=host,
        token=token,
        open_paths=HEALTH_PATHS | PAGE_PATHS,
    )


def _internal_error(_request: Request, error: Exception) -> Response:
    """The response to a bug; the server's log has the traceback."""
    return error_response(
        BugError(
            f"The response could not be computed ({type(error).__name__}).",
            fix="see the server's log, and please report it.",
        )
    )


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(
        Refused(
            error.status_code,
            f"{error.detail}: {request.method} {request.url.path[:200]}.",
            fix="see /openapi.json for all paths.",
        )
    )
