"""The embedded log's transaction: it keeps its rows to itself until one commit makes all of them
visible.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.durations import format_us, to_us
from headrace.errors import (
    DiskFull,
    FencedError,
    InputError,
    NoteConflict,
    TransactionFenced,
    TransactionTimedOut,
)
from headrace.log.api import Transaction
from headrace.log.file.commit_draft import Draft, PreparedRows, StaleTopic
from headrace.log.file.consumer import check_owner, check_places, plain_positions
from headrace.log.file.producer import prepare, prepare_control, refit, rows_to_batch
from headrace.log.file.segment import control_frame
from headrace.log.file.staging import StagingWriter, discard, staging_name
from headrace.log.file.state import TopicState
from headrace.log.file.store import now_us
from headrace.log.partitioning import Chooser, check_partition
from headrace.log.rows import tombstones, upserts
from headrace.log.topic_config import check_name
from headrace.log.values import AppendResult, Duration, Headers, Offsets, Rows, Staged

if TYPE_CHECKING:
    from headrace.log.file.handle import LogHandle


MAX_BYTES_IN_MEMORY = 8 << 20
_ANY = object()


class FileTransaction(Transaction):
    def __init__(
        self, log: LogHandle, id: str, timeout: Duration, *, epoch: int | None = None
    ) -> None:
        self.log, self.id = log, check_name(id, what="transaction id")
        self._timeout, self._timeout_us = timeout, to_us(timeout, what="timeout")
        self._begun_us = now_us()
        self._epoch: int = log.committer.submit(self._take_over) if epoch is None else epoch
        self._directory = staging_name(self._begun_us + self._timeout_us)
        self._chooser = Chooser()
        self._topics: dict[str, TopicState] = {}
        self._rows: list[PreparedRows] = []
        self._bytes = 0
        self._spilled: dict[str, StagingWriter] = {}
        self._adopted: list[Staged] = []
        self._offsets: list[tuple[str, Offsets]] = []
        self._notes: list[tuple[str, str | None, Any]] = []
        self._open = True

    def _take_over(self, draft: Draft) -> int:
        epoch = draft.state.transactions.get(self.id, 0) + 1
        draft.do("epoch", "transaction", self.id, epoch)
        return epoch

    # What is to be done

    def append(
        self,
        topic: str,
        rows: Rows,
        *,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> None:
        known = self._topic(topic)
        self._keep(known, rows_to_batch(rows, known, headers), partition)

    def upsert(self, topic: str, rows: Rows) -> None:
        known = self._table(topic, "upsert")
        self._keep(known, upserts(rows, known.info.arrow_schema, topic=topic), None)

    def delete(self, topic: str, keys: Any) -> None:
        known = self._table(topic, "delete")
        self._keep(
            known, tombstones(keys, known.info.arrow_schema, known.info.key, topic=topic), None
        )

    def append_control(self, topic: str, partition: int, payload: bytes) -> None:
        known = self._topic(topic)
        check_partition(known.info, partition)
        self._add(prepare_control(known, partition, control_frame(payload)))

    def adopt(self, staged: Staged) -> None:
        self._topic(staged.topic)
        self._adopted.append(staged)

    def commit_offsets(self, group: str, positions: Mapping[str, Mapping[int, int]]) -> None:
        self._check_open()
        check_name(group, what="group")
        plain = plain_positions(positions)
        for topic in plain:
            self._topic(topic)
        self._offsets.append((group, plain))

    def set_note(self, name: str, value: str | None, **expect: str | None) -> None:
        self._check_open()
        if unknown := set(expect) - {"expect"}:
            raise InputError(f"set_note does not know {unknown}.", fix="use expect=….")
        given: object = value
        if not isinstance(given, str | None):
            raise InputError(
                f"The note {name!r} cannot be a {type(given).__name__}.",
                fix="store text, such as JSON.",
            )
        self._notes.append((name, value, expect.get("expect", _ANY) if expect else _ANY))

    def _topic(self, name: str) -> TopicState:
        self._check_open()
        if name not in self._topics:
            self._topics[name] = self.log.topic_state(name)
        return self._topics[name]

    def _table(self, name: str, what: str) -> TopicState:
        topic = self._topic(name)
        if not topic.info.is_table:
            raise InputError(
                f"{what} needs a table, and {name!r} is a plain topic.",
                fix="use append, or create it with create_table.",
            )
        return topic

    def _check_open(self) -> None:
        if not self._open:
            raise InputError(
                f"The transaction {self.id!r} has ended.",
                fix="begin another one with log.transaction(...).",
            )
        if now_us() > self._begun_us + self._timeout_us:
            self.abort()
            raise TransactionTimedOut(
                f"The transaction {self.id!r} was open for longer than"
                f" {format_us(self._timeout_us)}; nothing of it is stored.",
                fix="do less in one transaction, or give it a longer timeout.",
            )

    def _keep(self, topic: TopicState, batch: pa.RecordBatch, partition: int | None) -> None:
        self._add(prepare(topic, batch, self._chooser.partitions(topic.info, batch, partition)))

    def _add(self, rows: PreparedRows) -> None:
        self._rows.append(rows)
        self._bytes += rows.size
        if self._bytes > MAX_BYTES_IN_MEMORY or self._spilled:
            try:
                self._spill()
            except (
                BaseException
            ):  # some of it may be written: it cannot be told what a commit would store
                self.abort()
                raise

    def _spill(self) -> None:
        """Move rows from memory to staged files; once begun, all of them go there, so that their
        order stays.
        """
        for rows in self._rows:
            topic = self._topics[rows.topic]
            if rows.topic not in self._spilled:
                self._spilled[rows.topic] = StagingWriter(self.log.store, topic, self._directory)
            self._spilled[rows.topic].write(rows)
        self._rows, self._bytes = [], 0

    # The end

    def commit(self) -> AppendResult:
        """All or nothing. The older of two owners of this id is refused."""
        self._check_open()
        staged = [*(writer.finish() for writer in self._spilled.values()), *self._adopted]
        while True:
            try:
                position = self.log.committer.submit(
                    lambda draft: self._decide(draft, staged), size=self._bytes
                )
                break
            except StaleTopic:
                self._refit()
            except (
                InputError,
                FencedError,
                TransactionTimedOut,
                DiskFull,
            ):  # refused: nothing of it is stored
                raise
            except BaseException:  # it may be stored: leave its staged rows alone
                self._open = False
                raise
        self._open = False
        discard(self.log.store, [file for part in staged for file, _ in part.partitions.values()])
        return position

    def _decide(self, draft: Draft, staged: list[Staged]) -> AppendResult:
        self._check_current(draft)
        for rows in self._rows:
            draft.check_fresh(rows)
        adopted = [(part, self.log.load_staged(draft, part)) for part in staged]
        for part, small in adopted:
            self.log.adopt_loaded(draft, part, small)
        for rows in self._rows:
            draft.append(rows)
        for group, positions in self._offsets:
            for topic, offsets in positions.items():
                draft.do(
                    "offsets",
                    group,
                    topic,
                    {str(partition): offset for partition, offset in offsets.items()},
                )
        for name, value, _ in self._notes:
            draft.do("note", name, value)
        return draft.position()

    def _check_current(self, draft: Draft) -> None:
        """Everything that can refuse the commit, before anything is done."""
        epoch = draft.state.transactions.get(self.id)
        if epoch != self._epoch:
            raise TransactionFenced(
                f"The transaction id {self.id!r} has a newer owner (epoch {epoch}, this one has"
                f" {self._epoch}); nothing of this one is stored.",
                fix="stop this owner, or use another id.",
            )
        for group, positions in self._offsets:
            check_places(draft.state, positions)
            check_owner(draft.state, group, positions, positions.member)
        for name, _, expected in self._notes:
            current = draft.state.notes.get(name)
            if expected is not _ANY and current != expected:
                raise NoteConflict(name, expected, current)

    def _refit(self) -> None:
        """A topic changed since its rows were prepared."""
        fresh = []
        for rows in self._rows:
            topic = self.log.topic_state(rows.topic)
            fresh.append(
                refit(rows, self._topics[rows.topic].info.arrow_schema, topic, self._chooser)
            )
        self._rows = fresh
        self._topics = {name: self.log.topic_state(name) for name in self._topics}

    def abort(self) -> None:
        if self._open:
            self._open = False
            self._rows = []
            for writer in self._spilled.values():
                writer.abandon()

    def next(self) -> FileTransaction:
        self.abort()
        return FileTransaction(self.log, self.id, self._timeout, epoch=self._epoch)
