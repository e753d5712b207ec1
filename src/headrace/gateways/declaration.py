"""The gateways that users declare: `hr.gateways.http(…)` and its siblings return a `Gateway`.

Declaring opens nothing. Optional packages are imported when the gateway is run. To receive over
another protocol, see `headrace.gateways.base`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from headrace.connector import as_tuple, check_settings
from headrace.durations import to_us
from headrace.errors import DuplicateStep, InputError, nearest
from headrace.gateways.base import RAW, GatewaySpec, check_format
from headrace.gateways.inbox import BLOCK, DEFAULT_BYTES, DEFAULT_ROWS, overload_policy
from headrace.gateways.signatures import RAW_SCHEMA, Hook
from headrace.log.values import Duration

if TYPE_CHECKING:
    from headrace.gateways.base import GatewayServer
    from headrace.gateways.inbox import GatewayStatus
    from headrace.log.api import Log


@dataclass(frozen=True, kw_only=True)
class Gateway(GatewaySpec):
    """Receives rows over a protocol, and appends them to topics."""

    def run(
        self,
        *,
        log: str | None = None,
        stop: Event | None = None,
        on_status: Callable[[GatewayStatus], None] | None = None,
        on_ready: Callable[[str], None] | None = None,
    ) -> None:
        """Receive in this process.

        Args:
            log: The log's address; by default the declared one.
            stop: Set it to stop. Without it, this never returns.
            on_status: Called about once a second with how the gateway is doing.
            on_ready: Called once with the address at which the gateway listens.

        Raises:
            ConfigurationError: There is no log, or the address cannot be listened on.
            ProducerFenced: Another process runs a gateway of the same name.

        Example:
            >>> hr.gateways.http("orders").run(log="file:data", on_ready=print)
        """
        from headrace.log import open_log

        report_status = on_status or (lambda _status: None)
        with open_log(self.log_address(log)) as opened:
            server = self.open(opened)
            with server:
                if on_ready is not None:
                    on_ready(server.address)
                server.run(stop or Event(), report_status)
            report_status(server.status())
            server.check()
            server.report()


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
    """Declare a gateway for `POST /topics/NAME` with JSON, JSON lines, or, for hooks, any body. A
    request is answered when its rows are durable.

    Args:
        topics: The topics that may be posted to.
        port: The port to listen on; 0 chooses a free one.
        host: The address to listen on. Beyond this machine a token is needed; hooks are
            authenticated by their signatures.
        hooks: Topics for webhooks, see `hr.gateways.hook`.
        token_file: A file with the token that senders must have; by default it is in the
            environment's HEADRACE_TOKEN.
        body_bytes: The most bytes in a request's body.
        name: Of the gateway; a second process with the same name takes over from the first.
        **settings: As for every gateway. `log`: the log's address. `policy`: what happens when the
            log is slower than the senders: "block", "buffer", "drop newest" or "drop oldest".
            `max_rows` and `max_bytes`: how much may wait for the log. `patience`: how long a sender
            that gets an answer waits for it. `received`: the column that gets the time of receipt,
            in topics that have it; `received_at` by default.

    Returns:
        The gateway, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.
        DuplicateStep: Two hooks are for one topic.

    Example:
        >>> hr.gateways.http(["orders", "clicks"], port=8766, log="file:data").run()
    """
    if not 1 <= body_bytes <= 1 << 30:
        raise InputError("body_bytes must be from 1 to 1 GiB.")
    by_topic = {hook.topic: hook for hook in hooks}
    if len(by_topic) < len(hooks):
        raise DuplicateStep("Two hooks are for one topic.", fix="give each a topic of its own.")
    options = {
        "port": port,
        "host": host,
        "hooks": by_topic,
        "token_file": None if token_file is None else Path(token_file),
        "body_bytes": body_bytes,
    }
    schemas = {hook.topic: RAW_SCHEMA for hook in hooks if hook.raw}
    return _gateway(
        "http",
        name or f"http.{port}",
        _open_http,
        (*as_tuple(topics), *by_topic),
        settings,
        schemas=schemas,
        **options,
    )


def _open_http(gateway: GatewaySpec, log: Log) -> GatewayServer:
    from headrace.gateways.http_gateway import HttpGatewayServer

    return HttpGatewayServer(gateway, log)


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
    """Declare a gateway for StatsD's packets over UDP.

    Args:
        topic: The topic, which is created if it is missing.
        port: The port to listen on; 0 chooses a free one.
        host: The address to listen on.
        flush: The interval for which a metric's values are aggregated into one row; None stores
            every value as it came.
        forget_gauges: Emit a gauge only in intervals in which it was set. By default gauges are
            emitted in every interval.
        name: Of the gateway; a second process with the same name takes over from the first.
        **settings: As for every gateway, see `hr.gateways.http`.

    Returns:
        The gateway, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> hr.gateways.statsd("metrics", flush="10 seconds", log="file:data").run()
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


def _open_statsd(gateway: GatewaySpec, log: Log) -> GatewayServer:
    from headrace.gateways.statsd_gateway import StatsdGatewayServer

    return StatsdGatewayServer(gateway, log)


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
    """Declare a gateway for messages of a ZeroMQ socket. Needs the extra `zeromq`.

    Args:
        topic: The topic.
        socket: "pull" or "sub".
        bind: Addresses to bind the socket to, such as tcp://127.0.0.1:5556.
        connect: Addresses to connect the socket to.
        subjects: For "sub", prefixes of the first part of the messages to receive.
        format: "json" (an object, an array, or lines), or "raw" for any bytes.
        message_bytes: The most bytes in a message.
        name: Of the gateway; a second process with the same name takes over from the first.
        **settings: As for every gateway, see `hr.gateways.http`.

    Returns:
        The gateway, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> hr.gateways.zeromq("events", bind="tcp://127.0.0.1:5556", log="file:data").run()
    """
    if socket not in {"pull", "sub"}:
        raise InputError(
            f"hr.gateways.zeromq has no socket {socket!r}: {nearest(socket, ['pull', 'sub'])}"
        )
    addresses = (*as_tuple(bind), *as_tuple(connect))
    if not addresses:
        raise InputError(
            "The ZeroMQ gateway neither binds nor connects.",
            fix="give bind='tcp://127.0.0.1:5556', or connect=….",
        )
    options = {
        "socket": socket,
        "bind": as_tuple(bind),
        "connect": as_tuple(connect),
        "subjects": as_tuple(subjects),
        "message_bytes": message_bytes,
    }
    schemas = {topic: _RAW_ZEROMQ} if check_format(format) == RAW else {}
    name = name or f"zeromq.{hashlib.sha256(' '.join(addresses).encode()).hexdigest()[:8]}"
    return _gateway(
        "zeromq",
        name,
        _open_zeromq,
        (topic,),
        settings,
        schemas=schemas,
        format=format,
        **options,
    )


def _open_zeromq(gateway: GatewaySpec, log: Log) -> GatewayServer:
    from headrace.gateways.zeromq_gateway import ZeromqGatewayServer

    return ZeromqGatewayServer(gateway, log)


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
    """Declare a gateway for a queue of RabbitMQ. A message is acknowledged when its rows are
    durable; repeats are recognised by their `message_id`. Needs the extra `amqp`.

    Args:
        topic: The topic.
        url: As in `amqp://user@host:5672/`, or where it is stored: `env:NAME` or `file:PATH`.
        queue: The queue to read.
        prefetch: The most messages that are not acknowledged.
        declare: Whether the queue is created if it is missing.
        format: "json" (an object, an array, or lines), or "raw" for any bytes.
        name: Of the gateway; a second process with the same name takes over from the first.
        **settings: As for every gateway, see `hr.gateways.http`.

    Returns:
        The gateway, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> hr.gateways.amqp("orders", url="env:AMQP_URL", queue="orders", log="file:data").run()
    """
    from headrace.amqp import check_url

    if not 1 <= prefetch <= 65_535:
        raise InputError(
            f"A prefetch of {prefetch} is not possible.", fix="choose from 1 to 65,535."
        )
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


def _open_amqp(gateway: GatewaySpec, log: Log) -> GatewayServer:
    from headrace.gateways.amqp_gateway import AmqpGatewayServer

    return AmqpGatewayServer(gateway, log)


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
    check_settings(f"hr.gateways.{kind}", settings, _SETTINGS)
    policy = overload_policy(
        settings.pop("policy", BLOCK),
        max_rows=settings.pop("max_rows", DEFAULT_ROWS),
        max_bytes=settings.pop("max_bytes", DEFAULT_BYTES),
        patience=settings.pop("patience", "30 seconds"),
    )
    return Gateway(
        name=name,
        kind=kind,
        opener=opener,
        topics=tuple(dict.fromkeys(topics)),
        policy=policy,
        schemas=schemas or {},
        options=options,
        **settings,
    )
