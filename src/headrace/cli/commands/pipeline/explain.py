"""`headrace explain`: why a window has not been emitted, and what a pattern waits for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import JsonOption, LogOption, open_chosen_log
from headrace.cli.output import echo, print_json, print_table
from headrace.run_status import read_status_fields

if TYPE_CHECKING:
    from headrace.log.api import Log
    from headrace.plan.plan import PipelinePlan


MAX_SHOWN = 20


def explain(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            help="The file of Python or SQL that declares the pipeline.",
            exists=True,
            dir_okay=False,
        ),
    ],
    step: Annotated[str, typer.Argument(help="The step's name, as `headrace plan` shows it.")],
    window: Annotated[
        str | None,
        typer.Option("--window", metavar="TIME", help="Only the window that holds this time."),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            "--key",
            metavar="NAME=VALUE",
            help="A pattern's partial matches of this key; once for each column of the key.",
        ),
    ] = None,
    log: LogOption = None,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="DIR",
            help="Its state directory. Default: NAME.state next to the file.",
        ),
    ] = None,
    pipeline: Annotated[
        str | None, typer.Option("--pipeline", help="Which one, if the file declares several.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Explain what a step waits for: its open windows, a key's partial matches, its watermarks, the
    producers that hold them back, and what would release them.

    Example: headrace explain shop.py minutes.window --window 2026-01-31T12:05:00Z
    Example: headrace explain shop.py fraud.match --key card=4000-12
    """
    from headrace.pipeline.loader import load_pipeline
    from headrace.runtime.explain import explain as explain_step
    from headrace.runtime.explain import explanation_plain, explanation_text, time_text
    from headrace.runtime.query_assignment import known_names

    loaded = load_pipeline(file, pipeline)
    directory = state or file.parent / f"{loaded.name}.state"
    if key:
        with open_chosen_log(context, log or loaded.log) as opened_log:
            _show_key(
                known_names(loaded.plan(), opened_log),
                opened_log,
                directory,
                step,
                key,
                json=json,
            )
        return
    with open_chosen_log(context, log or loaded.log) as opened_log:
        explanation = explain_step(
            known_names(loaded.plan(), opened_log), opened_log, directory, step, window
        )
    if json:
        print_json(explanation_plain(explanation))
        return
    for line in explanation_text(explanation):
        echo(line)
    if explanation.windows:
        rows = [
            (
                time_text(open_window.start_us),
                time_text(open_window.end_us),
                "waiting" if open_window.waiting else "emitted",
                f"{open_window.groups:,}",
            )
            for open_window in explanation.windows
        ]
        print_table(["from", "to", "window", "groups"], rows[:MAX_SHOWN])
    if len(explanation.windows) > MAX_SHOWN:
        echo(f"… and {len(explanation.windows) - MAX_SHOWN:,} more (--json shows all)")
    status = read_status_fields(directory)
    if status is not None and status.get("width"):
        width = "whole in one task" if status["batch_width"] == "one" else "wide"
        echo(f"The last batch ran {width}: {status['width']}.")


def _show_key(
    plan: PipelinePlan, log: Log, state: Path, step: str, key: list[str], *, json: bool
) -> None:
    from headrace.runtime.explain import (
        partial_matches,
        partial_matches_plain,
        partial_matches_text,
    )

    wrong = [condition for condition in key if "=" not in condition]
    if wrong:
        raise typer.BadParameter(f"{wrong[0]!r} does not name a column.", param_hint="--key")
    matches = partial_matches(
        plan, log, state, step, dict(condition.split("=", 1) for condition in key)
    )
    if json:
        print_json(partial_matches_plain(matches))
        return
    for line in partial_matches_text(matches):
        echo(line)
