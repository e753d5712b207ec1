"""What the log of a golden directory has besides the shop: a topic of every type, a table, an
idempotent producer, transactions, consumer groups, a queue, a compacted topic, dead letters and an
event store.

Shared by the script that writes it and the test that reads it; nothing here may change as long as a
golden directory was made with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from math import inf
from typing import Any

import headrace as hr
from headrace.events import Decider, Event, RecordedEvent, open_store
from tests.golden.shop import Row, plain

# A topic of every type

TYPES = """id STRING NOT NULL, flag BOOLEAN, tiny TINYINT, small SMALLINT, whole INT, big BIGINT,
    single FLOAT, double DOUBLE, money DECIMAL(20,4), label STRING, code CHAR(3), short VARCHAR(5),
    bytes BINARY, day DATE, clock TIME(6), moment TIMESTAMP, wall TIMESTAMP_NTZ,
    span INTERVAL DAY TO SECOND, loose VARIANT, list ARRAY<STRING>,
    nested STRUCT<id: BIGINT NOT NULL, tags: ARRAY<STRUCT<name: STRING, at: TIMESTAMP>>,
    price: DECIMAL(5,2)>,
    by_name MAP<STRING, DOUBLE>, by_number MAP<INT, BINARY>"""
_FULL: Row = {
    "flag": True,
    "tiny": -128,
    "small": 32767,
    "whole": -(2**31),
    "big": 2**63 - 1,
    "single": 0.5,
    "double": 0.1,
    "money": Decimal("-1234567890123456.7891"),
    "label": 'quote " backslash \\ newline \n null \x00 ünïcödé 🌊',
    "code": "abc",
    "short": "",
    "bytes": bytes(range(256)),
    "day": date(1969, 12, 31),
    "clock": time(23, 59, 59, 999999),
    "moment": datetime(2026, 2, 28, 23, 59, 59, 999999, tzinfo=UTC),
    "wall": datetime.fromisoformat("0001-01-01T00:00:00.000001"),
    "span": timedelta(days=-3, microseconds=5),
    "loose": {"value": b"\x0c\x07", "metadata": b"\x01\x00\x00"},
    "list": ["a", None, ""],
    "nested": {
        "id": 7,
        "tags": [
            {"name": "x", "at": datetime(2026, 1, 1, tzinfo=UTC)},
            {"name": None, "at": None},
            None,
        ],
        "price": Decimal("1.50"),
    },
    "by_name": [("one", 1.0), ("none", None)],
    "by_number": [(1, b"\x00\xff"), (2, None)],
}
EMPTY: Row = dict.fromkeys(_FULL)
_ZERO: Row = {
    **_FULL,
    "flag": False,
    "tiny": 0,
    "single": -inf,
    "double": inf,
    "label": "",
    "bytes": b"",
    "list": [],
    "by_name": [],
    "nested": {"id": 0, "tags": [], "price": None},
}
TYPED: list[Row] = [{"id": f"k{n}", **(_FULL, EMPTY, _ZERO)[n % 3]} for n in range(9)]
"""Rows for the topic `typed`, which has three partitions."""
HEADERS: list[list[tuple[str, bytes | None]]] = [
    [("n", b"%d" % n), ("none", None)] if n % 2 else [] for n in range(9)
]


def sale(number: int) -> Row:
    """A row of the topic `sales`, before it had a note."""
    return {"sale": number, "till": f"till-{number % 2}", "cents": number * 100}


def email(number: int) -> Row:
    """A row of the topic `emails`, which is used as a queue."""
    return {"recipient": f"r{number}@example.com", "body": f"Hello {number}"}


# An event store


@dataclass(frozen=True)
class Deposited:
    """Money that came."""

    amount: int


@dataclass(frozen=True)
class Withdrawn:
    """Money that went."""

    amount: int


@dataclass(frozen=True)
class Account:
    """The state of an account."""

    balance: int = 0


OPENED = Event("Opened", {"by": "ada", "tags": [1, None, "ü"]}, id="3f2a", subject="ada")
"""The first event of `cart-1`, which is appended without a decider."""


def accounts(folded: list[Any]) -> Decider[Account]:
    """A decider with a snapshot every four events. It adds each event that it folds to `folded`."""

    def decide(amount: int, _account: Account) -> list[Deposited | Withdrawn]:
        return [Deposited(amount) if amount > 0 else Withdrawn(-amount)]

    def evolve(account: Account, event: Deposited | Withdrawn) -> Account:
        folded.append(event)
        change = event.amount if isinstance(event, Deposited) else -event.amount
        return replace(account, balance=account.balance + change)

    return Decider(
        "account", Account(), decide, evolve, events=(Deposited, Withdrawn), snapshot_every=4
    )


# How it is read


_SETTINGS = (
    "schema", "key", "partitions", "is_table", "retention_us", "retention_bytes", "compact",
    "history_us", "tombstone_us", "segment_bytes", "segment_us", "compression", "id",
)  # fmt: skip


def contents(log: hr.Log) -> Any:
    """Every topic with its settings, rows and offsets, and the notes and groups."""
    names = [name for name in log.topics() if not name.startswith("__")]
    return plain({
        "names": log.topics(),
        "topics": {name: _settings(log.topic(name)) for name in names},
        "rows": {name: log.read(name, headers=True).to_pylist() for name in names},
        "ends": {name: log.end_offsets(name) for name in names},
        "starts": {name: log.start_offsets(name) for name in names},
        "groups": {name: log.committed(name) for name in log.groups()},
        "notes": {name: log.note(name) for name in ("moved", "gone")},
    })  # fmt: skip


def _settings(topic: hr.TopicInfo) -> dict[str, Any]:
    return {name: getattr(topic, name) for name in _SETTINGS}


_SINCE = {"correlation_id", "causation_id", "metadata"}
"""Fields that events of the recorded format do not have: they must read as None."""


def _event_fields(event: RecordedEvent) -> dict[str, Any]:
    return {
        name: value
        for name, value in event._asdict().items()
        if name not in _SINCE or value is not None
    }


def event_contents(log: hr.Log) -> Any:
    """Every event of the store, by entity and in the global order."""
    with open_store(log, "bank") as store:
        entities = store.entities()
        loaded = {
            name: [_event_fields(event) for event in store.load(name)] for name, _ in entities
        }
        return plain(
            {
                "entities": entities,
                "loaded": loaded,
                "all": [_event_fields(event) for event in store.read()],
            }
        )
