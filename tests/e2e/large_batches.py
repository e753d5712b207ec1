"""Runs one large batch on Spark, as a program: prints what came out, and the most memory that a
Python process of it has used, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import headrace as hr
from headrace.testing.pipelines import PipelineTest

LARGE = 100_000_000


def documents() -> hr.Pipeline:
    """The texts go through a shuffle, into a derived topic, into state and into a view."""
    pipeline = hr.Pipeline("documents")
    rows = pipeline.topic("documents", schema="id BIGINT, text STRING", key="id", partitions=2)
    pipeline.view(
        "sizes",
        rows.group_by("id").aggregate(n=hr.agg.count(), bytes=hr.agg.sum("octet_length(text)")),
    )
    pipeline.view("longest", rows.group_by("id").aggregate(text=hr.agg.max("text")))
    pipeline.write("copies", rows.key_by("id"), partitions=2)
    return pipeline


def strings(root: Path, spark: Any, width: str) -> dict[str, int]:
    with PipelineTest(documents(), root, spark, width=width) as test:
        for n in range(30):
            test.feed("documents", [{"id": n % 7, "text": chr(97 + n % 26) * LARGE}])
        test.settle()
        sizes = test.view("sizes")
        copies = sum(batch.num_rows for batch in test.log.read("copies"))
        assert copies == 30
        longest = {row["id"]: row["text"] for row in test.view("longest")}
        assert {n: text[0] for n, text in longest.items()} == {
            n: max(chr(97 + m % 26) for m in range(30) if m % 7 == n) for n in range(7)
        }
    return {
        "rows": sum(row["n"] for row in sizes),
        "bytes": sum(row["bytes"] for row in sizes),
    }


def hot_key(root: Path, spark: Any) -> dict[str, int]:
    pipeline = hr.Pipeline("hot")
    rows = pipeline.topic("rows", schema="k STRING, n BIGINT", key="k", partitions=2)
    by_key = rows.group_by("k").aggregate(
        count=hr.agg.count(), sum=hr.agg.sum("n"), newest=hr.agg.last("n"), name="by_key"
    )
    pipeline.view("by_key", by_key)
    with PipelineTest(pipeline, root, spark, width="auto") as test:
        for first in range(0, 5_000_000, 500_000):
            numbers = pa.array(np.arange(first, first + 500_000))
            test.feed("rows", pa.table({"k": pa.repeat("hot", 500_000), "n": numbers}))
        test.settle()
        (row,) = test.view("by_key")
    return {name: row[name] for name in ("count", "sum")}


def nothing(root: Path, spark: Any) -> dict[str, int]:
    pipeline = hr.Pipeline("nothing")
    rows = pipeline.topic("rows", schema="k STRING, n BIGINT", key="k", partitions=2)
    pipeline.view("by_key", rows.group_by("k").aggregate(count=hr.agg.count()))
    with PipelineTest(pipeline, root, spark, width="auto") as test:
        test.feed("rows", [{"k": "a", "n": 1}])
        for _ in range(2_000):
            test.cut(forced=True)
        test.settle()
        (row,) = test.view("by_key")
        return {"count": row["count"], "tick": test.runner.tick}


class PeakMemory:
    """The largest memory of a Python process of this program, in MiB: of itself, and of those that
    its JVM has started.
    """

    def __init__(self) -> None:
        self.mib = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.mib

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            for pid in _family(os.getpid()):
                with suppress(OSError):
                    if b"java" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
                        self.mib = max(self.mib, _private_mib(pid))


def _family(pid: int) -> list[int]:
    """A process and all that it has started."""
    children = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += [int(child) for child in file.read_text().split()]
    return [pid, *(member for child in children for member in _family(child))]


def _private_mib(pid: int) -> int:
    """Without the pages of mapped files, which the system can take away."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) // 1024
    return 0


def main(what: str, root: Path) -> None:
    spark = hr.spark("large", master="local[2]", driver_memory="1g")
    memory = PeakMemory()
    kind, _, width = what.partition("-")
    outcome = {"strings": lambda: strings(root, spark, width)}.get(
        kind, lambda: {"hot": hot_key, "nothing": nothing}[kind](root, spark)
    )()
    print(json.dumps({**outcome, "peak_mib": memory.stop()}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
