"""The sink `delta`: the contract, and that others can read and tend the table."""

from pathlib import Path

import pytest

import headrace as hr
from tests.sinks.sink_contract import SinkContract, account, assert_equal_to_log, caught_up

deltalake = pytest.importorskip("deltalake")
from headrace.sinks.delta_target import DeltaTarget  # noqa: E402


class TestDelta(SinkContract):
    points = ((DeltaTarget, "_commit", "before", 1), (DeltaTarget, "_commit", "after", 1))

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "delta"

    @pytest.fixture
    def sink(self, path: Path) -> hr.sinks.Sink:
        return hr.sinks.delta(path)

    def test_the_table_can_be_tended_meanwhile(
        self, sink: hr.sinks.Sink, log: hr.Log, path: Path
    ) -> None:
        for amount in range(3):
            with log.producer("accounts") as producer:
                producer.upsert([account(amount, amount), account(9, amount)])
            caught_up(sink, log, "accounts")
            table = deltalake.DeltaTable(path)
            table.optimize.compact()
            table.create_checkpoint()
        assert caught_up(sink, log, "accounts").status.rows == 0
        assert sorted(deltalake.DeltaTable(path).to_pyarrow_table()["id"].to_pylist()) == [
            0,
            1,
            2,
            9,
        ]
        assert_equal_to_log(sink, log, "accounts")

    def test_deleting_what_is_not_there_is_noted_too(
        self, sink: hr.sinks.Sink, log: hr.Log
    ) -> None:
        caught_up(sink, log, "accounts")
        with log.producer("accounts") as producer:
            producer.delete([1, 2, 3])
        assert caught_up(sink, log, "accounts").status.deletes == 3
        assert_equal_to_log(sink, log, "accounts")
