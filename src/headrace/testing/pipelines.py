"""Testing a whole pipeline: feed rows, cut ticks, run batches of any size, restart it with other
shards, lose what may be lost, and read the outputs.

    with PipelineTest(shop, tmp_path) as test:
        test.feed("orders", rows)
        test.settle()
        assert test.view("revenue") == [...]
        test.pass_time("1 hour")
        with pytest.raises(Died):
            test.step(dies="between views and log")
        test.restart(shards=3)

Everything is real: an embedded log, or the one given with `log=`, state on disk, and Spark if a
session is given. Without one, the tasks run in this process (`plain_spark`) in a fraction of the
time, as long as the plan needs no Spark SQL. `kernels` tests one step alone.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

from headrace.columnar.columns import CHANGE_TYPE, OFFSET_COLUMN, PARTITION_COLUMN
from headrace.durations import to_us
from headrace.errors import nearest
from headrace.log import open_log
from headrace.log.api import Log
from headrace.log.values import Rows
from headrace.runtime.calls import Calls
from headrace.runtime.inputs import create_captured_topics
from headrace.runtime.runner import Runner
from headrace.runtime.versions import start_version, version_state
from headrace.testing.fault_points import ALL, IN_TASKS, KAFKA_IN_TASKS, inject_faults
from headrace.testing.plain_spark import PlainSpark
from headrace.views.file import VIEWS_FILE
from headrace.views.reader import ViewReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.pipeline.pipeline import Pipeline


class Died(Exception):
    """The runner died at the point that the test named."""


class Undead(AssertionError):
    """The runner was to die at a point that it did not pass."""


def _die(point: str) -> None:
    raise Died(point)


class PipelineTest:
    """A pipeline under test, in a directory of its own.

    Args:
        pipeline: The pipeline.
        root: The directory for state, and for the log unless one is given.
        spark: A session; by default, tasks run in this process without Spark.
        shards: The number of shards.
        log: An open log, which stays open, or an address.
        width: How wide batches run: "one" task, "wide", "auto" as in a real run, or "mixed", which
            draws one of the first two for every batch. What comes out does not depend on it.

    Example:
        with PipelineTest(shop, tmp_path) as test:
            test.feed("orders", [{"region": "eu", "amount": 5.0}])
            test.settle()
            assert test.view("revenue") == [{"region": "eu", "revenue": 5.0}]

    """

    def __init__(
        self,
        pipeline: Pipeline,
        root: Path,
        spark: SparkSession | PlainSpark | None = None,
        *,
        shards: int = 2,
        log: Log | str | None = None,
        width: str = "mixed",
    ) -> None:
        self.pipeline, self.root, self.width = pipeline, root, width
        self._chance = Random(0)  # noqa: S311 - any sequence will do
        self.spark: Any = PlainSpark() if spark is None else spark
        root.mkdir(parents=True, exist_ok=True)
        self._own_log = not isinstance(log, Log)
        self.log = log if isinstance(log, Log) else open_log(log or f"file:{root / 'log'}")
        self.state = root / "state"
        self._passed_us = 0
        self._calls: Calls | None = None
        create_captured_topics(self.log, pipeline.plan())
        self.runner = self._start_runner(shards)

    def _start_runner(self, shards: int, accept_edits: Sequence[str] = ()) -> Runner:
        plan = self.pipeline.plan()
        runner = Runner.start(
            plan,
            self.log,
            self.spark,
            self.state,
            shards=shards,
            width="auto" if self.width == "mixed" else self.width,
            accept_edits=accept_edits,
        )
        self._calls = Calls(self.log, self.pipeline.calls, plan) if self.pipeline.calls else None
        if self._calls is not None:
            self._calls.open()
            self._calls.attach(runner)
        return runner

    # Inputs

    def feed(self, topic: str, rows: Rows) -> None:
        """Append rows to a topic. Rows of a table are upserts unless they have a `_change_type`."""
        with self.log.producer(topic) as producer:
            if self.log.topic(topic).is_table and not _have_change_type(rows):
                producer.upsert(rows)
            else:
                producer.append(rows)

    def cut(self, *, forced: bool = False) -> int:
        """Cut a tick of the rows that were fed since the last one. Returns how many ticks were
        cut.
        """
        return self.runner.cut(forced=forced)

    def pass_time(self, duration: str | timedelta) -> None:
        """Let time pass: the next ticks are later by the duration."""
        self._passed_us += to_us(duration)
        self.runner.now_us = lambda: time.time_ns() // 1000 + self._passed_us

    # Running

    def step(self, max_ticks: int = 1_000_000, *, dies: str | None = None) -> bool:
        """Run one batch of at most `max_ticks` ticks. Returns whether there was one.

        Args:
            max_ticks: The largest number of ticks.
            dies: The fault point, one of `ALL`, at which the runner dies; `restart` starts the next
                one. Points in tasks need a test without Spark, whose workers are other processes.

        Raises:
            Died: The runner died at the point.
            Undead: The batch did not pass the point.

        Example:
            with pytest.raises(Died):
                test.step(dies="between views and log")

        """
        if self.width == "mixed":
            for query in self.runner.queries:
                query.width.pin(self._chance.choice(("one", "wide")))
        if dies is None:
            return self.runner.step(max_ticks)
        if dies not in ALL:
            raise ValueError(f"There is no point {dies!r}: {nearest(dies, ALL)}")
        if dies in (*IN_TASKS, *KAFKA_IN_TASKS) and not isinstance(self.spark, PlainSpark):
            raise ValueError(
                f"{dies!r} is within a task, which Spark runs in another process. To fix: leave out"
                " the session."
            )
        with ExitStack() as stack:
            inject_faults(
                [dies],
                _die,
                lambda owner, name, struck: stack.enter_context(patch.object(owner, name, struck)),
            )
            self.runner.step(max_ticks)
        raise Undead(f"The batch did not come by {dies!r}.")

    def settle(self, max_ticks: int = 1_000_000, *, final: bool = False) -> None:
        """Cut a tick, and run batches until the ledger has all ticks and rows of recorded calls
        have their answers. With `final`, event time ends
        then, as after `headrace run --until-caught-up --final`: what waits for it is emitted.
        """
        self._settle(max_ticks)
        if final:
            self.runner.end_event_time()
            self._settle(max_ticks)

    def _settle(self, max_ticks: int) -> None:
        is_answered = False
        while not is_answered:
            self.cut()
            while self.step(max_ticks):
                continue
            is_answered = self._calls is None or (not self.answer() and not self.cut())

    def answer(self) -> bool:
        """Make the recorded calls of the pipeline, with their real functions and in this thread,
        until no row waits. Returns whether anything was recorded; the next tick takes it in.
        """
        return self._calls is not None and self._calls.answer_all()

    def restart(
        self,
        *,
        shards: int | None = None,
        lose_local_store: bool = False,
        accept_edits: Sequence[str] = (),
    ) -> None:
        """Start another runner, as after a crash: with another number of shards, on a machine that
        has no local store, or with edits accepted.
        """
        before = self.runner
        before.close()
        if lose_local_store:
            shutil.rmtree(self.state / "local", ignore_errors=True)
        self.runner = self._start_runner(shards or before.shards, accept_edits)
        self.pass_time("0 seconds")

    def replay(
        self,
        version: str,
        *,
        pipeline: Pipeline | None = None,
        since: int | str | None = None,
        retick: bool = False,
        shards: int = 2,
    ) -> VersionTest:
        """A version of this pipeline, or of a changed one, over the same ticks. Its outputs are
        called `<output>.<version>`.
        """
        return VersionTest(
            self, version, pipeline or self.pipeline, since=since, retick=retick, shards=shards
        )

    # Outputs

    def view(self, name: str) -> list[dict[str, Any]]:
        """The rows of a view."""
        with ViewReader(self.state / VIEWS_FILE) as reader:
            rows: list[dict[str, Any]] = reader.table(name).to_pylist()
            return rows

    def changes(self, view: str, since: int = 0) -> list[tuple[int, list[dict[str, Any]]]]:
        """The changes of a view after a tick: for each tick that changed it, its number and the
        changes.
        """
        with ViewReader(self.state / VIEWS_FILE) as reader:
            return [(tick, rows.to_pylist()) for tick, rows in reader.changes_since(view, since)]

    def rows(self, topic: str) -> list[tuple[Any, ...]]:
        """The rows of a derived topic in order, by partition: the values, and for a table the
        change type.
        """
        hidden = {OFFSET_COLUMN, PARTITION_COLUMN, "_timestamp"}
        table = self.log.read(topic).to_table()
        names = [PARTITION_COLUMN, *(name for name in table.column_names if name not in hidden)]
        return list(zip(*(table[name].to_pylist() for name in names), strict=True))

    def folded(self, topic: str, key: str) -> dict[Any, dict[str, Any]]:
        """The table that the changes of a topic amount to, by key. Fails if a change retracts a row
        that is not there, or inserts a second row for a key.
        """
        state: dict[Any, dict[str, Any]] = {}
        for row in self.log.read(topic).to_pylist():
            change = row.pop(CHANGE_TYPE)
            plain = {name: value for name, value in row.items() if not name.startswith("_")}
            known = state.get(plain[key])
            if change == "insert":
                assert known is None, f"{plain} was inserted, and {known} was there"
            else:
                assert known is not None, f"{change} of {plain}, which was not there"
            if change in {"delete", "update_preimage"}:
                assert change == "delete" or known == plain, (
                    f"{plain} was retracted, and {known} was there"
                )
            if change == "delete":
                del state[plain[key]]
            elif change != "update_preimage":
                state[plain[key]] = plain
        return state

    def close(self) -> None:
        self.runner.close()
        if self._own_log:
            self.log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class VersionTest(PipelineTest):
    """A version of a pipeline under test, on the same log."""

    def __init__(
        self,
        of: PipelineTest,
        version: str,
        pipeline: Pipeline,
        *,
        since: int | str | None,
        retick: bool,
        shards: int,
    ) -> None:
        self.of, self.version, self.since, self.retick = of, version, since, retick
        super().__init__(pipeline, of.root, of.spark, shards=shards, log=of.log)

    def _start_runner(self, shards: int, accept_edits: Sequence[str] = ()) -> Runner:
        plan = start_version(
            self.log, self.pipeline.plan(), self.version, since=self.since, retick=self.retick
        )
        self.state = version_state(self.of.state, self.version)
        return Runner.start(
            plan,
            self.log,
            self.spark,
            self.state,
            shards=shards,
            accept_edits=accept_edits,
        )

    def answer(self) -> bool:
        """A version calls nobody: it has the recorded answers."""
        return False


def _have_change_type(rows: Any) -> bool:
    first = rows[0] if isinstance(rows, list) and rows else rows
    return CHANGE_TYPE in (
        first if isinstance(first, dict) else getattr(first, "column_names", None) or ()
    )
