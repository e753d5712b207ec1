"""The fast path for `GET /views/NAME?key=…`, the most frequent request. It is answered before the
router sees it, at the cost of three checks (which version is served, whether the store's file is
still there, whether anything has been committed) and one SQL statement.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.errors import HeadraceError, UnknownView
from headrace.http.responses import JSON_HEADERS, error_response
from headrace.serve.requests import NoSuchRow, head_json, parse_key, parse_key_only
from headrace.serve.stores import ViewLocation, ViewStores
from headrace.views.lookup import Lookup

_PREFIX = "/views/"
_SNAPSHOT_S = 0.02
"""How long a snapshot of the store stays open at most if nothing is committed."""


@dataclass
class _CachedLookup:
    location: ViewLocation
    lookup: Lookup
    served_stamp: object
    head_tick: int = -1
    head: str = ""

    def response_head(self) -> str:
        """The first members of each response, which are the same for all rows of a tick."""
        if self.head_tick != self.lookup.tick:
            self.head_tick = self.lookup.tick
            self.head = head_json(self.location.name, self.location.version, self.lookup.tick)
        return self.head


class RowLookups:
    """Rows of views by key. It lives in the event loop's thread: reading a row takes less time
    than handing it to another thread.
    """

    def __init__(self, stores: ViewStores) -> None:
        self._stores = stores
        self._cache: dict[str, _CachedLookup] = {}
        self._is_release_scheduled = False

    def row(self, name: str, texts: list[str]) -> bytes:
        """The current row of a key, as the JSON body of a response. NoSuchRow if there is none."""
        cached = self._refreshed_lookup(name)
        lookup = cached.lookup
        stored_key = lookup.parse_plain_key(texts)
        if stored_key is None:
            stored_key = lookup.stored_key(parse_key(lookup.info, texts, whole=True))
        row = lookup.row_json(stored_key)
        if row is None:
            raise NoSuchRow(name, texts, lookup.tick)
        return f'{{{cached.response_head()},"row":{row}}}'.encode()

    def lookup(self, name: str) -> tuple[ViewLocation, Lookup]:
        """The look-up of a view, as of its newest commit, and where the view is stored."""
        cached = self._refreshed_lookup(name)
        return cached.location, cached.lookup

    def _refreshed_lookup(self, name: str) -> _CachedLookup:
        """The look-up of a view, as of its newest commit."""
        cached, served_stamp = self._cache.get(name), self._stores.served_stamp()
        if (
            cached is None
            or cached.lookup.is_closed
            or cached.served_stamp != served_stamp
            or not cached.location.store.is_on_disk()
            or not cached.lookup.refresh()
        ):
            self._cache.pop(name, None)
            location = self._stores.locate(name)
            try:
                lookup = location.store.open_lookup(location.stored_name)
            except UnknownView:
                raise self._stores.unknown_view(name) from None
            cached = self._cache[name] = _CachedLookup(location, lookup, served_stamp)
        if not self._is_release_scheduled:
            self._is_release_scheduled = True
            asyncio.get_running_loop().call_later(_SNAPSHOT_S, self._release)
        return cached

    def _release(self) -> None:
        self._is_release_scheduled = False
        for cached in self._cache.values():
            cached.lookup.release()


class LookupMiddleware:
    """ASGI middleware that answers `GET /views/NAME?key=…` and passes every other request on."""

    def __init__(self, app: ASGIApp, lookups: RowLookups) -> None:
        self._app = app
        self._lookups = lookups

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or not (name := _requested_view(scope))
            or not (texts := parse_key_only(scope["query_string"]))
        ):
            await self._app(scope, receive, send)
            return
        try:
            body = self._lookups.row(name, texts)
        except HeadraceError as error:
            await error_response(error)(scope, receive, send)
            return
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [*JSON_HEADERS, (b"content-length", b"%d" % len(body))],
            }
        )
        await send({"type": "http.response.body", "body": body})


def _requested_view(scope: Scope) -> str:
    """The view that a request reads, or an empty text if it is another request."""
    path: str = scope["path"]
    if scope["method"] != "GET" or not path.startswith(_PREFIX):
        return ""
    name = path[len(_PREFIX) :]
    return "" if "/" in name else name
