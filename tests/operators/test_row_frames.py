"""Functions over frames of rows, against DuckDB's window functions: the kernel over rows in any
order, cut into any ticks, calls and shards; and in a pipeline that is killed and restarted.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.columnar.keys import KEY_GROUPS, encode_keys, key_groups
from headrace.errors import PlanError, StreamOnly, UnknownColumn
from headrace.operators.kernel import UNSTARTED, Watermarks
from headrace.plan.window_steps import OverStep
from headrace.testing.kernels import KernelTest, MemoryState
from headrace.testing.pipelines import Died, PipelineTest
from tests.operators.windows.feeding import spread
from tests.short_forms import examples

START = datetime(2026, 1, 1, tzinfo=UTC)
DDL = "k BIGINT, v BIGINT, f DOUBLE, s STRING, id BIGINT, t TIMESTAMP"
Row = dict[str, Any]


def bids(pipeline: hr.Pipeline | None = None) -> hr.Stream:
    time = hr.EventTime("t", delay="20 seconds")
    return (pipeline or hr.Pipeline("auctions")).topic("bids", schema=DDL, event_time=time)


MERGED = {
    "n": (hr.agg.count(), "count(*)"),
    "known": (hr.agg.count("v"), "count(v)"),
    "total": (hr.agg.sum("v"), "sum(v)"),
    "mean": (hr.agg.avg("v"), "avg(v)"),
    "low": (hr.agg.min("v"), "min(v)"),
    "high": (hr.agg.max("f"), "max(f)"),
}
EXPANDED = {
    "middle": (hr.agg.median("v"), "median(v)"),
    "texts": (hr.agg.collect("s"), "coalesce(list(s) FILTER (s IS NOT NULL) {framed}, [])"),
    "opened": (hr.agg.first("s"), "first(s)"),
    "latest": (hr.agg.last("v"), "last(v)"),
    "best": (hr.agg.max_by("s", by="id"), "arg_max_null(s, id)"),
    "kinds": (hr.agg.count_distinct("v"), "count(DISTINCT v)"),
    "doubled": (hr.agg.sum("v * 2", where="s = 'x'"), "sum(v * 2) FILTER (s = 'x')"),
}
LEAD = "CASE WHEN lead(t, {n}) {over} <= t + INTERVAL 5 SECOND THEN lead(v, {n}) {over} END"
PLACES = {
    "number": (hr.over.row_number(), "row_number() {over}"),
    "before": (hr.over.lag("v"), "lag(v) {over}"),
    "long_before": (hr.over.lag("upper(s)", 3), "lag(upper(s), 3) {over}"),
}
TIMED = {
    "place": (hr.over.rank(), "rank() {peers}"),
    "dense": (hr.over.dense_rank(), "dense_rank() {peers}"),
}
LEADING = {
    "after": (hr.over.lead("v", within="5 seconds"), LEAD.replace("{n}", "1")),
    "far": (hr.over.lead("v", 2, within="5 seconds"), LEAD.replace("{n}", "2")),
}


@dataclass(frozen=True)
class Case:
    """A step, and the query that gives the same."""

    over: dict[str, Any]
    results: dict[str, tuple[Any, str]]

    def stream(self, rows: hr.Stream) -> hr.Stream:
        over = dict(self.over)
        frames = rows.over(over.pop("partition_by", None), **over)
        return frames.aggregate(**{name: spec for name, (spec, _) in self.results.items()})

    def query(self) -> str:
        """`arrived` is the order of arrival, `part` the partition up to a gap."""
        partition = "PARTITION BY k, part" if self.over.get("partition_by") else "PARTITION BY part"
        ties = {(): "", ("s", "v desc"): "s NULLS FIRST, v DESC NULLS LAST,", "s": "s NULLS FIRST,"}
        tie = "" if self.by_arrival else ties[self.over.get("order_by", ())]
        order = "ORDER BY arrived" if self.by_arrival else f"ORDER BY t, {tie} arrived"
        frame = "ROWS UNBOUNDED PRECEDING"
        if (rows := self.over.get("rows")) is not None:
            frame = f"ROWS {rows - 1} PRECEDING"
        framed = f"{partition} {order} {frame}"
        if (length := self.over.get("range")) is not None:
            amount, unit = length.split()
            framed = f"{partition} ORDER BY t RANGE INTERVAL {amount} {unit} PRECEDING"
        words = {
            "framed": f"OVER ({framed})",
            "over": f"OVER ({partition} {order})",
            "peers": f"OVER ({partition} ORDER BY t, {tie} 1)",
        }
        columns = [
            f"{text.format(**words) if '{' in text else f'{text} OVER ({framed})'} AS {name}"
            for name, (_, text) in self.results.items()
        ]
        own = "PARTITION BY k" if self.over.get("partition_by") else ""
        gap = int(self.over.get("gap", "1000000000 seconds").split()[0])
        parted = f"""SELECT *, sum(coalesce(begins, 0)) OVER ({own} ORDER BY t, arrived) AS part
            FROM (SELECT *, (t - lag(t) OVER ({own} ORDER BY t, arrived)
                > INTERVAL {gap} SECOND)::INT AS begins FROM rows)"""
        if self.by_arrival:
            parted = "SELECT *, 0 AS part FROM rows"
        return f"SELECT k, v, f, s, id, t, {', '.join(columns)} FROM ({parted})"

    @property
    def by_arrival(self) -> bool:
        return self.over.get("order_by") == "_arrival"


def case(*results: dict[str, tuple[Any, str]], **over: Any) -> Case:
    return Case(over, {name: each for part in results for name, each in part.items()})


RANGED = {name: EXPANDED[name] for name in ("middle", "kinds", "doubled")}
"""Those whose result does not depend on the order of rows of one time."""
CASES = {
    "rows": case(MERGED, PLACES, TIMED, partition_by="k", rows=3),
    "one row": case(MERGED, EXPANDED, partition_by="k", rows=1),
    "rows expanded": case(EXPANDED, partition_by="k", rows=4, order_by=("s", "v desc")),
    "rows before a lead": case(MERGED, LEADING, TIMED, partition_by="k", rows=2),
    "range": case(MERGED, PLACES, partition_by="k", range="7 seconds"),
    "range expanded": case(RANGED, partition_by="k", range="4 seconds"),
    "no range": case(MERGED, partition_by="k", range="0 seconds"),
    "range before a lead": case(MERGED, LEADING, range="3 seconds"),
    "running": case(MERGED, EXPANDED, PLACES, TIMED, partition_by="k", order_by="s"),
    "running over all": case(MERGED, PLACES, LEADING),
    "places": case(PLACES, TIMED, LEADING, partition_by="k", order_by=("s", "v desc")),
    "rows with gaps": case(MERGED, PLACES, TIMED, partition_by="k", rows=3, gap="6 seconds"),
    "range with gaps": case(MERGED, partition_by="k", range="9 seconds", gap="4 seconds"),
    "running with gaps": case(EXPANDED, PLACES, TIMED, partition_by="k", gap="5 seconds"),
    "arrival": case(MERGED, PLACES, partition_by="k", rows=3, order_by="_arrival"),
    "running by arrival": case(EXPANDED, PLACES, partition_by="k", order_by="_arrival"),
}


def oracle(rows: Sequence[Row], query: str) -> list[Row]:
    """What DuckDB makes of the rows, which are in order of arrival."""
    if not rows:
        return []
    numbered = [{**row, "arrived": number} for number, row in enumerate(rows)]
    schema = pa.schema([*bids().schema, pa.field("arrived", pa.int64())])
    table = pa.Table.from_pylist(numbered, schema)
    database().register("rows", table)
    found: list[Row] = database().sql(query).to_arrow_table().to_pylist()
    return found


@cache
def database() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    return connection


def text(rows: Sequence[Row]) -> list[str]:
    """Rows to compare: without the order, and with one form for numbers of other types."""
    return sorted(repr({name: plain(row[name]) for name in sorted(row)}) for row in rows)


def plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, list):
        return [plain(each) for each in value]
    return None if value is None else str(value) if isinstance(value, str) else float(value)


# The kernel


@dataclass(frozen=True)
class Feed:
    """Rows tick by tick, with the horizon at the end of each, in seconds."""

    ticks: list[list[Row]]
    horizons: list[int]

    def table(self, first: int, stop: int, schema: pa.Schema) -> pa.Table:
        rows = [{**row, "_tick": tick} for tick in range(first, stop) for row in self.ticks[tick]]
        return pa.Table.from_pylist(rows, schema.append(pa.field("_tick", pa.int64())))

    def watermarks(self, first: int, stop: int) -> Watermarks:
        ends = [UNSTARTED if each < 0 else us(each) for each in self.horizons]
        before = ends[first - 1] if first else UNSTARTED
        horizon = np.array(ends[first:stop], np.int64)
        ticks = np.arange(first, stop)
        return Watermarks(ticks, ticks * 1_000_000, horizon, horizon, before, before)

    @property
    def in_time(self) -> list[Row]:
        befores = [-1, *self.horizons[:-1]]
        return [
            row
            for rows, before in zip(self.ticks, befores, strict=True)
            for row in rows
            if row["t"] >= moment(before)
        ]


def moment(seconds: int) -> datetime:
    return START + timedelta(seconds=seconds)


def us(seconds: int) -> int:
    return int(moment(seconds).timestamp()) * 1_000_000


@st.composite
def feeds(draw: st.DrawFn) -> Feed:
    ids = iter(range(1_000))
    row = st.builds(
        lambda k, v, f, s, at: {
            "k": k, "v": v, "f": f, "s": s, "id": next(ids), "t": moment(at)
        },
        st.none() | st.integers(0, 1),
        st.none() | st.integers(-2, 5),
        st.none() | st.sampled_from([0.5, 1.25, -3.0]),
        st.none() | st.sampled_from(["", "x", "y"]),
        st.integers(0, 30),
    )  # fmt: skip
    ticks = draw(st.lists(st.lists(row, max_size=8), min_size=1, max_size=6))
    horizons = sorted(draw(st.lists(st.integers(-3, 25), min_size=len(ticks), max_size=len(ticks))))
    return Feed([*ticks, []], [*horizons, 1_000_000])


def run(
    stream: hr.Stream, feed: Feed, cuts: Sequence[int] = (), shards: Sequence[int] = (1,)
) -> tuple[list[Row], dict[bytes, bytes], list[int]]:
    """The rows that a kernel emits in calls, each with a number of shards of its own; its state;
    and the number of entries after each call.
    """
    step = stream.step
    assert isinstance(step, OverStep)
    schema = step.input.schema
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(feed.ticks)}), len(feed.ticks)]
    states, emitted, sizes = [MemoryState()], list[Row](), list[int]()
    for call, (first, stop) in enumerate(pairwise(bounds)):
        states = spread(states, shards[call % len(shards)])
        rows = computed(stream, feed.table(first, stop, bids().schema), schema)
        group = key_groups(encode_keys(rows, list(step.by))).astype(np.int64)
        outputs = []
        for number, state in enumerate(states):
            kernel = pickle.loads(pickle.dumps(step.kernel()))
            mine = rows.filter(pa.array(group * len(states) // KEY_GROUPS == number))
            output = kernel.step_timed(state, [mine], [feed.watermarks(first, stop)])
            output.validate(full=True)
            assert output.schema.names[:-1] == stream.schema.names
            outputs += output.to_pylist()
        emitted += outputs if len(states) == 1 else sorted(outputs, key=lambda row: row["_tick"])
        sizes.append(sum(len(state.values) for state in states))
    return emitted, {k: v for state in states for k, v in state.values.items()}, sizes


def computed(stream: hr.Stream, rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows with the columns that the step before the kernel computes."""
    source = stream.step.input
    extra = [name for name in schema.names if name not in rows.schema.names]
    if not extra:
        return rows
    texts = dict(source.columns)  # type: ignore[attr-defined]
    database().register("given", rows)
    columns = ", ".join(f"{texts[name]} AS {name}" for name in extra)
    found = database().sql(f"SELECT {columns} FROM given").to_arrow_table()
    for name in extra:
        rows = rows.append_column(schema.field(name), found[name].cast(schema.field(name).type))
    return rows.select([*schema.names, "_tick"])


@pytest.mark.parametrize("name", CASES)
@given(data=st.data(), feed=feeds())
@settings(max_examples=examples(20))
def test_each_row_has_what_the_same_query_gives(name: str, data: st.DataObject, feed: Feed) -> None:
    each = CASES[name]
    stream = each.stream(bids())
    rows = [row for tick in feed.ticks for row in tick] if each.by_arrival else feed.in_time
    emitted, state, _ = run(stream, feed)
    expected = text(oracle(rows, each.query()))
    assert text([{k: v for k, v in row.items() if k != "_tick"} for row in emitted]) == expected
    ticks = [row["_tick"] for row in emitted]
    assert ticks == sorted(ticks)
    if not each.by_arrival:
        for key in {row["k"] for row in emitted if "partition_by" in each.over}:
            times = [row["t"] for row in emitted if row["k"] == key]
            assert times == sorted(times)
    cuts = data.draw(st.lists(st.integers(1, len(feed.ticks)), max_size=4), label="cuts")
    shards = data.draw(st.sampled_from([[1], [2], [1, 3, 2]]), label="shards")
    again, other, _ = run(stream, feed, cuts, shards)
    assert sorted(map(repr, again)) == sorted(map(repr, emitted))
    assert other == state


def test_the_state_has_the_frame_of_the_next_row_and_is_forgotten() -> None:
    def sizes(stream: hr.Stream, count: int = 60) -> list[int]:
        test = KernelTest(stream)
        found = []
        for second in range(count):
            row = {"k": 1, "v": second, "f": 0.0, "s": "x" * 1_000, "id": second}
            test.tick([{**row, "t": moment(second)}], watermark=moment(second))
            found.append(sum(map(len, test.state.values.values())))
        test.tick([], watermark=moment(10 * count))
        return [*found, len(test.state.values)]

    by_rows = sizes(bids().over("k", rows=5).aggregate(total=hr.agg.sum("v")))
    assert max(by_rows[:-1]) < 1_000 + 6 * 80  # one row that waits, and four numbers
    ranged = bids().over("k", range="8 seconds")
    *used, left = sizes(ranged.aggregate(total=hr.agg.sum("v")))
    assert max(used) < 1_000 + 10 * 80
    assert left == 0
    *used, left = sizes(bids().over("k", gap="1 minute").aggregate(n=hr.over.row_number()))
    assert max(used) < 1_000 + 3 * 100
    assert left == 0
    assert sizes(bids().over("k").aggregate(total=hr.agg.sum("v")))[-1] == 1


def test_a_row_is_emitted_when_its_lead_is_certain_or_overdue() -> None:
    stream = bids().over("k").aggregate(after=hr.over.lead("v", within="10 seconds"))
    test = KernelTest(stream)

    def tick(*rows: tuple[int, int], horizon: int) -> list[tuple[int, int | None]]:
        given = [{"k": 1, "v": v, "f": 0.0, "s": "", "id": v, "t": moment(at)} for v, at in rows]
        return [(row["v"], row["after"]) for row in test.tick(given, watermark=moment(horizon))]

    assert tick((1, 0), (2, 4), horizon=4) == []
    assert test.waits_until_us == us(4) + 1
    assert tick((3, 4), horizon=5) == [(1, 2)]  # rows of one time are emitted together
    assert test.waits_until_us == us(14) + 1
    assert tick(horizon=14) == []
    assert tick((4, 15), horizon=15) == [(2, 3), (3, None)]
    assert tick(horizon=26) == [(4, None)]


def test_columns_of_any_name_and_type_come_through() -> None:
    ddl = """_time STRING, _mark BIGINT, _done BOOLEAN, `a b` INT, list ARRAY<STRING>, at TIMESTAMP,
        map MAP<STRING, INT>, pair STRUCT<x: INT, y: STRING>, amount DECIMAL(20, 2), day DATE"""
    topic = hr.Pipeline("p").topic("t", schema=ddl, event_time=hr.EventTime("at"))
    frames = topic.over("_mark", rows=3, order_by="a b")
    stream = frames.aggregate(
        lists=hr.over.lag("list"),
        pairs=hr.over.lag("pair"),
        total=hr.agg.sum("amount"),
        days=hr.agg.max("day"),
        nexts=hr.over.lead("map", within="1 hour"),
    )
    test = KernelTest(stream)
    rows = [
        {
            "_time": str(number), "_mark": 1, "_done": True, "a b": -number, "list": [str(number)],
            "at": moment(0), "map": [("n", number)], "pair": {"x": number, "y": None},
            "amount": None, "day": None,
        }
        for number in range(3)
    ]  # fmt: skip
    assert test.tick(rows[:2], watermark=moment(0)) == []
    test.tick(rows[2:], watermark=moment(0))
    found = test.tick([], watermark=moment(9_000))
    assert [row["_time"] for row in found] == ["2", "1", "0"]
    assert [row["lists"] for row in found] == [None, ["2"], ["1"]]
    assert [row["pairs"] for row in found] == [None, {"x": 2, "y": None}, {"x": 1, "y": None}]
    assert [row["nexts"] for row in found] == [[("n", 1)], [("n", 0)], None]
    more = {**rows[0], "at": moment(9_001), "_time": "3"}
    (last,) = test.tick([more], watermark=moment(90_000))
    assert (last["lists"], last["a b"]) == (["0"], 0)


def test_what_does_not_fit_is_refused() -> None:
    rows = bids()
    n = hr.agg.count()
    refused: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"rows": 0}, {"n": n}, "rows=0"),
        ({"rows": 20_000}, {"n": n}, "rows=20000"),
        ({"rows": 2, "range": "1 hour"}, {"n": n}, "by rows= and by range="),
        ({"late": hr.late.correct("1 hour")}, {"n": n}, "cannot be corrected"),
        ({"order_by": "_arrival", "range": "1 hour"}, {"n": n}, "goes by arrival"),
        ({"order_by": "_arrival"}, {"r": hr.over.rank()}, "no two are equal"),
        ({"order_by": "_arrival"}, {"r": hr.over.lead("v", within="1 s")}, "goes by arrival"),
        ({}, {}, "computes nothing"),
        ({}, {"n": "count"}, "not a function over rows"),
        ({}, {"v": n}, "twice"),
        ({}, {"r": hr.agg.rate("v")}, "rate"),
    ]
    for over, results, message in refused:
        with pytest.raises(PlanError, match=message):
            rows.over("k", **over).aggregate(**results)
    with pytest.raises(UnknownColumn, match="'w'"):
        rows.over("w")
    with pytest.raises(UnknownColumn, match="'w'"):
        rows.over("k", order_by="w")
    with pytest.raises(PlanError, match="10,000 rows"):
        hr.over.lag("v", 0)
    with pytest.raises(StreamOnly, match="over is for streams"):
        rows.to_table("k").over("k")
    timeless = hr.Pipeline("p").topic("t", schema="k BIGINT, v BIGINT")
    with pytest.raises(PlanError, match="has none"):
        timeless.over("k", rows=3)
    timeless.over("k", rows=3, order_by="_arrival").aggregate(n=n)


# In a pipeline

DEATHS = {2: "between views and log", 4: "in the log's transaction"}
PIPED = ("rows", "range", "running", "places", "running with gaps", "rows before a lead")


def auctions() -> hr.Pipeline:
    pipeline = hr.Pipeline("auctions")
    rows = bids(pipeline)
    for name in PIPED:
        output = name.replace(" ", "_")
        pipeline.write(output, CASES[name].stream(rows))
        best = CASES[name].stream(rows).window(hr.tumbling("10 seconds")).group_by("k")
        pipeline.view(f"{output}_by_window", best.aggregate(n=hr.agg.count()))
    return pipeline


def test_late_rows_keep_columns_that_begin_with_an_underscore(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("auctions")
    schema = "_id BIGINT, t TIMESTAMP"
    rows = pipeline.topic("rows", schema=schema, event_time=hr.EventTime("t"))
    divert = hr.late.divert("late_rows")
    minutes = rows.window(hr.tumbling("1 minute"), late=divert).group_by("_id")
    pipeline.view("minutes", minutes.aggregate(n=hr.agg.count()))
    with PipelineTest(pipeline, tmp_path) as test:
        for number, second in enumerate((100, 5)):
            test.feed("rows", [{"_id": number, "t": moment(second)}])
            test.settle()
        (late,) = test.log.read("late_rows").to_pylist()
    assert (late["_id"], late["t"]) == (1, moment(5))


def test_late_rows_are_diverted_as_they_came(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("auctions")
    frames = bids(pipeline).over("k", rows=2, late=hr.late.divert("late_bids"))
    pipeline.write("out", frames.aggregate(mean=hr.agg.avg("CASE WHEN s = 'x' THEN v END")))
    row = {"k": 1, "v": 2, "f": 0.5, "s": "x"}
    with PipelineTest(pipeline, tmp_path) as test:
        test.feed("bids", [{**row, "id": number, "t": moment(100)} for number in range(2)])
        test.settle()
        test.feed("bids", [{**row, "id": 3, "t": moment(9)}, {**row, "id": 4, "t": moment(90)}])
        test.settle(final=True)
        late = test.log.read("late_bids").to_pylist()
        out = test.log.read("out").to_pylist()
    assert [(row["id"], row["t"], row["s"]) for row in late] == [(3, moment(9), "x")]
    assert set(late[0]) == {*bids().schema.names, "_partition", "_offset", "_timestamp"}
    assert sorted(row["id"] for row in out) == [0, 1, 4]


def test_rows_that_come_late_and_runs_that_die_change_nothing(tmp_path: Path) -> None:
    random, fed = Random(5), list[Row]()
    with PipelineTest(auctions(), tmp_path) as test:
        for number in range(8):
            rows = [
                {
                    "k": random.choice([None, 1, 2]),
                    "v": random.choice([None, *range(5)]),
                    "f": random.random(),
                    "s": random.choice(["", "x", None]),
                    "id": len(fed) + index,
                    "t": moment(5 * number + random.randrange(18)),
                }
                for index in range(random.randrange(1, 15))
            ]
            test.feed("bids", rows)
            fed += rows
            if number in DEATHS:
                test.cut()
                with pytest.raises(Died):
                    test.step(dies=DEATHS[number])
                test.restart(shards=number, lose_local_store=number == 4)
            test.settle(final=number == 7)
        for name in PIPED:
            output = name.replace(" ", "_")
            expected = oracle(fed, CASES[name].query())
            names = list(expected[0])
            found = test.log.read(output).to_table().select(names).to_pylist()
            assert text(found) == text(expected), name
            windows = test.view(f"{output}_by_window")
            assert sum(row["n"] for row in windows) == len(fed), name
