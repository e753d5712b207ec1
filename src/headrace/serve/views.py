"""Reading views: which there are, rows by key or in a range, each with the tick that it shows; now,
or at an earlier tick.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from starlette.requests import Request
from starlette.responses import Response

from headrace.columnar.columns import CHANGE_TYPE, INSERT, UPDATE
from headrace.errors import ChangesGone, InputError, UnknownView, nearest
from headrace.serve.dashboard import read_plan, read_run
from headrace.serve.requests import (
    Asked,
    Limits,
    NoSuchRow,
    Refused,
    bounded_seconds,
    head_json,
    is_written_as_text,
    json_response,
    read_json,
    rows_json,
    typed_key,
)
from headrace.serve.stores import Place, Stores, versions
from headrace.types.json_codec import json_text_or_null
from headrace.types.schema import to_ddl
from headrace.views.file import ViewInfo
from headrace.views.reader import Snapshot
from headrace.views.sql import check_names, mentions

# A view as it was at an earlier tick: what is there now, with the kept changes since then undone.
#
# The first change of a key since that tick says what the key was: there is none before an insert,
# and the old row is in a delete or in an update's first half.


Key = tuple[Any, ...]
_PLACE = "_place"


class TickNotKept(ChangesGone):
    """A tick that is not, or no longer, or not yet among those a view can go back to."""

    def __init__(self, view: str, asked: int, kept_after: int, tick: int) -> None:
        super().__init__(view, asked, kept_after, tick)
        self.message = (
            f"The view {view!r} can be read at the ticks {kept_after} to {tick}, not at {asked}."
        )
        self.fix = (
            "choose a tick among them; a view keeps as many as its newest changes reach back."
        )


def view_at(
    snap: Snapshot,
    info: ViewInfo,
    tick: int,
    *,
    key: Key | None,
    start: Key,
    stop: Key,
    descending: bool,
    max_rows: int,
) -> pa.Table:
    """Rows of a key, or from one key up to another, as of a tick."""
    if not info.kept_after <= tick <= info.tick:
        raise TickNotKept(info.name, tick, info.kept_after, info.tick)
    if info.is_stream:
        return _stream_at(snap, info, tick, start, stop, descending=descending)
    now = _now(snap, info, key, max_rows)
    since = [rows for _, rows in snap.changes_since(info.name, tick)]
    found = _undone(info, now, pa.concat_tables(since) if since else None)
    if key is not None:
        return found.filter(_matches(found, info.key, key))
    found = found.filter(_mask(_within(found, info.key, start, stop)))
    order = pc.sort_indices(
        found.select(list(info.key)), sort_keys=[(name, "ascending") for name in info.key]
    )
    return found.take(order[::-1] if descending else order)  # nulls come last, and backwards first


def _stream_at(
    snap: Snapshot, info: ViewInfo, tick: int, start: Key, stop: Key, *, descending: bool
) -> pa.Table:
    """A stream only grows: what came later is left out."""
    end = min([tick + 1, *stop])
    return snap.scan(info.name, start=start[0] if start else None, stop=end, reverse=descending)


def _now(snap: Snapshot, info: ViewInfo, key: Key | None, max_rows: int) -> pa.Table:
    if key is not None:
        found = snap.get(info.name, key)
        return pa.Table.from_pylist([found] if found is not None else [], schema=info.schema)
    if snap.count(info.name) > max_rows:
        raise Refused(
            400,
            f"The view {info.name!r} has more than {max_rows:,} rows, too many to bring back to an"
            " earlier tick.",
            fix="ask for a key.",
        )
    return snap.table(info.name)


def _undone(info: ViewInfo, now: pa.Table, since: pa.Table | None) -> pa.Table:
    """Changes first and in their order, then what is there now: of each key the first one says what
    it was.
    """
    if since is None:
        return now
    everything = pa.concat_tables(
        [since.select(info.schema.names), now.select(info.schema.names)]
    ).cast(info.schema)
    placed = everything.select(list(info.key)).append_column(
        _PLACE, pa.array(np.arange(everything.num_rows))
    )
    firsts = (
        placed.group_by(list(info.key)).aggregate([(_PLACE, "min")])[f"{_PLACE}_min"].to_numpy()
    )
    kinds = since[CHANGE_TYPE]
    comes = pc.or_(pc.equal(kinds, INSERT), pc.equal(kinds, UPDATE)).to_numpy().astype(np.bool_)
    was_there = np.ones(everything.num_rows, np.bool_)
    was_there[: len(comes)] = ~comes
    return everything.take(pa.array(np.sort(firsts[was_there[firsts]])))


# Keys


def _matches(rows: pa.Table, names: Sequence[str], key: Key) -> pa.Array:
    wanted = np.ones(rows.num_rows, np.bool_)
    for name, value in zip(names, key, strict=True):
        wanted &= _equal(rows[name], value)
    return pa.array(wanted)


def _equal(column: pa.ChunkedArray, value: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    alike = (
        column.is_null()
        if value is None
        else pc.fill_null(pc.equal(column, pa.scalar(value, column.type)), False)
    )
    return alike.to_numpy().astype(np.bool_)  # type: ignore[no-any-return]


def _within(
    rows: pa.Table, names: Sequence[str], start: Key, stop: Key
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """At or behind the first, and before the last; a part of a key stands for all that begin with
    it. Null is behind everything.
    """
    wanted = np.ones(rows.num_rows, np.bool_)
    if start:
        wanted &= ~_before(rows, names, start)
    if stop:
        wanted &= _before(rows, names, stop)
    return wanted


def _before(
    rows: pa.Table, names: Sequence[str], bound: Key
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Column by column: smaller in the first one that differs."""
    before, alike = np.zeros(rows.num_rows, np.bool_), np.ones(rows.num_rows, np.bool_)
    for name, value in zip(names, bound, strict=False):
        smaller = (
            rows[name].is_valid()
            if value is None
            else pc.fill_null(pc.less(rows[name], pa.scalar(value, rows[name].type)), False)
        )
        before |= alike & smaller.to_numpy().astype(np.bool_)
        alike &= _equal(rows[name], value)
    return before


def _mask(wanted: np.ndarray[Any, np.dtype[np.bool_]]) -> pa.Array:
    return pa.array(wanted)


# Rows that are missing in views on purpose: those of their inputs that were left out because too
# many waited (`hr.shed`), counted exactly. `GET /views` tells it with each view.


_SHED = ".shed"


def left_out(directory: Path) -> dict[str, dict[str, int]]:
    """By view: its topics and how many rows of each were left out. Views that miss nothing are not
    in it.
    """
    run, plan = read_run(directory), read_plan(directory)
    counts = {} if run is None else run.get("counts", {})
    shed = {
        name.removesuffix(_SHED): count
        for name, count in counts.items()
        if name.endswith(_SHED) and count
    }
    if not shed or plan is None:
        return {}
    nodes = {node["id"]: node for node in plan["nodes"]}
    of_views = {
        node["label"]: _topics(node["id"], nodes)
        for node in plan["nodes"]
        if node["kind"] == "view"
    }
    missing = {
        view: {topic: shed[topic] for topic in sorted(topics & shed.keys())}
        for view, topics in of_views.items()
    }
    return {view: topics for view, topics in missing.items() if topics}


def _topics(start: str, nodes: dict[str, dict[str, Any]]) -> set[str]:
    """What a node reads, directly or not."""
    found, seen, ahead = set(), {start}, [start]
    while ahead:
        node = nodes.get(ahead.pop())
        if node is None:
            continue
        if "topic" in node:
            found.add(node["topic"])
        ahead += [each for each in node["inputs"] if each not in seen]
        seen.update(node["inputs"])
    return found


PARAMETERS = ("key", "from", "to", "order", "limit", "at_least", "wait", "at_tick")
MAX_TICK = (1 << 63) - 1


def list_views(stores: Stores) -> Response:
    """Each with the rows that are known to be missing in it, where there are any."""
    found = stores.views()
    missing = {
        directory: left_out(directory)
        for directory in {place.store.directory for place, _ in found}
    }
    return json_response(
        {
            "views": [
                _described(place, info, missing[place.store.directory].get(place.stored))
                for place, info in found
            ]
        }
    )


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
        limit = asked.number("limit", least=1, most=limits.max_rows) or limits.rows
        found = cls(
            asked.all("from"),
            asked.all("to"),
            asked.choice("order", ("asc", "desc")) == "desc",
            limit,
            asked.all("key"),
        )
        if found.key and (found.start or found.stop or found.descending):
            raise InputError(
                "key= names one row; from=, to= and order= do not go with it.",
                fix="leave out one or the other.",
            )
        return found


def rows(place: Place, asked: Range) -> Response:
    """Rows in a range, in the order of their key."""
    with place.store.reader.snapshot() as snap:
        info = snap.view(place.stored)
        found = _scan(snap, info, asked)
    return _page(place, info, info.tick, found, asked)


def _scan(snap: Snapshot, info: ViewInfo, asked: Range) -> pa.Table:
    start, stop = (_bound(info, texts) for texts in (asked.start, asked.stop))
    return snap.scan(
        info.name, start=start, stop=stop, limit=asked.limit + 1, reverse=asked.descending
    )


def _bound(info: ViewInfo, texts: list[str]) -> Any:
    values = typed_key(info, texts, whole=False) if texts else ()
    if info.is_stream:
        return values[0] if values else None
    return values or None


def rows_at(place: Place, tick: int, asked: Range, max_rows: int) -> Response:
    """The same as of an earlier tick that is still kept."""
    with place.store.reader.snapshot() as snap:
        info = snap.view(place.stored)
        key = typed_key(info, asked.key, whole=True) if asked.key else None
        start, stop = (
            typed_key(info, texts, whole=False) if texts else ()
            for texts in (asked.start, asked.stop)
        )
        found = view_at(
            snap,
            info,
            tick,
            key=key,
            start=start,
            stop=stop,
            descending=asked.descending,
            max_rows=max_rows,
        )
    if key is None:
        return _page(place, info, tick, found, asked)
    if not found.num_rows:
        raise NoSuchRow(place.name, asked.key, tick, was=True)
    return json_response(
        f'{{{head_json(place.name, place.version, tick)},"row":{rows_json(found)[1:-1]}}}'.encode()
    )


def _page(place: Place, info: ViewInfo, tick: int, found: pa.Table, asked: Range) -> Response:
    """At most so many rows, and how to ask for those behind them."""
    page = found.slice(0, asked.limit)
    more = "null" if found.num_rows <= asked.limit else json.dumps(_next(info, found, asked))
    return json_response(
        f'{{{head_json(place.name, place.version, tick)},"rows":{rows_json(page)},"next":{more}}}'.encode()
    )


def _next(info: ViewInfo, found: pa.Table, asked: Range) -> Mapping[str, Any]:
    """`from` is the first row of the next page; backwards, `to` is the last of this one. A stream
    is paged by SQL: a tick can have many rows.
    """
    if info.is_stream:
        return {}
    last = found.slice(asked.limit - 1 if asked.descending else asked.limit, 1)
    texts = [json_text_or_null(last[name].combine_chunks())[0].as_py() for name in info.key]
    if any(
        text == "null" and is_written_as_text(info.schema.field(name))
        for name, text in zip(info.key, texts, strict=True)
    ):
        return {}  # in a URL it would be the word
    plain = [json.loads(text) if text.startswith('"') else text for text in texts]
    return {"to" if asked.descending else "from": plain}


# SQL over HTTP: one SELECT over the views of one store, all at one moment, for so long and so many
# rows.


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
    return _query(
        await read_json(request, limits, what="A query", example='{"query": "SELECT …"}'), limits
    )


def _query(asked: Any, limits: Limits) -> Query:
    if not isinstance(asked, dict) or not isinstance(asked.get("query"), str):
        raise InputError("There is no query.", fix='send {"query": "SELECT …"}.')
    for name in asked:
        if name not in MEMBERS:
            raise InputError(f"There is no member {name!r} in a query: {nearest(name, MEMBERS)}")
    limit, parameters = asked.get("limit", limits.max_rows), asked.get("parameters", [])
    if type(limit) is not int or not 1 <= limit <= limits.max_rows:
        raise InputError(f"limit is not a number from 1 to {limits.max_rows:,}.")
    if not isinstance(parameters, list) or not all(
        each is None or type(each) in {str, int, float, bool} for each in parameters
    ):
        raise InputError(
            "parameters is not a list of texts, numbers and nulls.",
            fix="give one for each ? of the query.",
        )
    timeout_s, wait_s = (
        default if asked.get(name) is None else bounded_seconds(name, str(asked[name]), most)
        for name, default, most in (
            ("timeout", limits.sql_s, limits.max_sql_s),
            ("wait", limits.wait_s, limits.max_wait_s),
        )
    )
    return Query(
        asked["query"],
        parameters,
        timeout_s,
        limit,
        _text(asked, "version"),
        _text(asked, "at_least"),
        wait_s,
    )


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
            rows = snap.sql(
                query.text,
                query.parameters,
                timeout=timedelta(seconds=query.timeout_s),
                max_rows=query.limit,
            )
        except UnknownView:
            _name_version(stores, query)
            raise
    check_names(rows.schema.names)
    names = json.dumps(rows.schema.names, ensure_ascii=False)
    return json_response(
        f'{{"ticks":{json.dumps(ticks)},"columns":{names},"rows":{rows_json(rows)}}}'.encode()
    )


def _name_version(stores: Stores, query: Query) -> None:
    """A view that is not in the store that was asked may be in that of a version, which the query
    does not say.
    """
    for version in versions(stores.state):
        for info in stores.store(version).reader.views() if version != query.version else ():
            if mentions(query.text, info.name):
                raise Refused(
                    404,
                    f"The view {info.name!r} is one of the version {version!r}.",
                    fix=f'say "version": "{version}" beside the query.',
                )


def _refuse_switched(served: dict[str, str], text: str) -> None:
    """A view of a version is in another store: a query that names it would silently read the old
    one.
    """
    for view, version in served.items():
        if mentions(text, view):
            raise Refused(
                409,
                f"The view {view!r} is served from its version {version!r}.",
                fix=(
                    f'say "version": "{version}", and name it "{view}.{version}", in double quotes.'
                ),
            )
