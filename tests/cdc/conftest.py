"""Real database servers, each started once, when the first test asks for it; and a database of its
own for each test.
"""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.cdc.declaration import Capture
from tests.servers.database_server import DatabaseServer, ServerUnavailable
from tests.servers.mariadb_server import MariadbServer
from tests.servers.mysql_server import MysqlServer
from tests.servers.postgres_server import PostgresServer


def started(server: DatabaseServer) -> DatabaseServer:
    """Skips where no server can be had; with CI=true that is a failure."""
    try:
        return server.start()
    except ServerUnavailable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI needs a {server.kind} server: {error}")
        pytest.skip(f"no {server.kind} server: {error}")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    pytest.importorskip("psycopg2")
    server = started(PostgresServer())
    assert isinstance(server, PostgresServer)
    yield server
    server.stop()


class Postgres:
    """A database, and a connection to it."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name

    def connect(self) -> Any:
        import psycopg2

        return psycopg2.connect(self.url)

    def do(self, *statements: str) -> None:
        """In one transaction."""
        connection = self.connect()
        with connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
        connection.close()

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        connection = self.connect()
        with connection, connection.cursor() as cursor:
            cursor.execute(statement)
            rows: list[tuple[Any, ...]] = cursor.fetchall()
        connection.close()
        return rows


@pytest.fixture
def postgres(postgres_server: PostgresServer) -> Iterator[Postgres]:
    name = f"shop_{uuid.uuid4().hex[:8]}"
    server = Postgres(postgres_server.url, "postgres")
    connection = server.connect()
    connection.autocommit = True
    connection.cursor().execute(f"CREATE DATABASE {name}")
    database = Postgres(postgres_server.url_of(name), name)
    yield database
    slots = (
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE database = '{0}'"
        " AND active"
    )
    connection.cursor().execute(slots.format(name))
    connection.cursor().execute(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database ="
        f" '{name}' AND NOT active"
    )
    connection.close()


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[MariadbServer]:
    pytest.importorskip("pymysqlreplication")
    server = started(MariadbServer())
    assert isinstance(server, MariadbServer)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def mysql_server() -> Iterator[MysqlServer]:
    """Skips where there is no MySQL, in CI too: Debian has none."""
    pytest.importorskip("pymysqlreplication")
    server = MysqlServer()
    try:
        server.start()
    except ServerUnavailable as error:
        pytest.skip(str(error))
    yield server
    server.stop()


class Mariadb:
    """A database of MariaDB, or of MySQL, and a connection to it."""

    def __init__(self, server: MariadbServer | MysqlServer, name: str) -> None:
        self.server, self.name, self.url = server, name, server.url_of(name)

    @property
    def is_mysql(self) -> bool:
        return isinstance(self.server, MysqlServer)

    def capture(self, **settings: Any) -> Capture:
        make = hr.cdc.mysql if self.is_mysql else hr.cdc.mariadb
        return make(self.url, name=self.name, **settings)

    def connect(self, **settings: Any) -> Any:
        import pymysql

        return pymysql.connect(
            host="127.0.0.1",
            port=self.server.port,
            user="shop",
            database=self.name,
            charset="utf8mb4",
            **settings,
        )

    def do(self, *statements: str) -> None:
        """In one transaction, as far as there is no DDL among them."""
        connection = self.connect()
        with connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            connection.commit()

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        connection = self.connect()
        with connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return [tuple(row) for row in cursor.fetchall()]


@pytest.fixture(params=["mariadb", "mysql"])
def mariadb(request: pytest.FixtureRequest) -> Iterator[Mariadb]:
    server = request.getfixturevalue(f"{request.param}_server")
    name = f"shop_{uuid.uuid4().hex[:8]}"
    Mariadb(server, "shop").do(f"CREATE DATABASE {name}")
    yield Mariadb(server, name)
    Mariadb(server, "shop").do(f"DROP DATABASE {name}")


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'log'}"
