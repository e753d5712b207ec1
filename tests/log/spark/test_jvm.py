"""Spark's JVM as Headrace starts it: the command, what is left to PySpark, the JVM that is begun
early, and the class-data archive, which is never in the way.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.log.spark import class_archive, launcher
from headrace.log.spark.class_archive import SWITCH, find_archive, make_later, with_archive
from headrace.log.spark.jvm import (
    UNUSUAL_VARIABLES,
    JvmCommand,
    java_executable,
    module_options,
    usual_command,
)
from headrace.log.spark.settings import DAEMON_MODULE, classic_settings

pytestmark = pytest.mark.skipif(java_executable() is None, reason="there is no Java")
VARIABLES = (*UNUSUAL_VARIABLES, "SPARK_HOME", "SPARK_CONF_DIR", "SPARK_LOCAL_IP")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("PYSPARK_DRIVER_PYTHON", sys.executable)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(SWITCH, "on")


def command(**settings: str) -> JvmCommand | None:
    return usual_command(
        classic_settings("local[2]", {f"spark.{n}": v for n, v in settings.items()})
    )


def usual(**settings: str) -> JvmCommand:
    found = command(**settings)
    assert found is not None
    return found


# The command


def test_the_command_has_memory_java_options_and_settings() -> None:
    arguments = usual(
        **{"driver.memory": "3g", "driver.extraJavaOptions": "-Da='b c' -XX:+UseSerialGC"}
    ).arguments
    assert {"-Xmx3g", "-Da=b c", "-XX:+UseSerialGC"} <= set(arguments)
    assert arguments[arguments.index("spark.speculation=false") - 1] == "--conf"
    assert arguments[-1] == "pyspark-shell"
    assert not any("incubator" in argument for argument in arguments)


def test_a_newer_java_is_not_given_packages_that_it_lacks() -> None:
    """Java prints a warning for each."""
    lacking = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
    assert lacking in module_options(17)
    assert lacking not in module_options(25)
    assert len(module_options(17)) == len(module_options(25)) + 1


def test_its_workers_get_the_environment_that_spark_submit_gives() -> None:
    environment = usual().environment
    assert environment["PYTHONHASHSEED"] == "0"
    assert Path(environment["SPARK_HOME"], "jars").is_dir()


@pytest.mark.parametrize("name", UNUSUAL_VARIABLES)
def test_an_unusual_environment_is_left_to_pyspark(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert usual_command({"spark.master": "local[2]"}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("driver.extraClassPath", "x.jar"),
        ("submit.deployMode", "cluster"),
        ("master", "yarn"),
        ("driver.extraJavaOptions", "-Xmx9g"),
    ],
)
def test_unusual_settings_are_left_to_pyspark(name: str, value: str) -> None:
    assert usual_command({"spark.master": "local[2]", f"spark.{name}": value}) is None


@pytest.mark.parametrize(
    ("file", "text", "is_usual"),
    [
        ("spark-defaults.conf", "spark.sql.shuffle.partitions 7\n", True),
        ("spark-defaults.conf", "  spark.driver.memory=9g\n", False),
        ("spark-env.sh", "", False),
        ("java-opts", "-Xss9m", False),
    ],
)
def test_a_configuration_that_only_the_launcher_reads_is_left_to_it(
    file: str, text: str, is_usual: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / file).write_text(text)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert (command() is not None) == is_usual


def test_the_daemon_of_workers_is_ours_unless_the_user_has_chosen_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert classic_settings("local[2]", {})[DAEMON_MODULE] == "headrace.engine.worker_daemon"
    assert DAEMON_MODULE not in classic_settings("spark://master:7077", {})
    assert classic_settings("local[2]", {DAEMON_MODULE: "mine"})[DAEMON_MODULE] == "mine"
    (tmp_path / "spark-defaults.conf").write_text(f"{DAEMON_MODULE} theirs\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert DAEMON_MODULE not in classic_settings("local[2]", {})


# The JVM that is begun early


class StandInJvm:
    """A JVM that is not started."""

    def __init__(self, made_for: JvmCommand) -> None:
        self.command, self.is_alive = made_for, True

    def close(self) -> None:
        self.is_alive = False


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StandInJvm]]:
    jvms: list[StandInJvm] = []

    def launch(made_for: JvmCommand, _arguments: list[str]) -> StandInJvm:
        jvms.append(StandInJvm(made_for))
        return jvms[-1]

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(launcher, "_jvm", None)
    monkeypatch.setitem(sys.modules, "pyspark.core.context", None)
    yield jvms
    monkeypatch.setattr(launcher, "_jvm", None)


def _started_for(settings: dict[str, Any]) -> Any:
    return launcher._start(settings)


def test_a_jvm_that_was_begun_is_used(started: list[StandInJvm]) -> None:
    launcher.begin(master="local[2]", driver_memory="2g")
    settings = classic_settings("local[2]", {"spark.driver.memory": "2g"})
    assert _started_for(settings) is started[0]
    assert len(started) == 1


@pytest.mark.parametrize("change", ["settings", "environment", "directory", "death"])
def test_a_jvm_that_does_not_fit_any_more_is_replaced(
    change: str, started: list[StandInJvm], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A pipeline's file may set variables that its workers need, and change the directory."""
    launcher.begin(master="local[2]")
    settings = classic_settings("local[2]", {})
    if change == "settings":
        settings["spark.driver.memory"] = "2g"
    elif change == "environment":
        monkeypatch.setenv("SHOP", "here")
    elif change == "directory":
        monkeypatch.chdir(tmp_path)
    else:
        started[0].is_alive = False
    assert _started_for(settings) is started[1]
    assert not started[0].is_alive


def test_nothing_is_begun_for_a_connect_server(started: list[StandInJvm]) -> None:
    launcher.begin(remote="sc://somewhere")
    assert started == []


# The archive


def archive_of(made_for: JvmCommand, content: bytes = b"not an archive") -> Path:
    """A file where the archive of a command would be."""
    directory = class_archive.cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{class_archive._name(made_for.installation)}-{len(content)}.jsa"
    path.write_bytes(content)
    return path


def test_an_archive_is_found_by_java_spark_and_size() -> None:
    assert find_archive(usual()) is None
    path = archive_of(usual())
    assert find_archive(usual(**{"driver.memory": "2g"})) == path
    assert f"-XX:SharedArchiveFile={path}" in with_archive(usual()).options
    path.write_bytes(b"truncated")
    assert find_archive(usual()) is None, "Java 17 would crash"
    assert with_archive(usual()) == usual()


def test_an_archive_is_not_used_if_it_is_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive_of(usual())
    assert find_archive(usual(**{"driver.extraJavaOptions": "-Xshare:off"})) is None
    monkeypatch.setenv(SWITCH, "off")
    assert find_archive(usual()) is None
    monkeypatch.setenv(SWITCH, "on")
    (tmp_path / "spark-defaults.conf").touch()
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert find_archive(usual()) is None, "Java makes none with files in the class path"


def test_an_unwritable_cache_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert with_archive(usual()) == usual()
    make_later(None)


def test_only_one_process_makes_an_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_command: JvmCommand) -> None:
        pytest.fail("both have made one")

    monkeypatch.setattr(class_archive, "_run_jobs", fail)
    directory = class_archive.cache_directory()
    directory.mkdir(parents=True)
    with class_archive._only_one(directory) as is_first:
        assert is_first
        assert class_archive.make(usual()) is None


def test_an_archive_that_was_not_finished_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(started: JvmCommand) -> None:
        scratch = next(option for option in started.options if "AtExit" in option).split("=")[1]
        Path(scratch).write_bytes(b"half")
        raise OSError("killed")

    monkeypatch.setattr(class_archive, "_run_jobs", die)
    with pytest.raises(OSError, match="killed"):
        class_archive.make(usual())
    assert [path.name for path in class_archive.cache_directory().iterdir()] == [".making"]


A_JOB = """
import headrace as hr
session = hr.spark(master="local[1]", driver_memory="1g")
print(session.sparkContext.parallelize([1, 2], 1).map(lambda n: n + 1).collect())
"""


@pytest.mark.spark
@pytest.mark.process
def test_a_damaged_archive_is_ignored_without_a_word() -> None:
    """The right size, and the header of nothing."""
    archive_of(usual(**{"driver.memory": "1g"}), os.urandom(100_000))
    done = subprocess.run(
        [sys.executable, "-c", A_JOB], capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[2, 3]\n", "")


NOT_USED = """
import time
from headrace.log.spark.launcher import begin
begin(master="local[1]")
time.sleep(0.3)
raise SystemExit("the pipeline is wrong")
"""


@pytest.mark.process
def test_a_jvm_that_is_not_used_ends_without_a_word() -> None:
    """As when a pipeline's file has an error, which is found while the JVM starts."""
    done = subprocess.run(
        [sys.executable, "-c", NOT_USED], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.stderr) == ("", "the pipeline is wrong\n")


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.process
def test_an_archive_is_made_and_used() -> None:
    made = subprocess.run(
        [sys.executable, "-m", "headrace.log.spark.class_archive"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert made.returncode == 0, made.stderr
    path = find_archive(usual())
    assert path is not None
    used = usual(**{"driver.extraJavaOptions": "-Xlog:class+load=info"})
    arguments = [
        argument if argument != "-Xshare:auto" else "-Xshare:on"
        for argument in with_archive(used).arguments
    ]
    loading = subprocess.run(
        [*arguments[: arguments.index("org.apache.spark.deploy.SparkSubmit") + 1], "--version"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "SparkSubmit source: shared objects file (top)" in loading.stdout
