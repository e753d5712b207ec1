"""How large the files behind a step's key groups have grown, and which groups are due to be folded into a snapshot, so that a rebuild stays short.

The local store keeps this beside the state; it follows from the files, and is computed from them again when the store is filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_FOLD_BYTES = 64 << 10
_FOLD_TIMES = 2  # deltas may be so many times as large as what they are deltas of
_MOST_FILES = 500
_FOLDED_A_BYTE = 2  # folding may write so many bytes for each byte of deltas: more than enough, since a fold is due only when deltas have outgrown it


@dataclass
class Chain:
    """A group's first file (a snapshot, or the first delta, which is one too), and the deltas behind it."""

    first_bytes: int = 0
    delta_bytes: int = 0
    deltas: int = 0

    @property
    def due(self) -> bool:
        return self.delta_bytes > max(_FOLD_TIMES * self.first_bytes, _FOLD_BYTES) or self.deltas > _MOST_FILES

    @property
    def most_bytes(self) -> int:
        """A snapshot has at most as many."""
        return self.first_bytes + self.delta_bytes


@dataclass
class ChainSizes:
    """The chains of one step in one shard. Folding is paid for by deltas: what they have brought in is the credit, kept while groups wait for it."""

    chains: dict[int, Chain] = field(default_factory=dict)
    credit_bytes: int = 0

    def add(self, group: int, size: int, *, begins: bool) -> None:
        """A file behind the others of a group, or one that begins its chain."""
        if begins:
            self.chains[group] = Chain(first_bytes=size)
            return
        chain = self.chains.setdefault(group, Chain())
        chain.delta_bytes += size
        chain.deltas += 1

    def forget(self, group: int) -> None:
        self.chains.pop(group, None)

    def to_fold(self, written_bytes: int) -> list[int]:
        """The groups to fold now that so many bytes of deltas were written: the most overdue first, as many as are paid for. Cost follows the change."""
        due = sorted((group for group, chain in self.chains.items() if chain.due), key=lambda group: -self.chains[group].delta_bytes)
        self.credit_bytes = self.credit_bytes + _FOLDED_A_BYTE * written_bytes if due else 0
        chosen = []
        for group in due:
            price = self.chains[group].most_bytes
            if price > self.credit_bytes:
                break
            self.credit_bytes -= price
            chosen.append(group)
        return chosen

    def to_json(self) -> dict[str, Any]:
        chains = {str(group): [chain.first_bytes, chain.delta_bytes, chain.deltas] for group, chain in self.chains.items()}
        return {"credit_bytes": self.credit_bytes, "chains": chains}

    @classmethod
    def from_json(cls, known: Mapping[str, Any] | None) -> ChainSizes:
        if known is None:
            return cls()
        return cls({int(group): Chain(*numbers) for group, numbers in known["chains"].items()}, known["credit_bytes"])
