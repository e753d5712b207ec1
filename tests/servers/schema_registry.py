"""A real schema registry for tests: Apicurio Registry, fetched from Maven Central once, started on
a free loopback port with its data in memory. It has Confluent's interface under `address`.

    with SchemaRegistry() as registry:
        log.create_topic("orders", "id BIGINT", format="avro", registry=registry.address)

It needs Java and, the first time, Maven; `RegistryUnavailable` says which of them is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.error import URLError
from urllib.request import urlopen

from tests.servers.kafka_broker import _free_port

VERSION = "2.5.11.Final"
START_SECONDS = 90
STOP_SECONDS = 15
FETCH_SECONDS = 600
_ARTIFACT = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"


class RegistryUnavailable(Exception):
    """No registry can be had here: Java, Maven or its archive is missing. The text says which."""


def cache_directory() -> Path:
    """Where the registry's jars are kept between runs, for this user."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "headrace" / f"apicurio-{VERSION}"


def fetch_registry() -> Path:
    """The directory of the registry's jars, fetched with Maven if they are not there yet."""
    directory = cache_directory()
    if directory.is_dir():
        return directory
    maven = shutil.which("mvn")
    if maven is None:
        raise RegistryUnavailable(
            "Maven (`mvn`) is not installed, and Apicurio has not been fetched before."
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="fetch-") as scratch:
        command = [maven, "-q", "-B", _COPY, f"-Dartifact={_ARTIFACT}"]
        command += [f"-DoutputDirectory={scratch}"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise RegistryUnavailable(
                f"Maven did not fetch Apicurio {VERSION} within {FETCH_SECONDS} seconds."
            ) from None
        archives = list(Path(scratch).glob("*.tar.gz"))
        if done.returncode or not archives:
            raise RegistryUnavailable(
                f"Maven could not fetch Apicurio {VERSION}:"
                f" {(done.stdout + done.stderr).strip()[-2000:]}"
            )
        with tarfile.open(archives[0]) as archive:
            archive.extractall(Path(scratch) / "registry", filter="data")
        try:
            (Path(scratch) / "registry").rename(directory)
        except OSError:
            if not directory.is_dir():
                raise
    return directory


class SchemaRegistry:
    """One registry process. `start()` returns when it answers; `stop()` ends it."""

    def __init__(self) -> None:
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._output: Path | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/apis/ccompat/v7"

    def start(self) -> Self:
        java = shutil.which("java")
        if java is None:
            raise RegistryUnavailable("Java is not installed; Apicurio needs version 11 or newer.")
        directory = fetch_registry()
        self.port = _free_port()
        self._output = Path(tempfile.mkdtemp(prefix="headrace-registry-"))
        (jar,) = directory.glob("*-runner.jar")
        command = [java, "-Xmx256m", "-XX:TieredStopAtLevel=1", "-Dquarkus.http.host=127.0.0.1"]
        command += [f"-Dquarkus.http.port={self.port}", "-jar", str(jar)]
        with (self._output / "output.txt").open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        assert self._output is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                with urlopen(f"{self.address}/subjects", timeout=2):
                    return
            except (URLError, OSError):
                time.sleep(0.1)
        text = (self._output / "output.txt").read_text(errors="replace")[-3000:]
        raise RegistryUnavailable(f"Apicurio did not start: {text}")

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._output is not None:
            shutil.rmtree(self._output, ignore_errors=True)
            self._output = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
