"""A kernel's state as a dictionary: for tests of kernels, ours and users'. Remembers which keys changed, as a real host must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class MemoryState:
    """State in memory. `changed` has every key put since the last `take_changes`, with the value it now has (None: deleted)."""

    def __init__(self, values: Mapping[bytes, bytes] | None = None) -> None:
        self.values: dict[bytes, bytes] = dict(values or {})
        self.changed: dict[bytes, bytes | None] = {}

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return list(map(self.values.get, keys))

    def put(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        changes = dict(zip(keys, values, strict=True))
        self.changed.update(changes)
        self.values.update(changes)  # type: ignore[arg-type]  # deletions are taken out below
        if None in values:
            for key in [key for key, value in changes.items() if value is None]:
                self.values.pop(key)

    def take_changes(self) -> dict[bytes, bytes | None]:
        """What changed since the last time, for a host that writes it down."""
        changes, self.changed = self.changed, {}
        return changes

    def copy(self) -> MemoryState:
        return MemoryState(self.values)
