"""The moments at which a pipeline may be struck: a function of the engine, and whether just before or just after it.

`PipelineTest.step(dies=…)` lets a runner die there; our own tests also kill whole processes. The product knows nothing of it. A name that is no longer there is
an error, so that no test goes on without its fault.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

BEFORE, AFTER = "before", "after"


@dataclass(frozen=True)
class Point:
    """Just before or just after a function: `module`, and the name inside it, with dots."""

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
POINTS: dict[str, Point] = {
    "before the pack": Point("headrace.engine.job", "ReadAndPack.__call__", BEFORE),
    "a row was read": Point("headrace.engine.tasks", "TopicRange._placed", AFTER),
    "state was brought": Point("headrace.engine.local_store", "StoreTransaction.bring_to", AFTER),
    "before the kernel": Point("headrace.operators.aggregate", "AggregateKernel.step", BEFORE),
    "in the kernel": Point("headrace.engine.step_state", "StepState._put", AFTER),
    "files were written": Point("headrace.engine.state_writing", "_write_delta", AFTER),
    "the undo was kept": Point("headrace.engine.local_store", "StoreTransaction.keep_undo", AFTER),
    "the store was committed": Point("headrace.engine.local_store", "LocalStore._write_about", BEFORE),
    "the store was closed": Point("headrace.engine.local_store", "LocalStore.close", AFTER),
    "a view's changes were written": Point("headrace.engine.shard", "write_rows", AFTER),
    "a shard has reported": Point("headrace.engine.shard", "ShardFunction._report", AFTER),
    "a topic's rows were staged": Point("headrace.log.file.log", "FileLog.stage", AFTER),
}
IN_TASKS = tuple(POINTS)
# On the driver
POINTS |= {
    "before the reports": Point("headrace.pipeline.query", "read_reports", BEFORE),
    "before the commit": Point("headrace.pipeline.query", "commit_batch", BEFORE),
    "in the views' commit": Point("headrace.sinks.views", "ViewStore._advance", AFTER),
    "between views and log": Point("headrace.sinks.views", "ViewStore.commit", AFTER),
    "in the log's transaction": Point("headrace.sinks.ledger", "Ledger.add", AFTER),
    "in the log's commit": Point("headrace.log.file.log", "FileLog.adopt_loaded", BEFORE),
    "the log was committed": Point("headrace.sinks.ledger", "Ledger.commit", AFTER),
    "after the commit": Point("headrace.pipeline.query", "commit_batch", AFTER),
}
ON_THE_DRIVER = tuple(name for name in POINTS if name not in IN_TASKS)
# Where the log is Kafka's, in the place of those of the embedded log
KAFKA_IN_TASKS = {"rows were staged for Kafka": Point("headrace.log.kafka.log", "KafkaLog.stage", AFTER)}
KAFKA_ON_THE_DRIVER = {
    "sent to Kafka": Point("headrace.log.kafka.transaction", "KafkaTransaction._send_everything", AFTER),
    "committed in Kafka": Point("headrace.log.kafka.transaction", "commit", AFTER),
}
ALL = POINTS | KAFKA_IN_TASKS | KAFKA_ON_THE_DRIVER


def on_kafka(names: Iterable[str]) -> list[str]:
    """Without the points of the embedded log."""
    return [name for name in names if not ALL[name].module.startswith("headrace.log.file")]


def put_in_place(names: Iterable[str], strike: Callable[[str], None], patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let `strike` be called with a point's name whenever it is passed. Modules are imported."""
    for name in names:
        point = ALL[name]
        owner = point.owner()
        patch(owner, point.name, _struck(getattr(owner, point.name), name, point.when, strike))


def _struck(real: Callable[..., Any], name: str, when: str, strike: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(real)
    def struck(*args: Any, **options: Any) -> Any:
        if when == BEFORE:
            strike(name)
        result = real(*args, **options)
        if when == AFTER:
            strike(name)
        return result

    return struck
