"""The gateways of a pipeline, at work beside it: each in a thread of its own, for as long as the run goes on. One that fails for good ends the run, and its error is the run's.

A run that is to end by itself takes in what is there: its gateways stay closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

from headrace.pipeline.beside import beside

if TYPE_CHECKING:
    from headrace.gateways.declared import Gateway
    from headrace.pipeline.pipeline import Pipeline

OnReady = Callable[["Gateway", str], None]


@contextmanager
def receiving(pipeline: Pipeline, log: str, stop: Event, *, until_caught_up: bool, on_ready: OnReady | None) -> Iterator[None]:
    """Around a run, once its topics are there."""
    if until_caught_up or not pipeline.gateways:
        yield
        return
    with beside({f"gateway {each.name}": partial(_receive, each, log, on_ready) for each in pipeline.gateways.values()}, stop):
        yield


def _receive(gateway: Gateway, log: str, on_ready: OnReady | None, done: Event) -> None:
    gateway.run(log=log, stop=done, on_ready=None if on_ready is None else lambda address: on_ready(gateway, address))
