"""`headrace watch`: checks rules over lag and health, and reports what fires and resolves.

The rules themselves are in `headrace.alerts.watch`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import parse_qs, urlsplit

import typer

from headrace.cli.options import (
    EXIT_ALERT,
    JsonOption,
    LogOption,
    open_chosen_log,
    parse_seconds,
    stop_signals,
)
from headrace.cli.output import echo, iso_text, print_json

if TYPE_CHECKING:
    from headrace.alerts.alert import AlertReceiver
    from headrace.alerts.watch import RuleEvent

MIN_INTERVAL_S = 0.1


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
            metavar="RECEIVER",
            help=(
                "Also notify webhook:https://… or smtp://HOST?to=ops@example.com; may be repeated."
            ),
        ),
    ] = None,
    every: Annotated[
        str, typer.Option("--every", metavar="DURATION", help="How often to check the rules.")
    ] = "5 seconds",
    once: Annotated[
        bool, typer.Option("--once", help="Check once; exit with 3 if a limit is exceeded.")
    ] = False,
    name: Annotated[
        str, typer.Option("--name", help="The name under which this watch stores what fires.")
    ] = "watch",
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Watch lag, watermarks, late and dropped rows, failed batches and dead letters, until Ctrl-C.

    A rule fires once its limit has been exceeded for as long as it says ("for 1 minute"; else 10
    seconds), and resolves once it has not been exceeded for as long.

    Example: headrace watch --rule "lag seconds > 60" --rule "dead letters > 0 of orders" --state
    shop.state --log file:data
    """
    from headrace.alerts.watch import PER_MINUTE, Measurements, Watcher, parse_rule, read_rules

    watched = [parse_rule(text) for text in rule or ()]
    if rules is not None:
        watched += read_rules(rules)
    if not watched:
        raise typer.BadParameter(
            "There is no rule: give --rule 'lag rows > 10000', or name a file with --rules.",
            param_hint="--rule",
        )
    if once and (
        per_minute := [
            watched_rule.measure for watched_rule in watched if watched_rule.measure in PER_MINUTE
        ]
    ):
        raise typer.BadParameter(
            f"{per_minute[0]} are counted over a minute, which a single check cannot do: leave out"
            " --once, or this rule.",
            param_hint="--once",
        )
    with open_chosen_log(context, log) as opened_log:
        measurements = Measurements(opened_log, state or ())
        measurements.check_subjects(watched)
        if once:
            values = measurements.measure()
            is_exceeded = False
            for watched_rule in watched:
                for subject, value in values.get(watched_rule.measure, {}).items():
                    if watched_rule.applies_to(subject) and value > watched_rule.limit:
                        echo(
                            f"{watched_rule.text}: {subject} has {watched_rule.format_value(value)}"
                        )
                        is_exceeded = True
            if is_exceeded:
                raise typer.Exit(EXIT_ALERT)
            return
        receivers = [parse_receiver(text) for text in to or ()]
        watcher = Watcher.open(opened_log, measurements, watched, name=name, to=receivers)
        with stop_signals("Stopping.") as stop:
            echo(f"Watching {len(watched)} rules. Ctrl-C ends it.")
            watcher.run(
                stop,
                max(parse_seconds(every, option="--every"), MIN_INTERVAL_S),
                lambda event: _print_event(event, as_json=json),
            )


def parse_receiver(text: str) -> AlertReceiver:
    """The receiver that `webhook:https://…` or `smtp://HOST?to=ops@example.com` names."""
    from headrace.alerts import email
    from headrace.sinks import from_url

    url = urlsplit(text)
    if url.scheme in {"smtp", "smtps"}:
        options = parse_qs(url.query)
        sender, password = (options.get(name, [None])[0] for name in ("sender", "password"))
        return email(
            url._replace(query="").geturl(),
            to=options.get("to", []),
            sender=sender or "headrace@localhost",
            password=password,
        )
    if url.scheme != "webhook":
        raise typer.BadParameter(
            f"{text!r} is not a receiver: write webhook:https://… or"
            " smtp://HOST?to=ops@example.com.",
            param_hint="--to",
        )
    return from_url(text, table="alerts")


def _print_event(event: RuleEvent, *, as_json: bool) -> None:
    at = iso_text(datetime.now(UTC))
    if as_json:
        print_json(
            {
                "event": "firing" if event.is_firing else "resolved",
                "at": at,
                "rule": event.rule.text,
                "of": event.subject,
                "value": event.value,
                "limit": event.rule.limit,
            }
        )
    else:
        print(f"{at}  {event.text}", flush=True)
