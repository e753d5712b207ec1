"""`hr.spark()`: a Spark session set up for topics. On a laptop it starts Spark in this process's
JVM; with `master=` or `remote=` it uses a cluster.

What it sets can all be set otherwise, by `config={"spark.sql.shuffle.partitions": 8}` or by
keyword, dots as underscores: `sql_shuffle_partitions=8`. If a session is running already, that one
is returned, with the topics made known to it and the options that can still be changed.
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

OLDEST_JAVA = 17
SUBMITTED = ""
HOW_TO_INSTALL_JAVA = (
    "On Debian and Ubuntu: apt-get install default-jre-headless; on Fedora: dnf install"
    " java-latest-openjdk-headless; on Alpine: apk add openjdk21-jre-headless; on macOS: brew"
    " install openjdk."
)
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
LOGGING = Path(__file__).with_name("log4j2.properties")
# What any session has, also one on a Connect server.
SESSION = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
# What must be known when Spark starts.
STATIC = {
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
    """A session that reads and writes topics with `format("headrace")`: workers on this
    interpreter, UTC, RocksDB state, Arrow, quiet logs, no UI.

    `master` is a cluster's, or `local[2]` (`local[*]` if none is given); `remote` is the address of
    a Spark Connect server.
    """
    given = {**{_option_name(name): value for name, value in options.items()}, **(config or {})}
    check_start(master=master or given.get("spark.master"), remote=remote)
    settings = (
        _connect_settings(remote, given) if remote is not None else _classic_settings(master, given)
    )
    builder: Any = SparkSession.builder
    builder = builder.appName(app) if remote is None else builder.remote(remote)
    for name, value in settings.items():
        builder = builder.config(name, _text(value))
    session: SparkSession = builder.getOrCreate()
    register(session)
    return session


def _option_name(keyword: str) -> str:
    name = keyword if "." in keyword else keyword.replace("_", ".")
    return name if name.startswith("spark.") else f"spark.{name}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _connect_settings(remote: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a session on a Connect server is opened with. `local` means that Spark starts such a
    server here.
    """
    if remote.startswith("local"):
        _use_this_machine()
    return {**SESSION, **given}


def _use_this_machine() -> None:
    os.environ.setdefault(
        "SPARK_LOCAL_IP", "127.0.0.1"
    )  # or Spark looks for the machine's address, and complains
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable


def _classic_settings(master: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a session in this process is started with, and the environment that its workers get."""
    chosen = str(master or given.get("spark.master") or _default_master())
    settings: dict[str, Any] = {**SESSION, **STATIC}
    if chosen != SUBMITTED:
        settings["spark.master"] = chosen
    if chosen.startswith("local"):
        settings["spark.sql.shuffle.partitions"] = _cores(chosen)
        settings[
            "spark.shuffle.compress"
            # what a shuffle writes stays in this machine's memory: packing it took a quarter of the
            # time of batches with much text
        ] = "false"
        _use_this_machine()
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    return _quiet({**settings, **given})


def _quiet(settings: dict[str, Any]) -> dict[str, Any]:
    """With a log that has errors only, unless there is a configuration of the user's."""
    options = str(settings.get(JAVA_OPTIONS, ""))
    if "log4j2.configurationFile" in options:
        return settings
    return settings | {
        JAVA_OPTIONS: f"-Dlog4j2.configurationFile={LOGGING.as_uri()} {options}".strip()
    }


def _default_master() -> str:
    """This machine, unless `spark-submit` has started us, and so has chosen already."""
    return (
        SUBMITTED if "PYSPARK_GATEWAY_PORT" in os.environ else os.environ.get("MASTER", "local[*]")
    )


def _cores(master: str) -> int:
    """How many tasks run at once on a local master: `local`, `local[2]`, `local[*]`,
    `local[2,4]`.
    """
    number = re.match(r"local\[(\d+)", master)
    if number:
        return int(number[1])
    return 1 if master == "local" else os.cpu_count() or 1


def check_start(*, master: str | None = None, remote: str | None = None, **_options: Any) -> None:
    """ConfigurationError if `spark` with these options would have to start a JVM here, and cannot.
    One that runs, or that others have started, needs no Java of ours.
    """
    if remote is not None:
        starts_one = remote.startswith("local")
    else:
        starts_one = (
            SparkSession.getActiveSession() is None and (master or _default_master()) != SUBMITTED
        )
    if starts_one:
        check_java()


def check_java() -> None:
    """ConfigurationError if there is no Java that Spark can run on."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    fix = (
        f"install Java {OLDEST_JAVA} or newer, or set JAVA_HOME to where it is."
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
    if version is not None and version < OLDEST_JAVA:
        raise ConfigurationError(
            f"Spark needs Java {OLDEST_JAVA} or newer; {java} is Java {version}.", fix=fix
        )


@cache
def _java_version(java: str) -> int | None:
    """Asked once: a command may check before it does anything, and Spark's start checks again."""
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    version = re.search(r'version "(?:1\.)?(\d+)', said.stderr + said.stdout)
    return None if version is None else int(version[1])
