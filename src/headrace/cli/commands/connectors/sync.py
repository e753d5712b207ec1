"""`headrace sync`: keeps another system equal to a topic, as a process of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import JsonOption, LogOption, require_log_address, stop_signals
from headrace.cli.output import StatusLines, count_text, echo, format_cell, print_json
from headrace.durations import to_us
from headrace.errors import BadPipelineFile, nearest

if TYPE_CHECKING:
    from headrace.sinks.check import Difference, SinkComparison
    from headrace.sinks.declaration import Sink
    from headrace.sinks.sync import SyncStatus


EXIT_DIFFERENT = 5


def sync(
    context: typer.Context,
    topic: Annotated[
        str, typer.Argument(metavar="TOPIC", help="The topic to apply, of a table or any other.")
    ],
    sink: Annotated[
        str,
        typer.Argument(
            metavar="SINK",
            help=(
                "The target: sqlite:PATH, duckdb:PATH, parquet:, delta: or search:DIRECTORY,"
                " parquet:s3://BUCKET/PREFIX, iceberg:CATALOG/NAMESPACE, postgresql://…,"
                " mysql://…, redis://…, mirror:file:DIRECTORY, elasticsearch:https://…, opensearch:https://…,"
                " amqp://…, webhook:https://…, or FILE.py:NAME for a sink that a file"
                " declares."
            ),
        ),
    ],
    log: LogOption = None,
    table: Annotated[
        str | None, typer.Option("--table", help="The table's name. Default: the topic's.")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            help=(
                "merge (one row per key) or append (every row). Default: merge for tables, append"
                " for other topics."
            ),
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            "--key",
            metavar="COLUMN",
            help="Merge by this column; may be repeated. Only for topics that are not tables.",
        ),
    ] = None,
    no_create: Annotated[
        bool, typer.Option("--no-create", help="Create no tables and columns in the target.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            help="The sink's name, which its dead letters carry. Default: TOPIC.KIND.",
        ),
    ] = None,
    batch_rows: Annotated[
        int | None,
        typer.Option("--batch-rows", min=1, help="The largest number of rows per commit."),
    ] = None,
    commit_interval: Annotated[
        str | None,
        typer.Option(
            "--commit-interval",
            metavar="DURATION",
            help=(
                "How long a sink that has caught up waits after a commit, such as '30 seconds'."
                " Default: 10 seconds where every commit adds small files."
            ),
        ),
    ] = None,
    partition_by: Annotated[
        list[str] | None,
        typer.Option(
            "--partition-by",
            metavar="COLUMN",
            help=(
                "Put rows in folders or partitions by this column; may be repeated. Only for"
                " parquet: and iceberg:."
            ),
        ),
    ] = None,
    until_caught_up: Annotated[
        bool,
        typer.Option("--until-caught-up", help="End when all current rows have been applied."),
    ] = False,
    start_over: Annotated[
        bool,
        typer.Option("--start-over", help="Empty the target, and apply the topic from its start."),
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
    target = load_sink(
        sink,
        table=table,
        mode=mode,
        key=tuple(key or ()),
        create=False if no_create else None,
        name=name,
        batch_rows=batch_rows,
        commit_interval=commit_interval,
        partition_by=tuple(partition_by or ()),
    )
    address = require_log_address(context, log)
    if check:
        _check(target, topic, address, as_json=json)
        return
    status_lines = StatusLines(_status_line, json)
    with stop_signals() as stop:
        echo(f"Applying {topic} to {target.kind}. Ctrl-C ends it.")
        target.run(
            topic,
            log=address,
            stop=stop,
            until_caught_up=until_caught_up,
            start_over=start_over,
            on_status=status_lines,
        )
    notice = _refused_notice(status_lines.last)
    echo(f"{target.name_for(topic)}: {status_lines.summary()}{notice}")
    if status_lines.is_failing:
        raise typer.Exit(1)


def load_sink(text: str, **settings: Any) -> Sink:
    """The sink that a URL describes or a file declares, with the settings of the command line."""
    from headrace.sinks import Sink, from_url

    options = {name: value for name, value in settings.items() if value not in {None, ()}}
    file, _, name = text.partition(".py:")
    if not name:
        return from_url(text, **options)
    from headrace.pipeline.loader import run_file

    path = Path(f"{file}.py")
    values = vars(run_file(path)).items()
    declared = {label: value for label, value in values if isinstance(value, Sink)}
    if name not in declared:
        raise BadPipelineFile(f"{path} declares no sink {name!r}: {nearest(name, declared)}")
    if "partition_by" in options:
        raise BadPipelineFile(
            "--partition-by is for sinks that a URL describes.",
            fix=f"give partition_by=… where {path} declares the sink {name!r}.",
        )
    if "commit_interval" in options:
        interval_us = to_us(options.pop("commit_interval"), what="--commit-interval")
        options["commit_interval_s"] = interval_us / 1e6
    return replace(declared[name], **options)


def _check(sink: Sink, topic: str, address: str, *, as_json: bool) -> None:
    result = sink.check(topic, log=address)
    if as_json:
        print_json(result)
    else:
        for difference in result.examples:
            echo(_format_difference(difference))
        for description in result.unreadable_examples:
            echo(f"cannot be read: {description}")
        echo(_verdict(result))
    if not result.is_equal:
        raise typer.Exit(EXIT_DIFFERENT)


def _format_difference(difference: Difference) -> str:
    key = ", ".join(f"{name} {format_cell(value)}" for name, value in difference.key.items())
    if difference.log is None or difference.target is None:
        return f"{key}: {'not in the target' if difference.target is None else 'not in the log'}"
    values = "; ".join(
        f"{name} is {format_cell(difference.target[name])}, in the log"
        f" {format_cell(difference.log[name])}"
        for name in difference.columns
    )
    return f"{key}: {values}"


def _verdict(result: SinkComparison) -> str:
    if result.is_equal:
        return f"Equal: {count_text(result.rows, 'row')}, as of {_offsets_text(result)}."
    kinds = {**result.counts, "that cannot be read": result.unreadable}
    counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items() if count)
    more = sum(result.counts.values()) - len(result.examples)
    return (
        f"Different: {counts}, of {count_text(result.rows, 'row')}, as of"
        f" {_offsets_text(result)}.{f' {more:,} more not shown.' if more else ''}"
    )


def _offsets_text(result: SinkComparison) -> str:
    return (
        ", ".join(
            f"offset {offset} of partition {partition}"
            for partition, offset in sorted(result.positions.items())
        )
        or "nothing applied yet"
    )


def _status_line(status: SyncStatus, rate: float) -> str:
    failed = f"; failed {status.failures} times in a row: {status.error}" if status.error else ""
    return (
        f"{status.sink}: {count_text(status.rows, 'row')}, {rate:,.0f} rows/s, {status.behind:,}"
        f" behind, {status.refused:,} refused{failed}"
    )


def _refused_notice(status: SyncStatus | None) -> str:
    return (
        f" {count_text(status.refused, 'row')} refused: see `headrace dead list`."
        if status is not None and status.refused
        else ""
    )
