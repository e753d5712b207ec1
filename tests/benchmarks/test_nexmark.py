"""Nexmark: the events stay what they are, and every query comes to what DuckDB answers, in order
and out of order, in one batch and in many.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from benchmarks.nexmark.events import SCHEMAS, Events, events
from benchmarks.nexmark.oracle import answered, expected
from benchmarks.nexmark.pattern_queries import PATTERNS
from benchmarks.nexmark.queries import QUERIES, Query
from headrace.testing.pipelines import PipelineTest
from headrace.types.ddl import parse_columns

RATE = 50
"""Events a second: few enough that no two have the same time, and that windows end."""
DISORDER = 150
"""Events within three seconds, which is less than the delay."""
SECOND_RUN = 50_000
"""From here on there are persons with the ids of the first bidders."""


def digest(rows: pa.Table) -> str:
    """Depends on every value."""
    found = hashlib.sha256()
    for name in rows.column_names:
        for value in rows[name].to_pylist():
            found.update(f"{value}\n".encode())
    return found.hexdigest()[:16]


def test_the_events_are_what_they_were() -> None:
    digests = {name: digest(rows) for name, rows in events(3_000).tables().items()}
    assert digests == {
        "person": "99ce8304a302efb1",
        "auction": "383d43fc8fa33cf0",
        "bid": "baa0bb1468edb887",
    }


def test_events_have_the_shares_and_schemas_of_the_benchmark() -> None:
    made = events(5_000)
    for name, rows in made.tables().items():
        kinds = {field.name: field.type for field in parse_columns(SCHEMAS[name])}
        assert {field.name: field.type for field in rows.schema} == kinds
    assert [rows.num_rows for rows in made.tables().values()] == [100, 300, 4_600]


def test_a_range_of_events_can_be_made_without_those_before_it() -> None:
    whole, part = events(2_000, disorder=50), events(1_000, first=1_000, disorder=50)
    for rows, late in zip(whole.tables().values(), part.tables().values(), strict=True):
        assert rows.slice(rows.num_rows - late.num_rows).equals(late)


def test_disorder_moves_events_and_changes_none() -> None:
    for rows, moved in zip(
        events(1_500).tables().values(), events(1_500, disorder=150).tables().values(), strict=True
    ):
        assert not rows.equals(moved)
        assert rows.sort_by([("dateTime", "ascending"), ("extra", "ascending")]).equals(
            moved.sort_by([("dateTime", "ascending"), ("extra", "ascending")])
        )


def fed_in_parts(count: int, parts: int, disorder: int) -> list[Events]:
    """Half of the events from the beginning, and half from where bidders are persons."""
    half, each = parts // 2, count // parts
    starts = [number * each for number in range(parts - half)]
    starts += [SECOND_RUN + number * each for number in range(half)]
    return [events(each, first=first, rate=RATE, disorder=disorder) for first in starts]


def check(query: Query, root: Path, parts: list[Events]) -> None:
    pipeline = query.pipeline()
    answer = pipeline.plan().outputs[0].input
    with PipelineTest(pipeline, root) as test:
        topics = set(test.log.topics())
        for part in parts:
            for name, rows in part.tables().items():
                if name in topics and rows.num_rows:
                    test.feed(name, rows)
            test.settle(final=part is parts[-1])
        rows = answered(query, test.log, "nexmark.answer", answer.key, answer.schema.names)
    names = ("person", "auction", "bid")
    whole = Events(*(pa.concat_tables([part.tables()[name] for part in parts]) for name in names))
    assert rows == expected(query, whole)


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_comes_to_what_duckdb_answers(name: str, tmp_path: Path) -> None:
    check(QUERIES[name], tmp_path, fed_in_parts(3_000, 2, DISORDER))


@pytest.mark.slow
@pytest.mark.parametrize("disorder", [1, DISORDER])
@pytest.mark.parametrize("batches", [1, 8, 30])
@pytest.mark.parametrize("name", QUERIES)
def test_batches_and_disorder_change_no_answer(
    name: str, batches: int, disorder: int, tmp_path: Path
) -> None:
    check(QUERIES[name], tmp_path, fed_in_parts(30_000, batches, disorder))


# Patterns, beside the obvious search


Bid = tuple[datetime, int]
"""Time and price."""


def low_average(bids: list[Bid], start: int) -> tuple[Any, int] | None:
    """The longest run from a bid on whose average is low, and has a bid behind it."""
    prices, best = [], None
    for end in range(start, len(bids) - 1):
        prices.append(bids[end][1])
        if sum(prices) >= 10_000 * len(prices):
            break
        best = (bids[start][0], bids[end][0], sum(prices) / len(prices)), end + 1
    return best


def falling_price(bids: list[Bid], start: int) -> tuple[Any, int] | None:
    end = start + 1
    while end < len(bids) and bids[end][1] < bids[end - 1][1]:
        end += 1
    # `up` is above the price before the last: there are two falling ones at least.
    if end == len(bids) or end - start < 3 or bids[end][1] <= bids[end - 2][1]:
        return None
    return (bids[start][0], bids[end - 1][0], bids[end][0]), end


def price_drop(bids: list[Bid], start: int) -> tuple[Any, int] | None:
    at, price = bids[start]
    for end in range(start + 1, len(bids)):
        if bids[end][0] - at > timedelta(seconds=5) or bids[end][1] == price - 50:
            return None
        if bids[end][1] < price - 50:
            return (bids[end][0], price - bids[end][1]), end
    return None


SEARCHES: dict[str, tuple[Callable[[list[Bid], int], tuple[Any, int] | None], str]] = {
    "cep0": (falling_price, "at the last row"),
    "cep1": (low_average, "behind the last row"),
    "cep2": (low_average, "at the next row"),
    "cep3": (price_drop, "behind the last row"),
}


def searched(name: str, rows: pa.Table) -> Counter[tuple[Any, ...]]:
    """The matches of a pattern, found by trying every bid as the first one."""
    search, strategy = SEARCHES[name]
    by_key: dict[tuple[int, int], list[Bid]] = {}
    ordered = rows.sort_by("dateTime")
    columns = (ordered[column].to_pylist() for column in ("auction", "bidder", "dateTime", "price"))
    for auction, bidder, at, price in zip(*columns, strict=True):
        by_key.setdefault((auction, bidder), []).append((at, price))
    found: Counter[tuple[Any, ...]] = Counter()
    for key, bids in by_key.items():
        start = 0
        while start < len(bids):
            match = search(bids, start)
            if match is None or strategy == "at the next row":
                behind = start + 1
            else:
                behind = match[1] + (strategy == "behind the last row")
            if match is not None:
                found[(*key, *match[0])] += 1
            start = behind
    return found


def closing_bids(rows: pa.Table) -> pa.Table:
    """A bid above all others for each bidder and auction, which ends what is open."""
    keys = rows.group_by(["auction", "bidder"]).aggregate([])
    columns = {field.name: pa.nulls(keys.num_rows, field.type) for field in rows.schema}
    columns |= {name: keys[name] for name in ("auction", "bidder")}
    end = pc.max(rows["dateTime"]).as_py() + timedelta(seconds=1)
    columns["dateTime"] = pa.array([end] * keys.num_rows, rows.schema.field("dateTime").type)
    columns["price"] = pa.array([10**10] * keys.num_rows)
    return pa.table(columns, schema=rows.schema)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_has_the_matches_that_a_search_finds(name: str, tmp_path: Path) -> None:
    parts = [events(1_500, first=first, rate=RATE, disorder=DISORDER).bid for first in (0, 1_500)]
    closing = closing_bids(pa.concat_tables(parts))
    pipeline = PATTERNS[name].pipeline()
    with PipelineTest(pipeline, tmp_path) as test:
        for part in (*parts, closing):
            test.feed("bid", part)
            test.settle(final=part is closing)
        emitted = test.log.read("nexmark.answer").to_table()
    columns = [
        name for name in pipeline.plan().outputs[0].input.schema.names if name != "matched_at"
    ]
    matches = Counter(zip(*(emitted[column].to_pylist() for column in columns), strict=True))
    assert sum(matches.values()) > 10
    assert matches == searched(name, pa.concat_tables([*parts, closing]))
