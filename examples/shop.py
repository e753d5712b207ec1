"""A web shop in one file: everything Headrace does, with the data of a small shop. See it live with
`headrace demo` (or `make demo`), which runs it with simulated customers.

    headrace plan examples/shop.py    shows the steps, their names and their state
    headrace demo                     runs the shop with simulated customers, and the dashboard
    headrace demo --for 30s           does so for half a minute; then computes every number a second
                                      time from the log, and compares

To run it without simulated customers: `headrace run examples/shop.py`. On Kafka and a Spark cluster
only addresses change: docs/how-to/cluster.md.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import headrace as hr
from headrace.events import CommandRefused, Decider

HOME = Path(os.environ.get("SHOP_HOME", "shop-data"))
shop = hr.Pipeline("shop", log=f"file:{HOME}/log")


# 1. Inputs.
#
# Customers and products are in a database, and stay there: its changes are captured.

database = hr.cdc.sqlite(HOME / "shop.db", tables=["customers", "products"])
customers = shop.capture(
    database,
    "customers",
    schema="customer_id BIGINT, customer STRING, city STRING, country STRING",
    key="customer_id",
)
products = shop.capture(
    database, "products", schema="product_id BIGINT, product STRING, price DOUBLE", key="product_id"
)

# Orders, searches and clicks come from devices. Their clocks are wrong, some by years, and now and
# then a device is in a tunnel and sends its rows ten seconds later. Three timestamps show when an
# event really happened: when it happened and when it was sent, by the device's clock, and when it
# was received, by the shop's clock.

TIMES = "device STRING, happened TIMESTAMP, sent TIMESTAMP, received TIMESTAMP"


def from_devices(topic: str, columns: str, *, idle: str) -> hr.Stream:
    """A topic that devices send to, with the corrected time in a column `event_time`. A device that
    is silent for longer than `idle` no longer holds the watermark back.
    """
    times = hr.device_time(
        event="happened",
        sent="sent",
        received="received",
        device="device",
        delay="1 second",
        idle=idle,
        max_ahead="1 day",
    )
    return shop.topic(
        topic,
        schema=f"{columns}, {TIMES}",
        key="device",
        event_time=times,
        partitions=2,
        retention="6 hours",
    )


orders = from_devices(
    "orders",
    "order_id BIGINT, customer_id BIGINT, product_id BIGINT, amount DOUBLE",
    idle="4 seconds",
)
searches = from_devices("searches", "search_id BIGINT, words STRING", idle="10 minutes")
clicks = from_devices("clicks", "search_id BIGINT, product_id BIGINT", idle="10 minutes")

# Payments come from two banks, whose clocks are right. Tax rates are a table whose rows have a
# start of validity.

payments = shop.topic(
    "payments",
    schema="payment_id BIGINT, card STRING, amount DOUBLE, bank STRING, paid_at TIMESTAMP",
    key="card",
    event_time=hr.EventTime(
        "paid_at", delay="2 seconds", producer="bank", idle="10 minutes", max_ahead="1 day"
    ),
    partitions=2,
)
rates = shop.table(
    "tax_rates",
    schema="country STRING, rate DOUBLE, valid_from TIMESTAMP",
    key="country",
    event_time=hr.EventTime("valid_from"),
    history="1 day",
)

# The shop has a magazine. Each reader stores a search, and is notified of articles that match.

articles = shop.topic(
    "articles", schema="article_id BIGINT, title STRING, body STRING", key="article_id"
)
subscriptions = shop.table("subscriptions", schema="reader STRING, query STRING", key="reader")


# 2. Carts, which are event-sourced. A command is decided against the current state of the cart: it
# either stores events, or is refused and stores none.


@dataclass(frozen=True)
class Put:
    item: str


@dataclass(frozen=True)
class TakeOut:
    item: str


@dataclass(frozen=True)
class Buy:
    pass


@dataclass(frozen=True)
class ItemPut:
    item: str


@dataclass(frozen=True)
class ItemTakenOut:
    item: str


@dataclass(frozen=True)
class Bought:
    items: list[str]


@dataclass(frozen=True)
class Cart:
    items: tuple[str, ...] = ()
    is_bought: bool = False


def decide(command: Put | TakeOut | Buy, cart: Cart) -> list[ItemPut | ItemTakenOut | Bought]:
    if cart.is_bought:
        raise CommandRefused("This cart has been bought.")
    if isinstance(command, Put):
        return [ItemPut(command.item)]
    if isinstance(command, TakeOut):
        if command.item not in cart.items:
            raise CommandRefused(f"There is no {command.item} in the cart.")
        return [ItemTakenOut(command.item)]
    if not cart.items:
        raise CommandRefused("The cart is empty.")
    return [Bought(list(cart.items))]


def evolve(cart: Cart, event: ItemPut | ItemTakenOut | Bought) -> Cart:
    if isinstance(event, ItemPut):
        return replace(cart, items=(*cart.items, event.item))
    if isinstance(event, ItemTakenOut):
        at = cart.items.index(event.item)
        return replace(cart, items=cart.items[:at] + cart.items[at + 1 :])
    return replace(cart, is_bought=True)


CARTS = Decider("cart", Cart(), decide, evolve, events=(ItemPut, ItemTakenOut, Bought))
carts = hr.events.stream(shop, "carts")


# 3. Outputs.
#
# Orders are joined with the current row of their customer (a stream and a table), and with the tax
# rate that was valid when the order was placed (a stream and the versions of a table). A window of
# five seconds per city is emitted when the watermark passes its end, and corrected when an order
# arrives late.

taxed = (
    orders.join(customers, on="customer_id", name="with_customer")
    .join(rates.as_of("event_time"), on="country", name="with_tax_rate")
    .with_columns(tax="amount * rate", name="taxed")
)
revenue = (
    taxed.window(hr.tumbling("5 seconds"), late=hr.late.correct("1 hour"))
    .group_by("city")
    .aggregate(orders=hr.agg.count(), revenue=hr.agg.sum("amount"), tax=hr.agg.sum("tax"))
)
shop.view("revenue", revenue)

# Sales per product, joined with the products of the database (a table and a table), and the
# bestsellers: a leaderboard that is correct at every tick.

sold = orders.group_by("product_id").aggregate(orders=hr.agg.count(), revenue=hr.agg.sum("amount"))
sales = products.join(sold, on="product_id")
shop.view("sales", sales)
shop.view("bestsellers", sales.top(5, by=["revenue", "product_id ASC"]))

# Searches, and the clicks that followed within ten seconds (two streams). A search without a click
# is emitted when the watermark shows that none can arrive any more.

searched = searches.select("search_id", "words", "event_time").join(
    clicks.select("search_id", "product_id", "event_time"),
    on="search_id",
    before="0 seconds",
    after="10 seconds",
    how="left",
    suffix="_of_click",
    name="with_click",
)
shop.view(
    "click_through",
    searched.group_by("words").aggregate(
        searches=hr.agg.count(), clicks=hr.agg.count("product_id")
    ),
)

# A stolen card is tried out with small payments before the big one: a pattern, and an alert for
# each match.

fraud = payments.match(
    "small{3,} big",
    define={"small": "amount < 2", "big": "amount > 500"},
    measures={"tries": "count(small.*)", "total": "sum(amount)"},
    within="1 minute",
    name="stolen_cards",
)
shop.alert("fraud", fraud)

# Articles that match a reader's stored search, and items that customers put into their carts and
# took out again.

shop.write("matches", articles.search(subscriptions, query="query", text=["title", "body"]))
hesitated = (
    carts.where("type = 'ItemTakenOut'")
    .group_by(item="get_json_object(data, '$.item')")
    .aggregate(times=hr.agg.count())
)
shop.view("hesitated", hesitated)


if __name__ == "__main__":
    print(shop)
