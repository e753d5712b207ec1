"""The rows that wait for an answer of one call: reading them, which ones are open, and how far
event time is complete. All of it is in the log, so a caller can be killed at any moment.

    requests, one partition         5   6   7   8  [control: tick 9, horizon 12:00]  10  11
    open after 5, 7, 8 are done         6                                            10  11
    stored with those answers       low 6, read to 12, open {6, 10, 11}
    complete to                     the horizon of the last tick before 6: row 6 is not late yet
    and when 6 is done              12:00: what comes after tick 9 is not older than that

What is stored is bounded: nobody reads further than `MAX_SPAN` offsets ahead of the oldest open
row, and what is open in between is a compressed bitmap.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.calls.call import Call
from headrace.columnar.columns import OFFSET_COLUMN
from headrace.engine.ticks import read_control_ticks
from headrace.errors import NewerFormat
from headrace.log.api import Log
from headrace.operators.kernel import ENDED, UNSTARTED

VERSION = 1
MAX_SPAN = 100_000
"""How many offsets of a partition are read ahead of its oldest open row."""
MAX_OPEN_BYTES = 64 << 20
"""How many bytes of rows may be open; one batch of the log may go beyond."""
_READ_OFFSETS = 5_000


@dataclass(eq=False, slots=True)
class Chunk:
    """Rows that were read together, and the arguments for the function, row by row."""

    rows: pa.RecordBatch
    arguments: list[dict[str, Any]]
    open_rows: int


@dataclass(eq=False, slots=True)
class Request:
    """A row that waits for an answer."""

    partition: int
    offset: int
    chunk: Chunk
    index: int
    key: str
    """The idempotency key: the same text whenever the row is asked about."""

    @property
    def arguments(self) -> dict[str, Any]:
        return self.chunk.arguments[self.index]

    def row(self) -> dict[str, Any]:
        """The whole row, for errors."""
        row: dict[str, Any] = self.chunk.rows.slice(self.index, 1).to_pylist()[0]
        return row


@dataclass
class _Partition:
    """One partition of the requests. `low` is the oldest open offset, or the next one to read."""

    read_to: int = 0
    open: set[int] = field(default_factory=set)
    order: deque[int] = field(default_factory=deque)
    """The open offsets in order; those that are no longer open may still be among them."""
    horizons: deque[tuple[int, int]] = field(default_factory=deque)
    """(offset, horizon): all rows of the ticks up to that horizon are below the offset."""
    complete_us: int = UNSTARTED

    @property
    def low(self) -> int:
        while self.order and self.order[0] not in self.open:
            self.order.popleft()
        return self.order[0] if self.order else self.read_to

    def advance(self) -> None:
        """Take the horizons of ticks whose rows are all done."""
        low = self.low
        while self.horizons and self.horizons[0][0] <= low:
            self.complete_us = max(self.complete_us, self.horizons.popleft()[1])

    def to_json(self, reopened_to: int) -> list[Any]:
        """Up to `reopened_to` rows are known that this process may not have read yet."""
        low, known_to = self.low, max(self.read_to, reopened_to)
        bits = np.zeros(known_to - low, np.bool_)
        bits[[offset - low for offset in self.open]] = True
        packed = zlib.compress(np.packbits(bits).tobytes())
        complete = None if self.complete_us == UNSTARTED else self.complete_us
        return [low, known_to, base64.b64encode(packed).decode(), complete]


class Requests:
    """The requests of a call. It belongs to one thread."""

    def __init__(self, log: Log, call: Call, *, is_own_tick: Callable[[int], bool]) -> None:
        self.log = log
        self.call = call
        self.moved_by_others = False
        """Whether a tick that was not caused by answers has moved the horizon."""
        self._is_own_tick = is_own_tick
        self._partitions: dict[int, _Partition] = {}
        self._reopened: dict[int, tuple[int, int]] = {}
        self._open_bytes = 0
        self._ends: dict[int, int] = {}
        info = log.topic(call.requests_topic)
        self._identity = info.id or info.name
        self._columns = [*info.arrow_schema.names, OFFSET_COLUMN]

    def load(self, note: str | None) -> None:
        """Begin where the note says: read its open rows again."""
        stored = {"partitions": {}} if note is None else json.loads(note)
        if stored.get("version", VERSION) > VERSION:
            raise NewerFormat(
                f"The progress of the call {self.call.name!r} was stored by a newer Headrace.",
                fix="upgrade Headrace.",
            )
        self._partitions = {}
        self._reopened = {}
        self._open_bytes = 0
        for partition in self.log.end_offsets(self.call.requests_topic):
            low, read_to, packed, complete = stored["partitions"].get(
                str(partition), (0, 0, None, None)
            )
            state = self._partitions[partition] = _Partition(low)
            state.complete_us = UNSTARTED if complete is None else complete
            if packed is not None and read_to > low:
                bits = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint8)
                offsets = low + np.flatnonzero(np.unpackbits(bits, count=read_to - low))
                state.open = set(offsets.tolist())
                self._reopened[partition] = (low, read_to)

    def to_json(self) -> str:
        partitions = {
            str(number): state.to_json(self._reopened.get(number, (0, 0))[1])
            for number, state in self._partitions.items()
        }
        return json.dumps({"version": VERSION, "partitions": partitions})

    # Reading

    def read(self, max_rows: int) -> list[Request]:
        """The next rows that have no recorded fate: about `max_rows` of them at most, none if
        there are none or if too much is open.
        """
        requests: list[Request] = []
        self._ends = self.log.end_offsets(self.call.requests_topic)
        for partition, end in self._ends.items():
            state = self._partitions[partition]
            while (
                len(requests) < max_rows
                and state.read_to < end
                and state.read_to - state.low < MAX_SPAN
                and self._open_bytes < MAX_OPEN_BYTES
            ):
                stop = min(end, state.read_to + _READ_OFFSETS)
                if partition in self._reopened:
                    stop = min(stop, self._reopened[partition][1])
                requests += self._read_range(partition, state, stop)
        return requests

    def _read_range(self, partition: int, state: _Partition, stop: int) -> list[Request]:
        topic = self.call.requests_topic
        start = state.read_to
        earliest = self.log.start_offsets(topic)[partition]
        reopened = self._reopened.get(partition)
        requests = []
        for batch in self.log.read(
            topic, partition, max(start, earliest), max(stop, earliest), columns=self._columns
        ):
            rows = batch.drop_columns([OFFSET_COLUMN])
            offsets = batch.column(OFFSET_COLUMN).to_pylist()
            indices = [
                index
                for index, offset in enumerate(offsets)
                if not reopened or offset in state.open
            ]
            if not indices:
                continue
            chunk = Chunk(rows, rows.select(list(self.call.arguments)).to_pylist(), len(indices))
            self._open_bytes += rows.nbytes
            for index in indices:
                offset = offsets[index]
                key = self._key(partition, offset)
                requests.append(Request(partition, offset, chunk, index, key))
        state.open.update(request.offset for request in requests)
        state.order.extend(request.offset for request in requests)
        for tick in read_control_ticks(self.log, topic, partition, start, stop):
            state.horizons.append((tick.end, tick.horizon_us))
            if tick.horizon_us > state.complete_us and not self._is_own_tick(tick.tick):
                self.moved_by_others = True
        state.read_to = stop
        if reopened and stop >= reopened[1]:
            del self._reopened[partition]
        return requests

    def _key(self, partition: int, offset: int) -> str:
        text = f"{self._identity}/{partition}/{offset}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    # Progress

    def settle(self, requests: Iterable[Request]) -> None:
        """Close requests whose fate is in the transaction that stores `to_json`."""
        for request in requests:
            self._partitions[request.partition].open.discard(request.offset)
            request.chunk.open_rows -= 1
            if not request.chunk.open_rows:
                self._open_bytes -= request.chunk.rows.nbytes

    def copy(self) -> Any:
        """The state, for `restore` if a commit fails."""
        return (
            {
                number: replace(
                    state,
                    open=set(state.open),
                    order=deque(state.order),
                    horizons=deque(state.horizons),
                )
                for number, state in self._partitions.items()
            },
            self._open_bytes,
        )

    def restore(self, copied: Any, settled: Iterable[Request]) -> None:
        """Go back to a state from before `settled` were closed."""
        self._partitions, self._open_bytes = copied
        for request in settled:
            request.chunk.open_rows += 1

    @property
    def complete_us(self) -> int:
        """The event time up to which every row has its fate recorded; UNSTARTED if there is none,
        ENDED if event time has ended.
        """
        for state in self._partitions.values():
            state.advance()
        return min((state.complete_us for state in self._partitions.values()), default=UNSTARTED)

    @property
    def open_rows(self) -> int:
        return sum(len(state.open) for state in self._partitions.values())

    @property
    def has_read_all(self) -> bool:
        """Whether everything was read that was there when `read` was called last."""
        return bool(self._ends) and all(
            self._partitions[number].read_to >= end for number, end in self._ends.items()
        )

    @property
    def lows(self) -> dict[int, int]:
        """For each partition the offset below which every row has its fate recorded."""
        return {number: state.low for number, state in self._partitions.items()}


YEAR_1_US = -62_135_596_800_000_000
YEAR_9900_US = 250_246_540_800_000_000


def storable_us(complete_us: int) -> int:
    """An event time as a TIMESTAMP can hold it."""
    if complete_us >= ENDED:
        return YEAR_9900_US
    return min(max(complete_us, YEAR_1_US), YEAR_9900_US)
