"""A sink, declared: what `hr.sinks.postgres(…)` and its siblings return. It opens nothing until it
is run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from headrace.durations import to_us
from headrace.errors import InputError, nearest
from headrace.sinks.base import SinkSpec

if TYPE_CHECKING:
    from headrace.log.values import Duration
    from headrace.sinks.base import Shape, Target
    from headrace.sinks.check import Comparison
    from headrace.sinks.sync import SyncStatus


@dataclass(frozen=True)
class Sink(SinkSpec):
    """One place in another system that is kept equal to a topic of the log."""

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
        """Follow a topic in this process until `stop` is set, or until everything that is there now
        has been applied.

        `start_over` empties the target first, and applies the topic from its beginning.
        """
        from headrace.log import open_log
        from headrace.sinks.sync import Syncing

        with open_log(log) as opened:
            Syncing(self, opened, topic, start_over=start_over, on_status=on_status).run(
                stop=stop, until_caught_up=until_caught_up
            )

    def check(self, topic: str, *, log: str) -> Comparison:
        """Compare the target with the topic, key by key, as of what was applied."""
        from headrace.log import open_log
        from headrace.sinks.check import compare

        with open_log(log) as opened:
            return compare(self, opened, topic)


# `hr.sinks.<kind>(…)`: how each kind of sink is declared. Drivers are imported when a sink is
# opened.


_SETTINGS = ("table", "name", "mode", "key", "create", "batch_rows")


def sqlite(path: str | Path, **settings: Any) -> Sink:
    """A table of an SQLite database.

    Settings, as for all sinks: `table` (its name there; the topic's by default), `name` (of the
    sink, for its dead letters), `mode` ("merge" or "append"), `key` (to merge a stream by),
    `create` (whether to make the table, and columns that are missing; true by default),
    `batch_rows` (at most in one commit).
    """
    return _sink("sqlite", _open_sqlite, settings, path=str(path))


def _open_sqlite(sink: SinkSpec, shape: Shape) -> Target:
    from headrace.sinks.sqlite_target import SqliteTarget

    return SqliteTarget(sink, shape)


def postgres(url: str, **settings: Any) -> Sink:
    """A table of a Postgres database (`table` may name a schema: `reports.revenue`). Needs the
    extra `postgres`.
    """
    return _sink("postgres", _open_postgres, settings, url=url)


def _open_postgres(sink: SinkSpec, shape: Shape) -> Target:
    from headrace.sinks.postgres_target import PostgresTarget

    return PostgresTarget(sink, shape)


def redis(url: str, *, encoding: str = "hash", **settings: Any) -> Sink:
    """A key a row in Redis, `TABLE:KEY`: a hash, or with `encoding="json"` a JSON text. Needs the
    extra `redis`.
    """
    if encoding not in {"hash", "json"}:
        raise InputError(
            f"hr.sinks.redis has no encoding {encoding!r}: {nearest(encoding, ['hash', 'json'])}"
        )
    settings.setdefault("batch_rows", 10_000)  # Redis does nothing else meanwhile
    return _sink("redis", _open_redis, settings, url=url, encoding=encoding)


def _open_redis(sink: SinkSpec, shape: Shape) -> Target:
    from headrace.sinks.redis_target import RedisTarget

    return RedisTarget(sink, shape)


def parquet(path: str | Path, *, buckets: int = 16, **settings: Any) -> Sink:
    """A directory of Parquet files (in it a directory `table`, if that is given). A table is spread
    over `buckets` files, of which a commit writes those anew that it touches.
    """
    if not 1 <= buckets <= 10_000:
        raise InputError(
            f"hr.sinks.parquet cannot have {buckets} buckets.", fix="choose from 1 to 10,000."
        )
    return _sink("parquet", _open_parquet, settings, path=str(path), buckets=buckets)


def _open_parquet(sink: SinkSpec, shape: Shape) -> Target:
    from headrace.sinks.parquet_target import ParquetTarget

    return ParquetTarget(sink, shape)


def delta(path: str | Path, **settings: Any) -> Sink:
    """A Delta table (in `path`, or in a directory `table` in it). Needs the extra `delta`."""
    return _sink("delta", _open_delta, settings, path=str(path))


def _open_delta(sink: SinkSpec, shape: Shape) -> Target:
    from headrace.sinks.delta_target import DeltaTarget

    return DeltaTarget(sink, shape)


def search(path: str | Path, **settings: Any) -> Sink:
    """A full-text index in a directory. Needs the extra `search`."""
    return _sink("search", _open_search, settings, path=str(path))


def _open_search(sink: SinkSpec, shape: Shape) -> Target:
    from headrace.sinks.search_index import SearchTarget

    return SearchTarget(sink, shape)


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
    """Each row is posted as JSON, at least once, with an id by which the receiver can drop repeats;
    at most `request_rows` in one request.

    `secret` signs requests; it is named, not written: `env:NAME` or `file:PATH` (by default
    `env:HEADRACE_WEBHOOK_SECRET`, if that is set). Values of `headers` may be named so too.
    Addresses that are not public are refused, unless they are in one of the networks `internal`, or
    of the environment's HEADRACE_WEBHOOK_INTERNAL.
    """
    from headrace.sinks.webhook_target import SECRET_VARIABLE, Receiver

    if not 1 <= request_rows <= 10_000:
        raise InputError(
            f"hr.sinks.webhook cannot send {request_rows} rows in a request.",
            fix="choose from 1 to 10,000.",
        )
    settings.setdefault(
        "batch_rows", max(100, request_rows)
    )  # what may be sent again after a crash
    named = secret or (f"env:{SECRET_VARIABLE}" if os.environ.get(SECRET_VARIABLE) else None)
    receiver = Receiver(
        url,
        named,
        dict(headers or {}),
        to_us(timeout, what="timeout") / 1e6,
        (internal,) if isinstance(internal, str) else tuple(internal),
    )
    return _sink("webhook", _open_webhook, settings, receiver=receiver, request_rows=request_rows)


def _open_webhook(sink: SinkSpec, shape: Shape) -> Target:
    from headrace.sinks.webhook_target import WebhookTarget

    return WebhookTarget(sink, shape)


def amqp(url: str, *, exchange: str = "", routing_key: str | None = None, **settings: Any) -> Sink:
    """Each row is published to an exchange of RabbitMQ as JSON, at least once, and confirmed by the
    broker; its `message_id` is an id by which consumers can drop repeats. Needs the extra `amqp`.

    `url` may be named: `env:NAME` or `file:PATH`. The routing key is the table's name, unless
    another is given; the default exchange sends to the queue of that name.
    """
    from headrace.amqp import check_url

    settings.setdefault("batch_rows", 1_000)  # what may be sent again after a crash
    return _sink(
        "amqp", _open_amqp, settings, url=check_url(url), exchange=exchange, routing_key=routing_key
    )


def _open_amqp(sink: SinkSpec, shape: Shape) -> Target:
    from headrace.sinks.amqp_target import AmqpTarget

    return AmqpTarget(sink, shape)


def _sink(kind: str, opener: Any, settings: dict[str, Any], **options: Any) -> Sink:
    for setting in settings:
        if setting not in _SETTINGS:
            raise InputError(
                f"hr.sinks.{kind} has no setting {setting!r}: {nearest(setting, _SETTINGS)}"
            )
    given = settings.pop("key", ())
    key: Sequence[str] = (given,) if isinstance(given, str) else given
    return Sink(
        kind=kind,
        opener=opener,
        key=tuple(key),
        options=options,
        keeps_marks=kind in {"webhook", "amqp"},
        **settings,
    )


_PATHS: dict[str, Callable[..., Sink]] = {
    "delta": delta,
    "parquet": parquet,
    "search": search,
    "sqlite": sqlite,
}
_SERVERS: dict[str, Callable[..., Sink]] = {
    "postgres": postgres,
    "postgresql": postgres,
    "redis": redis,
    "rediss": redis,
    "amqp": amqp,
    "amqps": amqp,
}
_ADDRESSES: dict[str, Callable[..., Sink]] = {"webhook": webhook}
_EXAMPLES = (
    "sqlite:PATH, parquet:DIRECTORY, delta:DIRECTORY, search:DIRECTORY,"
    " postgresql://USER@HOST/DATABASE, redis://HOST, amqp://HOST, webhook:https://HOST/PATH"
)


def from_url(url: str, **settings: Any) -> Sink:
    """The sink that a URL stands for: `sqlite:shop.db`."""
    kind = urlsplit(url).scheme
    if kind in _PATHS:
        return _PATHS[kind](url.removeprefix(f"{kind}:").removeprefix("//"), **settings)
    if kind in _ADDRESSES:
        return _ADDRESSES[kind](url.removeprefix(f"{kind}:"), **settings)
    if kind in _SERVERS:
        return _SERVERS[kind](url, **settings)
    raise InputError(
        f"{kind + ':' if kind else url!r} is no sink:"
        f" {nearest(kind, [*_PATHS, *_SERVERS, *_ADDRESSES])}",
        fix=f"give {_EXAMPLES}.",
    )
