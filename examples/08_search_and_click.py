"""Searches and the clicks on their results: the click-through rate of each query, including
searches without a click.

A search waits ten minutes for its clicks. When the watermark shows that no more can arrive, the
search counts as one without a click: that is what how="left" means here. No search is counted too
early, whichever topic is ahead of the other.

Run it from anywhere: python examples/08_search_and_click.py. It creates a directory
`search-example` and can be run again.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import headrace as hr
from headrace.views.reader import ViewReader

HERE = Path("search-example")
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
SEARCHES, CLICKS = (
    "search BIGINT, query STRING, at TIMESTAMP",
    "search BIGINT, page STRING, at TIMESTAMP",
)

site = hr.Pipeline("site", log=f"file:{HERE}/log")
time = hr.EventTime("at", delay="1 minute")
searches = site.topic("searches", schema=SEARCHES, key="search", event_time=time)
clicks = site.topic("clicks", schema=CLICKS, key="search", event_time=time)

clicked = searches.join(
    clicks, on="search", before="0 seconds", after="10 minutes", how="left", suffix="_of_click"
)
rates = (
    clicked.with_columns(clicked="CASE WHEN page IS NULL THEN NULL ELSE search END")
    .group_by("query")
    .aggregate(searches=hr.agg.count_distinct("search"), clicked=hr.agg.count_distinct("clicked"))
    .with_columns(rate="clicked / searches")
)
site.view("click_through", rates)


def minutes(count: float) -> datetime:
    return NOON + timedelta(minutes=count)


def main() -> None:
    HERE.mkdir(exist_ok=True)
    with hr.open_log(f"file:{HERE}/log") as log:
        log.create_topic("searches", SEARCHES, key="search", exist_ok=True)
        log.create_topic("clicks", CLICKS, key="search", exist_ok=True)
        with (
            log.producer("searches", id="site") as searching,
            log.producer("clicks", id="site") as clicking,
        ):
            rows = [
                {"search": n, "query": "boots" if n % 2 else "rope", "at": minutes(n / 10)}
                for n in range(20)
            ]
            searching.append(rows, sequence=0)
            good = [{"search": n, "page": f"/{n}", "at": minutes(n / 10 + 2)} for n in (1, 3, 4, 5)]
            # A second click of the same search.
            again = [{"search": 1, "page": "/other", "at": minutes(8)}]
            too_late = [{"search": 7, "page": "/7", "at": minutes(15)}]
            clicking.append([*good, *again, *too_late], sequence=0)
            # An hour later someone searches and clicks again, which advances the watermark.
            searching.append([{"search": 99, "query": "lamp", "at": minutes(60)}], sequence=1)
            clicking.append([{"search": 99, "page": "/lamp", "at": minutes(60)}], sequence=1)

    site.run(state=HERE / "state", until_caught_up=True)
    with ViewReader(HERE / "state" / "views.db") as views:
        for row in views.table("click_through").to_pylist():
            print(
                f"{row['query']}: {row['clicked']} of {row['searches']} searches led to a click,"
                f" {row['rate']:.0%}"
            )


if __name__ == "__main__":
    main()
