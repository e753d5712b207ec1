"""The sink `postgres`, against a real server: the contract, what constraints refuse, a server that
goes away, and targets that are not as they must be.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import ConfigurationError, TargetMismatch
from headrace.log.dead_letters import read_dead_letters
from headrace.sinks.sync import SinkLoop
from headrace.testing.sink_contract import (
    SinkContract,
    account,
    assert_equal_to_log,
    caught_up,
    rows_of,
)
from tests.cdc.conftest import Postgres
from tests.cdc.conftest import started as start_server
from tests.servers.postgres_server import PostgresServer

pytest.importorskip("psycopg")


class TestPostgres(SinkContract):
    @pytest.fixture
    def sink(self, postgres: Postgres) -> hr.sinks.Sink:
        return hr.sinks.postgres(postgres.url)

    def test_rows_that_a_constraint_or_a_type_refuses_become_dead_letters(
        self, sink: hr.sinks.Sink, log: hr.Log, postgres: Postgres
    ) -> None:
        postgres.do(
            "CREATE TABLE accounts (id bigint PRIMARY KEY, name varchar(5), amount numeric CHECK"
            " (amount < 100))"
        )
        rows = {3: account(3, 500), 9: account(9, name="much too long"), 11: account(11, name="\0")}
        with log.producer("accounts") as producer:
            producer.upsert([rows.get(number, account(number)) for number in range(40)])
        assert caught_up(sink, log, "accounts").status.refused == 3
        assert len(rows_of(sink, log, "accounts")) == 37
        reasons = sorted(
            dead_letter["reason"] for dead_letter in read_dead_letters(log, "accounts.postgres")
        )
        assert [
            "violates check constraint" in reasons[1],
            "value too long" in reasons[2],
            "invalid byte sequence" in reasons[0],
        ] == [True] * 3
        assert {each.key["id"] for each in sink.check("accounts", log=log.address).examples} == {
            3,
            9,
            11,
        }

    def test_a_row_that_others_hold_on_to_is_not_deleted(
        self, sink: hr.sinks.Sink, log: hr.Log, postgres: Postgres
    ) -> None:
        with log.producer("accounts") as producer:
            producer.upsert([account(1), account(2)])
        caught_up(sink, log, "accounts")
        postgres.do(
            "CREATE TABLE orders (account bigint REFERENCES accounts)",
            "INSERT INTO orders VALUES (1)",
        )
        with log.producer("accounts") as producer:
            producer.delete([1, 2])
        assert caught_up(sink, log, "accounts").status.refused == 1
        assert postgres.query("SELECT id FROM accounts") == [(1,)]
        assert (
            "violates foreign key constraint"
            in read_dead_letters(log, "accounts.postgres")[0]["reason"]
        )

    def test_a_table_that_was_dropped_is_filled_again(
        self, sink: hr.sinks.Sink, log: hr.Log, postgres: Postgres
    ) -> None:
        with log.producer("accounts") as producer:
            producer.upsert([account(1), account(2)])
        caught_up(sink, log, "accounts")
        postgres.do("DROP TABLE accounts")
        assert caught_up(sink, log, "accounts").status.rows == 2
        assert_equal_to_log(sink, log, "accounts")

    def test_a_table_in_a_schema_with_columns_of_its_own(
        self, log: hr.Log, postgres: Postgres
    ) -> None:
        postgres.do(
            'CREATE SCHEMA "Reports"',
            'CREATE TABLE "Reports".accounts (id bigint PRIMARY KEY, name text, amount numeric,'
            " seen timestamptz DEFAULT now())",
        )
        sink = hr.sinks.postgres(postgres.url, table="Reports.accounts", create=False)
        with log.producer("accounts") as producer:
            producer.upsert([account(1)])
        caught_up(sink, log, "accounts")
        assert postgres.query('SELECT id, seen IS NOT NULL FROM "Reports".accounts') == [(1, True)]
        assert_equal_to_log(sink, log, "accounts")

    def test_a_target_that_does_not_fit(
        self, sink: hr.sinks.Sink, log: hr.Log, postgres: Postgres
    ) -> None:
        modest = replace(sink, create=False)
        with pytest.raises(TargetMismatch, match=r"no table 'accounts'[\s\S]*CREATE TABLE"):
            caught_up(modest, log, "accounts")
        postgres.do("CREATE TABLE accounts (id bigint, nam text, amount numeric)")
        with pytest.raises(TargetMismatch, match="no column 'name': did you mean 'nam'"):
            caught_up(modest, log, "accounts")
        with pytest.raises(TargetMismatch, match="ADD PRIMARY KEY"):
            caught_up(sink, log, "accounts")
        with pytest.raises(TargetMismatch, match=r"does not exist[\s\S]*To fix"):
            caught_up(replace(sink, table="nowhere.accounts"), log, "accounts")

    def test_a_missing_privilege_is_reported_with_the_statement(
        self, log: hr.Log, postgres: Postgres
    ) -> None:
        role = f"poor_{postgres.name}"
        postgres.do(
            f"CREATE ROLE {role} LOGIN",
            "CREATE TABLE accounts (id bigint PRIMARY KEY, name text)",
            f"GRANT ALL ON accounts TO {role}",
        )
        poor = hr.sinks.postgres(postgres.url.replace("postgres@", f"{role}@"))
        with pytest.raises(
            TargetMismatch,
            match=r"permission denied[\s\S]*as a role that may, run: CREATE TABLE _headrace_sinks",
        ):
            caught_up(poor, log, "accounts")
        postgres.do(
            "CREATE TABLE _headrace_sinks (target text PRIMARY KEY, applied text NOT NULL)",
            f"GRANT ALL ON _headrace_sinks TO {role}",
        )
        with pytest.raises(
            TargetMismatch, match=r'must be owner[\s\S]*ALTER TABLE "accounts" ADD COLUMN "amount"'
        ):
            caught_up(poor, log, "accounts")
        postgres.do('ALTER TABLE accounts ADD COLUMN "amount" numeric(12, 2)')
        with log.producer("accounts") as producer:
            producer.upsert([account(1)])
        caught_up(poor, log, "accounts")
        assert postgres.query("SELECT id FROM accounts") == [(1,)]

    def test_an_address_that_is_wrong(self, log: hr.Log, postgres: Postgres) -> None:
        with pytest.raises(ConfigurationError, match=r"does not exist[\s\S]*PGPASSWORD"):
            caught_up(hr.sinks.postgres(postgres.url + "x"), log, "accounts")

    def test_large_values_that_a_change_left_as_they_were(
        self, sink: hr.sinks.Sink, log: hr.Log
    ) -> None:
        log.create_table(
            "documents", "id BIGINT, title STRING, body STRING, _marks STRING", key="id"
        )
        unchanged = '{"body": {"unchanged": true}}'
        with log.producer("documents") as producer:
            producer.upsert(
                [
                    {"id": number, "title": "a", "body": f"long {number}", "_marks": None}
                    for number in range(4)
                ]
            )
        caught_up(sink, log, "documents")
        with log.producer("documents") as producer:
            producer.upsert(
                [
                    {"id": 1, "title": "b", "body": None, "_marks": unchanged},
                    {"id": 2, "title": "b", "body": "new", "_marks": None},
                ]
            )
            producer.upsert(
                [
                    {"id": 2, "title": "c", "body": None, "_marks": unchanged},
                    {"id": 3, "title": "c", "body": None, "_marks": None},
                ]
            )
        caught_up(sink, log, "documents")
        found = [(row["title"], row["body"]) for row in rows_of(sink, log, "documents")]
        assert found == [("a", "long 0"), ("b", "long 1"), ("c", "new"), ("c", None)]
        assert sink.check("documents", log=log.address).is_equal


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    server = start_server(PostgresServer())
    assert isinstance(server, PostgresServer)
    yield server
    server.stop()


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back(
    own_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sink = hr.sinks.postgres(own_server.url, batch_rows=50)
    with hr.open_log(f"file:{tmp_path_factory.mktemp('log')}") as log:
        log.create_table("accounts", "id BIGINT, amount BIGINT", key="id")
        stop = threading.Event()
        syncing = SinkLoop(sink, log, "accounts")
        thread = threading.Thread(target=syncing.run, kwargs={"stop": stop})
        thread.start()
        with log.producer("accounts") as producer:
            for number in range(60):
                if number in {20, 40}:
                    own_server.stop_process()
                if number in {30, 50}:
                    own_server.start_process()
                producer.upsert(pa.table({"id": [number % 7, number], "amount": [number, number]}))
                time.sleep(0.02)
        deadline = time.monotonic() + 60
        while (
            syncing.status.positions != log.end_offsets("accounts") and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        stop.set()
        thread.join(30)
        assert_equal_to_log(sink, log, "accounts")
