"""The ledger: for each commit of a pipeline's query the last tick and the state ids. Whatever is
not in it never happened.

It is a topic of the log, so outputs in the log commit in the same transaction as their entry; the
newest entry of each query also stands in a note, where it is found at once. Who may write is
decided by an epoch, taken by compare-and-set when a run starts and checked inside every commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from headrace.errors import FencedError, NewerFormat, RetryError
from headrace.log.api import Log, Transaction
from headrace.log.values import AppendResult

VERSION = 1
MAIN_QUERY = "main"
COMMIT_TIMEOUT = "10 minutes"
_SCHEMA = "version INT, epoch BIGINT, query STRING, tick BIGINT, states STRING, `at` TIMESTAMP"
_KEPT_BYTES = 64 << 20  # the newest entry of each query is in a note too
_OFFSETS_AN_ENTRY = 4  # Kafka's transactions take offsets too, and there may be several queries
StateIds = Mapping[int, str]


class RunnerFenced(FencedError):
    """A newer run of the same pipeline has taken over."""


@dataclass(frozen=True)
class LedgerEntry:
    """All inputs up to `tick` are in the outputs; `states` are the ids of every step's key groups
    as of it, `clocks` the id of the clocks.

    `due_us`: what the steps that go by time wait for next. `counts`: what was counted since the
    beginning, each row once.
    """

    epoch: int
    query: str
    tick: int
    states: Mapping[str, StateIds] = field(default_factory=dict)
    watermarks: str | None = None
    due_us: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        states = {step: _ranges(ids) for step, ids in self.states.items()}
        about = {
            "version": VERSION,
            "epoch": self.epoch,
            "query": self.query,
            "tick": self.tick,
            "states": states,
        }
        return json.dumps(
            {
                **about,
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
        states = {
            step: {group: name for first, last, name in ranges for group in range(first, last + 1)}
            for step, ranges in stored["states"].items()
        }
        return cls(
            stored["epoch"],
            stored["query"],
            stored["tick"],
            states,
            stored.get("clocks"),
            stored.get("due_us", {}),
            stored.get("counts", {}),
        )


def _ranges(ids: StateIds) -> list[tuple[int, int, str]]:
    """Neighbouring key groups usually have one id: 128 of them are a few ranges."""
    found: list[tuple[int, int, str]] = []
    for group, name in sorted(ids.items()):
        if found and found[-1][1] == group - 1 and found[-1][2] == name:
            found[-1] = (found[-1][0], group, name)
        else:
            found.append((group, group, name))
    return found


@dataclass(frozen=True)
class _Stored:
    """An entry, and its note as it is in the log."""

    entry: LedgerEntry
    text: str


class Ledger:
    """One pipeline's ledger, as its runner sees it."""

    def __init__(self, log: Log, pipeline: str) -> None:
        self.log, self.pipeline, self.topic = log, pipeline, f"__ledger.{pipeline}"
        self._epoch_note = f"epoch.{pipeline}"
        log.create_topic(
            self.topic,
            _SCHEMA,
            exist_ok=True,
            retention_bytes=_KEPT_BYTES,
            segment_bytes=_KEPT_BYTES // 8,
        )
        self.epoch = -1
        self._transaction: Transaction | None = None  # the last one of this runner
        self._added: dict[str, _Stored] = {}  # by it
        self._known: dict[
            str, _Stored
        ] = {}  # the newest, which nobody else can change while this is the runner
        self._is_settled = True  # whether the outcome of the last commit is known

    def take_over(self) -> int:
        """Become the pipeline's runner: an older one is refused from its next commit on."""
        while True:
            tx = (
                self._opened()
            )  # from here on an older runner cannot commit, so what is read next stays
            known = self.log.note(self._epoch_note)
            self.epoch = int(known or 0) + 1
            tx.set_note(self._epoch_note, str(self.epoch), expect=known)
            try:
                tx.commit()
            except FencedError:  # another one starts at the same moment
                continue
            self._transaction, self._known = tx, {}
            return self.epoch

    def _opened(self) -> Transaction:
        return self.log.transaction(f"pipeline.{self.pipeline}", timeout=COMMIT_TIMEOUT)

    def transaction(self) -> Transaction:
        """A transaction that commits only while this runner is the newest."""
        with self.fencing():
            tx = self._transaction.next() if self._transaction is not None else self._opened()
        tx.set_note(self._epoch_note, str(self.epoch), expect=str(self.epoch))
        self._transaction, self._added, self._is_settled = tx, {}, True
        return tx

    def settle(self) -> None:
        """Before anything is read that the last commit may have written: if its outcome is unknown,
        decide it. The log does so when its owner opens another transaction.
        """
        if not self._is_settled:
            self.transaction().abort()

    def commit(self, tx: Transaction) -> AppendResult:
        """Commit, and say clearly if someone else has taken over."""
        known, self._known = self._known, {}  # a commit whose outcome is not known is looked up
        self._is_settled = False
        with self.fencing():
            position = tx.commit()
        self._known, self._is_settled = known | self._added, True
        return position

    @contextmanager
    def fencing(self) -> Iterator[None]:
        """Around whatever refuses an older runner: it is told so in one way."""
        try:
            yield
        except FencedError as error:
            raise self._refused() from error

    def _refused(self) -> RunnerFenced | RetryError:
        """Fenced by a newer runner; or, if there is none, by an older one that found out too late:
        then it is worth another try.
        """
        if self.log.note(self._epoch_note) == str(self.epoch):
            self._transaction = None
            return RetryError(
                f"A commit of the pipeline {self.pipeline!r} was disturbed, and nothing of it is"
                " stored.",
                fix="try again.",
            )
        return RunnerFenced(
            f"Another runner of the pipeline {self.pipeline!r} has taken over (this one has epoch"
            f" {self.epoch}).",
            fix=(
                "nothing, if that was meant: this one has ended, and the newer one goes on where it"
                " stopped. Start one runner of a pipeline only."
            ),
        )

    def add(self, tx: Transaction, entry: LedgerEntry) -> None:
        """An entry behind the newest one that is known here: if there is another by the time of the
        commit, that fails.
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
        before = self._newest(entry.query)
        tx.append(self.topic, [row])
        tx.set_note(self._note(entry.query), text, expect=None if before is None else before.text)
        self._added[entry.query] = _Stored(entry, text)

    def strike_out(self, tx: Transaction, query: str) -> None:
        """A query's newest entry goes: it begins anew."""
        before = self._newest(query)
        tx.set_note(self._note(query), None, expect=None if before is None else before.text)
        self._known.pop(query, None)

    def last(self, query: str) -> LedgerEntry | None:
        """The newest entry."""
        found = self._newest(query)
        return None if found is None else found.entry

    def _newest(self, query: str) -> _Stored | None:
        if query in self._known:
            return self._known[query]
        text = self.log.note(self._note(query))
        found = None if text is None else _Stored(LedgerEntry.from_json(text), text)
        if found is not None and self.epoch >= 0:
            self._known[query] = found
        return found

    def _note(self, query: str) -> str:
        return f"ledger.{self.pipeline}.{query}"

    def recent(self, count: int) -> list[LedgerEntry]:
        """The last `count` entries of each query, of those written lately."""
        end = self.log.end_offsets(self.topic)[0]
        start = max(self.log.start_offsets(self.topic)[0], end - _OFFSETS_AN_ENTRY * count)
        found: dict[str, list[LedgerEntry]] = {}
        for batch in self.log.read(self.topic, 0, start, end, columns=["states"]):
            for text in batch.column(0).to_pylist():
                entry = LedgerEntry.from_json(text)
                found.setdefault(entry.query, []).append(entry)
        return [entry for entries in found.values() for entry in entries[-count:]]

    def check_newest(self) -> None:
        """RunnerFenced if another runner has taken over, which otherwise the next commit finds
        out.
        """
        if self.log.note(self._epoch_note) != str(self.epoch):
            raise self._refused()

    def entries(self) -> Iterator[LedgerEntry]:
        """All of them, oldest first."""
        for batch in self.log.read(self.topic, columns=["states"]):
            for text in batch.column(0).to_pylist():
                yield LedgerEntry.from_json(text)
