"""The embedded log beside a plain in-memory model of it: any history of operations, on two handles, with checkpoints, reopenings and upkeep in between."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.errors import LeaseLost, TransactionFenced
from headrace.log.file.housekeeping import make_checkpoint
from headrace.log.file.log import FileLog

TOPICS = ("a", "b")
PARTITIONS = 2
values = st.lists(st.integers(0, 99), min_size=1, max_size=4)
places = st.tuples(st.sampled_from(TOPICS), st.integers(0, PARTITIONS - 1))


class LogBesideModel(RuleBasedStateMachine):
    """The model: for each topic and partition the rows in order (None where a control batch took the offset), and what else was committed."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="model-"))
        self.handles = [self._open(), self._open()]
        for topic in TOPICS:
            self.handles[0].create_topic(topic, "n BIGINT", partitions=PARTITIONS, segment_bytes=700)
        self.rows: dict[tuple[str, int], list[int | None]] = {(topic, p): [] for topic in TOPICS for p in range(PARTITIONS)}
        self.offsets: dict[tuple[str, int], int] = {}
        self.notes: dict[str, str] = {}
        self.last, self.first_places = -1, {}  # type: ignore[var-annotated]
        self.done: set[tuple[int, int]] = set()
        self.columns = 0
        self.turn = 0

    def _open(self) -> FileLog:
        return FileLog(self.root / "log", durability="os")

    @property
    def log(self) -> FileLog:
        """Handles take turns, so that each sees what the other wrote."""
        self.turn += 1
        return self.handles[self.turn % 2]

    def _rows(self, numbers: list[int]) -> list[dict[str, Any]]:
        return [{"n": number, **{f"c{c}": None for c in range(self.columns)}} for number in numbers]

    @rule(place=places, numbers=values)
    def append(self, place: tuple[str, int], numbers: list[int]) -> None:
        topic, partition = place
        with self.log.producer(topic) as producer:
            position = producer.append(self._rows(numbers), partition=partition)
        start = len(self.rows[place])
        assert (position.partitions(topic)[partition].start, len(position.partitions(topic)[partition])) == (start, len(numbers))
        self.rows[place] += numbers

    @rule(numbers=values, step=st.integers(-3, 2))
    def append_numbered(self, numbers: list[int], step: int) -> None:
        sequence = max(0, self.last + step)
        with self.log.producer("a", id="p") as producer:
            assert producer.last_sequence == self.last
            position = producer.append(self._rows(numbers), sequence=sequence, partition=1)
        if sequence > self.last:
            self.first_places[sequence] = len(self.rows["a", 1])
            self.rows["a", 1] += numbers
            self.last = sequence
            assert not position.duplicate
        else:
            assert position.duplicate
            if sequence in self.first_places:
                assert position.partitions("a")[1].start == self.first_places[sequence]

    @rule(place=places)
    def append_control(self, place: tuple[str, int]) -> None:
        self.log.append_control(*place, b"tick")
        self.rows[place].append(None)

    @rule(parts=st.dictionaries(places, values, max_size=3), note=st.sampled_from("xyz"), value=st.none() | st.just("v"), commits=st.booleans())
    def transaction(self, parts: dict[tuple[str, int], list[int]], note: str, value: str | None, commits: bool) -> None:
        tx = self.log.transaction("tx")
        for (topic, partition), numbers in parts.items():
            tx.append(topic, self._rows(numbers), partition=partition)
        tx.set_note(note, value, expect=self.notes.get(note))
        tx.commit_offsets("g", {"a": {0: len(self.rows["a", 0])}})
        if not commits:
            tx.abort()
            return
        self.offsets["a", 0] = len(self.rows["a", 0])
        tx.commit()
        for place, numbers in parts.items():
            self.rows[place] += numbers
        self.notes = {name: kept for name, kept in {**self.notes, note: value}.items() if kept is not None}

    @rule()
    def older_transaction_is_fenced(self) -> None:
        older = self.handles[0].transaction("tx")
        older.append("a", self._rows([1]))
        self.handles[1].transaction("tx").abort()
        with pytest.raises(TransactionFenced):
            older.commit()

    @rule(most=st.integers(1, 20), commits=st.booleans())
    def consume(self, most: int, commits: bool) -> None:
        with self.log.consumer(list(TOPICS), "g", max_rows=most) as consumer:
            for batch in consumer.poll("0 seconds"):
                topic = batch.schema.metadata[b"headrace.topic"].decode()
                partition = batch["_partition"][0].as_py()
                first = self.offsets.get((topic, partition), 0)
                found = dict(zip(batch["_offset"].to_pylist(), batch["n"].to_pylist(), strict=True))
                assert min(found) >= first
                assert all(self.rows[topic, partition][offset] == number for offset, number in found.items())
            if commits:
                consumer.commit()
                for topic, parts in consumer.positions().items():
                    self.offsets |= {(topic, partition): offset for partition, offset in parts.items()}

    @rule(to=st.sampled_from(["earliest", "latest"]) | st.integers(0, 10))
    def reset(self, to: str | int) -> None:
        found = self.log.reset_group("g", "b", to)
        for partition in range(PARTITIONS):
            end = len(self.rows["b", partition])
            wanted = {"earliest": 0, "latest": end}.get(to, to) if isinstance(to, str) else to
            self.offsets["b", partition] = min(int(wanted), end)
        assert found["b"] == {p: self.offsets["b", p] for p in range(PARTITIONS)}

    @rule(most=st.integers(1, 5), acks=st.booleans())
    def receive(self, most: int, acks: bool) -> None:
        queue = self.log.queue("b", "q", delivery_limit=1000)
        for message in queue.receive(most, visibility="1 hour"):
            assert (message.partition, message.offset) not in self.done
            assert self.rows["b", message.partition][message.offset] == message.row["n"]
            if acks:
                message.ack()
                self.done.add((message.partition, message.offset))
                with pytest.raises(LeaseLost):
                    message.ack()
            else:
                message.nack()

    @precondition(lambda self: self.columns < 2)
    @rule()
    def add_column(self) -> None:
        for topic in TOPICS:
            self.log.alter_topic(topic, add_columns=f"c{self.columns} STRING")
        self.columns += 1

    @rule()
    def checkpoint(self) -> None:
        make_checkpoint(self.log)

    @rule()
    def upkeep(self) -> None:
        assert self.log.maintain()["segments_deleted"] == 0

    @rule(which=st.integers(0, 1))
    def reopen(self, which: int) -> None:
        self.handles[which].close()
        self.handles[which] = self._open()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "root"):
            return
        log = self.log
        for topic in TOPICS:
            assert log.end_offsets(topic) == {p: len(self.rows[topic, p]) for p in range(PARTITIONS)}
            for partition in range(PARTITIONS):
                table = log.read(topic, partition).to_table()
                expected = [(offset, number) for offset, number in enumerate(self.rows[topic, partition]) if number is not None]
                assert list(zip(table["_offset"].to_pylist(), table["n"].to_pylist(), strict=True)) == expected
                assert len(log.read_control(topic, partition)) == self.rows[topic, partition].count(None)
        assert {name: log.note(name) for name in self.notes} == self.notes
        if self.offsets:
            committed = log.committed("g")
            assert {(t, p): o for t, parts in committed.items() for p, o in parts.items()} == self.offsets

    def teardown(self) -> None:
        if hasattr(self, "root"):
            assert self.log.verify() == []
            for handle in self.handles:
                handle.close()
            shutil.rmtree(self.root)


CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


class LogAtLength(LogBesideModel):
    """The same, for longer."""


TestModel = LogBesideModel.TestCase
TestModel.settings = settings(max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=CHECKS)
TestModelAtLength = pytest.mark.slow(LogAtLength.TestCase)
TestModelAtLength.settings = settings(max_examples=400, stateful_step_count=60, deadline=None, suppress_health_check=CHECKS)
