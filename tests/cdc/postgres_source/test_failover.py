"""A capture that meets another server than the one that its position is of: after a failover, a
restore, or with another address. Somebody has made the slot there, so streaming would begin.
"""

import json
from pathlib import Path

import pytest

import headrace as hr
from headrace.cdc.postgres_source.position import PostgresPosition
from headrace.errors import ConfigurationError
from tests.cdc.captures import caught_up, folded_columns, postgres_capture
from tests.cdc.conftest import Postgres, started
from tests.servers.postgres_server import PostgresServer, find_program


class Standby(PostgresServer):
    """A copy of another server as it is when this one starts. It does not follow it, and can be
    promoted.
    """

    def __init__(self, primary: PostgresServer) -> None:
        super().__init__()
        self.primary = primary

    def prepare(self, data: Path) -> None:
        self.run(
            [
                find_program("pg_basebackup"),
                f"--pgdata={data}",
                "--wal-method=fetch",
                "--checkpoint=fast",
                f"--dbname={self.primary.url}",
                "--no-sync",
            ]
        )
        (data / "standby.signal").touch()

    def promote(self) -> None:
        self.run([find_program("pg_ctl"), "promote", "-w", "-D", str(self.data)])


@pytest.mark.server
def test_a_failover_onto_a_slot_that_somebody_else_made_lost_changes_silently(address: str) -> None:
    primary = started(PostgresServer())
    assert isinstance(primary, PostgresServer)
    standby = Standby(primary)
    try:
        before = Postgres(primary.url, "shop")
        before.do("CREATE TABLE a (id int PRIMARY KEY)", "INSERT INTO a VALUES (1)")
        standby.start()
        before.do("INSERT INTO a SELECT generate_series(2, 20000)")  # which the standby has not got
        caught_up(postgres_capture(before), address).close()
        primary.stop()
        standby.promote()
        after = Postgres(standby.url, "shop")
        after.do("SELECT pg_create_logical_replication_slot('headrace_shop', 'pgoutput')")
        after.do("CREATE PUBLICATION headrace_shop FOR TABLE a")
        after.do("INSERT INTO a VALUES (-1), (-2), (-3)")
        # More WAL than the primary had: the position is one that this server has too.
        after.do("CREATE TABLE other AS SELECT generate_series(1, 100000)")
        with pytest.raises(ConfigurationError, match=r"timeline 2[\s\S]*--start-over"):
            caught_up(postgres_capture(after), address)
        postgres_capture(after, tables=["a"]).run(
            log=address, until_caught_up=True, start_over=True
        )
        with hr.open_log(address) as log:
            assert folded_columns(log, "a", "id") == [(-3,), (-2,), (-1,), (1,)]
            stored = json.loads(log.note("cdc.shop") or "")["position"]
        assert PostgresPosition.parse(stored).timeline == 2
    finally:
        primary.stop()
        standby.stop()


@pytest.mark.server
def test_another_server_with_a_slot_of_that_name_is_refused(
    postgres: Postgres, address: str
) -> None:
    other = started(PostgresServer())
    try:
        assert isinstance(other, PostgresServer)
        postgres.do("CREATE TABLE a (id int PRIMARY KEY)", "INSERT INTO a VALUES (1)")
        caught_up(postgres_capture(postgres), address).close()
        there = Postgres(other.url, postgres.name)
        there.do("CREATE TABLE a (id int PRIMARY KEY)", "INSERT INTO a VALUES (2)")
        there.do(
            f"SELECT pg_create_logical_replication_slot('headrace_{postgres.name}', 'pgoutput')"
        )
        with pytest.raises(ConfigurationError, match="This is another server"):
            caught_up(postgres_capture(there), address)
    finally:
        other.stop()


def test_a_server_that_was_restored_to_an_earlier_state_is_refused(postgres: Postgres) -> None:
    postgres.do("CREATE TABLE a (id int PRIMARY KEY)")
    capture = postgres_capture(postgres)
    source = capture.open()
    try:
        position = PostgresPosition.parse(source.start(None))
    finally:
        source.close()
    for later in (str(position.at(1 << 60)), str(1 << 60)):
        source = capture.open()
        try:
            with pytest.raises(ConfigurationError, match="restored to an earlier state"):
                source.start(later)
        finally:
            source.close()


def test_a_position_of_before_servers_were_stored_goes_on(postgres: Postgres, address: str) -> None:
    postgres.do("CREATE TABLE a (id int PRIMARY KEY)", "INSERT INTO a VALUES (1)")
    capture, note = postgres_capture(postgres), f"cdc.{postgres.name}"
    with caught_up(capture, address) as log:
        state = json.loads(log.note(note) or "")
        position = PostgresPosition.parse(state["position"])
        assert position.system is not None
        before = json.dumps({**state, "version": 1, "position": str(position.lsn)})
        with log.transaction(note) as transaction:
            transaction.set_note(note, before)
        postgres.do("INSERT INTO a VALUES (2)")
        caught_up(capture, address).close()
        rows = [(row["id"], row["_change_type"]) for row in log.read("a").to_pylist()]
        assert rows == [(1, "insert"), (2, "insert")]
        state = json.loads(log.note(note) or "")
        assert PostgresPosition.parse(state["position"]).system == position.system
