"""Staging: rows of open transactions and of Spark's tasks, on disk but not part of any topic yet.

    staging/DEADLINE_US.[GROUP.]RANDOM/TOPIC~N.PARTITION.segment

A staged file has a segment's format, so a large one becomes a segment by being moved; a small one
is copied into the partition's open segment. A directory's name has the time after which its owner
counts as dead; maintenance then removes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from headrace.errors import TransactionTimedOut
from headrace.log.file.commit_draft import PreparedRows
from headrace.log.file.disk import Buffer, DiskFile
from headrace.log.file.segment import (
    Frame,
    body_is_sound,
    new_segment_header,
    read_frames,
    read_segment_header,
)
from headrace.log.file.state import TopicState
from headrace.log.file.store import Store
from headrace.log.values import Staged
from headrace.names import check_name

MAX_COPIED_BYTES = 1 << 20
"""A staged file up to this size is copied into the partition's segment; a larger one becomes a
segment of its own.
"""


class StagingWriter:
    """Writes frames of one topic into one staged file per partition."""

    def __init__(self, store: Store, topic: TopicState, directory: str) -> None:
        self.store = store
        self.topic = topic
        self.directory = directory
        self._files: dict[int, tuple[DiskFile, int, int]] = {}  # partition -> (file, bytes, rows)
        self._staged: Staged | None = None

    def write(self, rows: PreparedRows) -> None:
        for number, frames in rows.frames.items():
            file, position, count = self._files.get(number) or self._create_file(number)
            buffers: list[Buffer] = []
            frame_position = position
            for frame in frames:
                buffers += frame.buffers(count, frame_position, commit=0, first_us=0, last_us=0)
                count += frame.span or frame.count
                frame_position += frame.frame_bytes
            self._files[number] = (file, file.write(buffers, position), count)

    def _create_file(self, number: int) -> tuple[DiskFile, int, int]:
        path = self.store.root / "staging" / self.directory
        self.store.make_directory(path.parent)
        self.store.disk.make_directory(path)
        file = self.store.disk.open(path / f"{self.topic.directory}.{number}.segment", create=True)
        header = new_segment_header(
            self.topic.name, number, self.topic.info.arrow_schema, self.topic.settings
        ).encode()
        return file, file.write([header], 0), 0

    def finish(self) -> Staged:
        """Make the files durable. Returns what a transaction adopts; the same if called again."""
        if self._staged is not None:
            return self._staged
        if self.store.durable:
            for file, _, _ in self._files.values():
                file.sync()
            if self._files:
                directory = staged_path(self.store, self.directory)
                self.store.disk.sync_directory(directory)
        partitions = {
            number: (f"{self.directory}/{file.path.name}", rows)
            for number, (file, _, rows) in self._files.items()
        }
        for file, _, _ in self._files.values():
            file.close()
        total = sum(rows for _, rows in partitions.values())
        self._staged = Staged(topic=self.topic.name, partitions=partitions, rows=total)
        return self._staged

    def abandon(self) -> None:
        """Remove what was written: nobody will adopt it."""
        files = [file for file, _, _ in self._files.values()]
        for file in files:
            file.close()
        discard(self.store, [f"{self.directory}/{file.path.name}" for file in files])


def staging_name(deadline_us: int, group: str | None = None) -> str:
    """The name of a new staging directory."""
    unique = os.urandom(6).hex()
    if group is None:
        return f"{deadline_us:017d}.{unique}"
    return f"{deadline_us:017d}.{check_name(group, what='group')}.{unique}"


def staged_path(store: Store, file: str) -> Path:
    """The path of a staged file. Raises TransactionTimedOut if maintenance has removed it."""
    path = store.root / "staging" / file
    if not path.exists():
        raise TransactionTimedOut(
            f"Rows that were staged in {path} are gone: their transaction took too long.",
            fix="run it again, with a longer timeout.",
        )
    return path


def load_small_file(store: Store, file: str, topic: TopicState) -> list[Frame] | None:
    """The frames of a small staged file, to be copied; None if the file must be moved, because it
    is large or the topic's schema has changed.
    """
    staged = store.disk.open(staged_path(store, file), write=False)
    try:
        segment_header = read_segment_header(staged)
        size = staged.size()
        schema = topic.info.arrow_schema
        if size > MAX_COPIED_BYTES or not segment_header.schema.equals(schema, check_metadata=True):
            return None
        frames = []
        for position, header, body in read_frames(staged, segment_header.size, size):
            if header is None or not body_is_sound(header, body):
                raise TransactionTimedOut(
                    f"The staged file {staged.path} is damaged at byte {position}.",
                    fix="run the transaction again.",
                )
            frames.append(
                Frame(
                    kind=header.kind,
                    flags=header.flags,
                    count=header.count,
                    span=header.span,
                    body=body,
                    body_crc=header.body_crc,
                    producer=header.producer,
                    epoch=header.epoch,
                    sequence=header.sequence,
                )
            )
        return frames
    finally:
        staged.close()


def discard(store: Store, files: Iterable[str]) -> None:
    """Remove staged files, and their directories once they are empty."""
    directories = set()
    for file in files:
        path = store.root / "staging" / file
        store.disk.unlink(path)
        directories.add(path.parent)
    for directory in directories:
        store.disk.remove_directory(directory)  # once it is empty


def discard_group(store: Store, group: str) -> None:
    """Remove everything staged under a group's name. Requires the log's lock, since a commit may be
    adopting it.
    """
    for directory in (store.root / "staging").glob("*.*"):
        if directory.name.split(".", 1)[1].rpartition(".")[0] == group:
            discard(store, [f"{directory.name}/{name}" for name in _files_in(directory)])


def remove_expired(store: Store, now_us: int) -> int:
    """Remove staging directories of dead owners. Requires the log's lock, since a commit may be
    adopting from them. Returns how many were removed.
    """
    removed = 0
    for directory in (store.root / "staging").glob("*.*"):
        deadline = directory.name.split(".")[0]
        if deadline.isdigit() and int(deadline) < now_us:
            for name in _files_in(directory):
                store.disk.unlink(directory / name)
            removed += store.disk.remove_directory(directory)
    return removed


def _files_in(directory: Path) -> list[str]:
    """The names of the files in a staging directory, whose owner may be removing it."""
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
