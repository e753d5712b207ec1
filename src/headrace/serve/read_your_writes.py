"""Reading one's own writes: waiting until a view contains what was appended at a position.

A position is written `orders:0:18,orders:1:20`: topic, partition, and the offset behind the last
row, as `str(producer.append(…))` gives it. A view contains it when the tick that it shows reaches
at least as far in each of these partitions, which the pipeline's journal of ticks tells.
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
from headrace.log.api import Log
from headrace.serve.dashboard import pipeline_of
from headrace.serve.requests import Reads, Refused
from headrace.serve.stores import Store

_PART = re.compile(r"([A-Za-z0-9._-]{1,200}):([0-9]{1,9}):([0-9]{1,18})")
_POLL_S = 0.03
MAX_PARTS = 1_000


@dataclass(frozen=True)
class Wanted:
    """What a view must contain: for each topic and partition, everything before an offset."""

    ends: Mapping[tuple[str, int], int]

    def is_in(self, tick: Tick) -> bool:
        return all(
            tick.end(topic, partition) >= end for (topic, partition), end in self.ends.items()
        )


def wanted(text: str) -> Wanted:
    parts = text.split(",")
    found = [_PART.fullmatch(part) for part in parts]
    if len(parts) > MAX_PARTS or not all(found):
        raise InputError(
            f"at_least={text[:80]!r} is no position.",
            fix="give what an append returned, as text: TOPIC:PARTITION:END, joined by commas.",
        )
    return Wanted({(match[1], int(match[2])): int(match[3]) for match in found if match})


class Arrivals:
    """Knows the journals of the pipelines whose views are served."""

    def __init__(self, log: Log | None, reads: Reads) -> None:
        self._log, self._reads = log, reads
        self._journals: dict[str, TickJournal] = {}
        self._lock = threading.Lock()

    async def wait(self, store: Store, view: str | None, position: str, wait_s: float) -> None:
        """Return when a view, or every view of a store, contains a position. 503 if it takes too
        long.
        """
        asked = wanted(position)
        await self._reads.run(self._check, store, asked)
        deadline, needed = time.monotonic() + wait_s, None
        while True:
            needed = await self._reads.run(self._needed, store, asked) if needed is None else needed
            shown = await self._reads.run(_shown, store, view)
            if needed is not None and shown >= needed:
                return
            if time.monotonic() > deadline:
                raise Refused(
                    503,
                    f"After {wait_s:g} seconds the view, at tick {shown}, does not contain"
                    f" {position[:200]}.",
                    fix="ask again, or wait longer with wait=.",
                )
            await asyncio.sleep(_POLL_S)

    def _needed(self, store: Store, asked: Wanted) -> int | None:
        """The first tick that has all of it; None if there is none yet."""
        with self._lock:
            journal = self._journal(store)
            if journal is None:
                return None
            journal.refresh()
            last = journal.last
            return _first(journal, asked, last) if last is not None and asked.is_in(last) else None

    def _check(self, store: Store, asked: Wanted) -> None:
        """Refuse a position that cannot come: of another log, or in a topic that the pipeline does
        not read.
        """
        with self._lock:
            log, journal = self._opened(), self._journal(store)
            last = None if journal is None else journal.last
        known = log.topics()
        for (topic, partition), end in asked.ends.items():
            if topic not in known:
                raise UnknownTopic(topic, known)
            if end > log.end_offsets(topic).get(partition, -1):
                raise InputError(
                    f"The position {topic}:{partition}:{end} is not in this log.",
                    fix="give a position of the log that the pipeline reads.",
                )
            if last is not None and topic not in last.ends:
                raise InputError(
                    f"The pipeline does not read the topic {topic!r}: {nearest(topic, last.ends)}",
                    fix="wait for a topic that it reads.",
                )

    def _opened(self) -> Log:
        if self._log is None:
            raise ConfigurationError(
                "This server was started without a log, and cannot tell what a view contains.",
                fix="start it with --log ADDRESS.",
            )
        return self._log

    def _journal(self, store: Store) -> TickJournal | None:
        """None as long as the pipeline has just been started, and has told nothing of itself."""
        log = self._opened()
        pipeline = pipeline_of(store.directory)
        if pipeline is None:
            return None
        if pipeline not in self._journals:
            if f"__ticks.{pipeline}" not in log.topics():
                raise ConfigurationError(
                    f"This log has no ticks of the pipeline {pipeline!r}.",
                    fix="start the server with the pipeline's own log.",
                )
            self._journals[pipeline] = TickJournal(log, pipeline)
        return self._journals[pipeline]


def _first(journal: TickJournal, asked: Wanted, last: Tick) -> int:
    """By halving, since ends never go back."""
    low, high = (journal.first or last).number, last.number
    while low < high:
        middle = (low + high) // 2
        tick = journal.at(middle)
        low, high = (low, middle) if tick is not None and asked.is_in(tick) else (middle + 1, high)
    return low


def _shown(store: Store, view: str | None) -> int:
    if view is not None:
        return store.reader.tick(view)
    return min((info.tick for info in store.reader.views()), default=0)
