"""`headrace rescale`: chooses how many shards a pipeline has from now on."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.commands.pipeline.run import File, PipelineOption, StateOption, default_state
from headrace.cli.options import LogOption, find_log_address, open_chosen_log
from headrace.cli.output import echo


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
    """Choose how many shards a pipeline has, which is how many tasks of a stage can run at once.
    Its rows stay the same.

    A running pipeline changes between two batches, a stopped one at its next start. `headrace run
    --shards` takes precedence.

    Example: headrace rescale shop.py --shards 8
    """
    from headrace.errors import ConfigurationError, CorruptionError
    from headrace.pipeline.loader import load_pipeline
    from headrace.run_status import read_status
    from headrace.runtime.query_assignment import remember_shards
    from headrace.runtime.run import address_of
    from headrace.runtime.versions import version_state

    loaded = load_pipeline(file, pipeline)
    name = loaded.name if version is None else f"{loaded.name}.{version}"
    directory = state or default_state(file, loaded.name)
    with open_chosen_log(context, address_of(loaded, find_log_address(context, log))) as opened_log:
        remember_shards(opened_log, name, shards)
    try:
        status = read_status(directory if version is None else version_state(directory, version))
    except (ConfigurationError, CorruptionError):
        echo(f"{name} will run with {shards} shards.")
        return
    if status.is_running:
        note = (
            f"now {status.shards}; the current run (process {status.process}) changes within"
            " seconds, unless it was started with --shards"
        )
    else:
        note = f"{status.shards} in the last run"
    echo(f"{name} will run with {shards} shards ({note}).")
