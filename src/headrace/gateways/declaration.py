"""A gateway, declared: what `hr.gateways.http(…)` and its siblings return. It opens nothing until
it is run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from headrace.durations import to_us
from headrace.errors import DuplicateStep, InputError, nearest
from headrace.gateways.base import RAW, GatewaySpec, check_format
from headrace.gateways.inbox import BLOCK, DEFAULT_BYTES, DEFAULT_ROWS, policy_of
from headrace.gateways.signatures import RAW_SCHEMA, Hook
from headrace.log.values import Duration

if TYPE_CHECKING:
    from headrace.gateways.base import Receiving
    from headrace.gateways.inbox import GatewayStatus
    from headrace.log.api import Log


@dataclass(frozen=True)
class Gateway(GatewaySpec):
    """A way for rows to come in over a protocol, and the topics they go to."""

    def run(
        self,
        *,
        log: str | None = None,
        stop: Event | None = None,
        on_status: Callable[[GatewayStatus], None] | None = None,
        on_ready: Callable[[str], None] | None = None,
    ) -> None:
        """Receive in this process until `stop` is set. `on_ready` hears where it listens."""
        from headrace.log import open_log

        tell = on_status or (lambda _status: None)
        with open_log(self.log_address(log)) as opened:
            receiving = self.open(opened)
            with receiving:
                if on_ready is not None:
                    on_ready(receiving.address)
                receiving.work(stop or Event(), tell)
            tell(receiving.status())
            receiving.check()
            receiving.tell()


# `hr.gateways.<kind>(…)`: how each kind of gateway is declared. Optional packages are imported when
# a gateway is opened.


HTTP_PORT, STATSD_PORT = 8766, 8125
SHORTEST_FLUSH_US = 100_000
_RAW_ZEROMQ = "body BINARY, subject STRING, received_at TIMESTAMP"
_RAW_AMQP = (
    "body BINARY, message_id STRING, routing_key STRING, exchange STRING, content_type STRING,"
    " headers MAP<STRING, STRING>, received_at TIMESTAMP"
)
DEFAULT_BODY_BYTES = 8 << 20
_SETTINGS = ("log", "policy", "max_rows", "max_bytes", "patience", "received")


def http(
    topics: str | Sequence[str] = (),
    *,
    port: int = HTTP_PORT,
    host: str = "127.0.0.1",
    hooks: Sequence[Hook] = (),
    token_file: str | Path | None = None,
    body_bytes: int = DEFAULT_BODY_BYTES,
    name: str | None = None,
    **settings: Any,
) -> Gateway:
    """`POST /topics/NAME`: JSON, JSON lines, or, for `hooks`, any body. It is answered when the
    rows are durable.

    Elsewhere than on this machine it listens only with a token, from `token_file` or the
    environment's HEADRACE_TOKEN; hooks are known by their signatures.

    Settings, as for all gateways: `log`, `policy` ("block", "buffer", "drop newest" or "drop
    oldest"), `max_rows` and `max_bytes` (that may wait for the log), `patience` (of a sender that
    waits), and `received` (the column that gets the time of receipt, where a topic has it;
    `received_at` by default).
    """
    if not 1 <= body_bytes <= 1 << 30:
        raise InputError("body_bytes must be from 1 to 1 GiB.")
    by_topic = {each.topic: each for each in hooks}
    if len(by_topic) < len(hooks):
        raise DuplicateStep("Two hooks are for one topic.", fix="give each a topic of its own.")
    options = {
        "port": port,
        "host": host,
        "hooks": by_topic,
        "token_file": None if token_file is None else Path(token_file),
        "body_bytes": body_bytes,
    }
    schemas = {each.topic: RAW_SCHEMA for each in hooks if each.raw}
    return _gateway(
        "http",
        name or f"http.{port}",
        _open_http,
        (*_listed(topics), *by_topic),
        settings,
        schemas=schemas,
        **options,
    )


def _open_http(gateway: GatewaySpec, log: Log) -> Receiving:
    from headrace.gateways.http_gateway import HttpReceiving

    return HttpReceiving(gateway, log)


def statsd(
    topic: str = "metrics",
    *,
    port: int = STATSD_PORT,
    host: str = "127.0.0.1",
    flush: Duration | None = "10 seconds",
    forget_gauges: bool = False,
    name: str | None = None,
    **settings: Any,
) -> Gateway:
    """StatsD's packets over UDP. Each `flush` interval gives one row a metric; `flush=None` stores
    every value as it came. The topic is made, if it is missing.

    Gauges are told again in every interval; with `forget_gauges` only when somebody set them.
    """
    from headrace.gateways.statsd_gateway import RAW_SCHEMA as RAW_VALUES
    from headrace.gateways.statsd_gateway import SCHEMA

    flush_us = None if flush is None else to_us(flush, what="flush")
    if flush_us is not None and flush_us < SHORTEST_FLUSH_US:
        raise InputError(
            f"A flush interval of {flush} is too short.",
            fix="give at least 100 ms, or flush=None for every value as it came.",
        )
    options = {"port": port, "host": host, "flush_us": flush_us, "forget_gauges": forget_gauges}
    return _gateway(
        "statsd",
        name or f"statsd.{port}",
        _open_statsd,
        (topic,),
        settings,
        schemas={topic: RAW_VALUES if flush_us is None else SCHEMA},
        **options,
    )


def _open_statsd(gateway: GatewaySpec, log: Log) -> Receiving:
    from headrace.gateways.statsd_gateway import StatsdReceiving

    return StatsdReceiving(gateway, log)


def zeromq(
    topic: str,
    *,
    socket: str = "pull",
    bind: str | Sequence[str] = (),
    connect: str | Sequence[str] = (),
    subjects: Sequence[str] = ("",),
    format: str = "json",
    message_bytes: int = DEFAULT_BODY_BYTES,
    name: str | None = None,
    **settings: Any,
) -> Gateway:
    """Messages of a ZeroMQ socket, "pull" or "sub" (to `subjects`, prefixes of a message's first
    part), bound or connected to addresses such as tcp://127.0.0.1:5556. Needs the extra `zeromq`.

    A body is JSON (an object, an array, or lines), or with `format="raw"` anything.
    """
    if socket not in {"pull", "sub"}:
        raise InputError(f"There is no socket {socket!r} here: {nearest(socket, ['pull', 'sub'])}")
    places = (*_listed(bind), *_listed(connect))
    if not places:
        raise InputError(
            "The ZeroMQ gateway neither binds nor connects.",
            fix="give bind='tcp://127.0.0.1:5556', or connect=….",
        )
    options = {
        "socket": socket,
        "bind": _listed(bind),
        "connect": _listed(connect),
        "subjects": _listed(subjects),
        "message_bytes": message_bytes,
    }
    schemas = {topic: _RAW_ZEROMQ} if check_format(format) == RAW else {}
    chosen = name or f"zeromq.{hashlib.sha256(' '.join(places).encode()).hexdigest()[:8]}"
    return _gateway(
        "zeromq",
        chosen,
        _open_zeromq,
        (topic,),
        settings,
        schemas=schemas,
        format=format,
        **options,
    )


def _open_zeromq(gateway: GatewaySpec, log: Log) -> Receiving:
    from headrace.gateways.zeromq_gateway import ZeromqReceiving

    return ZeromqReceiving(gateway, log)


def amqp(
    topic: str,
    *,
    url: str,
    queue: str,
    prefetch: int = 1_000,
    declare: bool = False,
    format: str = "json",
    name: str | None = None,
    **settings: Any,
) -> Gateway:
    """Messages of a RabbitMQ queue, each acknowledged there when it is durable here; repeats are
    known by their `message_id`. Needs the extra `amqp`.

    `url` may be named: `env:NAME` or `file:PATH`. `declare` makes the queue, if it is missing.
    """
    from headrace.amqp import check_url

    if not 1 <= prefetch <= 65_535:
        raise InputError(f"A prefetch of {prefetch} is none.", fix="choose from 1 to 65,535.")
    options = {
        "url": check_url(url),
        "queue": queue,
        "prefetch": prefetch,
        "declare": declare,
        "format": check_format(format),
    }
    schemas = {topic: _RAW_AMQP} if format == RAW else {}
    return _gateway(
        "amqp",
        name or f"amqp.{hashlib.sha256(queue.encode()).hexdigest()[:8]}",
        _open_amqp,
        (topic,),
        settings,
        schemas=schemas,
        **options,
    )


def _open_amqp(gateway: GatewaySpec, log: Log) -> Receiving:
    from headrace.gateways.amqp_gateway import AmqpReceiving

    return AmqpReceiving(gateway, log)


def _listed(topics: str | Sequence[str]) -> tuple[str, ...]:
    return (topics,) if isinstance(topics, str) else tuple(topics)


def _gateway(
    kind: str,
    name: str,
    opener: Any,
    topics: tuple[str, ...],
    settings: dict[str, Any],
    *,
    schemas: dict[str, str] | None = None,
    **options: Any,
) -> Gateway:
    for setting in settings:
        if setting not in _SETTINGS:
            raise InputError(
                f"hr.gateways.{kind} has no setting {setting!r}: {nearest(setting, _SETTINGS)}"
            )
    policy = policy_of(
        settings.pop("policy", BLOCK),
        max_rows=settings.pop("max_rows", DEFAULT_ROWS),
        max_bytes=settings.pop("max_bytes", DEFAULT_BYTES),
        patience=settings.pop("patience", "30 seconds"),
    )
    return Gateway(
        name,
        kind,
        opener,
        tuple(dict.fromkeys(topics)),
        policy=policy,
        schemas=schemas or {},
        options=options,
        **settings,
    )
