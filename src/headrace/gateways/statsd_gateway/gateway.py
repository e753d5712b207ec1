"""The StatsD gateway: one thread receives packets, another reads them, and appends them as they are or puts them together until the interval ends."""

from __future__ import annotations

import contextlib
import queue
import time
from threading import Event, Thread

import pyarrow as pa

from headrace.gateways.declared import Gateway
from headrace.gateways.deliveries import Columns, Delivery
from headrace.gateways.receiving import END_S, ThreadReceiving, now_us
from headrace.gateways.statsd_gateway import packets
from headrace.gateways.statsd_gateway.aggregating import Aggregator
from headrace.gateways.statsd_gateway.lines import Values, read
from headrace.gateways.telling import LOST
from headrace.log.api import Log

WAIT_S = 0.02
GATHER_S = 0.05
GATHER_BYTES = 1 << 20
MOST_GATHERED = 16
"""Pieces of up to about `GATHER_BYTES` that wait to be read; then the system's own buffer fills."""
RAW_SCHEMA = "metric STRING, kind STRING, tags STRING, value DOUBLE, member STRING, is_delta BOOLEAN, sample_rate DOUBLE, stands_for DOUBLE, received_at TIMESTAMP"


class StatsdReceiving(ThreadReceiving):
    def __init__(self, gateway: Gateway, log: Log) -> None:
        super().__init__(gateway, log)
        self._flush_us: int | None = gateway.options["flush_us"]
        self._aggregator = Aggregator(forget_gauges=gateway.options["forget_gauges"])
        self._gathered: queue.Queue[tuple[bytes, int] | None] = queue.Queue(MOST_GATHERED)
        self._packets = 0
        self._given_up = Event()
        """Set when the log takes nothing any more: who waits for room is let go."""
        self._started_us = now_us()
        self._reader = Thread(target=self._read_all, name=f"{gateway.name} reads", daemon=True)

    def begin(self) -> None:
        self._socket = packets.opened(self.gateway.options["host"], self.gateway.options["port"])
        host, port = self._socket.getsockname()[:2]
        self.address, self.port = f"udp://{host}:{port}", int(port)
        self._started_us = now_us()
        self._reader.start()
        super().begin()

    def end(self) -> None:
        """What was received is read and handed on, for as long as the log goes on taking it."""
        super().end()
        with contextlib.suppress(queue.Full):
            self._gathered.put(None, timeout=END_S)
            self._reader.join(END_S)
        if self._reader.is_alive():
            self._given_up.set()
            self._gathered.put(None)
            self._reader.join(END_S)
        self._lost = packets.lost(self._socket)
        self._socket.close()

    def details(self) -> dict[str, int]:
        lost = packets.lost(self._socket) if self._socket.fileno() >= 0 else self._lost
        return {"packets": self._packets, LOST: lost, "values_in_this_interval": self._aggregator.waiting}

    # Receiving

    def receive(self) -> None:
        source = packets.Packets(self._socket, wait_s=WAIT_S)
        parts: list[bytes] = []
        size, since_s = 0, time.monotonic()
        while not self.stopped.is_set():
            came = source.receive()
            if came:
                parts.append(b"\n".join(came))
                self._packets += len(came)
                size += len(parts[-1])
            if parts and (size >= GATHER_BYTES or time.monotonic() - since_s >= GATHER_S):
                self._gathered.put((b"\n".join(parts), now_us()))
                parts, size = [], 0
            if not parts:
                since_s = time.monotonic()
        self._gathered.put((b"\n".join(parts), now_us()))

    # Reading

    def _read_all(self) -> None:
        try:
            while (piece := self._next()) is not None:
                if piece[0]:
                    self._take(*piece)
                self._flush_if_due()
            self._flush()
        except BaseException as error:
            self.failure = error
            while self._gathered.get() is not None:  # nobody may wait for us
                continue

    def _next(self) -> tuple[bytes, int] | None:
        try:
            return self._gathered.get(timeout=GATHER_S)
        except queue.Empty:
            return b"", 0

    def _take(self, data: bytes, received_us: int) -> None:
        values = read(data)
        if values.malformed:
            self.counts.turned_away(values.malformed, "malformed")
        if not len(values):
            return
        if self._flush_us is None:
            self._submit_in_pieces(_raw(values), received_us)
            return
        self.counts.came(len(values))
        if too_many := self._aggregator.add(values):
            self.counts.came(-too_many)
            self.counts.turned_away(too_many, "too many metrics")

    def _flush_if_due(self) -> None:
        if self._flush_us is not None and now_us() - self._started_us >= self._flush_us:
            self._flush()

    def _flush(self) -> None:
        """Intervals follow each other without a gap; one in which nothing came tells of gauges alone."""
        if self._flush_us is None:
            return
        ended_us = now_us()
        batch, count = self._aggregator.flush(self._started_us, ended_us)
        self._started_us = ended_us
        if batch.num_rows:
            self._submit(batch, batch.nbytes, ended_us, count)

    def _submit_in_pieces(self, batch: pa.RecordBatch, received_us: int) -> None:
        """None larger than may wait, so that the bounds hold however many packets came together."""
        policy = self.gateway.policy
        rows = max(1, min(policy.rows, batch.num_rows * policy.bytes // max(1, batch.nbytes)))
        for start in range(0, batch.num_rows, rows):
            piece = batch.slice(start, rows)
            self._submit(piece, piece.nbytes, received_us, None)

    def _submit(self, batch: pa.RecordBatch, size: int, received_us: int, stands_for: int | None) -> None:
        topic = self.gateway.topics[0]
        self.inbox.submit(Delivery(topic, Columns(batch), batch.num_rows, size, received_us, stands_for=stands_for), self._given_up)


def _raw(values: Values) -> pa.RecordBatch:
    """Each value that came, in that order."""
    order = pa.array(values.order)
    number = pa.array(values.value, from_pandas=True)
    different = pa.record_batch({
        "metric": values.metric, "kind": values.kind, "tags": values.tags, "value": number, "member": values.member,
        "is_delta": pa.array(values.is_delta), "sample_rate": pa.array(values.rate), "stands_for": pa.array(1 / values.rate),
    })  # fmt: skip
    return different.take(order)
