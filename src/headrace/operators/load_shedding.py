"""Load shedding: dropping rows of an input on purpose when a pipeline is far behind.

`hr.shed(...)` builds a `ShedPolicy`. The runner decides which ticks are shed and records it with
the tick; a `LoadShedder` then drops rows of those ticks, by priority or by a share of them. Which
rows it drops follows from their partition and offset alone, so that a replay and every other reader
drop the same rows.

    policy: behind=10_000, keep=0.1, priority="tier", min_priority=2; tick 7 is shed
    rows in:  tick 6: all rows      rows out: tick 6: all rows
              tick 7: tier 2, 1, 1            tick 7: tier 2, and about one in ten of the others
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
class ShedPolicy:
    """What to drop from an input while more than `behind` of its rows wait: all but the share
    `keep`, and never a row whose `priority` is at least `min_priority`.
    """

    behind: int
    keep: float = 0.0
    priority: str | None = None
    min_priority: Any = None

    def __str__(self) -> str:
        above = (
            ""
            if self.priority is None
            else f", and all with {self.priority} >= {self.min_priority!r}"
        )
        return f"shed(behind={self.behind:,}, keep={self.keep:g}{above})"


_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class LoadShedder:
    """Drops rows of the ticks of a batch that are shed."""

    shed: ShedPolicy
    ticks: frozenset[int]

    def filter_rows(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of the batch that are not dropped."""
        ticks = rows.column(TICK).to_numpy()
        is_shed = np.isin(ticks, np.fromiter(self.ticks, np.int64, len(self.ticks)))
        if not is_shed.any():
            return rows
        stays = ~is_shed | (
            chance(rows.column(PARTITION_COLUMN).to_numpy(), rows.column(OFFSET_COLUMN).to_numpy())
            < self.shed.keep
        )
        if self.shed.priority is not None:
            column = rows.column(self.shed.priority)
            matters = pc.greater_equal(column, pa.scalar(self.shed.min_priority).cast(column.type))
            stays |= matters.fill_null(False).to_numpy(zero_copy_only=False)
        return rows.filter(pa.array(stays))


def chance(
    partitions: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """A pseudo-random number in [0, 1) for each row, computed from its partition and offset."""
    mixed = (offsets.astype(np.uint64) + (partitions.astype(np.uint64) << np.uint64(48))) * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
    fractions: npt.NDArray[np.float64] = (mixed ^ (mixed >> np.uint64(31))) / 2.0**64
    return fractions
