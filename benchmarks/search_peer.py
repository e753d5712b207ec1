"""The peer of search: Lucene's Monitor with its multi-pass presearcher, in Java, from Maven
Central. Fetched once with `mvn`, run on one core over the same files.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Unavailable, note

HERE = Path(__file__).parent / "peers" / "lucene"
MIN_JAVA = 21
KEPT_IN = (
    "/usr/lib/jvm",
    "/opt/java",
    "/Library/Java/JavaVirtualMachines",
    "~/.sdkman/candidates/java",
)


@dataclass(frozen=True)
class Ran:
    """Documents a second, the same by the matching thread's CPU, seconds to add the queries, and
    what was found.
    """

    rate: float
    rate_by_cpu: float
    seconds_to_add: float
    matches: int
    digest: int


def java_home() -> Path:
    """A JDK that is new enough: of JAVA_HOME, the one in use, or one where systems keep theirs."""
    used, named = shutil.which("java"), os.environ.get("JAVA_HOME")
    homes = [Path(named)] if named else []
    homes += [Path(used).resolve().parents[1]] if used else []
    homes += [
        home for kept in KEPT_IN for home in sorted(Path(kept).expanduser().glob("*"), reverse=True)
    ]
    for home in homes:
        if (home / "bin" / "javac").exists() and _version(home) >= MIN_JAVA:
            return home
    raise Unavailable(
        f"Lucene 10 needs a JDK of version {MIN_JAVA} or newer, and there is none: install one,"
        " and let JAVA_HOME name it."
    )


def _version(home: Path) -> int:
    done = subprocess.run(
        [home / "bin" / "java", "-version"], capture_output=True, text=True, check=False, timeout=60
    )
    found = re.search(r'version "(\d+)', done.stderr)
    return int(found[1]) if found else 0


def built() -> Path:
    """The directory with everything that the JVM needs; kept between runs, as long as nothing
    changed. Maven fetches under whichever Java it has; the newer one compiles.
    """
    maven, home = shutil.which("mvn"), java_home()
    if maven is None:
        raise Unavailable("Maven (`mvn`) is not installed.")
    sources = sorted(HERE.rglob("*.java"))
    digest = hashlib.sha256(
        b"".join(path.read_bytes() for path in [HERE / "pom.xml", *sources])
    ).hexdigest()[:12]
    directory = (
        Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        / "headrace"
        / f"search-peer-{digest}"
    )
    if not directory.is_dir():
        note("fetching Lucene's Monitor with Maven")
        making = Path(tempfile.mkdtemp(dir=_made(directory.parent)))
        shutil.copy(HERE / "pom.xml", making)
        _done([maven, "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=lib"], making)
        _done(
            [
                str(home / "bin" / "javac"),
                "-cp",
                f"{making / 'lib'}/*",
                "-d",
                "classes",
                *map(str, sources),
            ],
            making,
        )
        making.rename(directory)
    return directory


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _done(command: list[str], directory: Path) -> None:
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, check=False, timeout=1200
    )
    if done.returncode:
        shutil.rmtree(directory, ignore_errors=True)
        raise Unavailable(
            f"{command[0]} could not build the peer: {(done.stdout + done.stderr)[-500:]}"
        )


def run(queries: Path, documents: Path, batch: int) -> Ran:
    directory, java = built(), java_home() / "bin" / "java"
    classpath = f"{directory / 'classes'}{os.pathsep}{directory / 'lib'}/*"
    options = ["-Xmx4g", "-XX:ActiveProcessorCount=1", "-XX:+UseSerialGC"]
    command = [
        str(java),
        *options,
        "-cp",
        classpath,
        "peers.MonitorPeer",
        str(queries),
        str(documents),
        str(batch),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    said = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    if "digest" not in said:
        raise RuntimeError(f"The Lucene Monitor failed: {done.stderr[-2000:]}")
    return Ran(
        float(said["rate"]),
        float(said["rate by CPU"]),
        float(said["seconds to add"]),
        int(said["matches"]),
        int(said["digest"]),
    )
