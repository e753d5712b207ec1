"""What a gateway hands to the log: deliveries, each of which is stored, refused or dropped as a whole, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import pyarrow as pa


@dataclass(frozen=True)
class Lines:
    """Rows as JSON objects, one a value."""

    values: list[bytes]


@dataclass(frozen=True)
class Parsed:
    """Rows of one JSON array, as a parser gave them."""

    values: list[Any]


@dataclass(frozen=True)
class Plain:
    """Rows by column name, as Python has them: a body as it came, with what is known of it. What the topic has no column for is left out."""

    values: list[Mapping[str, Any]]


@dataclass(frozen=True)
class Columns:
    """Rows that are Arrow data already. A delivery of StatsD's stands for more values than it has rows."""

    batch: pa.RecordBatch


Content: TypeAlias = Lines | Parsed | Plain | Columns


class Fate(StrEnum):
    """Every row that came has one of these, or still waits."""

    stored = "stored"
    repeated = "repeated"
    """It is in the topic already, under the same id."""
    dropped = "dropped"
    refused = "refused"


@dataclass(frozen=True)
class Outcome:
    """What became of a delivery. `reason` is a few words that are counted; `message` says it to whoever sent it."""

    fate: Fate
    reason: str = ""
    message: str = ""
    position: str = ""
    passing: bool = False
    """Whether the same delivery may be taken later."""


def _nobody(_outcome: Outcome) -> None:
    pass


@dataclass
class Delivery:
    """One request, one message, or the values of some packets. `rows` are those it takes room for."""

    topic: str
    content: Content
    rows: int
    size: int
    received_us: int
    id: str | None = None
    payload: bytes | None = None
    """What came, for a dead letter if it cannot be used; None where the sender is told instead."""
    stands_for: int | None = None
    """How many it counts as, if not its rows: values of metrics that were put together."""
    done: Callable[[Outcome], None] = field(default=_nobody, repr=False)

    @property
    def counted(self) -> int:
        return self.rows if self.stands_for is None else self.stands_for
