"""Folding and merging: how chains of state files stay short, so that a local store can be rebuilt
from them quickly.

Every batch adds a delta to the chains of the key groups that it changes. *Folding* writes a group's
whole state as a snapshot, which starts a new chain. It pays where the chain holds far more garbage
than live bytes, or has many files. Deltas pay for it: each byte written earns credit, and a few
groups are folded at a time, so that the cost follows the rate of change and never comes all at
once. *Merging* turns many small deltas into one: where changes are small and the state is large,
folding alone would let chains grow too long.

`step_state.write_states` folds and merges; the local store keeps the schedule with the state. It
follows from the files, and is computed again when the store is rebuilt.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from headrace.columnar.keys import KEY_GROUPS

_SMALL_BYTES = 64 << 10
"""Chains with at most so many bytes of deltas are not folded."""
_FOLD_RATIO = 2.0
"""Ratio of garbage to live bytes at which folding pays."""
_LATE_RATIO = 6.0
"""Ratio at which folding is overdue, and credit is earned faster."""
_MANY_FILES = 64
"""From so many deltas on, a chain is also folded if its deltas outgrow its first file, even if all
bytes are live.
"""
_CREDIT_PER_BYTE = 0.25
"""Bytes of snapshots per byte of deltas. Holds garbage at four times the state when keys are
updated.
"""
_LATE_CREDIT_PER_BYTE = 2.0
"""Enough even when all keys are new."""
_MERGE_FILES = 256
_MAX_MERGED_BYTES = 16 << 20


Sizes = npt.NDArray[np.int64]
_CREDIT = struct.Struct("<d")
# The columns of a schedule; a key group without files has zeros.
_FIRST_BYTES = 0  # the first file: a snapshot, or the first delta
_DELTA_BYTES = 1
_DELTAS = 2
_LIVE_BYTES = 3  # what is still in the state of all these bytes
_UNMERGED_BYTES = 4  # the deltas since the last merge
_UNMERGED = 5


class FileChain(NamedTuple):
    """The sizes of one key group's chain."""

    first_bytes: int
    delta_bytes: int
    deltas: int
    live_bytes: int
    unmerged_bytes: int
    unmerged: int


class FoldingSchedule:
    """The sizes of all chains of one step in one shard, and the credit that deltas have earned for
    folding.
    """

    def __init__(self, sizes: Sizes | None = None, credit_bytes: float = 0.0) -> None:
        self.sizes = np.zeros((KEY_GROUPS, 6), np.int64) if sizes is None else sizes
        self.credit_bytes = credit_bytes

    @property
    def chains(self) -> dict[int, FileChain]:
        """The sizes of each group that has files."""
        present = np.flatnonzero(self.sizes.any(axis=1)).tolist()
        return {group: FileChain(*self.sizes[group].tolist()) for group in present}

    # Bookkeeping

    def start_chain(self, group: int, size: int) -> None:
        """A group's chain starts anew with a file that holds its whole state."""
        self.sizes[group] = (size, 0, 0, size, 0, 0)

    def add_delta(self, group: int, size: int, *, growth: int = 0) -> None:
        """A delta of `size` bytes is added to a group's chain; the state grows by `growth`
        bytes.
        """
        self.sizes[group] += (0, size, 1, growth, size, 1)

    def add_deltas(self, groups: Sizes, written: Sizes, growth: Sizes, is_first: Sizes) -> None:
        """Add the deltas of one file, group by group; for some it is the first of their chain."""
        old, new = groups[~is_first], groups[is_first]
        self.sizes[old, _DELTA_BYTES] += written[old]
        self.sizes[old, _DELTAS] += 1
        self.sizes[old, _LIVE_BYTES] += growth[old]
        self.sizes[old, _UNMERGED_BYTES] += written[old]
        self.sizes[old, _UNMERGED] += 1
        self.sizes[new] = 0
        self.sizes[new, _FIRST_BYTES] = written[new]
        self.sizes[new, _LIVE_BYTES] = growth[new]  # without deletions of missing keys

    def drop_chain(self, group: int) -> None:
        self.sizes[group] = 0

    def live_bytes(self, group: int) -> int:
        return int(self.sizes[group, _LIVE_BYTES])

    def set_live_bytes(self, group: int, live_bytes: int) -> None:
        self.sizes[group, _LIVE_BYTES] = live_bytes

    # Folding

    def garbage_ratios(self) -> npt.NDArray[np.float64]:
        """For each group the ratio of garbage bytes to live bytes; with many files, at least the
        ratio of the deltas to the first file. 0 if the deltas are small.
        """
        first, delta, deltas, live = (self.sizes[:, column] for column in range(4))
        ratios = (first + delta) / np.maximum(live, 1) - 1
        ratios = np.where(
            deltas < _MANY_FILES, ratios, np.maximum(ratios, delta / np.maximum(first, 1))
        )
        return np.where(delta <= _SMALL_BYTES, 0.0, ratios)

    def add_credit(self, written_bytes: int) -> None:
        """Credit for deltas that were written. Without a chain worth folding, none is kept."""
        worst = float(self.garbage_ratios().max())
        if worst < _FOLD_RATIO:
            self.credit_bytes = 0
        else:
            rate = _CREDIT_PER_BYTE if worst < _LATE_RATIO else _LATE_CREDIT_PER_BYTE
            self.credit_bytes += rate * written_bytes

    def groups_to_fold(self) -> list[int]:
        """The groups whose folding pays and is paid for, the worst first."""
        ratios = self.garbage_ratios()
        groups: list[int] = []
        credit = self.credit_bytes
        for group in np.argsort(-ratios, kind="stable").tolist():
            live_bytes = self.live_bytes(group)
            if ratios[group] < _FOLD_RATIO or live_bytes > credit:
                break
            credit -= live_bytes
            groups.append(group)
        return groups

    def record_fold(self, group: int, size: int) -> None:
        """A group was folded into a snapshot of `size` bytes."""
        self.start_chain(group, size)
        self.credit_bytes -= size

    # Merging

    def groups_to_merge(self) -> Mapping[int, int]:
        """Group -> how many of its newest deltas to merge. Empty unless some group has many deltas
        and all of them together are small.
        """
        unmerged = self.sizes[:, _UNMERGED]
        if (
            unmerged.max() < _MERGE_FILES
            or self.sizes[:, _UNMERGED_BYTES].sum() > _MAX_MERGED_BYTES
        ):
            return {}
        return {group: int(unmerged[group]) for group in np.flatnonzero(unmerged > 1).tolist()}

    def record_merge(self, group: int, size: int) -> None:
        """A group's unmerged deltas were merged into one of `size` bytes."""
        chain = self.sizes[group]
        chain[_DELTA_BYTES] += size - chain[_UNMERGED_BYTES]
        chain[_DELTAS] -= chain[_UNMERGED] - 1
        chain[_UNMERGED_BYTES] = chain[_UNMERGED] = 0

    # In the local store

    def to_bytes(self) -> bytes:
        return _CREDIT.pack(self.credit_bytes) + self.sizes.tobytes()

    @classmethod
    def from_bytes(cls, stored: bytes | None) -> Self:
        if not stored:
            return cls()
        sizes = np.frombuffer(stored, np.int64, offset=_CREDIT.size).reshape(KEY_GROUPS, 6).copy()
        return cls(sizes, *_CREDIT.unpack_from(stored))
