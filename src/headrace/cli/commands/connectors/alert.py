"""`headrace alert`: lists the messages of alerts, and silences an alert for a while."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from headrace.cli.options import JsonOption, LogOption, open_chosen_log, parse_seconds
from headrace.cli.output import echo, iso_text, print_json, print_table
from headrace.durations import from_us

app = typer.Typer(
    help="Show the messages of alerts, and silence an alert for a while.", no_args_is_help=True
)
_MAX_MESSAGES = 10_000
PipelineOption = Annotated[
    str, typer.Option("--pipeline", metavar="NAME", help="The alert's pipeline.")
]
NameArgument = Annotated[str, typer.Argument(metavar="ALERT", help="The alert's name.")]


@app.command("list")
def list_alerts(
    context: typer.Context,
    last: Annotated[
        int,
        typer.Option(
            "--last", min=1, max=_MAX_MESSAGES, help="How many of the newest messages to show."
        ),
    ] = 20,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Show the newest messages of alerts.

    Example: headrace alert list --log file:data
    """
    from headrace.alerts.alert import TOPIC, AlertMessage

    messages = []
    with open_chosen_log(context, log) as opened_log:
        if TOPIC in opened_log.topics():
            start = max(opened_log.end_offsets(TOPIC)[0] - last, opened_log.start_offsets(TOPIC)[0])
            rows = opened_log.read(TOPIC, 0, start).to_pylist()
            messages = [AlertMessage.from_row(row) for row in rows]
    if json:
        for message in messages:
            print_json(message)
        return
    print_table(
        ["at", "pipeline", "alert", "group", "state", "fired", "resolved", "active", ""],
        [
            [
                iso_text(message.at),
                message.pipeline,
                message.alert,
                message.group or "-",
                message.state,
                message.fired,
                message.resolved,
                message.active,
                "silenced" if message.is_silenced else "",
            ]
            for message in messages
        ],
        empty="There are no messages yet.",
    )


@app.command()
def silence(
    context: typer.Context,
    alert: NameArgument,
    pipeline: PipelineOption,
    duration: Annotated[
        str, typer.Option("--for", metavar="DURATION", help="How long the silence lasts.")
    ] = "1 hour",
    log: LogOption = None,
) -> None:
    """Send nothing of an alert for a while. Its messages are recorded meanwhile; what still fires
    at the end is sent then.

    Example: headrace alert silence spike --pipeline shop --for "2 hours" --log file:data
    """
    from headrace.alerts.decision import silence as silence_alert

    until_us = time.time_ns() // 1_000 + int(parse_seconds(duration, option="--for") * 1_000_000)
    with open_chosen_log(context, log) as opened_log:
        silence_alert(opened_log, pipeline, alert, until_us)
    echo(f"{alert} is silent until {iso_text(from_us(until_us))}.")


@app.command()
def unsilence(
    context: typer.Context, alert: NameArgument, pipeline: PipelineOption, log: LogOption = None
) -> None:
    """End a silence now.

    Example: headrace alert unsilence spike --pipeline shop --log file:data
    """
    from headrace.alerts.decision import silence as silence_alert

    with open_chosen_log(context, log) as opened_log:
        silence_alert(opened_log, pipeline, alert, 0)
    echo(f"{alert} is no longer silent.")
