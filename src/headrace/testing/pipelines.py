"""Testing a pipeline: feed rows, cut ticks, run batches of any size, restart it with other shards, lose what may be lost, read what came out.

    with PipelineTest(shop, tmp_path) as test:
        test.feed("orders", rows)
        test.settle()
        assert test.view("revenue") == [...]
        test.pass_time("1 hour")
        with pytest.raises(Died):
            test.step(dies="between views and log")
        test.restart(shards=3)

It runs the real thing: an embedded log, or the one given with `log=`, state on disk, and Spark, if it is given a session. Without one the tasks run in this process
(`plain_spark`), in a fraction of the time, as long as the plan needs no Spark SQL. `kernels` tests one step alone.
"""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

from headrace.durations import to_us
from headrace.errors import nearest
from headrace.log import open_log
from headrace.log.api import CHANGE_TYPE, OFFSET_COLUMN, PARTITION_COLUMN, Log, Rows
from headrace.pipeline.replay import begin, version_state
from headrace.pipeline.runner import Runner
from headrace.pipeline.topics import make_captured
from headrace.sinks.view_file import VIEWS_FILE
from headrace.sinks.view_reader import ViewReader
from headrace.testing.plain_spark import PlainSpark
from headrace.testing.points import ALL, IN_TASKS, KAFKA_IN_TASKS, put_in_place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.pipeline.pipeline import Pipeline


class Died(Exception):
    """The runner was made to die at the point that the test named."""


class Undead(AssertionError):
    """The runner was to die at a point, and did not come by there."""


def _die(point: str) -> None:
    raise Died(point)


class PipelineTest:
    """A pipeline under test, in a directory of its own. `log` is an open log, which stays open, or an address; without one the log is in the directory too."""

    def __init__(
        self, pipeline: Pipeline, root: Path, spark: SparkSession | PlainSpark | None = None, *, shards: int = 2, log: Log | str | None = None
    ) -> None:
        self.pipeline, self.root = pipeline, root
        self.spark: Any = PlainSpark() if spark is None else spark
        root.mkdir(parents=True, exist_ok=True)
        self._own_log = not isinstance(log, Log)
        self.log = log if isinstance(log, Log) else open_log(log or f"file:{root / 'log'}")
        self.state = root / "state"
        self._passed_us = 0
        make_captured(self.log, pipeline.plan())
        self.runner = self._started(shards)

    def _started(self, shards: int) -> Runner:
        return Runner(self.pipeline.plan(), self.log, self.spark, self.state, shards=shards)

    # What goes in

    def feed(self, topic: str, rows: Rows) -> None:
        """Append rows to a topic; rows of a table are upserts unless they say otherwise."""
        with self.log.producer(topic) as producer:
            if self.log.topic(topic).is_table and not _says_change(rows):
                producer.upsert(rows)
            else:
                producer.append(rows)

    def cut(self, *, forced: bool = False) -> int:
        """Make a tick of what was fed since the last one."""
        return self.runner.cut(forced=forced)

    def pass_time(self, duration: str | timedelta) -> None:
        """Let time pass: the next ticks are so much later."""
        self._passed_us += to_us(duration)
        self.runner.now_us = lambda: time.time_ns() // 1000 + self._passed_us

    # What happens

    def step(self, most_ticks: int = 1_000_000, *, dies: str | None = None) -> bool:
        """One batch of at most so many ticks.

        `dies`: the runner is gone at that point, one of `points.ALL`; Died is raised, and `restart` goes on. Points within tasks can be named without Spark only, as
        Spark's workers are processes of their own. Undead if the batch does not come by there.
        """
        if dies is None:
            return self.runner.step(most_ticks)
        if dies not in ALL:
            raise ValueError(f"There is no point {dies!r}: {nearest(dies, ALL)}")
        if dies in (*IN_TASKS, *KAFKA_IN_TASKS) and not isinstance(self.spark, PlainSpark):
            raise ValueError(f"{dies!r} is within a task, which Spark runs in another process. To fix: leave out the session.")
        with ExitStack() as stack:
            put_in_place([dies], _die, lambda owner, name, struck: stack.enter_context(patch.object(owner, name, struck)))
            self.runner.step(most_ticks)
        raise Undead(f"The batch did not come by {dies!r}.")

    def settle(self, most_ticks: int = 1_000_000) -> None:
        """Cut a tick, and run until the ledger has all of them."""
        self.cut()
        while self.step(most_ticks):
            continue

    def restart(self, *, shards: int | None = None, lose_local_store: bool = False) -> None:
        """Another runner takes over, as after a crash: with other shards, or on a machine that has none of the state at hand."""
        before = self.runner
        before.close()
        if lose_local_store:
            shutil.rmtree(self.state / "local", ignore_errors=True)
        self.runner = self._started(shards or before.shards)
        self.pass_time("0 seconds")

    def replay(
        self, version: str, *, pipeline: Pipeline | None = None, since: int | str | None = None, retick: bool = False, shards: int = 2
    ) -> VersionTest:
        """A version beside this one, of this pipeline or of a changed one, over the same ticks. Its outputs are called `<output>.<version>`."""
        return VersionTest(self, version, pipeline or self.pipeline, since=since, retick=retick, shards=shards)

    # What comes out

    def view(self, name: str) -> list[dict[str, Any]]:
        with ViewReader(self.state / VIEWS_FILE) as reader:
            rows: list[dict[str, Any]] = reader.table(name).to_pylist()
            return rows

    def changes(self, view: str, since: int = 0) -> list[tuple[int, list[dict[str, Any]]]]:
        """A view's changes after a tick: for each tick that changed it, its number and the changes."""
        with ViewReader(self.state / VIEWS_FILE) as reader:
            return [(tick, rows.to_pylist()) for tick, rows in reader.changes_since(view, since)]

    def rows(self, topic: str) -> list[tuple[Any, ...]]:
        """A derived topic's rows in order, by partition: values, and the kind of change of a table's."""
        hidden = {OFFSET_COLUMN, PARTITION_COLUMN, "_timestamp"}
        table = self.log.read(topic).to_table()
        names = [PARTITION_COLUMN, *(name for name in table.column_names if name not in hidden)]
        return list(zip(*(table[name].to_pylist() for name in names), strict=True))

    def folded(self, topic: str, key: str) -> dict[Any, dict[str, Any]]:
        """What a table's topic amounts to. Fails if it takes back a row that is not there, or has two for a key."""
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
                assert change == "delete" or known == plain, f"{plain} was taken back, and {known} was there"
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class VersionTest(PipelineTest):
    """A version of a pipeline under test, on the same log."""

    def __init__(self, of: PipelineTest, version: str, pipeline: Pipeline, *, since: int | str | None, retick: bool, shards: int) -> None:
        self.of, self.version, self.since, self.retick = of, version, since, retick
        super().__init__(pipeline, of.root, of.spark, shards=shards, log=of.log)

    def _started(self, shards: int) -> Runner:
        plan = begin(self.log, self.pipeline.plan(), self.version, since=self.since, retick=self.retick)
        self.state = version_state(self.of.state, self.version)
        return Runner(plan, self.log, self.spark, self.state, shards=shards)


def _says_change(rows: Any) -> bool:
    first = rows[0] if isinstance(rows, list) and rows else rows
    return CHANGE_TYPE in (first if isinstance(first, dict) else getattr(first, "column_names", None) or ())
