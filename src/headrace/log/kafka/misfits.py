"""Records that do not fit their topic's schema, which only foreign producers can write: they go to dead letters, each once, and never stop the stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from threading import RLock

import pyarrow as pa
from confluent_kafka import Message

from headrace.errors import ConfigurationError, RetryError, TransactionFenced
from headrace.log import dead
from headrace.log.api import Log, TopicInfo
from headrace.log.kafka.config import logger
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.records import Misfit, to_rows

MOST_ATTEMPTS = 20
Seen = set[tuple[int | None, int | None]]


class DeadLetters:
    """Puts misfits into `<topic>.dead`. Several readers may meet the same record, so whoever diverts fences the others and looks first."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._guard = RLock()  # letters may have misfits among them too
        self._seen: dict[str, tuple[dict[int, int], Seen]] = {}
        self.counts: Counter[str] = Counter()
        """How many were met, by topic."""

    def divert(self, topic: str, misfits: Sequence[Misfit]) -> None:
        with self._guard:
            self.counts[topic] += len(misfits)
            logger.warning("%d records of %s do not fit its schema, such as offset %d: %s", len(misfits), topic, misfits[0].offset, misfits[0].reason)
            if all((misfit.partition, misfit.offset) in self._known(topic)[1] for misfit in misfits):
                return
            try:
                self._divert_once(topic, misfits)
            except ConfigurationError as error:  # a reader without the right to write: the records stay where they are
                logger.error("They cannot be put into %s: %s", dead.dead_name(topic), error)

    def _divert_once(self, topic: str, misfits: Sequence[Misfit]) -> None:
        """1. fence whoever else diverts; 2. look what is there; 3. add the rest and commit; if fenced meanwhile, look again."""
        name = dead.ensure_topic(self._log, topic)
        for _ in range(MOST_ATTEMPTS):
            transaction = self._log.transaction(f"dead.{topic}")
            seen = self._read(topic, name)
            fresh = [misfit for misfit in misfits if (misfit.partition, misfit.offset) not in seen]
            if not fresh:
                transaction.abort()
                return
            transaction.append(name, dead.letters_to_rows(_letter(topic, misfit) for misfit in fresh))
            try:
                transaction.commit()
            except TransactionFenced:
                continue
            return
        raise RetryError(f"Too many readers divert records of {topic!r} at once.", fix="try again.")

    def _known(self, topic: str) -> tuple[dict[int, int], Seen]:
        return self._seen.setdefault(topic, ({}, set()))

    def _read(self, topic: str, name: str) -> Seen:
        """Which records have a letter already."""
        positions, seen = self._known(topic)
        for partition, end in self._log.end_offsets(name).items():
            start = positions.get(partition)
            for batch in self._log.read(name, partition, start, end, columns=["place", "source_partition", "source_offset"]):
                mine = batch.filter(pa.compute.equal(batch.column("place"), _place(topic)))
                seen.update(zip(mine.column("source_partition").to_pylist(), mine.column("source_offset").to_pylist(), strict=True))
            positions[partition] = end
        return seen


def _place(topic: str) -> str:
    return f"topic {topic}"


def _letter(topic: str, misfit: Misfit) -> dead.DeadLetter:
    return dead.DeadLetter(
        place=_place(topic), reason=misfit.reason, partition=misfit.partition, offset=misfit.offset, payload=misfit.payload, key=misfit.key
    )


class RowReader:
    """Records of one topic into rows, for one reader. `follows`: it takes over columns that are added to the topic while it reads."""

    def __init__(self, connection: Connection, letters: DeadLetters, info: TopicInfo, *, headers: bool, follows: bool) -> None:
        self._connection, self._letters, self.info = connection, letters, info
        self._headers, self._follows = headers, follows
        self._ignored: list[str] = []

    def rows(self, messages: Sequence[Message]) -> pa.RecordBatch:
        """Rows of records of one partition. What does not fit is diverted, unless it is the topic that has changed."""
        found = to_rows(self.info, messages, headers=self._headers, ignored=self._ignored)
        if found.misfits and self._learned_columns():
            found = to_rows(self.info, messages, headers=self._headers, ignored=self._ignored)
        if found.misfits:
            self._letters.divert(self.info.name, found.misfits)
        return found.batch

    def _learned_columns(self) -> bool:
        newest = self._connection.topics.info(self.info.name)
        added = [name for name in newest.columns if name not in self.info.columns and name not in self._ignored]
        if not added:
            return False
        if self._follows:
            self.info = newest
        else:
            self._ignored += added
        return True
