"""Null groups, newest rows by event time, one-to-many joins and windows over changing tables, in
whole pipelines: random rows against DuckDB, and what went wrong once.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import headrace as hr
from headrace.log.dead_letters import read_dead_letters
from headrace.testing.pipelines import PipelineTest

pytestmark = pytest.mark.usefixtures("no_syncs")
Row = dict[str, Any]
START = datetime(2026, 1, 1, tzinfo=UTC)
VISITS = "id BIGINT, site STRING, page STRING, ms BIGINT, at TIMESTAMP"


def visits_of(pipeline: hr.Pipeline) -> Any:
    return pipeline.topic(
        "visits", schema=VISITS, partitions=2, event_time=hr.EventTime("at", delay="1 day")
    )


def visit(number: int, site: str | None, page: str | None, ms: int | None, seconds: int) -> Row:
    at = START + timedelta(seconds=seconds)
    return {"id": number, "site": site, "page": page, "ms": ms, "at": at}


# Against DuckDB


def web_log() -> hr.Pipeline:
    pipeline = hr.Pipeline("web")
    visits = visits_of(pipeline)
    pipeline.view(
        "sites",
        visits.group_by("site", "page").aggregate(
            n=hr.agg.count(),
            ms=hr.agg.sum("ms"),
            typical=hr.agg.median("ms"),
            times=hr.agg.collect_set("ms"),
            slow=hr.agg.count_if("ms > 2"),
            spread=hr.agg.variance("ms"),
            first=hr.agg.first("id"),
            last=hr.agg.last("id"),
            slowest=hr.agg.max_by("page", by="id"),
            pairs=hr.agg.count_distinct("ms", "id"),
        ),
    )
    minutes = visits.window(hr.tumbling("10 seconds"), emit="changes").group_by("page")
    pipeline.view("minutes", minutes.aggregate(n=hr.agg.count(), last=hr.agg.last("id")))
    newest = visits.to_table("id")
    pipeline.view("newest", newest)
    pages = newest.group_by("page").aggregate(n=hr.agg.count(), last=hr.agg.last("id"))
    pipeline.view("pages", pages)
    pipeline.view("distinct_pages", newest.distinct("page", "site"))
    pipeline.view("joined", newest.join(pages, on="page", how="left", suffix="_page"))
    seen = newest.select("id AS visit", "page")
    pipeline.view("page_visits", pages.select("page", "n").join(seen, on="page", how="left"))
    moved = newest.window(hr.tumbling("10 seconds"), emit="changes").group_by("page")
    pipeline.view("moved", moved.aggregate(n=hr.agg.count()))
    pipeline.view("firsts", visits.first(per="page"))
    pipeline.view("lasts", visits.last(per=["page", "site"]))
    pipeline.view("slowest", visits.top(2, by="ms", per="page"))
    return pipeline


NEWEST = """(SELECT * EXCLUDE (arrived) FROM (SELECT *, row_number() OVER
    (PARTITION BY id ORDER BY happened DESC, arrived DESC) AS place FROM visits) WHERE place = 1)"""
PAGES = f"""(SELECT page, count(*) AS n, last(id ORDER BY happened, id) AS last FROM {NEWEST}
    GROUP BY page)"""
WINDOW = "epoch_us(happened) // 10000000"
QUERIES = {
    "sites": """SELECT site, page, count(*), sum(ms), median(ms),
        coalesce(list_sort(list_distinct(list(ms) FILTER (ms IS NOT NULL))), []),
        count(*) FILTER (ms > 2), var_samp(ms), first(id ORDER BY happened, arrived),
        last(id ORDER BY happened, arrived), last(page ORDER BY id, arrived),
        count(DISTINCT row(ms, id)) FILTER (ms IS NOT NULL)
        FROM visits GROUP BY site, page""",
    "minutes": f"""SELECT page, {WINDOW}, count(*), last(id ORDER BY happened, arrived)
        FROM visits GROUP BY page, {WINDOW}""",
    "newest": f"SELECT id, site, page, ms, epoch_us(happened) FROM {NEWEST}",
    "pages": f"SELECT page, n FROM {PAGES}",
    "distinct_pages": f"SELECT DISTINCT page, site FROM {NEWEST}",
    "joined": f"SELECT t.id, p.n FROM {NEWEST} t LEFT JOIN {PAGES} p ON t.page = p.page",
    "page_visits": f"""SELECT p.page, p.n, t.id FROM {PAGES} p
        LEFT JOIN {NEWEST} t ON t.page = p.page""",
    "moved": f"SELECT page, {WINDOW}, count(*) FROM {NEWEST} GROUP BY page, {WINDOW}",
    "firsts": "SELECT page, first(id ORDER BY happened, arrived) FROM visits GROUP BY page",
    "lasts": """SELECT page, site, last(id ORDER BY happened, arrived) FROM visits
        GROUP BY page, site""",
    "slowest": """SELECT page, row_number() OVER same_page AS rank, id FROM visits
        WINDOW same_page AS (PARTITION BY page ORDER BY ms DESC NULLS LAST, arrived)
        QUALIFY rank <= 2""",
}
COLUMNS: dict[str, list[str]] = {
    "sites": [
        "site", "page", "n", "ms", "typical", "times", "slow", "spread", "first", "last", "slowest",
        "pairs",
    ],
    "minutes": ["page", "window_start", "n", "last"],
    "newest": ["id", "site", "page", "ms", "at"],
    "pages": ["page", "n"],
    "distinct_pages": ["page", "site"],
    "joined": ["id", "n_page" ],
    "page_visits": ["page", "n", "visit"],
    "moved": ["page", "window_start", "n"],
    "firsts": ["page", "id"],
    "lasts": ["page", "site", "id"],
    "slowest": ["page", "rank", "id"],
}  # fmt: skip


def plain(view: str, row: Row) -> tuple[Any, ...]:
    values = []
    for name in COLUMNS[view]:
        value = row[name if name in row else name.removesuffix("_page")]
        if isinstance(value, datetime):
            us = (value - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
            value = us // 10_000_000 if name == "window_start" else us
        values.append(round(value, 9) if isinstance(value, float) else value)
    return tuple(values)


def random_ticks(random: Random, ticks: int) -> list[list[Row]]:
    def site() -> str | None:
        return random.choice([None, "", "null", "a"])

    return [
        [
            visit(
                random.randrange(6),
                site(),
                site(),
                random.choice([None, 0, 1, 2, 3, 4]),
                random.randrange(40),
            )
            for _ in range(random.randrange(9))
        ]
        for _ in range(ticks)
    ]


def test_views_equal_duckdb_at_every_tick() -> None:
    check_views(random_ticks(Random(7), 4), shards=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_views_of_many_histories_equal_duckdb(seed: int) -> None:
    check_views(random_ticks(Random(seed), 6), shards=1 + seed % 3)


def check_views(ticks: list[list[Row]], shards: int) -> None:
    with (
        TemporaryDirectory() as root,
        PipelineTest(web_log(), Path(root), shards=shards) as test,
        duckdb.connect() as database,
    ):
        for number, tick in enumerate(ticks):
            test.feed("visits", tick)
            test.cut()
            test.settle()
            if number == 1:
                test.restart(lose_local_store=True)
            visits = arrived(test, ticks[: number + 1])
            if not visits.num_rows:
                continue
            database.register("visits", visits)
            for view, query in QUERIES.items():
                found = sorted((plain(view, row) for row in test.view(view)), key=repr)
                expected = sorted(
                    (
                        tuple(round(v, 9) if isinstance(v, float) else v for v in row)
                        for row in database.execute(query).fetchall()
                    ),
                    key=repr,
                )
                assert found == expected, view


def arrived(test: PipelineTest, ticks: list[list[Row]]) -> pa.Table:
    """All rows in the pipeline's order: by tick, partition and offset."""
    bounds = list(test.runner.journal.between(0, test.runner.tick))
    stored = test.log.read("visits").to_pylist()

    def order(row: Row) -> tuple[int, int, int]:
        partition, offset = row["_partition"], row["_offset"]
        tick = next(t.number for t in bounds if offset < t.end("visits", partition))
        return tick, partition, offset

    rows = sorted(stored, key=order)
    assert len(rows) == sum(map(len, ticks))
    columns = {name: [row[name] for row in rows] for name in ("id", "site", "page", "ms", "at")}
    kinds = {"site": pa.string(), "page": pa.string(), "at": pa.timestamp("us")}
    naive = [at.replace(tzinfo=None) for at in columns["at"]]
    arrays = {
        name: pa.array(naive if name == "at" else values, kinds.get(name, pa.int64()))
        for name, values in columns.items()
    }
    arrays["happened"] = arrays.pop("at")
    return pa.table({**arrays, "arrived": pa.array(range(len(rows)), pa.int64())})


# What went wrong


def test_null_groups_left_the_result_as_dead_letters(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("web")
    visits = visits_of(pipeline)
    pages = visits.group_by("page").aggregate(n=hr.agg.count(), name="pages")
    pipeline.view("pages", pages)
    pipeline.write("pages_topic", pages)
    pipeline.view("first", visits.dedupe(on="page", within="1 hour").to_table("id"))
    hours = visits.window(hr.tumbling("1 hour"), emit="changes").group_by("page")
    pipeline.view("hours", hours.aggregate(n=hr.agg.count()))
    pipeline.view("keyed", visits.to_table("page", name="keyed"))
    with PipelineTest(pipeline, tmp_path) as test:
        empty, text = visit(3, "a", "", 1, 1), visit(4, "a", "null", 1, 1)
        test.feed("visits", [visit(1, "a", None, 1, 1), visit(2, "a", None, 1, 1), empty, text])
        test.settle()
        counts = {row["page"]: row["n"] for row in test.view("pages")}
        assert counts == {None: 2, "": 1, "null": 1}
        assert {row["page"]: row["n"] for row in test.view("hours")} == counts
        assert sorted(row["id"] for row in test.view("first")) == [1, 3, 4]
        assert not {"pages", "hours.window"} & {
            name.removesuffix(".dead") for name in test.log.topics()
        }
        # A table's topic has a primary key, which is never null. So has `to_table`.
        assert set(test.folded("pages_topic", "page")) == {"", "null"}
        (letter,) = read_dead_letters(test.log, "pages_topic.topic")
        assert letter["reason"] == "its key is null"
        assert len(read_dead_letters(test.log, "keyed")) == 2
        counted = test.runner.leading.entry.counts
        assert (counted["pages_topic.topic.diverted"], counted["keyed.diverted"]) == (1, 2)


def test_patterns_and_last_rows_left_out_the_null_group(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("web")
    visits = visits_of(pipeline)
    pipeline.view("last", visits.last(per="page", name="last"))
    pipeline.view("first", visits.first(per="page", name="first"))
    growing = visits.key_by("page").match(
        "a b", define={"b": "b.ms > a.ms"}, measures={"from": "a.id", "to": "b.id"}, name="growing"
    )
    pipeline.write("growing", growing)
    pipeline.write("followed", visits.over("page", order_by="id").aggregate(n=hr.agg.count()))
    with PipelineTest(pipeline, tmp_path, shards=3) as test:
        test.feed("visits", [visit(n, "a", page, n, n) for n in (1, 2) for page in (None, "null")])
        test.settle()
        test.restart(lose_local_store=True)
        test.feed("visits", [visit(n, "a", page, n, n) for n in (3, 4) for page in (None, "null")])
        test.settle(final=True)
        assert {row["page"]: row["id"] for row in test.view("last")} == {None: 4, "null": 4}
        assert {row["page"]: row["id"] for row in test.view("first")} == {None: 1, "null": 1}
        pairs = {
            (row["page"], row["from"], row["to"]) for row in test.log.read("growing").to_pylist()
        }
        assert pairs == {(page, n, n + 1) for page in (None, "null") for n in (1, 3)}
        assert test.log.read("followed").to_table().num_rows == 8
        assert not [name for name in test.log.topics() if name.endswith(".dead")]


def test_a_question_by_null_did_not_find_the_null_group(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("web")
    visits = visits_of(pipeline)
    pipeline.ask("page", using=visits.group_by("page").aggregate(n=hr.agg.count()))
    pipeline.ask("site", using=visits.group_by("site", "page").aggregate(n=hr.agg.count()))
    with PipelineTest(pipeline, tmp_path, shards=3) as test:
        test.feed("visits", [visit(1, "a", None, 1, 1), visit(2, None, "x", 1, 1)])
        test.settle()
        test.restart(lose_local_store=True)
        for number, (site, page) in enumerate([("a", None), (None, "x"), (None, None), ("a", "x")]):
            test.feed("ask.page", [{"ask_id": str(number), "page": page}])
            test.feed("ask.site", [{"ask_id": str(number), "site": site, "page": page}])
        test.settle()
        answers = {
            name: {
                row["ask_id"]: row["n"] for row in test.log.read(f"ask.{name}.answers").to_pylist()
            }
            for name in ("page", "site")
        }
        assert answers["page"] == {"0": 1, "1": 1, "2": 1, "3": 1}
        assert answers["site"] == {"0": 1, "1": 1, "2": None, "3": None}


def test_the_newest_row_was_the_last_to_arrive(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("web")
    visits = visits_of(pipeline)
    pipeline.view("newest", visits.to_table("site"))
    pipeline.view("arrived", visits.to_table("site", by="_arrival"))
    pipeline.view("slowest", visits.to_table("site", by="ms"))
    pipeline.view(
        "ends",
        visits.group_by("site").aggregate(
            first=hr.agg.first("id"),
            last=hr.agg.last("id"),
            arrived=hr.agg.last("id", by="_arrival"),
            slowest=hr.agg.last("id", by="ms"),
        ),
    )
    with PipelineTest(pipeline, tmp_path) as test:
        for row in (visit(1, "a", "x", 5, 9), visit(2, "a", "y", 9, 3), visit(3, "a", "z", 1, 3)):
            test.feed("visits", [row])
            test.cut()
            test.settle()
        assert [row["id"] for row in test.view("newest")] == [1]
        assert [row["id"] for row in test.view("arrived")] == [3]
        assert [row["id"] for row in test.view("slowest")] == [2]
        (ends,) = test.view("ends")
        assert (ends["first"], ends["last"], ends["arrived"], ends["slowest"]) == (2, 1, 3, 2)


def test_a_one_to_many_left_join_of_tables_was_refused(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("shop")
    customers = pipeline.table("customers", schema="customer BIGINT, name STRING", key="customer")
    lines = pipeline.table(
        "lines", schema="customer BIGINT, line BIGINT, item STRING", key=["customer", "line"]
    )
    joined = customers.join(lines, on="customer", how="left")
    assert joined.key == ("customer", "line")
    pipeline.view("joined", joined)
    with PipelineTest(pipeline, tmp_path) as test:
        test.feed("customers", [{"customer": n, "name": f"c{n}"} for n in (1, 2)])
        test.feed("lines", [{"customer": 1, "line": n, "item": f"i{n}"} for n in (1, 2)])
        test.settle()
        assert items(test) == [(1, 1, "i1"), (1, 2, "i2"), (2, None, None)]
        gone = [{"customer": 1, "line": n, "item": None, "_change_type": "delete"} for n in (1, 2)]
        test.feed("lines", gone)
        test.settle()
        assert items(test) == [(1, None, None), (2, None, None)]


def items(test: PipelineTest) -> list[tuple[Any, ...]]:
    rows = [(row["customer"], row["line"], row["item"]) for row in test.view("joined")]
    return sorted(rows, key=lambda row: (row[0], row[1] or 0))


def test_a_full_join_lost_a_row_whose_partner_went(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("shop")
    orders = pipeline.table("orders", schema="id BIGINT, customer BIGINT", key="id")
    customers = pipeline.table("customers", schema="customer BIGINT, name STRING", key="customer")
    pipeline.view("placed", orders.join(customers, on="customer", how="full"))
    with PipelineTest(pipeline, tmp_path) as test:
        test.feed("orders", [{"id": 1, "customer": 7}])
        test.feed("customers", [{"customer": 7, "name": "Ann"}])
        test.settle()
        test.feed("customers", [{"customer": 7, "name": None, "_change_type": "delete"}])
        test.settle()
        assert test.view("placed") == [{"id": 1, "customer": 7, "name": None}]


def test_null_matches_nothing_in_a_join_of_grouped_tables(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("web")
    visits = visits_of(pipeline)
    pages = visits.group_by("page").aggregate(n=hr.agg.count())
    slow = visits.where("ms > 2").group_by("page").aggregate(slow=hr.agg.count())
    for how in ("inner", "left", "full"):
        pipeline.view(how, pages.join(slow, on="page", how=how, name=f"{how}_join"))
    with PipelineTest(pipeline, tmp_path) as test:
        test.feed("visits", [visit(1, "a", None, 5, 1), visit(2, "a", "x", 5, 1)])
        test.settle()
        found = {
            how: {row["page"]: (row["n"], row["slow"]) for row in test.view(how)}
            for how in ("inner", "left", "full")
        }
        assert found["inner"] == {"x": (1, 1)}
        assert found["left"] == found["full"] == {"x": (1, 1), None: (1, None)}
        # The result of the full join can have one row with the key null: that of the left table.
        (letter,) = read_dead_letters(test.log, "full_join")
        assert "its key is null" in letter["reason"]


def test_rows_of_a_table_that_moved_were_counted_in_both_windows(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("web")
    visits = pipeline.table(
        "visits",
        schema="id BIGINT, at TIMESTAMP",
        key="id",
        event_time=hr.EventTime("at", delay="0 seconds"),
    )
    windows = visits.window(hr.tumbling("10 seconds"))
    pipeline.view("windows", windows.aggregate(n=hr.agg.count(), name="count"))
    with PipelineTest(pipeline, tmp_path) as test:
        for number, seconds in ((1, 3), (2, 12), (1, 15), (3, 31)):
            at = START + timedelta(seconds=seconds)
            test.feed("visits", [{"id": number, "at": at}])
            test.cut()
            test.settle()
        assert [row["n"] for row in test.view("windows")] == [1, 1], "row 1 stays where it was"
        assert test.runner.leading.entry.counts["windows.late_moves.late"] == 1
