"""What of a Postgres database is captured, and when: columns, rows, topics, snapshots; somebody
else's publication and slot; topics about schema changes and transactions.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.cdc.capture import CaptureStatus
from headrace.cdc.state import PAUSE, RESUME, request_snapshot
from headrace.errors import ConfigurationError, InputError, RetryError
from headrace.log.capture_reports import read_capture_reports
from headrace.serve.metrics import render_metrics
from headrace.serve.stores import ViewStores
from tests.cdc.captures import caught_up, folded_columns, postgres_capture, running
from tests.cdc.conftest import Postgres
from tests.waits import wait_until

CUSTOMERS = (
    "CREATE TABLE customers (id int PRIMARY KEY, email text, phone text, password text, age int)",
    "INSERT INTO customers VALUES (1, 'a@b.c', '123', 'secret1', 30)",
    "INSERT INTO customers VALUES (2, NULL, '456', 'secret2', 17)",
    "INSERT INTO customers VALUES (3, 'a@b.c', NULL, 'secret3', 40)",
)


def sha(text: str) -> str:
    return hashlib.sha256(("salt" + text).encode()).hexdigest()


def test_columns_are_left_out_masked_and_hashed_and_rows_filtered(
    postgres: Postgres, address: str
) -> None:
    postgres.do(*CUSTOMERS, "CREATE TABLE orders (id int PRIMARY KEY, password text, n int)")
    capture = postgres_capture(
        postgres,
        exclude=["*.password"],
        hash=["customers.email"],
        salt="salt",
        mask={"customers.phone": "***"},
        where={"customers": "age >= 18"},
        include=["public.orders.n"],
        topic="{schema}.{table}.changes",
    )
    caught_up(capture, address).close()
    postgres.do(
        "UPDATE customers SET age = 18, password = 'secret4' WHERE id = 2",
        "UPDATE customers SET age = 10 WHERE id = 3",
        "INSERT INTO customers VALUES (4, 'x', 'secret5', 'secret6', 5)",
        "INSERT INTO orders VALUES (1, 'secret7', 1)",
    )
    with caught_up(capture, address) as log:
        assert log.topics() == ["public.customers.changes", "public.orders.changes"]
        topic = "public.customers.changes"
        assert folded_columns(log, topic, "id", "email", "phone", "age") == [
            (1, sha("a@b.c"), "***", 30),
            (2, None, "***", 18),
        ]
        assert "password" not in log.topic(topic).arrow_schema.names
        assert folded_columns(log, "public.orders.changes", "id", "n") == [(1, 1)]
        assert "secret" not in str(log.read(topic).to_pylist())
    caught_up(postgres_capture(postgres, topic=capture.topic), address).close()
    with hr.open_log(address) as log:
        expected = sorted(postgres.query("SELECT id, password, age FROM customers"))
        assert folded_columns(log, topic, "id", "password", "age") == expected


def test_marks_do_not_show_what_is_hidden(postgres: Postgres, address: str) -> None:
    postgres.do("CREATE TABLE t (id int PRIMARY KEY, a numeric(9,2), b numeric(9,2), c date)")
    postgres.do("INSERT INTO t VALUES (1, 'NaN', 'NaN', 'infinity')")
    capture = postgres_capture(postgres, exclude=["t.a"], mask={"t.b": "-"})
    caught_up(capture, address).close()
    postgres.do("INSERT INTO t VALUES (2, 'NaN', 'NaN', 'infinity')")
    with caught_up(capture, address) as log:
        rows = log.read("t").to_pylist()
        assert [row["_marks"] for row in rows] == ['{"c": {"text": "infinity"}}'] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exclude": ["customers.pasword"]}, "did you mean 'password'"),
        ({"exclude": ["custmers.password"]}, "did you mean 'public.customers'"),
        ({"mask": {"customers.id": "x"}}, "part of the key"),
        ({"where": {"customers": "age +"}}, "age"),
        ({"where": {"customers": "age + 1"}}, "cannot be|can compute"),
    ],
)
def test_rules_that_would_hide_nothing_are_refused(
    postgres: Postgres, address: str, settings: dict[str, Any], message: str
) -> None:
    postgres.do(*CUSTOMERS)
    with pytest.raises(ConfigurationError, match=message):
        postgres_capture(postgres, **settings).run(log=address, until_caught_up=True)


def test_settings_that_cannot_be_read_are_refused_when_they_are_declared() -> None:
    for settings in (
        {"exclude": ["password"]},
        {"snapshot": "sometimes"},
        {"topic": "{database}"},
    ):
        with pytest.raises(InputError):
            hr.cdc.postgres("postgresql://x/y", **settings)


def test_a_renamed_column_was_captured_without_its_mask(postgres: Postgres, address: str) -> None:
    postgres.do(*CUSTOMERS)
    capture = postgres_capture(postgres, exclude=["customers.password"])
    caught_up(capture, address).close()
    postgres.do("ALTER TABLE customers RENAME password TO pass")
    postgres.do("UPDATE customers SET pass = 'secret9' WHERE id = 1")
    seen: list[CaptureStatus] = []
    capture.run(log=address, until_caught_up=True, on_status=seen.append)
    assert "may have been renamed" in seen[-1].stopped["public.customers"]
    with hr.open_log(address) as log:
        assert "secret" not in str(log.read("customers").to_pylist())


def test_a_condition_on_a_value_that_was_not_sent_stops_the_table(
    postgres: Postgres, address: str
) -> None:
    postgres.do(
        "CREATE TABLE docs (id int PRIMARY KEY, n int, doc text)",
        "ALTER TABLE docs ALTER doc SET STORAGE EXTERNAL",
        "INSERT INTO docs VALUES (1, 0, repeat('a', 5000))",
    )
    capture = postgres_capture(postgres, where={"docs": "doc <> 'b'"})
    caught_up(capture, address).close()
    postgres.do("UPDATE docs SET n = 1")
    seen: list[CaptureStatus] = []
    capture.run(log=address, until_caught_up=True, on_status=seen.append)
    assert "REPLICA IDENTITY FULL" in seen[-1].stopped["public.docs"]
    postgres.do("ALTER TABLE docs REPLICA IDENTITY FULL")
    with hr.open_log(address) as log:
        request_snapshot(log, capture.name, ["docs"])
    postgres.do("UPDATE docs SET n = 2")
    with caught_up(capture, address) as log:
        assert folded_columns(log, "docs", "id", "n") == [(1, 2)]


# Snapshots


def test_snapshots_never_and_only(postgres: Postgres, address: str) -> None:
    postgres.do("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    never = postgres_capture(postgres, snapshot="never", prefix="never.")
    caught_up(never, address).close()
    postgres.do("INSERT INTO t VALUES (2)")
    with caught_up(never, address) as log:
        assert folded_columns(log, "never.t", "id") == [(2,)]
    only = hr.cdc.postgres(postgres.url, name="only", snapshot="only", prefix="only.")
    only.run(log=address)
    with hr.open_log(address) as log:
        assert folded_columns(log, "only.t", "id") == [(1,), (2,)]
    postgres.do("DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (3)")
    only.run(log=address)
    with hr.open_log(address) as log:
        assert folded_columns(log, "only.t", "id") == [(2,), (3,)]
    slots = f"SELECT slot_name FROM pg_replication_slots WHERE database = '{postgres.name}'"
    assert postgres.query(slots) == [(f"headrace_{postgres.name}",)]


def test_a_snapshot_is_taken_when_needed(postgres: Postgres, address: str) -> None:
    postgres.do("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)")
    capture = postgres_capture(postgres, snapshot="when_needed")
    caught_up(capture, address).close()
    postgres.do(f"SELECT pg_drop_replication_slot('headrace_{postgres.name}')")
    postgres.do("DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (3)")
    with caught_up(capture, address) as log:
        assert folded_columns(log, "t", "id") == [(2,), (3,)]


def test_rows_of_a_condition_are_read_again_and_snapshots_are_paused(
    postgres: Postgres, address: str
) -> None:
    postgres.do(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, 'v' FROM generate_series(1, 100) i",
    )
    capture, seen = postgres_capture(postgres, chunk_rows=10), list[CaptureStatus]()
    caught_up(capture, address).close()
    with hr.open_log(address) as log:
        request_snapshot(log, capture.name, action=PAUSE)
        request_snapshot(log, capture.name, ["t"], condition="id > 95")
        request_snapshot(log, capture.name, ["t"], condition="nonsense")
        with running(capture, address, seen):
            wait_until(lambda: bool(seen) and seen[-1].is_paused)
            postgres.do("INSERT INTO t VALUES (101, 'streamed')")
            wait_until(lambda: log.read("t").to_table().num_rows == 101)
            request_snapshot(log, capture.name, action=RESUME)
            wait_until(lambda: bool(seen) and not seen[-1].is_paused and not seen[-1].snapshots)
        assert log.read("t").to_table().num_rows == 107
        assert folded_columns(log, "t", "id", "v") == sorted(postgres.query("SELECT * FROM t"))


# Somebody else's publication and slot


def test_a_publication_and_a_slot_are_used_as_they_are(postgres: Postgres, address: str) -> None:
    slot = f"dba_{postgres.name}"
    postgres.do(
        "CREATE TABLE t (id int PRIMARY KEY, v text, secret text)",
        "CREATE TABLE other (id int PRIMARY KEY)",
        "INSERT INTO t SELECT i, 'v', 'secret' FROM generate_series(1, 6) i",
        'CREATE PUBLICATION "the dba\'s" FOR TABLE t (id, v) WHERE (id > 3)',
    )
    postgres.do(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    capture = postgres_capture(postgres, publication="the dba's", slot=slot, chunk_rows=2)
    caught_up(capture, address).close()
    postgres.do("UPDATE t SET id = id - 3", "INSERT INTO t VALUES (10, 'w', 'secret')")
    with caught_up(capture, address) as log:
        assert log.topics() == ["t"]
        assert folded_columns(log, "t", "id", "v") == [(10, "w")]
        assert "secret" not in log.topic("t").arrow_schema.names
    assert capture.remove() == []
    assert postgres.query("SELECT pubname FROM pg_publication") == [("the dba's",)]
    with pytest.raises(ConfigurationError, match="not in the publication"):
        postgres_capture(
            postgres, tables=["other"], publication="the dba's", slot=slot, prefix="x."
        ).run(log=address + "2", until_caught_up=True)
    postgres.do("ALTER PUBLICATION \"the dba's\" SET (publish = 'insert')")
    with pytest.raises(ConfigurationError, match="does not publish all changes"):
        capture.run(log=address, until_caught_up=True)


# Topics about the capture


def test_schema_changes_and_transactions_have_topics(postgres: Postgres, address: str) -> None:
    postgres.do("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    capture = postgres_capture(postgres, schema_topic="ddl", transaction_topic="transactions")
    caught_up(capture, address).close()
    postgres.do(
        "INSERT INTO t VALUES (1), (2)",
        "INSERT INTO u VALUES (1)",
        "UPDATE t SET id = 3 WHERE id = 2",
    )
    postgres.do("ALTER TABLE t ADD COLUMN n int", "INSERT INTO t VALUES (9, 9)")
    with caught_up(capture, address) as log:
        changes = [row for row in log.read("ddl").to_pylist() if row["before"] is not None]
        assert [(row["table"], row["topic"], json.loads(row["columns"])) for row in changes] == [
            ("public.t", "t", [["id", "INT"], ["n", "INT"]])
        ]
        rows = log.read("transactions").to_pylist()
        assert [(row["changes"], json.loads(row["tables"])) for row in rows] == [
            (4, {"public.t": 3, "public.u": 1}),
            (1, {"public.t": 1}),
        ]
        changed = next(row for row in log.read("t").to_pylist() if row["_transaction"])
        assert rows[0]["transaction"] == changed["_transaction"]
        assert rows[0]["committed_at"] == changed["_committed_at"]


def test_a_capture_reports_to_the_log(postgres: Postgres, address: str, tmp_path: Path) -> None:
    postgres.do("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)")
    with caught_up(postgres_capture(postgres), address) as log:
        report = read_capture_reports(log)[postgres.name]
        assert (report["rows"], report["lag_seconds"], report["stopped"]) == (2, 0.0, {})
        assert report["retained_bytes"] >= 0
        metrics = render_metrics(ViewStores(tmp_path), 0, log)
    assert f'headrace_capture_rows_total{{capture="{postgres.name}"}} 2' in metrics
    assert f'headrace_capture_stopped_tables{{capture="{postgres.name}"}} 0' in metrics
    assert "headrace_capture_retained_bytes" in metrics


# A database that is away


def test_a_capture_that_was_to_catch_up_waited_for_ever_for_a_host_that_is_not_there(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cdc.capture.CATCH_UP_PATIENCE_S", 0.5)
    with pytest.raises(RetryError, match="cannot be reached"):
        hr.cdc.postgres("postgresql://x@127.0.0.1:1/y").run(log=address, until_caught_up=True)
