"""`headrace topic`: creates, lists, shows, alters, trims and deletes topics and tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import pyarrow as pa
import typer

from headrace.cli.options import (
    JsonOption,
    LogOption,
    YesOption,
    confirm,
    open_chosen_log,
    parse_offset,
)
from headrace.cli.output import bytes_text, count_text, echo, print_json, print_table
from headrace.durations import format_us
from headrace.errors import TopicExists
from headrace.log.api import Log
from headrace.log.topic_config import describe_change
from headrace.log.values import TopicInfo, TopicStats
from headrace.types.schema import to_ddl

app = typer.Typer(
    help="Topics and tables: create, list, show, alter, trim, delete.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="The topic's name.")]
Retention = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION",
        help='Keep rows this long, such as "7 days"; "none" keeps them forever.',
    ),
]
RetentionBytes = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES", help='Keep at most this much per partition; "none" for no limit.'
    ),
]
History = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION",
        help='A table\'s changes older than this may be compacted; "none" keeps all.',
    ),
]
Tombstones = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION", help="How long a deletion stays visible in a compacted topic."
    ),
]
SegmentBytes = Annotated[
    int | None, typer.Option(min=1, help="Start a new segment file at this size.")
]
SegmentAge = Annotated[
    str | None, typer.Option(metavar="DURATION", help="Start a new segment file at this age.")
]
Strict = Annotated[
    bool | None,
    typer.Option(
        "--strict/--no-strict",
        help=(
            "On Kafka: make dead letters of records with fields that the topic does not have,"
            " instead of ignoring the fields."
        ),
    ),
]
ValueFormat = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="On Kafka, the format of values: json, avro, protobuf or json-schema.",
    ),
]
Registry = Annotated[
    str | None,
    typer.Option(metavar="URL", help="The schema registry, unless the format is json."),
]
Compression = Annotated[
    str | None, typer.Option(help="How stored rows are compressed: none, lz4 or zstd.")
]


@app.command()
def create(
    context: typer.Context,
    name: Name,
    schema: Annotated[
        str, typer.Option(help='The columns, as in Spark: "id BIGINT, at TIMESTAMP".')
    ],
    key: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMNS", help="Rows with equal keys share a partition. Several: a,b."
        ),
    ] = None,
    partitions: Annotated[int, typer.Option(min=1)] = 1,
    primary_key: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMNS",
            help="Create a table: a topic of changes, with this primary key.",
        ),
    ] = None,
    history: History = None,
    retention: Retention = None,
    retention_bytes: RetentionBytes = None,
    compact: Annotated[
        bool, typer.Option("--compact", help="Keep only the newest row of each key.")
    ] = False,
    tombstones: Tombstones = None,
    segment_bytes: SegmentBytes = None,
    segment_age: SegmentAge = None,
    compression: Compression = None,
    strict: Strict = None,
    format: ValueFormat = None,
    registry: Registry = None,
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="OCTAL", help="Permissions of a new log's files: 660 shares it with a group."
        ),
    ] = None,
    if_missing: Annotated[
        bool,
        typer.Option("--if-missing", help="Accept a topic that exists with the same settings."),
    ] = False,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Create a topic, or with --primary-key a table.

    Example: headrace topic create orders --schema "id BIGINT, amount DOUBLE" --key id --partitions
    4 --retention "7 days"
    """
    storage = _without_none(
        tombstones=tombstones,
        segment_bytes=segment_bytes,
        segment_age=segment_age,
        compression=compression,
        strict=strict,
        format=format,
        registry=registry,
    )
    with (
        open_chosen_log(context, log, create=True, mode=mode) as opened_log,
        _command_line_errors(),
    ):
        if primary_key is None:
            _refuse_option("--history", history, "only a table (--primary-key) has a history")
            settings = storage | _without_none(
                retention=retention and _parse_none(retention),
                retention_bytes=_parse_bytes(retention_bytes),
                key=_columns(key),
            )
            info = opened_log.create_topic(
                name,
                schema,
                partitions=partitions,
                compact=compact,
                exist_ok=if_missing,
                **settings,
            )
        else:
            _refuse_option("--key", key, "a table is partitioned by its primary key")
            _refuse_option(
                "--retention",
                retention or retention_bytes,
                "a table keeps its rows; limit its history with --history",
            )
            _refuse_option("--compact", compact, "choose a table's compaction with --history")
            settings = storage | _without_none(history=history and _parse_none(history))
            info = opened_log.create_table(
                name,
                schema,
                key=_columns(primary_key) or [],
                partitions=partitions,
                exist_ok=if_missing,
                **settings,
            )
    _print_topic("Created", info, json=json)


@app.command("list")
def list_topics(
    context: typer.Context,
    everything: Annotated[
        bool, typer.Option("--all", help="Internal topics too (their names start with __).")
    ] = False,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """List the topics. Those of other programs on Kafka have no schema until they are given one,
    with `headrace topic create --if-missing`.

    Example: headrace topic list --log file:data
    """
    with open_chosen_log(context, log) as opened_log:
        names = [
            name for name in sorted(opened_log.topics()) if everything or not name.startswith("__")
        ]
        infos = opened_log.topic_infos()
        all_stats = {stats.name: stats for stats in opened_log.stats(count_rows=False)}
    topics = [
        (all_stats[name], infos[name]) for name in names if name in all_stats and name in infos
    ]
    if json:
        for stats, info in topics:
            summary = _summary(info) if info else _no_schema(stats)
            print_json(summary | {"offsets": None if stats.rows < 0 else stats.rows})
        return
    rows = [
        (
            stats.name,
            _kind(info) if info else "no schema",
            stats.partitions,
            (", ".join(info.key) if info else "") or "-",
            None if stats.rows < 0 else stats.rows,
        )
        for stats, info in topics
    ]
    print_table(
        ["topic", "kind", "partitions", "key", "offsets"],
        rows,
        empty="No topics yet. Create one with `headrace topic create`.",
    )


@app.command()
def show(
    context: typer.Context, name: Name, log: LogOption = None, json: JsonOption = False
) -> None:
    """Show a topic's columns, settings and offsets.

    Example: headrace topic show orders --log file:data
    """
    with open_chosen_log(context, log) as opened_log:
        info = opened_log.topic(name)
        offsets = _offsets(opened_log, name)
    if json:
        print_json(_summary(info) | {"offsets": offsets})
        return
    echo(f"{_kind(info)} {info.name}")
    print_table(
        ["column", "type", "null", "key"],
        [(f.name, _type_text(f), f.nullable, f.name in info.key) for f in info.arrow_schema],
    )
    print_table(["setting", "value"], _settings(info).items())
    print_table(
        ["partition", "earliest", "end"],
        [(each["partition"], each["earliest"], each["end"]) for each in offsets],
    )


@app.command()
def alter(
    context: typer.Context,
    name: Name,
    add_columns: Annotated[
        str | None, typer.Option(metavar="DDL", help='New columns, all nullable: "note STRING".')
    ] = None,
    alter_columns: Annotated[
        str | None,
        typer.Option(metavar="DDL", help='Columns with their new, wider types: "amount BIGINT".'),
    ] = None,
    drop_columns: Annotated[
        str | None, typer.Option(metavar="COLUMNS", help="Columns to drop. Several: a,b.")
    ] = None,
    rename_columns: Annotated[
        str | None,
        typer.Option(metavar="OLD=NEW", help="Columns to rename. Several: a=b,c=d."),
    ] = None,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="The new number of partitions; it can only grow.")
    ] = None,
    allow_moving_keys: Annotated[
        bool,
        typer.Option(
            "--allow-moving-keys",
            help=(
                "Add partitions to a keyed topic, although new rows of a key then may go to another"
                " partition than its old rows."
            ),
        ),
    ] = False,
    retention: Retention = None,
    retention_bytes: RetentionBytes = None,
    compact: Annotated[
        bool | None,
        typer.Option("--compact/--no-compact", help="Keep only the newest row of each key."),
    ] = None,
    history: History = None,
    tombstones: Tombstones = None,
    segment_bytes: SegmentBytes = None,
    segment_age: SegmentAge = None,
    compression: Compression = None,
    strict: Strict = None,
    format: ValueFormat = None,
    registry: Registry = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what the change would do, and do not do it.")
    ] = False,
    yes: YesOption = False,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Change columns, add partitions, or change retention and storage, while the topic is in use.
    Before columns are altered, dropped or renamed, it shows what that does and asks for
    confirmation on a terminal; elsewhere --yes is required.

    Example: headrace topic alter orders --add-columns "note STRING" --retention "30 days"
    """
    settings = _without_none(
        add_columns=add_columns,
        alter_columns=alter_columns,
        drop_columns=_columns(drop_columns),
        rename_columns=_renames(rename_columns),
        partitions=partitions,
        compact=compact,
        tombstones=tombstones,
        segment_bytes=segment_bytes,
        segment_age=segment_age,
        compression=compression,
        strict=strict,
        format=format,
        registry=registry,
    )
    settings |= {
        key: _parse_none(value)
        for key, value in _without_none(retention=retention, history=history).items()
    }
    settings |= (
        {"retention_bytes": _parse_bytes(retention_bytes)} if retention_bytes is not None else {}
    )
    if not settings:
        raise typer.BadParameter("There is nothing to change: see `headrace topic alter --help`.")
    settings["allow_moving_keys"] = allow_moving_keys
    with open_chosen_log(context, log) as opened_log:
        if dry_run or (_changes_columns(settings) and not yes):
            before = opened_log.topic(name)
            after = opened_log.alter_topic(name, dry_run=True, **settings)
            effects, readers = describe_change(before, after), _readers(opened_log, name)
            if dry_run and json:
                print_json(_summary(after) | {"effects": effects, "readers": readers})
            else:
                _print_effects(before, after, effects, readers)
            if dry_run:
                return
            confirm(f"Alter {_kind(before)} {name}?", to="alter it")
        info = opened_log.alter_topic(name, **settings)
    _print_topic("Altered", info, json=json)


def _changes_columns(settings: dict[str, Any]) -> bool:
    return not settings.keys().isdisjoint({"alter_columns", "drop_columns", "rename_columns"})


def _readers(log: Log, topic: str) -> list[str]:
    """The pipelines and groups that have read a topic."""
    from headrace.runtime.inputs import pipelines_that_read

    groups = [name for name in log.groups() if topic in log.group(name).committed]
    return [f"pipeline {name}" for name in pipelines_that_read(log, topic)] + [
        f"group {name}" for name in groups
    ]


def _print_effects(
    before: TopicInfo, after: TopicInfo, effects: list[str], readers: list[str]
) -> None:
    echo(f"Altering {_kind(before)} {before.name} would change this:")
    for effect in effects or ["nothing"]:
        echo(f"- {effect}")
    echo(f"Columns before: {before.schema}")
    echo(f"Columns after:  {after.schema}")
    echo(f"Read by: {', '.join(readers) or 'no pipeline and no group'}")


@app.command()
def trim(
    context: typer.Context,
    name: Name,
    before: Annotated[
        str,
        typer.Option(
            metavar="OFFSET",
            help=(
                'Remove the rows before this offset or append time (ISO 8601, or "7 days ago");'
                " latest removes all rows."
            ),
        ),
    ],
    partition: Annotated[int | None, typer.Option(min=0, help="Only this partition.")] = None,
    yes: YesOption = False,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Remove a topic's oldest rows. Asks for confirmation on a terminal; elsewhere --yes is
    required.

    Example: headrace topic trim clicks --before "30 days ago" --yes
    """
    position = parse_offset(before, option="--before")
    with open_chosen_log(context, log) as opened_log:
        start = opened_log.start_offsets(name)
        if not yes:
            confirm(f"Remove the rows of {name} before {before}?", to="remove them")
        partitions = None if partition is None else [partition]
        trimmed = opened_log.trim_topic(name, position, partitions=partitions)
    removed = _offset_count(start, trimmed)
    if json:
        print_json({"trimmed": name, "offsets": removed, "earliest": trimmed})
    else:
        echo(f"Removed {count_text(removed, 'offset')} of {name}.")


@app.command()
def delete(
    context: typer.Context,
    name: Name,
    yes: YesOption = False,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Delete a topic and all its rows. Asks for confirmation on a terminal; elsewhere --yes is
    required.

    Example: headrace topic delete orders --yes
    """
    with open_chosen_log(context, log) as opened_log:
        info = opened_log.topic(name)
        if not yes:
            confirm(f"Delete {_kind(info)} {name} and all its rows?", to="delete")
        opened_log.delete_topic(name)
    if json:
        print_json({"deleted": name})
    else:
        echo(f"Deleted {_kind(info)} {name}.")


@contextmanager
def _command_line_errors() -> Iterator[None]:
    """Name the command's options in errors of the log, which name its Python arguments."""
    try:
        yield
    except TopicExists as error:
        raise TopicExists(
            error.message, fix=error.fix.replace("pass exist_ok=True", "give --if-missing")
        ) from None


def _without_none(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _refuse_option(option: str, value: Any, why: str) -> None:
    if value:
        raise typer.BadParameter(f"{why}.", param_hint=option)


def _columns(text: str | None) -> list[str] | None:
    return [name.strip() for name in text.split(",")] if text else None


def _renames(text: str | None) -> dict[str, str] | None:
    if not text:
        return None
    pairs = [pair.partition("=") for pair in text.split(",")]
    for old, equals, new in pairs:
        if not (equals and old.strip() and new.strip()):
            raise typer.BadParameter(
                f"{text!r} is not of the form old=new,old=new.", param_hint="--rename-columns"
            )
    return {old.strip(): new.strip() for old, _, new in pairs}


def _parse_none(text: str) -> str | None:
    return None if text.lower() == "none" else text


def _parse_bytes(text: str | None) -> int | None:
    if text is None or _parse_none(text) is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a number of bytes.", param_hint="--retention-bytes"
        ) from None


def _type_text(column: pa.Field) -> str:
    """The type of a column as in a schema, with its comment."""
    return to_ddl(pa.schema([column.with_name("c").with_nullable(True)])).removeprefix("c ")


def _kind(info: TopicInfo) -> str:
    return "table" if info.is_table else "topic"


def _offset_count(start: dict[int, int], end: dict[int, int]) -> int:
    """The number of retained offsets. It is an upper bound of the number of rows, because
    compaction and control batches leave gaps.
    """
    return sum(end.values()) - sum(start.values())


def _offsets(log: Log, name: str) -> list[dict[str, int]]:
    start, end = log.start_offsets(name), log.end_offsets(name)
    return [
        {"partition": number, "earliest": start[number], "end": end[number]}
        for number in sorted(end)
    ]


def _summary(info: TopicInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "kind": _kind(info),
        "schema": info.schema,
        "key": list(info.key),
        "partitions": info.partitions,
        "retention_us": info.retention_us,
        "retention_bytes": info.retention_bytes,
        "compact": info.compact,
        "history_us": info.history_us,
        "tombstone_us": info.tombstone_us,
        "segment_bytes": info.segment_bytes,
        "segment_us": info.segment_us,
        "compression": info.compression,
        "strict": info.strict,
        "format": info.format,
        "registry": info.registry or None,
    }


def _no_schema(stats: TopicStats) -> dict[str, Any]:
    """A topic of another program, which has no schema."""
    return {
        "name": stats.name,
        "kind": "no schema",
        "schema": None,
        "key": [],
        "partitions": stats.partitions,
    }


def _settings(info: TopicInfo) -> dict[str, str]:
    """The settings of a topic as text."""
    settings = {"partitions": str(info.partitions)}
    if info.is_table:
        settings["history"] = _duration_text(info.history_us)
    else:
        settings |= {
            "retention": _duration_text(info.retention_us),
            "retention bytes": (
                "no limit" if info.retention_bytes is None else bytes_text(info.retention_bytes)
            ),
            "compact": "yes" if info.compact else "no",
        }
    if info.compact or info.history_us is not None:
        settings["tombstones"] = _duration_text(info.tombstone_us)
    if info.strict:
        settings["strict"] = "yes"
    if info.registry:
        settings["format"] = f"{info.format}, by {info.registry.partition('?')[0]}"
    return settings | {
        "segments": f"{bytes_text(info.segment_bytes)} or {_duration_text(info.segment_us)}",
        "compression": info.compression,
    }


def _duration_text(us: int | None) -> str:
    return "forever" if us is None else format_us(us)


def _print_topic(done: str, info: TopicInfo, *, json: bool) -> None:
    if json:
        print_json(_summary(info))
    else:
        echo(
            f"{done} {_kind(info)} {info.name}: {info.schema}"
            f" ({count_text(info.partitions, 'partition')})"
        )
