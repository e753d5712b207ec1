"""The points at which a pipeline can be killed: a function of the engine, and whether just before
or just after it.

`PipelineTest.step(dies=…)` raises `Died` there; our own tests also kill whole processes, which
import this module before anything else: it imports nothing of the engine. A point whose function no
longer exists is an error, so no test runs without its fault.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

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
    "files were written": FaultPoint("headrace.engine.state.step_state", "_write_deltas", AFTER),
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
# On the driver of a run, which begins a batch before the one before it is committed
RUNNING_AHEAD = {
    "the next batch was begun": FaultPoint("headrace.runtime.runner", "Runner._begin", AFTER),
    "before a batch is discarded": FaultPoint(
        "headrace.runtime.runner", "Runner.discard_ahead", BEFORE
    ),
}
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
ALL = POINTS | RUNNING_AHEAD | KAFKA_IN_TASKS | KAFKA_ON_THE_DRIVER


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
