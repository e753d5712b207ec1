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

import functools
import importlib
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

from headrace.columnar.columns import CHANGE_TYPE, OFFSET_COLUMN, PARTITION_COLUMN
from headrace.durations import to_us
from headrace.errors import nearest
from headrace.log import open_log
from headrace.log.api import Log
from headrace.log.values import Rows
from headrace.runtime.inputs import create_captured_topics
from headrace.runtime.runner import Runner
from headrace.runtime.versions import start_version, version_state
from headrace.testing.plain_spark import PlainSpark
from headrace.views.file import VIEWS_FILE
from headrace.views.reader import ViewReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.pipeline.pipeline import Pipeline


# Fault points: where a runner can be made to die
#
# A point is a function of the engine, and whether the fault comes just before or just after it.
# `PipelineTest.step(dies=…)` lets a runner die there; this project's own tests also kill whole
# processes. The engine knows nothing of it. A function that no longer exists is an error, so that
# no test goes on without its fault.


BEFORE, AFTER = "before", "after"


@dataclass(frozen=True)
class FaultPoint:
    """Just before or just after a function: `attribute` is its name in the module, with dots."""

    module: str
    attribute: str
    when: str

    def owner(self) -> Any:
        *path, _ = self.attribute.split(".")
        return functools.reduce(getattr, path, importlib.import_module(self.module))

    @property
    def name(self) -> str:
        return self.attribute.rsplit(".", 1)[-1]


# In a task
POINTS: dict[str, FaultPoint] = {
    "before the pack": FaultPoint("headrace.engine.map_tasks", "ReadAndPack.__call__", BEFORE),
    "a row was read": FaultPoint("headrace.engine.reader", "TopicRange._with_order_columns", AFTER),
    "state was brought": FaultPoint(
        "headrace.engine.state.local_store", "StoreTransaction.bring_to", AFTER
    ),
    "before the kernel": FaultPoint(
        "headrace.operators.aggregates.kernel", "AggregateKernel.step", BEFORE
    ),
    "in the kernel": FaultPoint("headrace.engine.state.step_state", "StepState._put", AFTER),
    "files were written": FaultPoint("headrace.engine.state.step_state", "_write_delta", AFTER),
    "the undo was kept": FaultPoint(
        "headrace.engine.state.local_store", "StoreTransaction.keep_undo", AFTER
    ),
    "the store was committed": FaultPoint(
        "headrace.engine.state.local_store", "LocalStore._write_about", BEFORE
    ),
    "the store was closed": FaultPoint(
        "headrace.engine.state.local_store", "LocalStore.close", AFTER
    ),
    "a view's changes were written": FaultPoint("headrace.engine.shard", "write_rows", AFTER),
    "a shard has reported": FaultPoint("headrace.engine.shard", "ShardFunction._report", AFTER),
    "a topic's rows were staged": FaultPoint("headrace.log.file.log", "FileLog.stage", AFTER),
}
IN_TASKS = tuple(POINTS)
# On the driver
POINTS |= {
    "before the reports": FaultPoint("headrace.runtime.query", "read_reports", BEFORE),
    "before the commit": FaultPoint("headrace.runtime.query", "commit_batch", BEFORE),
    "in the views' commit": FaultPoint("headrace.views.store", "ViewStore._advance", AFTER),
    "between views and log": FaultPoint("headrace.views.store", "ViewStore.commit", AFTER),
    "in the log's transaction": FaultPoint("headrace.engine.ledger", "Ledger.add", AFTER),
    "in the log's commit": FaultPoint("headrace.log.file.log", "FileLog.adopt_loaded", BEFORE),
    "the log was committed": FaultPoint("headrace.engine.ledger", "Ledger.commit", AFTER),
    "after the commit": FaultPoint("headrace.runtime.query", "commit_batch", AFTER),
}
ON_THE_DRIVER = tuple(name for name in POINTS if name not in IN_TASKS)
# On Kafka, instead of the points of the embedded log
KAFKA_IN_TASKS = {
    "rows were staged for Kafka": FaultPoint("headrace.log.kafka.log", "KafkaLog.stage", AFTER)
}
KAFKA_ON_THE_DRIVER = {
    "sent to Kafka": FaultPoint(
        "headrace.log.kafka.transaction", "KafkaTransaction._send_notes", AFTER
    ),
    "committed in Kafka": FaultPoint("headrace.log.kafka.transaction", "commit_transaction", AFTER),
}
ALL = POINTS | KAFKA_IN_TASKS | KAFKA_ON_THE_DRIVER


def on_kafka(names: Iterable[str]) -> list[str]:
    """The names, without the points of the embedded log."""
    return [name for name in names if not ALL[name].module.startswith("headrace.log.file")]


def inject_faults(
    names: Iterable[str],
    strike: Callable[[str], None],
    patch: Callable[[Any, str, Any], None] = setattr,
) -> None:
    """Call `strike` with a point's name whenever the point is passed. Imports the modules."""
    for name in names:
        point = ALL[name]
        owner = point.owner()
        patch(owner, point.name, _with_fault(getattr(owner, point.name), name, point.when, strike))


def _with_fault(
    real: Callable[..., Any], name: str, when: str, strike: Callable[[str], None]
) -> Callable[..., Any]:
    @functools.wraps(real)
    def with_fault(*args: Any, **options: Any) -> Any:
        if when == BEFORE:
            strike(name)
        result = real(*args, **options)
        if when == AFTER:
            strike(name)
        return result

    return with_fault


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
    ) -> None:
        self.pipeline, self.root = pipeline, root
        self.spark: Any = PlainSpark() if spark is None else spark
        root.mkdir(parents=True, exist_ok=True)
        self._own_log = not isinstance(log, Log)
        self.log = log if isinstance(log, Log) else open_log(log or f"file:{root / 'log'}")
        self.state = root / "state"
        self._passed_us = 0
        create_captured_topics(self.log, pipeline.plan())
        self.runner = self._start_runner(shards)

    def _start_runner(self, shards: int) -> Runner:
        return Runner.start(self.pipeline.plan(), self.log, self.spark, self.state, shards=shards)

    # Inputs

    def feed(self, topic: str, rows: Rows) -> None:
        """Append rows to a topic. Rows of a table are upserts unless they have a `_change_type`."""
        with self.log.producer(topic) as producer:
            if self.log.topic(topic).is_table and not _have_change_type(rows):
                producer.upsert(rows)
            else:
                producer.append(rows)

    def cut(self, *, forced: bool = False) -> int:
        """Cut a tick of the rows that were fed since the last one. Returns how many ticks were cut."""
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

    def settle(self, max_ticks: int = 1_000_000) -> None:
        """Cut a tick, and run batches until the ledger has all ticks."""
        self.cut()
        while self.step(max_ticks):
            continue

    def restart(self, *, shards: int | None = None, lose_local_store: bool = False) -> None:
        """Start another runner, as after a crash: with another number of shards, or on a machine
        that has no local store.
        """
        before = self.runner
        before.close()
        if lose_local_store:
            shutil.rmtree(self.state / "local", ignore_errors=True)
        self.runner = self._start_runner(shards or before.shards)
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

    def _start_runner(self, shards: int) -> Runner:
        plan = start_version(
            self.log, self.pipeline.plan(), self.version, since=self.since, retick=self.retick
        )
        self.state = version_state(self.of.state, self.version)
        return Runner.start(plan, self.log, self.spark, self.state, shards=shards)


def _have_change_type(rows: Any) -> bool:
    first = rows[0] if isinstance(rows, list) and rows else rows
    return CHANGE_TYPE in (
        first if isinstance(first, dict) else getattr(first, "column_names", None) or ()
    )
