"""Pages of the guide that run pipelines as a user does: `headrace run`, in one Spark session for
all of them; on Kafka too.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.docs.pages import KAFKA, pages, run_page
from tests.servers.kafka_broker import KafkaBroker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
@pytest.mark.parametrize("name", pages(spark=True))
def test_a_page_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: "SparkSession"
) -> None:
    run_page(name, tmp_path, monkeypatch)


@pytest.mark.spark
@pytest.mark.kafka
@pytest.mark.parametrize("name", pages(spark=True, server=KAFKA))
def test_a_page_on_kafka_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spark: "SparkSession",
    kafka_broker: KafkaBroker,
) -> None:
    run_page(name, tmp_path, monkeypatch, {KAFKA: kafka_broker.address})
