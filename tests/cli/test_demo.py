"""`headrace demo`: it ends well, and its checks notice what is wrong."""

import os
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pyarrow as pa
import pytest

import headrace as hr
from headrace.cli.demo import Checks, Shop, in_order, orders, same_set
from headrace.cli.demo_windows import show_time
from headrace.testing.plain_spark import PlainSpark
from tests.java import require_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A till that forgets an append, and one that sends an order nobody placed.
SABOTAGE = """
import sys
from pathlib import Path
from headrace.cli import demo

class Dishonest(demo.Shop):
    def _check(self, log):
        with log.producer("orders") as producer:
            producer.append(demo.orders(10**9, 1))
        self.sent += 7
        return super()._check(log)

directory = Path(sys.argv[1])
sys.exit(len(Dishonest(directory / "log", directory, 1).run()))
"""


@pytest.mark.spark
def test_the_demo_ends_well(tmp_path: Path) -> None:
    require_java()
    command = [str(Path(sys.executable).with_name("headrace")), "demo", "--keep", str(tmp_path / "log")]
    done = subprocess.run(command, env={**os.environ, "DEMO_SECONDS": "6"}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All as it should be" in done.stdout
    assert "BAD" not in done.stdout
    assert "the minute and the hour were both corrected" in done.stdout
    assert (tmp_path / "log").is_dir()


@pytest.mark.spark
def test_the_demo_notices_what_is_wrong(tmp_path: Path) -> None:
    require_java()
    done = subprocess.run([sys.executable, "-c", SABOTAGE, tmp_path], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode >= 4, done.stdout + done.stderr
    for what in ("BAD orders stored", "BAD each once, and none invented", "BAD each order has one invoice", "BAD each customer's orders and revenue", "BAD orders in the slow group's report"):
        assert what in done.stdout


def test_the_part_about_time_shows_who_holds_the_clock_and_a_correction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks, session = Checks(), cast("SparkSession", PlainSpark())
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        show_time(log, session, tmp_path / "state", checks)
    shown = capsys.readouterr().out
    assert checks.failed == []
    assert shown.count("  ok  ") == 3
    assert "sales waits for the producer b" in shown
    assert [line.split() for line in shown.splitlines() if "update_" in line] == [
        ["minutes", "update_preimage", "12:00", "8.00"],
        ["minutes", "update_postimage", "12:00", "108.00"],
        ["hours", "update_preimage", "12:00", "8.00"],
        ["hours", "update_postimage", "12:00", "108.00"],
    ]


def test_sets_are_compared_with_their_repeats() -> None:
    one, two = pa.chunked_array([[1, 2]]), pa.chunked_array([[2], [1]])
    assert same_set(one, two)
    assert not same_set(one, pa.chunked_array([[1, 2, 2]]))
    assert not same_set(one, pa.chunked_array([[1, 3]]))


def test_order_is_judged_for_each_customer() -> None:
    rows = orders(0, 500)
    stored = rows.append_column("_partition", pa.array([0] * 500)).append_column("_offset", pa.array(range(500)))
    assert in_order(stored)
    backwards = stored.set_column(stored.schema.get_field_index("_offset"), "_offset", pa.array(range(500, 0, -1)))
    assert not in_order(backwards)


def test_an_order_is_known_by_its_number() -> None:
    assert orders(3, 4).equals(orders(0, 10).slice(3, 4))


def test_a_failed_check_is_remembered(capsys: pytest.CaptureFixture[str]) -> None:
    checks = Checks()
    checks.equal("right", 1, 1)
    checks.equal("wrong", 1, 2)
    checks.true("false", good=False)
    assert checks.failed == ["wrong", "false"]
    assert "BAD wrong: 1, not 2" in capsys.readouterr().out


def test_waiting_shows_that_things_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("headrace.cli.demo.SHOW_SECONDS", 0.05)
    shop = Shop(tmp_path / "log", tmp_path, 1)
    with hr.open_log(shop.address) as log, ThreadPoolExecutor() as pool:
        log.create_topic("large_orders", "order_id BIGINT")
        shop._wait(log, [pool.submit(time.sleep, 0.5)], "starting")
        assert "Spark starting,      0 large orders" in capsys.readouterr().out
        forever: Future[None] = Future()
        shop._wait(log, [pool.submit(int, "x"), forever], "starting")  # one has failed: no waiting for the other
