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

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

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


@dataclass
class FileChain:
    """The sizes of one key group's chain."""

    first_bytes: int = 0
    """The first file: a snapshot, or the first delta."""
    delta_bytes: int = 0
    deltas: int = 0
    live_bytes: int = 0
    """What is still in the state of all these bytes."""
    unmerged_bytes: int = 0
    unmerged: int = 0
    """The deltas since the last merge."""

    @property
    def garbage_ratio(self) -> float:
        """Ratio of garbage bytes to live bytes; with many files, at least the ratio of the deltas
        to the first file. 0 if the deltas are small.
        """
        if self.delta_bytes <= _SMALL_BYTES:
            return 0.0
        ratio = (self.first_bytes + self.delta_bytes) / max(self.live_bytes, 1) - 1
        if self.deltas < _MANY_FILES:
            return ratio
        return max(ratio, self.delta_bytes / max(self.first_bytes, 1))


@dataclass
class FoldingSchedule:
    """The chains of one step in one shard, and the credit that deltas have earned for folding."""

    chains: dict[int, FileChain] = field(default_factory=dict)
    credit_bytes: float = 0

    # Bookkeeping

    def start_chain(self, group: int, size: int) -> None:
        """A group's chain starts anew with a file that holds its whole state."""
        self.chains[group] = FileChain(first_bytes=size, live_bytes=size)

    def add_delta(self, group: int, size: int, *, growth: int = 0) -> None:
        """A delta of `size` bytes is added to a chain; the state grows by `growth` bytes."""
        chain = self.chains.setdefault(group, FileChain())
        chain.delta_bytes += size
        chain.deltas += 1
        chain.live_bytes += growth
        chain.unmerged_bytes += size
        chain.unmerged += 1

    def drop_chain(self, group: int) -> None:
        self.chains.pop(group, None)

    def live_bytes(self, group: int) -> int:
        return self.chains[group].live_bytes if group in self.chains else 0

    def set_live_bytes(self, group: int, live_bytes: int) -> None:
        self.chains.setdefault(group, FileChain()).live_bytes = live_bytes

    # Folding

    def add_credit(self, written_bytes: int) -> None:
        """Credit for deltas that were written. Without a chain worth folding, none is kept."""
        worst = max((chain.garbage_ratio for chain in self.chains.values()), default=0.0)
        if worst < _FOLD_RATIO:
            self.credit_bytes = 0
        else:
            rate = _CREDIT_PER_BYTE if worst < _LATE_RATIO else _LATE_CREDIT_PER_BYTE
            self.credit_bytes += rate * written_bytes

    def groups_to_fold(self) -> list[int]:
        """The groups whose folding pays and is paid for, the worst first."""
        groups, credit = [], self.credit_bytes
        for group, chain in sorted(self.chains.items(), key=lambda item: -item[1].garbage_ratio):
            if chain.garbage_ratio < _FOLD_RATIO or chain.live_bytes > credit:
                break
            credit -= chain.live_bytes
            groups.append(group)
        return groups

    def record_fold(self, group: int, size: int) -> None:
        """A group was folded into a snapshot of `size` bytes."""
        self.start_chain(group, size)
        self.credit_bytes -= size

    # Merging

    def groups_to_merge(self) -> dict[int, int]:
        """Group -> how many of its newest deltas to merge. Empty unless some group has many deltas
        and all of them together are small.
        """
        has_many = any(chain.unmerged >= _MERGE_FILES for chain in self.chains.values())
        unmerged_bytes = sum(chain.unmerged_bytes for chain in self.chains.values())
        if not has_many or unmerged_bytes > _MAX_MERGED_BYTES:
            return {}
        return {
            group: chain.unmerged
            for group, chain in sorted(self.chains.items())
            if chain.unmerged > 1
        }

    def record_merge(self, group: int, size: int) -> None:
        """A group's unmerged deltas were merged into one of `size` bytes."""
        chain = self.chains[group]
        chain.delta_bytes += size - chain.unmerged_bytes
        chain.deltas -= chain.unmerged - 1
        chain.unmerged_bytes = chain.unmerged = 0

    # In the local store

    def to_json(self) -> dict[str, Any]:
        chains = {str(group): list(astuple(chain)) for group, chain in self.chains.items()}
        return {"credit_bytes": self.credit_bytes, "chains": chains}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any] | None) -> FoldingSchedule:
        if stored is None:
            return cls()
        chains = {int(group): FileChain(*numbers) for group, numbers in stored["chains"].items()}
        return cls(chains, stored["credit_bytes"])
