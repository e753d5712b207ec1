"""The guide's examples of windows and joins, spelled in SQL over the topics of their pages: the
same steps.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import run_page

OVER_ORDERS = "PARTITION BY region ORDER BY placed_at"
TUMBLING = "TUMBLE(orders, placed_at, INTERVAL 1 MINUTE)"
BOUNDS = "window_start, window_end"
TWINS: dict[str, tuple[str, dict[str, str]]] = {
    "concepts/windows.md": (
        "shop",
        {
            "revenue": f"""
                SELECT region, {BOUNDS}, sum(amount) AS revenue, count(*) AS orders
                FROM {TUMBLING} GROUP BY region, {BOUNDS} LATE CORRECT INTERVAL 1 HOUR
            """,
            "days": f"""
                SELECT region, {BOUNDS}, count(*) AS orders
                FROM TUMBLE(orders, placed_at, INTERVAL 1 DAY, timezone => 'Europe/Berlin')
                GROUP BY region, {BOUNDS} EMIT CHANGES
            """,
            "visits": f"""
                SELECT device, {BOUNDS}, count(*) AS orders
                FROM SESSION(orders, placed_at, INTERVAL '30' MINUTE)
                GROUP BY device, {BOUNDS} LATE CORRECT INTERVAL '1' HOUR
            """,
            "every_minute": f"""
                SELECT {BOUNDS}, sum(amount) AS revenue
                FROM HOP(orders, placed_at, INTERVAL 1 MINUTE, INTERVAL 5 MINUTES) GROUP BY {BOUNDS}
            """,
            "hours": f"""
                SELECT region, {BOUNDS}, sum(revenue) AS revenue
                FROM TUMBLE(revenue, window_end, INTERVAL 1 HOUR)
                GROUP BY region, {BOUNDS} LATE CORRECT INTERVAL 1 DAY
            """,
            "metrics": f"""
                SELECT region, {BOUNDS}, rate() AS per_second,
                    rate(amount, per => INTERVAL 1 HOUR) AS per_hour,
                    quantiles(amount, array(0.5, 0.99)) AS p50_p99,
                    decayed_sum(amount, half_life => INTERVAL 10 SECONDS) AS recent,
                    approx_count_distinct(device) AS buyers
                FROM {TUMBLING} GROUP BY region, {BOUNDS}
            """,
            "moving": f"""
                SELECT region, {BOUNDS}, avg(amount) AS mean
                FROM SLIDE(orders, placed_at, INTERVAL 5 MINUTES) GROUP BY region, {BOUNDS}
            """,
            "best": f"""
                SELECT * FROM revenue
                QUALIFY ROW_NUMBER() OVER (PARTITION BY {BOUNDS} ORDER BY revenue DESC) <= 3
            """,
            "highest_orders": f"""
                WITH highest AS (
                    SELECT {BOUNDS}, max(amount) AS amount FROM {TUMBLING} GROUP BY {BOUNDS}
                )
                SELECT * FROM CHANGES OF highest AS h JOIN orders AS o ON h.amount = o.amount
                    AND o.placed_at >= h.window_end - INTERVAL '1 minute 1 microsecond'
                    AND o.placed_at < h.window_end AND o.placed_at >= h.window_start
            """,
            "last_ten": f"""
                SELECT *, avg(amount) OVER ({OVER_ORDERS}
                    ROWS BETWEEN 9 PRECEDING AND CURRENT ROW) AS mean
                FROM orders
            """,
            "last_hour": f"""
                SELECT *, max_by(order_id, amount) OVER ({OVER_ORDERS}
                    RANGE BETWEEN INTERVAL 1 HOUR PRECEDING AND CURRENT ROW) AS best
                FROM orders
            """,
        },
    ),
    "concepts/joins.md": (
        "shop",
        {
            "paid": """
                SELECT * FROM orders AS o LEFT JOIN payments AS p ON o.order_id = p.order_id
                    AND p.paid_at BETWEEN o.placed_at AND o.placed_at + INTERVAL 1 HOUR
            """,
            "in_time": """
                SELECT * FROM auctions AS a JOIN bids AS b ON a.auction = b.auction
                    AND b.at BETWEEN a.opens AND a.expires
            """,
            "early": """
                SELECT * FROM auctions AS a, bids AS b WHERE a.auction = b.auction
                    AND b.at >= a.opens AND b.at <= least(expires, opens + INTERVAL 1 HOUR)
            """,
            "enriched": "SELECT * FROM orders LEFT JOIN customers USING (customer_id)",
            "titled": "SELECT * FROM orders LEFT JOIN regions ON lower(region) = code",
            "taxed": """
                SELECT *, amount * rate AS tax FROM orders
                JOIN rates FOR SYSTEM_TIME AS OF orders.placed_at ON orders.region = rates.region
            """,
            "newest": """
                SELECT * FROM orders
                QUALIFY ROW_NUMBER() OVER (PARTITION BY order_id ORDER BY placed_at DESC) = 1
            """,
            "placed": "SELECT * FROM newest LEFT JOIN people USING (customer_id)",
            "orders_of": "SELECT * FROM people LEFT JOIN newest USING (customer_id)",
            "timeline": "SELECT * FROM posts AS p JOIN follows AS f ON p.author = f.author",
            "mutual": """
                SELECT * FROM follows AS f JOIN follows AS back
                    ON f.follower = back.author AND f.author = back.follower
            """,
            "spent": """
                SELECT customer_id, sum(amount) AS spent, count(*) AS orders FROM newest
                GROUP BY customer_id
            """,
            "ranked": "SELECT * FROM spent JOIN customers USING (customer_id)",
            "best": "SELECT * FROM ranked ORDER BY spent DESC LIMIT 10",
            "best_of_tier": """
                SELECT * EXCEPT (n) FROM (
                    SELECT *, ROW_NUMBER() OVER (PARTITION BY tier ORDER BY spent DESC, name) AS n
                    FROM ranked
                ) WHERE n <= 3
            """,
            "tiers": "SELECT DISTINCT tier FROM customers",
            "dearest": """
                SELECT * FROM (
                    SELECT *, ROW_NUMBER() OVER (PARTITION BY customer_id ORDER BY amount DESC)
                        AS rank FROM orders
                ) WHERE rank <= 3
            """,
            "first_orders": """
                SELECT * FROM orders
                QUALIFY ROW_NUMBER() OVER (PARTITION BY customer_id ORDER BY placed_at) = 1
            """,
        },
    ),
}


@pytest.mark.parametrize("page", TWINS)
def test_an_example_of_the_guide_has_its_twin(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = run_page(page, tmp_path, monkeypatch)
    pipeline, twins = TWINS[page]
    known = names[pipeline].declared_rows()
    more: dict[str, Any] = {
        name: value
        for name, value in names.items()
        if hasattr(value, "schema") and name not in known and not name.startswith("_")
    }
    for name, query in twins.items():
        found = names[pipeline].sql(" ".join(query.split()), **more)
        # Fresh names: the page's own steps may have a name by now.
        assert (
            str(names[pipeline].plan_of(found)).split("\n")[2:]
            == str(names[pipeline].plan_of(names[name])).split("\n")[2:]
        ), name
        assert found.step == names[name].step, name
