"""The sink `duckdb`: the contract, tables that the user made, and other programs that use the
file.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

import headrace as hr
from headrace.errors import ConfigurationError, TargetMismatch, TargetUnavailable
from headrace.log.dead_letters import read_dead_letters
from headrace.testing.sink_contract import (
    SinkContract,
    account,
    assert_equal_to_log,
    caught_up,
    rows_of,
)


class TestDuckdb(SinkContract):
    @pytest.fixture
    def sink(self, tmp_path: Path) -> hr.sinks.Sink:
        return hr.sinks.duckdb(tmp_path / "target.duckdb")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "target.duckdb"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_table("accounts", "id BIGINT, name STRING, amount DECIMAL(12, 2)", key="id")
        with log.producer("accounts") as producer:
            producer.upsert([account(number, number) for number in range(40)])
        yield log


def test_rows_that_a_constraint_refuses_are_dead_lettered_once(log: hr.Log, path: Path) -> None:
    with duckdb.connect(path) as db:
        db.execute(
            "CREATE TABLE accounts (id BIGINT PRIMARY KEY, name VARCHAR,"
            " amount DECIMAL(12, 2) CHECK (amount < 500))"
        )
    sink = hr.sinks.duckdb(path)
    with log.producer("accounts") as producer:
        producer.upsert([account(number, 500) for number in (3, 17, 18)])
    assert caught_up(sink, log, "accounts").status.refused == 3
    assert [row["id"] for row in rows_of(sink, log, "accounts")] == [
        number for number in range(40) if number not in {3, 17, 18}
    ]
    with log.producer("accounts") as producer:
        producer.upsert([account(3, 7), account(4, 8)])
        producer.delete([5])
    assert caught_up(sink, log, "accounts").status.refused == 0
    dead_letters = read_dead_letters(log, "accounts.duckdb")
    assert [row["source_offset"] for row in dead_letters] == [40, 41, 42]
    assert all("CHECK constraint" in row["reason"] for row in dead_letters)


def test_a_delete_that_is_refused_takes_no_other_row_along(log: hr.Log, path: Path) -> None:
    sink = hr.sinks.duckdb(path)
    with duckdb.connect(path) as db:
        db.execute(
            "CREATE TABLE accounts (id BIGINT PRIMARY KEY, name VARCHAR, amount DECIMAL(12, 2))"
        )
        db.execute("CREATE TABLE cards (account BIGINT REFERENCES accounts (id))")
    caught_up(sink, log, "accounts")
    with duckdb.connect(path) as db:
        db.execute("INSERT INTO cards VALUES (7)")
    with log.producer("accounts") as producer:
        producer.delete([6, 7, 8])
        producer.upsert([account(100)])
    assert caught_up(sink, log, "accounts").status.refused == 1
    found = [row["id"] for row in rows_of(sink, log, "accounts")]
    assert found == [number for number in range(40) if number not in {6, 8}] + [100]
    (dead_letter,) = read_dead_letters(log, "accounts.duckdb")
    assert "foreign key" in dead_letter["reason"]


def test_others_can_use_the_file_between_commits(log: hr.Log, path: Path) -> None:
    sink = hr.sinks.duckdb(path)
    with sink.open(sink.shape_for(log.topic("accounts")), log) as target:
        target.prepare()
        target.begin(1)
        script = f"import duckdb; print(duckdb.connect({str(path)!r}).sql('FROM accounts'))"
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_file_that_another_process_keeps_open_is_tried_again(log: hr.Log, path: Path) -> None:
    script = f"import duckdb; db = duckdb.connect({str(path)!r}); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        sink = hr.sinks.duckdb(path)
        with (
            sink.open(sink.shape_for(log.topic("accounts")), log) as target,
            pytest.raises(TargetUnavailable, match=r"lock[\s\S]*no other program"),
        ):
            target.prepare()
        other.communicate(b"\n", timeout=60)
    caught_up(sink, log, "accounts")
    assert_equal_to_log(sink, log, "accounts")


def test_a_table_that_was_dropped_is_filled_again(log: hr.Log, path: Path) -> None:
    sink = hr.sinks.duckdb(path)
    caught_up(sink, log, "accounts")
    with duckdb.connect(path) as db:
        db.execute("DROP TABLE accounts")
    with pytest.raises(TargetMismatch, match="no table 'accounts'"):
        sink.check("accounts", log=log.address)
    assert caught_up(sink, log, "accounts").status.rows == 40
    assert_equal_to_log(sink, log, "accounts")


def test_a_column_of_another_type_is_refused(log: hr.Log, path: Path) -> None:
    with duckdb.connect(path) as db:
        db.execute("CREATE TABLE accounts (id INTEGER, name VARCHAR)")
    with pytest.raises(TargetMismatch, match=r"'id' of[\s\S]*INTEGER; the topic's is BIGINT"):
        caught_up(hr.sinks.duckdb(path), log, "accounts")


def test_a_file_that_is_no_database(log: hr.Log, path: Path) -> None:
    path.write_text("something else entirely" * 1000)
    with pytest.raises(ConfigurationError, match="not a DuckDB database"):
        caught_up(hr.sinks.duckdb(path), log, "accounts")


def test_a_file_that_is_not_there_cannot_be_compared(log: hr.Log, path: Path) -> None:
    with pytest.raises(TargetMismatch, match="no file"):
        hr.sinks.duckdb(path).check("accounts", log=log.address)
    assert not path.exists()
