"""The demo's summary: every number that the pipeline tells beside the same number computed a second time from the log (`recomputed`). A wrong one is remembered."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from headrace.demo import recomputed
from headrace.demo.recorded import Frame, Recorded
from headrace.demo.warehouse import PARCELS
from headrace.demo.world import DATABASE, Sent
from headrace.log.api import Log
from headrace.sinks.view_file import VIEWS_FILE
from headrace.sinks.view_reader import ViewReader

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
    """What to compare: the log, the views, the shop's database, and what the world knows that it did."""

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
        yield Check(f"exactly once: {self.sent.orders:,} orders in, {counted:,} counted", everything and counted == self.sent.orders)
        twice = len(stored) - stored.nunique()
        yield Check(f"repeated: {self.sent.repeats:,} appends were sent twice, as after a lost answer; {twice:,} rows are there twice", twice == 0)
        parcels = self.log.read(PARCELS).to_pandas()["order_id"]
        yield Check(f"transactions: {len(parcels):,} parcels, one for each order", bool(np.array_equal(np.sort(parcels), np.sort(stored))))

    def _windows(self, log: Recorded, views: ViewReader) -> Iterator[Check]:
        """Windows, the clocks of devices, the table as of a tick, and the version as of a time: each order has to be in the right place."""
        taxed = recomputed.taxed_orders(log)
        kept, wanted = _view(views, "revenue"), recomputed.revenue(taxed)
        wrong = differences(kept, wanted, ["city", "window_start"])
        orders, tax = int(kept["orders"].sum()), kept["tax"].sum()
        yield Check(f"windows: {len(kept):,} of 5 seconds and a city, with {orders:,} orders and {tax:,.2f} of tax; {wrong:,} are wrong", not wrong and orders == self.sent.orders)
        told, corrected = _told(views)
        late = recomputed.late_orders(taxed, told)
        expected = recomputed.corrections(late)
        yield Check(f"corrections: {len(late):,} orders came when their window had been told; {corrected:,} corrections, {expected:,} expected", corrected == expected)

    @staticmethod
    def _tables(log: Recorded, views: ViewReader) -> Iterator[Check]:
        kept, wanted = _view(views, "sales"), recomputed.sales(log)
        wrong = differences(kept, wanted, ["product_id"])
        yield Check(f"tables joined: {len(kept):,} products with {kept['revenue'].sum():,.2f} of sales; {wrong:,} are wrong", not wrong)
        best = _view(views, "bestsellers").sort_values("revenue", ascending=False)
        wrong = differences(best, recomputed.bestsellers(wanted), ["product_id"])
        yield Check(f"leaderboard: {', '.join(best['product'])}; {wrong:,} are wrong", not wrong)
        kept, wanted = _view(views, "hesitated"), recomputed.hesitated(log)
        wrong = differences(kept, wanted, ["item"])
        yield Check(f"carts: {len(log.rows('carts')):,} events; things were taken out {kept['times'].sum():,} times; {wrong:,} kinds are wrong", not wrong)

    def _streams(self, log: Recorded, views: ViewReader) -> Iterator[Check]:
        kept, wanted = _view(views, "click_through"), recomputed.click_through(log)
        wrong = differences(kept, wanted, ["words"])
        yield Check(f"streams joined: {kept['searches'].sum():,} searches, {kept['clicks'].sum():,} with a click; {wrong:,} of {len(wanted)} words are wrong", not wrong)
        found = sorted((row["card"], row["tries"], round(row["total"], 2)) for row in self.log.read(FRAUD).to_pylist())
        expected = recomputed.fraud(log)
        yield Check(f"pattern: {len(found):,} stolen cards found, {len(expected):,} there", found == expected)
        told = sum(row["fired"] for row in self.log.read("alerts").to_pylist()) if "alerts" in self.log.topics() else 0
        yield Check(f"alerts: {told:,} told", told == len(expected))
        fitting, wanted_matches = sorted((row["article_id"], row["reader"]) for row in self.log.read("matches").to_pylist()), recomputed.matches(log)
        articles = len(log.rows("articles"))
        yield Check(f"stored searches: {articles:,} articles, {len(fitting):,} matches, {len(wanted_matches):,} expected", fitting == wanted_matches)

    def _database(self, log: Recorded) -> Iterator[Check]:
        wrong = 0
        with closing(sqlite3.connect(self.home / DATABASE)) as database:
            for table, key in (("customers", "customer_id"), ("products", "product_id")):
                there = pd.read_sql_query(f"SELECT * FROM {table}", database)  # noqa: S608  # of two names above
                wrong += differences(log.newest(table, key)[list(there.columns)], there, [key])
        captured = sum((log.rows(table)["_change_type"] == "update_postimage").sum() for table in ("customers", "products"))
        yield Check(f"captured: {captured:,} changes of the database, {self.sent.changes:,} made; {wrong:,} rows differ from it", not wrong and captured == self.sent.changes)
        events = log.rows("carts")
        whole = bool((events.groupby("entity").cumcount() + 1 == events["version"]).all())
        commands = f"{self.sent.commands:,} commands left {len(events):,} events without a gap, {self.sent.refused:,} refused ones none"
        yield Check(f"event sourcing: {commands}", whole and len(events) == self.sent.commands)

    def _damage(self) -> Iterator[Check]:
        if self.log.address.startswith("file:"):
            damaged = sum(each.kind != "ok" for each in self.log.verify())
            yield Check(f"the log, read from end to end: {damaged:,} damaged places", damaged == 0)


def differences(kept: Frame, wanted: Frame, key: list[str]) -> int:
    """How many keys are missing, too many, or have another value."""
    values = [name for name in wanted.columns if name not in key]
    both = kept[[*key, *values]].merge(wanted, on=key, how="outer", suffixes=("", "_wanted"), indicator="where")
    wrong = both["where"] != "both"
    for name in values:
        ours, theirs = both[name], both[f"{name}_wanted"]
        wrong |= ~np.isclose(ours, theirs, rtol=1e-9, atol=0, equal_nan=False) if pd.api.types.is_numeric_dtype(theirs) else ours != theirs
    return int(wrong.sum()) + len(kept) - len(kept.drop_duplicates(key))


def _view(views: ViewReader, name: str) -> Frame:
    frame: Frame = views.table(name).to_pandas()
    return frame


def _told(views: ViewReader) -> tuple[Frame, int]:
    """The tick in which each window was first told, and how many corrections there were."""
    rows = [{**row, "told_tick": tick} for tick, changes in views.changes_since("revenue", 0) for row in changes.to_pylist()]
    changes = Frame(rows, columns=["city", "window_start", "_change_type", "told_tick"])
    told = changes[changes["_change_type"] == "insert"].drop_duplicates(["city", "window_start"])[["city", "window_start", "told_tick"]]
    return told, int((changes["_change_type"] == "update_postimage").sum())
