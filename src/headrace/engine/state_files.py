"""State as it is true: immutable files, each named by a random id, with the keys that one batch changed (a delta) or all keys of a key group (a snapshot).

A key group's state is the chain of files that its id leads to: each file says for each key group which one came before. A file is durable
before its id is in the ledger; a file that no ledger entry reaches never happened.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.errors import CorruptionError, NewerFormat

VERSION = 1
GROUPS = 128
SUFFIX = ".state"
_SCHEMA = pa.schema([pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())])
StateIds = dict[int, str]
"""Key group -> the id of the file that holds its newest change; a group without one is empty."""


@dataclass(frozen=True)
class StateFile:
    """One file's content: rows sorted by key group, and for each group it covers where its rows start and which file came before."""

    id: str
    table: pa.Table
    starts: Mapping[int, tuple[int, int]]  # group -> (first row, rows)
    parents: Mapping[int, str | None]
    size: int

    def rows(self, group: int) -> pa.Table:
        first, count = self.starts.get(group, (0, 0))
        return self.table.slice(first, count)


def new_id() -> str:
    return uuid.uuid4().hex


class StateFiles:
    """The files of one step, in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, keys: pa.Array, values: pa.Array, groups: npt.NDArray[np.uint8], parents: Mapping[int, str | None]) -> tuple[str, int]:
        """Store changes (a null value deletes its key) for all groups in `parents`. Returns the new id and the file's size."""
        order = np.argsort(groups, kind="stable")
        in_order = groups[order]
        numbers, firsts, counts = np.unique(in_order, return_index=True, return_counts=True)
        starts = {int(g): [int(f), int(c)] for g, f, c in zip(numbers, firsts, counts, strict=True)}
        metadata = {"version": VERSION, "starts": starts, "parents": {str(group): parent for group, parent in parents.items()}}
        chosen = pa.array(order)
        table = pa.Table.from_arrays([keys.take(chosen), values.take(chosen)], schema=_SCHEMA)
        return self._store(table.replace_schema_metadata({b"headrace": json.dumps(metadata).encode()}))

    def _store(self, table: pa.Table) -> tuple[str, int]:
        """Write under a temporary name, sync, rename, sync the directory."""
        self.directory.mkdir(parents=True, exist_ok=True)
        name = new_id()
        fresh = self.directory / f".{name}"
        with fresh.open("wb") as file:
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        fresh.rename(self.directory / f"{name}{SUFFIX}")
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return name, size

    def read(self, name: str) -> StateFile:
        path = self.directory / f"{name}{SUFFIX}"
        try:
            table = pa.ipc.open_file(pa.BufferReader(path.read_bytes())).read_all()
            metadata = json.loads(table.schema.metadata[b"headrace"])
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
            raise CorruptionError(
                f"The state file {path} cannot be read: {error}", fix="restore it from a backup, or replay the pipeline."
            ) from error
        if metadata["version"] > VERSION:
            raise NewerFormat(f"{path} has format {metadata['version']}; this Headrace knows {VERSION}.", fix="upgrade Headrace.")
        starts = {int(group): (first, count) for group, (first, count) in metadata["starts"].items()}
        parents = {int(group): parent for group, parent in metadata["parents"].items()}
        return StateFile(name, table, starts, parents, path.stat().st_size)

    def chain(self, group: int, newest: str | None, *, until: str | None = None, cache: dict[str, StateFile] | None = None) -> Iterator[StateFile]:
        """The files that lead to a group's state, newest first, down to (not including) `until`."""
        known = {} if cache is None else cache
        name = newest
        while name is not None and name != until:
            if name not in known:
                known[name] = self.read(name)
            yield known[name]
            name = known[name].parents.get(group)

    def load(self, groups: Iterable[int], ids: StateIds) -> dict[int, dict[bytes, bytes]]:
        """The whole state of key groups, for rebuilding, rescaling and looking at it."""
        cache: dict[str, StateFile] = {}
        return {group: self._folded(list(self.chain(group, ids.get(group), cache=cache)), group) for group in groups}

    @staticmethod
    def _folded(files: Sequence[StateFile], group: int) -> dict[bytes, bytes]:
        state: dict[bytes, bytes | None] = {}
        for file in reversed(files):
            rows = file.rows(group)
            state.update(zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True))
        return {key: value for key, value in state.items() if value is not None}

    def reachable(self, ids: Iterable[StateIds]) -> set[str]:
        """Every file that some ledger entry leads to."""
        cache: dict[str, StateFile] = {}
        return {file.id for entry in ids for group, name in entry.items() for file in self.chain(group, name, cache=cache)}

    def sweep(self, kept: set[str], *, older_than_s: float, now_s: float) -> int:
        """Remove files that nothing reaches, once they are too old to belong to a batch under way."""
        removed = 0
        for path in self.directory.glob(f"*{SUFFIX}"):
            if path.name.removesuffix(SUFFIX) not in kept and now_s - path.stat().st_mtime > older_than_s:
                path.unlink(missing_ok=True)
                removed += 1
        return removed
