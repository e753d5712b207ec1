"""`headrace dead`: rows that could not be processed, kept with their reason: list, show, replay."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.options import JsonOption, LogOption, opened
from headrace.cli.output import emit, plain, say, table
from headrace.errors import InputError, nearest
from headrace.log.api import Log

app = typer.Typer(help="Dead letters: list, show, replay.", no_args_is_help=True)

Topic = Annotated[
    str, typer.Argument(help="The topic whose dead letters are meant, or its .dead topic.")
]


def _has_letters(log: Log, topic: str) -> bool:
    """Whether there are any; InputError if nothing of that name could have some."""
    of = topic.removesuffix(".dead")
    known, dead = set(log.topics()), f"{of}.dead"
    if dead in known or of in known:
        return dead in known
    having = sorted(name.removesuffix(".dead") for name in known if name.endswith(".dead"))
    raise InputError(
        f"There is no topic {of!r}, and no step of that name has dead letters:"
        f" {nearest(of, [*known, *having])}",
        fix="`headrace dead list` names them.",
    )


@app.command("list")
def list_dead(context: typer.Context, log: LogOption = None, json: JsonOption = False) -> None:
    """List the topics that hold dead letters.

    Example: headrace dead list --log file:data
    """
    from headrace.log import dead_letters as dead

    with opened(context, log) as opened_log:
        found = dead.topics(opened_log)
    if json:
        for each in found:
            emit({"name": each.name, "of": each.of, "rows": each.rows})
        return
    table(
        ["dead letters", "of", "rows"],
        [(each.name, each.of, each.rows) for each in found],
        empty="No dead letters.",
    )


@app.command()
def show(
    context: typer.Context,
    topic: Topic,
    start: Annotated[
        int | None, typer.Option("--from", min=0, metavar="OFFSET", help="Begin at this offset.")
    ] = None,
    most: Annotated[int, typer.Option("--max", min=1, help="Show at most this many.")] = 20,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Show dead letters with the reason each was put aside.

    Example: headrace dead show orders --max 5 --log file:data
    """
    from headrace.log import dead_letters as dead

    with opened(context, log) as opened_log:
        letters = (
            dead.letters(opened_log, topic, start=start, limit=most)
            if _has_letters(opened_log, topic)
            else []
        )
    if json:
        for each in letters:
            emit(each)
        return
    names = list(dict.fromkeys(name for each in letters for name in each))
    table(
        names,
        [[plain(each.get(name)) for name in names] for each in letters],
        empty="No dead letters.",
    )


@app.command()
def replay(
    context: typer.Context,
    topic: Topic,
    offset: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Only this letter; can be repeated. Without it, all."),
    ] = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Try dead letters again, after the reason was fixed. Exits with 1 when some fail again.

    Example: headrace dead replay orders --offset 17 --log file:data
    """
    from headrace.log import dead_letters as dead

    with opened(context, log) as opened_log:
        result = (
            dead.replay(opened_log, topic, offsets=offset or None)
            if _has_letters(opened_log, topic)
            else dead.ReplayResult(0)
        )
    if json:
        failed = [
            {"partition": partition, "offset": at, "reason": reason}
            for partition, at, reason in result.failed
        ]
        emit({"replayed": result.replayed, "failed": failed})
    else:
        say(f"{result.replayed:,} replayed, {len(result.failed):,} failed again.")
        if result.failed:
            table(["partition", "offset", "reason"], result.failed)
    if result.failed:
        raise typer.Exit(1)
