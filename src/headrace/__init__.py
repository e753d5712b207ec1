"""The public names of Headrace, and nothing else. Importing it starts no JVM and loads no optional
package.

A name is loaded when it is first used (PEP 562), so that a script which only appends to a log never
pays for Spark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace import errors
from headrace._version import __version__

if TYPE_CHECKING:
    from headrace import alerts, cdc, events, gateways, sinks
    from headrace.log import open_log
    from headrace.log.api import Batches, Consumer, Log, Message, Producer, Queue, Transaction
    from headrace.log.spark.session import spark
    from headrace.log.values import AppendResult, GroupInfo, Offsets, PartitionLag, TopicInfo
    from headrace.operators.aggregates import functions as agg
    from headrace.operators.windows import late
    from headrace.operators.windows.specs import hopping, session, sliding, tumbling
    from headrace.pipeline import document_search as search
    from headrace.pipeline.patterns import pattern
    from headrace.pipeline.pipeline import Pipeline, shed
    from headrace.pipeline.stream import Stream, Table
    from headrace.plan.event_time import EventTime, device_time, processing_time


_HOMES = {
    "EventTime": "headrace.plan.event_time",
    "Pipeline": "headrace.pipeline.pipeline",
    "device_time": "headrace.plan.event_time",
    "open_log": "headrace.log",
    "pattern": "headrace.pipeline.patterns",
    "processing_time": "headrace.plan.event_time",
    "shed": "headrace.pipeline.pipeline",
    "spark": "headrace.log.spark.session",
    "Stream": "headrace.pipeline.stream",
    "Table": "headrace.pipeline.stream",
}
_HOMES |= dict.fromkeys(
    ("hopping", "session", "sliding", "tumbling"),
    "headrace.operators.windows.specs",
)
_MODULES = {
    "agg": "headrace.operators.aggregates.functions",
    "alerts": "headrace.alerts",
    "cdc": "headrace.cdc",
    "events": "headrace.events",
    "gateways": "headrace.gateways",
    "late": "headrace.operators.windows.late",
    "search": "headrace.pipeline.document_search",
    "sinks": "headrace.sinks",
}
_HOMES |= dict.fromkeys(
    ("Batches", "Consumer", "Log", "Message", "Producer", "Queue", "Transaction"),
    "headrace.log.api",
)
_HOMES |= dict.fromkeys(
    ("GroupInfo", "PartitionLag", "AppendResult", "Offsets", "TopicInfo"), "headrace.log.values"
)

__all__ = [
    "AppendResult",
    "Batches",
    "Consumer",
    "EventTime",
    "GroupInfo",
    "Log",
    "Message",
    "Offsets",
    "PartitionLag",
    "Pipeline",
    "Producer",
    "Queue",
    "Stream",
    "Table",
    "TopicInfo",
    "Transaction",
    "__version__",
    "agg",
    "alerts",
    "cdc",
    "device_time",
    "errors",
    "events",
    "gateways",
    "hopping",
    "late",
    "open_log",
    "pattern",
    "processing_time",
    "search",
    "session",
    "shed",
    "sinks",
    "sliding",
    "spark",
    "tumbling",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = import_module(_MODULES[name])
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(
            f"module 'headrace' has no attribute {name!r}: {errors.nearest(name, __all__)}"
        )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
