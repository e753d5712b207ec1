"""A day in the demo's shop, without Spark and in a time of its own: the real pipeline of
examples/shop.py, the real world around it, and all that came out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from shop_demo.showing import shop_file
from shop_demo.world import DATABASE, Sent, World, clock_us, make_database

from headrace.alerts.decision import AlertDecider
from headrace.log import open_log
from headrace.log.api import Log
from headrace.pipeline.loader import run_file
from headrace.testing.pipelines import PipelineTest

ORDERS_A_SECOND = 100
OPEN_S, SETTLE_EVERY_S, LATER_S = 14, 2, 14


@dataclass(frozen=True)
class Day:
    """What is left of it."""

    home: Path
    state: Path
    log: Log
    sent: Sent


@pytest.fixture(scope="session")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    home = tmp_path_factory.mktemp("shop")
    with open_log(f"file:{home / 'log'}") as log:
        yield lived(home, log)


def lived(home: Path, log: Log) -> Day:
    """From opening to closing, on any log."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOP_HOME", str(home))
        make_database(home / DATABASE)
        shop = run_file(shop_file())
        shop.database.run(log=log.address, until_caught_up=True)
        with PipelineTest(shop.shop, home / "run", log=log) as test:
            return Day(home, test.state, log, _live(test, shop, home))


def _live(test: PipelineTest, shop: ModuleType, home: Path) -> Sent:
    world = World(test.log, shop, home, _now_us(test), orders_a_second=ORDERS_A_SECOND)
    for second in range(OPEN_S):
        test.pass_time("1 second")
        world.step(_now_us(test))
        if second % SETTLE_EVERY_S == 0:
            _settle(test, shop)
    world.close(_now_us(test))
    _settle(test, shop)
    for _ in range(LATER_S):
        test.pass_time("1 second")
        test.cut(forced=True)
    test.settle()
    deciding = AlertDecider.open(test.log, "shop", shop.shop.alerts["fraud"], None)
    while deciding.step(_now_us(test), at_once=True):
        continue
    return world.sent


def _settle(test: PipelineTest, shop: ModuleType) -> None:
    shop.database.run(log=test.log.address, until_caught_up=True)
    test.settle()


def _now_us(test: PipelineTest) -> int:
    return clock_us() + test._passed_us
