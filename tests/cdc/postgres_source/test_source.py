"""Postgres, captured by logical replication from a real server: types, keys, large values, columns
that change, partitions, messages.
"""

from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pytest

from headrace.cdc.topics import fold
from tests.cdc.captures import caught_up, folded_columns, postgres_capture
from tests.cdc.conftest import Postgres
from tests.waits import wait_until

TYPES: list[tuple[str, str, Any]] = [
    ("boolean", "true", True),
    ("smallint", "-32768", -32768),
    ("integer", "7", 7),
    ("bigint", "9223372036854775807", 9223372036854775807),
    ("real", "'-Infinity'", float("-inf")),
    ("double precision", "0.1", 0.1),
    ("numeric(12,3)", "123456789.125", Decimal("123456789.125")),
    (
        "numeric",
        "'12345678901234567890123456789012345678901234567890.000123'",
        "12345678901234567890123456789012345678901234567890.000123",
    ),
    ("numeric", "'NaN'", "NaN"),
    ("numeric(60,2)", "1.5", "1.50"),
    ("text", "E'a,\"b\"\\nü\\\\'", 'a,"b"\nü\\'),
    ("text", "''", ""),
    ("varchar(5)", "'abc'", "abc"),
    ("char(4)", "'ab'", "ab  "),
    ("date", "'2026-02-28'", date(2026, 2, 28)),
    ("time", "'12:34:56.789'", time(12, 34, 56, 789000)),
    ("timetz", "'12:34:56+02'", "12:34:56+02"),
    (
        "timestamp",
        "'2026-02-28 12:00:00.5'",
        datetime(2026, 2, 28, 12, 0, 0, 500000),  # noqa: DTZ001
    ),
    ("timestamptz", "'2026-02-28 12:00:00+02'", datetime(2026, 2, 28, 10, tzinfo=UTC)),
    ("interval", "'1 year 2 days 3 seconds'", "P1Y2DT3S"),
    ("uuid", "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    ("json", "'{\"a\": [1]}'", '{"a": [1]}'),
    ("jsonb", "'{\"a\":[1]}'", '{"a": [1]}'),
    ("bytea", "'\\x00ff10'", b"\x00\xff\x10"),
    ("bytea", "''", b""),
    ("integer[]", "'{1,NULL,3}'", "{1,NULL,3}"),
    ("text[][]", "'{{a,\"b c\"},{d,e}}'", '{{a,"b c"},{d,e}}'),
    ("mood", "'glad'", "glad"),
    ("price", "12.5", Decimal("12.50")),
    ("money", "12.34", "$12.34"),
    ("inet", "'10.0.0.1/8'", "10.0.0.1/8"),
    ("int4range", "'[1,5)'", "[1,5)"),
    ("bit(3)", "'101'", "101"),
    ("oid", "4000000000", 4000000000),
]


def test_every_type_from_snapshot_and_stream(postgres: Postgres, address: str) -> None:
    columns = ", ".join(f"c{column} {kind}" for column, (kind, _, _) in enumerate(TYPES))
    values = ", ".join(value for _, value, _ in TYPES)
    postgres.do(
        "CREATE TYPE mood AS ENUM ('glad', 'sad')",
        "CREATE DOMAIN price AS numeric(10,2)",
        f"CREATE TABLE things (id int PRIMARY KEY, {columns})",
        f"INSERT INTO things VALUES (1, {values})",
        "INSERT INTO things (id) VALUES (2)",
    )
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    postgres.do(f"INSERT INTO things VALUES (3, {values})", "INSERT INTO things (id) VALUES (4)")
    with caught_up(capture, address) as log:
        rows = {row["id"]: row for row in log.read("things").to_pylist()}
        for column, (kind, _, expected) in enumerate(TYPES):
            for number in (1, 3):
                value = rows[number][f"c{column}"]
                assert (
                    value.time() if isinstance(value, datetime) and kind == "time" else value
                ) == expected, kind
            assert rows[2][f"c{column}"] is None
            assert rows[4][f"c{column}"] is None
        assert {row["_marks"] for row in rows.values()} == {None}


def test_values_that_a_column_cannot_hold_are_marked(postgres: Postgres, address: str) -> None:
    postgres.do(
        "CREATE TABLE odd (id int PRIMARY KEY, amount numeric(10,2), day date, at timestamptz)"
    )
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    postgres.do(
        "INSERT INTO odd VALUES (1, 'NaN', '0044-03-15 BC', 'infinity'), (2, 1.5, '2026-01-01',"
        " '2026-01-01')"
    )
    with caught_up(capture, address) as log:
        one, two = log.read("odd").to_pylist()
        assert (one["amount"], one["day"], one["at"]) == (None, None, None)
        assert (
            one["_marks"]
            == '{"amount": {"text": "NaN"}, "day": {"text": "0044-03-15 BC"}, "at": {"text":'
            ' "infinity"}}'
        )
        assert (two["amount"], two["day"], two["_marks"]) == (
            Decimal("1.50"),
            date(2026, 1, 1),
            None,
        )


def test_changes_keys_and_transactions(postgres: Postgres, address: str) -> None:
    postgres.do(
        "CREATE TABLE a (id int PRIMARY KEY, v text)",
        "CREATE TABLE b (x int, y text, v int, PRIMARY KEY (y, x))",
    )
    postgres.do(
        "INSERT INTO a SELECT i, 'v' || i FROM generate_series(1, 10) i",
        "INSERT INTO b VALUES (1, 'k', 1)",
    )
    capture = postgres_capture(postgres, chunk_rows=4)
    caught_up(capture, address).close()
    postgres.do(
        "INSERT INTO a VALUES (11, NULL)",
        "UPDATE a SET v = 'new' WHERE id = 1",
        "UPDATE b SET x = 2, v = 5",
        "DELETE FROM a WHERE id = 2",
        "UPDATE a SET id = 30 WHERE id = 3",
    )
    with caught_up(capture, address) as log:
        rows = [row for row in log.read("a").to_pylist() if row["_transaction"] is not None]
        assert [(row["_change_type"], row["id"], row["v"], row["_order"]) for row in rows] == [
            ("insert", 11, None, 0),
            ("update_postimage", 1, "new", 1),
            ("delete", 2, None, 3),
            ("delete", 3, None, 4),
            ("insert", 30, "v3", 4),
        ]
        moved = [row for row in log.read("b").to_pylist() if row["_transaction"] is not None]
        assert [
            (row["_change_type"], row["x"], row["y"], row["v"], row["_order"]) for row in moved
        ] == [("delete", 1, "k", None, 2), ("insert", 2, "k", 5, 2)]
        assert (
            len(
                {
                    (row["_transaction"], row["_position"], row["_committed_at"], row["_timestamp"])
                    for row in [*rows, *moved]
                }
            )
            == 1
        )
        assert folded_columns(log, "a", "id", "v") == sorted(postgres.query("SELECT * FROM a"))


def test_truncation_deletes_every_row(postgres: Postgres, address: str) -> None:
    postgres.do(
        "CREATE TABLE a (id int PRIMARY KEY)", "INSERT INTO a SELECT generate_series(1, 10)"
    )
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    postgres.do(
        "INSERT INTO a VALUES (20)",
        "DELETE FROM a WHERE id = 5",
        "TRUNCATE a",
        "INSERT INTO a VALUES (7)",
    )
    with caught_up(capture, address) as log:
        assert folded_columns(log, "a", "id") == [(7,)]
        deleted = [
            row["id"] for row in log.read("a").to_pylist() if row["_change_type"] == "delete"
        ]
        assert sorted(deleted) == [*range(1, 11), 20]


def test_large_values_that_did_not_change(postgres: Postgres, address: str) -> None:
    postgres.do(
        "CREATE TABLE docs (id int PRIMARY KEY, n int, doc text)",
        "ALTER TABLE docs ALTER doc SET STORAGE EXTERNAL",
    )
    postgres.do("INSERT INTO docs VALUES (1, 0, repeat('a', 5000))")
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    postgres.do(
        "UPDATE docs SET n = 1",
        "INSERT INTO docs VALUES (2, 0, repeat('b', 5000))",
        "UPDATE docs SET n = 9 WHERE id = 2",
        "UPDATE docs SET id = 3 WHERE id = 2",
    )
    with caught_up(capture, address) as log:
        unknown, _, known, _, moved = [
            row for row in log.read("docs").to_pylist() if row["_transaction"] is not None
        ]
        assert (unknown["n"], unknown["doc"], unknown["_marks"]) == (
            1,
            None,
            '{"doc": {"unchanged": true}}',
        )
        assert (known["n"], known["doc"], known["_marks"]) == (9, "b" * 5000, None)
        assert (moved["id"], moved["doc"]) == (3, "b" * 5000)
        assert folded_columns(log, "docs", "id", "n", "doc") == sorted(
            postgres.query("SELECT * FROM docs")
        )
    postgres.do("ALTER TABLE docs REPLICA IDENTITY FULL", "UPDATE docs SET n = 2 WHERE id = 1")
    with caught_up(capture, address) as log:
        last = log.read("docs").to_pylist()[-1]
        assert (last["n"], last["doc"], last["_marks"]) == (2, "a" * 5000, None)


def test_full_identity_gives_preimages_and_does_without_a_key(
    postgres: Postgres, address: str
) -> None:
    postgres.do(
        "CREATE TABLE keyless (a int, b text)",
        "ALTER TABLE keyless REPLICA IDENTITY FULL",
        "INSERT INTO keyless SELECT i, NULL FROM generate_series(1, 7) i",
    )
    postgres.do(
        "CREATE TABLE keyed (a int PRIMARY KEY, b text)",
        "ALTER TABLE keyed REPLICA IDENTITY FULL",
        "INSERT INTO keyed VALUES (1, 'x')",
    )
    capture = postgres_capture(postgres, preimages=True, chunk_rows=3)
    caught_up(capture, address).close()
    postgres.do(
        "UPDATE keyless SET b = 'y' WHERE a = 1",
        "DELETE FROM keyless WHERE a = 2",
        "UPDATE keyed SET b = 'z'",
        "DELETE FROM keyed",
    )
    with caught_up(capture, address) as log:
        assert sorted(folded_columns(log, "keyless", "a", "b"), key=repr) == sorted(
            postgres.query("SELECT * FROM keyless"), key=repr
        )
        rows = log.read("keyed").to_pylist()
        assert [(row["_change_type"], row["b"]) for row in rows] == [
            ("insert", "x"),
            ("update_preimage", "x"),
            ("update_postimage", "z"),
            ("delete", "z"),
        ]


def test_columns_are_added_dropped_renamed_and_retyped(postgres: Postgres, address: str) -> None:
    postgres.do(
        "CREATE TABLE t (id int PRIMARY KEY, a int, b text)",
        "INSERT INTO t SELECT i, i, 'b' FROM generate_series(1, 5) i",
    )
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    postgres.do(
        "UPDATE t SET a = 10 WHERE id = 1",
        "ALTER TABLE t ADD COLUMN c int DEFAULT 7",
        "INSERT INTO t VALUES (6, 6, 'b', 8)",
        "ALTER TABLE t DROP COLUMN b",
    )
    with caught_up(capture, address) as log:
        assert folded_columns(log, "t", "id", "a", "c") == sorted(
            postgres.query("SELECT id, a, c FROM t")
        )
        assert {row["b"] for row in fold(log, "t").to_pylist()} == {None}
    postgres.do(
        "ALTER TABLE t RENAME COLUMN a TO amount",
        "ALTER TABLE t ALTER COLUMN c TYPE text",
        "UPDATE t SET c = 'text' WHERE id = 2",
    )
    with caught_up(capture, address) as log:
        assert folded_columns(log, "t", "id", "amount", "c__string") == sorted(
            postgres.query("SELECT id, amount, c FROM t")
        )
    postgres.do("ALTER TABLE t ADD COLUMN quiet int DEFAULT 1")  # and no row changes
    with caught_up(capture, address) as log:
        assert folded_columns(log, "t", "id", "quiet") == sorted(
            postgres.query("SELECT id, quiet FROM t")
        )


def test_partitions_are_one_table_and_messages_a_topic(postgres: Postgres, address: str) -> None:
    postgres.do(
        "CREATE TABLE p (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20)",
        "INSERT INTO p SELECT i, 'v' FROM generate_series(5, 14) i",
    )
    capture = postgres_capture(postgres, prefix="db.")
    caught_up(capture, address).close()
    postgres.do(
        "UPDATE p SET id = 15 WHERE id = 5",
        "SELECT pg_logical_emit_message(true, 'audit', 'somebody')",
    )
    with caught_up(capture, address) as log:
        assert folded_columns(log, "db.p", "id", "v") == sorted(postgres.query("SELECT * FROM p"))
        assert [
            (row["prefix"], row["content"]) for row in log.read("db.logical_messages").to_pylist()
        ] == [("audit", b"somebody")]
        assert log.topics() == ["db.logical_messages", "db.p"]


def test_a_large_transaction_is_one(
    postgres: Postgres, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cdc.postgres_source.source.MAX_MESSAGES", 1000)
    postgres.do("CREATE TABLE big (id int PRIMARY KEY, v text)")
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    postgres.do(
        "INSERT INTO big SELECT i, repeat('x', 1000) FROM generate_series(1, 20000) i",
        "UPDATE big SET v = 'y' WHERE id % 2 = 0",
    )
    with caught_up(capture, address) as log:
        rows = log.read("big").to_table()
        assert rows.num_rows == 30_000
        assert len(set(rows["_timestamp"].to_pylist())) == 1
        assert rows["_order"].to_pylist() == list(range(30_000))


def test_columns_that_change_inside_a_large_transaction(
    postgres: Postgres, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cdc.postgres_source.source.MAX_MESSAGES", 1000)
    postgres.do(
        "CREATE TABLE big (id int PRIMARY KEY, v text)", "INSERT INTO big VALUES (0, 'first')"
    )
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    postgres.do(
        "INSERT INTO big SELECT i, repeat('x', 1000) FROM generate_series(1, 15000) i",
        "ALTER TABLE big ADD COLUMN c int DEFAULT 5",
        "INSERT INTO big SELECT i, repeat('y', 1000), 6 FROM generate_series(20000, 25000) i",
    )
    with caught_up(capture, address) as log:
        assert folded_columns(log, "big", "id", "v", "c") == sorted(
            postgres.query("SELECT * FROM big")
        )
        stream = [
            row
            for row in log.read("big", columns=["_transaction", "_timestamp"]).to_pylist()
            if row["_transaction"] is not None
        ]
        assert len(stream) == 20_001
        assert len({row["_timestamp"] for row in stream}) == 1


def test_an_idle_database_holds_no_wal(
    postgres: Postgres, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cdc.postgres_source.source.HEARTBEAT_S", 0.2)
    postgres.do("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE other (id int PRIMARY KEY)")
    from threading import Event, Thread

    capture, stop, seen = postgres_capture(postgres, tables=["a"]), Event(), []
    running = Thread(
        target=capture.run,
        kwargs={
            "log": address,
            "stop": stop,
            "on_status": lambda status: seen.append(dict(status.source)),
        },
    )
    running.start()
    try:
        wait_until(lambda: bool(seen))
        postgres.do("INSERT INTO other SELECT generate_series(1, 1000)")
        ((end,),) = postgres.query("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn")
        wait_until(
            lambda: postgres.query(
                f"SELECT confirmed_flush_lsn - '0/0'::pg_lsn >= {end} FROM pg_replication_slots"
                f" WHERE database = '{postgres.name}'"
            )[0][0]
        )
    finally:
        stop.set()
        running.join(30)
    assert {"wal_status", "retained_bytes", "behind_bytes"} <= set(seen[0])
    caught_up(capture, address).close()  # and it goes on from there
