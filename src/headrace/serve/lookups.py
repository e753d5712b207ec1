"""One row by key: what is asked most, so it is answered before anything else looks at the request,
with as little as can be: one look at which version is served, one at whether anything has been
committed, and one statement.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.errors import HeadraceError, UnknownView
from headrace.serve.requests import (
    JSON_HEADERS,
    NoSuchRow,
    error_response,
    head_json,
    only_key,
    typed_key,
)
from headrace.serve.stores import Place, Stores
from headrace.views.lookup import Lookup

_PREFIX = "/views/"
_HELD_S = 0.02
"""For so long a moment of the store is held on to at most, as long as nothing is committed."""


@dataclass
class _Known:
    place: Place
    lookup: Lookup
    served: object
    head: tuple[int, str] = (-1, "")

    def answer_head(self) -> str:
        """What answers begin with, as long as the tick is the same."""
        if self.head[0] != self.lookup.tick:
            self.head = (
                self.lookup.tick,
                head_json(self.place.name, self.place.version, self.lookup.tick),
            )
        return self.head[1]


class Lookups:
    """The views by key. It lives in the event loop's thread: a row takes so little time that
    another thread would cost more.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._known: dict[str, _Known] = {}
        self._will_let_go = False

    def row(self, name: str, texts: list[str]) -> bytes:
        """The row of a key as it is now, as the JSON of an answer."""
        known = self._opened(name)
        lookup = known.lookup
        stored = lookup.stored_key(texts)
        text = lookup.row(
            lookup.key_of(typed_key(lookup.info, texts, whole=True)) if stored is None else stored
        )
        if text is None:
            raise NoSuchRow(name, texts, lookup.tick)
        return f'{{{known.answer_head()},"row":{text}}}'.encode()

    def _opened(self, name: str) -> _Known:
        """A view as of its newest commit."""
        known, served = self._known.get(name), self._stores.served_stamp()
        if (
            known is None
            or known.lookup.closed
            or known.served != served
            or not known.place.store.is_on_disk()
            or not known.lookup.show_newest()
        ):
            self._known.pop(name, None)
            known = self._known[name] = self._found(name, served)
        if not self._will_let_go:
            self._will_let_go = True
            asyncio.get_running_loop().call_later(_HELD_S, self._let_go)
        return known

    def _found(self, name: str, served: object) -> _Known:
        place = self._stores.place(name)
        try:
            return _Known(place, place.store.opened_lookup(place.stored), served)
        except UnknownView:
            raise self._stores.unknown(name) from None

    def _let_go(self) -> None:
        self._will_let_go = False
        for known in self._known.values():
            known.lookup.end()


class Shortcut:
    """Answers `GET /views/NAME?key=…` itself, and passes every other request on."""

    def __init__(self, app: ASGIApp, lookups: Lookups) -> None:
        self._app, self._lookups = app, lookups

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or not (name := _view(scope))
            or not (texts := only_key(scope["query_string"]))
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


def _view(scope: Scope) -> str:
    """The view that is asked for, or nothing."""
    path: str = scope["path"]
    if scope["method"] != "GET" or not path.startswith(_PREFIX):
        return ""
    name = path[len(_PREFIX) :]
    return "" if "/" in name else name
