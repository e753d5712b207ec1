"""The daemon that Spark's Python workers are forked from."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from headrace.engine.worker_daemon import PRELOADED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PRELOAD = """
import gc, json, os, sys
from headrace.engine import worker_daemon
worker_daemon.preload()
tasks = os.listdir("/proc/self/task")
threads = [open(f"/proc/self/task/{task}/comm").read().strip() for task in tasks]
clients = [name for name in sys.modules if name.startswith(("confluent_kafka", "psycopg", "redis"))]
print(json.dumps({"threads": threads, "clients": clients, "frozen": gc.get_freeze_count()}))
"""


@pytest.mark.parametrize("name", PRELOADED)
def test_what_is_preloaded_exists(name: str) -> None:
    assert find_spec(name) is not None


def test_preloading_starts_no_thread_and_loads_no_client() -> None:
    """Neither would survive a fork."""
    done = subprocess.run(
        [sys.executable, "-c", PRELOAD],
        capture_output=True,
        text=True,
        check=True,
        env={"OMP_NUM_THREADS": "1"},  # as Spark sets it for workers
    )
    loaded = json.loads(done.stdout)
    assert len(loaded["threads"]) == 1, loaded["threads"]
    assert loaded["clients"] == []
    assert loaded["frozen"] > 100_000


FORK = """
import os
from headrace.engine import worker_daemon
worker_daemon.preload()
import numpy as np
for _ in range(2):
    if os.fork() == 0:
        print(np.random.random(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_workers_do_not_share_their_random_numbers() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True)
    first, second = done.stdout.split()
    assert first != second


def describe(_rows: Iterable[int]) -> Iterator[tuple[str, bool]]:
    import gc

    yield from [("pyarrow", "pyarrow" in sys.modules), ("frozen", gc.get_freeze_count() > 100_000)]


def test_a_worker_has_everything_from_the_start(spark: SparkSession) -> None:
    assert spark.conf.get("spark.python.daemon.module") == "headrace.engine.worker_daemon"
    found = spark.sparkContext.parallelize([0], 1).mapPartitions(describe).collect()
    assert dict(found) == {"pyarrow": True, "frozen": True}
