"""Two streams joined within bounds that are in the left rows: the kernel against two lists, and in
a pipeline against DuckDB.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.columnar.keys import encode_keys
from headrace.errors import BadExpression, InputError, PlanError, UnfitColumn, UnknownColumn
from headrace.operators.joins.interval_join import IntervalJoin
from headrace.operators.joins.sides import ResultColumn, Side
from headrace.plan.join_steps import UNBOUNDED_US
from headrace.testing.kernels import MemoryState
from headrace.testing.pipelines import Died, PipelineTest
from tests.operators.histories import History, Row, Ticks
from tests.operators.joins.join_driver import Drive, Track, check_all_ways, cuts, restored, tracks
from tests.short_forms import examples

TIME = pa.timestamp("us", "UTC")
LEFT = Side(
    pa.schema([("k", pa.int64()), ("t", TIME), ("low", TIME), ("high", TIME), ("n", pa.int64())]),
    ("k",),
    time="t",
)
RIGHT = Side(
    pa.schema([("key", pa.int64()), ("at", TIME), ("m", pa.string())]), ("key",), time="at"
)
COLUMNS: list[ResultColumn] = [
    ("left", "k", "k"),
    ("left", "n", "n"),
    ("right", "at", "at"),
    ("right", "m", "m"),
]
Bounds = tuple[int, int, str | None, str | None]


def join(bounds: Bounds) -> IntervalJoin:
    before_us, after_us, since, until = bounds
    return restored(
        IntervalJoin(
            "j",
            LEFT,
            RIGHT,
            COLUMNS,
            before_us=before_us,
            after_us=after_us,
            since=since,
            until=until,
        )
    )


class Oracle:
    """All rows, in two lists; tick by tick, every row with every row."""

    def __init__(self, bounds: Bounds) -> None:
        self.before, self.after, self.since, self.until = bounds
        self.pools: tuple[list[Row], list[Row]] = ([], [])
        self.late = [0, 0]

    def tick(self, number: int, inputs: tuple[Any, ...], watermarks: tuple[Track, Track]) -> Any:
        for side in (0, 1):
            fresh = [
                {**row, "tick": number}
                for row in inputs[side]
                if row["time"] >= watermarks[side].horizon_before(number)
            ]
            self.late[side] += len(inputs[side]) - len(fresh)
            self.pools[side].extend(fresh)
        pairs = [
            (left, right)
            for left in self.pools[0]
            for right in self.pools[1]
            if number == max(left["tick"], right["tick"]) and self._meet(left, right)
        ]
        keys = pa.table({"k": pa.array([left["k"] for left, _ in pairs], pa.int64())})
        encoded = encode_keys(keys, ["k"]).to_pylist()
        return [pairs[at] for at in sorted(range(len(pairs)), key=lambda at: encoded[at])]

    def bounds(self, left: Row) -> tuple[int, int] | None:
        low, high = left["time"] - self.before, left["time"] + self.after
        if (self.since and left["low"] is None) or (self.until and left["high"] is None):
            return None
        low = max(low, left["low"]) if self.since else low
        return low, min(high, left["high"]) if self.until else high

    def _meet(self, left: Row, right: Row) -> bool:
        bounds = self.bounds(left)
        if bounds is None or left["k"] is None:
            return False
        return bool(left["k"] == right["k"] and bounds[0] <= right["time"] <= bounds[1])

    def kept(self, watermarks: tuple[Track, Track]) -> int:
        """How many rows may still match one."""
        lefts = [self.bounds(row) for row in self.pools[0] if row["k"] is not None]
        left_count = sum(
            bounds is not None and bounds[0] <= bounds[1] and bounds[1] >= watermarks[1].closed[-1]
            for bounds in lefts
        )
        right_count = sum(
            row["k"] is not None and bool(row["time"] + self.before >= watermarks[0].closed[-1])
            for row in self.pools[1]
        )
        return int(left_count + right_count)


def moment(time: int | None) -> Any:
    return pa.scalar(time, TIME).as_py()


@st.composite
def rows_in_ticks(draw: st.DrawFn, ticks: int) -> Ticks:
    time = st.integers(-4, 14)
    row = st.fixed_dictionaries(
        {
            "k": st.none() | st.integers(0, 2),
            "time": time,
            "low": st.none() | time,
            "high": st.none() | time,
        }
    )
    drawn = draw(st.lists(st.lists(row, max_size=4), min_size=ticks, max_size=ticks))
    numbers = iter(range(1000))
    return [[{**each, "number": next(numbers)} for each in rows] for rows in drawn]


BOUNDS: list[Bounds] = [
    (0, UNBOUNDED_US, None, "high"),
    (3, UNBOUNDED_US, "low", "high"),
    (2, 4, "low", None),
    (-1, 6, "low", "high"),
]


@pytest.mark.parametrize("bounds", BOUNDS)
@given(data=st.data())
@settings(max_examples=examples(60))
def test_rows_meet_within_the_bounds_of_the_left_row(bounds: Bounds, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    watermarks = data.draw(tracks(count)), data.draw(tracks(count))
    ticks = data.draw(rows_in_ticks(count)), data.draw(rows_in_ticks(count))
    oracle, expected = Oracle(bounds), []
    for number, inputs in enumerate(zip(*ticks, strict=True)):
        expected += [
            {
                "k": left["k"],
                "n": left["number"],
                "at": moment(right["time"]),
                "m": str(right["number"]),
                "_tick": number,
            }
            for left, right in oracle.tick(number, inputs, watermarks)
        ]
    lefts = [
        [
            {
                "k": row["k"],
                "t": row["time"],
                "low": row["low"],
                "high": row["high"],
                "n": row["number"],
            }
            for row in rows
        ]
        for rows in ticks[0]
    ]
    rights = [
        [{"key": row["k"], "at": row["time"], "m": str(row["number"])} for row in rows]
        for rows in ticks[1]
    ]
    histories = (
        History(LEFT.schema, lefts, is_table=False),
        History(RIGHT.schema, rights, is_table=False),
    )
    drive = Drive(histories, watermarks)
    state = check_all_ways(
        drive,
        lambda: join(bounds),
        expected,
        ("k", pa.int64()),
        [["k"], ["key"]],
        data.draw(cuts(count)),
    )
    assert stored_rows(join(bounds), state) == oracle.kept(watermarks), (
        "a row is kept as long as it may match another, and no longer"
    )
    kernel = join(bounds)
    kernel.step_timed(
        MemoryState(),
        [each.table(0, count) for each in histories],
        [each.watermarks(0, count) for each in watermarks],
    )
    assert kernel.counts == {"late_left": oracle.late[0], "late_right": oracle.late[1]}


def stored_rows(kernel: IntervalJoin, state: MemoryState) -> int:
    values = [value for name, value in state.values.items() if name[:1] == b"r"]
    counts, _ = kernel._store.decode(pa.array(values, pa.binary()))
    return int(counts.sum())


# In a pipeline

START = datetime(2026, 1, 1, tzinfo=UTC)
AUCTIONS = "auction BIGINT, reserve BIGINT, opens TIMESTAMP, expires TIMESTAMP, begins TIMESTAMP"
BIDS = "auction BIGINT, price BIGINT, placed TIMESTAMP"
MATCHED = "FROM auctions JOIN bids USING (auction) WHERE placed BETWEEN"
WINNERS = f"SELECT auction, max(price) AS price {MATCHED} opens AND expires GROUP BY auction"
HIGHEST = """WITH best AS (SELECT time_bucket(INTERVAL 10 SECOND, placed) AS begins,
    max(price) AS price FROM bids GROUP BY 1)
    SELECT auction, price, placed FROM best JOIN bids USING (price)
    WHERE placed >= begins AND placed < begins + INTERVAL 10 SECOND"""
EARLY = f"""SELECT auction, count(*) AS n {MATCHED} greatest(opens - INTERVAL 5 SECOND,
    coalesce(begins, opens)) AND opens + INTERVAL 8 SECOND GROUP BY auction"""


def market() -> hr.Pipeline:
    pipeline = hr.Pipeline("market")
    auctions = pipeline.topic(
        "auctions", schema=AUCTIONS, event_time=hr.EventTime("opens", delay="30 seconds")
    )
    bids = pipeline.topic(
        "bids", schema=BIDS, event_time=hr.EventTime("placed", delay="30 seconds")
    )
    matched = auctions.join(bids, on="auction", until="expires")
    pipeline.view("winners", matched.top(1, by="price", per="auction"))
    pipeline.view(
        "bids_by_window",
        matched.window(hr.tumbling("10 seconds")).aggregate(n=hr.agg.count()),
    )
    early = auctions.join(
        bids,
        on="auction",
        before="5 seconds",
        after="8 seconds",
        since="coalesce(begins, opens)",
    )
    best = bids.window(hr.tumbling("10 seconds")).aggregate(price=hr.agg.max("price")).changes()
    highest = best.join(bids, on="price", before="10 seconds", since="window_start")
    pipeline.write("highest", highest)
    per_window = highest.window(hr.tumbling("10 seconds")).aggregate(n=hr.agg.count())
    pipeline.view("highest_by_window", per_window)
    pipeline.view("early", early.group_by("auction").aggregate(n=hr.agg.count()))
    return pipeline


def test_bids_while_an_auction_is_open_are_those_of_between(tmp_path: Path) -> None:
    random, auctions, bids = Random(2), list[Row](), list[Row]()
    with PipelineTest(market(), tmp_path) as test, duckdb.connect() as database:
        for number in range(6):
            opened = [
                {
                    "auction": len(auctions) + index,
                    "reserve": 1,
                    "opens": (opens := START + timedelta(seconds=8 * number + random.randrange(8))),
                    "expires": opens + timedelta(seconds=random.randrange(30)),
                    "begins": random.choice([None, opens - timedelta(seconds=2)]),
                }
                for index in range(3)
            ]
            placed = [
                {
                    "auction": random.randrange(max(0, 3 * number - 6), 3 * number + 3),
                    "price": random.randrange(100),
                    "placed": START + timedelta(seconds=8 * number + random.randrange(-4, 20)),
                }
                for _ in range(20)
            ]
            auctions, bids = auctions + opened, bids + placed
            test.feed("bids", placed[:10])
            test.cut()
            test.feed("auctions", opened)
            test.feed("bids", placed[10:])
            if number == 2:
                test.cut()
                with pytest.raises(Died):
                    test.step(dies="between views and log")
                test.restart(shards=3)
            test.settle(final=number == 5)
        database.execute("SET TimeZone = 'UTC'")
        database.register("auctions", pa.Table.from_pylist(auctions))
        database.register("bids", pa.Table.from_pylist(bids))
        winners = {row["auction"]: row["price"] for row in test.view("winners")}
        assert winners == dict(database.sql(WINNERS).fetchall())
        early = {row["auction"]: row["n"] for row in test.view("early")}
        assert early == dict(database.sql(EARLY).fetchall())
        found = test.log.read("highest").to_table().select(["auction", "price", "placed"])
        theirs = database.sql(HIGHEST).to_arrow_table().cast(found.schema)
        order = [(name, "ascending") for name in found.schema.names]
        assert found.sort_by(order).to_pylist() == theirs.sort_by(order).to_pylist()
        assert sum(row["n"] for row in test.view("highest_by_window")) == theirs.num_rows
        windows = {row["window_start"]: row["n"] for row in test.view("bids_by_window")}
        theirs = database.sql(
            f"SELECT time_bucket(INTERVAL 10 SECOND, placed), count(*) {MATCHED} opens AND expires"
            " GROUP BY 1"
        ).fetchall()
        assert windows == {start.astimezone(UTC): count for start, count in theirs}, (
            "no result is late for what follows"
        )


def test_bounds_that_do_not_fit_are_refused() -> None:
    pipeline = hr.Pipeline("market")
    auctions = pipeline.topic("auctions", schema=AUCTIONS, event_time=hr.EventTime("opens"))
    bids = pipeline.topic("bids", schema=BIDS, event_time=hr.EventTime("placed"))
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"until": "expires", "how": "left"}, PlanError, "joins how='left'"),
        ({"until": "expires", "within": "1 hour", "before": "1 hour"}, PlanError, "has within="),
        ({"until": "reserve"}, UnfitColumn, "is BIGINT"),
        ({"until": "expirs"}, UnknownColumn, "'expirs'"),
        ({"until": "expires +"}, BadExpression, "expires"),
    ]
    for arguments, error, message in refused:
        with pytest.raises(error, match=message):
            auctions.join(bids, on="auction", **arguments)
    table: Any = bids.to_table("auction")
    with pytest.raises(PlanError, match="a table has no end"):
        auctions.join(table, on="auction", until="expires")
    with pytest.raises(InputError, match="no event time"):
        IntervalJoin("j", Side(LEFT.schema, ("k",)), RIGHT, [], before_us=0, after_us=0)
    best = bids.window(hr.tumbling("1 minute")).aggregate(price=hr.agg.max("price")).changes()
    with pytest.raises(PlanError, match="joins windows with rows how='full'"):
        best.join(bids, on="price", within="1 minute", how="full")
    joined = auctions.join(bids, on="auction", until="opens + INTERVAL 1 HOUR")
    assert joined.schema.names == [*auctions.schema.names, "price", "placed"]
