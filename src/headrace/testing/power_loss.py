"""Power loss, simulated: a disk that records every change a workload makes, and what may be left of
them when the power goes.

For tests of the embedded log, this project's own and yours:

    disk = RecordingDisk(tmp_path / "before")
    log = FileLog(tmp_path / "before" / "log", disk=disk)
    ...                                                       # a workload
    disk.trace.cut_power(7, tmp_path / "after", mode="torn", chance=random.Random(1))
    log = FileLog(tmp_path / "after" / "log", disk=RebootedDisk())

What was synced is there afterwards. What was not is kept, dropped, torn or garbled, each write on
its own. The model is strict: a new, renamed or removed name is durable only when its directory was
synced, whatever was done to the file itself.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from threading import Lock, RLock
from typing import Any
from weakref import WeakSet

from headrace.log.file.disk import Buffer, Disk, DiskFile, to_disk_error

# Disks for tests of the embedded log: one that was rebooted, one that is slow, and one that is
# full. See `crash` for one that loses its power.


class _UnsyncedFile(DiskFile):
    def sync(self) -> None:
        """Nothing: nobody will cut this disk's power."""


class RebootedDisk(Disk):
    """The disk after a restart: another boot, so that the log recovers. Does not sync, for
    speed.
    """

    file_type = _UnsyncedFile

    def __init__(self) -> None:
        self._boot = os.urandom(16)

    def boot_id(self) -> bytes:
        return self._boot

    def sync_directory(self, path: Path) -> None:
        """Nothing, as above."""


class _SlowFile(DiskFile):
    disk: SlowDisk

    def sync(self) -> None:
        with self.disk.busy():
            super().sync()


class _Busy:
    """The device: it does one sync at a time, each as long as it takes."""

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
        self._device = _Busy(sync_s)

    def busy(self) -> _Busy:
        return self._device

    def sync_directory(self, path: Path) -> None:
        with self.busy():
            super().sync_directory(path)


class _FullFile(DiskFile):
    disk: FullDisk

    def write(self, buffers: Sequence[Buffer], position: int) -> int:
        data = b"".join(buffers)
        fits = self.disk.take(position + len(data) - self.size(), len(data))
        super().write([data[:fits]], position)
        if fits < len(data):
            raise to_disk_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), self.path)
        return position + len(data)

    def truncate(self, size: int) -> None:
        before = self.size()
        super().truncate(size)
        self.disk.room_bytes += max(0, before - size)


class FullDisk(Disk):
    """A disk with room for so many more bytes, then none: a write that does not fit is done in
    part, as on a real one.
    """

    file_type = _FullFile

    def __init__(self, room_bytes: int, *, name_bytes: int = 0) -> None:
        self.room_bytes, self.name_bytes = room_bytes, name_bytes

    def take(self, growth: int, most: int) -> int:
        """Use up room for a write of `most` bytes that lets a file grow; returns how many of them
        fit.
        """
        missing = max(0, growth - self.room_bytes)
        self.room_bytes -= max(0, growth) - missing
        return max(0, most - missing)

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> DiskFile:
        if create and not path.exists():
            self._take_name(path)
        return super().open(path, create=create, write=write)

    def make_one_directory(self, path: Path) -> None:
        self._take_name(path)
        super().make_one_directory(path)

    def _take_name(self, path: Path) -> None:
        if self.take(self.name_bytes, self.name_bytes) < self.name_bytes:
            raise to_disk_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), path)


__all__ = [
    "MODES",
    "Change",
    "FullDisk",
    "ProcessKilled",
    "RebootedDisk",
    "RecordingDisk",
    "SlowDisk",
    "Trace",
]

MODES = ("kept", "dropped", "torn", "garbled", "mixed")
"""What becomes of changes that were not synced: all kept, all dropped, cut short, overwritten with
rubbish, or any of these, each on its own.
"""
SECTOR_BYTES = 512
_NEVER = 1 << 62


class ProcessKilled(BaseException):
    """Raised by a disk whose process is no more. Not an Exception: nothing may handle it."""


@dataclass(frozen=True, slots=True)
class Change:
    """One step of what a workload did to its disk. Paths are relative to the recorded directory; a
    node is a file, whatever its name.
    """

    kind: str  # create, write, truncate, sync, mkdir, rename, unlink, rmdir, sync-directory
    path: str
    node: int = -1
    position: int = 0
    data: bytes = b""
    target: str = ""


@dataclass
class Trace:
    """Everything a workload did, in order, from a directory's first content on. `marks` are a
    workload's own notes: (changes so far, note).
    """

    files: dict[str, int]
    contents: dict[int, bytes]
    directories: set[str]
    changes: list[Change] = field(default_factory=list)
    marks: list[tuple[int, Any]] = field(default_factory=list)

    def marks_before(self, after: int) -> list[Any]:
        """What was noted when at most `after` changes had been made."""
        return [note for index, note in self.marks if index <= after]

    def cut_power(self, after: int, into: Path, *, mode: str, chance: Random) -> None:
        """Write into a fresh directory what may be left when power is lost behind the first `after`
        changes.
        """
        _Wreck(self, mode, chance).build(after).save(into)


class _Wreck:
    """What is left on the disk: names, and the bytes of nodes."""

    def __init__(self, trace: Trace, mode: str, chance: Random) -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; use one of {MODES}.")
        self.trace, self.mode, self.chance = trace, mode, chance
        self.files, self.directories = dict(trace.files), set(trace.directories)
        self.contents = {node: bytearray(content) for node, content in trace.contents.items()}

    def build(self, after: int) -> _Wreck:
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
        """Names survive like a file system's own journal keeps them (up to some point), or, in mode
        "mixed", as strictly as POSIX allows.
        """
        return {
            "dropped": False,
            "torn": index < names_kept_until,
            "mixed": self.chance.random() < 0.5,
        }.get(self.mode, True)

    def _change_name(self, change: Change, *, certain: bool) -> None:
        """Do it if it is possible: names whose directory is lost are lost with it."""
        place = change.target or change.path
        if _parent(place) not in self.directories:
            return
        if change.kind == "create":
            self.files.setdefault(place, change.node)
        elif change.kind == "mkdir":
            self.directories.add(place)
        elif change.kind == "rename" and (certain or self.files.get(change.path) == change.node):
            self.files.pop(change.path, None)
            self.files[place] = change.node
        elif change.kind == "unlink":
            self.files.pop(place, None)
        elif change.kind == "rmdir" and not any(
            _parent(name) == place for name in (*self.files, *self.directories)
        ):
            self.directories.discard(place)

    def _change_data(self, change: Change, *, survives: bool) -> None:
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


def _prefix(change: Change, chance: Random) -> Pieces:
    return [(0, change.data[: chance.randint(0, len(change.data))])]


def _sectors(change: Change, chance: Random) -> Pieces:
    """Some of the sectors it touched, the others as they were before."""
    first = -change.position % SECTOR_BYTES
    cuts = [0, *range(first or SECTOR_BYTES, len(change.data), SECTOR_BYTES), len(change.data)]
    pieces = [(start, change.data[start:stop]) for start, stop in pairwise(cuts)]
    return [piece for piece in pieces if chance.random() < 0.5]


def _garbled(change: Change, chance: Random) -> Pieces:
    start = chance.randint(0, len(change.data))
    stop = chance.randint(start, len(change.data))
    return [(0, change.data[:start] + chance.randbytes(stop - start) + change.data[stop:])]


def _zeros(change: Change, chance: Random) -> Pieces:
    """The file has grown, and its new bytes never came."""
    start = chance.choice((0, chance.randint(0, len(change.data))))
    return [(0, change.data[:start] + bytes(len(change.data) - start))]


_FATES: dict[str, Callable[[Change, Random], Pieces]] = {
    "kept": lambda change, _: [(0, change.data)],
    "prefix": _prefix,
    "sectors": _sectors,
    "garbled": _garbled,
    "zeros": _zeros,
}


def _synced_at(changes: Sequence[Change]) -> list[int]:
    """For each change, which later one made it durable."""
    found = [_NEVER] * len(changes)
    synced: dict[int | str, int] = {}
    for index in range(len(changes) - 1, -1, -1):
        change = changes[index]
        if change.kind == "sync":
            synced[change.node] = index
        elif change.kind == "sync-directory":
            synced[change.path] = index
        elif change.kind in _DATA:
            found[index] = synced.get(change.node, _NEVER)
        else:  # a rename is one step: either of its directories makes it durable
            places = {_parent(change.path), _parent(change.target or change.path)}
            found[index] = min(synced.get(place, _NEVER) for place in places)
    return found


class _RecordedFile(DiskFile):
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
    """Does everything for real, apart from syncs, in a directory that it alone changes, and
    remembers each step.

    `ignores_sync` breaks the disk on purpose: a test that still passes when syncs are left out
    proves nothing. `kill_after` ends the process, so to speak, behind so many changes: what it
    wrote stays, and `reopened()` is the disk as the next process finds it.
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
        """Remember something about this moment, such as which append was just acknowledged."""
        with self._guard:
            if not self._frozen:
                self.trace.marks.append((len(self.trace.changes), note))

    def freeze(self) -> Trace:
        """Stop recording: what comes now (closing the log, say) did not happen before the power
        went.
        """
        self._frozen = True
        return self.trace

    def reopened(self) -> RecordingDisk:
        """The next process on the same machine, with the same trace. The old one's files are
        closed, as the kernel would do.
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
        """One change at a time, done and recorded together."""
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
                Change(
                    kind,
                    self._name(path),
                    node,
                    position,
                    data,
                    "" if target is None else self._name(target),
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

    def remove_directory(self, path: Path) -> None:
        with self.changing():
            super().remove_directory(path)
            self.record("rmdir", path)
