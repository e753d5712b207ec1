"""A draft: what one commit will do, decided under the log's lock against the newest state.

Its operations are applied to that state at once, so that the next draft of the same group sees
them; nothing is on disk yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.errors import HeadraceError
from headrace.log.file.disk import Buffer
from headrace.log.file.segment import Frame, new_header, segment_name
from headrace.log.file.state import Operation, PartitionState, State, TopicState
from headrace.log.values import AppendResult, OffsetRange


class StaleTopic(HeadraceError):
    """Rows were prepared for a topic that has changed meanwhile: prepare them again."""


@dataclass(slots=True)
class SegmentWrite:
    """Bytes for a place in a segment's file."""

    directory: str
    partition: int
    segment: int
    position: int
    buffers: list[Buffer]
    size: int


@dataclass(slots=True)
class Seal:
    """A segment that will not be written any more and ends here; of size 0, one that was never
    begun.
    """

    directory: str
    partition: int
    segment: int
    size: int


@dataclass(slots=True)
class Adoption:
    """A staged file that becomes a segment."""

    directory: str
    partition: int
    file: str
    name: str


@dataclass(slots=True)
class PreparedRows:
    """Frames for one topic, made outside the lock, with what they assume of the topic."""

    topic: str
    directory: str
    ddl: str
    partition_count: int
    frames: dict[int, list[Frame]]

    @property
    def size(self) -> int:
        return sum(frame.frame_bytes for frames in self.frames.values() for frame in frames)


@dataclass(slots=True)
class Draft:
    state: State
    time_us: int
    commit: int = 0
    operations: list[Operation] = field(default_factory=list)
    writes: list[SegmentWrite] = field(default_factory=list)
    seals: list[Seal] = field(default_factory=list)
    adoptions: list[Adoption] = field(default_factory=list)
    offsets: dict[str, dict[int, OffsetRange]] = field(default_factory=dict)
    inline: bool = True

    def do(self, *operation: object) -> None:
        """Add an operation, and apply it."""
        if not self.operations:
            self.commit = self.state.commit + 1
        self.operations.append(list(operation))
        self.state.apply(self.commit, self.time_us, [list(operation)])

    def position(self) -> AppendResult:
        return AppendResult(self.offsets, self.commit)

    def check_fresh(self, rows: PreparedRows) -> None:
        """Before anything else: rows must fit the topic as it is now."""
        topic = self.state.topic(rows.topic)
        if (
            topic.directory != rows.directory
            or topic.settings["ddl"] != rows.ddl
            or len(topic.partitions) != rows.partition_count
        ):
            raise StaleTopic(f"The topic {rows.topic!r} changed.")

    def append(self, rows: PreparedRows) -> None:
        topic = self.state.topic(rows.topic)
        for number, frames in rows.frames.items():
            self._append_frames(topic, number, frames)

    def _append_frames(self, topic: TopicState, number: int, frames: list[Frame]) -> None:
        size = sum(frame.frame_bytes for frame in frames)
        self._roll_if_due(topic, number, topic.partitions[number], size)
        partition = topic.partitions[number]
        first = partition.end
        segment, position = (
            (partition.segment, partition.position) if partition.position else (partition.end, 0)
        )
        buffers: list[Buffer] = []
        if not position:
            buffers.append(
                new_header(topic.name, number, topic.info.arrow_schema, topic.settings).encode()
            )
        total = size + sum(map(len, buffers))
        offset, commit, at = first, self.commit or self.state.commit + 1, position + total - size
        for frame in frames:
            buffers += frame.buffers(
                offset - segment, at, commit=commit, first_us=self.time_us, last_us=self.time_us
            )
            offset += frame.span or frame.count
            at += frame.frame_bytes
        self.writes.append(SegmentWrite(topic.directory, number, segment, position, buffers, total))
        self.do(
            "append",
            topic.name,
            number,
            first,
            offset - first,
            segment,
            position,
            total,
            int(self.inline),
        )
        self._add_offsets(topic.name, number, first, offset)

    def _roll_if_due(
        self, topic: TopicState, number: int, partition: PartitionState, size: int
    ) -> None:
        info = topic.info
        too_large = partition.position + size > info.segment_bytes
        too_old = self.time_us - partition.opened_us > info.segment_us
        if partition.position and (too_large or too_old):
            self.roll(topic, number)

    def roll(self, topic: TopicState, number: int) -> None:
        """End the segment being written; the next append begins another one."""
        partition = topic.partitions[number]
        if partition.position:
            self.seals.append(Seal(topic.directory, number, partition.segment, partition.position))
            self.do("roll", topic.name, number)

    def adopt(self, topic: TopicState, number: int, file: str, rows: int) -> None:
        """A staged file becomes the partition's next segment, as it is."""
        self.roll(topic, number)
        first = topic.partitions[number].end
        self.seals.append(Seal(topic.directory, number, first, 0))
        name = segment_name(first, self.commit or self.state.commit + 1, self.time_us)
        self.do("adopt", topic.name, number, first, rows, file, name)
        self.adoptions.append(Adoption(topic.directory, number, file, name))
        self._add_offsets(topic.name, number, first, first + rows)

    def _add_offsets(self, topic: str, number: int, start: int, stop: int) -> None:
        places = self.offsets.setdefault(topic, {})
        known = places.get(number)
        places[number] = OffsetRange(known.start if known else start, stop)
