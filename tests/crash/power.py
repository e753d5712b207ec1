"""Runs a workload on a recorded disk, cuts the power anywhere in it, and says what must be true
afterwards.

Whatever the log's journal says is compared with what the healthy log said at the same commit, and
every row with what was read when it was stored. So a lost, doubled, invented, reordered or
half-done thing of any kind is noticed, not only those that somebody thought of.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from headrace.columnar.columns import OFFSET_COLUMN, PARTITION_COLUMN
from headrace.log.file.disk import Disk
from headrace.log.file.log import FileLog
from headrace.log.file.state import State, TopicState
from headrace.testing.power_loss import ProcessKilled, RebootedDisk, RecordingDisk, Trace

Row = dict[str, Any]


def described(state: State) -> str:
    """A state as text that can be compared."""
    return json.dumps(state.dump(), sort_keys=True)


class Run:
    """A log being worked on. Remembers what was true at each commit, and every row that was ever
    readable.
    """

    def __init__(
        self,
        directory: Path,
        *,
        before: Run | None = None,
        acknowledged: int = 0,
        durability: str = "disk",
        **options: Any,
    ) -> None:
        """With `before`, a directory that its crash left, `acknowledged` being the last commit that
        must be there.
        """
        self.directory, self.durability = directory, durability
        self.disk = RecordingDisk(directory, **options)
        self.states: dict[int, str] = (
            {0: described(State())} if before is None else dict(before.states)
        )
        self.rows: dict[tuple[str, int, int], Row] = {} if before is None else dict(before.rows)
        self.controls: dict[tuple[str, int, int], bytes] = (
            {} if before is None else dict(before.controls)
        )
        self.disk.mark(acknowledged)
        try:
            self.log = self._open()
        except ProcessKilled:
            self.after_kill()
        self._forget_future()

    def _forget_future(self) -> None:
        """What the crash undid may now come otherwise."""
        state = self.log.store.view()
        ends = {
            (topic.directory, number): part.end
            for topic in state.topics.values()
            for number, part in enumerate(topic.partitions)
        }
        self.states = {
            commit: text for commit, text in self.states.items() if commit <= state.commit
        }
        self.rows = {
            position: row
            for position, row in self.rows.items()
            if position[2] < ends.get(position[:2], 0)
        }
        self.controls = {
            position: payload
            for position, payload in self.controls.items()
            if position[2] < ends.get(position[:2], 0)
        }

    def _open(self) -> FileLog:
        log = FileLog.open(self.directory / "log", disk=self.disk, durability=self.durability)
        publish = log.store.marker.publish

        def watched(lsn: int, **options: Any) -> None:
            publish(lsn, **options)
            self._note(log)

        log.store.marker.publish = watched  # type: ignore[method-assign]
        self._note(log)
        return log

    def _note(self, log: FileLog) -> None:
        """What a reader can see now must be true for ever."""
        with log.store.frozen_view() as state:
            before = self.states.setdefault(state.commit, described(state))
            assert before == described(state), "one commit, two truths"
            self.disk.mark(state.commit)

    def after_kill(self) -> None:
        """Go on as the next process on the same machine."""
        if hasattr(self, "log"):
            self.log.maintenance_thread.stop()
        self.disk = self.disk.reopened()
        self.log = self._open()
        with (
            self.log.store.locked() as newest
        ):  # what the dead process wrote and never acknowledged
            self.states.setdefault(newest.state.commit, described(newest.state))

    def look(self) -> None:
        """Read everything, and see that nothing changed since it was read before."""
        state = self.log.store.view()
        for topic in state.topics.values():
            for row in rows_of(self.log, topic.name):
                position = (topic.directory, row.pop(PARTITION_COLUMN), row.pop(OFFSET_COLUMN))
                assert without_nulls(self.rows.setdefault(position, row)) == without_nulls(row)
            for number in range(len(topic.partitions)):
                for control in self.log.read_control(topic.name, number):
                    assert (
                        self.controls.setdefault(
                            (topic.directory, number, control.offset), control.payload
                        )
                        == control.payload
                    )
        self.disk.mark(state.commit)

    def finish(self) -> Trace:
        self.look()
        trace = self.disk.freeze()
        self.log.close()
        return trace


def without_nulls(row: Row) -> Row:
    """A column that was added later reads as null."""
    return {name: value for name, value in row.items() if value is not None}


def rows_of(log: FileLog, topic: str) -> list[Row]:
    return [
        {k: v for k, v in row.items() if k != "_timestamp"} for row in log.read(topic).to_pylist()
    ]


class Survivor:
    """Checks a log that was opened after power was lost."""

    def __init__(self, run: Run, trace: Trace, after: int) -> None:
        self.run = run
        self.acknowledged: int = max(trace.marks_before(after), default=0)

    def check(self, root: Path, disk: Callable[[], Disk] = RebootedDisk) -> None:
        log = FileLog.open(root, disk=disk())
        try:
            self._check_truth(log)
            self._check_use(log)
            log.maintain()
            before = (
                described(log.store.view()),
                {topic: rows_of(log, topic) for topic in log.topics()},
            )
        finally:
            log.close()
        log = FileLog.open(root, disk=disk())
        try:
            assert before[0] == described(log.store.view()), (
                "opened again, the state is another one"
            )
            assert before[1] == {topic: rows_of(log, topic) for topic in log.topics()}, (
                "opened again, the rows are others"
            )
            assert_sound(log)
        finally:
            log.close()

    def _check_truth(self, log: FileLog) -> None:
        state = log.store.view()
        assert state.commit >= self.acknowledged, (
            f"commit {self.acknowledged} was acknowledged; {state.commit} is the last one left"
        )
        assert described(state) == self.run.states[state.commit], (
            f"commit {state.commit} is not what it was"
        )
        for topic in state.topics.values():
            self._check_rows(log, topic)
        assert_sound(log)

    def _check_rows(self, log: FileLog, topic: TopicState) -> None:
        for number, partition in enumerate(topic.partitions):
            wanted = {
                offset: without_nulls(row)
                for (directory, part, offset), row in self.run.rows.items()
                if (directory, part) == (topic.directory, number)
                and partition.start <= offset < partition.end
            }
            found = [
                (row.pop(OFFSET_COLUMN), row)
                for row in rows_of(log, topic.name)
                if row.pop(PARTITION_COLUMN) == number
            ]
            assert [offset for offset, _ in found] == sorted({offset for offset, _ in found}), (
                "rows are doubled or out of order"
            )
            assert all(wanted.get(offset) == without_nulls(row) for offset, row in found), (
                "a row was invented or changed"
            )
            missing = set(wanted) - {offset for offset, _ in found}
            if topic.info.compact or topic.info.history_us is not None:
                missing &= newest_of_each_key(wanted, topic.info.key)
            assert not missing, f"rows {sorted(missing)} of {topic.name}[{number}] are gone"
            controls = {
                (topic.directory, number, c.offset): c.payload
                for c in log.read_control(topic.name, number)
            }
            known = {
                position: payload
                for position, payload in self.run.controls.items()
                if position[:2] == (topic.directory, number)
            }
            assert controls == {
                position: payload
                for position, payload in known.items()
                if partition.start <= position[2] < partition.end
            }

    def _check_use(self, log: FileLog) -> None:
        """The log works: what is appended now is read again, behind everything else, also when its
        segment is ended.
        """
        for name in log.topics():
            if not name.endswith(".dead"):
                before = rows_of(log, name)
                self._append(log, name)
                log.alter_topic(name, add_columns=f"later_{log.store.view().commit} INT")
                self._append(log, name)
                after = rows_of(log, name)
                assert sum(row["n"] == 999 for row in after) == 2
                assert [without_nulls(row) for row in after if row["n"] != 999] == [
                    without_nulls(row) for row in before
                ], "rows changed"

    @staticmethod
    def _append(log: FileLog, name: str) -> None:
        row = dict.fromkeys(log.topic(name).columns) | {"n": 999, "text": "after the crash"}
        if log.topic(name).is_table:
            row["_change_type"] = "insert"
        with log.producer(name, id="survivor") as producer:
            producer.append(row)


def newest_of_each_key(rows: dict[int, Row], key: tuple[str, ...]) -> set[int]:
    newest = {tuple(row.get(name) for name in key): offset for offset, row in sorted(rows.items())}
    return set(newest.values())


def assert_sound(log: FileLog) -> None:
    """`verify` finds nothing. An index is a cache and never synced: one that was torn is noticed
    and built again.
    """
    findings = [finding for finding in log.verify() if finding.kind != "stale"]
    assert not findings, findings


@contextmanager
def crashed(trace: Trace, after: int, into: Path, *, mode: str, seed: int = 0) -> Iterator[Path]:
    """The log's directory after a power loss; removed when it was looked at."""
    trace.cut_power(after, into, mode=mode, chance=Random(f"{mode} {seed} {after}"))
    try:
        yield into / "log"
    finally:
        shutil.rmtree(into)


def check_crash(
    run: Run, trace: Trace, after: int, into: Path, *, mode: str, seed: int = 0
) -> None:
    with crashed(trace, after, into, mode=mode, seed=seed) as root:
        try:
            Survivor(run, trace, after).check(root)
        except BaseException as error:
            change = trace.changes[after - 1] if after else None
            where = (
                f"power lost behind change {after} of {len(trace.changes)}"
                f" ({change and (change.kind, change.path)}), mode {mode!r}, seed {seed}"
            )
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
