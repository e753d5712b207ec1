"""The StatsD gateway: one thread receives packets, another parses them, and appends their values or
aggregates them until the flush interval ends.

    packets in     orders:1|c   orders:2|c|@0.5   latency:120|ms   latency:80|ms

    rows out       metric   kind     value  count  rate  sum  min  max  mean  p50 …
    (10 s later)   orders   counter    5.0    3.0   0.5    5
                   latency  timer    100.0    2.0   0.2  200   80  120   100   80

Lines have the form `name:value|kind[|@rate][|#tags]`, as StatsD defines them, with DogStatsD's tags
and packed values (`name:1:2:3|ms`). Equal lines are parsed once, since services count the same
thing again and again. A malformed line is counted, and the rest of its packet is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import queue
import socket
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import ConfigurationError
from headrace.gateways.base import STOP_S, GatewaySpec, ThreadedGatewayServer, now_us
from headrace.gateways.inbox import ArrowRows, Submission
from headrace.gateways.metrics import LOST
from headrace.log.api import Log

# Packets

CALL_PACKETS = 256
SLOT_BYTES = 64 << 10
"""No UDP packet is larger."""
BUFFER_BYTES = 32 << 20
"""The receive buffer to request. Without the privilege, the system grants less
(net.core.rmem_max).
"""
_SO_RCVBUFFORCE = 33
_MSG_WAITFORONE = 0x10000
_QUIET = {errno.EAGAIN, errno.EINTR, errno.ECONNREFUSED}


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Header(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("parts", ctypes.POINTER(_Iovec)),
        ("part_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Message(ctypes.Structure):
    _fields_ = (("header", _Header), ("length", ctypes.c_uint32))


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens, with a receive buffer as large as the system grants."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationError(
            f"Cannot listen on {host}, port {port}: {error.strerror or error}.",
            fix="choose another --host or --port.",
        ) from None
    try:
        _enlarge_buffer(listening)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise ConfigurationError(
            f"Cannot listen on {host}, port {port} (UDP): {error.strerror or error}.",
            fix="choose another --host or --port.",
        ) from None
    return listening


def _enlarge_buffer(listening: socket.socket) -> None:
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    try:
        listening.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, BUFFER_BYTES)
    except OSError:
        return  # it needs a privilege that few processes have


class PacketReceiver:
    """Receives packets from a socket, many with one system call, for one thread.

    Python's `recv` returns one packet at a time; `recvmmsg` returns all that wait, so that a flood
    costs little more than its bytes.
    """

    def __init__(self, listening: socket.socket, *, wait_s: float) -> None:
        listening.setblocking(True)
        whole, part = int(wait_s), int(wait_s % 1 * 1_000_000)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, part))
        self._socket = listening
        self._call = getattr(ctypes.CDLL(None, use_errno=True), "recvmmsg", None)
        self._slots = bytearray(CALL_PACKETS * SLOT_BYTES)
        self._view = memoryview(self._slots)
        address = ctypes.addressof((ctypes.c_char * len(self._slots)).from_buffer(self._slots))
        self._parts = (_Iovec * CALL_PACKETS)(
            *(_Iovec(address + i * SLOT_BYTES, SLOT_BYTES) for i in range(CALL_PACKETS))
        )
        messages = (_Message * CALL_PACKETS)()
        for i in range(CALL_PACKETS):
            messages[i].header.parts = ctypes.pointer(self._parts[i])
            messages[i].header.part_count = 1
        self._messages = messages
        self._raw = np.frombuffer(memoryview(self._messages), np.uint8).reshape(
            CALL_PACKETS, ctypes.sizeof(_Message)
        )

    def receive(self) -> list[memoryview]:
        """Return the packets that wait, or the next one; none if none comes in time. They are valid
        until the next call.
        """
        if self._call is None:
            try:
                return [self._view[: self._socket.recv_into(self._slots)]]
            except OSError as error:
                if error.errno in _QUIET:
                    return []
                raise
        count = self._call(
            self._socket.fileno(), self._messages, CALL_PACKETS, _MSG_WAITFORONE, None
        )
        if count < 0:
            if (number := ctypes.get_errno()) in _QUIET:
                return []
            raise OSError(number, os.strerror(number))
        at, view = _Message.length.offset, self._view
        lengths = (
            np.ascontiguousarray(self._raw[:count, at : at + 4]).view(np.uint32).ravel().tolist()
        )
        return [
            view[start : start + length]
            for start, length in zip(range(0, count * SLOT_BYTES, SLOT_BYTES), lengths, strict=True)
        ]


def dropped_packets(listening: socket.socket) -> int:
    """Return how many packets the system dropped since the socket was opened, according to
    /proc/net/udp; 0 on systems without it.
    """
    inode = str(os.fstat(listening.fileno()).st_ino)
    table = Path("/proc/net/udp6" if listening.family == socket.AF_INET6 else "/proc/net/udp")
    try:
        rows = (line.split() for line in table.read_text().splitlines()[1:])
        return next((int(row[12]) for row in rows if row[9] == inode), 0)
    except OSError:
        return 0


# Lines

COUNTER, GAUGE, TIMER, HISTOGRAM, SET = "counter", "gauge", "timer", "histogram", "set"
_KINDS = {"c": COUNTER, "g": GAUGE, "ms": TIMER, "h": HISTOGRAM, "d": HISTOGRAM, "s": SET}
MAX_LINE_BYTES = 8_192
_LINE = (
    r"^(?P<metric>[^:|@#\s\x00-\x1f\x{FFFD}][^:|\x00-\x1f\x{FFFD}]*):(?P<value>[^|\x00-\x1f\x{FFFD}]+)\|(?P<kind>c|g|ms|h|d|s)"
    r"(?:\|@(?P<rate>[0-9.eE+-]+))?(?:\|#(?P<tags>[^|\x00-\x1f\x{FFFD}]*))?(?:\|[cT][^|\x00-\x1f]*)*$"
)
_NUMBER = r"^[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?$"


@dataclass(frozen=True)
class StatsdValues:
    """Distinct values, as columns."""

    metric: pa.Array
    kind: pa.Array
    tags: pa.Array
    value: npt.NDArray[np.float64]
    """NaN for sets."""
    member: pa.Array
    """The member of a set; null for other kinds."""
    is_delta: npt.NDArray[np.bool_]
    """Whether a gauge's value has a sign, and so is added to it."""
    rate: npt.NDArray[np.float64]
    times: npt.NDArray[np.int64]
    """How often each value came."""
    order: npt.NDArray[np.int64]
    """For every value that came, in that order, the index of the distinct one."""
    malformed: int
    """How many lines or values could not be used."""

    def __len__(self) -> int:
        return len(self.order)


def parse_packets(data: bytes) -> StatsdValues:
    """Return the values of packets that are joined by line ends."""
    text = data.decode(errors="replace")
    lines = pc.list_flatten(pc.split_pattern(pa.array([text], pa.large_string()), "\n"))
    lines = lines.filter(pc.not_equal(pc.binary_length(lines), 0))
    encoded = lines.dictionary_encode()
    order = encoded.indices.to_numpy().astype(np.int64)
    parts = pc.extract_regex(_trim_lines(encoded.dictionary), _LINE)
    metric, value, kind, rate, tags = (
        parts.field(name) for name in ("metric", "value", "kind", "rate", "tags")
    )
    codes = pc.index_in(kind, pa.array(list(_KINDS), kind.type))
    kind = pa.array(list(_KINDS.values())).take(codes)
    line_of, value = _unpack(value, kind)
    if line_of is not None:
        metric, kind, rate, tags = (
            column.take(pa.array(line_of)) for column in (metric, kind, rate, tags)
        )
    order = _value_order(order, line_of, len(encoded.dictionary))
    return _drop_malformed(metric, kind, rate, tags, value, order)


def _trim_lines(lines: pa.Array) -> pa.Array:
    """Return lines without carriage returns; those that are too long become empty."""
    trimmed = pc.utf8_rtrim(lines, "\r")
    return pc.if_else(
        pc.greater(pc.binary_length(trimmed), MAX_LINE_BYTES), pa.scalar("", trimmed.type), trimmed
    )


def _unpack(value: pa.Array, kind: pa.Array) -> tuple[npt.NDArray[np.int64] | None, pa.Array]:
    """Split packed values: `1:2:3` is three values, except in sets, whose members may contain any
    character. Returns the line of each value (None if each line has one), and the values.
    """
    packed = pc.fill_null(pc.and_(pc.match_substring(value, ":"), pc.not_equal(kind, SET)), False)
    if not pc.any(packed).as_py():
        return None, value
    singles = pa.ListArray.from_arrays(pa.array(np.arange(len(value) + 1, dtype=np.int32)), value)
    lists = pc.if_else(packed, pc.split_pattern(value, ":"), singles)
    return pc.list_parent_indices(lists).to_numpy().astype(np.int64), pc.list_flatten(lists)


def _value_order(
    order: npt.NDArray[np.int64], line_of: npt.NDArray[np.int64] | None, lines: int
) -> npt.NDArray[np.int64]:
    """Return the order of values, given that of lines."""
    if line_of is None:
        return order
    counts = np.bincount(line_of, minlength=lines)
    firsts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    lengths = counts[order]
    starts = np.repeat(firsts[order], lengths)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    result: npt.NDArray[np.int64] = starts + within
    return result


def _drop_malformed(
    metric: pa.Array,
    kind: pa.Array,
    rate: pa.Array,
    tags: pa.Array,
    value: pa.Array,
    order: npt.NDArray[np.int64],
) -> StatsdValues:
    """Return the values without malformed ones: an unknown line, no number, an impossible rate."""
    is_set = pc.equal(kind, SET)
    numbers, is_number = _numbers(value)
    rates, is_rate = _numbers(rate)
    has_rate = pc.not_equal(pc.fill_null(rate, ""), "").to_numpy(zero_copy_only=False)
    rates = np.where(has_rate, rates, 1.0)
    good = (
        pc.is_valid(kind).to_numpy(zero_copy_only=False)
        & (is_number | _as_bools(is_set))
        & (~has_rate | (is_rate & (rates > 0) & (rates <= 1)))
    )
    good_indices = pa.array(np.flatnonzero(good))
    renumbered = np.where(good, np.cumsum(good) - 1, -1)[order]
    signed = _as_bools(pc.and_(pc.equal(kind, GAUGE), pc.match_substring_regex(value, r"^[+-]")))
    order = renumbered[renumbered >= 0]
    times = np.bincount(order, minlength=len(good_indices)).astype(np.int64)
    member = pc.if_else(is_set, value, pa.scalar(None, value.type))
    texts = [
        column.take(good_indices).cast(pa.string())
        for column in (metric, kind, _sort_tags(tags), member)
    ]
    return StatsdValues(
        metric=texts[0],
        kind=texts[1],
        tags=texts[2],
        value=np.where(_as_bools(is_set), np.nan, numbers)[good],
        member=texts[3],
        is_delta=signed[good],
        rate=rates[good],
        times=times,
        order=order,
        malformed=int((renumbered < 0).sum()),
    )


def _numbers(text: pa.Array) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return texts as numbers, 0 where they are not, and which of them are finite numbers."""
    matches = pc.match_substring_regex(text, _NUMBER)
    plain = pc.utf8_ltrim(pc.if_else(matches, text, pa.scalar("0", text.type)), "+")
    numbers = pc.fill_null(plain.cast(pa.float64()), 0.0).to_numpy()
    return numbers, _as_bools(matches) & np.isfinite(numbers)


def _as_bools(mask: pa.Array) -> npt.NDArray[np.bool_]:
    flags: npt.NDArray[np.bool_] = pc.fill_null(mask, False).to_numpy(zero_copy_only=False)
    return flags


def _sort_tags(tags: pa.Array) -> pa.Array:
    """Sort the tags of each value: `b:2,a:1` and `a:1,b:2` are the same. There are few distinct
    ones.
    """
    encoded = pc.fill_null(tags, "").dictionary_encode()
    distinct: list[Any] = encoded.dictionary.to_pylist()
    sorted_tags = pa.array(
        [",".join(sorted(filter(None, text.split(",")))) for text in distinct], pa.string()
    )
    return sorted_tags.take(encoded.indices)


# Aggregation

MAX_METRICS = 100_000
MAX_VALUES = 5_000_000
"""Values of timers and members of sets that are buffered until the interval ends."""
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
SCHEMA = (
    "metric STRING, kind STRING, tags STRING, value DOUBLE, count DOUBLE, rate DOUBLE, sum DOUBLE,"
    " min DOUBLE, max DOUBLE, mean DOUBLE, p50 DOUBLE, p90 DOUBLE, p95 DOUBLE, p99 DOUBLE,"
    " started_at TIMESTAMP, ended_at TIMESTAMP, received_at TIMESTAMP"
)
_FIGURES = ("value", "count", "rate", "sum", "min", "max", "mean", *PERCENTILES)
Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_NO_NUMBERS, _NO_FLOATS = np.empty(0, np.int64), np.empty(0, np.float64)


@dataclass
class _Interval:
    """The values of one interval, by the index of their metric."""

    totals: dict[int, float] = field(default_factory=dict)
    counts: dict[int, float] = field(default_factory=dict)
    timed: list[tuple[Numbers, Floats, Floats]] = field(default_factory=list)
    """Metrics, values, and how many values each stands for."""
    members: list[pa.RecordBatch] = field(default_factory=list)
    size: int = 0
    values: int = 0


class StatsdAggregator:
    """Aggregates values as StatsD does, and returns one row a metric at the end of each interval:
    counters are summed, gauges remembered, timers and histograms described, and the distinct
    members of sets counted.

    Values are buffered as columns, with the index of their metric. Only metrics are looped over,
    never values.
    """

    def __init__(self, *, forget_gauges: bool = False) -> None:
        self._forget_gauges = forget_gauges
        self._numbers: dict[tuple[str, str, str], int] = {}
        self._names: list[tuple[str, str, str]] = []
        self._gauges: dict[int, float] = {}
        self._waiting = _Interval()

    @property
    def waiting(self) -> int:
        return self._waiting.values

    def add(self, values: StatsdValues) -> int:
        """Add values. Returns how many were rejected, because there are too many metrics or
        values.
        """
        # The index of each value's metric; -1 if there are too many metrics.
        names = pc.binary_join_element_wise(
            values.metric, values.kind, values.tags, "\n"
        ).dictionary_encode()
        numbers = np.array([self._number(name) for name in names.dictionary.to_pylist()], np.int64)
        metrics: Numbers = numbers[names.indices.to_numpy()] if len(numbers) else _NO_NUMBERS
        taken = metrics >= 0
        kinds = values.kind.to_numpy(zero_copy_only=False)
        weights = values.times / values.rate
        self._add_counters(metrics, values, weights, taken & (kinds == COUNTER))
        self._add_gauges(metrics, values, taken & (kinds == GAUGE))
        many = taken & ((kinds == TIMER) | (kinds == HISTOGRAM) | (kinds == SET))
        if self._waiting.size + int(many.sum()) > MAX_VALUES:
            taken &= ~many
        else:
            mine = many & (kinds != SET)
            if mine.any():
                self._waiting.timed.append((metrics[mine], values.value[mine], weights[mine]))
                self._waiting.size += int(mine.sum())
            self._add_members(metrics, values, many & (kinds == SET))
        count = int(values.times[taken].sum())
        self._waiting.values += count
        return len(values) - count

    def _number(self, joined: str) -> int:
        metric, kind, tags = joined.split("\n")
        name = (metric, kind, tags)
        number = self._numbers.get(name)
        if number is None:
            if len(self._names) >= MAX_METRICS:
                return -1
            number = self._numbers[name] = len(self._names)
            self._names.append(name)
        return number

    def _add_counters(
        self, metrics: Numbers, values: StatsdValues, weights: Floats, mine: npt.NDArray[np.bool_]
    ) -> None:
        distinct, indices = np.unique(metrics[mine], return_inverse=True)
        sums = np.bincount(indices, weights=values.value[mine] * weights[mine])
        times = np.bincount(indices, weights=weights[mine])
        for metric, total, count in zip(
            distinct.tolist(), sums.tolist(), times.tolist(), strict=True
        ):
            self._waiting.totals[metric] = self._waiting.totals.get(metric, 0.0) + total
            self._waiting.counts[metric] = self._waiting.counts.get(metric, 0.0) + count

    def _add_gauges(
        self, metrics: Numbers, values: StatsdValues, mine: npt.NDArray[np.bool_]
    ) -> None:
        """Set gauges, in the order of the values: to the last value without a sign, plus what was
        added to it since.
        """
        order = values.order[mine[values.order]]
        if not len(order):
            return
        distinct, indices = np.unique(metrics[order], return_inverse=True)
        numbers, is_delta, at = values.value[order], values.is_delta[order], np.arange(len(order))
        last = np.full(len(distinct), -1)
        np.maximum.at(last, indices[~is_delta], at[~is_delta])
        since = is_delta & (at > last[indices])
        more = np.bincount(indices[since], weights=numbers[since], minlength=len(distinct))
        for i, metric in enumerate(distinct.tolist()):
            base = float(numbers[last[i]]) if last[i] >= 0 else self._gauges.get(metric, 0.0)
            self._gauges[metric] = base + float(more[i])
        times = np.bincount(indices)
        for metric, count in zip(distinct.tolist(), times.tolist(), strict=True):
            self._waiting.counts[metric] = self._waiting.counts.get(metric, 0.0) + count

    def _add_members(
        self, metrics: Numbers, values: StatsdValues, mine: npt.NDArray[np.bool_]
    ) -> None:
        if mine.any():
            members = values.member.filter(pa.array(mine))
            self._waiting.members.append(
                pa.record_batch({"metric": pa.array(metrics[mine]), "member": members})
            )
            self._waiting.size += int(mine.sum())

    # The end of an interval

    def flush(self, started_us: int, ended_us: int) -> tuple[pa.RecordBatch, int]:
        """Return one row a metric, and how many values they stand for. A gauge that was not set
        keeps its value, and is emitted again unless gauges are to be forgotten.
        """
        waiting, self._waiting = self._waiting, _Interval()
        seconds = max((ended_us - started_us) / 1e6, 1e-6)
        rows: list[tuple[int, dict[str, float]]] = [
            (
                metric,
                {
                    "value": total,
                    "sum": total,
                    "count": waiting.counts[metric],
                    "rate": total / seconds,
                },
            )
            for metric, total in waiting.totals.items()
        ]
        rows += [
            (metric, {"value": value, "count": waiting.counts.get(metric, 0.0)})
            for metric, value in self._gauges.items()
        ]
        rows += _describe_timed(waiting.timed, seconds) + _count_distinct(waiting.members)
        batch = self._batch(rows, started_us, ended_us)
        if self._forget_gauges:
            self._gauges.clear()
        if len(self._names) >= MAX_METRICS // 2:
            # Drop all metrics but gauges, and renumber these, before there are too many.
            names = [self._names[number] for number in self._gauges]
            gauges = list(self._gauges.values())
            self._names = names
            self._numbers = {name: number for number, name in enumerate(names)}
            self._gauges = dict(enumerate(gauges))
        return batch, waiting.values

    def _batch(
        self, rows: list[tuple[int, dict[str, float]]], started_us: int, ended_us: int
    ) -> pa.RecordBatch:
        names = [self._names[number] for number, _ in rows]
        moment = pa.timestamp("us", "UTC")
        columns = {
            column: pa.array([name[i] for name in names], pa.string())
            for i, column in enumerate(("metric", "kind", "tags"))
        }
        columns |= {
            column: pa.array([figures.get(column) for _, figures in rows], pa.float64())
            for column in _FIGURES
        }
        columns |= {
            name: pa.repeat(pa.scalar(us, moment), len(rows))
            for name, us in (("started_at", started_us), ("ended_at", ended_us))
        }
        return pa.record_batch(columns)


def _describe_timed(
    timed: list[tuple[Numbers, Floats, Floats]], seconds: float
) -> list[tuple[int, dict[str, float]]]:
    """Return the figures of timers and histograms. A sampled value counts as often as it stands
    for, also in percentiles.
    """
    if not timed:
        return []
    metrics, values, weights = (np.concatenate([part[i] for part in timed]) for i in range(3))
    order = np.lexsort((values, metrics))
    metrics, values, weights = metrics[order], values[order], weights[order]
    distinct, firsts = np.unique(metrics, return_index=True)
    ends = np.append(firsts[1:], len(metrics))
    total = np.cumsum(weights)
    rows = []
    for metric, first, stop in zip(distinct.tolist(), firsts.tolist(), ends.tolist(), strict=True):
        mine, share = values[first:stop], total[first:stop] - (total[first - 1] if first else 0.0)
        count, whole = float(share[-1]), float((mine * weights[first:stop]).sum())
        figures = {
            "value": whole / count,
            "mean": whole / count,
            "count": count,
            "rate": count / seconds,
            "sum": whole,
            "min": float(mine[0]),
            "max": float(mine[-1]),
        }
        indices = np.minimum(
            np.searchsorted(share, np.array(list(PERCENTILES.values())) * count * (1 - 1e-12)),
            len(mine) - 1,
        )
        rows.append((metric, figures | dict(zip(PERCENTILES, mine[indices].tolist(), strict=True))))
    return rows


def _count_distinct(members: list[pa.RecordBatch]) -> list[tuple[int, dict[str, float]]]:
    if not members:
        return []
    counted = (
        pa.Table.from_batches(members).group_by("metric").aggregate([("member", "count_distinct")])
    )
    return [
        (metric, {"value": float(count), "count": float(count)})
        for metric, count in zip(
            *(counted[name].to_pylist() for name in ("metric", "member_count_distinct")),
            strict=True,
        )
    ]


# The server

WAIT_S = 0.02
GATHER_S = 0.05
GATHER_BYTES = 1 << 20
MAX_GATHERED = 16
"""Buffers of up to about `GATHER_BYTES` that wait to be parsed; beyond that the system's own buffer
fills.
"""
RAW_SCHEMA = (
    "metric STRING, kind STRING, tags STRING, value DOUBLE, member STRING, is_delta BOOLEAN,"
    " sample_rate DOUBLE, stands_for DOUBLE, received_at TIMESTAMP"
)


class StatsdGatewayServer(ThreadedGatewayServer):
    """Receives packets in one thread, and parses and aggregates them in another."""

    def __init__(self, gateway: GatewaySpec, log: Log) -> None:
        super().__init__(gateway, log)
        self._flush_us: int | None = gateway.options["flush_us"]
        self._aggregator = StatsdAggregator(forget_gauges=gateway.options["forget_gauges"])
        self._gathered: queue.Queue[tuple[bytes, int] | None] = queue.Queue(MAX_GATHERED)
        self._packets = 0
        self._dropped_packets = 0
        self._given_up = Event()
        """Set when the log accepts nothing any more, so that no thread waits for room."""
        self._started_us = now_us()
        self._reader = Thread(target=self._parse_all, name=f"{gateway.name} reads", daemon=True)

    def start(self) -> None:
        self._socket = open_socket(self.gateway.options["host"], self.gateway.options["port"])
        host, port = self._socket.getsockname()[:2]
        self.address, self.port = f"udp://{host}:{port}", int(port)
        self._started_us = now_us()
        self._reader.start()
        super().start()

    def stop(self) -> None:
        """Stop receiving. What was received is still parsed and submitted, as long as the log
        accepts it.
        """
        super().stop()
        with contextlib.suppress(queue.Full):
            self._gathered.put(None, timeout=STOP_S)
            self._reader.join(STOP_S)
        if self._reader.is_alive():
            self._given_up.set()
            self._gathered.put(None)
            self._reader.join(STOP_S)
        self._dropped_packets = dropped_packets(self._socket)
        self._socket.close()

    def details(self) -> dict[str, int]:
        dropped = self._dropped_packets
        if self._socket.fileno() >= 0:
            dropped = dropped_packets(self._socket)
        return {
            "packets": self._packets,
            LOST: dropped,
            "values_in_this_interval": self._aggregator.waiting,
        }

    # Receiving

    def receive(self) -> None:
        source = PacketReceiver(self._socket, wait_s=WAIT_S)
        parts: list[bytes] = []
        size, since_s = 0, time.monotonic()
        while not self.stopped.is_set():
            packets = source.receive()
            if packets:
                parts.append(b"\n".join(packets))
                self._packets += len(packets)
                size += len(parts[-1])
            if parts and (size >= GATHER_BYTES or time.monotonic() - since_s >= GATHER_S):
                self._gathered.put((b"\n".join(parts), now_us()))
                parts, size = [], 0
            if not parts:
                since_s = time.monotonic()
        self._gathered.put((b"\n".join(parts), now_us()))

    # Parsing

    def _parse_all(self) -> None:
        try:
            while (gathered := self._next()) is not None:
                data, received_us = gathered
                if data:
                    self._add(data, received_us)
                if self._flush_us is not None and now_us() - self._started_us >= self._flush_us:
                    self._flush()
            self._flush()
        except BaseException as error:
            self.failure = error
            while (
                self._gathered.get() is not None
            ):  # so that the receiving thread does not wait for ever
                continue

    def _next(self) -> tuple[bytes, int] | None:
        try:
            return self._gathered.get(timeout=GATHER_S)
        except queue.Empty:
            return b"", 0

    def _add(self, data: bytes, received_us: int) -> None:
        values = parse_packets(data)
        if values.malformed:
            self.counters.record_rejected(values.malformed, "malformed")
        if not len(values):
            return
        if self._flush_us is None:
            # Submit rows in slices that fit the inbox, so that its bounds hold however many packets
            # came together.
            # One row for each value that came, in that order.
            order = pa.array(values.order)
            number = pa.array(values.value, from_pandas=True)
            distinct = pa.record_batch(
                {
                    "metric": values.metric,
                    "kind": values.kind,
                    "tags": values.tags,
                    "value": number,
                    "member": values.member,
                    "is_delta": pa.array(values.is_delta),
                    "sample_rate": pa.array(values.rate),
                    "stands_for": pa.array(1 / values.rate),
                }
            )
            batch = distinct.take(order)
            policy = self.gateway.policy
            rows = max(1, min(policy.rows, batch.num_rows * policy.bytes // max(1, batch.nbytes)))
            for start in range(0, batch.num_rows, rows):
                part = batch.slice(start, rows)
                self._submit(part, part.nbytes, received_us, None)
            return
        self.counters.record_received(len(values))
        if too_many := self._aggregator.add(values):
            self.counters.record_received(-too_many)
            self.counters.record_rejected(too_many, "too many metrics")

    def _flush(self) -> None:
        """Submit the rows of an interval, and begin the next one without a gap. An interval in
        which nothing came has gauges only.
        """
        if self._flush_us is None:
            return
        ended_us = now_us()
        batch, count = self._aggregator.flush(self._started_us, ended_us)
        self._started_us = ended_us
        if batch.num_rows:
            self._submit(batch, batch.nbytes, ended_us, count)

    def _submit(
        self, batch: pa.RecordBatch, size: int, received_us: int, stands_for: int | None
    ) -> None:
        submission = Submission(
            topic=self.gateway.topics[0],
            content=ArrowRows(batch),
            rows=batch.num_rows,
            size=size,
            received_us=received_us,
            stands_for=stands_for,
        )
        self.inbox.submit(submission, self._given_up)
