"""`headrace explain`: why a window has not been published."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.output import emit, say, table
from headrace.cli.settings import JsonOption, LogOption, opened

MOST_SHOWN = 20


def explain(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="The Python file that declares the pipeline.", exists=True, dir_okay=False)],
    step: Annotated[str, typer.Argument(help="The step's name, as `headrace plan` shows it.")],
    window: Annotated[str | None, typer.Option("--window", metavar="TIME", help="Only the window that holds this time.")] = None,
    log: LogOption = None,
    state: Annotated[Path | None, typer.Option("--state", metavar="DIR", help="Its state directory. Default: NAME.state beside the file.")] = None,
    pipeline: Annotated[str | None, typer.Option("--pipeline", help="Which one, if the file declares several.")] = None,
    json: JsonOption = False,
) -> None:
    """Say what a step waits for: its open windows, its clocks, the producers that hold them back, and what would release them.

    Example: headrace explain shop.py minutes.window --window 2026-01-31T12:05:00Z
    """
    from headrace.pipeline.arrangement import known_names
    from headrace.pipeline.explain import explain as explained
    from headrace.pipeline.explain import plain, time_text, told
    from headrace.pipeline.load import load

    loaded = load(file, pipeline)
    with opened(context, log or loaded.log) as opened_log:
        found = explained(known_names(loaded.plan(), opened_log), opened_log, state or file.parent / f"{loaded.name}.state", step, window)
    if json:
        emit(plain(found))
        return
    for line in told(found):
        say(line)
    if found.windows:
        rows = [(time_text(each.start_us), time_text(each.end_us), "waits" if each.waiting else "published", f"{each.groups:,}") for each in found.windows]
        table(["from", "to", "window", "groups"], rows[:MOST_SHOWN])
    if len(found.windows) > MOST_SHOWN:
        say(f"… and {len(found.windows) - MOST_SHOWN:,} more (--json shows all)")
