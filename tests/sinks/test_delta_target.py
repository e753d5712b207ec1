"""The sink `delta`: the contract, and that others can read and tend the table."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace as hr
from headrace.errors import InputError, TargetMismatch
from headrace.testing.sink_contract import SinkContract, account, assert_equal_to_log, caught_up
from headrace.testing.strikes import StrikePoint

deltalake = pytest.importorskip("deltalake")
from headrace.sinks.delta_target import DeltaTarget  # noqa: E402


class TestDelta(SinkContract):
    points = (
        StrikePoint(DeltaTarget, "_commit", "before", 1),
        StrikePoint(DeltaTarget, "_commit", "after", 1),
    )

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


@pytest.mark.slow
@pytest.mark.server
class TestDeltaOnS3(SinkContract):
    @pytest.fixture
    def sink(self, s3_url: str) -> hr.sinks.Sink:
        return hr.sinks.delta(s3_url)


@pytest.mark.server
class TestObjectStore:
    """With `table=…`, a URL became a local directory; what was missing was tried again for ever."""

    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[hr.Log]:
        with hr.open_log(f"file:{tmp_path / 'log'}") as log:
            log.create_table("accounts", "id BIGINT, name STRING", key="id")
            with log.producer("accounts") as producer:
                producer.upsert([{"id": 1, "name": "ada"}])
            yield log

    def test_a_table_below_a_url(self, s3_url: str, log: hr.Log) -> None:
        sink = hr.sinks.delta(s3_url, table="people")
        caught_up(sink, log, "accounts")
        assert_equal_to_log(sink, log, "accounts")
        options = {"allow_http": "true"}
        assert deltalake.DeltaTable(f"{s3_url}/people", storage_options=options).version() > 0

    def test_a_bucket_that_is_not_there(self, s3_url: str, log: hr.Log) -> None:
        sink = hr.sinks.delta("s3://no-such-bucket-of-ours/lake")
        with pytest.raises(TargetMismatch, match=r"no bucket[\s\S]*create the bucket"):
            caught_up(sink, log, "accounts")

    def test_a_protocol_that_is_not_known(self) -> None:
        with pytest.raises(InputError, match="hr.sinks.delta cannot write to ftp"):
            hr.sinks.from_url("delta:ftp://host/x")
