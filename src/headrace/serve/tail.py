"""A topic's rows, pushed as they are appended. The id of an event says how far each partition was read (`0:17,1:20`), so that one who comes back goes on behind it."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator, Mapping

import pyarrow as pa

from headrace.errors import InputError, OffsetOutOfRange
from headrace.log.api import Log
from headrace.serve.answers import rows_json
from headrace.serve.channels import Event, Hub, Select
from headrace.serve.events import event

Offsets = Mapping[int, int]
_PART = re.compile(r"([0-9]{1,9}):([0-9]{1,18})")
_ROWS_A_READ = 5_000


def offsets_from(text: str | None) -> dict[int, int] | None:
    """What a Last-Event-ID says; InputError if it is none of ours."""
    if not text:
        return None
    found = [_PART.fullmatch(part) for part in text.split(",")]
    if not all(found):
        raise InputError(
            f"The Last-Event-ID {text[:80]!r} is none of this server's.", fix="send the id of the last event, such as 0:17,1:20, or none."
        )
    return {int(match[1]): int(match[2]) for match in found if match}


class TopicSource:
    """The rows of one topic."""

    def __init__(self, log: Log, topic: str) -> None:
        self._log, self.topic = log, topic

    def start(self) -> Offsets:
        return self._log.end_offsets(self.topic)

    def read(self, after: Offsets) -> tuple[Offsets, list[Event]]:
        """A bounded part of what came; the rest is there at the next look."""
        reached, events = dict(after), []
        for partition, end in self._log.end_offsets(self.topic).items():
            start = reached.get(partition, 0)
            stop = min(end, start + _ROWS_A_READ)
            if stop > start:
                reached[partition] = stop
                events += self._events(partition, start, stop, reached)
        return reached, events

    def missed(self, after: Offsets, up_to: Offsets) -> Iterator[Event]:
        reached = dict(after)
        for partition, end in up_to.items():
            for start in range(reached.get(partition, 0), end, _ROWS_A_READ):
                stop = min(end, start + _ROWS_A_READ)
                reached[partition] = stop
                yield from self._events(partition, start, stop, reached)

    def _events(self, partition: int, start: int, stop: int, reached: Offsets) -> list[Event]:
        """One event for what one read gave, if that is anything: control batches take offsets too."""
        batches = list(self._log.read(self.topic, partition, start, stop))
        if not any(batch.num_rows for batch in batches):
            return []
        rows, place = pa.Table.from_batches(batches), self.id(reached)
        return [Event(place, rows, self.encode(place, rows))]

    def is_behind(self, position: Offsets, wanted: Offsets) -> bool:
        return any(position.get(partition, 0) < offset for partition, offset in wanted.items())

    def id(self, position: Offsets) -> str:
        return ",".join(f"{partition}:{offset}" for partition, offset in sorted(position.items()))

    def encode(self, id: str, rows: pa.Table) -> bytes:
        return event("rows", f'{{"topic":"{self.topic}","rows":{rows_json(rows)}}}', id)


def start_of(log: Log, topic: str, resume: Offsets | None, last: int) -> dict[int, int]:
    """Where to begin: behind what was got, or so many rows back in each partition. What is not there any more, or not yet, is refused."""
    earliest, end = log.start_offsets(topic), log.end_offsets(topic)
    if resume is None:
        return {partition: max(earliest[partition], stop - last) for partition, stop in end.items()}
    for partition, offset in resume.items():
        if not earliest.get(partition, 0) <= offset <= end.get(partition, -1):
            raise OffsetOutOfRange(topic, partition, offset, earliest.get(partition, 0), end.get(partition, 0))
    return {partition: resume.get(partition, earliest[partition]) for partition in end}


async def tail(log: Log, hub: Hub, topic: str, after: Offsets, select: Select | None) -> AsyncGenerator[bytes, None]:
    channel = await hub.channel(("topic", topic), lambda: TopicSource(log, topic))
    with hub.followed(channel):
        async for data in hub.follow(channel, after, select):
            yield data
