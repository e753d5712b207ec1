"""Random DDL and DML on several tables of a MariaDB, while the capture is killed again and again:
in the end each topic is what its table is.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

import headrace as hr
from headrace.cdc.topics import fold
from tests.cdc.conftest import Mariadb
from tests.cdc.workload import CaptureProcess
from tests.servers.mariadb_server import MariadbServer
from tests.waits import wait_until

SIMPLE = "(id int PRIMARY KEY, a int, b varchar(20))"
TABLES = {
    "plain": SIMPLE,
    "swapped": SIMPLE,
    "texts": (
        "(id varbinary(8), n int, a int, b varchar(20) CHARACTER SET utf16, PRIMARY KEY (n, id))"
    ),
    "parts": f"{SIMPLE} PARTITION BY HASH (id) PARTITIONS 3",
    "history": f"{SIMPLE} WITH SYSTEM VERSIONING",
    "parents": SIMPLE,
    "children": (
        "(id int PRIMARY KEY, a int, b varchar(20), FOREIGN KEY (a) REFERENCES parents (id)"
        " ON DELETE CASCADE ON UPDATE CASCADE)"
    ),
}
BLOCKED = {
    *(1050, 1051, 1054, 1060, 1061, 1062, 1091, 1146, 1205, 1213),
    *(1217, 1451, 1452, 1397, 1402, 1505, 1507, 1508, 1515, 1516, 1701, 1735, 1968, 4119),
}
"""What a random statement may run into: double keys, what does not exist, locks, foreign keys."""


class Chaos:
    """Changes the tables at random, in a thread. Nothing of it depends on the capture."""

    def __init__(self, database: Mariadb, seed: int) -> None:
        self.database = database
        self.chance = random.Random(seed)
        self.done: dict[str, int] = {}
        self.error: BaseException | None = None
        self._stopped = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._xa: list[str] = []
        self._number = 0

    def start(self) -> "Chaos":
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(60)
        connection = self.connect()
        while self._xa:
            self.run(connection, f"XA COMMIT '{self._xa.pop()}'")
        connection.close()
        if self.error is not None:
            raise self.error

    def connect(self) -> Any:
        connection = self.database.connect(autocommit=True)
        connection.cursor().execute("SET lock_wait_timeout = 1, innodb_lock_wait_timeout = 1")
        connection.cursor().execute("SET sql_mode = '', system_versioning_alter_history = KEEP")
        return connection

    def _run(self) -> None:
        try:
            connection = self.connect()
            while not self._stopped.is_set():
                self.step(connection)
                time.sleep(0.01)
            connection.close()
        except BaseException as error:
            self.error = error

    def run(self, connection: Any, *statements: str) -> bool:
        """Run statements up to the first one that fails. Returns whether none did."""
        import pymysql

        for statement in statements:
            try:
                connection.cursor().execute(statement)
            except pymysql.err.MySQLError as error:
                if error.args[0] not in BLOCKED:
                    raise
                return False
        return True

    def step(self, connection: Any) -> None:
        kinds: list[tuple[int, Callable[[Any], None]]] = [
            (40, self._transaction),
            (3, self._truncate),
            (3, self._alter),
            (3, self._by_statement),
            (2, self._incomplete),
            (3, self._replace),
            (3, self._partition),
            (4, self._xa_transaction),
            (1, self._flush),
        ]
        weights = [weight for weight, _ in kinds]
        (kind,) = self.chance.choices([kind for _, kind in kinds], weights)
        kind(connection)
        self.done[kind.__name__] = self.done.get(kind.__name__, 0) + 1

    def write(self, table: str | None = None) -> str:
        """Return a random statement that changes rows."""
        chance = self.chance
        table = table or chance.choice(list(TABLES))
        low = chance.randint(0, 60)
        some = f"id BETWEEN {low} AND {low + chance.randint(0, 9)}"
        a, b = chance.randint(0, 30), chance.choice(["''", "NULL", "'ü😀'", "'a longer text'"])
        if table == "texts":
            some = f"n = {chance.randint(0, 3)}"
            name = chance.choice(["61", "6100", "00", "", "ff61"])
            key = f"(n, id, a, b) VALUES ({chance.randint(0, 3)}, x'{name}'"
        else:
            key = f"(id, a, b) VALUES ({chance.randint(0, 60)}"
        column = "b" if table == "children" else "a"
        value = b if table == "children" else str(a)
        moved = "n = n + 1" if table == "texts" else f"id = id + {chance.choice([1, 100, -100])}"
        return chance.choice([
            f"INSERT IGNORE INTO {table} {key}, {a}, {b})",
            f"INSERT IGNORE INTO {table} {key}, {a}, {b})",
            f"REPLACE INTO {table} {key}, {a}, {b})",
            f"UPDATE {table} SET {column} = {value} WHERE {some}",
            f"UPDATE {table} SET b = {b} WHERE {some}",
            f"UPDATE IGNORE {table} SET {moved} WHERE {some} ORDER BY id DESC",
            f"DELETE FROM {table} WHERE {some}",
        ])  # fmt: skip

    def _transaction(self, connection: Any) -> None:
        statements = [self.write() for _ in range(self.chance.randint(1, 5))]
        end = "COMMIT" if self.chance.random() < 0.85 else "ROLLBACK"
        if self.chance.random() < 0.2:
            statements += ["SAVEPOINT s", self.write(), "ROLLBACK TO SAVEPOINT s", self.write()]
        self.run(connection, "BEGIN", *statements)
        self.run(connection, end)

    def _truncate(self, connection: Any) -> None:
        table = self.chance.choice(["plain", "texts", "parts", "children"])
        self.run(connection, f"TRUNCATE TABLE /* all */ `{self.database.name}`.{table}")

    def _alter(self, connection: Any) -> None:
        table = self.chance.choice(list(TABLES))
        action = self.chance.choice([
            "ADD COLUMN c int DEFAULT 5",
            "ADD COLUMN c int DEFAULT 6",
            "DROP COLUMN c",
            "MODIFY b varchar(3)",
            "MODIFY b varchar(20)",
            "ADD INDEX i (b)",
            "DROP INDEX i",
            "FORCE",
            "RENAME COLUMN a TO x, RENAME COLUMN x TO a",
        ])  # fmt: skip
        self.run(connection, f"ALTER TABLE {table} {action}")

    def _by_statement(self, connection: Any) -> None:
        format_name = self.chance.choice(["STATEMENT", "MIXED"])
        self.run(connection, f"SET SESSION binlog_format = '{format_name}'")
        self.run(connection, self.write())
        self.run(connection, "SET SESSION binlog_format = 'ROW'")

    def _incomplete(self, connection: Any) -> None:
        image = self.chance.choice(["MINIMAL", "NOBLOB"])
        self.run(connection, f"SET SESSION binlog_row_image = '{image}'")
        self.run(connection, self.write())
        self.run(connection, "SET SESSION binlog_row_image = 'FULL'")

    def _replace(self, connection: Any) -> None:
        filled = [self.write("swapped") for _ in range(3)]
        how = self.chance.randint(0, 2)
        if how == 0:
            self.run(connection, "DROP TABLE swapped", f"CREATE TABLE swapped {SIMPLE}", *filled)
        elif how == 1:
            self.run(connection, f"CREATE OR REPLACE TABLE swapped {SIMPLE}", *filled)
        else:
            self.run(
                connection,
                f"CREATE OR REPLACE TABLE other {SIMPLE}",
                "INSERT INTO other VALUES (1, 2, 'three')",
                "RENAME TABLE swapped TO gone, other TO swapped",
                "DROP TABLE gone",
                *filled,
            )

    def _partition(self, connection: Any) -> None:
        number = self.chance.randint(0, 2)
        action = self.chance.choice([
            f"TRUNCATE PARTITION p{number}",
            "ADD PARTITION PARTITIONS 1",
            "COALESCE PARTITION 1",
            f"REBUILD PARTITION p{number}",
        ])  # fmt: skip
        self.run(connection, f"ALTER TABLE parts {action}")

    def _xa_transaction(self, connection: Any) -> None:
        """Prepare a transaction in a session of its own, or end one that was prepared."""
        if len(self._xa) >= 2 or (self._xa and self.chance.random() < 0.6):
            name = self._xa.pop(0)
            self.run(connection, f"XA {self.chance.choice(['COMMIT', 'ROLLBACK'])} '{name}'")
            return
        self._number += 1
        name = f"{self.database.name}{self._number}"
        other = self.connect()
        statements = [self.write("plain") for _ in range(2)]
        if self.run(other, f"XA START '{name}'", *statements):
            self.run(other, f"XA END '{name}'", f"XA PREPARE '{name}'")
            self._xa.append(name)
            thread = other.thread_id()
            other.close()
            listed = f"SELECT 1 FROM information_schema.processlist WHERE id = {thread}"
            wait_until(lambda: not self.database.query(listed))
        else:
            other.close()

    def _flush(self, connection: Any) -> None:
        self.run(connection, "FLUSH BINARY LOGS")


def rows_in(address: str) -> int:
    with hr.open_log(address) as log:
        return sum(sum(log.end_offsets(topic).values()) for topic in log.topics())


@pytest.mark.server
@pytest.mark.parametrize(
    ("kills", "seed"), [(1, 1), *(pytest.param(12, n, marks=pytest.mark.slow) for n in range(5))]
)
def test_topics_equal_tables_after_random_ddl_and_dml(
    mariadb_server: MariadbServer, tmp_path: Path, address: str, kills: int, seed: int
) -> None:
    name = f"chaos_{kills}_{seed}"
    Mariadb(mariadb_server, "shop").do(f"CREATE DATABASE {name}")
    database = Mariadb(mariadb_server, name)
    database.do(*(f"CREATE TABLE {table} {columns}" for table, columns in TABLES.items()))
    chaos = Chaos(database, seed)
    chance = random.Random(seed)
    connection = chaos.connect()
    for _ in range(100):
        chaos.run(connection, chaos.write())
    connection.close()
    file = tmp_path / "captured.py"
    file.write_text(
        f"import headrace as hr\nc = hr.cdc.mariadb({database.url!r}, name='chaos', chunk_rows=7,"
        f" tables={list(TABLES)!r})\n"
    )
    chaos.start()
    try:
        for _ in range(kills):
            before = rows_in(address)
            process = CaptureProcess(file, address)
            wait_until(lambda: rows_in(address) > before, timeout_s=60)  # noqa: B023
            time.sleep(chance.random() * 2)
            process.kill()
    finally:
        chaos.stop()
    CaptureProcess(file, address, "--until-caught-up").finish()
    assert sum(chaos.done.values()) > 20
    with hr.open_log(address) as log:
        for table in TABLES:
            names = sorted(row[0] for row in database.query(f"SHOW COLUMNS FROM {table}"))
            expected = database.query(f"SELECT {', '.join(names)} FROM {table}")
            found = [tuple(row[each] for each in names) for row in fold(log, table).to_pylist()]
            assert sorted(found, key=repr) == sorted(expected, key=repr), (table, chaos.done)
    Mariadb(mariadb_server, "shop").do(f"DROP DATABASE {name}")
