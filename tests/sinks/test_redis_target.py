"""The sink `redis`, against a real server: the contract for hashes and for JSON, and a server that
has forgotten everything.
"""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import InputError, TargetMismatch
from headrace.log.dead_letters import read_dead_letters
from headrace.sinks.sync import SinkLoop
from headrace.testing.sink_contract import SinkContract, account, assert_equal_to_log, caught_up
from tests.servers.redis_server import RedisServer

redis = pytest.importorskip("redis")


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    with redis.Redis.from_url(redis_server.url, decode_responses=True) as client:
        client.flushall()
        yield client


class TestHashes(SinkContract):
    @pytest.fixture
    def sink(self, redis_server: RedisServer, client: Any) -> hr.sinks.Sink:
        return hr.sinks.redis(redis_server.url)

    def test_how_a_row_stands_there(self, sink: hr.sinks.Sink, log: hr.Log, client: Any) -> None:
        with log.producer("accounts") as producer:
            producer.upsert([account(7, "1.50")])
        caught_up(sink, log, "accounts")
        assert client.hgetall("accounts:7") == {"id": "7", "name": "ada", "amount": "1.50"}
        with log.producer("accounts") as producer:
            producer.upsert([{"id": 7, "name": None, "amount": 2}])
        caught_up(sink, log, "accounts")
        assert client.hgetall("accounts:7") == {"id": "7", "amount": "2.00"}

    def test_a_key_that_was_something_else_is_replaced(
        self, sink: hr.sinks.Sink, log: hr.Log, client: Any
    ) -> None:
        client.set("accounts:7", "text")
        client.set("accountsx:7", "not ours")
        with log.producer("accounts") as producer:
            producer.upsert([account(7)])
        caught_up(sink, log, "accounts")
        assert_equal_to_log(sink, log, "accounts")
        assert client.get("accountsx:7") == "not ours"


class TestJson(SinkContract):
    @pytest.fixture
    def sink(self, redis_server: RedisServer, client: Any) -> hr.sinks.Sink:
        return hr.sinks.redis(redis_server.url, encoding="json")

    def test_how_a_row_stands_there(self, sink: hr.sinks.Sink, log: hr.Log, client: Any) -> None:
        log.create_table("stock", "shop STRING, item BIGINT, left INT", key=["shop", "item"])
        with log.producer("stock") as producer:
            producer.upsert([{"shop": "a b", "item": 1, "left": 3}])
        caught_up(sink, log, "stock")
        assert json.loads(client.get('stock:["a b",1]')) == {"shop": "a b", "item": 1, "left": 3}


def test_values_that_json_cannot_carry_become_dead_letters(
    redis_server: RedisServer, client: Any, tmp_path: Path
) -> None:
    sink = hr.sinks.redis(redis_server.url, encoding="json")
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_table("days", "id BIGINT, day DATE", key="id")
        with log.producer("days") as producer:
            producer.upsert(
                pa.table(
                    {
                        "id": range(9),
                        "day": pa.array([*range(7), 10_000_000, 8], pa.int32()).cast(pa.date32()),
                    }
                )
            )
        assert caught_up(sink, log, "days").status.refused == 1
        (dead_letter,) = read_dead_letters(log, "days.redis")
        assert (
            dead_letter["source_offset"],
            "outside the years" in dead_letter["reason"],
            "10000000" in dead_letter["row"],
        ) == (7, True, True)
        assert client.exists(*[f"days:{number}" for number in range(9)]) == 8


def test_a_server_that_has_forgotten_is_filled_again(
    redis_server: RedisServer, client: Any, tmp_path: Path
) -> None:
    """Rows and place are lost together."""
    sink, stop = hr.sinks.redis(redis_server.url), threading.Event()
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_table("accounts", "id BIGINT", key="id")
        thread = threading.Thread(target=SinkLoop(sink, log, "accounts").run, kwargs={"stop": stop})
        thread.start()
        deadline = time.monotonic() + 30
        with log.producer("accounts") as producer:
            for number in (1, 2):
                producer.upsert([{"id": number}])
                while not client.exists(f"accounts:{number}") and time.monotonic() < deadline:
                    time.sleep(0.02)
                if number == 1:
                    client.flushall()
        while client.exists("accounts:1", "accounts:2") < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        stop.set()
        thread.join(20)
        assert_equal_to_log(sink, log, "accounts")


def test_a_checkpoint_key_of_another_type_ends_the_sync_with_what_to_do(
    redis_server: RedisServer, client: Any, tmp_path: Path
) -> None:
    """WRONGTYPE was taken for a server that is away, and tried again for ever."""
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_table("accounts", "id BIGINT", key="id")
        client.rpush("headrace:sink:accounts", "somebody else's")
        with pytest.raises(TargetMismatch, match=r"is a list[\s\S]*table=…"):
            caught_up(hr.sinks.redis(redis_server.url), log, "accounts")


@pytest.mark.parametrize("encoding", ["hash", "json"])
def test_a_check_goes_on_past_keys_that_are_no_rows(
    redis_server: RedisServer, client: Any, tmp_path: Path, encoding: str
) -> None:
    """A key of another type, and values that are not those of the column."""
    sink = hr.sinks.redis(redis_server.url, encoding=encoding)
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_table("accounts", "id BIGINT, day DATE", key="id")
        with log.producer("accounts") as producer:
            producer.upsert([{"id": number, "day": None} for number in range(2000)])
        caught_up(sink, log, "accounts")
        client.delete("accounts:7", "accounts:8", "accounts:9")
        client.rpush("accounts:7", "no row")
        if encoding == "hash":
            client.hset("accounts:8", mapping={"id": "8", "day": "some day"})
        else:
            client.set("accounts:8", '{"id": 8, "day": "some day"}')
        compared = sink.check("accounts", log=log.address)
        assert compared.counts == {"missing": 3, "extra": 0, "different": 0}
        assert compared.unreadable == 2
        assert "'accounts:7'" in " ".join(compared.unreadable_examples)
        assert "some day" in " ".join(compared.unreadable_examples)


def test_an_unknown_encoding() -> None:
    with pytest.raises(InputError, match="did you mean 'hash'"):
        hr.sinks.redis("redis://nowhere", encoding="hsh")
