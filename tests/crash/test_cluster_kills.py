"""Kill -9 of workers and executors of a cluster with two machines: a batch in one task goes on on
the other machine, with the same rows as without.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import headrace as hr
from tests.crash.engine_kills import (
    EXECUTOR,
    HERE,
    ROOT,
    WORKER,
    Outcome,
    in_turn,
    prepared,
    run_through,
    undisturbed,
)
from tests.servers.spark_cluster import SparkCluster

pytestmark = [pytest.mark.spark, pytest.mark.slow]
ROWS = 20_000

WHERE_TASKS_RUN = """
import os, sys
import headrace as hr
from headrace.runtime.spark_jobs import _one_item

context = hr.spark(master=sys.argv[1]).sparkContext
context.parallelize(range(40), 40).map(lambda _: __import__("time").sleep(0.1)).count()
for host in sys.argv[2:] * 5:
    one = _one_item(context, (host, "elsewhere"))
    print(host, *one.mapPartitions(lambda items: [(list(items), os.environ["SPARK_LOCAL_IP"])][:1])
          .map(lambda ran: ran[1]).collect())
"""


def test_a_job_in_one_task_runs_where_the_last_one_ran(
    tmp_path: Path, spark_cluster: SparkCluster
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WHERE_TASKS_RUN, spark_cluster.master, *spark_cluster.hosts],
        env=spark_cluster.environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    asked = [line.split() for line in done.stdout.splitlines()]
    assert asked == [[host, host] for host in spark_cluster.hosts * 5]


@pytest.mark.parametrize("width", ["one", "mixed"])
def test_a_batch_goes_on_at_another_executor(
    tmp_path: Path,
    spark_cluster: SparkCluster,
    width: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kills = in_turn(
        ("in the kernel", EXECUTOR),
        ("files were written", WORKER),
        ("the store was committed", EXECUTOR),
        ("a topic's rows were staged", EXECUTOR),
    )
    calm_root, root = tmp_path / "calm", tmp_path / "killed"
    prepared(calm_root, f"file:{calm_root / 'log'}", "calm", ROWS, len(kills) + 1)
    calm = undisturbed(calm_root, f"file:{calm_root / 'log'}", "calm")
    prepared(root, f"file:{root / 'log'}", "killed", ROWS, len(kills) + 1)
    settings = {
        "spark.executorEnv.PYTHONPATH": os.pathsep.join([str(HERE / "inject"), str(ROOT)]),
        "spark.executorEnv.HEADRACE_ARMED": str(root / "armed"),
    }
    for name, value in spark_cluster.environment(tmp_path, settings).items():
        monkeypatch.setenv(name, value)
    run_through(
        root,
        f"file:{root / 'log'}",
        "killed",
        kills,
        deaths=0,
        options=["--master", spark_cluster.master, "--width", width],
    )
    with hr.open_log(f"file:{root / 'log'}") as log:
        killed = Outcome(log, "killed", root / "state")
    killed.check(ROWS)
    assert (killed.topics, killed.views, killed.changes) == (calm.topics, calm.views, calm.changes)
