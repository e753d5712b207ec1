"""`headrace sync`: keep another system equal to a topic, as a process of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import JsonOption, LogOption, required_log, stopping
from headrace.cli.output import StatusLines, cell, counted, emit, say
from headrace.errors import BadPipelineFile, nearest

if TYPE_CHECKING:
    from headrace.sinks.check import Comparison, Difference
    from headrace.sinks.declaration import Sink
    from headrace.sinks.sync import SyncStatus


EXIT_DIFFERENT = 5


def sync(
    context: typer.Context,
    topic: Annotated[
        str, typer.Argument(metavar="TOPIC", help="The topic to follow: a table's, or any other.")
    ],
    sink: Annotated[
        str,
        typer.Argument(
            metavar="SINK",
            help=(
                "Where to: sqlite:PATH, parquet:, delta: or search:DIRECTORY, postgresql://…,"
                " redis://…, amqp://…, webhook:https://…, or FILE.py:NAME for a sink that a file"
                " declares."
            ),
        ),
    ],
    log: LogOption = None,
    table: Annotated[
        str | None, typer.Option("--table", help="What it is called there. Default: as the topic.")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            help=(
                "merge (one row a key) or append (every row). Default: merge for tables, append for"
                " others."
            ),
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            "--key",
            metavar="COLUMN",
            help="Merge by this column; may be repeated. For topics that are no tables.",
        ),
    ] = None,
    no_create: Annotated[
        bool, typer.Option("--no-create", help="Make no table and no column there.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            help="The sink's name, under which its dead letters stand. Default: TOPIC.KIND.",
        ),
    ] = None,
    batch_rows: Annotated[
        int | None, typer.Option("--batch-rows", min=1, help="At most so many rows in one commit.")
    ] = None,
    until_caught_up: Annotated[
        bool,
        typer.Option(
            "--until-caught-up", help="End when everything that is there has been applied."
        ),
    ] = False,
    start_over: Annotated[
        bool,
        typer.Option(
            "--start-over", help="Empty the target, and apply the topic from its beginning."
        ),
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Compare target and log, key by key, and end; exit code 5 if they differ.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Keep another system equal to a topic, exactly once, until Ctrl-C or SIGTERM.

    Example: headrace sync orders sqlite:shop.db --log file:data
    """
    found = declared_sink(
        sink,
        table=table,
        mode=mode,
        key=tuple(key or ()),
        create=False if no_create else None,
        name=name,
        batch_rows=batch_rows,
    )
    address = required_log(context, log)
    if check:
        _check(found, topic, address, as_json=json)
        return
    told = StatusLines(_how_it_goes, json)
    with stopping() as stop:
        say(f"Applying {topic} to {found.kind}. Ctrl-C ends it.")
        found.run(
            topic,
            log=address,
            stop=stop,
            until_caught_up=until_caught_up,
            start_over=start_over,
            on_status=told,
        )
    say(f"{found.name_for(topic)}: {told.summary()}{_put_aside(told.last)}")


def declared_sink(text: str, **settings: Any) -> Sink:
    """What a URL stands for, or a file declares, with what was said on the command line."""
    from headrace.sinks import from_url

    given = {name: value for name, value in settings.items() if value not in {None, ()}}
    file, _, name = text.partition(".py:")
    if name:
        return replace(_sink_in(Path(f"{file}.py"), name), **given)
    return from_url(text, **given)


def _sink_in(path: Path, name: str) -> Sink:
    from headrace.pipeline.loader import run_file
    from headrace.sinks import Sink

    found = {label: each for label, each in vars(run_file(path)).items() if isinstance(each, Sink)}
    if name not in found:
        raise BadPipelineFile(f"{path} declares no sink {name!r}: {nearest(name, found)}")
    return found[name]


def _check(found: Sink, topic: str, address: str, *, as_json: bool) -> None:
    result = found.check(topic, log=address)
    if as_json:
        emit(result)
    else:
        for each in result.examples:
            say(_line(each))
        say(_verdict(result))
    if not result.is_equal:
        raise typer.Exit(EXIT_DIFFERENT)


def _line(each: Difference) -> str:
    key = ", ".join(f"{name} {cell(value)}" for name, value in each.key.items())
    if each.log is None or each.target is None:
        return f"{key}: {'not in the target' if each.target is None else 'not in the log'}"
    values = "; ".join(
        f"{name} is {cell(each.target[name])}, in the log {cell(each.log[name])}"
        for name in each.columns
    )
    return f"{key}: {values}"


def _verdict(result: Comparison) -> str:
    if result.is_equal:
        return f"Equal: {counted(result.rows, 'row')}, as of {_places(result)}."
    counts = ", ".join(f"{count:,} {kind}" for kind, count in result.counts.items() if count)
    more = sum(result.counts.values()) - len(result.examples)
    return (
        f"Different: {counts}, of {counted(result.rows, 'row')}, as of"
        f" {_places(result)}.{f' {more:,} more not shown.' if more else ''}"
    )


def _places(result: Comparison) -> str:
    return (
        ", ".join(
            f"offset {offset} of partition {partition}"
            for partition, offset in sorted(result.positions.items())
        )
        or "nothing applied yet"
    )


def _how_it_goes(status: SyncStatus, rate: float) -> str:
    failed = f"; failed {status.failures} times in a row: {status.error}" if status.error else ""
    return (
        f"{status.sink}: {counted(status.rows, 'row')}, {rate:,.0f} rows/s, {status.behind:,}"
        f" behind, {status.refused:,} refused{failed}"
    )


def _put_aside(status: SyncStatus | None) -> str:
    return (
        f" {counted(status.refused, 'row')} refused: see `headrace dead list`."
        if status is not None and status.refused
        else ""
    )
