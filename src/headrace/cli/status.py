"""`headrace status`: what a running pipeline is doing."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.output import emit, say, table
from headrace.cli.settings import JsonOption
from headrace.durations import from_us

if TYPE_CHECKING:
    from headrace.pipeline.status import Status

StateArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The pipeline's state directory, such as shop.state.")]
_RUN = ".queries_run"
_OF_TABLES = re.compile(r"\.(windows|queries)_")
"""Figures that have a table of their own."""


def status(state: StateArgument, json: JsonOption = False) -> None:
    """Show a pipeline's run: its tick, how far it is behind, rows a second, the size of its state, clocks and who holds them back, errors.

    Example: headrace status shop.state
    """
    from headrace.pipeline.status import read_status

    known = read_status(state)
    if json:
        emit({**vars(known), "is_running": known.is_running})
        return
    how = "running" if known.is_running else "not running"
    say(f"{known.pipeline}: {how} (process {known.process}, epoch {known.epoch}), as of {time.time() - known.updated:.0f} s ago")
    table(["what", "now"], [*_about(known), *((name, f"{count:,}") for name, count in sorted(known.counts.items()) if not _OF_TABLES.search(name))])
    if known.clocks:
        say("")
        table(["input", "complete up to", "producers", "held back by"], [_clock(name, clock) for name, clock in sorted(known.clocks.items())])
    if windows := _windows(known):
        say("")
        table(["step", "windows that wait", "kept for corrections", "waits for"], windows)
    if searches := _searches(known):
        say("")
        table(["search", "queries stored", "looked at in the last batch", "in all"], searches)
    if len(known.queries) > 1:
        say("")
        table(["query", "tick", "rows behind", "last batch", "outputs"], [_query(name, each) for name, each in known.queries.items()])
    for name, state_of in known.ingests.items():
        say(f"Ingest {name}: {state_of}")
    if known.last_error:
        say(f"Last error: {known.last_error}")


def _about(known: Status) -> list[tuple[str, str]]:
    return [
        ("tick", f"{known.tick} of {known.newest_tick}"),
        ("rows behind", f"{known.rows_behind:,}"),
        ("last batch", f"{known.batch_rows:,} rows in {known.batch_seconds:.2f} s ({known.rows_per_second:,.0f} rows/s)"),
        ("batches", f"{known.batches:,} ({known.failures} failed)"),
        ("state", f"{known.state_bytes:,} bytes in {known.shards} shards"),
        *((f"ingest {name}", how) for name, how in sorted(known.ingests.items())),
    ]


def _query(name: str, each: dict[str, Any]) -> tuple[str, ...]:
    batch = f"{each['batch_seconds']:.2f} s, {each['rows_per_second']:,.0f} rows/s"
    return name, str(each["tick"]), f"{each['rows_behind']:,}", batch, ", ".join(each["outputs"])


def _clock(name: str, clock: dict[str, Any]) -> tuple[str, str, str, str]:
    """How far an input is complete, and the producer that it waits for most."""
    if clock["complete_us"] is None:
        return name, "no row yet", "0", ""
    held = ""
    if clock["held_back_by"]:
        slowest = clock["held_back_by"][0]
        held = f"{slowest['producer']} (at {time_text(slowest['newest_us'])}, not heard of since {time_text(slowest['heard_us'])})"
    return name, time_text(clock["complete_us"]), f"{clock['producers']:,}", held or "nobody: all are idle, time follows the ticks"


def _windows(known: Status) -> list[tuple[str, str, str, str]]:
    """Steps with open windows, or that wait for a time."""
    due_us = {step: time_us for query in known.queries.values() for step, time_us in query["due_us"].items()}
    waiting, kept = ({name.removesuffix(end): count for name, count in known.counts.items() if name.endswith(end)} for end in (".windows_waiting", ".windows_kept"))
    return [
        (step, f"{waiting.get(step, 0):,}", f"{kept.get(step, 0):,}", time_text(due_us[step]) if step in due_us else "nothing")
        for step in sorted({*waiting, *kept, *due_us})
    ]


def _searches(known: Status) -> list[tuple[str, str, str, str]]:
    """Steps with stored queries: how many there are, and how often one was looked at."""
    last = {name: count for query in known.queries.values() for name, count in query.get("batch_counts", {}).items()}
    steps = sorted(name.removesuffix(_RUN) for name in known.counts if name.endswith(_RUN))
    return [(step, f"{known.counts.get(f'{step}.queries_stored', 0):,}", f"{last.get(step + _RUN, 0):,}", f"{known.counts[step + _RUN]:,}") for step in steps]


def time_text(time_us: int) -> str:
    return from_us(time_us).isoformat(timespec="seconds").replace("+00:00", "Z")
