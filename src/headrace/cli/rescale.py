"""`headrace rescale`: choose how many shards a pipeline has from now on."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.output import say
from headrace.cli.run import File, PipelineOption, StateOption, state_beside
from headrace.cli.settings import LogOption, chosen_log, opened


def rescale(
    context: typer.Context,
    file: File,
    shards: Annotated[int, typer.Option("--shards", min=1, max=128, help="How many shards.")],
    version: Annotated[str | None, typer.Option("--as", metavar="VERSION", help="Of this version, made by `headrace replay`.")] = None,
    log: LogOption = None,
    state: StateOption = None,
    pipeline: PipelineOption = None,
) -> None:
    """Choose how many shards a pipeline has: how many tasks of a stage can work at once. Its rows stay the same.

    A running pipeline takes it on between two batches, the next run when it starts; `headrace run --shards` beats it.

    Example: headrace rescale shop.py --shards 8
    """
    from headrace.errors import ConfigurationError
    from headrace.pipeline.load import load
    from headrace.pipeline.replay import version_state
    from headrace.pipeline.rescale import remember_shards
    from headrace.pipeline.running import address_of
    from headrace.pipeline.status import read_status

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
    now = f"now {known.shards}; the run under way (process {known.process}) changes within seconds, unless it was started with --shards"
    say(f"{name} will run with {shards} shards ({now if known.is_running else f'last time {known.shards}'}).")
