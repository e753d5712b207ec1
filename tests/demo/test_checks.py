"""The demo's summary: all is well on a good day, and whatever is tampered with is noticed."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest
from shop_demo import checks as recomputed
from shop_demo.checks import Summary, differences
from shop_demo.world import DATABASE

from headrace.log import open_log
from headrace.log.api import Log
from headrace.views.file import ViewTable
from headrace.views.reader import ViewReader
from tests.demo.conftest import Day


@pytest.fixture
def copy(day: Day, tmp_path: Path) -> Iterator[Day]:
    """A copy of the day, to be tampered with."""
    shutil.copytree(day.home, tmp_path / "shop")
    with open_log(f"file:{tmp_path / 'shop' / 'log'}") as log:
        yield Day(tmp_path / "shop", tmp_path / "shop" / "run" / "state", log, day.sent)


def lines(day: Day) -> dict[str, bool]:
    """What each line of the summary is about, and whether it is good."""
    return {
        check.text.partition(":")[0]: check.good
        for check in Summary(day.log, day.state, day.home, day.sent).checks()
    }


def wrong(day: Day) -> set[str]:
    return {about for about, good in lines(day).items() if not good}


def test_on_a_good_day_every_line_is_good(day: Day) -> None:
    checks = list(Summary(day.log, day.state, day.home, day.sent).checks())
    assert [check.text for check in checks if not check.good] == []
    assert (
        checks[0].text
        == f"exactly once: {day.sent.orders:,} orders in, {day.sent.orders:,} counted"
    )
    assert day.sent.orders > 1000
    assert day.sent.repeats > 0
    summary = "\n".join(check.text for check in checks)
    assert "corrections: 0 orders" not in summary
    assert "pattern: 0 stolen" not in summary


VIEWS = [
    ("revenue", "orders", "windows"),
    ("revenue", "tax", "windows"),
    ("sales", "revenue", "tables joined"),
    ("bestsellers", "price", "leaderboard"),
    ("click_through", "clicks", "streams joined"),
    ("hesitated", "times", "carts"),
]


@pytest.mark.parametrize(("view", "column", "about"), VIEWS, ids=lambda value: value)
def test_a_wrong_number_in_a_view_is_noticed(copy: Day, view: str, column: str, about: str) -> None:
    with ViewReader(copy.state / "views.db") as views, views.snapshot() as snap:
        table = ViewTable(snap.view(view))
    name = table.columns[table.info.schema.names.index(column)]
    with closing(sqlite3.connect(copy.state / "views.db")) as file, file:
        file.execute(f"UPDATE {table.table} SET {name} = {name} + 1")
    assert about in wrong(copy)


def test_orders_that_nobody_counted_or_placed_are_noticed(copy: Day) -> None:
    fewer = replace(copy, sent=replace(copy.sent, orders=copy.sent.orders + 7))
    assert {"exactly once", "windows"} <= wrong(fewer)
    _append_again(copy.log, "orders")
    assert {"exactly once", "repeated", "transactions", "windows", "tables joined"} <= wrong(copy)


@pytest.mark.parametrize(
    ("topic", "about"),
    [
        ("parcels", "transactions"),
        ("alert.fraud", "pattern"),
        ("matches", "stored searches"),
        ("carts", "event sourcing"),
        ("alerts", "alerts"),
    ],
)
def test_a_row_too_many_is_noticed(copy: Day, topic: str, about: str) -> None:
    _append_again(copy.log, topic)
    assert about in wrong(copy)


def test_a_change_that_was_not_captured_is_noticed(copy: Day) -> None:
    with closing(sqlite3.connect(copy.home / DATABASE)) as database, database:
        database.execute("UPDATE products SET price = 1 WHERE product_id = 3")
    assert wrong(copy) == {"captured"}


def test_a_flipped_bit_is_noticed(copy: Day) -> None:
    (segment,) = sorted((copy.home / "log" / "topics").glob("parcels~*/0/*.segment"))[:1]
    content = bytearray(segment.read_bytes())
    content[-20] ^= 1
    segment.write_bytes(content)
    with open_log(copy.log.address) as log:
        assert sum(each.kind != "ok" for each in log.verify()) > 0


def _append_again(log: Log, topic: str) -> None:
    """The first row of a topic a second time."""
    rows = log.read(topic).to_table()
    with log.producer(topic) as producer:
        producer.append(
            rows.select([name for name in rows.schema.names if not name.startswith("_")]).slice(
                0, 1
            )
        )


# The second computation itself


def test_differences_are_rows_that_miss_are_too_many_or_have_other_values() -> None:
    wanted = pd.DataFrame({"k": [1, 2, 3], "n": [1.0, 2.0, 3.0], "s": ["a", "b", "c"]})
    assert differences(wanted.sample(frac=1, random_state=0), wanted, ["k"]) == 0
    assert differences(wanted[1:], wanted, ["k"]) == 1
    assert differences(pd.concat([wanted, wanted[:1]]), wanted, ["k"]) == 1
    assert differences(wanted.assign(n=[1.0, 2.0, 3.1]), wanted, ["k"]) == 1
    assert differences(wanted.assign(s=["a", "x", "y"]), wanted, ["k"]) == 2
    assert differences(wanted.assign(n=[float("nan"), 2.0, 3.0]), wanted, ["k"]) == 1


@pytest.mark.parametrize(
    ("query", "fits"),
    [
        ("a", True),
        ("x", False),
        ("a AND b", True),
        ("a AND x", False),
        ("x OR b", True),
        ("a AND NOT b", False),
        ("a AND NOT x", True),
        ("x OR a AND NOT x", True),
    ],
)
def test_stored_searches_are_read_as_they_are_meant(query: str, fits: bool) -> None:
    assert recomputed.fits(query, {"a", "b"}) == fits


class Payments:
    """Stands for the log: payments of cards, by second."""

    def __init__(self, *payments: tuple[str, float, int]) -> None:
        self._payments = payments

    def rows(self, _topic: str) -> pd.DataFrame:
        rows = [
            (card, amount, datetime.fromtimestamp(second, UTC), 1, at)
            for at, (card, amount, second) in enumerate(self._payments)
        ]
        return pd.DataFrame(rows, columns=["card", "amount", "paid_at", "tick", "_offset"])


@pytest.mark.parametrize(
    ("payments", "found"),
    [
        ([("a", 1, 1), ("a", 1, 2), ("a", 1, 3), ("a", 900, 4)], [("a", 3, 903)]),
        ([("a", 1, 3), ("a", 900, 4), ("a", 1, 1), ("a", 1, 2)], [("a", 3, 903)]),
        ([("a", 1, 1), ("a", 1, 2), ("a", 900, 4)], []),
        ([("a", 1, 1), ("a", 1, 2), ("a", 1, 3), ("a", 20, 3), ("a", 900, 4)], []),
        ([("a", 1, 1), ("b", 1, 2), ("a", 1, 2), ("a", 1, 3), ("a", 900, 4)], [("a", 3, 903)]),
        ([("a", 1, 1), ("a", 1, 50), ("a", 1, 51), ("a", 1, 52), ("a", 900, 62)], [("a", 3, 903)]),
        ([("a", 1, 1), ("a", 1, 2), ("a", 1, 3), ("a", 900, 62)], []),
    ],
    ids=[
        "a match",
        "out of order",
        "two are not enough",
        "something between",
        "another card between",
        "the first is too old",
        "too late",
    ],
)
def test_stolen_cards_are_found_by_looking(
    payments: list[tuple[str, float, int]], found: list[tuple[str, int, float]]
) -> None:
    assert recomputed.fraud(Payments(*payments)) == found  # type: ignore[arg-type]
