"""A pipeline's sinks: other systems that follow its derived topics for as long as it runs.

`Pipeline.sink` writes rows to a derived topic, exactly once as all outputs; each sink then follows its topic by the same loop as `headrace sync`, in a thread of its own. So a slow or
missing target does not hold up the pipeline, and there is one way in which targets are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

from headrace.pipeline.beside import beside

if TYPE_CHECKING:
    from headrace.sinks.declared import Sink


@contextmanager
def sinking(sinks: Mapping[str, Sink], log: str, stop: Event, *, until_caught_up: bool) -> Iterator[None]:
    """Around a run. One that is to end by itself applies what it made when it has made it; another does so meanwhile, and is stopped if a sink fails for good."""
    if until_caught_up:
        yield
        for topic, sink in sinks.items():
            sink.run(topic, log=log, stop=stop, until_caught_up=True)
        return
    with beside({f"sink {topic}": partial(_follow, sink, topic, log) for topic, sink in sinks.items()}, stop):
        yield


def _follow(sink: Sink, topic: str, log: str, ended: Event) -> None:
    sink.run(topic, log=log, stop=ended)
