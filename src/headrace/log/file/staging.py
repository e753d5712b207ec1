"""Staging: rows of open transactions and of Spark's tasks, on disk but not part of any topic yet.

A staging directory is named by the time up to which its owner may be believed alive; what is older
is swept. A staged file has a segment's format, so a large one becomes a segment by being moved.
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
    new_header,
    read_frames,
    read_segment_header,
)
from headrace.log.file.state import TopicState
from headrace.log.file.store import Store
from headrace.log.topic_config import check_name
from headrace.log.values import Staged

MAX_COPIED_BYTES = 1 << 20
"""A staged file up to this size is copied into the partition's segment; a larger one becomes a
segment of its own.
"""


class StagingWriter:
    """Writes frames of one topic into one file per partition."""

    def __init__(self, store: Store, topic: TopicState, directory: str) -> None:
        self.store, self.topic, self.directory = store, topic, directory
        self._files: dict[int, tuple[DiskFile, int, int]] = {}  # partition -> (file, bytes, rows)
        self._staged: Staged | None = None

    def write(self, rows: PreparedRows) -> None:
        for number, frames in rows.frames.items():
            file, position, count = self._files.get(number) or self._begin(number)
            buffers: list[Buffer] = []
            at = position
            for frame in frames:
                buffers += frame.buffers(count, at, commit=0, first_us=0, last_us=0)
                count += frame.span or frame.count
                at += frame.frame_bytes
            self._files[number] = (file, file.write(buffers, position), count)

    def _begin(self, number: int) -> tuple[DiskFile, int, int]:
        path = self.store.root / "staging" / self.directory
        self.store.make_directory(path.parent)
        self.store.disk.make_directory(path)
        file = self.store.disk.open(path / f"{self.topic.directory}.{number}.segment", create=True)
        header = new_header(
            self.topic.name, number, self.topic.info.arrow_schema, self.topic.settings
        ).encode()
        return file, file.write([header], 0), 0

    def finish(self) -> Staged:
        """Make it durable; returns what a transaction adopts. Can be repeated."""
        if self._staged is None:
            self._staged = self._finish()
        return self._staged

    def _finish(self) -> Staged:
        for file, _, _ in self._files.values():
            if self.store.durable:
                file.sync()
        if self._files and self.store.durable:
            self.store.disk.sync_directory(self.store.root / "staging" / self.directory)
        partitions = {
            number: (f"{self.directory}/{file.path.name}", rows)
            for number, (file, _, rows) in self._files.items()
        }
        for file, _, _ in self._files.values():
            file.close()
        return Staged(self.topic.name, partitions, sum(rows for _, rows in partitions.values()))

    def abandon(self) -> None:
        """Remove what was written: nobody will adopt it."""
        for file, _, _ in self._files.values():
            file.close()
        discard(
            self.store,
            [f"{self.directory}/{file.path.name}" for file, _, _ in self._files.values()],
        )


def staging_name(deadline_us: int, group: str | None = None) -> str:
    unique = os.urandom(6).hex()
    return (
        f"{deadline_us:017d}.{unique}"
        if group is None
        else f"{deadline_us:017d}.{check_name(group, what='group')}.{unique}"
    )


def staged_path(store: Store, file: str) -> Path:
    """Where a staged file is. TransactionTimedOut if it was swept."""
    path = store.root / "staging" / file
    if not path.exists():
        raise TransactionTimedOut(
            f"Rows that were staged in {path} are gone: their transaction took too long.",
            fix="run it again, with a longer timeout.",
        )
    return path


def load_if_small(store: Store, file: str, topic: TopicState) -> list[Frame] | None:
    """A small staged file's frames, to be copied; None if it is better moved as it is."""
    opened = store.disk.open(staged_path(store, file), write=False)
    try:
        header = read_segment_header(opened)
        size = opened.size()
        if size > MAX_COPIED_BYTES or not header.schema.equals(
            topic.info.arrow_schema, check_metadata=True
        ):
            return None
        frames = []
        for position, head, body in read_frames(opened, header.size, size):
            if head is None or not body_is_sound(head, body):
                raise TransactionTimedOut(
                    f"The staged file {opened.path} is damaged at byte {position}.",
                    fix="run the transaction again.",
                )
            frames.append(
                Frame(
                    head.kind,
                    head.flags,
                    head.count,
                    body,
                    head.body_crc,
                    0,
                    head.producer,
                    head.epoch,
                    head.sequence,
                )
            )
        return frames
    finally:
        opened.close()


def discard(store: Store, files: Iterable[str]) -> None:
    """Remove staged files, and their directories once empty."""
    directories = set()
    for file in files:
        path = store.root / "staging" / file
        store.disk.unlink(path)
        directories.add(path.parent)
    for directory in directories:
        if directory.is_dir() and not any(directory.iterdir()):
            store.disk.remove_directory(directory)


def discard_group(store: Store, group: str) -> None:
    """Remove what was staged under a group's name. Under the log's lock, since a commit may be
    adopting.
    """
    for directory in (store.root / "staging").glob("*.*"):
        if directory.name.split(".", 1)[1].rpartition(".")[0] == group:
            discard(store, [f"{directory.name}/{path.name}" for path in directory.iterdir()])


def sweep(store: Store, now_us: int) -> int:
    """Remove what dead owners left. Under the log's lock, since a commit may be adopting."""
    removed = 0
    for directory in (store.root / "staging").glob("*.*"):
        deadline = directory.name.split(".")[0]
        if deadline.isdigit() and int(deadline) < now_us:
            for path in directory.iterdir():
                store.disk.unlink(path)
            store.disk.remove_directory(directory)
            removed += 1
    return removed
