"""Which other systems have rows of a topic: each sink leaves its name in the log when it begins to follow one. Whoever must forget something can then name them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from headrace.errors import ReadOnlyLog

if TYPE_CHECKING:
    from headrace.log.api import Log
    from headrace.log.file.log import FileLog
    from headrace.sinks.declared import Sink

_PREFIX = "followed/"


def remember(log: Log, topic: str, sink: Sink) -> None:
    """Once for each sink of a topic. What Kafka has cannot be forgotten, by nobody: nothing is left there."""
    name, what = f"{_PREFIX}{topic}/{sink.name_for(topic)}", f"{sink.kind} {sink.table or topic}"
    if log.address.startswith("kafka:") or log.note(name) == what:
        return
    with suppress(ReadOnlyLog), log.transaction(f"followed.{sink.name_for(topic)}") as tx:
        tx.set_note(name, what)


def of_topic(log: FileLog, topic: str) -> list[str]:
    """Every sink that ever followed a topic, in words."""
    known = {name.removeprefix(f"{_PREFIX}{topic}/"): what for name, what in log.store.view().notes.items() if name.startswith(f"{_PREFIX}{topic}/")}
    return [f"the sink {name!r} ({what}), which follows the topic {topic!r}" for name, what in sorted(known.items())]
