"""The sink `search`: the contract, and what `headrace search` finds."""

import json
from pathlib import Path

import pytest

import headrace as hr
from headrace.errors import InputError
from headrace.testing.sink_contract import SinkContract, account, caught_up
from headrace.testing.strikes import StrikePoint
from tests.cli.conftest import Run, run

pytest.importorskip("tantivy")
from headrace.sinks.search_target import SearchTarget, search

__all__ = ["run"]


class TestSearch(SinkContract):
    points = (
        StrikePoint(SearchTarget, "_commit", "before", 1),
        StrikePoint(SearchTarget, "_commit", "after", 1),
    )

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "index"

    @pytest.fixture
    def address(self, log: hr.Log) -> str:
        return log.address

    @pytest.fixture
    def sink(self, path: Path) -> hr.sinks.Sink:
        return hr.sinks.search(path)

    def test_search_results_follow_the_topic(
        self, sink: hr.sinks.Sink, log: hr.Log, path: Path, run: Run
    ) -> None:
        def ids(query: str) -> list[int]:
            return sorted(json.loads(row)["id"] for _, row in search(path, query))

        with log.producer("accounts") as producer:
            producer.upsert(
                [
                    account(1, name="red shoes"),
                    account(2, name="Red hats"),
                    account(3, name="blue shoes"),
                ]
            )
        caught_up(sink, log, "accounts")
        assert (
            ids("red"),
            ids("shoes"),
            ids('"red shoes"'),
            ids("row.name:hats"),
            ids("row.id:3"),
            ids("red -hats"),
        ) == ([1, 2], [1, 3], [1], [2], [3], [1])
        with log.producer("accounts") as producer:
            producer.upsert([account(1, name="green shoes")])
            producer.delete([2])
        caught_up(sink, log, "accounts")
        assert (ids("red"), ids("green")) == ([], [1])
        (found,) = run("search", path, "green", "--json").lines
        assert found["row"] == {"id": 1, "name": "green shoes", "amount": "1.00"}
        assert "green shoes" in run("search", path, "green").out
        assert "Nothing found." in run("search", path, "red").out
        assert "cannot be read" in run("search", path, 'row.name:"', code=1).err
        assert ids("ledger") == []
        assert (ids("row.id:[1 TO 2]"), ids("row.id:>1")) == ([1], [3])


def test_no_index(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no search index"):
        search(tmp_path, "x")
