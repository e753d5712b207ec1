"""A real Kafka broker for tests: fetched from Maven Central once, started on free loopback ports,
gone when stopped.

Used by this project's own tests and benchmarks, and by anyone who wants to test a pipeline against
Kafka without a server of their own:

    with KafkaBroker() as broker:
        log = hr.open_log(broker.address)

It needs Java 17 and, the first time, Maven; `BrokerUnavailable` says which of them is missing. One
node, broker and controller in one process, data in a temporary directory. Nothing of it is fit for
production.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

KAFKA_VERSION = "4.3.0"
START_SECONDS = 60
STOP_SECONDS = 15
FETCH_SECONDS = 600

POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>headrace</groupId><artifactId>kafka-for-tests</artifactId><version>1</version>
  <dependencies>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{KAFKA_VERSION}</version></dependency>
  </dependencies>
</project>
"""

# One node has no replicas to wait for, and a test has no time for the delays that spare a
# production cluster needless work.
SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "inter.broker.listener.name": "PLAINTEXT",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "500",
    "group.share.heartbeat.interval.ms": "500",
    "group.share.min.heartbeat.interval.ms": "500",
    "group.share.session.timeout.ms": "3000",
    "group.share.min.session.timeout.ms": "3000",
    "group.share.min.record.lock.duration.ms": "1000",
    "group.share.assignment.interval.ms": "0",
    "auto.create.topics.enable": "false",
    "log.retention.check.interval.ms": "1000",
    "log.cleaner.backoff.ms": "500",
    "log.initial.task.delay.ms": "500",
    "log.segment.delete.delay.ms": "0",
}

# The broker ends, and its data goes, when this process closes the pipe: by `stop`, or by dying in
# whatever way.
WATCHED = """
directory=$1; shift; exec 3<&0
"$@" </dev/null 3<&- & broker=$!
(read -r _ <&3; kill $broker) & watcher=$!
exec 3<&-
wait $broker; code=$?
kill $watcher 2>/dev/null
[ $code -ne 143 ] || rm -rf "$directory"
exit $code
"""


class BrokerUnavailable(Exception):
    """No broker can be had here: Java, Maven or the jars are missing. The text says which."""


def cache_directory() -> Path:
    """Where the broker's jars are kept between runs, for this user."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "headrace" / f"kafka-{KAFKA_VERSION}"


def fetch_jars() -> Path:
    """The directory of the broker's jars, fetched with Maven if they are not there yet."""
    directory = cache_directory()
    if directory.is_dir():
        return directory
    maven = shutil.which("mvn")
    if maven is None:
        raise BrokerUnavailable(
            "Maven (`mvn`) is not installed, and the jars of Kafka have not been fetched before."
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="fetch-") as scratch:
        _copy_dependencies(maven, Path(scratch))
        _publish(Path(scratch) / "jars", directory)
    return directory


def _copy_dependencies(maven: str, scratch: Path) -> None:
    (scratch / "pom.xml").write_text(POM)
    command = [maven, "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars"]
    try:
        done = subprocess.run(
            command, cwd=scratch, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise BrokerUnavailable(
            f"Maven did not fetch Kafka {KAFKA_VERSION} within {FETCH_SECONDS} seconds."
        ) from None
    if done.returncode or not (scratch / "jars").is_dir():
        raise BrokerUnavailable(
            f"Maven could not fetch Kafka {KAFKA_VERSION}:"
            f" {(done.stdout + done.stderr).strip()[-2000:]}"
        )


def _publish(jars: Path, directory: Path) -> None:
    """Rename into place, so that no reader ever sees half of the jars; whoever comes second keeps
    the first one's.
    """
    try:
        jars.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class KafkaBroker:
    """One broker process. `start()` returns when it answers; `stop()` ends it and removes its
    data.
    """

    def __init__(self, settings: Mapping[str, str] | None = None, *, heap_mb: int = 400) -> None:
        self.settings = dict(settings or {})
        self.heap_mb = heap_mb
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        """What `hr.open_log` takes."""
        return f"kafka://{self.bootstrap}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> Self:
        java = shutil.which("java")
        if java is None:
            raise BrokerUnavailable("Java is not installed; Kafka needs version 17 or newer.")
        jars = fetch_jars()
        self._directory = Path(tempfile.mkdtemp(prefix="headrace-kafka-"))
        try:
            config = self._write_config(self._directory)
            self._format(java, jars, config)
            self._launch(java, jars, config)
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the broker, politely first, and remove its data."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def output(self) -> str:
        """The end of what the broker printed; for error messages."""
        file = self._directory / "output.txt" if self._directory else None
        return file.read_text(errors="replace")[-3000:] if file and file.exists() else ""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _write_config(self, directory: Path) -> Path:
        self.port, controller = _free_port(), _free_port()
        settings = {
            **SETTINGS,
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller}",
            "log.dirs": str(directory / "data"),
            **self.settings,
        }
        config = directory / "server.properties"
        config.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        return config

    def _command(self, java: str, jars: Path, main: str, *arguments: str) -> list[str]:
        quick_start = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
        return [java, f"-Xmx{self.heap_mb}m", *quick_start, "-cp", f"{jars}/*", main, *arguments]

    def _format(self, java: str, jars: Path, config: Path) -> None:
        command = self._command(
            java,
            jars,
            "kafka.tools.StorageTool",
            "format",
            "--standalone",
            "-t",
            _cluster_id(),
            "-c",
            str(config),
        )
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=START_SECONDS, check=False
        )
        if done.returncode:
            raise BrokerUnavailable(
                "Kafka's storage could not be formatted:"
                f" {(done.stdout + done.stderr).strip()[-2000:]}"
            )

    def _launch(self, java: str, jars: Path, config: Path) -> None:
        assert self._directory is not None
        with (self._directory / "output.txt").open("wb") as output:
            self._process = subprocess.Popen(
                [
                    "/bin/sh",
                    "-c",
                    WATCHED,
                    "kafka",
                    str(self._directory),
                    *self._command(java, jars, "kafka.Kafka", str(config)),
                ],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise BrokerUnavailable(
                    f"Kafka ended at once with code {self._process.returncode}: {self.output()}"
                )
            if self._answers():
                return
            time.sleep(0.1)
        raise BrokerUnavailable(
            f"Kafka did not answer within {START_SECONDS} seconds: {self.output()}"
        )

    def _answers(self) -> bool:
        """The socket opens when the broker has caught up with its metadata and takes requests."""
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True


def _cluster_id() -> str:
    """Kafka wants the 22 characters of a URL-safe base64 UUID that does not begin with a dash."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
