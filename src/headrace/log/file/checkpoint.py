"""Checkpoints: the state as of a position of the journal, so that opening a log does not read its
whole past.

The two newest are kept, with the journal since the older one: a damaged checkpoint costs time, not
data.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import CorruptionError, CorruptJournal, NewerFormat
from headrace.log.file.disk import Disk
from headrace.log.file.journal import FILE_HEADER_BYTES, ROLL, Damage, Journal, Record
from headrace.log.file.segment import SEGMENT_SUFFIX, read_segment_header
from headrace.log.file.state import State

if TYPE_CHECKING:
    from headrace.log.file.state import Operation


CHECKPOINT_SUFFIX = ".checkpoint"
KEPT = 2
VERSION = 1


def save(disk: Disk, directory: Path, lsn: int, base: int, state: dict[str, Any]) -> None:
    """Store a state as of `lsn`, a position in the journal file that starts at `base`."""
    text = json.dumps(
        {"version": VERSION, "lsn": lsn, "base": base, "state": state}, separators=(",", ":")
    ).encode()
    disk.replace_file(
        directory / f"{lsn:020d}{CHECKPOINT_SUFFIX}", [b"%08x\n" % zlib.crc32(text), text]
    )


def positions(directory: Path) -> list[int]:
    """Where there are checkpoints, newest first."""
    return sorted(
        (
            int(path.name[: -len(CHECKPOINT_SUFFIX)])
            for path in directory.glob(f"*{CHECKPOINT_SUFFIX}")
            if path.name[0] != "."
        ),
        reverse=True,
    )


def load(directory: Path, lsn: int) -> dict[str, Any] | None:
    """A checkpoint, or None if it is damaged."""
    try:
        crc, text = (directory / f"{lsn:020d}{CHECKPOINT_SUFFIX}").read_bytes().split(b"\n", 1)
        if int(crc, 16) != zlib.crc32(text):
            return None
    except (OSError, ValueError):
        return None
    content: dict[str, Any] = json.loads(text)
    if content["version"] > VERSION:
        raise NewerFormat(
            f"The checkpoint at {lsn} has format {content['version']}; this Headrace knows"
            f" {VERSION}.",
            fix="upgrade Headrace.",
        )
    return content


def forget_old(disk: Disk, directory: Path, journal_bases: list[int]) -> None:
    """Remove checkpoints behind the newest two, and journal files that only they needed."""
    kept = positions(directory)[:KEPT]
    for lsn in positions(directory)[KEPT:]:
        disk.unlink(directory / f"{lsn:020d}{CHECKPOINT_SUFFIX}")
    if len(kept) < KEPT:
        return
    needed = max((base for base in journal_bases if base <= kept[-1]), default=0)
    for base in journal_bases:
        if base < needed:
            disk.unlink(directory / f"{base:020d}.journal")


# Salvage: when records of the journal rotted, the segments still know some of what they said.
#
# A segment's header has its topic's settings, and each frame the commit that wrote it. So a topic
# whose definition was lost is found again, and so are rows that no record speaks of any more. Used
# by replicas when they step over damage, and by writers before they append behind it.


logger = logging.getLogger("headrace.log")


class LostCommits:
    """The numbers of commits whose records are gone: in the gaps that damage left, and behind the
    last record if that was damaged.
    """

    def __init__(self) -> None:
        self._gaps: list[range] = []
        self._from: int | None = None

    def add(self, first: int, stop: int) -> None:
        self._gaps.append(range(first, stop))
        self._from = None

    def add_rest(self, first: int) -> None:
        self._from = first

    def __contains__(self, commit: int) -> bool:
        return any(commit in gap for gap in self._gaps) or (
            self._from is not None and commit >= self._from
        )


def restoring(
    disk: Disk, root: Path, state: State, name: str, number: int, commit: int
) -> Operation | None:
    """The operation that defines a topic again which a record of some commit speaks of; None if
    nothing is left of it.
    """
    known = state.topics.get(name)
    directories = [root / "topics" / known.directory] if known else _candidates(root, name, commit)
    for directory in directories:
        settings = known.settings if known else topic_settings(disk, directory)
        if settings is not None:
            return restoring_operation(name, settings, directory, number)
    return None


def restoring_operation(
    name: str, settings: dict[str, Any], directory: Path, number: int = 0
) -> Operation:
    logger.error(
        "The definition of the topic %r was lost; it is taken from its segments. Check its"
        " settings.",
        name,
    )
    settings = settings | {"partitions": max(settings["partitions"], number + 1)}
    return [
        "restore",
        name,
        settings,
        directory.name,
        [first_base(directory / str(n)) for n in range(settings["partitions"])],
    ]


def _candidates(root: Path, name: str, commit: int) -> list[Path]:
    """Directories of topics of that name that were there at a commit, newest first."""
    found = {
        int(path.name.rpartition("~")[2]): path for path in (root / "topics").glob(f"{name}~*")
    }
    return [found[created] for created in sorted(found, reverse=True) if created < commit]


def topic_settings(disk: Disk, directory: Path) -> dict[str, Any] | None:
    for path in sorted(directory.glob(f"*/*{SEGMENT_SUFFIX}"), reverse=True):
        file = disk.open(path, write=False)
        try:
            return read_segment_header(file).settings
        except CorruptionError:
            continue
        finally:
            file.close()
    return None


def first_base(directory: Path) -> int:
    return min((int(path.name[:20]) for path in directory.glob(f"*{SEGMENT_SUFFIX}")), default=0)


# A replica: one process's copy of the state, kept up by reading the journal from a checkpoint on.

_MAX_ATTEMPTS = 20


class Replica:
    """`state` as of position `lsn` of the journal, in the file that starts at `base`."""

    def __init__(self, journal: Journal, directory: Path) -> None:
        self.journal, self.directory = journal, directory
        self.damage: list[Damage] = []
        self.lost = LostCommits()
        self.unclean: list[
            tuple[int, int, int]
        ] = []  # (file's base, position, bytes) of filling that is not empty
        self.state, self.lsn, self.base = State(), 0, 0
        self.records_since_checkpoint = 0
        self.load()

    def load(self) -> None:
        """Start from the newest checkpoint that is sound and that the journal goes on from."""
        for _ in range(_MAX_ATTEMPTS):
            if self._load_checkpoint():
                return
            bases = self.journal.bases()
            if not bases or bases[0] == 0:
                self.state, self.lsn, self.base = State(), FILE_HEADER_BYTES, 0
                self.records_since_checkpoint = 0
                return
            # otherwise, those we saw may have been forgotten, and others made, while we looked
        raise CorruptJournal(
            f"No checkpoint in {self.directory} is sound, and the journal does not reach back to"
            " the beginning.",
            fix="restore the journal directory from a backup.",
        )

    def _load_checkpoint(self) -> bool:
        for lsn in positions(self.directory):
            content = load(self.directory, lsn)
            if content is None:
                logger.warning(
                    "The checkpoint at %d in %s is damaged or gone; going back to the one before.",
                    lsn,
                    self.directory,
                )
            elif content["base"] in self.journal.bases():
                self.state, self.lsn, self.base = State.load(content["state"]), lsn, content["base"]
                return True
        return False

    def advance(
        self,
        limit: int | None = None,
        *,
        proven: int = 0,
        each: Callable[[Record], None] | None = None,
    ) -> int | None:
        """Apply records up to `limit` (all there are, if None). Returns where a torn tail begins,
        or None if there is none.

        `proven` is how far the journal is known to have been durable: damage before it is rot,
        which is reported and stepped over.
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
                if (
                    self.journal.end_of(self.base) > end
                ):  # somebody is writing it, and we hold no lock
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
        """Remember the damage: a writer must look for the rows that the lost record spoke of before
        it appends (`salvage.reconcile`).
        """
        if all(known.lsn != damage.lsn for known in self.damage):
            self.damage.append(damage)
            logger.error(
                "The journal is corrupt at byte %d of %s; going on behind it.",
                damage.position,
                damage.file,
            )
        self.lost.add_rest(self.state.commit + 1)
        self.lsn = damage.after if damage.after is not None else -(-stop // 8) * 8

    def _is_cut_off(self, limit: int | None, proven: int) -> bool:
        """Whether this file ends before it should: it was known to reach further, or its last
        record, which names the next file, is gone.
        """
        return self.lsn < (proven if limit is None else limit) or (
            limit is None and self._next_base() is not None
        )

    def _step_over_end(self, goal: int) -> bool:
        """Go on in the next file, if there is one (then True); else nothing may be written where
        something was durable.
        """
        file = self.journal.file_at(self.base)
        following = self._next_base()
        self._step_over(
            Damage(self.lsn, None, goal, str(file.path), self.lsn - self.base),
            goal if following is None else self.lsn,
        )
        if following is not None:
            self._go_to(following)
        return following is not None

    def _next_base(self) -> int | None:
        return min((base for base in self.journal.bases() if base > self.base), default=None)

    def _make_up_for_loss(self, record: Record) -> None:
        """A record may speak of what a lost one defined. What cannot be found again is left out,
        and said.
        """
        if record.commit > self.state.commit + 1:
            self.lost.add(self.state.commit + 1, record.commit)
        possible, defined = [], set()
        for operation in record.meta["ops"]:
            kind, *arguments = operation
            if kind in {"topic", "restore"}:
                defined.add(arguments[0])
            elif (
                kind in {"append", "adopt", "roll", "start"}
                and arguments[0] not in defined
                and not self.state.has_partition(*arguments[:2])
            ):
                found = restoring(
                    self.journal.disk,
                    self.directory.parent,
                    self.state,
                    arguments[0],
                    arguments[1],
                    record.commit,
                )
                if found is None:
                    logger.error(
                        "What commit %d did to the topic %r is lost: its definition is.",
                        record.commit,
                        arguments[0],
                    )
                    continue
                self.state.apply(self.state.commit, self.state.time_us, [found])
            possible.append(operation)
        record.meta["ops"] = possible
