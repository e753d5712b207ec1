"""`hr.EventTime`: which column says when a row happened, how far rows may be out of order, and who
produces them. `hr.device_time` corrects the clocks of devices, and `hr.processing_time` takes the
time at which a row is processed.

The watermarks that follow from it are computed in `headrace.engine.watermarks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import pyarrow as pa

from headrace.durations import format_us, to_us
from headrace.errors import PlanError, UnknownColumn
from headrace.operators.watermark_spec import WatermarkSpec
from headrace.operators.windows.late_policy import LONGEST_US
from headrace.types.schema import type_name


@dataclass(frozen=True, init=False)
class EventTime:
    """The event time of a topic, for `event_time=` of `Pipeline.topic` and `Pipeline.table`.

    The watermark follows the slowest producer that is not idle.

    Args:
        column: The TIMESTAMP column that says when a row happened.
        delay: How far out of order the rows of one producer may come. The watermark stays this far
            behind the producer's newest row.
        producer: The column that says who sent a row, such as a device. Without it the topic is one
            producer.
        idle: How long a producer may be silent, in tick time, before it no longer holds the
            watermark back. When all are, the watermark moves on with tick time from the newest
            event time; the topic no longer holds back joins and unions with other topics, nor does
            it if it has had no row for so long since the pipeline's first tick.
        max_ahead: How far ahead of the time at which it was appended a row may move the watermark.
            A row that is further ahead is data like any other and is counted, but moves it no
            further, so a wrong clock does not make other rows late. Streams whose event times lie
            in the future, such as bookings, need more than the default of nothing.

    Raises:
        PlanError: A duration is longer than 10 years.
        BadDuration: A duration cannot be parsed.

    Example:
        ```python
        at = hr.EventTime("placed_at", delay="10 seconds", producer="till")
        orders = shop.topic(
            "till_orders", schema="till STRING, placed_at TIMESTAMP", event_time=at
        )
        ```
    """

    column: str
    delay_us: int = 0
    producer: str | None = None
    idle_us: int = 60_000_000
    max_ahead_us: int = 0
    delay_given: bool = False
    """Internal: whether a delay was declared. A table's watermark follows the ticks unless its
    event time declares a delay or a producer.
    """

    def __init__(
        self,
        column: str,
        *,
        delay: str | timedelta | None = None,
        producer: str | None = None,
        idle: str | timedelta = "1 minute",
        max_ahead: str | timedelta = "0 seconds",
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
        """Internal: raise if the columns do not exist or have other types."""
        for name in (self.column, self.producer):
            if name is not None and name not in schema.names:
                raise UnknownColumn(name, schema.names, where=where)
        _check_time(schema.field(self.column), f"{where} has the event time")
        if self.producer is not None:
            _check_plain(schema.field(self.producer), f"{where} has the producer column")

    def added_columns(self, schema: pa.Schema) -> list[pa.Field]:  # noqa: ARG002
        """Internal: the columns that the topic does not have, and its rows get when read."""
        return []

    def watermark_spec(self, name: str) -> WatermarkSpec:
        """Internal: how the watermark of an input of that name moves."""
        return WatermarkSpec(
            name=name,
            column=self.column,
            producer=self.producer,
            delay_us=self.delay_us,
            idle_us=self.idle_us,
            max_ahead_us=self.max_ahead_us,
        )

    def __str__(self) -> str:
        parts = [self.column, f"delay {format_us(self.delay_us)}"]
        if self.producer is not None:
            parts.append(f"producer {self.producer}")
        return ", ".join([*parts, f"idle {format_us(self.idle_us)}"])


@dataclass(frozen=True, init=False)
class DeviceTime(EventTime):
    """The event time of rows whose devices' clocks are corrected, as `hr.device_time` returns it.
    `column` and `flag` are added to the topic's columns. Each device is a producer.
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

    def added_columns(self, schema: pa.Schema) -> list[pa.Field]:
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
    max_ahead: str | timedelta = "0 seconds",
    tolerance: str | timedelta = "1 minute",
    column: str = "event_time",
    flag: str = "time_flag",
) -> DeviceTime:
    """Correct the clocks of devices, for `event_time=` of `Pipeline.topic`.

    Each device's offset is estimated from the times at which its rows were sent and received, and
    smoothed tick by tick. The corrected time is in a column of its own.

    Args:
        event: The TIMESTAMP column with the time at which a row happened, by the device's clock.
        sent: The column with the time at which it was sent, by the device's clock.
        received: The column with the time at which it was received, by your clock.
        device: The column that says which device sent it.
        delay: How far out of order a device's rows may come, as in `hr.EventTime`.
        idle: How long a device may be silent before it no longer holds the watermark back.
        max_ahead: How far ahead of its tick's time a row may move the watermark.
        tolerance: A row whose times are further than this from the device's estimated offset is
            flagged, and counted.
        column: The name of the added column with the corrected time.
        flag: The name of the added column that says why a row is flagged; null otherwise.

    Returns:
        The event time.

    Raises:
        PlanError: `tolerance` is zero, or a duration is longer than 10 years.

    Example:
        ```python
        readings = shop.topic(
            "readings",
            schema="meter STRING, at TIMESTAMP, sent TIMESTAMP, received TIMESTAMP, kwh DOUBLE",
            event_time=hr.device_time(
                event="at", sent="sent", received="received", device="meter"
            ),
        )
        ```
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


@dataclass(frozen=True, init=False)
class AnswerTime(EventTime):
    """The event time of recorded answers (`answer_steps`): `column` is that of their rows.

    The watermark does not follow it, but `complete`, a column in which the caller says up to which
    event time every row has its answer recorded. Nothing else moves it, not even the passing of
    time: a row that waits for its answer is never late behind it.
    """

    complete: str = ""

    def __init__(self, column: str, *, complete: str) -> None:
        super().__init__(column)
        object.__setattr__(self, "complete", complete)

    def watermark_spec(self, name: str) -> WatermarkSpec:
        return WatermarkSpec(
            name=name,
            column=self.complete,
            idle_us=LONGEST_US,
            max_ahead_us=LONGEST_US,
            is_one_producer=True,
        )

    def __str__(self) -> str:
        return f"{self.column}, behind the rows that wait for an answer"


@dataclass(frozen=True)
class ProcessingTime:
    """The time of the tick that a row belongs to, in a column of its own, as `hr.processing_time`
    returns it. The watermark follows the ticks, so no row is ever late.
    """

    column: str = "processed_at"

    def check(self, schema: pa.Schema, *, where: str) -> None:
        """Raise if the topic has a column of that name."""
        if self.column in schema.names:
            raise PlanError(
                f"{where} has a column {self.column!r} already.",
                fix='name another: hr.processing_time(column="arrived_at").',
            )

    def added_columns(self, schema: pa.Schema) -> list[pa.Field]:  # noqa: ARG002
        return [pa.field(self.column, pa.timestamp("us", "UTC"))]

    def __str__(self) -> str:
        return f"{self.column}, the time of processing"


def processing_time(column: str = "processed_at") -> ProcessingTime:
    """Use the time at which rows are processed, for `event_time=` of `Pipeline.topic`.

    Args:
        column: The name of the added column with that time.

    Returns:
        The event time. No row is late by it.

    Example:
        ```python
        pings = shop.topic("pings", schema="host STRING", event_time=hr.processing_time())
        ```
    """
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
    """A duration in microseconds. More than ten years would be for ever: windows would never be
    emitted, and producers never count as idle.
    """
    us = to_us(duration, what=what)
    if us > LONGEST_US:
        raise PlanError(
            f"The {what}, {format_us(us)}, is longer than 10 years.", fix="give a shorter one."
        )
    return us
