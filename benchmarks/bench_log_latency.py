"""One durable append against a bare write and sync; eight threads against one, on this disk and on
one whose sync takes 2 ms.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

from benchmarks.report import Result, compare
from headrace.log.file.disk import Disk
from headrace.log.file.log import FileLog
from headrace.testing.power_loss import SlowDisk

SCHEMA = "order_id BIGINT, customer_id BIGINT, amount DOUBLE, note STRING"
ROW = {"order_id": 1, "customer_id": 3, "amount": 1.5, "note": "x" * 60}
APPENDS = 500
THREADS = 8


def median_ms(action: Callable[[], object], count: int = APPENDS) -> float:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1000


class BareFile:
    """What a sync costs on this disk: 400 bytes written and synced."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT)

    def write_and_sync(self) -> None:
        os.write(self.descriptor, b"x" * 400)
        os.fsync(self.descriptor)


def appends_a_second(log: FileLog, threads: int, appends: int) -> float:
    """Single rows from several threads, each with a producer of its own; every append is durable
    when it returns.
    """
    producers = [log.producer("orders") for _ in range(threads)]
    workers = [
        Thread(target=lambda p=producer: [p.append(ROW) for _ in range(appends // threads)])
        for producer in producers
    ]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return appends / (time.perf_counter() - started)


def opened(root: Path, name: str, disk: Disk) -> FileLog:
    log = FileLog.open(root / name, disk=disk)
    log.create_topic("orders", SCHEMA, key="customer_id", partitions=4)
    return log


def results() -> Iterator[Result]:
    root = Path(tempfile.mkdtemp(prefix="bench-log-"))
    try:
        log, bare = opened(root, "log", Disk()), BareFile(root / "bare")
        producer = log.producer("orders")
        yield compare(
            "log",
            "one durable append of one row",
            "ms",
            ours=lambda: median_ms(lambda: producer.append(ROW)),
            peer="write + fsync",
            theirs=lambda: median_ms(bare.write_and_sync),
            bar=0.25,
            better="lower",
            params={"appends": APPENDS},
        )
        yield compare(
            "log",
            "eight threads appending single rows",
            "appends/s",
            ours=lambda: appends_a_second(log, THREADS, 4000),
            peer="one thread",
            theirs=lambda: appends_a_second(log, 1, 2000),
            bar=1.5,
            better="higher",
            params={"threads": THREADS},
        )
        slow = opened(root, "slow", SlowDisk(sync_s=0.002))
        yield compare(
            "log",
            "eight threads appending single rows, sync takes 2 ms",
            "appends/s",
            ours=lambda: appends_a_second(slow, THREADS, 1600),
            peer="one thread",
            theirs=lambda: appends_a_second(slow, 1, 200),
            bar=5.0,
            better="higher",
            params={"threads": THREADS, "sync_ms": 2},
        )
        log.close()
        slow.close()
    finally:
        shutil.rmtree(root, ignore_errors=True)
