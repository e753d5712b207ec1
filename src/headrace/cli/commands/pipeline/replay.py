"""`headrace replay`: runs a version of a pipeline next to it, over the same ticks."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headrace.cli.commands.pipeline.run import (
    File,
    FinalOption,
    LocalOption,
    MasterOption,
    PipelineOption,
    ShardsOption,
    StateOption,
    UntilOption,
    default_state,
    echo_takeover,
    final_line,
)
from headrace.cli.options import LogOption, find_log_address, stop_signals
from headrace.cli.output import RunProgress, echo
from headrace.durations import to_time_us
from headrace.errors import BadDuration


def replay(
    context: typer.Context,
    file: File,
    version: Annotated[
        str,
        typer.Option(
            "--as",
            metavar="VERSION",
            help="The name of the version; its outputs are named OUTPUT.VERSION.",
        ),
    ],
    since: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TICK|TIME",
            help=(
                "Start at this tick, or at the first one at or after a time such as"
                " 2026-01-31T12:00:00Z, with empty state. Default: the first tick."
            ),
        ),
    ] = None,
    retick: Annotated[
        bool,
        typer.Option(
            "--retick",
            help="Cut new ticks instead of using the recorded ones; the rows may differ.",
        ),
    ] = False,
    log: LogOption = None,
    master: MasterOption = None,
    state: StateOption = None,
    local: LocalOption = None,
    shards: ShardsOption = None,
    pipeline: PipelineOption = None,
    until_caught_up: UntilOption = False,
    final: FinalOption = False,
) -> None:
    """Build a version of a pipeline next to it: replay the same ticks, with state, topics and views
    of its own.

    An unchanged pipeline computes the same rows; a changed one shows what it would have computed.

    After the recorded ticks it continues with new ones, until Ctrl-C or SIGTERM. The same command
    resumes a version that was stopped.

    Example: headrace replay shop.py --as v2 --until-caught-up
    """
    from headrace.pipeline.loader import load_pipeline
    from headrace.runtime.run import replay as replay_pipeline
    from headrace.runtime.versions import version_state

    loaded = load_pipeline(file, pipeline)
    start = parse_tick_or_time(since)
    directory = state or default_state(file, loaded.name)
    home = version_state(directory, version)
    progress = RunProgress(
        opening=f"Replaying {loaded.name} as {version}; state and views in {home}. Ctrl-C ends it."
    )
    echo_takeover(home)
    with stop_signals() as stop:
        replay_pipeline(
            loaded,
            version,
            since=start,
            retick=retick,
            log=find_log_address(context, log),
            state=directory,
            local=local,
            shards=shards,
            until_caught_up=until_caught_up,
            final=final,
            stop=stop,
            on_status=progress,
            master=master,
        )
        echo(final_line(f"{loaded.name} as {version}", progress, stopped=stop.is_set()))
        if losses := progress.losses():
            print(losses, file=sys.stderr, flush=True)


def parse_tick_or_time(text: str | None) -> int | str | None:
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
