"""The ledger: what a pipeline has committed. What is not in the ledger never happened.

Each commit of a query adds one `LedgerEntry`: the last tick that is in all of the query's outputs,
and the ids of its state files. The ledger is a topic of the log, so that outputs in the log commit
in the same transaction as their entry. The newest entry of each query is also stored in a note of
the log, where it can be read without a scan.

Only one runner may write. An epoch, incremented by compare-and-set when a runner starts
(`Ledger.take_over`) and checked inside every commit, fences older runners.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Self

from headrace.engine.state.files import SHARED, from_ranges, to_ranges
from headrace.errors import FencedError, NewerFormat, RetryError
from headrace.log.api import Log, Transaction
from headrace.log.values import AppendResult

VERSION = 2  # 1: no state file is shared by several steps
MAIN_QUERY = "main"
COMMIT_TIMEOUT = "10 minutes"
_SCHEMA = "version INT, epoch BIGINT, query STRING, tick BIGINT, states STRING, `at` TIMESTAMP"
_RETENTION_BYTES = 64 << 20  # the newest entry of each query is also in a note
_OFFSETS_PER_ENTRY = 4  # Kafka's transactions use offsets too, and there may be several queries


class RunnerFenced(FencedError):
    """A newer runner of the same pipeline has taken over."""


@dataclass(frozen=True)
class LedgerEntry:
    """One commit of a query: all inputs up to `tick` are in the outputs."""

    epoch: int
    query: str
    tick: int
    states: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Step -> key group -> id of the newest state file."""
    watermarks: str | None = None
    """The id of the file with the inputs' watermarks."""
    due_us: Mapping[str, int] = field(default_factory=dict)
    """Step -> the earliest watermark that its state waits for."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Metrics since the pipeline began; every row is counted once."""

    @property
    def _has_shared_files(self) -> bool:
        return any(name.startswith(SHARED) for ids in self.states.values() for name in ids.values())

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": VERSION if self._has_shared_files else 1,
                "epoch": self.epoch,
                "query": self.query,
                "tick": self.tick,
                "states": {step: to_ranges(ids) for step, ids in self.states.items()},
                "clocks": self.watermarks,
                "due_us": dict(self.due_us),
                "counts": dict(self.counts),
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> LedgerEntry:
        stored = json.loads(text)
        if stored["version"] > VERSION:
            raise NewerFormat(
                f"The ledger has format {stored['version']}; this Headrace knows {VERSION}.",
                fix="upgrade Headrace.",
            )
        states = {step: from_ranges(ranges) for step, ranges in stored["states"].items()}
        return cls(
            epoch=stored["epoch"],
            query=stored["query"],
            tick=stored["tick"],
            states=states,
            watermarks=stored.get("clocks"),
            due_us=stored.get("due_us", {}),
            counts=stored.get("counts", {}),
        )


@dataclass(frozen=True)
class _StoredEntry:
    """An entry, and the exact text of its note in the log, for compare-and-set."""

    entry: LedgerEntry
    text: str


_TOPIC_PREFIX = "__ledger."


def known_pipelines(log: Log) -> list[str]:
    """The pipelines that have ever run on a log."""
    topics = [topic for topic in log.topics() if topic.startswith(_TOPIC_PREFIX)]
    return [topic.removeprefix(_TOPIC_PREFIX) for topic in topics]


class Ledger:
    """The ledger of one pipeline. `open` creates its topic; `take_over` makes this process the
    pipeline's only writer.
    """

    def __init__(self, log: Log, pipeline: str) -> None:
        self.log = log
        self.pipeline = pipeline
        self.topic = f"{_TOPIC_PREFIX}{pipeline}"
        self.epoch = -1
        self._epoch_note = f"epoch.{pipeline}"
        self._transaction: Transaction | None = None  # the last one of this runner
        self._added: dict[str, _StoredEntry] = {}  # entries in that transaction
        # The newest entries. Nobody else can change them while this process is the runner.
        self._newest: dict[str, _StoredEntry] = {}
        self._is_settled = True  # whether the outcome of the last commit is known

    @classmethod
    def open(cls, log: Log, pipeline: str) -> Self:
        """Create the ledger's topic if it is missing, and return the ledger."""
        ledger = cls(log, pipeline)
        log.create_topic(
            ledger.topic,
            _SCHEMA,
            exist_ok=True,
            retention_bytes=_RETENTION_BYTES,
            segment_bytes=_RETENTION_BYTES // 8,
        )
        return ledger

    # Writing

    def take_over(self) -> int:
        """Become the pipeline's runner: fences every older runner from its next commit on. Returns
        the new epoch.
        """
        while True:
            # Once this transaction is open, an older runner cannot commit: what is read next stays.
            tx = self._open_transaction()
            stored_epoch = self.log.note(self._epoch_note)
            self.epoch = int(stored_epoch or 0) + 1
            tx.set_note(self._epoch_note, str(self.epoch), expect=stored_epoch)
            try:
                tx.commit()
            except FencedError:  # another runner starts at the same moment
                continue
            self._transaction, self._newest = tx, {}
            return self.epoch

    def _open_transaction(self) -> Transaction:
        return self.log.transaction(f"pipeline.{self.pipeline}", timeout=COMMIT_TIMEOUT)

    def transaction(self) -> Transaction:
        """A transaction that commits only while this runner is the newest."""
        with self.fencing():
            previous = self._transaction
            tx = self._open_transaction() if previous is None else previous.next()
        tx.set_note(self._epoch_note, str(self.epoch), expect=str(self.epoch))
        self._transaction = tx
        self._added = {}
        self._is_settled = True
        return tx

    def settle(self) -> None:
        """Find out whether the last commit happened, if its outcome is unknown. Must be called
        before anything is read that it may have written.

        The log decides an open transaction when its owner opens the next one.
        """
        if not self._is_settled:
            self.transaction().abort()

    def add(self, tx: Transaction, entry: LedgerEntry) -> None:
        """Add an entry to a transaction. The commit fails if the query's newest entry in the log is
        not the one that this ledger knows.
        """
        text = entry.to_json()
        row = {
            "version": VERSION,
            "epoch": entry.epoch,
            "query": entry.query,
            "tick": entry.tick,
            "states": text,
            "at": datetime.now(UTC),
        }
        before = self._find_newest(entry.query)
        tx.append(self.topic, [row])
        tx.set_note(self._note(entry.query), text, expect=None if before is None else before.text)
        self._added[entry.query] = _StoredEntry(entry, text)

    def remove(self, tx: Transaction, query: str) -> None:
        """Remove a query's newest entry in a transaction: the query starts over."""
        before = self._find_newest(query)
        tx.set_note(self._note(query), None, expect=None if before is None else before.text)
        self._newest.pop(query, None)

    def commit(self, tx: Transaction) -> AppendResult:
        """Commit a transaction of this ledger. Raises RunnerFenced if a newer runner has taken
        over.
        """
        # Until the outcome is known, the newest entries are read from the log.
        newest, self._newest = self._newest, {}
        self._is_settled = False
        with self.fencing():
            result = tx.commit()
        self._newest = newest | self._added
        self._is_settled = True
        return result

    # Fencing

    @contextmanager
    def fencing(self) -> Iterator[None]:
        """Turn a refusal by the log or the views into RunnerFenced or RetryError."""
        try:
            yield
        except FencedError as error:
            raise self._refusal() from error

    def check_newest(self) -> None:
        """Raise RunnerFenced if a newer runner has taken over, without waiting for the next commit
        to find out.
        """
        if self.log.note(self._epoch_note) != str(self.epoch):
            raise self._refusal()

    def _refusal(self) -> RunnerFenced | RetryError:
        """RunnerFenced if there is a newer epoch. Otherwise an older runner, not yet aware that it
        is fenced, disturbed the commit, which can be tried again.
        """
        if self.log.note(self._epoch_note) == str(self.epoch):
            self._transaction = None
            return RetryError(
                f"A commit of the pipeline {self.pipeline!r} was aborted by another runner that is"
                " fenced by now; nothing of it is stored.",
                fix="try again.",
            )
        return RunnerFenced(
            f"Another runner of the pipeline {self.pipeline!r} has taken over (this one has epoch"
            f" {self.epoch}).",
            fix=(
                "nothing, if that was intended: this runner has ended, and the newer one goes on"
                " where it stopped. Start only one runner of a pipeline."
            ),
        )

    # Reading

    def last(self, query: str) -> LedgerEntry | None:
        """The newest entry of a query."""
        stored = self._find_newest(query)
        return None if stored is None else stored.entry

    def _find_newest(self, query: str) -> _StoredEntry | None:
        if query in self._newest:
            return self._newest[query]
        text = self.log.note(self._note(query))
        stored = None if text is None else _StoredEntry(LedgerEntry.from_json(text), text)
        if stored is not None and self.epoch >= 0:
            self._newest[query] = stored
        return stored

    def _note(self, query: str) -> str:
        return f"ledger.{self.pipeline}.{query}"

    def recent(self, count: int) -> list[LedgerEntry]:
        """The last `count` entries of each query, among the entries written lately."""
        end = self.log.end_offsets(self.topic)[0]
        start = max(self.log.start_offsets(self.topic)[0], end - _OFFSETS_PER_ENTRY * count)
        by_query: dict[str, list[LedgerEntry]] = {}
        for entry in self._read(start, end):
            by_query.setdefault(entry.query, []).append(entry)
        return [entry for entries in by_query.values() for entry in entries[-count:]]

    def entries(self) -> Iterator[LedgerEntry]:
        """All entries, oldest first."""
        return self._read()

    def _read(self, start: int | None = None, stop: int | None = None) -> Iterator[LedgerEntry]:
        for batch in self.log.read(self.topic, 0, start, stop, columns=["states"]):
            for text in batch.column(0).to_pylist():
                yield LedgerEntry.from_json(text)
