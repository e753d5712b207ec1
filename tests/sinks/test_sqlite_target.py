"""The sink `sqlite`: the contract, tables that the user made, and faults that pass."""

import sqlite3
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import headrace as hr
from headrace.errors import ConfigurationError, InputError, TargetMismatch, TargetRefuses
from headrace.log.dead_letters import read_dead_letters, replay
from headrace.sinks import base as target_module
from headrace.sinks.sqlite_target import SqliteTarget
from headrace.sinks.sync import SinkLoop
from headrace.testing.sink_contract import (
    SinkContract,
    account,
    assert_equal_to_log,
    caught_up,
    rows_of,
)
from headrace.testing.strikes import StrikePoint, Struck, strike


class TestSqlite(SinkContract):
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "target.db"

    @pytest.fixture
    def sink(self, path: Path) -> hr.sinks.Sink:
        return hr.sinks.sqlite(path)

    def test_rows_that_a_constraint_refuses_are_dead_lettered_once(
        self, sink: hr.sinks.Sink, log: hr.Log, path: Path
    ) -> None:
        with sqlite3.connect(path) as db:
            db.execute(
                "CREATE TABLE accounts (id INTEGER PRIMARY KEY, name TEXT, amount TEXT CHECK"
                " (CAST(amount AS REAL) < 100))"
            )
        with log.producer("accounts") as producer:
            producer.upsert([account(n, 500 if n in {3, 17, 18} else n) for n in range(40)])
        status = caught_up(sink, log, "accounts").status
        assert (status.refused, status.upserts) == (3, 40)
        dead_letters = read_dead_letters(log, "accounts.sqlite")
        assert all(
            "CHECK constraint failed" in dead_letter["reason"] for dead_letter in dead_letters
        )
        assert len(dead_letters) == 3
        compared = sink.check("accounts", log=log.address)
        assert [(each.kind, each.key["id"]) for each in compared.examples] == [
            ("missing", 17),
            ("missing", 18),
            ("missing", 3),
        ]
        assert caught_up(sink, log, "accounts").status.rows == 0
        assert len(read_dead_letters(log, "accounts.sqlite")) == 3
        with pytest.raises(InputError, match=r"not of a topic[\s\S]*--start-over"):
            replay(log, "accounts.sqlite")

    def test_a_table_that_was_dropped_is_filled_again(
        self, sink: hr.sinks.Sink, log: hr.Log, path: Path
    ) -> None:
        with log.producer("accounts") as producer:
            producer.upsert([account(1), account(2)])
        caught_up(sink, log, "accounts")
        with sqlite3.connect(path) as db:
            db.execute("DROP TABLE accounts")
        with pytest.raises(TargetMismatch, match="no table 'accounts'"):
            sink.check("accounts", log=log.address)
        assert caught_up(sink, log, "accounts").status.rows == 2
        assert_equal_to_log(sink, log, "accounts")

    def test_a_file_that_is_no_database(self, sink: hr.sinks.Sink, log: hr.Log, path: Path) -> None:
        path.write_text("something else entirely, and long enough to be looked at" * 100)
        with pytest.raises(ConfigurationError, match="file is not a database"):
            caught_up(sink, log, "accounts")

    def test_when_nearly_all_is_refused_it_stops(
        self, sink: hr.sinks.Sink, log: hr.Log, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(target_module, "MAX_REFUSED", 5)
        with sqlite3.connect(path) as db:
            db.execute(
                "CREATE TABLE accounts (id INTEGER PRIMARY KEY, name TEXT CHECK (name = 'x'),"
                " amount TEXT)"
            )
        with log.producer("accounts") as producer:
            producer.upsert([account(n) for n in range(40)])
        with pytest.raises(TargetRefuses, match="refuses more than 5 rows[\\s\\S]*To fix"):
            caught_up(sink, log, "accounts")
        assert sink.check("accounts", log=log.address).positions == {}
        assert "accounts.sqlite.dead" not in log.topics()

    def test_a_target_without_table_key_or_column(
        self, sink: hr.sinks.Sink, log: hr.Log, path: Path
    ) -> None:
        modest = replace(sink, create=False)
        with pytest.raises(TargetMismatch, match=r"no table 'accounts'[\s\S]*CREATE TABLE"):
            caught_up(modest, log, "accounts")
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE accounts (id INTEGER, nam TEXT, amount TEXT)")
        with pytest.raises(TargetMismatch, match="no column 'name': did you mean 'nam'"):
            caught_up(modest, log, "accounts")
        with pytest.raises(TargetMismatch, match="CREATE UNIQUE INDEX"):
            caught_up(sink, log, "accounts")
        with sqlite3.connect(path) as db:
            db.execute("CREATE UNIQUE INDEX by_id ON accounts (id)")
        caught_up(sink, log, "accounts")
        assert_equal_to_log(sink, log, "accounts")

    def test_a_sync_waits_for_a_target_to_come_back(
        self, log: hr.Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory = tmp_path / "later"
        sink = hr.sinks.sqlite(directory / "target.db")
        with log.producer("accounts") as producer:
            producer.upsert([account(1)])
        errors: list[str | None] = []
        syncing = SinkLoop(
            sink, log, "accounts", on_status=lambda status: errors.append(status.error)
        )
        thread = threading.Thread(target=syncing.run, kwargs={"until_caught_up": True})
        thread.start()
        deadline = time.monotonic() + 20
        while not errors and time.monotonic() < deadline:
            time.sleep(0.01)
        directory.mkdir()
        thread.join(20)
        assert errors[0] is not None
        assert "unable to open database file" in errors[0]
        assert syncing.status.error is None
        assert_equal_to_log(sink, log, "accounts")

    def test_dead_letters_are_not_doubled_by_a_commit_that_fails(
        self, sink: hr.sinks.Sink, log: hr.Log, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with sqlite3.connect(path) as db:
            db.execute(
                "CREATE TABLE accounts (id INTEGER PRIMARY KEY, name TEXT NOT NULL, amount TEXT)"
            )
        with log.producer("accounts") as producer:
            producer.upsert([{**account(1), "name": None}, account(2)])
        for _ in range(2):
            with monkeypatch.context() as patch:
                strike(patch, StrikePoint(SqliteTarget, "write_checkpoint", "before", 1))
                with pytest.raises(Struck):
                    caught_up(sink, log, "accounts")
        caught_up(sink, log, "accounts")
        assert [
            dead_letter["source_offset"]
            for dead_letter in read_dead_letters(log, "accounts.sqlite")
        ] == [0]
        assert [row["id"] for row in rows_of(sink, log, "accounts")] == [2]


def test_misspelt_settings_and_kinds() -> None:
    with pytest.raises(InputError, match="did you mean 'table'"):
        hr.sinks.sqlite("x.db", tabel="y")
    with pytest.raises(InputError, match="did you mean 'sqlite'"):
        hr.sinks.from_url("sqlit:x.db")
    with pytest.raises(InputError, match="did you mean 'merge'"):
        hr.sinks.sqlite("x.db", mode="merg")


def test_a_check_goes_on_past_values_that_are_not_of_the_column(tmp_path: Path) -> None:
    """It ended with the converter's error, whatever else was wrong."""
    sink = hr.sinks.sqlite(tmp_path / "target.db")
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_table("accounts", "id BIGINT, day DATE, amount DECIMAL(9, 2)", key="id")
        with log.producer("accounts") as producer:
            producer.upsert([{"id": number, "day": None, "amount": 1} for number in range(100)])
        caught_up(sink, log, "accounts")
        with sqlite3.connect(tmp_path / "target.db") as db:
            db.execute("UPDATE accounts SET day = 'some day' WHERE id = 7")
            db.execute("UPDATE accounts SET amount = 'much' WHERE id = 50")
            db.execute("DELETE FROM accounts WHERE id = 60")
        compared = sink.check("accounts", log=log.address)
        assert compared.counts == {"missing": 3, "extra": 0, "different": 0}
        assert compared.unreadable == 2
        assert [
            "some day" in compared.unreadable_examples[0],
            "much" in compared.unreadable_examples[1],
        ] == [True, True]


@pytest.mark.parametrize("kind", ["sqlite", "duckdb", "search"])
def test_a_url_of_an_object_store_is_no_path(kind: str) -> None:
    with pytest.raises(InputError, match=f"hr.sinks.{kind} cannot write to s3://bucket/x"):
        hr.sinks.from_url(f"{kind}:s3://bucket/x")
