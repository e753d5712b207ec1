"""Read-your-writes: `at_least=OFFSETS` waits until a view contains the rows up to these offsets.

Offsets are written `orders:0:18,orders:1:20`: topic, partition, and the offset after the last row,
as `str(producer.append(…))` returns them. A view contains them once it shows a tick that covers
them in each partition; the pipeline's tick journal says which ticks do.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.engine.ticks import Tick, TickJournal
from headrace.errors import ConfigurationError, InputError, UnknownTopic, nearest
from headrace.http.responses import Refused
from headrace.log.api import Log
from headrace.run_status import pipeline_name
from headrace.serve.requests import ReadPool
from headrace.serve.stores import ServedStore

_PART = re.compile(r"([A-Za-z0-9._-]{1,200}):([0-9]{1,9}):([0-9]{1,18})")
_POLL_S = 0.03
MAX_PARTS = 1_000


@dataclass(frozen=True)
class RequiredOffsets:
    """The rows a view must contain: in each topic and partition, everything before an offset."""

    ends: Mapping[tuple[str, int], int]

    def is_covered_by(self, tick: Tick) -> bool:
        return all(
            tick.end(topic, partition) >= end for (topic, partition), end in self.ends.items()
        )


def parse_offsets(text: str) -> RequiredOffsets:
    parts = text.split(",")
    matches = [_PART.fullmatch(part) for part in parts]
    if len(parts) > MAX_PARTS or not all(matches):
        raise InputError(
            f"at_least={text[:80]!r} is not a list of offsets.",
            fix="give the text of what an append returned: TOPIC:PARTITION:END, joined by commas.",
        )
    return RequiredOffsets({(match[1], int(match[2])): int(match[3]) for match in matches if match})


class OffsetWaiter:
    """Waits until views contain offsets, by the tick journals of the pipelines it serves."""

    def __init__(self, log: Log | None, reads: ReadPool) -> None:
        self._log = log
        self._reads = reads
        self._journals: dict[str, TickJournal] = {}
        self._lock = threading.Lock()

    async def wait(self, store: ServedStore, view: str | None, offsets: str, wait_s: float) -> None:
        """Return once a view, or without one every view of a store, contains the offsets. Refused
        with status 503 if that takes longer than `wait_s`.
        """
        required = parse_offsets(offsets)
        await self._reads.run(self._check, store, required)
        deadline = time.monotonic() + wait_s
        required_tick = None
        while True:
            if required_tick is None:
                required_tick = await self._reads.run(self._find_tick, store, required)
            shown_tick = await self._reads.run(_shown_tick, store, view)
            if required_tick is not None and shown_tick >= required_tick:
                return
            if time.monotonic() > deadline:
                raise Refused(
                    503,
                    f"After {wait_s:g} seconds the view, at tick {shown_tick}, does not contain"
                    f" {offsets[:200]}.",
                    fix="send the request again, or wait longer with wait=.",
                )
            await asyncio.sleep(_POLL_S)

    def _find_tick(self, store: ServedStore, required: RequiredOffsets) -> int | None:
        """The first tick that covers the offsets; None if there is none yet."""
        with self._lock:
            journal = self._journal(store)
            if journal is None:
                return None
            journal.refresh()
            last = journal.last
            if last is None or not required.is_covered_by(last):
                return None
            low, high = (journal.first or last).number, last.number
            while low < high:  # a binary search, since the ends of ticks never decrease
                middle = (low + high) // 2
                tick = journal.at(middle)
                if tick is not None and required.is_covered_by(tick):
                    high = middle
                else:
                    low = middle + 1
            return low

    def _check(self, store: ServedStore, required: RequiredOffsets) -> None:
        """Refuse offsets that no view can ever contain: those of another log, or of a topic that
        the pipeline does not read.
        """
        with self._lock:
            log, journal = self._require_log(), self._journal(store)
            last = None if journal is None else journal.last
        topics = log.topics()
        for (topic, partition), end in required.ends.items():
            if topic not in topics:
                raise UnknownTopic(topic, topics)
            if end > log.end_offsets(topic).get(partition, -1):
                raise InputError(
                    f"The offset {topic}:{partition}:{end} is not in this log.",
                    fix="give an offset of the log that the pipeline reads.",
                )
            if last is not None and topic not in last.ends:
                raise InputError(
                    f"The pipeline does not read the topic {topic!r}: {nearest(topic, last.ends)}",
                    fix="wait for a topic that it reads.",
                )

    def _require_log(self) -> Log:
        if self._log is None:
            raise ConfigurationError(
                "This server was started without a log, so it does not know what a view contains.",
                fix="start it with --log ADDRESS.",
            )
        return self._log

    def _journal(self, store: ServedStore) -> TickJournal | None:
        """The tick journal of a store's pipeline; None if the pipeline has just been started and
        has not written its status.
        """
        log = self._require_log()
        pipeline = pipeline_name(store.directory)
        if pipeline is None:
            return None
        if pipeline not in self._journals:
            if f"__ticks.{pipeline}" not in log.topics():
                raise ConfigurationError(
                    f"This log has no ticks of the pipeline {pipeline!r}.",
                    fix="start the server with the pipeline's own log.",
                )
            self._journals[pipeline] = TickJournal.open(log, pipeline)
        return self._journals[pipeline]


def _shown_tick(store: ServedStore, view: str | None) -> int:
    if view is not None:
        return store.reader.tick(view)
    return min((info.tick for info in store.reader.views()), default=0)
