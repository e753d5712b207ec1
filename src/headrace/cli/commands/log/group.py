"""`headrace group`: lists, shows and resets consumer groups. Their lag is in `lag.py`."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.options import (
    JsonOption,
    LogOption,
    open_chosen_log,
    parse_offset,
)
from headrace.cli.output import echo, print_json, print_table, seconds_text
from headrace.errors import UnknownGroup

app = typer.Typer(help="Consumer groups: list, show, reset.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The group's name.")]


@app.command("list")
def list_groups(context: typer.Context, log: LogOption = None, json: JsonOption = False) -> None:
    """List the groups with their members and how far they are behind.

    Example: headrace group list --log file:data
    """
    with open_chosen_log(context, log) as opened_log:
        groups = [opened_log.group(name) for name in sorted(opened_log.groups())]
        lags = opened_log.lag()
    rows = [(each, sum(lag.rows for lag in lags if lag.group == each.name)) for each in groups]
    if json:
        for each, behind in rows:
            print_json(
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
    print_table(
        ["group", "kind", "topics", "members", "lag"],
        shown,
        empty="No groups yet: a group exists once it has read something.",
    )


@app.command()
def show(
    context: typer.Context, name: Name, log: LogOption = None, json: JsonOption = False
) -> None:
    """Show the members of a group, their partitions, and the group's offsets.

    Example: headrace group show billing --log file:data
    """
    with open_chosen_log(context, log) as opened_log:
        info = opened_log.group(name)
        lags = opened_log.lag(name)
    if json:
        print_json(
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
    echo(f"{info.kind} {info.name}, generation {info.generation}")
    members = [
        (
            each.member,
            each.host or "-",
            ", ".join(f"{topic}[{number}]" for topic, number in sorted(each.partitions)) or "-",
            seconds_text(each.seconds_since_heartbeat),
        )
        for each in info.members
    ]
    print_table(["member", "host", "partitions", "last heartbeat"], members, empty="No members.")
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
    print_table(
        ["topic", "partition", "committed", "end", "lag", "behind"],
        positions,
        empty="No offsets yet.",
    )


@app.command()
def reset(
    context: typer.Context,
    name: Name,
    topic: Annotated[str, typer.Option(help="The topic whose offsets are reset.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="OFFSET",
            help='earliest, latest, an offset, or a time (ISO 8601, or "1 hour ago").',
        ),
    ],
    partition: Annotated[
        list[int] | None, typer.Option(min=0, help="Only this partition; can be repeated.")
    ] = None,
    new: Annotated[
        bool,
        typer.Option("--new", help="Allow a group that does not exist yet; it will start there."),
    ] = False,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Reset a group's offsets in a topic. Its members must have stopped.

    Example: headrace group reset billing --topic orders --to 2026-01-31T12:00:00Z
    """
    target = parse_offset(to, option="--to")
    with open_chosen_log(context, log) as opened_log:
        groups = opened_log.groups()
        if name not in groups and not new:
            raise UnknownGroup(
                name, groups, fix="check the name, or give --new for a group that has not read yet."
            )
        before = dict(opened_log.committed(name).get(topic, {})) if name in groups else {}
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
            print_json(
                {"group": name, "topic": topic, "partition": number, "before": was, "after": is_now}
            )
        return
    echo(f"Moved {name} on {topic}:")
    print_table(["partition", "before", "after"], moved)
