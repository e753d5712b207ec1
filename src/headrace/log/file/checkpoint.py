"""Checkpoints and replicas: the state on disk, and a process's copy of it in memory.

A checkpoint is the state as of a position of the journal, so that opening a log does not read its
whole past. The two newest are retained, with the journal since the older one: a damaged checkpoint
costs time, not data.

A `Replica` starts from a checkpoint and applies the journal's records. When records are corrupt, it
restores what it can from segment headers, which have their topic's settings; the rows of lost
commits are found by `recovery.reconcile`. Checkpoints are made by `maintenance`.
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
from headrace.log.file.journal import (
    FILE_HEADER_BYTES,
    ROLL,
    Journal,
    JournalDamage,
    JournalRecord,
    journal_name,
)
from headrace.log.file.segment import SEGMENT_SUFFIX, read_segment_header
from headrace.log.file.state import State

if TYPE_CHECKING:
    from headrace.log.file.state import Operation


logger = logging.getLogger("headrace.log")

# Checkpoints

CHECKPOINT_SUFFIX = ".checkpoint"
CHECKPOINT_VERSION = 3
"""Format 2 has the ranges of the sequence numbers that each producer has stored, the ranges of the
messages that each queue has done, and when each transaction id was last used. Format 3, written
only then, has topics whose columns have changed.
"""
MAX_CHECKPOINTS = 2


def checkpoint_name(lsn: int) -> str:
    """The file name of the checkpoint as of a position of the journal."""
    return f"{lsn:020d}{CHECKPOINT_SUFFIX}"


def save_checkpoint(
    disk: Disk, directory: Path, lsn: int, base: int, state: dict[str, Any]
) -> None:
    """Store a state as of `lsn`, a position in the journal file that starts at `base`."""
    has_history = any("schema_history" in topic["settings"] for topic in state["topics"].values())
    version = CHECKPOINT_VERSION if has_history else CHECKPOINT_VERSION - 1
    content = {"version": version, "lsn": lsn, "base": base, "state": state}
    text = json.dumps(content, separators=(",", ":")).encode()
    disk.replace_file(directory / checkpoint_name(lsn), [b"%08x\n" % zlib.crc32(text), text])


def checkpoint_lsns(directory: Path) -> list[int]:
    """The positions of the journal as of which there are checkpoints, newest first."""
    lsns = (
        int(path.name[: -len(CHECKPOINT_SUFFIX)])
        for path in directory.glob(f"*{CHECKPOINT_SUFFIX}")
        if path.name[0] != "."
    )
    return sorted(lsns, reverse=True)


def load_checkpoint(directory: Path, lsn: int) -> dict[str, Any] | None:
    """The content of a checkpoint, or None if it is damaged or gone."""
    try:
        crc, text = (directory / checkpoint_name(lsn)).read_bytes().split(b"\n", 1)
        if int(crc, 16) != zlib.crc32(text):
            return None
    except (OSError, ValueError):
        return None
    content: dict[str, Any] = json.loads(text)
    if content["version"] > CHECKPOINT_VERSION:
        raise NewerFormat(
            f"The checkpoint at {lsn} has format {content['version']}; this Headrace knows"
            f" {CHECKPOINT_VERSION}.",
            fix="upgrade Headrace.",
        )
    return content


def delete_old_checkpoints(disk: Disk, directory: Path, journal_bases: list[int]) -> None:
    """Delete all but the newest two checkpoints, and journal files that only the others need."""
    lsns = checkpoint_lsns(directory)
    retained = lsns[:MAX_CHECKPOINTS]
    for lsn in lsns[MAX_CHECKPOINTS:]:
        disk.unlink(directory / checkpoint_name(lsn))
    if len(retained) < MAX_CHECKPOINTS:
        return
    first_needed = max((base for base in journal_bases if base <= retained[-1]), default=0)
    for base in journal_bases:
        if base < first_needed:
            disk.unlink(directory / journal_name(base))


# Restoring topics whose definition the journal has lost


class LostCommits:
    """The numbers of commits whose journal records are corrupt: in the gaps that damage left, and
    from some number on if the damage is at the journal's end.
    """

    def __init__(self) -> None:
        self._gaps: list[range] = []
        self._from: int | None = None

    def add(self, first: int, stop: int) -> None:
        self._gaps.append(range(first, stop))
        self._from = None

    def add_from(self, first: int) -> None:
        self._from = first

    @property
    def first(self) -> int | None:
        """The first of them; None if there are none."""
        firsts = [gap.start for gap in self._gaps] + [self._from] * (self._from is not None)
        return min((first for first in firsts if first is not None), default=None)

    def __contains__(self, commit: int) -> bool:
        return any(commit in gap for gap in self._gaps) or (
            self._from is not None and commit >= self._from
        )


def topic_settings(disk: Disk, directory: Path) -> dict[str, Any] | None:
    """A topic's settings from the header of its newest sound segment; None if there is none."""
    for path in sorted(directory.glob(f"*/*{SEGMENT_SUFFIX}"), reverse=True):
        file = disk.open(path, write=False)
        try:
            return read_segment_header(file).settings
        except CorruptionError:
            continue
        finally:
            file.close()
    return None


def restore_operation(
    name: str, settings: dict[str, Any], directory: Path, number: int = 0
) -> Operation:
    """The operation that defines a topic, with at least `number + 1` partitions, from settings that
    were found in its segments.
    """
    logger.error(
        "The definition of the topic %r was lost; it is taken from its segments. Check its"
        " settings.",
        name,
    )
    settings = settings | {"partitions": max(settings["partitions"], number + 1)}
    starts = []
    for partition in range(settings["partitions"]):
        paths = (directory / str(partition)).glob(f"*{SEGMENT_SUFFIX}")
        starts.append(min((int(path.name[:20]) for path in paths), default=0))
    return ["restore", name, settings, directory.name, starts]


# Replicas

_MAX_LOAD_ATTEMPTS = 20


class Replica:
    """A process's copy of the state.

    Attributes:
        state: The state as of position `lsn` of the journal, in the file that starts at `base`.
        damage: Corrupt parts of the journal that were skipped and not yet reconciled.
        lost_commits: The commits whose records were in the damage.
        bad_padding: (file's base, position, bytes) of padding behind records that is not zeros.
    """

    def __init__(self, journal: Journal, directory: Path) -> None:
        self.journal = journal
        self.directory = directory
        self.damage: list[JournalDamage] = []
        self.lost_commits = LostCommits()
        self.bad_padding: list[tuple[int, int, int]] = []
        self.state = State()
        self.lsn = 0
        self.base = 0
        self.records_since_checkpoint = 0

    @classmethod
    def open(cls, journal: Journal, directory: Path) -> Replica:
        """A replica as of the newest sound checkpoint."""
        replica = cls(journal, directory)
        replica.load()
        return replica

    def load(self) -> None:
        """Start from the newest sound checkpoint whose journal file exists."""
        for _ in range(_MAX_LOAD_ATTEMPTS):
            if self._load_checkpoint():
                return
            bases = self.journal.bases()
            if not bases or bases[0] == 0:
                self.state = State()
                self.lsn = FILE_HEADER_BYTES
                self.base = 0
                self.records_since_checkpoint = 0
                return
            # Otherwise checkpoints were deleted and others made while we looked: look again.
        raise CorruptJournal(
            f"No checkpoint in {self.directory} is sound, and the journal does not reach back to"
            " the beginning.",
            fix="restore the journal directory from a backup.",
        )

    def _load_checkpoint(self) -> bool:
        for lsn in checkpoint_lsns(self.directory):
            content = load_checkpoint(self.directory, lsn)
            if content is None:
                logger.warning(
                    "The checkpoint at %d in %s is damaged or gone; going back to the one before.",
                    lsn,
                    self.directory,
                )
            elif content["base"] in (bases := self.journal.bases()) or (
                content["base"] > max(bases, default=-1)  # the newest file is lost
            ):
                self.state = State.load(content["state"])
                self.lsn = lsn
                self.base = content["base"]
                return True
        return False

    def advance(
        self,
        limit: int | None = None,
        *,
        durable_lsn: int = 0,
        on_record: Callable[[JournalRecord], None] | None = None,
    ) -> int | None:
        """Apply the journal's records.

        Args:
            limit: The position up to which to apply them; None for all.
            durable_lsn: How far the journal is known to have been durable. Damage before it is
                corruption, which is reported and skipped; damage behind it is a torn tail.
            on_record: Called with each record before it is applied.

        Returns:
            The position of a torn tail; None if there is none.
        """
        while True:
            end = self.journal.end_of(self.base)
            stop = end if limit is None else min(end, limit)
            has_rolled = False
            for item in self.journal.records(self.base, self.lsn, stop):
                if isinstance(item, JournalDamage):
                    is_behind_durable = item.lsn >= max(durable_lsn, item.durable_lsn)
                    if is_behind_durable and self._next_base() is None:
                        return item.lsn
                    self._skip_damage(item, stop)
                    continue
                durable_lsn = max(durable_lsn, item.durable_lsn)
                if any(item.padding) or item.end > end:
                    start = min(item.end, end) - len(item.padding)
                    self.bad_padding.append((self.base, start, item.end - start))
                has_rolled = self._apply(item, on_record)
            if not has_rolled and self._ends_too_early(limit, durable_lsn):
                if self.journal.end_of(self.base) > end:  # it is being written; we hold no lock
                    continue
                has_rolled = self._skip_end(durable_lsn if limit is None else limit)
            if not has_rolled or (limit is not None and self.lsn >= limit):
                return None

    def _apply(
        self, record: JournalRecord, on_record: Callable[[JournalRecord], None] | None
    ) -> bool:
        """Apply one record. Returns whether the journal continues in another file."""
        if record.kind == ROLL:
            self._continue_in(record.end)
            return True
        self.state.check_names(record.meta["ops"])
        if self.damage:
            self._restore_topics(record)
        if on_record is not None:
            on_record(record)
        self.state.apply(record.commit, record.meta["t"], record.meta["ops"])
        self.lsn = record.end
        self.records_since_checkpoint += 1
        return False

    def _continue_in(self, base: int) -> None:
        """Continue in the journal file that starts at a position."""
        self.state.on_journal_roll()
        self.records_since_checkpoint = 0
        self.base = base
        self.lsn = base + FILE_HEADER_BYTES

    def _next_base(self) -> int | None:
        return min((base for base in self.journal.bases() if base > self.base), default=None)

    # Damage

    def _skip_damage(self, damage: JournalDamage, stop: int) -> None:
        """Continue behind damage and remember it: before a writer appends, it must look for the
        rows that the lost records described (`recovery.reconcile`).
        """
        if all(earlier.lsn != damage.lsn for earlier in self.damage):
            self.damage.append(damage)
            logger.error(
                "The journal is corrupt at byte %d of %s; going on behind it.",
                damage.position,
                damage.file,
            )
        self.lost_commits.add_from(self.state.commit + 1)
        self.state.forget_sequences()
        self.lsn = damage.after if damage.after is not None else -(-stop // 8) * 8

    def _ends_too_early(self, limit: int | None, durable_lsn: int) -> bool:
        """Whether the file was known to reach further, or its ROLL record, which names the next
        file, is gone.
        """
        return self.lsn < (durable_lsn if limit is None else limit) or (
            limit is None and self._next_base() is not None
        )

    def _skip_end(self, goal: int) -> bool:
        """Continue in the next file, if there is one; otherwise at `goal`, so that nothing is
        written where something was durable. Returns whether there is a next file.
        """
        file = self.journal.file_at(self.base)
        next_base = self._next_base()
        damage = JournalDamage(
            lsn=self.lsn,
            after=None,
            durable_lsn=goal,
            file=str(file.path),
            position=self.lsn - self.base,
        )
        self._skip_damage(damage, goal if next_base is None else self.lsn)
        if next_base is not None:
            self._continue_in(next_base)
        return next_base is not None

    def skip_missing(self, base: int, limit: int) -> None:
        """Continue at `limit` although the newest file, which starts at `base`, is lost."""
        damage = JournalDamage(
            lsn=base,
            after=None,
            durable_lsn=limit,
            file=str(self.directory / journal_name(base)),
            position=0,
        )
        self._skip_damage(damage, limit)

    def skip_rest(self) -> None:
        """Take note that commits behind the journal's end are lost, whose rows may be there."""
        file = self.journal.file_at(self.base)
        position = self.lsn - self.base
        self.damage.append(JournalDamage(self.lsn, None, self.lsn, str(file.path), position))
        self.lost_commits.add_from(self.state.commit + 1)
        self.state.forget_sequences()

    def _restore_topics(self, record: JournalRecord) -> None:
        """Define the topics that a record refers to and whose definition was in lost records.
        Operations on topics that cannot be restored are removed from the record and logged.
        """
        if record.commit > self.state.commit + 1:
            self.lost_commits.add(self.state.commit + 1, record.commit)
        possible = []
        defined: set[str] = set()
        for operation in record.meta["ops"]:
            kind, *arguments = operation
            if kind in {"topic", "evolve", "restore"}:
                defined.add(arguments[0])
            elif (
                kind in {"append", "adopt", "roll", "start"}
                and arguments[0] not in defined
                and not self.state.has_partition(*arguments[:2])
            ):
                restore = self._find_topic(arguments[0], arguments[1], record.commit)
                if restore is None:
                    logger.error(
                        "What commit %d did to the topic %r is lost: its definition is.",
                        record.commit,
                        arguments[0],
                    )
                    continue
                self.state.apply(self.state.commit, self.state.time_us, [restore])
            possible.append(operation)
        record.meta["ops"] = possible

    def _find_topic(self, name: str, number: int, commit: int) -> Operation | None:
        """The operation that restores a topic, with partition `number`, as a commit knew it; None
        if nothing is left of it.
        """
        topics = self.directory.parent / "topics"
        known = self.state.topics.get(name)
        if known is not None:
            return restore_operation(name, known.settings, topics / known.directory, number)
        created = {int(path.name.rpartition("~")[2]): path for path in topics.glob(f"{name}~*")}
        for created_in in sorted(created, reverse=True):
            if created_in < commit:
                settings = topic_settings(self.journal.disk, created[created_in])
                if settings is not None:
                    return restore_operation(name, settings, created[created_in], number)
        return None
