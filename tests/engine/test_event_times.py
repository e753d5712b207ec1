"""The reports of event times: the newest row of each tick and producer, from any pieces in any
order, and how far a row may move the watermark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given
from hypothesis import strategies as st

from headrace.columnar.columns import ORDER_FIELDS, TIMESTAMP_COLUMN, TIMESTAMP_TYPE
from headrace.engine.event_times import PARTS, EventTimes, furthest_ahead, newest_rows, read_parts
from headrace.engine.reports import JobMemory
from headrace.operators.watermark_spec import WatermarkSpec

S = 1_000_000
row_of_report = st.tuples(
    st.integers(1, 4),
    st.sampled_from("abc"),
    st.integers(0, 5),
    st.integers(0, 9),
    st.integers(0, 5),
    st.integers(0, 1),
    st.integers(0, 20),
    st.just(False),
)


def table_of(rows: list[tuple[Any, ...]]) -> pa.Table:
    if not rows:
        return PARTS.empty_table()
    columns = [
        pa.array(list(column), field.type)
        for column, field in zip(zip(*rows, strict=True), PARTS, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=PARTS)


@given(st.lists(row_of_report, max_size=12, unique_by=lambda row: (row[5], row[6])), st.data())
def test_the_newest_rows_are_the_same_from_any_pieces_in_any_order(
    rows: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    best: dict[tuple[int, str], tuple[Any, ...]] = {}
    for row in rows:
        tick, producer, newest, event, _, partition, offset, _ = row
        rank = (-newest, -event, partition, offset)
        known = best.get((tick, producer))
        if known is None or rank < known[0]:
            best[tick, producer] = (rank, row)
    shuffled = data.draw(st.permutations(rows))
    cut = data.draw(st.integers(0, len(rows)))
    pieces = [newest_rows(table_of(piece)) for piece in (shuffled[:cut], shuffled[cut:])]
    found = newest_rows(pa.concat_tables(pieces))
    assert found["tick"].to_pylist() == sorted(found["tick"].to_pylist())
    assert sorted(map(repr, found.to_pylist())) == sorted(
        repr(dict(zip(PARTS.names, row, strict=True))) for _, row in best.values()
    )


def test_reports_of_several_tasks_were_taken_in_the_order_of_tasks_not_of_ticks() -> None:
    later = (2, "a", 9, 9, 9, 0, 1, False)
    earlier = (1, "a", 5, 5, 5, 1, 0, False)
    assert newest_rows(table_of([later, earlier]))["tick"].to_pylist() == [1, 2]


@dataclass(frozen=True)
class TwoTicks:
    ticks: tuple[int, ...] = (1, 2)
    times_us: tuple[int, ...] = (1_000 * S, 2_000 * S)


def read_rows(event_s: list[int], appended_s: list[int], ticks: list[int]) -> pa.RecordBatch:
    order = {
        "_tick": ticks,
        "_rank": [0] * len(ticks),
        "_partition": [3] * len(ticks),
        "_offset": list(range(10, 10 + len(ticks))),
    }
    columns = [
        pa.array(np.array(event_s) * S).cast(TIMESTAMP_TYPE),
        *(pa.array(order[field.name], field.type) for field in ORDER_FIELDS),
        pa.array(np.array(appended_s) * S).cast(TIMESTAMP_TYPE),
    ]
    fields = [pa.field("at", TIMESTAMP_TYPE), *ORDER_FIELDS]
    schema = pa.schema([*fields, pa.field(TIMESTAMP_COLUMN, TIMESTAMP_TYPE)])
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def test_a_row_moves_the_watermark_no_further_than_its_append_time_and_max_ahead() -> None:
    job = JobMemory()
    spec = WatermarkSpec("orders", "at", max_ahead_us=10 * S)
    times = EventTimes(spec, TwoTicks(), 0, job)
    rows = read_rows([900, 99_000, 905, 5_000], [901, 902, 903, 9_999], [1, 1, 1, 2])
    usable = times.usable(rows)
    times.finish()
    assert usable.schema.names == ["at", *(field.name for field in ORDER_FIELDS)]
    assert usable.num_rows == 4, "a row ahead is data"
    parts = read_parts(job, "orders")
    newest = newest_rows(parts.filter(pc.invert(parts["is_ahead"])))
    assert newest.select(["tick", "newest_us", "event_us", "offset"]).to_pylist() == [
        {"tick": 1, "newest_us": 912 * S, "event_us": 99_000 * S, "offset": 11},
        # Its append time is that of a producer's clock, and in the future: the tick is the bound.
        {"tick": 2, "newest_us": 2_010 * S, "event_us": 5_000 * S, "offset": 13},
    ]
    (furthest,) = furthest_ahead(parts.filter(parts["is_ahead"])).to_pylist()
    assert (furthest["offset"], furthest["partition"], furthest["producer"]) == (11, 3, "3")
    assert times.rows_ahead == 2


def test_milliseconds_between_clocks_are_not_counted() -> None:
    times = EventTimes(WatermarkSpec("orders", "at"), TwoTicks(), 0, JobMemory())
    times.usable(read_rows([901, 902], [900, 900], [1, 1]))
    assert times.rows_ahead == 1
