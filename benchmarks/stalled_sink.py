"""A pipeline that goes on running while it is measured: rounds of rows, with a sink whose receiver
answers at once or not at all. `bench_gateways` uses it.

Both sides are rounds of one run, so Spark's start, its warming up and the machine's day are the
same for both. A round's rows become visible at once and are one batch; its time is from there until
the view has them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import headrace as hr
from benchmarks.log_rows import SCHEMA, batches

ROUND_ROWS = 1_000_000
ONE_IN = 1_000
"""The share of rows that the sink sends."""
REQUEST_ROWS = 100
PATIENCE_S = 300.0


class Receiver(ThreadingHTTPServer):
    """Answers at once; while it stalls, not before it is let go."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.goes_on, self.answered = threading.Event(), 0
        self.goes_on.set()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.goes_on.wait(PATIENCE_S)
        self.server.answered += 1
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def pipeline(log: str, receiver: str) -> hr.Pipeline:
    shop = hr.Pipeline("shop", log=log)
    rows = shop.topic("rows", schema=SCHEMA)
    shop.view(
        "totals",
        rows.group_by("customer_id").aggregate(total=hr.agg.sum("amount"), n=hr.agg.count()),
    )
    sent = rows.where(f"id % {ONE_IN} = 0")
    shop.sink(
        hr.sinks.webhook(
            receiver,
            table="some",
            internal=["127.0.0.1"],
            timeout="5 minutes",
            request_rows=REQUEST_ROWS,
        ),
        sent,
    )
    return shop


class Rounds:
    """`with Rounds() as rounds: rounds.paced(stalls=True)`."""

    def __enter__(self) -> Self:
        self._directory = TemporaryDirectory()
        self._receiver, self._stop, self._batch_done = (
            Receiver(),
            threading.Event(),
            threading.Condition(),
        )
        self._done_rows = self._batches = self._fed_rows = 0
        self._failure: BaseException | None = None
        self._log = hr.open_log(f"file:{self._directory.name}/log")
        self._log.create_topic("rows", SCHEMA)
        self._rows = batches(ROUND_ROWS, 50_000)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._receiver.goes_on.set()
        self._stop.set()
        self._thread.join()
        self._receiver.shutdown()
        self._log.close()
        self._directory.cleanup()

    def _run(self) -> None:
        shop = pipeline(self._log.address, f"http://127.0.0.1:{self._receiver.server_port}/hook")
        try:
            shop.run(
                state=Path(self._directory.name) / "state",
                stop=self._stop,
                on_status=self._heard,
                master="local[2]",
                driver_memory="1g",
            )
        except BaseException as error:
            self._failure = error

    def _heard(self, status: Any) -> None:
        with self._batch_done:
            if status.batches > self._batches:
                self._batches, self._done_rows = status.batches, self._done_rows + status.batch_rows
            self._batch_done.notify_all()

    def paced(self, *, stalls: bool) -> float:
        """Rows a second that the view takes in, with a sink that stalls or does not. One that
        does not has sent what it had to before the round begins.
        """
        self._receiver.goes_on.set()
        self._wait_for_the_sink()
        if stalls:
            self._receiver.goes_on.clear()
        with self._log.transaction("feed") as tx:
            for batch in self._rows:
                tx.append("rows", batch)
        started = time.perf_counter()
        self._fed_rows += ROUND_ROWS
        self._until(lambda: self._done_rows >= self._fed_rows)
        return ROUND_ROWS / (time.perf_counter() - started)

    def _wait_for_the_sink(self) -> None:
        expected = self._fed_rows // ONE_IN // REQUEST_ROWS
        deadline_s = time.monotonic() + PATIENCE_S
        while self._receiver.answered < expected:
            self._check(deadline_s)
            time.sleep(0.01)

    def _until(self, is_so: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        with self._batch_done:
            while not is_so():
                self._check(deadline_s)
                self._batch_done.wait(1)

    def _check(self, deadline_s: float) -> None:
        if self._failure is not None:
            raise self._failure
        if time.monotonic() > deadline_s:
            raise TimeoutError("the pipeline or its sink does not go on")
