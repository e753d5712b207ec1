"""`hr.spark()`: what it sets, what it takes, and what it says where there is no Java."""

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import headrace as hr
from headrace.errors import ConfigurationError
from headrace.log.spark.jvm import check_java
from headrace.log.spark.session import end_quietly, has_ended
from headrace.log.spark.settings import classic_settings, local_cores, option_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
def test_a_session_is_set_up_for_topics(spark: "SparkSession") -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2", "as many as tasks at a time"
    assert "RocksDB" in str(spark.conf.get("spark.sql.streaming.stateStore.providerClass"))
    assert spark.conf.get("spark.sql.execution.arrow.pyspark.enabled") == "true"
    assert spark.conf.get("spark.speculation") == "false"
    assert spark.conf.get("spark.ui.enabled") == "false"
    assert spark.conf.get("spark.driver.memory") == "1g"
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


@pytest.mark.spark
def test_a_session_that_runs_already_is_used_again(spark: "SparkSession") -> None:
    before = spark.conf.get("spark.sql.shuffle.partitions")
    try:
        again = hr.spark(
            sql_shuffle_partitions=5, config={"spark.sql.session.timeZone": "Europe/Paris"}
        )
        assert again.sparkContext is spark.sparkContext
        assert again.conf.get("spark.sql.shuffle.partitions") == "5"
        assert again.conf.get("spark.sql.session.timeZone") == "Europe/Paris"
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", str(before))
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_options_by_keyword() -> None:
    assert option_name("driver_memory") == "spark.driver.memory"
    assert option_name("spark.driver.memoryOverhead") == "spark.driver.memoryOverhead"
    assert option_name("sql.shuffle.partitions") == "spark.sql.shuffle.partitions"


@pytest.mark.parametrize(
    ("master", "cores"),
    [
        ("local", 1),
        ("local[3]", 3),
        ("local[2,4]", 2),
        ("local[*]", os.cpu_count()),
        ("local[*,4]", os.cpu_count()),
    ],
)
def test_a_local_master_says_how_many_tasks_run_at_once(master: str, cores: int) -> None:
    assert local_cores(master) == cores


@pytest.fixture
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not started Spark."""
    from pyspark.sql import SparkSession

    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    for name in (
        "PYSPARK_PYTHON",
        "PYSPARK_DRIVER_PYTHON",
        "SPARK_LOCAL_IP",
        "PYSPARK_GATEWAY_PORT",
        "MASTER",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_session")
def test_a_cluster_keeps_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.log.spark.session.check_java", lambda: None)
    monkeypatch.setenv("PYSPARK_PYTHON", "python-on-the-cluster")
    settings = classic_settings("spark://master:7077", {})
    assert settings["spark.master"] == "spark://master:7077"
    assert "spark.sql.shuffle.partitions" not in settings
    assert os.environ["PYSPARK_PYTHON"] == "python-on-the-cluster"
    assert "SPARK_LOCAL_IP" not in os.environ
    own = classic_settings("yarn", {"spark.driver.extraJavaOptions": "-Dx=1"})[
        "spark.driver.extraJavaOptions"
    ]
    assert own.endswith(" -Dx=1")
    assert "log4j2.configurationFile" in own, "an option of the user's does not make the log loud"
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    assert "spark.master" not in classic_settings(None, {}), "spark-submit has chosen"


@pytest.mark.usefixtures("no_session")
@pytest.mark.parametrize("home", [None, "nowhere"])
def test_without_java_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str | None
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (
        monkeypatch.setenv("JAVA_HOME", home)
        if home
        else monkeypatch.delenv("JAVA_HOME", raising=False)
    )
    with pytest.raises(ConfigurationError, match="Spark needs Java") as refused:
        hr.spark()
    for command in (
        "apt-get install default-jre-headless",
        "dnf install java",
        "brew install openjdk",
    ):
        assert command in refused.value.fix


def test_a_java_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_402\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="Java 17 or newer; .* is Java 8"):
        check_java()


class StandInConnectSession:
    """A session of a Connect server that has gone."""

    @property
    def version(self) -> str:
        raise ConnectionRefusedError


StandInConnectSession.__module__ = "pyspark.sql.connect.session"


def test_a_connect_server_that_does_not_answer_has_ended() -> None:
    assert has_ended(StandInConnectSession())
    assert not has_ended(object()), "a session without a JVM does not end by itself"


def test_a_reset_connection_to_a_jvm_that_ended_printed_a_stack_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Py4J logs the error that it raises, to the root logger, when the connection is reset instead
    of closed.
    """
    root = logging.getLogger()
    before = list(root.filters)
    try:
        end_quietly(object())
        end_quietly(object())
        assert len(root.filters) <= len(before) + 1
        for module, message, is_shown in (
            ("java_gateway", "Exception while sending command.", False),
            ("java_gateway", "Another message.", True),
            ("users_module", "Exception while sending command.", True),
        ):
            caplog.clear()
            root.handle(
                logging.LogRecord("root", logging.ERROR, f"{module}.py", 1, message, (), None)
            )
            assert [record.message for record in caplog.records] == [message] * is_shown
    finally:
        root.filters[:] = before
