"""Orders with the tax rate at the time of sale, in whatever order rows arrive: an order that
arrives late gets the rate of its own day, not the newest rate.

Rates are a table whose versions have a start of validity. An order waits until the table's
watermark has passed it, and is then joined with the version that was valid when it was placed.
`history()` shows all versions, each with the end of its validity.

Run it from anywhere: python examples/09_tax_at_sale.py. It creates a directory `tax-example` and
can be run again.
"""

from datetime import UTC, datetime
from pathlib import Path

import headrace as hr
from headrace.views.reader import ViewReader

HERE = Path("tax-example")
ORDERS = "order_id BIGINT, region STRING, amount DOUBLE, placed_at TIMESTAMP"
RATES = "region STRING, rate DOUBLE, valid_from TIMESTAMP"

shop = hr.Pipeline("shop", log=f"file:{HERE}/log")
orders = shop.topic("orders", schema=ORDERS, key="order_id", event_time=hr.EventTime("placed_at"))
rates = shop.table(
    "rates", schema=RATES, key="region", event_time=hr.EventTime("valid_from"), history="1000 days"
)

taxed = orders.join(rates.as_of("placed_at"), on="region", how="left").with_columns(
    tax="round(amount * rate, 2)"
)
shop.view("receipts", taxed.to_table("order_id"))
shop.view("rate_history", rates.history())


def day(month: int, number: int) -> datetime:
    return datetime(2025, month, number, tzinfo=UTC)


def main() -> None:
    HERE.mkdir(exist_ok=True)
    with hr.open_log(f"file:{HERE}/log") as log:
        log.create_topic("orders", ORDERS, key="order_id", exist_ok=True)
        log.create_table("rates", RATES, key="region", exist_ok=True)
        with (
            log.producer("rates", id="treasury") as changing,
            log.producer("orders", id="till") as selling,
        ):
            known = [("eu", 0.20, day(1, 1)), ("eu", 0.25, day(7, 1)), ("us", 0.05, day(1, 1))]
            changing.upsert(
                [
                    {"region": region, "rate": rate, "valid_from": since}
                    for region, rate, since in known
                ],
                sequence=0,
            )
            sold = [
                (1, "eu", day(6, 30)),
                (2, "eu", day(7, 1)),
                (3, "us", day(8, 1)),
                (4, "eu", day(3, 1)),
                (5, "mars", day(8, 1)),
            ]
            selling.append(
                [
                    {"order_id": n, "region": region, "amount": 100.0, "placed_at": at}
                    for n, region, at in sold
                ],
                sequence=0,
            )

    shop.run(state=HERE / "state", until_caught_up=True)
    with ViewReader(HERE / "state" / "views.db") as views:
        for row in views.table("receipts").to_pylist():
            print(
                f"order {row['order_id']} of {row['placed_at']:%d %B} in {row['region']}: tax"
                f" {row['tax']}"
            )
        for row in views.table("rate_history").to_pylist():
            print(
                f"{row['region']} {row['rate']} from {row['valid_from']:%d %B} to"
                f" {row['valid_to'] and format(row['valid_to'], '%d %B')}"
            )


if __name__ == "__main__":
    main()
