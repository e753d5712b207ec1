"""What a derived topic carries beside its rows: with each commit, how many rows of which tick a partition got, and the clocks of the step that wrote it.

So whoever reads the topic can know where each of the writer's ticks ends, and how far time had come then: `carried_ticks`. A pipeline that reads the topic as an input
cuts ticks of its own, as of any topic. On Kafka what is carried is a record with a reserved header.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import NewerFormat
from headrace.log.api import Log
from headrace.operators.kernel import UNSTARTED, Clocks

VERSION = 1
TickRows = Mapping[int, int]
"""Tick -> rows of it."""


@dataclass(frozen=True)
class CarriedTick:
    """Rows of a partition below `end` are of this tick or an earlier one; the clocks are as of the end of the tick."""

    tick: int
    end: int
    complete_us: int = UNSTARTED
    closed_us: int = UNSTARTED


def to_control(rows: TickRows, clocks: Clocks) -> bytes:
    """What one partition gets with a commit. Clocks are told where they change."""
    before = np.stack([clocks.complete_before, clocks.closed_before])
    moved = np.flatnonzero((before != np.stack([clocks.complete, clocks.closed])).any(axis=0))
    changes = [[int(clocks.ticks[at]), int(clocks.complete[at]), int(clocks.closed[at])] for at in moved]
    start = [clocks.complete_at_start, clocks.closed_at_start]
    content = {"version": VERSION, "tick": int(clocks.ticks[-1]), "rows": sorted(rows.items()), "start": start, "clocks": changes}
    return json.dumps(content, separators=(",", ":")).encode()


def carried_ticks(log: Log, topic: str, partition: int, start: int | None = None) -> Iterator[CarriedTick]:
    """The ticks that a partition's rows belong to, oldest first: those that brought rows, those that moved a clock, and the last of each commit."""
    for control in log.read_control(topic, partition, start):
        content = json.loads(control.payload)
        if content["version"] > VERSION:
            raise NewerFormat(f"The topic {topic!r} was written by a newer Headrace.", fix="upgrade Headrace.")
        yield from _ticks(content, control.offset)


def _ticks(content: dict[str, Any], end: int) -> Iterator[CarriedTick]:
    rows: dict[int, int] = dict(content["rows"])
    clocks = {tick: (complete_us, closed_us) for tick, complete_us, closed_us in content["clocks"]}
    at, now_us = end - sum(rows.values()), tuple(content["start"])
    for tick in sorted({*rows, *clocks, content["tick"]}):
        at, now_us = at + rows.get(tick, 0), clocks.get(tick, now_us)
        yield CarriedTick(tick, at, *now_us)
