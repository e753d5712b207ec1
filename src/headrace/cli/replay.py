"""`headrace replay`: run a version of a pipeline beside it, over the same ticks."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.output import say
from headrace.cli.progress import Progress
from headrace.cli.run import (
    File,
    LocalOption,
    MasterOption,
    PipelineOption,
    ShardsOption,
    StateOption,
    UntilOption,
    farewell,
    state_beside,
    tell_of_older,
)
from headrace.cli.settings import LogOption, chosen_log
from headrace.cli.stopping import stopping
from headrace.durations import to_time_us
from headrace.errors import BadDuration


def replay(
    context: typer.Context,
    file: File,
    version: Annotated[str, typer.Option("--as", metavar="VERSION", help="The version's name: its outputs are called OUTPUT.VERSION.")],
    since: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TICK|TIME",
            help="Begin at this tick, or at the first one at or after a time such as 2026-01-31T12:00:00Z, with nothing remembered from before. "
            "Default: the first tick.",
        ),
    ] = None,
    retick: Annotated[bool, typer.Option("--retick", help="Cut new ticks instead of using the recorded ones: the rows may differ.")] = False,
    log: LogOption = None,
    master: MasterOption = None,
    state: StateOption = None,
    local: LocalOption = None,
    shards: ShardsOption = None,
    pipeline: PipelineOption = None,
    until_caught_up: UntilOption = False,
) -> None:
    """Build a version of a pipeline beside it: the same ticks over again, with state, topics and views of its own.

    An unchanged pipeline gives the same rows; a changed one shows what it would have given.

    When the recorded ticks are done it goes on with new ones, until Ctrl-C or SIGTERM. The same command goes on with a version that was stopped.

    Example: headrace replay shop.py --as v2 --until-caught-up
    """
    from headrace.pipeline.load import load
    from headrace.pipeline.replay import version_state
    from headrace.pipeline.running import replay as replay_pipeline

    loaded = load(file, pipeline)
    begin = _tick_or_time(since)
    directory = state or state_beside(file, loaded.name)
    home = version_state(directory, version)
    progress = Progress(opening=f"Replaying {loaded.name} as {version}; state and views in {home}. Ctrl-C ends it.")
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
        message = f"{text!r} is neither a tick's number nor a time such as 2026-01-31T12:00:00Z or '1 hour ago'."
        raise typer.BadParameter(message, param_hint="--from") from None
    return text
