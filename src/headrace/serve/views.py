"""Reading views: which there are, rows by key or in a range, each with the tick that it shows; now, or at an earlier tick."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from starlette.responses import Response

from headrace.errors import InputError
from headrace.log.json_text import json_text_or_null
from headrace.log.schema import to_ddl
from headrace.serve.answers import NoSuchRow, head_json, json_response, rows_json
from headrace.serve.asking import Asked
from headrace.serve.history import view_at
from headrace.serve.known_loss import left_out
from headrace.serve.limits import Limits
from headrace.serve.stores import Place, Stores
from headrace.serve.typed_text import is_written_as_text, typed_key
from headrace.sinks.view_file import ViewInfo
from headrace.sinks.view_reader import Snapshot

PARAMETERS = ("key", "from", "to", "order", "limit", "at_least", "wait", "at_tick")
MOST_TICK = (1 << 63) - 1


def list_views(stores: Stores) -> Response:
    """Each with the rows that are known to be missing in it, where there are any."""
    found = stores.views()
    missing = {directory: left_out(directory) for directory in {place.store.directory for place, _ in found}}
    return json_response({"views": [_described(place, info, missing[place.store.directory].get(place.stored)) for place, info in found]})


def _described(place: Place, info: ViewInfo, missing: Mapping[str, int] | None) -> dict[str, Any]:
    return {
        "name": place.name,
        "version": place.version,
        "key": list(info.key),
        "schema": to_ddl(info.schema),
        "tick": info.tick,
        "kept_after": info.kept_after,
        **({"left_out": missing} if missing else {}),
    }


# Many rows


@dataclass(frozen=True)
class Range:
    """Which rows of a view, in the texts of a request."""

    start: list[str]
    stop: list[str]
    descending: bool
    limit: int
    key: list[str]

    @classmethod
    def of(cls, asked: Asked, limits: Limits) -> Range:
        limit = asked.number("limit", least=1, most=limits.most_rows) or limits.rows
        found = cls(asked.all("from"), asked.all("to"), asked.choice("order", ("asc", "desc")) == "desc", limit, asked.all("key"))
        if found.key and (found.start or found.stop or found.descending):
            raise InputError("key= names one row; from=, to= and order= do not go with it.", fix="leave out one or the other.")
        return found


def rows(place: Place, asked: Range) -> Response:
    """Rows in a range, in the order of their key."""
    with place.store.reader.snapshot() as snap:
        info = snap.view(place.stored)
        found = _scan(snap, info, asked)
    return _page(place, info, info.tick, found, asked)


def _scan(snap: Snapshot, info: ViewInfo, asked: Range) -> pa.Table:
    start, stop = (_bound(info, texts) for texts in (asked.start, asked.stop))
    return snap.scan(info.name, start=start, stop=stop, limit=asked.limit + 1, reverse=asked.descending)


def _bound(info: ViewInfo, texts: list[str]) -> Any:
    values = typed_key(info, texts, whole=False) if texts else ()
    if info.is_stream:
        return values[0] if values else None
    return values or None


def rows_at(place: Place, tick: int, asked: Range, most_rows: int) -> Response:
    """The same as of an earlier tick that is still kept."""
    with place.store.reader.snapshot() as snap:
        info = snap.view(place.stored)
        key = typed_key(info, asked.key, whole=True) if asked.key else None
        start, stop = (typed_key(info, texts, whole=False) if texts else () for texts in (asked.start, asked.stop))
        found = view_at(snap, info, tick, key=key, start=start, stop=stop, descending=asked.descending, most_rows=most_rows)
    if key is None:
        return _page(place, info, tick, found, asked)
    if not found.num_rows:
        raise NoSuchRow(place.name, asked.key, tick, was=True)
    return json_response(f'{{{head_json(place.name, place.version, tick)},"row":{rows_json(found)[1:-1]}}}'.encode())


def _page(place: Place, info: ViewInfo, tick: int, found: pa.Table, asked: Range) -> Response:
    """At most so many rows, and how to ask for those behind them."""
    page = found.slice(0, asked.limit)
    more = "null" if found.num_rows <= asked.limit else json.dumps(_next(info, found, asked))
    return json_response(f'{{{head_json(place.name, place.version, tick)},"rows":{rows_json(page)},"next":{more}}}'.encode())


def _next(info: ViewInfo, found: pa.Table, asked: Range) -> Mapping[str, Any]:
    """`from` is the first row of the next page; backwards, `to` is the last of this one. A stream is paged by SQL: a tick can have many rows."""
    if info.is_stream:
        return {}
    last = found.slice(asked.limit - 1 if asked.descending else asked.limit, 1)
    texts = [json_text_or_null(last[name].combine_chunks())[0].as_py() for name in info.key]
    if any(text == "null" and is_written_as_text(info.schema.field(name)) for name, text in zip(info.key, texts, strict=True)):
        return {}  # in a URL it would be the word
    plain = [json.loads(text) if text.startswith('"') else text for text in texts]
    return {"to" if asked.descending else "from": plain}
