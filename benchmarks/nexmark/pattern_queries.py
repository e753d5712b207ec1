"""Nexmark's queries of patterns in the bids of one bidder on one auction, with what they are in
Flink's SQL. The tests find the same matches by trying every bid as the first one.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.nexmark.queries import Query, Sources
from headrace.pipeline.stream import Stream

PATTERNS: dict[str, Query] = {}
_Build = Callable[[Sources], Stream]


def _pattern(measures: str, strategy: str, pattern: str, define: str) -> Callable[[_Build], _Build]:
    """Register a query, by the parts of its MATCH_RECOGNIZE."""

    def register(build: _Build) -> _Build:
        text = (
            "SELECT * FROM bid MATCH_RECOGNIZE (PARTITION BY auction, bidder ORDER BY dateTime"
            f" MEASURES {measures} ONE ROW PER MATCH AFTER MATCH {strategy}"
            f" PATTERN {pattern} DEFINE {define})"
        )
        PATTERNS[build.__name__] = Query(build.__name__, build, sql="", flink=text)
        return build

    return register


def _bids(nexmark: Sources) -> Stream:
    return nexmark.bid.select("auction", "bidder", "price", "dateTime").key_by("auction", "bidder")


@_pattern(
    "S.dateTime AS starts, LAST(DOWN.dateTime) AS bottom, LAST(UP.dateTime) AS ends",
    "SKIP TO LAST UP",
    "(S DOWN+ UP)",
    """
    DOWN AS (LAST(DOWN.price, 1) IS NULL AND DOWN.price < S.price)
        OR DOWN.price < LAST(DOWN.price, 1),
    UP AS UP.price > LAST(DOWN.price, 1)
    """,
)
def cep0(nexmark: Sources) -> Stream:
    """Periods in which a bidder's price falls."""
    return _bids(nexmark).match(
        "s down+ up",
        define={
            "down": "price < coalesce(last(down.price, 1), s.price)",
            "up": "price > last(down.price, 1)",
        },
        measures={
            "starts": "s.dateTime",
            "bottom": "last(down.dateTime)",
            "ends": "last(up.dateTime)",
        },
        after_match="skip to last up",
    )


_LOW_AVERAGE = {
    "starts": "first(a.dateTime)",
    "ends": "last(a.dateTime)",
    "avg_price": "avg(a.price)",
}
_LOW_AVERAGE_SQL = (
    "FIRST(A.dateTime) AS starts, LAST(A.dateTime) AS ends, AVG(A.price) AS avg_price"
)


@_pattern(_LOW_AVERAGE_SQL, "SKIP PAST LAST ROW", "(A+ B)", "A AS AVG(A.price) < 10000")
def cep1(nexmark: Sources) -> Stream:
    """The longest periods in which a bidder's average stays low, one after the other."""
    return _bids(nexmark).match("a+ b", define={"a": "avg(a.price) < 10000"}, measures=_LOW_AVERAGE)


@_pattern(_LOW_AVERAGE_SQL, "SKIP TO NEXT ROW", "(A+ B)", "A AS AVG(A.price) < 10000")
def cep2(nexmark: Sources) -> Stream:
    """The longest period in which a bidder's average stays low, from each bid on."""
    return _bids(nexmark).match(
        "a+ b",
        define={"a": "avg(a.price) < 10000"},
        measures=_LOW_AVERAGE,
        after_match="skip to next row",
    )


@_pattern(
    "C.dateTime AS drop_time, A.price - C.price AS drop_diff",
    "SKIP PAST LAST ROW",
    "(A B* C) WITHIN INTERVAL '5' SECOND",
    "B AS B.price > A.price - 50, C AS C.price < A.price - 50",
)
def cep3(nexmark: Sources) -> Stream:
    """The first bid that is far below an earlier one, within five seconds."""
    return _bids(nexmark).match(
        "a b* c",
        define={"b": "price > a.price - 50", "c": "price < a.price - 50"},
        measures={"drop_time": "c.dateTime", "drop_diff": "a.price - c.price"},
        within="5 seconds",
    )
