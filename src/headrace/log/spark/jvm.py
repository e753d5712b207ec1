"""Spark's JVM: the Java that it runs on, and starting it without PySpark's launcher.

PySpark starts the JVM through `bin/spark-submit`, which starts another JVM first, only to print the
command. Here the same command is built in Python (`usual_command`), and run before PySpark is even
imported (`launcher`); PySpark is then given the port of the running JVM, as by `spark-submit`. It
has all that PySpark's own launch has: it ignores Ctrl-C, it ends with this process, and
spark-defaults.conf, extra jars, memory and Java options apply. Without PySpark's
`--add-modules=jdk.incubator.vector`, which only MLlib uses, the JVM prints no warning about it.

Whatever is unusual (a spark-env.sh, Hadoop's directories, YARN, Windows …) is left to PySpark:
`usual_command` then returns None.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from headrace.errors import ConfigurationError
from headrace.log.spark.settings import JAVA_OPTIONS, configuration_directory, setting_text

# Java


MIN_JAVA_VERSION = 17
HOW_TO_INSTALL_JAVA = (
    "On Debian and Ubuntu: apt-get install default-jre-headless; on Fedora: dnf install"
    " java-latest-openjdk-headless; on Alpine: apk add openjdk21-jre-headless; on macOS: brew"
    " install openjdk."
)


def check_java() -> None:
    """ConfigurationError if there is no Java that Spark can run on."""
    home, java = os.environ.get("JAVA_HOME"), java_executable()
    fix = (
        f"install Java {MIN_JAVA_VERSION} or newer, or set JAVA_HOME to where it is."
        f" {HOW_TO_INSTALL_JAVA}"
    )
    if java is None:
        where = (
            f"JAVA_HOME is {home!r}, and there is no bin/java in it"
            if home
            else "there is no `java` on the PATH"
        )
        raise ConfigurationError(f"Spark needs Java, and {where}.", fix=fix)
    version = java_version(java)
    if version is not None and version < MIN_JAVA_VERSION:
        raise ConfigurationError(
            f"Spark needs Java {MIN_JAVA_VERSION} or newer; {java} is Java {version}.", fix=fix
        )


def java_executable() -> str | None:
    """The Java that Spark uses: of JAVA_HOME, or the one on the PATH."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    return java if java is not None and os.access(java, os.X_OK) else None


def java_version(java: str) -> int | None:
    """The major version of a Java executable."""
    version = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)', java_build(java))
    return None if version is None else int(version[1])


@cache
def java_build(java: str) -> str:
    """What a Java executable says about itself: its `release` file, or the output of `java
    -version`, which takes longer. Cached: a command checks before it does anything, and starting
    Spark checks again.
    """
    real = Path(java).resolve()
    with suppress(OSError):
        text = (real.parent.parent / "release").read_text()
        if "JAVA_VERSION=" in text:
            return f"{real}\n{text}"
    result = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    return f"{real}\n{result.stderr}{result.stdout}"


# The command


KNOWN_SPARK = re.compile(r"spark-launcher_[\d.]+-(4\.[23]\.\d+)\.jar")
UNUSUAL_VARIABLES = (
    "HADOOP_CONF_DIR",
    "PYSPARK_GATEWAY_PORT",
    "PYSPARK_SUBMIT_ARGS",
    "SPARK_API_MODE",
    "SPARK_CLASSPATH",
    "SPARK_CONNECT_MODE_ENABLED",
    "SPARK_DIST_CLASSPATH",
    "SPARK_DRIVER_MEMORY",
    "SPARK_MEM",
    "SPARK_PREPEND_CLASSES",
    "SPARK_PRINT_LAUNCH_COMMAND",
    "SPARK_REMOTE",
    "SPARK_SQL_TESTING",
    "SPARK_TESTING",
    "YARN_CONF_DIR",
)
UNUSUAL_SETTINGS = (
    "spark.api.mode",
    "spark.driver.defaultExtraJavaOptions",
    "spark.driver.extraClassPath",
    "spark.driver.extraLibraryPath",
    "spark.remote",
    "spark.submit.deployMode",
)
OPENED_PACKAGES = (
    "java.base/java.lang",
    "java.base/java.lang.invoke",
    "java.base/java.lang.reflect",
    "java.base/java.io",
    "java.base/java.net",
    "java.base/java.nio",
    "java.base/java.util",
    "java.base/java.util.concurrent",
    "java.base/java.util.concurrent.atomic",
    "java.base/jdk.internal.ref",
    "java.base/sun.nio.ch",
    "java.base/sun.nio.cs",
    "java.base/sun.security.action",
    "java.base/sun.util.calendar",
    "java.security.jgss/sun.security.krb5",
)
GONE_PACKAGES = {"java.base/sun.security.action": 24}
"""Opened packages that a version of Java no longer has; it would print a warning."""


def module_options(java_version: int) -> list[str]:
    """The options of Spark's own launcher (`JavaModuleOptions`), but for the incubator module and
    for what this Java does not have.
    """
    opened = [
        f"--add-opens={package}=ALL-UNNAMED"
        for package in OPENED_PACKAGES
        if java_version < GONE_PACKAGES.get(package, java_version + 1)
    ]
    return [
        "-XX:+IgnoreUnrecognizedVMOptions",
        *opened,
        "-Dio.netty.tryReflectionSetAccessible=true",
        "-Dio.netty.allocator.type=pooled",
        "-Dio.netty.handler.ssl.defaultEndpointVerificationAlgorithm=NONE",
        "--sun-misc-unsafe-memory-access=allow",
        "--enable-native-access=ALL-UNNAMED",
        "-Dderby.connection.requireAuthentication=false",
    ]


HIDE_DEFAULT_SOURCE = "HEADRACE_HIDE_DEFAULT_SOURCE"
"""The environment variable that hides `pyspark_headrace.DefaultSource` from Spark."""


@dataclass(frozen=True)
class Installation:
    """The Spark and the Java of this machine."""

    home: Path
    configuration: Path
    spark_version: str
    java: str
    java_version: int
    java_build: str

    @property
    def jars(self) -> Path:
        return self.home / "jars"

    @property
    def class_path(self) -> str:
        first = [str(jar) for jar in sorted(self.jars.glob("slf4j-api-*.jar"))]
        return os.pathsep.join([str(self.configuration), *first, f"{self.jars}/*"])


@dataclass(frozen=True)
class JvmCommand:
    """A command that starts Spark's JVM, with the environment and directory that it starts in.
    Equal commands start equal JVMs.
    """

    installation: Installation
    options: tuple[str, ...]
    settings: Mapping[str, str]
    environment: Mapping[str, str]
    directory: str

    def with_options(self, *options: str) -> JvmCommand:
        return replace(self, options=(*self.options, *options))

    @property
    def arguments(self) -> list[str]:
        settings = [
            part for item in self.settings.items() for part in ("--conf", f"{item[0]}={item[1]}")
        ]
        return [
            self.installation.java,
            "-cp",
            self.installation.class_path,
            *self.options,
            "org.apache.spark.deploy.SparkSubmit",
            *settings,
            "pyspark-shell",
        ]


def usual_command(settings: Mapping[str, Any]) -> JvmCommand | None:
    """The command by which PySpark would start the JVM for these settings, as far as it is known
    here; None where PySpark must start it itself.
    """
    installation = _installation()
    texts = {name: setting_text(value) for name, value in settings.items()}
    master = texts.get("spark.master", "")
    java_options = texts.get(JAVA_OPTIONS, "")
    if (
        installation is None
        or any(name in os.environ for name in UNUSUAL_VARIABLES)
        or any(name in texts for name in UNUSUAL_SETTINGS)
        or not master.startswith(("local", "spark://"))
        or "-Xmx" in java_options
    ):
        return None
    environment = {
        **os.environ,
        "SPARK_HOME": str(installation.home),
        "SPARK_CONNECT_MODE": "0",
        "SPARK_ENV_LOADED": "1",
        "SPARK_SCALA_VERSION": "2.13",
        "PYTHONHASHSEED": "0",
        HIDE_DEFAULT_SOURCE: "1",
    }
    return JvmCommand(
        installation=installation,
        options=(
            *shlex.split(os.environ.get("SPARK_SUBMIT_OPTS", "")),
            *shlex.split(java_options),
            f"-Xmx{texts.get('spark.driver.memory', '1g')}",
            *module_options(installation.java_version),
        ),
        settings=texts,
        environment=environment,
        directory=os.getcwd(),  # noqa: PTH109 - a path as Spark's environment has it
    )


def _installation() -> Installation | None:
    """The installed Spark and Java; None if either is missing or not known here, or configured by
    a script.
    """
    package, java = find_spec("pyspark"), java_executable()
    locations = package.submodule_search_locations if package is not None else None
    if os.name != "posix" or not locations or java is None:
        return None
    home = Path(os.environ.get("SPARK_HOME") or locations[0])
    version = java_version(java)
    known = [
        found[1]
        for jar in (home / "jars").glob("spark-launcher_*.jar")
        if (found := KNOWN_SPARK.fullmatch(jar.name))
    ]
    configuration = configuration_directory(home)
    if (
        not known
        or version is None
        or (configuration / "spark-env.sh").exists()
        or (configuration / "java-opts").exists()
        or _defaults_concern_launch(configuration / "spark-defaults.conf")
    ):
        return None
    return Installation(
        home=home,
        configuration=configuration,
        spark_version=known[0],
        java=java,
        java_version=version,
        java_build=java_build(java),
    )


def _defaults_concern_launch(file: Path) -> bool:
    """Whether a file of default settings has some that the launcher reads. All others are read by
    the JVM itself.
    """
    try:
        text = file.read_text()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return (
        re.search(r"^\s*spark\.(driver|submit|master|remote|api)", text, re.MULTILINE) is not None
    )


# The process


START_TIMEOUT_S = 120.0
POLL_EVERY_S = 0.01
IGNORE_INTERRUPTS = 'trap "" INT; exec "$@"'  # Ctrl-C is for the driver


class JvmGateway(NamedTuple):
    """Where PySpark reaches a JVM."""

    port: int
    secret: str


class Jvm:
    """A JVM that was started here. It ends with this process, whose pipe it reads."""

    def __init__(
        self, command: JvmCommand, process: subprocess.Popen[bytes], scratch: Path
    ) -> None:
        self.command = command
        self.process = process
        self._scratch = scratch
        self._is_used = False

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def wait_for_gateway(self) -> JvmGateway | None:
        """Its gateway, when it is ready; None if the JVM ended instead."""
        file = self._scratch / "gateway"
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not file.exists():
            if not self.is_alive or time.monotonic() > deadline_s:
                return None
            time.sleep(POLL_EVERY_S)
        self._is_used = True
        content = file.read_bytes()
        port, length = struct.unpack_from("!ii", content)
        return JvmGateway(port=port, secret=content[8 : 8 + length].decode())

    def leave(self) -> None:
        """For the end of this process: a JVM that nobody has used ends at once, before it can
        complain; any other when it reads the end of its input.
        """
        if self._is_used:
            shutil.rmtree(self._scratch, ignore_errors=True)
        else:
            self.close()

    def close(self, patience_s: float = 0.0) -> None:
        """End it: by the end of its input, which is orderly, and by force if that takes longer."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


def launch(command: JvmCommand, arguments: Sequence[str]) -> Jvm:
    """Start a JVM for a command, with arguments that may have more options than the command's own.
    Returns at once; it is ready about a second later.
    """
    scratch = Path(tempfile.mkdtemp(prefix="headrace-jvm-"))
    process = subprocess.Popen(
        ["/bin/sh", "-c", IGNORE_INTERRUPTS, "sh", *arguments],
        stdin=subprocess.PIPE,
        env={**command.environment, "_PYSPARK_DRIVER_CONN_INFO_PATH": str(scratch / "gateway")},
    )
    jvm = Jvm(command, process, scratch)
    atexit.register(jvm.leave)
    return jvm
