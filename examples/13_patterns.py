"""Patterns: cards that are tried out with small payments before a big one, and orders that are not
shipped in time, which are matched when the watermark advances, without a further row. Rules come
from a table, and can be added and removed while rows flow.

Run it from anywhere: python examples/13_patterns.py. It runs in this process with the test kit,
which can let time pass. To see the automaton: `headrace plan examples/13_patterns.py`.
"""

import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import headrace as hr
from headrace.testing.pipelines import PipelineTest

START = datetime(2026, 3, 1, 12, tzinfo=UTC)

bank = hr.Pipeline("bank")
payments = bank.topic(
    "payments",
    schema="card STRING, amount DOUBLE, paid_at TIMESTAMP",
    key="card",
    event_time=hr.EventTime("paid_at", delay="10 seconds"),
)
orders = bank.topic(
    "orders",
    schema="order_id BIGINT, what STRING, at TIMESTAMP",
    key="order_id",
    event_time=hr.EventTime("at", delay="1 minute"),
)

fraud = payments.match(
    "small{3,} big",
    define={"small": "amount < 10", "big": "amount > 1000 AND amount > 50 * avg(small.amount)"},
    measures={"total": "sum(amount)", "tries": "count(small.*)"},
    within="10 minutes",
    timed_out="tried_out",
)
silent = bank.sql("""
    SELECT order_id, placed_at FROM orders MATCH_RECOGNIZE (
        PARTITION BY order_id ORDER BY at
        MEASURES last(placed.at) AS placed_at
        PATTERN (placed !shipped) WITHIN INTERVAL '2' DAY
        DEFINE placed AS what = 'placed', shipped AS what = 'shipped'
    )
""")
rules = bank.table(
    "rules", schema="name STRING, pattern STRING, define STRING, within STRING", key="name"
)
bank.write("suspicions", payments.match(rules, measures={"total": "sum(amount)"}))
bank.write("fraud", fraud)
bank.write("silent", silent)


def paid(card: str, amount: float, minutes: float) -> dict[str, object]:
    return {"card": card, "amount": amount, "paid_at": START + timedelta(minutes=minutes)}


def order(order_id: int, what: str, hours: float) -> dict[str, object]:
    return {"order_id": order_id, "what": what, "at": START + timedelta(hours=hours)}


def main() -> None:
    with tempfile.TemporaryDirectory() as root, PipelineTest(bank, Path(root)) as test:
        tried = [paid("a", 1.0, 1), paid("a", 2.0, 2), paid("a", 1.5, 3)]
        # Rows may arrive out of order.
        test.feed(
            "payments",
            [
                tried[2],
                paid("b", 5.0, 2),
                tried[0],
                paid("a", 1900.0, 4),
                tried[1],
                paid("b", 1900.0, 5),
            ],
        )
        test.feed("orders", [order(1, "placed", 0), order(2, "placed", 1), order(1, "shipped", 20)])
        test.settle()
        print("fraud:", [row[1:4] for row in test.rows("fraud")])
        print("not shipped:", [row[1] for row in test.rows("silent")])

        much = {
            "name": "much",
            "pattern": "one more",
            "define": '{"more": "amount > 100 * one.amount"}',
            "within": "1 hour",
        }
        test.feed("rules", [much, {**much, "name": "wrong", "pattern": "one (more"}])
        test.feed("payments", [paid("d", 1.0, 8), paid("d", 500.0, 9), paid("d", 1.0, 10)])
        test.settle()
        print("a new rule:", [row[1:4] for row in test.rows("suspicions")])
        print(
            "a rule that cannot be parsed:",
            [
                row["reason"].splitlines()[0]
                for row in test.log.read("suspicions.match.dead").to_pylist()
            ],
        )

        test.feed("payments", [paid("c", 3.0, 20)])
        test.settle()
        test.pass_time("3 days")
        test.settle()
        print("three days later, not shipped:", [row[1] for row in test.rows("silent")])
        print("tried out, with no big payment:", [row[1:4] for row in test.rows("tried_out")])


if __name__ == "__main__":
    main()
