"""`headrace capture`: captures the changes of databases into the log, as a process of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import JsonOption, LogOption, find_log_address, stop_signals
from headrace.cli.output import StatusLines, bytes_text, count_text, echo, seconds_text
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
            "--name", help="Which capture of the file; with a URL, the name of the capture."
        ),
    ] = None,
    table: TablesOption = None,
    prefix: Annotated[
        str, typer.Option("--prefix", help="The prefix of the topics' names. Only with a URL.")
    ] = "",
    until_caught_up: Annotated[
        bool,
        typer.Option("--until-caught-up", help="End when all current rows have been captured."),
    ] = False,
    snapshot: Annotated[
        list[str] | None,
        typer.Option(
            "--snapshot",
            metavar="TABLE",
            help="Request a new snapshot of a table, and end. A running capture takes it.",
        ),
    ] = None,
    start_over: Annotated[
        bool,
        typer.Option(
            "--start-over",
            help=(
                "Forget the position and read all tables again, if the database no longer has the"
                " changes after it."
            ),
        ),
    ] = False,
    remove: Annotated[
        bool,
        typer.Option(
            "--remove",
            help=(
                "Remove what captures created in the database (triggers, slot, publication), and"
                " end. Topics stay."
            ),
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Capture the changes of databases into the log, until Ctrl-C or SIGTERM.

    Example: headrace capture sqlite:shop.db --table orders --log file:data
    """
    selected = load_captures(source, name, tables=tuple(table or ()), prefix=prefix)
    if remove:
        for declared in selected:
            removed = declared.remove()
            for removed_object in removed:
                echo(f"{declared.name}: removed {removed_object}")
            if not removed:
                echo(f"{declared.name}: there was nothing to remove.")
    elif snapshot:
        _request_snapshot(selected, snapshot, find_log_address(context, log))
    else:
        _run_all(
            selected,
            find_log_address(context, log),
            until_caught_up=until_caught_up,
            start_over=start_over,
            as_json=json,
        )


def load_captures(source: str, name: str | None, **settings: Any) -> list[Capture]:
    """The captures that a file declares, or the one that a URL describes."""
    from headrace.cdc import from_url

    if not source.endswith(".py") and ":" in source:
        return [from_url(source, name=name, **settings)]
    if settings["tables"] or settings["prefix"]:
        raise InputError(
            "--table and --prefix can be given only with a URL, not with a file.",
            fix="set them in the file.",
        )
    from headrace.cdc.declaration import Capture
    from headrace.pipeline.loader import run_file

    values = vars(run_file(Path(source))).values()
    declared = {value.name: value for value in values if isinstance(value, Capture)}
    if name is not None and name not in declared:
        raise BadPipelineFile(f"{source} declares no capture {name!r}: {nearest(name, declared)}")
    if not declared:
        raise BadPipelineFile(
            f"{source} declares no capture.",
            fix=(
                "declare one at the top of the file, as in shop = hr.cdc.sqlite('shop.db',"
                " log='file:data')."
            ),
        )
    return [declared[name]] if name is not None else list(declared.values())


def _request_snapshot(captures: list[Capture], tables: list[str], log: str | None) -> None:
    from headrace.cdc.capture import request_snapshot
    from headrace.log import open_log

    if len(captures) > 1:
        raise InputError(
            "Which capture is to read tables again?",
            fix=f"choose one, as in --name {captures[0].name}.",
        )
    (declared,) = captures
    with open_log(declared.log_address(log)) as opened_log:
        request_snapshot(opened_log, declared.name, tables)
    echo(
        f"Requested that {declared.name} reads {', '.join(tables)} again; it starts within seconds,"
        " or at its next run."
    )


def _run_all(
    captures: list[Capture],
    log: str | None,
    *,
    until_caught_up: bool,
    start_over: bool,
    as_json: bool,
) -> None:
    """Run each capture in a thread of its own. If one fails permanently, all end."""
    failures: list[BaseException] = []
    with stop_signals(
        "Stopping after the current transaction; press Ctrl-C again to stop at once."
    ) as stop:
        threads = [
            Thread(
                target=_run_one,
                args=(declared, log, stop, failures, until_caught_up, start_over, as_json),
                daemon=True,
            )
            for declared in captures
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
    if failures:
        raise failures[0]


def _run_one(
    declared: Capture,
    log: str | None,
    stop: Event,
    failures: list[BaseException],
    until_caught_up: bool,
    start_over: bool,
    as_json: bool,
) -> None:
    status_lines = StatusLines(status_line, as_json)
    capture = replace(declared, log=log or declared.log)
    try:
        echo(
            f"Capturing {capture.name} ({capture.kind}) into {capture.log_address()}. Ctrl-C ends"
            " it."
        )
        capture.run(
            stop=stop,
            until_caught_up=until_caught_up,
            start_over=start_over,
            on_status=status_lines,
        )
        echo(f"{capture.name}: {status_lines.summary()}{_dead_letter_notice(status_lines.last)}")
    except BaseException as error:
        failures.append(error)
        stop.set()


def _dead_letter_notice(status: CaptureStatus | None) -> str:
    return (
        f" {count_text(status.dead_letters, 'record')} became dead letters: see `headrace dead"
        " list`."
        if status is not None and status.dead_letters
        else ""
    )


def status_line(status: CaptureStatus, rate: float) -> str:
    """The status of a capture as one line."""
    parts = [
        f"{table} {progress_bar(done, about)} {done:,} of about {about:,}"
        f" rows{_time_left(done, about, rate)}"
        for table, (done, about) in status.snapshots.items()
    ]
    parts.append(
        f"{count_text(status.changes, 'change')}, {rate:,.0f} rows/s, at {status.position}"
    )
    parts += [
        f"{name.replace('_', ' ')}: {_format_detail(name, value)}"
        for name, value in status.source.items()
    ]
    if status.dead_letters:
        parts.append(f"{count_text(status.dead_letters, 'record')} became dead letters")
    if status.error:
        parts.append(f"failed {status.failures} times in a row: {status.error}")
    return f"{status.capture}: {'; '.join(parts)}"


def progress_bar(done: int, about: int, width: int = 20) -> str:
    filled = min(width, done * width // max(about, 1))
    return "[" + "#" * filled + "." * (width - filled) + "]"


def _time_left(done: int, about: int, rate: float) -> str:
    return f", {seconds_text((about - done) / rate)} left" if rate >= 1 and about > done else ""


def _format_detail(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return bytes_text(value)
    return f"{value:,.1f}" if isinstance(value, float) else str(value)
