"""Nexmark's queries on `hr.Pipeline`, each with what it means in SQL.

The SQL is the benchmark's own question in DuckDB's dialect, over all rows at once: what the result
must come to once every row has arrived and event time has ended. `flink` is the same in Flink's
dialect, where that differs. A query takes the three streams and returns a stream or table.

What cannot be said as the benchmark says it is in the nearest form that gives the same rows, and
says so in its docstring. Unbounded joins of streams are joins within ten years, the longest bound:
both sides only insert, and each row is stored once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pyarrow import parquet

import headrace as hr
from benchmarks.nexmark.events import SCHEMAS, side_input
from headrace.operators.file_table import FileTable
from headrace.pipeline.stream import Stream, Table

DELAY = "4 seconds"
ALWAYS = "3650 days"
_MANY = 10_000_000


@dataclass(frozen=True)
class Sources:
    """The streams of one pipeline."""

    pipeline: hr.Pipeline
    person: Stream
    auction: Stream
    bid: Stream

    def side_input(self) -> FileTable:
        """The small table of `events.side_input`, from a file."""
        with TemporaryDirectory(prefix="nexmark-") as directory:
            path = Path(directory) / "side_input.parquet"
            parquet.write_table(side_input(), path)
            return hr.file_table(path, schema="key BIGINT, value STRING", key="key")


@dataclass(frozen=True)
class Query:
    """One of the queries."""

    name: str
    build: Callable[[Sources], Stream | Table]
    sql: str
    flink: str | None
    """The query in Flink's dialect; None where Flink cannot answer it."""
    is_by_arrival: bool = False
    """Whether its time is that of processing."""

    def pipeline(self, *, name: str = "nexmark", partitions: int = 2) -> hr.Pipeline:
        """The pipeline that writes the query's answer to the topic `<name>.answer`.

        Args:
            name: The pipeline's name.
            partitions: Of each topic that is created.

        """
        pipeline = hr.Pipeline(name)
        times = hr.EventTime("dateTime", delay=DELAY, idle="1 day")
        arrival = hr.processing_time("processed_at")
        person, auction, bid = (
            pipeline.topic(
                topic,
                schema=schema,
                event_time=arrival if self.is_by_arrival else times,
                partitions=partitions,
            )
            for topic, schema in SCHEMAS.items()
        )
        sources = Sources(pipeline, person, auction, bid)
        pipeline.write(f"{name}.answer", self.build(sources), partitions=partitions)
        return pipeline


QUERIES: dict[str, Query] = {}
_Build = Callable[[Sources], Stream | Table]


def _query(
    sql: str, flink: str | None = "", *, is_by_arrival: bool = False
) -> Callable[[_Build], _Build]:
    """Register a query. Its text for Flink is that for DuckDB, unless another is given."""

    def register(build: _Build) -> _Build:
        name = build.__name__
        QUERIES[name] = Query(name, build, sql, flink or sql, is_by_arrival)
        if flink is None:
            QUERIES[name] = replace(QUERIES[name], flink=None)
        return build

    return register


@_query("SELECT auction, bidder, price, dateTime, extra FROM bid")
def q0(nexmark: Sources) -> Stream:
    """Pass bids through."""
    return nexmark.bid.select("auction", "bidder", "price", "dateTime", "extra")


@_query("SELECT auction, bidder, 0.908 * price AS price, dateTime, extra FROM bid")
def q1(nexmark: Sources) -> Stream:
    """Dollars to euros."""
    return nexmark.bid.select(
        "auction",
        "bidder",
        "0.908 * price AS price",
        "dateTime",
        "extra",
    )


@_query("SELECT auction, price FROM bid WHERE MOD(auction, 123) = 0")
def q2(nexmark: Sources) -> Stream:
    """The bids on some auctions."""
    return nexmark.bid.where("auction % 123 = 0").select("auction", "price")


@_query(
    """
    SELECT P.name, P.city, P.state, A.id
    FROM auction AS A JOIN person AS P ON A.seller = P.id
    WHERE A.category = 10 AND P.state IN ('OR', 'ID', 'CA')
    """
)
def q3(nexmark: Sources) -> Stream:
    """Who sells in some states and a category. A seller may register after the auction."""
    auctions = nexmark.auction.where("category = 10").select("id", "seller", "dateTime")
    persons = nexmark.person.where("state IN ('OR', 'ID', 'CA')").select(
        "id AS person", "name", "city", "state", "dateTime AS since"
    )
    sold = auctions.join(persons, left_on="seller", right_on="person", within=ALWAYS)
    return sold.select("name", "city", "state", "id")


def _bids_in_time(nexmark: Sources, auction: str, bid: str) -> Stream:
    """Bids with their auctions, while those are open: the stream's columns of either, as text."""
    auctions = nexmark.auction.select("id", "dateTime", "expires", *_names(auction))
    bids = nexmark.bid.select("auction", "price", "dateTime AS bid_dateTime", *_names(bid))
    return auctions.join(bids, left_on="id", right_on="auction", until="expires")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


@_query(
    """
    SELECT category, AVG(final) AS final
    FROM (
        SELECT MAX(B.price) AS final, A.category
        FROM auction A JOIN bid B ON A.id = B.auction
        WHERE B.dateTime BETWEEN A.dateTime AND A.expires
        GROUP BY A.id, A.category
    ) AS Q
    GROUP BY category
    """
)
def q4(nexmark: Sources) -> Table:
    """The average winning price of each category."""
    in_time = _bids_in_time(nexmark, "category", "")
    final = in_time.group_by("id", "category").aggregate(final=hr.agg.max("price"))
    return final.group_by("category").aggregate(final=hr.agg.avg("final"))


_HOP = """
    (SELECT *, UNNEST(range(
        CAST(floor(epoch_ms(dateTime) / 2000) AS BIGINT) * 2000 - 8000,
        CAST(floor(epoch_ms(dateTime) / 2000) AS BIGINT) * 2000 + 2000,
        2000)) AS window_start FROM bid)
"""


@_query(
    f"""
    WITH counts AS (
        SELECT auction, COUNT(*) AS num, window_start FROM {_HOP} AS W
        GROUP BY auction, window_start
    )
    SELECT auction, num FROM counts
    QUALIFY num = MAX(num) OVER (PARTITION BY window_start)
    """,
    """
    SELECT B.auction, B.num
    FROM (
        SELECT auction, COUNT(*) AS num, window_start, window_end
        FROM TABLE(HOP(TABLE bid, DESCRIPTOR(dateTime), INTERVAL '2' SECOND, INTERVAL '10' SECOND))
        GROUP BY auction, window_start, window_end
    ) AS B
    JOIN (
        SELECT MAX(num) AS maxn, window_start, window_end
        FROM (
            SELECT COUNT(*) AS num, window_start, window_end
            FROM TABLE(
                HOP(TABLE bid, DESCRIPTOR(dateTime), INTERVAL '2' SECOND, INTERVAL '10' SECOND))
            GROUP BY auction, window_start, window_end
        ) AS C
        GROUP BY window_start, window_end
    ) AS M
    ON B.window_start = M.window_start AND B.window_end = M.window_end AND B.num >= M.maxn
    """,
)
def q5(nexmark: Sources) -> Table:
    """The auctions with the most bids of the last ten seconds, every two seconds."""
    counts = (
        nexmark.bid.window(hr.hopping("10 seconds", every="2 seconds"))
        .group_by("auction")
        .aggregate(num=hr.agg.count())
    )
    most = counts.group_by("window_start", "window_end").aggregate(maxn=hr.agg.max("num"))
    hottest = counts.join(most, on=["window_start", "window_end"]).where("num >= maxn")
    return hottest.select("auction", "num", "window_start", "window_end")


_WINNING = """
    SELECT A.id, A.itemName, A.description, A.initialBid, A.reserve, A.dateTime, A.expires,
        A.seller, A.category, A.extra, B.auction, B.bidder, B.price, B.dateTime AS bid_dateTime,
        B.extra AS bid_extra
    FROM auction A JOIN bid B ON A.id = B.auction
    WHERE B.dateTime BETWEEN A.dateTime AND A.expires
"""


@_query(
    f"""
    WITH winning AS (
        {_WINNING}
        QUALIFY ROW_NUMBER() OVER (PARTITION BY A.id ORDER BY price DESC, bid_dateTime) = 1
    ), newest AS (
        SELECT seller, price FROM winning
        QUALIFY ROW_NUMBER() OVER (PARTITION BY seller ORDER BY bid_dateTime DESC, id DESC) <= 10
    )
    SELECT seller, AVG(price) AS avg_price FROM newest GROUP BY seller
    """,
    flink=None,
)
def q6(nexmark: Sources) -> Table:
    """The average price of the last ten auctions of each seller.

    The benchmark's SQL has a row for each auction, the average of the ten before it; this is the
    present row of each seller.
    """
    winning = _bids_in_time(nexmark, "seller", "").top(
        1, by=["price", "bid_dateTime ASC"], per="id"
    )
    newest = winning.top(10, by=["bid_dateTime", "id"], per="seller")
    return newest.group_by("seller").aggregate(avg_price=hr.agg.avg("price"))


@_query(
    """
    SELECT auction, price, bidder, dateTime, extra FROM bid
    QUALIFY price = MAX(price) OVER (PARTITION BY floor(epoch_ms(dateTime) / 10000))
    """,
    """
    SELECT B.auction, B.price, B.bidder, B.dateTime, B.extra
    FROM bid B
    JOIN (
        SELECT MAX(price) AS maxprice, window_end
        FROM TABLE(TUMBLE(TABLE bid, DESCRIPTOR(dateTime), INTERVAL '10' SECOND))
        GROUP BY window_start, window_end
    ) AS M
    ON B.price = M.maxprice
    WHERE B.dateTime BETWEEN M.window_end - INTERVAL '10' SECOND AND M.window_end
    """,
)
def q7(nexmark: Sources) -> Stream:
    """The highest bids of each ten seconds: the window's result, joined back to its rows. Its own
    time is the last microsecond of the window.
    """
    highest = nexmark.bid.window(hr.tumbling("10 seconds")).aggregate(maxprice=hr.agg.max("price"))
    bids = nexmark.bid.select("auction", "price", "bidder", "dateTime", "extra")
    return (
        highest.changes()
        .join(
            bids,
            left_on="maxprice",
            right_on="price",
            before="10 seconds",
            since="window_start",
        )
        .select("auction", "price", "bidder", "dateTime", "extra")
    )


@_query(
    """
    SELECT DISTINCT P.id, P.name, time_bucket(INTERVAL '10 seconds', P.dateTime) AS stime
    FROM person P JOIN auction A ON P.id = A.seller
        AND time_bucket(INTERVAL '10 seconds', P.dateTime)
            = time_bucket(INTERVAL '10 seconds', A.dateTime)
    """,
    """
    SELECT P.id, P.name, P.window_start AS stime
    FROM (
        SELECT id, name, window_start, window_end
        FROM TABLE(TUMBLE(TABLE person, DESCRIPTOR(dateTime), INTERVAL '10' SECOND))
        GROUP BY id, name, window_start, window_end
    ) AS P
    JOIN (
        SELECT seller, window_start, window_end
        FROM TABLE(TUMBLE(TABLE auction, DESCRIPTOR(dateTime), INTERVAL '10' SECOND))
        GROUP BY seller, window_start, window_end
    ) AS A
    ON P.id = A.seller AND P.window_start = A.window_start AND P.window_end = A.window_end
    """,
)
def q8(nexmark: Sources) -> Table:
    """Who has registered and sold in the same ten seconds."""
    ten_seconds = hr.tumbling("10 seconds")
    persons = nexmark.person.window(ten_seconds).group_by("id", "name").aggregate(n=hr.agg.count())
    sellers = nexmark.auction.window(ten_seconds).group_by("seller").aggregate(n=hr.agg.count())
    both = persons.join(
        sellers,
        left_on=["id", "window_start", "window_end"],
        right_on=["seller", "window_start", "window_end"],
        suffix="_sold",
    )
    return both.select("id", "name", "window_start AS stime", "window_start", "window_end")


@_query(
    f"""
    {_WINNING}
    QUALIFY ROW_NUMBER() OVER (PARTITION BY A.id ORDER BY price DESC, bid_dateTime) = 1
    """,
    f"""
    SELECT id, itemName, description, initialBid, reserve, dateTime, expires, seller, category,
        extra, auction, bidder, price, bid_dateTime, bid_extra
    FROM (
        SELECT *, ROW_NUMBER() OVER (PARTITION BY id ORDER BY price DESC, bid_dateTime ASC) AS n
        FROM ({_WINNING})
    )
    WHERE n <= 1
    """,
)
def q9(nexmark: Sources) -> Table:
    """The winning bid of each auction."""
    in_time = _bids_in_time(
        nexmark,
        "itemName, description, initialBid, reserve, seller, category, extra",
        "bidder, extra AS bid_extra",
    )
    winning = in_time.top(1, by=["price", "bid_dateTime ASC"], per="id")
    return winning.select(
        "id",
        "itemName",
        "description",
        "initialBid",
        "reserve",
        "dateTime",
        "expires",
        "seller",
        "category",
        "extra",
        "auction",
        "bidder",
        "price",
        "bid_dateTime",
        "bid_extra",
        "rank",
    )


@_query(
    """
    SELECT auction, bidder, price, dateTime, extra,
        strftime(dateTime, '%Y-%m-%d') AS dt, strftime(dateTime, '%H:%M') AS hm
    FROM bid
    """,
    """
    SELECT auction, bidder, price, dateTime, extra,
        DATE_FORMAT(dateTime, 'yyyy-MM-dd') AS dt, DATE_FORMAT(dateTime, 'HH:mm') AS hm
    FROM bid
    """,
)
def q10(nexmark: Sources) -> Stream:
    """Bids with the day and minute that they are filed under. The files are a sink's business: the
    rows are written to a topic, here and for Flink to nowhere.
    """
    return nexmark.bid.select(
        "auction",
        "bidder",
        "price",
        "dateTime",
        "extra",
        "date_format(dateTime, 'yyyy-MM-dd') AS dt",
        "date_format(dateTime, 'HH:mm') AS hm",
    )


@_query(
    """
    WITH begun AS (
        SELECT bidder, dateTime, COALESCE(
            dateTime >= lag(dateTime) OVER w + INTERVAL '10 seconds', true) AS is_new
        FROM bid WINDOW w AS (PARTITION BY bidder ORDER BY dateTime)
    ), numbered AS (
        SELECT bidder, dateTime, SUM(CAST(is_new AS INT)) OVER (
            PARTITION BY bidder ORDER BY dateTime RANGE UNBOUNDED PRECEDING) AS session FROM begun
    )
    SELECT bidder, COUNT(*) AS bid_count, MIN(dateTime) AS starttime,
        MAX(dateTime) + INTERVAL '10 seconds' AS endtime
    FROM numbered GROUP BY bidder, session
    """,
    """
    SELECT bidder, COUNT(*) AS bid_count,
        SESSION_START(dateTime, INTERVAL '10' SECOND) AS starttime,
        SESSION_END(dateTime, INTERVAL '10' SECOND) AS endtime
    FROM bid GROUP BY bidder, SESSION(dateTime, INTERVAL '10' SECOND)
    """,
)
def q11(nexmark: Sources) -> Table:
    """Bids of each session of a bidder."""
    sessions = (
        nexmark.bid.window(hr.session("10 seconds"))
        .group_by("bidder")
        .aggregate(bid_count=hr.agg.count())
    )
    return sessions.select("bidder", "bid_count", "window_start", "window_end")


@_query(
    "SELECT bidder, COUNT(*) AS bid_count FROM bid GROUP BY bidder",
    """
    SELECT bidder, COUNT(*) AS bid_count, window_start AS starttime, window_end AS endtime
    FROM TABLE(TUMBLE(TABLE bid, DESCRIPTOR(p_time), INTERVAL '10' SECOND))
    GROUP BY bidder, window_start, window_end
    """,
    is_by_arrival=True,
)
def q12(nexmark: Sources) -> Table:
    """Bids of each bidder in ten seconds of processing time. The SQL is their sum: which window a
    bid is in depends on when it was processed.
    """
    return (
        nexmark.bid.window(hr.tumbling("10 seconds"))
        .group_by("bidder")
        .aggregate(bid_count=hr.agg.count())
    )


@_query(
    """
    SELECT B.auction, B.bidder, B.price, B.dateTime, S.value
    FROM bid B JOIN side_input S ON MOD(B.auction, 10000) = S.key
    """,
    """
    SELECT B.auction, B.bidder, B.price, B.dateTime, S.`value`
    FROM bid B JOIN side_input FOR SYSTEM_TIME AS OF B.p_time AS S
    ON MOD(B.auction, 10000) = S.`key`
    """,
)
def q13(nexmark: Sources) -> Stream:
    """Bids with a value of a small table in a file."""
    bids = nexmark.bid.select(
        "auction", "bidder", "price", "dateTime", "auction % 10000 AS side_key"
    )
    side = bids.join(nexmark.side_input(), left_on="side_key", right_on="key")
    return side.select("auction", "bidder", "price", "dateTime", "value")


_TIME_TYPE = """
    CASE WHEN HOUR(dateTime) >= 8 AND HOUR(dateTime) <= 18 THEN 'dayTime'
        WHEN HOUR(dateTime) <= 6 OR HOUR(dateTime) >= 20 THEN 'nightTime'
        ELSE 'otherTime' END AS bidTimeType
"""


@_query(
    f"""
    SELECT auction, bidder, 0.908 * price AS price, {_TIME_TYPE}, dateTime,
        extra, CHAR_LENGTH(extra) - CHAR_LENGTH(REPLACE(extra, 'c', '')) AS c_counts
    FROM bid WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000
    """
)
def q14(nexmark: Sources) -> Stream:
    """Bids of some prices with the time of day and how often a letter occurs, for which the
    benchmark has a function of its own.
    """
    return nexmark.bid.where("0.908 * price > 1000000 AND 0.908 * price < 50000000").select(
        "auction",
        "bidder",
        "0.908 * price AS price",
        _TIME_TYPE,
        "dateTime",
        "extra",
        "length(extra) - length(replace(extra, 'c', '')) AS c_counts",
    )


_RANKS = {
    "rank1": "price < 10000",
    "rank2": "price >= 10000 AND price < 1000000",
    "rank3": "price >= 1000000",
}
_RANKED_COUNTS = ",\n".join(
    [
        "COUNT(*) AS total_bids",
        *(f"COUNT(*) FILTER (WHERE {is_in}) AS {rank}_bids" for rank, is_in in _RANKS.items()),
    ]
)
_DISTINCT_COUNTS = ",\n".join(
    text
    for column in ("bidder", "auction")
    for text in [
        f"COUNT(DISTINCT {column}) AS total_{column}s",
        *(
            f"COUNT(DISTINCT {column}) FILTER (WHERE {is_in}) AS {rank}_{column}s"
            for rank, is_in in _RANKS.items()
        ),
    ]
)


def _ranked_counts() -> dict[str, Any]:
    counts: dict[str, Any] = {"total_bids": hr.agg.count()}
    return counts | {f"{rank}_bids": hr.agg.count(where=is_in) for rank, is_in in _RANKS.items()}


def _distinct_counts() -> dict[str, Any]:
    counts: dict[str, Any] = {}
    for column in ("bidder", "auction"):
        counts[f"total_{column}s"] = hr.agg.count_distinct(column, max_values=_MANY)
        for rank, is_in in _RANKS.items():
            counts[f"{rank}_{column}s"] = hr.agg.count_distinct(
                column, where=is_in, max_values=_MANY
            )
    return counts


@_query(
    f"""
    SELECT strftime(dateTime, '%Y-%m-%d') AS day, {_RANKED_COUNTS}, {_DISTINCT_COUNTS}
    FROM bid GROUP BY day
    """,
    f"""
    SELECT DATE_FORMAT(dateTime, 'yyyy-MM-dd') AS `day`, {_RANKED_COUNTS}, {_DISTINCT_COUNTS}
    FROM bid GROUP BY DATE_FORMAT(dateTime, 'yyyy-MM-dd')
    """,
)
def q15(nexmark: Sources) -> Table:
    """Bids, bidders and auctions of each day by price."""
    days = nexmark.bid.group_by(day="date_format(dateTime, 'yyyy-MM-dd')")
    return days.aggregate(**_ranked_counts(), **_distinct_counts())


@_query(
    f"""
    SELECT channel, strftime(dateTime, '%Y-%m-%d') AS day,
        MAX(strftime(dateTime, '%H:%M')) AS minute,
        {_RANKED_COUNTS}, {_DISTINCT_COUNTS}
    FROM bid GROUP BY channel, day
    """,
    f"""
    SELECT channel, DATE_FORMAT(dateTime, 'yyyy-MM-dd') AS `day`,
        MAX(DATE_FORMAT(dateTime, 'HH:mm')) AS `minute`, {_RANKED_COUNTS}, {_DISTINCT_COUNTS}
    FROM bid GROUP BY channel, DATE_FORMAT(dateTime, 'yyyy-MM-dd')
    """,
)
def q16(nexmark: Sources) -> Table:
    """Bids, bidders and auctions of each channel and day by price."""
    days = nexmark.bid.group_by("channel", day="date_format(dateTime, 'yyyy-MM-dd')")
    minute = hr.agg.max("date_format(dateTime, 'HH:mm')")
    return days.aggregate(minute=minute, **_ranked_counts(), **_distinct_counts())


@_query(
    f"""
    SELECT auction, strftime(dateTime, '%Y-%m-%d') AS day, {_RANKED_COUNTS},
        MIN(price) AS min_price, MAX(price) AS max_price,
        AVG(price) AS avg_price, SUM(price) AS sum_price
    FROM bid GROUP BY auction, day
    """,
    f"""
    SELECT auction, DATE_FORMAT(dateTime, 'yyyy-MM-dd') AS `day`, {_RANKED_COUNTS},
        MIN(price) AS min_price, MAX(price) AS max_price, AVG(price) AS avg_price,
        SUM(price) AS sum_price
    FROM bid GROUP BY auction, DATE_FORMAT(dateTime, 'yyyy-MM-dd')
    """,
)
def q17(nexmark: Sources) -> Table:
    """Bids and prices of each auction and day."""
    days = nexmark.bid.group_by("auction", day="date_format(dateTime, 'yyyy-MM-dd')")
    return days.aggregate(
        **_ranked_counts(),
        min_price=hr.agg.min("price"),
        max_price=hr.agg.max("price"),
        avg_price=hr.agg.avg("price"),
        sum_price=hr.agg.sum("price"),
    )


_BID = "auction, bidder, price, channel, url, dateTime, extra"


@_query(
    f"""
    SELECT {_BID} FROM bid
    QUALIFY ROW_NUMBER() OVER (
        PARTITION BY bidder, auction ORDER BY dateTime DESC, arrival DESC) = 1
    """,
    f"""
    SELECT {_BID} FROM (
        SELECT *, ROW_NUMBER() OVER (PARTITION BY bidder, auction ORDER BY dateTime DESC) AS n
        FROM bid)
    WHERE n <= 1
    """,
)
def q18(nexmark: Sources) -> Table:
    """The last bid of each bidder on each auction; of bids at the same time, the last to arrive."""
    return nexmark.bid.last(per=["bidder", "auction"])


@_query(
    f"""
    SELECT {_BID},
        ROW_NUMBER() OVER (PARTITION BY auction ORDER BY price DESC, arrival) AS rank_number
    FROM bid QUALIFY rank_number <= 10
    """,
    f"""
    SELECT {_BID}, rank_number FROM (
        SELECT *, ROW_NUMBER() OVER (PARTITION BY auction ORDER BY price DESC) AS rank_number
        FROM bid)
    WHERE rank_number <= 10
    """,
)
def q19(nexmark: Sources) -> Table:
    """The ten highest bids of each auction; of equal ones, the first to arrive comes first."""
    return nexmark.bid.top(10, by="price", per="auction", rank="rank_number")


@_query(
    """
    SELECT auction, bidder, price, channel, url, B.dateTime AS bid_dateTime, B.extra AS bid_extra,
        itemName, description, initialBid, reserve, A.dateTime AS auction_dateTime, expires, seller,
        category, A.extra AS auction_extra
    FROM bid AS B JOIN auction AS A ON B.auction = A.id
    WHERE A.category = 10
    """
)
def q20(nexmark: Sources) -> Stream:
    """Bids with their auctions, of one category. A bid may come before its auction."""
    bids = nexmark.bid.select(
        "auction", "bidder", "price", "channel", "url", "dateTime AS bid_dateTime",
        "extra AS bid_extra",
    )  # fmt: skip
    auctions = nexmark.auction.where("category = 10").select(
        "id", "itemName", "description", "initialBid", "reserve", "dateTime AS auction_dateTime",
        "expires", "seller", "category", "extra AS auction_extra",
    )  # fmt: skip
    expanded = bids.join(auctions, left_on="auction", right_on="id", within=ALWAYS)
    return expanded.select(
        "auction", "bidder", "price", "channel", "url", "bid_dateTime", "bid_extra", "itemName",
        "description", "initialBid", "reserve", "auction_dateTime", "expires", "seller", "category",
        "auction_extra",
    )  # fmt: skip


_CHANNEL_ID = """
    CASE WHEN lower(channel) = 'apple' THEN '0'
        WHEN lower(channel) = 'google' THEN '1'
        WHEN lower(channel) = 'facebook' THEN '2'
        WHEN lower(channel) = 'baidu' THEN '3'
        ELSE regexp_extract(url, '(&|^)channel_id=([^&]*)', 2) END AS channel_id
"""
_HAS_CHANNEL_ID = """
    regexp_extract(url, '(&|^)channel_id=([^&]*)', 2) <> ''
    OR lower(channel) IN ('apple', 'google', 'facebook', 'baidu')
"""


@_query(
    f"SELECT auction, bidder, price, channel, {_CHANNEL_ID} FROM bid WHERE {_HAS_CHANNEL_ID}",
)
def q21(nexmark: Sources) -> Stream:
    """Bids with the number of their channel."""
    return nexmark.bid.where(_HAS_CHANNEL_ID).select(
        "auction", "bidder", "price", "channel", _CHANNEL_ID
    )


@_query(
    """
    SELECT auction, bidder, price, channel, split_part(url, '/', 4) AS dir1,
        split_part(url, '/', 5) AS dir2, split_part(url, '/', 6) AS dir3
    FROM bid
    """,
    """
    SELECT auction, bidder, price, channel, SPLIT_INDEX(url, '/', 3) AS dir1,
        SPLIT_INDEX(url, '/', 4) AS dir2, SPLIT_INDEX(url, '/', 5) AS dir3
    FROM bid
    """,
)
def q22(nexmark: Sources) -> Stream:
    """Bids with the directories of their url."""
    return nexmark.bid.select(
        "auction",
        "bidder",
        "price",
        "channel",
        "split_part(url, '/', 4) AS dir1",
        "split_part(url, '/', 5) AS dir2",
        "split_part(url, '/', 6) AS dir3",
    )


@_query(
    """
    SELECT bidder, price, channel, url, B.extra AS bid_extra, P.id AS person_id, name, emailAddress,
        creditCard, city, state, P.extra AS person_extra, itemName, description, initialBid,
        reserve, A.dateTime AS auction_dateTime, expires, seller, category,
        A.extra AS auction_extra
    FROM bid B JOIN person P ON P.id = B.bidder JOIN auction A ON A.seller = B.bidder
    """
)
def q23(nexmark: Sources) -> Stream:
    """The bids of persons who sell, too, with all that they sell."""
    bids = nexmark.bid.select(
        "bidder", "price", "channel", "url", "dateTime AS bid_dateTime", "extra AS bid_extra"
    )
    persons = nexmark.person.select(
        "id AS person_id", "name", "emailAddress", "creditCard", "city", "state",
        "dateTime AS person_dateTime", "extra AS person_extra",
    )  # fmt: skip
    auctions = nexmark.auction.select(
        "itemName", "description", "initialBid", "reserve", "dateTime AS auction_dateTime",
        "expires", "seller", "category", "extra AS auction_extra",
    )  # fmt: skip
    known = bids.join(persons, left_on="bidder", right_on="person_id", within=ALWAYS)
    sold = known.join(auctions, left_on="bidder", right_on="seller", within=ALWAYS)
    return sold.select(
        "bidder", "price", "channel", "url", "bid_extra", "person_id", "name", "emailAddress",
        "creditCard", "city", "state", "person_extra", "itemName", "description", "initialBid",
        "reserve", "auction_dateTime", "expires", "seller", "category", "auction_extra",
    )  # fmt: skip
