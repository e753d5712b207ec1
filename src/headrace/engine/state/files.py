"""State as it is true: immutable files, each named by a random id, with the keys that one batch
changed (a delta) or all keys of a key group (a snapshot).

A key group's state is the chain of files that its id leads to: each file says for each key group
which one came before. A file is durable before its id is in the ledger; a file that no ledger entry
reaches never happened.
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
from headrace.columnar.keys import whole
from headrace.errors import CorruptionError, NewerFormat

# Immutable Arrow files: each named by a random id that ends with the checksum of its content, and
# durable before the id is known to anyone.
#
# State and clocks are kept in them. The id in the ledger thereby vouches for every byte: a file
# that was damaged, or put there by mistake, is never taken for the truth.


_CHECKSUM_DIGITS = 8
_METADATA = b"headrace"


def new_id() -> str:
    return uuid.uuid4().hex


def store(directory: Path, suffix: str, table: pa.Table, about: dict[str, Any]) -> str:
    """Write a durable state file whose name ends in its checksum. Returns the name."""
    directory.mkdir(parents=True, exist_ok=True)
    content = _encoded(table.replace_schema_metadata({_METADATA: json.dumps(about).encode()}))
    name = f"{new_id()[:-_CHECKSUM_DIGITS]}{zlib.crc32(content):0{_CHECKSUM_DIGITS}x}"
    write_atomically(directory / f"{name}{suffix}", content, durable=True)
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
        raise NewerFormat(
            f"{path} has format {about['version']}; this Headrace knows {newest_version}.",
            fix="upgrade Headrace.",
        )
    return about


def _unreadable(path: Path, why: str) -> CorruptionError:
    return CorruptionError(
        f"{path} cannot be read: {why}", fix="restore it from a backup, or replay the pipeline."
    )


VERSION = 1
GROUPS = 128
SUFFIX = ".state"
_A_ROW_BYTES = 8  # where key and value end
_SCHEMA = pa.schema([pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())])
StateIds = dict[int, str]
"""Key group -> the id of the file that holds its newest change; a group without one is empty."""


@dataclass(frozen=True)
class StateFile:
    """One file's content: rows sorted by key group, and for each group it covers where its rows
    start and which file came before.
    """

    id: str
    table: pa.Table
    starts: Mapping[int, tuple[int, int]]  # group -> (first row, rows)
    parents: Mapping[int, str | None]

    def rows(self, group: int) -> pa.Table:
        first, count = self.starts.get(group, (0, 0))
        return self.table.slice(first, count)

    def weight(self, group: int) -> int:
        """About how many of the file's bytes are a group's."""
        rows = self.rows(group).combine_chunks()
        return int(weights(whole(rows["key"]), whole(rows["value"])).sum())


def weights(keys: pa.Array, values: pa.Array) -> npt.NDArray[np.int64]:
    """About how many bytes of a file each row takes; the value of one that is deleted takes
    none.
    """
    return np.diff(offsets_of(keys)) + np.diff(offsets_of(values)) + _A_ROW_BYTES


def growth(keys: pa.Array, before: pa.Array, after: pa.Array) -> npt.NDArray[np.int64]:
    """About how many bytes more there are of each key than before; where a value is null, nothing
    is there.
    """
    was, now = (
        np.where(values.is_valid().to_numpy(zero_copy_only=False), weights(keys, values), 0)
        for values in (before, after)
    )
    return now - was


class StateFiles:
    """The files of one step, in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(
        self,
        keys: pa.Array,
        values: pa.Array,
        groups: npt.NDArray[np.uint8],
        parents: Mapping[int, str | None],
    ) -> str:
        """Store changes (a null value deletes its key) for all groups in `parents`; `groups` are in
        order. Returns the new id.
        """
        cuts = np.searchsorted(groups, np.arange(GROUPS + 1))
        starts = {
            group: [int(cuts[group]), int(cuts[group + 1] - cuts[group])]
            for group in range(GROUPS)
            if cuts[group + 1] > cuts[group]
        }
        about = {
            "version": VERSION,
            "starts": starts,
            "parents": {str(group): parent for group, parent in parents.items()},
        }
        return store(
            self.directory, SUFFIX, pa.Table.from_arrays([keys, values], schema=_SCHEMA), about
        )

    def read(self, name: str) -> StateFile:
        table, about = read(self._path(name), newest_version=VERSION)
        starts = {int(group): (first, count) for group, (first, count) in about["starts"].items()}
        parents = {int(group): parent for group, parent in about["parents"].items()}
        return StateFile(name, table, starts, parents)

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}{SUFFIX}"

    def chain(
        self,
        group: int,
        newest: str | None,
        *,
        until: str | None = None,
        most: int | None = None,
        cache: dict[str, StateFile] | None = None,
    ) -> Iterator[StateFile]:
        """The files that lead to a group's state, newest first, down to (not including) `until`, at
        most `most` of them.
        """
        known = {} if cache is None else cache
        name, left = newest, most
        while name is not None and name != until and left != 0:
            if name not in known:
                known[name] = self.read(name)
            yield known[name]
            name, left = known[name].parents.get(group), None if left is None else left - 1

    def load(self, groups: Iterable[int], ids: StateIds) -> dict[int, dict[bytes, bytes]]:
        """The whole state of key groups, for looking at it."""
        cache: dict[str, StateFile] = {}
        chains = {group: list(self.chain(group, ids.get(group), cache=cache)) for group in groups}
        return {
            group: dict(zip(*(column.to_pylist() for column in folded(files, group)), strict=True))
            for group, files in chains.items()
        }

    def parents(self, name: str) -> dict[int, str | None]:
        """For each key group that a file covers the file that came before; without reading its
        rows.
        """
        about = read_about(self._path(name), newest_version=VERSION)
        known: dict[str | None, str | None] = {}  # most groups have the same one: keep it once
        return {
            int(group): known.setdefault(parent, parent)
            for group, parent in about["parents"].items()
        }

    def reach(self, entries: Iterable[StateIds]) -> Iterator[str]:
        """The files that ledger entries lead to, one by one; some are named more than once."""
        known: dict[str, dict[int, str | None]] = {}
        seen: set[tuple[int, str]] = set()
        for group, newest in (each for ids in entries for each in ids.items()):
            name: str | None = newest
            while name is not None and (group, name) not in seen:
                seen.add((group, name))
                if name not in known:
                    known[name] = self.parents(name)
                yield name
                name = known[name].get(group)


def folded(
    files: Sequence[StateFile], group: int, *, with_deletions: bool = False
) -> tuple[pa.Array, pa.Array]:
    """A group's keys and values after some files of its chain, newest first: each key once, in
    order; a deleted one only if asked for, with a null.
    """
    if not files:
        return pa.array([], pa.binary()), pa.array([], pa.binary())
    rows = pa.concat_tables([file.rows(group) for file in files]).combine_chunks()
    keys, values = whole(rows["key"]), whole(rows["value"])
    encoded = keys.dictionary_encode()
    _, newest = np.unique(
        encoded.indices.to_numpy(), return_index=True
    )  # the first that is found, since the newest file comes first
    chosen = newest[pc.sort_indices(encoded.dictionary).to_numpy()]
    keys, values = take_bytes(keys, chosen), take_bytes(values, chosen)
    if with_deletions or not values.null_count:
        return keys, values
    there = values.is_valid()
    return keys.filter(there), values.filter(there)


# A task's report: a small file for the commit. Whichever attempt's is found, it stands for the same
# rows.


def write_report(directory: Path, name: str, report: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / f"{name}.json", json.dumps(report).encode(), durable=False)
