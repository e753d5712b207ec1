"""Everything the shop's pipeline tells, computed a second time: in plain pandas and Python, in one go, from the rows that are in the log. None of our operators has a part in it."""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta

import pandas as pd

from headrace.demo.recorded import Frame, Recorded

WINDOW, CLICK_WITHIN, FRAUD_WITHIN = "5s", pd.Timedelta(seconds=10), timedelta(minutes=1)
BEST = 5


def taxed_orders(log: Recorded) -> Frame:
    """Each order with its customer as of its tick, the tax rate as of its time, and the window that it belongs to."""
    orders = log.device_rows("orders")
    customers = log.rows("customers").drop_duplicates(["customer_id", "tick"], keep="last")[["tick", "customer_id", "city", "country"]]
    met = pd.merge_asof(orders, customers, on="tick", by="customer_id").dropna(subset="country").sort_values("event_time", kind="stable")
    rates = log.rows("tax_rates").drop_duplicates(["country", "valid_from"], keep="last")[["country", "rate", "valid_from"]].sort_values("valid_from")
    taxed = pd.merge_asof(met, rates, left_on="event_time", right_on="valid_from", by="country").dropna(subset="rate")
    return taxed.assign(tax=taxed["amount"] * taxed["rate"], window_start=taxed["event_time"].dt.floor(WINDOW))


def revenue(taxed: Frame) -> Frame:
    groups = taxed.groupby(["city", "window_start"], as_index=False)
    return groups.agg(orders=("order_id", "count"), revenue=("amount", "sum"), tax=("tax", "sum"))


def late_orders(taxed: Frame, told: Frame) -> Frame:
    """Those that came in a later tick than the one in which their window was first told."""
    arrived = taxed.merge(told, on=["city", "window_start"])
    return arrived[arrived["tick"] > arrived["told_tick"]]


def corrections(late: Frame) -> int:
    """How often a window has to be corrected: once for each tick that brings late orders of it."""
    return len(late.drop_duplicates(["city", "window_start", "tick"]))


def sales(log: Recorded) -> Frame:
    sold = log.rows("orders").groupby("product_id", as_index=False).agg(orders=("order_id", "count"), revenue=("amount", "sum"))
    return log.newest("products", "product_id")[["product_id", "product", "price"]].merge(sold, on="product_id")


def bestsellers(everything: Frame) -> Frame:
    return everything.sort_values(["revenue", "product_id"], ascending=[False, True]).head(BEST)


def click_through(log: Recorded) -> Frame:
    """Each search, with the clicks that came in time: of those there is at most one."""
    searches, clicks = (log.device_rows(topic)[["search_id", "event_time", *more]] for topic, more in (("searches", ["words"]), ("clicks", ["product_id"])))
    pairs = searches.merge(clicks, on="search_id", how="left", suffixes=("", "_of_click"))
    after = pairs["event_time_of_click"] - pairs["event_time"]
    pairs["clicked"] = after.between(pd.Timedelta(0), CLICK_WITHIN)
    return pairs.groupby("words", as_index=False).agg(searches=("search_id", "nunique"), clicks=("clicked", "sum"))


def fraud(log: Recorded) -> list[tuple[str, int, float]]:
    """Three small payments of a card or more, and directly behind them a big one, within a minute: card, small ones, sum of all."""
    found = []
    payments = log.rows("payments").sort_values(["card", "paid_at", "tick", "_offset"], kind="stable")
    for card, rows in payments.groupby("card"):
        amounts, times = rows["amount"].tolist(), rows["paid_at"].tolist()
        at = 0
        while at < len(amounts):
            end = at
            while end < len(amounts) and amounts[end] < 2:
                end += 1
            if end - at >= 3 and end < len(amounts) and amounts[end] > 500 and times[end] - times[at] <= FRAUD_WITHIN:
                found.append((str(card), end - at, round(sum(amounts[at : end + 1]), 2)))
                at = end
            at += 1
    return sorted(found)


def matches(log: Recorded) -> list[tuple[int, str]]:
    """Each article beside the searches that were stored when it came."""
    found, stored = [], dict[str, str]()
    changes = log.rows("subscriptions").assign(is_article=False)
    everything = pd.concat([changes, log.rows("articles").assign(is_article=True)]).sort_values(["tick", "is_article"], kind="stable")
    for row in everything.to_dict("records"):
        if not row["is_article"]:
            stored[row["reader"]] = row["query"]
            continue
        words = set(f"{row['title']} {row['body']}".split())
        found += [(int(row["article_id"]), reader) for reader, query in stored.items() if fits(query, words)]
    return sorted(found)


def fits(query: str, words: set[str]) -> bool:
    """`a AND NOT b OR c`, over a set of words."""
    return any(all((part.removeprefix("NOT ") in words) != part.startswith("NOT ") for part in either.split(" AND ")) for either in query.split(" OR "))


def hesitated(log: Recorded) -> Frame:
    events = log.rows("carts")
    taken = Counter(json.loads(data)["item"] for data in events.loc[events["type"] == "ItemTakenOut", "data"])
    return Frame({"item": list(taken), "times": list(taken.values())}).astype({"item": object, "times": "int64"})
