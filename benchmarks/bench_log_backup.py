"""Repeating a load of numbered appends, and backing up a log that is being written."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Self

import headrace as hr
from benchmarks.log_rows import SCHEMA, batches
from benchmarks.report import Result, compare, judged, limited, note, seconds
from headrace.log import Log

APPENDS = 1000
BACKUP_ROWS = 3_000_000
PAUSE_SHARE = 0.5
"""How much of the fastest rate the log is written at while it is backed up."""


def load_s(log: Log) -> float:
    """The time for a load of numbered appends."""

    def load() -> None:
        with log.producer("t", id="loader") as producer:
            for number in range(APPENDS):
                producer.append([{"id": number, "text": "x", "value": 1.0}], sequence=number)

    return seconds(load)


def repeated(root: Path) -> Result:
    with hr.open_log(f"file:{root}/repeated") as log:
        log.create_topic("t", "id BIGINT, text STRING, value DOUBLE", partitions=2)
        first_s = load_s(log)
        again_s = statistics.median(load_s(log) for _ in range(3))
    note(f"{APPENDS} numbered appends: {first_s:.2f} s, again {again_s:.2f} s")
    return limited(
        "log",
        f"a load of {APPENDS:,} numbered appends again, in times of the first",
        "times",
        again_s / first_s,
        limit=2.0,
    )


# In a process of its own, as `headrace log backup` is; it prints how long the backup took.
BACKUP = """
import sys, headrace as hr
with hr.open_log(sys.argv[1]) as log:
    print(log.backup(sys.argv[2]).seconds)
"""


def backup_s(log: Log, directory: Path) -> float:
    done = subprocess.run(
        [sys.executable, "-c", BACKUP, log.address, str(directory)],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


class Writer:
    """Appends batches at a rate, in a thread, and measures what an append takes."""

    def __init__(self, log: Log, pause_s: float) -> None:
        self.log, self.pause_s = log, pause_s
        self.rows = 0
        self._stop = Event()
        self._batches = batches(100_000, 1000)
        self._thread = Thread(target=self._write)

    def _write(self) -> None:
        with self.log.producer("t") as producer:
            while not self._stop.is_set():
                batch = self._batches[self.rows // 1000 % len(self._batches)]
                producer.append(batch)
                self.rows += 1000
                time.sleep(self.pause_s)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def backed_up(root: Path) -> Iterator[Result]:
    """A backup beside a plain copy of the files, and appends with a backup beside those without."""
    with hr.open_log(f"file:{root}/written", durability="os") as log:
        log.create_topic("t", SCHEMA, segment_bytes=64 << 20)
        with log.producer("t") as producer:
            for batch in batches(BACKUP_ROWS):
                producer.append(batch)
        size = sum(path.stat().st_size for path in (root / "written").rglob("*") if path.is_file())
    with hr.open_log(f"file:{root}/written") as log:
        with log.producer("t") as producer:
            batch = batches(1000, 1000)[0]
            append_s = statistics.median(seconds(lambda: producer.append(batch)) for _ in range(50))
        pause_s = append_s * (1 / PAUSE_SHARE - 1)
        rates: dict[str, list[float]] = {"alone": [], "beside": []}
        count = 0

        def backup() -> float:
            nonlocal count
            count += 1
            with Writer(log, pause_s):
                taken_s = backup_s(log, root / f"backup{count}")
            shutil.rmtree(root / f"backup{count}")
            return size / 1e6 / taken_s

        def copy() -> float:
            def run() -> None:
                shutil.copytree(root / "written" / "topics", root / "copied")
                for path in (root / "copied").rglob("*.segment"):
                    with path.open("rb") as file:
                        os.fsync(file.fileno())

            with Writer(log, pause_s):
                taken_s = seconds(run)
            shutil.rmtree(root / "copied")
            return size / 1e6 / taken_s

        yield compare(
            "log",
            "online backup of a log that is being written",
            "MB/s",
            ours=backup,
            peer="a copy and sync of the same files",
            theirs=copy,
            bar=0.5,
            better="higher",
            repeats=3,
        )
        for name in ("alone", "beside") * 3:
            with Writer(log, pause_s) as writer:
                started_s, rows = time.perf_counter(), writer.rows
                if name == "beside":
                    backup_s(log, root / "beside")
                else:
                    time.sleep(2)
                rates[name].append((writer.rows - rows) / (time.perf_counter() - started_s))
            shutil.rmtree(root / "beside", ignore_errors=True)
        yield judged(
            "log",
            "appends at half the rate while a backup is made",
            "rows/s",
            statistics.median(rates["beside"]),
            "without one",
            statistics.median(rates["alone"]),
            bar=0.8,
            better="higher",
        )


def results() -> Iterator[Result]:
    with tempfile.TemporaryDirectory(prefix="bench-backup-") as name:
        yield repeated(Path(name))
        yield from backed_up(Path(name))
