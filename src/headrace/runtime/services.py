"""The services that run in the background of a pipeline: captures, ingests, gateways, sinks and
alerts.

Each runs in a thread of its own for as long as the run goes on, and is stopped when the run ends. A
service that fails for good ends the run, and its error becomes the run's. `run` starts them around
the runner: each `run_…` function here is a context manager around a run.

Ingests are Spark queries rather than threads; the runner polls them between batches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigurationError, RetryError
from headrace.log.api import Log
from headrace.retry import Backoff
from headrace.runtime.failures import failure_reason
from headrace.runtime.inputs import create_input

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from headrace.alerts.alert import AlertMessage
    from headrace.alerts.decision import AlertDecider
    from headrace.cdc.declaration import Capture
    from headrace.gateways.declaration import Gateway
    from headrace.runtime.declared_pipeline import DeclaredPipeline
    from headrace.sinks.declaration import Sink


# Threads in the background


Service = Callable[[Event], None]
"""Works until the event is set."""


@contextmanager
def background(
    services: Mapping[str, Service], stop: Event, *, patience_s: float | None = None
) -> Iterator[list[BaseException]]:
    """Run services in the background of the body, each in a thread of its own.

    When a service fails, `stop` is set, and its error is raised at the end. Yields the list of
    failures so far. At the end, each thread is waited for, for at most `patience_s`.
    """
    done, failures = Event(), list[BaseException]()

    def run(service: Service) -> None:
        try:
            service(done)
        except BaseException as error:
            failures.append(error)
            stop.set()

    threads = [
        Thread(target=run, args=(service,), daemon=True, name=name)
        for name, service in services.items()
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


# Captures


PATIENCE_S = 60.0


@contextmanager
def run_captures(
    pipeline: DeclaredPipeline, log: Log, stop: Event, *, until_caught_up: bool
) -> Iterator[None]:
    """Run the captures and sources of a pipeline. A run that is to catch up lets them catch up
    first.
    """
    captures = list(pipeline.captures.values())
    _create_topics_of_sources(pipeline, captures, log)
    if until_caught_up:
        for capture in captures:
            capture.run(log=log.address, stop=stop, until_caught_up=True)
        yield
        return
    services = {
        f"capture {capture.name}": partial(_run_capture, capture, log.address)
        for capture in captures
    }
    with background(services, stop, patience_s=PATIENCE_S) as failures:
        _await_captured_topics(pipeline, log, stop, failures)
        yield


def _create_topics_of_sources(
    pipeline: DeclaredPipeline, captures: Sequence[Capture], log: Log
) -> None:
    """Create the topics of sources that are missing, as the pipeline declares them."""
    if not captures:
        return
    from headrace.sources.base import Source

    topics = {capture.topic for capture in captures if isinstance(capture, Source)}
    existing = set(log.topics())
    for step in pipeline.plan().inputs:
        if step.topic in topics:
            create_input(log, step, existing)


def _run_capture(capture: Capture, log: str, done: Event) -> None:
    capture.run(log=log, stop=done)


def _await_captured_topics(
    pipeline: DeclaredPipeline, log: Log, stop: Event, failures: list[BaseException]
) -> None:
    """Wait for the topics of captured tables: a capture creates one when it has read the table's
    columns.
    """
    wanted = {step.topic for step in pipeline.plan().inputs if step.captured_by is not None}
    deadline_s = time.monotonic() + PATIENCE_S
    while not wanted <= set(log.topics()) and not stop.is_set():
        if time.monotonic() > deadline_s:
            raise RetryError(
                f"No capture has created the topics {sorted(wanted - set(log.topics()))} yet.",
                fix="check that the database can be reached.",
            )
        time.sleep(0.05)
    if failures:
        raise failures[0]


# Gateways


OnReady = Callable[["Gateway", str], None]


@contextmanager
def run_gateways(
    pipeline: DeclaredPipeline,
    log: str,
    stop: Event,
    *,
    until_caught_up: bool,
    on_ready: OnReady | None,
) -> Iterator[None]:
    """Run the gateways of a pipeline, once its topics exist. `on_ready` is called with each gateway
    and its address. A run that is to catch up processes what is there: its gateways stay closed.
    """
    if until_caught_up or not pipeline.gateways:
        yield
        return
    services = {
        f"gateway {gateway.name}": partial(_run_gateway, gateway, log, on_ready)
        for gateway in pipeline.gateways.values()
    }
    with background(services, stop):
        yield


def _run_gateway(gateway: Gateway, log: str, on_ready: OnReady | None, done: Event) -> None:
    gateway.run(
        log=log,
        stop=done,
        on_ready=None if on_ready is None else lambda address: on_ready(gateway, address),
    )


# Sinks


@contextmanager
def run_sinks(
    sinks: Mapping[str, Sink], log: str, stop: Event, *, until_caught_up: bool
) -> Iterator[None]:
    """Run the sinks of a pipeline, by the derived topic that each follows, or by name if it
    `follows` an input's topic.

    `Pipeline.sink` writes rows to a derived topic, exactly once as all outputs, unless they are an
    input's; the sink follows the topic as `headrace sync` does. So a slow or missing target does
    not hold up the pipeline. A run that is to catch up applies its rows at the end.
    """
    if until_caught_up:
        yield
        for name, sink in sinks.items():
            sink.run(sink.follows or name, log=log, stop=stop, until_caught_up=True)
        return
    services = {
        f"sink {name}": partial(_run_sink, sink, sink.follows or name, log)
        for name, sink in sinks.items()
    }
    with background(services, stop):
        yield


def _run_sink(sink: Sink, topic: str, log: str, done: Event) -> None:
    sink.run(topic, log=log, stop=done)


# Alerts


logger = logging.getLogger("headrace.alerts")
POLL_S = 0.1
_ALERT_RETRY_S = 1.0
OnAlert = Callable[["AlertMessage"], None]


@contextmanager
def run_alerts(
    pipeline: DeclaredPipeline,
    log: Log,
    stop: Event,
    *,
    until_caught_up: bool,
    on_alert: OnAlert | None,
) -> Iterator[None]:
    """Run the alerts of a pipeline: for each a thread that decides what to send, and one for each
    receiver. A receiver's failures concern it alone; a failure of the log ends the run. A run that
    is to catch up decides and sends at the end.
    """
    if not pipeline.alerts:
        yield
        return
    from headrace.alerts.decision import AlertDecider
    from headrace.alerts.delivery import AlertSender

    alerts = list(pipeline.alerts.values())
    senders = [
        AlertSender.open(log, pipeline.name, alert, receiver)
        for alert in alerts
        for receiver in alert.to
    ]
    deciders = [AlertDecider.open(log, pipeline.name, alert, on_alert) for alert in alerts]
    if until_caught_up:
        yield
        for decider in deciders:
            while decider.step(_now_us(), at_once=True):
                continue
        for sender in senders:
            sender.run(stop, until_caught_up=True)
        return
    services: dict[str, Service] = {
        f"alert {decider.alert.name}": partial(decide_alerts, decider) for decider in deciders
    }
    services |= {
        f"alert {sender.alert.name} to receiver {number}": sender.run
        for number, sender in enumerate(senders)
    }
    with background(services, stop):
        yield


def decide_alerts(decider: AlertDecider, done: Event) -> None:
    """Decide until `done` is set. A temporary failure is tried again: nothing was sent then. Of
    failures in a row, the first is logged.
    """
    is_failing = False
    while not done.is_set():
        try:
            if is_failing:
                decider.reload()
            worked = decider.step(_now_us())
            is_failing = False
        except RetryError as error:
            if not is_failing:
                logger.warning(
                    "The alert %s cannot be decided now, and is tried again: %s",
                    decider.alert.name,
                    error,
                )
            is_failing = True
            done.wait(_ALERT_RETRY_S)
            continue
        if not worked:
            done.wait(POLL_S)


def _now_us() -> int:
    return time.time_ns() // 1_000


# Ingests: streaming DataFrames that are written into topics
#
# Each is a Spark query with a checkpoint in the state directory. It writes under a name of its own,
# by which the log recognises a repeated batch: each row comes in once. A query that fails is
# started again after a pause that grows; the status says why.


ingest_logger = logging.getLogger("headrace.pipeline")
EVERY = "200 milliseconds"
INGEST_BACKOFF = Backoff(first_s=2.0, longest_s=60.0, jitter=0.0)
MAX_FAILURES = 20


@dataclass
class IngestQuery:
    """The Spark query of one ingest."""

    name: str
    topic: str
    writer: str
    source: Any
    """The streaming DataFrame, or a function that makes it from the session."""
    checkpoint: Path
    query: StreamingQuery | None = None
    failures: int = 0
    error: str | None = None
    is_done: bool = False
    start_after_s: float = 0.0

    def poll(self, spark: SparkSession, log: str, *, until_caught_up: bool) -> bool:
        """Start the query if it is due, and notice that it has ended, failed or recovered. Returns
        whether the status has changed.
        """
        if self.is_done or (self.query is None and time.monotonic() < self.start_after_s):
            return False
        if self.query is None:
            try:
                self._start(spark, log, until_caught_up=until_caught_up)
            except ConfigurationError:
                raise
            except Exception as error:
                self._handle_failure(error)
            return True
        if self.query.isActive:
            # A query that was started again has recovered when it has done a batch.
            has_recovered = self.error is not None and self.query.lastProgress is not None
            if has_recovered:
                self.error = None
                self.failures = 0
            return has_recovered
        failure = self.query.exception()
        if failure is not None:
            self._handle_failure(failure)
        else:
            self.is_done = True
        return True

    def _start(self, spark: SparkSession, log: str, *, until_caught_up: bool) -> None:
        rows: DataFrame = self.source(spark) if callable(self.source) else self.source
        if not getattr(rows, "isStreaming", False):
            raise ConfigurationError(
                f"The ingest {self.name!r} is no streaming DataFrame.",
                fix=(
                    "read it with spark.readStream; a batch is written once, with"
                    " df.write.format('headrace')."
                ),
            )
        writer = (
            rows.writeStream.format("headrace")
            .option("log", log)
            .option("topic", self.topic)
            .option("writer", self.writer)
            .option("checkpointLocation", str(self.checkpoint))
            .queryName(self.writer)
        )
        if until_caught_up:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=EVERY)
        self.query = writer.start()

    def _handle_failure(self, error: BaseException) -> None:
        self.failures += 1
        self.error = failure_reason(error)
        self.query = None
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

    def status(self) -> str:
        """The state of the query, in a few words."""
        if self.error is not None:
            return f"failed ({self.failures} in a row): {self.error}"
        if self.is_done:
            return "done"
        progress = self.query.lastProgress if self.query is not None else None
        if progress is None:
            return "starting"
        return f"running, batch {progress.batchId}, {progress.processedRowsPerSecond:,.0f} rows/s"


class Ingests:
    """All ingests of a run. The runner calls `poll` between batches."""

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
        self.spark = spark
        self.log = log
        self.until_caught_up = until_caught_up
        self.on_change = on_change
        self.queries = [
            IngestQuery(
                name=ingest.name,
                topic=ingest.topic,
                writer=f"{pipeline.name}.{ingest.name}",
                source=pipeline.ingested[ingest.name],
                checkpoint=state.absolute() / "ingest" / ingest.name,
            )
            for ingest in pipeline.plan().ingests
        ]

    def poll(self) -> bool:
        """Start queries that are due, and notice those that have ended. Returns whether more rows
        may come, so that a run has not caught up yet.
        """
        changes = [
            query.poll(self.spark, self.log, until_caught_up=self.until_caught_up)
            for query in self.queries
        ]
        if any(changes):
            self.on_change()
        return any(not query.is_done for query in self.queries)

    def status(self) -> dict[str, str]:
        return {query.name: query.status() for query in self.queries}

    def stop(self) -> None:
        for query in self.queries:
            if query.query is not None and query.query.isActive:
                query.query.stop()
