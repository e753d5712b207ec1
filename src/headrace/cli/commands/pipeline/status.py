"""`headrace status`: shows the status of a pipeline's run. `top.py` shows it continuously."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import JsonOption
from headrace.cli.output import echo, print_json, print_table, seconds_text
from headrace.durations import from_us

if TYPE_CHECKING:
    from headrace.run_status import Status


StateArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="The pipeline's state directory, such as shop.state.")
]
_QUERIES_RUN = ".queries_run"
_IN_OTHER_TABLES = re.compile(r"\.(windows|queries)_")
"""Counts that are shown in tables of their own."""


def status(state: StateArgument, json: JsonOption = False) -> None:
    """Show the status of a pipeline: its tick, how far it is behind, rows per second, the size of
    its state, watermarks and the producers that hold them back, errors.

    Example: headrace status shop.state
    """
    from headrace.run_status import read_status

    status = read_status(state)
    if json:
        print_json({**vars(status), "is_running": status.is_running})
        return
    state_text = "running" if status.is_running else "not running"
    echo(
        f"{status.pipeline}: {state_text} (process {status.process}, epoch {status.epoch}), as of"
        f" {time.time() - status.updated:.0f} s ago"
    )
    print_table(
        ["what", "now"],
        [
            *_summary_rows(status),
            *(
                (name, f"{count:,}")
                for name, count in sorted(status.counts.items())
                if not _IN_OTHER_TABLES.search(name)
            ),
        ],
    )
    if status.watermarks:
        echo("")
        print_table(
            ["input", "watermark", "producers", "held back by"],
            [
                _watermark_row(name, watermark)
                for name, watermark in sorted(status.watermarks.items())
            ],
        )
    if status.steps:
        echo("")
        print_table(
            ["step", "keys in its state", "bytes"],
            [
                (step, f"{size['keys']:,}", f"{size['bytes']:,}")
                for step, size in sorted(status.steps.items(), key=lambda each: -each[1]["bytes"])
            ],
        )
    if windows := _window_rows(status):
        echo("")
        print_table(["step", "waiting windows", "retained for corrections", "waits for"], windows)
    if searches := _search_rows(status):
        echo("")
        print_table(["search", "stored queries", "run in the last batch", "run in total"], searches)
    if len(status.queries) > 1:
        echo("")
        print_table(
            ["query", "tick", "rows behind", "last batch", "outputs"],
            [_query_row(name, query) for name, query in status.queries.items()],
        )
    for name, state_of in status.ingests.items():
        echo(f"Ingest {name}: {state_of}")
    if status.last_error:
        echo(f"Last error: {status.last_error}")


def _summary_rows(status: Status) -> list[tuple[str, str]]:
    return [
        ("tick", f"{status.tick} of {status.newest_tick}"),
        ("rows behind", f"{status.rows_behind:,}"),
        (
            "last batch",
            (
                f"{status.batch_rows:,} rows in {status.batch_seconds:.2f} s"
                f" ({status.rows_per_second:,.0f} rows/s)"
            ),
        ),
        ("width", _width_text(status)),
        *_freshness_rows(status),
        ("batches", f"{status.batches:,} ({status.failures} failed)"),
        ("state", f"{status.state_bytes:,} bytes in {status.shards} shards"),
        *((f"ingest {name}", state_text) for name, state_text in sorted(status.ingests.items())),
        *((f"call {name}", state_text) for name, state_text in sorted(status.calls.items())),
    ]


def _width_text(status: Status) -> str:
    width = "one task" if status.batch_width == "one" else "wide"
    return f"{width}: {status.width}" if status.width else width


def _freshness_rows(status: Status) -> list[tuple[str, str]]:
    """For each view, the age of its newest change, and the time from append to visible."""
    rows = []
    for name, view in sorted(status.views.items()):
        if view["newest"] is None:
            continue
        age = f"newest change {seconds_text(max(0.0, time.time() - view['newest']))} ago"
        if view["visible_p50_s"] is not None:
            age += (
                f"; from append to visible {view['visible_p50_s']:.2f} s (p50),"
                f" {view['visible_p99_s']:.2f} s (p99)"
            )
        rows.append((f"view {name}", age))
    return rows


def _query_row(name: str, query: dict[str, Any]) -> tuple[str, ...]:
    batch = f"{query['batch_seconds']:.2f} s, {query['rows_per_second']:,.0f} rows/s"
    return name, str(query["tick"]), f"{query['rows_behind']:,}", batch, ", ".join(query["outputs"])


def _watermark_row(name: str, watermark: dict[str, Any]) -> tuple[str, str, str, str]:
    """The watermark of an input, and the producer that holds it back most."""
    if watermark.get("ended"):
        return name, "event time has ended", f"{watermark['producers']:,}", ""
    if watermark["watermark_us"] is None:
        return name, "no row yet", "0", ""
    held_back_by = ""
    if watermark["held_back_by"]:
        slowest = watermark["held_back_by"][0]
        held_back_by = (
            f"{slowest['producer']} (at {time_text(slowest['newest_us'])}, silent since"
            f" {time_text(slowest['heard_us'])})"
        )
    return (
        name,
        time_text(watermark["watermark_us"]),
        f"{watermark['producers']:,}",
        held_back_by or "none: all producers are idle, and the watermark moves on with tick time",
    )


def _window_rows(status: Status) -> list[tuple[str, str, str, str]]:
    """The steps with open windows, or that wait for an event time."""
    due_us = {
        step: time_us
        for query in status.queries.values()
        for step, time_us in query["due_us"].items()
    }
    waiting, retained = (
        {
            name.removesuffix(end): count
            for name, count in status.counts.items()
            if name.endswith(end)
        }
        for end in (".windows_waiting", ".windows_kept")
    )
    return [
        (
            step,
            f"{waiting.get(step, 0):,}",
            f"{retained.get(step, 0):,}",
            time_text(due_us[step]) if step in due_us else "nothing",
        )
        for step in sorted({*waiting, *retained, *due_us})
    ]


def _search_rows(status: Status) -> list[tuple[str, str, str, str]]:
    """The steps with stored queries: how many there are, and how often they were run."""
    last = {
        name: count
        for query in status.queries.values()
        for name, count in query.get("batch_counts", {}).items()
    }
    steps = sorted(
        name.removesuffix(_QUERIES_RUN) for name in status.counts if name.endswith(_QUERIES_RUN)
    )
    return [
        (
            step,
            f"{status.counts.get(f'{step}.queries_stored', 0):,}",
            f"{last.get(step + _QUERIES_RUN, 0):,}",
            f"{status.counts[step + _QUERIES_RUN]:,}",
        )
        for step in steps
    ]


def time_text(time_us: int) -> str:
    return from_us(time_us).isoformat(timespec="seconds").replace("+00:00", "Z")
