"""A capture of SQLite that is killed again and again, during snapshot and stream: the topics equal
the tables, and no transaction was cut or doubled.
"""

import sqlite3
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from tests.cdc.workload import (
    CaptureProcess,
    Database,
    Workload,
    assert_equal_to_tables,
    assert_nothing_twice,
    assert_transactions_whole,
    kill_again_and_again,
    rows_of,
)
from tests.waits import wait_until

pytestmark = pytest.mark.process


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_at_random(tmp_path: Path, kills: int) -> None:
    path, address = tmp_path / "shop.db", f"file:{tmp_path / 'log'}"

    def connect() -> Any:
        return sqlite3.connect(path, timeout=30)

    database = Database(connect)
    connect().execute("PRAGMA journal_mode = WAL").connection.close()
    database.create()
    file = tmp_path / "captured.py"
    file.write_text(f"import headrace as hr\nshop = hr.cdc.sqlite({str(path)!r}, chunk_rows=20)\n")
    workload = Workload(database, seed=kills).start()
    kill_again_and_again(file, address, kills, seed=kills)
    workload.stop()
    CaptureProcess(file, address, "--until-caught-up").finish()
    with hr.open_log(address) as log:
        assert_equal_to_tables(log, database)
        assert assert_transactions_whole(log) >= kills
        for topic in ("accounts", "orders"):
            assert_nothing_twice(log, topic)


def test_sigterm_ends_it_cleanly(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    database = Database(lambda: sqlite3.connect(path, timeout=30))
    database.create()
    file = tmp_path / "captured.py"
    file.write_text(f"import headrace as hr\nshop = hr.cdc.sqlite({str(path)!r})\n")
    address = f"file:{tmp_path / 'log'}"
    process = CaptureProcess(file, address)
    wait_until(lambda: (tmp_path / "log").exists() and rows_of(address, "orders") == 200)
    assert process.end() == 0
