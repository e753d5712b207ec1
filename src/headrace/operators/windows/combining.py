"""Rows combined before the shuffle: one row stands for those of one group, pane and tick. A pane is what lies between two bounds of windows, so its rows are in
the same windows, and are late together.

A combined row has the group's columns, a time in its pane, the columns that tell a row's place, `_partial` (a state, as it is stored), and `_producers`: how many
rows of each producer it stands for, so that late rows are counted exactly all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from headrace.operators.aggregation import Aggregation
from headrace.operators.buffers import Ints, Mask
from headrace.operators.codes import Codes, codes_of, joint, stable_sort
from headrace.operators.combining import ORDER, PARTIAL, by_tick
from headrace.operators.kernel import TICK
from headrace.operators.keys import encode_keys, whole
from headrace.operators.segments import Segments

PRODUCERS = "_producers"
_NO_KEYS = pa.nulls(0, pa.binary())


def combine(aggregation: Aggregation, rows: pa.Table, times: Sequence[str], panes: Ints, producers: pa.Array) -> pa.Table:
    """Rows with a pane and a producer each, as fewer rows, each with the columns `times` of one of its rows. It does not matter which rows come together."""
    ticks = whole(rows.column(TICK)).to_numpy()
    coarse = joint(joint(codes_of(encode_keys(rows, aggregation.by)), panes), ticks)
    order, _ = stable_sort(joint(coarse, _numbers(producers)))
    starts = np.flatnonzero(_begins(coarse[order]))
    segments = Segments(rows, order, starts, ticks[order[starts]], np.arange(len(starts)), _NO_KEYS)
    columns = dict.fromkeys([*aggregation.by, *times, *(name for name in rows.schema.names if name in ORDER)])
    first = rows.select(list(columns)).take(pa.array(order[starts]))
    first = first.append_column(PRODUCERS, _counted(producers.take(pa.array(order)), starts))
    return by_tick(first.append_column(pa.field(PARTIAL, pa.binary()), aggregation.partials(segments)))


def _numbers(producers: pa.Array) -> Ints:
    """A number for each producer, whichever."""
    if pa.types.is_null(producers.type):
        return np.zeros(len(producers), np.int64)
    numbers: Ints = producers.dictionary_encode(null_encoding="encode").indices.to_numpy().astype(np.int64)
    return numbers


def _counted(producers: pa.Array, starts: Ints) -> pa.Array:
    """For each segment its producers, each with its number of rows. Those of a segment lie together."""
    new = _begins(_numbers(producers).astype(np.uint64))
    new[starts] = True
    runs = np.flatnonzero(new)
    rows = pa.array(np.diff(runs, append=len(producers)))
    counted = pa.StructArray.from_arrays([producers.take(pa.array(runs)), rows], ["producer", "rows"])
    return pa.ListArray.from_arrays(pa.array(np.append(np.searchsorted(runs, starts), len(runs)).astype(np.int32)), counted)


def _begins(codes: Codes) -> Mask:
    begins = np.ones(len(codes), np.bool_)
    begins[1:] = codes[1:] != codes[:-1]
    return begins
