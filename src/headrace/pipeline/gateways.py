"""The gateways of a pipeline, at work beside it: each in a thread of its own, for as long as the run goes on. One that fails for good ends the run, and its error is the run's.

A run that is to end by itself takes in what is there: its gateways stay closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING

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
    done, failures = Event(), list[BaseException]()
    threads = [Thread(target=_run, args=(each, log, done, stop, failures, on_ready), daemon=True, name=f"gateway {each.name}") for each in pipeline.gateways.values()]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def _run(gateway: Gateway, log: str, done: Event, stop: Event, failures: list[BaseException], on_ready: OnReady | None) -> None:
    try:
        gateway.run(log=log, stop=done, on_ready=None if on_ready is None else lambda address: on_ready(gateway, address))
    except BaseException as error:
        failures.append(error)
        stop.set()
