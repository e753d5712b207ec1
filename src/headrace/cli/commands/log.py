"""`headrace log`: care of the log: verify, stats, compact."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from headrace.cli.options import EXIT_DAMAGE, JsonOption, LogOption, opened
from headrace.cli.output import bytes_text, emit, say, table

app = typer.Typer(help="Care of the log: verify, stats, compact.", no_args_is_help=True)

SOUND = "Everything is as it was written."
Topic = Annotated[str | None, typer.Argument(help="Only this topic.")]


@app.command()
def verify(
    context: typer.Context, topic: Topic = None, log: LogOption = None, json: JsonOption = False
) -> None:
    """Read everything and check it. Exits with 4 when something is not as it was written; nothing
    is deleted.

    Example: headrace log verify --log file:data
    """
    with opened(context, log) as opened_log:
        findings = [each for each in opened_log.verify(topic) if each.kind != "ok"]
    if json and not findings:
        emit({"kind": "ok", "topic": topic, "message": SOUND})
    elif json:
        for each in findings:
            emit(each)
    else:
        rows = [
            (
                each.kind,
                each.topic or "-",
                each.partition if each.partition >= 0 else None,
                each.file,
                each.position,
                each.message,
            )
            for each in findings
        ]
        table(["found", "topic", "partition", "file", "byte", "what"], rows, empty=SOUND)
    if findings:
        raise typer.Exit(EXIT_DAMAGE)


@app.command()
def stats(
    context: typer.Context, topic: Topic = None, log: LogOption = None, json: JsonOption = False
) -> None:
    """Show rows, bytes and segments of each topic.

    Example: headrace log stats --log file:data
    """
    with opened(context, log) as opened_log:
        found = opened_log.stats(topic)
    if json:
        for each in found:
            emit(asdict(each))
        return
    rows = [
        (each.name, each.partitions, each.rows, bytes_text(each.bytes), each.segments)
        for each in found
    ]
    table(["topic", "partitions", "rows", "size", "segments"], rows, empty="No topics yet.")


@app.command()
def compact(
    context: typer.Context, topic: Topic = None, log: LogOption = None, json: JsonOption = False
) -> None:
    """Apply retention and compaction now, without waiting for a writer to do it in the background.

    Example: headrace log compact customers --log file:data
    """
    with opened(context, log) as opened_log:
        removed = opened_log.maintain(topic)
    if json:
        emit(removed)
    elif any(removed.values()):
        table(["what", "removed"], sorted(removed.items()))
    else:
        say("Nothing to remove.")
