"""The sink `parquet`: the contract, and a directory in which a process was killed between its files
and its manifest.
"""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

import headrace as hr
from headrace.errors import InputError, TargetMismatch
from headrace.sinks import parquet_target as files_manifest
from headrace.sinks.parquet_target import ParquetTarget
from tests.sinks.sink_contract import SinkContract, account, assert_equal_to_log, caught_up


class TestParquet(SinkContract):
    points = (
        (ParquetTarget, "_write", "after", 0),
        (ParquetTarget, "_publish", "before", 1),
        (ParquetTarget, "_publish", "after", 1),
    )

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return tmp_path / "files"

    @pytest.fixture
    def sink(self, directory: Path) -> hr.sinks.Sink:
        return hr.sinks.parquet(directory, buckets=4)

    def test_the_files_are_plain_parquet_and_no_others_stay(
        self, sink: hr.sinks.Sink, log: hr.Log, directory: Path
    ) -> None:
        for amount in range(5):
            with log.producer("accounts") as producer:
                producer.upsert([account(number, amount) for number in range(20)])
            caught_up(sink, log, "accounts")
        (directory / "left-by-a-dead-process.parquet").write_bytes(b"half a file")
        caught_up(sink, log, "accounts")
        assert sorted(
            (row["id"], row["amount"]) for row in pq.read_table(directory).to_pylist()
        ) == [(number, 4) for number in range(20)]
        assert len(list(directory.glob("*.parquet"))) <= 4
        assert len(list((directory / files_manifest.DIRECTORY).iterdir())) <= 4
        assert_equal_to_log(sink, log, "accounts")

    def test_a_directory_that_must_be_there(self, log: hr.Log, tmp_path: Path) -> None:
        with pytest.raises(TargetMismatch, match="no directory"):
            caught_up(hr.sinks.parquet(tmp_path / "nowhere", create=False), log, "accounts")


def test_buckets_within_reason() -> None:
    with pytest.raises(InputError, match="0 buckets"):
        hr.sinks.parquet("x", buckets=0)
