"""The sinks that users declare: `hr.sinks.postgres(…)` and its siblings return a `Sink`.

Declaring opens nothing. The driver of a target is imported when the sink is run. To write a sink of
your own, see `headrace.sinks.base`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from headrace.connector import (
    PluginGroup,
    as_tuple,
    build_from_url,
    check_settings,
    without_scheme,
)
from headrace.durations import to_us
from headrace.errors import InputError, nearest
from headrace.secrets import is_named
from headrace.sinks.base import SinkSpec
from headrace.sinks.batch import APPEND

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


_SETTINGS = ("table", "name", "mode", "key", "create", "batch_rows", "commit_interval")
_LAKE_COMMIT_INTERVAL = "10 seconds"
"""By default, for targets in which every commit adds files that are small."""


def sqlite(path: str | Path, **settings: Any) -> Sink:
    """Declare a sink to a table of an SQLite database.

    Args:
        path: The database file. It is created if it is missing.
        **settings: As for every sink. `table`: what the target is called; by default as the topic.
            `name`: of the sink, for its dead letters; by default `<topic>.<kind>`. `mode`: "merge"
            (one row a key; the default for tables) or "append" (every row once). `key`: the columns
            to merge a stream by. `create`: whether a missing table or column is created; true by
            default. `batch_rows`: the most rows in one commit. `commit_interval`: how long a sink
            that has caught up waits after a commit, such as "10 seconds", so that there are fewer
            and larger ones.

    Returns:
        The sink, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> hr.sinks.sqlite("shop.db", table="orders").run("orders", log="file:data")
    """
    return _sink("sqlite", settings, path=_local_path("sqlite", path))


def _local_path(kind: str, path: str | Path) -> str:
    """Return a path of this machine as a text.

    Raises:
        InputError: It is the URL of something else, of which a directory would be made.
    """
    if "://" in str(path):
        raise InputError(
            f"hr.sinks.{kind} cannot write to {path}: it needs a path of this machine.",
            fix="give a path. Parquet, Delta and Iceberg sinks write to object stores.",
        )
    return str(path)


def duckdb(path: str | Path, **settings: Any) -> Sink:
    """Declare a sink to a table of a DuckDB database file.

    Args:
        path: The database file. It is created if it is missing, and open only while a batch is
            applied, so that others can read it in between.
        **settings: As for every sink, see `hr.sinks.sqlite`. `commit_interval` is 1 second by
            default.

    Returns:
        The sink, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> hr.sinks.duckdb("reports.duckdb", table="orders").run("orders", log="file:data")
    """
    settings.setdefault("commit_interval", "1 second")
    return _sink("duckdb", settings, path=_local_path("duckdb", path))


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


def mysql(url: str, **settings: Any) -> Sink:
    """Declare a sink to a table of a MariaDB or MySQL database. Needs the extra `mysql`.

    Args:
        url: As in `mysql://user@host/database` or `mariadb://user@host/database`.
        **settings: As for every sink, see `hr.sinks.sqlite`. `table` may name another database of
            the server: `reports.revenue`.

    Returns:
        The sink, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> hr.sinks.mysql("mysql://app@db/shop", table="reports.orders")
    """
    return _sink("mysql", settings, url=url)


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


def parquet(
    path: str | Path,
    *,
    buckets: int | None = None,
    partition_by: str | Sequence[str] = (),
    **settings: Any,
) -> Sink:
    """Declare a sink to Parquet files, in a directory or in an object store.

    Args:
        path: The directory; or `s3://bucket/prefix`, `gs://…` or `az://…`, which need the extra
            `objectstore`. With the setting `table`, the files are in a directory of that name in
            it.
        buckets: In merge mode, over how many files the rows of a partition are spread by their key.
            A commit rewrites those that it touches. By default 16; with `partition_by`, 1.
        partition_by: Columns whose values name folders, such as `dt=2026-03-01`, as in Hive. The
            files do not have these columns.
        **settings: As for every sink, see `hr.sinks.sqlite`. `commit_interval` is 10 seconds by
            default in an object store.

    Returns:
        The sink, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> hr.sinks.parquet("s3://lake", table="orders", partition_by="dt", mode="append")
    """
    columns = as_tuple(partition_by)
    if buckets is None:
        buckets = 1 if columns else 16
    if not 1 <= buckets <= 10_000:
        raise InputError(
            f"hr.sinks.parquet cannot have {buckets} buckets.", fix="choose from 1 to 10,000."
        )
    if len(set(columns)) < len(columns):
        raise InputError(f"partition_by names a column twice: {', '.join(columns)}.")
    place = _place_of_files("parquet", path)
    if "://" in place:
        settings.setdefault("commit_interval", _LAKE_COMMIT_INTERVAL)
    return _sink("parquet", settings, path=place, buckets=buckets, partition_by=columns)


_OBJECT_STORES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")


def _place_of_files(kind: str, path: str | Path) -> str:
    """Return a directory, or the URL of an object store."""
    place = str(path)
    scheme, separator, rest = place.partition(":")
    if scheme == "file":
        return rest.removeprefix("//")
    if not separator or not rest.startswith("/") or not scheme.isalnum():
        return place
    if scheme in _OBJECT_STORES and rest.startswith("//"):
        return place
    if isinstance(path, Path):
        raise InputError(
            f"{place!r} is a URL as a Path, which leaves out a slash.", fix="pass it as a text."
        )
    stores = ", ".join(f"{name}://" for name in _OBJECT_STORES)
    raise InputError(
        f"hr.sinks.{kind} cannot write to {scheme}: {nearest(scheme, _OBJECT_STORES)}",
        fix=f"give a directory, or one of {stores}. Mount other file systems as directories.",
    )


def delta(path: str | Path, **settings: Any) -> Sink:
    """Declare a sink to a Delta table. Needs the extra `delta`.

    Args:
        path: The table's directory, or a URL such as `s3://bucket/prefix`; with the setting
            `table`, a directory of that name in it.
        **settings: As for every sink, see `hr.sinks.sqlite`. `commit_interval` is 10 seconds by
            default in an object store.

    Returns:
        The sink, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> hr.sinks.delta("lake", table="orders")
    """
    place = _place_of_files("delta", path)
    if "://" in place:
        settings.setdefault("commit_interval", _LAKE_COMMIT_INTERVAL)
    return _sink("delta", settings, path=place)


def iceberg(
    catalog: str = "default",
    *,
    namespace: str = "headrace",
    properties: Mapping[str, str] | None = None,
    partition_by: str | Sequence[str] = (),
    **settings: Any,
) -> Sink:
    """Declare a sink to a table of an Iceberg catalogue. Needs the extra `iceberg`.

    Args:
        catalog: The name of the catalogue, which `~/.pyiceberg.yaml` or the environment configures,
            as in `PYICEBERG_CATALOG__LAKE__URI`.
        namespace: The table's namespace; `a.b` is one in another.
        properties: The catalogue's properties, instead of its configuration, or in addition.
        partition_by: Columns by whose values a table is partitioned that the sink creates.
        **settings: As for every sink, see `hr.sinks.sqlite`. `commit_interval` is 10 seconds by
            default.

    Returns:
        The sink, which opens nothing until it is run.

    Raises:
        InputError: A setting is unknown or has an impossible value.

    Example:
        >>> hr.sinks.iceberg("lake", namespace="shop", table="orders")
    """
    if not catalog or not all(namespace.split(".")):
        raise InputError(
            f"hr.sinks.iceberg needs a catalogue and a namespace, not {catalog!r} and"
            f" {namespace!r}.",
            fix="give both, as in iceberg:CATALOG/NAMESPACE.",
        )
    settings.setdefault("commit_interval", _LAKE_COMMIT_INTERVAL)
    return _sink(
        "iceberg",
        settings,
        catalog=catalog,
        namespace=namespace,
        properties=dict(properties or {}),
        partition_by=as_tuple(partition_by),
    )


def _iceberg_from_url(place: str, **settings: Any) -> Sink:
    catalog, separator, namespace = place.partition("/")
    return iceberg(catalog, namespace=namespace if separator else "headrace", **settings)


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
    return _sink("search", settings, path=_local_path("search", path))


def elasticsearch(
    url: str, *, headers: Mapping[str, str] | None = None, ca: str | None = None, **settings: Any
) -> Sink:
    """Declare a sink to an index of Elasticsearch, by its bulk API.

    Args:
        url: As in `https://user:password@host:9200`, or where it is stored: `env:NAME` or
            `file:PATH`.
        headers: Further headers, such as `Authorization`. Values may be `env:NAME` or `file:PATH`.
        ca: A file with the certificates to trust, in PEM format; by default those of the system.
        **settings: As for every sink, see `hr.sinks.sqlite`. `table` is the index, or an alias of
            one. `commit_interval` is 1 second by default.

    Returns:
        The sink, which opens nothing until it is run.

    Raises:
        InputError: The address or a setting cannot be used.

    Example:
        >>> hr.sinks.elasticsearch("https://localhost:9200", headers={"Authorization": "env:ES"})
    """
    return _search_server("elasticsearch", url, headers, ca, settings)


def opensearch(
    url: str, *, headers: Mapping[str, str] | None = None, ca: str | None = None, **settings: Any
) -> Sink:
    """Declare a sink to an index of OpenSearch, by its bulk API.

    Args:
        url: As in `https://user:password@host:9200`, or where it is stored: `env:NAME` or
            `file:PATH`.
        headers: Further headers, such as `Authorization`. Values may be `env:NAME` or `file:PATH`.
        ca: A file with the certificates to trust, in PEM format; by default those of the system.
        **settings: As for every sink, see `hr.sinks.sqlite`. `table` is the index, or an alias of
            one. `commit_interval` is 1 second by default.

    Returns:
        The sink, which opens nothing until it is run.

    Raises:
        InputError: The address or a setting cannot be used.

    Example:
        >>> hr.sinks.opensearch("https://localhost:9200", headers={"Authorization": "env:AUTH"})
    """
    return _search_server("opensearch", url, headers, ca, settings)


def _search_server(
    kind: str,
    url: str,
    headers: Mapping[str, str] | None,
    ca: str | None,
    settings: dict[str, Any],
) -> Sink:
    if not is_named(url):
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise InputError(
                f"hr.sinks.{kind} needs the address of a server.",
                fix="write https://HOST:9200, or say where it is stored: env:NAME or file:PATH.",
            )
    settings.setdefault("commit_interval", "1 second")
    return _sink(kind, settings, url=url, headers=dict(headers or {}), ca=ca)


def mirror(log: str, **settings: Any) -> Sink:
    """Declare a sink to a topic of another log: the same rows, in the same partitions, at the same
    offsets, with their headers.

    Args:
        log: The address of the other log, an embedded one: `file:DIRECTORY`.
        **settings: As for every sink, see `hr.sinks.sqlite`. `table` is the topic there, by default
            of the same name. There is no `mode` and no `key`: every row is copied as it is.

    Returns:
        The sink, which opens nothing until it is run.

    Raises:
        InputError: The address or a setting cannot be used.

    Example:
        >>> hr.sinks.mirror("file:/mnt/standby").run("orders", log="file:data")
    """
    if not log.startswith("file:"):
        raise InputError(
            f"hr.sinks.mirror cannot write to {log}: offsets can be kept in an embedded log alone.",
            fix="give file:DIRECTORY.",
        )
    for setting in ("mode", "key"):
        if settings.get(setting):
            raise InputError(
                f"hr.sinks.mirror has no {setting}: every row is copied as it is.",
                fix="leave it out.",
            )
    return replace(_sink("mirror", settings, log=log), mode=APPEND, keeps_all=True)


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
        declare: The function of `hr.sinks`, or one that takes what follows the scheme of a URL.
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
    "parquet": SinkKind(
        parquet, "files.parquet_target:ParquetTarget", "parquet:DIRECTORY (or parquet:s3://…)"
    ),
    "delta": SinkKind(delta, "delta_target:DeltaTarget", "delta:DIRECTORY"),
    "iceberg": SinkKind(
        _iceberg_from_url, "iceberg_target:IcebergTarget", "iceberg:CATALOG/NAMESPACE"
    ),
    "mirror": SinkKind(mirror, "mirror_target:MirrorTarget", "mirror:file:DIRECTORY"),
    "elasticsearch": SinkKind(
        elasticsearch,
        "elasticsearch_target:ElasticsearchTarget",
        "elasticsearch:https://HOST:9200",
    ),
    "opensearch": SinkKind(
        opensearch, "elasticsearch_target:ElasticsearchTarget", "opensearch:https://HOST:9200"
    ),
    "search": SinkKind(search, "search_target:SearchTarget", "search:DIRECTORY"),
    "duckdb": SinkKind(duckdb, "duckdb_target:DuckdbTarget", "duckdb:PATH"),
    "postgres": SinkKind(
        postgres,
        "postgres_target:PostgresTarget.open",
        "postgresql://USER@HOST/DATABASE",
        schemes=("postgres", "postgresql"),
    ),
    "mysql": SinkKind(
        mysql,
        "mysql_target:MysqlTarget.open",
        "mysql://USER@HOST/DATABASE",
        schemes=("mysql", "mariadb"),
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
    interval = settings.pop("commit_interval", None)
    return Sink(
        kind=kind,
        opener=open_target,
        key=as_tuple(settings.pop("key", ())),
        options=options,
        keeps_marks=KINDS[kind].may_repeat,
        commit_interval_s=to_us(interval, what="commit_interval") / 1e6 if interval else 0.0,
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
        url: `sqlite:PATH`, `duckdb:PATH`, `parquet:DIRECTORY`, `parquet:s3://BUCKET/PREFIX`,
            `delta:DIRECTORY`, `iceberg:CATALOG/NAMESPACE`, `search:DIRECTORY`,
            `mirror:file:DIRECTORY`, `postgresql://…`, `mysql://…`, `redis://…`,
            `elasticsearch:https://…`, `opensearch:https://…`, `amqp://…` or `webhook:https://…`; or
            another scheme that an installed package handles, by an entry point of the group
            `headrace.sinks`.
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
    return build_from_url(
        url,
        builders,
        plugins=PluginGroup("headrace.sinks", Sink),
        settings=settings,
        what="a sink",
        examples=examples,
    )
