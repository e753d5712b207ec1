"""`headrace log`: verifies the log, shows its size, compacts it and backs it up."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import EXIT_DAMAGE, JsonOption, LogOption, open_chosen_log
from headrace.cli.output import bytes_text, echo, print_json, print_table
from headrace.log.file.log import FileLog

app = typer.Typer(
    help="Maintain the log: verify, stats, compact, backup, repair.", no_args_is_help=True
)

NO_DAMAGE = "No damage found."
Topic = Annotated[str | None, typer.Argument(help="Only this topic.")]


@app.command()
def verify(
    context: typer.Context, topic: Topic = None, log: LogOption = None, json: JsonOption = False
) -> None:
    """Read everything and verify its checksums. Exits with 4 if there is damage; nothing is
    deleted.

    Example: headrace log verify --log file:data
    """
    with open_chosen_log(context, log) as opened_log:
        findings = [finding for finding in opened_log.verify(topic) if finding.kind != "ok"]
    if json and not findings:
        print_json({"kind": "ok", "topic": topic, "message": NO_DAMAGE})
    elif json:
        for finding in findings:
            print_json(finding)
    else:
        rows = [
            (
                finding.kind,
                finding.topic or "-",
                _known(finding.partition),
                _known(finding.offset),
                finding.file,
                _known(finding.position),
                finding.message,
            )
            for finding in findings
        ]
        heads = ["found", "topic", "partition", "offset", "file", "byte", "what"]
        print_table(heads, rows, empty=NO_DAMAGE)
    if findings:
        raise typer.Exit(EXIT_DAMAGE)


@app.command()
def stats(
    context: typer.Context, topic: Topic = None, log: LogOption = None, json: JsonOption = False
) -> None:
    """Show rows, bytes and segments of each topic.

    Kafka's brokers report neither bytes nor segments, and offsets instead of rows, which are more
    after compaction and transactions.

    Example: headrace log stats --log file:data
    """
    with open_chosen_log(context, log) as opened_log:
        all_stats = opened_log.stats(topic)
    if json:
        for topic_stats in all_stats:
            print_json(asdict(topic_stats))
        return
    rows = [
        (
            topic_stats.name,
            topic_stats.partitions,
            _known(topic_stats.rows),
            None if topic_stats.bytes < 0 else bytes_text(topic_stats.bytes),
            _known(topic_stats.segments),
        )
        for topic_stats in all_stats
    ]
    print_table(["topic", "partitions", "rows", "size", "segments"], rows, empty="No topics yet.")


def _known(count: int) -> int | None:
    """A number that the log knows; None for one that it does not."""
    return None if count < 0 else count


@app.command()
def compact(
    context: typer.Context, topic: Topic = None, log: LogOption = None, json: JsonOption = False
) -> None:
    """Apply retention and compaction now, without waiting for a writer to do it in the background.

    Example: headrace log compact customers --log file:data
    """
    with open_chosen_log(context, log) as opened_log:
        removed = opened_log.maintain(topic)
    if json:
        print_json(removed)
    elif any(removed.values()):
        print_table(["what", "removed"], sorted(removed.items()))
    else:
        echo("Nothing to remove.")


@app.command()
def backup(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(help="Where to; a second time, what is new.")],
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Back up the log while it is in use, as of one commit. Opening the directory restores it.

    Example: headrace log backup /backups/data --log file:data
    """
    with open_chosen_log(context, log) as opened_log:
        result = opened_log.backup(directory)
    if json:
        print_json(asdict(result))
        return
    echo(
        f"Backed up to {directory} as of commit {result.commit}: {bytes_text(result.copied_bytes)}"
        f" copied and verified in {result.seconds:.1f} s, {bytes_text(result.total_bytes)} in all."
    )


@app.command()
def repair(
    directory: Annotated[Path, typer.Argument(help="A copy of a log, made while it was written.")],
) -> None:
    """Open a copy that was made while the log was being written, without what is missing in it.
    Transactions may be torn: use a backup if there is one.

    Example: headrace log repair copied/data
    """
    with FileLog.open(directory, create=False, accept_torn_copy=True) as opened_log:
        findings = [finding for finding in opened_log.verify() if finding.kind != "stale"]
    for finding in findings:
        echo(f"{finding.kind}: {finding.file}, byte {finding.position}: {finding.message}")
    echo(f"{directory} can be opened now. {len(findings) or 'No'} damages are left in it.")
    if findings:
        raise typer.Exit(EXIT_DAMAGE)
