"""`headrace lag`: how far consumer groups are behind, in rows and seconds, once or repeatedly, with
thresholds that set the exit code.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Annotated

import typer

from headrace.cli.options import (
    EXIT_ALERT,
    JsonOption,
    LogOption,
    open_chosen_log,
    parse_seconds,
)
from headrace.cli.output import console, echo, iso_text, print_json, print_table, seconds_text
from headrace.log.api import Log
from headrace.log.values import PartitionLag

MIN_INTERVAL_S = 0.05
PartitionKey = tuple[str, str, int]
"""Group, topic and partition."""


@dataclass
class LagAlerts:
    """The partitions that are further behind than a threshold allows."""

    rows: int | None
    seconds: float | None
    active: dict[PartitionKey, PartitionLag] = field(default_factory=dict)
    was_exceeded: bool = False

    def is_exceeded(self, lag: PartitionLag) -> bool:
        too_many = self.rows is not None and lag.rows > self.rows
        too_old = self.seconds is not None and lag.rows > 0 and lag.seconds > self.seconds
        return too_many or too_old

    def update(self, lags: list[PartitionLag]) -> tuple[list[PartitionLag], list[PartitionLag]]:
        """Update the alerts; returns those that start and those that end. The alert of a partition
        that no longer exists ends.
        """
        now = {(lag.group, lag.topic, lag.partition): lag for lag in lags}
        exceeding = {key: lag for key, lag in now.items() if self.is_exceeded(lag)}
        started = [lag for key, lag in exceeding.items() if key not in self.active]
        ended = [now.get(key, lag) for key, lag in self.active.items() if key not in exceeding]
        self.active = exceeding
        self.was_exceeded = self.was_exceeded or bool(exceeding)
        return started, ended


def lag(
    context: typer.Context,
    group: Annotated[str | None, typer.Argument(help="Only this group.")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Measure repeatedly, until Ctrl-C.")
    ] = False,
    every: Annotated[
        str, typer.Option(metavar="DURATION", help="How often --watch measures.")
    ] = "2 seconds",
    stop_after: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="End --watch after this long.")
    ] = None,
    alert_rows: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Alert when a partition is more than N rows behind."),
    ] = None,
    alert_seconds: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="S", help="Alert when the next row has waited longer than S seconds."
        ),
    ] = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Show how far consumer groups are behind. Exits with 3 if a threshold is exceeded, with
    --watch if it was exceeded at any time.

    With --watch, alerts are printed when they start and when they end.

    Example: headrace lag billing --alert-rows 10000 --alert-seconds 60 --log file:data
    """
    alerts = LagAlerts(alert_rows, alert_seconds)
    every_seconds = max(parse_seconds(every, option="--every"), MIN_INTERVAL_S)
    stop_seconds = None if stop_after is None else parse_seconds(stop_after, option="--for")
    with open_chosen_log(context, log) as opened_log:
        if watch:
            _watch(opened_log, group, alerts, every_seconds, stop_seconds, json=json)
        else:
            lags = opened_log.lag(group)
            alerts.update(lags)
            _show(lags, alerts, json=json)
    if alerts.was_exceeded:
        raise typer.Exit(EXIT_ALERT)


def _watch(
    log: Log,
    group: str | None,
    alerts: LagAlerts,
    every_seconds: float,
    stop_seconds: float | None,
    *,
    json: bool,
) -> None:
    deadline = None if stop_seconds is None else time.monotonic() + stop_seconds
    is_screen = not json and console().is_terminal
    while True:
        lags = log.lag(group)
        started, ended = alerts.update(lags)
        if json or is_screen:
            if is_screen:
                console().clear()
            _show(lags, alerts, json=json)
        for event, changed in (("alert_start", started), ("alert_end", ended)):
            for lag in changed:
                _print_event(event, lag, json=json)
        if deadline is not None and time.monotonic() + every_seconds > deadline:
            return
        time.sleep(every_seconds)


def _show(lags: list[PartitionLag], alerts: LagAlerts, *, json: bool) -> None:
    if json:
        for entry in lags:
            print_json(
                {
                    "event": "lag",
                    **asdict(entry),
                    "alert": alerts.is_exceeded(entry),
                    "at": iso_text(datetime.now(UTC)),
                }
            )
        return
    headings = ["group", "topic", "partition", "committed", "end", "lag", "behind"]
    rows = [
        [
            entry.group,
            entry.topic,
            entry.partition,
            entry.committed,
            entry.end,
            entry.rows,
            seconds_text(entry.seconds),
        ]
        for entry in lags
    ]
    if alerts.active:
        headings.append("")
        rows = [
            [*row, "ALERT" if alerts.is_exceeded(entry) else ""]
            for row, entry in zip(rows, lags, strict=True)
        ]
    print_table(headings, rows, empty="No group has read anything yet.")


def _print_event(event: str, lag: PartitionLag, *, json: bool) -> None:
    if json:
        print_json({"event": event, **asdict(lag), "at": iso_text(datetime.now(UTC))})
        return
    state = "ALERT" if event == "alert_start" else "ok again"
    echo(
        f"{iso_text(datetime.now(UTC))}  {state}: {lag.group} on {lag.topic}[{lag.partition}] is"
        f" {lag.rows:,} rows, {seconds_text(lag.seconds)} behind"
    )
