"""Which partition each row of an append goes to: named by the caller, by key, by a function of the user's, or in turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.errors import BadPartition
from headrace.log.api import Partitioner, TopicInfo
from headrace.log.keys import partitions_by_key

Numbers = npt.NDArray[np.int32]


class Chooser:
    """Chooses partitions for one producer; rows without a key go round in turn, across appends too."""

    def __init__(self, partitioner: Partitioner | None = None) -> None:
        self._partitioner = partitioner
        self._turn = 0

    def partitions(self, info: TopicInfo, batch: pa.RecordBatch, partition: int | None) -> Numbers:
        rows = batch.num_rows
        if partition is not None:
            check_partition(info, partition)
            return np.full(rows, partition, np.int32)
        if self._partitioner is not None:
            return _checked(self._partitioner(batch, info.partitions), info, rows)
        if info.key:
            return partitions_by_key(batch, info.key, info.partitions)
        turn, self._turn = self._turn, (self._turn + rows) % info.partitions
        return ((turn + np.arange(rows)) % info.partitions).astype(np.int32)


def check_partition(info: TopicInfo, partition: int) -> None:
    if not 0 <= partition < info.partitions:
        raise BadPartition(f"The topic {info.name!r} has no partition {partition}.", fix=f"name one from 0 to {info.partitions - 1}.")


def _checked(chosen: Any, info: TopicInfo, rows: int) -> Numbers:
    numbers = np.asarray(chosen)
    if numbers.shape != (rows,) or numbers.dtype.kind not in "iu":
        raise BadPartition(
            f"The partitioner of {info.name!r} returned {type(chosen).__name__} of shape {numbers.shape}.", fix=f"return {rows} whole numbers."
        )
    if rows and not 0 <= numbers.min() <= numbers.max() < info.partitions:
        raise BadPartition(f"The partitioner of {info.name!r} chose a partition outside 0 to {info.partitions - 1}.", fix="keep within the topic's.")
    return numbers.astype(np.int32)
