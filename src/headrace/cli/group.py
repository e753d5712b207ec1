"""`headrace group`: list, show and reset consumer groups."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.output import emit, say, seconds_text, table
from headrace.cli.settings import JsonOption, LogOption, opened, place
from headrace.errors import UnknownGroup

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
            emit({"name": each.name, "kind": each.kind, "topics": sorted(each.committed), "members": len(each.members), "lag_rows": behind})
        return
    shown = [(each.name, each.kind, ", ".join(sorted(each.committed)) or "-", len(each.members), behind) for each, behind in rows]
    table(["group", "kind", "topics", "members", "lag"], shown, empty="No groups yet: a group is there once it has read something.")


@app.command()
def show(context: typer.Context, name: Name, log: LogOption = None, json: JsonOption = False) -> None:
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
                    {"member": each.member, "host": each.host, "partitions": each.partitions, "seconds_since_heartbeat": each.seconds_since_heartbeat}
                    for each in info.members
                ],
                "positions": [
                    {"topic": each.topic, "partition": each.partition, "committed": each.committed, "end": each.end, "rows": each.rows, "seconds": each.seconds}
                    for each in lags
                ],
            }
        )
        return
    say(f"{info.kind} {info.name}, generation {info.generation}")
    members = [(each.member, each.host or "-", _owned(each.partitions), seconds_text(each.seconds_since_heartbeat)) for each in info.members]
    table(["member", "host", "partitions", "last heard of"], members, empty="No members now.")
    positions = [(each.topic, each.partition, each.committed, each.end, each.rows, seconds_text(each.seconds)) for each in lags]
    table(["topic", "partition", "committed", "end", "lag", "behind"], positions, empty="No positions yet.")


@app.command()
def reset(
    context: typer.Context,
    name: Name,
    topic: Annotated[str, typer.Option(help="The topic whose positions are moved.")],
    to: Annotated[str, typer.Option(metavar="PLACE", help='earliest, latest, an offset, or a time (ISO 8601, or "1 hour ago").')],
    partition: Annotated[list[int] | None, typer.Option(min=0, help="Only this partition; can be repeated.")] = None,
    new: Annotated[bool, typer.Option("--new", help="Also a group that does not exist yet: where it will begin.")] = False,
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
            raise UnknownGroup(name, known, fix="check the name; --new places a group that has not read yet.")
        before = dict(opened_log.committed(name).get(topic, {})) if name in known else {}
        after = opened_log.reset_group(name, topic, target, partitions=partition or None).get(topic, {})
    moved = [(number, before.get(number), offset) for number, offset in sorted(after.items()) if not partition or number in partition]
    if json:
        for number, was, is_now in moved:
            emit({"group": name, "topic": topic, "partition": number, "before": was, "after": is_now})
        return
    say(f"Moved {name} on {topic}:")
    table(["partition", "before", "after"], moved)


def _owned(partitions: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{topic}[{number}]" for topic, number in sorted(partitions)) or "-"
