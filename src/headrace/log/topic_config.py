"""A topic's name, schema and settings as a user declares them: checked, with durations in
microseconds.

Both backends create and alter topics through `declared_topic` and `altered_topic`, so they accept
and refuse the same declarations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from headrace.durations import format_us, to_us
from headrace.errors import (
    IncompatibleChange,
    InputError,
    OffsetOutOfRange,
    TopicExists,
    nearest,
)
from headrace.log.partitioning import check_partition
from headrace.log.values import TopicInfo
from headrace.names import check_name
from headrace.types.schema import check_key, parse_schema, table_schema, to_ddl
from headrace.types.schema_history import ColumnChange, definition, differences, evolve

if TYPE_CHECKING:
    from headrace.log.api import Log

T = TypeVar("T")
_OFFSET_ALIASES = {"beginning": "earliest", "end": "latest"}


# Offsets


def resolve_offset_alias(to: T) -> T | str:
    """Resolve the aliases "beginning" (earliest) and "end" (latest); the rest is unchanged."""
    return _OFFSET_ALIASES.get(to, to) if isinstance(to, str) else to


def resolve_reset(
    to: str | int | datetime | None, shift: int | None
) -> str | int | datetime | None:
    """Where a group is reset to; None for a shift. InputError unless exactly one is given."""
    if (to is None) == (shift is None):
        raise InputError(
            "A reset needs either an offset to go to or a number of offsets to move by.",
            fix="give one of `to` and `shift`.",
        )
    return None if to is None else resolve_offset_alias(to)


def shifted_offsets(
    group: str,
    topic: str,
    committed: Mapping[int, int | None],
    shift: int,
    bounds: Mapping[int, tuple[int, int]],
) -> dict[int, int]:
    """Committed offsets moved forward, or back if `shift` is negative, within (start, end) of each
    partition.
    """
    offsets = {}
    for number, offset in committed.items():
        if offset is None:
            raise InputError(
                f"The group {group!r} has no committed offset in {topic}[{number}] to move from.",
                fix="reset that partition to an offset, or name the partitions to shift.",
            )
        start, end = bounds[number]
        offsets[number] = min(max(offset + shift, start), end)
    return offsets


def trim_offsets(
    log: Log, name: str, before: str | int | datetime, partitions: Sequence[int] | None
) -> dict[int, int]:
    """The offsets before which a call of `trim_topic` removes rows, by partition."""
    info, ends = log.topic(name), log.end_offsets(name)
    for number in partitions or ():
        check_partition(info, number)
    position = resolve_offset_alias(before)
    if position == "latest":
        offsets = ends
    elif isinstance(position, int) and not isinstance(position, bool):
        offsets = dict.fromkeys(ends, position)
        for number in ends if partitions is None else partitions:
            if not 0 <= position <= ends[number]:
                start = log.start_offsets(name)[number]
                raise OffsetOutOfRange(name, number, position, start, ends[number])
    elif position == "earliest":
        offsets = log.start_offsets(name)
    else:
        offsets = log.offsets_at(name, position)
    return {
        number: offset
        for number, offset in offsets.items()
        if partitions is None or number in partitions
    }


# Declarations

COMPRESSIONS = ("none", "lz4", "zstd")
FORMATS = ("json", "avro", "protobuf", "json-schema")
MAX_PARTITIONS = 10_000
# The option of create_topic and alter_topic, and the field of TopicInfo that holds it.
_DURATIONS = {
    "retention": "retention_us",
    "history": "history_us",
    "tombstones": "tombstone_us",
    "segment_age": "segment_us",
}
_PLAIN = {
    "retention_bytes",
    "compact",
    "segment_bytes",
    "compression",
    "strict",
    "format",
    "registry",
}


def declared_topic(
    name: str,
    schema: str,
    key: str | Sequence[str] | None,
    *,
    partitions: int,
    is_table: bool,
    options: Mapping[str, Any],
) -> TopicInfo:
    """The topic that a call of `create_topic` or `create_table` describes."""
    check_name(name, what="topic name")
    columns = parse_schema(schema)
    names = check_key(columns, key, where=f"The topic {name!r}")
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise InputError(
            f"The topic {name!r} cannot have {partitions} partitions.",
            fix=f"give it 1 to {MAX_PARTITIONS}.",
        )
    if is_table and not names:
        raise InputError(
            f"The table {name!r} needs a primary key.", fix="name its column with key=…."
        )
    info = TopicInfo(
        name=name,
        schema=to_ddl(columns),
        arrow_schema=stored_schema(columns, names, is_table=is_table),
        key=names,
        partitions=partitions,
        is_table=is_table,
        **setting_fields(options),
    )
    _check_compaction(info)
    _check_registry(info)
    return info


def stored_schema(columns: pa.Schema, key: tuple[str, ...], *, is_table: bool) -> pa.Schema:
    """The columns as stored: a table's rows also have `_change_type`."""
    return table_schema(columns, key) if is_table else columns


def _check_compaction(info: TopicInfo) -> None:
    if info.compact and not info.key:
        raise InputError(
            f"The topic {info.name!r} has no key, and compaction keeps the newest row of each key.",
            fix="name its key, or leave out compact.",
        )


def _check_registry(info: TopicInfo) -> None:
    if info.format != "json" and not info.registry.startswith(("http://", "https://")):
        raise InputError(
            f"The topic {info.name!r} has the format {info.format!r}, and"
            f" {repr(info.registry) if info.registry else 'nothing'} is the address of a registry.",
            fix="name it: registry='http://host:8081'.",
        )
    if info.format == "json" and info.registry:
        raise InputError(
            f"The topic {info.name!r} has a registry, and its values are plain JSON.",
            fix="choose format='avro', 'protobuf' or 'json-schema', or leave out the registry.",
        )


def setting_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `create_topic` and `alter_topic` as fields of TopicInfo."""
    fields: dict[str, Any] = {}
    for option, value in options.items():
        if option in _DURATIONS:
            fields[_DURATIONS[option]] = None if value is None else to_us(value, what=option)
        elif option in _PLAIN:
            fields[option] = value
        else:
            raise InputError(
                f"A topic has no setting {option!r}:"
                f" {nearest(option, [*_DURATIONS, *_PLAIN, 'partitions', 'key', 'schema'])}"
            )
    compression = fields.get("compression", "none")
    if compression not in COMPRESSIONS:
        raise InputError(
            f"The compression {compression!r} is not known:"
            f" {nearest(str(compression), COMPRESSIONS)}"
        )
    value_format = fields.get("format", "json")
    if value_format not in FORMATS:
        raise InputError(
            f"The format {value_format!r} is not known: {nearest(str(value_format), FORMATS)}"
        )
    if fields.get("segment_bytes", 1) < 1 or (fields.get("retention_bytes") or 1) < 1:
        raise InputError("segment_bytes and retention_bytes are 1 or more.")
    return fields


def altered_topic(
    info: TopicInfo,
    *,
    change: ColumnChange,
    partitions: int | None,
    allow_moving_keys: bool,
    settings: Mapping[str, Any],
) -> TopicInfo:
    """A topic after a change. Raises IncompatibleChange if readers of stored rows would break."""
    changed = replace(info, **setting_fields(settings))
    if change:
        schema, history = evolve(
            parse_schema(info.schema),
            info.schema_history,
            change,
            key=info.key,
            where=f"The topic {info.name!r}",
        )
        changed = replace(
            changed,
            schema=to_ddl(schema),
            arrow_schema=stored_schema(schema, info.key, is_table=info.is_table),
            schema_history=history,
        )
    if partitions is not None:
        if partitions < info.partitions:
            raise IncompatibleChange(
                f"The topic {info.name!r} has {info.partitions} partitions; they cannot become"
                f" {partitions}, as rows would be lost.",
                fix="create another topic and copy the rows.",
            )
        if partitions > MAX_PARTITIONS:
            raise InputError(
                f"The topic {info.name!r} cannot have {partitions} partitions.",
                fix=f"give it 1 to {MAX_PARTITIONS}.",
            )
        if partitions > info.partitions and info.key and not allow_moving_keys:
            raise IncompatibleChange(
                f"More partitions for {info.name!r} would send most keys to another partition: rows"
                " of one key would no longer be in one partition, in order, and a table's older"
                " rows would not be found with the newer ones.",
                fix=(
                    "create another topic, or pass allow_moving_keys=True (--allow-moving-keys) if"
                    " nobody relies on it."
                ),
            )
        changed = replace(changed, partitions=partitions)
    if not info.compact:  # a compacted topic of others may have no key
        _check_compaction(changed)
    _check_registry(changed)
    return changed


def describe_change(before: TopicInfo, after: TopicInfo) -> list[str]:
    """What altering a topic does to its rows, producers and readers, one sentence a change."""
    was, now = before.schema_history, after.schema_history
    old = {field.name: field for field in parse_schema(before.schema)}
    new = {field.name: field for field in parse_schema(after.schema)}
    sentences = []
    for name, field in old.items():
        present = now.present_name(name)
        if present not in new:
            sentences.append(
                f"drop {name} {definition(field)}: its values are not read any more, a row that"
                " has one is refused, and the name cannot be used again"
            )
            continue
        if definition(field) != definition(new[present]):
            sentences.append(
                f"alter {name} from {definition(field)} to {definition(new[present])}: stored"
                " values are converted when they are read; a reader that declares"
                f" {definition(field)} goes on until a value comes that does not fit"
            )
        if present != name:
            sentences.append(
                f"rename {name} to {present}: stored rows are read with the new name; producers and"
                " readers may go on with the former one"
            )
    sentences += [
        f"add {name} {definition(new[name])}: it is null in stored rows, and producers may leave it"
        " out"
        for name in now.added
        if name not in {now.present_name(each) for each in was.added}
    ]
    if after.partitions != before.partitions:
        moves = ", and most keys move to another one" if before.key else ""
        sentences.append(f"partitions from {before.partitions} to {after.partitions}{moves}")
    for option, name in {**_DURATIONS, **{plain: plain for plain in sorted(_PLAIN)}}.items():
        values = getattr(before, name), getattr(after, name)
        if values[0] != values[1]:
            old_text, new_text = (_setting_text(option, value) for value in values)
            sentences.append(f"{option} from {old_text} to {new_text}{_removal(option, *values)}")
    return sentences


def _setting_text(option: str, value: Any) -> str:
    if value is None:
        return "none"
    return format_us(value) if option in _DURATIONS else str(value).lower()


def _removal(option: str, before: Any, after: Any) -> str:
    """What a setting removes that the setting before it keeps."""
    if option in {"retention", "retention_bytes"} and after is not None:
        if before is None or after < before:
            return ": rows beyond it are removed"
    elif (option == "compact" and after) or (option == "history" and after is not None):
        return ": superseded rows of a key are removed"
    return ""


def check_existing_topic(existing: TopicInfo, wanted: TopicInfo, *, exist_ok: bool) -> TopicInfo:
    """The existing topic if it may stand in for the one to be created; TopicExists otherwise. A
    program may declare the columns that the topic had at an earlier time.
    """
    if not exist_ok:
        raise TopicExists(
            f"There is a topic {wanted.name!r} already.",
            fix="choose another name, or pass exist_ok=True.",
        )
    differs = (existing.key, existing.is_table) != (wanted.key, wanted.is_table) or any(
        differences(
            parse_schema(wanted.schema), parse_schema(existing.schema), existing.schema_history
        )
    )
    if differs:
        raise TopicExists(
            f"There is a topic {wanted.name!r} already, with another schema or key:"
            f" {existing.schema} (key: {', '.join(existing.key) or 'none'}).",
            fix="choose another name, or declare it as it is; columns change with alter_topic.",
        )
    return existing
