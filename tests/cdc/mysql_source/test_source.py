"""MariaDB, and MySQL where there is one, captured from the binlog of a real server: types, keys,
columns that change, what is refused, and a capture that is killed while the server restarts.
"""

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import ConfigurationError
from tests.cdc.captures import caught_up, folded_columns
from tests.cdc.conftest import Mariadb, started
from tests.cdc.workload import (
    CaptureProcess,
    Database,
    Workload,
    assert_equal_to_tables,
    assert_nothing_twice,
    assert_transactions_whole,
    kill_again_and_again,
    restart_under,
)
from tests.servers.mariadb_server import MariadbServer
from tests.servers.mysql_server import MysqlServer
from tests.servers.mysql_server import program as mysql_program
from tests.waits import wait_until

TYPES: list[tuple[str, str, Any]] = [
    ("tinyint", "-128", -128),
    ("tinyint unsigned", "255", 255),
    ("int unsigned", "4294967295", 4294967295),
    ("bigint", "-9223372036854775808", -9223372036854775808),
    ("bigint unsigned", "18446744073709551615", Decimal(18446744073709551615)),
    ("float", "1.5", 1.5),
    ("double", "0.1", 0.1),
    ("decimal(20,4)", "-12345.6789", Decimal("-12345.6789")),
    ("varchar(20)", "'ü\\'\\n\"'", "ü'\n\""),
    ("text", "''", ""),
    ("varbinary(10)", "x'00ff10'", b"\x00\xff\x10"),
    ("blob", "x'80'", b"\x80"),
    ("date", "'2026-02-28'", date(2026, 2, 28)),
    (
        "datetime(6)",
        "'2026-02-28 12:00:00.123456'",
        datetime(2026, 2, 28, 12, 0, 0, 123456),  # noqa: DTZ001
    ),
    (
        "timestamp(3) null",
        "'2026-02-28 12:00:00.5'",
        datetime(2026, 2, 28, 12, 0, 0, 500000, tzinfo=UTC),
    ),
    ("time(1)", "'-30:00:01.5'", "-30:00:01.500000"),
    ("year", "2026", 2026),
    ("enum('glad','sad')", "'sad'", "sad"),
    ("set('a','b','c')", "'c,a'", "a,c"),
    ("bit(4)", "b'1010'", 10),
    ("json", "'{\"a\": [1]}'", '{"a": [1]}'),
    ("char(4)", "'ab'", "ab"),
]


def test_every_type_from_snapshot_and_stream(mariadb: Mariadb, address: str) -> None:
    columns = ", ".join(f"c{number} {kind}" for number, (kind, _, _) in enumerate(TYPES))
    values = ", ".join(value for _, value, _ in TYPES)
    utc = "SET time_zone = '+00:00'"
    mariadb.do(
        utc,
        f"CREATE TABLE things (id int PRIMARY KEY, {columns})",
        f"INSERT INTO things VALUES (1, {values})",
        "INSERT INTO things (id) VALUES (2)",
    )
    capture = mariadb.capture()
    caught_up(capture, address).close()
    mariadb.do(
        utc, f"INSERT INTO things VALUES (3, {values})", "INSERT INTO things (id) VALUES (4)"
    )
    with caught_up(capture, address) as log:
        rows = {row["id"]: row for row in log.read("things").to_pylist()}
        for number, (kind, _, expected) in enumerate(TYPES):
            assert rows[1][f"c{number}"] == expected, f"{kind} in the snapshot"
            assert rows[3][f"c{number}"] == expected, f"{kind} in the stream"
            assert rows[2][f"c{number}"] is None
            assert rows[4][f"c{number}"] is None


def test_values_that_the_binlog_has_in_other_forms(mariadb: Mariadb, address: str) -> None:
    """As a SELECT gives them: documents, ids and addresses as text, shapes as bytes."""
    others = "j json" if mariadb.is_mysql else "u uuid, i inet6, a inet4"
    documents = ['{"b": [1, 2.5, null, true], "ü": "x"}', "[]", '"text"', "17"]
    ids = [
        "123e4567-e89b-12d3-a456-426614174000",
        "00000000-0000-4000-8000-000000000000",
        "018f3c2e-7a00-7abc-8def-0123456789ab",
        "6ccd780c-baba-1026-9564-5b8c656024db",
    ]
    rows = (
        [f"'{each}'" for each in documents]
        if mariadb.is_mysql
        else [f"'{each}', '2001:db8::{n}00', '10.0.{n}.0'" for n, each in enumerate(ids)]
        + [f"'{ids[0]}', '::ffff:1.2.3.4', '0.0.0.0'"]
    )
    mariadb.do(f"CREATE TABLE t (id int PRIMARY KEY, p point, {others})")
    mariadb.do(
        *(f"INSERT INTO t VALUES ({n}, POINT({n}, 0.5), {row})" for n, row in enumerate(rows))
    )
    capture = mariadb.capture()
    caught_up(capture, address).close()
    mariadb.do("UPDATE t SET id = id + 100")
    with caught_up(capture, address) as log:
        listed = log.read("t").to_pylist()
        names = [name for name in listed[0] if name != "id" and not name.startswith("_")]
        before = {
            row["id"]: [row[name] for name in names]
            for row in listed
            if row["_transaction"] is None
        }
        after = {
            row["id"] - 100: [row[name] for name in names]
            for row in listed
            if row["_change_type"] == "insert" and row["_transaction"] is not None
        }
        assert before == after
        assert len(after) == len(rows)
        assert isinstance(after[0][0], bytes)


def test_changes_keys_transactions_and_truncation(mariadb: Mariadb, address: str) -> None:
    mariadb.do(
        "CREATE TABLE a (id int PRIMARY KEY, v text)",
        "CREATE TABLE b (x int, y varchar(9), PRIMARY KEY (y, x))",
        "INSERT INTO b VALUES (1, 'k')",
    )
    mariadb.do(*(f"INSERT INTO a VALUES ({n}, 'v{n}')" for n in range(10)))
    capture = mariadb.capture(chunk_rows=4, preimages=True)
    caught_up(capture, address).close()
    mariadb.do(
        "INSERT INTO a VALUES (11, NULL)",
        "UPDATE a SET v = 'new' WHERE id = 1",
        "UPDATE b SET x = 2",
        "DELETE FROM a WHERE id = 2",
        "UPDATE a SET id = 30 WHERE id = 3",
    )
    with caught_up(capture, address) as log:
        rows = [row for row in log.read("a").to_pylist() if row["_transaction"] is not None]
        assert [(row["_change_type"], row["id"], row["v"], row["_order"]) for row in rows] == [
            ("insert", 11, None, 0),
            ("update_preimage", 1, "v1", 1),
            ("update_postimage", 1, "new", 1),
            ("delete", 2, "v2", 3),
            ("delete", 3, "v3", 4),
            ("insert", 30, "v3", 4),
        ]
        moved = [row for row in log.read("b").to_pylist() if row["_transaction"] is not None]
        assert [(row["_change_type"], row["x"]) for row in moved] == [("delete", 1), ("insert", 2)]
        assert len({(row["_transaction"], row["_timestamp"]) for row in [*rows, *moved]}) == 1
        assert folded_columns(log, "a", "id") == sorted(mariadb.query("SELECT id FROM a"))
    mariadb.do("TRUNCATE TABLE a", "INSERT INTO a VALUES (7, 'again')")
    with caught_up(capture, address) as log:
        assert folded_columns(log, "a", "id", "v") == [(7, "again")]


def test_savepoints_do_not_cut_a_transaction(mariadb: Mariadb, address: str) -> None:
    mariadb.do("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE noise (id int PRIMARY KEY)")
    capture = mariadb.capture(tables=["t"])
    caught_up(capture, address).close()
    mariadb.do(
        "INSERT INTO noise VALUES (1)",
        "INSERT INTO t VALUES (1)",
        "SAVEPOINT a",
        "INSERT INTO t VALUES (2)",
        "ROLLBACK TO SAVEPOINT a",
        "INSERT INTO t VALUES (3)",
        "SAVEPOINT b",
        "INSERT INTO t VALUES (4)",
    )
    with caught_up(capture, address) as log:
        rows = log.read("t").to_pylist()
        assert [(row["id"], row["_change_type"]) for row in rows] == [
            (1, "insert"),
            (3, "insert"),
            (4, "insert"),
        ]
        assert len({(row["_timestamp"], row["_transaction"]) for row in rows}) == 1


def test_columns_come_go_and_change(mariadb: Mariadb, address: str) -> None:
    mariadb.do(
        "CREATE TABLE t (id int PRIMARY KEY, a int, b text)",
        *(f"INSERT INTO t VALUES ({n}, {n}, 'b')" for n in range(5)),
    )
    capture = mariadb.capture()
    caught_up(capture, address).close()
    mariadb.do(
        "UPDATE t SET a = 10 WHERE id = 1",
        "ALTER TABLE t ADD COLUMN c int DEFAULT 7",
        "INSERT INTO t VALUES (6, 6, 'b', 8)",
        "ALTER TABLE t DROP COLUMN b",
    )
    with caught_up(capture, address) as log:
        assert folded_columns(log, "t", "id", "a", "c") == sorted(
            mariadb.query("SELECT id, a, c FROM t")
        )
    mariadb.do(
        "ALTER TABLE t CHANGE a amount int",
        "ALTER TABLE t MODIFY c varchar(9)",
        "UPDATE t SET c = 'text' WHERE id = 2",
    )
    with caught_up(capture, address) as log:
        assert folded_columns(log, "t", "id", "amount", "c__string") == sorted(
            mariadb.query("SELECT id, amount, c FROM t")
        )


def test_tables_that_cannot_be_captured_are_refused_with_the_reason(
    mariadb: Mariadb, address: str
) -> None:
    mariadb.do("CREATE TABLE keyless (a int)", "CREATE TABLE t (id int PRIMARY KEY)")
    for settings, message in ((["keyless"], "ADD PRIMARY KEY"), (["tt"], "did you mean 't'")):
        with pytest.raises(ConfigurationError, match=message):
            mariadb.capture(tables=settings).run(log=address, until_caught_up=True)
    mariadb.do("SET GLOBAL binlog_row_metadata = 'MINIMAL'")
    try:
        with pytest.raises(ConfigurationError, match="SET GLOBAL binlog_row_metadata = 'FULL'"):
            mariadb.capture(tables=["t"]).run(log=address, until_caught_up=True)
    finally:
        mariadb.do("SET GLOBAL binlog_row_metadata = 'FULL'")


def test_a_purged_binlog_is_reported_and_a_new_snapshot_repairs_it(
    mariadb: Mariadb, address: str
) -> None:
    mariadb.do("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)")
    capture = mariadb.capture()
    caught_up(capture, address).close()
    mariadb.do("INSERT INTO t VALUES (3)", "DELETE FROM t WHERE id = 1", "FLUSH BINARY LOGS")
    file = mariadb.query("SHOW BINARY LOGS")[-1][0]

    def purged() -> bool:
        """The server keeps a file for a moment, until the tables' own log has no need of it."""
        mariadb.do(f"PURGE BINARY LOGS TO '{file}'")
        return [row[0] for row in mariadb.query("SHOW BINARY LOGS")] == [file]

    wait_until(purged)
    with pytest.raises(ConfigurationError, match=r"no longer has the binlog[\s\S]*--start-over"):
        capture.run(log=address, until_caught_up=True)
    capture.run(log=address, until_caught_up=True, start_over=True)
    with hr.open_log(address) as log:
        assert folded_columns(log, "t", "id") == [(2,), (3,)]


def test_changes_that_cannot_be_read_are_not_passed_over(mariadb: Mariadb, address: str) -> None:
    """Compressed transactions are no rows to the reader of the binlog: it must not go on as if
    there were none.
    """
    setting = "binlog_transaction_compression" if mariadb.is_mysql else "log_bin_compress"
    mariadb.do("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'a')")
    capture = mariadb.capture()
    caught_up(capture, address).close()
    mariadb.do(f"SET GLOBAL {setting} = ON")
    try:
        with pytest.raises(ConfigurationError, match=f"SET GLOBAL {setting} = 'OFF'"):
            capture.run(log=address, until_caught_up=True)
        mariadb.do("INSERT INTO t VALUES (2, repeat('long and the same again ', 100))")
    finally:
        mariadb.do(f"SET GLOBAL {setting} = OFF")
    with pytest.raises(ConfigurationError, match=r"cannot be read[\s\S]*--start-over"):
        capture.run(log=address, until_caught_up=True)
    capture.run(log=address, until_caught_up=True, start_over=True)
    with hr.open_log(address) as log:
        assert folded_columns(log, "t", "id") == [(1,), (2,)]


@pytest.mark.server
@pytest.mark.parametrize("kind", [MariadbServer, MysqlServer])
@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_at_random_while_the_server_restarts(
    tmp_path: Path, address: str, kills: int, kind: type[MariadbServer] | type[MysqlServer]
) -> None:
    import pymysql

    if kind is MysqlServer and mysql_program() is None:
        pytest.skip("no MySQL here")
    server = kind()
    started(server)
    try:
        shop = Mariadb(server, "shop")
        database = Database(shop.connect, mark="%s")
        database.create()
        file = tmp_path / "captured.py"
        file.write_text(
            f"import headrace as hr\nshop = hr.cdc.{server.kind}({server.url!r}, name='shop',"
            " chunk_rows=30)\n"
        )
        workload = Workload(database, seed=kills, tolerate=(pymysql.err.Error, OSError)).start()
        kill_again_and_again(file, address, kills - 1, seed=kills)
        restart_under(CaptureProcess(file, address), address, server)
        workload.stop()
        CaptureProcess(file, address, "--until-caught-up").finish()
        with hr.open_log(address) as log:
            assert_equal_to_tables(log, database)
            assert assert_transactions_whole(log) >= kills
            for topic in ("accounts", "orders"):
                assert_nothing_twice(log, topic)
    finally:
        server.stop()
