"""The servers that sinks write to; databases are started as for change capture."""

from collections.abc import Iterator

import pytest

from tests.cdc.conftest import (
    mariadb,
    mariadb_server,
    mysql_server,
    postgres,
    postgres_server,
    started,
)
from tests.servers.redis_server import RedisServer
from tests.servers.s3_server import S3Server

__all__ = ["mariadb", "mariadb_server", "mysql_server", "postgres", "postgres_server"]


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    pytest.importorskip("redis")
    server = started(RedisServer())
    assert isinstance(server, RedisServer)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    pytest.importorskip("obstore")
    server = started(S3Server())
    assert isinstance(server, S3Server)
    yield server
    server.stop()


@pytest.fixture
def s3_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place in an empty bucket, with credentials in the environment."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return s3_server.new_bucket()
