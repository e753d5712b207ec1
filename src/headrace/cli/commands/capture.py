"""`headrace capture`: databases into the log, as a process of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import JsonOption, LogOption, chosen_log, stopping
from headrace.cli.output import StatusLines, bytes_text, counted, say, seconds_text
from headrace.errors import BadPipelineFile, InputError, nearest

if TYPE_CHECKING:
    from headrace.cdc.capture import CaptureStatus
    from headrace.cdc.declaration import Capture


TablesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--table", metavar="TABLE", help="A table to capture; may be repeated. Only with a URL."
    ),
]


def capture(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|URL",
            help=(
                "A Python file that declares captures, or a database: sqlite:PATH, postgres://…,"
                " mariadb://…, mysql://…"
            ),
        ),
    ],
    log: LogOption = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", help="Which capture of the file; or how the one of a URL is called."
        ),
    ] = None,
    table: TablesOption = None,
    prefix: Annotated[
        str, typer.Option("--prefix", help="What the topics' names begin with. Only with a URL.")
    ] = "",
    until_caught_up: Annotated[
        bool,
        typer.Option(
            "--until-caught-up", help="End when everything that is there has been taken in."
        ),
    ] = False,
    snapshot: Annotated[
        list[str] | None,
        typer.Option(
            "--snapshot",
            metavar="TABLE",
            help="Ask for a table to be read again, and end. A running capture does it.",
        ),
    ] = None,
    start_over: Annotated[
        bool,
        typer.Option(
            "--start-over",
            help=(
                "Forget the position and read all tables again: for when the database lost what"
                " follows it."
            ),
        ),
    ] = False,
    remove: Annotated[
        bool,
        typer.Option(
            "--remove",
            help=(
                "Remove what captures made in the database (triggers, slot, publication), and end."
                " Topics stay."
            ),
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Capture the changes of databases into the log, until Ctrl-C or SIGTERM.

    Example: headrace capture sqlite:shop.db --table orders --log file:data
    """
    found = captures(source, name, tables=tuple(table or ()), prefix=prefix)
    if remove:
        for each in found:
            _remove(each)
    elif snapshot:
        _ask(found, snapshot, chosen_log(context, log))
    else:
        _run_all(
            found,
            chosen_log(context, log),
            until_caught_up=until_caught_up,
            start_over=start_over,
            as_json=json,
        )


def captures(source: str, name: str | None, **settings: Any) -> list[Capture]:
    """What a file declares, or a URL stands for."""
    from headrace.cdc import from_url

    if not source.endswith(".py") and ":" in source:
        return [from_url(source, name=name, **settings)]
    if settings["tables"] or settings["prefix"]:
        raise InputError(
            "--table and --prefix are for URLs; a file says these things itself.",
            fix="change the file.",
        )
    found = captures_in(Path(source))
    if name is not None and name not in found:
        raise BadPipelineFile(f"{source} declares no capture {name!r}: {nearest(name, found)}")
    if not found:
        raise BadPipelineFile(
            f"{source} declares no capture.",
            fix=(
                "make one at the top of the file, as in shop = hr.cdc.sqlite('shop.db',"
                " log='file:data')."
            ),
        )
    return [found[name]] if name is not None else list(found.values())


def captures_in(path: Path) -> dict[str, Capture]:
    """The captures among the names that a file defines."""
    from headrace.cdc.declaration import Capture
    from headrace.pipeline.loader import run_file

    values = vars(run_file(path)).values()
    return {each.name: each for each in values if isinstance(each, Capture)}


def _remove(each: Capture) -> None:
    removed = each.remove()
    for thing in removed:
        say(f"{each.name}: removed {thing}")
    if not removed:
        say(f"{each.name}: there was nothing to remove.")


def _ask(found: list[Capture], tables: list[str], log: str | None) -> None:
    from headrace.cdc.capture import ask_for_snapshot
    from headrace.log import open_log

    if len(found) > 1:
        raise InputError(
            "Which capture is to read tables again?",
            fix=f"choose one, as in --name {found[0].name}.",
        )
    with open_log(found[0].log_address(log)) as opened:
        ask_for_snapshot(opened, found[0].name, tables)
    say(
        f"Asked {found[0].name} to read {', '.join(tables)} again; it begins within seconds, or"
        " when it next runs."
    )


def _run_all(
    found: list[Capture], log: str | None, *, until_caught_up: bool, start_over: bool, as_json: bool
) -> None:
    """Each in a thread of its own; the first that fails for good ends all."""
    failures: list[BaseException] = []
    with stopping("Stopping after the transaction under way; once more ends it at once.") as stop:
        threads = [
            Thread(
                target=_run_one,
                args=(each, log, stop, failures, until_caught_up, start_over, as_json),
                daemon=True,
            )
            for each in found
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
    if failures:
        raise failures[0]


def _run_one(
    each: Capture,
    log: str | None,
    stop: Event,
    failures: list[BaseException],
    until_caught_up: bool,
    start_over: bool,
    as_json: bool,
) -> None:
    told = StatusLines(line, as_json)
    given = replace(each, log=log or each.log)
    try:
        say(f"Capturing {each.name} ({each.kind}) into {given.log_address()}. Ctrl-C ends it.")
        given.run(stop=stop, until_caught_up=until_caught_up, start_over=start_over, on_status=told)
        say(f"{each.name}: {told.summary()}{_put_aside(told.last)}")
    except BaseException as error:
        failures.append(error)
        stop.set()


def _put_aside(status: CaptureStatus | None) -> str:
    return (
        f" {counted(status.aside, 'record')} put aside: see `headrace dead list`."
        if status is not None and status.aside
        else ""
    )


def line(status: CaptureStatus, rate: float) -> str:
    """How it goes, in one line."""
    parts = [
        f"{table} {bar(done, about)} {done:,} of about {about:,} rows{_left(done, about, rate)}"
        for table, (done, about) in status.snapshots.items()
    ]
    parts.append(f"{counted(status.changes, 'change')}, {rate:,.0f} rows/s, at {status.position}")
    parts += [
        f"{name.replace('_', ' ')}: {_shown(name, value)}" for name, value in status.source.items()
    ]
    if status.aside:
        parts.append(f"{counted(status.aside, 'record')} put aside")
    if status.error:
        parts.append(f"failed {status.failures} times in a row: {status.error}")
    return f"{status.capture}: {'; '.join(parts)}"


def bar(done: int, about: int, width: int = 20) -> str:
    filled = min(width, done * width // max(about, 1))
    return "[" + "#" * filled + "." * (width - filled) + "]"


def _left(done: int, about: int, rate: float) -> str:
    return f", {seconds_text((about - done) / rate)} left" if rate >= 1 and about > done else ""


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return bytes_text(value)
    return f"{value:,.1f}" if isinstance(value, float) else str(value)
