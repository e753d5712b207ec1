"""Fixtures that every test may use: a real Kafka broker and a Spark session, each started once,
when the first test asks for it.
"""

import os
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.servers.kafka_broker import BrokerUnavailable, KafkaBroker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Spark's workers run on the interpreter that runs the tests, not on whatever `python3` is.
os.environ["PYSPARK_PYTHON"] = sys.executable

# Where the tests run in the background of a script, Ctrl-C is ignored, and so it would be in the
# commands that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine makes any single example slow, and making examples too; that is no bug.
settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run in several processes, files that share a Spark session, or a broker, run in
    the same one; the others go wherever there is room.
    """
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class ByWhatIsShared(LoadScopeScheduling):  # type: ignore[misc]  # xdist is not typed
        def _split_scope(self, nodeid: str) -> str:
            return _shared_by(config.rootpath / nodeid.partition("::")[0])

    return ByWhatIsShared(config, log)


@cache
def _shared_by(file: Path) -> str:
    text = file.read_text()
    return next(
        (fixture for fixture in ("spark", "kafka_broker", "rabbitmq") if f"{fixture}: " in text),
        file.as_posix(),
    )


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


@pytest.fixture(scope="session")
def spark() -> "Iterator[SparkSession]":
    """Two tasks at a time and little memory. Skips where there is no Java; with CI=true that is a
    failure.
    """
    import headrace
    from headrace.errors import ConfigurationError

    try:
        session = headrace.spark("tests", master="local[2]", driver_memory="1g")
    except ConfigurationError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI needs Spark: {error}")
        pytest.skip(f"no Spark: {error}")
    yield session
    session.stop()
