"""The description of the HTTP interface as OpenAPI, served at `/openapi.json`."""

from __future__ import annotations

from typing import Any

from headrace._version import __version__
from headrace.serve.requests import Limits

_STRINGS = {"type": "array", "items": {"type": "string"}}


def description(limits: Limits) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": __version__,
            "description": "The views of a pipeline: rows, SQL, and changes as they happen.",
        },
        "paths": {
            "/views": {
                "get": _operation("All views, with the tick each shows", [], _json("the views"))
            },
            "/views/{name}": {
                "get": _operation(
                    "Rows of a view, with the tick that they show",
                    [
                        _parameter("name", "The view", location="path"),
                        _parameter(
                            "key",
                            "One row: once for each column of the key, in order; \\N is null",
                            _STRINGS,
                        ),
                        _parameter(
                            "from",
                            "The first key, or its first columns; of a stream, the first tick",
                            _STRINGS,
                        ),
                        _parameter("to", "The key before which to stop", _STRINGS),
                        _parameter(
                            "order",
                            "The order of the key; of a stream, of appending",
                            {"enum": ["asc", "desc"]},
                        ),
                        _parameter(
                            "limit",
                            "How many rows",
                            {
                                "type": "integer",
                                "minimum": 1,
                                "maximum": limits.max_rows,
                                "default": limits.rows,
                            },
                        ),
                        _parameter(
                            "at_least",
                            "Wait until the view contains these offsets:"
                            " TOPIC:PARTITION:END, joined by commas",
                        ),
                        _parameter(
                            "wait",
                            f"How long to wait for it; at most {limits.max_wait_s:g} seconds",
                            {"type": "string", "default": f"{limits.wait_s:g} seconds"},
                        ),
                        _parameter(
                            "at_tick",
                            "The view as it was at an earlier tick",
                            {"type": "integer", "minimum": 0},
                        ),
                    ],
                    _json("a row, or rows"),
                    404,
                    410,
                    503,
                )
            },
            "/views/{name}/changes": {
                "get": _operation(
                    "A view's rows, then its changes as they happen",
                    [
                        _parameter("name", "The view", location="path"),
                        _parameter("key", "Only rows whose key begins with these values", _STRINGS),
                        _parameter(
                            "where",
                            "Only rows that meet a condition, such as: amount >= 100 and"
                            " region = eu",
                        ),
                        _parameter(
                            "Last-Event-ID", "The id of the last event received", location="header"
                        ),
                    ],
                    _events(),
                    404,
                    410,
                    503,
                )
            },
            "/sql": {"post": _sql(limits)},
            "/ask/{name}": {"post": _ask()},
            "/topics/{name}/tail": {
                "get": _operation(
                    "A topic's rows as they are appended",
                    [
                        _parameter("name", "The topic", location="path"),
                        _parameter("where", "Only rows that meet a condition"),
                        _parameter(
                            "last",
                            "How many of the rows that each partition already has",
                            {"type": "integer", "minimum": 0, "default": 0},
                        ),
                        _parameter(
                            "Last-Event-ID", "The id of the last event received", location="header"
                        ),
                    ],
                    _events(),
                    404,
                    410,
                    503,
                )
            },
            "/dashboard/facts": {
                "get": _operation(
                    "What the dashboard at / shows: the plan, the run, rates, topics, groups, time",
                    [],
                    _json("the measurements"),
                )
            },
            "/dead/{name}/replay": {
                "post": _operation(
                    "Replay dead letters; the only request that changes anything",
                    [
                        _parameter(
                            "name", "The topic whose dead letters to replay", location="path"
                        ),
                        _parameter(
                            "offset",
                            "Only the dead letter at this offset",
                            {"type": "integer", "minimum": 0},
                        ),
                    ],
                    _json("the number of rows replayed, and those that failed"),
                    404,
                    503,
                )
            },
            "/metrics": {
                "get": _operation("Metrics for Prometheus", [], _content("metrics", "text/plain"))
            },
            "/health": {
                "get": _operation(
                    "Whether views can be read; needs no token", [], _json("views can be read"), 503
                )
            },
            "/openapi.json": {"get": _operation("This description", [], _json("the description"))},
        },
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def _operation(
    summary: str, parameters: list[dict[str, Any]], response: dict[str, Any], *refusals: int
) -> dict[str, Any]:
    error = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in ("error", "message", "fix")},
    }
    responses = {"200": response}
    for status in (400, 401, 403, *refusals):
        responses[str(status)] = {
            "description": _MEANINGS[status],
            "content": {"application/json": {"schema": error}},
        }
    return {"summary": summary, "parameters": parameters, "responses": responses}


_MEANINGS = {
    400: "The request cannot be understood",
    401: "The token is missing or wrong",
    403: "The request comes from another origin, or addresses the server by another name",
    404: "There is no such view, topic or row",
    409: "The view is served from a version",
    410: (
        "The tick or offset is no longer retained, or has not come yet; the message says which are"
    ),
    413: "The request is too large",
    415: "The request is not JSON",
    503: "Try again later",
}


def _json(what: str) -> dict[str, Any]:
    return _content(what, "application/json")


def _events() -> dict[str, Any]:
    return _content("Server-sent events; the id of each is where to resume", "text/event-stream")


def _content(what: str, kind: str) -> dict[str, Any]:
    return {"description": what, "content": {kind: {}}}


# Parameters


def _parameter(
    name: str, what: str, schema: dict[str, Any] | None = None, location: str = "query"
) -> dict[str, Any]:
    return {
        "name": name,
        "in": location,
        "required": location == "path",
        "description": what,
        "schema": schema or {"type": "string"},
    }


def _ask() -> dict[str, Any]:
    parameters = [
        _parameter("name", "The question's name", location="path"),
        _parameter("wait", "How long to wait for the answer"),
    ]
    body = {
        "content": {
            "application/json": {
                "schema": {"type": "object", "description": "The columns of the question"}
            }
        }
    }
    return {
        **_operation(
            "Append a question, and wait for the pipeline's answer as of its tick",
            parameters,
            _json("the answer"),
            404,
            413,
            415,
            503,
        ),
        "requestBody": body,
    }


def _sql(limits: Limits) -> dict[str, Any]:
    members = {
        "query": {"type": "string", "description": "One SELECT over the views, in DuckDB's SQL"},
        "parameters": {"type": "array", "description": "One value for each ? of the query"},
        "timeout": {"type": "string", "default": f"{limits.sql_s:g} seconds"},
        "limit": {
            "type": "integer",
            "minimum": 1,
            "maximum": limits.max_rows,
            "description": "More rows than this are an error",
        },
        "version": {
            "type": "string",
            "description": "Query the views of a version, by their full names",
        },
        "at_tick": {
            "type": "integer",
            "minimum": 0,
            "description": "Query the views as of an earlier tick, which their changes still reach",
        },
        "at_least": {"type": "string", "description": "Wait until all views contain these offsets"},
        "wait": {"type": "string", "default": f"{limits.wait_s:g} seconds"},
    }
    body = {
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["query"],
                    "properties": members,
                    "additionalProperties": False,
                }
            }
        }
    }
    return {
        **_operation(
            "A SELECT over the views, from one snapshot",
            [],
            _json("the rows"),
            404,
            409,
            410,
            413,
            415,
            503,
        ),
        "requestBody": body,
    }
