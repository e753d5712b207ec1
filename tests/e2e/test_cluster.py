"""The shop of the demo on real Kafka and a Spark cluster of two workers: the same file, and the
same numbers, computed a second time from the log.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shop_demo.checks import Summary

from headrace.log import open_log
from tests.demo.conftest import lived
from tests.servers.kafka_broker import BrokerUnavailable, KafkaBroker
from tests.servers.spark_cluster import SparkCluster

pytestmark = pytest.mark.kafka
PATIENT = {"broker.session.timeout.ms": "120000"}


@pytest.fixture
def broker() -> Iterator[KafkaBroker]:
    """One of its own: the shop's topics have the names they have, and begin empty."""
    try:
        with KafkaBroker(PATIENT) as started:
            yield started
    except BrokerUnavailable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI needs a Kafka broker: {error}")
        pytest.skip(f"no Kafka broker: {error}")


def test_the_shop_gives_checked_numbers_on_kafka(broker: KafkaBroker, tmp_path: Path) -> None:
    """The short form: without the cluster, and without Spark."""
    with open_log(broker.address) as log:
        day = lived(tmp_path, log)
        checks = list(Summary(log, day.state, day.home, day.sent).checks())
    assert [check.text for check in checks if not check.good] == []
    assert len(checks) == 14  # the embedded log's own check is not for a broker


@pytest.mark.slow
@pytest.mark.spark
def test_the_shop_gives_the_same_checked_numbers_on_kafka_and_a_cluster(
    broker: KafkaBroker, spark_cluster: SparkCluster, tmp_path: Path
) -> None:
    environment = spark_cluster.environment(tmp_path)
    demo = [
        sys.executable,
        "-m",
        "headrace.cli",
        "demo",
        "--for",
        "15s",
        "--port",
        "0",
        "--no-open",
    ]
    directories = [
        "--log",
        broker.address,
        "--master",
        spark_cluster.master,
        "--keep",
        str(tmp_path / "shared"),
    ]
    done = subprocess.run(
        [*demo, *directories],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    came_in, counted = re.findall(
        r"exactly once: ([\d,]+) orders in, ([\d,]+) counted", done.stdout
    )[0]
    assert came_in == counted
    assert "BAD" not in done.stdout
    assert "All 14 as it should be" in done.stdout
    assert spark_cluster.executors() == 2
