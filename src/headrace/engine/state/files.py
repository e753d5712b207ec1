"""State files: the state of a step, as immutable Arrow files.

A file holds the keys that one batch changed (a delta), or all keys of some key groups (a
snapshot). For each key group it names the file that came before. So the state of a key group is a
chain of files, and the id of the newest one identifies it: the ledger stores these ids.

A file's id is random and ends with the checksum of its content, and the file is durable before
anyone knows its id. An id in the ledger therefore vouches for every byte: a file that was damaged
or put there by mistake is never taken for the truth. A file that no ledger entry reaches never
happened; `sweeper` removes it. `engine.watermarks` stores watermarks in such files too.
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.atomic_file import write_atomically
from headrace.columnar.buffers import offsets_of, take_bytes
from headrace.columnar.keys import KEY_GROUPS, as_array
from headrace.errors import CorruptionError, NewerFormat

# Immutable files of any kind


MIN_COMPRESSED_BYTES = 64 << 10
"""Smaller files are stored as they are, and mapped into memory."""
_CHECKSUM_DIGITS = 8
_METADATA = b"headrace"


def new_id() -> str:
    return uuid.uuid4().hex


def store(directory: Path, suffix: str, table: pa.Table, about: dict[str, Any]) -> str:
    """Write a file durably. `about` is stored in its metadata. Returns the new id."""
    directory.mkdir(parents=True, exist_ok=True)
    table = table.replace_schema_metadata({_METADATA: json.dumps(about).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=_write_options(table)) as writer:
        writer.write_table(table)
    content = sink.getvalue()
    name = f"{new_id()[:-_CHECKSUM_DIGITS]}{_checksum(content)}"
    write_atomically(directory / f"{name}{suffix}", content, durable=True)
    return name


def _write_options(table: pa.Table) -> pa.ipc.IpcWriteOptions:
    """Large files are compressed: rows of texts take half as much, and are written sooner."""
    if table.nbytes < MIN_COMPRESSED_BYTES:
        return pa.ipc.IpcWriteOptions()
    return pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))


def _checksum(content: pa.Buffer) -> str:
    return f"{zlib.crc32(content):0{_CHECKSUM_DIGITS}x}"


def read(path: Path, *, newest_version: int) -> tuple[pa.Table, dict[str, Any]]:
    """A file's rows, mapped into memory, and its metadata. Raises CorruptionError if the checksum
    does not match.
    """
    try:
        content = pa.memory_map(str(path)).read_buffer()
        if _checksum(content) != path.stem[-_CHECKSUM_DIGITS:]:
            raise _unreadable(path, "its content does not fit the checksum in its name")
        table = pa.ipc.open_file(content).read_all()
        return table, _read_metadata(path, table.schema, newest_version)
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, str(error)) from error


def read_about(path: Path, *, newest_version: int) -> dict[str, Any]:
    """A file's metadata, without reading or checking its rows."""
    try:
        with pa.OSFile(str(path)) as file:
            return _read_metadata(path, pa.ipc.open_file(file).schema, newest_version)
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, str(error)) from error


def _read_metadata(path: Path, schema: pa.Schema, newest_version: int) -> dict[str, Any]:
    about: dict[str, Any] = json.loads(schema.metadata[_METADATA])
    if about["version"] > newest_version:
        raise NewerFormat(
            f"{path} has format {about['version']}; this Headrace knows {newest_version}.",
            fix="upgrade Headrace.",
        )
    return about


def _unreadable(path: Path, why: str) -> CorruptionError:
    return CorruptionError(
        f"{path} cannot be read: {why}", fix="restore it from a backup, or replay the pipeline."
    )


# State files


VERSION = 1
SHARED_VERSION = 2
SUFFIX = ".state"
SHARED = "+"
"""The directory of files that hold the changes of several steps. Their ids begin with it too."""
_ROW_OVERHEAD_BYTES = 8  # the offsets of key and value
_SCHEMA = pa.schema([pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())])
StateIds = dict[int, str]
"""Key group -> id of the file with its newest change. A group without an id is empty."""
IdRanges = list[tuple[int, int, str]]
"""State ids as (first key group, last key group, id)."""


def to_ranges(ids: Mapping[int, str]) -> IdRanges:
    """Neighbouring key groups usually share an id, so that 128 groups are a few ranges."""
    ranges: IdRanges = []
    for group, name in sorted(ids.items()):
        if ranges and ranges[-1][1] == group - 1 and ranges[-1][2] == name:
            ranges[-1] = (ranges[-1][0], group, name)
        else:
            ranges.append((group, group, name))
    return ranges


def from_ranges(ranges: Iterable[tuple[int, int, str]]) -> StateIds:
    return {group: name for first, last, name in ranges for group in range(first, last + 1)}


@dataclass(frozen=True)
class StateFile:
    """The content of one file. Its rows are sorted by key group."""

    id: str
    table: pa.Table
    starts: Mapping[int, tuple[int, int]]
    """Key group -> (first row, number of rows)."""
    parents: Mapping[int, str | None]
    """Key group -> id of the file before; None for a snapshot."""

    def rows(self, group: int) -> pa.Table:
        first, count = self.starts.get(group, (0, 0))
        return self.table.slice(first, count)

    def group_bytes(self, group: int) -> int:
        """About how many bytes of the file belong to a key group."""
        rows = self.rows(group).combine_chunks()
        return int(row_bytes(as_array(rows["key"]), as_array(rows["value"])).sum())


def row_bytes(keys: pa.Array, values: pa.Array) -> npt.NDArray[np.int64]:
    """About how many bytes of a file each row takes. A deletion has no value."""
    return np.diff(offsets_of(keys)) + np.diff(offsets_of(values)) + _ROW_OVERHEAD_BYTES


def row_growth_bytes(keys: pa.Array, before: pa.Array, after: pa.Array) -> npt.NDArray[np.int64]:
    """By how many bytes each key's entry has grown. A null value is no entry."""
    bytes_before, bytes_after = (
        np.where(values.is_valid().to_numpy(zero_copy_only=False), row_bytes(keys, values), 0)
        for values in (before, after)
    )
    return bytes_after - bytes_before


class StateFiles:
    """The state files of one step, in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(
        self,
        keys: pa.Array,
        values: pa.Array,
        groups: npt.NDArray[np.uint8],
        parents: Mapping[int, str | None],
    ) -> str:
        """Store changes for the key groups in `parents`. A null value deletes its key; `groups`
        are sorted. Returns the new id.
        """
        about = {"version": VERSION, **_describe(groups, parents)}
        table = pa.Table.from_arrays([keys, values], schema=_SCHEMA)
        return store(self.directory, SUFFIX, table, about)

    def read(self, name: str) -> StateFile:
        table, about = read(self.path(name), newest_version=SHARED_VERSION)
        about = self._own_part(name, about)
        return StateFile(
            id=name,
            table=table,
            starts={int(group): (first, n) for group, (first, n) in about["starts"].items()},
            parents={int(group): parent for group, parent in about["parents"].items()},
        )

    def path(self, name: str) -> Path:
        """Where a file is: in the step's directory, or where several steps share files."""
        if name.startswith(SHARED):
            return self.directory.parent / SHARED / f"{name[1:]}{SUFFIX}"
        return self.directory / f"{name}{SUFFIX}"

    def _own_part(self, name: str, about: dict[str, Any]) -> dict[str, Any]:
        """What a file's metadata says about this step."""
        if not name.startswith(SHARED):
            return about
        part: dict[str, Any] = about["steps"][self.directory.name]
        return part

    def chain(
        self,
        group: int,
        newest: str | None,
        *,
        until: str | None = None,
        limit: int | None = None,
        cache: dict[str, StateFile] | None = None,
    ) -> Iterator[StateFile]:
        """The chain of files of a key group, newest first, down to but without `until`, and at most
        `limit` files.
        """
        cache = {} if cache is None else cache
        name, left = newest, limit
        while name is not None and name != until and left != 0:
            if name not in cache:
                cache[name] = self.read(name)
            yield cache[name]
            name = cache[name].parents.get(group)
            left = None if left is None else left - 1

    def load(self, groups: Iterable[int], ids: StateIds) -> dict[int, dict[bytes, bytes]]:
        """The whole state of some key groups, for people to look at."""
        cache: dict[str, StateFile] = {}
        content = {}
        for group in groups:
            chain = list(self.chain(group, ids.get(group), cache=cache))
            keys, values = fold(chain, group)
            content[group] = dict(zip(keys.to_pylist(), values.to_pylist(), strict=True))
        return content

    def parents(self, name: str) -> dict[int, str | None]:
        """Key group -> id of the file before, without reading the file's rows."""
        about = read_about(self.path(name), newest_version=SHARED_VERSION)
        about = self._own_part(name, about)
        interned: dict[str | None, str | None] = {}  # most groups have the same parent
        return {
            int(group): interned.setdefault(parent, parent)
            for group, parent in about["parents"].items()
        }

    def reach(self, entries: Iterable[StateIds]) -> Iterator[str]:
        """The ids of all files that ledger entries lead to, one by one, some more than once."""
        parents: dict[str, dict[int, str | None]] = {}
        seen: set[tuple[int, str]] = set()
        for group, newest in (item for ids in entries for item in ids.items()):
            name: str | None = newest
            while name is not None and (group, name) not in seen:
                seen.add((group, name))
                if name not in parents:
                    parents[name] = self.parents(name)
                yield name
                name = parents[name].get(group)


def _describe(
    groups: npt.NDArray[np.uint8], parents: Mapping[int, str | None], *, first_row: int = 0
) -> dict[str, Any]:
    """Where the rows of each key group are, and which file came before."""
    cuts = np.searchsorted(groups, np.arange(KEY_GROUPS + 1))
    counts = np.diff(cuts)
    return {
        "starts": {
            group: [first_row + int(cuts[group]), int(counts[group])]
            for group in np.flatnonzero(counts).tolist()
        },
        "parents": {str(group): parent for group, parent in parents.items()},
    }


@dataclass(frozen=True)
class StepChanges:
    """The changes of one step that go into a file with those of others: see `StateFiles.write`."""

    step: str
    keys: pa.Array
    values: pa.Array
    groups: npt.NDArray[np.uint8]
    parents: Mapping[int, str | None]


def write_shared(directory: Path, changes: Sequence[StepChanges]) -> str:
    """Store the changes of several steps in one file: it is written and synced once. `directory`
    has the steps' own directories. Returns the new id, which is the same for all of them.
    """
    steps, first_row = {}, 0
    for change in changes:
        steps[change.step] = _describe(change.groups, change.parents, first_row=first_row)
        first_row += len(change.keys)
    columns = [
        pa.concat_arrays([change.keys for change in changes]),
        pa.concat_arrays([change.values for change in changes]),
    ]
    about = {"version": SHARED_VERSION, "steps": steps}
    table = pa.Table.from_arrays(columns, schema=_SCHEMA)
    return SHARED + store(directory / SHARED, SUFFIX, table, about)


def fold(
    files: Sequence[StateFile], group: int, *, with_deletions: bool = False
) -> tuple[pa.Array, pa.Array]:
    """The keys and values of a key group after some files of its chain, newest first. Each key
    occurs once, in order. A deleted key is included only `with_deletions`, with a null value.
    """
    if not files:
        return pa.array([], pa.binary()), pa.array([], pa.binary())
    rows = pa.concat_tables([file.rows(group) for file in files]).combine_chunks()
    keys, values = as_array(rows["key"]), as_array(rows["value"])
    encoded = keys.dictionary_encode()
    # The first occurrence of a key is its newest value, since the newest file comes first.
    _, newest = np.unique(encoded.indices.to_numpy(), return_index=True)
    order = newest[pc.sort_indices(encoded.dictionary).to_numpy()]
    keys, values = take_bytes(keys, order), take_bytes(values, order)
    if with_deletions or not values.null_count:
        return keys, values
    is_live = values.is_valid()
    return keys.filter(is_live), values.filter(is_live)
