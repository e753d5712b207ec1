"""How long the chains of files behind a step's key groups have grown, and what to do about it, so that filling a store from them stays quick.

*Folding* writes a group's whole state as a snapshot, which begins a new chain. It is worth it where the files hold far more than what is there still, or where they are
many. It is paid for by the deltas that were written, a few groups at a time, so that cost follows the change and never comes all at once. *Merging* makes one delta of many small ones: where changes are small and the state is large, folding alone would let
chains grow too long.

The local store keeps these sizes beside the state. They follow from the files, and are computed from them again when the store is filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

_SMALL_BYTES = 64 << 10  # of deltas of one group: not worth folding
_FOLD_TIMES = 2.0  # so many times as much that is not there any more as is there is worth folding
_MANY_FILES = 64  # of one group: worth folding if they are so many times as large as what they follow, though all of it be there still
_LATE_TIMES = 6.0  # and so many times are too many
_PAID_A_BYTE = 0.25  # bytes of snapshots for each byte of deltas: keeps what is not there any more at four times the state, where keys are updated
_PAID_A_BYTE_LATE = 2.0  # enough also where all keys are new
_MERGE_FILES = 256
_MOST_MERGED_BYTES = 16 << 20


@dataclass
class Chain:
    """A group's first file (a snapshot, or the first delta, which is one too), the deltas behind it, what is there still of all that, and the deltas that no merge has seen."""

    first_bytes: int = 0
    delta_bytes: int = 0
    deltas: int = 0
    live_bytes: int = 0
    fresh_bytes: int = 0
    fresh: int = 0

    @property
    def excess(self) -> float:
        """How many times as large as what is there what is not there any more is, or, of many files, deltas beside what they follow; 0 if they are small."""
        if self.delta_bytes <= _SMALL_BYTES:
            return 0.0
        gone = (self.first_bytes + self.delta_bytes) / max(self.live_bytes, 1) - 1
        return gone if self.deltas < _MANY_FILES else max(gone, self.delta_bytes / max(self.first_bytes, 1))


@dataclass
class ChainSizes:
    """The chains of one step in one shard. `credit_bytes` is what deltas have paid for folding, kept while groups wait for it."""

    chains: dict[int, Chain] = field(default_factory=dict)
    credit_bytes: float = 0

    def begin(self, group: int, size: int) -> None:
        """A group's chain begins anew with a file that has all of it."""
        self.chains[group] = Chain(first_bytes=size, live_bytes=size)

    def add(self, group: int, size: int, *, more: int = 0) -> None:
        """A delta behind the others, with which there are so many bytes more (or fewer) than before."""
        chain = self.chains.setdefault(group, Chain())
        chain.delta_bytes += size
        chain.deltas += 1
        chain.live_bytes += more
        chain.fresh_bytes += size
        chain.fresh += 1

    def forget(self, group: int) -> None:
        self.chains.pop(group, None)

    def live_bytes(self, group: int) -> int:
        """What is there of a group."""
        return self.chains[group].live_bytes if group in self.chains else 0

    def holds(self, group: int, live_bytes: int) -> None:
        """What is there of a group, once all of its files are known."""
        self.chains.setdefault(group, Chain()).live_bytes = live_bytes

    # Folding

    def earn(self, written_bytes: int) -> None:
        """For deltas that were written."""
        worst = max((chain.excess for chain in self.chains.values()), default=0.0)
        paid = 0.0 if worst < _FOLD_TIMES else _PAID_A_BYTE if worst < _LATE_TIMES else _PAID_A_BYTE_LATE
        self.credit_bytes = self.credit_bytes + paid * written_bytes if paid else 0

    def to_fold(self) -> list[int]:
        """The groups that are worth folding and paid for, the worst first."""
        chosen, left = [], self.credit_bytes
        for group, chain in sorted(self.chains.items(), key=lambda each: -each[1].excess):
            if chain.excess < _FOLD_TIMES or chain.live_bytes > left:
                break
            left -= chain.live_bytes
            chosen.append(group)
        return chosen

    def folded(self, group: int, size: int) -> None:
        self.begin(group, size)
        self.credit_bytes -= size

    # Merging

    def to_merge(self) -> dict[int, int]:
        """For each group with several how many of its newest deltas to merge; none, unless some group has many and all are small."""
        many = any(chain.fresh >= _MERGE_FILES for chain in self.chains.values())
        if not many or sum(chain.fresh_bytes for chain in self.chains.values()) > _MOST_MERGED_BYTES:
            return {}
        return {group: chain.fresh for group, chain in sorted(self.chains.items()) if chain.fresh > 1}

    def merged(self, group: int, size: int) -> None:
        chain = self.chains[group]
        chain.delta_bytes += size - chain.fresh_bytes
        chain.deltas -= chain.fresh - 1
        chain.fresh_bytes = chain.fresh = 0

    # Beside the state

    def to_json(self) -> dict[str, Any]:
        chains = {str(group): list(astuple(chain)) for group, chain in self.chains.items()}
        return {"credit_bytes": self.credit_bytes, "chains": chains}

    @classmethod
    def from_json(cls, known: Mapping[str, Any] | None) -> ChainSizes:
        if known is None:
            return cls()
        return cls({int(group): Chain(*numbers) for group, numbers in known["chains"].items()}, known["credit_bytes"])
