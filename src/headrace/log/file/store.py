"""The store: a log's directory opened by one process, with its lock, journal, durable marker,
replicas and segment files.

    headrace.json        that this directory is a log, and its format
    journal/             the commit journal, checkpoints, the lock, the durable marker
    topics/NAME~N/P/     the segments of partition P of topic NAME (created in commit N)
    staging/             rows of open transactions and tasks
    groups/              heartbeats of group members
    quarantine/          copies of damaged bytes, for a person to look at

A process has two replicas of the state. `view()` is what readers see: everything durable.
`locked()` gives the newest state, against which the next commit is decided.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Protocol

from headrace.errors import ConfigurationError, InputError, LogUnavailable, NewerFormat, ReadOnlyLog
from headrace.log.file.checkpoint import Replica, checkpoint_lsns
from headrace.log.file.commit_draft import Adoption, Seal, SegmentWrite
from headrace.log.file.disk import OPEN, PRIVATE, Disk, DiskFile
from headrace.log.file.journal import (
    FILE_HEADER_BYTES,
    JOURNAL_SUFFIX,
    DurableMark,
    DurableMarker,
    Journal,
    JournalRecord,
    MissingJournal,
)
from headrace.log.file.segment import list_stray_names, segment_name
from headrace.log.file.state import State

logger = logging.getLogger("headrace.log")

FORMAT = 1
MAX_CLOCK_ERROR_US = 5_000_000
"""By how much a process's clock may differ from that of the machine that keeps the files, and by
how much append times stand still rather than go back.
"""
_CLOCK_CHECK_S = 1.0
_MAX_OPEN_SEGMENTS = 256


class Recovery(Protocol):
    """The repair of a log's directory, implemented by the module `headrace.log.file.recovery`.

    The store is given it rather than importing it, since recovery itself works on a store.
    """

    def recover(self, store: Store) -> None:
        """Make the files agree with the journal after power loss."""

    def reconcile(self, store: Store, replica: Replica) -> None:
        """Restore what damaged journal records described, as far as the segments show it, and
        record it in the journal.
        """

    def salvage(self, store: Store, replica: Replica) -> None:
        """Restore it in memory only."""

    def check_copy(self, store: Store, replica: Replica) -> None:
        """Raise TornCopy if a copy lacks commits, or rows of commits."""


class Store:
    """A log's directory, opened by this process. A directory that cannot be written has no lock
    file.
    """

    def __init__(
        self,
        root: Path,
        recovery: Recovery,
        *,
        disk: Disk,
        durable: bool,
        lock_file: DiskFile | None,
        marker: DurableMarker,
    ) -> None:
        self.root = root
        self.disk = disk
        self.durable = durable
        self.writable = lock_file is not None
        self.marker = marker
        self.clock = LogClock(lock_file)
        self.accepts_torn_copy = False
        self.journal_directory = root / "journal"
        self._process = os.getpid()
        self._closed = False
        self._lock_file = lock_file
        # Excludes threads of this process. Never taken twice: releasing the file lock once would
        # release it altogether.
        self._lock_guard = Lock()
        self._view_guard = Lock()
        self._view: Replica | None = None
        self._view_journal = Journal(disk, self.journal_directory, write=False)
        self._newest: Replica | None = None
        self._newest_journal = Journal(disk, self.journal_directory, write=self.writable)
        self._segments: OrderedDict[tuple[str, int], tuple[int, DiskFile]] = OrderedDict()
        self._directories: set[Path] = set()  # known to be durable
        self._recovery = recovery

    @classmethod
    def open(
        cls,
        root: Path,
        recovery: Recovery,
        *,
        disk: Disk,
        create: bool,
        durability: str,
        mode: int = PRIVATE,
        accepts_torn_copy: bool = False,
    ) -> Store:
        """Open a log's directory, or create it with files of a mode, and recover it if that is
        needed.
        """
        writable = _open_directory(root, disk, create=create, mode=mode)
        journal = root / "journal"
        store = cls(
            root,
            recovery,
            disk=disk,
            durable=durability == "disk",
            lock_file=disk.open_lock(journal / "lock") if writable else None,
            marker=DurableMarker.open(disk, journal / "durable", write=writable),
        )
        store.accepts_torn_copy = accepts_torn_copy
        if writable and not store.marker.is_current(store.marker.read()):
            with store._lock_guard, store.lock_file().locked():
                if not store.marker.is_current(store.marker.read()):  # nobody else was faster
                    recovery.recover(store)
        if not writable and not accepts_torn_copy:
            store._check_unwritable_copy()
        return store

    def _check_unwritable_copy(self) -> None:
        """Raise TornCopy for a copy that cannot be repaired here, and lacks something."""
        mark = self.marker.read()
        is_backup = mark is None and (self.root / "backup.json").exists()
        if is_backup or (mark is not None and mark.inode != self.marker.inode):
            replica = Replica.open(self._view_journal, self.journal_directory)
            try:
                replica.advance(mark.lsn if mark else None, durable_lsn=mark.lsn if mark else 0)
            except MissingJournal as missing:
                if mark is not None:  # otherwise a backup was stopped before it made that file
                    replica.skip_missing(missing.base, mark.lsn)
            self._recovery.check_copy(self, replica)

    # The state

    def view(self) -> State:
        """The state as readers see it: everything durable, nothing else."""
        self.check_open()
        mark = self.marker.read() or self._restore_mark()
        limit = mark.lsn if mark else 0
        with self._view_guard:
            if self._view is None:
                self._view = Replica.open(self._view_journal, self.journal_directory)
            if self._view.lsn < limit:
                self._advance_view(self._view, limit)
            elif mark is None and not self.writable:
                self._view.advance()  # the mark cannot be restored: show whatever is sound
            if self._view.damage:
                self._repair_view(self._view)
            return self._view.state

    def _repair_view(self, view: Replica) -> None:
        """Show what damaged journal records described, as far as the segments show it. Whoever may
        write records that in the journal; whoever may not has it in memory only.
        """
        if not self.writable:
            self._recovery.salvage(self, view)
        elif self._repair():
            mark = self.marker.read()
            view.advance(mark.lsn if mark else None)
            view.damage.clear()

    def _repair(self) -> bool:
        """Repair the journal by bringing the newest state up to date, and publish its end. Returns
        False if somebody else is committing: that commit does so.
        """
        if not self._lock_guard.acquire(blocking=False):
            return False
        try:
            with self.lock_file().locked(wait=False) as is_ours:
                if not is_ours:
                    return False
                newest = self._newest_replica()
                newest.journal.file_at(newest.base).sync()
                self.marker.publish(newest.lsn)
        finally:
            self._lock_guard.release()
        return True

    def _restore_mark(self) -> DurableMark | None:
        """Replace a damaged durable mark: sync the journal and publish its end. If another thread
        is committing, its commit does so.
        """
        if self.writable:
            self._repair()
        return self.marker.read()

    @contextmanager
    def frozen_view(self) -> Iterator[State]:
        """The state as readers see it, which does not advance inside `with`: several topics as of
        one commit.
        """
        state = self.view()
        with self._view_guard:
            yield state

    def _advance_view(self, view: Replica, limit: int) -> None:
        for attempt in range(10):
            try:
                view.advance(limit, durable_lsn=limit)
            except MissingJournal as missing:
                # Deleted after a checkpoint since this process last read it, or lost.
                view.load()
                if view.base <= missing.base and attempt:
                    if self.writable:
                        self._repair()
                    elif max(view.journal.bases(), default=-1) < missing.base:
                        view.skip_missing(missing.base, limit)
                        return
            else:
                return
        raise LogUnavailable(
            f"The journal of {self.root} moves on faster than it can be read.", fix="try again."
        )

    @contextmanager
    def locked(self) -> Iterator[Replica]:
        """Hold the log's lock; yields the replica of the newest state, durable or not."""
        self.check_open()
        if os.getpid() != self._process:  # the file lock would be shared with the parent
            raise ConfigurationError(
                "This log was opened before the process forked.",
                fix="open it again in the child process.",
            )
        with self._lock_guard, self.lock_file().locked():
            yield self._newest_replica()

    def lock_file(self) -> DiskFile:
        """The file whose lock is the log's lock. Raises ReadOnlyLog."""
        if self._lock_file is None:
            raise ReadOnlyLog(
                f"The log in {self.root} cannot be written: the directory is read-only.",
                fix="check its permissions, or read only.",
            )
        return self._lock_file

    def _newest_replica(self) -> Replica:
        """The newest state, after reading what other processes have written. Requires the lock."""
        if self._newest is None:
            self._newest = Replica.open(self._newest_journal, self.journal_directory)
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
                torn = newest.advance(
                    durable_lsn=self.marker.durable_lsn(), on_record=self._finish_adoptions
                )
            except MissingJournal as missing:
                # Others have gone on and deleted the file, or its creator died before creating it.
                newest.load()
                if newest.base <= missing.base:
                    newest.journal.create_next(missing.base)
                continue
            if torn is not None:  # we hold the lock, so its writer has died
                newest.journal.file_at(newest.base).truncate(torn - newest.base)
            break
        if newest.damage:
            self._recovery.reconcile(self, newest)

    def _finish_adoptions(self, record: JournalRecord) -> None:
        """Move a record's staged files: its writer may have died before it did."""
        for operation in record.meta["ops"]:
            if operation[0] == "adopt" and self._newest is not None:
                _, topic_name, partition, _, _, file, name = operation
                topic = self._newest.state.topics.get(topic_name)
                if topic is not None:
                    self.adopt(
                        Adoption(
                            directory=topic.directory, partition=partition, file=file, name=name
                        )
                    )

    def newest_state(self) -> State | None:
        """The state object that the next commit will be decided against, not yet brought up to
        date; None before the first commit and after a failed one.
        """
        newest = self._newest
        return None if newest is None else newest.state

    def forget_newest(self) -> None:
        """Drop the newest state and the open segments: after a failed commit they may be ahead of
        the journal.
        """
        self._newest = None
        for _, file in self._segments.values():
            file.close()
        self._segments.clear()

    # Segments

    def partition_directory(self, directory: str, partition: int) -> Path:
        return self.root / "topics" / directory / str(partition)

    def segment_path(self, directory: str, partition: int, segment: int) -> Path:
        return self.partition_directory(directory, partition) / segment_name(segment)

    def write_segment(self, write: SegmentWrite) -> DiskFile:
        """Write bytes at a position of a segment; bytes of failed commits behind it are cut off."""
        file = self._segment_file(write.directory, write.partition, write.segment)
        if file.size() > write.position:
            file.truncate(write.position)
        file.write(write.buffers, write.position)
        return file

    def _segment_file(self, directory: str, partition: int, segment: int) -> DiskFile:
        opened = self._segments.get((directory, partition))
        if opened is not None and opened[0] == segment:
            self._segments.move_to_end((directory, partition))
            return opened[1]
        path = self.segment_path(directory, partition, segment)
        self.make_directory(path.parent)
        file = self.disk.open(path, create=True)
        self.disk.sync_directory(path.parent)
        # The file before is not closed here: the committer may still sync it.
        self._segments[directory, partition] = (segment, file)
        if len(self._segments) > _MAX_OPEN_SEGMENTS:
            self._segments.popitem(last=False)
        return file

    def make_directory(self, path: Path) -> None:
        """Create a directory below the root and make it durable. One that exists is synced too: its
        creator may have been killed before it synced the parent.
        """
        if path not in self._directories and path != self.root:
            self.make_directory(path.parent)
            self.disk.make_directory(path)
            self.disk.sync_directory(path.parent)
            self._directories.add(path)

    def seal(self, seal: Seal) -> None:
        """Cut a segment at its end, and remove segments that failed commits began behind it: their
        offsets are about to be used.
        """
        path = self.segment_path(seal.directory, seal.partition, seal.segment)
        if seal.size and path.exists():  # otherwise the commit is about to create it
            file = self.disk.open(path)
            if file.size() > seal.size:
                file.truncate(seal.size)
            file.close()
        self.remove_strays(seal.directory, seal.partition, seal.segment + (seal.size > 0))

    def remove_strays(
        self, directory: str, partition: int, first: int, stop: int | None = None
    ) -> None:
        """Unlink segments of failed commits whose base is in a range of offsets."""
        path = self.partition_directory(directory, partition)
        for name in list_stray_names(path, first, stop):
            self.disk.unlink(path / name)

    def adopt(self, adoption: Adoption) -> None:
        """Make a staged file a segment by moving it. Harmless if it was moved before, even if the
        segment has been removed since.
        """
        staged = self.root / "staging" / adoption.file
        if adoption.file and staged.exists():  # a salvaged segment was never moved again
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


# The clock


def now_us() -> int:
    """The current time in microseconds since 1970, by this process's clock."""
    return time.time_ns() // 1000


class LogClock:
    """The time by which rows are appended and expire: that of the machine that keeps the files, as
    its file system shows it. A process whose own clock is off by more than a few seconds goes by
    the file system's.
    """

    def __init__(self, file: DiskFile | None) -> None:
        self._file = file
        self._offset_us = 0
        self._checked_s = -math.inf
        self._wall_minus_monotonic_us = 0.0  # changes when the wall clock is set

    def now_us(self) -> int:
        """The current time in microseconds since 1970."""
        step_us = now_us() - time.monotonic() * 1e6 - self._wall_minus_monotonic_us
        is_due = time.monotonic() - self._checked_s > _CLOCK_CHECK_S
        if (is_due or abs(step_us) > MAX_CLOCK_ERROR_US) and self._file is not None:
            self._check(self._file.path)
        return now_us() + self._offset_us

    def _check(self, path: Path) -> None:
        self._checked_s = time.monotonic()
        self._wall_minus_monotonic_us = now_us() - self._checked_s * 1e6
        try:
            os.utime(path)
            offset_us = os.stat(path).st_mtime_ns // 1000 - now_us()
        except OSError:  # somebody else's file: our own clock must do
            return
        offset_us = 0 if abs(offset_us) < MAX_CLOCK_ERROR_US else offset_us
        if offset_us and not self._offset_us:
            logger.error(
                "The clock of this process is %.0f s %s that of the machine that keeps %s. Append"
                " times follow the machine.",
                abs(offset_us) / 1e6,
                "ahead of" if offset_us < 0 else "behind",
                path.parent.parent,
            )
        self._offset_us = offset_us


# The directory


_FIX_ABOUT = 'restore it; for this version it reads {"format": 1, "mode": "600"}.'


def _open_directory(root: Path, disk: Disk, *, create: bool, mode: int) -> bool:
    """Check that a directory is a log, or create one. Returns whether it can be written."""
    about = root / "headrace.json"
    try:
        if root.exists() and not root.is_dir():
            raise LogUnavailable(
                f"{root} is a file; a log is a directory.",
                fix="name a directory, such as file:data.",
            )
        if not about.exists():
            _check_creatable(root, create=create)
            disk.set_permissions(root if root.is_dir() else root.parent, mode)
            disk.make_directory(root / "journal")
            disk.sync_directory(root)
            disk.sync_directory(root.parent)
            Journal(disk, root / "journal", write=True).create_file(0)
            # Last, because this file makes the directory a log.
            content = {"format": FORMAT, "what": "Headrace log", "mode": f"{mode:o}"}
            disk.replace_file(about, [json.dumps(content).encode() + b"\n"])
        stored = json.loads(about.read_bytes())
        version = int(stored["format"])
        disk.set_permissions(root, int(stored.get("mode", f"{OPEN:o}"), 8))
    except (ValueError, KeyError, TypeError) as error:
        raise LogUnavailable(
            f"{about} is damaged: it does not say which format the log has.",
            fix=_FIX_ABOUT,
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


def _check_creatable(root: Path, *, create: bool) -> None:
    journal = root / "journal"
    has_records = bool(checkpoint_lsns(journal)) or any(
        path.stat().st_size > FILE_HEADER_BYTES for path in journal.glob(f"*{JOURNAL_SUFFIX}")
    )
    # Looked for again, since another process may have created the log meanwhile.
    if has_records and not (root / "headrace.json").exists():
        raise LogUnavailable(
            f"The log in {root} has lost its file headrace.json, which says its format.",
            fix=_FIX_ABOUT,
        )
    if not create:
        raise LogUnavailable(
            f"There is no log in {root}.",
            fix="check the address; `headrace topic create` creates a new log.",
        )
    if not root.parent.is_dir():
        raise LogUnavailable(
            f"The directory {root.parent} does not exist.",
            fix=f"create it (mkdir -p {root.parent}), or check the address.",
        )
    # Another process may be creating the log just now, or has left it unfinished.
    if root.is_dir() and not all(
        name in {"journal", "headrace.json"} or name.startswith(".headrace.json.")
        for name in os.listdir(root)
    ):
        raise LogUnavailable(
            f"{root} is a directory with other things in it, and no log.",
            fix="name an empty or new directory.",
        )
    if not os.access(root if root.is_dir() else root.parent, os.W_OK):
        raise LogUnavailable(
            f"{root} cannot be created: the directory is read-only.",
            fix="check permissions, or name another directory.",
        )
