"""Ctrl-C and SIGTERM end a command that runs until it is told to stop: the first one asks, the second one does not wait."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType


@contextmanager
def stopping(told: str = "Stopping after the batch under way; once more ends it at once.") -> Iterator[Event]:
    """An event that the first signal sets; the second one raises KeyboardInterrupt, which does no harm either."""
    stop = Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        if told:
            print(told, file=sys.stderr, flush=True)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
