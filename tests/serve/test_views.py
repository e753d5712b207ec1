"""Views over HTTP: by key, in ranges, by SQL, each with its tick; and what cannot be had, with the
reason.
"""

import itertools
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

from headrace.serve import views
from headrace.types.schema import parse_schema
from headrace.views.store import ViewStore
from tests.serve.conftest import ORDERS, Client, receive
from tests.views.store_contract import changes, inserts

AT = datetime(2026, 1, 31, 12, 30, 0, 5, tzinfo=UTC)
EU = ("eu", date(2026, 1, 31), 1.5, Decimal("0.30"), AT, True, ["a", '"b"'], b"\x00\xff", 0.1)
US = ("us", date(2026, 1, 31), float("nan"), None, None, False, None, None, float("inf"))
NOBODY: tuple[Any, ...] = (None, None, float("-inf"), Decimal("-1.00"), AT, None, [], b"", 1e30)
SHOWN = {
    "region": "eu",
    "day": "2026-01-31",
    "amount": 1.5,
    "tax": "0.30",
    "at": "2026-01-31T12:30:00.000005Z",
    "big": True,
    "tags": ["a", '"b"'],
    "raw": "AP8=",
    "ratio": 0.1,
}


def test_list(client: Client) -> None:
    counts, events = client.get("/views").json["views"]
    assert counts == {
        "name": "counts",
        "version": None,
        "key": ["k"],
        "schema": "k BIGINT, n BIGINT",
        "tick": 4,
        "kept_after": 0,
    }
    assert (events["name"], events["key"]) == ("events", [])


def test_a_key_with_the_tick_it_shows(client: Client, store: ViewStore) -> None:
    assert client.get("/views/counts", key=2).json == {
        "view": "counts",
        "tick": 4,
        "row": {"k": 2, "n": 20},
    }
    store.commit(5, 1, {"counts": changes((5, "delete", (2, 20)), (5, "insert", (-7, 70)))})
    assert client.get("/views/counts", key=-7).json == {
        "view": "counts",
        "tick": 5,
        "row": {"k": -7, "n": 70},
    }
    gone = client.get("/views/counts", key=2)
    assert (gone.status, gone.json["error"]) == (404, "NoSuchRow")
    assert "no row for the key 2 at tick 5" in gone.json["message"]


def test_a_row_by_key_is_the_row_of_a_range(client: Client, store: ViewStore) -> None:
    """Two ways to the same JSON: one from what is stored, one from Arrow data."""
    store.declare("orders", ORDERS, ("region", "day"))
    store.commit(5, 1, {"orders": inserts(5, EU, US, NOBODY, schema=ORDERS)})
    rows = client.get("/views/orders").json["rows"]
    assert rows[0] == SHOWN
    for row in rows[:2]:
        assert client.get("/views/orders", key=[row["region"], row["day"]]).json["row"] == row
    assert rows[1] == {
        **dict.fromkeys(SHOWN),
        "region": "us",
        "day": "2026-01-31",
        "amount": "NaN",
        "big": False,
        "ratio": "Infinity",
    }
    assert (rows[2]["region"], rows[2]["day"], rows[2]["amount"]) == (None, None, "-Infinity")


KEYS: list[tuple[str, Any, str]] = [
    ("BIGINT", -(2**63), str(-(2**63))),
    ("INT", 7, "7"),
    ("STRING", "a&b=c ü", "a&b=c ü"),
    ("STRING", "", ""),
    ("DATE", date(2026, 1, 31), "2026-01-31"),
    ("TIMESTAMP", AT, "2026-01-31T12:30:00.000005Z"),
    ("DECIMAL(10, 2)", Decimal("1.50"), "1.50"),
    ("BOOLEAN", True, "true"),
    ("DOUBLE", 0.1, "0.1"),
    ("DOUBLE", float("nan"), "NaN"),
    ("BINARY", b"\x00\xff", "AP8="),
]


@pytest.mark.parametrize(
    ("kind", "value", "text"), KEYS, ids=[f"{kind}-{text}" for kind, _, text in KEYS]
)
def test_keys_are_written_as_answers_write_them(
    client: Client, store: ViewStore, kind: str, value: Any, text: str
) -> None:
    schema = parse_schema(f"id {kind}, n BIGINT")
    store.declare("by", schema, ("id",))
    store.commit(5, 1, {"by": inserts(5, (value, 1), schema=schema)})
    assert client.get("/views/by", key=text).json["row"]["n"] == 1
    assert client.get("/views/by", **{"from": text}).json["rows"][0]["n"] == 1
    assert client.get("/views/by", to=text).json["rows"] == []


def keys(answer: Any) -> list[int]:
    return [row["k"] for row in answer["rows"]]


def test_ranges_orders_and_pages(client: Client, store: ViewStore) -> None:
    store.commit(5, 1, {"counts": inserts(5, *((n, n * 10) for n in range(4, 10)))})
    assert keys(client.get("/views/counts", **{"from": 2, "to": 5}).json) == [2, 3, 4]
    assert keys(client.get("/views/counts", order="desc", limit=2).json) == [9, 8]
    page = client.get("/views/counts", limit=4).json
    seen = keys(page)
    while page["next"]:
        page = client.get("/views/counts", limit=4, **page["next"]).json
        seen += keys(page)
    assert seen == list(range(1, 10))
    page = client.get("/views/counts", limit=4, order="desc").json
    seen = keys(page)
    while page["next"]:
        page = client.get("/views/counts", limit=4, order="desc", **page["next"]).json
        seen += keys(page)
    assert seen == list(range(9, 0, -1))


def test_keys_with_nulls_are_looked_up_and_paged_like_others(
    client: Client, store: ViewStore
) -> None:
    """As an outer join's result has them; they lie behind all others."""
    schema = parse_schema("a BIGINT, b BIGINT")
    store.declare("pairs", schema, ("a", "b"))
    pairs = [(1, 1), (1, 2), (1, None), (2, None), (3, 1), (None, 1), (None, 7)]
    store.commit(5, 1, {"pairs": inserts(5, *pairs[::-1], schema=schema)})
    assert client.get("/views/pairs", key=[2, "null"]).json["row"] == {"a": 2, "b": None}
    for order, at in itertools.product(("asc", "desc"), ({}, {"at_tick": 5})):
        page: dict[str, Any] = {"next": {"limit": 2, "order": order}}
        seen = []
        while page["next"]:
            page = client.get(
                "/views/pairs", **{"limit": 2, "order": order, **at, **page["next"]}
            ).json
            seen += [(row["a"], row["b"]) for row in page["rows"]]
        assert seen == (pairs if order == "asc" else pairs[::-1]), (order, at)
    bounds = {"from": [1, "null"], "to": "null"}
    assert [
        client.get("/views/pairs", **bounds, **at).json["rows"] for at in ({}, {"at_tick": 5})
    ] == [[{"a": a, "b": b} for a, b in pairs[2:5]]] * 2


TEXT_KEYS: dict[str, list[Any]] = {
    "STRING": ["", "N", "\\N", "\\\\N", "a", "null"],
    "BINARY": [b"", b"\x9e\xe9e"],  # the second is `null` in base64
    "DECIMAL(6, 2)": [Decimal("-9.50"), Decimal("9.50"), Decimal("100.00")],
    "TIMESTAMP": [datetime(1969, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)],
}


@pytest.mark.parametrize("kind", TEXT_KEYS)
def test_a_null_key_of_a_text_could_not_be_read_and_ended_the_pages(
    client: Client, store: ViewStore, kind: str
) -> None:
    schema = parse_schema(f"k {kind}, n BIGINT")
    store.declare("texts", schema, ("k",))
    values = enumerate([*TEXT_KEYS[kind], None])
    store.commit(5, 1, {"texts": inserts(5, *((v, n) for n, v in values), schema=schema)})
    in_order = store.reader.table("texts")["n"].to_pylist()
    null = len(TEXT_KEYS[kind])
    for order, at in itertools.product(("asc", "desc"), ({}, {"at_tick": 5})):
        page: dict[str, Any] = {"next": {}}
        seen = []
        while page["next"] is not None:
            query = {"limit": 1, "order": order, **at, **page["next"]}
            page = client.get("/views/texts", **query).json
            seen += [row["n"] for row in page["rows"]]
            assert len(seen) <= len(in_order)
        assert seen == (in_order if order == "asc" else in_order[::-1]), (order, at)
    assert client.get("/views/texts", key="\\N").json["row"] == {"k": None, "n": null}
    for selected in ({"key": "\\N"}, {"where": "k = null"}):
        with client.follow("/views/texts/changes", **selected) as subscriber:
            assert [row["n"] for row in receive(subscriber).data["rows"]] == [null]
    if kind == "STRING":
        for escaped, n in (("\\\\N", 2), ("\\\\\\N", 3), ("N", 1), ("null", 5)):
            assert client.get("/views/texts", key=escaped).json["row"]["n"] == n
        with client.follow("/views/texts/changes", where="k = 'null'") as subscriber:
            assert [row["n"] for row in receive(subscriber).data["rows"]] == [5]


def test_a_stream_by_ticks(client: Client, store: ViewStore) -> None:
    store.commit(5, 1, {"events": inserts(5, (1, 1))})
    store.commit(6, 1, {"events": inserts(6, (2, 2), (1, 3))})
    assert client.get("/views/events", **{"from": 6}).json["rows"] == [
        {"k": 2, "n": 2, "_tick": 6},
        {"k": 1, "n": 3, "_tick": 6},
    ]
    assert "is a stream" in client.get("/views/events", key=1).json["message"]


def test_a_view_that_is_made_anew_is_found_again(client: Client, store: ViewStore) -> None:
    assert client.get("/views/counts", key=1).status == 200
    store.close()
    for path in store.path.parent.glob("views.db*"):
        path.unlink()
    with ViewStore.open(store.path) as anew:
        schema = parse_schema("k STRING, m DOUBLE")
        anew.declare("counts", schema, ("k",))
        anew.commit(2, 2, {"counts": inserts(2, ("1", 0.5), schema=schema)})
        assert client.get("/views/counts", key=1).json == {
            "view": "counts",
            "tick": 2,
            "row": {"k": "1", "m": 0.5},
        }


BAD = [
    ({"kye": 1}, "did you mean 'key'"),
    ({"key": "one"}, "'one' is no value of the column 'k', which is BIGINT"),
    ({"key": [1, 2]}, "2 values came for the key"),
    ({"key": 1, "from": 1}, "cannot be combined with"),
    ({"key": str(2**63)}, "is no value of the column 'k'"),
    ({"from": "1;2"}, "is no value of the column 'k'"),
    ({"limit": 0}, "not a number from 1"),
    ({"limit": [1, 2]}, "came 2 times"),
    ({"order": "up"}, "not one of asc, desc"),
    ({"at_tick": "x"}, "at_tick='x' is not a number"),
    ({"at_least": "orders"}, "is not a list of offsets"),
]


@pytest.mark.parametrize(("query", "reason"), BAD, ids=[json.dumps(query) for query, _ in BAD])
def test_bad_requests_are_refused(client: Client, query: dict[str, Any], reason: str) -> None:
    refused = client.get("/views/counts", **query)
    assert refused.status == 400
    assert reason in refused.json["message"]


def test_an_error_of_our_own_is_an_object_too(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "read_rows", lambda *_: 1 / 0)
    broken = client.get("/views/counts")
    assert (broken.status, broken.json["error"]) == (500, "BugError")
    assert "ZeroDivisionError" in broken.json["message"]


def test_an_unknown_view_suggests_the_nearest(client: Client) -> None:
    for path in ("/views/count", "/views/count/changes"):
        refused = client.get(path)
        assert (refused.status, refused.json["error"]) == (404, "UnknownView")
        assert "did you mean 'counts'" in refused.json["message"]


# SQL


def test_sql(client: Client, store: ViewStore) -> None:
    found = client.sql(
        "SELECT sum(n) AS total, count(*) AS many FROM counts WHERE k > ?", parameters=[1]
    ).json
    assert found == {
        "ticks": {"counts": 4, "events": 4},
        "columns": ["total", "many"],
        "rows": [{"total": 50, "many": 2}],
    }


REFUSED_SQL = [
    ("DELETE FROM counts", {}, "only SELECT is allowed"),
    ("DELETE FROM _rows_1", {}, "may not run"),
    ("UPDATE _views SET tick = 9", {}, "may not run"),
    ("ATTACH 'x.db' AS x", {}, "may not run"),
    ("PRAGMA journal_mode = DELETE", {}, "may not run"),
    ("SELECT * FROM _views", {}, "There is no view '_views'"),
    ("SELECT * FROM duckdb_settings()", {}, "may not use the function duckdb_settings"),
    ("SELECT * FROM count", {}, "did you mean 'counts'"),
    ("SELECT getenv('HOME')", {}, "may not use the function getenv"),
    ("SELECT k FROM counts", {"limit": 2}, "more than 2 rows"),
    ("SELECT * FROM counts a JOIN counts b USING (k)", {}, "two columns 'n'"),
    ("SELECT k FROM counts", {"version": "v9"}, "There is no version 'v9'"),
    ("SELECT k FROM counts", {"timeout": "2 hours"}, "longer than the limit of 60 seconds"),
    ("SELECT k FROM counts", {"tiemout": "1 second"}, "did you mean 'timeout'"),
    (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n",
        {"timeout": "100 milliseconds"},
        "took longer than 0.1",
    ),
]


@pytest.mark.parametrize(
    ("query", "members", "reason"), REFUSED_SQL, ids=[query[:24] for query, _, _ in REFUSED_SQL]
)
def test_sql_that_may_not_run(
    client: Client, query: str, members: dict[str, Any], reason: str
) -> None:
    refused = client.sql(query, **members)
    assert refused.status in {400, 404}
    assert reason in refused.json["message"]
    assert client.get("/views/counts", key=3).json["row"] == {"k": 3, "n": 30}


def test_sql_must_come_as_json_and_be_of_bounded_size(client: Client) -> None:
    assert (
        client.ask("POST", "/sql", b'{"query": "SELECT 1"}', {"content-type": "text/plain"}).status
        == 415
    )
    assert client.ask("POST", "/sql", b"{", {"content-type": "application/json"}).status == 400
    assert (
        client.ask("POST", "/sql", b" " * (2 << 20), {"content-type": "application/json"}).status
        == 413
    )
    assert client.get("/sql").status == 405


# An earlier tick


def test_at_tick_gives_each_tick_as_it_was(client: Client, store: ViewStore) -> None:
    store.commit(
        5,
        1,
        {
            "counts": changes(
                (5, "delete", (1, 10)),
                (5, "update_preimage", (2, 20)),
                (5, "update_postimage", (2, 21)),
            )
        },
    )
    store.commit(
        7,
        1,
        {"counts": changes((7, "insert", (1, 11)), (7, "delete", (2, 21)), (7, "insert", (9, 90)))},
    )
    was = {
        0: [],
        3: [],
        4: [(1, 10), (2, 20), (3, 30)],
        5: [(2, 21), (3, 30)],
        6: [(2, 21), (3, 30)],
        7: [(1, 11), (3, 30), (9, 90)],
    }
    for tick, rows in was.items():
        answer = client.get("/views/counts", at_tick=tick).json
        assert (answer["tick"], [tuple(row.values()) for row in answer["rows"]]) == (tick, rows)
        for key in (1, 2, 3, 9):
            expected = next((row for row in rows if row[0] == key), None)
            found = client.get("/views/counts", at_tick=tick, key=key)
            assert (found.status, expected) == (404, None) or tuple(
                found.json["row"].values()
            ) == expected
    assert [
        row["k"]
        for row in client.get("/views/counts", at_tick=4, order="desc", **{"from": 2}).json["rows"]
    ] == [3, 2]


def test_a_tick_that_is_not_kept_names_those_that_are(client: Client, store: ViewStore) -> None:
    for tick in (5, 10**15):
        refused = client.get("/views/counts", at_tick=tick)
        assert refused.status == 410
        assert f"can be read at the ticks 0 to 4, not at {tick}" in refused.json["message"]


def test_a_look_up_shows_each_commit_at_once(client: Client, store: ViewStore) -> None:
    """Though it holds on to a moment of the store for as long as nothing is committed."""
    for tick in range(5, 205):
        store.commit(
            tick, 1, {"counts": changes((tick, "delete" if tick % 2 else "insert", (2, 20)))}
        )
        for _ in range(2):
            answer = client.get("/views/counts", key=2)
            assert answer.status == (404 if tick % 2 else 200)
            assert (
                f"at tick {tick}." in answer.json["message"]
                if tick % 2
                else answer.json["tick"] == tick
            )
