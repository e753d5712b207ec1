"""The program that a load's processes run: one role each, against the public interface of whichever
log the address names. Everything it asks and is answered goes into its history.

A role works until a file `stop-ROLE` is there. Every value is sent under its process's name, so it
is unique, and every row goes to a partition of the program's choice, so that a row whose append was
never answered can be accounted for.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa

import headrace as hr
from headrace.errors import (
    DiskFull,
    FencedError,
    HeadraceError,
    MemberFenced,
    OffsetOutOfRange,
    RetryError,
    TransactionTimedOut,
    UnknownGroup,
)
from headrace.log.values import TOPIC_METADATA, AppendResult
from tests.history import faults, mutants
from tests.history.history import (
    Action,
    Assign,
    Poll,
    RecordedOperation,
    Recorder,
    Send,
    partitions_to_json,
)

SCHEMA = "key STRING, value STRING, source STRING, padding STRING"
PARTITIONS = {"plain": 3, "second": 2, "copied": 3, "kept": 1, "latest": 2}
KEYS = 12
"""How many keys the compacted topic has."""
LARGE_BYTES = 12_000
"""Rows of this size go through other code than small ones: see `faults.install`."""
COPIERS, READERS = "history.copiers", "history.readers"
MAX_ROWS = 40
REFUSED = (FencedError, DiskFull, TransactionTimedOut)
"""Errors after which nothing is stored."""


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """What one process is to do.

    Attributes:
        directory: Where it records its history, and finds what it is told.
        life: How many processes had this role and number before, and one more.
        pace_s: How long it rests between two operations, on average.
        session_timeout: After how long a member of a group that is silent is given up.
        polls_per_transaction: How often a copier polls, at most, before it commits.
        mutant: A defect that is put into the log; empty for none.
    """

    address: str
    directory: Path
    role: str
    number: int = 0
    life: int = 1
    seed: int = 0
    pace_s: float = 0.01
    session_timeout: str = "1 second"
    polls_per_transaction: int = 3
    mutant: str = ""

    @property
    def part(self) -> str:
        return f"{self.role}-{self.number}"

    @property
    def process(self) -> str:
        return f"{self.part}.{self.life}"

    @property
    def done_file(self) -> Path:
        """Is there when the process has come to its end as it was told to."""
        return self.directory / f"{self.process}.done"


def run(settings: ClientSettings) -> None:
    """The life of a process. It ends with 0 when it was told to stop, or fenced by its
    successor.
    """
    recorder = Recorder(settings.directory / f"{settings.process}.history", settings.process)
    try:
        faults.install(settings.directory, settings.part)
        mutants.install(settings.mutant)
        with hr.open_log(settings.address) as log:
            ROLES[settings.role](Client(log, recorder, settings))
        settings.done_file.touch()
    except (FencedError, RetryError) as error:  # whoever started it may start another one
        recorder.invoke("end").info(error)
    except BaseException:
        (settings.directory / f"{settings.process}.error").write_text(traceback.format_exc())
        sys.exit(1)


class Client:
    """A process at work: its log, its chance, its history."""

    def __init__(self, log: hr.Log, recorder: Recorder, settings: ClientSettings) -> None:
        self.log = log
        self.recorder = recorder
        self.settings = settings
        self.chance = Random(f"{settings.seed} {settings.process}")
        self._numbers = count()
        self._stop = settings.directory / f"stop-{settings.role}"

    def is_stopped(self) -> bool:
        return self._stop.exists()

    def rest(self) -> None:
        time.sleep(self.chance.uniform(0, 2 * self.settings.pace_s))

    def new_sends(self, topic: str, rows: int) -> list[Send]:
        """Rows with keys chosen at random, each in its key's partition."""
        keys = [self.chance.randrange(KEYS) for _ in range(rows)]
        return [self.new_send(topic, key % PARTITIONS[topic], key=f"k{key}") for key in keys]

    def new_send(self, topic: str, partition: int, *, key: str = "", source: str = "") -> Send:
        """A row with a value that nobody else has."""
        value = f"{self.settings.process}:{next(self._numbers)}"
        return Send(topic, partition, value, key, source)

    def to_rows(self, sends: Sequence[Send]) -> list[dict[str, str]]:
        """The rows as they are appended. Now and then they are too large to be kept in memory."""
        is_large = sends[0].topic != "kept" and self.chance.random() < 0.05
        padding = "x" * (self.chance.randrange(LARGE_BYTES) if is_large else 8)
        return [
            {"key": send.key, "value": send.value, "source": send.source, "padding": padding}
            for send in sends
        ]


def partition_by_key(rows: pa.RecordBatch, partitions: int) -> list[int]:
    """The partition of each row, as `Client.new_sends` chose it."""
    return [int(key.as_py()[1:]) % partitions for key in rows.column("key")]


def offsets_of(sends: Sequence[Send], result: AppendResult) -> list[int | None]:
    """The offset of each row. On Kafka only the first and the last are certain where others wrote
    in between.
    """
    by_partition: dict[tuple[str, int], list[int]] = {}
    for index, send in enumerate(sends):
        by_partition.setdefault((send.topic, send.partition), []).append(index)
    offsets: list[int | None] = [None] * len(sends)
    for (topic, partition), indices in by_partition.items():
        span = result.offsets.get(topic, {}).get(partition)
        if span is None:
            continue
        if len(span) == len(indices):
            for index, offset in zip(indices, range(span.start, span.stop), strict=True):
                offsets[index] = offset
        else:
            offsets[indices[0]] = span.start
            offsets[indices[-1]] = span.stop - 1
    return offsets


# Writing


def write(client: Client) -> None:
    """Numbered appends to three topics, of rows for one or several partitions. What was refused is
    sent anew under the same number; what is in doubt is repeated as it was; and now and then
    something that was stored is repeated too.
    """
    producers = {}
    for topic in ("plain", "kept", "latest"):
        opening = client.recorder.invoke("open", id=f"{topic}/{client.settings.part}")
        producers[topic] = client.log.producer(
            topic, id=client.settings.part, partitioner=partition_by_key
        )
        opening.ok(is_work=False)
    while not client.is_stopped():
        topic = client.chance.choices(list(producers), weights=[3, 2, 2])[0]
        producer = producers[topic]
        sequence = producer.last_sequence + 1
        sends = client.new_sends(topic, client.chance.randint(1, 3))
        _append(client, producer, sends, sequence)
        if producer.last_sequence == sequence and client.chance.random() < 0.15:
            _append(client, producer, sends, sequence)
        client.rest()


def _append(client: Client, producer: Any, sends: list[Send], sequence: int) -> None:
    while True:
        operation = client.recorder.invoke("send", id=f"{producer.topic}/{producer.id}")
        operation.step(sends)
        try:
            result = producer.append(client.to_rows(sends), sequence=sequence)
        except FencedError as error:
            operation.fail(error)
            raise
        except REFUSED as error:
            operation.fail(error)
            time.sleep(0.02)
            return
        except RetryError as error:
            operation.info(error)
            if client.settings.address.startswith("file:"):
                raise  # this process writes no more: the next one sees what is stored
            time.sleep(0.1)
        else:
            operation.ok(offsets_of(sends, result), repeat=result.duplicate)
            return


def move(client: Client) -> None:
    """Transactions over several partitions of several topics, some of which are aborted."""
    transactions = Transactions(client, client.settings.part)
    while not client.is_stopped():
        sends = [
            send
            for topic in client.chance.sample(["plain", "second", "second", "latest"], 2)
            for send in client.new_sends(topic, client.chance.randint(1, 2))
        ]
        with transactions.begin() as (operation, tx):
            operation.step(sends)
            for send in sends:
                tx.append(send.topic, client.to_rows([send]), partition=send.partition)
                if client.chance.random() < 0.2:
                    client.rest()
            if client.chance.random() < 0.15:
                tx.abort()
                operation.fail("aborted")
            else:
                operation.committing()
                operation.ok(offsets_of(sends, tx.commit()))
        client.rest()


class Transactions:
    """One transaction after the other, under an id of which this process became the owner."""

    def __init__(self, client: Client, id: str) -> None:
        self._client = client
        self._id = id
        opening = client.recorder.invoke("open", id=f"transaction/{id}")
        self._tx = client.log.transaction(id, timeout="10 seconds")
        opening.ok(is_work=False)
        self._is_fresh = True
        self._operation: RecordedOperation | None = None
        self.failed = False

    def begin(self, **details: Any) -> Transactions:
        self._operation = self._client.recorder.invoke(
            "transaction", id=f"transaction/{self._id}", **details
        )
        return self

    def __enter__(self) -> tuple[RecordedOperation, hr.Transaction]:
        assert self._operation is not None
        self.failed = False
        if not self._is_fresh:
            self._tx = self._tx.next()
        self._is_fresh = False
        return self._operation, self._tx

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Record a failure. One that another transaction may get over is not raised."""
        assert self._operation is not None
        if error is None:
            return False
        self.failed = True
        if isinstance(error, REFUSED):
            self._operation.fail(error)
        elif isinstance(error, RetryError):
            self._operation.info(error)
            return not self._client.settings.address.startswith("file:")
        elif isinstance(error, HeadraceError):
            self._operation.fail(error)
            return False
        self._tx.abort()
        return isinstance(error, DiskFull | TransactionTimedOut | MemberFenced)


# Reading


class Member:
    """A member of a group, which is opened again when it was fenced or a transaction failed."""

    def __init__(self, client: Client, topics: Sequence[str], group: str) -> None:
        self._client = client
        self._topics = topics
        self.group = group
        self.name = ""
        self._lives = count(1)
        self._consumer: hr.Consumer | None = None
        self._assigned: list[Action] = []

    def consumer(self) -> hr.Consumer:
        while self._consumer is None:
            self.name = f"m{next(self._lives)}"
            self._assigned.clear()
            with suppress(DiskFull):
                self._consumer = self._client.log.consumer(
                    list(self._topics),
                    self.group,
                    session_timeout=self._client.settings.session_timeout,
                    max_rows=MAX_ROWS,
                    on_lost="earliest",
                    on_assigned=self._on_assigned,
                )
        return self._consumer

    def _on_assigned(self, consumer: hr.Consumer, partitions: Mapping[str, Sequence[int]]) -> None:
        positions = consumer.positions()
        self._assigned += [
            Assign(topic, number, positions[topic][number])
            for topic, numbers in partitions.items()
            for number in numbers
        ]

    def poll(self, operation: RecordedOperation) -> list[dict[str, Any]]:
        """Rows, recorded as soon as they are there."""
        rows: list[dict[str, Any]] = []
        polls: list[Poll] = []
        for batch in self.consumer().poll("50 milliseconds", self._client.chance.randint(1, 40)):
            topic = batch.schema.metadata[TOPIC_METADATA].decode()
            some = batch.select(["_partition", "_offset", "value"]).to_pylist()
            rows += some
            offsets = tuple((row["_offset"], row["value"]) for row in some)
            polls.append(Poll(topic, some[0]["_partition"], offsets))
        assigned, self._assigned[:] = list(self._assigned), []
        operation.step([*assigned, *polls])
        return rows

    def reopen(self) -> None:
        """Leave the group. The next poll joins it again, behind what was committed."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            with suppress(RetryError, FencedError):
                consumer.close()

    def is_done(self) -> bool:
        """Whether the group has read all that there is."""
        try:
            return not any(lag.rows for lag in self._client.log.lag(self.group))
        except UnknownGroup:
            return False


def copy(client: Client) -> None:
    """Exactly once from one topic to another: rows, and how far they were read, in one
    transaction.
    """
    member = Member(client, ["plain"], COPIERS)
    transactions = Transactions(client, client.settings.part)
    while not (client.is_stopped() and member.is_done()):
        member.consumer()
        with transactions.begin(group=COPIERS, member=member.name) as (operation, tx):
            rows = member.poll(operation)
            for _ in range(client.chance.randrange(client.settings.polls_per_transaction)):
                client.rest()
                rows += member.poll(operation)
            sends = [
                client.new_send("copied", row["_partition"], source=row["value"]) for row in rows
            ]
            operation.step(sends)
            for partition in sorted({send.partition for send in sends}):
                some = [send for send in sends if send.partition == partition]
                tx.append("copied", client.to_rows(some), partition=partition)
            if rows:
                client.rest()  # what takes time here
                tx.commit_offsets(COPIERS, member.consumer().positions())
                operation.committing()
                operation.ok(offsets_of(sends, tx.commit()))
            else:
                tx.abort()
                operation.ok(is_work=False)
        if transactions.failed:
            member.reopen()
    member.reopen()


def read(client: Client) -> None:
    """A plain group: each row at least once."""
    member = Member(client, list(PARTITIONS), READERS)
    while not (client.is_stopped() and member.is_done()):
        member.consumer()
        operation = client.recorder.invoke("poll", group=READERS, member=member.name)
        try:
            rows = member.poll(operation)
            operation.ok(is_work=bool(rows))
            client.rest()
            is_ending = client.is_stopped()
            if is_ending or (rows and client.chance.random() < 0.7):
                operation = client.recorder.invoke("commit", group=READERS)
                member.consumer().commit()
                operation.ok(is_work=False)
        except REFUSED as error:
            operation.fail(error)
            member.reopen()
        if client.chance.random() < 0.005:  # somebody leaves and comes back
            member.reopen()
    member.reopen()


def look(client: Client) -> None:
    """Audits: where all partitions end at one moment, and every row up to there."""
    audit = Auditor(client)
    while not client.is_stopped():
        audit.look()
        client.rest()


class Auditor:
    """Reads each row once, up to an end that is the same moment for all partitions."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._reached = {
            (topic, number): 0 for topic, total in PARTITIONS.items() for number in range(total)
        }

    def look(self, *, is_final: bool = False) -> None:
        log = self._client.log
        operation = self._client.recorder.invoke("audit")
        starts = {topic: log.start_offsets(topic) for topic in PARTITIONS}
        ends = log.snapshot(PARTITIONS)
        polls = []
        for (topic, number), reached in self._reached.items():
            start, stop = max(reached, starts[topic][number]), ends[topic][number]
            if start < stop:
                polls.append(Poll(topic, number, self._rows(topic, number, start, stop)))
                self._reached[topic, number] = stop
        operation.step(polls)
        operation.ok(
            is_work=bool(polls),
            starts=partitions_to_json(starts),
            ends=partitions_to_json(ends),
            final=is_final,
        )

    def _rows(self, topic: str, number: int, start: int, stop: int) -> tuple[tuple[int, str], ...]:
        try:
            rows = self._client.log.read(
                topic, number, start, stop, columns=["_offset", "value"]
            ).to_pylist()
        except OffsetOutOfRange as error:  # retention was faster
            return self._rows(topic, number, error.earliest, stop) if error.earliest < stop else ()
        return tuple((row["_offset"], row["value"]) for row in rows)


def final_audit(address: str, directory: Path) -> None:
    """Read everything that is there, after all processes have ended."""
    recorder = Recorder(directory / "final.history", "final")
    settings = ClientSettings(address=address, directory=directory, role="look")
    with hr.open_log(address) as log:
        Auditor(Client(log, recorder, settings)).look(is_final=True)
    recorder.close()


def keep(client: Client) -> None:
    """Retention, compaction and checkpoints, as often as possible."""
    while not client.is_stopped():
        operation = client.recorder.invoke("maintain")
        try:
            done = client.log.maintain()
        except DiskFull as error:
            operation.fail(error)
        else:
            operation.ok(**{name: number for name, number in done.items() if name != "note"})
        faults.remove_old_rows(client.log, "kept")
        time.sleep(10 * client.settings.pace_s)


ROLES: dict[str, Callable[[Client], None]] = {
    "write": write,
    "move": move,
    "copy": copy,
    "read": read,
    "look": look,
    "keep": keep,
}


if __name__ == "__main__":  # by hand: ADDRESS DIRECTORY ROLE NUMBER
    _, address_, directory_, role_, number_ = sys.argv
    run(
        ClientSettings(
            address=address_,
            directory=Path(directory_),
            role=role_,
            number=int(number_),
            mutant=os.environ.get(mutants.VARIABLE, ""),
        )
    )
