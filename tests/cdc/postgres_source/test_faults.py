"""Postgres as it goes wrong: settings, privileges, slots that are lost; and a capture that is
killed while the server is restarted.
"""

from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import ConfigurationError, RetryError
from tests.cdc.captures import caught_up, folded_columns, postgres_capture
from tests.cdc.conftest import Postgres, started
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
from tests.servers.postgres_server import PostgresServer


def refused(database: Postgres, address: str, url: str | None = None, **settings: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        hr.cdc.postgres(url or database.url, name=database.name, **settings).run(
            log=address, until_caught_up=True
        )
    assert error.value.fix
    return str(error.value)


@pytest.mark.server
def test_wrong_settings_say_what_to_set(address: str) -> None:
    server = started(PostgresServer({"wal_level": "replica"}))
    try:
        assert isinstance(server, PostgresServer)
        assert "ALTER SYSTEM SET wal_level = 'logical'" in refused(
            Postgres(server.url, "x"), address
        )
    finally:
        server.stop()


def test_missing_tables_keys_and_privileges_are_named(postgres: Postgres, address: str) -> None:
    postgres.do(
        "CREATE TABLE orders (id int PRIMARY KEY)",
        "CREATE TABLE keyless (a int)",
        "CREATE ROLE poor LOGIN",
        "CREATE ROLE reader LOGIN REPLICATION",
    )
    try:
        assert "did you mean 'public.orders'" in refused(postgres, address, tables=["ordres"])
        message = refused(postgres, address, tables=["keyless"])
        assert "REPLICA IDENTITY FULL" in message
        assert (
            postgres.query("SELECT 1 FROM pg_publication") == []
        )  # publishing it would have made the user's updates fail
        caught_up(postgres_capture(postgres), address).close()  # nobody named it: it is left out
        assert "ALTER ROLE" in refused(
            postgres, address, postgres.url.replace("postgres@", "poor@"), tables=["orders"]
        )
        postgres_capture(postgres).remove()
        assert "CREATE PUBLICATION" in refused(
            postgres, address, postgres.url.replace("postgres@", "reader@"), tables=["orders"]
        )
        assert "does not exist" in refused(postgres, address, postgres.url + "_not_there")
    finally:
        postgres.do("DROP ROLE poor", "DROP ROLE reader")


def test_a_lost_slot_is_reported_and_never_recreated_silently(
    postgres: Postgres, address: str
) -> None:
    postgres.do(
        "CREATE TABLE a (id int PRIMARY KEY, v int)",
        "INSERT INTO a SELECT i, i FROM generate_series(1, 5) i",
    )
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    slot = f"headrace_{postgres.name}"
    postgres.do(f"SELECT pg_drop_replication_slot('{slot}')")
    postgres.do(
        "DELETE FROM a WHERE id = 1",
        "UPDATE a SET v = 9 WHERE id = 2",
        "INSERT INTO a VALUES (6, 6)",
    )
    message = refused(postgres, address)
    assert "was dropped" in message
    assert "--start-over" in message
    assert (
        postgres.query("SELECT 1 FROM pg_replication_slots WHERE slot_name = '" + slot + "'") == []
    )
    capture.run(log=address, until_caught_up=True, start_over=True)
    with hr.open_log(address) as log:
        assert folded_columns(log, "a", "id", "v") == [(2, 9), (3, 3), (4, 4), (5, 5), (6, 6)]
    postgres.do(f"SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())")
    postgres.do(
        "INSERT INTO a VALUES (7, 7)",
        f"SELECT pg_replication_slot_advance('{slot}', pg_current_wal_insert_lsn())",
    )
    assert "Another client has read" in refused(postgres, address)


def test_a_table_that_left_the_publication_is_read_again(
    postgres: Postgres, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    postgres.do(
        "CREATE TABLE a (id int PRIMARY KEY)",
        "CREATE TABLE b (id int PRIMARY KEY)",
        "INSERT INTO a VALUES (1), (2)",
    )
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    postgres.do(f"ALTER PUBLICATION headrace_{postgres.name} DROP TABLE a")
    postgres.do(
        "INSERT INTO a VALUES (3)", "DELETE FROM a WHERE id = 1", "INSERT INTO b VALUES (1)"
    )
    with caught_up(capture, address) as log:
        assert folded_columns(log, "a", "id") == [(2,), (3,)]
        assert folded_columns(log, "b", "id") == [(1,)]
    assert "public.a came, went or were rewritten" in caplog.text
    assert "public.b" not in caplog.text


def test_a_dropped_publication_is_reported_and_can_be_restored(
    postgres: Postgres, address: str
) -> None:
    postgres.do("CREATE TABLE a (id int PRIMARY KEY)", "INSERT INTO a VALUES (1), (2)")
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    postgres.do(f"DROP PUBLICATION headrace_{postgres.name}")
    postgres.do("INSERT INTO a VALUES (3)", "DELETE FROM a WHERE id = 1")
    with pytest.raises(ConfigurationError, match=r"publication was dropped[\s\S]*--start-over"):
        capture.run(log=address, until_caught_up=True)
    capture.run(log=address, until_caught_up=True, start_over=True)
    with hr.open_log(address) as log:
        assert folded_columns(log, "a", "id") == [(2,), (3,)]


def test_a_slot_in_use_is_waited_for(postgres: Postgres, address: str) -> None:
    postgres.do("CREATE TABLE a (id int PRIMARY KEY)")
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    with hr.open_log(address) as log:
        position = capture_position(log, postgres.name)
    first, second = capture.open(), capture.open()
    try:
        first.start(position)
        with pytest.raises(RetryError, match="in use by the server's process"):
            second.start(position)
    finally:
        first.close()
        second.close()


def capture_position(log: hr.Log, name: str) -> str:
    import json

    position: str = json.loads(log.note(f"cdc.{name}") or "")["position"]
    return position


def test_slots_and_publications_can_be_removed(postgres: Postgres, address: str) -> None:
    postgres.do("CREATE TABLE a (id int PRIMARY KEY)")
    capture = postgres_capture(postgres)
    caught_up(capture, address).close()
    assert len(capture.remove()) == 2
    assert capture.remove() == []


@pytest.mark.server
@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_at_random_while_the_server_restarts(
    tmp_path: Path, address: str, kills: int
) -> None:
    import psycopg2

    server = started(PostgresServer())
    assert isinstance(server, PostgresServer)
    try:
        database = Database(lambda: psycopg2.connect(server.url), mark="%s")
        database.create()
        file = tmp_path / "captured.py"
        file.write_text(
            f"import headrace as hr\nshop = hr.cdc.postgres({server.url!r}, name='shop',"
            " chunk_rows=30, partitions=1)\n"
        )
        workload = Workload(database, seed=kills, tolerate=(psycopg2.Error,)).start()
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
