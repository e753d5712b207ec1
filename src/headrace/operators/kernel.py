"""What a kernel is, and what it sees of its state. Kernels compute; the engine hosts them on Spark, tests and users' tests host them in memory.

A kernel is pure: its answer follows from its state and its rows, never from a clock, from chance, or from how ticks were put into calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa

TICK = "_tick"
PARTITION = "_partition"
CHANGE_TYPE = "_change_type"


class KeyedState(Protocol):
    """A kernel's memory: bytes by key. The host makes it durable, and knows what changed."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of many keys at once; None for a key that has none."""
        ...

    def put(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        """Store the values of many keys at once; None deletes. A later `get` sees it."""
        ...


class Kernel(Protocol):
    """An operator over the rows of one shard."""

    @property
    def output(self) -> pa.Schema:
        """The user's columns of the result, and `_change_type` if the result is a table."""
        ...

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        """Take in the rows of some ticks, whole ones, in the pipeline's order; give the result's rows, each with its `_tick`.

        The result is sorted by tick, key and change. Ticks may come one at a time or many in a call: the rows are the same.
        """
        ...
