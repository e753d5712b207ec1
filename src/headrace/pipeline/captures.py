"""The captures of a pipeline, at work beside it: each in a thread of its own, for as long as the run goes on.

A run that is to catch up lets the captures catch up first. A capture that fails for good ends the run, and its error is the run's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

from headrace.errors import RetryError
from headrace.log.api import Log
from headrace.pipeline.beside import beside

if TYPE_CHECKING:
    from headrace.cdc.declared import Capture
    from headrace.pipeline.pipeline import Pipeline

PATIENCE_S = 60.0


@contextmanager
def capturing(pipeline: Pipeline, log: Log, stop: Event, *, until_caught_up: bool) -> Iterator[None]:
    captures = list(pipeline.captures.values())
    if until_caught_up:
        for each in captures:
            each.run(log=log.address, stop=stop, until_caught_up=True)
        yield
        return
    works = {f"capture {each.name}": partial(_follow, each, log.address) for each in captures}
    with beside(works, stop, patience_s=PATIENCE_S) as failures:
        _await_topics(pipeline, log, stop, failures)
        yield


def _follow(capture: Capture, log: str, done: Event) -> None:
    capture.run(log=log, stop=done)


def _await_topics(pipeline: Pipeline, log: Log, stop: Event, failures: list[BaseException]) -> None:
    """A captured table's topic is made by its capture, as soon as that has looked at the table."""
    wanted = {step.topic for step in pipeline.plan().inputs if step.captured_by is not None}
    deadline_s = time.monotonic() + PATIENCE_S
    while not wanted <= set(log.topics()) and not stop.is_set():
        if time.monotonic() > deadline_s:
            raise RetryError(f"No capture has made the topics {sorted(wanted - set(log.topics()))} yet.", fix="see that the database can be reached.")
        time.sleep(0.05)
    if failures:
        raise failures[0]
