"""A replica: one process's copy of the state, kept up by reading the journal from a checkpoint on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from headrace.errors import CorruptJournal
from headrace.log.file import checkpoint
from headrace.log.file.journal import FILE_HEADER_BYTES, ROLL, Damage, Journal, Record
from headrace.log.file.salvage import LostCommits, restoring
from headrace.log.file.state import State

logger = logging.getLogger("headrace.log")
_MOST_ATTEMPTS = 20


class Replica:
    """`state` as of position `lsn` of the journal, in the file that starts at `base`."""

    def __init__(self, journal: Journal, directory: Path) -> None:
        self.journal, self.directory = journal, directory
        self.damage: list[Damage] = []
        self.lost = LostCommits()
        self.unclean: list[tuple[int, int, int]] = []  # (file's base, position, bytes) of filling that is not empty
        self.state, self.lsn, self.base = State(), 0, 0
        self.records_since_checkpoint = 0
        self.load()

    def load(self) -> None:
        """Start from the newest checkpoint that is sound and that the journal goes on from."""
        for _ in range(_MOST_ATTEMPTS):
            if self._load_checkpoint():
                return
            bases = self.journal.bases()
            if not bases or bases[0] == 0:
                self.state, self.lsn, self.base = State(), FILE_HEADER_BYTES, 0
                self.records_since_checkpoint = 0
                return
            # otherwise, those we saw may have been forgotten, and others made, while we looked
        raise CorruptJournal(
            f"No checkpoint in {self.directory} is sound, and the journal does not reach back to the beginning.",
            fix="restore the journal directory from a backup.",
        )

    def _load_checkpoint(self) -> bool:
        for lsn in checkpoint.positions(self.directory):
            content = checkpoint.load(self.directory, lsn)
            if content is None:
                logger.warning("The checkpoint at %d in %s is damaged or gone; going back to the one before.", lsn, self.directory)
            elif content["base"] in self.journal.bases():
                self.state, self.lsn, self.base = State.load(content["state"]), lsn, content["base"]
                return True
        return False

    def advance(self, limit: int | None = None, *, proven: int = 0, each: Callable[[Record], None] | None = None) -> int | None:
        """Apply records up to `limit` (all there are, if None). Returns where a torn tail begins, or None if there is none.

        `proven` is how far the journal is known to have been durable: damage before it is rot, which is reported and stepped over.
        """
        while True:
            end = self.journal.end_of(self.base)
            stop = end if limit is None else min(end, limit)
            rolled = False
            for item in self.journal.records(self.base, self.lsn, stop):
                if isinstance(item, Damage):
                    if item.lsn >= max(proven, item.proven) and self._next_base() is None:
                        return item.lsn
                    self._step_over(item, stop)
                    continue
                proven = max(proven, item.durable)
                if any(item.filling) or item.end > end:
                    filling = min(item.end, end) - len(item.filling)
                    self.unclean.append((self.base, filling, item.end - filling))
                rolled = self._apply(item, each)
            if not rolled and self._is_cut_off(limit, proven):
                if self.journal.end_of(self.base) > end:  # somebody is writing it, and we hold no lock
                    continue
                rolled = self._step_over_end(proven if limit is None else limit)
            if not rolled or (limit is not None and self.lsn >= limit):
                return None

    def _apply(self, record: Record, each: Callable[[Record], None] | None) -> bool:
        """Returns whether the journal goes on in another file."""
        if record.kind == ROLL:
            self._go_to(record.end)
            return True
        if self.damage:
            self._make_up_for_loss(record)
        if each is not None:
            each(record)
        self.state.apply(record.commit, record.meta["t"], record.meta["ops"])
        self.lsn = record.end
        self.records_since_checkpoint += 1
        return False

    def _go_to(self, base: int) -> None:
        """The journal goes on in the file that starts at a position."""
        self.state.rolled()
        self.records_since_checkpoint = 0
        self.base, self.lsn = base, base + FILE_HEADER_BYTES

    # Damage

    def _step_over(self, damage: Damage, stop: int) -> None:
        """Remember the damage: a writer must look for the rows that the lost record spoke of before it appends (`salvage.reconcile`)."""
        if all(known.lsn != damage.lsn for known in self.damage):
            self.damage.append(damage)
            logger.error("The journal is corrupt at byte %d of %s; going on behind it.", damage.position, damage.file)
        self.lost.add_rest(self.state.commit + 1)
        self.lsn = damage.after if damage.after is not None else -(-stop // 8) * 8

    def _is_cut_off(self, limit: int | None, proven: int) -> bool:
        """Whether this file ends before it should: it was known to reach further, or its last record, which names the next file, is gone."""
        return self.lsn < (proven if limit is None else limit) or (limit is None and self._next_base() is not None)

    def _step_over_end(self, goal: int) -> bool:
        """Go on in the next file, if there is one (then True); else nothing may be written where something was durable."""
        file = self.journal.file_at(self.base)
        following = self._next_base()
        self._step_over(Damage(self.lsn, None, goal, str(file.path), self.lsn - self.base), goal if following is None else self.lsn)
        if following is not None:
            self._go_to(following)
        return following is not None

    def _next_base(self) -> int | None:
        return min((base for base in self.journal.bases() if base > self.base), default=None)

    def _make_up_for_loss(self, record: Record) -> None:
        """A record may speak of what a lost one defined. What cannot be found again is left out, and said."""
        if record.commit > self.state.commit + 1:
            self.lost.add(self.state.commit + 1, record.commit)
        possible, defined = [], set()
        for operation in record.meta["ops"]:
            kind, *arguments = operation
            if kind in {"topic", "restore"}:
                defined.add(arguments[0])
            elif kind in {"append", "adopt", "roll", "start"} and arguments[0] not in defined and not self.state.has_partition(*arguments[:2]):
                found = restoring(self.journal.disk, self.directory.parent, self.state, arguments[0], arguments[1], record.commit)
                if found is None:
                    logger.error("What commit %d did to the topic %r is lost: its definition is.", record.commit, arguments[0])
                    continue
                self.state.apply(self.state.commit, self.state.time_us, [found])
            possible.append(operation)
        record.meta["ops"] = possible
