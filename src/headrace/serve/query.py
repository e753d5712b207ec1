"""SQL over HTTP: one SELECT over the views of one store, all at one moment, for so long and so many rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import InputError, UnknownView, nearest
from headrace.serve.answers import Refused, json_response, rows_json
from headrace.serve.asking import bounded_seconds, read_json
from headrace.serve.limits import Limits
from headrace.serve.stores import Stores, versions
from headrace.sinks.view_sql import check_names, mentions

MEMBERS = ("query", "parameters", "timeout", "limit", "version", "at_least", "wait")


@dataclass(frozen=True)
class Query:
    """What was asked."""

    text: str
    parameters: list[Any]
    timeout_s: float
    limit: int
    version: str | None
    at_least: str | None
    wait_s: float


async def read_query(request: Request, limits: Limits) -> Query:
    return _query(await read_json(request, limits, what="A query", example='{"query": "SELECT …"}'), limits)


def _query(asked: Any, limits: Limits) -> Query:
    if not isinstance(asked, dict) or not isinstance(asked.get("query"), str):
        raise InputError("There is no query.", fix='send {"query": "SELECT …"}.')
    for name in asked:
        if name not in MEMBERS:
            raise InputError(f"There is no member {name!r} in a query: {nearest(name, MEMBERS)}")
    limit, parameters = asked.get("limit", limits.most_rows), asked.get("parameters", [])
    if type(limit) is not int or not 1 <= limit <= limits.most_rows:
        raise InputError(f"limit is not a number from 1 to {limits.most_rows:,}.")
    if not isinstance(parameters, list) or not all(each is None or type(each) in {str, int, float, bool} for each in parameters):
        raise InputError("parameters is not a list of texts, numbers and nulls.", fix="give one for each ? of the query.")
    timeout_s, wait_s = (
        default if asked.get(name) is None else bounded_seconds(name, str(asked[name]), most)
        for name, default, most in (("timeout", limits.sql_s, limits.most_sql_s), ("wait", limits.wait_s, limits.most_wait_s))
    )
    return Query(asked["query"], parameters, timeout_s, limit, _text(asked, "version"), _text(asked, "at_least"), wait_s)


def _text(asked: dict[str, Any], name: str) -> str | None:
    value = asked.get(name)
    if value is not None and not isinstance(value, str):
        raise InputError(f"{name} is not a text.")
    return value


def answer(stores: Stores, query: Query) -> Response:
    if query.version is None:
        _refuse_switched(stores.served(), query.text)
    with stores.store(query.version).reader.snapshot() as snap:
        ticks = {info.name: info.tick for info in snap.views()}
        try:
            rows = snap.sql(query.text, query.parameters, timeout=timedelta(seconds=query.timeout_s), most_rows=query.limit)
        except UnknownView:
            _name_version(stores, query)
            raise
    check_names(rows.schema.names)
    names = json.dumps(rows.schema.names, ensure_ascii=False)
    return json_response(f'{{"ticks":{json.dumps(ticks)},"columns":{names},"rows":{rows_json(rows)}}}'.encode())


def _name_version(stores: Stores, query: Query) -> None:
    """A view that is not in the store that was asked may be in that of a version, which the query does not say."""
    for version in versions(stores.state):
        for info in stores.store(version).reader.views() if version != query.version else ():
            if mentions(query.text, info.name):
                raise Refused(404, f"The view {info.name!r} is one of the version {version!r}.", fix=f'say "version": "{version}" beside the query.')


def _refuse_switched(served: dict[str, str], text: str) -> None:
    """A view of a version is in another store: a query that names it would silently read the old one."""
    for view, version in served.items():
        if mentions(text, view):
            raise Refused(
                409,
                f"The view {view!r} is served from its version {version!r}.",
                fix=f'say "version": "{version}", and name it "{view}.{version}", in double quotes.',
            )
