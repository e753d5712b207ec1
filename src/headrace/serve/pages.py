"""The dashboard's files: one page, its scripts, one style sheet, served as they are. Nothing is loaded from elsewhere, and the browser is told to refuse it."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_SCRIPT = "text/javascript"
_FILES = {
    "/": ("index.html", "text/html"),
    "/board.js": ("board.js", _SCRIPT),
    "/drawing.js": ("drawing.js", _SCRIPT),
    "/board.css": ("board.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def page(request: Request) -> Response:
    name, kind = _FILES[request.url.path]
    return Response((files("headrace.serve") / "page" / name).read_bytes(), media_type=kind, headers=_HEADERS)


def page_routes() -> list[Route]:
    return [Route(path, page, methods=["GET"]) for path in _FILES]
