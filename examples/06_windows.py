"""Windows over event time: rows arrive out of order, one till holds the watermark back, and a late
row corrects a minute that was already emitted, and the hour that contains it.

Run it from anywhere: python examples/06_windows.py. It creates a directory `windows-example`;
delete it to start over.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import headrace as hr
from headrace.runtime.explain import explain, explanation_text
from headrace.views.reader import ViewReader

HERE = Path("windows-example")
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)

shop = hr.Pipeline("shop", log=f"file:{HERE}/log")
orders = shop.topic(
    "orders",
    schema="region STRING, amount DOUBLE, till STRING, placed_at TIMESTAMP",
    event_time=hr.EventTime("placed_at", delay="10 seconds", producer="till", idle="1 hour"),
)
minutes = (
    orders.window(hr.tumbling("1 minute"), late=hr.late.correct("1 day"))
    .group_by("region")
    .aggregate(revenue=hr.agg.sum("amount"), orders=hr.agg.count())
)
hours = (
    minutes.window(hr.tumbling("1 hour"), late=hr.late.correct("1 day"), emit="changes")
    .group_by("region")
    .aggregate(revenue=hr.agg.sum("revenue"))
)
shop.view("minutes", minutes)
shop.view("hours", hours)


def main() -> None:
    HERE.mkdir(exist_ok=True)
    print("1. Two tills, rows out of order. Till b is behind:")
    feed(("a", 20, 5.0), ("b", 5, 1.0), ("a", 70, 3.0), ("a", 10, 2.0), ("a", 65, 4.0))
    run()
    assert view("minutes") == [], "b may still send rows of the first minute"
    print("  ", why("minutes.window")[2].partition(" A row")[0].partition(", it has")[0])

    print("2. Till b moves on, and the first minute is emitted, with the hour that contains it:")
    feed(("b", 75, 1.0))
    run()
    show("minutes")
    show("hours")

    print("3. A row of the first minute arrives late and corrects both:")
    tick = as_of("minutes")
    feed(("b", 30, 100.0))
    run()
    show_changes("minutes", tick)
    show_changes("hours", tick)
    assert [row["revenue"] for row in view("hours")] == [108.0]


def feed(*rows: tuple[str, int, float]) -> None:
    """Append orders, given as (till, seconds after noon, amount)."""
    with hr.open_log(f"file:{HERE}/log") as log:
        log.create_topic(
            "orders",
            "region STRING, amount DOUBLE, till STRING, placed_at TIMESTAMP",
            exist_ok=True,
        )
        with log.producer("orders") as producer:
            producer.append(
                [
                    {
                        "region": "north",
                        "amount": amount,
                        "till": till,
                        "placed_at": NOON + timedelta(seconds=seconds),
                    }
                    for till, seconds, amount in rows
                ]
            )


def run() -> None:
    shop.run(state=HERE / "state", until_caught_up=True)


def view(name: str) -> list[dict[str, Any]]:
    with ViewReader(HERE / "state" / "views.db") as views:
        rows: list[dict[str, Any]] = views.table(name).to_pylist()
        return rows


def as_of(name: str) -> int:
    with ViewReader(HERE / "state" / "views.db") as views:
        return views.tick(name)


def why(step: str) -> list[str]:
    """The lines that `headrace explain examples/06_windows.py STEP` prints."""
    with hr.open_log(f"file:{HERE}/log") as log:
        return explanation_text(explain(shop.plan(), log, HERE / "state", step))


def show(name: str) -> None:
    for row in view(name):
        print(f"   {name}: {row['window_start']:%H:%M} {row['region']} {row['revenue']:.2f}")


def show_changes(name: str, since: int) -> None:
    with ViewReader(HERE / "state" / "views.db") as views:
        for _, changes in views.changes_since(name, since):
            for row in changes.to_pylist():
                print(
                    f"   {name}: {row['_change_type']} {row['window_start']:%H:%M} {row['region']}"
                    f" {row['revenue']:.2f}"
                )


if __name__ == "__main__":
    main()
