"""Rows by key over Postgres's protocol, a part of the benchmark `sql`: a view and a real Postgres's
table with the same rows, asked by pgbench over 32 connections with prepared statements.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psycopg
import pyarrow as pa

from benchmarks.report import Result, Unavailable, compare
from headrace.types.schema import parse_schema
from headrace.views.store import ViewStore
from tests.servers.database_server import ServerUnavailable
from tests.servers.postgres_server import PostgresServer, find_program

ROWS, CONNECTIONS, SECONDS = 100_000, 32, 5
SCHEMA = parse_schema("aid BIGINT, bid INT, abalance INT, filler STRING")
_TABLE = "CREATE TABLE accounts (aid BIGINT PRIMARY KEY, bid INT, abalance INT, filler TEXT)"
_FILL = (
    f"INSERT INTO accounts SELECT n, 1, n % 1000, repeat('x', 84) FROM generate_series(1, {ROWS}) n"
)
_SELECT = f"""\\set aid random(1, {ROWS})
SELECT abalance FROM accounts WHERE aid = :aid;
"""


def view_rows() -> pa.Table:
    keys = np.arange(1, ROWS + 1)
    table = pa.table(
        {"aid": keys, "bid": np.ones(ROWS), "abalance": keys % 1000, "filler": ["x" * 84] * ROWS}
    ).cast(SCHEMA)
    return table.append_column("_tick", pa.repeat(1, ROWS).cast(pa.int64())).append_column(
        "_change_type", pa.repeat("insert", ROWS)
    )


@contextmanager
def served(root: Path) -> Iterator[str]:
    """`headrace serve --postgres` over the rows; gives its address."""
    state = root / "bench.state"
    state.mkdir()
    with ViewStore.open(state / "views.db") as store:
        store.declare("accounts", SCHEMA, ("aid",))
        store.commit(1, 1, {"accounts": view_rows()})
    command = [sys.executable, "-m", "headrace.cli", "serve", str(state)]
    with subprocess.Popen(
        [*command, "--port", "0", "--postgres", "0"], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        try:
            line = running.stdout.readline()
            found = re.search(r"postgresql://127\.0\.0\.1:(\d+)", line)
            assert found is not None, line
            yield f"postgresql://bench@127.0.0.1:{found[1]}/bench"
        finally:
            running.terminate()


def selects_a_second(url: str, script: Path) -> float:
    done = subprocess.run(
        [
            find_program("pgbench"),
            "-n",
            "-f",
            str(script),
            "-M",
            "prepared",
            "-c",
            str(CONNECTIONS),
            "-j",
            "2",
            "-T",
            str(SECONDS),
            url,
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"tps = ([\d.]+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


def point_selects() -> Iterator[Result]:
    """The line of rows by key."""
    with tempfile.TemporaryDirectory(prefix="headrace-selects-") as directory:
        root = Path(directory)
        script = root / "select.sql"
        script.write_text(_SELECT)
        try:
            server = PostgresServer().start()
        except ServerUnavailable as error:
            raise Unavailable(str(error)) from None
        try:
            with psycopg.connect(server.url, autocommit=True) as connection:
                connection.execute(_TABLE)
                connection.execute(_FILL)
                connection.execute("VACUUM ANALYZE accounts")
            with served(root) as url:
                yield compare(
                    "sql",
                    f"rows by key over Postgres's protocol, {CONNECTIONS} connections",
                    "selects/s",
                    ours=lambda: selects_a_second(url, script),
                    peer="Postgres",
                    theirs=lambda: selects_a_second(server.url, script),
                    bar=0.5,
                    better="higher",
                    repeats=3,
                    params={"rows": ROWS, "connections": CONNECTIONS, "seconds": SECONDS},
                )
        finally:
            server.stop()
