"""`headrace verify-determinism`: its exit codes, and that it names what draws numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace as hr
from tests.cli.conftest import Run

SHOP = """
import random
import headrace as hr

@hr.udf("DOUBLE", name="{name}", each_row=True)
def function(amount):
    return amount + {added}

shop = hr.Pipeline("{name}_shop")
orders = shop.topic("orders", schema="id BIGINT, amount DOUBLE", key="id")
shop.write("{name}_changed", orders.with_columns(changed="{name}(amount)"))
"""


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    ("name", "added", "code", "said"),
    [
        ("adds_one", "1", 0, "adds_one_shop is deterministic in 1 ticks with 3 rows of input"),
        ("adds_any", "random.random()", 7, "calls adds_any()"),
    ],
)
def test_the_exit_code_says_whether_two_runs_differ(
    run: Run, log: hr.Log, tmp_path: Path, name: str, added: str, code: int, said: str
) -> None:
    file = tmp_path / "shop.py"
    file.write_text(SHOP.format(name=name, added=added))
    log.create_topic("orders", "id BIGINT, amount DOUBLE", key="id")
    with log.producer("orders") as producer:
        producer.append([{"id": number, "amount": float(number)} for number in range(3)])
    run("run", file, "--until-caught-up", "--master", "local[2]")
    topics, ends = log.topics(), log.snapshot(log.topics())
    done = run("verify-determinism", file, "--master", "local[2]", code=code)
    assert said in done.out
    assert log.topics() == topics
    assert log.snapshot(topics) == ends, "the log is only read"
