"""The sinks that users declare: `hr.sinks.postgres(…)` and its siblings return a `Sink`.

Declaring opens nothing. The driver of a target is imported when the sink is run. To write a sink of
your own, see `headrace.sinks.base`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, cast

from headrace.connector import as_tuple, build_from_url, check_settings, without_scheme
from headrace.durations import to_us
from headrace.errors import InputError, nearest
from headrace.sinks.base import SinkSpec

if TYPE_CHECKING:
    from headrace.log.values import Duration
    from headrace.sinks.base import Target
    from headrace.sinks.batch import TargetShape
    from headrace.sinks.check import SinkComparison
    from headrace.sinks.sync import SyncStatus


@dataclass(frozen=True, kw_only=True)
class Sink(SinkSpec):
    """A target in another system that is kept equal to a topic of the log."""

    def run(
        self,
        topic: str,
        *,
        log: str,
        stop: Event | None = None,
        until_caught_up: bool = False,
        start_over: bool = False,
        on_status: Callable[[SyncStatus], None] | None = None,
    ) -> None:
        """Follow a topic in this process.

        Args:
            topic: The topic to follow.
            log: The address of its log.
            stop: Set it to stop. Without it, and without `until_caught_up`, this never returns.
            until_caught_up: Return when all rows are applied that are in the topic now.
            start_over: Empty the target first, and apply the topic from its beginning.
            on_status: Called about once a second with how the sink is doing.

        Raises:
            TargetMismatch: The target does not fit the topic, or is filled from another one.
            TargetRefuses: The target refuses so many rows that something else must be wrong.
            SinkFenced: Another process has taken over the target.

        Example:
            >>> hr.sinks.sqlite("shop.db").run("orders", log="file:data", until_caught_up=True)
        """
        from headrace.log import open_log
        from headrace.sinks.sync import SinkLoop

        with open_log(log) as opened:
            loop = SinkLoop(self, opened, topic, start_over=start_over, on_status=on_status)
            loop.run(stop=stop, until_caught_up=until_caught_up)

    def check(self, topic: str, *, log: str) -> SinkComparison:
        """Compare the target with the topic, key by key, as of the offsets that it has applied.

        Args:
            topic: The topic that the target follows.
            log: The address of its log.

        Returns:
            How many keys are missing, extra or different, and the first of them.

        Raises:
            NotSupported: The target cannot be read back, such as a webhook's receiver.

        Example:
            >>> hr.sinks.sqlite("shop.db").check("orders", log="file:data").is_equal
            True
        """
        from headrace.log import open_log
        from headrace.sinks.check import compare

        with open_log(log) as opened:
            return compare(self, opened, topic)


_SETTINGS = ("table", "name", "mode", "key", "create", "batch_rows")


def sqlite(path: str | Path, **settings: Any) -> Sink:
    """Declare a sink to a table of an SQLite database.

    Args:
        path: The database file. It is created if it is missing.
        **settings: As for every sink. `table`: what the target is called; by default as the topic.
            `name`: of the sink, for its dead letters; by default `<topic>.<kind>`. `mode`: "merge"
            (one row a key; the default for tables) or "append" (every row once). `key`: the columns
            to merge a stream by. `create`: whether a missing table or column is created; true by
            default. `batch_rows`: the most rows in one commit.

    Returns:
        The sink, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> hr.sinks.sqlite("shop.db", table="orders").run("orders", log="file:data")
    """
    return _sink("sqlite", settings, path=str(path))


def postgres(url: str, **settings: Any) -> Sink:
    """Declare a sink to a table of a Postgres database. Needs the extra `postgres`.

    Args:
        url: As in `postgresql://user@host/database`.
        **settings: As for every sink, see `hr.sinks.sqlite`. `table` may name a schema:
            `reports.revenue`.

    Returns:
        The sink, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> hr.sinks.postgres("postgresql://app@db/shop", table="reports.orders")
    """
    return _sink("postgres", settings, url=url)


def redis(url: str, *, encoding: str = "hash", **settings: Any) -> Sink:
    """Declare a sink to Redis: each row is under the key `TABLE:KEY`. Needs the extra `redis`.

    Args:
        url: As in `redis://host`.
        encoding: "hash" (one field a column) or "json" (one JSON text).
        **settings: As for every sink, see `hr.sinks.sqlite`. `batch_rows` is 10,000 by default,
            since Redis does nothing else while it applies a batch.

    Returns:
        The sink, which opens nothing until it is run.

    Raises:
        InputError: A setting or the encoding is unknown.

    Example:
        >>> hr.sinks.redis("redis://cache", table="account", encoding="json")
    """
    if encoding not in {"hash", "json"}:
        raise InputError(
            f"hr.sinks.redis has no encoding {encoding!r}: {nearest(encoding, ['hash', 'json'])}"
        )
    settings.setdefault("batch_rows", 10_000)
    return _sink("redis", settings, url=url, encoding=encoding)


def parquet(path: str | Path, *, buckets: int = 16, **settings: Any) -> Sink:
    """Declare a sink to a directory of Parquet files.

    Args:
        path: The directory; with the setting `table`, the files are in a directory of that name in
            it.
        buckets: In merge mode, over how many files the rows are spread by their key. A commit
            rewrites those that it touches.
        **settings: As for every sink, see `hr.sinks.sqlite`.

    Returns:
        The sink, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> hr.sinks.parquet("lake", table="orders", mode="append")
    """
    if not 1 <= buckets <= 10_000:
        raise InputError(
            f"hr.sinks.parquet cannot have {buckets} buckets.", fix="choose from 1 to 10,000."
        )
    return _sink("parquet", settings, path=str(path), buckets=buckets)


def delta(path: str | Path, **settings: Any) -> Sink:
    """Declare a sink to a Delta table. Needs the extra `delta`.

    Args:
        path: The table's directory; with the setting `table`, a directory of that name in it.
        **settings: As for every sink, see `hr.sinks.sqlite`.

    Returns:
        The sink, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> hr.sinks.delta("lake", table="orders")
    """
    return _sink("delta", settings, path=str(path))


def search(path: str | Path, **settings: Any) -> Sink:
    """Declare a sink to a full-text index. Needs the extra `search`.

    Args:
        path: The index's directory; with the setting `table`, a directory of that name in it.
        **settings: As for every sink, see `hr.sinks.sqlite`.

    Returns:
        The sink, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> hr.sinks.search("products").run("products", log="file:data")
    """
    return _sink("search", settings, path=str(path))


def webhook(
    url: str,
    *,
    secret: str | None = None,
    headers: Mapping[str, str] | None = None,
    request_rows: int = 1,
    timeout: Duration = "10 seconds",
    internal: Sequence[str] = (),
    **settings: Any,
) -> Sink:
    """Declare a sink that posts each row as JSON, at least once, with an id by which the receiver
    can drop repeats.

    Args:
        url: Where to post. Addresses that are not public are refused, unless they are in one of the
            networks of `internal` or of the environment's HEADRACE_WEBHOOK_INTERNAL.
        secret: Where the secret is that requests are signed with: `env:NAME` or `file:PATH`. By
            default `env:HEADRACE_WEBHOOK_SECRET`, if that is set.
        headers: Further headers. Values may be `env:NAME` or `file:PATH`.
        request_rows: The most rows in one request.
        timeout: The longest time for one request.
        internal: Networks that are not public and yet allowed, such as "10.1.0.0/16".
        **settings: As for every sink, see `hr.sinks.sqlite`. `batch_rows` is 100 by default: so
            many rows may be sent again after a crash.

    Returns:
        The sink, which opens nothing until it is run.

    Raises:
        InputError: The address, a header or a setting cannot be used.

    Example:
        >>> hr.sinks.webhook("https://example.com/hook", secret="env:HOOK_SECRET")
    """
    from headrace.sinks.webhook_target import SECRET_VARIABLE, WebhookEndpoint

    if not 1 <= request_rows <= 10_000:
        raise InputError(
            f"hr.sinks.webhook cannot send {request_rows} rows in a request.",
            fix="choose from 1 to 10,000.",
        )
    settings.setdefault("batch_rows", max(100, request_rows))
    if not secret and os.environ.get(SECRET_VARIABLE):
        secret = f"env:{SECRET_VARIABLE}"
    endpoint = WebhookEndpoint(
        url=url,
        secret=secret or None,
        headers=dict(headers or {}),
        timeout_s=to_us(timeout, what="timeout") / 1e6,
        internal=as_tuple(internal),
    )
    return _sink("webhook", settings, endpoint=endpoint, request_rows=request_rows)


def amqp(url: str, *, exchange: str = "", routing_key: str | None = None, **settings: Any) -> Sink:
    """Declare a sink that publishes each row as JSON to an exchange of RabbitMQ, at least once. Its
    `message_id` is an id by which consumers can drop repeats. Needs the extra `amqp`.

    Args:
        url: As in `amqp://user@host:5672/`, or where it is stored: `env:NAME` or `file:PATH`.
        exchange: The exchange. The default one sends to the queue named by the routing key.
        routing_key: By default the setting `table`, or the topic's name.
        **settings: As for every sink, see `hr.sinks.sqlite`. `batch_rows` is 1,000 by default: so
            many rows may be sent again after a crash.

    Returns:
        The sink, which opens nothing until it is run.

    Raises:
        InputError: The address or a setting cannot be used.

    Example:
        >>> hr.sinks.amqp("amqp://guest@localhost/", exchange="orders")
    """
    from headrace.amqp import check_url

    settings.setdefault("batch_rows", 1_000)
    return _sink("amqp", settings, url=check_url(url), exchange=exchange, routing_key=routing_key)


@dataclass(frozen=True)
class SinkKind:
    """What the package must know about a built-in kind of sink.

    Attributes:
        declare: The function of `hr.sinks`.
        target: Where what opens the target is found, as `module:name`. It is imported when a sink
            of the kind is run.
        url: The form of its URLs, for messages.
        schemes: The schemes of its URLs; by default the name of the kind.
        may_repeat: Whether the target may get a row again, and so gets marks with the rows.
    """

    declare: Callable[..., Sink]
    target: str
    url: str
    schemes: tuple[str, ...] = ()
    may_repeat: bool = False


KINDS = {
    "sqlite": SinkKind(sqlite, "sqlite_target:SqliteTarget.open", "sqlite:PATH"),
    "parquet": SinkKind(parquet, "parquet_target:ParquetTarget", "parquet:DIRECTORY"),
    "delta": SinkKind(delta, "delta_target:DeltaTarget", "delta:DIRECTORY"),
    "search": SinkKind(search, "search_target:SearchTarget", "search:DIRECTORY"),
    "postgres": SinkKind(
        postgres,
        "postgres_target:PostgresTarget.open",
        "postgresql://USER@HOST/DATABASE",
        schemes=("postgres", "postgresql"),
    ),
    "redis": SinkKind(
        redis, "redis_target:RedisTarget", "redis://HOST", schemes=("redis", "rediss")
    ),
    "amqp": SinkKind(
        amqp, "amqp_target:AmqpTarget", "amqp://HOST", schemes=("amqp", "amqps"), may_repeat=True
    ),
    "webhook": SinkKind(
        webhook, "webhook_target:WebhookTarget", "webhook:https://HOST/PATH", may_repeat=True
    ),
}
"""The built-in kinds of sinks. A new one needs an entry here, and what the entry names."""


def _sink(kind: str, settings: dict[str, Any], **options: Any) -> Sink:
    check_settings(f"hr.sinks.{kind}", settings, _SETTINGS)
    return Sink(
        kind=kind,
        opener=open_target,
        key=as_tuple(settings.pop("key", ())),
        options=options,
        keeps_marks=KINDS[kind].may_repeat,
        **settings,
    )


def open_target(sink: SinkSpec, shape: TargetShape) -> Target:
    """Open the target of a built-in kind, whose driver is imported now."""
    module, _, name = KINDS[sink.kind].target.partition(":")
    opener = attrgetter(name)(import_module(f"headrace.sinks.{module}"))
    return cast("Target", opener(sink, shape))


def from_url(url: str, **settings: Any) -> Sink:
    """Declare the sink that a URL stands for, as `headrace sync` does.

    Args:
        url: `sqlite:PATH`, `parquet:DIRECTORY`, `delta:DIRECTORY`, `search:DIRECTORY`,
            `postgresql://…`, `redis://…`, `amqp://…` or `webhook:https://…`.
        **settings: As for every sink, see `hr.sinks.sqlite`.

    Returns:
        The sink, which opens nothing until it is run.

    Raises:
        InputError: The URL names no sink, or a setting cannot be used.

    Example:
        >>> hr.sinks.from_url("sqlite:shop.db", table="orders")
    """

    def builder(kind: SinkKind) -> Callable[[str], Sink]:
        takes_url = any(kind.url.startswith(f"{scheme}://") for scheme in kind.schemes)
        return lambda url: kind.declare(url if takes_url else without_scheme(url), **settings)

    builders = {
        scheme: builder(kind) for name, kind in KINDS.items() for scheme in kind.schemes or (name,)
    }
    examples = ", ".join(kind.url for kind in KINDS.values())
    return build_from_url(url, builders, what="a sink", examples=examples)
