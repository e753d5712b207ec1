"""What goes on beside a run: captures, gateways, sinks and alerts, each piece of work in a thread of its own, told when the run is over. One that fails for good ends the run, and its error is the run's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Thread

Work = Callable[[Event], None]
"""Goes on until the event is set."""


@contextmanager
def beside(works: Mapping[str, Work], stop: Event, *, patience_s: float | None = None) -> Iterator[list[BaseException]]:
    """Around a run. `stop` ends it when one fails; the failures so far are what it gives. `patience_s`: how long each is waited for at the end."""
    done, failures = Event(), list[BaseException]()
    threads = [Thread(target=_run, args=(work, done, stop, failures), daemon=True, name=name) for name, work in works.items()]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        done.set()
        for thread in threads:
            thread.join(patience_s)
    if failures:
        raise failures[0]


def _run(work: Work, done: Event, stop: Event, failures: list[BaseException]) -> None:
    try:
        work(done)
    except BaseException as error:
        failures.append(error)
        stop.set()
