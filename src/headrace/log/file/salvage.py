"""Salvage: when records of the journal rotted, the segments still know some of what they said.

A segment's header has its topic's settings, and each frame the commit that wrote it. So a topic whose definition was lost is found again, and
so are rows that no record speaks of any more. Used by replicas when they step over damage, and by writers before they append behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import CorruptionError
from headrace.log.file.disk import Disk, DiskFile
from headrace.log.file.frame import body_is_sound
from headrace.log.file.journal import COMMIT, encode_record
from headrace.log.file.segment import SUFFIX, SegmentPlace, read_frames, read_segment_header, segment_name
from headrace.log.file.state import PartitionState

if TYPE_CHECKING:
    from headrace.log.file.replica import Replica
    from headrace.log.file.state import Operation, State, TopicState
    from headrace.log.file.store import Store

logger = logging.getLogger("headrace.log")


class LostCommits:
    """The numbers of commits whose records are gone: in the gaps that damage left, and behind the last record if that was damaged."""

    def __init__(self) -> None:
        self._gaps: list[range] = []
        self._from: int | None = None

    def add(self, first: int, stop: int) -> None:
        self._gaps.append(range(first, stop))
        self._from = None

    def add_rest(self, first: int) -> None:
        self._from = first

    def __contains__(self, commit: int) -> bool:
        return any(commit in gap for gap in self._gaps) or (self._from is not None and commit >= self._from)


def restoring(disk: Disk, root: Path, state: State, name: str, number: int, commit: int) -> Operation | None:
    """The operation that defines a topic again which a record of some commit speaks of; None if nothing is left of it."""
    known = state.topics.get(name)
    directories = [root / "topics" / known.directory] if known else _candidates(root, name, commit)
    for directory in directories:
        settings = known.settings if known else _settings(disk, directory)
        if settings is not None:
            return _restoring(name, settings, directory, number)
    return None


def _restoring(name: str, settings: dict[str, Any], directory: Path, number: int = 0) -> Operation:
    logger.error("The definition of the topic %r was lost; it is taken from its segments. Check its settings.", name)
    settings = settings | {"partitions": max(settings["partitions"], number + 1)}
    return ["restore", name, settings, directory.name, [_first_base(directory / str(n)) for n in range(settings["partitions"])]]


def _candidates(root: Path, name: str, commit: int) -> list[Path]:
    """Directories of topics of that name that were there at a commit, newest first."""
    found = {int(path.name.rpartition("~")[2]): path for path in (root / "topics").glob(f"{name}~*")}
    return [found[created] for created in sorted(found, reverse=True) if created < commit]


def _settings(disk: Disk, directory: Path) -> dict[str, Any] | None:
    for path in sorted(directory.glob(f"*/*{SUFFIX}"), reverse=True):
        file = disk.open(path, write=False)
        try:
            return read_segment_header(file).settings
        except CorruptionError:
            continue
        finally:
            file.close()
    return None


def _first_base(directory: Path) -> int:
    return min((int(path.name[:20]) for path in directory.glob(f"*{SUFFIX}")), default=0)


def reconcile(store: Store, replica: Replica) -> None:
    """Before anything is written behind damage: find topics and rows of lost commits, and say in the journal that they are there."""
    operations = list(_lost_topics(store, replica))
    replica.state.apply(replica.state.commit, replica.state.time_us, operations)
    for topic in replica.state.topics.values():
        for number, partition in enumerate(topic.partitions):
            operations += _lost_rows(store, topic, number, partition, replica.lost)
    replica.damage.clear()
    if operations:
        logger.error("%d segments or topics were found behind the journal's damage and kept.", len(operations))
        append_record(store, replica, operations)


def _lost_topics(store: Store, replica: Replica) -> Iterator[Operation]:
    for directory in sorted((store.root / "topics").glob("*~*")):
        name, _, created = directory.name.rpartition("~")
        if name not in replica.state.topics and int(created) in replica.lost:
            settings = _settings(store.disk, directory)
            if settings is not None:
                yield _restoring(name, settings, directory)


def _lost_rows(store: Store, topic: TopicState, number: int, partition: PartitionState, lost: LostCommits) -> Iterator[Operation]:
    segment, position, end = partition.segment, partition.position, partition.end
    if position:
        span, size = _sound_rows(store, store.segment_path(topic.directory, number, segment), position, end - segment, lost)
        if span:
            yield ["append", topic.name, number, end, span, segment, position, size - position, 0]
            end += span
    while True:
        place = _segment_at(store.partition_directory(topic.directory, number), end)
        if place is None or (place.commit and place.commit not in lost):
            return
        path = store.partition_directory(topic.directory, number) / place.name
        span, size = _sound_rows(store, path, 0, 0, None if place.commit else lost)
        if not span:
            return
        if place.commit:
            yield ["adopt", topic.name, number, end, span, "", place.name]
        else:
            yield ["append", topic.name, number, end, span, end, 0, size, 0]
        end += span


def _segment_at(directory: Path, base: int) -> SegmentPlace | None:
    """The segment that begins at an offset; one that was staged as a whole is there only because its commit was durable."""
    names = sorted(path.name for path in directory.glob(f"{base:020d}.*{SUFFIX}"))
    plain = directory / segment_name(base)
    return SegmentPlace.parse(names[0] if names else plain.name) if names or plain.exists() else None


def _sound_rows(store: Store, path: Path, start: int, relative: int, lost: LostCommits | None) -> tuple[int, int]:
    """How many offsets of whole, sound frames of lost commits (of any, if None) lie from a place on, and where they end. Synced."""
    try:
        file: DiskFile = store.disk.open(path)
    except FileNotFoundError:
        return 0, start
    try:
        end = start or read_segment_header(file).size
        expected = relative
        for position, header, body in read_frames(file, end, file.size()):
            if header is None or header.relative != expected or (lost is not None and header.commit not in lost) or not body_is_sound(header, body):
                break
            expected += header.span
            end = position + header.frame_bytes
        file.sync()
        return expected - relative, end
    except CorruptionError:
        return 0, start
    finally:
        file.close()


def append_record(store: Store, replica: Replica, operations: list[Operation]) -> None:
    """Write and sync one record outside the committer, under the log's lock."""
    state = replica.state
    commit = state.commit + 1
    record = encode_record(replica.lsn, COMMIT, commit, store.marker.proven(), {"t": state.time_us, "ops": operations})
    journal = replica.journal.file_at(replica.base)
    end = journal.write(record, replica.lsn - replica.base)
    journal.sync()
    state.apply(commit, state.time_us, operations)
    replica.lsn = replica.base + end
