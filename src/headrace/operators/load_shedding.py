"""What may be left out of an input when too much of it waits, as plain values: `pipeline/shedding`
makes them, `engine/shedding` goes by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import OFFSET_COLUMN, PARTITION_COLUMN, TICK


@dataclass(frozen=True)
class Shed:
    """What is left out of an input once more than `behind` rows of it wait: all but a share `keep`,
    never those whose `priority` is at least `least`.
    """

    behind: int
    keep: float = 0.0
    priority: str | None = None
    least: Any = None

    def __str__(self) -> str:
        above = "" if self.priority is None else f", and all with {self.priority} >= {self.least!r}"
        return f"shed(behind={self.behind:,}, keep={self.keep:g}{above})"


# Rows left out on purpose, when a pipeline is too far behind: by priority, or a share of them by
# chance. Which ticks are shed is recorded with them; which rows of those follows from where they
# stand in their topic. So a replay leaves out the same rows, and everyone who reads them does.


_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Shedding:
    """In some ticks of a batch."""

    shed: Shed
    ticks: frozenset[int]

    def kept(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that stay."""
        ticks = rows.column(TICK).to_numpy()
        in_them = np.isin(ticks, np.fromiter(self.ticks, np.int64, len(self.ticks)))
        if not in_them.any():
            return rows
        stays = ~in_them | (
            chance(rows.column(PARTITION_COLUMN).to_numpy(), rows.column(OFFSET_COLUMN).to_numpy())
            < self.shed.keep
        )
        if self.shed.priority is not None:
            column = rows.column(self.shed.priority)
            matters = pc.greater_equal(column, pa.scalar(self.shed.least).cast(column.type))
            stays |= matters.fill_null(False).to_numpy(zero_copy_only=False)
        return rows.filter(pa.array(stays))


def chance(
    partitions: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """A number from 0 to 1 for each row, by its place alone."""
    mixed = (offsets.astype(np.uint64) + (partitions.astype(np.uint64) << np.uint64(48))) * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
    found: npt.NDArray[np.float64] = (mixed ^ (mixed >> np.uint64(31))) / 2.0**64
    return found
