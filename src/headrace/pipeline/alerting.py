"""The alerts of a pipeline, at work beside it: for each a thread that decides what is told, and one for each receiver. What fails for a receiver is its own affair; what fails for the log ends the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

from headrace.errors import RetryError
from headrace.pipeline.beside import Work, beside

if TYPE_CHECKING:
    from headrace.alerts.deciding import Deciding
    from headrace.alerts.messages import AlertMessage
    from headrace.alerts.sending import Sending
    from headrace.log.api import Log
    from headrace.pipeline.pipeline import Pipeline

logger = logging.getLogger("headrace.alerts")
POLL_S = 0.1
OnAlert = Callable[["AlertMessage"], None]


@contextmanager
def alerting(pipeline: Pipeline, log: Log, stop: Event, *, until_caught_up: bool, on_alert: OnAlert | None) -> Iterator[None]:
    """Around a run. One that is to end by itself tells what it found when it has found it."""
    if not pipeline.alerts:
        yield
        return
    from headrace.alerts.deciding import Deciding
    from headrace.alerts.sending import Sending

    sendings = [Sending(log, pipeline.name, alert, way) for alert in pipeline.alerts.values() for way in alert.to]
    deciders = [Deciding(log, pipeline.name, alert, on_alert) for alert in pipeline.alerts.values()]
    if until_caught_up:
        yield
        _tell_all(deciders, sendings, stop)
        return
    works: dict[str, Work] = {f"alert {each.alert.name}": partial(_decide, each) for each in deciders}
    works |= {f"alert {each.alert.name} tells {number}": each.run for number, each in enumerate(sendings)}
    with beside(works, stop):
        yield


def _tell_all(deciders: list[Deciding], sendings: list[Sending], stop: Event) -> None:
    for each in deciders:
        while each.step(_now_us(), at_once=True):
            continue
    for sending in sendings:
        sending.run(stop, until_caught_up=True)


def _decide(deciding: Deciding, ended: Event) -> None:
    """What fails in passing is tried again: nothing was told then. Of failures in a row the first is told of."""
    is_failing = False
    while not ended.is_set():
        try:
            if is_failing:
                deciding.forget()
            found = deciding.step(_now_us())
            is_failing = False
        except RetryError as error:
            if not is_failing:
                logger.warning("The alert %s cannot be decided now, and is tried again: %s", deciding.alert.name, error)
            is_failing = True
            ended.wait(1.0)
            continue
        if not found:
            ended.wait(POLL_S)


def _now_us() -> int:
    return time.time_ns() // 1_000
