"""Serving: key look-ups against a bare endpoint of the same server, and a thousand subscribers
against one. The server runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.report import Result, compare, judged, note
from benchmarks.serve_load import Heard, answers_a_second
from headrace.types.schema import parse_schema
from headrace.views.store import ViewStore

ROWS, CONNECTIONS, SECONDS = 100_000, 32, 3.0
SUBSCRIBERS, TICKS_A_SECOND, CHANGES_A_TICK, LISTEN_SECONDS = 1_000, 4, 25, 10.0
SCHEMA = parse_schema("k BIGINT, name STRING, amount DOUBLE, n BIGINT")

# The same server and settings with one endpoint that returns a constant.
BARE = """
import socket, uvicorn
from starlette.applications import Starlette
from starlette.routing import Route
from headrace.http.access import AccessMiddleware
from headrace.http.responses import json_response
row = b'{"k":1,"name":"name of 1","amount":0.5,"n":0}'
answer = b'{"view":"orders","tick":1,"row":' + row + b"}"
async def constant(request):
    return json_response(answer)
listening = socket.create_server(("127.0.0.1", 0))
print("at", f"http://127.0.0.1:{listening.getsockname()[1]}.", flush=True)
routes = Starlette(routes=[Route("/constant", constant)])
app = AccessMiddleware(routes, host="127.0.0.1", token=None)
quiet = dict(log_config=None, access_log=False, ws="none", server_header=False, date_header=False)
uvicorn.Server(uvicorn.Config(app, **quiet)).run(sockets=[listening])
"""


@contextmanager
def process(*arguments: str) -> Iterator[int]:
    """A server; gives its port."""
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        try:
            yield int(running.stdout.readline().partition("http://127.0.0.1:")[2].split(".")[0])
        finally:
            running.terminate()


def rows(tick: int, keys: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.Table:
    columns = {
        "k": keys,
        "name": [f"name of {key}" for key in keys.tolist()],
        "amount": keys * 0.5,
        "n": np.full(len(keys), tick),
    }
    table = pa.table(columns).cast(SCHEMA)
    return table.append_column("_tick", pa.repeat(tick, len(keys)).cast(pa.int64())).append_column(
        "_change_type", pa.repeat("insert", len(keys))
    )


class Writer(threading.Thread):
    """Commits a tick some times a second, as a pipeline would, and notes when each was there."""

    def __init__(self, store: ViewStore) -> None:
        super().__init__(daemon=True)
        self.store, self.ended, self.committed = store, threading.Event(), dict[int, float]()

    def run(self) -> None:
        tick = self.store.reader.tick("sales")
        while not self.ended.wait(1 / TICKS_A_SECOND):
            tick += 1
            changes = rows(tick, np.arange(tick * CHANGES_A_TICK, (tick + 1) * CHANGES_A_TICK))
            self.store.commit(tick, 1, {"sales": changes})
            self.committed[tick] = time.time()


def delays_ms(store: ViewStore, port: int, subscribers: int) -> list[float]:
    """From commit to each subscriber; every tick of the time must have come to everyone."""
    heard, writer = Heard(), Writer(store)

    async def follow() -> None:
        await asyncio.wait_for(heard.subscribe(port, "/views/sales/changes", subscribers), 60)
        writer.start()
        await asyncio.sleep(LISTEN_SECONDS)
        writer.ended.set()
        await asyncio.sleep(2.0)

    asyncio.run(follow())
    writer.join()
    incomplete = [tick for tick in writer.committed if len(heard.came.get(tick, [])) < subscribers]
    assert not incomplete, (
        f"{len(incomplete)} of {len(writer.committed)} ticks did not come to everyone"
    )
    return [
        (came - at) * 1_000 for tick, at in writer.committed.items() for came in heard.came[tick]
    ]


def results() -> Iterator[Result]:
    state = Path(tempfile.mkdtemp(prefix="headrace-serve-"))
    try:
        with ViewStore.open(state / "views.db") as store:
            store.declare("orders", SCHEMA, ("k",))
            store.declare("sales", SCHEMA, ("k",))
            store.commit(1, 1, {"orders": rows(1, np.arange(ROWS))})
            paths = [
                f"/views/orders?key={key}"
                for key in np.random.default_rng(1).integers(0, ROWS, 10_000).tolist()
            ]
            with (
                process("-m", "headrace.cli", "serve", str(state), "--port", "0") as ours,
                process("-c", BARE) as bare,
            ):
                yield compare(
                    "serve",
                    f"key look-ups at {CONNECTIONS} connections",
                    "answers/s",
                    ours=lambda: answers_a_second(
                        ours, paths, connections=CONNECTIONS, seconds=SECONDS
                    ),
                    peer="a constant",
                    theirs=lambda: answers_a_second(
                        bare, ["/constant"], connections=CONNECTIONS, seconds=SECONDS
                    ),
                    bar=0.5,
                    better="higher",
                    repeats=3,
                )
                note(f"serve: one subscriber, then {SUBSCRIBERS:,}")
                one, many = (delays_ms(store, ours, count) for count in (1, SUBSCRIBERS))
                p99 = float(np.percentile(many, 99))
                what = (
                    f"commit to browser: p99 of {SUBSCRIBERS:,} subscribers beside 10 times the p50"
                    " of one"
                )
                yield judged(
                    "serve",
                    what,
                    "ms",
                    p99,
                    "10 × p50 of one",
                    10 * statistics.median(one),
                    bar=1.0,
                    better="lower",
                )
    finally:
        shutil.rmtree(state, ignore_errors=True)
