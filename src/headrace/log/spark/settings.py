"""The settings of the sessions that `hr.spark()` starts, and which Spark it starts. Needs no
PySpark, so that a command can start the JVM (`jvm`) before it imports anything large.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUBMITTED = ""  # the master of a process that `spark-submit` started: already chosen
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
DAEMON_MODULE = "spark.python.daemon.module"
LOGGING = Path(__file__).with_name("log4j2.properties")
# Settings of every session, also one on a Connect server
SESSION_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
# Settings that must be known when Spark starts
START_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.speculation": "false",
}


def chosen_settings(config: Mapping[str, Any] | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the caller of `hr.spark` gave, by their full names."""
    return {**{option_name(name): value for name, value in options.items()}, **(config or {})}


def option_name(keyword: str) -> str:
    name = keyword if "." in keyword else keyword.replace("_", ".")
    return name if name.startswith("spark.") else f"spark.{name}"


def setting_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def connect_settings(remote: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a session on a Connect server. With `local` Spark starts such a server
    here.
    """
    if remote.startswith("local"):
        _use_this_machine()
    return {**SESSION_SETTINGS, **chosen}


def classic_settings(master: str | None, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a session with its driver in this process. Also sets the environment that its
    workers inherit.
    """
    master = str(master or chosen.get("spark.master") or default_master())
    settings: dict[str, Any] = {**SESSION_SETTINGS, **START_SETTINGS}
    if master != SUBMITTED:
        settings["spark.master"] = master
    if master.startswith("local"):
        settings["spark.sql.shuffle.partitions"] = local_cores(master)
        # A local shuffle stays in memory: compressing it took a quarter of the time of batches with
        # much text.
        settings["spark.shuffle.compress"] = "false"
        _use_this_machine()
        if not spark_default(DAEMON_MODULE):
            # On a cluster, Headrace may come with the job, too late for the daemon.
            settings[DAEMON_MODULE] = "headrace.engine.worker_daemon"
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    settings |= chosen
    java_options = str(settings.get(JAVA_OPTIONS, ""))
    if "log4j2.configurationFile" not in java_options:
        log_errors_only = f"-Dlog4j2.configurationFile={LOGGING.as_uri()}"
        settings[JAVA_OPTIONS] = f"{log_errors_only} {java_options}".strip()
    return settings


def _use_this_machine() -> None:
    # Otherwise Spark looks up the machine's address, and warns.
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable


def default_master() -> str:
    """This machine, unless `spark-submit` has started this process and chosen a master."""
    return (
        SUBMITTED if "PYSPARK_GATEWAY_PORT" in os.environ else os.environ.get("MASTER", "local[*]")
    )


def local_cores(master: str) -> int:
    """The number of tasks that run at once on a local master: `local`, `local[2]`, `local[*]`,
    `local[2,4]`.
    """
    number = re.match(r"local\[(\d+)", master)
    if number:
        return int(number[1])
    return 1 if master == "local" else os.cpu_count() or 1


def configuration_directory(home: Path) -> Path:
    """Where Spark, installed in `home`, looks for its configuration files."""
    return Path(os.environ.get("SPARK_CONF_DIR") or home / "conf")


def spark_default(name: str) -> bool:
    """Whether the user's spark-defaults.conf sets this setting."""
    home = os.environ.get("SPARK_CONF_DIR") or os.environ.get("SPARK_HOME")
    if home is None:  # PySpark as it is installed has none
        return False
    try:
        text = (configuration_directory(Path(home)) / "spark-defaults.conf").read_text()
    except OSError:
        return False
    return re.search(rf"^\s*{re.escape(name)}[\s=:]", text, re.MULTILINE) is not None
