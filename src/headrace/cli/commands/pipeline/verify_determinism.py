"""`headrace verify-determinism`: computes some recorded ticks of a pipeline twice and compares."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.commands.pipeline.replay import parse_tick_or_time
from headrace.cli.commands.pipeline.run import File, MasterOption, PipelineOption
from headrace.cli.options import (
    EXIT_NOT_DETERMINISTIC,
    LogOption,
    find_log_address,
    open_chosen_log,
)
from headrace.cli.output import echo


def verify_determinism(
    context: typer.Context,
    file: File,
    ticks: Annotated[
        int, typer.Option("--ticks", min=1, max=100_000, help="How many ticks are computed.")
    ] = 20,
    since: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TICK|TIME",
            help="The first tick, or a time. Default: the last ticks are taken.",
        ),
    ] = None,
    log: LogOption = None,
    master: MasterOption = None,
    pipeline: PipelineOption = None,
) -> None:
    """Compute some recorded ticks of a pipeline twice, in a temporary directory, and compare the
    rows. Exits with 7 if they differ.

    The two runs have different batches, shards and widths. The log is only read: the rows of the
    ticks are copied. State begins empty.

    Example: headrace verify-determinism shop.py --ticks 100
    """
    from headrace.pipeline.loader import load_pipeline
    from headrace.runtime.determinism import verify_determinism as verify
    from headrace.runtime.run import RunSession, address_of

    loaded = load_pipeline(file, pipeline)
    start = parse_tick_or_time(since)
    with open_chosen_log(context, address_of(loaded, find_log_address(context, log))) as opened:
        session = RunSession({"master": master}).session
        report = verify(loaded.plan(), opened, session, ticks=ticks, since=start)
    counted = (
        f"{report.ticks} ticks with {report.input_rows:,} rows of input, {report.output_rows:,} of"
        " output"
    )
    if report.is_deterministic:
        echo(f"{report.pipeline} is deterministic in {counted}.")
        return
    echo(f"{report.pipeline} is NOT deterministic in {counted}:")
    for difference in report.differences:
        echo(f"  {difference}")
    echo(
        "To fix: a function may use its arguments only: no clock, no random numbers, no order of a"
        " set, nothing that it keeps from an earlier call."
    )
    raise typer.Exit(EXIT_NOT_DETERMINISTIC)
