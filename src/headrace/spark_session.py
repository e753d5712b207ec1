"""`hr.spark()`: a Spark session set up for topics. On a laptop it starts Spark in this process's JVM; with `master=` or `remote=` it uses a cluster.

What it sets can all be set otherwise, by `config={"spark.sql.shuffle.partitions": 8}` or by keyword, dots as underscores: `sql_shuffle_partitions=8`. If a
session is running already, that one is returned, with the topics made known to it and the options that can still be changed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from headrace.errors import ConfigurationError
from headrace.log.spark import register

OLDEST_JAVA = 17
LOGGING = Path(__file__).with_name("spark_log4j2.properties")
# What any session has, also one on a Connect server.
SESSION = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
# What must be known when Spark starts.
STATIC = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.speculation": "false",
}


def spark(
    app: str = "headrace", *, master: str | None = None, remote: str | None = None, config: Mapping[str, Any] | None = None, **options: Any
) -> SparkSession:
    """A session that reads and writes topics with `format("headrace")`: workers on this interpreter, UTC, RocksDB state, Arrow, quiet logs, no UI.

    `master` is a cluster's, or `local[2]` (`local[*]` if none is given); `remote` is the address of a Spark Connect server.
    """
    given = {**{_option_name(name): value for name, value in options.items()}, **(config or {})}
    settings = _connect_settings(remote) if remote is not None else _classic_settings(master, given)
    builder: Any = SparkSession.builder
    builder = builder.appName(app) if remote is None else builder.remote(remote)
    for name, value in {**settings, **given}.items():
        builder = builder.config(name, _text(value))
    session: SparkSession = builder.getOrCreate()
    register(session)
    return session


def _option_name(keyword: str) -> str:
    name = keyword if "." in keyword else keyword.replace("_", ".")
    return name if name.startswith("spark.") else f"spark.{name}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _connect_settings(remote: str) -> dict[str, str]:
    """What a session on a Connect server is opened with. `local` means that Spark starts such a server here."""
    if remote.startswith("local"):
        _use_this_machine()
        check_java()
    return dict(SESSION)


def _use_this_machine() -> None:
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # or Spark looks for the machine's address, and complains
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable


def _classic_settings(master: str | None, given: Mapping[str, Any]) -> dict[str, str]:
    """What a session in this process is started with, and the environment that its workers get."""
    settings = {**SESSION, **STATIC}
    chosen = master or given.get("spark.master") or _default_master()
    if chosen is not None:
        settings["spark.master"] = str(chosen)
    if chosen is not None and str(chosen).startswith("local"):
        settings["spark.sql.shuffle.partitions"] = str(_cores(str(chosen)))
        _use_this_machine()
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    java_options = given.get("spark.driver.extraJavaOptions", "")
    if "log4j2.configurationFile" not in str(java_options):
        settings["spark.driver.extraJavaOptions"] = f"-Dlog4j2.configurationFile={LOGGING.as_uri()}"
    if SparkSession.getActiveSession() is None and "PYSPARK_GATEWAY_PORT" not in os.environ:
        check_java()
    return settings


def _default_master() -> str | None:
    """This machine, unless `spark-submit` has chosen already."""
    return None if "PYSPARK_GATEWAY_PORT" in os.environ else os.environ.get("MASTER", "local[*]")


def _cores(master: str) -> int:
    """How many tasks run at once on a local master: `local`, `local[2]`, `local[*]`, `local[2,4]`."""
    number = re.match(r"local\[(\d+)", master)
    if number:
        return int(number[1])
    return 1 if master == "local" else os.cpu_count() or 1


def check_java() -> None:
    """ConfigurationError if there is no Java that Spark can run on."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    fix = "install Java 17 or newer (on Debian: apt-get install openjdk-17-jre-headless), or set JAVA_HOME to where it is."
    if java is None or not os.access(java, os.X_OK):
        where = f"JAVA_HOME is {home!r}, and there is no bin/java in it" if home else "there is no `java` on the PATH"
        raise ConfigurationError(f"Spark needs Java, and {where}.", fix=fix)
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    version = re.search(r'version "(?:1\.)?(\d+)', said.stderr + said.stdout)
    if version is not None and int(version[1]) < OLDEST_JAVA:
        raise ConfigurationError(f"Spark needs Java {OLDEST_JAVA} or newer; {java} is Java {version[1]}.", fix=fix)
