"""The peers of patterns: Flink CEP and Esper, in Java, from Maven Central. Built once with `mvn`,
run as processes of their own over a file of the same events.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.report import Unavailable, note

HERE = Path(__file__).parent / "peers"
RATE = "rate:"
_OPENS = (
    "java.base/java.util",
    "java.base/java.lang",
    "java.base/java.time",
    "java.base/java.nio",
    "java.base/sun.nio.ch",
)
Match = tuple[int, int, int, int]
"""Card, first and last time in milliseconds, number of rows."""


def built() -> Path:
    """The directory with everything that the JVM needs; kept between runs, as long as nothing
    changed.
    """
    maven = shutil.which("mvn")
    if maven is None:
        raise Unavailable("Maven (`mvn`) is not installed.")
    sources = [HERE / "pom.xml", *sorted((HERE / "src").rglob("*.java"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    directory = (
        Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        / "headrace"
        / f"pattern-peers-{digest}"
    )
    if not (directory / "target" / "lib").is_dir():
        note("building Flink CEP's and Esper's side with Maven")
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(HERE / "src", directory / "src")
        shutil.copy(HERE / "pom.xml", directory)
        command = [
            maven,
            "-q",
            "-B",
            "compile",
            "dependency:copy-dependencies",
            "-DoutputDirectory=target/lib",
        ]
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, check=False, timeout=1200
        )
        if done.returncode:
            shutil.rmtree(directory, ignore_errors=True)
            raise Unavailable(
                f"Maven could not build the peers: {(done.stdout + done.stderr)[-500:]}"
            )
    return directory


def write_events(path: Path, events: pa.Table) -> None:
    """Card, amount, kind and time, as the peers read them."""
    made = np.empty(
        events.num_rows,
        np.dtype([("card", ">i8"), ("amount", ">f8"), ("kind", ">i4"), ("ts", ">i8")]),
    )
    made["card"], made["amount"] = events["card"].to_numpy(), events["amount"].to_numpy()
    made["kind"] = kinds(events)
    made["ts"] = events["paid_at"].cast(pa.int64()).to_numpy() // 1000
    path.write_bytes(made.tobytes())


def kinds(events: pa.Table) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Letters as numbers."""
    encoded = events["kind"].combine_chunks().dictionary_encode()
    numbers = np.array(
        [ord(letter) - ord("a") for letter in encoded.dictionary.to_pylist()], np.int32
    )
    found: np.ndarray[tuple[int], np.dtype[np.int32]] = numbers[encoded.indices.to_numpy()]
    return found


def run(peer: str, events: Path, which: str) -> tuple[float, list[Match]]:
    """Events a second, and the matches."""
    directory = built()
    java = shutil.which("java")
    if java is None:
        raise Unavailable("Java is not installed.")
    with tempfile.NamedTemporaryFile(suffix=".csv") as out:
        classpath = (
            f"{directory / 'target' / 'classes'}{os.pathsep}{directory / 'target' / 'lib'}/*"
        )
        opens = [word for each in _OPENS for word in ("--add-opens", f"{each}=ALL-UNNAMED")]
        command = [
            java,
            "-Xmx4g",
            *opens,
            "-cp",
            classpath,
            f"peers.{peer}",
            str(events),
            which,
            out.name,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
        rates = [
            line.removeprefix(RATE) for line in done.stdout.splitlines() if line.startswith(RATE)
        ]
        if not rates:
            raise RuntimeError(f"{peer} failed: {done.stderr[-2000:]}")
        lines = Path(out.name).read_text().splitlines()
    return float(rates[0]), sorted(tuple(map(int, line.split(","))) for line in lines)  # type: ignore[misc]
