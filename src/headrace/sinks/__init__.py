"""Exactly-once outputs, and the ledger that decides what happened. `hr.sinks` are other systems
that follow a topic:

    orders = hr.sinks.sqlite("shop.db", table="orders")
    orders.run("orders", log="file:data")        # or: headrace sync orders sqlite:shop.db

Each function declares a sink (`declared.Sink`) and opens nothing. `docs/edges/sinks.md` says what
is promised.
"""

from __future__ import annotations

from headrace.sinks.declaration import (
    Sink,
    amqp,
    delta,
    from_url,
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
    "from_url",
    "parquet",
    "postgres",
    "redis",
    "search",
    "sqlite",
    "webhook",
]
