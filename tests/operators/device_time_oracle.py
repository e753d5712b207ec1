"""Device time corrected row by row, in plain Python."""

from __future__ import annotations

from datetime import datetime, timedelta
from statistics import median_low
from typing import Any
from zoneinfo import ZoneInfo

EPOCH = datetime(2026, 1, 1, tzinfo=ZoneInfo("UTC"))
TOLERANCE = 60  # seconds
Row = dict[str, Any]


def at(seconds: float | None) -> datetime | None:
    return None if seconds is None else EPOCH + timedelta(seconds=seconds)


def row(
    happened: float | None, sent: float | None, received: float | None, device: str | None = "a"
) -> Row:
    return {"device": device, "happened": at(happened), "sent": at(sent), "received": at(received)}


def corrected_times(ticks: list[list[Row]]) -> list[datetime | None]:
    """The event time of each row: its device's offset is smoothed tick by tick."""
    offsets: dict[Any, int] = {}
    jumps: dict[Any, int] = {}
    found: list[datetime | None] = []
    microsecond, tolerance = timedelta(microseconds=1), TOLERANCE * 1_000_000
    for rows in ticks:
        own = [
            (
                None
                if each["sent"] is None or each["received"] is None
                else (each["received"] - each["sent"]) // microsecond
            )
            for each in rows
        ]
        for device in dict.fromkeys(each["device"] for each in rows):
            mine = [
                offset
                for each, offset in zip(rows, own, strict=True)
                if each["device"] == device and offset is not None
            ]
            if not mine:
                continue
            middle, known = median_low(mine), offsets.get(device)
            far = known is not None and abs(middle - known) > tolerance
            jumps[device] = jumps.get(device, 0) + 1 if far else 0
            if known is None or jumps[device] == 3:
                offsets[device], jumps[device] = middle, 0
            elif not far:
                offsets[device] = known + (middle - known) // 8
        for each, offset in zip(rows, own, strict=True):
            used = offsets.get(each["device"], 0)
            used = offset if offset is not None and abs(offset - used) > tolerance else used
            time = None if each["happened"] is None else each["happened"] + used * microsecond
            found.append(
                time if time is None or each["received"] is None else min(time, each["received"])
            )
    return found
