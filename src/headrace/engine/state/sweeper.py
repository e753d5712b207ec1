"""The sweeper: removes what no retained ledger entry leads to, a little at a time between batches,
so that it never delays one for long.

A *round* visits everything once: the state files of each step (also of steps that no longer exist),
temporary files of interrupted writes, the directories of finished jobs, and local stores of other
queries or of another number of shards. It removes only what was unneeded long before the round
began. A batch that is running is younger than that, and every file that a later entry leads to is
new, or was reachable already.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headrace.engine.state.files import SHARED, SUFFIX, StateFiles, StateIds

ROUND_EVERY_S = 300.0
OLDER_THAN_S = 600.0
BUDGET_S = 0.05
_STORE_DIRECTORY = re.compile(r"\d+-of-(\d+)")
Roots = Callable[[], Mapping[str, Sequence[StateIds]]]
"""Returns, for each step, the state ids of all retained ledger entries, the newest of every query
among them. Called once per round.
"""


@dataclass
class Sweeper:
    """Sweeps the state directory of a pipeline."""

    state: Path
    local: Path
    roots: Roots
    shards: Callable[[], Collection[int]]
    """Returns the numbers of shards that batches are computed with at present."""
    queries: Callable[[], Collection[str]]
    """Returns the names of the present queries, which have local stores."""
    every_s: float = ROUND_EVERY_S
    older_than_s: float = OLDER_THAN_S
    removed: int = 0
    _next_round_s: float = 0.0
    _round: Iterator[None] | None = field(default=None, repr=False)

    def work(self, budget_s: float = BUDGET_S) -> None:
        """Go on with the present round, or start one if it is due, for at most `budget_s`."""
        started_s = time.monotonic()
        if self._round is None:
            if started_s < self._next_round_s:
                return
            self._round = self._sweep(time.time() - self.older_than_s)
        while time.monotonic() - started_s < budget_s:
            if next(self._round, self) is self:
                self.postpone()
                return

    def postpone(self) -> None:
        """Abandon the present round; the next one starts when it is due."""
        self._round = None
        self._next_round_s = time.monotonic() + self.every_s

    def finish(self) -> int:
        """Sweep a whole round now. Returns how many files and directories were removed."""
        before = self.removed
        for _ in self._sweep(time.time() - self.older_than_s):
            continue
        return self.removed - before

    def _sweep(self, limit_s: float) -> Iterator[None]:
        """One round; yields after each small step, where it can be suspended."""
        roots = self.roots()
        # Without a root there is no ledger entry yet, so nothing is known to be gone.
        gone_steps = [
            path.name
            for path in _list(self.state / "steps")
            if roots and path.name not in {SHARED, *roots}
        ]
        shared: set[str] = set()
        for step, entries in {**roots, **dict.fromkeys(gone_steps, ())}.items():
            files = StateFiles(self.state / "steps" / step)
            yield from self._sweep_step(files, entries, limit_s, shared)
        if roots:
            yield from self._remove_files(self.state / "steps" / SHARED, shared, limit_s)
        for step in gone_steps:
            with suppress(OSError):  # young files are left in it
                (self.state / "steps" / step).rmdir()
        yield from self._remove_directories(_list(self.state / "jobs"), limit_s)
        other_queries = (path for path in _list(self.local) if path.name not in self.queries())
        yield from self._remove_directories(other_queries, limit_s)
        yield from self._remove_directories(self._stores_of_other_shards(), limit_s)

    def _sweep_step(
        self, files: StateFiles, entries: Sequence[StateIds], limit_s: float, shared: set[str]
    ) -> Iterator[None]:
        """Sweep a step's own files. What it reaches of the files of several steps goes to
        `shared`.
        """
        reachable = set()
        for name in files.reach(entries):
            if name.startswith(SHARED):
                shared.add(name.removeprefix(SHARED))
            else:
                reachable.add(name)
            yield
        yield from self._remove_files(files.directory, reachable, limit_s)

    def _remove_files(
        self, directory: Path, reachable: Collection[str], limit_s: float
    ) -> Iterator[None]:
        """Remove the old files of a directory that nothing reaches."""
        for path in _list(directory):
            is_temporary = path.name.startswith(".")
            if is_temporary or (
                path.name.endswith(SUFFIX) and path.name.removesuffix(SUFFIX) not in reachable
            ):
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < limit_s:
                        path.unlink()
                        self.removed += 1
            yield

    def _stores_of_other_shards(self) -> Iterator[Path]:
        """Local stores of another number of shards than there is now."""
        for path in list(self.local.glob("**/data.mdb")):
            match = _STORE_DIRECTORY.fullmatch(path.parent.name)
            if match and int(match[1]) not in self.shards():
                yield path.parent

    def _remove_directories(self, paths: Iterator[Path], limit_s: float) -> Iterator[None]:
        for path in paths:
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < limit_s:
                    shutil.rmtree(path, ignore_errors=True)
                    self.removed += 1
            yield


def _list(directory: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            yield directory / entry.name
