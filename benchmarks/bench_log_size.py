"""What must not grow: the time to open a log with its segments, a reader's memory with the topic,
the lag query with groups.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import headrace as hr
from benchmarks.log_rows import SCHEMA, batches
from benchmarks.report import Result, compare, seconds, within
from headrace.log import Log

GROUPS, PARTITIONS = 100, 16


def with_segments(root: Path, count: int) -> str:
    """A log of one topic with so many segments."""
    address = f"file:{root}/segments-{count}"
    log = hr.open_log(address, durability="os")
    log.create_topic("t", SCHEMA, segment_bytes=1)
    with log.producer("t") as producer:
        rows = batches(10, 10)[0]
        for _ in range(count):
            producer.append(rows)
    log.close()
    return address


def open_ms(address: str) -> float:
    """Open, read the newest row, close."""

    def once() -> None:
        with hr.open_log(address) as log:
            end = log.end_offsets("t")[0]
            if log.read("t", 0, end - 1).to_table().num_rows != 1:
                raise RuntimeError("The newest row is not there.")

    return min(seconds(once) for _ in range(5)) * 1000


def with_rows(root: Path, rows: int) -> str:
    address = f"file:{root}/rows-{rows}"
    with hr.open_log(address, durability="os") as log:
        log.create_topic("t", SCHEMA, segment_bytes=8 << 20)
        with log.producer("t") as producer:
            for batch in batches(rows):
                producer.append(batch)
    return address


# The kernel's high-water mark of this very process: `ru_maxrss` would also remember the one that
# started it.
READ = """
import sys, headrace as hr
log = hr.open_log(sys.argv[1])
rows = sum(batch.num_rows for batch in log.read("t"))
status = open("/proc/self/status")
print(next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM")))
"""


def reader_mib(address: str) -> float:
    """The peak memory of a process that reads a whole topic."""
    done = subprocess.run(
        [sys.executable, "-c", READ, address], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def with_groups(root: Path) -> Log:
    log = hr.open_log(f"file:{root}/groups", durability="os")
    log.create_topic("t", SCHEMA, partitions=PARTITIONS)
    with log.producer("t") as producer:
        for batch in batches(100_000, 1000):
            producer.append(batch)
    ends = log.end_offsets("t")
    for group in range(GROUPS):
        with log.transaction("offsets") as tx:
            tx.commit_offsets(
                f"group-{group}", {"t": {p: end * group // GROUPS for p, end in ends.items()}}
            )
    return log


def results() -> Iterator[Result]:
    root = Path(tempfile.mkdtemp(prefix="bench-log-"))
    try:
        many, few = with_segments(root, 2000), with_segments(root, 2)
        yield compare(
            "log",
            "open a log with 2,000 segments and read its newest row",
            "ms",
            ours=lambda: open_ms(many),
            peer="the same with 2 segments",
            theirs=lambda: open_ms(few),
            bar=0.2,
            better="lower",
        )
        large, small = with_rows(root, 1_000_000), with_rows(root, 100_000)
        yield compare(
            "log",
            "a reader's peak memory, 1,000,000 rows",
            "MiB",
            ours=lambda: reader_mib(large),
            peer="100,000 rows",
            theirs=lambda: reader_mib(small),
            bar=0.8,
            better="lower",
            repeats=3,
        )
        log = with_groups(root)
        yield within(
            "log",
            "lag of 100 groups over 16 partitions",
            "ms",
            ours=lambda: seconds(lambda: _expect(len(log.lag()))) * 1000,
            limit=50,
            params={"groups": GROUPS, "partitions": PARTITIONS},
        )
        log.close()
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _expect(partitions: int) -> None:
    if partitions != GROUPS * PARTITIONS:
        raise RuntimeError(f"{partitions} partitions' lag instead of {GROUPS * PARTITIONS}.")
