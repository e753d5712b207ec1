"""A real OpenSearch for tests: its jars are fetched from Maven Central once, and one node is
started with the modules that a sink needs. Like this:

with OpenSearchServer() as server:
sink = hr.sinks.opensearch(server.url)

It needs a JDK (17), since a node with modules from the class path is a class of its own, and Maven
the first time. Nothing of it is fit for production.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path

from tests.servers.database_server import DatabaseServer, ServerUnavailable, free_port

VERSION = "2.19.1"
FETCH_S = 600
_PARTS = (
    ("org.opensearch", "opensearch", VERSION),
    ("org.opensearch.plugin", "transport-netty4-client", VERSION),
    ("org.apache.logging.log4j", "log4j-core", "2.21.0"),
)
POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>headrace</groupId><artifactId>opensearch-for-tests</artifactId><version>1</version>
  <dependencies>{
    "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId>"
        f"<version>{version}</version></dependency>"
        for group, name, version in _PARTS
    )
}</dependencies>
</project>
"""
NODE = """
import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import org.opensearch.common.settings.Settings;
import org.opensearch.node.InternalSettingsPreparer;
import org.opensearch.node.Node;
import org.opensearch.env.Environment;
import org.opensearch.transport.Netty4Plugin;

public class TestNode extends Node {
  TestNode(Environment environment) { super(environment, List.of(Netty4Plugin.class), false); }

  public static void main(String[] arguments) throws Exception {
    Path home = Path.of(arguments[0]);
    Settings settings = Settings.builder()
        .put("path.home", home)
        .put("cluster.name", "tests")
        .put("node.name", "tests")
        .put("network.host", "127.0.0.1")
        .put("http.port", arguments[1])
        .put("transport.port", arguments[2])
        .put("discovery.type", "single-node")
        .put("transport.type", "netty4")
        .put("http.type", "netty4")
        .put("node.store.allow_mmap", false)
        .put("cluster.routing.allocation.disk.threshold_enabled", false)
        .build();
    Node node = new TestNode(InternalSettingsPreparer.prepareEnvironment(
        settings, Map.of(), home.resolve("config"), () -> "tests"));
    node.start();
    Runtime.getRuntime().addShutdownHook(new Thread(() -> {
      try { node.close(); } catch (Exception error) { error.printStackTrace(); }
    }));
    Thread.currentThread().join();
  }
}
"""


def fetch_jars() -> Path:
    """Return the directory of the server's jars, fetched with Maven if they are not there yet."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = base / "headrace" / f"opensearch-{VERSION}"
    if directory.is_dir():
        return directory
    maven = shutil.which("mvn")
    if maven is None:
        raise ServerUnavailable(
            "Maven is not installed, and the jars of OpenSearch have not been fetched before."
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="fetch-") as scratch:
        (Path(scratch) / "pom.xml").write_text(POM)
        command = [maven, "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars"]
        try:
            done = subprocess.run(
                command, cwd=scratch, capture_output=True, text=True, timeout=FETCH_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise ServerUnavailable(f"Maven did not fetch OpenSearch {VERSION} in time.") from None
        jars = Path(scratch) / "jars"
        if done.returncode or not jars.is_dir():
            output = (done.stdout + done.stderr).strip()[-2000:]
            raise ServerUnavailable(f"Maven could not fetch OpenSearch {VERSION}: {output}")
        try:
            jars.rename(directory)
        except OSError:  # another process was faster
            if not directory.is_dir():
                raise
    return directory


class OpenSearchServer(DatabaseServer):
    kind = "OpenSearch"
    heap_mb = 256

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def owner(self) -> str | None:
        """A node that is started from a class of its own does not refuse root."""
        return None

    def prepare(self, data: Path) -> None:
        (data / "config").mkdir(parents=True)
        (data / "TestNode.java").write_text(NODE)

    def command(self, data: Path) -> list[str]:
        java = shutil.which("java")
        if java is None or shutil.which("javac") is None:
            raise ServerUnavailable("There is no JDK. To fix: apt-get install default-jdk-headless")
        return [
            java,
            f"-Xmx{self.heap_mb}m",
            "-XX:TieredStopAtLevel=1",
            "-XX:+UseSerialGC",
            "-cp",
            f"{fetch_jars()}/*",
            str(data / "TestNode.java"),
            str(data),
            str(self.port),
            str(free_port()),
        ]

    def answers(self) -> bool:
        try:
            health = f"{self.url}/_cluster/health"
            with urllib.request.urlopen(health, timeout=1) as response:
                return b'"red"' not in response.read()
        except OSError:
            return False
