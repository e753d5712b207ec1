"""Functions over frames, joins until a time of the row itself and with a file, on Spark with
expressions that need it, against DuckDB.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pytest

import headrace as hr
from headrace.testing.pipelines import PipelineTest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
START = datetime(2026, 3, 1, 12, tzinfo=UTC)

AVERAGES = """SELECT bid, avg(price * 2) OVER (PARTITION BY auction ORDER BY placed, bid
    ROWS 9 PRECEDING) AS mean, lag(upper(note)) OVER (PARTITION BY auction ORDER BY placed, bid)
    AS before FROM bids"""
TEXTS = """SELECT bid, price + price + 1 AS more, CASE note WHEN 'a' THEN 'first!' END AS text
    FROM bids"""
PLACED = """SELECT auction, count(*) AS n, max(price) AS best FROM auctions
    JOIN bids USING (auction) WHERE
    placed BETWEEN opens - INTERVAL 5 SECOND AND expires + INTERVAL 5 SECOND
    GROUP BY auction"""


def market(notes: Path) -> hr.Pipeline:
    pipeline = hr.Pipeline("market")
    auctions = pipeline.topic(
        "auctions",
        schema="auction BIGINT, opens TIMESTAMP, expires TIMESTAMP",
        event_time=hr.EventTime("opens", delay="5 minutes"),
    )
    bids = pipeline.topic(
        "bids",
        schema="bid BIGINT, auction BIGINT, price INT, note STRING, placed TIMESTAMP",
        event_time=hr.EventTime("placed", delay="5 minutes"),
        partitions=2,
        metadata={"part": "_partition", "position": "_offset", "appended": "_timestamp"},
    )
    averages = bids.over("auction", order_by="bid", rows=10).aggregate(
        mean=hr.agg.avg("price * 2"), before=hr.over.lag("upper(note)")
    )
    pipeline.write("averages", averages)
    file = hr.file_table(notes, schema="note STRING, text STRING", key="note")
    noted = bids.with_columns("price + price AS twice").join(file, on="note", how="left")
    texts = noted.select("bid", "twice + 1 AS more", "concat(text, '!') AS text")
    pipeline.write("texts", texts)
    matched = auctions.join(
        bids,
        on="auction",
        before="1 minute",
        since="opens - INTERVAL 5 SECOND",
        until="expires + INTERVAL 5 SECOND",
    )
    best = matched.group_by("auction").aggregate(n=hr.agg.count(), best=hr.agg.max("price"))
    pipeline.view("placed", best)
    return pipeline


def test_frames_and_intervals_on_spark(tmp_path: Path, spark: SparkSession) -> None:
    random = Random(7)
    auctions = [
        {
            "auction": number,
            "opens": (opens := START + timedelta(seconds=random.randrange(60))),
            "expires": opens + timedelta(seconds=random.randrange(60)),
        }
        for number in range(8)
    ]
    bids = [
        {
            "bid": number,
            "auction": random.randrange(8),
            "price": random.randrange(1, 100),
            "note": random.choice(["a", "b", None]),
            "placed": START + timedelta(seconds=random.randrange(120)),
        }
        for number in range(150)
    ]
    notes = tmp_path / "notes.csv"
    notes.write_text("note,text\na,first\n")
    with (
        PipelineTest(market(notes), tmp_path / "test", spark) as test,
        duckdb.connect() as database,
    ):
        test.feed("bids", bids[:80])
        test.feed("auctions", auctions)
        test.settle()
        test.restart(shards=3)
        test.feed("bids", bids[80:])
        test.settle(final=True)
        for name, rows in (("auctions", auctions), ("bids", bids)):
            database.register(name, pa.Table.from_pylist(rows))
        written, stored = (test.log.read(name).to_table() for name in ("averages", "bids"))
        places = written.select(["bid", "part", "position", "appended"])
        known = stored.select(["bid", "_partition", "_offset", "_timestamp"])
        known = known.rename_columns(places.schema.names)
        assert text(places.to_pylist()) == text(known.to_pylist())
        ours = written.select(["bid", "mean", "before"])
        assert text(ours.to_pylist()) == text(rows_of(database, AVERAGES))
        texts = test.log.read("texts").to_table().select(["bid", "more", "text"])
        assert text(texts.to_pylist()) == text(rows_of(database, TEXTS))
        assert text(test.view("placed")) == text(rows_of(database, PLACED))


def rows_of(database: duckdb.DuckDBPyConnection, query: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = database.sql(query).to_arrow_table().to_pylist()
    return rows


def text(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(repr(sorted(row.items())) for row in rows)
