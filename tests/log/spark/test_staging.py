"""Rows that the tasks of one job have staged are discarded together."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import BadName, ConfigurationError
from headrace.log.spark.options import write_options
from headrace.log.spark.writer import check_staging, group_name
from tests.log.spark.conftest import ORDERS, orders


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def broken() -> Iterator[pa.RecordBatch]:
    yield from orders(0, 10).to_batches()
    raise ValueError("upstream")


def test_a_group_is_discarded_and_others_stay(tmp_path: Path) -> None:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_topic("t", ORDERS, partitions=2)
        for _ in range(2):
            log.stage("t", orders(0, 10).to_batches(), group="job-1")
        kept = log.stage("t", orders(10, 10).to_batches(), group="job-11")
        lone = log.stage("t", orders(20, 10).to_batches())
        log.discard_group("job-1")
        assert len(files(tmp_path / "log" / "staging")) == 4
        with log.transaction("x") as transaction:
            transaction.adopt(kept)
            transaction.adopt(lone)
        log.discard_group("job-11")
        assert sorted(log.read("t").to_table()["order_id"].to_pylist()) == list(range(10, 30))
        assert files(tmp_path / "log" / "staging") == []
        with pytest.raises(BadName):
            log.stage("t", orders(0, 1).to_batches(), group="../../elsewhere")


def test_staging_for_a_log_on_kafka(tmp_path: Path) -> None:
    """Its rows wait in a directory, which needs no broker."""
    from headrace.log.kafka import staging

    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        info = log.create_topic("t", ORDERS, partitions=2)
    directory = tmp_path / "staging"
    for group in ("job-1", "job-1", "job-2"):
        staging.stage(info, orders(0, 10).to_batches(), str(directory), group)
    with pytest.raises(ValueError, match="upstream"):
        staging.stage(info, broken(), str(directory), "job-2")
    assert len(files(directory)) == 6
    staging.discard_group("job-1", str(directory))
    assert len(files(directory)) == 2
    staging.discard_group("job-2", str(directory))
    assert list(directory.iterdir()) == []


def test_a_group_s_name_is_the_same_everywhere_and_no_other_s() -> None:
    assert group_name("file:a", "t", "w", 7) == group_name("file:a", "t", "w", "7")
    assert group_name("file:a", "t", "w", 7) != group_name("file:a", "t", "w7", "")


def test_only_kafka_needs_a_directory() -> None:
    check_staging(
        write_options({"log": "kafka://b:1", "topic": "t", "stagingDirectory": "shared"}, home="")
    )
    with pytest.raises(ConfigurationError, match="is for a log on Kafka"):
        check_staging(
            write_options({"log": "file:a", "topic": "t", "stagingDirectory": "shared"}, home="")
        )
