"""Processors in whole pipelines: equal to sessions, through kills, restarts, any number of shards
and any size of batches; replayed; and on Spark.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import headrace as hr
from headrace.runtime.state_inspector import StateInspector
from headrace.testing.pipelines import Died, PipelineTest
from headrace.testing.plain_spark import PlainSpark

pytestmark = pytest.mark.usefixtures("no_syncs")
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
GAP = timedelta(minutes=5)
SPARK: Any = PlainSpark()


class Sessions(hr.Processor, each_key=True):
    """Sessions of a user with a gap of 5 minutes. Rows of a session may come in any order, but not
    behind the watermark.
    """

    output = "u STRING, window_start TIMESTAMP, window_end TIMESTAMP, n BIGINT"
    times = hr.state("ARRAY<TIMESTAMP>", default=[])
    closes = hr.timer()

    def on_row(self, row: dict[str, Any], ctx: Any) -> None:
        if ctx.watermark is None or row["at"] >= ctx.watermark:
            ctx["times"] = sorted([*ctx["times"], row["at"]])
            ctx["closes"] = min(last + GAP for _, last, _ in self.sessions(ctx["times"]))

    def on_timer(self, key: dict[str, Any], ctx: Any) -> Iterator[dict[str, Any]]:
        first, last, n = next(self.sessions(ctx["times"]))
        yield {**key, "window_start": first, "window_end": last + GAP, "n": n}
        ctx["times"] = ctx["times"][n:]
        if ctx["times"]:
            ctx["closes"] = next(self.sessions(ctx["times"]))[1] + GAP

    def sessions(self, times: list[datetime]) -> Iterator[tuple[datetime, datetime, int]]:
        """Each session's first time, last time and number of rows."""
        start = 0
        for at in range(1, len(times) + 1):
            if at == len(times) or times[at] - times[at - 1] > GAP:
                yield times[start], times[at - 1], at - start
                start = at


class Joined(hr.Processor):
    """Clicks with the newest name of their user, which is another input."""

    output = "u STRING, name STRING, clicks BIGINT"
    clicks = hr.state("BIGINT", default=0)
    name = hr.state("STRING", default="?")

    def on_rows(self, rows: pa.Table, ctx: Any) -> pa.Table:
        ctx["clicks"] = pc.add(ctx["clicks"], ctx.per_key(rows["at"], "count"))
        columns = {"name": ctx["name"], "clicks": ctx["clicks"], "u": ctx.keys["u"]}
        return pa.table(columns)

    def on_names(self, rows: pa.Table, ctx: Any) -> None:
        gone = pc.equal(rows["_change_type"], "delete")
        ctx["name"] = ctx.per_key(pc.if_else(gone, None, rows["name"]), "last")


class Fourths(hr.Processor, each_key=True):
    """A table of clicks by user without every fourth, and every third click aside."""

    output = "u STRING, n BIGINT, places ARRAY<BIGINT> NOT NULL"
    table_key = "u"
    thirds = hr.side_output("u STRING, at TIMESTAMP, n BIGINT, why STRING")
    places = hr.state("ARRAY<BIGINT>", default=[])

    def on_row(self, row: dict[str, Any], ctx: Any) -> None:
        n = len(ctx["places"]) + 1
        ctx["places"].append(n)
        if n % 4:
            ctx.emit(u=row["u"], n=n, places=ctx["places"])
        else:
            ctx.delete(u=row["u"])
        if not n % 3:
            ctx.emit_to("thirds", row, n=n, why="a third")


class ColumnFourths(hr.Processor):
    """The table, by columns: of the clicks of a tick the last is the one that counts."""

    output = "u STRING, n BIGINT"
    table_key = ("u",)
    many = hr.side_output("u STRING, n BIGINT")
    n = hr.state("BIGINT", default=0)

    def on_rows(self, rows: pa.Table, ctx: Any) -> pa.Table:
        ctx["n"] = pc.add(ctx["n"], ctx.per_key(rows["at"], "count"))
        table = pa.table({"u": ctx.keys["u"], "n": ctx["n"]})
        ctx.emit_to("many", table.filter(pc.greater(table["n"], 3)))
        is_gone = pc.equal(pc.subtract(ctx["n"], pc.multiply(pc.divide(ctx["n"], 4), 4)), 0)
        changes = pc.if_else(is_gone, "delete", "insert")
        return table.append_column("_change_type", changes)


def clickstream() -> hr.Pipeline:
    pipeline = hr.Pipeline("clicks")
    clicks = pipeline.topic(
        "clicks",
        schema="u STRING, at TIMESTAMP",
        key="u",
        partitions=3,
        event_time=hr.EventTime("at", delay="3 minutes"),
    )
    names = pipeline.table("names", schema="u STRING, name STRING", key="u")
    sessions = clicks.process(Sessions, key="u", name="sessions")
    pipeline.write("sessions", sessions)
    windows = clicks.window(hr.session(GAP), late=hr.late.drop())
    pipeline.write("windows", windows.group_by("u").aggregate(n=hr.agg.count()).changes())
    joined = clicks.process(Joined, key="u", name="joined", ttl="2 hours", names=names)
    pipeline.view("newest", joined.to_table("u"))
    fourths = clicks.process(Fourths, key="u", name="fourths")
    pipeline.view("fourths", fourths)
    pipeline.view("by_number", fourths.group_by("n").aggregate(users=hr.agg.count()))
    pipeline.write("thirds", fourths.side("thirds"))
    by_columns = clicks.process(ColumnFourths, key="u", name="column_fourths")
    pipeline.view("column_fourths", by_columns)
    pipeline.write("many", by_columns.side("many"))
    return pipeline


def check_fourths(test: PipelineTest, ticks: list[Any]) -> None:
    every = Counter(row["u"] for clicks, _ in ticks for row in clicks)
    counts = {user: n for user, n in every.items() if n % 4 and user is not None}
    rows = {row["u"]: row for row in test.view("fourths")}
    assert {user: row["n"] for user, row in rows.items()} == counts
    assert all(row["places"] == [*range(1, row["n"] + 1)] for row in rows.values())
    assert {row["u"]: row["n"] for row in test.view("column_fourths")} == counts
    users = {row["n"]: row["users"] for row in test.view("by_number")}
    assert users == Counter(counts.values())
    found = Counter(row["u"] for row in test.log.read("thirds").to_pylist())
    assert found == Counter({user: n // 3 for user, n in every.items() if n >= 3})


def fed(chance: random.Random) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Per tick, clicks and names."""
    ticks = []
    for tick in range(10):
        clicks = [
            {
                "u": chance.choice(["ann", "bob", "cid", None]),
                "at": NOON + timedelta(minutes=4 * tick + chance.uniform(-4, 6)),
            }
            for _ in range(chance.randrange(4))
        ]
        names = [{"u": chance.choice(["ann", "bob"]), "name": f"name {tick}"}]
        ticks.append((clicks, names if chance.random() < 0.5 else []))
    return ticks


def rows_of(test: PipelineTest, topic: str) -> list[str]:
    hidden = ("_partition", "_offset", "_timestamp", "change_type")
    table = test.log.read(topic).to_table()
    kept = table.select([name for name in table.column_names if name not in hidden])
    return sorted(str(sorted(row.items())) for row in kept.to_pylist())


def feed(test: PipelineTest, clicks: list[dict[str, Any]], names: list[dict[str, Any]]) -> None:
    if names:
        test.feed("names", names)
    if clicks:
        test.feed("clicks", clicks)
    test.cut(forced=True)


@pytest.mark.parametrize("seed", range(3))
def test_sessions_of_a_processor_are_those_of_windows_through_kills(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    ticks = fed(chance)
    results = []
    for lives in (False, True):
        with PipelineTest(clickstream(), tmp_path / f"{lives}", SPARK) as test:
            for clicks, names in ticks:
                feed(test, clicks, names)
                if not lives:
                    test.step()
                elif chance.random() < 0.4:
                    point = chance.choice(["between views and log", "files were written"])
                    with pytest.raises(Died):
                        test.step(dies=point)
                    test.restart(
                        shards=chance.randint(1, 4), lose_local_store=chance.random() < 0.5
                    )
            while test.step(3 if lives else 1):
                continue
            test.settle(final=True)
            sessions, windows = rows_of(test, "sessions"), rows_of(test, "windows")
            assert sessions == windows
            check_fourths(test, ticks)
            aside = [rows_of(test, "thirds"), rows_of(test, "many")]
            results.append([sessions, sorted(map(str, test.view("newest"))), *aside])
            if not lives:
                with test.replay("v2", shards=3) as again:
                    while again.step(4):
                        continue
                    assert rows_of(test, "sessions.v2") == sessions
                    assert [rows_of(test, f"{name}.v2") for name in ("thirds", "many")] == aside
    assert results[0] == results[1]
    assert results[0][0]


class Failing(hr.Processor, each_key=True):
    output = "u STRING, at TIMESTAMP"

    def on_row(self, row: dict[str, Any], ctx: Any) -> dict[str, Any]:
        if row["u"] == "bob":
            raise ValueError("no bobs")
        return row


def test_rows_that_a_processor_fails_on_are_dead_letters(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("clicks")
    clicks = pipeline.topic("clicks", schema="u STRING, at TIMESTAMP")
    pipeline.write("passed", clicks.process(Failing, key="u", errors="divert", name="failing"))
    with PipelineTest(pipeline, tmp_path, SPARK) as test:
        test.feed("clicks", [{"u": name, "at": NOON} for name in ("ann", "bob", "cid")])
        test.settle()
        assert [row[1] for row in sorted(test.rows("passed"))] == ["ann", "cid"]
        counts = test.runner.leading.entry.counts
        assert counts["failing.diverted"] == 1


class Counting(hr.Processor, each_key=True):
    output = "u STRING"
    clicks = hr.state("BIGINT", default=0)
    seen = hr.state("ARRAY<STRING>", default=["nobody"])
    quiet = hr.timer()

    def on_row(self, row: dict[str, Any], ctx: Any) -> None:
        ctx["clicks"] += 1
        ctx["quiet"] = row["at"] + GAP

    def on_timer(self, key: dict[str, Any], ctx: Any) -> None: ...


def test_the_state_of_a_key_can_be_looked_at(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("clicks")
    clicks = pipeline.topic("clicks", schema="u STRING, at TIMESTAMP", event_time="at")
    pipeline.write("counted", clicks.process(Counting, key="u", name="counting"))
    with PipelineTest(pipeline, tmp_path, SPARK) as test:
        test.feed("clicks", [{"u": name, "at": NOON} for name in ("ann", "bob", "ann")])
        test.settle()
        inspector = StateInspector.open(test.log, "clicks", test.state, "counting", pipeline.plan())
        ann = {"u": "ann", "clicks": 2, "seen": ["nobody"], "quiet": NOON + GAP}
        assert inspector.row({"u": "ann"}) == ann
        assert inspector.row({"u": "cid"}) is None
        shown, more = inspector.rows(10)
        assert sorted(row["u"] for row in shown) == ["ann", "bob"]
        assert not more


@pytest.mark.spark
def test_processors_run_on_spark(spark: Any, tmp_path: Path) -> None:
    ticks = fed(random.Random(7))
    found = []
    for session in (None, spark):
        with PipelineTest(
            clickstream(), tmp_path / f"{session}"[:5], session, width="wide"
        ) as test:
            for clicks, names in ticks:
                feed(test, clicks, names)
            test.settle(final=True)
            found.append([rows_of(test, "sessions"), sorted(map(str, test.view("newest")))])
    assert found[0] == found[1]
    assert found[0][0]
