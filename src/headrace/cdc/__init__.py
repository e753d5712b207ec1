"""Change capture: tables of a database become tables of the log, complete, in order, with
transactions kept whole. `hr.cdc`.

    shop = hr.cdc.sqlite("shop.db", tables=["customers", "orders"], log="file:data")
    shop.run()                                    # or: headrace capture shop.py

In the order in which changes flow:

- `declaration`: what users call, and `Capture`, which it returns.
- `postgres_source`, `mysql_source`, `sqlite_source`, `debezium_source`, `polling_source`: the
  databases, each of which delivers its stream of changes in parts.
- `base`: what a source is, the items of its stream, and how to write another one.
- `capture`: the loop that moves parts from the source to the log and confirms them; snapshots.
- `selection`: which columns and rows of a table its topic has.
- `row_counts`: tables without a key, whose equal rows are counted.
- `writer`: the log's side: one transaction with rows and position.
- `state`: the note with the position and the snapshots' progress, and requests for snapshots.
- `topics`: the topics of captured tables, their columns, and `fold`, which reads them back.

`headrace.connector` has what captures share with gateways and sinks.
`docs/concepts/change-capture.md` says what is promised.
"""

from __future__ import annotations

from headrace.cdc.declaration import (
    Capture,
    debezium,
    from_url,
    mariadb,
    mysql,
    polling,
    postgres,
    sqlite,
)
from headrace.cdc.topics import fold

__all__ = [
    "Capture",
    "debezium",
    "fold",
    "from_url",
    "mariadb",
    "mysql",
    "polling",
    "postgres",
    "sqlite",
]
