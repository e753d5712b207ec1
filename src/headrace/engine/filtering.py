"""A condition on rows, and on a table's changes: there a row that no longer fits it goes, one that fits it now comes.

Spark says for each row whether it fits; here the two images of an update, which lie side by side, are looked at together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
import pyarrow as pa

from headrace.log.api import CHANGE_TYPE, DELETE, INSERT, UPDATE_BEFORE

KEEP = "_keep"


def keep_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows without `_keep`: of a stream those that fit, of a table its changes as `keep_changes` has them."""
    given = iter(batches)
    first = next(given, None)
    if first is not None:
        every = chain([first], given)
        yield from keep_changes(every) if CHANGE_TYPE in first.schema.names else map(_fitting, every)


def _fitting(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.filter(batch.column(KEEP)).drop_columns([KEEP])


def keep_changes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Changes without `_keep`, as they are for a table of the rows that fit."""
    waiting: pa.RecordBatch | None = None
    for each in batches:
        batch = each if waiting is None else pa.concat_batches([waiting, each])
        whole = _whole_pairs(batch)
        waiting = batch.slice(whole) if whole < batch.num_rows else None
        if whole:
            yield _kept(batch.slice(0, whole))
    if waiting is not None:
        yield _kept(waiting)


def _whole_pairs(batch: pa.RecordBatch) -> int:
    """How many rows to look at now: a last row that is the first image of an update waits for the second."""
    count: int = batch.num_rows
    return count - 1 if count and batch.column(CHANGE_TYPE)[count - 1].as_py() == UPDATE_BEFORE else count


def _kept(batch: pa.RecordBatch) -> pa.RecordBatch:
    kinds = np.array(batch.column(CHANGE_TYPE).to_pylist(), dtype=object)
    fits = batch.column(KEEP).fill_null(False).to_numpy(zero_copy_only=False)
    before = np.flatnonzero(kinds == UPDATE_BEFORE)
    kinds[before[fits[before] & ~fits[before + 1]]] = DELETE
    kinds[before[~fits[before] & fits[before + 1]] + 1] = INSERT
    changed = batch.set_column(batch.schema.get_field_index(CHANGE_TYPE), batch.schema.field(CHANGE_TYPE), pa.array(kinds.tolist(), pa.string()))
    names = [name for name in batch.schema.names if name != KEEP]
    return changed.select(names).filter(pa.array(fits))
