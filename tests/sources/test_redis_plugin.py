"""The example of a source from outside the package, against a real server: it passes the suite that
every source passes, exactly once.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import ConfigurationError
from headrace.sources import Source
from headrace.testing.source_contract import ROWS, SourceContract, numbered
from tests.cdc.conftest import started
from tests.servers.redis_server import RedisServer

pytest.importorskip("redis")

import redis
from plugins.headrace_redis import headrace_redis

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    server = RedisServer()
    started(server)
    yield server
    server.stop()


class Stream:
    def __init__(self, client: Any, key: str) -> None:
        self.client = client
        self.key = key

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self.client.xadd(self.key, dict(row))

    def add_bad(self) -> None:
        self.client.xadd(self.key, {"id": "x", "name": "bad"})


class TestRedisStream(SourceContract):
    @pytest.fixture
    def source(self, server: RedisServer, tmp_path: Path) -> Source:
        return headrace_redis.source(
            f"redis-stream://127.0.0.1:{server.port}/{tmp_path.name}", topic="rows", schema=ROWS
        )

    @pytest.fixture
    def outside(self, server: RedisServer, tmp_path: Path) -> Iterator[Stream]:
        with redis.Redis.from_url(server.url, decode_responses=True) as client:
            yield Stream(client, tmp_path.name)

    def test_fields_that_an_entry_lacks_are_null(
        self, source: Source, outside: Stream, log: hr.Log
    ) -> None:
        outside.client.xadd(outside.key, {"id": 0})
        outside.client.xadd(outside.key, {"id": 1, "name": "row 1"})
        self.read(source, log)
        rows = log.read("rows").to_pylist()
        assert [(row["id"], row["name"]) for row in rows] == [(0, None), (1, "row 1")]

    def test_entries_that_were_removed_before_they_were_read_are_noticed(
        self, source: Source, outside: Stream, log: hr.Log
    ) -> None:
        outside.add(numbered(0, 3))
        self.read(source, log)
        outside.add(numbered(3, 9))
        for entry, _ in outside.client.xrange(outside.key)[:6]:
            outside.client.xdel(outside.key, entry)
        with pytest.raises(ConfigurationError, match="were removed"):
            self.read(source, log)
