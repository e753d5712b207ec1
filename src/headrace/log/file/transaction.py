"""The embedded log's transaction: its rows are buffered until one commit makes all of them visible.

Rows are prepared as they are added and stay in memory up to a limit; from then on they go into
staged files (`staging`), which the commit adopts. The commit is one journal record, so readers see
all of it or nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.durations import format_us, to_us
from headrace.errors import (
    DiskFull,
    FencedError,
    InputError,
    MemberFenced,
    NoteConflict,
    TransactionFenced,
    TransactionTimedOut,
)
from headrace.log.api import Transaction
from headrace.log.file.commit_draft import CommitDraft, PreparedRows, StaleTopic
from headrace.log.file.consumer import check_offsets, check_owner, plain_offsets, store_offsets
from headrace.log.file.producer import prepare, prepare_control, refit, rows_to_batch
from headrace.log.file.segment import control_frame, gap_frames
from headrace.log.file.staging import StagingWriter, discard, staging_name
from headrace.log.file.state import PRODUCER_RETENTION_US, TopicState
from headrace.log.partitioning import PartitionAssigner, check_partition
from headrace.log.rows import tombstones, upserts
from headrace.log.values import AppendResult, Duration, Headers, Offsets, Rows, Staged
from headrace.names import check_name

if TYPE_CHECKING:
    from headrace.log.file.handle import LogHandle


MAX_BYTES_IN_MEMORY = 8 << 20
_SEEN_INTERVAL_US = PRODUCER_RETENTION_US // 30
_ANY_VALUE = object()


class FileTransaction(Transaction):
    """A transaction of the embedded log, by the owner of its id with this epoch."""

    def __init__(self, log: LogHandle, id: str, timeout_us: int, epoch: int) -> None:
        self.log = log
        self.id = id
        self._timeout_us = timeout_us
        self._epoch = epoch
        self._deadline_s = time.monotonic() + timeout_us / 1e6
        self._directory = staging_name(log.store.clock.now_us() + self._timeout_us)
        self._assigner = PartitionAssigner()
        self._topics: dict[str, TopicState] = {}
        self._rows: list[PreparedRows] = []
        self._bytes = 0
        self._spilled: dict[str, StagingWriter] = {}
        self._adopted: list[Staged] = []
        self._offsets: list[tuple[str, Offsets]] = []
        self._notes: list[tuple[str, str | None, Any]] = []  # (name, value, expected value)
        self._is_open = True

    @classmethod
    def begin(cls, log: LogHandle, id: str, timeout: Duration) -> FileTransaction:
        """Begin the first transaction of a new owner of the id, which fences older owners."""
        check_name(id, what="transaction id")
        timeout_us = to_us(timeout, what="timeout")

        def decide(draft: CommitDraft) -> int:
            # An id that was forgotten begins above all epochs that it ever had.
            epoch = draft.state.transactions.get(id, draft.state.commit) + 1
            draft.do("epoch", "transaction", id, epoch)
            return epoch

        return cls(log, id, timeout_us, log.committer.submit(decide))

    # Content

    def append(
        self,
        topic: str,
        rows: Rows,
        *,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> None:
        state = self._topic(topic)
        self._add_batch(state, rows_to_batch(rows, state, headers), partition)

    def upsert(self, topic: str, rows: Rows) -> None:
        state = self._table(topic, "upsert")
        info = state.info
        batch = upserts(rows, info.arrow_schema, topic=topic, history=info.schema_history)
        self._add_batch(state, batch, None)

    def delete(self, topic: str, keys: Any) -> None:
        state = self._table(topic, "delete")
        batch = tombstones(keys, state.info.arrow_schema, state.info.key, topic=topic)
        self._add_batch(state, batch, None)

    def append_control(self, topic: str, partition: int, payload: bytes) -> None:
        state = self._topic(topic)
        check_partition(state.info, partition)
        self._add(prepare_control(state, partition, control_frame(payload)))

    def skip_offsets(self, topic: str, partition: int, count: int) -> None:
        state = self._topic(topic)
        check_partition(state.info, partition)
        for frame in gap_frames(count):
            self._add(prepare_control(state, partition, frame))

    def adopt(self, staged: Staged) -> None:
        self._topic(staged.topic)
        self._adopted.append(staged)

    def commit_offsets(self, group: str, positions: Mapping[str, Mapping[int, int]]) -> None:
        self._check_open()
        check_name(group, what="group")
        offsets = plain_offsets(positions)
        for topic in offsets:
            self._topic(topic)
        if offsets.handle is not None:
            offsets.handle.check_positions(offsets)
        self._offsets.append((group, offsets))

    def set_note(self, name: str, value: str | None, **expect: str | None) -> None:
        self._check_open()
        if unknown := set(expect) - {"expect"}:
            raise InputError(f"set_note does not know {unknown}.", fix="use expect=….")
        content: object = value
        if not isinstance(content, str | None):
            raise InputError(
                f"The note {name!r} cannot be a {type(content).__name__}.",
                fix="store text, such as JSON.",
            )
        self._notes.append((name, value, expect.get("expect", _ANY_VALUE)))

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
        if not self._is_open:
            raise InputError(
                f"The transaction {self.id!r} has ended.",
                fix="begin another one with log.transaction(...).",
            )
        if time.monotonic() > self._deadline_s:
            self.abort()
            raise TransactionTimedOut(
                f"The transaction {self.id!r} was open for longer than"
                f" {format_us(self._timeout_us)}; nothing of it is stored.",
                fix="do less in one transaction, or give it a longer timeout.",
            )

    def _add_batch(self, topic: TopicState, batch: pa.RecordBatch, partition: int | None) -> None:
        self._add(prepare(topic, batch, self._assigner.assign(topic.info, batch, partition)))

    def _add(self, rows: PreparedRows) -> None:
        self._rows.append(rows)
        self._bytes += rows.size
        if self._bytes > MAX_BYTES_IN_MEMORY or self._spilled:
            try:
                self._spill()
            except BaseException:  # rows may be half written: a commit could not be trusted
                self.abort()
                raise

    def _spill(self) -> None:
        """Move rows from memory into staged files. Once begun, all later rows go there too, so that
        they stay in order.
        """
        for rows in self._rows:
            topic = self._topics[rows.topic]
            if rows.topic not in self._spilled:
                self._spilled[rows.topic] = StagingWriter(self.log.store, topic, self._directory)
            self._spilled[rows.topic].write(rows)
        self._rows = []
        self._bytes = 0

    # The end

    def commit(self) -> AppendResult:
        self._check_open()
        consumers = [(offsets.handle, offsets) for _, offsets in self._offsets if offsets.handle]
        for consumer, offsets in consumers:
            consumer.check_positions(offsets)
        staged = [*(writer.finish() for writer in self._spilled.values()), *self._adopted]
        while True:
            try:
                result = self.log.committer.submit(
                    lambda draft: self._decide(draft, staged), size=self._bytes
                )
                break
            except StaleTopic:
                topics = {name: self.log.topic_state(name) for name in self._topics}
                self._rows = [
                    refit(
                        rows,
                        self._topics[rows.topic].info.arrow_schema,
                        topics[rows.topic],
                        self._assigner,
                    )
                    for rows in self._rows
                ]
                self._topics = topics
            except (InputError, FencedError, TransactionTimedOut, DiskFull) as error:
                if isinstance(error, MemberFenced):
                    for consumer, _ in consumers:
                        consumer.refuse_positions()
                raise  # refused: nothing of it is stored
            except BaseException:  # it may be stored: leave the staged rows alone
                self._is_open = False
                raise
        self._is_open = False
        for consumer, offsets in consumers:
            consumer.settle_positions(offsets)
        discard(self.log.store, [file for part in staged for file, _ in part.partitions.values()])
        return result

    def _decide(self, draft: CommitDraft, staged: list[Staged]) -> AppendResult:
        # Everything that can refuse the commit comes before the first operation.
        self._check_current(draft)
        for rows in self._rows:
            draft.check_fresh(rows)
        loaded = [(part, self.log.load_staged(draft, part)) for part in staged]

        for part, frames in loaded:
            self.log.adopt_loaded(draft, part, frames)
        for rows in self._rows:
            draft.append(rows)
        for group, offsets in self._offsets:
            store_offsets(draft, group, offsets)
        for name, value, _ in self._notes:
            draft.do("note", name, value)
        if draft.time_us - draft.state.transactions_seen_us[self.id] > _SEEN_INTERVAL_US:
            draft.do("epoch", "transaction", self.id, self._epoch)  # it is not forgotten
        return draft.result()

    def _check_current(self, draft: CommitDraft) -> None:
        """Refuse the commit if the id has a newer owner, a member has lost a partition, or a note
        does not have the expected value.
        """
        epoch = draft.state.transactions.get(self.id)
        if epoch is None:
            raise TransactionFenced(
                f"The transaction id {self.id!r} is not known any more, as after"
                f" {format_us(PRODUCER_RETENTION_US)} without a commit; nothing of this transaction"
                " is stored.",
                fix="begin again with log.transaction(...).",
            )
        if epoch != self._epoch:
            raise TransactionFenced(
                f"The transaction id {self.id!r} has a newer owner (epoch {epoch}, this one has"
                f" {self._epoch}); nothing of this one is stored.",
                fix="stop this owner, or use another id.",
            )
        for group, offsets in self._offsets:
            check_offsets(draft.state, offsets)
            check_owner(draft.state, group, offsets, offsets.member)
        for name, _, expected in self._notes:
            current = draft.state.notes.get(name)
            if expected is not _ANY_VALUE and current != expected:
                raise NoteConflict(name, expected, current)

    def abort(self) -> None:
        if self._is_open:
            self._is_open = False
            self._rows = []
            for writer in self._spilled.values():
                writer.abandon()

    def next(self) -> FileTransaction:
        self.abort()
        return FileTransaction(self.log, self.id, self._timeout_us, self._epoch)
