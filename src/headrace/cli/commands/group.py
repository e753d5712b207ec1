"""`headrace group`: list, show and reset consumer groups."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Annotated

import typer

from headrace.cli.options import EXIT_ALERT, JsonOption, LogOption, opened, place, seconds_of
from headrace.cli.output import console, emit, iso, say, seconds_text, table
from headrace.errors import UnknownGroup
from headrace.log.api import Log
from headrace.log.values import PartitionLag

app = typer.Typer(help="Consumer groups: list, show, reset.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The group's name.")]


@app.command("list")
def list_groups(context: typer.Context, log: LogOption = None, json: JsonOption = False) -> None:
    """List the groups with their members and how far they are behind.

    Example: headrace group list --log file:data
    """
    with opened(context, log) as opened_log:
        groups = [opened_log.group(name) for name in sorted(opened_log.groups())]
        lags = opened_log.lag()
    rows = [(each, sum(lag.rows for lag in lags if lag.group == each.name)) for each in groups]
    if json:
        for each, behind in rows:
            emit(
                {
                    "name": each.name,
                    "kind": each.kind,
                    "topics": sorted(each.committed),
                    "members": len(each.members),
                    "lag_rows": behind,
                }
            )
        return
    shown = [
        (each.name, each.kind, ", ".join(sorted(each.committed)) or "-", len(each.members), behind)
        for each, behind in rows
    ]
    table(
        ["group", "kind", "topics", "members", "lag"],
        shown,
        empty="No groups yet: a group is there once it has read something.",
    )


@app.command()
def show(
    context: typer.Context, name: Name, log: LogOption = None, json: JsonOption = False
) -> None:
    """Show who reads what in a group, and its positions.

    Example: headrace group show billing --log file:data
    """
    with opened(context, log) as opened_log:
        info = opened_log.group(name)
        lags = opened_log.lag(name)
    if json:
        emit(
            {
                "name": info.name,
                "kind": info.kind,
                "generation": info.generation,
                "members": [
                    {
                        "member": each.member,
                        "host": each.host,
                        "partitions": each.partitions,
                        "seconds_since_heartbeat": each.seconds_since_heartbeat,
                    }
                    for each in info.members
                ],
                "positions": [
                    {
                        "topic": each.topic,
                        "partition": each.partition,
                        "committed": each.committed,
                        "end": each.end,
                        "rows": each.rows,
                        "seconds": each.seconds,
                    }
                    for each in lags
                ],
            }
        )
        return
    say(f"{info.kind} {info.name}, generation {info.generation}")
    members = [
        (
            each.member,
            each.host or "-",
            _owned(each.partitions),
            seconds_text(each.seconds_since_heartbeat),
        )
        for each in info.members
    ]
    table(["member", "host", "partitions", "last heard of"], members, empty="No members now.")
    positions = [
        (
            each.topic,
            each.partition,
            each.committed,
            each.end,
            each.rows,
            seconds_text(each.seconds),
        )
        for each in lags
    ]
    table(
        ["topic", "partition", "committed", "end", "lag", "behind"],
        positions,
        empty="No positions yet.",
    )


@app.command()
def reset(
    context: typer.Context,
    name: Name,
    topic: Annotated[str, typer.Option(help="The topic whose positions are moved.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="PLACE",
            help='earliest, latest, an offset, or a time (ISO 8601, or "1 hour ago").',
        ),
    ],
    partition: Annotated[
        list[int] | None, typer.Option(min=0, help="Only this partition; can be repeated.")
    ] = None,
    new: Annotated[
        bool,
        typer.Option("--new", help="Also a group that does not exist yet: where it will begin."),
    ] = False,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Move a group to another place in a topic. Its members must have stopped.

    Example: headrace group reset billing --topic orders --to 2026-01-31T12:00:00Z
    """
    target = place(to, option="--to")
    with opened(context, log) as opened_log:
        known = opened_log.groups()
        if name not in known and not new:
            raise UnknownGroup(
                name, known, fix="check the name; --new places a group that has not read yet."
            )
        before = dict(opened_log.committed(name).get(topic, {})) if name in known else {}
        after = opened_log.reset_group(name, topic, target, partitions=partition or None).get(
            topic, {}
        )
    moved = [
        (number, before.get(number), offset)
        for number, offset in sorted(after.items())
        if not partition or number in partition
    ]
    if json:
        for number, was, is_now in moved:
            emit(
                {"group": name, "topic": topic, "partition": number, "before": was, "after": is_now}
            )
        return
    say(f"Moved {name} on {topic}:")
    table(["partition", "before", "after"], moved)


def _owned(partitions: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{topic}[{number}]" for topic, number in sorted(partitions)) or "-"


# `headrace lag`: how far groups are behind, in rows and seconds; once, or watched; with thresholds
# that set the exit code.


SHORTEST_LOOK_SECONDS = 0.05
Place = tuple[str, str, int]


@dataclass
class Alerts:
    """Which partitions are behind by more than a threshold allows: tells when that begins and when
    it ends.
    """

    rows: int | None
    seconds: float | None
    active: dict[Place, PartitionLag] = field(default_factory=dict)
    ever: bool = False

    def passed(self, lag: PartitionLag) -> bool:
        too_many = self.rows is not None and lag.rows > self.rows
        too_old = self.seconds is not None and lag.rows > 0 and lag.seconds > self.seconds
        return too_many or too_old

    def update(self, lags: list[PartitionLag]) -> tuple[list[PartitionLag], list[PartitionLag]]:
        """Take in what is known now; returns the alerts that start and those that end. A partition
        that is gone has ended.
        """
        now = {(lag.group, lag.topic, lag.partition): lag for lag in lags}
        passed = {place: lag for place, lag in now.items() if self.passed(lag)}
        started = [lag for place, lag in passed.items() if place not in self.active]
        ended = [now.get(place, lag) for place, lag in self.active.items() if place not in passed]
        self.active = passed
        self.ever = self.ever or bool(passed)
        return started, ended


def lag(
    context: typer.Context,
    group: Annotated[str | None, typer.Argument(help="Only this group.")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again and again until Ctrl-C.")
    ] = False,
    every: Annotated[
        str, typer.Option(metavar="DURATION", help="How often --watch looks.")
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
    """Show how far groups are behind. Exits with 3 when a threshold is passed (with --watch: was
    passed).

    With --watch, alerts are printed when they start and when they end.

    Example: headrace lag billing --alert-rows 10000 --alert-seconds 60 --log file:data
    """
    alerts = Alerts(alert_rows, alert_seconds)
    every_seconds = max(seconds_of(every, option="--every"), SHORTEST_LOOK_SECONDS)
    stop_seconds = None if stop_after is None else seconds_of(stop_after, option="--for")
    with opened(context, log) as opened_log:
        if watch:
            _watch(opened_log, group, alerts, every_seconds, stop_seconds, json=json)
        else:
            lags = opened_log.lag(group)
            alerts.update(lags)
            _show(lags, alerts, json=json)
    if alerts.ever:
        raise typer.Exit(EXIT_ALERT)


def _watch(
    log: Log,
    group: str | None,
    alerts: Alerts,
    every_seconds: float,
    stop_seconds: float | None,
    *,
    json: bool,
) -> None:
    deadline = None if stop_seconds is None else time.monotonic() + stop_seconds
    on_screen = not json and console().is_terminal
    while True:
        lags = log.lag(group)
        started, ended = alerts.update(lags)
        if json or on_screen:
            if on_screen:
                console().clear()
            _show(lags, alerts, json=json)
        for event, changed in (("alert_start", started), ("alert_end", ended)):
            for each in changed:
                _tell(event, each, json=json)
        if deadline is not None and time.monotonic() + every_seconds > deadline:
            return
        time.sleep(every_seconds)


def _show(lags: list[PartitionLag], alerts: Alerts, *, json: bool) -> None:
    if json:
        for each in lags:
            emit(
                {
                    "event": "lag",
                    **asdict(each),
                    "alert": alerts.passed(each),
                    "at": iso(datetime.now(UTC)),
                }
            )
        return
    headings = ["group", "topic", "partition", "committed", "end", "lag", "behind"]
    rows = [
        [
            each.group,
            each.topic,
            each.partition,
            each.committed,
            each.end,
            each.rows,
            seconds_text(each.seconds),
        ]
        for each in lags
    ]
    if alerts.active:
        headings.append("")
        rows = [
            [*row, "ALERT" if alerts.passed(each) else ""]
            for row, each in zip(rows, lags, strict=True)
        ]
    table(headings, rows, empty="No group has read anything yet.")


def _tell(event: str, lag: PartitionLag, *, json: bool) -> None:
    if json:
        emit({"event": event, **asdict(lag), "at": iso(datetime.now(UTC))})
        return
    state = "ALERT" if event == "alert_start" else "ok again"
    say(
        f"{iso(datetime.now(UTC))}  {state}: {lag.group} on {lag.topic}[{lag.partition}] is"
        f" {lag.rows:,} rows, {seconds_text(lag.seconds)} behind"
    )
