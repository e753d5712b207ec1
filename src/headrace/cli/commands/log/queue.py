"""`headrace queue`: receives, acknowledges, returns and renews messages, for shell scripts; looks
at a queue and purges it.
"""

from __future__ import annotations

import json as json_module
import sys
from typing import Annotated

import typer

from headrace.cli.options import JsonOption, LogOption, YesOption, confirm, open_chosen_log
from headrace.cli.output import count_text, echo, print_json, print_table
from headrace.errors import UnknownGroup
from headrace.log.api import Log

app = typer.Typer(
    help="A topic as a queue, for scripts: receive, ack, nack, renew, peek, stats, purge.",
    no_args_is_help=True,
)

Topic = Annotated[str, typer.Argument(help="The topic used as a queue.")]
Group = Annotated[str, typer.Option(help="The group of workers that share the messages.")]
Receipts = Annotated[
    list[str] | None,
    typer.Argument(
        help="Receipts; none, or -, reads them (or what receive printed) from standard input."
    ),
]


@app.command()
def receive(
    context: typer.Context,
    topic: Topic,
    group: Group,
    max_rows: Annotated[int, typer.Option("--max", min=1, help="Receive at most this many.")] = 1,
    visibility: Annotated[
        str,
        typer.Option(metavar="DURATION", help="How long they are hidden from other workers."),
    ] = "30 seconds",
    wait: Annotated[
        str, typer.Option(metavar="DURATION", help="How long to wait for the first message.")
    ] = "0 seconds",
    log: LogOption = None,
    json: JsonOption = False,  # noqa: ARG001 - the output is always JSON; scripts may give --json
) -> None:
    """Receive messages: one JSON object a line, with the receipt to acknowledge it. Prints nothing
    if there is none.

    Example: headrace queue receive emails --group mailers --max 10 --visibility "1 minute"
    """
    with open_chosen_log(context, log) as opened_log, opened_log.queue(topic, group) as queue:
        for message in queue.receive(max_rows, visibility=visibility, wait=wait):
            print_json(
                {
                    "receipt": message.receipt,
                    "topic": message.topic,
                    "partition": message.partition,
                    "offset": message.offset,
                    "timestamp": message.timestamp,
                    "deliveries": message.deliveries,
                    "row": message.row,
                    "headers": message.headers,
                }
            )


@app.command()
def ack(
    context: typer.Context,
    topic: Topic,
    group: Group,
    receipts: Receipts = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Acknowledge messages: they are not delivered again.

    Example: headrace queue ack emails --group mailers RECEIPT
    """
    parsed_receipts = _receipts(receipts)
    with open_chosen_log(context, log) as opened_log, opened_log.queue(topic, group) as queue:
        queue.ack(parsed_receipts)
    _report("acknowledged", len(parsed_receipts), json=json)


@app.command()
def nack(
    context: typer.Context,
    topic: Topic,
    group: Group,
    receipts: Receipts = None,
    delay: Annotated[
        str, typer.Option(metavar="DURATION", help="Deliver them again only after this long.")
    ] = "0 seconds",
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Return messages: they are delivered again, to the next worker that receives.

    Example: headrace queue nack emails --group mailers --delay "1 minute" RECEIPT
    """
    parsed_receipts = _receipts(receipts)
    with open_chosen_log(context, log) as opened_log, opened_log.queue(topic, group) as queue:
        queue.nack(parsed_receipts, delay)
    _report("given back", len(parsed_receipts), json=json)


@app.command()
def renew(
    context: typer.Context,
    topic: Topic,
    group: Group,
    receipts: Receipts = None,
    visibility: Annotated[
        str,
        typer.Option(metavar="DURATION", help="How long, from now, they stay hidden from others."),
    ] = "30 seconds",
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Keep messages for longer, while they are being worked on.

    Example: headrace queue renew emails --group mailers --visibility "5 minutes" RECEIPT
    """
    parsed_receipts = _receipts(receipts)
    with open_chosen_log(context, log) as opened_log, opened_log.queue(topic, group) as queue:
        queue.renew(parsed_receipts, visibility)
    _report("renewed", len(parsed_receipts), json=json)


@app.command()
def peek(
    context: typer.Context,
    topic: Topic,
    group: Group,
    max_rows: Annotated[int, typer.Option("--max", min=1, help="Show at most this many.")] = 10,
    log: LogOption = None,
    json: JsonOption = False,  # noqa: ARG001 - the output is always JSON; scripts may give --json
) -> None:
    """Look at messages that are not done, without receiving them: one JSON object a line, whose
    status is ready, leased or delayed.

    Example: headrace queue peek emails --group mailers --max 5
    """
    with open_chosen_log(context, log) as opened_log, opened_log.queue(topic, group) as queue:
        for message in queue.peek(max_rows):
            print_json(
                {
                    "topic": message.topic,
                    "partition": message.partition,
                    "offset": message.offset,
                    "timestamp": message.timestamp,
                    "deliveries": message.deliveries,
                    "status": message.status,
                    "row": message.row,
                    "headers": message.headers,
                }
            )


@app.command()
def stats(
    context: typer.Context,
    topic: Topic,
    group: Group,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Count the messages that are ready, leased and delayed, by partition.

    Example: headrace queue stats emails --group mailers
    """
    with open_chosen_log(context, log) as opened_log:
        _check_group(opened_log, group)
        with opened_log.queue(topic, group) as queue:
            partitions = queue.stats()
    if json:
        for each in partitions:
            print_json(
                {
                    "topic": each.topic,
                    "group": each.group,
                    "partition": each.partition,
                    "ready": each.ready,
                    "leased": each.leased,
                    "delayed": each.delayed,
                    "oldest": each.oldest,
                }
            )
        return
    print_table(
        ["partition", "ready", "leased", "delayed", "oldest offset"],
        [
            (each.partition, each.ready, each.leased, each.delayed, each.oldest)
            for each in partitions
        ],
    )


@app.command()
def purge(
    context: typer.Context,
    topic: Topic,
    group: Group,
    yes: YesOption = False,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Mark all messages that are in the topic now as done; the rows stay. Asks for confirmation on
    a terminal; elsewhere --yes is required.

    Example: headrace queue purge emails --group mailers --yes
    """
    with open_chosen_log(context, log) as opened_log:
        _check_group(opened_log, group)
        if not yes:
            confirm(f"Mark all messages of {topic} as done for {group}?", to="purge")
        with opened_log.queue(topic, group) as queue:
            count = queue.purge()
    _report("purged", count, json=json)


def _check_group(log: Log, group: str) -> None:
    """Refuse a group that has received nothing yet: its name may be wrong."""
    if group not in log.groups():
        raise UnknownGroup(group, log.groups())


def _receipts(arguments: list[str] | None) -> list[str]:
    """Receipts from the command line, or one a line from standard input, where a line may also be
    one that `receive` printed.
    """
    if arguments and arguments != ["-"]:
        return arguments
    receipts = [_receipt(line.strip()) for line in sys.stdin if line.strip()]
    if not receipts:
        raise typer.BadParameter(
            "Name the receipts that `receive` printed, or pass them on standard input.",
            param_hint="RECEIPTS",
        )
    return receipts


def _receipt(line: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        return str(json_module.loads(line)["receipt"])
    except (json_module.JSONDecodeError, KeyError):
        raise typer.BadParameter(
            f"{line[:80]!r} is not a line that `receive` prints.", param_hint="RECEIPTS"
        ) from None


def _report(done: str, count: int, *, json: bool) -> None:
    if json:
        print_json({done.replace(" ", "_"): count})
    else:
        echo(f"{count_text(count, 'message')} {done}.")
