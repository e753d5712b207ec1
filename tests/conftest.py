"""Fixtures that every test may use: a real Kafka broker, started once, when the first test asks for it."""

import os
import sys
from collections.abc import Iterator

import pytest

from headrace.testing.kafka_broker import BrokerUnavailable, KafkaBroker

# Spark's workers run on the interpreter that runs the tests, not on whatever `python3` is.
os.environ["PYSPARK_PYTHON"] = sys.executable


@pytest.fixture(scope="session")
def kafka_broker() -> Iterator[KafkaBroker]:
    """Skips where no broker can be had; with CI=true that is a failure."""
    broker = KafkaBroker()
    try:
        broker.start()
    except BrokerUnavailable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI needs a Kafka broker: {error}")
        pytest.skip(f"no Kafka broker: {error}")
    yield broker
    broker.stop()
