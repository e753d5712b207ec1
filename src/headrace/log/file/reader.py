"""Reading rows: from offsets to segments to frames to Arrow batches. Bounded memory, whatever a
topic's size.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import pyarrow as pa

from headrace.columnar.columns import OFFSET_COLUMN, SYSTEM_FIELDS, TIMESTAMP_COLUMN, TIMESTAMP_TYPE
from headrace.durations import from_us
from headrace.errors import (
    BadPartition,
    CorruptBatch,
    CorruptionError,
    InputError,
    OffsetOutOfRange,
    UnknownColumn,
)
from headrace.log.api import Batches
from headrace.log.file.segment import (
    CONTROL,
    SPARSE,
    FrameHeader,
    Segment,
    SegmentPlace,
    body_is_sound,
    decode_batch,
    segment_name,
    segment_names,
)
from headrace.log.file.state import PartitionState, TopicState
from headrace.log.file.store import Store
from headrace.log.values import Control, TopicInfo, readable_schema

logger = logging.getLogger("headrace.log")
_MAX_OPEN_SEGMENTS = 64
_COALESCED_BYTES = 1 << 20
"""Small frames are joined into batches of about this size."""


@dataclass(slots=True)
class Piece:
    """A sound frame with its place in the partition."""

    segment: Segment
    header: FrameHeader
    body: memoryview
    first: int

    @property
    def stop(self) -> int:
        return self.first + self.header.span

    @property
    def time_us(self) -> int:
        return self.header.first_us or self.segment.place.time_us


class SegmentCache:
    """Open segments, a bounded number of them. A file that was removed stays readable for whoever
    has it open; one that was replaced, until it is asked for again.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._guard = Lock()
        self._open: OrderedDict[tuple[str, int, str], Segment] = OrderedDict()
        self._listed: dict[tuple[str, int], tuple[tuple[int, bool], list[str]]] = {}

    def names(self, directory: str, partition: int, state: PartitionState) -> list[str]:
        """A partition's segments in order. Looked up again when the one being written is another,
        for only then can there be new ones.
        """
        tag = (state.segment, state.position > 0)
        known = self._listed.get((directory, partition))
        if known is None or known[0] != tag:
            known = self._listed[directory, partition] = (
                tag,
                segment_names(
                    self.store.partition_directory(directory, partition), tag[0], begun=tag[1]
                ),
            )
        return known[1]

    def segment(self, directory: str, partition: int, name: str) -> Segment:
        key = (directory, partition, name)
        with self._guard:
            known = self._open.get(key)
            if known is None or known.is_replaced:
                known = self._open[key] = Segment(
                    self.store.disk, self.store.partition_directory(directory, partition) / name
                )
            self._open.move_to_end(key)
            if len(self._open) > _MAX_OPEN_SEGMENTS:
                self._open.popitem(last=False)
        return known

    def close(self) -> None:
        with self._guard:
            self._open.clear()
            self._listed.clear()

    def forget(self, directory: str, partition: int) -> None:
        """Segments were replaced or removed."""
        with self._guard:
            self._listed.pop((directory, partition), None)
            for key in [key for key in self._open if key[:2] == (directory, partition)]:
                del self._open[key]


class PartitionReader:
    """Reads one partition as of a state: offsets from `start` to `end` exist, except those that
    compaction removed.
    """

    def __init__(self, cache: SegmentCache, topic: TopicState, number: int) -> None:
        if not 0 <= number < len(topic.partitions):
            raise BadPartition(
                f"The topic {topic.name!r} has no partition {number}.",
                fix=f"name one from 0 to {len(topic.partitions) - 1}.",
            )
        self.cache, self.topic, self.number = cache, topic, number
        self.state = topic.partitions[number]

    def check_start(self, offset: int) -> None:
        if not self.state.start <= offset <= self.state.end:
            raise OffsetOutOfRange(
                self.topic.name, self.number, offset, self.state.start, self.state.end
            )

    def pieces(self, start: int, stop: int, *, on_corrupt: str) -> Iterator[Piece]:
        """Frames that have offsets from `start` to `stop`. Damage is put into quarantine, then
        raised or stepped over.
        """
        offset = start
        while offset < stop:
            place, segment_stop = self._place_of(offset)
            if place is None:
                self._check_not_retired(offset)
                self._damaged(offset, segment_stop, "", 0, "its segment is missing", on_corrupt)
            else:
                yield from self._pieces_of(place, offset, min(stop, segment_stop), on_corrupt)
            offset = max(segment_stop, offset + 1)

    def _names(self) -> list[str]:
        return self.cache.names(self.topic.directory, self.number, self.state)

    def _place_of(self, offset: int) -> tuple[SegmentPlace | None, int]:
        """The segment that has an offset, and the offset at which the next one begins."""
        if (
            self.state.position and offset >= self.state.segment
        ):  # the newest rows: no need to list the others
            return (
                SegmentPlace(segment_name(self.state.segment), self.state.segment),
                self.state.end,
            )
        names = self._names()
        at = (
            bisect_right(names, f"{offset:020d}/") - 1
        )  # a slash sorts behind the dot that follows the base
        following = (
            SegmentPlace.parse(names[at + 1]).base if at + 1 < len(names) else self.state.end
        )
        return SegmentPlace.parse(names[at]) if at >= 0 else None, min(following, self.state.end)

    def _check_not_retired(self, offset: int) -> None:
        """Whether retention has overtaken this reader since it began."""
        start = self.cache.store.view().topic(self.topic.name).partitions[self.number].start
        if start > offset:
            raise OffsetOutOfRange(
                self.topic.name, self.number, offset, start, self.state.end
            ) from None

    def _segment(self, place: SegmentPlace) -> Segment:
        """Open a segment. If retention removed it under our eyes, say so."""
        try:
            return self.cache.segment(self.topic.directory, self.number, place.name)
        except FileNotFoundError:
            self.cache.forget(self.topic.directory, self.number)
            self._check_not_retired(place.base)
            raise CorruptionError(
                f"The segment {place.name} of {self.topic.name}[{self.number}] is missing.",
                fix="restore it from a backup.",
            ) from None

    def _limit(self, segment: Segment) -> tuple[int, bool]:
        """Up to which byte a segment may be read, and whether it is sealed."""
        if segment.place.base == self.state.segment and not segment.place.commit:
            return self.state.position, False
        return segment.file.size(), True

    def _pieces_of(
        self, place: SegmentPlace, start: int, stop: int, on_corrupt: str
    ) -> Iterator[Piece]:
        path = self.cache.store.partition_directory(self.topic.directory, self.number) / place.name
        try:
            segment = self._segment(place)
        except CorruptionError as error:
            self._damaged(start, stop, str(path), 0, error.message, on_corrupt)
            return
        limit, sealed = self._limit(segment)
        expected, broken_at, why = start, -1, ""
        for position, header, body in segment.frames(start - place.base, limit, sealed=sealed):
            if header is None:
                broken_at, why = position, "there is no batch where one should be"
                continue
            first = place.base + header.relative
            if first + header.span <= start:
                continue
            if first >= stop:
                break
            if first > expected and (broken_at >= 0 or not segment.may_have_gaps):
                self._damaged(
                    expected,
                    first,
                    str(path),
                    max(broken_at, 0),
                    why or "it is not there",
                    on_corrupt,
                )
            broken_at = -1
            if body_is_sound(header, body):
                yield Piece(segment, header, body, first)
            else:
                self._damaged(
                    first,
                    first + header.span,
                    str(path),
                    position,
                    "its checksum does not fit",
                    on_corrupt,
                )
            expected = first + header.span
        if expected < stop and (broken_at >= 0 or not segment.may_have_gaps or segment.is_cut):
            self._damaged(
                expected,
                stop,
                str(path),
                max(broken_at, 0),
                why or "the file is too short",
                on_corrupt,
            )

    def _damaged(
        self, first: int, stop: int, file: str, position: int, why: str, on_corrupt: str
    ) -> None:
        quarantine(self.cache.store, self.topic.name, self.number, first, stop, file, position, why)
        error = CorruptBatch(
            topic=self.topic.name,
            partition=self.number,
            first=first,
            stop=stop,
            file=file,
            position=position,
            why=why,
        )
        if on_corrupt == "raise":
            raise error
        logger.error("Skipped: %s", error.message)

    def controls(self, start: int, stop: int) -> Iterator[Control]:
        for piece in self.pieces(start, stop, on_corrupt="raise"):
            if piece.header.kind == CONTROL and start <= piece.first < stop:
                yield Control(self.number, piece.first, from_us(piece.time_us), bytes(piece.body))

    def first_since(self, time_us: int) -> int:
        """The first offset appended at or after a time; the end, if there is none."""
        names = self._names()
        first_kept = max(0, bisect_right(names, f"{self.state.start:020d}/") - 1)
        low, high = first_kept, bisect_right(names, f"{max(0, self.state.end - 1):020d}/")
        while low < high:  # the last segment that begins before the time
            middle = (low + high) // 2
            first = self._time_at_start(SegmentPlace.parse(names[middle]))
            low, high = (
                (middle + 1, high) if first is not None and first < time_us else (low, middle)
            )
        for name in names[max(first_kept, low - 1) :]:
            place = SegmentPlace.parse(name)
            segment = self._segment(place)
            limit, sealed = self._limit(segment)
            relative = segment.index(limit, sealed=sealed).first_since(time_us)
            if relative is not None:
                return max(self.state.start, place.base + relative)
        return self.state.end

    def _time_at_start(self, place: SegmentPlace) -> int | None:
        if place.time_us:
            return place.time_us
        segment = self._segment(place)
        limit, sealed = self._limit(segment)
        return segment.index(limit, sealed=sealed).time_of(0)

    def time_of(self, offset: int) -> int | None:
        """When the row at an offset was appended."""
        place, _ = self._place_of(offset)
        if place is None or offset >= self.state.end:
            return None
        segment = self._segment(place)
        limit, sealed = self._limit(segment)
        return segment.index(limit, sealed=sealed).time_of(offset - place.base)


def quarantine(
    store: Store,
    topic: str,
    partition: int,
    first: int,
    stop: int,
    file: str,
    position: int,
    why: str,
) -> None:
    """Leave a note about damaged bytes, and a copy of them, for a person to look at. Best effort:
    the disk may be read-only.
    """
    directory = store.root / "quarantine"
    name = f"{topic}-{partition}-{first}"
    try:
        store.disk.make_directory(directory)
        note = {
            "topic": topic,
            "partition": partition,
            "first": first,
            "stop": stop,
            "file": file,
            "position": position,
            "why": why,
        }
        if not (directory / f"{name}.json").exists():
            if file:
                with open(file, "rb") as source:
                    source.seek(position)
                    (directory / f"{name}.bytes").write_bytes(source.read(64 << 20))
            (directory / f"{name}.json").write_text(json.dumps(note) + "\n")
    except OSError as error:
        logger.warning("Could not put %s into quarantine: %s", name, error)


class FileBatches(Batches):
    """Rows of one or more partitions, as Arrow batches with the system's columns behind the
    topic's.
    """

    def __init__(
        self,
        info: TopicInfo,
        ranges: Sequence[tuple[PartitionReader, int, int]],
        *,
        columns: Sequence[str] | None = None,
        headers: bool = False,
        on_corrupt: str = "raise",
    ) -> None:
        if on_corrupt not in {"raise", "skip"}:
            raise InputError(f"on_corrupt is {on_corrupt!r}.", fix="use 'raise' or 'skip'.")
        self.ranges, self.on_corrupt = ranges, on_corrupt
        self._full = readable_schema(info, headers=headers)
        self._names = list(columns) if columns is not None else list(self._full.names)
        for name in self._names:
            if name not in self._full.names:
                raise UnknownColumn(name, self._full.names, where=f"The topic {info.name!r}")
        self.schema = pa.schema([self._full.field(name) for name in self._names])

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for reader, start, stop in self.ranges:
            waiting: list[pa.RecordBatch] = []
            waiting_bytes = 0
            for piece in reader.pieces(start, stop, on_corrupt=self.on_corrupt):
                if piece.header.kind == CONTROL:
                    continue
                batch = self._rows(piece, reader.number, start, stop)
                if batch.num_rows:
                    waiting.append(batch)
                    waiting_bytes += piece.header.body_bytes
                if waiting_bytes >= _COALESCED_BYTES:
                    yield _joined(waiting)
                    waiting, waiting_bytes = [], 0
            if waiting:
                yield _joined(waiting)

    def _rows(self, piece: Piece, partition: int, start: int, stop: int) -> pa.RecordBatch:
        stored = decode_batch(piece.header, piece.body, piece.segment.header.schema)
        count = stored.num_rows
        system = _system_columns(stored, piece, partition)
        arrays = [_column(stored, system, self._full.field(name), count) for name in self._names]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        if piece.first >= start and piece.stop <= stop:
            return batch
        offsets = system[OFFSET_COLUMN].to_numpy(zero_copy_only=False)
        low, high = np.searchsorted(offsets, [start, stop])
        return batch.slice(int(low), int(high - low))


def _system_columns(stored: pa.RecordBatch, piece: Piece, partition: int) -> dict[str, pa.Array]:
    count = stored.num_rows
    columns = {SYSTEM_FIELDS[0].name: pa.array(np.full(count, partition, np.int32))}
    if piece.header.flags & SPARSE:
        columns[OFFSET_COLUMN] = stored.column(OFFSET_COLUMN)
        columns[TIMESTAMP_COLUMN] = stored.column(TIMESTAMP_COLUMN)
    else:
        columns[OFFSET_COLUMN] = pa.array(
            np.arange(piece.first, piece.first + count, dtype=np.int64)
        )
        columns[TIMESTAMP_COLUMN] = pa.array(np.full(count, piece.time_us, np.int64)).cast(
            TIMESTAMP_TYPE
        )
    return columns


def _column(
    stored: pa.RecordBatch, system: dict[str, pa.Array], field: pa.Field, count: int
) -> pa.Array:
    """A column as stored; null where it was added to the topic later."""
    if field.name in system:
        return system[field.name]
    at = stored.schema.get_field_index(field.name)
    return stored.column(at) if at >= 0 else pa.nulls(count, field.type)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
