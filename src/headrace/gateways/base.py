"""A gateway at work: what all kinds share. Each kind says how it receives (`begin`, `end`);
everything else is the same: an inbox, a writer, counts.

with hr.gateways.http("orders", port=0).open(log) as running:
print(running.address, running.status())
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any, Self

from headrace.errors import ConfigurationError, InputError, nearest
from headrace.gateways.inbox import (
    Content,
    Counts,
    GatewayStatus,
    Inbox,
    Lines,
    Parsed,
    Plain,
    Policy,
)
from headrace.gateways.metrics import Telling
from headrace.gateways.writer import Writer
from headrace.log.api import Closing, Log
from headrace.log.topic_config import check_name
from headrace.types.json_codec import Misshapen, parse

STATUS_S = 1.0
TELL_S = 5.0
LOOK_S = 0.1
END_S = 30.0


def now_us() -> int:
    return time.time_ns() // 1_000


@dataclass(frozen=True)
class GatewaySpec:
    """Where rows come in, and the topics they go to. `name` identifies it: a second process with
    the same name takes over from the first.
    """

    name: str
    kind: str
    opener: Callable[[GatewaySpec, Log], Receiving] = field(repr=False, compare=False)
    topics: tuple[str, ...] = ()
    log: str | None = None
    policy: Policy = field(default_factory=Policy)
    received: str = "received_at"
    """The column that gets the time at which a row came, in topics that have it."""
    schemas: dict[str, str] = field(default_factory=dict, repr=False)
    """Topics that the gateway makes itself, if they are missing."""
    options: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_name(self.name, what="gateway name")
        if not self.topics:
            raise InputError(
                f"The gateway {self.name!r} has no topic to append to.", fix="name one."
            )

    def open(self, log: Log) -> Receiving:
        """The gateway, ready to be entered with `with`."""
        return self.opener(self, log)

    def log_address(self, given: str | None = None) -> str:
        address = given or self.log
        if address is None:
            raise ConfigurationError(
                f"The gateway {self.name!r} has no log.", fix="pass log=… (--log …)."
            )
        return address


class Receiving(Closing):
    """Begins to receive when it is entered; ends with everything appended that was taken."""

    patient = True
    """Whether an append that fails in passing is tried again, since the sender could not be
    told.
    """
    address = ""

    def __init__(self, gateway: GatewaySpec, log: Log) -> None:
        self.gateway, self.log = gateway, log
        self.counts = Counts(gateway.name, gateway.kind)
        self.stopped = Event()
        self.failure: BaseException | None = None
        self._writer = Writer(log, gateway.name, received=gateway.received)
        self._telling = Telling(log)

    # What each kind says

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def end(self) -> None:
        """Receive nothing more. What is under way may still need the inbox."""

    def details(self) -> dict[str, int]:
        return {}

    # The same for all

    def __enter__(self) -> Self:
        self.prepare_topics()
        self.inbox = Inbox(
            self.gateway.policy,
            self.counts,
            self._writer.write,
            patient=self.patient,
            on_room=self.on_room(),
        )
        try:
            self.begin()
        except BaseException:
            self.inbox.close()
            raise
        return self

    def on_room(self) -> Callable[[], None] | None:
        return None

    def prepare_topics(self) -> None:
        """Make what is missing, where the gateway itself says what a topic's rows are; else a topic
        must be there.
        """
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
        self.end()
        self.inbox.close()

    def status(self) -> GatewayStatus:
        self.counts.details = self.details()
        return self.counts.status(self.inbox.waiting_bytes)

    def work(self, stop: Event, on_status: Callable[[GatewayStatus], None]) -> None:
        """Until it is told to stop, or cannot go on."""
        shown_s = told_s = 0.0
        while not stop.wait(LOOK_S):
            self.check()
            if time.monotonic() - shown_s >= STATUS_S:
                shown_s = time.monotonic()
                on_status(self.status())
            if time.monotonic() - told_s >= TELL_S:
                told_s = time.monotonic()
                self.tell()

    def tell(self) -> None:
        """To whoever watches the log."""
        self._telling.tell(self.status(), now_us())

    def check(self) -> None:
        """Raise what ended it, if anything did."""
        if self.failure is not None:
            raise self.failure
        self.inbox.check()


class ThreadReceiving(Receiving):
    """A kind whose `receive` runs in a thread of its own, until `stopped`."""

    _thread: Thread | None = None

    @abstractmethod
    def receive(self) -> None: ...

    def begin(self) -> None:
        self._thread = Thread(target=self._run, name=f"{self.gateway.name} receives", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.receive()
        except BaseException as error:
            self.failure = error

    def end(self) -> None:
        if self._thread is not None:
            self._thread.join(END_S)


# A message's body as rows, for gateways whose senders cannot be told what is wrong with it: JSON,
# JSON lines, or the body as it is. What cannot be read becomes a dead letter.


JSON, RAW = "json", "raw"
FORMATS = (JSON, RAW)


def check_format(name: str) -> str:
    if name not in FORMATS:
        raise InputError(
            f"There is no format {name!r}: {nearest(name, FORMATS)}",
            fix=f"choose one of {', '.join(FORMATS)}.",
        )
    return name


def content_of(body: bytes, format: str, extra: Mapping[str, Any]) -> Content:
    """`extra` is what is known of a raw body. An array is many rows, and so are lines; what is
    neither is one row, whatever comes of it.
    """
    if format == RAW:
        return Plain([{"body": body, **extra}])
    if body.lstrip()[:1] == b"[":
        try:
            parsed = parse(body)
        except Misshapen:
            return Lines([body])
        return Parsed(parsed) if parsed else Lines([body])
    return Lines(_objects(body) or [body])


def _objects(body: bytes) -> list[bytes]:
    """Each line an object; but an object that was written over several lines is one."""
    lines = [line for line in body.split(b"\n") if line and not line.isspace()]
    return (
        lines
        if all(line.strip().startswith(b"{") and line.strip().endswith(b"}") for line in lines)
        else [body]
    )


def rows_of(content: Content) -> int:
    assert isinstance(content, Lines | Parsed | Plain)
    return len(content.values)
