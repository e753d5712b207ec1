"""`headrace run`: run a pipeline until it is stopped. The options that it shares with `replay` are here too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.dashboard import where_not
from headrace.cli.output import say
from headrace.cli.progress import Progress
from headrace.cli.settings import LogOption, chosen_log
from headrace.cli.stopping import stopping

if TYPE_CHECKING:
    from headrace.alerts.messages import AlertMessage

File = Annotated[Path, typer.Argument(help="The Python file that declares the pipeline.", exists=True, dir_okay=False)]
PipelineOption = Annotated[str | None, typer.Option("--pipeline", metavar="NAME", help="Which one, if the file declares several.")]
StateOption = Annotated[
    Path | None, typer.Option("--state", metavar="DIR", help="Where state and views are kept. Default: NAME.state beside the file.")
]
LocalOption = Annotated[
    Path | None,
    typer.Option(
        "--local", metavar="DIR", help="Where each machine keeps the state it has at hand: a disk of its own. Default: in the state directory, or on a cluster the temporary one."
    ),
]
MasterOption = Annotated[str | None, typer.Option("--master", help="Spark's master; default: this machine.")]
ShardsOption = Annotated[
    int | None,
    typer.Option("--shards", min=1, max=128, help="How many shards, for this run. Default: what `headrace rescale` chose, else one a core."),
]
UntilOption = Annotated[bool, typer.Option("--until-caught-up", help="End when everything that is there has been taken in.")]
PortOption = Annotated[
    int | None, typer.Option("--port", min=0, max=65535, help="Where to serve the views; 0 is any that is free. Default: 8765, or the next that is free.")
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
    port: PortOption = None,
    batch_target: Annotated[str, typer.Option("--batch-target", metavar="DURATION", help="How long a batch should take: when there is much to take in, its size is chosen so.")] = "30 seconds",
    no_serve: Annotated[bool, typer.Option("--no-serve", help="Do not serve the views.")] = False,
) -> None:
    """Run a pipeline: take in its topics, keep its views and derived topics, and serve the views on this machine, until Ctrl-C or SIGTERM.

    Example: headrace run shop.py --log file:data
    """
    from headrace.pipeline.load import load
    from headrace.pipeline.running import run as run_pipeline

    loaded = load(file, pipeline)
    directory = state or state_beside(file, loaded.name)
    progress = Progress(opening=f"Running {loaded.name}; state and views in {directory}. Ctrl-C ends it.")
    tell_of_older(directory)
    with stopping() as stop:
        run_pipeline(
            loaded,
            log=chosen_log(context, log),
            state=directory,
            local=local,
            shards=shards,
            until_caught_up=until_caught_up,
            stop=stop,
            on_status=progress,
            master=master,
            serve=not no_serve and (port is not None or not until_caught_up),
            port=port,
            on_serving=lambda server: say(f"Serving the views at {server.address}{where_not(server, port)}."),
            on_gateway=lambda gateway, address: say(f"Taking rows for {', '.join(gateway.topics)} at {address}."),
            on_alert=ring,
            batch_target=batch_target,
        )
        say(farewell(loaded.name, progress, stopped=stop.is_set()))


def ring(message: AlertMessage) -> None:
    """An alert, for whoever sits at the terminal: with its bell."""
    bell = "\a" if sys.stderr.isatty() else ""
    print(f"{bell}{message.text().rstrip()}", file=sys.stderr, flush=True)


def state_beside(file: Path, name: str) -> Path:
    return file.parent / f"{name}.state"


def tell_of_older(state: Path) -> None:
    """Another process that runs the same pipeline will notice that it is not the newest any more, and end."""
    from headrace.pipeline.status import running_elsewhere

    if (older := running_elsewhere(state)) is not None:
        say(f"Taking over from process {older.process} on {older.host}, which runs {older.pipeline} now: it ends by itself.")


def farewell(name: str, progress: Progress, *, stopped: bool) -> str:
    """The last line of a run."""
    return f"{name} ended cleanly." if stopped else progress.summary()
