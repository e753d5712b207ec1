"""The servers that sinks write to; Postgres is started as for change capture."""

from collections.abc import Iterator

import pytest

from tests.cdc.conftest import postgres, postgres_server, started
from tests.servers.redis_server import RedisServer

__all__ = ["postgres", "postgres_server"]


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    pytest.importorskip("redis")
    server = started(RedisServer())
    assert isinstance(server, RedisServer)
    yield server
    server.stop()
