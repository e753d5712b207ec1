"""Fixtures that every test may use: a real Kafka broker and a Spark session, each started once per
worker, for the first test that needs it.
"""

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.java import require_java
from tests.servers.kafka_broker import BrokerUnavailable, KafkaBroker
from tests.servers.spark_cluster import ClusterUnavailable, SparkCluster
from tests.short_forms import examples

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Spark's workers run on the interpreter that runs the tests, not on whatever `python3` is.
os.environ["PYSPARK_PYTHON"] = sys.executable

# Commands that tests start neither use nor make an archive in the cache of whoever runs the tests.
os.environ.setdefault("HEADRACE_CLASS_ARCHIVE", "off")
# Every JVM that the tests start lives for minutes at most: the optimizing compiler costs more
# than it gains, half of the suite's processor time.
for launcher_variable in ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS"):
    os.environ.setdefault(launcher_variable, "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# Where the tests run in the background of a script, Ctrl-C is ignored, and so it would be in the
# commands that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine makes any single example slow, and making examples too; that is no bug.
settings.register_profile(
    "headrace",
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("headrace")


# What a test needs, by the fixtures it uses: `make test-fast` leaves these out.
NEEDS = {
    "spark": ("spark",),
    "kafka": ("kafka_broker", "broker"),
    "server": (
        "postgres_server",
        "mariadb_server",
        "mysql_server",
        "redis_server",
        "rabbitmq",
        "own_server",  # of a single test
        "postgres",
    ),
    "browser": ("chromium",),
    "process": ("site",),
}


SIMULATIONS = (
    "tests/crash/*.py",
    "tests/demo/*.py",
    "tests/docs/test_pages.py",
    "tests/e2e/*.py",
    "tests/engine/state/test_folding_schedule.py",
    "tests/events/test_excision*.py",
    "tests/gateways/test_overload.py",
    "tests/golden/*.py",
    "tests/history/test_power_loss.py",
    "tests/log/file/test_damage.py",
    "tests/log/file/test_full_disk.py",
    "tests/test_readme.py",
)
"""Files whose tests take a whole log or pipeline from end to end or through many faults:
`make test-fast` leaves them out too.
"""
COST = {"spark": 5, "kafka": 1, "server": 1, "browser": 2, "process": 2}
"""Roughly how many seconds a test takes that needs one of these."""
OWN_JVM_COST = 30
"""And one that starts Spark in a process of its own."""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark each test by the servers that its fixtures start, and put the costliest files first: a
    long file at the end would leave the other worker without work. The order of tests in a file and
    of files that cost little stays random.
    """
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        for mark, names in NEEDS.items():
            if fixtures & set(names):
                item.add_marker(mark)
        if any(item.path.match(pattern) for pattern in SIMULATIONS):
            item.add_marker("simulation")
    yield  # tests are deselected by their marks, and shuffled
    costs: Counter[Path] = Counter()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        costs[item.path] += sum(cost for mark, cost in COST.items() if mark in marks)
        if "spark" in marks and "spark" not in getattr(item, "fixturenames", ()):
            costs[item.path] += OWN_JVM_COST
    order = {path: number for number, path in enumerate(dict.fromkeys(i.path for i in items))}
    items.sort(key=lambda item: (-costs[item.path], order[item.path]))


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


@pytest.fixture
def spark_cluster() -> Iterator[SparkCluster]:
    """Two machines. Skips where there is no Java; with CI=true that is a failure."""
    require_java()
    try:
        with SparkCluster(workers=2) as started:
            yield started
    except ClusterUnavailable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))


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
