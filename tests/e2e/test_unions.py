"""Tables united: whatever comes and goes in each of them, a key has one row, that of the first
table that has it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import headrace as hr
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark

SHOPS = ("north", "south", "west")
TICKS, CHANGES, KEYS = 30, 8, 6


def united() -> hr.Pipeline:
    pipeline = hr.Pipeline("shops")
    tables = [
        pipeline.table(shop, schema="id BIGINT, `the price` BIGINT", key="id") for shop in SHOPS
    ]
    pipeline.write("prices", tables[0].union(*tables[1:]))
    pipeline.view("by_id", tables[0].union(tables[1], tables[2]).with_columns(price="`the price`"))
    return pipeline


def changes(rng: random.Random, held: dict[str, dict[int, int]]) -> dict[str, list[dict[str, Any]]]:
    """Some rows that come, change or go, in each table; some that go were not there."""
    made: dict[str, list[dict[str, Any]]] = {shop: [] for shop in SHOPS}
    for _ in range(rng.randrange(CHANGES)):
        shop, key, price = rng.choice(SHOPS), rng.randrange(KEYS), rng.randrange(100)
        goes = rng.random() < 0.4
        made[shop].append(
            {
                "id": key,
                "the price": None if goes else price,
                "_change_type": "delete" if goes else "insert",
            }
        )
        if goes:
            held[shop].pop(key, None)
        else:
            held[shop][key] = price
    return made


def test_of_a_key_in_several_tables_the_first_has_the_say(tmp_path: Path, no_syncs: None) -> None:
    rng, held = random.Random(4), {shop: dict[int, int]() for shop in SHOPS}
    spark: Any = PlainSpark()
    with PipelineTest(united(), tmp_path, spark) as test:
        for _ in range(TICKS):
            for shop, rows in changes(rng, held).items():
                for row in rows:
                    test.feed(shop, [row])
            test.settle()
            first = {key: held[shop][key] for shop in reversed(SHOPS) for key in held[shop]}
            assert {
                key: row["the price"] for key, row in test.folded("prices", "id").items()
            } == first
            assert {row["id"]: row["price"] for row in test.view("by_id")} == first


def test_a_promise_that_no_key_is_in_two_saves_the_state() -> None:
    pipeline = hr.Pipeline("shops")
    north, south = (pipeline.table(shop, schema="id BIGINT", key="id") for shop in SHOPS[:2])
    pipeline.view("all", north.union(south, disjoint=True))
    assert "top" not in str(pipeline.plan())
    pipeline.view("sorted_out", north.union(south))
    assert "top" in str(pipeline.plan())
