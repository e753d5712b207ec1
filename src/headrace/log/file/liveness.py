"""Liveness: whether a member of a group is alive, and whether a lease is over, without trusting
anybody's wall clock.

A member shows that it is alive by writing its *heartbeat* file, a few times per session timeout. An
observer decides by clocks that do not jump:

- On one machine all processes share the monotonic clock, so the heartbeat itself says how old it
  is. It also says which clock it was written by (`machine_clock`).
- A heartbeat of another machine, or from before a restart, is a value without a meaning. The
  observer remembers when it first saw that value, by its own monotonic clock. A value that does not
  change for a session timeout belongs to a dead member.

Leases of queues (`queue`) go by the same two rules.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from headrace.errors import HeadraceError
from headrace.log.file.disk import Disk

_HEARTBEATS_PER_TIMEOUT = 3
_HEARTBEAT_BYTES = 128
_MAX_OBSERVED = 100_000


@functools.cache
def machine_clock() -> str:
    """Names the monotonic clock of this machine since it was started. Where a machine does not say
    when it was started, each process has a clock of its own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        with suppress(OSError):  # a container may have an offset to the machine's clock
            boot += os.readlink("/proc/self/ns/time")
    except OSError:
        boot = f"{socket.gethostname()} {os.getpid()} {os.urandom(8).hex()}"
    return hashlib.sha256(boot.encode()).hexdigest()[:12]


def monotonic_us() -> int:
    """The monotonic clock in microseconds."""
    return time.monotonic_ns() // 1000


# Heartbeats


def heartbeat_path(root: Path, group: str, member: str) -> Path:
    return root / "groups" / f"{group}~{member}"


class Heartbeat:
    """Shows that a member is alive by writing a file, as long as the member polls often enough."""

    def __init__(self, disk: Disk, path: Path, timeout_us: int, max_poll_interval_us: int) -> None:
        self.path = path
        self._disk = disk
        self.last_poll_s = time.monotonic()
        self._interval_s = timeout_us / 1e6 / _HEARTBEATS_PER_TIMEOUT
        self._max_poll_interval_s = max_poll_interval_us / 1e6
        self._count = 0
        self._stop = Event()
        self._thread = Thread(target=self._beat, daemon=True, name=f"heartbeat {path.name}")

    def start(self) -> None:
        self._disk.make_directory(self.path.parent)
        self.write()
        self._thread.start()

    def write(self) -> None:
        """Write the next heartbeat. Its length is fixed, so that a reader never sees half of it."""
        self._count += 1
        content = {"clock": machine_clock(), "us": monotonic_us(), "count": self._count}
        text = json.dumps(content).ljust(_HEARTBEAT_BYTES - 1) + "\n"
        file = self._disk.open(self.path, create=True)
        try:
            file.write([text.encode()], 0)
        finally:
            file.close()

    def _beat(self) -> None:
        while not self._stop.wait(min(self._interval_s, self._max_poll_interval_s)):
            if time.monotonic() - self.last_poll_s < self._max_poll_interval_s:
                # A full disk, for example: the next one may succeed.
                with suppress(OSError, HeadraceError):
                    self.write()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self.path.unlink(missing_ok=True)


class Observer:
    """Remembers which values it has seen, and since when, by this process's monotonic clock."""

    def __init__(self) -> None:
        self._guard = Lock()
        self._seen: dict[Any, tuple[Any, int]] = {}

    def unchanged_us(self, key: Any, value: Any) -> int:
        """For how long this observer has seen the same value; 0 when it sees it first."""
        now_us = monotonic_us()
        with self._guard:
            known = self._seen.get(key)
            if known is not None and known[0] == value:
                return now_us - known[1]
            if len(self._seen) >= _MAX_OBSERVED and key not in self._seen:
                self._seen.pop(next(iter(self._seen)))
            self._seen[key] = (value, now_us)
        return 0

    def retain(self, keys: Iterable[Any]) -> None:
        """Forget everything but these keys."""
        with self._guard:
            self._seen = {key: self._seen[key] for key in keys if key in self._seen}


class MemberObserver:
    """Decides which members of groups are dead."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._observer = Observer()

    def silent_us(self, group: str, member: str) -> float:
        """For how long a member has certainly been silent; infinite if it has no heartbeat."""
        path = heartbeat_path(self._root, group, member)
        try:
            modified_ns = path.stat().st_mtime_ns
        except FileNotFoundError:
            return float("inf")
        text = _read_text(path)
        if text is None:
            return float("inf")
        heartbeat = _parse_heartbeat(text)
        if heartbeat is not None and heartbeat[0] == machine_clock():
            return max(0, monotonic_us() - heartbeat[1])
        return self._observer.unchanged_us((group, member), (text, modified_ns))

    def dead(self, group: str, members: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """The members that were silent for longer than their session timeout."""
        return [
            member
            for member, about in members.items()
            if self.silent_us(group, member) > about["timeout_us"]
        ]

    def await_dead(self, group: str, members: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """The dead members, decided once and for all: a member whose heartbeat this process cannot
        date is watched until it changes, or for its session timeout.
        """
        undated = {
            member: about
            for member, about in members.items()
            if not self.is_dated(group, member)
            and self.silent_us(group, member) <= about["timeout_us"]
        }
        values = {
            member: _read_text(heartbeat_path(self._root, group, member)) for member in undated
        }
        deadline_s = time.monotonic() + max(
            (about["timeout_us"] / 1e6 for about in undated.values()), default=0.0
        )
        while undated and time.monotonic() <= deadline_s + 0.05:
            time.sleep(0.02)
            undated = {
                member: about
                for member, about in undated.items()
                if _read_text(heartbeat_path(self._root, group, member)) == values[member]
                and self.silent_us(group, member) <= about["timeout_us"]
            }
        return self.dead(group, members)

    def is_dated(self, group: str, member: str) -> bool:
        """Whether a member's heartbeat goes by this machine's clock, or there is none."""
        text = _read_text(heartbeat_path(self._root, group, member))
        heartbeat = None if text is None else _parse_heartbeat(text)
        return text is None or (heartbeat is not None and heartbeat[0] == machine_clock())

    def heartbeat_age_s(self, group: str, member: str) -> float:
        """Seconds since a member's last heartbeat, to be shown: by the monotonic clock of this
        machine, or else by the time that the file system gave the file.
        """
        path = heartbeat_path(self._root, group, member)
        if self.is_dated(group, member):
            return self.silent_us(group, member) / 1e6
        try:
            return max(0.0, time.time() - path.stat().st_mtime)
        except FileNotFoundError:
            return float("inf")


def _read_text(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except PermissionError:  # that it changes can still be seen
        return b""


def _parse_heartbeat(text: bytes) -> tuple[str, int] | None:
    """(clock, time by that clock) of a heartbeat; None if it does not say."""
    try:
        content = json.loads(text)
        return str(content["clock"]), int(content["us"])
    except (ValueError, KeyError, TypeError):
        return None


def remove_heartbeats(root: Path, group: str, members: Iterable[str]) -> None:
    """Remove the heartbeat files of members that are no longer in their group."""
    for member in members:
        with suppress(OSError):
            heartbeat_path(root, group, member).unlink(missing_ok=True)
