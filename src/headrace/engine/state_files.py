"""State as it is true: immutable files, each named by a random id, with the keys that one batch changed (a delta) or all keys of a key group (a snapshot).

A key group's state is the chain of files that its id leads to: each file says for each key group which one came before. A file is durable
before its id is in the ledger; a file that no ledger entry reaches never happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.engine import named_files
from headrace.operators.buffers import offsets_of, take_bytes
from headrace.operators.keys import whole

VERSION = 1
GROUPS = 128
SUFFIX = ".state"
_A_ROW_BYTES = 8  # where key and value end
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

    def rows(self, group: int) -> pa.Table:
        first, count = self.starts.get(group, (0, 0))
        return self.table.slice(first, count)

    def weight(self, group: int) -> int:
        """About how many of the file's bytes are a group's."""
        rows = self.rows(group).combine_chunks()
        return int(weights(whole(rows["key"]), whole(rows["value"])).sum())


def weights(keys: pa.Array, values: pa.Array) -> npt.NDArray[np.int64]:
    """About how many bytes of a file each row takes; the value of one that is deleted takes none."""
    return np.diff(offsets_of(keys)) + np.diff(offsets_of(values)) + _A_ROW_BYTES


def growth(keys: pa.Array, before: pa.Array, after: pa.Array) -> npt.NDArray[np.int64]:
    """About how many bytes more there are of each key than before; where a value is null, nothing is there."""
    was, now = (np.where(values.is_valid().to_numpy(zero_copy_only=False), weights(keys, values), 0) for values in (before, after))
    return now - was


class StateFiles:
    """The files of one step, in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, keys: pa.Array, values: pa.Array, groups: npt.NDArray[np.uint8], parents: Mapping[int, str | None]) -> str:
        """Store changes (a null value deletes its key) for all groups in `parents`; `groups` are in order. Returns the new id."""
        cuts = np.searchsorted(groups, np.arange(GROUPS + 1))
        starts = {group: [int(cuts[group]), int(cuts[group + 1] - cuts[group])] for group in range(GROUPS) if cuts[group + 1] > cuts[group]}
        about = {"version": VERSION, "starts": starts, "parents": {str(group): parent for group, parent in parents.items()}}
        return named_files.store(self.directory, SUFFIX, pa.Table.from_arrays([keys, values], schema=_SCHEMA), about)

    def read(self, name: str) -> StateFile:
        table, about = named_files.read(self._path(name), newest_version=VERSION)
        starts = {int(group): (first, count) for group, (first, count) in about["starts"].items()}
        parents = {int(group): parent for group, parent in about["parents"].items()}
        return StateFile(name, table, starts, parents)

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}{SUFFIX}"

    def chain(
        self, group: int, newest: str | None, *, until: str | None = None, most: int | None = None, cache: dict[str, StateFile] | None = None
    ) -> Iterator[StateFile]:
        """The files that lead to a group's state, newest first, down to (not including) `until`, at most `most` of them."""
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
        return {group: dict(zip(*(column.to_pylist() for column in folded(files, group)), strict=True)) for group, files in chains.items()}

    def parents(self, name: str) -> dict[int, str | None]:
        """For each key group that a file covers the file that came before; without reading its rows."""
        about = named_files.read_about(self._path(name), newest_version=VERSION)
        known: dict[str | None, str | None] = {}  # most groups have the same one: keep it once
        return {int(group): known.setdefault(parent, parent) for group, parent in about["parents"].items()}

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


def folded(files: Sequence[StateFile], group: int, *, with_deletions: bool = False) -> tuple[pa.Array, pa.Array]:
    """A group's keys and values after some files of its chain, newest first: each key once, in order; a deleted one only if asked for, with a null."""
    if not files:
        return pa.array([], pa.binary()), pa.array([], pa.binary())
    rows = pa.concat_tables([file.rows(group) for file in files]).combine_chunks()
    keys, values = whole(rows["key"]), whole(rows["value"])
    encoded = keys.dictionary_encode()
    _, newest = np.unique(encoded.indices.to_numpy(), return_index=True)  # the first that is found, since the newest file comes first
    chosen = newest[pc.sort_indices(encoded.dictionary).to_numpy()]
    keys, values = take_bytes(keys, chosen), take_bytes(values, chosen)
    if with_deletions or not values.null_count:
        return keys, values
    there = values.is_valid()
    return keys.filter(there), values.filter(there)
