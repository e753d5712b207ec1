"""What a request asks for: its parameters, by name, each once unless it is a list, and nothing that is not known."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any
from urllib.parse import unquote_plus

from starlette.requests import Request

from headrace.durations import to_us
from headrace.errors import InputError, nearest
from headrace.serve.answers import Refused
from headrace.serve.limits import Limits


def only_key(query: bytes) -> list[str]:
    """The values of key=, if a request asks for nothing else: what is asked most, without building what the other questions need."""
    parts = query.split(b"&")
    if not all(part.startswith(b"key=") for part in parts):
        return []
    return [unquote_plus(part[4:].decode("latin-1"), errors="replace") for part in parts]


async def read_json(request: Request, limits: Limits, *, what: str, example: str) -> Any:
    """The body of a request that comes as JSON, bounded. `what` it is, and an `example`, for those who send something else."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, f"{what} comes as JSON.", fix=f"send {example} with Content-Type: application/json.")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > limits.body_bytes:
            raise Refused(413, f"The request is larger than {limits.body_bytes:,} bytes.", fix="shorten it.")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise InputError("The request is not JSON.", fix=f"send {example}.") from None


class Asked:
    """The parameters of one request."""

    def __init__(self, request: Request, known: Collection[str]) -> None:
        self._given = request.query_params
        for name in self._given:
            if name not in known:
                raise InputError(f"There is no parameter {name!r} here: {nearest(name, known)}")

    def all(self, name: str) -> list[str]:
        return self._given.getlist(name)

    def one(self, name: str) -> str | None:
        given = self._given.getlist(name)
        if len(given) > 1:
            raise InputError(f"The parameter {name!r} came {len(given)} times.", fix="give it once.")
        return given[0] if given else None

    def number(self, name: str, *, least: int = 0, most: int) -> int | None:
        text = self.one(name)
        if text is None:
            return None
        if not (text.isascii() and text.isdecimal() and len(text) < 19 and least <= int(text) <= most):
            raise InputError(f"{name}={text[:40]!r} is not a number from {least:,} to {most:,}.", fix="give one, in digits alone.")
        return int(text)

    def choice(self, name: str, choices: Collection[str]) -> str | None:
        text = self.one(name)
        if text is not None and text not in choices:
            raise InputError(f"{name}={text[:40]!r} is not one of {', '.join(choices)}.", fix="choose one of them.")
        return text

    def seconds(self, name: str, default_s: float, most_s: float) -> float:
        """A length of time such as "5 seconds", bounded."""
        text = self.one(name)
        return default_s if text is None else bounded_seconds(name, text, most_s)


def bounded_seconds(name: str, text: str, most_s: float) -> float:
    seconds = to_us(text, what=name) / 1_000_000
    if not 0 <= seconds <= most_s:
        raise InputError(f"{name}={text!r} is longer than {most_s:g} seconds, which is the most.", fix="give a shorter time.")
    return seconds
