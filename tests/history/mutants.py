"""Defects of the log, each put into all processes of a load by its name. What the checker
does not find here it would not find in earnest: `test_mutants` asks for each by its kind.

    HEADRACE_HISTORY_MUTANT=early_ack python -m pytest tests/history/test_embedded.py
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pyarrow as pa

from headrace.columnar.columns import OFFSET_COLUMN
from headrace.log.file import compaction, maintenance
from headrace.log.file.consumer import FileConsumer, parse_partition_key
from headrace.log.file.producer import FileProducer
from headrace.log.file.transaction import FileTransaction
from headrace.log.member_fence import MemberFence
from headrace.log.partitioning import key_bytes
from headrace.log.values import AppendResult, OffsetRange, Offsets

VARIABLE = "HEADRACE_HISTORY_MUTANT"
_WINDOW_S = 0.05
"""How long a step that should be atomic is left open, so that a small load meets it."""


def install(name: str) -> None:
    """Put a defect into this process; none for an empty name."""
    if name:
        MUTANTS[name]()


def _patch(owner: Any, name: str, defect: Any) -> Any:
    """Replace an attribute. Returns what it was."""
    original = getattr(owner, name)
    setattr(owner, name, defect)
    return original


# Writing


def early_ack() -> None:
    """An append is acknowledged with the offsets that it will probably get, and stored later."""
    background = ThreadPoolExecutor(1)

    def later(self: FileProducer, rows: Any, sequence: int | None) -> None:
        time.sleep(_WINDOW_S)
        commit(self, rows, sequence)

    def acknowledge(self: FileProducer, rows: Any, sequence: int | None) -> AppendResult:
        partitions = self.log.store.view().topic(self.topic).partitions
        spans = {}
        for number, frames in rows.frames.items():
            first = partitions[number].end
            spans[number] = OffsetRange(first, first + sum(frame.count for frame in frames))
        background.submit(later, self, rows, sequence)
        return AppendResult({self.topic: spans})

    commit = _patch(FileProducer, "_commit", acknowledge)


def no_producer_fence() -> None:
    """A producer goes on although its id was opened again."""

    def unfenced(self: FileProducer, draft: Any) -> None:
        self.epoch = draft.state.producers[self._name].epoch

    _patch(FileProducer, "_check_epoch", unfenced)


def no_duplicate_check() -> None:
    """A repeated sequence number is stored again."""
    _patch(FileProducer, "_find_duplicate", lambda *_: None)


# Transactions


def no_transaction_fence() -> None:
    """A transaction commits although its id has a newer owner."""

    def unfenced(self: FileTransaction, draft: Any) -> None:
        self._epoch = draft.state.transactions[self.id]
        check(self, draft)

    check = _patch(FileTransaction, "_check_current", unfenced)


def no_member_fence() -> None:
    """Offsets are committed for partitions that another member owns by now."""
    _patch_everywhere("check_owner", lambda *_: None)


def rows_at_once() -> None:
    """A transaction's rows are visible as soon as they are appended."""

    def append(self: FileTransaction, topic: str, rows: Any, **options: Any) -> None:
        options.pop("headers", None)
        self.log.producer(topic).append(rows, **options)  # type: ignore[attr-defined]

    _patch(FileTransaction, "append", append)


def one_commit_per_partition() -> None:
    """A transaction over several partitions is several commits."""

    def commit_one_by_one(self: FileTransaction) -> AppendResult:
        offsets: dict[str, dict[int, OffsetRange]] = {}
        rows, offsets_to_commit = self._rows, self._offsets
        for index, some in enumerate(rows):
            is_last = index == len(rows) - 1
            self._rows, self._offsets = [some], offsets_to_commit if is_last else []
            for topic, spans in commit(self).offsets.items():
                for number, span in spans.items():
                    earlier = offsets.setdefault(topic, {}).get(number, span)
                    offsets[topic][number] = OffsetRange(earlier.start, span.stop)
            self._is_open = not is_last
            time.sleep(_WINDOW_S / 5)
        return AppendResult(offsets)

    commit = _patch(FileTransaction, "commit", commit_one_by_one)


def offsets_before_rows() -> None:
    """A group's offsets are committed first, and then the rows that were made of what it read."""

    def commit_offsets_first(self: FileTransaction) -> Any:
        if not self._offsets or self._spilled:
            return commit(self)
        rows, self._rows = self._rows, []
        commit(self)
        time.sleep(4 * _WINDOW_S)
        self._rows, self._offsets, self._is_open = rows, [], True
        return commit(self)

    commit = _patch(FileTransaction, "commit", commit_offsets_first)


# Consumers


def lost_partitions_are_forgotten() -> None:
    """A member that lost a partition between two polls commits the rest, and what it made of the
    lost one's rows with it.
    """
    _patch(MemberFence, "check", lambda *_: None)


def commits_ahead() -> None:
    """A consumer commits all that there is, not what it was given."""

    def ends(self: FileConsumer) -> Offsets:
        offsets: Offsets = positions(self)
        state = self.log.store.view()
        for topic, numbers in offsets.items():
            for number in numbers:
                numbers[number] = state.topics[topic].partitions[number].end
        return offsets

    positions = _patch(FileConsumer, "_owned_positions", ends)


def poll_skips() -> None:
    """What does not fit into one poll is left out."""

    def read_once(self: FileConsumer, state: Any, key: str, *limits: int) -> Any:
        batches, stop = read_partition(self, state, key, *limits)
        topic, number = parse_partition_key(key)
        return batches, max(stop, state.topics[topic].partitions[number].end)

    read_partition = _patch(FileConsumer, "_read_partition", read_once)


def poll_goes_back() -> None:
    """A consumer gets a row again now and then."""

    def read_again(self: FileConsumer, *arguments: Any) -> Any:
        if self._rotation % 5 == 0:
            self._positions = {key: max(0, at - 1) for key, at in self._positions.items()}
        return read(self, *arguments)

    read = _patch(FileConsumer, "_read", read_again)


# Maintenance


def early_retention() -> None:
    """Retention by size leaves nothing but the open segment."""

    def retained(log: Any, topic: Any, *arguments: Any) -> Any:
        if topic.info.retention_bytes is not None:
            topic = _Like(topic, info=replace(topic.info, retention_bytes=1))
        return retained_start(log, topic, *arguments)

    retained_start = _patch(maintenance, "_retained_start", retained)


def compaction_keeps_the_oldest() -> None:
    """Compaction keeps the first row of each key."""

    def oldest(segments: Any, topic: Any) -> pa.Table:
        tables = []
        for segment in segments:
            for header, body in compaction._sound_frames(segment):
                batch = compaction._rows_with_offsets(segment, header, body)
                keys = key_bytes(batch, topic.info.key)
                tables.append(pa.table({"key": keys, "at": batch.column(OFFSET_COLUMN)}))
        grouped = pa.concat_tables(tables).group_by("key").aggregate([("at", "min")])
        return grouped.select(["key", "at_min"]).rename_columns(["key", "offset_max"])

    _patch(compaction, "_newest_offsets", oldest)


# On Kafka


def kafka_no_transaction_fence() -> None:
    """Every owner of a transaction id is somebody else to the broker."""
    from headrace.log.kafka import transaction

    def strange(connection: Any, id: str, timeout_us: int) -> Any:
        return open_client(connection, f"{id}-{uuid.uuid4().hex}", timeout_us)

    open_client = _patch(transaction, "_open_client", strange)


def kafka_owner_is_not_compared() -> None:
    """An owner of a transaction id whose client was fenced opens another one, and so takes the id
    back from its newer owner.
    """
    from headrace.log.kafka.transaction import KafkaTransaction

    _patch(KafkaTransaction, "_check_owner", lambda _: None)


def kafka_offsets_before_rows() -> None:
    """A group's offsets are committed by its member, and then the rows in a transaction."""
    from headrace.log.kafka.transaction import KafkaTransaction

    def commit_offsets_first(self: KafkaTransaction) -> Any:
        for _, positions in self._contents.offsets:
            positions.handle.commit(positions)  # type: ignore[attr-defined]
        self._contents.offsets.clear()
        time.sleep(4 * _WINDOW_S)
        return commit(self)

    commit = _patch(KafkaTransaction, "commit", commit_offsets_first)


class _Like:
    """An object with some attributes replaced."""

    def __init__(self, original: Any, **attributes: Any) -> None:
        self._original = original
        self.__dict__ |= attributes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _patch_everywhere(name: str, defect: Any) -> None:
    for module in ("consumer", "transaction"):
        _patch(__import__(f"headrace.log.file.{module}", fromlist=[name]), name, defect)


MUTANTS: dict[str, Callable[[], None]] = {
    mutant.__name__: mutant
    for mutant in (
        early_ack,
        no_producer_fence,
        no_duplicate_check,
        no_transaction_fence,
        no_member_fence,
        rows_at_once,
        one_commit_per_partition,
        offsets_before_rows,
        lost_partitions_are_forgotten,
        commits_ahead,
        poll_skips,
        poll_goes_back,
        early_retention,
        compaction_keeps_the_oldest,
        kafka_no_transaction_fence,
        kafka_owner_is_not_compared,
        kafka_offsets_before_rows,
    )
}
