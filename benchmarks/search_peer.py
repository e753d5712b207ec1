"""The peer of search: Lucene's Monitor with its multi-pass presearcher, in Java, from Maven Central. Built once with `mvn`, run on one core over the same files."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Unavailable, note

HERE = Path(__file__).parent / "peers" / "lucene"
LEAST_JAVA = 21


@dataclass(frozen=True)
class Ran:
    """Documents a second, seconds to add the queries, and what was found."""

    rate: float
    seconds_to_add: float
    matches: int
    digest: int


def java_home() -> Path:
    """A Java that is new enough: the one in use, or one beside it."""
    used = shutil.which("java")
    homes = [Path(used).resolve().parents[1]] if used else []
    homes += sorted(Path("/usr/lib/jvm").glob("*"), reverse=True)
    for home in homes:
        if (home / "bin" / "javac").exists():
            done = subprocess.run([home / "bin" / "java", "-version"], capture_output=True, text=True, check=False, timeout=60)
            found = re.search(r'version "(\d+)', done.stderr)
            if found and int(found[1]) >= LEAST_JAVA:
                return home
    raise Unavailable(f"Lucene 10 needs a JDK of version {LEAST_JAVA} or newer.")


def built() -> Path:
    """The directory with everything that the JVM needs; kept between runs, as long as nothing changed."""
    maven = shutil.which("mvn")
    if maven is None:
        raise Unavailable("Maven (`mvn`) is not installed.")
    sources = [HERE / "pom.xml", *sorted(HERE.rglob("*.java"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    directory = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headrace" / f"search-peer-{digest}"
    if not (directory / "target" / "lib").is_dir():
        note("building the Lucene Monitor's side with Maven")
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(HERE, directory)
        command = [maven, "-q", "-B", "compile", "dependency:copy-dependencies", "-DoutputDirectory=target/lib"]
        environment = {**os.environ, "JAVA_HOME": str(java_home())}
        done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=1200)
        if done.returncode:
            shutil.rmtree(directory, ignore_errors=True)
            raise Unavailable(f"Maven could not build the peer: {(done.stdout + done.stderr)[-500:]}")
    return directory


def run(queries: Path, documents: Path, batch: int) -> Ran:
    directory, java = built(), java_home() / "bin" / "java"
    classpath = f"{directory / 'target' / 'classes'}{os.pathsep}{directory / 'target' / 'lib'}/*"
    options = ["-Xmx4g", "-XX:ActiveProcessorCount=1", "-XX:+UseSerialGC"]
    command = [str(java), *options, "-cp", classpath, "peers.MonitorPeer", str(queries), str(documents), str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    said = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    if "digest" not in said:
        raise RuntimeError(f"The Lucene Monitor failed: {done.stderr[-2000:]}")
    return Ran(float(said["rate"]), float(said["seconds to add"]), int(said["matches"]), int(said["digest"]))
