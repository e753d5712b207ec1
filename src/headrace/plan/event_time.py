"""`hr.EventTime`: which column says when a row happened, how far rows may be out of order, and who
produces them. Where no column says so, there is `hr.device_time` for devices whose clocks are
wrong, and `hr.processing_time`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import pyarrow as pa

from headrace.durations import format_us, to_us
from headrace.errors import PlanError, UnknownColumn
from headrace.operators.windows.late import LONGEST_US
from headrace.types.schema import type_name


@dataclass(frozen=True, init=False)
class EventTime:
    """Event time of a topic. Within a producer, rows come at most `delay` out of order.

    A producer silent for longer than `idle` of tick time no longer holds time back. A row whose
    time is more than `max_ahead` ahead of its tick's time does not move the clock: it is diverted
    and counted.
    """

    column: str
    delay_us: int = 0
    producer: str | None = None
    idle_us: int = 60_000_000
    max_ahead_us: int = 86_400_000_000
    delay_given: bool = False
    """Whether a delay was named: a table's clock follows the ticks unless its event time names a
    delay or a producer.
    """

    def __init__(
        self,
        column: str,
        *,
        delay: str | timedelta | None = None,
        producer: str | None = None,
        idle: str | timedelta = "1 minute",
        max_ahead: str | timedelta = "1 day",
    ) -> None:
        values = {
            "column": column,
            "delay_us": (
                0 if delay is None else _bounded_us(delay, f"delay of the event time {column!r}")
            ),
            "producer": producer,
            "idle_us": _bounded_us(idle, f"idle time of the event time {column!r}"),
            "max_ahead_us": _bounded_us(max_ahead, f"max_ahead of the event time {column!r}"),
            "delay_given": delay is not None,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def check(self, schema: pa.Schema, *, where: str) -> None:
        """That the columns are there and that the one with the time holds times."""
        for name in (self.column, self.producer):
            if name is not None and name not in schema.names:
                raise UnknownColumn(name, schema.names, where=where)
        _check_time(schema.field(self.column), f"{where} has the event time")
        if self.producer is not None:
            _check_plain(schema.field(self.producer), f"{where} has the producer column")

    def added(self, schema: pa.Schema) -> list[pa.Field]:  # noqa: ARG002
        """The columns that are not in the topic, but come with its rows."""
        return []

    def __str__(self) -> str:
        parts = [self.column, f"delay {format_us(self.delay_us)}"]
        if self.producer is not None:
            parts.append(f"producer {self.producer}")
        return ", ".join([*parts, f"idle {format_us(self.idle_us)}"])


@dataclass(frozen=True, init=False)
class DeviceTime(EventTime):
    """The time of a row by a clock that is put right: `column` and `flag` are added to the topic's
    columns. Each device is a producer.
    """

    event: str = ""
    sent: str = ""
    received: str = ""
    device: str = ""
    flag: str = "time_flag"
    tolerance_us: int = 60_000_000

    def __init__(
        self,
        *,
        event: str,
        sent: str,
        received: str,
        device: str,
        delay: str | timedelta | None,
        idle: str | timedelta,
        max_ahead: str | timedelta,
        tolerance: str | timedelta,
        column: str,
        flag: str,
    ) -> None:
        super().__init__(column, delay=delay, producer=device, idle=idle, max_ahead=max_ahead)
        tolerance_us = _bounded_us(tolerance, f"tolerance of the event time {column!r}")
        if not tolerance_us:
            raise PlanError(
                f"The tolerance of the event time {column!r} is zero.",
                fix="give more than zero, such as the 1 minute it is by default.",
            )
        values = {
            "event": event,
            "sent": sent,
            "received": received,
            "device": device,
            "flag": flag,
            "tolerance_us": tolerance_us,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def check(self, schema: pa.Schema, *, where: str) -> None:
        for name in (self.event, self.sent, self.received, self.device):
            if name not in schema.names:
                raise UnknownColumn(name, schema.names, where=where)
        for name in (self.event, self.sent, self.received):
            _check_time(schema.field(name), f"{where} has the device's time")
        _check_plain(schema.field(self.device), f"{where} has the device column")
        taken = {name.lower() for name in schema.names}
        for name in (self.column, self.flag):
            if name.lower() in taken:
                raise PlanError(
                    f"{where} has a column {name!r} already.",
                    fix=(
                        'give others with hr.device_time(…, column="happened_at",'
                        ' flag="time_flag").'
                    ),
                )
            taken.add(name.lower())

    def added(self, schema: pa.Schema) -> list[pa.Field]:
        return [
            pa.field(self.column, schema.field(self.event).type),
            pa.field(self.flag, pa.string()),
        ]

    def __str__(self) -> str:
        return (
            f"{super().__str__()}, from {self.event}, {self.sent} and {self.received} with"
            f" tolerance {format_us(self.tolerance_us)}"
        )


def device_time(
    *,
    event: str,
    sent: str,
    received: str,
    device: str,
    delay: str | timedelta | None = None,
    idle: str | timedelta = "1 minute",
    max_ahead: str | timedelta = "1 day",
    tolerance: str | timedelta = "1 minute",
    column: str = "event_time",
    flag: str = "time_flag",
) -> DeviceTime:
    """For `event_time=`: when rows happened, though the devices' clocks are wrong.

    `event` and `sent` name the columns with the times at which a row happened and was sent by its
    device's clock, `received` the one by yours; `device` who sent it. From those the device's
    offset is learned, smoothed tick by tick, and the corrected time is in the column `column`. A
    row that lies more than `tolerance` off what its device's clock was, or lacks a time, says so in
    `flag`, which is null otherwise; such rows are counted.
    """
    return DeviceTime(
        event=event,
        sent=sent,
        received=received,
        device=device,
        delay=delay,
        idle=idle,
        max_ahead=max_ahead,
        tolerance=tolerance,
        column=column,
        flag=flag,
    )


@dataclass(frozen=True)
class ProcessingTime:
    """The time of the tick that a row was taken in with, as a column of its own. The clock follows
    the ticks, so nothing is ever late.
    """

    column: str = "processed_at"

    def check(self, schema: pa.Schema, *, where: str) -> None:
        if self.column in schema.names:
            raise PlanError(
                f"{where} has a column {self.column!r} already.",
                fix='name another: hr.processing_time(column="taken_in_at").',
            )

    def added(self, schema: pa.Schema) -> list[pa.Field]:  # noqa: ARG002
        return [pa.field(self.column, pa.timestamp("us", "UTC"))]

    def __str__(self) -> str:
        return f"{self.column}, the time of processing"


def processing_time(column: str = "processed_at") -> ProcessingTime:
    """For `event_time=`: rows happen when they are processed. They get a column with that time."""
    return ProcessingTime(column)


def _check_time(field: pa.Field, what: str) -> None:
    if not pa.types.is_timestamp(field.type):
        raise PlanError(
            f"{what} {field.name!r}, which is {type_name(field.type)} and no time.",
            fix="name a column of type TIMESTAMP.",
        )


def _check_plain(field: pa.Field, what: str) -> None:
    if pa.types.is_nested(field.type):
        raise PlanError(
            f"{what} {field.name!r}, which is nested.",
            fix="name a column of a plain type, such as STRING or BIGINT.",
        )


def _bounded_us(duration: str | timedelta, what: str) -> int:
    """Longer than ten years would be for ever: windows would never be told, producers never given
    up, no time would be absurd.
    """
    us = to_us(duration, what=what)
    if us > LONGEST_US:
        raise PlanError(
            f"The {what}, {format_us(us)}, is longer than 10 years.", fix="give a shorter one."
        )
    return us
