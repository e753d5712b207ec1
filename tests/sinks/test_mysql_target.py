"""The sink `mysql`, against a real MariaDB (and MySQL, where there is one): the contract, keys that
most collations take for one, values at the edges of types, tables of somebody else, and a server
that goes away.
"""

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

import headrace as hr
from headrace.errors import ConfigurationError, TargetMismatch, TargetUnavailable
from headrace.log.dead_letters import read_dead_letters
from headrace.sinks.checkpoint import new_owner
from headrace.sinks.sync import SinkLoop
from headrace.testing.sink_contract import (
    AT,
    SinkContract,
    account,
    assert_equal_to_log,
    caught_up,
    next_batch,
    no_dead_letters,
    rows_of,
)
from tests.cdc.conftest import Mariadb
from tests.cdc.conftest import started as start_server
from tests.servers.mariadb_server import MariadbServer
from tests.waits import wait_until

pymysql = pytest.importorskip("pymysql")


def dead_reasons(log: hr.Log, sink: str) -> list[str]:
    return sorted(dead_letter["reason"] for dead_letter in read_dead_letters(log, sink))


class TestMysql(SinkContract):
    stores_nan = False

    @pytest.fixture
    def sink(self, mariadb: Mariadb) -> hr.sinks.Sink:
        return hr.sinks.mysql(mariadb.url)

    def test_keys_that_collations_take_for_one_stay_apart(
        self, sink: hr.sinks.Sink, log: hr.Log
    ) -> None:
        log.create_table("words", "k STRING, part BINARY, n INT", key=["k", "part"])
        keys = [
            "a",
            "A",
            "a ",
            " a",
            "ä",
            "a\u0308",
            "ß",
            "ss",
            "",
            " ",
            "a\0",
            "'",
            "\\",
            "'' -- ",
        ]
        with log.producer("words") as producer:
            producer.upsert([{"k": key, "part": b"\0", "n": n} for n, key in enumerate(keys)])
            producer.upsert(
                [{"k": "a", "part": b"", "n": 100}, {"k": "a", "part": b"\0\0", "n": 1}]
            )
        assert caught_up(sink, log, "words").status.refused == 0
        assert len(rows_of(sink, log, "words")) == len(keys) + 2
        assert_equal_to_log(sink, log, "words")
        with log.producer("words") as producer:
            producer.delete([("A", b"\0"), ("a ", b"\0"), ("\\", b"\0"), ("a", b"")])
        caught_up(sink, log, "words")
        assert len(rows_of(sink, log, "words")) == len(keys) - 2
        assert_equal_to_log(sink, log, "words")

    def test_values_at_the_edges_of_types(self, sink: hr.sinks.Sink, log: hr.Log) -> None:
        log.create_table(
            "edges",
            "id BIGINT, single FLOAT, twice DOUBLE, big DECIMAL(38, 0), fine DECIMAL(38, 20),"
            " day DATE, `at` TIMESTAMP, plain TIMESTAMP_NTZ, raw BINARY, words STRING, m"
            " MAP<STRING, DECIMAL(5, 2)>",
            key="id",
        )
        names = log.topic("edges").arrow_schema.names
        nothing = dict.fromkeys(name for name in names if name != "_change_type")
        first = datetime.min.replace(tzinfo=UTC)
        last = datetime.max.replace(tzinfo=UTC)
        edges: list[dict[str, Any]] = [
            {"single": 0.1, "twice": 0.1},
            {"single": -0.0, "twice": -0.0},
            {"single": 3.4028234663852886e38, "twice": 1.7976931348623157e308},
            {"single": 1.401298464324817e-45, "twice": 5e-324},
            {"single": 16777217.0, "twice": 1234567890.12345678},
            {"big": Decimal("9" * 38), "fine": Decimal("0." + "0" * 19 + "1")},
            {"big": Decimal("-" + "9" * 38), "fine": Decimal("-" + "9" * 18 + "." + "9" * 20)},
            {"day": date(1, 1, 1), "at": first, "plain": first.replace(tzinfo=None)},
            {"day": date(9999, 12, 31), "at": last, "plain": last.replace(tzinfo=None)},
            {"at": AT.replace(year=1969), "plain": AT.replace(year=2040, tzinfo=None)},
            {"raw": bytes(range(256)), "words": "".join(map(chr, range(1, 256))) + "🦆" * 100},
            {"m": [("b", Decimal("1.50")), ("a", None)]},
            {"m": []},
        ]
        with log.producer("edges") as producer:
            producer.upsert([{**nothing, "id": n, **row} for n, row in enumerate(edges)])
        assert caught_up(sink, log, "edges").status.refused == 0
        assert sink.check("edges", log=log.address).is_equal  # -0.0 is 0.0
        minus_zero = {**nothing, "id": 1, "single": 0.0, "twice": 0.0}
        with log.producer("edges") as producer:
            producer.upsert(minus_zero)
        caught_up(sink, log, "edges")
        assert_equal_to_log(sink, log, "edges")

    def test_a_key_of_zero_is_not_replaced_by_the_next_number(
        self, sink: hr.sinks.Sink, log: hr.Log, mariadb: Mariadb
    ) -> None:
        mariadb.do(
            "CREATE TABLE accounts (id bigint AUTO_INCREMENT PRIMARY KEY, name longtext, amount"
            " decimal(12, 2))"
        )
        with log.producer("accounts") as producer:
            producer.upsert([account(0), account(1)])
        caught_up(sink, log, "accounts")
        assert mariadb.query("SELECT id FROM accounts ORDER BY id") == [(0,), (1,)]

    def test_another_unique_index_does_not_change_a_row_of_another_key(
        self, sink: hr.sinks.Sink, log: hr.Log, mariadb: Mariadb
    ) -> None:
        """`ON DUPLICATE KEY UPDATE` would give row 1 the values of row 2."""
        mariadb.do(
            "CREATE TABLE accounts (id bigint PRIMARY KEY, name varchar(50) UNIQUE, amount"
            " decimal(12, 2))"
        )
        with log.producer("accounts") as producer:
            producer.upsert([account(1, name="ada"), account(3, name="eve")])
        caught_up(sink, log, "accounts")
        with log.producer("accounts") as producer:
            producer.upsert(
                [account(2, 9, name="ada"), account(3, 5, name="eva"), account(4, 7, "x")]
            )
        assert caught_up(sink, log, "accounts").status.refused == 1
        assert mariadb.query("SELECT id, name, amount FROM accounts ORDER BY id") == [
            (1, "ada", 1),
            (3, "eva", 5),
            (4, "x", 7),
        ]
        assert "Duplicate entry" in dead_reasons(log, "accounts.mysql")[0]

    def test_rows_that_a_constraint_or_a_type_refuses_become_dead_letters(
        self, sink: hr.sinks.Sink, log: hr.Log, mariadb: Mariadb
    ) -> None:
        mariadb.do(
            "CREATE TABLE accounts (id bigint PRIMARY KEY, name varchar(5), amount decimal(12, 2)"
            " CHECK (amount < 100))"
        )
        rows = {3: account(3, 500), 9: account(9, name="much too long")}
        with log.producer("accounts") as producer:
            producer.upsert([rows.get(number, account(number)) for number in range(40)])
        assert caught_up(sink, log, "accounts").status.refused == 2
        assert len(rows_of(sink, log, "accounts")) == 38
        reasons = dead_reasons(log, "accounts.mysql")
        assert ["constraint" in reasons[0].lower(), "too long" in reasons[1]] == [True, True]
        mariadb.do(
            "CREATE TABLE orders (account bigint, FOREIGN KEY (account) REFERENCES accounts (id))",
            "INSERT INTO orders VALUES (1)",
        )
        with log.producer("accounts") as producer:
            producer.delete([1, 2])
        assert caught_up(sink, log, "accounts").status.refused == 1
        assert mariadb.query("SELECT id FROM accounts WHERE id < 4") == [(0,), (1,)]

    def test_a_row_larger_than_a_packet_is_a_dead_letter_and_statements_stay_below_it(
        self, sink: hr.sinks.Sink, log: hr.Log, mariadb: Mariadb
    ) -> None:
        ((longest,),) = mariadb.query("SELECT @@max_allowed_packet")
        with log.producer("accounts") as producer:
            producer.upsert([account(number, name="é" * 400_000) for number in range(40)])
            producer.upsert([account(77, name="x" * int(longest)), account(78)])
        assert caught_up(sink, log, "accounts").status.refused == 1
        assert "max_allowed_packet" in dead_reasons(log, "accounts.mysql")[0]
        assert len(rows_of(sink, log, "accounts")) == 41

    def test_a_table_that_was_dropped_is_filled_again(
        self, sink: hr.sinks.Sink, log: hr.Log, mariadb: Mariadb
    ) -> None:
        with log.producer("accounts") as producer:
            producer.upsert([account(1), account(2)])
        caught_up(sink, log, "accounts")
        mariadb.do("DROP TABLE accounts")
        assert caught_up(sink, log, "accounts").status.rows == 2
        assert_equal_to_log(sink, log, "accounts")

    @pytest.mark.parametrize(
        ("table", "match"),
        [
            (
                "(id bigint, nam text, amount decimal(12, 2))",
                "no column 'name': did you mean 'nam'",
            ),
            ("(id bigint, name text, amount decimal(12, 2))", r"[\s\S]*ADD PRIMARY KEY"),
            (
                "(id bigint PRIMARY KEY, name char(9), amount decimal(12, 2))",
                r"'name'[\s\S]*char\(9\)[\s\S]*values of STRING[\s\S]*MODIFY `name` longtext",
            ),
            (
                "(id bigint PRIMARY KEY, name text, amount decimal(12, 1))",
                r"'amount'[\s\S]*MODIFY `amount` decimal\(12,2\)",
            ),
            (
                "(id bigint PRIMARY KEY, name text, amount decimal(12, 2)) ENGINE=MyISAM",
                r"without transactions[\s\S]*ENGINE=InnoDB",
            ),
        ],
    )
    def test_a_table_of_somebody_else_that_does_not_fit(
        self, sink: hr.sinks.Sink, log: hr.Log, mariadb: Mariadb, table: str, match: str
    ) -> None:
        mariadb.do(f"CREATE TABLE accounts {table}")
        with pytest.raises(TargetMismatch, match=match):
            caught_up(replace(sink, create=False), log, "accounts")

    def test_a_key_with_a_collation_that_takes_two_keys_for_one_is_refused(
        self, sink: hr.sinks.Sink, log: hr.Log, mariadb: Mariadb
    ) -> None:
        log.create_table("words", "k STRING, n INT", key="k")
        mariadb.do(
            "CREATE TABLE words (k varchar(50) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci"
            " PRIMARY KEY, n int)"
        )
        with pytest.raises(TargetMismatch, match=r"'a' and 'A'[\s\S]*MODIFY `k` varchar") as raised:
            caught_up(sink, log, "words")
        mariadb.do(raised.value.fix)
        with log.producer("words") as producer:
            producer.upsert([{"k": "a", "n": 1}, {"k": "A ", "n": 2}])
        caught_up(sink, log, "words")
        assert_equal_to_log(sink, log, "words")

    def test_no_table_and_no_right_to_create_one(
        self, sink: hr.sinks.Sink, log: hr.Log, mariadb: Mariadb
    ) -> None:
        role = f"poor_{mariadb.name}"[:30]
        mariadb.do(f"CREATE USER {role}", f"GRANT SELECT ON {mariadb.name}.* TO {role}")
        poor = hr.sinks.mysql(mariadb.url.replace("shop@", f"{role}@"))
        with pytest.raises(TargetMismatch, match=r"denied[\s\S]*as a user that may, run: CREATE"):
            caught_up(poor, log, "accounts")
        with pytest.raises(TargetMismatch, match=r"no table 'accounts'[\s\S]*CREATE TABLE"):
            caught_up(replace(sink, create=False), log, "accounts")
        caught_up(sink, log, "accounts")
        with pytest.raises(TargetMismatch, match=r"command denied[\s\S]*GRANT SELECT"):
            caught_up(poor, log, "accounts")
        mariadb.do(f"DROP USER {role}")

    def test_an_address_that_is_wrong(self, log: hr.Log, mariadb: Mariadb) -> None:
        with pytest.raises(ConfigurationError, match="Unknown database"):
            caught_up(hr.sinks.mysql(mariadb.url + "x"), log, "accounts")
        with pytest.raises(ConfigurationError, match=r"Access denied[\s\S]*MYSQL_PWD") as raised:
            caught_up(
                hr.sinks.mysql(mariadb.url.replace("shop@", "root:secret77@")), log, "accounts"
            )
        assert "secret77" not in str(raised.value)

    def test_a_commit_whose_outcome_is_unknown_is_read_back(
        self, sink: hr.sinks.Sink, log: hr.Log, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The connection is lost after the server has committed, before it has said so."""
        from headrace.sinks.mysql_target import MysqlTarget

        real = MysqlTarget._execute
        lost: list[str | bytes] = []

        def losing(target: MysqlTarget, statement: str | bytes) -> Any:
            result = real(target, statement)
            if statement == "COMMIT" and target.owner >= 0 and not lost:
                lost.append(statement)
                target._db._force_close()
                raise OSError("reset")
            return result

        monkeypatch.setattr(MysqlTarget, "_execute", losing)
        with log.producer("accounts") as producer:
            producer.upsert([account(1), account(2)])
        caught_up(sink, log, "accounts")
        assert lost
        assert_equal_to_log(sink, log, "accounts")

    def test_a_deadlock_is_tried_again(
        self, sink: hr.sinks.Sink, log: hr.Log, mariadb: Mariadb
    ) -> None:
        with log.producer("accounts") as producer:
            producer.upsert([account(1), account(2)])
        caught_up(sink, log, "accounts")
        with mariadb.connect() as other, other.cursor() as cursor:
            cursor.execute("UPDATE accounts SET name = 'x' WHERE id = 2")
            with log.producer("accounts") as producer:
                producer.upsert([account(1, 5), account(2, 6)])
            syncing = SinkLoop(sink, log, "accounts")
            thread = threading.Thread(target=syncing.run, kwargs={"until_caught_up": True})
            thread.start()
            with mariadb.connect() as third, third.cursor() as watching:

                def waits() -> bool:
                    watching.execute("SELECT count(*) FROM information_schema.innodb_trx")
                    return int(watching.fetchone()[0]) > 1

                if not mariadb.is_mysql:
                    wait_until(waits, interval_s=0.3)  # the server caches it for 0.1 s
            # Whichever of the two the server chooses as the victim, the sink ends up right.
            with suppress(pymysql.err.OperationalError):
                cursor.execute("UPDATE accounts SET name = 'y' WHERE id = 1")
            other.rollback()
        thread.join(60)
        assert not thread.is_alive()
        assert_equal_to_log(sink, log, "accounts")

    def test_an_owner_that_is_halted_in_a_commit_is_fenced(
        self, sink: hr.sinks.Sink, log: hr.Log
    ) -> None:
        with log.producer("accounts") as producer:
            producer.upsert([account(1)])
        shape = sink.shape_for(log.topic("accounts"))
        with sink.open(shape, log) as older, sink.open(shape, log) as newer:
            older.prepare()
            newer.prepare()
            batch = next_batch(log, older, older.begin(new_owner()))
            with older.atomic():
                older.read_checkpoint()
                older.merge(batch)
                with pytest.raises(TargetUnavailable, match="[Ll]ock wait"):
                    newer._execute("SET innodb_lock_wait_timeout = 1")  # type: ignore[attr-defined]
                    newer.begin(new_owner())
            newer.begin(new_owner())
            assert newer.apply(batch, no_dead_letters)
        assert_equal_to_log(sink, log, "accounts")


def test_a_server_that_is_not_there_is_said_at_once(tmp_path: Any) -> None:
    sink = hr.sinks.mysql("mysql://shop@127.0.0.1:1/shop")
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_table("accounts", "id BIGINT", key="id")
        with pytest.raises(TargetUnavailable, match=r"127\.0\.0\.1[\s\S]*see that the server runs"):
            sink.check("accounts", log=log.address)


@pytest.fixture
def own_server() -> Iterator[MariadbServer]:
    server = start_server(MariadbServer())
    assert isinstance(server, MariadbServer)
    yield server
    server.stop()


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back(
    own_server: MariadbServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sink = hr.sinks.mysql(own_server.url, batch_rows=50)
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
                producer.upsert([{"id": number % 7, "amount": number}, {"id": number, "amount": 1}])
        wait_until(lambda: syncing.status.positions == log.end_offsets("accounts"), 60)
        stop.set()
        thread.join(30)
        assert_equal_to_log(sink, log, "accounts")
