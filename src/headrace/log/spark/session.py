"""`hr.spark()`: a Spark session set up for topics. Without arguments it starts a local Spark; with
`master=` or `remote=` it uses a cluster.

Every setting can be overridden, by `config={"spark.sql.shuffle.partitions": 8}` or by keyword with
underscores for dots: `sql_shuffle_partitions=8`. If a session is running already, it is returned,
with the source registered and those options that can still be changed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from headrace.errors import ConfigurationError
from headrace.log.spark import register
from headrace.log.spark.source import HIDE_DEFAULT_SOURCE

MIN_JAVA_VERSION = 17
SUBMITTED = ""  # the master of a process that `spark-submit` started: already chosen
HOW_TO_INSTALL_JAVA = (
    "On Debian and Ubuntu: apt-get install default-jre-headless; on Fedora: dnf install"
    " java-latest-openjdk-headless; on Alpine: apk add openjdk21-jre-headless; on macOS: brew"
    " install openjdk."
)
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
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


def spark(
    app: str = "headrace",
    *,
    master: str | None = None,
    remote: str | None = None,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> SparkSession:
    """Start or get a Spark session that reads and writes topics with `format("headrace")`.

    Its Python workers use this interpreter, its time zone is UTC, its state store is RocksDB, and
    it logs errors only and has no UI. A running session is returned as it is, with those options
    that can still be changed.

    Args:
        app: the name of the application.
        master: the address of a cluster, or `local[2]` for two local threads; by default all cores
            of this machine, or what `spark-submit` has chosen.
        remote: the address of a Spark Connect server, instead of `master`.
        config: Spark settings by their full names.
        **options: Spark settings by keyword, without the prefix `spark.` and with underscores for
            dots.

    Returns:
        The session.

    Raises:
        ConfigurationError: Spark must be started here, and there is no Java that it can run on.

    Example:
        >>> session = hr.spark(master="local[2]", sql_shuffle_partitions=4)
        >>> session.read.format("headrace").options(log="file:data", topic="orders").load().show()
    """
    keywords = {_option_name(name): value for name, value in options.items()}
    chosen = {**keywords, **(config or {})}
    check_start(master=master or chosen.get("spark.master"), remote=remote)
    settings = (
        _connect_settings(remote, chosen)
        if remote is not None
        else _classic_settings(master, chosen)
    )
    builder: Any = SparkSession.builder
    builder = builder.appName(app) if remote is None else builder.remote(remote)
    for name, value in settings.items():
        builder = builder.config(name, _text(value))
    # A JVM that is started here hides the source that Spark would find by itself: that one could
    # not be replaced by the registered one.
    os.environ[HIDE_DEFAULT_SOURCE] = "1"
    try:
        session: SparkSession = builder.getOrCreate()
    finally:
        del os.environ[HIDE_DEFAULT_SOURCE]
    register(session)
    return session


def _option_name(keyword: str) -> str:
    name = keyword if "." in keyword else keyword.replace("_", ".")
    return name if name.startswith("spark.") else f"spark.{name}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _connect_settings(remote: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a session on a Connect server. With `local` Spark starts such a server
    here.
    """
    if remote.startswith("local"):
        _use_this_machine()
    return {**SESSION_SETTINGS, **chosen}


def _use_this_machine() -> None:
    # Otherwise Spark looks up the machine's address, and warns.
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable


def _classic_settings(master: str | None, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a session with its driver in this process. Also sets the environment that its
    workers inherit.
    """
    master = str(master or chosen.get("spark.master") or _default_master())
    settings: dict[str, Any] = {**SESSION_SETTINGS, **START_SETTINGS}
    if master != SUBMITTED:
        settings["spark.master"] = master
    if master.startswith("local"):
        settings["spark.sql.shuffle.partitions"] = _cores(master)
        # A local shuffle stays in memory: compressing it took a quarter of the time of batches with
        # much text.
        settings["spark.shuffle.compress"] = "false"
        _use_this_machine()
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    settings |= chosen
    java_options = str(settings.get(JAVA_OPTIONS, ""))
    if "log4j2.configurationFile" not in java_options:
        log_errors_only = f"-Dlog4j2.configurationFile={LOGGING.as_uri()}"
        settings[JAVA_OPTIONS] = f"{log_errors_only} {java_options}".strip()
    return settings


def _default_master() -> str:
    """This machine, unless `spark-submit` has started this process and chosen a master."""
    return (
        SUBMITTED if "PYSPARK_GATEWAY_PORT" in os.environ else os.environ.get("MASTER", "local[*]")
    )


def _cores(master: str) -> int:
    """The number of tasks that run at once on a local master: `local`, `local[2]`, `local[*]`,
    `local[2,4]`.
    """
    number = re.match(r"local\[(\d+)", master)
    if number:
        return int(number[1])
    return 1 if master == "local" else os.cpu_count() or 1


def check_start(*, master: str | None = None, remote: str | None = None, **_options: Any) -> None:
    """ConfigurationError if `spark` with these options would have to start a JVM here and cannot. A
    session that is running, or a JVM that was started elsewhere, needs no Java here.
    """
    if remote is not None:
        starts_jvm = remote.startswith("local")
    else:
        starts_jvm = (
            SparkSession.getActiveSession() is None and (master or _default_master()) != SUBMITTED
        )
    if starts_jvm:
        check_java()


def check_java() -> None:
    """ConfigurationError if there is no Java that Spark can run on."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    fix = (
        f"install Java {MIN_JAVA_VERSION} or newer, or set JAVA_HOME to where it is."
        f" {HOW_TO_INSTALL_JAVA}"
    )
    if java is None or not os.access(java, os.X_OK):
        where = (
            f"JAVA_HOME is {home!r}, and there is no bin/java in it"
            if home
            else "there is no `java` on the PATH"
        )
        raise ConfigurationError(f"Spark needs Java, and {where}.", fix=fix)
    version = _java_version(java)
    if version is not None and version < MIN_JAVA_VERSION:
        raise ConfigurationError(
            f"Spark needs Java {MIN_JAVA_VERSION} or newer; {java} is Java {version}.", fix=fix
        )


@cache
def _java_version(java: str) -> int | None:
    """The version of a Java executable. Cached: a command checks before it does anything, and
    starting Spark checks again.
    """
    result = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    version = re.search(r'version "(?:1\.)?(\d+)', result.stderr + result.stdout)
    return None if version is None else int(version[1])
