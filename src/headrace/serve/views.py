"""The responses to requests for views: the list of views, their rows by range, and SQL.

Each response names the tick that it shows. Single rows by key take the fast path of `lookups.py`;
rows as of an earlier tick are computed by `time_travel.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import ChangesGone, InputError, UnknownView, nearest
from headrace.http.responses import Refused, json_response
from headrace.run_status import read_plan, read_status_fields
from headrace.serve.requests import (
    Limits,
    NoSuchRow,
    RequestParameters,
    bounded_seconds,
    head_json,
    is_plain_text,
    parse_key,
    read_json,
    rows_json,
    written_key_value,
)
from headrace.serve.stores import ViewLocation, ViewStores, versions
from headrace.serve.time_travel import TickNotKept, view_at
from headrace.types.json_codec import json_text_or_null
from headrace.types.schema import to_ddl
from headrace.views.file import ViewInfo
from headrace.views.sql import SqlLimits, check_names, mentions, run_query

PARAMETERS = ("key", "from", "to", "order", "limit", "at_least", "wait", "at_tick")
MAX_TICK = (1 << 63) - 1
_SHED_SUFFIX = ".shed"


# The list of views


def list_views(stores: ViewStores) -> Response:
    """All views, each with the number of input rows that were shed, if there are any."""
    shed_by_directory: dict[Path, dict[str, dict[str, int]]] = {}
    views = []
    for location, info in stores.views():
        directory = location.store.directory
        if directory not in shed_by_directory:
            shed_by_directory[directory] = shed_rows(directory)
        view: dict[str, Any] = {
            "name": location.name,
            "version": location.version,
            "key": list(info.key),
            "schema": to_ddl(info.schema),
            "tick": info.tick,
            "kept_after": info.kept_after,
        }
        if shed := shed_by_directory[directory].get(location.stored_name):
            view["left_out"] = shed
        views.append(view)
    return json_response({"views": views})


def shed_rows(directory: Path) -> dict[str, dict[str, int]]:
    """The input rows that a pipeline shed under load (`hr.shed`), exactly counted: by view, the
    number of rows per topic. Views that miss no rows are left out.
    """
    status, plan = read_status_fields(directory), read_plan(directory)
    counts = {} if status is None else status.get("counts", {})
    shed = {
        name.removesuffix(_SHED_SUFFIX): count
        for name, count in counts.items()
        if name.endswith(_SHED_SUFFIX) and count
    }
    if not shed or plan is None:
        return {}
    nodes = {node["id"]: node for node in plan["nodes"]}
    by_view = {}
    for node in plan["nodes"]:
        if node["kind"] == "view" and (topics := _input_topics(node["id"], nodes) & shed.keys()):
            by_view[node["label"]] = {topic: shed[topic] for topic in sorted(topics)}
    return by_view


def _input_topics(start: str, nodes: dict[str, dict[str, Any]]) -> set[str]:
    """The topics that a node of the plan reads, directly or through other nodes."""
    topics, seen, queue = set(), {start}, [start]
    while queue:
        node = nodes.get(queue.pop())
        if node is None:
            continue
        if "topic" in node:
            topics.add(node["topic"])
        queue += [name for name in node["inputs"] if name not in seen]
        seen.update(node["inputs"])
    return topics


# Rows of a range


@dataclass(frozen=True)
class RowRange:
    """The rows of a view that a request selects, as its texts."""

    start: list[str]
    stop: list[str]
    descending: bool
    limit: int
    key: list[str]

    @classmethod
    def from_parameters(cls, parameters: RequestParameters, limits: Limits) -> RowRange:
        limit = parameters.number("limit", min_value=1, max_value=limits.max_rows)
        row_range = cls(
            start=parameters.all("from"),
            stop=parameters.all("to"),
            descending=parameters.choice("order", ("asc", "desc")) == "desc",
            limit=limit or limits.rows,
            key=parameters.all("key"),
        )
        if row_range.key and (row_range.start or row_range.stop or row_range.descending):
            raise InputError(
                "key= names one row; it cannot be combined with from=, to= and order=.",
                fix="leave out one or the other.",
            )
        return row_range


def read_rows(location: ViewLocation, row_range: RowRange) -> Response:
    """The rows of a range, in key order."""
    with location.store.reader.snapshot() as snap:
        info = snap.view(location.stored_name)
        rows = snap.scan(
            info.name,
            start=_bound(info, row_range.start),
            stop=_bound(info, row_range.stop),
            limit=row_range.limit + 1,
            reverse=row_range.descending,
        )
    return _page(location, info, info.tick, rows, row_range)


def _bound(info: ViewInfo, texts: list[str]) -> Any:
    values = parse_key(info, texts, whole=False) if texts else ()
    if info.is_stream:
        return values[0] if values else None
    return values or None


def read_rows_at(location: ViewLocation, tick: int, row_range: RowRange, max_rows: int) -> Response:
    """The rows of a range, or the row of a key, as of an earlier tick."""
    with location.store.reader.snapshot() as snap:
        info = snap.view(location.stored_name)
        key = parse_key(info, row_range.key, whole=True) if row_range.key else None
        start, stop = (
            parse_key(info, texts, whole=False) if texts else ()
            for texts in (row_range.start, row_range.stop)
        )
        rows = view_at(
            snap,
            info,
            tick,
            key=key,
            start=start,
            stop=stop,
            descending=row_range.descending,
            max_rows=max_rows,
        )
    if key is None:
        return _page(location, info, tick, rows, row_range)
    if not rows.num_rows:
        raise NoSuchRow(location.name, row_range.key, tick, is_past=True)
    head = head_json(location.name, location.version, tick)
    return json_response(f'{{{head},"row":{rows_json(rows)[1:-1]}}}'.encode())


def _page(
    location: ViewLocation, info: ViewInfo, tick: int, rows: pa.Table, row_range: RowRange
) -> Response:
    """At most `limit` rows, and in `next` the parameters of the next page."""
    page = rows.slice(0, row_range.limit)
    is_last = rows.num_rows <= row_range.limit
    next_page = "null" if is_last else json.dumps(_next_page(info, rows, row_range))
    head = head_json(location.name, location.version, tick)
    return json_response(f'{{{head},"rows":{rows_json(page)},"next":{next_page}}}'.encode())


def _next_page(info: ViewInfo, rows: pa.Table, row_range: RowRange) -> Mapping[str, Any]:
    """`from` is the first key of the next page; in descending order, `to` is the last key of this
    one. A stream has none, because a tick can have many rows: page it with SQL.
    """
    if info.is_stream:
        return {}
    boundary = rows.slice(row_range.limit - 1 if row_range.descending else row_range.limit, 1)
    texts = []
    for name in info.key:
        text = json_text_or_null(boundary[name].combine_chunks())[0].as_py()
        value = None if text == "null" else json.loads(text) if text.startswith('"') else text
        is_plain = is_plain_text(info.schema.field(name))
        texts.append(written_key_value(value, is_plain=is_plain))
    return {"to" if row_range.descending else "from": texts}


# SQL


MEMBERS = ("query", "parameters", "timeout", "limit", "version", "at_tick", "at_least", "wait")


@dataclass(frozen=True)
class SqlQuery:
    """The body of `POST /sql`: one SELECT over the views of one store."""

    text: str
    parameters: list[Any]
    timeout_s: float
    limit: int
    version: str | None
    at_tick: int | None
    at_least: str | None
    wait_s: float


async def read_query(request: Request, limits: Limits) -> SqlQuery:
    """The query in a request's body. InputError if a member is unknown or has another type."""
    body = await read_json(request, limits, what="A query", example='{"query": "SELECT …"}')
    if not isinstance(body, dict) or not isinstance(body.get("query"), str):
        raise InputError("There is no query.", fix='send {"query": "SELECT …"}.')
    for name in body:
        if name not in MEMBERS:
            raise InputError(f"There is no member {name!r} in a query: {nearest(name, MEMBERS)}")
    limit, parameters = body.get("limit", limits.max_rows), body.get("parameters", [])
    if type(limit) is not int or not 1 <= limit <= limits.max_rows:
        raise InputError(f"limit is not a number from 1 to {limits.max_rows:,}.")
    if not isinstance(parameters, list) or not all(
        value is None or type(value) in {str, int, float, bool} for value in parameters
    ):
        raise InputError(
            "parameters is not a list of texts, numbers and nulls.",
            fix="give one for each ? of the query.",
        )
    at_tick = body.get("at_tick")
    if at_tick is not None and (type(at_tick) is not int or not 0 <= at_tick <= MAX_TICK):
        raise InputError(f"at_tick is not a number from 0 to {MAX_TICK:,}.")
    for name in ("version", "at_least"):
        if not isinstance(body.get(name), str | None):
            raise InputError(f"{name} is not a text.")
    timeout_s, wait_s = (
        default_s if body.get(name) is None else bounded_seconds(name, str(body[name]), max_s)
        for name, default_s, max_s in (
            ("timeout", limits.sql_s, limits.max_sql_s),
            ("wait", limits.wait_s, limits.max_wait_s),
        )
    )
    return SqlQuery(
        text=body["query"],
        parameters=parameters,
        timeout_s=timeout_s,
        limit=limit,
        version=body.get("version"),
        at_tick=at_tick,
        at_least=body.get("at_least"),
        wait_s=wait_s,
    )


def answer_query(stores: ViewStores, query: SqlQuery, limits: Limits) -> Response:
    """The result of a query, all from one commit, with the ticks of the views in its store."""
    if query.version is None:
        # A switched view is in another store: the query would silently read the old rows.
        for view, version in stores.served_versions().items():
            if mentions(query.text, view):
                raise Refused(
                    409,
                    f"The view {view!r} is served from its version {version!r}.",
                    fix=(
                        f'add "version": "{version}" to the request, and name the view'
                        f' "{view}.{version}", in double quotes.'
                    ),
                )
    store = stores.store(query.version)
    ticks = (
        None
        if query.at_tick is None
        else {info.name: query.at_tick for info in store.reader.views()}
    )
    try:
        result = run_query(
            store.path,
            query.text,
            query.parameters,
            limits=SqlLimits(
                timeout_s=query.timeout_s,
                max_rows=query.limit,
                max_bytes=limits.sql_result_bytes,
                memory_bytes=limits.sql_memory_bytes,
            ),
            ticks=ticks,
        )
    except UnknownView:
        _refuse_other_version(stores, query)
        raise
    except ChangesGone as error:
        raise TickNotKept(error.view, error.asked, error.kept_after, error.tick) from None
    check_names(result.rows.schema.names)
    names = json.dumps(result.rows.schema.names, ensure_ascii=False)
    ticks_json = json.dumps(result.ticks)
    return json_response(
        f'{{"ticks":{ticks_json},"columns":{names},"rows":{rows_json(result.rows)}}}'.encode()
    )


def _refuse_other_version(stores: ViewStores, query: SqlQuery) -> None:
    """Refuse a query over a view that another version's store has, and say which version it is."""
    for version in versions(stores.state):
        for info in stores.store(version).reader.views() if version != query.version else ():
            if mentions(query.text, info.name):
                raise Refused(
                    404,
                    f"The view {info.name!r} belongs to the version {version!r}.",
                    fix=f'add "version": "{version}" to the request.',
                )
