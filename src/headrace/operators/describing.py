"""Stored state for people: what a kernel can tell of the bytes it keeps under a key. `headrace state show` asks; nothing else needs it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from headrace.operators.kernel import CHANGE_TYPE, TICK
from headrace.operators.segments import Segments


@runtime_checkable
class Describing(Protocol):
    """A kernel that can show its state."""

    @property
    def key_fields(self) -> list[pa.Field]:
        """The columns of a key, in order."""
        ...

    def describe(self, keys: pa.Array, values: pa.Array) -> pa.Table:
        """A row for each entry: the key's columns, and what the state amounts to."""
        ...


def no_rows(schema: pa.Schema, keys: int, *, over_table: bool) -> Segments:
    """Segments of keys of which no row came: their only versions are what is stored."""
    nothing = np.zeros(0, np.int64)
    system = [pa.field(TICK, pa.int64()), *([pa.field(CHANGE_TYPE, pa.string())] if over_table else [])]
    rows = pa.schema([*schema, *system]).empty_table()
    return Segments(rows, nothing, nothing, nothing, np.zeros(keys, np.int64), pa.array([], pa.binary()))
