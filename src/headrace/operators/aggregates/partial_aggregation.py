"""Partial aggregation: rows are combined before the shuffle, so that fewer of them cross it.

A combined row stands for all rows of one group and tick (for windows: of one group, pane and tick).
It has the columns of the group, those of `ORDER` from the first of its rows, and `_partial`, the
aggregate state of its rows as the kernel would store it:

    rows before the shuffle               combined row
    tick 7: region=eu amount=10           tick 7: region=eu _partial=(rows 2, sum 12)
    tick 7: region=eu amount=2

The receiving kernel merges the states instead of adding the rows. Combining is exact and optional:
the output is the same for any choice of rows to combine, so a task combines when
`is_worth_combining` estimates that it pays. `AggregateKernel.combine` and the `combine` methods of
the window kernels build on this module; `AggregateSet` merges the states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints
from headrace.columnar.columns import TICK
from headrace.columnar.keys import as_array, encode_keys
from headrace.columnar.lookup import group_start_mask
from headrace.columnar.segments import Segments
from headrace.columnar.sort import key_codes, pair_codes, stable_sort

ORDER = (TICK, "_rank", "_partition", "_offset")
"""The columns that give a row its position in the pipeline's order."""

PARTIAL = "_partial"
"""The column of combined rows with the state; null in rows that are not combined."""

PRODUCERS = "_producers"
"""The column of combined rows with the number of rows from each producer, to count late rows."""

_SAMPLE_ROWS = 8192
_MAX_GROUPS_PER_ROW = 0.5  # above this, combining costs more than it saves
_NO_KEYS = pa.nulls(0, pa.binary())


def is_worth_combining(rows: pa.Table, by: Sequence[str]) -> bool:
    """Estimate from a sample whether the rows have far fewer groups per tick than rows.

    The answer affects speed only.
    """
    if not rows.num_rows:
        return False
    sample = rows.slice(0, _SAMPLE_ROWS)
    distinct = len(pc.unique(encode_keys(sample, by)))
    max_groups = _MAX_GROUPS_PER_ROW * rows.num_rows
    if sample.num_rows == rows.num_rows:
        return bool(distinct <= max_groups)
    keys = _estimate_key_count(sample.num_rows, distinct)
    ticks = len(np.unique(as_array(rows.column(TICK)).to_numpy()))
    return bool(ticks * _expected_distinct(keys, rows.num_rows / ticks) <= max_groups)


def _expected_distinct(keys: float, rows: float) -> float:
    """Expected number of distinct keys among rows that are drawn uniformly from `keys` keys."""
    return -keys * math.expm1(-rows / keys)


def _estimate_key_count(rows: int, distinct: int) -> float:
    """Invert `_expected_distinct` by bisection: how many keys give so many distinct ones."""
    low, high = float(distinct), 1e12
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _expected_distinct(middle, rows) < distinct else (low, middle)
    return low


def by_tick(rows: pa.Table) -> pa.Table:
    """The rows, stably sorted by tick."""
    ticks = as_array(rows.column(TICK)).to_numpy()
    if (ticks[1:] >= ticks[:-1]).all():
        return rows
    return rows.take(pa.array(np.argsort(ticks, kind="stable")))


def combine_rest(
    rows: pa.Table, combine: Callable[[pa.Table], pa.Table], also: Sequence[str] = ()
) -> pa.Table:
    """Combine the rows that are not combined yet, if some are; otherwise return plain rows.

    Kernels work on rows of one form. `also` names the columns besides `_partial` that only combined
    rows have.
    """
    partial = rows.column(PARTIAL)
    if partial.null_count == 0:
        return rows
    plain = rows.drop_columns([name for name in (PARTIAL, *also) if name in rows.schema.names])
    if partial.null_count == len(partial):
        return plain
    combined = combine(plain.filter(partial.is_null()))
    already = rows.filter(partial.is_valid()).select(combined.schema.names)
    return by_tick(pa.concat_tables([already, combined]))


def combine_panes(
    rows: pa.Table,
    by: Sequence[str],
    times: Sequence[str],
    panes: Ints,
    producers: pa.Array,
    partials: Callable[[Segments], pa.Array],
) -> pa.Table:
    """Combine the rows of each group, pane and tick into one row, for window kernels.

    A pane is a span of time that no window bound divides: its rows are in the same windows, and are
    late together. A combined row takes the columns `times` from one of its rows. `_producers` says
    how many rows of each producer it stands for, so that late rows are still counted exactly.

    Args:
        rows: The rows to combine.
        by: The columns of the group.
        times: The columns with event times that the kernel needs.
        panes: The number of each row's pane.
        producers: The producer of each row.
        partials: Computes the stored state of each segment's rows.

    """
    ticks = as_array(rows.column(TICK)).to_numpy()
    segment_codes = pair_codes(pair_codes(key_codes(encode_keys(rows, by)), panes), ticks)
    order, _ = stable_sort(pair_codes(segment_codes, _producer_codes(producers)))
    starts = np.flatnonzero(group_start_mask(segment_codes[order]))
    segments = Segments(
        rows=rows,
        order=order,
        starts=starts,
        ticks=ticks[order[starts]],
        firsts=np.arange(len(starts)),
        keys=_NO_KEYS,
    )
    columns = dict.fromkeys([*by, *times, *(name for name in rows.schema.names if name in ORDER)])
    combined = rows.select(list(columns)).take(pa.array(order[starts]))
    counts = _producer_counts(producers.take(pa.array(order)), starts)
    combined = combined.append_column(PRODUCERS, counts)
    return by_tick(combined.append_column(pa.field(PARTIAL, pa.binary()), partials(segments)))


def _producer_codes(producers: pa.Array) -> Ints:
    """An integer for each producer, in no particular order."""
    if pa.types.is_null(producers.type):
        return np.zeros(len(producers), np.int64)
    encoded = producers.dictionary_encode(null_encoding="encode")
    codes: Ints = encoded.indices.to_numpy().astype(np.int64)
    return codes


def _producer_counts(producers: pa.Array, starts: Ints) -> pa.Array:
    """For each segment a list of its producers with their numbers of rows.

    Segments begin at `starts`; the rows of one producer are adjacent within a segment.
    """
    is_run_start = group_start_mask(_producer_codes(producers))
    is_run_start[starts] = True
    run_starts = np.flatnonzero(is_run_start)
    lengths = pa.array(np.diff(run_starts, append=len(producers)))
    runs = pa.StructArray.from_arrays(
        [producers.take(pa.array(run_starts)), lengths], ["producer", "rows"]
    )
    offsets = np.append(np.searchsorted(run_starts, starts), len(run_starts)).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), runs)
