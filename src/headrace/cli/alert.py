"""`headrace alert`: what alerts have told, and silence for a while."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from headrace.cli.output import emit, iso, say, table
from headrace.cli.settings import JsonOption, LogOption, opened, seconds_of
from headrace.durations import from_us

app = typer.Typer(help="Show what alerts have told, and silence them for a while.", no_args_is_help=True)
_MOST = 10_000
PipelineOption = Annotated[str, typer.Option("--pipeline", metavar="NAME", help="Of which pipeline.")]
NameArgument = Annotated[str, typer.Argument(metavar="ALERT", help="The alert's name.")]


@app.command("list")
def list_alerts(
    context: typer.Context,
    last: Annotated[int, typer.Option("--last", min=1, max=_MOST, help="How many messages, the newest.")] = 20,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Show the newest messages of alerts.

    Example: headrace alert list --log file:data
    """
    from headrace.alerts.messages import TOPIC, AlertMessage

    with opened(context, log) as opened_log:
        rows = []
        if TOPIC in opened_log.topics():
            start = max(opened_log.end_offsets(TOPIC)[0] - last, opened_log.start_offsets(TOPIC)[0])
            rows = [AlertMessage.of(row) for row in opened_log.read(TOPIC, 0, start).to_pylist()]
    if json:
        for each in rows:
            emit(each)
        return
    headings = ["at", "pipeline", "alert", "group", "state", "fired", "resolved", "active", ""]
    shown = [[iso(each.at), each.pipeline, each.alert, each.group or "-", each.state, each.fired, each.resolved, each.active, "silenced" if each.is_silenced else ""] for each in rows]
    table(headings, shown, empty="No alert has told anything yet.")


@app.command()
def silence(
    context: typer.Context,
    alert: NameArgument,
    pipeline: PipelineOption,
    duration: Annotated[str, typer.Option("--for", metavar="DURATION", help="For how long.")] = "1 hour",
    log: LogOption = None,
) -> None:
    """Tell nobody of an alert for a while. It is recorded meanwhile; what still fires at the end is told then.

    Example: headrace alert silence spike --pipeline shop --for "2 hours" --log file:data
    """
    from headrace.alerts.silences import silence as keep_silent

    until_us = time.time_ns() // 1_000 + int(seconds_of(duration, option="--for") * 1_000_000)
    with opened(context, log) as opened_log:
        keep_silent(opened_log, pipeline, alert, until_us)
    say(f"{alert} is silent until {iso(from_us(until_us))}.")


@app.command()
def unsilence(context: typer.Context, alert: NameArgument, pipeline: PipelineOption, log: LogOption = None) -> None:
    """End a silence now.

    Example: headrace alert unsilence spike --pipeline shop --log file:data
    """
    from headrace.alerts.silences import silence as keep_silent

    with opened(context, log) as opened_log:
        keep_silent(opened_log, pipeline, alert, 0)
    say(f"{alert} tells again.")
