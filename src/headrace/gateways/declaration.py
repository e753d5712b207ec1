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
from urllib.parse import urlsplit

from headrace.connector import PluginGroup, as_tuple, build_from_url, check_settings
from headrace.durations import to_us
from headrace.errors import DuplicateStep, InputError, nearest
from headrace.gateways.base import RAW, GatewaySpec, check_format
from headrace.gateways.idempotency import DEFAULT_KEEP, DEFAULT_KEYS, key_retention
from headrace.gateways.inbox import BLOCK, DEFAULT_BYTES, DEFAULT_ROWS, overload_policy
from headrace.gateways.signatures import RAW_SCHEMA, Hook
from headrace.http.proxies import PublicUrl, TrustedProxies
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
_SETTINGS = (
    "log",
    "policy",
    "max_rows",
    "max_bytes",
    "patience",
    "received",
    "max_keys",
    "keep_keys",
)


def http(
    topics: str | Sequence[str] = (),
    *,
    port: int = HTTP_PORT,
    host: str = "127.0.0.1",
    hooks: Sequence[Hook] = (),
    token_file: str | Path | None = None,
    body_bytes: int = DEFAULT_BODY_BYTES,
    connections: int = 10_000,
    client_connections: int | None = 1_000,
    head_timeout: Duration = "10 seconds",
    body_timeout: Duration = "20 seconds",
    proxies: str | Sequence[str] = (),
    public_url: str | None = None,
    drain: Duration = "0 seconds",
    name: str | None = None,
    **settings: Any,
) -> Gateway:
    """Declare a gateway for `POST /topics/NAME` with JSON, JSON lines, CSV, or, for hooks, any
    body. A request is answered when its rows are durable.

    Args:
        topics: The topics that may be posted to.
        port: The port to listen on; 0 chooses a free one.
        host: The address to listen on. Beyond this machine a token is needed; hooks are
            authenticated by their signatures.
        hooks: Topics for webhooks, see `hr.gateways.hook`.
        token_file: A file with the token that senders must have; by default it is in the
            environment's HEADRACE_TOKEN.
        body_bytes: The most bytes in a request's body, as it comes and decompressed.
        connections: The most connections; fewer where the system allows fewer open files. Where
            there are more, those that have been without a complete request for longest are closed.
        client_connections: The most connections of one address (of IPv6, of a /64 network) that is
            no trusted proxy; None for no such limit.
        head_timeout: How long the head of a request may take.
        body_timeout: How long a body may take; one that comes with at least 1 KiB a second may take
            longer.
        proxies: Addresses or networks of reverse proxies whose `X-Forwarded-For` is believed.
        public_url: The URL under which a proxy makes the gateway public, with the prefix of its
            paths. A token or signatures are needed then.
        drain: How long requests are still accepted when the gateway stops and is not ready any
            more, for a load balancer to notice.
        name: Of the gateway; a second process with the same name takes over from the first.
        **settings: As for every gateway. `log`: the log's address. `policy`: what happens when the
            log is slower than the senders: "block", "buffer", "drop newest" or "drop oldest".
            `max_rows` and `max_bytes`: how much may wait for the log. `patience`: how long a sender
            that gets an answer waits for it. `received`: the column that gets the time of receipt,
            in topics that have it; `received_at` by default. `max_keys` and `keep_keys`: how many
            ids of requests or messages are remembered for each topic, and for how long; 500,000
            and 24 hours by default.

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
    if connections < 1 or (client_connections is not None and client_connections < 1):
        raise InputError("A gateway must allow at least one connection.")
    by_topic = {hook.topic: hook for hook in hooks}
    if len(by_topic) < len(hooks):
        raise DuplicateStep("Two hooks are for one topic.", fix="give each a topic of its own.")
    options = {
        "port": port,
        "host": host,
        "hooks": by_topic,
        "token_file": None if token_file is None else Path(token_file),
        "body_bytes": body_bytes,
        "connections": connections,
        "client_connections": client_connections,
        "head_s": to_us(head_timeout, what="head_timeout") / 1e6,
        "body_s": to_us(body_timeout, what="body_timeout") / 1e6,
        "proxies": TrustedProxies.parse(as_tuple(proxies)),
        "public_url": None if public_url is None else PublicUrl.parse(public_url),
        "drain_s": to_us(drain, what="drain") / 1e6,
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


def from_url(url: str, *, topics: str | Sequence[str], **settings: Any) -> Gateway:
    """Declare the gateway that a URL stands for, as `headrace gateway open` does.

    Args:
        url: `http://HOST:PORT`, `statsd://HOST:PORT`, or another scheme that an installed package
            handles, by an entry point of the group `headrace.gateways`.
        topics: The topics that rows are appended to.
        **settings: As for every gateway, see `hr.gateways.http`, and those of its kind.

    Returns:
        The gateway, which opens nothing until it is run.

    Raises:
        InputError: The URL names no gateway, or a setting cannot be used.

    Example:
        >>> hr.gateways.from_url("http://127.0.0.1:8766", topics="orders", log="file:data")
    """
    parts = urlsplit(url)
    names = as_tuple(topics)

    def listening(port: int) -> dict[str, Any]:
        return {
            "host": parts.hostname or "127.0.0.1",
            "port": port if parts.port is None else parts.port,
            **settings,
        }

    builders: dict[str, Callable[[str], Gateway]] = {
        "http": lambda _url: http(names, **listening(HTTP_PORT)),
        "statsd": lambda _url: statsd(*names, **listening(STATSD_PORT)),
    }
    return build_from_url(
        url,
        builders,
        plugins=PluginGroup("headrace.gateways", Gateway),
        settings={"topics": names, **settings},
        what="a gateway",
        examples="http://HOST:PORT or statsd://HOST:PORT",
    )


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
    keys = key_retention(
        settings.pop("max_keys", DEFAULT_KEYS), settings.pop("keep_keys", DEFAULT_KEEP)
    )
    return Gateway(
        name=name,
        kind=kind,
        opener=opener,
        topics=tuple(dict.fromkeys(topics)),
        policy=policy,
        keys=keys,
        schemas=schemas or {},
        options=options,
        **settings,
    )
