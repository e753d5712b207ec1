"""Sinks: other systems that follow a topic of the log. `hr.sinks`.

    orders = hr.sinks.sqlite("shop.db", table="orders")
    orders.run("orders", log="file:data")        # or: headrace sync orders sqlite:shop.db

In the order in which rows flow:

- `declaration`: what users call, and `Sink`, which it returns.
- `sync`: the loop that follows a topic and applies batches; dead letters.
- `topic_follower`: reads the topic in slices of bounded size.
- `batch`: a slice in the form in which it is applied, one change a key.
- `base`: what a target is, the protocol of a commit, and how to write a sink.
- `checkpoint`: offsets and owner, stored in the target in the same commit as the rows.
- `sqlite_target`, `duckdb_target`, `postgres_target`, `mysql_target`, `redis_target`,
  `delta_target`, `iceberg_target`, `search_target`, and `files` with `parquet_target`: targets that
  apply each row exactly once.
- `mirror_target`: a topic of another log, with the same offsets.
- `elasticsearch_target`: exactly once as well, by versions, though a batch is no transaction.
- `at_least_once`, with `webhook_target` and `amqp_target`: targets that may get a row again.
- `check`: compares a target with its topic, for `Sink.check`.

`headrace.connector` has what sinks share with captures and gateways. Views, which a pipeline writes
itself, are in `headrace.views`. `docs/edges/sinks.md` says what is promised.
"""

from __future__ import annotations

from headrace.sinks.declaration import (
    Sink,
    amqp,
    delta,
    duckdb,
    elasticsearch,
    from_url,
    iceberg,
    mirror,
    mysql,
    opensearch,
    parquet,
    postgres,
    redis,
    search,
    sqlite,
    webhook,
)

__all__ = [
    "Sink",
    "amqp",
    "delta",
    "duckdb",
    "elasticsearch",
    "from_url",
    "iceberg",
    "mirror",
    "mysql",
    "opensearch",
    "parquet",
    "postgres",
    "redis",
    "search",
    "sqlite",
    "webhook",
]
