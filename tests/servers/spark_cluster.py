"""A Spark standalone cluster for tests: a master and some workers, processes of this machine on
loopback, gone when stopped.

    with SparkCluster(workers=2) as cluster:
        session = hr.spark(master=cluster.master)

It needs Java 17 or newer, and nothing but pyspark. Everything in it is small; nothing of it is
fit for production.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

SMALL = {
    "spark.executor.memory": "512m",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.network.timeout": "600s",
    "spark.executor.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
}
"""Settings for a cluster on loopback with little memory."""
START_SECONDS, STOP_SECONDS, PATIENCE_SECONDS = 180, 15, 600
_MASTER, _WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"


class ClusterUnavailable(Exception):
    """No cluster can be had here. The text says why."""


class SparkCluster:
    """`start()` returns when all workers have joined; `stop()` ends them and removes what they
    wrote. Each worker has an address of its own, so that Spark takes it for a machine of its own.
    """

    def __init__(self, *, workers: int = 2, cores: int = 1, memory_mb: int = 1024) -> None:
        self.workers, self.cores, self.memory_mb = workers, cores, memory_mb
        self._port, self._page = 0, 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._directory: Path | None = None

    @property
    def master(self) -> str:
        """What `hr.spark(master=…)` takes."""
        return f"spark://127.0.0.1:{self._port}"

    @property
    def hosts(self) -> list[str]:
        """The addresses of the workers."""
        return [f"127.0.0.{number + 2}" for number in range(self.workers)]

    def start(self) -> Self:
        self._directory = Path(tempfile.mkdtemp(prefix="headrace-spark-"))
        self._port, self._page = _free_port(), _free_port()
        try:
            self._launch(
                "master",
                _MASTER,
                "127.0.0.1",
                "--port",
                str(self._port),
                "--webui-port",
                str(self._page),
            )
            self._wait("the master answers", lambda: self._facts() is not None)
            for number, host in enumerate(self.hosts):
                size = ["--cores", str(self.cores), "--memory", f"{self.memory_mb}m"]
                self._launch(
                    f"worker-{number}",
                    _WORKER,
                    host,
                    *size,
                    "--webui-port",
                    "0",
                    "--work-dir",
                    str(self._directory / f"work-{number}"),
                    self.master,
                )
            self._wait(
                "all workers have joined",
                lambda: (self._facts() or {}).get("aliveworkers") == self.workers,
            )
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Workers first; what has not ended after a while is killed."""
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def executors(self) -> int:
        """How many workers have run something."""
        assert self._directory is not None
        return sum(
            any((self._directory / f"work-{number}").glob("app-*"))
            for number in range(self.workers)
        )

    @staticmethod
    def environment(directory: Path, settings: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment for a driver. `directory` keeps its settings."""
        (directory / "spark-defaults.conf").write_text(
            "".join(f"{name} {value}\n" for name, value in {**SMALL, **(settings or {})}.items())
        )
        return {**os.environ, "SPARK_CONF_DIR": str(directory), "SPARK_LOCAL_IP": "127.0.0.1"}

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _launch(self, name: str, main: str, host: str, *arguments: str) -> None:
        """Spark's own script, which becomes the JVM."""
        from pyspark.find_spark_home import _find_spark_home

        assert self._directory is not None
        home = _find_spark_home()
        patient = (  # a busy machine may keep a worker waiting for long
            f"-Dspark.worker.timeout={PATIENCE_SECONDS}"
        )
        quick_start = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
        environment = {
            **os.environ,
            "SPARK_HOME": home,
            "SPARK_LOCAL_IP": host,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": quick_start,
            "SPARK_MASTER_OPTS": patient,
            "SPARK_WORKER_OPTS": patient,
        }
        with (self._directory / f"{name}.txt").open("wb") as output:
            command = [
                str(Path(home) / "bin" / "spark-class"),
                main,
                "--host",
                host,
                *arguments,
            ]
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_SECONDS
        while not condition():
            ended = [
                process.returncode for process in self._processes if process.poll() is not None
            ]
            if ended or time.monotonic() > deadline_s:
                raise ClusterUnavailable(
                    f"A Spark cluster could not be started: {what} was waited for. {self._output()}"
                )
            time.sleep(0.1)

    def _facts(self) -> dict[str, int] | None:
        """What the master's page says, for programs."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._page}/json/", timeout=5
            ) as answer:  # our own
                facts: dict[str, int] = json.load(answer)
                return facts
        except (urllib.error.URLError, OSError, ValueError):
            return None

    def _output(self) -> str:
        assert self._directory is not None
        return "\n".join(
            path.read_text(errors="replace")[-1500:]
            for path in sorted(self._directory.glob("*.txt"))
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
