"""SQL over views: what it gives, and everything it may not do."""

import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from headrace.errors import BadQuery, UnknownView
from headrace.types.schema import parse_schema
from headrace.views.reader import ViewReader
from headrace.views.store import ViewStore
from tests.views.store_contract import COUNTS, changes, inserts

SALES = parse_schema(
    "region STRING, amount DOUBLE, price DECIMAL(10, 2), at TIMESTAMP, tags ARRAY<STRING>, ok"
    " BOOLEAN, raw BINARY"
)
AT = datetime(2026, 1, 31, 12, tzinfo=UTC)


def filled(path: Path) -> ViewStore:
    store = ViewStore.open(path)
    store.declare("sales", SALES, ("region",))
    store.declare("counts", COUNTS, ("k",))
    store.declare("shop-events.v2", COUNTS)
    sold = [
        ("eu", 1.5, Decimal("10.50"), AT, ["a", "b"], True, b"\x01"),
        ("us", math.nan, Decimal("9.00"), AT.replace(month=2, day=1), [], False, None),
        ("ap", None, None, None, None, None, None),
    ]
    store.commit(
        3,
        1,
        {
            "sales": inserts(3, *sold, schema=SALES),
            "counts": inserts(3, *((k, k) for k in range(100))),
        },
    )
    store.commit(5, 1, {"shop-events.v2": inserts(4, (1, 2), (3, 4))})
    return store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ViewStore]:
    """For a test that writes."""
    with filled(tmp_path / "views.db") as store:
        yield store


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ViewReader]:
    """One file of views, shared by the tests that only read."""
    with filled(tmp_path_factory.mktemp("sql") / "views.db") as store:
        yield store.reader


def test_views_can_be_joined_filtered_and_aggregated(reader: ViewReader) -> None:
    assert reader.sql("SELECT region, amount FROM sales WHERE region = 'eu'").to_pylist() == [
        {"region": "eu", "amount": 1.5}
    ]
    assert reader.sql(
        "SELECT sum(n) AS n, count(*) AS c FROM counts WHERE k < ?", [10]
    ).to_pylist() == [{"n": 45, "c": 10}]
    joined = reader.sql(
        'SELECT e._tick, e.n, c.n FROM "shop-events.v2" e JOIN counts c ON c.k = e.k ORDER BY e.k'
    )
    assert joined.schema.names == ["_tick", "n", "n"]
    assert [column.to_pylist() for column in joined.columns] == [[4, 4], [2, 4], [1, 3]]
    assert reader.sql(
        "WITH big AS (SELECT * FROM counts WHERE n >= 98) SELECT count(*) AS c FROM BIG"
    ).to_pylist() == [{"c": 2}]
    assert reader.sql(
        "SELECT k, rank() OVER (ORDER BY n DESC) AS r FROM Counts ORDER BY r LIMIT 1"
    ).to_pylist() == [{"k": 99, "r": 1}]
    assert reader.sql(
        "WITH RECURSIVE up(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM up WHERE x < 5) SELECT"
        " sum(x) AS s FROM up"
    )["s"].to_pylist() == [15]


def test_results_have_types(reader: ViewReader) -> None:
    result = reader.sql(
        "SELECT amount, price, at, tags, ok, raw, NULL AS none FROM sales ORDER BY region DESC"
    )
    assert [field.type for field in result.schema] == [
        pa.float64(),
        pa.string(),
        pa.string(),
        pa.string(),
        pa.int64(),
        pa.binary(),
        pa.null(),
    ]
    amounts = result["amount"].to_pylist()
    assert math.isnan(amounts[0])
    assert amounts[1:] == [1.5, None]
    assert result["price"].to_pylist() == ["9.00", "10.50", None]
    assert reader.sql("SELECT 1 AS x UNION ALL SELECT 2.5")["x"].to_pylist() == [1.0, 2.5]
    assert reader.sql("SELECT k FROM counts WHERE k < 0").to_pydict() == {"k": []}
    with pytest.raises(BadQuery, match="'x' of the result mixes text and whole numbers") as caught:
        reader.sql("SELECT 1 AS x UNION ALL SELECT 'a'")
    assert "CAST(x AS TEXT)" in caught.value.fix


def test_times_numbers_and_lists_compare_as_documented(reader: ViewReader) -> None:
    assert reader.sql("SELECT region FROM sales WHERE at >= '2026-02-01'")[
        "region"
    ].to_pylist() == ["us"]
    assert reader.sql("SELECT max(at) AS at FROM sales")["at"].to_pylist() == [
        "2026-02-01T12:00:00.000000Z"
    ]
    assert reader.sql("SELECT strftime('%H', at) AS h FROM sales WHERE region = 'eu'")[
        "h"
    ].to_pylist() == ["12"]
    assert reader.sql("SELECT region FROM sales WHERE CAST(price AS REAL) > 9.5")[
        "region"
    ].to_pylist() == ["eu"]
    assert reader.sql("SELECT value FROM sales, json_each(tags) ORDER BY value")[
        "value"
    ].to_pylist() == ["a", "b"]
    assert reader.sql("SELECT tags ->> 0 AS t FROM sales WHERE ok")["t"].to_pylist() == ["a"]


def test_a_null_key_is_null_in_sql_too(store: ViewStore) -> None:
    assert store.reader.sql("SELECT count(*) AS c FROM counts WHERE k IS NULL")[
        "c"
    ].to_pylist() == [0]
    store.commit(6, 1, {"counts": inserts(6, (None, 7))})
    assert store.reader.sql("SELECT * FROM counts WHERE k IS NULL").to_pylist() == [
        {"k": None, "n": 7}
    ]
    assert store.reader.sql("SELECT count(*) AS c, max(k) AS m FROM counts").to_pylist() == [
        {"c": 101, "m": 99}
    ]
    store.commit(7, 1, {"counts": changes((7, "delete", (None, 7)))})
    assert store.reader.sql("SELECT count(*) AS c FROM counts")["c"].to_pylist() == [100]


def test_a_key_is_found_by_its_index(reader: ViewReader) -> None:
    plan = reader.sql("EXPLAIN QUERY PLAN SELECT n FROM counts WHERE k = 5")["detail"].to_pylist()
    assert plan == ["SEARCH _rows_2 USING PRIMARY KEY (c0=?)"]


def test_sql_reads_the_snapshot(store: ViewStore) -> None:
    with store.reader.snapshot() as snap:
        store.commit(6, 1, {"counts": inserts(6, (1000, 1))})
        assert snap.sql("SELECT count(*) AS c FROM counts")["c"].to_pylist() == [100]
        assert snap.tick("counts") == 5
    assert store.reader.sql("SELECT count(*) AS c FROM counts")["c"].to_pylist() == [101]


REFUSED = [
    "DELETE FROM counts",
    "DELETE FROM _rows_2",
    "UPDATE _ledger SET epoch = 100",
    "INSERT INTO _rows_2 VALUES (1, 1)",
    "DROP VIEW counts",
    "CREATE TABLE x (y)",
    "CREATE TEMP TABLE x (y)",
    "CREATE TEMP VIEW x AS SELECT 1",
    "ATTACH ':memory:' AS other",
    "DETACH main",
    "PRAGMA query_only = OFF",
    "PRAGMA user_version",
    "PRAGMA journal_mode = DELETE",
    "SELECT * FROM pragma_table_info('counts')",
    "VACUUM",
    "VACUUM INTO 'copy.db'",
    "BEGIN",
    "COMMIT",
    "ROLLBACK",
    "SAVEPOINT x",
    "REINDEX",
    "ANALYZE",
    "SELECT * FROM sqlite_schema",
    "SELECT count(*) FROM sqlite_master",
    "SELECT * FROM _views",
    "SELECT count(*) FROM _views",
    "SELECT data FROM _changes",
    "WITH counts AS (SELECT * FROM _views) SELECT * FROM counts",
    "SELECT k FROM counts WHERE EXISTS (SELECT 1 FROM _ledger WHERE epoch > 0)",
    "SELECT load_extension('x')",
    "SELECT randomblob(1000000000)",
    "SELECT zeroblob(1000000000)",
    "SELECT readfile('x')",
    "SELECT random()",
    "SELECT 1; SELECT 2",
    "SELECT 1; DROP VIEW counts",
    "",
    "-- nothing",
    "SELEC 1",
    "SELECT k, nn FROM counts",
    (
        "SELECT replace(replace(printf('%1000d', 1), ' ', printf('%1000d', 1)), ' ',"
        " printf('%1000d', 1))"
    ),
    "SELECT ?",
]


@pytest.mark.parametrize("query", REFUSED)
def test_nothing_but_reading_views_is_allowed(reader: ViewReader, query: str) -> None:
    with pytest.raises(BadQuery) as caught:
        reader.sql(query)
    assert caught.value.fix
    assert reader.sql("SELECT count(*) AS c FROM counts")["c"].to_pylist() == [100]


def test_after_a_query_the_connection_is_free_again(reader: ViewReader) -> None:
    with reader.snapshot() as snap:
        with pytest.raises(BadQuery):
            snap.sql("SELECT * FROM _views")
        assert snap.tick("counts") == 5
        assert snap.get("counts", 3) == {"k": 3, "n": 3}


def test_a_query_that_takes_too_long_is_stopped(reader: ViewReader) -> None:
    started = time.monotonic()
    with pytest.raises(BadQuery, match=r"longer than 0\.2 seconds"):
        reader.sql(
            "WITH RECURSIVE up(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM up) SELECT count(*)"
            " FROM up",
            timeout="200 ms",
        )
    assert time.monotonic() - started < 5
    with pytest.raises(BadQuery, match="longer than"):
        reader.sql(
            "SELECT count(*) FROM counts a, counts b, counts c, counts d, counts e",
            timeout="100 ms",
        )
    assert reader.tick("counts") == 5


def test_a_result_is_bounded(reader: ViewReader) -> None:
    assert reader.sql("SELECT k FROM counts", max_rows=100).num_rows == 100
    with pytest.raises(BadQuery, match="more than 99 rows"):
        reader.sql("SELECT k FROM counts", max_rows=99)


def test_an_unknown_view_names_the_nearest(reader: ViewReader) -> None:
    with pytest.raises(UnknownView, match="'count': did you mean 'counts'"):
        reader.sql("SELECT * FROM count")
