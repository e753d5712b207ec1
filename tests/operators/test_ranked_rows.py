"""The first rows of each group of a stream with their ranks, against sorting, and in a pipeline
against DuckDB.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.columnar.keys import encode_keys, key_groups
from headrace.errors import InputError, PlanError, UnknownColumn
from headrace.operators.changelog import check_ticks, fold
from headrace.operators.ranked_rows import RankedRowsKernel
from headrace.testing.kernels import MemoryState
from headrace.testing.pipelines import PipelineTest
from tests.operators.joins.join_driver import restored
from tests.short_forms import examples

SCHEMA = pa.schema([("k", pa.int64()), ("a", pa.int64()), ("b", pa.string()), ("id", pa.int64())])
STREAM = pa.schema([*SCHEMA, ("_tick", pa.int64())])
Row = dict[str, Any]
Group = int | None


def ranking(rows: list[Row], kernel: RankedRowsKernel) -> dict[tuple[Any, int], Row]:
    """Sort each group, take the first. Python's sort keeps the order of arrival."""
    found: dict[tuple[Any, int], Row] = {}
    per = kernel.per
    for group in {tuple(row[name] for name in per) for row in rows}:
        mine = [row for row in rows if tuple(row[name] for name in per) == group]
        for name, is_descending in reversed(kernel.by):
            known = [row for row in mine if row[name] is not None]
            unknown = [row for row in mine if row[name] is None]
            values = sorted({row[name] for row in known}, reverse=is_descending)
            mine = [row for value in values for row in known if row[name] == value] + unknown
        found |= {(group, rank): row for rank, row in enumerate(mine[: kernel.n], 1)}
    return found


@st.composite
def histories(draw: st.DrawFn) -> list[list[Row]]:
    counts = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    ids = iter(range(100))
    row = st.builds(
        lambda k, a, b: {"k": k, "a": a, "b": b, "id": next(ids)},
        st.none() | st.integers(0, 1),
        st.none() | st.integers(-2, 2),
        st.none() | st.sampled_from(["", "x", "y"]),
    )
    return [draw(st.lists(row, min_size=count, max_size=count)) for count in counts]


ORDERS = st.sampled_from(
    [[("a", True)], [("a", False)], [("b", True), ("a", False)], [("a", True), ("b", True)], []]
)


def table(history: list[list[Row]], first: int, stop: int) -> pa.Table:
    rows = [{**row, "_tick": tick} for tick in range(first, stop) for row in history[tick]]
    return pa.Table.from_pylist(rows, STREAM)


@given(data=st.data(), n=st.integers(1, 4), order=ORDERS, per=st.sampled_from([(), ("k",)]))
@settings(max_examples=examples(200))
def test_every_tick_has_the_first_rows_of_all_rows_so_far(
    data: st.DataObject, n: int, order: list[tuple[str, bool]], per: tuple[str, ...]
) -> None:
    history = data.draw(histories())
    kernel = RankedRowsKernel("t", SCHEMA, n=n, by=order, per=per)

    def run(bounds: list[int], shard: int | None = None) -> tuple[list[Row], MemoryState]:
        state, emitted = MemoryState(), []
        for first, stop in pairwise([0, *sorted(set(bounds)), len(history)]):
            rows = table(history, first, stop)
            if shard is not None:
                rows = rows.filter(pa.array(key_groups(encode_keys(rows, per)) % 2 == shard))
            result = restored(kernel).step(state := state.copy(), rows)
            result.validate(full=True)
            emitted += result.to_pylist()
        return emitted, state

    at_once, state = run([])
    view: dict[tuple[Any, ...], Row] = {}
    changes = pa.Table.from_pylist(at_once, kernel.output.append(pa.field("_tick", pa.int64())))
    check_ticks(changes, [*per, "rank"])
    for tick in range(len(history)):
        of_tick = changes.filter(pa.compute.less_equal(changes["_tick"], tick))
        view = fold(of_tick, [*per, "rank"])
        expected = ranking([row for rows in history[: tick + 1] for row in rows], kernel)
        found = {
            (tuple(row[name] for name in per), row["rank"]): {
                name: row[name] for name in SCHEMA.names
            }
            for row in view.values()
        }
        assert found == expected
    bounds = data.draw(st.lists(st.integers(1, len(history)), max_size=4))
    in_parts, other = run([bound for bound in bounds if bound < len(history)])
    assert (in_parts, other.values) == (at_once, state.values)
    sharded = [run([], shard) for shard in range(2)]
    assert sorted(map(repr, [row for emitted, _ in sharded for row in emitted])) == sorted(
        map(repr, at_once)
    )
    assert {name: value for _, part in sharded for name, value in part.values.items()} == (
        state.values
    )


def test_the_state_has_the_first_rows_only() -> None:
    kernel, state = RankedRowsKernel("t", SCHEMA, n=3, by=[("a", True)]), MemoryState()
    rows = [[{"k": 1, "a": number, "b": "x" * 50, "id": number}] for number in range(500)]
    sizes = set()
    for tick in range(500):
        kernel.step(state, table(rows, tick, tick + 1))
        sizes.add(sum(map(len, state.values.values())))
    assert max(sizes) < 3 * 110
    (shown,) = kernel.describe(pa.array([]), pa.array(state.values.values())).to_pylist()
    assert [row["id"] for row in shown["rows"]] == [499, 498, 497]


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UnknownColumn, match="'w'"):
        RankedRowsKernel("t", SCHEMA, n=1, by=[("w", True)])
    for n, rank in ((0, "rank"), (1_001, "rank"), (2, None)):
        with pytest.raises(InputError, match="1 to 1,000"):
            RankedRowsKernel("t", SCHEMA, n=n, by=[("a", True)], rank=rank)
    bids = hr.Pipeline("p").topic("bids", schema="auction BIGINT, price BIGINT, rank INT")
    with pytest.raises(PlanError, match="rank"):
        bids.top(3, by="price")
    with pytest.raises(PlanError, match=r"asks for the first 0 rows"):
        bids.top(0, by="price", rank="position")
    with pytest.raises(PlanError, match="names no order"):
        bids.top(3, by=[], rank="position")


# In a pipeline

START = datetime(2026, 1, 1, tzinfo=UTC)
BIDS = "auction BIGINT, bidder BIGINT, price BIGINT, happened TIMESTAMP"


def auctions() -> hr.Pipeline:
    pipeline = hr.Pipeline("auctions")
    time = hr.EventTime("happened", delay="1 day")
    bids = pipeline.topic("bids", schema=BIDS, event_time=time)
    pipeline.view("dearest", bids.top(3, by="price", per="auction"))
    pipeline.view("overall", bids.top(5, by=["price ASC", "happened"], rank="position"))
    pipeline.view("opened", bids.first(per=["auction", "bidder"]))
    pipeline.view("cheapest", bids.first(per="auction", by="price"))
    pipeline.view("began", bids.first(per="auction", by="_arrival"))
    pipeline.view("newest", bids.last(per=["auction", "bidder"]))
    leaders = bids.top(3, by="price", per="auction").group_by("bidder")
    pipeline.view("leaders", leaders.aggregate(n=hr.agg.count(), best=hr.agg.max("price")))
    return pipeline


RANKED = """SELECT * EXCLUDE (arrived) FROM (SELECT *, row_number() OVER
    (PARTITION BY {per} ORDER BY {by}) AS {rank} FROM bids) WHERE {rank} <= {n}"""


def ranked(per: str, by: str, n: int = 1, rank: str = "rank") -> str:
    return RANKED.format(per=per, by=by, n=n, rank=rank)


DEAREST = ranked("auction", "price DESC NULLS LAST, arrived", 3)
QUERIES = {
    "dearest": DEAREST,
    "overall": ranked("1", "price NULLS LAST, happened DESC, arrived", 5, "position"),
    "opened": ranked("auction, bidder", "happened, arrived"),
    "cheapest": ranked("auction", "price NULLS LAST, arrived"),
    "began": ranked("auction", "arrived"),
    "newest": ranked("auction, bidder", "happened DESC, arrived DESC"),
    "leaders": f"SELECT bidder, count(*) AS n, max(price) AS best FROM ({DEAREST}) GROUP BY bidder",
}


def test_rankings_of_streams_are_those_of_row_number(tmp_path: Path) -> None:
    random, fed = Random(3), list[Row]()
    with PipelineTest(auctions(), tmp_path) as test, duckdb.connect() as database:
        for number in range(6):
            rows = [
                {
                    "auction": random.randrange(4),
                    "bidder": random.randrange(3),
                    "price": random.choice([None, *range(8)]),
                    "happened": START + timedelta(seconds=random.randrange(30)),
                }
                for _ in range(random.randrange(1, 20))
            ]
            test.feed("bids", rows)
            fed += [{**row, "arrived": len(fed) + index} for index, row in enumerate(rows)]
            test.settle()
            if number == 3:
                test.restart(shards=3)
            database.register("rows", pa.Table.from_pylist(fed))
            database.execute("CREATE OR REPLACE TABLE bids AS FROM rows")
            for view, query in QUERIES.items():
                theirs = database.sql(query).to_arrow_table().to_pylist()
                ours = test.view(view)
                names = list(ours[0])
                assert sorted(plain(row, names) for row in ours) == sorted(
                    plain(row, names) for row in theirs
                ), view


def plain(row: Row, names: list[str]) -> str:
    return repr([str(row[name]) for name in names])
