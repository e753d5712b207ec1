"""What a gateway is, and how to write one for another protocol.

A gateway receives rows over a protocol and appends them to topics. A kind of gateway subclasses
`GatewayServer` and implements `start` and `stop`: it turns what it receives into submissions and
hands them to the inbox (`inbox`), which bounds what waits, and appends with one thread (`writer`).
A kind that receives in a loop subclasses `ThreadedGatewayServer` and implements `receive`:

    class LineServer(ThreadedGatewayServer):
        def receive(self):
            while not self.stopped.is_set():
                line = read_line(timeout_s=0.1)
                if line:
                    self.accept(line)

    Gateway(kind="lines", name="lines", opener=LineServer, topics=("orders",)).run(log="file:data")

Policies for overload, dead letters, repeats by ids, counts and metrics are done here. The tests
that every gateway should pass are in `headrace.testing.gateway_contract`. An entry point of the
group `headrace.gateways` makes `headrace gateway open` know its URLs (`connector.PluginGroup`).
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any, ClassVar, Self

from headrace.connector import STATUS_INTERVAL_S, InboundConnector, Interval
from headrace.errors import InputError, nearest
from headrace.gateways.idempotency import KeyRetention
from headrace.gateways.inbox import (
    ArrowRows,
    Content,
    GatewayCounters,
    GatewayStatus,
    Inbox,
    JsonLines,
    JsonRows,
    OverloadPolicy,
    PlainRows,
    Submission,
)
from headrace.gateways.metrics import GatewayReporter
from headrace.gateways.writer import GatewayWriter
from headrace.log.api import Closeable, Log
from headrace.types.json_codec import JsonMismatch, parse_json

REPORT_INTERVAL_S = 5.0
CHECK_S = 0.1
STOP_S = 30.0


def now_us() -> int:
    return time.time_ns() // 1_000


@dataclass(frozen=True, kw_only=True)
class GatewaySpec(InboundConnector):
    """A declared gateway.

    Attributes:
        name: Identifies the gateway: a second process with the same name takes over from the first.
        opener: Makes the server, and imports the packages that it needs.
        topics: The topics that rows are appended to.
        policy: What happens when the log is slower than the senders.
        keys: How many ids of requests and messages are remembered, and for how long.
        received: The column that gets the time at which a row was received, in topics that have it.
        schemas: The columns of topics that the gateway creates if they are missing.
    """

    noun: ClassVar[str] = "gateway"

    name: str
    opener: Callable[[GatewaySpec, Log], GatewayServer] = field(repr=False, compare=False)
    topics: tuple[str, ...] = ()
    policy: OverloadPolicy = field(default_factory=OverloadPolicy)
    keys: KeyRetention | None = None
    received: str = "received_at"
    schemas: dict[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.topics:
            raise InputError(
                f"The gateway {self.name!r} has no topic to append to.", fix="name one."
            )

    def open(self, log: Log) -> GatewayServer:
        """Return the server. It receives while it is used as a context manager."""
        return self.opener(self, log)


class GatewayServer(Closeable):
    """Receives as long as its context is open. When the context is left, everything that was
    accepted is appended first.
    """

    retries_appends = True
    """Whether an append that fails for a moment is tried again here. False if the sender gets an
    answer, and can try again itself.
    """
    has_ids = False
    """Whether what is received may have ids by which repeats are recognised."""
    address = ""

    def __init__(self, gateway: GatewaySpec, log: Log) -> None:
        self.gateway = gateway
        self.log = log
        self.counters = GatewayCounters(gateway.name, gateway.kind)
        self.stopped = Event()
        self.failure: BaseException | None = None
        """What ended receiving, if anything did."""
        self._writer = GatewayWriter(
            log,
            gateway.name,
            received=gateway.received,
            keys=gateway.keys,
            has_ids=self.has_ids,
        )
        self._reporter = GatewayReporter(log)

    # What a kind of gateway implements

    @abstractmethod
    def start(self) -> None:
        """Begin to receive, and set `address`."""

    @abstractmethod
    def stop(self) -> None:
        """Receive nothing more. The inbox is still open, for what was received."""

    def details(self) -> dict[str, int]:
        """Return figures that only this kind of gateway has, for the status."""
        return {}

    def on_room(self) -> Callable[[], None] | None:
        """Return a function that the inbox calls when it has room again."""
        return None

    # The same for all kinds

    def accept(
        self,
        payload: bytes,
        *,
        topic: str | None = None,
        id: str | None = None,
        format: str = "json",
        metadata: Mapping[str, Any] | None = None,
    ) -> bool:
        """Hand a message to the inbox, for a thread that receives. Where the policy blocks, wait
        until there is room. A message that does not fit its topic becomes a dead letter.

        Args:
            payload: What was received.
            topic: The topic; by default the gateway's first one.
            id: By which a repeat is recognised, if the kind of gateway `has_ids`.
            format: `JSON` (an object, an array of objects, or lines) or `RAW`.
            metadata: Further columns of a raw message.

        Returns:
            Whether it was accepted. If not, it is counted as refused or dropped.
        """
        content = parse_content(payload, format, metadata or {})
        submission = Submission(
            topic=topic or self.gateway.topics[0],
            content=content,
            rows=row_count(content),
            size=len(payload),
            received_us=now_us(),
            id=id,
            payload=payload,
        )
        return self.inbox.submit(submission, self.stopped)

    def __enter__(self) -> Self:
        self.prepare_topics()
        self.inbox = Inbox(
            self.gateway.policy,
            self.counters,
            self._writer.write,
            retries_appends=self.retries_appends,
            on_room=self.on_room(),
        ).start()
        try:
            self.start()
        except BaseException:
            self.inbox.close()
            raise
        return self

    def prepare_topics(self) -> None:
        """Create missing topics whose columns the gateway knows; others must exist."""
        for topic in self.gateway.topics:
            if topic not in self.log.topics() and topic in self.gateway.schemas:
                self.log.create_topic(topic, self.gateway.schemas[topic], exist_ok=True)
            info = self.log.topic(topic)
            if topic.startswith("__"):
                raise InputError(
                    f"The topic {info.name!r} is Headrace's own.", fix="choose another."
                )

    def close(self) -> None:
        self.stopped.set()
        self.stop()
        self.inbox.close()

    def status(self) -> GatewayStatus:
        self.counters.details = self.details()
        return self.counters.status(self.inbox.waiting_bytes)

    def run(self, stop: Event, on_status: Callable[[GatewayStatus], None]) -> None:
        """Report status and counts until `stop` is set. Raises what ended the gateway, if anything
        did.
        """
        status_interval = Interval(STATUS_INTERVAL_S)
        report_interval = Interval(REPORT_INTERVAL_S)
        while not stop.wait(CHECK_S):
            self.check()
            if status_interval.is_due():
                on_status(self.status())
            if report_interval.is_due():
                self.report()

    def report(self) -> None:
        """Write the counts to the log, for `headrace gateway list` and `headrace watch`."""
        self._reporter.report(self.status(), now_us())

    def check(self) -> None:
        """Raise what ended the gateway, if anything did."""
        if self.failure is not None:
            raise self.failure
        self.inbox.check()


class ThreadedGatewayServer(GatewayServer):
    """A server whose `receive` runs in a thread of its own."""

    _thread: Thread | None = None

    @abstractmethod
    def receive(self) -> None:
        """Receive until `stopped` is set."""

    def start(self) -> None:
        self._thread = Thread(target=self._run, name=f"{self.gateway.name} receives", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.receive()
        except BaseException as error:
            self.failure = error

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.join(STOP_S)


# Bodies of messages whose senders get no answer: JSON, JSON lines, or any bytes. A body that cannot
# be read becomes a dead letter.

JSON, RAW = "json", "raw"
FORMATS = (JSON, RAW)


def check_format(name: str) -> str:
    """Return the name of a format, if there is one of that name."""
    if name not in FORMATS:
        raise InputError(
            f"There is no format {name!r}: {nearest(name, FORMATS)}",
            fix=f"choose one of {', '.join(FORMATS)}.",
        )
    return name


def parse_content(body: bytes, format: str, metadata: Mapping[str, Any]) -> Content:
    """Return the rows of a body. A JSON array, and lines that are JSON objects, are several rows;
    anything else is one.

    Args:
        body: What was received.
        format: `JSON` or `RAW`.
        metadata: Further columns of a raw body.
    """
    if format == RAW:
        return PlainRows([{"body": body, **metadata}])
    if body.lstrip()[:1] == b"[":
        try:
            parsed = parse_json(body)
        except JsonMismatch:
            return JsonLines([body])
        return JsonRows(parsed) if parsed else JsonLines([body])
    lines = [line for line in body.split(b"\n") if line and not line.isspace()]
    is_lines = all(line.strip()[:1] == b"{" and line.strip()[-1:] == b"}" for line in lines)
    return JsonLines(lines if lines and is_lines else [body])  # an object may span several lines


def row_count(content: Content) -> int:
    assert not isinstance(content, ArrowRows)
    return len(content.values)
