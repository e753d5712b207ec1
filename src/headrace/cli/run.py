"""`headrace run`: run a pipeline until it is stopped."""

from __future__ import annotations

import signal
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Annotated

import typer

from headrace.cli.output import say
from headrace.cli.settings import LogOption, Settings

File = Annotated[Path, typer.Argument(help="The Python file that declares the pipeline.", exists=True, dir_okay=False)]
StateOption = Annotated[
    Path | None, typer.Option("--state", metavar="DIR", help="Where state and views are kept. Default: NAME.state beside the file.")
]


def run(
    context: typer.Context,
    file: File,
    log: LogOption = None,
    master: Annotated[str | None, typer.Option("--master", help="Spark's master; default: this machine.")] = None,
    state: StateOption = None,
    shards: Annotated[int | None, typer.Option("--shards", min=1, max=128, help="How many shards; can be changed at any start.")] = None,
    pipeline: Annotated[str | None, typer.Option("--pipeline", help="Which one, if the file declares several.")] = None,
    until_caught_up: Annotated[bool, typer.Option("--until-caught-up", help="End when everything that is there has been taken in.")] = False,
) -> None:
    """Run a pipeline: take in its topics, keep its views and derived topics, until Ctrl-C or SIGTERM.

    Example: headrace run shop.py --log file:data
    """
    from headrace.pipeline.load import load
    from headrace.pipeline.running import run as run_pipeline

    loaded = load(file, pipeline)
    settings = context.find_object(Settings) or Settings()
    directory = state or file.parent / f"{loaded.name}.state"
    stop = Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    say(f"Running {loaded.name}; state and views in {directory}. Ctrl-C ends it.")
    run_pipeline(loaded, log=log or settings.log, state=directory, shards=shards, until_caught_up=until_caught_up, stop=stop, master=master)
    say(f"{loaded.name} ended cleanly.")
