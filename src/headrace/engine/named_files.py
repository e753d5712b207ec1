"""Immutable Arrow files: each named by a random id that ends with the checksum of its content, and durable before the id is known to anyone.

State and clocks are kept in them. The id in the ledger thereby vouches for every byte: a file that was damaged, or put there by mistake, is never taken for the truth.
"""

from __future__ import annotations

import json
import os
import uuid
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa

from headrace.errors import CorruptionError, NewerFormat
from headrace.log.file.disk import Disk

_CHECKSUM_DIGITS = 8
_METADATA = b"headrace"


def new_id() -> str:
    return uuid.uuid4().hex


def store(directory: Path, suffix: str, table: pa.Table, about: dict[str, Any]) -> str:
    """Write under a temporary name, sync, rename, sync the directory. Returns the id."""
    directory.mkdir(parents=True, exist_ok=True)
    content = _encoded(table.replace_schema_metadata({_METADATA: json.dumps(about).encode()}))
    name = f"{new_id()[:-_CHECKSUM_DIGITS]}{zlib.crc32(content):0{_CHECKSUM_DIGITS}x}"
    fresh = directory / f".{name}"
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(directory / f"{name}{suffix}")
    Disk().sync_directory(directory)
    return name


def _encoded(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def read(path: Path, *, newest_version: int) -> tuple[pa.Table, dict[str, Any]]:
    """A file's rows, mapped into memory, and what it says about itself; checked byte by byte."""
    try:
        content = pa.memory_map(str(path)).read_buffer()
        _check_sum(path, content)
        table = pa.ipc.open_file(content).read_all()
        return table, _about(path, table.schema, newest_version)
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, str(error)) from error


def read_about(path: Path, *, newest_version: int) -> dict[str, Any]:
    """What a file says about itself, without reading (or checking) its rows."""
    try:
        with pa.OSFile(str(path)) as file:
            return _about(path, pa.ipc.open_file(file).schema, newest_version)
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, str(error)) from error


def _check_sum(path: Path, content: pa.Buffer) -> None:
    if f"{zlib.crc32(content):0{_CHECKSUM_DIGITS}x}" != path.stem[-_CHECKSUM_DIGITS:]:
        raise _unreadable(path, "its content does not fit the checksum in its name")


def _about(path: Path, schema: pa.Schema, newest_version: int) -> dict[str, Any]:
    about: dict[str, Any] = json.loads(schema.metadata[_METADATA])
    if about["version"] > newest_version:
        raise NewerFormat(f"{path} has format {about['version']}; this Headrace knows {newest_version}.", fix="upgrade Headrace.")
    return about


def _unreadable(path: Path, why: str) -> CorruptionError:
    return CorruptionError(f"{path} cannot be read: {why}", fix="restore it from a backup, or replay the pipeline.")
