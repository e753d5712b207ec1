"""SQL over views: what it gives, everything it may not do, and the limits it cannot pass."""

import math
import os
import threading
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from headrace.errors import BadQuery, ChangesGone, InputError, UnknownView
from headrace.types.schema import parse_schema
from headrace.views import sql as views_sql
from headrace.views.reader import ViewReader
from headrace.views.sql import SqlLimits, run_query
from headrace.views.store import ViewStore
from tests.views.store_contract import COUNTS, changes, inserts, update

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
    store.declare("order", COUNTS, ("k",))
    sold = [
        ("eu", 1.5, Decimal("100.00"), AT, ["a", "b"], True, b"\x01"),
        ("us", math.nan, Decimal("9.50"), AT.replace(month=2, day=1), [], False, None),
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


def column(reader: ViewReader, query: str, *parameters: object) -> list[object]:
    values: list[object] = reader.sql(query, list(parameters)).column(0).to_pylist()
    return values


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
    assert column(
        reader, "WITH big AS (SELECT * FROM counts WHERE n >= 98) SELECT count(*) FROM BIG"
    ) == [2]
    assert reader.sql(
        "SELECT k, rank() OVER (ORDER BY n DESC) AS r FROM Counts ORDER BY r LIMIT 1"
    ).to_pylist() == [{"k": 99, "r": 1}]
    assert column(
        reader,
        "WITH RECURSIVE up(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM up WHERE x < 5) SELECT"
        " sum(x) FROM up",
    ) == [15]
    assert column(reader, 'SELECT count(*) FROM "order"') == [0]


# Regressions: SQLite has fewer types than views, and showed it


def test_decimals_compared_as_text(reader: ViewReader) -> None:
    assert column(reader, "SELECT region FROM sales WHERE price > 50") == ["eu"]
    assert column(reader, "SELECT region FROM sales WHERE price > ?", "50") == ["eu"]
    assert column(reader, "SELECT max(price) FROM sales") == [Decimal("100.00")]
    assert column(reader, "SELECT sum(price) FROM sales") == [Decimal("109.50")]
    assert column(reader, "SELECT region FROM sales ORDER BY price") == ["ap", "us", "eu"]


def test_times_in_the_form_that_is_printed_compared_wrongly(reader: ViewReader) -> None:
    for text in ("2026-02-01T12:00:00Z", "2026-02-01 12:00:00+00:00", "2026-02-01T12:00:00.000Z"):
        assert column(reader, 'SELECT region FROM sales WHERE "at" >= ?', text) == ["us"]
        assert column(reader, f"SELECT region FROM sales WHERE \"at\" >= '{text}'") == ["us"]
    assert column(reader, 'SELECT region FROM sales WHERE "at" < ?', AT + timedelta(days=1)) == [
        "eu"
    ]
    assert column(reader, "SELECT hour(\"at\") FROM sales WHERE region = 'eu'") == [12]
    assert column(reader, 'SELECT max("at") AS last FROM sales') == [AT.replace(month=2, day=1)]


def test_results_have_types(reader: ViewReader) -> None:
    result = reader.sql("SELECT *, NULL AS none FROM sales ORDER BY region DESC")
    assert result.schema.types[:-1] == [field.type for field in SALES]
    assert result.schema.names[:-1] == SALES.names
    assert math.isnan(result["amount"][0].as_py())
    assert result["price"].to_pylist() == [Decimal("9.50"), Decimal("100.00"), None]
    assert result["tags"].to_pylist() == [[], ["a", "b"], None]
    assert reader.sql("SELECT sum(k) AS s FROM counts").schema.types == [pa.int64()]
    assert reader.sql("SELECT 1 AS x UNION ALL SELECT 2.5")["x"].to_pylist() == [
        Decimal("1.0"),
        Decimal("2.5"),
    ]
    assert reader.sql("SELECT k FROM counts WHERE k < 0").schema == pa.schema({"k": pa.int64()})
    day = reader.sql(
        'SELECT max("at") - min("at") AS d, list(k) AS ks FROM sales, counts WHERE k < 2'
    )
    assert day["d"].to_pylist() == [timedelta(days=1)]
    assert reader.sql('SELECT max("at")::DATE AS d FROM sales')["d"].to_pylist() == [
        date(2026, 2, 1)
    ]
    with pytest.raises(BadQuery, match="an interval of months"):
        reader.sql("SELECT INTERVAL 1 MONTH AS m")
    with pytest.raises(BadQuery, match=r"the type INTERVAL\[\], which views do not have"):
        reader.sql("SELECT [INTERVAL 1 DAY] AS days")
    with pytest.raises(BadQuery, match="does not fit int64"):
        reader.sql("SELECT sum(k) * 9223372036854775807 AS s FROM counts")


def test_floats_and_nulls_order_as_in_spark(store: ViewStore) -> None:
    schema = parse_schema("k BIGINT, x DOUBLE")
    store.declare("floats", schema, ("k",))
    values = [1.0, math.nan, None, -math.inf, 0.0, -0.0, math.inf]
    store.commit(6, 1, {"floats": inserts(6, *enumerate(values), schema=schema)})
    ordered = column(store.reader, "SELECT x FROM floats ORDER BY x, k")
    assert str(ordered) == "[None, -inf, 0.0, 0.0, 1.0, inf, nan]"
    assert str(column(store.reader, "SELECT x FROM floats ORDER BY x DESC LIMIT 2")) == "[nan, inf]"
    assert column(store.reader, "SELECT count(*) FROM floats GROUP BY x ORDER BY x") == [
        *(1, 1, 2),
        *(1, 1, 1),
    ]
    assert column(store.reader, "SELECT k FROM floats WHERE x > 1e308 ORDER BY k") == [1, 6]
    assert column(store.reader, "SELECT 1 / 0") == [None]


def test_a_null_key_is_null_in_sql_too(store: ViewStore) -> None:
    assert column(store.reader, "SELECT count(*) FROM counts WHERE k IS NULL") == [0]
    store.commit(6, 1, {"counts": inserts(6, (None, 7))})
    assert store.reader.sql("SELECT * FROM counts WHERE k IS NULL").to_pylist() == [
        {"k": None, "n": 7}
    ]
    store.commit(7, 1, {"counts": changes((7, "delete", (None, 7)))})
    assert column(store.reader, "SELECT count(*) FROM counts") == [100]


# Following


def test_sql_reads_the_snapshot(store: ViewStore) -> None:
    with store.reader.snapshot() as snap:
        more = changes((6, "delete", (3, 3)), *update(6, (4, 4), (4, 40)), (6, "insert", (1000, 1)))
        store.commit(6, 1, {"counts": more})
        total = "SELECT count(*) AS c, sum(n) AS s FROM counts"
        assert snap.sql(total).to_pylist() == [{"c": 100, "s": 4950}]
        assert store.reader.sql(total).to_pylist() == [{"c": 100, "s": 4984}]
        assert snap.sql(total).to_pylist() == [{"c": 100, "s": 4950}]
        assert snap.tick("counts") == 5


def test_a_snapshot_older_than_the_retained_changes_is_refused(tmp_path: Path) -> None:
    with ViewStore.open(tmp_path / "views.db", max_changes=2) as store:
        store.declare("counts", COUNTS, ("k",))
        store.commit(1, 1, {"counts": inserts(1, (1, 1))})
        with store.reader.snapshot() as snap:
            assert snap.sql("SELECT n FROM counts")["n"].to_pylist() == [1]
            store.commit(2, 1, {"counts": inserts(2, *((k, k) for k in range(2, 9)))})
            with pytest.raises(ChangesGone):
                snap.sql("SELECT n FROM counts")
        assert column(store.reader, "SELECT count(*) FROM counts") == [8]  # loaded again


def test_a_view_that_was_built_again_went_on_from_rows_of_another_meaning(
    store: ViewStore,
) -> None:
    assert column(store.reader, "SELECT count(*) FROM counts") == [100]
    store.rebuild(["counts"], 2, at_tick=9)
    assert column(store.reader, "SELECT count(*) FROM counts") == [100]
    store.commit(9, 2, {"counts": changes((1, "insert", (1, 5)), *update(9, (1, 5), (1, 6)))})
    assert store.reader.sql("SELECT * FROM counts").to_pylist() == [{"k": 1, "n": 6}]


def test_a_stream_keeps_its_newest_rows_in_their_order(tmp_path: Path) -> None:
    with ViewStore.open(tmp_path / "views.db") as store:
        store.declare("events", COUNTS, max_rows=5)
        store.commit(1, 1, {"events": inserts(1, *((k, 0) for k in range(4)))})
        newest = "SELECT k, _tick FROM events"
        assert column(store.reader, newest) == [0, 1, 2, 3]
        for tick in range(2, 6):
            store.commit(tick, 1, {"events": inserts(tick, (tick * 10, 0), (tick * 10 + 1, 0))})
            expected = store.reader.table("events")
            assert (
                store.reader.sql(newest).to_pylist() == expected.select(["k", "_tick"]).to_pylist()
            )


def test_a_store_that_was_replaced_is_loaded_anew(tmp_path: Path) -> None:
    path = tmp_path / "views.db"
    for count in (3, 5):
        with ViewStore.open(path) as store:
            store.declare("counts", COUNTS, ("k",))
            store.commit(7, 1, {"counts": inserts(7, *((k, k) for k in range(count)))})
            assert column(store.reader, "SELECT count(*) FROM counts") == [count]
        for file in tmp_path.glob("views.db*"):
            file.unlink()


# The sandbox


REFUSED = [
    "DELETE FROM counts",
    "DELETE FROM _rows_2",
    "UPDATE counts SET n = 100",
    "INSERT INTO counts VALUES (1, 1)",
    "DROP VIEW counts",
    "CREATE TABLE x (y INT)",
    "CREATE TEMP TABLE x (y INT)",
    "CREATE MACRO f() AS 1",
    "CREATE SECRET s (TYPE s3)",
    "ATTACH ':memory:' AS other",
    "DETACH memory",
    "USE memory",
    "SET threads = 4",
    "RESET lock_configuration",
    "SET VARIABLE x = 1",
    "PRAGMA database_list",
    "PRAGMA disable_progress_bar",
    "CALL pragma_version()",
    "CHECKPOINT",
    "VACUUM",
    "BEGIN",
    "COMMIT",
    "EXPLAIN SELECT 1",
    "EXPLAIN ANALYZE SELECT 1",
    "DESCRIBE counts",
    "SHOW TABLES",
    "SUMMARIZE counts",
    "INSTALL httpfs",
    "LOAD httpfs",
    "EXPORT DATABASE 'x'",
    "COPY counts TO 'x.csv'",
    "COPY (SELECT 1) TO '/tmp/x.csv'",
    "PREPARE p AS SELECT 1",
    "EXECUTE p",
    "SELECT * FROM duckdb_tables()",
    "SELECT * FROM duckdb_settings()",
    "SELECT * FROM duckdb_secrets()",
    "SELECT * FROM duckdb_tables",
    "SELECT * FROM pg_catalog.pg_class",
    "SELECT * FROM pg_class",
    "SELECT * FROM information_schema.tables",
    "SELECT * FROM sqlite_master",
    "SELECT * FROM memory.main.counts",
    "SELECT * FROM main._rows_1",
    "SELECT * FROM _rows_1",
    "SELECT * FROM _views",
    "WITH counts AS (SELECT * FROM _views) SELECT * FROM counts",
    "SELECT * FROM (WITH pg_class AS (SELECT 1) SELECT * FROM pg_class) a, pg_class b",
    "SELECT k FROM counts WHERE EXISTS (SELECT 1 FROM _rows_1)",
    "SELECT k, (SELECT max(oid) FROM pg_type) FROM counts",
    "SELECT count(*) FILTER (WHERE k IN (SELECT oid FROM pg_type)) FROM counts",
    "SELECT k FROM counts ORDER BY (SELECT max(oid) FROM pg_type)",
    "SELECT k FROM counts LIMIT (SELECT count(*) FROM pg_type)",
    "SELECT sum(n) OVER (ORDER BY (SELECT getenv('HOME'))) FROM counts",
    "SELECT list_transform([1], lambda x: getenv('HOME'))",
    "SELECT list_aggregate([1], 'sum', getenv('HOME'))",
    "SELECT CASE WHEN getenv('HOME') = '' THEN 1 END",
    "SELECT k FROM counts GROUP BY getenv('HOME'), k",
    "VALUES (getenv('HOME'))",
    "SELECT * FROM (VALUES (getenv('HOME')))",
    "SELECT * FROM counts a JOIN counts b ON a.k = getenv('HOME')",
    "SELECT * REPLACE (getenv('HOME') AS k) FROM counts",
    "SELECT DISTINCT ON (getenv('HOME')) k FROM counts",
    "SELECT * FROM unnest([getenv('HOME')])",
    "SELECT k FROM counts QUALIFY getenv('HOME') = ''",
    "SELECT getenv('HOME')",
    "SELECT main.getenv('HOME')",
    "SELECT system.main.abs(1)",
    "SELECT current_setting('threads')",
    "SELECT getvariable('x')",
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM read_text('/etc/passwd')",
    "SELECT * FROM read_blob('/etc/passwd')",
    "SELECT * FROM glob('/*')",
    "SELECT * FROM '/etc/passwd'",
    "FROM 'https://example.com/x.parquet'",
    "SELECT * FROM query('SELECT 1')",
    "SELECT * FROM query_table('counts')",
    "SELECT * FROM json_execute_serialized_sql('{}')",
    "SELECT json_serialize_sql('SELECT 1')",
    "SELECT * FROM sniff_csv('x')",
    "SELECT * FROM test_all_types()",
    "SELECT * FROM pragma_table_info('counts')",
    "SELECT * FROM repeat_row(1, num_rows := 3)",
    "SELECT nextval('x')",
    "SELECT random()",
    "SELECT sleep_ms(1000000)",
    "SELECT pg_sleep(1000)",
    "SELECT write_log('x')",
    "SELECT k COLLATE de FROM counts",
    "SELECT * FROM counts AT (VERSION => 1)",
    "SELECT 1; SELECT 2",
    "SELECT 1; DROP VIEW counts",
    "",
    "-- nothing",
    ";",
    "SELEC 1",
    "SELECT k, nn FROM counts",
    "SELECT ?",
    "SELECT k FROM counts WHERE k = 'x'",
    "SELECT '" + "x" * 300_000 + "'",
    "SELECT " + "(" * 20_000 + "1" + ")" * 20_000,
    "SELECT " + "NOT " * 20_000 + "true",
    "SELECT " + "[" * 5_000 + "]" * 5_000,
    "SELECT 1" + " + 1" * 20_000,
    "SELECT * FROM " + "(SELECT * FROM " * 2_000 + "counts" + ")" * 2_000,
    "SELECT '\x00'",
]


@pytest.mark.parametrize("query", REFUSED, ids=lambda query: query[:40])
def test_nothing_but_reading_views_is_allowed(reader: ViewReader, query: str) -> None:
    with pytest.raises((BadQuery, UnknownView)) as caught:
        reader.sql(query)
    assert len(str(caught.value)) < 2_000


def test_a_name_or_literal_cannot_end_its_quotes(store: ViewStore) -> None:
    schema = parse_schema('`a"b` BIGINT, `x; DROP VIEW "counts"` STRING')
    store.declare("odd.columns", schema, ('a"b',))
    odd = "'); DELETE FROM counts; --"
    store.commit(6, 1, {"odd.columns": inserts(6, (1, odd), schema=schema)})
    found = store.reader.sql('SELECT * FROM "odd.columns"')
    assert found.to_pylist() == [{'a"b': 1, 'x; DROP VIEW "counts"': odd}]
    assert column(store.reader, "SELECT ?", odd) == [odd]
    with pytest.raises(BadQuery, match=r'in double quotes: "odd\.columns"|"odd\.columns"'):
        store.reader.sql("SELECT * FROM odd.columns")


def test_a_parameter_that_cannot_be_passed_is_named(reader: ViewReader) -> None:
    with pytest.raises(InputError, match="parameter 2"):
        reader.sql("SELECT ?, ?", [1, object()])


def test_a_name_that_is_a_keyword_needs_quotes_and_the_error_says_so(reader: ViewReader) -> None:
    with pytest.raises(BadQuery) as caught:
        reader.sql("SELECT region FROM sales WHERE at > now()")
    assert caught.value.fix.startswith('write "at" in double quotes')
    with pytest.raises(BadQuery):
        reader.sql("SELECT * FROM order")


def test_an_unknown_view_names_the_nearest(reader: ViewReader) -> None:
    with pytest.raises(UnknownView, match="'count': did you mean 'counts'"):
        reader.sql("SELECT * FROM count")


# Limits: a query that passes one ends, and nobody else notices


def bounded(reader: ViewReader, query: str, limits: SqlLimits) -> str:
    started = time.monotonic()
    with pytest.raises(BadQuery) as caught:
        run_query(reader.path, query, limits=limits)
    assert time.monotonic() - started < limits.timeout_s + 4
    return caught.value.message


@pytest.mark.parametrize(
    "query",
    [
        "WITH RECURSIVE up(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM up) SELECT count(*) FROM up",
        "SELECT count(*) FROM counts a, counts b, counts c, counts d, counts e",
        "SELECT sum(i) FROM generate_series(1, 1000000000000) t(i)",
        # These two never look whether they were interrupted.
        "SELECT levenshtein(repeat('a', 100000), repeat('b', 100000)) FROM counts",
        "SELECT rpad('a', 1000000000, 'b') FROM counts",
    ],
)
def test_a_query_took_73_seconds_in_spite_of_its_limit(reader: ViewReader, query: str) -> None:
    message = bounded(reader, query, SqlLimits(timeout_s=0.5, memory_bytes=4 << 30))
    assert message == "The query took longer than 0.5 seconds."
    assert reader.tick("counts") == 5
    assert column(reader, "SELECT count(*) FROM counts") == [100]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT length(repeat('x', 2000000000))",
        "SELECT list_sum(range(500000000))",
        "SELECT i FROM range(100000000) t(i) ORDER BY hash_ DESC".replace("hash_", "md5(i::TEXT)"),
        "SELECT count(*) FROM (SELECT DISTINCT md5(i::TEXT) FROM range(100000000) t(i))",
        "SELECT string_agg(repeat('x', 1000)) FROM range(10000000)",
        "SELECT printf('%2000000000d', 1)",
        "SELECT list(i) FROM range(1000000000) t(i)",
    ],
)
def test_a_query_took_all_memory(reader: ViewReader, query: str) -> None:
    message = bounded(reader, query, SqlLimits(timeout_s=30, memory_bytes=64 << 20))
    assert message == "The query needs more than 64 MiB of memory."


def test_a_result_is_bounded(reader: ViewReader) -> None:
    assert reader.sql("SELECT k FROM counts", max_rows=100).num_rows == 100
    with pytest.raises(BadQuery, match="more than 99 rows"):
        reader.sql("SELECT k FROM counts", max_rows=99)
    limits = SqlLimits(max_bytes=1 << 20)
    message = bounded(reader, "SELECT repeat('x', 100) FROM range(100000)", limits)
    assert message == "The query's result has more than 1,048,576 bytes."


def test_a_runaway_query_delays_nobody(reader: ViewReader) -> None:
    column(reader, "SELECT count(*) FROM counts")
    runaway = "SELECT levenshtein(repeat('a', 100000), repeat('b', 100000)) FROM counts"
    threads = [
        threading.Thread(target=bounded, args=(reader, runaway, SqlLimits(timeout_s=2.0)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    while any(thread.is_alive() for thread in threads):
        assert column(reader, "SELECT count(*) FROM counts") == [100]
    for thread in threads:
        thread.join()


def test_queries_go_on_after_their_process_was_killed(reader: ViewReader) -> None:
    assert column(reader, "SELECT count(*) FROM counts") == [100]
    (handle,) = views_sql._handles
    os.kill(handle.process_id, 9)
    assert column(reader, "SELECT count(*) FROM counts") == [100]


def test_a_view_larger_than_sql_may_hold_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_SQL_VIEWS_MB", "8")
    views_sql.end_process()
    schema = parse_schema("k BIGINT, text STRING")
    try:
        with ViewStore.open(tmp_path / "views.db") as store:
            for name, count in (("large", 100_000), ("small", 10_000), ("other", 10_000)):
                store.declare(name, schema, ("k",))
                texts = [f"{k:0200}" for k in range(count)]
                rows = pa.table({"k": range(count), "text": texts, "_tick": [1] * count})
                store.commit(
                    1,
                    1,
                    {name: rows.append_column("_change_type", pa.repeat("insert", count))},
                    views=[name],
                )
            with pytest.raises(InputError, match="'large' takes more than the 8 MiB"):
                store.reader.sql("SELECT count(*) FROM large")
            for _ in range(3):
                for name in ("small", "other"):
                    assert column(store.reader, f"SELECT count(*) FROM {name}") == [10_000]
    finally:
        views_sql.end_process()
