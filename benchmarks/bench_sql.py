"""SQL: how long a file of 200 statements takes to compile, from its text to the plan; and rows by
key over Postgres's protocol, against a real Postgres.

At run time there is nothing to measure: the plan is that of the Python spelling
(`tests/sql/test_nexmark.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import headrace as hr
from benchmarks.postgres_selects import point_selects
from benchmarks.report import Result, seconds, within

STATEMENTS = 200
_TOPIC = """
CREATE TOPIC orders_{n} (order_id BIGINT, customer_id BIGINT, region STRING, amount DOUBLE,
    placed_at TIMESTAMP) WITH (key = 'order_id', event_time = 'placed_at', delay = '10 seconds')
"""
_TABLE = "CREATE TABLE customers_{n} (customer_id BIGINT PRIMARY KEY, name STRING, tier STRING)"
_VIEWS = (
    """
CREATE VIEW revenue_{n} AS
SELECT region, count(*) AS orders, sum(amount) AS total, sum(amount) / count(*) AS mean
FROM orders_{n} WHERE amount > 0 AND region IS NOT NULL GROUP BY region HAVING count(*) > 1
""",
    """
CREATE VIEW hourly_{n} AS
SELECT region, window_start, window_end, sum(amount) AS total,
    count(*) FILTER (WHERE amount > 9) AS large
FROM TUMBLE(orders_{n}, placed_at, INTERVAL '1' HOUR) GROUP BY region, window_start, window_end
EMIT CHANGES LATE CORRECT INTERVAL '1' DAY
""",
    """
CREATE STREAM named_{n} AS
SELECT o.order_id, o.amount * 1.2 AS gross, upper(c.name) AS name,
    CASE WHEN o.amount > 100 THEN 'large' ELSE 'small' END AS size
FROM orders_{n} AS o LEFT JOIN customers_{n} AS c ON o.customer_id = c.customer_id
""",
    """
CREATE VIEW dearest_{n} AS
SELECT * FROM (
    SELECT *, ROW_NUMBER() OVER (PARTITION BY region ORDER BY amount DESC) AS rank FROM orders_{n}
) WHERE rank <= 3
""",
    """
CREATE VIEW by_tier_{n} AS
WITH spent AS (SELECT customer_id, sum(amount) AS total FROM orders_{n} GROUP BY customer_id)
SELECT c.tier, sum(s.total) AS total FROM customers_{n} AS c JOIN spent AS s
    ON c.customer_id = s.customer_id GROUP BY c.tier
""",
    "CREATE VIEW tiers_{n} AS SELECT DISTINCT tier FROM customers_{n} WHERE name <> 'nobody'",
)


def statements(count: int = STATEMENTS) -> str:
    """A file of so many statements: topics and tables, and six outputs over each pair."""
    templates = (_TOPIC, _TABLE, *_VIEWS)
    texts = [templates[at % len(templates)].format(n=at // len(templates)) for at in range(count)]
    return ";\n".join(texts)


def compile_file(text: str) -> None:
    """Compile a file's text, to the plan with all names."""
    pipeline = hr.Pipeline("shop")
    pipeline.sql(text)
    pipeline.plan()


def results() -> Iterator[Result]:
    text = statements()
    yield within(
        "sql",
        f"a file of {STATEMENTS} statements compiles",
        "s",
        ours=lambda: seconds(lambda: compile_file(text)),
        limit=2.0,
        params={"statements": STATEMENTS, "characters": len(text)},
    )
    yield from point_selects()
