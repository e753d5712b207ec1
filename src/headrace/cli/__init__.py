"""The command `headrace`.

    registry    the list of commands, imported when they are called, and how errors end them
    options     the log, common options, durations and signals
    output      tables, JSON lines and progress
    row_files   rows from JSON lines, CSV and Parquet files
    view_stores the stores of views that a command reads
    commands/   one module per command or group of commands

Exit codes, for scripts: 0 done, 1 error (standard error says what happened and what to do), 2 wrong
usage, 3 a threshold was exceeded, 4 `log verify` found damage, 5 `view diff` or `sync --check`
found a difference, 6 `run --fail-on-dead-letters` made some, 7 `verify-determinism` found a
difference, 130 ended by Ctrl-C. If a reader such as `head` closes the output early, a
command ends with 0.
"""

from __future__ import annotations

from typing import Annotated

import typer

from headrace._version import __version__
from headrace.cli.options import JsonOption, Settings
from headrace.cli.registry import LazyGroup, register

app = typer.Typer(
    name="headrace",
    cls=LazyGroup,
    help=(
        "Stream processing for Python: a durable log with topics, groups and queues, in a directory"
        " or on Kafka, and pipelines over it, with views that are served.\n\nName the log with"
        " --log or HEADRACE_LOG: file:PATH is a directory, kafka://HOST:PORT a broker.\n\nExit"
        " codes: 0 done, 1 error, 2 wrong usage, 3 a threshold was exceeded, 4 damage was found,"
        " 5 views, or a sink and its topic, differ, 6 rows became dead letters (if asked), 7 a"
        " pipeline is not deterministic."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
register(app)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        version()
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
    log: Annotated[
        str | None,
        typer.Option("--log", metavar="ADDRESS", help="The log: file:PATH or kafka://HOST:PORT."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    context.obj = Settings(log=log, debug=debug)


@app.command()
def version(json: JsonOption = False) -> None:
    """Show the version.

    Example: headrace version
    """
    from headrace.cli.output import echo, print_json

    if json:
        print_json({"headrace": __version__})
    else:
        echo(f"headrace {__version__}")


def main() -> None:
    """The entry point of the installed command."""
    app()
