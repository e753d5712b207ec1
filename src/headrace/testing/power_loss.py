"""Simulated power loss: a disk that records every change of a workload, and what may be left of
them after a power cut. Also disks that are slow or full.

For tests of the embedded log, this project's own and yours:

    disk = RecordingDisk(tmp_path / "before")
    log = FileLog.open(tmp_path / "before" / "log", disk=disk)
    ...                                                       # a workload
    disk.trace.cut_power(7, tmp_path / "after", mode="torn", chance=random.Random(1))
    log = FileLog.open(tmp_path / "after" / "log", disk=RebootedDisk())

What was synced survives. What was not is kept, dropped, torn or garbled, each write on its own. The
model is strict: a created, renamed or removed name is durable only when its directory was synced,
whatever was done to the file itself.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from threading import Lock, RLock
from typing import Any
from weakref import WeakSet

from headrace.log.file.disk import Buffer, Disk, DiskFile, to_disk_error

# Disks that were rebooted, are slow or are full


class _UnsyncedFile(DiskFile):
    def sync(self) -> None:
        """Do nothing: this disk never loses power."""


class RebootedDisk(Disk):
    """The disk after a reboot: it has another boot id, so that the log recovers. It does not sync,
    for speed.
    """

    file_type = _UnsyncedFile

    def __init__(self) -> None:
        self._boot = os.urandom(16)

    def boot_id(self) -> bytes:
        return self._boot

    def sync_directory(self, path: Path) -> None:
        """Do nothing: this disk never loses power."""


class _SlowFile(DiskFile):
    disk: SlowDisk

    def sync(self) -> None:
        with self.disk.busy():
            super().sync()


class _SyncDevice:
    """The device: one sync at a time, each of which takes `sync_s`."""

    def __init__(self, sync_s: float) -> None:
        self.sync_s, self._device, self._started = sync_s, Lock(), 0.0

    def __enter__(self) -> None:
        self._device.acquire()
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        time.sleep(max(0.0, self._started + self.sync_s - time.perf_counter()))
        self._device.release()


class SlowDisk(Disk):
    """A disk whose every sync takes `sync_s` seconds, one at a time."""

    file_type = _SlowFile

    def __init__(self, sync_s: float = 0.002) -> None:
        self._device = _SyncDevice(sync_s)

    def busy(self) -> _SyncDevice:
        return self._device

    def sync_directory(self, path: Path) -> None:
        with self.busy():
            super().sync_directory(path)


class _WrittenFile(DiskFile):
    """A file in which every byte goes through `write`."""

    def copy_from(self, original: DiskFile, start: int, stop: int) -> Iterator[int]:
        yield self.write([original.read(stop - start, start)], start)


class _FullFile(_WrittenFile):
    disk: FullDisk

    def write(self, buffers: Sequence[Buffer], position: int) -> int:
        data = b"".join(buffers)
        fits = self.disk.reserve(position + len(data) - self.size(), len(data))
        super().write([data[:fits]], position)
        if fits < len(data):
            raise to_disk_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), self.path)
        return position + len(data)

    def truncate(self, size: int) -> None:
        before = self.size()
        super().truncate(size)
        self.disk.room_bytes += max(0, before - size)


class FullDisk(Disk):
    """A disk with room for `room_bytes` more bytes: a write that does not fit is done in part, as
    on a real one.
    """

    file_type = _FullFile

    def __init__(self, room_bytes: int, *, name_bytes: int = 0) -> None:
        self.room_bytes, self.name_bytes = room_bytes, name_bytes

    def reserve(self, growth: int, size: int) -> int:
        """Use up room for a write of `size` bytes that makes a file grow by `growth`. Returns how
        many bytes of it fit.
        """
        missing = max(0, growth - self.room_bytes)
        self.room_bytes -= max(0, growth) - missing
        return max(0, size - missing)

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> DiskFile:
        if create and not path.exists():
            self._reserve_name(path)
        return super().open(path, create=create, write=write)

    def make_one_directory(self, path: Path) -> None:
        self._reserve_name(path)
        super().make_one_directory(path)

    def _reserve_name(self, path: Path) -> None:
        if self.reserve(self.name_bytes, self.name_bytes) < self.name_bytes:
            raise to_disk_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), path)


__all__ = [
    "MODES",
    "DiskChange",
    "FullDisk",
    "ProcessKilled",
    "RebootedDisk",
    "RecordingDisk",
    "SlowDisk",
    "Trace",
]

MODES = ("kept", "dropped", "torn", "garbled", "mixed")
"""What becomes of changes that were not synced: all kept, all dropped, cut short, overwritten with
garbage, or any of these, each on its own.
"""
SECTOR_BYTES = 512
_NEVER = 1 << 62


class ProcessKilled(BaseException):
    """Raised by a disk whose process was killed. Not an Exception: nothing may handle it."""


@dataclass(frozen=True, slots=True)
class DiskChange:
    """One change that a workload made to its disk. Paths are relative to the recorded directory; a
    node identifies a file whatever its name.
    """

    kind: str  # create, write, truncate, sync, mkdir, rename, unlink, rmdir, sync-directory
    path: str
    node: int = -1
    position: int = 0
    data: bytes = b""
    target: str = ""


@dataclass
class Trace:
    """All changes of a workload, in order, from the directory's first content on. `marks` are the
    workload's own notes: (number of changes so far, note).
    """

    files: dict[str, int]
    contents: dict[int, bytes]
    directories: set[str]
    changes: list[DiskChange] = field(default_factory=list)
    marks: list[tuple[int, Any]] = field(default_factory=list)

    def marks_before(self, after: int) -> list[Any]:
        """The notes that were taken when at most `after` changes had been made."""
        return [note for index, note in self.marks if index <= after]

    def cut_power(self, after: int, into: Path, *, mode: str, chance: Random) -> None:
        """Write to a new directory what may be left if power is lost after the first `after`
        changes.

        Args:
            after: The number of changes before the power cut.
            into: The new directory.
            mode: What becomes of changes that were not synced; one of `MODES`.
            chance: Decides wherever there is a choice.
        """
        _DiskImage(self, mode, chance).build(after).save(into)


class _DiskImage:
    """The disk after a power cut: names, and the bytes of nodes."""

    def __init__(self, trace: Trace, mode: str, chance: Random) -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; use one of {MODES}.")
        self.trace, self.mode, self.chance = trace, mode, chance
        self.files, self.directories = dict(trace.files), set(trace.directories)
        self.contents = {node: bytearray(content) for node, content in trace.contents.items()}

    def build(self, after: int) -> _DiskImage:
        changes = self.trace.changes[:after]
        durable = _synced_at(changes)
        pending = [
            index
            for index, change in enumerate(changes)
            if durable[index] == _NEVER and change.kind not in _DATA
        ]
        names_kept_until = (
            self.chance.choice(pending) if pending and self.mode == "torn" else _NEVER
        )
        for index, change in enumerate(changes):
            survives = durable[index] < after
            if change.kind in _DATA:
                self._change_data(change, survives=survives)
            elif survives or self._keeps_name(index, names_kept_until):
                self._change_name(change, certain=survives)
        return self

    def _keeps_name(self, index: int, names_kept_until: int) -> bool:
        """Whether a change of a name survives that was not synced: up to some point, as the journal
        of a file system keeps them; or at random, as POSIX allows, in mode "mixed".
        """
        return {
            "dropped": False,
            "torn": index < names_kept_until,
            "mixed": self.chance.random() < 0.5,
        }.get(self.mode, True)

    def _change_name(self, change: DiskChange, *, certain: bool) -> None:
        """Apply a change if it is possible: names whose directory is lost are lost with it."""
        name = change.target or change.path
        if _parent(name) not in self.directories:
            return
        if change.kind == "create":
            self.files.setdefault(name, change.node)
        elif change.kind == "mkdir":
            self.directories.add(name)
        elif change.kind == "rename" and (certain or self.files.get(change.path) == change.node):
            self.files.pop(change.path, None)
            self.files[name] = change.node
        elif change.kind == "unlink":
            self.files.pop(name, None)
        elif change.kind == "rmdir" and not any(
            _parent(other) == name for other in (*self.files, *self.directories)
        ):
            self.directories.discard(name)

    def _change_data(self, change: DiskChange, *, survives: bool) -> None:
        content = self.contents.setdefault(change.node, bytearray())
        fate = "kept" if survives else self._fate()
        if fate == "dropped":
            return
        if change.kind == "truncate":
            del content[change.position :]
            content.extend(bytes(change.position - len(content)))
            return
        data, start = _FATES[fate](change, self.chance), change.position
        for at, piece in data:
            content.extend(bytes(max(0, start + at - len(content))))
            content[start + at : start + at + len(piece)] = piece

    def _fate(self) -> str:
        if self.mode == "mixed":
            return self.chance.choice(("kept", "dropped", *_BROKEN))
        if self.mode == "torn":
            return self.chance.choice(("prefix", "sectors"))
        return self.chance.choice(("garbled", "zeros")) if self.mode == "garbled" else self.mode

    def save(self, into: Path) -> None:
        into.mkdir(parents=True, exist_ok=True)
        for name in sorted(self.directories - {""}):
            (into / name).mkdir(exist_ok=True)
        for name, node in self.files.items():
            if _parent(name) in self.directories:
                (into / name).write_bytes(self.contents.get(node, b""))


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


Pieces = Sequence[tuple[int, bytes]]
_DATA = {"write", "truncate"}
_BROKEN = ("prefix", "sectors", "garbled", "zeros")


def _prefix(change: DiskChange, chance: Random) -> Pieces:
    return [(0, change.data[: chance.randint(0, len(change.data))])]


def _sectors(change: DiskChange, chance: Random) -> Pieces:
    """Some of the sectors of a write; the others stay as they were."""
    first = -change.position % SECTOR_BYTES
    cuts = [0, *range(first or SECTOR_BYTES, len(change.data), SECTOR_BYTES), len(change.data)]
    pieces = [(start, change.data[start:stop]) for start, stop in pairwise(cuts)]
    return [piece for piece in pieces if chance.random() < 0.5]


def _garbled(change: DiskChange, chance: Random) -> Pieces:
    start = chance.randint(0, len(change.data))
    stop = chance.randint(start, len(change.data))
    return [(0, change.data[:start] + chance.randbytes(stop - start) + change.data[stop:])]


def _zeros(change: DiskChange, chance: Random) -> Pieces:
    """The file has grown, but the end of its new bytes is zeros."""
    start = chance.choice((0, chance.randint(0, len(change.data))))
    return [(0, change.data[:start] + bytes(len(change.data) - start))]


_FATES: dict[str, Callable[[DiskChange, Random], Pieces]] = {
    "kept": lambda change, _: [(0, change.data)],
    "prefix": _prefix,
    "sectors": _sectors,
    "garbled": _garbled,
    "zeros": _zeros,
}


def _synced_at(changes: Sequence[DiskChange]) -> list[int]:
    """For each change, the index of the later one that made it durable."""
    durable_at = [_NEVER] * len(changes)
    synced: dict[int | str, int] = {}
    for index in range(len(changes) - 1, -1, -1):
        change = changes[index]
        if change.kind == "sync":
            synced[change.node] = index
        elif change.kind == "sync-directory":
            synced[change.path] = index
        elif change.kind in _DATA:
            durable_at[index] = synced.get(change.node, _NEVER)
        else:  # a rename is one step: either of its directories makes it durable
            parents = {_parent(change.path), _parent(change.target or change.path)}
            durable_at[index] = min(synced.get(parent, _NEVER) for parent in parents)
    return durable_at


class _RecordedFile(_WrittenFile):
    disk: RecordingDisk
    node: int = -1

    def write(self, buffers: Sequence[Buffer], position: int) -> int:
        with self.disk.changing():
            end = super().write(buffers, position)
            self.disk.record(
                "write", self.path, node=self.node, position=position, data=b"".join(buffers)
            )
        return end

    def truncate(self, size: int) -> None:
        with self.disk.changing():
            super().truncate(size)
            self.disk.record("truncate", self.path, node=self.node, position=size)

    def sync(self) -> None:
        with self.disk.changing():
            if not self.disk.ignores_sync(self.path):
                self.disk.record("sync", self.path, node=self.node)


class RecordingDisk(Disk):
    """A disk that does everything for real, apart from syncs, and records each change. Nothing else
    may change its directory.

    Args:
        directory: The recorded directory.
        ignores_sync: Breaks the disk on purpose: a test that still passes without syncs proves
            nothing.
        kill_after: Simulates a kill of the process after so many changes: what it wrote stays, and
            `reopened()` is the disk as the next process finds it.

    """

    file_type = _RecordedFile

    def __init__(
        self,
        directory: Path,
        *,
        ignores_sync: Callable[[Path], bool] = lambda _: False,
        kill_after: int | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.ignores_sync, self.kill_after = directory, ignores_sync, kill_after
        self._boot = os.urandom(16)
        self._guard = RLock()
        self._open_files: WeakSet[DiskFile] = WeakSet()
        self._frozen = False
        self._nodes: dict[int, int] = {}  # inode -> node
        self.trace = self._first_content()

    def _first_content(self) -> Trace:
        trace = Trace({}, {}, {""})
        for path in sorted(self.directory.rglob("*")):
            name = self._name(path)
            if path.is_dir():
                trace.directories.add(name)
            else:
                node = self._nodes[path.stat().st_ino] = len(self._nodes)
                trace.files[name], trace.contents[node] = node, path.read_bytes()
        self._next_node = len(trace.contents)
        return trace

    def _name(self, path: Path) -> str:
        name = str(path.relative_to(self.directory))
        return "" if name == "." else name

    def boot_id(self) -> bytes:
        return self._boot

    def mark(self, note: Any) -> None:
        """Take a note about this moment, such as which append was just acknowledged."""
        with self._guard:
            if not self._frozen:
                self.trace.marks.append((len(self.trace.changes), note))

    def freeze(self) -> Trace:
        """Stop recording: what comes now, such as closing the log, does not happen before the power
        cut.
        """
        self._frozen = True
        return self.trace

    def reopened(self) -> RecordingDisk:
        """The disk as the next process on the same machine finds it, with the same trace. The files
        of the old process are closed, as the kernel would do.
        """
        for file in list(self._open_files):
            file.close()
        fresh = RecordingDisk.__new__(RecordingDisk)
        fresh.__dict__ |= self.__dict__ | {
            "kill_after": None,
            "_guard": RLock(),
            "_open_files": WeakSet(),
        }
        return fresh

    def changing(self) -> RLock:
        """A lock under which one change at a time is made and recorded."""
        if self.kill_after is not None and len(self.trace.changes) >= self.kill_after:
            raise ProcessKilled
        return self._guard

    def record(
        self,
        kind: str,
        path: Path,
        *,
        node: int = -1,
        position: int = 0,
        data: bytes = b"",
        target: Path | None = None,
    ) -> None:
        if not self._frozen:
            self.trace.changes.append(
                DiskChange(
                    kind=kind,
                    path=self._name(path),
                    node=node,
                    position=position,
                    data=data,
                    target="" if target is None else self._name(target),
                )
            )

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> DiskFile:
        with self.changing() if create else self._guard:
            is_new = create and not path.exists()
            file = super().open(path, create=create, write=write)
            assert isinstance(file, _RecordedFile)
            self._open_files.add(file)
            inode = os.fstat(file.descriptor).st_ino
            if is_new:
                self._nodes[inode], self._next_node = self._next_node, self._next_node + 1
                self.record("create", path, node=self._nodes[inode])
            file.node = self._nodes[inode]
        return file

    def make_one_directory(self, path: Path) -> None:
        with self.changing():
            super().make_one_directory(path)
            self.record("mkdir", path)

    def sync_directory(self, path: Path) -> None:
        with self.changing():
            if not self.ignores_sync(path):
                self.record("sync-directory", path)

    def rename(self, old: Path, new: Path) -> None:
        with self.changing():
            node = self._nodes[old.stat().st_ino]
            super().rename(old, new)
            self.record("rename", old, node=node, target=new)

    def unlink(self, path: Path) -> None:
        with self.changing():
            if path.exists():
                super().unlink(path)
                self.record("unlink", path)

    def remove_directory(self, path: Path) -> bool:
        with self.changing():
            is_there = path.exists()
            is_gone = super().remove_directory(path)
            if is_there and is_gone:
                self.record("rmdir", path)
            return is_gone
