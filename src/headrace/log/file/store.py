"""The store: a log's directory opened by one process. Its lock, journal, marker, replicas and
segment files.

headrace.json        what this directory is, and its format
journal/             the commit journal, checkpoints, the lock, the durable marker
topics/NAME~N/P/     the segments of partition P of topic NAME (created in commit N)
staging/             rows of open transactions and tasks
groups/              heartbeats of group members
quarantine/          copies of damaged bytes, for a person to look at
"""

from __future__ import annotations

import json
import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Protocol

from headrace.errors import ConfigurationError, InputError, LogUnavailable, NewerFormat, ReadOnlyLog
from headrace.log.file.checkpoint import Replica
from headrace.log.file.commit_draft import Adoption, Seal, SegmentWrite
from headrace.log.file.disk import Disk, DiskFile
from headrace.log.file.journal import DurableMarker, Journal, Mark, MissingJournal, Record
from headrace.log.file.segment import segment_name, stray_names
from headrace.log.file.state import State

FORMAT = 1
_MAX_OPEN_SEGMENTS = 256


class Recovery(Protocol):
    """What repairs a log's directory (`headrace.log.file.recovery`)."""

    def recover(self, store: Store) -> None:
        """Make the files agree with the journal after power was lost."""

    def reconcile(self, store: Store, replica: Replica) -> None:
        """Restore what damaged records of the journal said, as far as the segments know it."""


class Store:
    """Everything below the API that touches the directory. `recovery` repairs it under the lock."""

    def __init__(
        self, root: Path, recovery: Recovery, *, disk: Disk, create: bool, durability: str
    ) -> None:
        self.root, self.disk, self.durable = root, disk, durability == "disk"
        self._process = os.getpid()
        self._closed = False
        self.writable = _prepare(root, disk, create=create)
        self.journal_directory = root / "journal"
        self._lock_file: DiskFile | None = (
            disk.open(self.journal_directory / "lock", create=True) if self.writable else None
        )
        self._lock_guard = (
            Lock()
        )  # never taken twice: the file's lock would be gone after the inner one
        self.marker = DurableMarker(disk, self.journal_directory / "durable", write=self.writable)
        self._view_guard = Lock()
        self._view: Replica | None = None
        self._view_journal = Journal(disk, self.journal_directory, write=False)
        self._newest: Replica | None = None
        self._newest_journal = Journal(disk, self.journal_directory, write=self.writable)
        self._segments: OrderedDict[tuple[str, int], tuple[int, DiskFile]] = OrderedDict()
        self._directories: set[Path] = set()  # known to be durable
        self._recovery = recovery
        self._recover_if_needed()

    # What is true

    def view(self) -> State:
        """The state as readers may see it: everything durable, nothing else."""
        self.check_open()
        mark = self.marker.read() or self._renewed_mark()
        limit = mark.lsn if mark else 0
        with self._view_guard:
            if self._view is None:
                self._view = Replica(self._view_journal, self.journal_directory)
            if self._view.lsn < limit:
                self._advance_view(self._view, limit)
            elif (
                mark is None and not self.writable
            ):  # nobody here can set it right: whatever is sound is shown
                self._view.advance()
            return self._view.state

    def _renewed_mark(self) -> Mark | None:
        """The marker was damaged: make everything durable, then say so. If somebody is committing,
        they will.
        """
        if self.writable and self._lock_guard.acquire(blocking=False):
            try:
                with self.lock_file().locked():
                    newest = self._caught_up()
                    newest.journal.file_at(newest.base).sync()
                    self.marker.publish(newest.lsn)
            finally:
                self._lock_guard.release()
        return self.marker.read()

    @contextmanager
    def still_view(self) -> Iterator[State]:
        """The same, and nobody moves it on meanwhile: several topics as of one commit."""
        state = self.view()
        with self._view_guard:
            yield state

    def _advance_view(self, view: Replica, limit: int) -> None:
        for _ in range(10):
            try:
                view.advance(limit, proven=limit)
            except (
                MissingJournal
            ):  # the journal was cut behind a checkpoint while this process slept
                view.load()
            else:
                return
        raise LogUnavailable(
            f"The journal of {self.root} moves on faster than it can be read.", fix="try again."
        )

    @contextmanager
    def locked(self) -> Iterator[Replica]:
        """Hold the log's lock; yields the newest state, durable or not."""
        self.check_open()
        if (
            os.getpid() != self._process
        ):  # the lock would be shared with the parent, and exclude nobody
            raise ConfigurationError(
                "This log was opened before the process forked.",
                fix="open it again in the child process.",
            )
        with self._lock_guard, self.lock_file().locked():
            yield self._caught_up()

    def lock_file(self) -> DiskFile:
        if self._lock_file is None:
            raise ReadOnlyLog(
                f"The log in {self.root} cannot be written: the directory is read-only.",
                fix="check its permissions, or read only.",
            )
        return self._lock_file

    def _caught_up(self) -> Replica:
        if self._newest is None:
            self._newest = Replica(self._newest_journal, self.journal_directory)
        newest = self._newest
        try:
            is_behind = newest.lsn < newest.journal.end_of(newest.base)
        except MissingJournal:
            is_behind = True
        if is_behind:
            self._catch_up(newest)
        return newest

    def _catch_up(self, newest: Replica) -> None:
        while True:
            try:
                torn = newest.advance(proven=self.marker.proven(), each=self._finish_adoptions)
            except MissingJournal as missing:
                self._open_missing(newest, missing.base)
                continue
            if torn is not None:  # we hold the lock, so nobody is writing it: its writer died
                newest.journal.file_at(newest.base).truncate(torn - newest.base)
            break
        if newest.damage:
            self._recovery.reconcile(self, newest)

    def _finish_adoptions(self, record: Record) -> None:
        """Whoever wrote a record may have died before it moved its staged files."""
        for operation in record.meta["ops"]:
            if operation[0] == "adopt" and self._newest is not None:
                _, topic, partition, _, _, staged, name = operation
                known = self._newest.state.topics.get(topic)
                if known is not None:
                    self.adopt(Adoption(known.directory, partition, staged, name))

    def _open_missing(self, newest: Replica, base: int) -> None:
        """The journal's next file is not there: others have gone on and cleaned up, or its maker
        died before it made it.
        """
        newest.load()
        if newest.base <= base:
            newest.journal.create_next(base)

    def newest_state(self) -> State | None:
        """The state that the next commit will be decided against, before it has caught up; another
        one if a commit failed, or if none was made yet.
        """
        newest = self._newest
        return None if newest is None else newest.state

    def forget_newest(self) -> None:
        """After a failed commit: what this process believes may be ahead of the journal."""
        self._newest = None
        for _, file in self._segments.values():
            file.close()
        self._segments.clear()

    # Recovery

    def _recover_if_needed(self) -> None:
        if not self.writable or self.marker.is_current(self.marker.read()):
            return
        with self._lock_guard, self.lock_file().locked():
            if not self.marker.is_current(self.marker.read()):
                self._recovery.recover(self)

    # Segments

    def partition_directory(self, directory: str, partition: int) -> Path:
        return self.root / "topics" / directory / str(partition)

    def segment_path(self, directory: str, partition: int, segment: int) -> Path:
        return self.partition_directory(directory, partition) / segment_name(segment)

    def write_segment(self, write: SegmentWrite) -> DiskFile:
        """Put bytes where a draft says. What lies behind the place is not true and is cut off."""
        file = self._segment_file(write.directory, write.partition, write.segment)
        if file.size() > write.position:
            file.truncate(write.position)
        file.write(write.buffers, write.position)
        return file

    def _segment_file(self, directory: str, partition: int, segment: int) -> DiskFile:
        known = self._segments.get((directory, partition))
        if known is not None and known[0] == segment:
            self._segments.move_to_end((directory, partition))
            return known[1]
        path = self.segment_path(directory, partition, segment)
        self.make_directory(path.parent)
        file = self.disk.open(path, create=True)
        self.disk.sync_directory(path.parent)
        self._segments[directory, partition] = (
            segment,
            file,
        )  # the old one is closed when nobody syncs it any more
        if len(self._segments) > _MAX_OPEN_SEGMENTS:
            self._segments.popitem(last=False)
        return file

    def make_directory(self, path: Path) -> None:
        """See that a directory below the root is there, and durable: who made it may have been
        killed before syncing the one above it.
        """
        if path not in self._directories and path != self.root:
            self.make_directory(path.parent)
            self.disk.make_directory(path)
            self.disk.sync_directory(path.parent)
            self._directories.add(path)

    def seal(self, seal: Seal) -> None:
        """Cut a segment at its true end, and remove files that failed commits began behind it:
        their place is about to be taken.
        """
        path = self.segment_path(seal.directory, seal.partition, seal.segment)
        if seal.size and path.exists():  # otherwise the same commit is about to write it
            file = self.disk.open(path)
            if file.size() > seal.size:
                file.truncate(seal.size)
            file.close()
        self.remove_strays(seal.directory, seal.partition, seal.segment + (seal.size > 0))

    def remove_strays(
        self, directory: str, partition: int, first: int, stop: int | None = None
    ) -> None:
        """Unlink segments that no commit speaks of."""
        path = self.partition_directory(directory, partition)
        for name in stray_names(path, first, stop):
            self.disk.unlink(path / name)

    def adopt(self, adoption: Adoption) -> None:
        """Make a staged file a segment by moving it. Can be repeated, also when the segment was
        removed since.
        """
        staged = self.root / "staging" / adoption.file
        if staged.exists():
            target = (
                self.partition_directory(adoption.directory, adoption.partition) / adoption.name
            )
            self.make_directory(target.parent)
            self.disk.rename(staged, target)

    def check_open(self) -> None:
        if self._closed:
            raise InputError(
                f"The log in {self.root} was closed.", fix="open it again with open_log(...)."
            )

    def close(self) -> None:
        self._closed = True
        if self._lock_file is not None:
            self.marker.sync()
        self.forget_newest()
        self._view_journal.close()
        self._newest_journal.close()
        self.marker.close()
        if self._lock_file is not None:
            self._lock_file.close()


def now_us() -> int:
    return time.time_ns() // 1000


def _prepare(root: Path, disk: Disk, *, create: bool) -> bool:
    """See that there is a log at a path, or make one. Returns whether it can be written."""
    about = root / "headrace.json"
    try:
        if root.exists() and not root.is_dir():
            raise LogUnavailable(
                f"{root} is a file; a log is a directory.",
                fix="name a directory, such as file:data.",
            )
        if not about.exists():
            _check_makeable(root, create=create)
            _make(root, about, disk)
        version = int(json.loads(about.read_bytes())["format"])
    except (ValueError, KeyError, TypeError) as error:
        raise LogUnavailable(
            f"{about} is damaged: it does not say which format the log has.",
            fix='restore it; for this version it reads {"format": 1}.',
        ) from error
    except PermissionError as error:
        raise LogUnavailable(
            f"{about} cannot be read: permission denied.",
            fix="check the directory's owner and permissions.",
        ) from error
    if version > FORMAT:
        raise NewerFormat(
            f"The log in {root} has format {version}; this Headrace knows {FORMAT}.",
            fix="upgrade Headrace.",
        )
    journal = root / "journal"
    files = [path for path in (journal / "lock", journal / "durable") if path.exists()]
    return all(os.access(path, os.W_OK) for path in (root, journal, *files))


def _check_makeable(root: Path, *, create: bool) -> None:
    if not create:
        raise LogUnavailable(
            f"There is no log in {root}.",
            fix="check the address; `headrace topic create` makes a new log.",
        )
    if not root.parent.is_dir():
        raise LogUnavailable(
            f"The directory {root.parent} does not exist.",
            fix=f"create it (mkdir -p {root.parent}), or check the address.",
        )
    if root.is_dir() and any(not _is_begun(name) for name in os.listdir(root)):
        raise LogUnavailable(
            f"{root} is a directory with other things in it, and no log.",
            fix="name an empty or new directory.",
        )
    if not os.access(root if root.is_dir() else root.parent, os.W_OK):
        raise LogUnavailable(
            f"{root} cannot be created: the directory is read-only.",
            fix="check permissions, or name another directory.",
        )


def _is_begun(name: str) -> bool:
    """Whether this is of a log that another process is making now, or that was left half made."""
    return name in {"journal", "headrace.json"} or name.startswith(".headrace.json.")


def _make(root: Path, about: Path, disk: Disk) -> None:
    """Lay out a new log. The file that says that it is one comes last."""
    disk.make_directory(root / "journal")
    disk.sync_directory(root)
    disk.sync_directory(root.parent)
    Journal(disk, root / "journal", write=True).create_file(0)
    disk.replace_file(
        about, [json.dumps({"format": FORMAT, "what": "Headrace log"}).encode() + b"\n"]
    )
