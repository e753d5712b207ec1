"""`headrace capture`: captures the changes of databases into the log, as a process of its own."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import (
    JsonOption,
    LogOption,
    find_log_address,
    parse_settings,
    stop_signals,
)
from headrace.cli.output import (
    StatusLines,
    bytes_text,
    count_text,
    echo,
    iso_text,
    print_json,
    print_table,
    seconds_text,
)
from headrace.errors import BadPipelineFile, ConfigurationError, InputError, nearest

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
                "A Python file that declares captures; a database: sqlite:PATH, postgres://…,"
                " mariadb://…, mysql://…; or another source of rows: dir:DIRECTORY,"
                " poll:https://…, mqtt://HOST/TOPIC"
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
    topic: Annotated[
        str | None,
        typer.Option(
            "--topic",
            metavar="TOPIC",
            help=(
                "The topic for rows that are of no table; of tables, the topics' names, such as"
                " '{schema}_{table}'. Only with a URL."
            ),
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--include",
            metavar="TABLE.COLUMN",
            help="Capture only such columns of the table, and its key. Only with a URL.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="TABLE.COLUMN",
            help="A column not to capture, such as '*.password'. Only with a URL.",
        ),
    ] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(
            "--mask",
            metavar="TABLE.COLUMN=TEXT",
            help="A column in whose place a text stands. Only with a URL.",
        ),
    ] = None,
    hash_columns: Annotated[
        list[str] | None,
        typer.Option(
            "--hash",
            metavar="TABLE.COLUMN",
            help=(
                "A column to replace by its SHA-256, with the salt in HEADRACE_CAPTURE_SALT. Only"
                " with a URL."
            ),
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            metavar="TABLE=CONDITION",
            help="Capture only rows that meet a condition. Only with a URL.",
        ),
    ] = None,
    snapshot_mode: Annotated[
        str | None,
        typer.Option(
            "--snapshot-mode",
            help="initial, never, when_needed or only. Only with a URL.",
        ),
    ] = None,
    publication: Annotated[
        str | None,
        typer.Option("--publication", help="Postgres: use this publication as it is."),
    ] = None,
    slot: Annotated[
        str | None, typer.Option("--slot", help="Postgres: use this replication slot as it is.")
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option("--schema", help="The columns of that topic, if it is to be created."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="NAME=VALUE",
            help="Another setting of the source, such as every='5 seconds'; may be repeated.",
        ),
    ] = None,
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
    condition: Annotated[
        str | None,
        typer.Option(
            "--condition",
            metavar="SQL",
            help="With --snapshot, read only rows for which this is true, such as 'id < 100'.",
        ),
    ] = None,
    pause: Annotated[
        bool,
        typer.Option("--pause-snapshots", help="Pause snapshots; changes go on. Then end."),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume-snapshots", help="Go on with paused snapshots. Then end.")
    ] = False,
    status: Annotated[
        bool, typer.Option("--status", help="Show how the captures are doing, and end.")
    ] = False,
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
    settings = {
        **parse_settings(option or ()),
        "topic": topic,
        "schema": schema,
        "include": tuple(include or ()),
        "exclude": tuple(exclude or ()),
        "mask": _pairs(mask, option="--mask"),
        "hash": tuple(hash_columns or ()),
        "salt": os.environ.get("HEADRACE_CAPTURE_SALT", "") if hash_columns else "",
        "where": _pairs(where, option="--where"),
        "snapshot": snapshot_mode,
        "publication": publication,
        "slot": slot,
    }
    selected = load_captures(
        source,
        name,
        tables=tuple(table or ()),
        prefix=prefix,
        **{setting: value for setting, value in settings.items() if value},
    )
    if status:
        _show_status(selected, find_log_address(context, log), as_json=json)
    elif remove:
        for declared in selected:
            removed = declared.remove()
            for removed_object in removed:
                echo(f"{declared.name}: removed {removed_object}")
            if not removed:
                echo(f"{declared.name}: there was nothing to remove.")
    elif snapshot or pause or resume:
        action = "pause" if pause else "resume" if resume else "snapshot"
        _request_snapshot(
            selected, snapshot or [], find_log_address(context, log), action, condition
        )
    else:
        _run_all(
            selected,
            find_log_address(context, log),
            until_caught_up=until_caught_up,
            start_over=start_over,
            as_json=json,
        )


_OPTIONS = {"tables": "table", "snapshot": "snapshot-mode"}
"""Options that have another name than their setting."""


def _pairs(texts: list[str] | None, *, option: str) -> dict[str, str]:
    """Return options such as `orders=amount > 10` by what is in front of the equals sign."""
    pairs = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r} has no =.", param_hint=option)
        pairs[name] = value
    return pairs


def load_captures(source: str, name: str | None, **settings: Any) -> list[Capture]:
    """The captures that a file declares, or the one that a URL describes."""
    from headrace.sources import from_url

    given = {setting: value for setting, value in settings.items() if value}
    if not source.endswith(".py") and ":" in source:
        return [from_url(source, name=name, **given)]
    if given:
        options = [_OPTIONS.get(name, name.replace("_", "-")) for name in given]
        raise InputError(
            f"--{' and --'.join(options)} can be given only with a URL, not with a file.",
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


def _request_snapshot(
    captures: list[Capture],
    tables: list[str],
    log: str | None,
    action: str,
    condition: str | None,
) -> None:
    from headrace.cdc.state import request_snapshot
    from headrace.log import open_log

    if len(captures) > 1:
        raise InputError(
            "Which capture is meant?",
            fix=f"choose one, as in --name {captures[0].name}.",
        )
    (declared,) = captures
    with open_log(declared.log_address(log)) as opened_log:
        request_snapshot(opened_log, declared.name, tables, condition=condition, action=action)
    effects = {"pause": "pauses its snapshots", "resume": "goes on with its snapshots"}
    effect = effects.get(action, f"reads {', '.join(tables)} again")
    echo(f"Requested that {declared.name} {effect}; it starts within seconds, or at its next run.")


def _show_status(captures: list[Capture], log: str | None, *, as_json: bool) -> None:
    """Show the last reports of captures."""
    from headrace.log import open_log
    from headrace.log.capture_reports import read_capture_reports

    for declared in captures:
        with open_log(declared.log_address(log)) as opened_log:
            report = read_capture_reports(opened_log).get(declared.name)
        if report is None:
            echo(f"{declared.name} has not reported yet.")
            continue
        at = iso_text(datetime.fromtimestamp(report["at"], UTC))
        shown = {"capture": declared.name, **report, "at": at}
        del shown["version"]
        if as_json:
            print_json(shown)
            continue
        stopped = shown.pop("stopped")
        print_table(
            ["what", declared.name],
            [
                (name.replace("_", " "), _format_detail(name, value))
                for name, value in shown.items()
                if value is not None and name != "capture"
            ],
        )
        for table, reason in stopped.items():
            echo(f"{table} is not followed any more: {reason}")


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
        if until_caught_up and status_lines.last is not None and status_lines.last.stopped:
            failures.append(_stopped_tables(status_lines.last))
    except BaseException as error:
        failures.append(error)
        stop.set()


def _stopped_tables(status: CaptureStatus) -> ConfigurationError:
    return ConfigurationError(
        f"{status.capture} has caught up, but for {', '.join(status.stopped)}, which it does not"
        " follow any more.",
        fix="see why with --status; then request a snapshot with --snapshot TABLE.",
    )


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
    done = count_text(status.changes, "change")
    if status.rows and not status.changes:
        done = count_text(status.rows, "row")
    parts.append(f"{done}, {rate:,.0f} rows/s, at {status.position}")
    parts += [
        f"{name.replace('_', ' ')}: {_format_detail(name, value)}"
        for name, value in status.source.items()
    ]
    if status.lag_s:
        parts.append(f"behind by {seconds_text(status.lag_s)}")
    if status.is_paused:
        parts.append("snapshots are paused")
    parts += [f"{table} is not followed any more: {why}" for table, why in status.stopped.items()]
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
