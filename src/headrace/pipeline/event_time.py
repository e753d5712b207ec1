"""`hr.EventTime`: which column says when a row happened, how far rows may be out of order, and who produces them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import pyarrow as pa

from headrace.durations import format_us, to_us
from headrace.errors import PlanError, UnknownColumn
from headrace.log.schema import type_name


@dataclass(frozen=True, init=False)
class EventTime:
    """Event time of a topic. Within a producer, rows come at most `delay` out of order.

    A producer silent for longer than `idle` of tick time no longer holds time back. A row whose time is more than `most_ahead` ahead of its
    tick's time does not move the clock: it is diverted and counted.
    """

    column: str
    delay_us: int = 0
    producer: str | None = None
    idle_us: int = 60_000_000
    most_ahead_us: int = 86_400_000_000
    delay_given: bool = False
    """Whether a delay was named: a table's clock follows the ticks unless its event time names a delay or a producer."""

    def __init__(
        self,
        column: str,
        *,
        delay: str | timedelta | None = None,
        producer: str | None = None,
        idle: str | timedelta = "1 minute",
        most_ahead: str | timedelta = "1 day",
    ) -> None:
        values = {
            "column": column,
            "delay_us": 0 if delay is None else to_us(delay, what=f"delay of the event time {column!r}"),
            "producer": producer,
            "idle_us": to_us(idle, what=f"idle time of the event time {column!r}"),
            "most_ahead_us": to_us(most_ahead, what=f"most_ahead of the event time {column!r}"),
            "delay_given": delay is not None,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def check(self, schema: pa.Schema, *, where: str) -> None:
        """That the columns are there and that the one with the time holds times."""
        for name in (self.column, self.producer):
            if name is not None and name not in schema.names:
                raise UnknownColumn(name, schema.names, where=where)
        kind = schema.field(self.column).type
        if not pa.types.is_timestamp(kind):
            raise PlanError(
                f"{where} has the event time {self.column!r}, which is {type_name(kind)} and no time.", fix="name a column of type TIMESTAMP."
            )
        if self.producer is not None and pa.types.is_nested(schema.field(self.producer).type):
            raise PlanError(
                f"{where} has the producer column {self.producer!r}, which is nested.", fix="name a column of a plain type, such as STRING or BIGINT."
            )

    def __str__(self) -> str:
        parts = [self.column, f"delay {format_us(self.delay_us)}"]
        if self.producer is not None:
            parts.append(f"producer {self.producer}")
        return ", ".join([*parts, f"idle {format_us(self.idle_us)}"])


@dataclass(frozen=True)
class ProcessingTime:
    """The time of the tick that a row was taken in with, as a column of its own. The clock follows the ticks, so nothing is ever late."""

    column: str = "processed_at"

    def check(self, schema: pa.Schema, *, where: str) -> None:
        if self.column in schema.names:
            raise PlanError(f"{where} has a column {self.column!r} already.", fix='name another: hr.processing_time(column="taken_in_at").')

    def __str__(self) -> str:
        return f"{self.column}, the time of processing"


def processing_time(column: str = "processed_at") -> ProcessingTime:
    """For `event_time=`: rows happen when they are processed. They get a column with that time."""
    return ProcessingTime(column)
