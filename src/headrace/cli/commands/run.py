"""`headrace run`: run a pipeline until it is stopped. The options that it shares with `replay` are
here too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.commands.serve import where_not
from headrace.cli.options import LogOption, chosen_log, opened, stopping
from headrace.cli.output import Progress, say
from headrace.durations import to_time_us
from headrace.errors import BadDuration

if TYPE_CHECKING:
    from headrace.alerts.alert import AlertMessage


File = Annotated[
    Path,
    typer.Argument(help="The Python file that declares the pipeline.", exists=True, dir_okay=False),
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
        help="Where state and views are kept. Default: NAME.state beside the file.",
    ),
]
LocalOption = Annotated[
    Path | None,
    typer.Option(
        "--local",
        metavar="DIR",
        help=(
            "Where each machine keeps the state it has at hand: a disk of its own. Default: in the"
            " state directory, or on a cluster the temporary one."
        ),
    ),
]
MasterOption = Annotated[
    str | None, typer.Option("--master", help="Spark's master; default: this machine.")
]
ShardsOption = Annotated[
    int | None,
    typer.Option(
        "--shards",
        min=1,
        max=128,
        help=(
            "How many shards, for this run. Default: what `headrace rescale` chose, else one a"
            " core."
        ),
    ),
]
UntilOption = Annotated[
    bool,
    typer.Option("--until-caught-up", help="End when everything that is there has been taken in."),
]
PortOption = Annotated[
    int | None,
    typer.Option(
        "--port",
        min=0,
        max=65535,
        help=(
            "Where to serve the views; 0 is any that is free. Default: 8765, or the next that is"
            " free."
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
    port: PortOption = None,
    batch_target: Annotated[
        str,
        typer.Option(
            "--batch-target",
            metavar="DURATION",
            help=(
                "How long a batch should take: when there is much to take in, its size is"
                " chosen so."
            ),
        ),
    ] = "30 seconds",
    no_serve: Annotated[bool, typer.Option("--no-serve", help="Do not serve the views.")] = False,
) -> None:
    """Run a pipeline: take in its topics, keep its views and derived topics, and serve the views on
    this machine, until Ctrl-C or SIGTERM.

    Example: headrace run shop.py --log file:data
    """
    from headrace.pipeline.loader import load
    from headrace.runtime.run import run as run_pipeline

    loaded = load(file, pipeline)
    directory = state or state_beside(file, loaded.name)
    progress = Progress(
        opening=f"Running {loaded.name}; state and views in {directory}. Ctrl-C ends it."
    )
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
            on_serving=lambda server: say(
                f"Serving the views at {server.address}{where_not(server, port)}."
            ),
            on_gateway=lambda gateway, address: say(
                f"Taking rows for {', '.join(gateway.topics)} at {address}."
            ),
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
    """Another process that runs the same pipeline will notice that it is not the newest any more,
    and end.
    """
    from headrace.runtime.status import running_elsewhere

    if (older := running_elsewhere(state)) is not None:
        say(
            f"Taking over from process {older.process} on {older.host}, which runs {older.pipeline}"
            " now: it ends by itself."
        )


def farewell(name: str, progress: Progress, *, stopped: bool) -> str:
    """The last line of a run."""
    return f"{name} ended cleanly." if stopped else progress.summary()


# `headrace replay`: run a version of a pipeline beside it, over the same ticks.


def replay(
    context: typer.Context,
    file: File,
    version: Annotated[
        str,
        typer.Option(
            "--as",
            metavar="VERSION",
            help="The version's name: its outputs are called OUTPUT.VERSION.",
        ),
    ],
    since: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TICK|TIME",
            help=(
                "Begin at this tick, or at the first one at or after a time such as"
                " 2026-01-31T12:00:00Z, with nothing remembered from before. "
                "Default: the first tick."
            ),
        ),
    ] = None,
    retick: Annotated[
        bool,
        typer.Option(
            "--retick",
            help="Cut new ticks instead of using the recorded ones: the rows may differ.",
        ),
    ] = False,
    log: LogOption = None,
    master: MasterOption = None,
    state: StateOption = None,
    local: LocalOption = None,
    shards: ShardsOption = None,
    pipeline: PipelineOption = None,
    until_caught_up: UntilOption = False,
) -> None:
    """Build a version of a pipeline beside it: the same ticks over again, with state, topics and
    views of its own.

    An unchanged pipeline gives the same rows; a changed one shows what it would have given.

    When the recorded ticks are done it goes on with new ones, until Ctrl-C or SIGTERM. The same
    command goes on with a version that was stopped.

    Example: headrace replay shop.py --as v2 --until-caught-up
    """
    from headrace.pipeline.loader import load
    from headrace.runtime.run import replay as replay_pipeline
    from headrace.runtime.versions import version_state

    loaded = load(file, pipeline)
    begin = _tick_or_time(since)
    directory = state or state_beside(file, loaded.name)
    home = version_state(directory, version)
    progress = Progress(
        opening=f"Replaying {loaded.name} as {version}; state and views in {home}. Ctrl-C ends it."
    )
    tell_of_older(home)
    with stopping() as stop:
        replay_pipeline(
            loaded,
            version,
            since=begin,
            retick=retick,
            log=chosen_log(context, log),
            state=directory,
            local=local,
            shards=shards,
            until_caught_up=until_caught_up,
            stop=stop,
            on_status=progress,
            master=master,
        )
        say(farewell(f"{loaded.name} as {version}", progress, stopped=stop.is_set()))


def _tick_or_time(text: str | None) -> int | str | None:
    if text is None or (text.isascii() and text.isdigit()):
        return None if text is None else int(text)
    try:
        to_time_us(text)
    except BadDuration:
        message = (
            f"{text!r} is neither a tick's number nor a time such as 2026-01-31T12:00:00Z or '1"
            " hour ago'."
        )
        raise typer.BadParameter(message, param_hint="--from") from None
    return text


# `headrace rescale`: choose how many shards a pipeline has from now on.


def rescale(
    context: typer.Context,
    file: File,
    shards: Annotated[int, typer.Option("--shards", min=1, max=128, help="How many shards.")],
    version: Annotated[
        str | None,
        typer.Option("--as", metavar="VERSION", help="Of this version, made by `headrace replay`."),
    ] = None,
    log: LogOption = None,
    state: StateOption = None,
    pipeline: PipelineOption = None,
) -> None:
    """Choose how many shards a pipeline has: how many tasks of a stage can work at once. Its rows
    stay the same.

    A running pipeline takes it on between two batches, the next run when it starts; `headrace run
    --shards` beats it.

    Example: headrace rescale shop.py --shards 8
    """
    from headrace.errors import ConfigurationError
    from headrace.pipeline.loader import load
    from headrace.runtime.arrangement import remember_shards
    from headrace.runtime.run import address_of
    from headrace.runtime.status import read_status
    from headrace.runtime.versions import version_state

    loaded = load(file, pipeline)
    name = loaded.name if version is None else f"{loaded.name}.{version}"
    directory = state or state_beside(file, loaded.name)
    with opened(context, address_of(loaded, chosen_log(context, log))) as chosen:
        remember_shards(chosen, name, shards)
    try:
        known = read_status(directory if version is None else version_state(directory, version))
    except ConfigurationError:
        say(f"{name} will run with {shards} shards.")
        return
    now = (
        f"now {known.shards}; the run under way (process {known.process}) changes within seconds,"
        " unless it was started with --shards"
    )
    say(
        f"{name} will run with {shards} shards"
        f" ({now if known.is_running else f'last time {known.shards}'})."
    )
