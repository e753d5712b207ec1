"""What goes on beside a run: captures, gateways, sinks and alerts, each piece of work in a thread
of its own, told when the run is over. One that fails for good ends the run, and its error is the
run's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigurationError, RetryError
from headrace.log.api import Log
from headrace.retry import Backoff
from headrace.runtime.query import reason

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from headrace.alerts.alert import AlertMessage
    from headrace.alerts.decision import Deciding
    from headrace.alerts.delivery import Sending
    from headrace.cdc.declaration import Capture
    from headrace.gateways.declaration import Gateway
    from headrace.runtime.declaration import DeclaredPipeline
    from headrace.sinks.declaration import Sink


Work = Callable[[Event], None]
"""Goes on until the event is set."""


@contextmanager
def background(
    works: Mapping[str, Work], stop: Event, *, patience_s: float | None = None
) -> Iterator[list[BaseException]]:
    """Around a run. `stop` ends it when one fails; the failures so far are what it gives.
    `patience_s`: how long each is waited for at the end.
    """
    done, failures = Event(), list[BaseException]()
    threads = [
        Thread(target=_run, args=(work, done, stop, failures), daemon=True, name=name)
        for name, work in works.items()
    ]
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


# The alerts of a pipeline, at work beside it: for each a thread that decides what is told, and one
# for each receiver. What fails for a receiver is its own affair; what fails for the log ends the
# run.


logger = logging.getLogger("headrace.alerts")
POLL_S = 0.1
OnAlert = Callable[["AlertMessage"], None]


@contextmanager
def alerting(
    pipeline: DeclaredPipeline,
    log: Log,
    stop: Event,
    *,
    until_caught_up: bool,
    on_alert: OnAlert | None,
) -> Iterator[None]:
    """Around a run. One that is to end by itself tells what it found when it has found it."""
    if not pipeline.alerts:
        yield
        return
    from headrace.alerts.decision import Deciding
    from headrace.alerts.delivery import Sending

    sendings = [
        Sending(log, pipeline.name, alert, way)
        for alert in pipeline.alerts.values()
        for way in alert.to
    ]
    deciders = [Deciding(log, pipeline.name, alert, on_alert) for alert in pipeline.alerts.values()]
    if until_caught_up:
        yield
        _tell_all(deciders, sendings, stop)
        return
    works: dict[str, Work] = {
        f"alert {each.alert.name}": partial(_decide, each) for each in deciders
    }
    works |= {
        f"alert {each.alert.name} tells {number}": each.run for number, each in enumerate(sendings)
    }
    with background(works, stop):
        yield


def _tell_all(deciders: list[Deciding], sendings: list[Sending], stop: Event) -> None:
    for each in deciders:
        while each.step(_now_us(), at_once=True):
            continue
    for sending in sendings:
        sending.run(stop, until_caught_up=True)


def _decide(deciding: Deciding, ended: Event) -> None:
    """What fails in passing is tried again: nothing was told then. Of failures in a row the first
    is told of.
    """
    is_failing = False
    while not ended.is_set():
        try:
            if is_failing:
                deciding.forget()
            found = deciding.step(_now_us())
            is_failing = False
        except RetryError as error:
            if not is_failing:
                logger.warning(
                    "The alert %s cannot be decided now, and is tried again: %s",
                    deciding.alert.name,
                    error,
                )
            is_failing = True
            ended.wait(1.0)
            continue
        if not found:
            ended.wait(POLL_S)


def _now_us() -> int:
    return time.time_ns() // 1_000


# The captures of a pipeline, at work beside it: each in a thread of its own, for as long as the run
# goes on.
#
# A run that is to catch up lets the captures catch up first. A capture that fails for good ends the
# run, and its error is the run's.


PATIENCE_S = 60.0


@contextmanager
def capturing(
    pipeline: DeclaredPipeline, log: Log, stop: Event, *, until_caught_up: bool
) -> Iterator[None]:
    captures = list(pipeline.captures.values())
    if until_caught_up:
        for each in captures:
            each.run(log=log.address, stop=stop, until_caught_up=True)
        yield
        return
    works = {
        f"capture {each.name}": partial(_follow_capture, each, log.address) for each in captures
    }
    with background(works, stop, patience_s=PATIENCE_S) as failures:
        _await_topics(pipeline, log, stop, failures)
        yield


def _follow_capture(capture: Capture, log: str, done: Event) -> None:
    capture.run(log=log, stop=done)


def _await_topics(
    pipeline: DeclaredPipeline, log: Log, stop: Event, failures: list[BaseException]
) -> None:
    """A captured table's topic is made by its capture, as soon as that has looked at the table."""
    wanted = {step.topic for step in pipeline.plan().inputs if step.captured_by is not None}
    deadline_s = time.monotonic() + PATIENCE_S
    while not wanted <= set(log.topics()) and not stop.is_set():
        if time.monotonic() > deadline_s:
            raise RetryError(
                f"No capture has made the topics {sorted(wanted - set(log.topics()))} yet.",
                fix="see that the database can be reached.",
            )
        time.sleep(0.05)
    if failures:
        raise failures[0]


# The gateways of a pipeline, at work beside it: each in a thread of its own, for as long as the run
# goes on. One that fails for good ends the run, and its error is the run's.
#
# A run that is to end by itself takes in what is there: its gateways stay closed.


OnReady = Callable[["Gateway", str], None]


@contextmanager
def receiving(
    pipeline: DeclaredPipeline,
    log: str,
    stop: Event,
    *,
    until_caught_up: bool,
    on_ready: OnReady | None,
) -> Iterator[None]:
    """Around a run, once its topics are there."""
    if until_caught_up or not pipeline.gateways:
        yield
        return
    with background(
        {
            f"gateway {each.name}": partial(_receive, each, log, on_ready)
            for each in pipeline.gateways.values()
        },
        stop,
    ):
        yield


def _receive(gateway: Gateway, log: str, on_ready: OnReady | None, done: Event) -> None:
    gateway.run(
        log=log,
        stop=done,
        on_ready=None if on_ready is None else lambda address: on_ready(gateway, address),
    )


# A pipeline's sinks: other systems that follow its derived topics for as long as it runs.
#
# `Pipeline.sink` writes rows to a derived topic, exactly once as all outputs; each sink then
# follows its topic by the same loop as `headrace sync`, in a thread of its own. So a slow or
# missing target does not hold up the pipeline, and there is one way in which targets are written.


@contextmanager
def sinking(
    sinks: Mapping[str, Sink], log: str, stop: Event, *, until_caught_up: bool
) -> Iterator[None]:
    """Around a run. One that is to end by itself applies what it made when it has made it; another
    does so meanwhile, and is stopped if a sink fails for good.
    """
    if until_caught_up:
        yield
        for topic, sink in sinks.items():
            sink.run(topic, log=log, stop=stop, until_caught_up=True)
        return
    with background(
        {f"sink {topic}": partial(_follow_sink, sink, topic, log) for topic, sink in sinks.items()},
        stop,
    ):
        yield


def _follow_sink(sink: Sink, topic: str, log: str, ended: Event) -> None:
    sink.run(topic, log=log, stop=ended)


# Streaming DataFrames that are brought in: for each a Spark query that writes into its topic, as
# long as the run goes on.
#
# A query has a checkpoint in the state directory, and writes under a name of its own, by which the
# log recognises a repeated batch: each row comes in once. One that fails is started again, after a
# while that grows; the status says why.


ingest_logger = logging.getLogger("headrace.pipeline")
EVERY = "200 milliseconds"
INGEST_BACKOFF = Backoff(first_s=2.0, longest_s=60.0, jitter=0.0)
MAX_FAILURES = 20


@dataclass
class IngestQuery:
    """One of them. `given` is the DataFrame, or a function that makes it from the session."""

    name: str
    topic: str
    writer: str
    given: Any
    checkpoint: Path
    query: StreamingQuery | None = None
    failures: int = 0
    error: str | None = None
    is_done: bool = False
    start_after_s: float = 0.0

    def start(self, spark: SparkSession, log: str, *, until_caught_up: bool) -> None:
        rows = self._rows(spark)
        writing = (
            rows.writeStream.format("headrace")
            .option("log", log)
            .option("topic", self.topic)
            .option("writer", self.writer)
        )
        writing = writing.option("checkpointLocation", str(self.checkpoint)).queryName(self.writer)
        triggered = (
            writing.trigger(availableNow=True)
            if until_caught_up
            else writing.trigger(processingTime=EVERY)
        )
        self.query = triggered.start()

    def _rows(self, spark: SparkSession) -> DataFrame:
        rows: DataFrame = self.given(spark) if callable(self.given) else self.given
        if not getattr(rows, "isStreaming", False):
            raise ConfigurationError(
                f"What is to be ingested as {self.name!r} is no streaming DataFrame.",
                fix=(
                    "read it with spark.readStream; a batch is written once, with"
                    " df.write.format('headrace')."
                ),
            )
        return rows

    def has_failed(self, error: BaseException) -> None:
        self.failures += 1
        self.error, self.query = reason(error), None
        if self.failures > MAX_FAILURES:
            raise error
        pause_s = INGEST_BACKOFF.pause_s(self.failures)
        self.start_after_s = time.monotonic() + pause_s
        ingest_logger.warning(
            "The ingest %s failed (%d in a row): %s\nTrying again in %.0f s.",
            self.name,
            self.failures,
            self.error,
            pause_s,
        )

    def about(self) -> str:
        """How it is doing, in a few words."""
        if self.error is not None:
            return f"failed ({self.failures} in a row): {self.error}"
        if self.is_done:
            return "done"
        progress = self.query.lastProgress if self.query is not None else None
        return (
            "starting"
            if progress is None
            else f"running, batch {progress.batchId}, {progress.processedRowsPerSecond:,.0f} rows/s"
        )


class Ingests:
    """All of a run. `attend` is called between batches."""

    def __init__(
        self,
        pipeline: DeclaredPipeline,
        spark: SparkSession,
        log: str,
        state: Path,
        *,
        until_caught_up: bool,
        on_change: Callable[[], None],
    ) -> None:
        self.spark, self.log, self.until_caught_up, self.on_change = (
            spark,
            log,
            until_caught_up,
            on_change,
        )
        self.queries = [
            IngestQuery(
                each.name,
                each.topic,
                f"{pipeline.name}.{each.name}",
                pipeline.ingested[each.name],
                state.absolute() / "ingest" / each.name,
            )
            for each in pipeline.plan().ingests
        ]

    def attend(self) -> bool:
        """Start what is to be started, notice what has ended. Returns whether rows may still come
        before a run that is to catch up may end.
        """
        changed = [self._attend_one(query) for query in self.queries]
        if any(changed):
            self.on_change()
        return any(not query.is_done for query in self.queries)

    def _attend_one(self, each: IngestQuery) -> bool:
        """Returns whether there is something to tell."""
        if each.is_done or (each.query is None and time.monotonic() < each.start_after_s):
            return False
        if each.query is None:
            return self._start(each)
        if each.query.isActive:
            return self._went_well(each)
        error = each.query.exception()
        if error is not None:
            each.has_failed(error)
        else:
            each.is_done = True
        return True

    def _start(self, each: IngestQuery) -> bool:
        try:
            each.start(self.spark, self.log, until_caught_up=self.until_caught_up)
        except ConfigurationError:
            raise
        except Exception as error:
            each.has_failed(error)
        return True

    @staticmethod
    def _went_well(each: IngestQuery) -> bool:
        """A query that was started again is well when it has done a batch."""
        if each.error is None or each.query is None or each.query.lastProgress is None:
            return False
        each.error, each.failures = None, 0
        return True

    def status(self) -> dict[str, str]:
        return {query.name: query.about() for query in self.queries}

    def stop(self) -> None:
        for each in self.queries:
            if each.query is not None and each.query.isActive:
                each.query.stop()
