"""Changes of rows that the binlog has not as rows: DDL, statements, cascades, incomplete images,
XA. Each of them went unseen, or was published although it was rolled back. They are made on tables
of one database, and captured by one run.
"""

from typing import Any, NamedTuple

import pytest

import headrace as hr
from headrace.cdc.base import TableChanges
from headrace.cdc.writer import CaptureWriter
from headrace.errors import ConfigurationError
from tests.cdc.captures import caught_up, folded_columns
from tests.cdc.conftest import Mariadb
from tests.servers.mariadb_server import MariadbServer
from tests.waits import wait_until

PARTITIONED = "(id int PRIMARY KEY, v int) PARTITION BY RANGE (id) ({})".format(
    ", ".join(f"PARTITION p{n} VALUES LESS THAN ({n}0)" for n in range(1, 4))
)
SIMPLE = "(id int PRIMARY KEY, v int)"
ROWS = "VALUES (1, 1), (11, 11), (21, 21)"
STATEMENTS = "SET SESSION binlog_format = 'STATEMENT'"


class Case(NamedTuple):
    """Tables that are captured, and the statements that change them. `{t}` is the first table."""

    table: str
    before: tuple[str, ...]
    after: tuple[str, ...]


CASES = {
    "partition_dropped": Case(PARTITIONED, (), ("ALTER TABLE {t} DROP PARTITION p1",)),
    "partition_truncated": Case(PARTITIONED, (), ("ALTER TABLE {t} TRUNCATE PARTITION p1, p2",)),
    "partition_exchanged": Case(
        PARTITIONED,
        ("CREATE TABLE {t}_x (id int PRIMARY KEY, v int)", "INSERT INTO {t}_x VALUES (5, 6)"),
        ("ALTER TABLE {t} EXCHANGE PARTITION p1 WITH TABLE {t}_x",),
    ),
    "partition_moved": Case(
        PARTITIONED, (), ("ALTER TABLE {t} ADD PARTITION (PARTITION p9 VALUES LESS THAN (90))",)
    ),
    "dropped_and_created": Case(
        SIMPLE,
        (),
        ("DROP TABLE {t}", f"CREATE TABLE {{t}} {SIMPLE}", "INSERT INTO {t} VALUES (2, 2)"),
    ),
    "created_or_replaced": Case(
        SIMPLE, (), (f"CREATE OR REPLACE TABLE {{t}} {SIMPLE}", "INSERT INTO {t} VALUES (3, 3)")
    ),
    "created_as_select": Case(
        SIMPLE, (), ("CREATE OR REPLACE TABLE {t} (id int PRIMARY KEY) AS SELECT 8 AS id, 9 AS v",)
    ),
    "created_if_not_exists": Case(
        SIMPLE, (), (f"CREATE TABLE IF NOT EXISTS {{t}} {SIMPLE}", "DELETE FROM {t} WHERE id = 1")
    ),
    "renamed_swap": Case(
        SIMPLE,
        (f"CREATE TABLE {{t}}_new {SIMPLE}", "INSERT INTO {t}_new VALUES (7, 7)"),
        ("RENAME TABLE {t} TO {t}_old, {t}_new TO {t}", "INSERT INTO {t} VALUES (8, 8)"),
    ),
    "altered_rename_back": Case(
        SIMPLE,
        (),
        (
            "ALTER TABLE {t} RENAME TO {t}_away",
            "INSERT INTO {t}_away VALUES (4, 4)",
            "ALTER TABLE {t}_away RENAME {t}",
        ),
    ),
    "truncated_qualified": Case(SIMPLE, (), ("TRUNCATE TABLE `{d}` . `{t}`",)),
    "truncated_with_comment": Case(
        SIMPLE, (), ("/* a */ TRUNCATE /*! TABLE */ {t} -- b", "INSERT INTO {t} VALUES (2, 2)")
    ),
    "truncated_from_elsewhere": Case(SIMPLE, (), ("USE mysql", "TRUNCATE {d}.{t}", "USE {d}")),
    "truncated_in_another_database": Case(
        SIMPLE,
        (f"CREATE TABLE {{d}}_other.{{t}} {SIMPLE}",),
        ("TRUNCATE {d}_other.{t}", "USE {d}_other", "TRUNCATE {t}", "USE {d}"),
    ),
    "delete_by_statement": Case(SIMPLE, (), (STATEMENTS, "DELETE FROM {t} WHERE id = 1")),
    "update_by_statement_from_elsewhere": Case(
        SIMPLE, (), (STATEMENTS, "USE mysql", "UPDATE {d}.{t} SET v = v + 1", "USE {d}")
    ),
    "insert_by_statement": Case(
        SIMPLE, (), (STATEMENTS, "INSERT INTO {t} SELECT id + 1, v FROM {t}")
    ),
    "loaded_by_statement": Case(
        SIMPLE,
        (),
        (
            STATEMENTS,
            "SELECT 40, 41 INTO OUTFILE '../{t}.txt'",
            "LOAD DATA INFILE '../{t}.txt' INTO TABLE {t}",
        ),
    ),
    "function_by_statement": Case(
        SIMPLE,
        (
            "SET GLOBAL log_bin_trust_function_creators = 1",
            f"CREATE TABLE {{t}}_log {SIMPLE}",
            "CREATE FUNCTION {t}_f() RETURNS int BEGIN DELETE FROM {t}; RETURN 5; END",
        ),
        (STATEMENTS, "INSERT INTO {t}_log VALUES ({t}_f(), 1)"),
    ),
    "mixed_format": Case(
        SIMPLE, (), ("SET SESSION binlog_format = 'MIXED'", "UPDATE {t} SET v = 99")
    ),
    "trigger_by_statement": Case(
        SIMPLE,
        (
            f"CREATE TABLE {{t}}_log {SIMPLE}",
            "CREATE TRIGGER {t}_tr AFTER INSERT ON {t}_log FOR EACH ROW DELETE FROM {t}",
        ),
        (STATEMENTS, "INSERT INTO {t}_log VALUES (1, 1)"),
    ),
    "cascade_on_delete": Case(
        "(id int PRIMARY KEY, v int, FOREIGN KEY (v) REFERENCES {t}_p (id) ON DELETE CASCADE)",
        (),
        ("DELETE FROM {t}_p WHERE id = 1",),
    ),
    "cascade_to_null": Case(
        "(id int PRIMARY KEY, v int, FOREIGN KEY (v) REFERENCES {t}_p (id) ON DELETE SET NULL)",
        (),
        ("DELETE FROM {t}_p WHERE id = 11",),
    ),
    "cascade_on_update": Case(
        "(id int PRIMARY KEY, v int, FOREIGN KEY (v) REFERENCES {t}_p (id) ON UPDATE CASCADE)",
        (),
        ("UPDATE {t}_p SET id = 100 WHERE id = 1",),
    ),
    "cascade_of_a_cascade": Case(
        "(id int PRIMARY KEY, v int, FOREIGN KEY (v) REFERENCES {t}_m (id) ON DELETE CASCADE)",
        (),
        ("DELETE FROM {t}_p WHERE id = 21",),
    ),
    "cascade_of_a_foreign_key_that_is_gone": Case(
        "(id int PRIMARY KEY, v int, CONSTRAINT {t}_fk FOREIGN KEY (v) REFERENCES {t}_p (id)"
        " ON DELETE CASCADE)",
        (),
        ("DELETE FROM {t}_p WHERE id = 21", "ALTER TABLE {t} DROP FOREIGN KEY {t}_fk"),
    ),
    "image_noblob": Case(
        "(id int PRIMARY KEY, v int, b text)",
        ("UPDATE {t} SET b = 'kept'",),
        ("SET SESSION binlog_row_image = 'NOBLOB'", "UPDATE {t} SET v = 5 WHERE id = 1"),
    ),
    "image_minimal": Case(
        "(id int PRIMARY KEY, v int DEFAULT 77)",
        (),
        (
            "SET SESSION binlog_row_image = 'MINIMAL'",
            "INSERT INTO {t} (id) VALUES (5)",
            "UPDATE {t} SET id = 2 WHERE id = 1",
            "DELETE FROM {t} WHERE id = 11",
        ),
    ),
    "columns_swapped": Case(
        "(id int PRIMARY KEY, v int, w int DEFAULT 5)",
        (),
        ("ALTER TABLE {t} RENAME COLUMN v TO w, RENAME COLUMN w TO v",),
    ),
    "column_dropped_and_added": Case(
        SIMPLE, (), ("ALTER TABLE {t} DROP COLUMN v, ADD COLUMN v int DEFAULT 3",)
    ),
    "values_shortened": Case(
        "(id int PRIMARY KEY, v varchar(9))",
        ("UPDATE {t} SET v = 'longer'",),
        ("SET SESSION sql_mode = ''", "ALTER TABLE {t} MODIFY v varchar(3)"),
    ),
    "duplicates_ignored": Case(
        SIMPLE,
        ("UPDATE {t} SET v = 1",),
        ("ALTER IGNORE TABLE {t} ADD UNIQUE (v)",),
    ),
    "altered_for_one_statement": Case(
        SIMPLE,
        (),
        (
            "SET STATEMENT max_statement_time = 30 FOR ALTER TABLE {t} ADD COLUMN w int DEFAULT 4",
            "ALTER TABLE {t} DROP COLUMN w",
            "ALTER TABLE {t} ADD COLUMN w int DEFAULT 6",
        ),
    ),
    "system_versioned": Case(
        "(id int PRIMARY KEY, v int) WITH SYSTEM VERSIONING",
        (),
        (
            "UPDATE {t} SET v = 5 WHERE id = 1",
            "UPDATE {t} SET id = 12 WHERE id = 11",
            "DELETE FROM {t} WHERE id = 21",
            "DELETE HISTORY FROM {t}",
            "INSERT INTO {t} VALUES (9, 9)",
        ),
    ),
    "system_versioned_by_columns_of_its_own": Case(
        "(id int PRIMARY KEY, v int, s timestamp(6) GENERATED ALWAYS AS ROW START INVISIBLE,"
        " e timestamp(6) GENERATED ALWAYS AS ROW END INVISIBLE, PERIOD FOR SYSTEM_TIME (s, e))"
        " WITH SYSTEM VERSIONING",
        (),
        ("UPDATE {t} SET v = 5 WHERE id = 1", "DELETE FROM {t} WHERE id = 21"),
    ),
    "system_versioning_added": Case(
        SIMPLE,
        (),
        (
            "ALTER TABLE {t} ADD SYSTEM VERSIONING",
            "UPDATE {t} SET v = 8 WHERE id = 1",
            "DELETE FROM {t} WHERE id = 11",
        ),
    ),
    "rolled_back_with_a_table_without_transactions": Case(
        SIMPLE,
        ("CREATE TABLE {t}_m (id int PRIMARY KEY) ENGINE = MyISAM",),
        (
            "SET SESSION binlog_direct_non_transactional_updates = 0",
            "BEGIN",
            "INSERT INTO {t} VALUES (50, 50)",
            "INSERT INTO {t}_m VALUES (1)",
            "ROLLBACK",
            "INSERT INTO {t} VALUES (51, 51)",
        ),
    ),
    "xa_committed": Case(
        SIMPLE,
        (),
        (
            "XA START '{t}', 'branch', 7",
            "INSERT INTO {t} VALUES (30, 30)",
            "UPDATE {t} SET v = 5 WHERE id = 1",
            "DELETE FROM {t} WHERE id = 11",
            "XA END '{t}', 'branch', 7",
            "XA PREPARE '{t}', 'branch', 7",
            "XA COMMIT '{t}', 'branch', 7",
            "UPDATE {t} SET v = 31 WHERE id = 30",
        ),
    ),
    "xa_rolled_back": Case(
        SIMPLE,
        (),
        (
            "XA START '{t}'",
            "INSERT INTO {t} VALUES (30, 30)",
            "DELETE FROM {t} WHERE id = 1",
            "XA END '{t}'",
            "XA PREPARE '{t}'",
            "XA ROLLBACK '{t}'",
        ),
    ),
    "xa_in_one_phase": Case(
        SIMPLE,
        (),
        (
            "XA START '{t}'",
            "INSERT INTO {t} VALUES (30, 30)",
            "XA END '{t}'",
            "XA COMMIT '{t}' ONE PHASE",
        ),
    ),
    "xa_by_statement": Case(
        SIMPLE,
        (),
        (
            STATEMENTS,
            "XA START '{t}'",
            "DELETE FROM {t} WHERE id = 1",
            "XA END '{t}'",
            "XA PREPARE '{t}'",
            "XA COMMIT '{t}'",
        ),
    ),
}
LOGGED = {
    "xa_committed",
    "xa_rolled_back",
    "xa_in_one_phase",
    "partition_moved",
    "truncated_qualified",
    "truncated_in_another_database",
    "system_versioned",
}
"""Of these the binlog has all that is needed, so the table is not read again."""


class Result(NamedTuple):
    """The rows of a table, those of its topic, and the changes that it got."""

    table: list[tuple[Any, ...]]
    topic: list[tuple[Any, ...]]
    changes: list[dict[str, Any]]


def run(
    cases: dict[str, Case], server: MariadbServer, address: str, name: str
) -> dict[str, Result]:
    """Capture the tables of all cases, change all of them, and capture them again."""
    Mariadb(server, "shop").do(f"CREATE DATABASE {name}", f"CREATE DATABASE {name}_other")
    database = Mariadb(server, name)
    for table, case in cases.items():
        if "REFERENCES" in case.table:
            database.do(f"CREATE TABLE {table}_p {SIMPLE}", f"INSERT INTO {table}_p {ROWS}")
        if "_m (id)" in case.table:
            middle = CASES["cascade_on_delete"].table.format(t=table)
            database.do(f"CREATE TABLE {table}_m {middle}", f"INSERT INTO {table}_m {ROWS}")
        database.do(
            f"CREATE TABLE {table} {case.table.replace('{t}', table)}",
            f"INSERT INTO {table} (id, v) {ROWS}",
            *(statement.format(t=table, d=name) for statement in case.before),
        )
    capture = database.capture(tables=list(cases))
    with caught_up(capture, address) as log:
        ends = {table: log.end_offsets(table)[0] for table in cases}
    for table, case in cases.items():
        connection = database.connect(autocommit=True)
        connection.cursor().execute("SET time_zone = '+00:00'")
        for statement in case.after:
            connection.cursor().execute(statement.format(t=table, d=name))
        connection.close()
    results = {}
    with caught_up(capture, address) as log:
        for table in cases:
            names = [row[0] for row in database.query(f"SHOW COLUMNS FROM {table}")]
            rows = [row for row in log.read(table).to_pylist() if row["_offset"] >= ends[table]]
            hidden = [each for each in names if each in {"s", "e"}]
            names = [each for each in names if each not in hidden]
            results[table] = Result(
                sorted(database.query(f"SELECT {', '.join(names)} FROM {table}")),
                folded_columns(log, table, *names),
                rows,
            )
    Mariadb(server, "shop").do(
        f"DROP DATABASE {name}",
        f"DROP DATABASE {name}_other",
        "SET GLOBAL log_bin_trust_function_creators = 0",
    )
    return results


@pytest.fixture(scope="module")
def unseen(
    mariadb_server: MariadbServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    cases = {name: case for name, case in CASES.items() if name not in LOGGED}
    address = f"file:{tmp_path_factory.mktemp('unlogged') / 'log'}"
    return run(cases, mariadb_server, address, "unlogged")


@pytest.fixture(scope="module")
def logged(
    mariadb_server: MariadbServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    cases = {name: case for name, case in CASES.items() if name in LOGGED}
    address = f"file:{tmp_path_factory.mktemp('logged') / 'log'}"
    return run(cases, mariadb_server, address, "logged")


@pytest.mark.parametrize("case", sorted(set(CASES) - LOGGED))
def test_changes_without_rows_in_the_binlog_are_seen(case: str, unseen: dict[str, Result]) -> None:
    assert unseen[case].topic == unseen[case].table


@pytest.mark.parametrize("case", sorted(LOGGED))
def test_what_the_binlog_has_is_not_read_again(case: str, logged: dict[str, Result]) -> None:
    assert logged[case].topic == logged[case].table
    assert all(row["_transaction"] is not None for row in logged[case].changes)


def test_rows_of_an_xa_transaction_that_was_rolled_back_are_not_published(
    logged: dict[str, Result],
) -> None:
    assert logged["xa_rolled_back"].changes == []


def test_a_cascade_is_read_again_only_where_a_key_changed(mariadb: Mariadb, address: str) -> None:
    mariadb.do(
        "CREATE TABLE p (id int PRIMARY KEY, v int)",
        "CREATE TABLE c (id int PRIMARY KEY, p int, FOREIGN KEY (p) REFERENCES p (id)"
        " ON UPDATE CASCADE ON DELETE CASCADE)",
        "INSERT INTO p VALUES (1, 1)",
        "INSERT INTO c VALUES (1, 1)",
    )
    capture = mariadb.capture(tables=["c"])
    with caught_up(capture, address) as log:
        before = log.end_offsets("c")
    mariadb.do("UPDATE p SET v = 2", "INSERT INTO p VALUES (2, 2)")
    with caught_up(capture, address) as log:
        assert log.end_offsets("c") == before


def prepare(database: Mariadb, transaction: str, insert: str) -> None:
    """Prepare an XA transaction, and leave it: its session ends."""
    connection = database.connect(autocommit=True)
    for statement in (
        f"XA START {transaction}",
        insert,
        f"XA END {transaction}",
        f"XA PREPARE {transaction}",
    ):
        connection.cursor().execute(statement)
    connection.close()


def end(database: Mariadb, how: str, transaction: str) -> None:
    """Commit or roll back a prepared transaction, from another session."""

    def is_listed() -> bool:
        """Its own session may still be ending, and nobody else can end it until then."""
        rows = database.query("XA RECOVER")
        return bool(rows) and not database.query(
            "SELECT 1 FROM information_schema.processlist WHERE command = 'Sleep' AND db ="
            f" '{database.name}'"
        )

    wait_until(is_listed)
    connection = database.connect(autocommit=True)
    connection.cursor().execute(f"XA {how} {transaction}")
    connection.close()


def test_an_xa_transaction_is_published_when_it_is_committed_over_restarts(
    mariadb: Mariadb, address: str
) -> None:
    """Its rows were published when it was prepared. Between PREPARE and COMMIT the capture ends and
    the binlog goes on in another file; it is committed while another one is prepared.
    """
    if mariadb.is_mysql:
        pytest.skip("it needs the privilege XA_RECOVER_ADMIN")
    xid, other = f"'{mariadb.name}', 'a', 5", f"'{mariadb.name}', 'b', 5"
    mariadb.do("CREATE TABLE t (id int PRIMARY KEY, v int)", "INSERT INTO t VALUES (1, 1)")
    capture = mariadb.capture(tables=["t"])
    caught_up(capture, address).close()
    for transaction, row in ((xid, "(2, 2), (3, 3)"), (other, "(4, 4)")):
        prepare(mariadb, transaction, f"INSERT INTO t VALUES {row}")
    mariadb.do("INSERT INTO t VALUES (5, 5)")
    with caught_up(capture, address) as log:
        assert folded_columns(log, "t", "id") == [(1,), (5,)]
    mariadb.do("FLUSH BINARY LOGS", "INSERT INTO t VALUES (6, 6)")
    end(mariadb, "COMMIT", xid)
    with caught_up(capture, address) as log:
        assert folded_columns(log, "t", "id") == [(1,), (2,), (3,), (5,), (6,)]
        rows = {row["id"]: row for row in log.read("t").to_pylist()}
        assert rows[2]["_transaction"] == rows[3]["_transaction"] > rows[6]["_transaction"]
        assert [rows[2]["_order"], rows[3]["_order"]] == [0, 1]
        assert rows[2]["_position"] > rows[6]["_position"]
    end(mariadb, "ROLLBACK", other)
    mariadb.do("UPDATE t SET v = 7 WHERE id = 2")
    with caught_up(capture, address) as log:
        assert folded_columns(log, "t", "id", "v") == sorted(mariadb.query("SELECT id, v FROM t"))


def test_an_xa_transaction_of_before_the_capture_is_seen_when_it_is_committed(
    mariadb: Mariadb, address: str
) -> None:
    if mariadb.is_mysql:
        pytest.skip("it needs the privilege XA_RECOVER_ADMIN")
    xid = f"'{mariadb.name}'"
    mariadb.do("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    prepare(mariadb, xid, "INSERT INTO t VALUES (2)")
    capture = mariadb.capture(tables=["t"])
    try:
        caught_up(capture, address).close()
    finally:
        end(mariadb, "COMMIT", xid)
    with caught_up(capture, address) as log:
        assert folded_columns(log, "t", "id") == [(1,), (2,)]


def test_without_snapshots_an_unseen_change_is_refused(mariadb: Mariadb, address: str) -> None:
    """It is named with what to do, and seen once that is done."""
    mariadb.do(f"CREATE TABLE t {PARTITIONED}")
    caught_up(mariadb.capture(snapshot=False), address).close()
    mariadb.do(f"INSERT INTO t {ROWS}", "ALTER TABLE t DROP PARTITION p1")
    with pytest.raises(ConfigurationError, match=r"DROP PARTITION[\s\S]*snapshot=True"):
        caught_up(mariadb.capture(snapshot=False), address)
    with caught_up(mariadb.capture(), address) as log:
        assert folded_columns(log, "t", "id") == [(11,), (21,)]


def test_a_table_is_dropped_and_the_others_go_on(mariadb: Mariadb, address: str) -> None:
    """It was an error that ended the capture, and stopped it at every start."""
    mariadb.do("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    mariadb.do("INSERT INTO t VALUES (1)", "INSERT INTO u VALUES (1)")
    capture = mariadb.capture(tables=["t", "u"])
    caught_up(capture, address).close()
    mariadb.do("DROP TABLE t", "INSERT INTO u VALUES (2)")
    with caught_up(capture, address) as log:
        assert folded_columns(log, "u", "id") == [(1,), (2,)]
        assert folded_columns(log, "t", "id") == [(1,)]


def source_items(database: Mariadb, capture: Any, changes: list[str]) -> list[Any]:
    """What the source delivers of changes that are made after it began."""
    source = capture.open()
    try:
        source.start(None)
        source.tables()
        database.do(*changes)
        items: list[Any] = []
        while not source.is_caught_up():
            items += source.poll(0.2).items
        return items
    finally:
        source.close()


def test_a_renamed_key_column_is_a_new_key(mariadb: Mariadb) -> None:
    """It was a KeyError."""
    mariadb.do("CREATE TABLE t (id int PRIMARY KEY)")
    items = source_items(
        mariadb,
        mariadb.capture(),
        ["ALTER TABLE t CHANGE id number int", "INSERT INTO t VALUES (2)"],
    )
    assert items[0].shape.key == ("number",)
    assert items[1].rows.column("number").to_pylist() == [2]


def test_a_table_that_loses_its_key_is_not_followed_any_more(
    mariadb: Mariadb, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that are equal were one row."""
    mariadb.do("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    items = source_items(
        mariadb,
        mariadb.capture(),
        [
            "ALTER TABLE t DROP PRIMARY KEY",
            "INSERT INTO t VALUES (2), (2)",
            "INSERT INTO u VALUES (1)",
        ],
    )
    assert [item.table for item in items if isinstance(item, TableChanges)] == ["u"]
    assert "The table t is not captured any more" in caplog.text


def test_a_table_is_made_anew_before_its_first_snapshot_has_begun(
    mariadb: Mariadb, address: str
) -> None:
    """Rows that the stream had brought stayed in the topic: the snapshot took the topic for new."""
    mariadb.do("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    source = mariadb.capture().open()
    with hr.open_log(address) as log:
        writer = CaptureWriter(log, mariadb.name, prefix="", partitions=1, preimages=False)
        try:
            writer.state.position = source.start(None)
            for shape in source.tables():
                writer.add(shape)
            mariadb.do("INSERT INTO t VALUES (2)")
            while not log_has(log, "t", 1):
                writer.write(source.poll(0.2))
                writer.commit()
            mariadb.do(
                "DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (3)"
            )
            writer.close()
        finally:
            source.close()
    with caught_up(mariadb.capture(), address) as log:
        assert folded_columns(log, "t", "id") == [(3,)]


def log_has(log: hr.Log, topic: str, rows: int) -> bool:
    return sum(log.end_offsets(topic).values()) >= rows


def test_a_cascade_is_seen_by_a_user_who_may_only_read(mariadb: Mariadb, address: str) -> None:
    """The information schema hides the rules of foreign keys from such a user, and triggers."""
    if mariadb.is_mysql:
        pytest.skip("its privileges have other names")
    user = f"reader_{mariadb.name}"
    mariadb.do(
        f"CREATE TABLE p {SIMPLE}",
        "CREATE TABLE c (id int PRIMARY KEY, p int, FOREIGN KEY (p) REFERENCES p (id)"
        " ON DELETE CASCADE)",
        "CREATE TABLE log (id int PRIMARY KEY)",
        "CREATE TRIGGER tr AFTER INSERT ON log FOR EACH ROW UPDATE c SET p = NULL",
        f"INSERT INTO p {ROWS}",
        "INSERT INTO c VALUES (1, 1), (2, 11)",
        f"CREATE USER {user}@'%'",
        f"GRANT REPLICATION SLAVE, BINLOG MONITOR, SLAVE MONITOR ON *.* TO {user}@'%'",
        f"GRANT SELECT ON {mariadb.name}.* TO {user}@'%'",
    )
    url = mariadb.url.replace("shop@", f"{user}@")
    capture = hr.cdc.mariadb(url, name=mariadb.name, tables=["c"])
    caught_up(capture, address).close()
    mariadb.do("DELETE FROM p WHERE id = 1")
    with caught_up(capture, address) as log:
        assert folded_columns(log, "c", "id", "p") == [(2, 11)]
    mariadb.do(STATEMENTS, "INSERT INTO log VALUES (1)")
    with caught_up(capture, address) as log:
        assert folded_columns(log, "c", "id", "p") == [(2, None)]
    mariadb.do(f"DROP USER {user}@'%'")
