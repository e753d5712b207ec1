"""Headrace: a durable log, and pipelines over it. These are its public names.

    import headrace as hr

    log          open_log, Log, Producer, Consumer, Queue, Transaction, Message, Batches,
                 AppendResult, Offsets, TopicInfo, GroupInfo, PartitionLag, spark
    pipelines    Pipeline, Stream, Table, EventTime, device_time, processing_time, file_table,
                 Processor, state, timer, side_output, udf, RequestContext, tumbling, hopping,
                 sliding, session, late, agg, over, pattern, search, shed
    edges        cdc, sources, gateways, sinks, alerts, events
    errors       errors

A name is loaded when it is first used (PEP 562): importing the package starts no JVM and loads no
optional package, so a script that only appends to a log does not pay for Spark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace import errors
from headrace._version import __version__

if TYPE_CHECKING:
    from headrace import alerts, cdc, events, gateways, sinks, sources
    from headrace.calls.call import RequestContext
    from headrace.expressions.user_functions import udf
    from headrace.log import open_log
    from headrace.log.api import Batches, Consumer, Log, Message, Producer, Queue, Transaction
    from headrace.log.spark.session import spark
    from headrace.log.values import AppendResult, GroupInfo, Offsets, PartitionLag, TopicInfo
    from headrace.operators import row_functions as over
    from headrace.operators.aggregates import functions as agg
    from headrace.operators.processors.processor import Processor, side_output, state, timer
    from headrace.operators.windows import late_policy as late
    from headrace.operators.windows.specs import hopping, session, sliding, tumbling
    from headrace.pipeline import document_search as search
    from headrace.pipeline.file_table import file_table
    from headrace.pipeline.patterns import pattern
    from headrace.pipeline.pipeline import Pipeline, shed
    from headrace.pipeline.stream import Stream, Table
    from headrace.plan.event_time import EventTime, device_time, processing_time


_MODULES = {
    "agg": "headrace.operators.aggregates.functions",
    "alerts": "headrace.alerts",
    "cdc": "headrace.cdc",
    "events": "headrace.events",
    "gateways": "headrace.gateways",
    "late": "headrace.operators.windows.late_policy",
    "over": "headrace.operators.row_functions",
    "search": "headrace.pipeline.document_search",
    "sinks": "headrace.sinks",
    "sources": "headrace.sources",
}
"""Public names that are modules, and where they are."""

_NAMES_BY_MODULE = {
    "headrace.calls.call": ("RequestContext",),
    "headrace.expressions.user_functions": ("udf",),
    "headrace.log": ("open_log",),
    "headrace.log.api": (
        "Batches",
        "Consumer",
        "Log",
        "Message",
        "Producer",
        "Queue",
        "Transaction",
    ),
    "headrace.log.spark.session": ("spark",),
    "headrace.log.values": ("AppendResult", "GroupInfo", "Offsets", "PartitionLag", "TopicInfo"),
    "headrace.operators.processors.processor": ("Processor", "side_output", "state", "timer"),
    "headrace.operators.windows.specs": ("hopping", "session", "sliding", "tumbling"),
    "headrace.pipeline.file_table": ("file_table",),
    "headrace.pipeline.patterns": ("pattern",),
    "headrace.pipeline.pipeline": ("Pipeline", "shed"),
    "headrace.pipeline.stream": ("Stream", "Table"),
    "headrace.plan.event_time": ("EventTime", "device_time", "processing_time"),
}
_HOMES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
"""The module of each other public name."""

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
    "Processor",
    "Producer",
    "Queue",
    "RequestContext",
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
    "file_table",
    "gateways",
    "hopping",
    "late",
    "open_log",
    "over",
    "pattern",
    "processing_time",
    "search",
    "session",
    "shed",
    "side_output",
    "sinks",
    "sliding",
    "sources",
    "spark",
    "state",
    "timer",
    "tumbling",
    "udf",
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
