"""`headrace run`: runs a pipeline until it is stopped. `replay.py` and `rescale.py` share its
options.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.commands.pipeline.serve import port_taken_text
from headrace.cli.options import (
    EXIT_DEAD_LETTERS,
    LogOption,
    find_log_address,
    stop_signals,
)
from headrace.cli.output import RunProgress, echo, seconds_text

if TYPE_CHECKING:
    from headrace.alerts.alert import AlertMessage


File = Annotated[
    Path,
    typer.Argument(
        help="The file of Python or SQL that declares the pipeline.", exists=True, dir_okay=False
    ),
]
PipelineOption = Annotated[
    str | None,
    typer.Option("--pipeline", metavar="NAME", help="Which one, if the file declares several."),
]
StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        help="The directory for state and views. Default: NAME.state next to the file.",
    ),
]
LocalOption = Annotated[
    Path | None,
    typer.Option(
        "--local",
        metavar="DIR",
        help=(
            "The directory on each machine's own disk for its working copy of the state. Default:"
            " in the state directory, or on a cluster the temporary directory."
        ),
    ),
]
MasterOption = Annotated[
    str | None, typer.Option("--master", help="Spark's master. Default: this machine.")
]
ShardsOption = Annotated[
    int | None,
    typer.Option(
        "--shards",
        min=1,
        max=128,
        help=(
            "The number of shards of this run. Default: the number that `headrace rescale` chose,"
            " else one per core."
        ),
    ),
]
WidthOption = Annotated[
    str,
    typer.Option(
        "--width",
        metavar="auto|one|wide",
        help=(
            "How wide batches run: whole in one task, wide over many, or as their rows need it. The"
            " results do not depend on it."
        ),
    ),
]
UntilOption = Annotated[
    bool,
    typer.Option("--until-caught-up", help="End when all rows in the log have been processed."),
]
FinalOption = Annotated[
    bool,
    typer.Option(
        "--final",
        help=(
            "With --until-caught-up, end event time then: emit windows, unmatched rows and patterns"
            " that still wait. Rows that are appended later are late."
        ),
    ),
]
PortOption = Annotated[
    int | None,
    typer.Option(
        "--port",
        min=0,
        max=65535,
        help=(
            "The port on which to serve the views; 0 is any free one. Default: 8765, or the next"
            " free one."
        ),
    ),
]


def run(
    context: typer.Context,
    file: File,
    log: LogOption = None,
    master: MasterOption = None,
    state: StateOption = None,
    local: LocalOption = None,
    shards: ShardsOption = None,
    pipeline: PipelineOption = None,
    until_caught_up: UntilOption = False,
    final: FinalOption = False,
    port: PortOption = None,
    batch_target: Annotated[
        str,
        typer.Option(
            "--batch-target",
            metavar="DURATION",
            help=(
                "How long a batch should take; under load, the size of batches is chosen"
                " accordingly."
            ),
        ),
    ] = "30 seconds",
    width: WidthOption = "auto",
    accept_edit: Annotated[
        list[str] | None,
        typer.Option(
            "--accept-edit",
            metavar="TOPIC",
            help=(
                "Go on with a topic whose definition was edited: its rows up to now follow the old"
                " definition. Can be given several times."
            ),
        ),
    ] = None,
    no_serve: Annotated[bool, typer.Option("--no-serve", help="Do not serve the views.")] = False,
    fail_on_dead_letters: Annotated[
        bool,
        typer.Option(
            "--fail-on-dead-letters",
            help=f"End with exit code {EXIT_DEAD_LETTERS} if rows became dead letters.",
        ),
    ] = False,
) -> None:
    """Run a pipeline: process its topics, update its views and derived topics, and serve the views
    on this machine, until Ctrl-C or SIGTERM.

    Example: headrace run shop.py --log file:data
    """
    from headrace.log.spark.launcher import archive_later, begin

    begin(master=master)  # the JVM starts while the rest is imported and checked
    from headrace.pipeline.loader import load_pipeline
    from headrace.runtime.run import run as run_pipeline

    loaded = load_pipeline(file, pipeline)
    directory = state or default_state(file, loaded.name)
    progress = RunProgress(
        opening=f"Running {loaded.name}; state and views in {directory}. Ctrl-C ends it."
    )
    echo_takeover(directory)
    with stop_signals() as stop:
        run_pipeline(
            loaded,
            log=find_log_address(context, log),
            state=directory,
            local=local,
            shards=shards,
            until_caught_up=until_caught_up,
            final=final,
            stop=stop,
            on_status=progress,
            master=master,
            serve=not no_serve and (port is not None or not until_caught_up),
            port=port,
            on_serving=lambda server: echo(
                f"Serving the views at {server.address}{port_taken_text(server, port)}."
            ),
            on_gateway=lambda gateway, address: echo(
                f"Accepting rows for {', '.join(gateway.topics)} at {address}."
            ),
            on_alert=print_alert,
            on_starting=echo_starting,
            batch_target=batch_target,
            width=width,
            accept_edits=accept_edit or (),
        )
        archive_later()
        echo(final_line(loaded.name, progress, stopped=stop.is_set()))
        if losses := progress.losses():
            print(losses, file=sys.stderr, flush=True)
    if fail_on_dead_letters and progress.dead_letters():
        raise typer.Exit(EXIT_DEAD_LETTERS)


def echo_starting(seconds: float | None) -> None:
    """Say on a terminal that Spark starts, which takes seconds, and how long it took."""
    if not sys.stderr.isatty():
        return
    text = "Starting Spark …" if seconds is None else f"Spark started in {seconds_text(seconds)}."
    print(text, file=sys.stderr, flush=True)


def print_alert(message: AlertMessage) -> None:
    """Print an alert on standard error, with the bell on a terminal."""
    bell = "\a" if sys.stderr.isatty() else ""
    print(f"{bell}{message.text().rstrip()}", file=sys.stderr, flush=True)


def default_state(file: Path, name: str) -> Path:
    return file.parent / f"{name}.state"


def echo_takeover(state: Path) -> None:
    """Say that this run replaces another process of the same pipeline, which is fenced and ends."""
    from headrace.errors import CorruptionError
    from headrace.run_status import running_elsewhere

    try:
        older = running_elsewhere(state)
    except CorruptionError as damaged:  # this run writes it anew, and fences whoever runs
        echo(f"{damaged.message} This run writes it anew.")
        return
    if older is not None:
        echo(
            f"Taking over from process {older.process} on {older.host}, which runs {older.pipeline}"
            " now and will end."
        )


def final_line(name: str, progress: RunProgress, *, stopped: bool) -> str:
    """The last line of a run."""
    return f"{name} ended cleanly." if stopped else progress.summary()
