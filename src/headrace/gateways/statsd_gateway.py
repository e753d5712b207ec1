"""The StatsD gateway: one thread receives packets, another reads them, and appends them as they are
or puts them together until the interval ends.
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
from headrace.gateways.base import END_S, GatewaySpec, ThreadReceiving, now_us
from headrace.gateways.inbox import Columns, Delivery
from headrace.gateways.metrics import LOST
from headrace.log.api import Log

# UDP packets, many with one call to the system. Python's own `recv` takes one at a time; `recvmmsg`
# takes all that wait, so a flood costs little more than its bytes.
#
# What the system had no room for is counted by it, in /proc/net/udp.


PACKETS_A_CALL = 256
SLOT_BYTES = 64 << 10
"""No UDP packet is larger."""
BUFFER_BYTES = 32 << 20
"""Asked of the system; without the right to it, it gives less (net.core.rmem_max)."""
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


def opened(host: str, port: int) -> socket.socket:
    """A socket that listens, with as much room as the system gives."""
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
        _make_room(listening)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise ConfigurationError(
            f"Cannot listen on {host}, port {port} (UDP): {error.strerror or error}.",
            fix="choose another --host or --port.",
        ) from None
    return listening


def _make_room(listening: socket.socket) -> None:
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    try:
        listening.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, BUFFER_BYTES)
    except OSError:
        return  # it takes a right that only few processes have


class Packets:
    """Receives from a socket. It belongs to one thread."""

    def __init__(self, listening: socket.socket, *, wait_s: float) -> None:
        listening.setblocking(True)
        whole, part = int(wait_s), int(wait_s % 1 * 1_000_000)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, part))
        self._socket = listening
        self._call = getattr(ctypes.CDLL(None, use_errno=True), "recvmmsg", None)
        self._slots = bytearray(PACKETS_A_CALL * SLOT_BYTES)
        self._view = memoryview(self._slots)
        self._messages = self._prepared()
        self._raw = np.frombuffer(memoryview(self._messages), np.uint8).reshape(
            PACKETS_A_CALL, ctypes.sizeof(_Message)
        )

    def _prepared(self) -> ctypes.Array[_Message]:
        address = ctypes.addressof((ctypes.c_char * len(self._slots)).from_buffer(self._slots))
        self._parts = (_Iovec * PACKETS_A_CALL)(
            *(_Iovec(address + i * SLOT_BYTES, SLOT_BYTES) for i in range(PACKETS_A_CALL))
        )
        messages = (_Message * PACKETS_A_CALL)()
        for i in range(PACKETS_A_CALL):
            messages[i].header.parts, messages[i].header.part_count = (
                ctypes.pointer(self._parts[i]),
                1,
            )
        return messages

    def receive(self) -> list[memoryview]:
        """What waits, or what comes first; nothing if none came in time. What it returns is good
        until the next call.
        """
        if self._call is None:
            return self._receive_one()
        count = self._call(
            self._socket.fileno(), self._messages, PACKETS_A_CALL, _MSG_WAITFORONE, None
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

    def _receive_one(self) -> list[memoryview]:
        try:
            return [self._view[: self._socket.recv_into(self._slots)]]
        except OSError as error:
            if error.errno in _QUIET:
                return []
            raise


def lost(listening: socket.socket) -> int:
    """Packets for which the system had no room, since the socket was opened; 0 where it does not
    say.
    """
    inode = str(os.fstat(listening.fileno()).st_ino)
    table = Path("/proc/net/udp6" if listening.family == socket.AF_INET6 else "/proc/net/udp")
    try:
        rows = (line.split() for line in table.read_text().splitlines()[1:])
        return next((int(row[12]) for row in rows if row[9] == inode), 0)
    except OSError:
        return 0


# StatsD's lines, read by column: `name:value|kind[|@rate][|#tags]`, as StatsD has them and with
# DogStatsD's tags and packed values (`name:1:2:3|ms`).
#
# Equal lines are read once: a service counts the same thing again and again. A line that is none of
# these is malformed; it is counted, and nothing else of its packet is lost.


COUNTER, GAUGE, TIMER, HISTOGRAM, SET = "counter", "gauge", "timer", "histogram", "set"
_KINDS = {"c": COUNTER, "g": GAUGE, "ms": TIMER, "h": HISTOGRAM, "d": HISTOGRAM, "s": SET}
LONGEST_LINE = 8_192
_LINE = (
    r"^(?P<metric>[^:|@#\s\x00-\x1f\x{FFFD}][^:|\x00-\x1f\x{FFFD}]*):(?P<value>[^|\x00-\x1f\x{FFFD}]+)\|(?P<kind>c|g|ms|h|d|s)"
    r"(?:\|@(?P<rate>[0-9.eE+-]+))?(?:\|#(?P<tags>[^|\x00-\x1f\x{FFFD}]*))?(?:\|[cT][^|\x00-\x1f]*)*$"
)
_NUMBER = r"^[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?$"


@dataclass(frozen=True)
class Values:
    """Different values, in columns, and how often each came. `order` has, for every value that
    came, in that order, which one it was.
    """

    metric: pa.Array
    kind: pa.Array
    tags: pa.Array
    value: npt.NDArray[np.float64]
    """Of sets: not a number."""
    member: pa.Array
    """Of sets; else null."""
    is_delta: npt.NDArray[np.bool_]
    """A gauge's value with a sign: so much more or less."""
    rate: npt.NDArray[np.float64]
    times: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]
    malformed: int

    def __len__(self) -> int:
        return len(self.order)


def read(data: bytes) -> Values:
    """The values of packets that were joined by line ends."""
    text = data.decode(errors="replace")
    lines = pc.list_flatten(pc.split_pattern(pa.array([text], pa.large_string()), "\n"))
    lines = lines.filter(pc.not_equal(pc.binary_length(lines), 0))
    encoded = lines.dictionary_encode()
    order = encoded.indices.to_numpy().astype(np.int64)
    parts = pc.extract_regex(_readable(encoded.dictionary), _LINE)
    metric, value, kind, rate, tags = (
        parts.field(name) for name in ("metric", "value", "kind", "rate", "tags")
    )
    kind = _kinds(kind)
    which, value = _unpacked(value, kind)
    if which is not None:
        metric, kind, rate, tags = (
            column.take(pa.array(which)) for column in (metric, kind, rate, tags)
        )
    return _checked(metric, kind, rate, tags, value, _spread(order, which, len(encoded.dictionary)))


def _readable(lines: pa.Array) -> pa.Array:
    trimmed = pc.utf8_rtrim(lines, "\r")
    return pc.if_else(
        pc.greater(pc.binary_length(trimmed), LONGEST_LINE), pa.scalar("", trimmed.type), trimmed
    )


def _kinds(short: pa.Array) -> pa.Array:
    codes = pc.index_in(short, pa.array(list(_KINDS), short.type))
    return pa.array(list(_KINDS.values())).take(codes)


def _unpacked(value: pa.Array, kind: pa.Array) -> tuple[npt.NDArray[np.int64] | None, pa.Array]:
    """`1:2:3` is three values; but for sets, whose members may have any character. Also which line
    each is of, unless each has one.
    """
    packed = pc.fill_null(pc.and_(pc.match_substring(value, ":"), pc.not_equal(kind, SET)), False)
    if not pc.any(packed).as_py():
        return None, value
    lists = pc.if_else(packed, pc.split_pattern(value, ":"), _each_alone(value))
    return pc.list_parent_indices(lists).to_numpy().astype(np.int64), pc.list_flatten(lists)


def _each_alone(value: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.arange(len(value) + 1, dtype=np.int32)), value)


def _spread(
    order: npt.NDArray[np.int64], which: npt.NDArray[np.int64] | None, lines: int
) -> npt.NDArray[np.int64]:
    """The order of values, from that of lines."""
    if which is None:
        return order
    counts = np.bincount(which, minlength=lines)
    firsts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    lengths = counts[order]
    starts = np.repeat(firsts[order], lengths)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    result: npt.NDArray[np.int64] = starts + within
    return result


def _checked(
    metric: pa.Array,
    kind: pa.Array,
    rate: pa.Array,
    tags: pa.Array,
    value: pa.Array,
    order: npt.NDArray[np.int64],
) -> Values:
    """Without what is malformed: no known line, no number, a rate that is none."""
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
    kept = pa.array(np.flatnonzero(good))
    renumbered = np.where(good, np.cumsum(good) - 1, -1)[order]
    signed = _as_bools(pc.and_(pc.equal(kind, GAUGE), pc.match_substring_regex(value, r"^[+-]")))
    order = renumbered[renumbered >= 0]
    times = np.bincount(order, minlength=len(kept)).astype(np.int64)
    member = pc.if_else(is_set, value, pa.scalar(None, value.type))
    text = [
        column.take(kept).cast(pa.string()) for column in (metric, kind, _in_order(tags), member)
    ]
    return Values(
        text[0],
        text[1],
        text[2],
        np.where(_as_bools(is_set), np.nan, numbers)[good],
        text[3],
        signed[good],
        rates[good],
        times,
        order,
        int((renumbered < 0).sum()),
    )


def _numbers(text: pa.Array) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """As numbers, 0 where there is none; and where there is one that is finite."""
    matches = pc.match_substring_regex(text, _NUMBER)
    plain = pc.utf8_ltrim(pc.if_else(matches, text, pa.scalar("0", text.type)), "+")
    numbers = pc.fill_null(plain.cast(pa.float64()), 0.0).to_numpy()
    return numbers, _as_bools(matches) & np.isfinite(numbers)


def _as_bools(mask: pa.Array) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = pc.fill_null(mask, False).to_numpy(zero_copy_only=False)
    return found


def _in_order(tags: pa.Array) -> pa.Array:
    """`b:2,a:1` and `a:1,b:2` are the same tags. There are few different ones."""
    encoded = pc.fill_null(tags, "").dictionary_encode()
    different: list[Any] = encoded.dictionary.to_pylist()
    sorted_tags = pa.array(
        [",".join(sorted(filter(None, each.split(",")))) for each in different], pa.string()
    )
    return sorted_tags.take(encoded.indices)


# What StatsD does each flush interval: counters are summed, gauges remembered, timers and
# histograms described, members of sets counted.
#
# Values wait as columns, by the number of their metric. Only metrics are gone through one by one,
# never values.


MAX_METRICS = 100_000
MAX_VALUES = 5_000_000
"""Values of timers and members of sets that wait for the end of their interval."""
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
class _Waiting:
    """Values of one interval, by the numbers of their metrics."""

    totals: dict[int, float] = field(default_factory=dict)
    counts: dict[int, float] = field(default_factory=dict)
    timed: list[tuple[Numbers, Floats, Floats]] = field(default_factory=list)
    """Metric, value, and how many it stands for."""
    members: list[pa.RecordBatch] = field(default_factory=list)
    size: int = 0
    values: int = 0


class Aggregator:
    """Takes values, and gives one row a metric at the end of an interval."""

    def __init__(self, *, forget_gauges: bool = False) -> None:
        self._forget_gauges = forget_gauges
        self._numbers: dict[tuple[str, str, str], int] = {}
        self._names: list[tuple[str, str, str]] = []
        self._gauges: dict[int, float] = {}
        self._waiting = _Waiting()

    @property
    def waiting(self) -> int:
        return self._waiting.values

    def add(self, values: Values) -> int:
        """Returns how many could not be taken: there are too many metrics, or values."""
        metrics = self._metrics_of(values)
        taken = metrics >= 0
        kinds = values.kind.to_numpy(zero_copy_only=False)
        weights = values.times / values.rate
        self._add_counters(metrics, values, weights, taken & (kinds == COUNTER))
        self._add_gauges(metrics, values, taken & (kinds == GAUGE))
        many = taken & ((kinds == TIMER) | (kinds == HISTOGRAM) | (kinds == SET))
        if self._waiting.size + int(many.sum()) > MAX_VALUES:
            taken &= ~many
        else:
            self._add_timed(metrics, values, weights, many & (kinds != SET))
            self._add_members(metrics, values, many & (kinds == SET))
        count = int(values.times[taken].sum())
        self._waiting.values += count
        return len(values) - count

    def _metrics_of(self, values: Values) -> Numbers:
        """The number of each value's metric; -1 for one too many."""
        names = pc.binary_join_element_wise(
            values.metric, values.kind, values.tags, "\n"
        ).dictionary_encode()
        numbers = np.array([self._number(name) for name in names.dictionary.to_pylist()], np.int64)
        found: Numbers = numbers[names.indices.to_numpy()] if len(numbers) else _NO_NUMBERS
        return found

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
        self, metrics: Numbers, values: Values, weights: Floats, mine: npt.NDArray[np.bool_]
    ) -> None:
        different, places = np.unique(metrics[mine], return_inverse=True)
        sums = np.bincount(places, weights=values.value[mine] * weights[mine])
        times = np.bincount(places, weights=weights[mine])
        for metric, total, count in zip(
            different.tolist(), sums.tolist(), times.tolist(), strict=True
        ):
            self._waiting.totals[metric] = self._waiting.totals.get(metric, 0.0) + total
            self._waiting.counts[metric] = self._waiting.counts.get(metric, 0.0) + count

    def _add_gauges(self, metrics: Numbers, values: Values, mine: npt.NDArray[np.bool_]) -> None:
        """In the order they came: the last value without a sign, and what was added to it since."""
        order = values.order[mine[values.order]]
        if not len(order):
            return
        different, places = np.unique(metrics[order], return_inverse=True)
        numbers, is_delta, at = values.value[order], values.is_delta[order], np.arange(len(order))
        last = np.full(len(different), -1)
        np.maximum.at(last, places[~is_delta], at[~is_delta])
        since = is_delta & (at > last[places])
        more = np.bincount(places[since], weights=numbers[since], minlength=len(different))
        for i, metric in enumerate(different.tolist()):
            base = float(numbers[last[i]]) if last[i] >= 0 else self._gauges.get(metric, 0.0)
            self._gauges[metric] = base + float(more[i])
        times = np.bincount(places)
        for metric, count in zip(different.tolist(), times.tolist(), strict=True):
            self._waiting.counts[metric] = self._waiting.counts.get(metric, 0.0) + count

    def _add_timed(
        self, metrics: Numbers, values: Values, weights: Floats, mine: npt.NDArray[np.bool_]
    ) -> None:
        if mine.any():
            self._waiting.timed.append((metrics[mine], values.value[mine], weights[mine]))
            self._waiting.size += int(mine.sum())

    def _add_members(self, metrics: Numbers, values: Values, mine: npt.NDArray[np.bool_]) -> None:
        if mine.any():
            members = values.member.filter(pa.array(mine))
            self._waiting.members.append(
                pa.record_batch({"metric": pa.array(metrics[mine]), "member": members})
            )
            self._waiting.size += int(mine.sum())

    # The end of an interval

    def flush(self, started_us: int, ended_us: int) -> tuple[pa.RecordBatch, int]:
        """One row a metric, and how many values they are of. Gauges that nobody told anything about
        keep their values, and are told again unless they are to be forgotten.
        """
        waiting, self._waiting = self._waiting, _Waiting()
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
        rows += _described(waiting.timed, seconds) + _distinct(waiting.members)
        batch = self._batch(rows, started_us, ended_us)
        if self._forget_gauges:
            self._gauges.clear()
        if len(self._names) >= MAX_METRICS // 2:
            self._forget_idle()
        return batch, waiting.values

    def _forget_idle(self) -> None:
        """Numbers are given anew, before there are too many; gauges are kept."""
        kept = [self._names[number] for number in self._gauges]
        gauges = list(self._gauges.values())
        self._names, self._numbers = kept, {name: number for number, name in enumerate(kept)}
        self._gauges = dict(enumerate(gauges))

    def _batch(
        self, rows: list[tuple[int, dict[str, float]]], started_us: int, ended_us: int
    ) -> pa.RecordBatch:
        names = [self._names[number] for number, _ in rows]
        moment = pa.timestamp("us", "UTC")
        columns = {
            each: pa.array([name[i] for name in names], pa.string())
            for i, each in enumerate(("metric", "kind", "tags"))
        }
        columns |= {
            each: pa.array([figures.get(each) for _, figures in rows], pa.float64())
            for each in _FIGURES
        }
        columns |= {
            name: pa.repeat(pa.scalar(us, moment), len(rows))
            for name, us in (("started_at", started_us), ("ended_at", ended_us))
        }
        return pa.record_batch(columns)


def _described(
    timed: list[tuple[Numbers, Floats, Floats]], seconds: float
) -> list[tuple[int, dict[str, float]]]:
    """Each metric's values, in order of size: percentiles are those of what the values stand for,
    sampled or not.
    """
    if not timed:
        return []
    metrics, values, weights = (np.concatenate([part[i] for part in timed]) for i in range(3))
    order = np.lexsort((values, metrics))
    metrics, values, weights = metrics[order], values[order], weights[order]
    different, firsts = np.unique(metrics, return_index=True)
    ends = np.append(firsts[1:], len(metrics))
    total = np.cumsum(weights)
    rows = []
    for metric, first, end in zip(different.tolist(), firsts.tolist(), ends.tolist(), strict=True):
        mine, share = values[first:end], total[first:end] - (total[first - 1] if first else 0.0)
        count, whole = float(share[-1]), float((mine * weights[first:end]).sum())
        figures = {
            "value": whole / count,
            "mean": whole / count,
            "count": count,
            "rate": count / seconds,
            "sum": whole,
            "min": float(mine[0]),
            "max": float(mine[-1]),
        }
        places = np.minimum(
            np.searchsorted(share, np.array(list(PERCENTILES.values())) * count * (1 - 1e-12)),
            len(mine) - 1,
        )
        rows.append((metric, figures | dict(zip(PERCENTILES, mine[places].tolist(), strict=True))))
    return rows


def _distinct(members: list[pa.RecordBatch]) -> list[tuple[int, dict[str, float]]]:
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


WAIT_S = 0.02
GATHER_S = 0.05
GATHER_BYTES = 1 << 20
MAX_GATHERED = 16
"""Pieces of up to about `GATHER_BYTES` that wait to be read; then the system's own buffer fills."""
RAW_SCHEMA = (
    "metric STRING, kind STRING, tags STRING, value DOUBLE, member STRING, is_delta BOOLEAN,"
    " sample_rate DOUBLE, stands_for DOUBLE, received_at TIMESTAMP"
)


class StatsdReceiving(ThreadReceiving):
    def __init__(self, gateway: GatewaySpec, log: Log) -> None:
        super().__init__(gateway, log)
        self._flush_us: int | None = gateway.options["flush_us"]
        self._aggregator = Aggregator(forget_gauges=gateway.options["forget_gauges"])
        self._gathered: queue.Queue[tuple[bytes, int] | None] = queue.Queue(MAX_GATHERED)
        self._packets = 0
        self._given_up = Event()
        """Set when the log takes nothing any more: who waits for room is let go."""
        self._started_us = now_us()
        self._reader = Thread(target=self._read_all, name=f"{gateway.name} reads", daemon=True)

    def begin(self) -> None:
        self._socket = opened(self.gateway.options["host"], self.gateway.options["port"])
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
        self._lost = lost(self._socket)
        self._socket.close()

    def details(self) -> dict[str, int]:
        lost_packets = lost(self._socket) if self._socket.fileno() >= 0 else self._lost
        return {
            "packets": self._packets,
            LOST: lost_packets,
            "values_in_this_interval": self._aggregator.waiting,
        }

    # Receiving

    def receive(self) -> None:
        source = Packets(self._socket, wait_s=WAIT_S)
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
        """Intervals follow each other without a gap; one in which nothing came tells of gauges
        alone.
        """
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

    def _submit(
        self, batch: pa.RecordBatch, size: int, received_us: int, stands_for: int | None
    ) -> None:
        topic = self.gateway.topics[0]
        self.inbox.submit(
            Delivery(
                topic, Columns(batch), batch.num_rows, size, received_us, stands_for=stands_for
            ),
            self._given_up,
        )


def _raw(values: Values) -> pa.RecordBatch:
    """Each value that came, in that order."""
    order = pa.array(values.order)
    number = pa.array(values.value, from_pandas=True)
    different = pa.record_batch(
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
    return different.take(order)
