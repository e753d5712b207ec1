"""A random workload on two tables of any database, and the checks that hold a capture of it to its
promises. Transfers keep the sum of all balances, whole or not at all.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import headrace as hr
from headrace.cdc.topics import fold
from tests.servers.database_server import DatabaseServer

ACCOUNTS, BALANCE = 20, 100


@dataclass
class Database:
    """A connection, and how its driver wants parameters written."""

    connect: Callable[[], Any]
    mark: str = "?"
    text: str = "TEXT"
    double: str = "DOUBLE PRECISION"

    def run(self, cursor: Any, sql: str, *values: Any) -> None:
        cursor.execute(sql.replace("?", self.mark), values)

    def create(self) -> None:
        connection = self.connect()
        cursor = connection.cursor()
        self.run(
            cursor,
            f"CREATE TABLE accounts (id INTEGER PRIMARY KEY, owner {self.text}, balance INTEGER NOT"
            " NULL)",
        )
        self.run(
            cursor,
            "CREATE TABLE orders (shop INTEGER NOT NULL, number INTEGER NOT NULL, note"
            f" {self.text}, amount {self.double}, PRIMARY KEY (shop, number))",
        )
        for number in range(ACCOUNTS):
            self.run(
                cursor, "INSERT INTO accounts VALUES (?, ?, ?)", number, f"owner {number}", BALANCE
            )
        for number in range(200):
            self.run(
                cursor,
                "INSERT INTO orders VALUES (?, ?, ?, ?)",
                number % 3,
                number,
                None if number % 5 else "noted",
                number / 7,
            )
        connection.commit()
        connection.close()

    def rows(self, table: str) -> list[dict[str, Any]]:
        connection = self.connect()
        cursor = connection.cursor()
        cursor.execute(f"SELECT * FROM {table}")
        names = [column[0] for column in cursor.description]
        rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        connection.close()
        return rows


@dataclass
class Workload:
    """Runs in a thread until it is stopped."""

    database: Database
    seed: int
    pause_s: float = 0.002
    done: int = 0
    columns: int = 0
    ddl: bool = True
    tolerate: tuple[type[Exception], ...] = ()
    error: BaseException | None = None
    _stop: Event = field(default_factory=Event)
    _next: int = 1000

    def start(self) -> Workload:
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        chance = random.Random(self.seed)
        connection = None
        while not self._stop.is_set():
            try:
                connection = connection or self.database.connect()
                self._transaction(connection, chance)
                self.done += 1
            except self.tolerate:
                connection = None
                time.sleep(0.05)
            except BaseException as error:
                self.error = error
                return
            time.sleep(self.pause_s)
        if connection is not None:
            connection.close()

    def _transaction(self, connection: Any, chance: random.Random) -> None:
        cursor = connection.cursor()
        for _ in range(chance.randint(1, 4)):
            self._operation(cursor, chance)
        if chance.random() < 0.15:
            connection.rollback()
        else:
            connection.commit()
        if self.ddl and self.columns < 2 and self.done > 60 * (self.columns + 1):
            self.columns += 1
            self.database.run(
                cursor,
                f"ALTER TABLE orders ADD COLUMN extra{self.columns} INTEGER DEFAULT {self.columns}",
            )
            connection.commit()

    def _operation(self, cursor: Any, chance: random.Random) -> None:
        run, kind, number = self.database.run, chance.randint(0, 5), chance.randint(0, 199)
        if kind == 0:
            self._next += 1
            run(
                cursor,
                "INSERT INTO orders (shop, number, note, amount) VALUES (?, ?, ?, ?)",
                chance.randint(0, 2),
                self._next,
                "ü'\"\\\t" * chance.randint(0, 3),
                0.1,
            )
        elif kind == 1:
            run(
                cursor,
                "UPDATE orders SET amount = amount + ?, note = NULL WHERE number = ?",
                chance.random(),
                number,
            )
        elif kind == 2:
            run(cursor, "DELETE FROM orders WHERE number = ?", chance.randint(0, self._next))
        elif kind == 3:
            self._next += 1
            run(
                cursor,
                "UPDATE orders SET number = ? WHERE shop = 1 AND number = ?",
                self._next,
                number,
            )
        else:
            one, other = chance.sample(range(ACCOUNTS), 2)
            run(cursor, "UPDATE accounts SET balance = balance - 5 WHERE id = ?", one)
            run(cursor, "UPDATE accounts SET balance = balance + 5 WHERE id = ?", other)


def ordered(rows: list[dict[str, Any]]) -> list[tuple[tuple[str, Any], ...]]:
    return sorted((tuple(sorted(row.items())) for row in rows), key=repr)


def assert_equal_to_tables(log: hr.Log, database: Database, prefix: str = "") -> None:
    """The folded topics are the tables, column by column."""
    for table in ("accounts", "orders"):
        assert ordered(fold(log, prefix + table).to_pylist()) == ordered(database.rows(table)), (
            table
        )


def assert_transactions_whole(log: hr.Log, prefix: str = "") -> int:
    """At every commit of the log, once all accounts were there, the sum of their balances is what
    it always was. Returns how many commits were looked at.
    """
    balances: dict[int, int] = {}
    looked = 0
    rows = log.read(f"{prefix}accounts").to_pylist()
    for at, row in enumerate(rows):
        if row["_change_type"] == "update_preimage":
            continue
        balances[row["id"]] = row["balance"]
        is_commits_last = at + 1 == len(rows) or rows[at + 1]["_timestamp"] != row["_timestamp"]
        if is_commits_last and len(balances) == ACCOUNTS:
            assert sum(balances.values()) == ACCOUNTS * BALANCE, (
                f"a transaction was cut at offset {row['_offset']}"
            )
            looked += 1
    return looked


def assert_nothing_twice(log: hr.Log, topic: str) -> None:
    """Of one position, transaction and order there is one change (two if the key changed);
    snapshots apart.
    """
    seen: dict[tuple[Any, ...], int] = {}
    for row in log.read(topic).to_pylist():
        if row["_transaction"] is not None and row["_order"] is not None:
            position = (row["_position"], row["_transaction"], row["_order"], row["_change_type"])
            seen[position] = seen.get(position, 0) + 1
    assert [position for position, count in seen.items() if count > 1] == []


class CaptureProcess:
    """`headrace capture` in a process of its own."""

    def __init__(self, file: Path, log: str, *options: str) -> None:
        self.errors = file.with_suffix(".err")
        with self.errors.open("ab") as errors:
            command = [
                sys.executable,
                "-m",
                "headrace.cli",
                "capture",
                str(file),
                "--log",
                log,
                *options,
            ]
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)

    def kill(self) -> None:
        assert self.process.poll() is None, self.errors.read_text()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def finish(self) -> None:
        assert self.process.wait(120) == 0, self.errors.read_text()


def kill_again_and_again(
    file: Path, log: str, times: int, seed: int, *, longest_s: float = 0.5
) -> None:
    """Each process lives until it has brought something, and a random moment longer."""
    chance = random.Random(seed)
    for _ in range(times):
        before = rows_of(log, "accounts")
        process = CaptureProcess(file, log)
        await_rows(log, process, more_than=before)
        time.sleep(chance.random() * longest_s)
        process.kill()


def rows_of(log: str, topic: str) -> int:
    with hr.open_log(log) as opened:
        return sum(opened.end_offsets(topic).values()) if topic in opened.topics() else 0


def await_rows(log: str, process: CaptureProcess, *, more_than: int) -> None:
    deadline = time.monotonic() + 60
    while rows_of(log, "accounts") <= more_than:
        assert process.process.poll() is None, process.errors.read_text()
        assert time.monotonic() < deadline, "the capture brings nothing"
        time.sleep(0.02)


def restart_under(process: CaptureProcess, log: str, server: DatabaseServer) -> None:
    """The server goes and comes back while a capture is at work, which then goes on; and is
    killed.
    """
    await_rows(log, process, more_than=rows_of(log, "accounts"))
    server.stop_process()
    server.start_process()
    await_rows(log, process, more_than=rows_of(log, "accounts"))
    process.kill()
