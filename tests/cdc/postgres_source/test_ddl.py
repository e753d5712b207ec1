"""Postgres tables whose definition changes: columns, partitions, inheritance, rewrites. What the
stream does not say is noticed in the catalogue.
"""

from threading import Event, Thread
from typing import Any

import pytest

import headrace as hr
from headrace.cdc.base import SnapshotChunk, StreamPart
from headrace.cdc.capture import CaptureStatus
from headrace.cdc.state import request_snapshot
from headrace.cdc.writer import CaptureWriter
from tests.cdc.captures import caught_up, folded_columns, postgres_capture, running
from tests.cdc.conftest import Postgres
from tests.waits import wait_until


def test_after_drop_column_the_large_value_of_another_column_was_filled_in(
    postgres: Postgres, address: str
) -> None:
    postgres.do(
        "CREATE TABLE docs (id int PRIMARY KEY, n int, a text, b text)",
        "ALTER TABLE docs ALTER a SET STORAGE EXTERNAL, ALTER b SET STORAGE EXTERNAL",
    )
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    postgres.do("INSERT INTO docs VALUES (1, 0, repeat('a', 5000), repeat('b', 5000))")
    postgres.do("ALTER TABLE docs DROP COLUMN a", "UPDATE docs SET n = 1")
    with caught_up(capture, address) as log:
        assert folded_columns(log, "docs", "id", "n", "b") == [(1, 1, "b" * 5000)]
        assert {row["b"] for row in log.read("docs").to_pylist()} <= {None, "b" * 5000}


def test_a_large_value_was_remembered_after_a_smaller_one_had_replaced_it(
    postgres: Postgres, address: str
) -> None:
    """Values of less than 500 bytes are stored apart too, if a row has many of them."""
    columns = [f"c{number}" for number in range(8)]
    postgres.do(
        f"CREATE TABLE docs (id int PRIMARY KEY, n int, {', '.join(f'{c} text' for c in columns)})",
        "ALTER TABLE docs " + ", ".join(f"ALTER {c} SET STORAGE EXTERNAL" for c in columns),
    )
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    large, small = (
        ", ".join(f"repeat('{v}', {n})" for _ in columns) for v, n in (("L", 900), ("s", 400))
    )
    postgres.do(
        f"INSERT INTO docs VALUES (1, 0, {large})",
        f"UPDATE docs SET ({', '.join(columns)}) = ROW({small})",
        "UPDATE docs SET n = 1",
    )
    with caught_up(capture, address) as log:
        rows = log.read("docs").to_pylist()
        assert '"unchanged"' in str(rows[-1]["_marks"])
        assert folded_columns(log, "docs", *columns) == [tuple("s" * 400 for _ in columns)]


# Tables without a key


class CrashError(Exception):
    """Stands for the end of the process."""


def keyless(log: hr.Log, *columns: str) -> list[tuple[Any, ...]]:
    """The rows of the topic `t`, each as often as it is in the table."""
    return sorted(
        row[:-1] for row in folded_columns(log, "t", *columns, "_copies") for _ in range(row[-1])
    )


def test_equal_rows_of_a_table_without_a_key_were_one(postgres: Postgres, address: str) -> None:
    postgres.do(
        "CREATE TABLE t (a int, b text)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t SELECT i % 3, 'x' FROM generate_series(1, 10) i",
    )
    capture = postgres_capture(postgres, chunk_rows=3)
    with caught_up(capture, address) as log:
        assert keyless(log, "a", "b") == sorted(postgres.query("SELECT * FROM t"))
    postgres.do("DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t WHERE a = 1)")
    postgres.do("INSERT INTO t VALUES (7, 'y'), (7, 'y'), (0, 'x')", "UPDATE t SET b = b")
    postgres.do("UPDATE t SET a = 2 WHERE a = 0", "DELETE FROM t WHERE a = 1")
    with caught_up(capture, address) as log:
        assert keyless(log, "a", "b") == sorted(postgres.query("SELECT * FROM t"))
    postgres.do("TRUNCATE t", "INSERT INTO t VALUES (1, 'x')")
    with caught_up(capture, address) as log:
        assert keyless(log, "a", "b") == [(1, "x")]


def test_a_table_without_a_key_had_ghosts_after_its_columns_changed(
    postgres: Postgres, address: str
) -> None:
    postgres.do(
        "CREATE TABLE t (a int, b text, c int)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t SELECT i / 2, 'x', 1 FROM generate_series(1, 7) i",
    )
    capture = postgres_capture(postgres, chunk_rows=2)
    caught_up(capture, address).close()
    postgres.do("ALTER TABLE t DROP COLUMN c")
    postgres.do("DELETE FROM t WHERE a = 1", "INSERT INTO t VALUES (9, 'new')")
    with caught_up(capture, address) as log:
        assert keyless(log, "a", "b") == sorted(postgres.query("SELECT * FROM t"))
    postgres.do("ALTER TABLE t ADD COLUMN d int DEFAULT 4", "DELETE FROM t WHERE a = 2")
    postgres.do("ALTER TABLE t RENAME COLUMN b TO e", "UPDATE t SET e = 'z' WHERE a = 9")
    with caught_up(capture, address) as log:
        assert keyless(log, "a", "e", "d") == sorted(postgres.query("SELECT * FROM t"))


def test_a_table_without_a_key_is_read_whole_while_it_changes(
    postgres: Postgres, address: str
) -> None:
    """Its rows have no place: what is updated meanwhile is not counted twice."""
    postgres.do(
        "CREATE TABLE t (a int, b int)",
        "CREATE TABLE other (id int PRIMARY KEY)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t SELECT i % 5, 0 FROM generate_series(1, 3000) i",
    )
    capture, stop = postgres_capture(postgres, chunk_rows=50), Event()

    def change() -> None:
        for number in range(100_000):
            if stop.is_set():
                return
            postgres.do(
                f"UPDATE t SET b = b + 1 WHERE a = {number % 5}",
                f"INSERT INTO t VALUES ({number % 5}, 0)",
                f"INSERT INTO other VALUES ({number})",
                "DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t)",
            )

    changing = Thread(target=change)
    changing.start()
    try:
        caught_up(capture, address).close()
    finally:
        stop.set()
        changing.join(60)
    with caught_up(capture, address) as log:
        assert keyless(log, "a", "b") == sorted(postgres.query("SELECT * FROM t"))
        assert folded_columns(log, "other", "id") == sorted(postgres.query("SELECT * FROM other"))


def test_a_table_without_a_key_is_read_from_its_beginning_after_a_crash(
    postgres: Postgres, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read before belongs to another point of the stream."""
    postgres.do(
        "CREATE TABLE t (a int, b int)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t SELECT i % 7, i % 2 FROM generate_series(1, 300) i",
    )
    capture = postgres_capture(postgres, chunk_rows=20)
    read, write = 0, CaptureWriter.write

    def crash_at_the_sixth_chunk(writer: CaptureWriter, part: StreamPart) -> None:
        nonlocal read
        read += sum(isinstance(item, SnapshotChunk) for item in part.items)
        if read == 6:
            writer.commit()
            raise CrashError
        write(writer, part)

    monkeypatch.setattr(CaptureWriter, "write", crash_at_the_sixth_chunk)
    with pytest.raises(CrashError):
        capture.run(log=address, until_caught_up=True)
    monkeypatch.undo()
    with hr.open_log(address) as log:
        assert keyless(log, "a", "b")
    postgres.do("DELETE FROM t WHERE a = 3", "UPDATE t SET b = 9 WHERE a = 1")
    postgres.do("INSERT INTO t SELECT a, b FROM t WHERE a = 5")
    with caught_up(capture, address) as log:
        assert keyless(log, "a", "b") == sorted(postgres.query("SELECT * FROM t"))


# Rows that come and go without a change in the stream


PARTITIONED = (
    "CREATE TABLE p (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
    "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20)",
    "INSERT INTO p SELECT i, 'v' FROM generate_series(5, 14) i",
)


@pytest.mark.parametrize(
    "statements",
    [
        ["TRUNCATE p1"],
        ["ALTER TABLE p DETACH PARTITION p1"],
        ["DROP TABLE p2"],
        [
            "CREATE TABLE p3 (id int PRIMARY KEY, v text)",
            "INSERT INTO p3 SELECT i, 'w' FROM generate_series(20, 25) i",
            "ALTER TABLE p ATTACH PARTITION p3 FOR VALUES FROM (20) TO (30)",
        ],
        [
            "ALTER TABLE p DETACH PARTITION p1",
            "UPDATE p1 SET v = 'unseen'",
            "ALTER TABLE p ATTACH PARTITION p1 FOR VALUES FROM (0) TO (10)",
        ],
    ],
    ids=["truncated", "detached", "dropped", "attached", "changed while detached"],
)
def test_rows_of_partitions_came_and_went_unseen(
    postgres: Postgres, address: str, statements: list[str]
) -> None:
    postgres.do(*PARTITIONED)
    capture = postgres_capture(postgres, tables=["p"], chunk_rows=4)
    caught_up(capture, address).close()
    postgres.do("UPDATE p SET v = 'before' WHERE id % 2 = 0")
    postgres.do(*statements)
    postgres.do("UPDATE p SET v = 'after' WHERE id % 3 = 0")
    with caught_up(capture, address) as log:
        assert folded_columns(log, "p", "id", "v") == sorted(postgres.query("SELECT * FROM p"))


def test_a_new_partition_without_rows_is_no_reason_to_read_the_table_again(
    postgres: Postgres, address: str
) -> None:
    postgres.do(*PARTITIONED)
    capture = postgres_capture(postgres, tables=["p"])
    caught_up(capture, address).close()
    postgres.do("CREATE TABLE p4 PARTITION OF p FOR VALUES FROM (40) TO (50)")
    caught_up(capture, address).close()
    postgres.do("INSERT INTO p VALUES (41, 'new')")
    with caught_up(capture, address) as log:
        assert log.read("p").to_table().num_rows == 11
        assert folded_columns(log, "p", "id", "v") == sorted(postgres.query("SELECT * FROM p"))


def test_rows_of_a_partition_go_while_the_capture_runs(postgres: Postgres, address: str) -> None:
    postgres.do(*PARTITIONED)
    with running(postgres_capture(postgres, tables=["p"]), address) as log:
        wait_until(lambda: "p" in log.topics() and len(folded_columns(log, "p", "id")) == 10)
        postgres.do("TRUNCATE p1")
        wait_until(
            lambda: folded_columns(log, "p", "id") == [(number,) for number in range(10, 15)]
        )


@pytest.mark.parametrize("new_type", ["int", "bigint"])
def test_a_column_was_rewritten_by_alter_type_using(
    postgres: Postgres, address: str, new_type: str
) -> None:
    """Also where the type stays the same, so that nothing in the stream shows it."""
    postgres.do(
        "CREATE TABLE t (id int PRIMARY KEY, n int)",
        "INSERT INTO t SELECT i, i FROM generate_series(1, 9) i",
    )
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    postgres.do(f"ALTER TABLE t ALTER n TYPE {new_type} USING n * 100")
    column = "n" if new_type == "int" else "n__bigint"
    with caught_up(capture, address) as log:
        assert folded_columns(log, "t", "id", column) == sorted(postgres.query("SELECT * FROM t"))


def test_a_table_that_is_compacted_is_not_read_again(postgres: Postgres, address: str) -> None:
    postgres.do("CREATE TABLE t (id int PRIMARY KEY, n int)", "INSERT INTO t VALUES (1, 1)")
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    connection = postgres.connect()
    connection.autocommit = True
    connection.cursor().execute("VACUUM FULL t")
    connection.close()
    with caught_up(capture, address) as log:
        assert log.read("t").to_table().num_rows == 1
    postgres.do("ALTER TABLE t ALTER n SET DEFAULT 7, ALTER n SET NOT NULL")
    with caught_up(capture, address) as log:
        assert log.read("t").to_table().num_rows == 1


def test_the_snapshot_of_a_table_had_the_rows_of_those_that_inherit_from_it(
    postgres: Postgres, address: str
) -> None:
    postgres.do(
        "CREATE TABLE base (id int PRIMARY KEY, v text)",
        "CREATE TABLE child (PRIMARY KEY (id)) INHERITS (base)",
        "INSERT INTO base VALUES (1, 'base')",
        "INSERT INTO child VALUES (2, 'child')",
    )
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    postgres.do("UPDATE base SET v = v || '!'", "INSERT INTO child VALUES (1, 'another 1')")
    with caught_up(capture, address) as log:
        assert folded_columns(log, "base", "id", "v") == [(1, "base!")]
        assert folded_columns(log, "child", "id", "v") == [(1, "another 1"), (2, "child!")]


# Tables that cannot be followed any more


@pytest.mark.parametrize("tables", [(), ("gone", "stays")], ids=["all", "named"])
@pytest.mark.parametrize("is_running", [False, True], ids=["stopped", "running"])
def test_a_dropped_table_ended_the_capture_of_the_others(
    postgres: Postgres, address: str, tables: tuple[str, ...], is_running: bool
) -> None:
    postgres.do(
        "CREATE TABLE gone (id int PRIMARY KEY)",
        "CREATE TABLE stays (id int PRIMARY KEY)",
        "INSERT INTO gone VALUES (1)",
    )
    capture = postgres_capture(postgres, tables=tables)
    seen: list[CaptureStatus] = []
    with running(capture, address, seen) if is_running else caught_up(capture, address) as log:
        wait_until(lambda: "gone" in log.topics() and folded_columns(log, "gone", "id") == [(1,)])
        postgres.do("INSERT INTO gone VALUES (2)")
        postgres.do("DROP TABLE gone", "INSERT INTO stays VALUES (3)")
        if is_running:
            wait_until(lambda: bool(seen) and "public.gone" in seen[-1].stopped)
        else:
            capture.run(log=address, until_caught_up=True, on_status=seen.append)
            assert "dropped" in seen[-1].stopped["public.gone"]
        assert folded_columns(log, "stays", "id") == [(3,)]
        if is_running:
            assert folded_columns(log, "gone", "id") == [(1,), (2,)]
    postgres.do("CREATE TABLE gone (id int PRIMARY KEY)", "INSERT INTO gone VALUES (9)")
    with caught_up(capture, address) as log:
        assert folded_columns(log, "gone", "id") == [(9,)]


def test_a_key_that_changed_ended_the_capture_of_other_tables(
    postgres: Postgres, address: str
) -> None:
    postgres.do(
        "CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY)"
    )
    seen: list[CaptureStatus] = []
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    postgres.do("INSERT INTO t VALUES (1, 'a')")
    postgres.do("ALTER TABLE t RENAME id TO number", "INSERT INTO t VALUES (2, 'b')")
    postgres.do("INSERT INTO u VALUES (5)")
    for _ in range(2):
        capture.run(log=address, until_caught_up=True, on_status=seen.append)
        assert "key" in seen[-1].stopped["public.t"]
    with hr.open_log(address) as log:
        assert folded_columns(log, "u", "id") == [(5,)]
    postgres.do("ALTER TABLE t RENAME number TO id")
    with hr.open_log(address) as log:
        request_snapshot(log, capture.name, ["t"])
    with caught_up(capture, address) as log:
        assert folded_columns(log, "t", "id", "v") == [(1, "a"), (2, "b")]


def test_what_cannot_be_held_in_memory_stops_its_table_alone(
    postgres: Postgres, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cdc.row_counts.MAX_DISTINCT", 3)
    monkeypatch.setattr("headrace.cdc.postgres_source.deferred_keys.MAX_HELD_BYTES", 10_000)
    monkeypatch.setattr("headrace.cdc.postgres_source.source.MAX_MESSAGES", 600)
    postgres.do(
        "CREATE TABLE keyless (a int)",
        "CREATE TABLE moving (id int PRIMARY KEY DEFERRABLE)",
        "CREATE TABLE stays (id int PRIMARY KEY)",
        "ALTER TABLE keyless REPLICA IDENTITY FULL",
        "ALTER TABLE moving REPLICA IDENTITY FULL",
        "INSERT INTO keyless VALUES (1), (2), (3), (3)",
    )
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    postgres.do("INSERT INTO keyless VALUES (4)", "INSERT INTO stays VALUES (1)")
    postgres.do("INSERT INTO moving SELECT generate_series(1, 5000)")
    seen: list[CaptureStatus] = []
    capture.run(log=address, until_caught_up=True, on_status=seen.append)
    assert "ADD COLUMN id bigint" in seen[-1].stopped["public.keyless"]
    assert "NOT DEFERRABLE" in seen[-1].stopped["public.moving"]
    with hr.open_log(address) as log:
        assert folded_columns(log, "stays", "id") == [(1,)]
        assert folded_columns(log, "moving", "id") == []
