"""A SQLite database, captured by triggers: snapshot and stream, columns that change, requests, and
what is refused.
"""

import sqlite3
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

import headrace as hr
from headrace.cdc.capture import CaptureLoop
from headrace.cdc.declaration import Capture
from headrace.cdc.sqlite_source import SqliteSource
from headrace.cdc.state import request_snapshot
from headrace.cdc.topics import fold
from headrace.errors import ConfigurationError, InputError, TransactionFenced
from headrace.log.file.log import FileLog
from headrace.testing.power_loss import FullDisk
from tests.cdc.captures import caught_up, do, folded, table
from tests.cdc.workload import rows_of
from tests.waits import wait_until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(
            "CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, price REAL, picture BLOB)"
        )
        db.executemany(
            "INSERT INTO items VALUES (?, ?, ?, ?)",
            [(n, f"item {n}", n / 3, bytes([n % 256])) for n in range(100)],
        )
    db.close()
    return path


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'log'}"


def test_snapshot_and_changes(path: Path, address: str) -> None:
    capture = hr.cdc.sqlite(path, chunk_rows=30)
    with caught_up(capture, address) as log:
        assert folded(log) == table(path)
    do(
        path,
        "UPDATE items SET name = 'new' WHERE id = 3",
        "DELETE FROM items WHERE id = 4",
        "UPDATE items SET id = 500 WHERE id = 5",
    )
    with caught_up(capture, address) as log:
        assert folded(log) == table(path)
        rows = log.read("items", start=100).to_pylist()
        assert [
            (row["id"], row["_change_type"], row["_position"], row["_order"]) for row in rows
        ] == [
            (3, "update_postimage", 1, 0),
            (4, "delete", 2, 1),
            (5, "delete", 3, 2),
            (500, "insert", 3, 2),
        ]
        assert len({row["_transaction"] for row in rows}) == 1
        assert all(row["_committed_at"] is not None for row in rows)
        assert len({row["_timestamp"] for row in rows}) == 1  # one commit


def test_preimages_are_there_if_asked_for(path: Path, address: str) -> None:
    capture = hr.cdc.sqlite(path, preimages=True, snapshot=False)
    caught_up(capture, address).close()
    do(path, "UPDATE items SET name = 'new' WHERE id = 3")
    with caught_up(capture, address) as log:
        rows = log.read("items").to_pylist()
        assert [(row["name"], row["_change_type"]) for row in rows] == [
            ("item 3", "update_preimage"),
            ("new", "update_postimage"),
        ]


def test_a_snapshot_goes_on_where_it_was(path: Path, address: str) -> None:
    """Stopped after its first chunk, the next run reads the others only."""
    stop = Event()
    capture = hr.cdc.sqlite(path, chunk_rows=10)
    seen: list[int] = []

    class Stopping(SqliteSource):
        def poll(self, timeout_s: float) -> Any:
            part = super().poll(timeout_s)
            seen.append(1)
            if len(seen) == 3:
                stop.set()
            return part

    stopping = Capture(
        name="shop",
        kind="sqlite",
        opener=lambda _: Stopping.open(str(path), "shop", ()),
        chunk_rows=10,
    )
    stopping.run(log=address, stop=stop)
    with hr.open_log(address) as log:
        before = sum(log.end_offsets("items").values())
        assert 0 < before < 100
    do(path, "UPDATE items SET name = 'changed' WHERE id % 7 = 0")
    with caught_up(capture, address) as log:
        assert folded(log) == table(path)
        inserted = [
            row["id"] for row in log.read("items").to_pylist() if row["_change_type"] == "insert"
        ]
        assert inserted == list(range(100))  # each once


def test_columns_come_are_renamed_and_are_filled(path: Path, address: str) -> None:
    capture = hr.cdc.sqlite(path)
    caught_up(capture, address).close()
    do(
        path,
        "UPDATE items SET name = 'waits' WHERE id = 1",
        "ALTER TABLE items ADD COLUMN stock INTEGER DEFAULT 7",
        "INSERT INTO items VALUES (900, 'a', 1, NULL, 8)",
    )
    with caught_up(capture, address) as log:
        assert log.topic("items").arrow_schema.names[-2:] == ["stock", "_change_type"]
        columns = ["id", "name", "price", "picture", "stock"]
        assert sorted(
            tuple(row[name] for name in columns) for row in fold(log, "items").to_pylist()
        ) == table(path)
        assert "waits" in [
            row["name"]
            for row in log.read("items").to_pylist()
            if row["_change_type"] == "update_postimage"
        ]
    do(path, "ALTER TABLE items RENAME COLUMN stock TO left_over")
    with caught_up(capture, address) as log:
        assert sorted(
            (row["id"], row["left_over"], row["stock"]) for row in fold(log, "items").to_pylist()
        ) == [(row[0], row[4], None) for row in table(path)]


def test_a_new_table_and_a_table_again_while_it_runs(path: Path, address: str) -> None:
    capture, stop = hr.cdc.sqlite(path), Event()
    running = Thread(target=capture.run, kwargs={"log": address, "stop": stop})
    running.start()
    try:
        wait_until(lambda: rows_of(address, "items") == 100)
        do(
            path,
            "CREATE TABLE more (id TEXT PRIMARY KEY, n INTEGER)",
            "INSERT INTO more VALUES ('a', 1), ('b', 2)",
        )
        wait_until(lambda: rows_of(address, "more") == 2)
        do(path, "UPDATE more SET n = 3 WHERE id = 'a'")
        wait_until(lambda: rows_of(address, "more") == 3)
        with hr.open_log(address) as log:
            request_snapshot(log, "shop", ["items"])
        wait_until(lambda: rows_of(address, "items") == 200)
    finally:
        stop.set()
        running.join(30)
    with hr.open_log(address) as log:
        assert folded(log) == table(path)
        assert folded(log, "more") == [("a", 3), ("b", 2)]


def test_values_that_do_not_fit_are_marked(path: Path, address: str) -> None:
    do(path, "INSERT INTO items VALUES (200, 7, 'no number', 'text')")
    with caught_up(hr.cdc.sqlite(path), address) as log:
        (row,) = [row for row in log.read("items").to_pylist() if row["id"] == 200]
        assert (row["name"], row["price"], row["picture"]) == ("7", None, None)
        assert row["_marks"] == '{"price": {"text": "no number"}, "picture": {"text": "text"}}'


def test_lost_changes_are_reported_and_a_new_snapshot_repairs_them(
    path: Path, address: str
) -> None:
    """Removed triggers saw nothing; starting over finds what came, what changed and what went."""
    capture = hr.cdc.sqlite(path)
    caught_up(capture, address).close()
    do(path, "UPDATE items SET name = 'seen' WHERE id = 1")
    caught_up(capture, address).close()
    assert len(capture.remove()) == 7
    do(
        path,
        "DELETE FROM items WHERE id = 2",
        "UPDATE items SET name = 'unseen' WHERE id = 3",
        "INSERT INTO items VALUES (300, 'unseen', 1, NULL)",
    )
    with pytest.raises(ConfigurationError, match="may be missing.*\n.*--start-over"):
        capture.run(log=address, until_caught_up=True)
    capture.run(log=address, until_caught_up=True, start_over=True)
    with hr.open_log(address) as log:
        assert folded(log) == table(path)
    do(path, "DELETE FROM items WHERE id = 10")
    with caught_up(capture, address) as log:
        assert folded(log) == table(path)


def test_a_trigger_that_was_dropped_is_noticed(
    path: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    capture = hr.cdc.sqlite(path)
    caught_up(capture, address).close()
    do(
        path,
        "DROP TRIGGER _headrace_items_delete",
        "DELETE FROM items WHERE id = 2",
        "UPDATE items SET name = 'seen' WHERE id = 3",
    )
    with caught_up(capture, address) as log:
        assert folded(log) == table(path)
    assert "Changes of items may have been missed" in caplog.text


def test_two_captures_of_one_database_wait_for_each_other(
    path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cdc.sqlite_source.PRUNE_INTERVAL_S", 0.0)
    one, two = (
        hr.cdc.sqlite(path, name="one", prefix="one."),
        hr.cdc.sqlite(path, name="two", prefix="two."),
    )
    for capture in (one, two):
        caught_up(capture, address).close()
    do(path, "UPDATE items SET name = 'changed' WHERE id = 1")
    caught_up(one, address).close()
    do(path, "DELETE FROM items WHERE id = 2")
    caught_up(one, address).close()
    with caught_up(two, address) as log:
        assert folded(log, "one.items") == folded(log, "two.items") == table(path)
        assert len(log.read("two.items").to_table()) == 102
    assert table(path, "_headrace_order") == []  # what both have is removed
    do(
        path,
        "ALTER TABLE items ADD COLUMN stock INTEGER DEFAULT 4",
        "UPDATE items SET name = 'later' WHERE id = 5",
    )
    for capture in (one, two):
        with caught_up(capture, address) as log:
            rows = [
                tuple(row[name] for name in ("id", "name", "price", "picture", "stock"))
                for row in fold(log, capture.prefix + "items").to_pylist()
            ]
            assert sorted(rows) == table(path)
    assert one.remove() == ["reader one"]
    assert len(two.remove()) == 7


def test_a_process_that_was_replaced_writes_nothing(path: Path, address: str) -> None:
    capture = hr.cdc.sqlite(path)
    with hr.open_log(address) as log:
        older = CaptureLoop(capture, log)
        capture.run(log=address, until_caught_up=True)
        do(path, "DELETE FROM items WHERE id = 2")
        with pytest.raises(TransactionFenced):
            older.run(until_caught_up=True)
        assert len(folded(log)) == 100


@pytest.mark.parametrize("room_bytes", [3_000, 20_000])
def test_a_full_disk_is_waited_for(path: Path, tmp_path: Path, room_bytes: int) -> None:
    disk, stop = FullDisk(1 << 30), Event()
    log = FileLog.open(tmp_path / "log", disk=disk)
    failures: list[int] = []
    capturing = CaptureLoop(
        hr.cdc.sqlite(path, chunk_rows=10),
        log,
        on_status=lambda status: failures.append(status.failures),
    )
    disk.room_bytes = room_bytes
    running = Thread(target=capturing.run, kwargs={"stop": stop})
    running.start()
    try:
        wait_until(lambda: any(failures))
        do(path, "UPDATE items SET name = 'meanwhile' WHERE id % 3 = 0")
        disk.room_bytes = 1 << 30
        wait_until(
            lambda: (
                not capturing.status.failures
                and not capturing.status.snapshots
                and "items" in log.topics()
                and folded(log) == table(path)
            )
        )
    finally:
        stop.set()
        running.join(30)
    assert capturing.status.rows == log.end_offsets("items")[0]  # what was given up is not counted
    log.close()


def test_a_large_transaction_in_parts(
    path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cdc.sqlite_source.MAX_PART_CHANGES", 1000)
    capture = hr.cdc.sqlite(path, snapshot=False)
    caught_up(capture, address).close()
    with sqlite3.connect(path) as db:
        db.executemany(
            "INSERT INTO items VALUES (?, ?, ?, ?)",
            [(n, "x" * 1000, 1.0, b"") for n in range(1000, 21000)],
        )
    db.close()
    with caught_up(capture, address) as log:
        rows = log.read("items").to_table()
        assert rows.num_rows == 20_000
        assert len(set(rows["_timestamp"].to_pylist())) == 1
        assert rows["id"].to_pylist() == list(range(1000, 21000))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: hr.cdc.sqlite(path.with_name("none.db")), "There is no SQLite database"),
        (lambda path: hr.cdc.sqlite(path, tables=["itmes"]), "did you mean 'items'"),
        (lambda path: hr.cdc.sqlite(path, tables=["keyless"]), "no primary key"),
        (lambda path: hr.cdc.sqlite(__file__), "not an intact SQLite database"),
    ],
)
def test_a_table_that_cannot_be_captured_is_refused_with_the_reason(
    path: Path, address: str, make: Any, reason: str
) -> None:
    do(path, "CREATE TABLE keyless (a, b)")
    with pytest.raises(ConfigurationError, match=reason):
        make(path).run(log=address, until_caught_up=True)


def test_a_table_that_nobody_named_and_that_has_no_key_is_left_out(
    path: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    do(path, "CREATE TABLE keyless (a, b)")
    with caught_up(hr.cdc.sqlite(path), address) as log:
        assert log.topics() == ["items"]
    assert "keyless is not captured" in caplog.text


def test_a_declaration_is_checked() -> None:
    with pytest.raises(InputError, match="did you mean 'prefix'"):
        hr.cdc.sqlite("x.db", prefx="a")
    with pytest.raises(InputError, match=r"tables=\['orders'\]"):
        hr.cdc.sqlite("x.db", tables="orders")
    with pytest.raises(InputError, match="sqlite"):
        hr.cdc.from_url("sqlit:x.db")


def test_a_topic_of_another_kind_is_left_alone(path: Path, address: str) -> None:
    with hr.open_log(address) as log:
        log.create_topic("items", "a STRING")
    with pytest.raises(ConfigurationError, match="another prefix"):
        hr.cdc.sqlite(path).run(log=address, until_caught_up=True)
    with caught_up(hr.cdc.sqlite(path, prefix="shop."), address) as log:
        assert folded(log, "shop.items") == table(path)
