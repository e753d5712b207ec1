"""The peer of Nexmark: Flink SQL, in Java, from Maven Central. Built once with `mvn`, run as a
process of its own over files of the same rows, on the settings that the benchmark's own
configuration recommends: mini-batches, objects reused.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.nexmark.events import SCHEMAS, Events, side_input
from benchmarks.nexmark.queries import Query
from benchmarks.report import Unavailable, note

HERE = Path(__file__).parents[1] / "peers" / "nexmark"
PARALLELISM = 2
_BLOCK_ROWS = 4096
_TYPES = {"BIGINT": "BIGINT", "STRING": "STRING", "TIMESTAMP": "TIMESTAMP(3)"}
_OPENS = (
    "java.base/java.util",
    "java.base/java.lang",
    "java.base/java.time",
    "java.base/java.nio",
    "java.base/sun.nio.ch",
)
_SETTINGS = {
    "parallelism.default": str(PARALLELISM),
    "pipeline.object-reuse": "true",
    "table.local-time-zone": "UTC",
    "table.exec.mini-batch.enabled": "true",
    "table.exec.mini-batch.allow-latency": "2 s",
    "table.exec.mini-batch.size": "50000",
    "table.optimizer.distinct-agg.split.enabled": "true",
    "taskmanager.memory.network.min": "128 mb",
    "taskmanager.memory.network.max": "128 mb",
    "taskmanager.memory.managed.size": "1 gb",
}
HEAP = "heap, no checkpoints"
ROCKSDB = "RocksDB, exactly-once checkpoints every 10 s"


def built() -> Path:
    """The directory with everything that the JVM needs; kept between runs, as long as nothing
    changed.
    """
    maven = shutil.which("mvn")
    if maven is None or shutil.which("java") is None:
        raise Unavailable("Maven (`mvn`) or Java is not installed.")
    sources = sorted(path for path in HERE.rglob("*") if path.is_file())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    directory = (
        Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        / "headrace"
        / f"nexmark-peer-{digest}"
    )
    if not (directory / "target" / "lib").is_dir():
        note("building Flink SQL's side with Maven")
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(HERE, directory)
        copying = ["dependency:copy-dependencies", "-DoutputDirectory=target/lib"]
        done = subprocess.run(
            [maven, "-q", "-B", "compile", *copying],
            cwd=directory,
            capture_output=True,
            text=True,
            check=False,
            timeout=1200,
        )
        if done.returncode:
            shutil.rmtree(directory, ignore_errors=True)
            raise Unavailable(
                f"Maven could not build the peer: {(done.stdout + done.stderr)[-500:]}"
            )
    return directory


def write_files(directory: Path, rows: Events) -> None:
    """Each kind of event in a directory with a file for each parallel source."""
    for name, table in {**rows.tables(), "side_input": side_input()}.items():
        share = -(-table.num_rows // PARALLELISM)
        (directory / name).mkdir(parents=True)
        for part in range(PARALLELISM):
            # Alternating blocks: both files go through event time together.
            blocks = range(part * _BLOCK_ROWS, table.num_rows, PARALLELISM * _BLOCK_ROWS)
            with (directory / name / f"{part}.columns").open("wb") as file:
                for start in blocks if share else ():
                    _write_block(file.write, table.slice(start, _BLOCK_ROWS).combine_chunks())


def _write_block(write: object, rows: pa.Table) -> None:
    assert callable(write)
    write(np.int32(rows.num_rows).tobytes())
    for column in rows.columns:
        values = column.combine_chunks()
        if pa.types.is_string(values.type):
            ends = np.cumsum(pc.binary_length(values).to_numpy()).astype("<i4")
            data = ends.tobytes() + "".join(values.to_pylist()).encode()
        elif pa.types.is_timestamp(values.type):
            data = (values.cast(pa.int64()).to_numpy() // 1000).astype("<i8").tobytes()
        else:
            data = values.to_numpy().astype("<i8").tobytes()
        write(np.int32(len(data)).tobytes())
        write(data)


@dataclass(frozen=True)
class FlinkRun:
    """One run of Flink's: from the start of its job to its end, planning not counted, and the CPU
    time that its process took meanwhile, planning counted.
    """

    seconds: float
    cpu_s: float


def measured(
    queries: Sequence[Query], files: Path, *, durable: bool, runs: int, limit_s: float
) -> dict[str, list[FlinkRun]]:
    """The runs of each query. One that Flink refuses has none. Each has its share of `limit_s`, two
    runs at least and `runs` at most. What does not come to an end within twice `limit_s` is given
    up, and so are the queries behind it.
    """
    directory = built()
    with tempfile.TemporaryDirectory(prefix="bench-flink-") as made:
        root = Path(made)
        (root / "ddl").write_text(_tables(files))
        (root / "settings").write_text(
            "".join(f"{name}: {value}\n" for name, value in _settings(root, durable=durable))
        )
        for query in queries:
            (root / query.name).write_text(_quoted(query.flink or ""))
        opens = [word for each in _OPENS for word in ("--add-opens", f"{each}=ALL-UNNAMED")]
        classpath = (
            f"{directory / 'target' / 'classes'}{os.pathsep}{directory / 'target' / 'lib'}/*"
        )
        command = [
            "java",
            "-Xmx6g",
            *opens,
            "-cp",
            classpath,
            "peers.NexmarkPeer",
            *map(str, (root / "ddl", root / "settings", runs, limit_s)),
            *(str(root / query.name) for query in queries),
        ]
        output = root / "output"
        with output.open("w") as file:
            try:
                subprocess.run(
                    command, stdout=file, stderr=file, check=False, timeout=2 * limit_s + 60
                )
            except subprocess.TimeoutExpired:
                note(f"Flink took more than {2 * limit_s + 60:.0f} s: its last queries are missing")
        text = output.read_text(errors="replace")
    found: dict[str, list[FlinkRun]] = {query.name: [] for query in queries}
    for line in text.splitlines():
        kind, _, rest = line.partition(": ")
        name, _, value = rest.partition(" ")
        if kind == "seconds":
            seconds, cpu_s = map(float, value.split())
            found[name].append(FlinkRun(seconds, cpu_s))
        elif kind == "failed":
            note(f"Flink cannot run {name}: {value[:300]}")
    if not any(found.values()):
        raise RuntimeError(f"Flink SQL failed: {text[-2000:]}")
    return found


def _settings(root: Path, *, durable: bool) -> Iterable[tuple[str, str]]:
    state = (
        {
            "state.backend.type": "rocksdb",
            "execution.checkpointing.interval": "10 s",
            "execution.checkpointing.mode": "EXACTLY_ONCE",
            "execution.checkpointing.incremental": "true",
            "execution.checkpointing.storage": "filesystem",
            "execution.checkpointing.dir": (root / "checkpoints").as_uri(),
        }
        if durable
        else {"state.backend.type": "hashmap"}
    )
    return {**_SETTINGS, **state}.items()


def _tables(files: Path) -> str:
    """Statements that declare the files as tables."""
    statements = []
    for name, schema in {**SCHEMAS, "side_input": "key BIGINT, value STRING"}.items():
        columns = [column.rsplit(" ", 1) for column in schema.split(", ")]
        parts = [f"`{column}` {_TYPES[kind]}" for column, kind in columns]
        if name in SCHEMAS:
            parts.append("WATERMARK FOR `dateTime` AS `dateTime` - INTERVAL '4' SECOND")
        if name == "bid":
            parts.append("`p_time` AS PROCTIME()")
        statements.append(
            f"CREATE TABLE {name} ({', '.join(parts)})"
            f" WITH ('connector' = 'columns', 'path' = '{files / name}');\n"
        )
    return "".join(statements)


def _quoted(sql: str) -> str:
    """`dateTime` as an identifier: the word is a type in Flink's dialect."""
    return re.sub(r"(?<!`)\bdateTime\b(?!`)", "`dateTime`", sql)
