"""Sweeping: removes what no retained ledger entry leads to, a little at a time between batches, so
that it never holds one up for long.

A *round* goes through everything once: the state files of each step, also of those that are gone,
files that were never finished, the directories of jobs that are over, local stores of other queries
and of another number of shards. Only what was there, unneeded, long before the round began is
removed: a batch under way is younger than that, and whatever later entries lead to is new, or was
led to already.
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

from headrace.engine.state.files import SUFFIX, StateFiles, StateIds

ROUND_EVERY_S = 300.0
OLDER_THAN_S = 600.0
BUDGET_S = 0.05
_STORE = re.compile(r"\d+-of-(\d+)")
Roots = Callable[[], Mapping[str, Sequence[StateIds]]]
"""For each step the state ids of all entries that are retained, the newest of every query among
them. Asked anew in each round.
"""


@dataclass
class Sweeper:
    """Works on the state directory of a pipeline. `shards` says how many there are now, `queries`
    which queries have local stores.
    """

    state: Path
    local: Path
    roots: Roots
    shards: Callable[[], int]
    queries: Callable[[], Collection[str]]
    every_s: float = ROUND_EVERY_S
    older_than_s: float = OLDER_THAN_S
    removed: int = 0
    _next_round_s: float = 0.0
    _round: Iterator[None] | None = field(default=None, repr=False)

    def work(self, budget_s: float = BUDGET_S) -> None:
        """Go on with the round under way, or begin one if it is time; not for longer than the
        budget.
        """
        started = time.monotonic()
        if self._round is None:
            if started < self._next_round_s:
                return
            self._round = self._steps(time.time() - self.older_than_s)
        while time.monotonic() - started < budget_s:
            if next(self._round, self) is self:
                self.postpone()
                return

    def postpone(self) -> None:
        """Give up the round under way, and begin the next one when it is time."""
        self._round, self._next_round_s = None, time.monotonic() + self.every_s

    def finish(self) -> int:
        """A whole round, now. Returns how many files and directories it removed."""
        before = self.removed
        for _ in self._steps(time.time() - self.older_than_s):
            continue
        return self.removed - before

    def _steps(self, limit_s: float) -> Iterator[None]:
        """One round in small steps: it stops after each, and can be left there for a while."""
        roots = self.roots()
        gone = [
            path.name for path in _listed(self.state / "steps") if roots and path.name not in roots
        ]  # before the first entry, none is
        for step, entries in {**roots, **dict.fromkeys(gone, ())}.items():
            yield from self._sweep_step(StateFiles(self.state / "steps" / step), entries, limit_s)
        for step in gone:
            with suppress(OSError):  # young files are in it
                (self.state / "steps" / step).rmdir()
        yield from self._remove_directories(_listed(self.state / "jobs"), limit_s)
        yield from self._remove_directories(self._other_queries(), limit_s)
        yield from self._remove_directories(self._other_stores(), limit_s)

    def _other_queries(self) -> Iterator[Path]:
        """Local stores of queries that have become part of another, or were given up."""
        return (path for path in _listed(self.local) if path.name not in self.queries())

    def _other_stores(self) -> Iterator[Path]:
        """Local stores of another number of shards than there is now."""
        for path in list(self.local.glob("**/data.mdb")):
            shard = _STORE.fullmatch(path.parent.name)
            if shard and int(shard[1]) != self.shards():
                yield path.parent

    def _sweep_step(
        self, files: StateFiles, entries: Sequence[StateIds], limit_s: float
    ) -> Iterator[None]:
        kept = set()
        for name in files.reach(entries):
            kept.add(name)
            yield
        for path in _listed(files.directory):
            unfinished = path.name.startswith(".")
            if unfinished or (
                path.name.endswith(SUFFIX) and path.name.removesuffix(SUFFIX) not in kept
            ):
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < limit_s:
                        path.unlink()
                        self.removed += 1
            yield

    def _remove_directories(self, paths: Iterator[Path], limit_s: float) -> Iterator[None]:
        for path in paths:
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < limit_s:
                    shutil.rmtree(path, ignore_errors=True)
                    self.removed += 1
            yield


def _listed(directory: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError), os.scandir(directory) as found:
        for entry in found:
            yield directory / entry.name
