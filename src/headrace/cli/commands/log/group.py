"""`headrace group`: lists, shows, resets and deletes groups. Their lag is in `lag.py`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headrace.cli.options import (
    JsonOption,
    LogOption,
    YesOption,
    confirm,
    open_chosen_log,
    parse_offset,
)
from headrace.cli.output import echo, print_json, print_table, seconds_text
from headrace.errors import UnknownGroup

app = typer.Typer(help="Consumer groups: list, show, reset, delete.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The group's name.")]


@app.command("list")
def list_groups(context: typer.Context, log: LogOption = None, json: JsonOption = False) -> None:
    """List the groups with their members and how far they are behind.

    Example: headrace group list --log file:data
    """
    with open_chosen_log(context, log) as opened_log:
        groups = [opened_log.group(name) for name in sorted(opened_log.groups())]
        lags = opened_log.lag()
    rows = [(group, sum(lag.rows for lag in lags if lag.group == group.name)) for group in groups]
    if json:
        for group, behind in rows:
            print_json(
                {
                    "name": group.name,
                    "kind": group.kind,
                    "topics": sorted(group.committed),
                    "members": len(group.members),
                    "lag_rows": behind,
                }
            )
        return
    table_rows = [
        (
            group.name,
            group.kind,
            ", ".join(sorted(group.committed)) or "-",
            len(group.members),
            behind,
        )
        for group, behind in rows
    ]
    print_table(
        ["group", "kind", "topics", "members", "lag"],
        table_rows,
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
                        "member": member.member,
                        "host": member.host,
                        "partitions": member.partitions,
                        "seconds_since_heartbeat": member.seconds_since_heartbeat,
                    }
                    for member in info.members
                ],
                "positions": [
                    {
                        "topic": lag.topic,
                        "partition": lag.partition,
                        "committed": lag.committed,
                        "end": lag.end,
                        "rows": lag.rows,
                        "seconds": lag.seconds,
                    }
                    for lag in lags
                ],
            }
        )
        return
    generation = f", generation {info.generation}" if info.generation >= 0 else ""
    echo(f"{info.kind} {info.name}{generation}")
    members = [
        (
            member.member,
            member.host or "-",
            ", ".join(f"{topic}[{number}]" for topic, number in sorted(member.partitions)) or "-",
            seconds_text(member.seconds_since_heartbeat),
        )
        for member in info.members
    ]
    print_table(["member", "host", "partitions", "last heartbeat"], members, empty="No members.")
    positions = [
        (
            lag.topic,
            lag.partition,
            lag.committed,
            lag.end,
            lag.rows,
            seconds_text(lag.seconds),
        )
        for lag in lags
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
        str | None,
        typer.Option(
            metavar="OFFSET",
            help='earliest, latest, an offset, or a time (ISO 8601, or "1 hour ago").',
        ),
    ] = None,
    shift: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Instead of --to: move by N offsets, back if N is negative."
        ),
    ] = None,
    partition: Annotated[
        list[int] | None, typer.Option(min=0, help="Only this partition; can be repeated.")
    ] = None,
    new: Annotated[
        bool,
        typer.Option("--new", help="Allow a group that does not exist yet; it will start there."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be moved.")
    ] = False,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Reset a group's offsets in a topic. Its members must have stopped.

    Example: headrace group reset billing --topic orders --to 2026-01-31T12:00:00Z --dry-run
    """
    if (to is None) == (shift is None):
        raise typer.BadParameter("Give either --to or --shift.", param_hint="--to")
    target = None if to is None else parse_offset(to, option="--to")
    with open_chosen_log(context, log) as opened_log:
        groups = opened_log.groups()
        if name not in groups and not new:
            raise UnknownGroup(
                name, groups, fix="check the name, or give --new for a group that has not read yet."
            )
        before = dict(opened_log.committed(name).get(topic, {})) if name in groups else {}
        after = opened_log.reset_group(
            name, topic, target, shift=shift, partitions=partition or None, dry_run=dry_run
        ).get(topic, {})
    moved = [
        (number, before.get(number), offset)
        for number, offset in sorted(after.items())
        if not partition or number in partition
    ]
    missing = [
        f"{topic}[{number}]"
        for number, was, offset in moved
        if offset != (target if shift is None else (was or 0) + shift)
    ]
    if missing and (isinstance(target, int) or shift is not None):
        print(
            f"Not in the topic, so the nearest offset instead: {', '.join(missing)}.",
            file=sys.stderr,
        )
    if json:
        for number, was, is_now in moved:
            print_json(
                {"group": name, "topic": topic, "partition": number, "before": was, "after": is_now}
                | ({"dry_run": True} if dry_run else {})
            )
        return
    echo(f"{'Would move' if dry_run else 'Moved'} {name} on {topic}:")
    print_table(["partition", "before", "after"], moved)


@app.command()
def delete(
    context: typer.Context,
    name: Name,
    yes: YesOption = False,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Delete a group with its offsets; the topics stay. Its members must have stopped. Asks for
    confirmation on a terminal; elsewhere --yes is required.

    Example: headrace group delete billing-test --yes
    """
    with open_chosen_log(context, log) as opened_log:
        info = opened_log.group(name)
        if not yes:
            confirm(f"Delete the {info.kind} {name} and its offsets?", to="delete")
        opened_log.delete_group(name)
    if json:
        print_json({"deleted": name})
    else:
        echo(f"Deleted {info.kind} {name}.")
