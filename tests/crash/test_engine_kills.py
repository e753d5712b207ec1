"""Kill -9 of the driver and of Spark's Python workers, at every point of a batch: the same rows and
totals as without, none lost, none doubled, and in the same order.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

import headrace as hr
from headrace.testing.fault_points import (
    IN_TASKS,
    KAFKA_IN_TASKS,
    KAFKA_ON_THE_DRIVER,
    ON_THE_DRIVER,
    on_kafka,
)
from tests.crash.engine_child import Plan
from tests.crash.engine_kills import (
    DRIVER,
    WORKER,
    Outcome,
    in_turn,
    prepared,
    run_through,
    undisturbed,
)
from tests.servers.kafka_broker import KafkaBroker

pytestmark = pytest.mark.spark
BEGUN = "the next batch was begun"
"""While a batch is committed and the one after it is computed."""
SOME_POINTS = (
    "in the kernel",
    "files were written",
    "the store was committed",
    "a topic's rows were staged",
)


def check_killed(
    tmp_path: Path,
    plans: Sequence[Plan],
    *,
    rows: int,
    deaths: Sequence[int],
    address: str | None = None,
) -> None:
    ticks = max(tick for plan in plans for tick in plan) + 1
    root, name = tmp_path / "calm", f"calm-{uuid.uuid4().hex[:8]}"  # a broker outlives a test
    prepared(root, address or f"file:{root / 'log'}", name, rows, ticks)
    calm = undisturbed(root, address or f"file:{root / 'log'}", name)
    calm.check(rows)
    for number, (plan, dead) in enumerate(zip(plans, deaths, strict=True)):
        name, root = f"killed-{uuid.uuid4().hex[:8]}", tmp_path / f"killed{number}"
        log_address = address or f"file:{root / 'log'}"
        prepared(root, log_address, name, rows, ticks)
        run_through(root, log_address, name, plan, deaths=dead)
        with hr.open_log(log_address) as log:
            killed = Outcome(log, name, root / "state")
        assert killed.topics == calm.topics
        assert killed.views == calm.views
        assert killed.changes == calm.changes


def test_workers_and_drivers_killed_during_batches(tmp_path: Path) -> None:
    kills = [
        *((point, WORKER) for point in SOME_POINTS),
        ("between views and log", DRIVER),
        ("in the log's transaction", DRIVER),
        (BEGUN, DRIVER),
    ]
    check_killed(tmp_path, [in_turn(*kills)], rows=5000, deaths=[3])


@pytest.mark.slow
def test_the_driver_killed_at_every_point_and_workers_too_with_100_000_rows(tmp_path: Path) -> None:
    workers = in_turn(*((point, WORKER) for point in IN_TASKS))
    drivers_from_workers = in_turn(*((point, DRIVER) for point in IN_TASKS))
    drivers = in_turn(*((point, DRIVER) for point in (*ON_THE_DRIVER, BEGUN)))
    check_killed(
        tmp_path,
        [workers, drivers_from_workers, drivers],
        rows=100_000,
        deaths=[0, len(drivers_from_workers), len(drivers)],
    )


@pytest.mark.slow
@pytest.mark.kafka
def test_workers_and_drivers_killed_from_kafka_to_kafka(
    tmp_path: Path, kafka_broker: KafkaBroker
) -> None:
    tasks, on_the_driver = (
        on_kafka([*IN_TASKS, *KAFKA_IN_TASKS]),
        on_kafka([*ON_THE_DRIVER, *KAFKA_ON_THE_DRIVER]),
    )
    workers = in_turn(*((point, WORKER) for point in tasks))
    drivers = in_turn(*((point, DRIVER) for point in on_the_driver))
    check_killed(
        tmp_path,
        [workers, drivers],
        rows=100_000,
        deaths=[0, len(drivers)],
        address=kafka_broker.address,
    )
