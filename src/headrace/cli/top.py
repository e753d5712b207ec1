"""`headrace top`: a pipeline at a glance, in the terminal: how it goes, its topics and steps, time, views, dead letters. What the dashboard shows, in text."""

from __future__ import annotations

import time
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.output import bytes_text
from headrace.cli.settings import LogOption, chosen_log
from headrace.cli.stopping import stopping

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

StateArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The pipeline's state directory, such as shop.state.")]
LEAST_COLUMNS, LEAST_LINES = 60, 12


def top(
    context: typer.Context,
    state: StateArgument,
    log: LogOption = None,
    every: Annotated[float, typer.Option("--every", min=0.2, max=60.0, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
) -> None:
    """Show a pipeline at a glance: rates, steps, time, dead letters. Until Ctrl-C.

    Example: headrace top shop.state --log file:data
    """
    from rich.console import Console
    from rich.live import Live

    from headrace.log import open_log
    from headrace.serve.board import Board, check_state, log_of

    check_state(state)
    console = Console()
    address = chosen_log(context, log) or log_of(state)
    with open_log(address) if address else nullcontext() as opened, stopping("") as stop:
        board = Board(state, opened)
        if once:
            board.look()
            time.sleep(every)
            console.print(drawn(board.facts(), console.size.width, 1_000))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not stop.is_set():
                live.update(drawn(board.facts(), *console.size), refresh=True)
                stop.wait(every)


def drawn(facts: dict[str, Any], columns: int, lines: int) -> RenderableType:
    """As much as there is room for."""
    from rich.console import Group
    from rich.text import Text

    if columns < LEAST_COLUMNS or lines < LEAST_LINES:
        return Text(f"The terminal is too small: {columns} by {lines}, and {LEAST_COLUMNS} by {LEAST_LINES} are needed.")
    room = max(3, (lines - 8) // 3)
    parts: list[RenderableType] = [_head(facts), _topics(facts, room), _steps(facts, room), _times(facts, room)]
    return Group(*parts)


def _head(facts: dict[str, Any]) -> Group:
    from rich.console import Group
    from rich.text import Text

    run = facts["run"]
    if run is None:
        return Group(Text("This pipeline has not run yet.", style="yellow"))
    failing = run["failures"] and run["last_error"]
    state, style = ("failing", "bold red") if failing else ("running", "bold green") if run["is_running"] else ("not running", "bold yellow")
    dead = sum(each["rows"] for each in facts["dead"])
    line = Text.assemble(
        (run["pipeline"], "bold"), "  ", (state, style), f"  tick {run['tick']:,}  {run['rows_per_second']:,.0f} rows/s  {run['rows_behind']:,} behind  batch {run['batch_seconds']:.2f} s"
        f"  state {bytes_text(run['state_bytes'])}  {run['shards']} shards", (f"  {dead:,} dead letters" if dead else "", "yellow"),
    )  # fmt: skip
    return Group(line, Text(str(run["last_error"]).splitlines()[0], style="red")) if failing else Group(line)


def _topics(facts: dict[str, Any], room: int) -> Table:
    table = _table("topic", "rows/s", "rows", "size", numbers=3)
    busiest = sorted(facts["topics"], key=lambda topic: -topic["rows_per_second"])
    for topic in busiest[:room]:
        table.add_row(topic["name"], f"{topic['rows_per_second']:,.0f}", f"{topic.get('rows', topic['end']):,}", bytes_text(topic.get("bytes", 0)))
    return table


def _steps(facts: dict[str, Any], room: int) -> Table:
    table = _table("step", "in/s", "out/s", "late", "put aside", "windows open", "state", numbers=6)
    counts = (facts["run"] or {}).get("counts", {})
    names = sorted({name.rpartition(".")[0] for name in counts if name.endswith((".rows_in", ".rows_out"))}, key=lambda name: -facts["rates"].get(f"{name}.rows_in", 0))
    for name in names[:room]:
        rates = (f"{max(0.0, facts['rates'].get(f'{name}.{what}', 0.0)):,.0f}" for what in ("rows_in", "rows_out"))
        told = (f"{counts[key]:,}" if (key := f"{name}.{what}") in counts else "" for what in ("late", "diverted", "windows_waiting"))
        table.add_row(name, *rates, *told, bytes_text(facts["state"].get(name, 0)))
    return table


def _times(facts: dict[str, Any], room: int) -> Table:
    table = _table("input", "complete up to", "behind", "producers", "held back by", numbers=0)
    for name, clock in list((facts["run"] or {}).get("clocks", {}).items())[:room]:
        complete_us = clock["complete_us"]
        held = ", ".join(str(each["producer"]) for each in clock.get("held_back_by", ())[:3])
        if complete_us is None:
            table.add_row(name, "not begun", "", str(clock["producers"]), held)
        else:
            at = datetime.fromtimestamp(complete_us / 1_000_000, UTC)
            table.add_row(name, f"{at:%Y-%m-%d %H:%M:%S}", f"{facts['at'] - complete_us / 1_000_000:,.0f} s", str(clock["producers"]), held)
    return table


def _table(*columns: str, numbers: int) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    for at, column in enumerate(columns):
        table.add_column(column, justify="right" if 0 < at <= numbers else "left", no_wrap=True, overflow="ellipsis")
    return table
