"""`headrace status`: what a running pipeline is doing."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import JsonOption, LogOption, chosen_log, stopping
from headrace.cli.output import bytes_text, emit, say, table
from headrace.durations import from_us

if TYPE_CHECKING:
    from threading import Event

    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from headrace.runtime.status import Status
    from headrace.serve.dashboard import Board


StateArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="The pipeline's state directory, such as shop.state.")
]
_RUN = ".queries_run"
_OF_TABLES = re.compile(r"\.(windows|queries)_")
"""Figures that have a table of their own."""


def status(state: StateArgument, json: JsonOption = False) -> None:
    """Show a pipeline's run: its tick, how far it is behind, rows a second, the size of its state,
    clocks and who holds them back, errors.

    Example: headrace status shop.state
    """
    from headrace.runtime.status import read_status

    known = read_status(state)
    if json:
        emit({**vars(known), "is_running": known.is_running})
        return
    how = "running" if known.is_running else "not running"
    say(
        f"{known.pipeline}: {how} (process {known.process}, epoch {known.epoch}), as of"
        f" {time.time() - known.updated:.0f} s ago"
    )
    table(
        ["what", "now"],
        [
            *_about(known),
            *(
                (name, f"{count:,}")
                for name, count in sorted(known.counts.items())
                if not _OF_TABLES.search(name)
            ),
        ],
    )
    if known.watermarks:
        say("")
        table(
            ["input", "complete up to", "producers", "held back by"],
            [_clock(name, clock) for name, clock in sorted(known.watermarks.items())],
        )
    if windows := _windows(known):
        say("")
        table(["step", "windows that wait", "kept for corrections", "waits for"], windows)
    if searches := _searches(known):
        say("")
        table(["search", "queries stored", "looked at in the last batch", "in all"], searches)
    if len(known.queries) > 1:
        say("")
        table(
            ["query", "tick", "rows behind", "last batch", "outputs"],
            [_query(name, each) for name, each in known.queries.items()],
        )
    for name, state_of in known.ingests.items():
        say(f"Ingest {name}: {state_of}")
    if known.last_error:
        say(f"Last error: {known.last_error}")


def _about(known: Status) -> list[tuple[str, str]]:
    return [
        ("tick", f"{known.tick} of {known.newest_tick}"),
        ("rows behind", f"{known.rows_behind:,}"),
        (
            "last batch",
            (
                f"{known.batch_rows:,} rows in {known.batch_seconds:.2f} s"
                f" ({known.rows_per_second:,.0f} rows/s)"
            ),
        ),
        ("batches", f"{known.batches:,} ({known.failures} failed)"),
        ("state", f"{known.state_bytes:,} bytes in {known.shards} shards"),
        *((f"ingest {name}", how) for name, how in sorted(known.ingests.items())),
    ]


def _query(name: str, each: dict[str, Any]) -> tuple[str, ...]:
    batch = f"{each['batch_seconds']:.2f} s, {each['rows_per_second']:,.0f} rows/s"
    return name, str(each["tick"]), f"{each['rows_behind']:,}", batch, ", ".join(each["outputs"])


def _clock(name: str, clock: dict[str, Any]) -> tuple[str, str, str, str]:
    """How far an input is complete, and the producer that it waits for most."""
    if clock["watermark_us"] is None:
        return name, "no row yet", "0", ""
    held = ""
    if clock["held_back_by"]:
        slowest = clock["held_back_by"][0]
        held = (
            f"{slowest['producer']} (at {time_text(slowest['newest_us'])}, not heard of since"
            f" {time_text(slowest['heard_us'])})"
        )
    return (
        name,
        time_text(clock["watermark_us"]),
        f"{clock['producers']:,}",
        held or "nobody: all are idle, time follows the ticks",
    )


def _windows(known: Status) -> list[tuple[str, str, str, str]]:
    """Steps with open windows, or that wait for a time."""
    due_us = {
        step: time_us
        for query in known.queries.values()
        for step, time_us in query["due_us"].items()
    }
    waiting, kept = (
        {
            name.removesuffix(end): count
            for name, count in known.counts.items()
            if name.endswith(end)
        }
        for end in (".windows_waiting", ".windows_kept")
    )
    return [
        (
            step,
            f"{waiting.get(step, 0):,}",
            f"{kept.get(step, 0):,}",
            time_text(due_us[step]) if step in due_us else "nothing",
        )
        for step in sorted({*waiting, *kept, *due_us})
    ]


def _searches(known: Status) -> list[tuple[str, str, str, str]]:
    """Steps with stored queries: how many there are, and how often one was looked at."""
    last = {
        name: count
        for query in known.queries.values()
        for name, count in query.get("batch_counts", {}).items()
    }
    steps = sorted(name.removesuffix(_RUN) for name in known.counts if name.endswith(_RUN))
    return [
        (
            step,
            f"{known.counts.get(f'{step}.queries_stored', 0):,}",
            f"{last.get(step + _RUN, 0):,}",
            f"{known.counts[step + _RUN]:,}",
        )
        for step in steps
    ]


def time_text(time_us: int) -> str:
    return from_us(time_us).isoformat(timespec="seconds").replace("+00:00", "Z")


# `headrace top`: a pipeline at a glance, in the terminal: how it goes, its topics and steps, time,
# views, dead letters. What the dashboard shows, in text.

MIN_COLUMNS, MIN_LINES = 60, 12
_LOOKS_ONCE = 5


def top(
    context: typer.Context,
    state: StateArgument,
    log: LogOption = None,
    every: Annotated[
        float, typer.Option("--every", min=0.2, max=60.0, help="Seconds between two looks.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
) -> None:
    """Show a pipeline at a glance: rates, steps, time, dead letters. Until Ctrl-C.

    Example: headrace top shop.state --log file:data
    """
    from rich.console import Console
    from rich.live import Live

    from headrace.log import open_log
    from headrace.serve.dashboard import Board, check_state, log_of

    check_state(state)
    console = Console()
    address = chosen_log(context, log) or log_of(state)
    with open_log(address) if address else nullcontext() as opened, stopping("") as stop:
        board = Board(state, opened, count_views=True)
        if once:
            console.print(drawn(_after_a_batch(board, stop, every), console.size.width, 1_000))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not stop.is_set():
                live.update(drawn(board.facts(), *console.size), refresh=True)
                stop.wait(every)


def _after_a_batch(board: Board, stop: Event, every: float) -> dict[str, Any]:
    """The figures, when there is something to tell rates from: a run that goes on is looked at
    until it has done a batch, but not for long.
    """
    facts = first = board.facts()
    for _ in range(_LOOKS_ONCE):
        stop.wait(every)
        facts = board.facts()
        if (
            stop.is_set()
            or not (facts["run"] and first["run"] and facts["run"]["is_running"])
            or facts["run"]["tick"] != first["run"]["tick"]
        ):
            break
    return facts


@dataclass(frozen=True)
class Part:
    """A table of the screen: the first column names what a row is about, `numbers` columns behind
    it are right-aligned.
    """

    columns: tuple[str, ...]
    numbers: int
    rows: Sequence[tuple[str, ...]]


def drawn(facts: dict[str, Any], columns: int, lines: int) -> RenderableType:
    """As much as there is room for; where that is not all, how much more there is."""
    from rich.console import Group
    from rich.text import Text

    if columns < MIN_COLUMNS or lines < MIN_LINES:
        return Text(
            f"The terminal is too small: {columns} by {lines}, and {MIN_COLUMNS} by {MIN_LINES}"
            " are needed."
        )
    head = _head(facts, columns)
    parts = [part for part in (_topics(facts), _steps(facts), _times(facts)) if part.rows]
    room = lines - len(head) - len(parts)
    given = shares([len(part.rows) for part in parts], room)
    room -= sum(given)
    for part in (_views(facts), _groups(facts)):
        if part.rows and room >= min(len(part.rows), 3) + 1:
            parts.append(part)
            given.append(min(len(part.rows), room - 1))
            room -= given[-1] + 1
    return Group(
        *head, *(_table(part, few, columns) for part, few in zip(parts, given, strict=True))
    )


def shares(wants: Sequence[int], room: int) -> list[int]:
    """How many lines each gets: what it wants where there is room, else as even as can be."""
    given = [0] * len(wants)
    while room > 0 and given != list(wants):
        for at in [at for at, want in enumerate(wants) if given[at] < want][:room]:
            given[at] += 1
            room -= 1
    return given


def _head(facts: dict[str, Any], columns: int) -> list[Text]:
    """Line by line, as wide as the terminal."""
    from rich.console import Console
    from rich.text import Text

    run = facts["run"]
    if run is None:
        return [Text("This pipeline has not run yet.", style="yellow")]
    failing = run["failures"] and run["last_error"]
    state, style = (
        ("failing", "bold red")
        if failing
        else ("running", "bold green")
        if run["is_running"]
        else ("not running", "bold yellow")
    )
    dead = sum(each["rows"] for each in facts["dead"])
    line = Text.assemble(
        (run["pipeline"], "bold"),
        "  ",
        (state, style),
        f"  tick {run['tick']:,}  {run['rows_per_second']:,.0f} rows/s  {run['rows_behind']:,}"
        f" behind  batch {run['batch_seconds']:.2f} s  state {bytes_text(run['state_bytes'])} "
        f" {run['shards']} shards",
        (f"  {dead:,} dead letters" if dead else "", "yellow"),
    )
    told = list(line.wrap(Console(width=columns), columns))
    return (
        [*told, Text(str(run["last_error"]).splitlines()[0][:columns], style="red")]
        if failing
        else told
    )


def _topics(facts: dict[str, Any]) -> Part:
    busiest = sorted(facts["topics"], key=lambda topic: (-topic["rows_per_second"], topic["name"]))
    rows = [
        (
            topic["name"],
            f"{topic['rows_per_second']:,.0f}",
            f"{topic.get('rows', topic['end']):,}",
            bytes_text(topic.get("bytes", 0)),
        )
        for topic in busiest
    ]
    return Part(("topic", "rows/s", "offsets", "size"), 3, rows)


def _steps(facts: dict[str, Any]) -> Part:
    """`late` rows came when a window of theirs had been told, and corrected it; those that were
    `too late` did not.
    """
    counts = (facts["run"] or {}).get("counts", {})
    found = {name.rpartition(".")[0] for name in counts if name.endswith((".rows_in", ".rows_out"))}
    rows = []
    for name in sorted(found, key=lambda name: (-facts["rates"].get(f"{name}.rows_in", 0), name)):
        rates = (
            f"{max(0.0, facts['rates'].get(f'{name}.{what}', 0.0)):,.0f}"
            for what in ("rows_in", "rows_out")
        )
        told = (
            f"{counts[key]:,}" if (key := f"{name}.{what}") in counts else ""
            for what in ("corrected", "late", "diverted", "windows_waiting")
        )
        rows.append((name, *rates, *told, bytes_text(facts["state"].get(name, 0))))
    return Part(("step", "in/s", "out/s", "late", "too late", "aside", "windows", "state"), 7, rows)


def _times(facts: dict[str, Any]) -> Part:
    return Part(
        ("input", "complete up to", "behind", "producers", "held back by"),
        0,
        [_time(facts["at"], *each) for each in (facts["run"] or {}).get("watermarks", {}).items()],
    )


def _time(now_s: float, name: str, clock: dict[str, Any]) -> tuple[str, ...]:
    watermark_us = clock["watermark_us"]
    held = ", ".join(str(each["producer"]) for each in clock.get("held_back_by", ())[:3])
    if watermark_us is None:
        return name, "not begun", "", str(clock["producers"]), held
    at = datetime.fromtimestamp(watermark_us / 1_000_000, UTC)
    return (
        name,
        f"{at:%Y-%m-%d %H:%M:%S}",
        span_text(max(0.0, now_s - watermark_us / 1_000_000)),
        str(clock["producers"]),
        held,
    )


def span_text(seconds: float) -> str:
    """In the unit that says it best."""
    unit_s, name = (
        (1, "s")
        if seconds < 120
        else (
            (60, "min")
            if seconds < 7_200
            else (3_600, "h")
            if seconds < 172_800
            else (86_400, "days")
        )
    )
    return f"{seconds / unit_s:,.0f} {name}"


def _views(facts: dict[str, Any]) -> Part:
    return Part(
        ("view", "rows"), 1, [(name, f"{rows:,}") for name, rows in sorted(facts["views"].items())]
    )


def _groups(facts: dict[str, Any]) -> Part:
    return Part(
        ("group", "rows behind"),
        1,
        [
            (name, f"{rows:,}")
            for name, rows in sorted(facts["groups"].items(), key=lambda each: (-each[1], each[0]))
        ],
    )


def _table(part: Part, lines: int, columns: int) -> Table:
    """In so many lines and columns, heading apart. Names give way: figures stay whole."""
    from rich.table import Table

    shown = part.rows if lines >= len(part.rows) else part.rows[: lines - 1]
    widths = [max(map(len, column)) for column in zip(part.columns, *shown, strict=True)]
    others = sum(widths[1 : part.numbers + 1]) + 2 * (len(widths) - 1)
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=part.numbers > 1
    )
    for at, column in enumerate(part.columns):
        most = max(8, columns - others) if at == 0 and part.numbers else None
        table.add_column(
            column,
            justify="right" if 0 < at <= part.numbers else "left",
            no_wrap=True,
            overflow="ellipsis",
            max_width=most,
        )
    for row in shown:
        table.add_row(*row)
    if len(shown) < len(part.rows):
        table.add_row(f"… {len(part.rows) - len(shown):,} more", *[""] * (len(part.columns) - 1))
    return table
