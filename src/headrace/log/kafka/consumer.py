"""A member of a consumer group on Kafka. Kafka shares partitions out and fences by generation;
positions are kept here and committed by name.

Partitions are shared out cooperatively: a member reads on while others change. What it lost it
knows from Kafka's calls, which come while it polls.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer as Client
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from headrace.durations import to_us
from headrace.errors import BadPartition, HeadraceError, InputError, MemberFenced, OffsetOutOfRange
from headrace.log.api import Consumer
from headrace.log.kafka.cluster import ANSWER_SECONDS, Place
from headrace.log.kafka.connection import Connection, is_pending
from headrace.log.kafka.errors import LOST_MEMBERSHIP, code, doing, translated
from headrace.log.kafka.fetcher import OffsetLost, raise_for
from headrace.log.kafka.reader import DeadLetters, RowReader, explained
from headrace.log.topic_config import check_name
from headrace.log.values import TOPIC_METADATA, Duration, Offsets

SETTLE_SECONDS = 10.0


class KafkaConsumer(Consumer):
    """For one thread at a time, as Kafka's own."""

    def __init__(
        self,
        connection: Connection,
        letters: DeadLetters,
        topics: tuple[str, ...],
        group: str,
        *,
        start: str,
        session_timeout: Duration,
        max_rows: int,
        on_lost: str,
        headers: bool,
    ) -> None:
        if start not in {"earliest", "latest"} or on_lost not in {"raise", "earliest", "latest"}:
            raise InputError(
                f"start={start!r}, on_lost={on_lost!r}.",
                fix="start is 'earliest' or 'latest'; on_lost is 'raise', 'earliest' or 'latest'.",
            )
        self._connection, self.topics, self.group = (
            connection,
            topics,
            check_name(group, what="group"),
        )
        self._readers = {
            name: RowReader(
                connection, letters, connection.topics.info(name), headers=headers, follows=True
            )
            for name in topics
        }
        self._start, self._max_rows, self._on_lost = start, max_rows, on_lost
        self._positions: dict[Place, int] = {}
        self._stash: list[Message] = []
        self._joined = self._closed = False
        self._session_ms = to_us(session_timeout, what="session_timeout") // 1000
        with doing(f"join the group {group!r}"):
            self._client = Client(connection.cluster.member(group, self._session_ms))
            self._client.subscribe(
                list(topics),
                on_assign=self._assigned,
                on_revoke=self._revoked,
                on_lost=self._revoked,
            )
        self._await_first_assignment()

    # Membership

    def _await_first_assignment(self) -> None:
        """Be in the group when this returns: what is appended from now on is seen with
        `start="latest"` too.
        """
        deadline = time.monotonic() + self._session_ms / 1000 + SETTLE_SECONDS
        try:
            while not self._joined and time.monotonic() < deadline:
                self._serve(0.05)
        except HeadraceError:
            self._client.close()
            raise

    def _serve(self, seconds: float) -> None:
        """Let Kafka make its calls; a record that comes along is kept for the next poll. An error
        of the whole group is raised.
        """
        message = self._client.poll(seconds)
        if message is None:
            return
        error = message.error()
        if error is not None and message.topic() is None and not error.retriable():
            raise translated(KafkaException(error), f"read with the group {self.group!r}")
        self._stash.append(message)

    def _assigned(self, client: Client, partitions: list[TopicPartition]) -> None:
        self._joined = True
        if not partitions:
            return
        committed = self._committed(client, partitions)
        fresh = [(place.topic, place.partition) for place in committed if place.offset < 0]
        broker = self._connection.broker
        starts = broker.earliest(fresh) if self._start == "earliest" else broker.ends(fresh)
        for place in committed:
            key = (place.topic, place.partition)
            self._positions[key] = place.offset if place.offset >= 0 else starts[key]
        client.incremental_assign(
            [
                TopicPartition(
                    place.topic, place.partition, self._positions[place.topic, place.partition]
                )
                for place in partitions
            ]
        )

    @staticmethod
    def _committed(client: Client, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """What the group committed, once no transaction is about to change it."""
        deadline = time.monotonic() + ANSWER_SECONDS
        committed = client.committed(partitions, timeout=ANSWER_SECONDS)
        while any(is_pending(place) for place in committed) and time.monotonic() < deadline:
            time.sleep(0.005)
            committed = client.committed(partitions, timeout=ANSWER_SECONDS)
        return committed

    def _revoked(self, _client: Client, partitions: list[TopicPartition]) -> None:
        gone = {(place.topic, place.partition) for place in partitions}
        self._positions = {
            place: offset for place, offset in self._positions.items() if place not in gone
        }
        self._stash = [message for message in self._stash if _place(message) not in gone]

    # Reading

    def poll(
        self, timeout: Duration = "1 second", max_rows: int | None = None
    ) -> list[pa.RecordBatch]:
        self._check_open()
        deadline = time.monotonic() + to_us(timeout, what="timeout") / 1e6
        while True:
            batches = self._batches(
                self._arrived(max(deadline - time.monotonic(), 0.0), max_rows or self._max_rows)
            )
            if batches or time.monotonic() >= deadline:
                return batches

    def _arrived(self, seconds: float, most: int) -> list[Message]:
        """At least one message if one comes in time; more if they are there already."""
        with doing(f"read with the group {self.group!r}"):
            if not self._stash:
                self._serve(seconds)
            if len(self._stash) < most:
                self._stash += self._client.consume(most - len(self._stash), 0)
        arrived, self._stash = self._stash[:most], self._stash[most:]
        return arrived

    def _batches(self, messages: Sequence[Message]) -> list[pa.RecordBatch]:
        """Rows first: an end that was reported behind them moves the position beyond them. An error
        waits for a poll of its own.
        """
        by_place: dict[Place, list[Message]] = {}
        events: list[Message] = []
        for message in messages:
            if message.error() is None:
                by_place.setdefault(_place(message), []).append(message)
            else:
                events.append(message)
        batches = [
            self._rows(place, records)
            for place, records in sorted(by_place.items())
            if place in self._positions
        ]
        batches = [batch for batch in batches if batch.num_rows]
        for number, event in enumerate(events):
            if batches and not _is_end(event):
                self._stash = events[number:] + self._stash
                break
            self._take_event(event)
        return batches

    def _rows(self, place: Place, records: list[Message]) -> pa.RecordBatch:
        position = self._positions[place]
        wanted = [
            record for record in records if (record.offset() or 0) >= position
        ]  # after a seek, older ones may still be on their way
        if wanted:
            self._positions[place] = (wanted[-1].offset() or 0) + 1
        return (
            self._readers[place[0]]
            .rows(wanted)
            .replace_schema_metadata({TOPIC_METADATA: place[0].encode()})
        )

    def _take_event(self, message: Message) -> None:
        """The end of a partition, or an offset that is gone."""
        error, place = message.error(), _place(message)
        assert error is not None
        if place not in self._positions:
            return
        if _is_end(message):
            self._positions[place] = max(self._positions[place], message.offset() or 0)
            return
        try:
            raise_for(message, error, self._positions[place])
        except OffsetLost as lost:
            self._overtaken(explained(self._connection, lost))

    def _overtaken(self, lost: OffsetOutOfRange) -> None:
        """Retention was faster than this group."""
        if self._on_lost == "raise":
            raise lost
        self._move(
            (lost.topic, lost.partition), lost.earliest if self._on_lost == "earliest" else lost.end
        )

    def _check_open(self) -> None:
        if self._closed:
            raise InputError(
                "This consumer was closed.", fix="open another one with log.consumer(...)."
            )

    # Positions

    def positions(self) -> Offsets:
        offsets: dict[str, dict[int, int]] = {}
        for (topic, partition), offset in sorted(self._positions.items()):
            offsets.setdefault(topic, {})[partition] = offset
        return Offsets(
            offsets, member=None if self._closed else self._client.memberid(), handle=self
        )

    def metadata(self, positions: Mapping[str, Mapping[int, int]]) -> Any:
        """For a transaction that commits positions of ours: what the group's coordinator checks."""
        self._check_open()
        self._check_owned(positions)
        return self._client.consumer_group_metadata()

    def commit(self, positions: Mapping[str, Mapping[int, int]] | None = None) -> None:
        self._check_open()
        wanted = self.positions() if positions is None else positions
        offsets = [
            TopicPartition(topic, partition, offset)
            for topic, parts in wanted.items()
            for partition, offset in parts.items()
        ]
        deadline = time.monotonic() + SETTLE_SECONDS
        while offsets:
            self._check_owned(wanted)
            try:
                self._client.commit(offsets=offsets, asynchronous=False)
            except KafkaException as error:
                self._after_failed_commit(error, deadline)
            else:
                return

    def _after_failed_commit(self, error: KafkaException, deadline: float) -> None:
        """In the middle of a sharing-out, wait for its end: then either the partition is still ours
        or it is not.
        """
        if code(error) in LOST_MEMBERSHIP:
            self._positions, self._stash = {}, []
            raise MemberFenced(
                f"This consumer is no longer a member of group {self.group!r}.", fix=_FIX_FENCED
            ) from None
        if code(error) != KafkaError.REBALANCE_IN_PROGRESS or time.monotonic() > deadline:
            raise translated(error, f"commit positions of group {self.group!r}") from error
        self._serve(0.05)

    def _check_owned(self, positions: Mapping[str, Mapping[int, int]]) -> None:
        for topic, offsets in positions.items():
            for partition in offsets:
                if (topic, partition) not in self._positions:
                    raise MemberFenced(
                        f"This member no longer owns {topic}[{partition}] in group {self.group!r}.",
                        fix=_FIX_FENCED,
                    )

    def seek(self, partition: int, offset: int, *, topic: str | None = None) -> None:
        self._check_open()
        place = (topic or self.topics[0], partition)
        if place not in self._positions:
            raise BadPartition(
                f"This member does not own {place[0]}[{partition}].",
                fix=f"it owns {sorted(self._positions)}.",
            )
        start, end = (
            self._connection.broker.earliest([place])[place],
            self._connection.broker.ends([place])[place],
        )
        if not start <= offset <= end:
            raise OffsetOutOfRange(*place, offset, start, end)
        self._move(place, offset)

    def _move(self, place: Place, offset: int) -> None:
        """Assigned anew, as a partition whose offset was lost cannot be sought in."""
        with doing(f"move to offset {offset} of {place[0]}[{place[1]}]"):
            self._client.incremental_unassign([TopicPartition(*place)])
            self._client.incremental_assign([TopicPartition(*place, offset)])
        self._positions[place] = offset
        self._stash = [message for message in self._stash if _place(message) != place]

    def assignment(self) -> Mapping[str, tuple[int, ...]]:
        return {topic: tuple(offsets) for topic, offsets in self.positions().items()}

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._positions, self._stash = {}, []
            self._client.close()


_FIX_FENCED = "poll again: rows since the last commit are delivered to the new owner."


def _is_end(message: Message) -> bool:
    error = message.error()
    return error is not None and error.code() == KafkaError._PARTITION_EOF  # noqa: SLF001


def _place(message: Message) -> Place:
    return message.topic() or "", message.partition() or 0
