"""A commit draft: what one commit will do, decided under the log's lock against the newest state.

Requests of producers, transactions, consumers and queues fill a `CommitDraft`; the `Committer`
writes it. A draft's operations are applied to the state at once, so that the next draft of the same
group commit sees them; nothing is on disk yet.

Rows reach a draft as `PreparedRows`: frames that were encoded outside the lock, with the properties
of the topic they rely on. If the topic has changed since, `StaleTopic` sends them back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.errors import HeadraceError
from headrace.log.file.disk import Buffer
from headrace.log.file.segment import Frame, new_segment_header, segment_name
from headrace.log.file.state import Operation, State, TopicState
from headrace.log.values import AppendResult, OffsetRange

_CLOCK_ERROR_US = 5_000_000
"""A segment that was opened so much later than now was opened by a clock that was wrong."""


class StaleTopic(HeadraceError):
    """Rows were prepared for a topic that has changed since: they must be prepared again."""


@dataclass(slots=True)
class PreparedRows:
    """Frames for one topic by partition, encoded outside the lock, with the topic's directory,
    schema and number of partitions at that time.
    """

    topic: str
    directory: str
    ddl: str
    partition_count: int
    frames: dict[int, list[Frame]]

    @classmethod
    def of(cls, topic: TopicState, frames: dict[int, list[Frame]]) -> PreparedRows:
        """Frames that were encoded for a topic as it is in the given state."""
        return cls(
            topic=topic.name,
            directory=topic.directory,
            ddl=topic.settings["ddl"],
            partition_count=len(topic.partitions),
            frames=frames,
        )

    @property
    def size(self) -> int:
        return sum(frame.frame_bytes for frames in self.frames.values() for frame in frames)


@dataclass(slots=True)
class SegmentWrite:
    """Bytes to be written at a position of a segment's file."""

    directory: str
    partition: int
    segment: int
    position: int
    buffers: list[Buffer]
    size: int


@dataclass(slots=True)
class Seal:
    """A segment that will not be written any more and ends at `size`; 0 if it was never begun."""

    directory: str
    partition: int
    segment: int
    size: int


@dataclass(slots=True)
class Adoption:
    """A staged file that becomes the segment of the given name."""

    directory: str
    partition: int
    file: str
    name: str


@dataclass(slots=True)
class CommitDraft:
    """The operations, segment writes, seals and adoptions of one commit.

    With `inline`, the commit's rows also go into the journal and their segments are not synced.
    """

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
        """Add a journal operation, named after a method of `State`, and apply it to the state."""
        if not self.operations:
            self.commit = self.state.commit + 1
        self.operations.append(list(operation))
        self.state.apply(self.commit, self.time_us, [list(operation)])

    def result(self) -> AppendResult:
        """The offsets of all rows in the draft."""
        return AppendResult(self.offsets, self.commit)

    def check_fresh(self, rows: PreparedRows) -> None:
        """Raise StaleTopic if the topic has changed since rows were prepared for it.

        Must come before the draft's first operation, so that a refused commit has changed nothing.
        """
        topic = self.state.topic(rows.topic)
        if (
            topic.directory != rows.directory
            or topic.settings["ddl"] != rows.ddl
            or len(topic.partitions) != rows.partition_count
        ):
            raise StaleTopic(f"The topic {rows.topic!r} changed.")

    def append(self, rows: PreparedRows) -> None:
        """Append prepared rows to the open segments of their partitions."""
        topic = self.state.topic(rows.topic)
        for number, frames in rows.frames.items():
            self._append_frames(topic, number, frames)

    def _append_frames(self, topic: TopicState, number: int, frames: list[Frame]) -> None:
        size = sum(frame.frame_bytes for frame in frames)
        partition = topic.partitions[number]
        is_too_large = partition.position + size > topic.info.segment_bytes
        age_us = self.time_us - partition.opened_us
        is_too_old = age_us > topic.info.segment_us or age_us < -_CLOCK_ERROR_US
        if is_too_large or is_too_old:
            self.roll(topic, number)
            partition = topic.partitions[number]

        first = partition.end
        segment, position = partition.segment, partition.position
        buffers: list[Buffer] = []
        if not position:  # the first frames of a new segment, which is named by their offset
            segment = first
            header = new_segment_header(topic.name, number, topic.info.arrow_schema, topic.settings)
            buffers.append(header.encode())
        frame_position = position + sum(map(len, buffers))
        offset = first
        commit = self.commit or self.state.commit + 1
        for frame in frames:
            buffers += frame.buffers(
                offset - segment,
                frame_position,
                commit=commit,
                first_us=self.time_us,
                last_us=self.time_us,
            )
            offset += frame.span or frame.count
            frame_position += frame.frame_bytes
        total = frame_position - position
        self.writes.append(
            SegmentWrite(
                directory=topic.directory,
                partition=number,
                segment=segment,
                position=position,
                buffers=buffers,
                size=total,
            )
        )
        span, inline = offset - first, int(self.inline)
        self.do("append", topic.name, number, first, span, segment, position, total, inline)
        self._add_offsets(topic.name, number, first, offset)

    def roll(self, topic: TopicState, number: int) -> None:
        """Seal the partition's open segment, if any; the next append begins another one."""
        partition = topic.partitions[number]
        if partition.position:
            self.seals.append(
                Seal(
                    directory=topic.directory,
                    partition=number,
                    segment=partition.segment,
                    size=partition.position,
                )
            )
            self.do("roll", topic.name, number)

    def adopt(self, topic: TopicState, number: int, file: str, rows: int) -> None:
        """Make a staged file the partition's next segment, as it is."""
        self.roll(topic, number)
        first = topic.partitions[number].end
        self.seals.append(Seal(directory=topic.directory, partition=number, segment=first, size=0))
        name = segment_name(first, self.commit or self.state.commit + 1, self.time_us)
        self.do("adopt", topic.name, number, first, rows, file, name)
        self.adoptions.append(
            Adoption(directory=topic.directory, partition=number, file=file, name=name)
        )
        self._add_offsets(topic.name, number, first, first + rows)

    def _add_offsets(self, topic: str, number: int, start: int, stop: int) -> None:
        ranges = self.offsets.setdefault(topic, {})
        earlier = ranges.get(number)
        ranges[number] = OffsetRange(earlier.start if earlier else start, stop)
