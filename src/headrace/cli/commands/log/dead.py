"""`headrace dead`: lists, shows and replays dead letters, the rows that could not be processed."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.options import JsonOption, LogOption, open_chosen_log
from headrace.cli.output import echo, print_json, print_table, to_json_value
from headrace.errors import InputError, nearest
from headrace.log.api import Log

app = typer.Typer(help="Dead letters: list, show, replay.", no_args_is_help=True)

Topic = Annotated[
    str, typer.Argument(help="The topic that the dead letters belong to, or its .dead topic.")
]


def _has_dead_letters(log: Log, topic: str) -> bool:
    """Whether a topic or step has dead letters. InputError if there is neither a topic nor dead
    letters of that name.
    """
    source = topic.removesuffix(".dead")
    topics, dead_topic = set(log.topics()), f"{source}.dead"
    if dead_topic in topics or source in topics:
        return dead_topic in topics
    sources = sorted(name.removesuffix(".dead") for name in topics if name.endswith(".dead"))
    raise InputError(
        f"There is no topic {source!r}, and no step of that name has dead letters:"
        f" {nearest(source, [*topics, *sources])}",
        fix="see `headrace dead list`.",
    )


@app.command("list")
def list_dead(context: typer.Context, log: LogOption = None, json: JsonOption = False) -> None:
    """List the topics that hold dead letters.

    Example: headrace dead list --log file:data
    """
    from headrace.log import dead_letters as dead

    with open_chosen_log(context, log) as opened_log:
        dead_topics = dead.dead_topics(opened_log)
    if json:
        for dead_topic in dead_topics:
            print_json({"name": dead_topic.name, "of": dead_topic.of, "rows": dead_topic.rows})
        return
    print_table(
        ["dead letters", "of", "rows"],
        [(dead_topic.name, dead_topic.of, dead_topic.rows) for dead_topic in dead_topics],
        empty="No dead letters.",
    )


@app.command()
def show(
    context: typer.Context,
    topic: Topic,
    start: Annotated[
        int | None, typer.Option("--from", min=0, metavar="OFFSET", help="Begin at this offset.")
    ] = None,
    max_rows: Annotated[int, typer.Option("--max", min=1, help="Show at most this many.")] = 20,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Show dead letters with their reasons.

    Example: headrace dead show orders --max 5 --log file:data
    """
    from headrace.log import dead_letters as dead

    with open_chosen_log(context, log) as opened_log:
        dead_rows = (
            dead.read_dead_letters(opened_log, topic, start=start, limit=max_rows)
            if _has_dead_letters(opened_log, topic)
            else []
        )
    if json:
        for dead_row in dead_rows:
            print_json(dead_row)
        return
    names = list(dict.fromkeys(name for dead_row in dead_rows for name in dead_row))
    print_table(
        names,
        [[to_json_value(dead_row.get(name)) for name in names] for dead_row in dead_rows],
        empty="No dead letters.",
    )


@app.command()
def replay(
    context: typer.Context,
    topic: Topic,
    offset: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Only the dead letter at this offset; can be repeated."),
    ] = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Replay dead letters after the cause was fixed. Exits with 1 if some fail again.

    Example: headrace dead replay orders --offset 17 --log file:data
    """
    from headrace.log import dead_letters as dead

    with open_chosen_log(context, log) as opened_log:
        result = (
            dead.replay(opened_log, topic, offsets=offset or None)
            if _has_dead_letters(opened_log, topic)
            else dead.ReplayResult(0)
        )
    if json:
        failed = [
            {"partition": partition, "offset": at, "reason": reason}
            for partition, at, reason in result.failed
        ]
        print_json({"replayed": result.replayed, "failed": failed})
    else:
        echo(f"{result.replayed:,} replayed, {len(result.failed):,} failed again.")
        if result.failed:
            print_table(["partition", "offset", "reason"], result.failed)
    if result.failed:
        raise typer.Exit(1)
