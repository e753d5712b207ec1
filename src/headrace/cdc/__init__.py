"""Change capture: tables of a database become tables' topics of the log, complete, in order, with
transactions kept whole. `hr.cdc`.

    shop = hr.cdc.sqlite("shop.db", tables=["customers", "orders"], log="file:data")
    shop.run()                                    # or: headrace capture shop.py

Each function declares a capture (`declared.Capture`) and opens nothing.
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
