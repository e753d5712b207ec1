"""Gateways against what they cannot do without, and a pipeline with a stalled sink and
one whose sink is not.

- HTTP: another process posts 100 JSON lines a request over 16 connections, and counts what was
  answered, which is what is durable. The peer has no HTTP and no second process: 16 threads of this
  one parse the
  same bodies into rows and append them to an embedded log, each append synced before the next.
  Threads that come together share a sync there too, as requests do in the gateway.
- StatsD: the fastest pace of another process at which no packet is lost. The peer is a Python loop
  over `recv` that only counts; ours reads, sums up and stores by interval.
- A stalled sink: rounds of one run of one pipeline (`stalled_sink`), timed when Spark has long
  started; they take turns, so that both sides have the same machine.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import headrace as hr
from benchmarks.gateway_load import ROWS_A_REQUEST, bodies, figure, in_a_process
from benchmarks.log_rows import SCHEMA
from benchmarks.report import Result, compare, note
from benchmarks.stalled_sink import Rounds
from headrace.gateways import statsd_gateway as packets
from headrace.types.json_codec import decode_rows

CONNECTIONS = 16
SECONDS = 3.0
PACES = (25_000, 50_000, 75_000, 100_000, 150_000, 200_000, 300_000)
PACE_SECONDS = 1.0


@contextmanager
def fresh_log() -> Iterator[hr.Log]:
    with TemporaryDirectory() as directory, hr.open_log(f"file:{directory}/log") as log:
        log.create_topic("rows", SCHEMA)
        yield log


# HTTP


def posted() -> float:
    with fresh_log() as log, hr.gateways.http("rows", port=0).open(log) as running:
        return figure(
            in_a_process("http", running.address.rpartition(":")[2], CONNECTIONS, SECONDS)
        )


def appended() -> float:
    """As many threads as there are connections, each of which parses a request's rows and appends
    them.
    """
    requests = bodies()
    with fresh_log() as log:
        schema = log.topic("rows").arrow_schema
        done = [0] * CONNECTIONS
        started = time.perf_counter()

        def append(number: int) -> None:
            with log.producer("rows") as producer:
                while time.perf_counter() - started < SECONDS:
                    lines = requests[(done[number] * CONNECTIONS + number) % len(requests)].split(
                        b"\n"
                    )
                    producer.append(decode_rows(lines, schema).batch)
                    done[number] += 1

        threads = [threading.Thread(target=append, args=(number,)) for number in range(CONNECTIONS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return sum(done) * ROWS_A_REQUEST / (time.perf_counter() - started)


# StatsD


def without_loss(received: Callable[[float], tuple[int, int]]) -> float:
    """The fastest pace at which nothing is lost, in packets a second; the sender's own pace, where
    it is slower.
    """
    best = 0.0
    for pace in PACES:
        sent, got = received(pace)
        if got < sent:
            note(f"gateways: {sent - got} of {sent} packets lost at {pace:,} a second")
            break
        best = max(best, sent / PACE_SECONDS)
        if sent < 0.95 * pace * PACE_SECONDS:
            break
    return best


def counted(pace: float) -> tuple[int, int]:
    """A loop that only counts."""
    with packets.open_socket("127.0.0.1", 0) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 2, 0))
        sender = in_a_process("statsd", listening.getsockname()[1], pace, PACE_SECONDS)
        got, receive = 0, listening.recv
        try:
            while True:
                receive(65_535)
                got += 1
        except OSError:
            return int(figure(sender)), got


def stored(pace: float) -> tuple[int, int]:
    with fresh_log() as log, hr.gateways.statsd(port=0, flush="500 ms").open(log) as running:
        sent = int(
            figure(in_a_process("statsd", running.address.rpartition(":")[2], pace, PACE_SECONDS))
        )
        deadline = time.monotonic() + 2
        while running.status().details["packets"] < sent and time.monotonic() < deadline:
            time.sleep(0.01)
    return sent, running.status().stored


def results() -> Iterator[Result]:
    yield compare(
        "gateways",
        f"durable rows over HTTP, {ROWS_A_REQUEST} JSON lines a request, {CONNECTIONS} connections",
        "rows/s",
        ours=posted,
        peer=f"the log's own append of the same rows, parsed from JSON, by {CONNECTIONS} threads",
        theirs=appended,
        bar=0.3,
        better="higher",
        repeats=3,
    )
    yield compare(
        "gateways",
        "StatsD's packets without loss, stored by interval",
        "packets/s",
        ours=lambda: without_loss(stored),
        peer="a bare loop that only counts",
        theirs=lambda: without_loss(counted),
        bar=0.5,
        better="higher",
        repeats=3,
        warmups=0,
    )
    with Rounds() as rounds:
        yield compare(
            "gateways",
            "a view beside a sink that is stalled",
            "rows/s",
            ours=lambda: rounds.paced(stalls=True),
            peer="the same beside a sink that is not",
            theirs=lambda: rounds.paced(stalls=False),
            bar=0.9,
            better="higher",
            repeats=15,
            warmups=3,
        )
