"""The log's interface: what `headrace.open_log` returns, whichever backend stores the log.

`Log` opens everything else: a `Producer` appends to one topic, a `Transaction` to many at once, a
`Consumer` reads as a member of a group, a `Queue` leases single messages, and `Batches` is a lazy
read. Nothing in this module does I/O.

The two backends are `headrace.log.file` (a directory) and `headrace.log.kafka` (a cluster); both
pass the contract suite in tests/contract. The values that go in and out (`AppendResult`,
`Offsets`, `TopicInfo`, …) are in `headrace.log.values`. Methods whose description begins with
"Internal:" serve the engine and the Spark connectors, not users.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from headrace.durations import to_us
from headrace.errors import UnknownTopic
from headrace.log.lag_watch import LagAlert, LagWatch
from headrace.log.values import (
    AppendResult,
    BackupResult,
    ControlRecord,
    Duration,
    Finding,
    GroupInfo,
    Headers,
    Offsets,
    Partitioner,
    PartitionLag,
    PeekedMessage,
    QueueStats,
    Rows,
    Staged,
    TopicInfo,
    TopicStats,
)

if TYPE_CHECKING:
    import pandas as pd


class Closeable(ABC):
    """Something that must be closed, and that `with` closes."""

    @abstractmethod
    def close(self) -> None:
        """Release everything held. Closing twice is allowed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Batches(ABC, Iterable[pa.RecordBatch]):
    """A lazy read of committed rows: iterate over its Arrow batches, or load it whole.

    Iterating reads one batch at a time, so a topic of any size is read in bounded memory. Each
    iteration reads the same rows again; rows appended after `Log.read` are not part of it.

    Example:
        ```python
        for batch in log.read("orders", columns=["amount"]):
            total += pc.sum(batch["amount"]).as_py()
        ```
    """

    schema: pa.Schema
    """The Arrow schema of every batch."""
    misfits: int = 0
    """How many records of other programs the last iteration left out, because they do not fit the
    topic's schema. Always 0 on the embedded log.
    """
    unknown_fields: Mapping[str, int] = MappingProxyType({})
    """Fields that the topic's schema does not have -> in how many records the last iteration saw
    and ignored them. Always empty on the embedded log.
    """

    @abstractmethod
    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Read the rows from the beginning, batch by batch."""

    def with_dead_letters(self) -> Batches:
        """Internal: a read that also makes dead letters of records that do not fit the topic's
        schema. Readers that process rows for good use it; reading alone writes nothing.
        """
        return self

    def to_table(self) -> pa.Table:
        """Read everything into one Arrow table.

        Returns:
            All rows of this read.

        Raises:
            CorruptBatch: Stored bytes are damaged, and the read was opened with
                `on_corrupt="raise"`.

        Example:
            ```python
            orders = log.read("orders").to_table()
            ```
        """
        return pa.Table.from_batches(list(self), schema=self.schema)

    def to_pandas(self) -> pd.DataFrame:
        """Read everything into one pandas frame.

        Returns:
            All rows of this read.

        Raises:
            CorruptBatch: Stored bytes are damaged, and the read was opened with
                `on_corrupt="raise"`.

        Example:
            ```python
            log.read("orders").to_pandas().groupby("customer").amount.sum()
            ```
        """
        frame: pd.DataFrame = self.to_table().to_pandas()
        return frame

    def to_pylist(self) -> list[dict[str, Any]]:
        """Read everything into a list of dicts.

        Returns:
            One dict per row, in the order of the read.

        Raises:
            CorruptBatch: Stored bytes are damaged, and the read was opened with
                `on_corrupt="raise"`.

        Example:
            ```python
            [row["id"] for row in log.read("orders", columns=["id"]).to_pylist()]
            ```
        """
        rows: list[dict[str, Any]] = self.to_table().to_pylist()
        return rows


class Producer(Closeable):
    """Appends rows to one topic. Opened by `Log.producer`.

    A producer with an id is idempotent: its appends are numbered, and an append whose sequence
    number is already stored is acknowledged without being stored again. Opening an id again fences
    the older producer of that id.

    Example:
        ```python
        with log.producer("orders", id="shop-1") as producer:
            producer.append({"id": 7, "amount": 9.5})
        ```
    """

    topic: str
    """The topic this producer appends to."""
    id: str | None
    """The producer's id; None for a producer that is not idempotent."""
    epoch: int
    """How many times the id has been opened; 0 without an id."""

    @property
    @abstractmethod
    def last_sequence(self) -> int:
        """The last sequence number stored for this id in this topic; -1 if there is none.

        Example:
            ```python
            for number, rows in enumerate(batches):
                if number > producer.last_sequence:  # resume after a restart
                    producer.append(rows, sequence=number)
            ```
        """

    @abstractmethod
    def append(
        self,
        rows: Rows,
        *,
        sequence: int | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> AppendResult:
        """Append rows, atomically over partitions. Returns when they are durable.

        Args:
            rows: A dict, an iterable of dicts, a pyarrow Table or RecordBatch, or a pandas
                DataFrame, with exactly the topic's columns. Columns that were added to the topic
                later may be left out. On a table's topic the column `_change_type` says what kind
                of change each row is.
            sequence: The number of this append, for a producer with an id. Numbers rise, and may
                leave gaps; None uses `last_sequence + 1`. An append of no rows uses none.
            headers: One entry per row: a mapping or pairs of header name and bytes, or None.
            partition: The partition of all rows. None chooses by the producer's partitioner, by
                key, or round-robin if the topic has no key.

        Returns:
            The offsets the rows got. `duplicate` is true if the sequence number was stored before.

        Raises:
            BadRows: A row does not fit the topic's schema. Names the row and the column.
            BadPartition: The topic has no such partition.
            InputError: The producer is closed, or the sequence number is not usable.
            OutOfOrder: The sequence number is below the newest one, and was never stored.
            ProducerFenced: The id was opened again elsewhere.
            DiskFull: There is no room on the disk. Nothing of this append is stored.
            RetryError: The outcome is not known, or the backend cannot be reached.

        Example:
            ```python
            result = producer.append([{"id": 1, "amount": 5.0}, {"id": 2, "amount": 7.5}])
            result.partitions()[0].start  # the offset of the first row in partition 0
            ```
        """

    @abstractmethod
    def upsert(
        self, rows: Rows, *, sequence: int | None = None, headers: Headers | None = None
    ) -> AppendResult:
        """Append rows to a table's topic as the newest values of their keys.

        Args:
            rows: Rows with the table's declared columns, without `_change_type`.
            sequence: The number of this append; see `append`.
            headers: One entry per row; see `append`.

        Returns:
            The offsets the rows got.

        Raises:
            InputError: The topic is not a table, or the producer is closed.
            BadRows: A row does not fit the table's schema.
            ProducerFenced: The id was opened again elsewhere.
            DiskFull: There is no room on the disk. Nothing of this append is stored.
            RetryError: The outcome is not known, or the backend cannot be reached.

        Example:
            ```python
            producer.upsert({"customer": 42, "name": "Ada"})
            ```
        """

    @abstractmethod
    def delete(self, keys: Any, *, sequence: int | None = None) -> AppendResult:
        """Append tombstones to a table's topic: the keys have no value from now on.

        Args:
            keys: One key or many: values (for a key of one column), tuples, or rows with the key's
                columns alone.
            sequence: The number of this append; see `append`.

        Returns:
            The offsets the tombstones got.

        Raises:
            InputError: The topic is not a table, or the producer is closed.
            BadRows: A key does not have the key's columns.
            ProducerFenced: The id was opened again elsewhere.
            DiskFull: There is no room on the disk. Nothing of this append is stored.
            RetryError: The outcome is not known, or the backend cannot be reached.

        Example:
            ```python
            producer.delete([42, 43])
            ```
        """


class Transaction(Closeable):
    """Appends to many topics, group offsets and notes that become visible at once or never.

    Opened by `Log.transaction`. Leaving `with` commits; an exception aborts.

    Example:
        ```python
        with log.transaction("billing") as tx:
            tx.append("invoices", invoices)
            tx.commit_offsets("billing", consumer.positions())
        ```
    """

    id: str
    """The transaction id. Its newest owner fences all older ones."""

    @abstractmethod
    def append(
        self,
        topic: str,
        rows: Rows,
        *,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> None:
        """Add rows to the transaction. They are checked now and visible after the commit.

        Args:
            topic: The topic to append to.
            rows: Rows with exactly the topic's columns; see `Producer.append`.
            headers: One entry per row; see `Producer.append`.
            partition: The partition of all rows; None chooses by key, or round-robin.

        Raises:
            UnknownTopic: There is no such topic.
            BadRows: A row does not fit the topic's schema.
            BadPartition: The topic has no such partition.
            InputError: The transaction has ended.
            TransactionTimedOut: The transaction was open for longer than its timeout.

        Example:
            ```python
            tx.append("payments", {"id": 7, "amount": 9.5})
            ```
        """

    @abstractmethod
    def upsert(self, topic: str, rows: Rows) -> None:
        """Add rows to the transaction as the newest values of a table's keys.

        Args:
            topic: The table's topic.
            rows: Rows with the table's declared columns, without `_change_type`.

        Raises:
            UnknownTopic: There is no such topic.
            BadRows: A row does not fit the table's schema.
            InputError: The topic is not a table, or the transaction has ended.
            TransactionTimedOut: The transaction was open for longer than its timeout.

        Example:
            ```python
            tx.upsert("balances", {"account": "a", "balance": 10.0})
            ```
        """

    @abstractmethod
    def delete(self, topic: str, keys: Any) -> None:
        """Add tombstones for a table's keys to the transaction.

        Args:
            topic: The table's topic.
            keys: One key or many; see `Producer.delete`.

        Raises:
            UnknownTopic: There is no such topic.
            BadRows: A key does not have the key's columns.
            InputError: The topic is not a table, or the transaction has ended.
            TransactionTimedOut: The transaction was open for longer than its timeout.

        Example:
            ```python
            tx.delete("balances", "a")
            ```
        """

    @abstractmethod
    def append_control(self, topic: str, partition: int, payload: bytes) -> None:
        """Internal: add a control record, which takes one offset and which `Log.read` skips."""

    @abstractmethod
    def skip_offsets(self, topic: str, partition: int, count: int) -> None:
        """Internal: leave out so many offsets, as if compaction had removed what was there. Not on
        Kafka, which gives every record the next offset.
        """

    @abstractmethod
    def adopt(self, staged: Staged) -> None:
        """Internal: add rows that another process staged with `Log.stage`."""

    @abstractmethod
    def commit_offsets(self, group: str, positions: Mapping[str, Mapping[int, int]]) -> None:
        """Commit a group's offsets with the transaction: rows out and progress in move together.

        Args:
            group: The consumer group.
            positions: Topic -> partition -> next offset, usually `consumer.positions()`. Offsets
                from a consumer are fenced: the commit fails if that member lost the partition.

        Raises:
            UnknownTopic: There is no such topic.
            MemberFenced: The consumer lost a partition with rows that were not committed.
            InputError: The offsets are not of this form, or the transaction has ended.
            TransactionTimedOut: The transaction was open for longer than its timeout.

        Example:
            ```python
            tx.commit_offsets("billing", {"orders": {0: 120, 1: 98}})
            ```
        """

    @abstractmethod
    def set_note(self, name: str, value: str | None, **expect: str | None) -> None:
        """Store a small named value with the transaction; `Log.note` reads it back.

        Args:
            name: The note's name.
            value: The text to store; None removes the note.
            **expect: `expect=` the value the note must have at the commit (None: there must be no
                such note).

        Raises:
            InputError: The value is not text, or the transaction has ended.
            TransactionTimedOut: The transaction was open for longer than its timeout.

        Example:
            ```python
            tx.set_note("imported.up_to", "2026-02-01", expect="2026-01-01")
            ```
        """

    @abstractmethod
    def commit(self) -> AppendResult:
        """Make everything in this transaction visible at once. Returns when it is durable.

        Returns:
            The offsets of all rows, by topic and partition.

        Raises:
            TransactionFenced: The id has a newer owner. Nothing of this transaction is stored.
            TransactionTimedOut: The transaction was open for longer than its timeout.
            MemberFenced: Offsets were given for a partition that the member no longer owns.
            OffsetOutOfRange: An offset beyond a partition's end was given.
            NoteConflict: A note does not have the expected value.
            DiskFull: There is no room on the disk. Nothing of this transaction is stored.
            RetryError: The outcome is not known, or the backend cannot be reached.

        Example:
            ```python
            result = tx.commit()
            result.partitions("invoices")
            ```
        """

    @abstractmethod
    def abort(self) -> None:
        """End the transaction and discard everything in it. Harmless after the end.

        Example:
            ```python
            tx.abort()
            ```
        """

    @abstractmethod
    def next(self) -> Transaction:
        """Begin another transaction of the same owner; this one is aborted if it is still open.

        `Log.transaction(id)` fences the id's older owner. This method fences nobody: an owner that
        has itself been fenced stays fenced.

        Returns:
            An open transaction with the same id and timeout.

        Raises:
            RetryError: The backend cannot be reached.

        Example:
            ```python
            tx = log.transaction("loader")
            for rows in batches:
                tx.append("orders", rows)
                tx.commit()
                tx = tx.next()
            ```
        """

    def close(self) -> None:
        """Abort the transaction if it is still open."""
        self.abort()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()


class Consumer(Closeable):
    """One member of a consumer group. Opened by `Log.consumer`.

    The partitions of the group's topics are shared out among its live members. Delivery is at
    least once: after a crash, or when a partition moves to another member, rows since the last
    commit are delivered again.

    A member that loses a partition while it has delivered rows of it that are not committed is
    *fenced*: `commit`, `positions` and `Transaction.commit_offsets` raise `MemberFenced`, and the
    next `poll` after that goes back to the last commit. So a member may poll several times in one
    transaction. To finish such rows before a partition moves, commit in `on_revoked`.

    Leaving `with` by an exception closes the consumer without calling `on_revoked`, which might
    commit rows that were not processed.

    Example:
        ```python
        with log.consumer("orders", group="billing") as consumer:
            while True:
                for batch in consumer.poll():
                    bill(batch)
                consumer.commit()
        ```
    """

    group: str
    """The consumer group."""
    topics: tuple[str, ...]
    """The topics this member subscribes to."""

    @abstractmethod
    def poll(
        self, timeout: Duration = "1 second", max_rows: int | None = None
    ) -> list[pa.RecordBatch]:
        """Read the next rows of this member's partitions.

        Polling also keeps the member in the group and takes part in rebalancing: a partition that
        should move is given up at the next poll. The callbacks `on_revoked` and `on_assigned` are
        called from here, and their exceptions are raised here.

        Args:
            timeout: How long to wait for rows.
            max_rows: The most rows to return; None uses the consumer's `max_rows`.

        Returns:
            Batches of one topic and partition each, with the columns `_partition`, `_offset` and
            `_timestamp`; the schema's metadata names the topic. Empty if none came in time.

        Raises:
            OffsetOutOfRange: Retention removed the next row, and `on_lost` is "raise".
            CorruptBatch: Stored bytes are damaged. Rows in front of them are delivered first.
            InputError: The consumer is closed.
            RetryError: The backend cannot be reached.

        Example:
            ```python
            batches = consumer.poll(timeout="5 seconds", max_rows=10_000)
            ```
        """

    @abstractmethod
    def positions(self) -> Offsets:
        """The next offset of each partition this member owns.

        Returns:
            Topic -> partition -> offset, marked with this member, so that a commit of them in a
            transaction is fenced.

        Raises:
            MemberFenced: A partition was lost with rows that were delivered and not committed.

        Example:
            ```python
            with log.transaction("billing") as tx:
                tx.append("invoices", invoices)
                tx.commit_offsets("billing", consumer.positions())
            ```
        """

    @abstractmethod
    def commit(self, positions: Mapping[str, Mapping[int, int]] | None = None) -> None:
        """Store offsets for the group; after a restart it resumes there.

        Args:
            positions: Topic -> partition -> next offset. None commits everything delivered.

        Raises:
            MemberFenced: A partition was reassigned to another member, or was lost with rows that
                were delivered and not committed. Nothing is stored.
            OffsetOutOfRange: An offset is beyond the partition's end.
            InputError: The offsets are not of this form, or the consumer is closed.
            RetryError: The outcome is not known, or the backend cannot be reached.

        Example:
            ```python
            consumer.commit()
            consumer.commit({"orders": {0: 120}})
            ```
        """

    @abstractmethod
    def seek(self, partition: int, offset: int, *, topic: str | None = None) -> None:
        """Continue reading a partition from an offset.

        Args:
            partition: A partition that this member owns.
            offset: The offset to read next.
            topic: The topic; None for the first one subscribed to.

        Raises:
            BadPartition: This member does not own the partition.
            OffsetOutOfRange: The offset is no longer, or not yet, in the partition.

        Example:
            ```python
            consumer.seek(0, 0)  # read partition 0 again
            ```
        """

    @abstractmethod
    def assignment(self) -> Mapping[str, tuple[int, ...]]:
        """The partitions this member owns.

        Returns:
            Topic -> partition numbers.

        Example:
            ```python
            consumer.assignment()  # {"orders": (0, 2)}
            ```
        """

    @abstractmethod
    def close(self, *, revoke: bool = True) -> None:
        """Leave the group; the partitions are free at once. Closing twice is allowed.

        Args:
            revoke: Call `on_revoked` first, which may still commit.

        Example:
            ```python
            consumer.close()
            ```
        """

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(revoke=kind is None)


RebalanceCallback = Callable[[Consumer, Mapping[str, tuple[int, ...]]], None]
"""Called with a consumer and the partitions concerned, as topic -> partition numbers."""


class Message(ABC):
    """One message received from a queue, leased until its visibility ends.

    Example:
        ```python
        for message in queue.receive(10):
            if send(message.row):
                message.ack()
            else:
                message.nack(delay="1 minute")
        ```
    """

    topic: str
    """The topic the message is in."""
    partition: int
    """The message's partition."""
    offset: int
    """The message's offset in its partition."""
    timestamp: datetime
    """When the message was appended."""
    deliveries: int
    """How many times the message has been delivered, this time included."""
    row: dict[str, Any]
    """The message's columns."""
    headers: list[tuple[str, bytes | None]]
    """The message's headers."""
    receipt: str
    """Names this delivery, for `Queue.ack` and `Queue.nack`."""

    @abstractmethod
    def ack(self) -> None:
        """Acknowledge the message: it is done and never delivered again.

        Raises:
            LeaseLost: The visibility ended and the message was delivered to someone else.

        Example:
            ```python
            message.ack()
            ```
        """

    @abstractmethod
    def nack(self, delay: Duration = "0 seconds") -> None:
        """Return the message to the queue, for anyone to receive again.

        Args:
            delay: How long the message stays invisible first.

        Raises:
            LeaseLost: The visibility ended and the message was delivered to someone else.

        Example:
            ```python
            message.nack(delay="30 seconds")
            ```
        """

    @abstractmethod
    def renew(self, visibility: Duration = "30 seconds") -> None:
        """Extend the lease while the message is still being processed.

        Args:
            visibility: How long, from now, nobody else receives the message.

        Raises:
            LeaseLost: The visibility ended and the message was delivered to someone else.
            NotSupported: The log is on Kafka, whose share groups cannot extend a lease.

        Example:
            ```python
            message.renew("5 minutes")
            ```
        """


class Queue(Closeable):
    """A topic used as a queue: messages are leased, acknowledged or returned one by one.

    Opened by `Log.queue`. Order is not kept. A message that was delivered `delivery_limit` times
    without being acknowledged becomes a dead letter in the topic `<topic>.dead`.

    Example:
        ```python
        with log.queue("emails", group="mailers") as queue:
            for message in queue.receive(10, wait="5 seconds"):
                send(message.row)
                message.ack()
        ```
    """

    topic: str
    """The topic whose rows are the messages."""
    group: str
    """The group of receivers that share the messages."""
    delivery_limit: int
    """How many times a message is delivered before it becomes a dead letter."""

    @abstractmethod
    def receive(
        self,
        max_messages: int = 1,
        *,
        visibility: Duration = "30 seconds",
        wait: Duration = "0 seconds",
    ) -> Sequence[Message]:
        """Lease messages that nobody else holds.

        Args:
            max_messages: The most messages to return.
            visibility: How long nobody else receives them. A message that is neither acknowledged
                nor renewed in this time is delivered again.
            wait: How long to wait for a first message.

        Returns:
            The messages, oldest first within a partition; empty if there are none.

        Raises:
            UnknownTopic: The topic was deleted.
            NotSupported: The Kafka brokers do not allow this visibility or delivery limit.
            RetryError: The backend cannot be reached.

        Example:
            ```python
            messages = queue.receive(10, visibility="5 minutes", wait="20 seconds")
            ```
        """

    @abstractmethod
    def ack(self, receipts: Iterable[str]) -> None:
        """Acknowledge messages by their receipts, all or none.

        Args:
            receipts: `message.receipt` of each message.

        Raises:
            LeaseLost: One of the messages is no longer leased under its receipt.
            InputError: A text is not a receipt.

        Example:
            ```python
            queue.ack([message.receipt for message in messages])
            ```
        """

    @abstractmethod
    def nack(self, receipts: Iterable[str], delay: Duration = "0 seconds") -> None:
        """Return messages to the queue by their receipts, all or none.

        Args:
            receipts: `message.receipt` of each message.
            delay: How long the messages stay invisible first.

        Raises:
            LeaseLost: One of the messages is no longer leased under its receipt.
            InputError: A text is not a receipt.

        Example:
            ```python
            queue.nack([message.receipt], delay="1 minute")
            ```
        """

    @abstractmethod
    def renew(self, receipts: Iterable[str], visibility: Duration = "30 seconds") -> None:
        """Extend the leases of messages by their receipts, all or none.

        Args:
            receipts: `message.receipt` of each message.
            visibility: How long, from now, nobody else receives the messages.

        Raises:
            LeaseLost: One of the messages is no longer leased under its receipt.
            InputError: A text is not a receipt.
            NotSupported: The log is on Kafka, whose share groups cannot extend a lease.

        Example:
            ```python
            queue.renew([message.receipt for message in messages], "5 minutes")
            ```
        """

    @abstractmethod
    def peek(self, max_messages: int = 10) -> Sequence[PeekedMessage]:
        """Look at messages that are not done, without leasing them.

        Args:
            max_messages: The most messages to return.

        Returns:
            The messages, oldest first within a partition, leased and delayed ones included.

        Raises:
            UnknownTopic: The topic was deleted.
            NotSupported: The log is on Kafka, which does not show a share group's messages.

        Example:
            ```python
            for message in queue.peek(5):
                print(message.offset, message.status, message.row)
            ```
        """

    @abstractmethod
    def stats(self) -> Sequence[QueueStats]:
        """How many messages are ready, leased and delayed.

        Returns:
            One entry per partition.

        Raises:
            UnknownTopic: The topic was deleted.
            NotSupported: The log is on Kafka, which does not show a share group's messages.

        Example:
            ```python
            sum(stats.ready for stats in queue.stats())
            ```
        """

    @abstractmethod
    def purge(self) -> int:
        """Mark every message that is in the topic now as done, leased ones included.

        The rows stay in the topic: other groups still receive them, and `Log.reset_group` brings
        them back.

        Returns:
            How many messages were not done before.

        Raises:
            UnknownTopic: The topic was deleted.
            NotSupported: The log is on Kafka, whose client cannot move share groups.

        Example:
            ```python
            queue.purge()
            ```
        """


class Log(Closeable):
    """A durable, partitioned log: topics, producers, transactions, consumer groups and queues.

    Opened by `headrace.open_log`. Safe for threads; on the embedded log, several processes may
    open one directory at once.

    Example:
        ```python
        import headrace as hr

        with hr.open_log("file:data") as log:
            log.create_topic("orders", schema="id BIGINT, amount DOUBLE", key="id")
            with log.producer("orders") as producer:
                producer.append({"id": 1, "amount": 9.5})
            print(log.read("orders").to_pandas())
        ```
    """

    address: str
    """The address that opens this log again, from any directory and process."""

    # Topics

    @abstractmethod
    def create_topic(
        self,
        name: str,
        schema: str,
        *,
        key: str | Sequence[str] | None = None,
        partitions: int = 1,
        retention: Duration | None = None,
        retention_bytes: int | None = None,
        compact: bool = False,
        tombstones: Duration = "1 day",
        segment_bytes: int = 64 << 20,
        segment_age: Duration = "7 days",
        compression: str = "none",
        strict: bool = False,
        format: str = "json",
        registry: str = "",
        exist_ok: bool = False,
    ) -> TopicInfo:
        """Create a topic.

        Args:
            name: 1 to 200 letters, digits, dots, hyphens and underscores.
            schema: The columns as Spark DDL, such as `"id BIGINT NOT NULL, amount DOUBLE"`.
            key: The key's column or columns. Rows of one key are in one partition, in order.
            partitions: The number of partitions, 1 to 10,000.
            retention: Remove rows older than this; None keeps them for ever.
            retention_bytes: Remove the oldest rows of a partition beyond this size; None keeps them
                all.
            compact: Keep only the newest row of each key. Needs a key.
            tombstones: How long a compacted topic keeps deletions.
            segment_bytes: Begin a new segment file when one has reached this size.
            segment_age: Begin a new segment file when one is this old.
            compression: "none", "lz4" or "zstd".
            strict: On Kafka, make dead letters of records with fields that the schema does not
                have, instead of ignoring those fields.
            format: On Kafka, how the values of records are written: "json", or "avro", "protobuf"
                or "json-schema" by the schemas of a registry. Needs the extra `registry`.
            registry: The address of the registry, such as `"http://localhost:8081"`.
            exist_ok: Accept an existing topic with the same schema and key.

        Returns:
            The topic as created, or as it exists.

        Raises:
            TopicExists: There is a topic of that name, and `exist_ok` is false or its schema or key
                differs.
            BadName: The name is not allowed.
            BadSchema: The schema cannot be read or stored.
            InputError: A setting is not allowed.
            ReadOnlyLog: The log cannot be written.

        Example:
            ```python
            log.create_topic(
                "clicks",
                schema="user STRING, page STRING",
                key="user",
                partitions=4,
                retention="7 days",
            )
            ```
        """

    @abstractmethod
    def create_table(
        self,
        name: str,
        schema: str,
        *,
        key: str | Sequence[str],
        history: Duration | None = None,
        partitions: int = 1,
        tombstones: Duration = "1 day",
        segment_bytes: int = 64 << 20,
        segment_age: Duration = "7 days",
        compression: str = "none",
        strict: bool = False,
        format: str = "json",
        registry: str = "",
        exist_ok: bool = False,
    ) -> TopicInfo:
        """Create a table's topic: its rows are changes, and the newest one of a key is its value.

        Args:
            name: 1 to 200 letters, digits, dots, hyphens and underscores.
            schema: The columns as Spark DDL. The stored rows also have `_change_type`.
            key: The primary key's column or columns.
            history: How long superseded values stay before compaction removes them; None keeps all
                of them.
            partitions: The number of partitions, 1 to 10,000.
            tombstones: How long compaction keeps deletions.
            segment_bytes: Begin a new segment file when one has reached this size.
            segment_age: Begin a new segment file when one is this old.
            compression: "none", "lz4" or "zstd".
            strict: On Kafka, make dead letters of records with fields that the schema does not
                have, instead of ignoring those fields.
            format: On Kafka, how the values of records are written: "json", or "avro", "protobuf"
                or "json-schema" by the schemas of a registry. Needs the extra `registry`.
            registry: The address of the registry, such as `"http://localhost:8081"`.
            exist_ok: Accept an existing table with the same schema and key.

        Returns:
            The table's topic as created, or as it exists.

        Raises:
            TopicExists: There is a topic of that name, and `exist_ok` is false or its schema or key
                differs.
            BadName: The name is not allowed.
            BadSchema: The schema cannot be read or stored.
            InputError: A setting is not allowed, or the key is missing.
            ReadOnlyLog: The log cannot be written.

        Example:
            ```python
            log.create_table("customers", schema="id BIGINT, name STRING", key="id")
            with log.producer("customers") as producer:
                producer.upsert({"id": 1, "name": "Ada"})
            ```
        """

    @abstractmethod
    def alter_topic(
        self,
        name: str,
        *,
        add_columns: str | None = None,
        alter_columns: str | None = None,
        drop_columns: str | Sequence[str] | None = None,
        rename_columns: Mapping[str, str] | None = None,
        partitions: int | None = None,
        allow_moving_keys: bool = False,
        dry_run: bool = False,
        **settings: Any,
    ) -> TopicInfo:
        """Change a topic's columns, add partitions, or change its settings, while it is written and
        read. Stored rows stay as they are; readers get them with the topic's present columns.

        Args:
            name: The topic.
            add_columns: Nullable columns to add, as DDL. They are null in rows stored before, and
                producers may leave them out.
            alter_columns: Columns with their new definitions, as DDL. A type can only be widened
                (INT to BIGINT, FLOAT to DOUBLE, DECIMAL to more digits, NOT NULL to nullable), and
                a key's not at all. Stored values are converted when they are read.
            drop_columns: Columns that no longer exist. Values that are stored in them are not read
                any more, but stay on disk until retention or compaction removes their rows. The
                names cannot be used again.
            rename_columns: Present name -> new name. Stored rows have the new name when they are
                read. Producers and readers may go on with the former one.
            partitions: The new number of partitions, not fewer than now.
            allow_moving_keys: Allow more partitions on a topic with a key, although most keys then
                go to another partition.
            dry_run: Check the change and return what the topic would be, without changing it.
            **settings: `retention`, `retention_bytes`, `compact`, `history`, `tombstones`,
                `segment_bytes`, `segment_age`, `compression`, `strict`, `format`, `registry`; see
                `create_topic`. What is not named stays as it is.

        Returns:
            The topic after the change.

        Raises:
            UnknownTopic: There is no such topic.
            UnknownColumn: There is no such column.
            IncompatibleChange: Readers of what is stored would break.
            InputError: A setting does not exist or is not allowed.
            ReadOnlyLog: The log cannot be written.

        Example:
            ```python
            log.alter_topic("orders", add_columns="coupon STRING", retention="30 days")
            log.alter_topic("orders", alter_columns="amount DECIMAL(20,2)")
            ```
        """

    @abstractmethod
    def delete_topic(self, name: str) -> None:
        """Delete a topic with all its rows and the groups' offsets in it.

        Args:
            name: The topic.

        Raises:
            UnknownTopic: There is no such topic.
            ReadOnlyLog: The log cannot be written.

        Example:
            ```python
            log.delete_topic("clicks")
            ```
        """

    @abstractmethod
    def trim_topic(
        self,
        name: str,
        before: str | int | datetime,
        *,
        partitions: Sequence[int] | None = None,
    ) -> dict[int, int]:
        """Remove a topic's oldest rows. Offsets of the other rows do not change.

        Args:
            name: The topic.
            before: Remove the rows before this offset or append time; "latest" removes all.
            partitions: The partitions to trim; None for all.

        Returns:
            Partition -> its earliest offset now.

        Raises:
            UnknownTopic: There is no such topic.
            BadPartition: The topic has no such partition.
            OffsetOutOfRange: The offset does not exist yet.
            ReadOnlyLog: The log cannot be written.

        Example:
            ```python
            log.trim_topic("clicks", datetime(2026, 1, 1, tzinfo=UTC))
            ```
        """

    @abstractmethod
    def topics(self) -> list[str]:
        """The names of all topics.

        Returns:
            The names, sorted.

        Example:
            ```python
            log.topics()  # ["clicks", "orders"]
            ```
        """

    @abstractmethod
    def topic(self, name: str) -> TopicInfo:
        """A topic's schema, key and settings.

        Args:
            name: The topic.

        Returns:
            The topic as it is declared now.

        Raises:
            UnknownTopic: There is no such topic. Names the nearest one.

        Example:
            ```python
            log.topic("orders").partitions
            ```
        """

    def topic_infos(self) -> dict[str, TopicInfo | None]:
        """All topics at once, also those on Kafka that other programs created.

        Returns:
            Name -> the topic as it is declared now; None for one that has no schema yet.

        Example:
            ```python
            [name for name, info in log.topic_infos().items() if info is None]
            ```
        """
        infos: dict[str, TopicInfo | None] = {}
        for name in self.topics():
            with suppress(UnknownTopic):  # it was deleted meanwhile
                infos[name] = self.topic(name)
        return infos

    # Writing

    @abstractmethod
    def producer(
        self, topic: str, id: str | None = None, *, partitioner: Partitioner | None = None
    ) -> Producer:
        """Open a producer for a topic.

        Args:
            topic: The topic to append to.
            id: Makes the producer idempotent under this id and fences an older producer of it.
                None opens a producer without idempotence.
            partitioner: Chooses partitions: called with a batch and the number of partitions, it
                returns one partition number per row. None chooses by key, or round-robin.

        Returns:
            An open producer.

        Raises:
            UnknownTopic: There is no such topic.
            BadName: The id is not allowed.
            ReadOnlyLog: The log cannot be written.

        Example:
            ```python
            with log.producer("orders", id="shop-1") as producer:
                producer.append({"id": 7, "amount": 9.5})
            ```
        """

    @abstractmethod
    def transaction(self, id: str, *, timeout: Duration = "1 minute") -> Transaction:
        """Begin a transaction and fence older transactions of the same id.

        Args:
            id: Names the writer. There is one live owner of an id at a time: the newest.
            timeout: How long the transaction may stay open.

        Returns:
            An open transaction.

        Raises:
            BadName: The id is not allowed.
            ReadOnlyLog: The log cannot be written.
            RetryError: The backend cannot be reached.

        Example:
            ```python
            with log.transaction("billing") as tx:
                tx.append("invoices", {"order": 7, "amount": 9.5})
                tx.append("audit", {"text": "billed order 7"})
            ```
        """

    @abstractmethod
    def append_control(self, topic: str, partition: int, payload: bytes) -> AppendResult:
        """Internal: append a control record, which takes one offset and which `read` skips."""

    @abstractmethod
    def stage(
        self,
        topic: str,
        batches: Iterable[pa.RecordBatch],
        *,
        partition: int | None = None,
        directory: str | None = None,
        group: str | None = None,
    ) -> Staged:
        """Internal: store rows durably but invisibly, for another process's transaction to adopt.

        If the iterable of batches fails, nothing is left behind.

        Args:
            topic: The topic the rows are for.
            batches: The rows.
            partition: The partition of all rows; None chooses by key, or round-robin.
            directory: Where to store them if the log has no storage of its own for them (Kafka);
                both processes must see it. The embedded log ignores it.
            group: A name for what belongs together, such as the tasks of one job; `discard_group`
                removes it all, also what a killed process left.
        """

    @abstractmethod
    def discard_staged(self, staged: Staged) -> None:
        """Internal: remove staged rows that no transaction will adopt."""

    @abstractmethod
    def discard_group(self, group: str, *, directory: str | None = None) -> None:
        """Internal: remove all rows staged under a group's name and not adopted.

        Safe even if a commit's outcome is unknown: rows whose adoption was committed stay.
        """

    # Reading

    @abstractmethod
    def read(
        self,
        topic: str,
        partition: int | None = None,
        start: int | None = None,
        stop: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        headers: bool = False,
        on_corrupt: str = "raise",
    ) -> Batches:
        """Read committed rows: what is in the topic now, without a group.

        Args:
            topic: The topic.
            partition: One partition; None reads all, one after the other.
            start: The first offset; None for the earliest.
            stop: Read up to, not including, this offset; None for the end.
            columns: The columns to read, also by names that they had before they were renamed;
                None for the topic's columns and `_partition`, `_offset`
                and `_timestamp`.
            headers: Also offer the column `_headers`.
            on_corrupt: "raise" stops at damaged rows; "skip" logs them and goes on.

        Returns:
            A lazy read of the rows.

        Raises:
            UnknownTopic: There is no such topic.
            BadPartition: The topic has no such partition.
            UnknownColumn: There is no such column.
            OffsetOutOfRange: `start` is no longer, or not yet, in the partition.

        Example:
            ```python
            log.read("orders", partition=0, start=100, columns=["id", "_offset"]).to_pylist()
            ```
        """

    @abstractmethod
    def read_control(
        self, topic: str, partition: int, start: int | None = None, stop: int | None = None
    ) -> list[ControlRecord]:
        """Internal: the control records of a partition, from `start` up to `stop`."""

    @abstractmethod
    def start_offsets(self, topic: str) -> dict[int, int]:
        """The earliest offset of each partition: what is before it, retention has removed.

        Args:
            topic: The topic.

        Returns:
            Partition -> offset.

        Raises:
            UnknownTopic: There is no such topic.

        Example:
            ```python
            log.start_offsets("orders")  # {0: 0, 1: 0}
            ```
        """

    @abstractmethod
    def whole_from(self, topic: str) -> dict[int, int]:
        """The offset of each partition from which on no row is missing.

        Before it, retention has removed rows, or compaction may have.

        Args:
            topic: The topic.

        Returns:
            Partition -> offset.

        Raises:
            UnknownTopic: There is no such topic.

        Example:
            ```python
            log.whole_from("customers")  # {0: 1200}
            ```
        """

    @abstractmethod
    def end_offsets(self, topic: str) -> dict[int, int]:
        """The offset of each partition that its next row will get.

        Args:
            topic: The topic.

        Returns:
            Partition -> offset.

        Raises:
            UnknownTopic: There is no such topic.

        Example:
            ```python
            log.end_offsets("orders")  # {0: 120, 1: 98}
            ```
        """

    @abstractmethod
    def snapshot(self, topics: Iterable[str]) -> Offsets:
        """The end offsets of several topics at one moment.

        On the embedded log the offsets never cut a transaction in two; on Kafka they may.

        Args:
            topics: The topics.

        Returns:
            Topic -> partition -> end offset.

        Raises:
            UnknownTopic: One of the topics does not exist.

        Example:
            ```python
            ends = log.snapshot(["orders", "payments"])
            ```
        """

    @abstractmethod
    def offsets_at(self, topic: str, time: datetime | str | float) -> dict[int, int]:
        """The first offset of each partition that was appended at or after a time.

        Args:
            topic: The topic.
            time: A datetime, ISO 8601 text, or seconds since 1970.

        Returns:
            Partition -> offset; the end offset where nothing was appended since.

        Raises:
            UnknownTopic: There is no such topic.
            BadDuration: The time cannot be read.

        Example:
            ```python
            start = log.offsets_at("orders", "2026-02-01T00:00:00Z")
            ```
        """

    # Groups, queues, notes

    @abstractmethod
    def consumer(
        self,
        topics: str | Sequence[str],
        group: str,
        *,
        start: str = "earliest",
        session_timeout: Duration = "10 seconds",
        max_poll_interval: Duration = "5 minutes",
        max_rows: int = 100_000,
        max_bytes: int = 64 << 20,
        on_lost: str = "raise",
        on_assigned: RebalanceCallback | None = None,
        on_revoked: RebalanceCallback | None = None,
        headers: bool = False,
    ) -> Consumer:
        """Join a consumer group.

        Args:
            topics: One topic or several.
            group: The group. Its members share the partitions of their topics.
            start: Where to begin in a partition without a committed offset: "earliest" or "latest".
            session_timeout: After this long without a sign of life of its process, a member's
                partitions go to the others.
            max_poll_interval: After this long without a poll, a member counts as stuck, and its
                partitions go to the others within a session timeout.
            max_rows: The most rows that one poll returns.
            max_bytes: About how many bytes of rows one poll returns: it ends with the batch that
                reaches this size.
            on_lost: What to do when retention has removed the next row: "raise", or continue from
                "earliest" or "latest".
            on_assigned: Called with the consumer and the partitions that it has got (topic ->
                partition numbers), before rows of them are delivered. It may seek.
            on_revoked: Called with the consumer and the partitions that it is about to give up. It
                may commit. After a session timeout the partitions are gone already, and a commit
                raises MemberFenced.
            headers: Also deliver the column `_headers`.

        Returns:
            A member of the group.

        Raises:
            UnknownTopic: One of the topics does not exist.
            BadName: The group's name is not allowed.
            InputError: An option is not allowed.
            ReadOnlyLog: The log cannot be written, so offsets cannot be stored.

        Example:
            ```python
            with log.consumer(["orders", "payments"], group="billing") as consumer:
                for batch in consumer.poll():
                    print(batch.num_rows)
                consumer.commit()
            ```
        """

    @abstractmethod
    def queue(self, topic: str, group: str, *, delivery_limit: int = 5) -> Queue:
        """Open a topic as a queue, whose messages are acknowledged one by one.

        Args:
            topic: The topic whose rows are the messages.
            group: The group of receivers that share the messages.
            delivery_limit: After this many deliveries without an acknowledgement, a message becomes
                a dead letter.

        Returns:
            An open queue.

        Raises:
            UnknownTopic: There is no such topic.
            BadName: The group's name is not allowed.
            InputError: `delivery_limit` is less than 1.
            NotSupported: The Kafka cluster has no share groups.

        Example:
            ```python
            with log.queue("emails", group="mailers", delivery_limit=3) as queue:
                for message in queue.receive(10):
                    message.ack()
            ```
        """

    @abstractmethod
    def groups(self) -> list[str]:
        """The names of all consumer groups and queue groups.

        Returns:
            The names, sorted.

        Example:
            ```python
            log.groups()  # ["billing", "mailers"]
            ```
        """

    @abstractmethod
    def group(self, name: str) -> GroupInfo:
        """A group's members, their partitions, and its committed offsets.

        Args:
            name: The group.

        Returns:
            The group as it is now.

        Raises:
            UnknownGroup: No group of that name has ever read or committed.

        Example:
            ```python
            for member in log.group("billing").members:
                print(member.host, member.partitions)
            ```
        """

    @abstractmethod
    def committed(self, group: str) -> Offsets:
        """A group's committed offsets.

        Args:
            group: The group.

        Returns:
            Topic -> partition -> next offset.

        Raises:
            UnknownGroup: No group of that name has ever read or committed.

        Example:
            ```python
            log.committed("billing")  # {"orders": {0: 120, 1: 98}}
            ```
        """

    @abstractmethod
    def reset_group(
        self,
        group: str,
        topic: str,
        to: str | int | datetime | None = None,
        *,
        shift: int | None = None,
        partitions: Sequence[int] | None = None,
        dry_run: bool = False,
    ) -> Offsets:
        """Move a group's committed offsets. The group must have no live member.

        Args:
            group: The group; it need not exist yet.
            topic: The topic.
            to: "earliest", "latest", an offset, or a time (a datetime or ISO 8601 text).
            shift: Instead of `to`: how many offsets to move forward, or back if it is negative. An
                offset stays within what the partition has.
            partitions: The partitions to move; None for all.
            dry_run: Only return the new offsets, and move nothing.

        Returns:
            The group's new offsets in that topic.

        Raises:
            UnknownTopic: There is no such topic.
            UnknownGroup: There is no such group to shift.
            BadPartition: The topic has no such partition.
            InputError: Not exactly one of `to` and `shift` is given, or there is no committed
                offset to shift.
            MemberFenced: A member of the group is alive.
            ReadOnlyLog: The log cannot be written.

        Example:
            ```python
            log.reset_group("billing", "orders", "2026-02-01T00:00:00Z")
            log.reset_group("billing", "orders", shift=-100, dry_run=True)
            ```
        """

    @abstractmethod
    def delete_group(self, name: str) -> None:
        """Delete a consumer group or a queue's group: its offsets, its members and its leases.

        The group must have no live member. A group of that name that reads again begins anew.

        Args:
            name: The group.

        Raises:
            UnknownGroup: There is no such group.
            MemberFenced: A member of the group is alive.
            NotSupported: The group is a queue's on Kafka, whose client cannot delete share groups.
            ReadOnlyLog: The log cannot be written.

        Example:
            ```python
            log.delete_group("billing-test")
            ```
        """

    @abstractmethod
    def lag(self, group: str | None = None) -> list[PartitionLag]:
        """How far groups are behind, in rows and in seconds.

        Args:
            group: One group; None for all.

        Returns:
            One entry per group, topic and partition.

        Raises:
            UnknownGroup: No group of that name has ever read or committed.

        Example:
            ```python
            sum(lag.rows for lag in log.lag("billing"))
            ```
        """

    def watch_lag(
        self,
        on_alert: Callable[[LagAlert], None],
        *,
        rows: int | None = None,
        seconds: float | None = None,
        group: str | None = None,
        every: Duration = "5 seconds",
    ) -> LagWatch:
        """Call a function when a partition's lag crosses a threshold, and when it has recovered.

        Args:
            on_alert: Called in a background thread, once per crossing.
            rows: Threshold in rows.
            seconds: Threshold in seconds. With both, either one fires.
            group: The group to watch; None for all.
            every: The interval between two checks.

        Returns:
            The running watch; its `stop()` ends it.

        Raises:
            InputError: Neither `rows` nor `seconds` is given.
            UnknownGroup: No group of that name has ever read or committed.

        Example:
            ```python
            watch = log.watch_lag(lambda alert: print(alert.lag), rows=10_000, group="billing")
            ```
        """
        every_s = to_us(every, what="every") / 1e6
        watch = LagWatch(
            self.lag, on_alert, rows=rows, seconds=seconds, group=group, every_s=every_s
        )
        return watch.start()

    @abstractmethod
    def note(self, name: str) -> str | None:
        """Read a small named value that a transaction stored with `set_note`.

        Args:
            name: The note's name.

        Returns:
            The note's text; None if there is no such note.

        Example:
            ```python
            log.note("imported.up_to")
            ```
        """

    @abstractmethod
    def notes(self, prefix: str) -> dict[str, str]:
        """Read all notes whose names begin alike.

        Args:
            prefix: What the names begin with.

        Returns:
            The notes' texts by name.

        Example:
            ```python
            log.notes("imported.")
            ```
        """

    # Maintenance

    @abstractmethod
    def verify(self, topic: str | None = None) -> list[Finding]:
        """Check stored bytes for damage.

        Args:
            topic: One topic; None for the whole log.

        Returns:
            All damage found; an empty list means that everything is sound.

        Raises:
            UnknownTopic: There is no such topic.

        Example:
            ```python
            for finding in log.verify():
                print(finding.file, finding.position, finding.message)
            ```
        """

    @abstractmethod
    def backup(self, directory: str | Path) -> BackupResult:
        """Back up the whole log into a directory while it is in use. Opening that directory is
        restoring it.

        The backup is as of one commit: it has whole transactions only. A second backup into the
        same directory copies only what is new. Every batch that is copied is verified. Writers go
        on meanwhile; retention and compaction wait.

        Args:
            directory: An empty or new directory, or one with an earlier backup of this log.

        Returns:
            What was copied, and as of which commit.

        Raises:
            InputError: The directory has other things in it, or was written to since the backup
                before.
            CorruptionError: The log is damaged. The backup before is as it was.
            NotSupported: The log is not embedded.

        Example:
            ```python
            with hr.open_log("file:data") as log:
                log.backup("/backups/data")
            restored = hr.open_log("file:/backups/data")
            ```
        """

    @abstractmethod
    def stats(self, topic: str | None = None, *, count_rows: bool = True) -> list[TopicStats]:
        """The size of topics.

        Args:
            topic: One topic; None for all.
            count_rows: Count the stored rows. Otherwise, and on Kafka, offsets are counted, which
                are more than rows after compaction and transactions.

        Returns:
            One entry per topic.

        Raises:
            UnknownTopic: There is no such topic.

        Example:
            ```python
            log.stats("orders")[0].bytes
            ```
        """

    @abstractmethod
    def maintain(self, topic: str | None = None) -> dict[str, Any]:
        """Apply retention and compaction now, rather than in the background.

        Args:
            topic: One topic; None for all.

        Returns:
            What was removed. On Kafka, a note: the brokers do this themselves.

        Raises:
            UnknownTopic: There is no such topic.
            ReadOnlyLog: The log cannot be written.

        Example:
            ```python
            log.maintain("clicks")["segments_deleted"]
            ```
        """
