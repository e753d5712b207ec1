"""`headrace status`: what a running pipeline is doing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.output import emit, say, table
from headrace.cli.settings import JsonOption

StateArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The pipeline's state directory, such as shop.state.")]


def status(state: StateArgument, json: JsonOption = False) -> None:
    """Show a pipeline's run: its tick, how far it is behind, rows a second, the size of its state, errors.

    Example: headrace status shop.state
    """
    from headrace.pipeline.status import read_status

    known = read_status(state)
    if json:
        emit({**vars(known), "is_running": known.is_running})
        return
    how = "running" if known.is_running else "not running"
    say(f"{known.pipeline}: {how} (process {known.process}, epoch {known.epoch}), {time.time() - known.updated:.0f} s since the last batch")
    rows = [
        ("tick", f"{known.tick} of {known.newest_tick}"),
        ("rows behind", f"{known.rows_behind:,}"),
        ("last batch", f"{known.batch_rows:,} rows in {known.batch_seconds:.2f} s ({known.rows_per_second:,.0f} rows/s)"),
        ("batches", f"{known.batches:,} ({known.failures} failed)"),
        ("state", f"{known.state_bytes:,} bytes in {known.shards} shards"),
        *((name, f"{count:,}") for name, count in sorted(known.counts.items())),
    ]
    table(["what", "now"], rows)
    if known.last_error:
        say(f"Last error: {known.last_error}")
