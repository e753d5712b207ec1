"""`headrace top`: a pipeline at a glance, in the terminal: what the dashboard shows, as text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import LogOption, find_log_address, stop_signals
from headrace.cli.output import bytes_text

if TYPE_CHECKING:
    from threading import Event

    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from headrace.serve.dashboard import Dashboard


StateArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="The pipeline's state directory, such as shop.state.")
]
MIN_COLUMNS = 60
MIN_LINES = 12
_MAX_TRIES = 5


def top(
    context: typer.Context,
    state: StateArgument,
    log: LogOption = None,
    every: Annotated[
        float, typer.Option("--every", min=0.2, max=60.0, help="Seconds between two updates.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end.")] = False,
) -> None:
    """Show a pipeline at a glance: rates, steps, watermarks, dead letters. Until Ctrl-C.

    Example: headrace top shop.state --log file:data
    """
    from rich.console import Console
    from rich.live import Live

    from headrace.log import open_log
    from headrace.run_status import check_state, log_address
    from headrace.serve.dashboard import Dashboard

    check_state(state)
    console = Console()
    address = find_log_address(context, log) or log_address(state)
    with (
        open_log(address) if address else nullcontext() as opened_log,
        stop_signals("") as stop,
    ):
        dashboard = Dashboard(state, opened_log, count_views=True)
        if once:
            console.print(
                render(_measure_until_batch(dashboard, stop, every), console.size.width, 1_000)
            )
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not stop.is_set():
                live.update(render(dashboard.measurements(), *console.size), refresh=True)
                stop.wait(every)


def _measure_until_batch(dashboard: Dashboard, stop: Event, every: float) -> dict[str, Any]:
    """Measurements with rates: a running pipeline is measured until it has finished a batch, a few
    times at most.
    """
    measurements = first = dashboard.measurements()
    for _ in range(_MAX_TRIES):
        stop.wait(every)
        measurements = dashboard.measurements()
        if (
            stop.is_set()
            or not (measurements["run"] and first["run"] and measurements["run"]["is_running"])
            or measurements["run"]["tick"] != first["run"]["tick"]
        ):
            break
    return measurements


@dataclass(frozen=True)
class ScreenTable:
    """A table of the screen: a column of names, then `numbers` right-aligned columns, then
    others.
    """

    columns: tuple[str, ...]
    numbers: int
    rows: Sequence[tuple[str, ...]]


def render(measurements: dict[str, Any], columns: int, lines: int) -> RenderableType:
    """The screen: as many rows of each table as fit, and the number of further ones."""
    from rich.console import Group
    from rich.text import Text

    if columns < MIN_COLUMNS or lines < MIN_LINES:
        return Text(
            f"The terminal is too small: {columns} by {lines}, and {MIN_COLUMNS} by {MIN_LINES}"
            " are needed."
        )
    head = _render_head(measurements, columns)
    tables = [
        table
        for table in (
            _topics_table(measurements),
            _steps_table(measurements),
            _watermarks_table(measurements),
        )
        if table.rows
    ]
    room = lines - len(head) - len(tables)
    lines_per_table = share_lines([len(table.rows) for table in tables], room)
    room -= sum(lines_per_table)
    for table in (_views_table(measurements), _groups_table(measurements)):
        if table.rows and room >= min(len(table.rows), 3) + 1:
            tables.append(table)
            lines_per_table.append(min(len(table.rows), room - 1))
            room -= lines_per_table[-1] + 1
    return Group(
        *head,
        *(
            _render_table(table, table_lines, columns)
            for table, table_lines in zip(tables, lines_per_table, strict=True)
        ),
    )


def share_lines(wants: Sequence[int], room: int) -> list[int]:
    """The number of lines that each table gets: all it wants if there is room, else even shares."""
    lines_per_table = [0] * len(wants)
    while room > 0 and lines_per_table != list(wants):
        hungry = [index for index, want in enumerate(wants) if lines_per_table[index] < want]
        for index in hungry[:room]:
            lines_per_table[index] += 1
            room -= 1
    return lines_per_table


def _render_head(measurements: dict[str, Any], columns: int) -> list[Text]:
    """The lines above the tables, wrapped to the width of the terminal."""
    from rich.console import Console
    from rich.text import Text

    run = measurements["run"]
    if run is None:
        return [Text("This pipeline has not run yet.", style="yellow")]
    failing = run["failures"] and run["last_error"]
    if failing:
        state, style = "failing", "bold red"
    elif run["is_running"]:
        state, style = "running", "bold green"
    else:
        state, style = "not running", "bold yellow"
    dead = sum(each["rows"] for each in measurements["dead"])
    line = Text.assemble(
        (run["pipeline"], "bold"),
        "  ",
        (state, style),
        f"  tick {run['tick']:,}  {run['rows_per_second']:,.0f} rows/s  {run['rows_behind']:,}"
        f" behind  batch {run['batch_seconds']:.2f} s {_width_text(run)}{_visible_text(run)} "
        f" state {bytes_text(run['state_bytes'])}  {run['shards']} shards",
        (f"  {dead:,} dead letters" if dead else "", "yellow"),
    )
    lines = list(line.wrap(Console(width=columns), columns))
    if failing:
        lines.append(Text(str(run["last_error"]).splitlines()[0][:columns], style="red"))
    return lines


def _width_text(run: dict[str, Any]) -> str:
    return "in one task" if run.get("batch_width") == "one" else "wide"


def _visible_text(run: dict[str, Any]) -> str:
    """How long rows take from append to visible, in the view that takes longest."""
    times_s = [
        (view["visible_p50_s"], view["visible_p99_s"])
        for view in run.get("views", {}).values()
        if view["visible_p50_s"] is not None
    ]
    if not times_s:
        return ""
    p50_s, p99_s = max(times_s)
    return f"  visible after {p50_s:.2f} s (p99 {p99_s:.2f} s)"


def _topics_table(measurements: dict[str, Any]) -> ScreenTable:
    busiest = sorted(
        measurements["topics"], key=lambda topic: (-topic["rows_per_second"], topic["name"])
    )
    rows = [
        (
            topic["name"],
            f"{topic['rows_per_second']:,.0f}",
            f"{topic.get('rows', topic['end']):,}",
            bytes_text(topic.get("bytes", 0)),
        )
        for topic in busiest
    ]
    return ScreenTable(("topic", "rows/s", "offsets", "size"), 3, rows)


def _steps_table(measurements: dict[str, Any]) -> ScreenTable:
    """The table of steps. `late` rows came after a window of theirs was emitted, and corrected it;
    rows that were `too late` did not.
    """
    counts = (measurements["run"] or {}).get("counts", {})
    steps = {name.rpartition(".")[0] for name in counts if name.endswith((".rows_in", ".rows_out"))}
    rows = []
    for name in sorted(
        steps, key=lambda name: (-measurements["rates"].get(f"{name}.rows_in", 0), name)
    ):
        rates = (
            f"{max(0.0, measurements['rates'].get(f'{name}.{what}', 0.0)):,.0f}"
            for what in ("rows_in", "rows_out")
        )
        cells = (
            f"{counts[key]:,}" if (key := f"{name}.{what}") in counts else ""
            for what in ("corrected", "late", "diverted", "windows_waiting")
        )
        rows.append((name, *rates, *cells, bytes_text(measurements["state"].get(name, 0))))
    return ScreenTable(
        ("step", "in/s", "out/s", "late", "too late", "diverted", "windows", "state"), 7, rows
    )


def _watermarks_table(measurements: dict[str, Any]) -> ScreenTable:
    return ScreenTable(
        ("input", "watermark", "behind", "producers", "held back by"),
        0,
        [
            _watermark_row(measurements["at"], *each)
            for each in (measurements["run"] or {}).get("watermarks", {}).items()
        ],
    )


def _watermark_row(now_s: float, name: str, watermark: dict[str, Any]) -> tuple[str, ...]:
    watermark_us = watermark["watermark_us"]
    held_back_by = ", ".join(
        str(producer["producer"]) for producer in watermark.get("held_back_by", ())[:3]
    )
    if watermark_us is None:
        return name, "none yet", "", str(watermark["producers"]), held_back_by
    at = datetime.fromtimestamp(watermark_us / 1_000_000, UTC)
    return (
        name,
        f"{at:%Y-%m-%d %H:%M:%S}",
        span_text(max(0.0, now_s - watermark_us / 1_000_000)),
        str(watermark["producers"]),
        held_back_by,
    )


def span_text(seconds: float) -> str:
    """A length of time in its largest fitting unit."""
    for unit_s, name, limit_s in ((1, "s", 120), (60, "min", 7_200), (3_600, "h", 172_800)):
        if seconds < limit_s:
            return f"{seconds / unit_s:,.0f} {name}"
    return f"{seconds / 86_400:,.0f} days"


def _views_table(measurements: dict[str, Any]) -> ScreenTable:
    return ScreenTable(
        ("view", "rows"),
        1,
        [(name, f"{rows:,}") for name, rows in sorted(measurements["views"].items())],
    )


def _groups_table(measurements: dict[str, Any]) -> ScreenTable:
    return ScreenTable(
        ("group", "rows behind"),
        1,
        [
            (name, f"{rows:,}")
            for name, rows in sorted(
                measurements["groups"].items(), key=lambda each: (-each[1], each[0])
            )
        ],
    )


def _render_table(screen_table: ScreenTable, lines: int, columns: int) -> Table:
    """A table that fits into some lines, without its heading, and columns. Names are shortened,
    numbers are not.
    """
    from rich.table import Table

    shown = screen_table.rows if lines >= len(screen_table.rows) else screen_table.rows[: lines - 1]
    widths = [max(map(len, column)) for column in zip(screen_table.columns, *shown, strict=True)]
    others = sum(widths[1 : screen_table.numbers + 1]) + 2 * (len(widths) - 1)
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="bold",
        expand=screen_table.numbers > 1,
    )
    for index, column in enumerate(screen_table.columns):
        max_width = max(8, columns - others) if index == 0 and screen_table.numbers else None
        table.add_column(
            column,
            justify="right" if 0 < index <= screen_table.numbers else "left",
            no_wrap=True,
            overflow="ellipsis",
            max_width=max_width,
        )
    for row in shown:
        table.add_row(*row)
    if len(shown) < len(screen_table.rows):
        table.add_row(
            f"… {len(screen_table.rows) - len(shown):,} more",
            *[""] * (len(screen_table.columns) - 1),
        )
    return table
