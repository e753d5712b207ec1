"""The sinks `elasticsearch` and `opensearch`, against a real OpenSearch: the contract, and what a
server without transactions could get wrong.
"""

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import InputError, TargetMismatch
from headrace.log.dead_letters import read_dead_letters
from headrace.sinks.elasticsearch_target import CHECKPOINT_INDEX, ElasticsearchTarget, SearchServer
from headrace.testing.sink_contract import (
    SinkContract,
    assert_equal_to_log,
    caught_up,
    next_batch,
    no_dead_letters,
)
from headrace.testing.strikes import StrikePoint
from tests.cdc.conftest import started
from tests.servers.opensearch_server import OpenSearchServer

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def opensearch() -> Iterator[OpenSearchServer]:
    server = started(OpenSearchServer())
    assert isinstance(server, OpenSearchServer)
    yield server
    server.stop()


def ask(server: OpenSearchServer, method: str, path: str, body: Any = None) -> Any:
    request = urllib.request.Request(
        server.url + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


@pytest.fixture
def emptied(opensearch: OpenSearchServer) -> OpenSearchServer:
    for index in ask(opensearch, "GET", "/_all/_settings?expand_wildcards=all"):
        ask(opensearch, "DELETE", f"/{index}")
    return opensearch


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_table("accounts", "id BIGINT, name STRING", key="id")
        yield log


@pytest.fixture
def sink(emptied: OpenSearchServer) -> hr.sinks.Sink:
    return hr.sinks.opensearch(emptied.url)


class TestContract(SinkContract):
    is_atomic = False
    stores_nan = False
    points = (
        StrikePoint(ElasticsearchTarget, "_send", "before"),
        StrikePoint(ElasticsearchTarget, "_send", "after"),
        StrikePoint(ElasticsearchTarget, "_store", "before", 1),
        StrikePoint(ElasticsearchTarget, "_store", "after", 1),
    )

    @pytest.fixture
    def sink(self, emptied: OpenSearchServer) -> hr.sinks.Sink:
        return hr.sinks.opensearch(emptied.url)


def test_how_a_row_is_stored_and_found(
    sink: hr.sinks.Sink, emptied: OpenSearchServer, log: hr.Log
) -> None:
    schema = "shop STRING, item BIGINT, name STRING, price DECIMAL(9, 2), `at` TIMESTAMP"
    log.create_table("stock", schema, key=["shop", "item"])
    with log.producer("stock") as producer:
        producer.upsert(
            {"shop": "a b", "item": 1, "name": "Red shoes", "price": Decimal("1.50"), "at": None}
        )
    caught_up(sink, log, "stock")
    ask(emptied, "POST", "/stock/_refresh")
    query = {
        "query": {"bool": {"must": [{"match": {"name": "shoes"}}, {"range": {"price": {"gt": 1}}}]}}
    }
    (hit,) = ask(emptied, "POST", "/stock/_search", query)["hits"]["hits"]
    assert (hit["_id"], hit["_source"]["price"]) == ('["a b",1]', "1.50")


def test_keys_that_the_server_would_take_for_something_else(
    sink: hr.sinks.Sink, log: hr.Log
) -> None:
    """An empty id is none, and the server would make one up."""
    log.create_table("texts", "k STRING, n INT", key="k")
    keys = ["", "[", '[""]', '""', " ", "a/b?c=d&e", "ü" * 256, '"', "\\", "_doc", "1", "[1]"]
    with log.producer("texts") as producer:
        producer.upsert([{"k": key, "n": number} for number, key in enumerate(keys)])
        producer.upsert({"k": "ü" * 257, "n": -1})
    status = caught_up(sink, log, "texts").status
    assert (status.upserts, status.refused) == (len(keys) + 1, 1)
    compared = sink.check("texts", log=log.address)
    assert compared.counts == {"missing": 1, "extra": 0, "different": 0}
    with log.producer("texts") as producer:
        producer.delete([*keys, "ü" * 257])
    caught_up(sink, log, "texts")
    assert sink.check("texts", log=log.address).is_equal


def test_rows_that_the_index_does_not_take_become_dead_letters(
    sink: hr.sinks.Sink, emptied: OpenSearchServer, log: hr.Log
) -> None:
    ask(
        emptied,
        "PUT",
        "/accounts",
        {"mappings": {"properties": {"id": {"type": "long"}, "name": {"type": "date"}}}},
    )
    with log.producer("accounts") as producer:
        producer.upsert(
            [{"id": n, "name": "no date" if n % 10 == 3 else "2026-03-01"} for n in range(100)]
        )
    assert caught_up(sink, log, "accounts").status.refused == 10
    letters = read_dead_letters(log, "accounts.opensearch")
    assert len(letters) == 10
    assert "mapper_parsing_exception" in letters[0]["reason"]
    assert '"no date"' in letters[0]["row"]
    assert sink.check("accounts", log=log.address).counts["missing"] == 10


def test_a_request_of_a_superseded_process_that_comes_late_changes_nothing(
    sink: hr.sinks.Sink, log: hr.Log
) -> None:
    """It was sent before the takeover, and arrives after its successor has written and deleted."""
    shape = sink.shape_for(log.topic("accounts"))
    with (
        log.producer("accounts") as producer,
        sink.open(shape, log) as older,
        sink.open(shape, log) as newer,
    ):
        producer.upsert([{"id": 1, "name": "old"}, {"id": 2, "name": "old"}])
        older.prepare()
        late = next_batch(log, older, older.begin(1))
        with older.atomic():
            pass
        producer.upsert({"id": 1, "name": "new"})
        producer.delete(2)
        newer.prepare()
        assert newer.apply(next_batch(log, newer, newer.begin(2)), no_dead_letters)
        with pytest.raises(hr.errors.RetryError, match="Another process"):
            older.merge(late)
    assert_equal_to_log(sink, log, "accounts")


def test_an_index_that_was_deleted_is_filled_again(
    sink: hr.sinks.Sink, emptied: OpenSearchServer, log: hr.Log
) -> None:
    with log.producer("accounts") as producer:
        producer.upsert([{"id": n, "name": "x"} for n in range(10)])
    caught_up(sink, log, "accounts")
    ask(emptied, "DELETE", "/accounts")
    caught_up(sink, log, "accounts")
    assert_equal_to_log(sink, log, "accounts")


def test_an_index_that_is_another_one_than_was_filled_is_not_gone_on_with(
    sink: hr.sinks.Sink, emptied: OpenSearchServer, log: hr.Log
) -> None:
    """As one that was restored from a snapshot, or created by a stray request: rows up to the
    checkpoint would be missing in it.
    """
    with log.producer("accounts") as producer:
        producer.upsert([{"id": n, "name": "x"} for n in range(10)])
    caught_up(sink, log, "accounts")
    ask(emptied, "DELETE", "/accounts")
    ask(emptied, "PUT", "/accounts/_doc/7?refresh=true", {"id": 7, "name": "x"})
    with log.producer("accounts") as producer:
        producer.upsert({"id": 11, "name": "x"})
    with pytest.raises(TargetMismatch, match=r"made again or restored[\s\S]*--start-over"):
        caught_up(sink, log, "accounts")
    caught_up(sink, log, "accounts", start_over=True)
    assert_equal_to_log(sink, log, "accounts")


def test_a_lost_checkpoint_does_not_make_newer_rows_lose_against_older_documents(
    sink: hr.sinks.Sink, emptied: OpenSearchServer, log: hr.Log
) -> None:
    """Versions began at 1 again, and the server kept what it had."""
    with log.producer("accounts") as producer:
        producer.upsert([{"id": n, "name": "old"} for n in range(10)])
        caught_up(sink, log, "accounts")
        ask(emptied, "DELETE", f"/{CHECKPOINT_INDEX}")
        producer.upsert([{"id": n, "name": "new"} for n in range(5)])
        producer.delete([8])
    with pytest.raises(TargetMismatch, match=r"no checkpoint says[\s\S]*--start-over"):
        caught_up(sink, log, "accounts")
    caught_up(sink, log, "accounts", start_over=True)
    assert_equal_to_log(sink, log, "accounts")


def test_starting_over_that_was_killed_half_way_is_ended_by_the_next_run(
    sink: hr.sinks.Sink, log: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint was still that of before, and the rows were gone."""
    with log.producer("accounts") as producer:
        producer.upsert([{"id": n, "name": "x"} for n in range(10)])
    caught_up(sink, log, "accounts")
    with monkeypatch.context() as patch:
        patch.setattr(ElasticsearchTarget, "write_checkpoint", _die)
        with pytest.raises(KeyboardInterrupt):
            caught_up(sink, log, "accounts", start_over=True)
    caught_up(sink, log, "accounts")
    assert_equal_to_log(sink, log, "accounts")


def _die(*_arguments: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"settings": {"index.translog.durability": "async"}}, "before they are on its disk"),
        ({"mappings": {"_source": {"enabled": False}}}, "does not store documents"),
    ],
)
def test_an_index_that_cannot_keep_the_promise_is_refused(
    sink: hr.sinks.Sink, emptied: OpenSearchServer, log: hr.Log, body: Any, message: str
) -> None:
    ask(emptied, "PUT", "/accounts", body)
    with pytest.raises(TargetMismatch, match=message):
        caught_up(sink, log, "accounts")


def test_a_name_that_no_index_can_have(sink: hr.sinks.Sink, log: hr.Log) -> None:
    with pytest.raises(TargetMismatch, match="table='orders'"):
        caught_up(replace(sink, table="Orders"), log, "accounts")


def test_values_that_a_change_left_unchanged_come_from_the_index(
    sink: hr.sinks.Sink, log: hr.Log
) -> None:
    with log.producer("accounts") as producer:
        producer.upsert([{"id": n, "name": f"n{n}"} for n in range(3)])
    shape = sink.shape_for(log.topic("accounts"))
    caught_up(sink, log, "accounts")
    with sink.open(shape, log) as target:
        target.prepare()
        found = target.lookup(pa.table({"id": [2, 99, 0]}))
    assert found.to_pylist() == [{"id": 2, "name": "n2"}, {"id": 0, "name": "n0"}]


def test_a_full_disk_and_a_busy_server_are_tried_again(
    sink: hr.sinks.Sink, emptied: OpenSearchServer, log: hr.Log
) -> None:
    """The server makes an index read-only when its disk is full."""
    with log.producer("accounts") as producer:
        producer.upsert({"id": 1, "name": "x"})
        caught_up(sink, log, "accounts")
        block = "index.blocks.read_only_allow_delete"
        ask(emptied, "PUT", "/accounts/_settings", {block: True})
        producer.upsert({"id": 2, "name": "x"})
    failures: list[str] = []

    def unblock(status: Any) -> None:
        if status.failures and not failures:
            failures.append(status.error)
            ask(emptied, "PUT", "/accounts/_settings", {block: None})

    sink.run("accounts", log=log.address, until_caught_up=True, on_status=unblock)
    assert "blocked" in failures[0]
    assert_equal_to_log(sink, log, "accounts")


def test_an_alias_is_followed_and_a_data_stream_refused(
    sink: hr.sinks.Sink, emptied: OpenSearchServer, log: hr.Log
) -> None:
    ask(emptied, "PUT", "/accounts-1", {"aliases": {"accounts": {}}})
    with log.producer("accounts") as producer:
        producer.upsert({"id": 1, "name": "x"})
    caught_up(sink, log, "accounts")
    assert_equal_to_log(sink, log, "accounts")
    ask(emptied, "PUT", "/accounts-2", {"aliases": {"accounts": {}}})
    with pytest.raises(TargetMismatch, match="accounts-1, accounts-2"):
        caught_up(sink, log, "accounts")


def test_requests_stay_below_their_size(
    sink: hr.sinks.Sink, log: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = SearchServer.request

    def noting(
        self: SearchServer, method: str, path: str, body: Any = None, *, lines: Any = None
    ) -> Any:
        sizes.append(len(lines or b""))
        return real(self, method, path, body, lines=lines)

    monkeypatch.setattr(SearchServer, "request", noting)
    monkeypatch.setattr("headrace.sinks.elasticsearch_target.MAX_BULK_BYTES", 100_000)
    with log.producer("accounts") as producer:
        producer.upsert([{"id": n, "name": "x" * 1000} for n in range(500)])
    caught_up(sink, log, "accounts")
    assert 90_000 < max(sizes) <= 100_000
    assert_equal_to_log(sink, log, "accounts")


def test_an_address_that_is_none() -> None:
    with pytest.raises(InputError, match="env:NAME"):
        hr.sinks.opensearch("localhost:9200")
    assert hr.sinks.from_url("elasticsearch:env:SEARCH_URL").options["url"] == "env:SEARCH_URL"
