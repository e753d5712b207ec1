"""A pipeline with two views: revenue by region, always consistent as of one tick, and the number of
customers by current city.

Run it from anywhere: python examples/05_pipeline.py. It creates a directory `pipeline-example` and
can be run again: the pipeline resumes where it stopped. The file also works with the commands:

    headrace plan examples/05_pipeline.py
    headrace run examples/05_pipeline.py
"""

from pathlib import Path

import headrace as hr
from headrace.views.reader import ViewReader

HERE = Path("pipeline-example")

shop = hr.Pipeline("shop", log=f"file:{HERE}/log")
orders = shop.topic(
    "orders", schema="order_id BIGINT, region STRING, amount DOUBLE", key="order_id", partitions=2
)
customers = shop.table("customers", schema="customer_id BIGINT, city STRING", key="customer_id")

revenue = (
    orders.where("amount > 0")
    .group_by("region")
    .aggregate(orders=hr.agg.count(), revenue=hr.agg.sum("amount"))
)
shop.view("revenue", revenue)
shop.write("revenue_changes", revenue)
shop.view("cities", customers.group_by("city").aggregate(customers=hr.agg.count()))


def main() -> None:
    HERE.mkdir(exist_ok=True)
    with hr.open_log(f"file:{HERE}/log") as log:
        log.create_topic(
            "orders",
            "order_id BIGINT, region STRING, amount DOUBLE",
            key="order_id",
            partitions=2,
            exist_ok=True,
        )
        log.create_table(
            "customers", "customer_id BIGINT, city STRING", key="customer_id", exist_ok=True
        )
        with log.producer("orders", id="till") as producer:
            rows = [
                {"order_id": n, "region": "north" if n % 3 else "south", "amount": float(n % 7)}
                for n in range(300)
            ]
            producer.append(rows, sequence=0)  # a second run does not store them again
        with log.producer("customers") as producer:
            producer.upsert(
                [{"customer_id": 1, "city": "Oslo"}, {"customer_id": 2, "city": "Oslo"}]
            )
            producer.upsert({"customer_id": 2, "city": "Rome"})

    shop.run(state=HERE / "state", until_caught_up=True)

    with ViewReader(HERE / "state" / "views.db") as views:
        print("revenue as of tick", views.tick("revenue"))
        for row in views.table("revenue").to_pylist():
            print(row)
        cities = {row["city"]: row["customers"] for row in views.table("cities").to_pylist()}
        total = views.sql("SELECT sum(orders) AS orders FROM revenue").to_pylist()[0]["orders"]

    assert total == sum(n % 7 > 0 for n in range(300)), total
    assert cities == {"Oslo": 1, "Rome": 1}, cities
    print("all numbers are correct")


if __name__ == "__main__":
    main()
