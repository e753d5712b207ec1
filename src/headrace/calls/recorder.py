"""The recorder of a call: reads the rows that wait, and stores what became of them, in one
transaction with how far it came. It belongs to the thread that uses the log.

    fates      row 6: an answer; row 8: an answer; row 9: none after its tries
    one transaction
      __calls.shop.geocode      6 and 8, each with its row's columns, `_call`, `_code`,
                                `_answered_at`, and `_complete_to`: no row before it still waits
      geocode.dead              9, with the reason
      note calls.shop.geocode   what is open (`requests`)

An answer is used by nobody before its transaction has committed: the pipeline reads it from the
log. If the outcome of a commit is not known, the note says whether it happened.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

import pyarrow as pa

from headrace.calls.call import Call
from headrace.calls.requests import Request, Requests, storable_us
from headrace.error_policy import NULL
from headrace.errors import HeadraceError, RetryError
from headrace.log.api import Log, Transaction
from headrace.log.dead_letters import (
    DeadLetter,
    dead_letter_json,
    dead_letters_to_rows,
    ensure_dead_topic,
)
from headrace.log.values import COMPLETE_TO
from headrace.operators.kernel import UNSTARTED
from headrace.types.values import Misfit

logger = logging.getLogger("headrace.calls")
PROGRESS_EVERY_S = 0.5
TRIM_EVERY = 50_000
"""Requests are removed from the log in steps of so many offsets."""
NOT_FITTING = (Misfit, pa.ArrowException, OverflowError, ValueError, TypeError)
"""What conversions to Arrow raise for a value that does not fit."""


@dataclass(eq=False, slots=True)
class RequestFate:
    """What became of a request: the values of its answer, or the reason why there is none."""

    request: Request
    values: Mapping[str, Any] | None
    answered_us: int = 0
    reason: str = ""


@dataclass
class Exchanged:
    """What an exchange with the log gave."""

    requests: list[Request] = field(default_factory=list)
    """The rows that were read."""
    misfits: list[tuple[Request, str]] = field(default_factory=list)
    """The rows whose answers do not fit and were not recorded, with the reason."""
    dead: int = 0
    is_quiet: bool = False
    """Whether every request has a recorded fate, and event time has been moved on."""


class Recorder:
    """Records the fates of a call's requests. `open` takes over from an older one."""

    def __init__(self, log: Log, call: Call, *, is_own_tick: Callable[[int], bool]) -> None:
        self.log = log
        self.call = call
        self.requests = Requests(log, call, is_own_tick=is_own_tick)
        self.lows: dict[int, int] = {}
        """For each partition the offset below which every row has its fate recorded."""
        self._schema = log.topic(call.answers_topic).arrow_schema
        self._transaction: Transaction | None = None
        self._note: str | None = None
        self._written_us = UNSTARTED
        """The event time that the newest row of the answers is complete to."""
        self._owes_progress = False
        self._progress_s = 0.0
        self._trimmed: dict[int, int] = {}
        self._unsure: tuple[str, Sequence[RequestFate]] | None = None
        """The note and the fates of a commit whose outcome is not known."""
        self._recorded: set[int] = set()
        self._dead_topic: str | None = None

    @classmethod
    def open(cls, log: Log, call: Call, *, is_own_tick: Callable[[int], bool]) -> Self:
        """Fence an older recorder of the call, and read how far it came. The topics exist."""
        recorder = cls(log, call, is_own_tick=is_own_tick)
        recorder._transaction = log.transaction(call.owner)
        recorder.load()
        recorder._owes_progress = recorder.requests.complete_us > UNSTARTED
        if call.has_time and not any(log.end_offsets(call.answers_topic).values()):
            # From its first tick on, what follows waits for the rows that wait for an answer.
            with recorder._commit() as tx:
                tx.append(call.answers_topic, recorder._progress_row(), partition=0)
        return recorder

    def load(self) -> None:
        """Go back to what the log has: open rows are read again."""
        self._note = self.log.note(self.call.owner)
        self.requests.load(self._note)
        self.lows = self.requests.lows
        self._trimmed = dict(self.lows)

    def exchange(self, done: Sequence[RequestFate], max_rows: int) -> Exchanged:
        """Record what is done, and read what waits.

        1. Record answers, dead letters and progress in one transaction.
        2. Read further requests.
        3. If none is open, move event time on for what follows.
        """
        exchanged = Exchanged()
        self._settle_unsure()
        done = [fate for fate in done if id(fate) not in self._recorded]
        if done:  # 1
            exchanged.misfits = self._record(done)
            exchanged.dead = sum(self._is_dead(fate) for fate in done)
        self._recorded = set()
        try:
            if max_rows:  # 2
                exchanged.requests = self.requests.read(max_rows)
            if not self.requests.open_rows and self.requests.has_read_all:  # 3
                exchanged.is_quiet = not self._is_progress_due() or self._record_progress()
        except RetryError as error:
            logger.debug("The requests of %s cannot be read.", self.call.name, exc_info=error)
        self.lows = self.requests.lows
        return exchanged

    def _settle_unsure(self) -> None:
        """Find out whether the last commit happened, if its outcome is not known."""
        if self._unsure is None:
            return
        assert self._transaction is not None
        self._transaction = self._transaction.next()  # the log decides the one before
        note, fates = self._unsure
        if self.log.note(self.call.owner) == note:
            self._note = note
            self.requests.settle(fate.request for fate in fates)
            self._recorded = set(map(id, fates))
        self._unsure = None

    def _is_dead(self, fate: RequestFate) -> bool:
        return fate.values is None and self.call.errors != NULL

    def _record(self, done: Sequence[RequestFate]) -> list[tuple[Request, str]]:
        """Record fates in one transaction. Returns the answers that Arrow does not take."""
        answers = [fate for fate in done if not self._is_dead(fate)]
        dead = [fate for fate in done if self._is_dead(fate)]
        columns, misfits = self._answer_columns(answers)
        if misfits:
            refused = {id(request) for request, _ in misfits}
            answers = [fate for fate in answers if id(fate.request) not in refused]
            columns, _ = self._answer_columns(answers)
        if dead and self._dead_topic is None:
            self._dead_topic = ensure_dead_topic(self.log, self.call.name)
        before_us, copied = self.requests.complete_us, self.requests.copy()
        settled = [*answers, *dead]
        self.requests.settle(fate.request for fate in settled)
        # On Kafka a tick may cut a transaction between partitions: what it settles is complete
        # only with the next one.
        is_single = len(self.lows) == 1
        complete_us = self.requests.complete_us if is_single else before_us
        try:
            with self._commit(settled) as tx:
                for partition, batch in self._answer_batches(answers, columns, complete_us):
                    tx.append(self.call.answers_topic, batch, partition=partition)
                if self._dead_topic is not None and dead:
                    tx.append(self._dead_topic, self._dead_rows(dead))
        except BaseException:
            self.requests.restore(copied, (fate.request for fate in settled))
            raise
        self._owes_progress |= bool(dead) or not is_single
        if answers:
            self._written_us = max(self._written_us, complete_us)
        self._trim()
        return misfits

    @contextmanager
    def _commit(self, settled: Sequence[RequestFate] = ()) -> Iterator[Transaction]:
        """A transaction that stores the progress too. If its outcome is not known, the next
        exchange finds out from the note.
        """
        assert self._transaction is not None
        tx = self._transaction = self._transaction.next()
        try:
            yield tx
        except BaseException:
            tx.abort()
            raise
        note = self.requests.to_json()
        tx.set_note(self.call.owner, note, expect=self._note)
        self._unsure = note, settled
        tx.commit()
        self._unsure = None
        self._note = note

    def _answer_columns(
        self, answers: Sequence[RequestFate]
    ) -> tuple[list[pa.Array], list[tuple[Request, str]]]:
        """The columns of answers, and those that do not fit."""
        columns: list[pa.Array] = []
        misfits: dict[int, tuple[Request, str]] = {}
        for converter in self.call.converters:
            field = converter.field.with_nullable(True)
            values = [
                None if fate.values is None else fate.values[converter.name] for fate in answers
            ]
            given = [value for value in values if value is not None]
            try:
                if given and not converter.exact.issuperset(map(type, given)):
                    values = [
                        None if value is None else converter.convert(value) for value in values
                    ]
                columns.append(pa.array(values, field.type, from_pandas=False))
            except NOT_FITTING:
                for fate, value in zip(answers, values, strict=True):
                    try:
                        converter.array([value])
                    except (
                        Misfit, pa.ArrowException, OverflowError, ValueError, TypeError
                    ) as error:  # fmt: skip
                        if fate.values is not None:
                            reason = f"{converter.name!r} does not fit: {error}"
                            misfits.setdefault(id(fate), (fate.request, reason))
        return columns, list(misfits.values())

    def _answer_batches(
        self, answers: Sequence[RequestFate], columns: Sequence[pa.Array], complete_us: int
    ) -> list[tuple[int, pa.RecordBatch]]:
        """The rows of the answers' topic by partition, each partition in order of `answers`."""
        by_partition: dict[int, list[int]] = {}
        for index, fate in enumerate(answers):
            by_partition.setdefault(fate.request.partition, []).append(index)
        batches = []
        for partition, indices in by_partition.items():
            fates = [answers[index] for index in indices]
            arrays = [*_rows_of(fates).columns, *(each.take(pa.array(indices)) for each in columns)]
            keys = [fate.request.key for fate in fates]
            arrays += [
                pa.array(keys, pa.string()),
                pa.repeat(pa.scalar(self.call.code), len(fates)),
                pa.array([fate.answered_us for fate in fates], pa.timestamp("us", "UTC")),
            ]
            if self.call.has_time:
                complete = pa.scalar(storable_us(complete_us), pa.timestamp("us", "UTC"))
                arrays.append(pa.repeat(complete, len(fates)))
            batches.append((partition, pa.RecordBatch.from_arrays(arrays, schema=self._schema)))
        return batches

    def _dead_rows(self, dead: Sequence[RequestFate]) -> list[dict[str, Any]]:
        texts = dead_letter_json(_rows_of(dead)).to_pylist()
        place = f"call {self.call.pipeline}.{self.call.name}"
        return dead_letters_to_rows(
            DeadLetter(
                place=place,
                reason=fate.reason,
                partition=fate.request.partition,
                offset=fate.request.offset,
                row=text,
            )
            for fate, text in zip(dead, texts, strict=True)
        )

    def _is_progress_due(self) -> bool:
        """Whether what follows waits for event time that is complete by now."""
        if not self.call.has_time or self.requests.complete_us <= self._written_us:
            return False
        return self._owes_progress or self.requests.moved_by_others

    def _record_progress(self) -> bool:
        """Append a row that moves event time. False if one was written just before."""
        if time.monotonic() - self._progress_s < PROGRESS_EVERY_S:
            return False
        with self._commit() as tx:
            tx.append(self.call.answers_topic, self._progress_row(), partition=0)
        self._progress_s = time.monotonic()
        self._written_us = self.requests.complete_us
        self._owes_progress = self.requests.moved_by_others = False
        return True

    def _progress_row(self) -> pa.RecordBatch:
        row = dict.fromkeys(self._schema.names)
        complete_us = storable_us(self.requests.complete_us)
        row[COMPLETE_TO] = pa.scalar(complete_us, pa.timestamp("us", "UTC")).as_py()
        return pa.RecordBatch.from_pylist([row], self._schema)

    def _trim(self) -> None:
        """Remove requests from the log that nobody reads again."""
        for partition, low in self.requests.lows.items():
            if low - self._trimmed.get(partition, 0) >= TRIM_EVERY:
                self._trimmed[partition] = low
                with suppress(HeadraceError):  # they only take room
                    self.log.trim_topic(self.call.requests_topic, low, partitions=[partition])


def _rows_of(fates: Sequence[RequestFate]) -> pa.RecordBatch:
    """The rows of requests, in this order."""
    chunks = list({id(fate.request.chunk): fate.request.chunk for fate in fates}.values())
    starts: dict[int, int] = {}
    count = 0
    for chunk in chunks:
        starts[id(chunk)] = count
        count += chunk.rows.num_rows
    indices = [starts[id(fate.request.chunk)] + fate.request.index for fate in fates]
    rows = pa.Table.from_batches([chunk.rows for chunk in chunks]).take(pa.array(indices))
    return rows.combine_chunks().to_batches()[0]
