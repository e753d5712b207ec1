"""The demo's summary: every number that the pipeline emits, and the same number computed a second
time from the log (`recomputed`). A wrong one is remembered.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from headrace.log.api import Log
from headrace.views.file import VIEWS_FILE
from headrace.views.reader import ViewReader
from shop_demo.world import DATABASE, PARCELS, Sent

# The log as plain tables, each row with the tick that it was taken in with: what the second
# computation starts from. It uses the recorded ticks and nothing of the engine.


Frame = pd.DataFrame
Row = dict[str, Any]


class Recorded:
    """Topics as DataFrames, in the pipeline's order; `tick` is added: which one a row belongs
    to.
    """

    def __init__(self, log: Log, pipeline: str) -> None:
        self._log = log
        self._ticks = list(_ticks(log.read(f"__ticks.{pipeline}").to_pylist()))

    def rows(self, topic: str) -> Frame:
        """All rows that were ever appended to a topic."""
        frame = self._log.read(topic).to_pandas()
        frame["tick"] = 0
        for partition in frame["_partition"].unique():
            which = frame["_partition"] == partition
            ends = [ends.get(topic, {}).get(str(partition), 0) for _, ends in self._ticks]
            frame.loc[which, "tick"] = np.searchsorted(
                ends, frame.loc[which, "_offset"].to_numpy(), side="right"
            )
        return frame.sort_values(["tick", "_partition", "_offset"], kind="stable").reset_index(
            drop=True
        )

    def device_rows(self, topic: str) -> Frame:
        """With the time at which things happened: by the device's clock, and corrected by how far
        that was off when the row was sent.
        """
        frame = self.rows(topic)
        frame["event_time"] = frame["happened"] + (frame["received"] - frame["sent"])
        return frame

    def newest(self, topic: str, key: str) -> Frame:
        """What a table's topic amounts to."""
        return (
            self.rows(topic)
            .drop_duplicates(key, keep="last")
            .sort_values(key)
            .reset_index(drop=True)
        )


def _ticks(rows: list[Row]) -> list[tuple[int, dict[str, dict[str, int]]]]:
    """Number and ends of each tick. Most are recorded as what changed since the one before."""
    found: list[tuple[int, dict[str, dict[str, int]]]] = []
    ends: dict[str, dict[str, int]] = {}
    for row in sorted(rows, key=lambda row: int(row["tick"])):
        changed = json.loads(row["ends"])
        ends = {
            topic: {**ends.get(topic, {}), **changed.get(topic, {})}
            for topic in {**ends, **changed}
        }
        found.append((row["tick"], ends))
    return found


# Everything the shop's pipeline emits, computed a second time: in plain pandas and Python, in one
# go, from the rows that are in the log. None of our operators has a part in it.


WINDOW, CLICK_WITHIN, FRAUD_WITHIN = "5s", pd.Timedelta(seconds=10), timedelta(minutes=1)
BEST = 5


def taxed_orders(log: Recorded) -> Frame:
    """Each order with its customer as of its tick, the tax rate as of its time, and the window that
    it belongs to.
    """
    orders = log.device_rows("orders")
    customers = log.rows("customers").drop_duplicates(["customer_id", "tick"], keep="last")[
        ["tick", "customer_id", "city", "country"]
    ]
    met = (
        pd.merge_asof(orders, customers, on="tick", by="customer_id")
        .dropna(subset="country")
        .sort_values("event_time", kind="stable")
    )
    rates = (
        log.rows("tax_rates")
        .drop_duplicates(["country", "valid_from"], keep="last")[["country", "rate", "valid_from"]]
        .sort_values("valid_from")
    )
    taxed = pd.merge_asof(
        met, rates, left_on="event_time", right_on="valid_from", by="country"
    ).dropna(subset="rate")
    return taxed.assign(
        tax=taxed["amount"] * taxed["rate"], window_start=taxed["event_time"].dt.floor(WINDOW)
    )


def revenue(taxed: Frame) -> Frame:
    groups = taxed.groupby(["city", "window_start"], as_index=False)
    return groups.agg(orders=("order_id", "count"), revenue=("amount", "sum"), tax=("tax", "sum"))


def late_orders(taxed: Frame, emitted: Frame) -> Frame:
    """Those that came in a later tick than the one in which their window was first emitted."""
    arrived = taxed.merge(emitted, on=["city", "window_start"])
    return arrived[arrived["tick"] > arrived["emitted_tick"]]


def corrections(late: Frame) -> int:
    """How often a window has to be corrected: once for each tick that brings late orders of it."""
    return len(late.drop_duplicates(["city", "window_start", "tick"]))


def sales(log: Recorded) -> Frame:
    sold = (
        log.rows("orders")
        .groupby("product_id", as_index=False)
        .agg(orders=("order_id", "count"), revenue=("amount", "sum"))
    )
    return log.newest("products", "product_id")[["product_id", "product", "price"]].merge(
        sold, on="product_id"
    )


def bestsellers(everything: Frame) -> Frame:
    return everything.sort_values(["revenue", "product_id"], ascending=[False, True]).head(BEST)


def click_through(log: Recorded) -> Frame:
    """Each search, with the clicks that came in time: of those there is at most one."""
    searches, clicks = (
        log.device_rows(topic)[["search_id", "event_time", *more]]
        for topic, more in (("searches", ["words"]), ("clicks", ["product_id"]))
    )
    pairs = searches.merge(clicks, on="search_id", how="left", suffixes=("", "_of_click"))
    after = pairs["event_time_of_click"] - pairs["event_time"]
    pairs["clicked"] = after.between(pd.Timedelta(0), CLICK_WITHIN)
    return pairs.groupby("words", as_index=False).agg(
        searches=("search_id", "nunique"), clicks=("clicked", "sum")
    )


def fraud(log: Recorded) -> list[tuple[str, int, float]]:
    """Three small payments of a card or more, and directly behind them a big one, within a minute:
    card, small ones, sum of all.
    """
    found = []
    payments = log.rows("payments").sort_values(
        ["card", "paid_at", "tick", "_offset"], kind="stable"
    )
    for card, rows in payments.groupby("card"):
        amounts, times = rows["amount"].tolist(), rows["paid_at"].tolist()
        at = 0
        while at < len(amounts):
            end = at
            while end < len(amounts) and amounts[end] < 2:
                end += 1
            if (
                end - at >= 3
                and end < len(amounts)
                and amounts[end] > 500
                and times[end] - times[at] <= FRAUD_WITHIN
            ):
                found.append((str(card), end - at, round(sum(amounts[at : end + 1]), 2)))
                at = end
            at += 1
    return sorted(found)


def matches(log: Recorded) -> list[tuple[int, str]]:
    """Each article with the searches that were stored when it came."""
    found, stored = [], dict[str, str]()
    changes = log.rows("subscriptions").assign(is_article=False)
    everything = pd.concat([changes, log.rows("articles").assign(is_article=True)]).sort_values(
        ["tick", "is_article"], kind="stable"
    )
    for row in everything.to_dict("records"):
        if not row["is_article"]:
            stored[row["reader"]] = row["query"]
            continue
        words = set(f"{row['title']} {row['body']}".split())
        found += [
            (int(row["article_id"]), reader)
            for reader, query in stored.items()
            if fits(query, words)
        ]
    return sorted(found)


def fits(query: str, words: set[str]) -> bool:
    """`a AND NOT b OR c`, over a set of words."""
    return any(
        all(
            (part.removeprefix("NOT ") in words) != part.startswith("NOT ")
            for part in either.split(" AND ")
        )
        for either in query.split(" OR ")
    )


def hesitated(log: Recorded) -> Frame:
    events = log.rows("carts")
    taken = Counter(
        json.loads(data)["item"] for data in events.loc[events["type"] == "ItemTakenOut", "data"]
    )
    return Frame({"item": list(taken), "times": list(taken.values())}).astype(
        {"item": object, "times": "int64"}
    )


PIPELINE, FRAUD = "shop", "alert.fraud"


@dataclass(frozen=True)
class Check:
    """One line of the summary."""

    text: str
    good: bool

    def __str__(self) -> str:
        return f"  {'ok ' if self.good else 'BAD'} {self.text}"


@dataclass(frozen=True)
class Summary:
    """What to compare: the log, the views, the shop's database, and what the world knows that it
    did.
    """

    log: Log
    state: Path
    home: Path
    sent: Sent

    def checks(self) -> Iterator[Check]:
        log = Recorded(self.log, PIPELINE)
        with ViewReader(self.state / VIEWS_FILE) as views:
            yield from self._orders(log, views)
            yield from self._windows(log, views)
            yield from self._tables(log, views)
            yield from self._streams(log, views)
        yield from self._database(log)
        yield from self._damage()

    def _orders(self, log: Recorded, views: ViewReader) -> Iterator[Check]:
        stored = log.rows("orders")["order_id"]
        counted = int(_view(views, "sales")["orders"].sum())
        everything = bool(np.array_equal(np.sort(stored), np.arange(self.sent.orders)))
        yield Check(
            f"exactly once: {self.sent.orders:,} orders in, {counted:,} counted",
            everything and counted == self.sent.orders,
        )
        twice = len(stored) - stored.nunique()
        yield Check(
            f"repeated: {self.sent.repeats:,} appends were sent twice, as after a lost answer;"
            f" {twice:,} rows are there twice",
            twice == 0,
        )
        parcels = self.log.read(PARCELS).to_pandas()["order_id"]
        yield Check(
            f"transactions: {len(parcels):,} parcels, one for each order",
            bool(np.array_equal(np.sort(parcels), np.sort(stored))),
        )

    def _windows(self, log: Recorded, views: ViewReader) -> Iterator[Check]:
        """Windows, the clocks of devices, the table as of a tick, and the version as of a time:
        each order has to be in the right place.
        """
        taxed = taxed_orders(log)
        kept, wanted = _view(views, "revenue"), revenue(taxed)
        wrong = differences(kept, wanted, ["city", "window_start"])
        orders, tax = int(kept["orders"].sum()), kept["tax"].sum()
        yield Check(
            f"windows: {len(kept):,} of 5 seconds and a city, with {orders:,} orders and {tax:,.2f}"
            f" of tax; {wrong:,} are wrong",
            not wrong and orders == self.sent.orders,
        )
        emitted, corrected = _emitted(views)
        late = late_orders(taxed, emitted)
        expected = corrections(late)
        yield Check(
            f"corrections: {len(late):,} orders came after their window was emitted; {corrected:,}"
            f" corrections, {expected:,} expected",
            corrected == expected,
        )

    @staticmethod
    def _tables(log: Recorded, views: ViewReader) -> Iterator[Check]:
        kept, wanted = _view(views, "sales"), sales(log)
        wrong = differences(kept, wanted, ["product_id"])
        yield Check(
            f"tables joined: {len(kept):,} products with {kept['revenue'].sum():,.2f} of sales;"
            f" {wrong:,} are wrong",
            not wrong,
        )
        best = _view(views, "bestsellers").sort_values("revenue", ascending=False)
        wrong = differences(best, bestsellers(wanted), ["product_id"])
        yield Check(f"leaderboard: {', '.join(best['product'])}; {wrong:,} are wrong", not wrong)
        kept, wanted = _view(views, "hesitated"), hesitated(log)
        wrong = differences(kept, wanted, ["item"])
        yield Check(
            f"carts: {len(log.rows('carts')):,} events; things were taken out"
            f" {kept['times'].sum():,} times; {wrong:,} kinds are wrong",
            not wrong,
        )

    def _streams(self, log: Recorded, views: ViewReader) -> Iterator[Check]:
        kept, wanted = _view(views, "click_through"), click_through(log)
        wrong = differences(kept, wanted, ["words"])
        yield Check(
            f"streams joined: {kept['searches'].sum():,} searches, {kept['clicks'].sum():,} with a"
            f" click; {wrong:,} of {len(wanted)} words are wrong",
            not wrong,
        )
        found = sorted(
            (row["card"], row["tries"], round(row["total"], 2))
            for row in self.log.read(FRAUD).to_pylist()
        )
        expected = fraud(log)
        yield Check(
            f"pattern: {len(found):,} stolen cards found, {len(expected):,} there",
            found == expected,
        )
        emitted = (
            sum(row["fired"] for row in self.log.read("alerts").to_pylist())
            if "alerts" in self.log.topics()
            else 0
        )
        yield Check(f"alerts: {emitted:,} emitted", emitted == len(expected))
        fitting, wanted_matches = (
            sorted(
                (row["article_id"], row["reader"]) for row in self.log.read("matches").to_pylist()
            ),
            matches(log),
        )
        articles = len(log.rows("articles"))
        yield Check(
            f"stored searches: {articles:,} articles, {len(fitting):,} matches,"
            f" {len(wanted_matches):,} expected",
            fitting == wanted_matches,
        )

    def _database(self, log: Recorded) -> Iterator[Check]:
        wrong = 0
        with closing(sqlite3.connect(self.home / DATABASE)) as database:
            for table, key in (("customers", "customer_id"), ("products", "product_id")):
                there = pd.read_sql_query(f"SELECT * FROM {table}", database)  # of two names above
                wrong += differences(log.newest(table, key)[list(there.columns)], there, [key])
        captured = sum(
            (log.rows(table)["_change_type"] == "update_postimage").sum()
            for table in ("customers", "products")
        )
        yield Check(
            f"captured: {captured:,} changes of the database, {self.sent.changes:,} made; {wrong:,}"
            " rows differ from it",
            not wrong and captured == self.sent.changes,
        )
        events = log.rows("carts")
        whole = bool((events.groupby("entity").cumcount() + 1 == events["version"]).all())
        commands = (
            f"{self.sent.commands:,} commands left {len(events):,} events without a gap,"
            f" {self.sent.refused:,} refused ones none"
        )
        yield Check(f"event sourcing: {commands}", whole and len(events) == self.sent.commands)

    def _damage(self) -> Iterator[Check]:
        if self.log.address.startswith("file:"):
            damaged = sum(each.kind != "ok" for each in self.log.verify())
            yield Check(f"the log, read from end to end: {damaged:,} damaged places", damaged == 0)


def differences(kept: Frame, wanted: Frame, key: list[str]) -> int:
    """How many keys are missing, too many, or have another value."""
    values = [name for name in wanted.columns if name not in key]
    both = kept[[*key, *values]].merge(
        wanted, on=key, how="outer", suffixes=("", "_wanted"), indicator="where"
    )
    wrong = both["where"] != "both"
    for name in values:
        ours, theirs = both[name], both[f"{name}_wanted"]
        wrong |= (
            ~np.isclose(ours, theirs, rtol=1e-9, atol=0, equal_nan=False)
            if pd.api.types.is_numeric_dtype(theirs)
            else ours != theirs
        )
    return int(wrong.sum()) + len(kept) - len(kept.drop_duplicates(key))


def _view(views: ViewReader, name: str) -> Frame:
    frame: Frame = views.table(name).to_pandas()
    return frame


def _emitted(views: ViewReader) -> tuple[Frame, int]:
    """The tick in which each window was first emitted, and how many corrections there were."""
    rows = [
        {**row, "emitted_tick": tick}
        for tick, changes in views.changes_since("revenue", 0)
        for row in changes.to_pylist()
    ]
    changes = Frame(rows, columns=["city", "window_start", "_change_type", "emitted_tick"])
    emitted = changes[changes["_change_type"] == "insert"].drop_duplicates(
        ["city", "window_start"]
    )[["city", "window_start", "emitted_tick"]]
    return emitted, int((changes["_change_type"] == "update_postimage").sum())
