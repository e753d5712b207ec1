"""Queries compile to the plan of the Python spelling, one case a line or two."""

from collections.abc import Callable
from typing import Any

import pytest

import headrace as hr
from headrace.pipeline.stream import Stream, Table

ORDERS = (
    "order_id BIGINT, customer_id BIGINT, region STRING, amount DOUBLE, placed_at TIMESTAMP,"
    " expires TIMESTAMP, words ARRAY<STRING>, place STRUCT<city: STRING, zip: INT>"
)


class Shop:
    """A pipeline with inputs of each kind."""

    def __init__(self) -> None:
        self.pipeline = hr.Pipeline("shop")
        at = hr.EventTime("placed_at", delay="10 seconds")
        topic, table = self.pipeline.topic, self.pipeline.table
        self.orders = topic("orders", schema=ORDERS, key="order_id", event_time=at)
        self.payments = topic(
            "payments",
            schema="order_id BIGINT, paid DOUBLE, paid_at TIMESTAMP",
            event_time=hr.EventTime("paid_at"),
        )
        self.customers = table(
            "customers", schema="customer_id BIGINT, name STRING, tier STRING", key="customer_id"
        )
        self.prices = table(
            "prices",
            schema="region STRING, rate DOUBLE, valid_from TIMESTAMP",
            key="region",
            event_time="valid_from",
            history="30 days",
        )
        self.searches = table("searches", schema="id BIGINT, query STRING", key="id")


Rows = Stream | Table
Build = Callable[[Shop], Rows]
agg = hr.agg


def hourly(shop: Shop, **window: Any) -> Any:
    return shop.orders.window(hr.tumbling("1 hour"), **window)


TWINS: list[tuple[str, Build]] = [
    # Projections and conditions
    ("SELECT * FROM orders", lambda s: s.orders),
    ("SELECT order_id, amount FROM orders", lambda s: s.orders.select("order_id", "amount")),
    (
        """
        SELECT o.order_id, O.Amount * 2 AS twice FROM orders AS o WHERE o.amount > 3 AND NOT
        region = 'x'
        """,
        lambda s: s.orders.where("amount > 3 AND NOT region = 'x'").select(
            "order_id", "amount * 2 AS twice"
        ),
    ),
    (
        "SELECT *, amount * 2 AS twice FROM orders",
        lambda s: s.orders.with_columns(twice="amount * 2"),
    ),
    (
        "SELECT * EXCEPT (amount, region) FROM orders",
        lambda s: s.orders.select("* EXCEPT (amount, region)"),
    ),
    (
        "SELECT place.city AS city, o.place.zip zip, words[0] AS first FROM orders o",
        lambda s: s.orders.select("place.city AS city", "place.zip AS zip", "words[0] AS first"),
    ),
    (
        """
        SELECT order_id, CASE WHEN amount > 3 THEN 'large' ELSE 'small' END AS size, CAST(amount
        AS INT) AS whole FROM orders WHERE amount BETWEEN 1 AND 2 OR region IN ('a', 'b')
        """,
        lambda s: s.orders.where("amount BETWEEN 1 AND 2 OR region IN ('a', 'b')").select(
            "order_id",
            "CASE WHEN amount > 3 THEN 'large' ELSE 'small' END AS size",
            "CAST(amount AS INT) AS whole",
        ),
    ),
    (
        "SELECT order_id, /* a comment */ array_contains(words, 'x') AS is_it FROM orders -- so",
        lambda s: s.orders.select("order_id", "array_contains(words, 'x') AS is_it"),
    ),
    # Groups
    (
        "SELECT region, count(*) AS n, sum(amount) AS total FROM orders GROUP BY region",
        lambda s: s.orders.group_by("region").aggregate(n=agg.count(), total=agg.sum("amount")),
    ),
    (
        "SELECT region, sum(amount) / count(*) AS mean FROM orders GROUP BY 1 HAVING count(*) > 3",
        lambda s: (
            s.orders.group_by("region")
            .aggregate(sum_amount=agg.sum("amount"), count=agg.count())
            .where("count > 3")
            .select("region", "sum_amount / count AS mean")
        ),
    ),
    (
        "SELECT date(placed_at) AS day, max(amount) AS most FROM orders GROUP BY day",
        lambda s: s.orders.group_by(day="date(placed_at)").aggregate(most=agg.max("amount")),
    ),
    (
        """
        SELECT region, upper(region) AS r, min_by(order_id, amount) AS cheapest FROM orders
        GROUP BY ALL
        """,
        lambda s: s.orders.group_by("region", r="upper(region)").aggregate(
            cheapest=agg.min_by("order_id", "amount")
        ),
    ),
    (
        """
        SELECT count(DISTINCT region) AS regions, count(*) FILTER (WHERE amount > 3) AS large,
        approx_percentile(amount, 0.9) AS p90, first(region) AS f FROM orders
        """,
        lambda s: s.orders.aggregate(
            regions=agg.count_distinct("region"),
            large=agg.count(where="amount > 3"),
            p90=agg.quantiles("amount", 0.9),
            f=agg.first("region"),
        ),
    ),
    (
        "SELECT tier, count(*) AS n FROM customers WHERE name IS NOT NULL GROUP BY tier",
        lambda s: s.customers.where("name IS NOT NULL").group_by("tier").aggregate(n=agg.count()),
    ),
    ("SELECT DISTINCT tier FROM customers", lambda s: s.customers.distinct("tier")),
    ("SELECT tier FROM customers GROUP BY tier", lambda s: s.customers.distinct("tier")),
    # Windows
    (
        """
        SELECT region, window_start, window_end, count(*) AS n FROM TUMBLE(orders, placed_at,
        INTERVAL '1' HOUR) GROUP BY region, window_start, window_end
        """,
        lambda s: hourly(s).group_by("region").aggregate(n=agg.count()),
    ),
    (
        """
        SELECT window_start, window_end, sum(o.amount) AS total FROM TABLE(TUMBLE(TABLE orders,
        DESCRIPTOR(placed_at), INTERVAL 1 HOUR)) o WHERE region = 'x' GROUP BY window_end,
        window_start EMIT CHANGES LATE CORRECT INTERVAL '1' DAY
        """,
        lambda s: (
            s.orders.where("region = 'x'")
            .window(hr.tumbling("1 hour"), late=hr.late.correct("1 day"), emit="changes")
            .aggregate(total=agg.sum("amount"))
        ),
    ),
    (
        """
        SELECT window_start, window_end, count(*) AS n FROM HOP(orders, placed_at, INTERVAL 1
        MINUTE, INTERVAL 10 MINUTES) GROUP BY ALL LATE DIVERT TO late_orders EMIT FINAL
        """,
        lambda s: s.orders.window(
            hr.hopping("10 minutes", every="1 minute"), late=hr.late.divert("late_orders")
        ).aggregate(n=agg.count()),
    ),
    (
        """
        SELECT customer_id, window_start, window_end, count(*) AS n FROM SESSION(orders,
        placed_at, INTERVAL '30 minutes') GROUP BY 1, 2, 3 HAVING n > 2 LATE DROP
        """,
        lambda s: (
            s.orders.window(hr.session("30 minutes"))
            .group_by("customer_id")
            .aggregate(n=agg.count())
            .where("n > 2")
        ),
    ),
    (
        """
        SELECT customer_id, window_start, window_end, avg(amount) AS mean FROM SLIDE(orders,
        placed_at, INTERVAL 1 HOUR) GROUP BY customer_id, window_start, window_end
        """,
        lambda s: (
            s.orders.window(hr.sliding("1 hour"))
            .group_by("customer_id")
            .aggregate(mean=agg.avg("amount"))
        ),
    ),
    (
        """
        SELECT window_start, window_end, count(*) AS n FROM TUMBLE(orders, placed_at, INTERVAL 1
        DAY, timezone => 'Europe/Vienna') WHERE window_start > TIMESTAMP '2026-01-01 00:00:00'
        GROUP BY ALL
        """,
        lambda s: (
            s.orders.window(hr.tumbling("1 day", timezone="Europe/Vienna"))
            .aggregate(n=agg.count())
            .where("window_start > TIMESTAMP '2026-01-01 00:00:00'")
        ),
    ),
    # Joins
    (
        """
        SELECT * FROM orders o JOIN payments p ON o.order_id = p.order_id AND p.paid_at BETWEEN
        o.placed_at - INTERVAL 1 HOUR AND o.placed_at + INTERVAL 1 HOUR
        """,
        lambda s: s.orders.join(s.payments, on="order_id", within="1 hour"),
    ),
    (
        """
        SELECT o.order_id, amount, paid FROM orders o LEFT JOIN payments p ON o.order_id =
        p.order_id AND p.paid_at BETWEEN o.placed_at AND o.placed_at + INTERVAL 1 HOUR AND
        p.paid > 1
        """,
        lambda s: s.orders.join(
            s.payments.where("paid > 1"),
            on="order_id",
            before="0 seconds",
            after="1 hour",
            how="left",
        ).select("order_id", "amount", "paid"),
    ),
    (
        """
        SELECT o.order_id, p.paid FROM orders o, payments p WHERE o.order_id = p.order_id AND
        p.paid_at >= o.placed_at AND p.paid_at < o.placed_at + INTERVAL '10' MINUTE AND paid >
        amount
        """,
        lambda s: (
            s.orders.join(
                s.payments, on="order_id", before="0 seconds", after="599999999 microseconds"
            )
            .where("paid > amount")
            .select("order_id", "paid")
        ),
    ),
    (
        """
        SELECT * FROM orders o JOIN payments p ON o.order_id = p.order_id AND p.paid_at BETWEEN
        o.placed_at AND o.expires
        """,
        lambda s: s.orders.join(s.payments, on="order_id", before="0 seconds", until="expires"),
    ),
    (
        "SELECT order_id, name FROM orders LEFT JOIN customers USING (customer_id)",
        lambda s: s.orders.join(s.customers, on="customer_id", how="left").select(
            "order_id", "name"
        ),
    ),
    (
        "SELECT o.order_id, c.name FROM customers c JOIN orders o ON c.customer_id = o.customer_id",
        lambda s: s.orders.join(s.customers, on="customer_id").select("order_id", "name"),
    ),
    (
        """
        SELECT order_id, amount * rate AS local FROM orders o JOIN prices FOR SYSTEM_TIME AS OF
        o.placed_at AS p ON o.region = p.region
        """,
        lambda s: s.orders.join(s.prices.as_of("placed_at"), on="region").select(
            "order_id", "amount * rate AS local"
        ),
    ),
    (
        """
        WITH spent AS (SELECT customer_id, sum(amount) AS total FROM orders GROUP BY
        customer_id) SELECT * FROM customers c LEFT JOIN spent ON c.customer_id =
        spent.customer_id
        """,
        lambda s: s.customers.join(
            s.orders.group_by("customer_id").aggregate(total=agg.sum("amount")),
            on="customer_id",
            how="left",
        ),
    ),
    (
        """
        SELECT a.customer_id, b.customer_id AS other, a.tier FROM customers a JOIN customers b
        ON a.tier = b.tier
        """,
        lambda s: s.customers.join(s.customers, on="tier", suffix="_b").select(
            "customer_id", "customer_id_b AS other", "tier"
        ),
    ),
    # Rows by their number
    (
        """
        SELECT * FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY region ORDER BY amount DESC) AS
        rank FROM orders) WHERE rank <= 3
        """,
        lambda s: s.orders.top(3, by="amount", per="region"),
    ),
    (
        """
        SELECT * FROM orders QUALIFY ROW_NUMBER() OVER (PARTITION BY customer_id ORDER BY
        placed_at DESC) = 1
        """,
        lambda s: s.orders.last(per="customer_id"),
    ),
    (
        """
        SELECT * EXCEPT (n) FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY customer_id ORDER BY
        placed_at) AS n FROM orders) AS numbered WHERE numbered.n < 2
        """,
        lambda s: s.orders.first(per="customer_id"),
    ),
    (
        """
        SELECT * FROM orders QUALIFY ROW_NUMBER() OVER (PARTITION BY customer_id ORDER BY amount
        DESC, placed_at ASC) = 1
        """,
        lambda s: s.orders.first(per="customer_id", by=["amount DESC", "placed_at"]),
    ),
    (
        """
        SELECT customer_id, name, tier FROM (SELECT *, ROW_NUMBER() OVER (ORDER BY name ASC) AS
        n FROM customers) WHERE n <= 10
        """,
        lambda s: s.customers.top(10, by="name ASC"),
    ),
    (
        "SELECT * FROM customers ORDER BY name, tier DESC LIMIT 5",
        lambda s: s.customers.top(5, by=["name ASC", "tier"]),
    ),
    (
        """
        SELECT *, lag(amount) OVER w AS previous, sum(amount) OVER (PARTITION BY customer_id
        ORDER BY placed_at ROWS BETWEEN 9 PRECEDING AND CURRENT ROW) AS total FROM orders WINDOW
        w AS (PARTITION BY customer_id ORDER BY placed_at)
        """,
        lambda s: (
            s.orders.over("customer_id")
            .aggregate(previous=hr.over.lag("amount"))
            .over("customer_id", rows=10)
            .aggregate(total=agg.sum("amount"))
        ),
    ),
    (
        """
        SELECT *, avg(amount) OVER (PARTITION BY region ORDER BY placed_at, order_id DESC RANGE
        BETWEEN INTERVAL 1 HOUR PRECEDING AND CURRENT ROW) AS mean FROM orders
        """,
        lambda s: s.orders.over("region", range="1 hour", order_by="order_id desc").aggregate(
            mean=agg.avg("amount")
        ),
    ),
    # Unions, filters by queries, and the rest
    (
        """
        SELECT order_id, amount FROM orders WHERE region = 'a' UNION ALL SELECT order_id, paid
        FROM payments
        """,
        lambda s: (
            s.orders.where("region = 'a'")
            .select("order_id", "amount")
            .union(s.payments.select("order_id", "paid").select("order_id", "paid AS amount"))
        ),
    ),
    (
        """
        SELECT * FROM customers WHERE customer_id IN (SELECT customer_id FROM customers WHERE
        tier = 'gold')
        """,
        lambda s: s.customers.join(
            s.customers.where("tier = 'gold'").select("customer_id").distinct("customer_id"),
            on="customer_id",
        ),
    ),
    (
        "SELECT * FROM CHANGES OF customers WHERE change_type = 'delete'",
        lambda s: s.customers.changes().where("change_type = 'delete'"),
    ),
    (
        "SELECT * FROM SEARCH(orders, searches, query => query, text => region)",
        lambda s: s.orders.search(s.searches, query="query", text="region"),
    ),
    (
        "SELECT order_id, word FROM orders LATERAL VIEW explode(words) w AS word",
        lambda s: s.orders.explode("words", "word").select("order_id", "word"),
    ),
    (
        """
        SELECT * FROM orders MATCH_RECOGNIZE (PARTITION BY customer_id ORDER BY placed_at
        MEASURES sum(amount) AS total PATTERN (a b) DEFINE b AS amount > a.amount) WHERE total >
        10
        """,
        lambda s: (
            s.orders.key_by("customer_id")
            .match("a b", define={"b": "amount > a.amount"}, measures={"total": "sum(amount)"})
            .where("total > 10")
        ),
    ),
]


@pytest.mark.parametrize(
    ("query", "build"), TWINS, ids=[" ".join(query.split())[:60] for query, _ in TWINS]
)
def test_a_query_has_the_plan_of_its_python_twin(query: str, build: Build) -> None:
    shop = Shop()
    found = shop.pipeline.sql(" ".join(query.split()))
    expected = build(shop)
    assert str(shop.pipeline.plan_of(found)) == str(shop.pipeline.plan_of(expected))
    assert found.step == expected.step
    assert type(found) is type(expected)
