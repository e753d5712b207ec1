"""The store compared with a model that is a dict: appends of every kind, repeated ones, excisions,
snapshots, and reopening in between. And the well-known skipped gap.
"""

import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import headrace as hr
from headrace.errors import EventIdConflict, UnknownSubject, VersionConflict
from headrace.events import ANY, NEW, Change, Event, Handler, excise, open_store
from headrace.log.file.disk import Disk, DiskFile
from headrace.log.file.log import FileLog
from tests.events.totals import TOTALS, Total
from tests.short_forms import examples

ENTITIES = st.sampled_from(["a", "b", "c"])
SUBJECTS = st.sampled_from([None, "ada", "bob"])


class StoreAndModel(RuleBasedStateMachine):
    """The model: every event ever stored, by offset, and for each entity how far its versions have
    come.
    """

    @initialize()
    def begin(self) -> None:
        self.root = tempfile.mkdtemp()
        self.events: dict[
            int, tuple[str, int, str | None, int, str | None]
        ] = {}  # offset -> (entity, version, subject, amount, id)
        self.heads: dict[str, int] = {}
        self.end = self.ids = 0
        self.open()

    def open(self) -> None:
        self.log = hr.open_log(f"file:{self.root}/log", durability="os")
        self.store = open_store(self.log, "bank")
        self.handler = Handler(self.store, TOTALS)

    def close(self) -> None:
        self.store.close()
        self.log.close()

    @rule(
        entities=st.lists(ENTITIES, min_size=1, max_size=3, unique=True),
        count=st.integers(1, 3),
        subject=SUBJECTS,
        off=st.sampled_from([None, None, 0, 1, -1]),
        named=st.booleans(),
    )
    def append(
        self, entities: list[str], count: int, subject: str | None, off: int | None, named: bool
    ) -> None:
        """`off`: how far the expected version is from the right one; None expects nothing."""
        changes: list[Change] = []
        new: list[tuple[str, int, str | None, int, str | None]] = []
        for entity in entities:
            head = self.heads.get(entity, 0)
            ids = [f"id-{self.ids + n}" if named else None for n in range(count)]
            self.ids += count
            new += [(entity, head + 1 + n, subject, n, ids[n]) for n in range(count)]
            changes.append(
                Change(
                    entity,
                    [Event("Added", {"amount": n}, ids[n], subject) for n in range(count)],
                    ANY if off is None else max(NEW, head + off),
                )
            )
        wrong = [
            change
            for change in changes
            if change.expected not in {ANY, self.heads.get(change.entity, 0)}
        ]
        if wrong:
            with pytest.raises(VersionConflict) as conflict:
                self.store.commit(changes)
            assert conflict.value.current == self.heads.get(conflict.value.entity, 0)
            return
        answer = self.store.commit(changes)
        assert answer.offsets == range(self.end, self.end + len(new))
        self.add(new)
        if named:
            again = self.store.commit([Change(change.entity, change.events) for change in changes])
            assert (again.duplicate, again.offsets, again.versions) == (
                True,
                answer.offsets,
                answer.versions,
            )
            with pytest.raises(EventIdConflict):
                self.store.append(entities[0], Event("Added", {"amount": 99}, new[0][4]))

    def add(self, new: list[tuple[str, int, str | None, int, str | None]]) -> None:
        for each in new:
            self.events[self.end] = each
            self.heads[each[0]] = each[1]
            self.end += 1

    @rule(entity=ENTITIES, command=st.integers(1, 3))
    def handle(self, entity: str, command: int) -> None:
        before = self.heads.get(entity, 0)
        answer = self.handler.handle(entity, command)
        self.add(
            [
                (entity, before + 1 + n, None, event.amount, None)
                for n, event in enumerate(answer.events)
            ]
        )
        assert answer.version == self.heads.get(entity, 0)

    @rule(subject=st.sampled_from(["ada", "bob"]))
    def excise(self, subject: str) -> None:
        gone = [offset for offset, event in self.events.items() if event[2] == subject]
        if not gone:
            with pytest.raises(UnknownSubject):
                excise(self.store, subject)
            return
        assert excise(self.store, subject).events == len(gone)
        for offset in gone:
            del self.events[offset]

    @rule()
    def flush(self) -> None:
        self.store.by_entity.flush()

    @rule(lose_index=st.booleans())
    def reopen(self, lose_index: bool) -> None:
        self.close()
        if lose_index:
            shutil.rmtree(Path(self.root) / "log" / "events", ignore_errors=True)
        self.open()

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "store"):
            return
        stored = [
            (e.offset, (e.entity, e.version, e.subject, e.data["amount"], e.id))
            for e in self.store.read()
        ]
        assert stored == sorted(self.events.items())
        for entity in ("a", "b", "c"):
            mine = [each for _, each in sorted(self.events.items()) if each[0] == entity]
            assert [(e.version, e.data["amount"]) for e in self.store.load(entity)] == [
                (each[1], each[3]) for each in mine
            ]
            assert self.store.version(entity) == self.heads.get(entity, 0)
            assert self.handler.state(entity) == folded(mine)
        assert [name for name, _ in self.store.entities()] == sorted(
            {each[0] for each in self.events.values()}
        )

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.close()
            shutil.rmtree(self.root)


def folded(events: list[tuple[Any, ...]]) -> Total:
    state = TOTALS.initial
    for event in events:
        state = TOTALS.evolve(state, TOTALS.events[0](event[3]))
    return state


StoreAndModel.TestCase.settings = settings(
    max_examples=examples(15),
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestStoreAndModel = StoreAndModel.TestCase


class SlowDisk(Disk):
    """A disk that takes its time to sync the journal, when asked to."""

    def __init__(self) -> None:
        self.slow, self.waiting, self.go_on = False, threading.Event(), threading.Event()

        class File(DiskFile):
            def sync(file) -> None:  # noqa: N805
                if self.slow and file.path.suffix == ".journal":
                    self.waiting.set()
                    assert self.go_on.wait(30)
                super().sync()

        self.file_type = File


def test_an_append_that_takes_long_is_not_skipped_by_who_follows(tmp_path: Path) -> None:
    """One writer has its place in the order and is not durable yet; another, quicker one comes
    behind it.
    """
    disk, followed = SlowDisk(), list[tuple[int, str]]()
    with (
        FileLog.open(tmp_path / "log", disk=disk) as slow_log,
        open_store(slow_log, "bank") as slow,
        FileLog.open(tmp_path / "log") as log,
        open_store(log, "bank") as quick,
    ):
        quick.append("first", Event("Added", {"amount": 0}))
        disk.slow = True
        appending = threading.Thread(
            target=lambda: slow.append("slow", Event("Added", {"amount": 1}))
        )
        appending.start()
        assert disk.waiting.wait(10)
        followed += [(event.offset, event.entity) for event in quick.follow(idle="50 ms")]
        answer = quick.append("quick", Event("Added", {"amount": 2}))
        followed += [
            (event.offset, event.entity) for event in quick.follow(len(followed), idle="50 ms")
        ]
        assert answer.offsets == range(2, 3)
        assert followed == [
            (0, "first"),
            (1, "slow"),
            (2, "quick"),
        ]  # the quick one's sync made both durable
        disk.go_on.set()
        appending.join(10)
        assert [event.entity for event in quick.follow(idle="50 ms")] == ["first", "slow", "quick"]
