"""`headrace alert`: what alerts have told, and silence for a while."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import parse_qs, urlsplit

import typer

from headrace.cli.options import EXIT_ALERT, JsonOption, LogOption, opened, seconds_of, stopping
from headrace.cli.output import emit, iso, say, table
from headrace.durations import from_us

if TYPE_CHECKING:
    from headrace.alerts.alert import Way
    from headrace.alerts.watch import Event


app = typer.Typer(
    help="Show what alerts have told, and silence them for a while.", no_args_is_help=True
)
_MOST = 10_000
PipelineOption = Annotated[
    str, typer.Option("--pipeline", metavar="NAME", help="Of which pipeline.")
]
NameArgument = Annotated[str, typer.Argument(metavar="ALERT", help="The alert's name.")]


@app.command("list")
def list_alerts(
    context: typer.Context,
    last: Annotated[
        int, typer.Option("--last", min=1, max=_MOST, help="How many messages, the newest.")
    ] = 20,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Show the newest messages of alerts.

    Example: headrace alert list --log file:data
    """
    from headrace.alerts.alert import TOPIC, AlertMessage

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
    shown = [
        [
            iso(each.at),
            each.pipeline,
            each.alert,
            each.group or "-",
            each.state,
            each.fired,
            each.resolved,
            each.active,
            "silenced" if each.is_silenced else "",
        ]
        for each in rows
    ]
    table(headings, shown, empty="No alert has told anything yet.")


@app.command()
def silence(
    context: typer.Context,
    alert: NameArgument,
    pipeline: PipelineOption,
    duration: Annotated[
        str, typer.Option("--for", metavar="DURATION", help="For how long.")
    ] = "1 hour",
    log: LogOption = None,
) -> None:
    """Tell nobody of an alert for a while. It is recorded meanwhile; what still fires at the end is
    told then.

    Example: headrace alert silence spike --pipeline shop --for "2 hours" --log file:data
    """
    from headrace.alerts.decision import silence as keep_silent

    until_us = time.time_ns() // 1_000 + int(seconds_of(duration, option="--for") * 1_000_000)
    with opened(context, log) as opened_log:
        keep_silent(opened_log, pipeline, alert, until_us)
    say(f"{alert} is silent until {iso(from_us(until_us))}.")


@app.command()
def unsilence(
    context: typer.Context, alert: NameArgument, pipeline: PipelineOption, log: LogOption = None
) -> None:
    """End a silence now.

    Example: headrace alert unsilence spike --pipeline shop --log file:data
    """
    from headrace.alerts.decision import silence as keep_silent

    with opened(context, log) as opened_log:
        keep_silent(opened_log, pipeline, alert, 0)
    say(f"{alert} tells again.")


# `headrace watch`: lag and health watched by rules, each a line; what fires and what is resolved is
# told, here and to others.


SHORTEST_LOOK_S = 0.1


def watch(
    context: typer.Context,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            "--rule",
            metavar="RULE",
            help="Such as 'lag rows > 10000 of billing for 1 minute'; may be repeated.",
        ),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option(
            "--rules",
            metavar="FILE",
            help="A file with one rule a line.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    state: Annotated[
        list[Path] | None,
        typer.Option(
            "--state",
            metavar="DIR",
            help="A pipeline's state directory, such as shop.state; may be repeated.",
        ),
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="WAY",
            help=(
                "Who else is told: webhook:https://… or smtp://HOST?to=ops@example.com; may be"
                " repeated."
            ),
        ),
    ] = None,
    every: Annotated[
        str, typer.Option("--every", metavar="DURATION", help="How often to look.")
    ] = "5 seconds",
    once: Annotated[
        bool, typer.Option("--once", help="Look once; exit with 3 if a rule's limit is passed.")
    ] = False,
    name: Annotated[
        str, typer.Option("--name", help="Of this watch: what fires is remembered under it.")
    ] = "watch",
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Watch lag, watermarks, late and dropped rows, failed batches and dead letters, until Ctrl-C.

    A rule fires when its limit has been passed for as long as it says ("for 1 minute"; else 10
    seconds), and is resolved when it has not been for as long.

    Example: headrace watch --rule "lag seconds > 60" --rule "dead letters > 0 of orders" --state
    shop.state --log file:data
    """
    from headrace.alerts.watch import A_MINUTE, Facts, Watching, is_meant, parse, read

    found = [*(parse(each) for each in rule or ()), *(read(rules) if rules is not None else ())]
    if not found:
        raise typer.BadParameter(
            "There is no rule: say --rule 'lag rows > 10000', or name a file with --rules.",
            param_hint="--rule",
        )
    if once and (by_minute := [each for each in found if each.what in A_MINUTE]):
        raise typer.BadParameter(
            f"{by_minute[0].what} are counted over a minute, which one look cannot see: leave out"
            " --once, or this rule.",
            param_hint="--once",
        )
    with opened(context, log) as opened_log:
        facts = Facts(opened_log, state or ())
        if once:
            values = facts.look()
            passed = [
                (each, of, value)
                for each in found
                for of, value in values.get(each.what, {}).items()
                if is_meant(each, of) and value > each.limit
            ]
            for each, of, value in passed:
                say(f"{each.text}: {of} has {each.shown(value)}")
            if passed:
                raise typer.Exit(EXIT_ALERT)
            return
        watching = Watching(
            opened_log, facts, found, name=name, to=[way_of(each) for each in to or ()]
        )
        with stopping("Stopping.") as stop:
            say(f"Watching {len(found)} rules. Ctrl-C ends it.")
            watching.run(
                stop,
                max(seconds_of(every, option="--every"), SHORTEST_LOOK_S),
                lambda event: _tell(event, as_json=json),
            )


def way_of(text: str) -> Way:
    """`webhook:https://…`, or `smtp://HOST?to=ops@example.com`."""
    from headrace.alerts import email
    from headrace.sinks import from_url

    parts = urlsplit(text)
    if parts.scheme in {"smtp", "smtps"}:
        asked = parse_qs(parts.query)
        sender, password = (asked.get(name, [None])[0] for name in ("sender", "password"))
        return email(
            parts._replace(query="").geturl(),
            to=asked.get("to", []),
            sender=sender or "headrace@localhost",
            password=password,
        )
    if parts.scheme != "webhook":
        raise typer.BadParameter(
            f"{text!r} is no one who can be told: write webhook:https://… or"
            " smtp://HOST?to=ops@example.com.",
            param_hint="--to",
        )
    return from_url(text, table="alerts")


def _tell(event: Event, *, as_json: bool) -> None:
    at = iso(datetime.now(UTC))
    if as_json:
        emit(
            {
                "event": "firing" if event.is_firing else "resolved",
                "at": at,
                "rule": event.rule.text,
                "of": event.of,
                "value": event.value,
                "limit": event.rule.limit,
            }
        )
    else:
        print(f"{at}  {event.text}", flush=True)
