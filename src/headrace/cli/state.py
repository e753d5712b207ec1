"""`headrace state`: look at the state a pipeline keeps for its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.output import emit, say, table
from headrace.cli.settings import EXIT_DAMAGE, JsonOption, LogOption, opened

app = typer.Typer(help="A pipeline's state: list its steps, show one, verify the files.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="The pipeline's name.")]
StateOption = Annotated[Path | None, typer.Option("--state", metavar="DIR", help="Its state directory. Default: NAME.state")]


@app.command("list")
def list_steps(context: typer.Context, name: Name, log: LogOption = None, state: StateOption = None, json: JsonOption = False) -> None:
    """List the steps that keep state, with how many keys and bytes.

    Example: headrace state list shop --log file:data
    """
    from headrace.pipeline.inspect import step_states

    with opened(context, log) as opened_log:
        found = step_states(opened_log, name, state or Path(f"{name}.state"))
    if json:
        for each in found:
            emit(each)
        return
    table(
        ["step", "tick", "keys", "files", "bytes"], [(e.step, e.tick, f"{e.keys:,}", e.files, f"{e.bytes:,}") for e in found], empty="No state yet."
    )


@app.command()
def verify(context: typer.Context, name: Name, log: LogOption = None, state: StateOption = None, json: JsonOption = False) -> None:
    """Check that every file that the ledger refers to is there and sound. Exits with 4 if not.

    Example: headrace state verify shop --log file:data
    """
    from headrace.pipeline.inspect import damaged_files

    with opened(context, log) as opened_log:
        damage = damaged_files(opened_log, name, state or Path(f"{name}.state"))
    for message in damage:
        emit({"damage": message}) if json else say(message)
    if damage:
        raise typer.Exit(EXIT_DAMAGE)
    if not json:
        say("Every state file that the ledger refers to is there and sound.")
