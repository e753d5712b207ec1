"""One row by key: what is asked most, so it is answered before anything else looks at the request, and many at a time.

Requests that came together are answered together, in one *moment*: one look at which version is served, one read transaction of the store. A moment ends before anything is
answered that came after it began (the event loop does things in the order in which they are put to it), so nobody is shown less than what was there when they asked.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.errors import HeadraceError
from headrace.serve.answers import JSON_HEADERS, Refused, error_response, head_json
from headrace.serve.asking import only_key
from headrace.serve.stores import Place, Stores
from headrace.serve.typed_text import typed_key
from headrace.sinks.view_lookup import Lookup

_PREFIX = "/views/"


class Lookups:
    """The views by key. It lives in the event loop's thread: a row takes so little time that another thread would cost more."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._moment: dict[str, tuple[Place, Lookup, str]] | None = None

    def row(self, name: str, texts: list[str]) -> bytes:
        """The row of a key as it is now, as the JSON of an answer."""
        place, lookup, head = self._opened(name)
        stored = lookup.stored_key(texts)
        text = lookup.row(lookup.key_of(typed_key(lookup.info, texts, whole=True)) if stored is None else stored)
        if text is None:
            raise Refused(404, f"The view {place.name!r} has no row for the key {', '.join(texts)} at tick {lookup.tick}.")
        return f'{{{head},"row":{text}}}'.encode()

    def _opened(self, name: str) -> tuple[Place, Lookup, str]:
        """A view in the moment that is under way, or in a new one."""
        if self._moment is None:
            self._moment = {}
            asyncio.get_running_loop().call_soon(self._end)
        found = self._moment.get(name)
        if found is None or found[1].closed:
            place = self._stores.place(name)
            lookup = place.store.opened_lookup(place.stored)
            found = self._moment[name] = place, lookup, head_json(place.name, place.version, lookup.tick)
        return found

    def _end(self) -> None:
        moment, self._moment = self._moment, None
        for _, lookup, _ in (moment or {}).values():
            lookup.end()


class Shortcut:
    """Answers `GET /views/NAME?key=…` itself, and passes every other request on."""

    def __init__(self, app: ASGIApp, lookups: Lookups) -> None:
        self._app, self._lookups = app, lookups

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (name := _view(scope)) or not (texts := only_key(scope["query_string"])):
            await self._app(scope, receive, send)
            return
        try:
            body = self._lookups.row(name, texts)
        except HeadraceError as error:
            await error_response(error)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [*JSON_HEADERS, (b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})


def _view(scope: Scope) -> str:
    """The view that is asked for, or nothing."""
    path: str = scope["path"]
    if scope["method"] != "GET" or not path.startswith(_PREFIX):
        return ""
    name = path[len(_PREFIX) :]
    return "" if "/" in name else name
