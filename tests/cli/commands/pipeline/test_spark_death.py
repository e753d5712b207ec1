"""`headrace run` when Spark's JVM is killed: it starts another one and goes on at the ledger's
tick, or ends with an error. It never looks alive while it is not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.shop import Shop

pytestmark = [pytest.mark.spark, pytest.mark.process]


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    yield made
    made.close()


def jvm_of(process: int) -> int | None:
    """The JVM that a process has started."""
    children = Path(f"/proc/{process}/task").glob("*/children")
    for child in (int(pid) for file in children for pid in file.read_text().split()):
        if b"org.apache.spark.deploy.SparkSubmit" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    return None


def kill_jvm(shop: Shop) -> int:
    assert shop.process is not None
    jvm = jvm_of(shop.process.pid)
    assert jvm is not None
    os.kill(jvm, signal.SIGKILL)
    return jvm


def test_a_run_goes_on_when_the_jvm_is_killed(shop: Shop) -> None:
    """First while it is idle, then in the middle of a batch."""
    shop.feed()
    shop.start()
    shop.wait(lambda: shop.status()["tick"] >= 1 and shop.status()["rows_behind"] == 0)
    first = kill_jvm(shop)
    assert shop.process is not None
    process = shop.process.pid
    shop.wait(lambda: jvm_of(process) not in (None, first))
    shop.feed()
    shop.wait(lambda: shop.status()["tick"] >= 2 and shop.status()["rows_behind"] == 0)

    (shop.root / "slow").write_text("3")
    shop.feed()
    shop.wait((shop.root / "busy").exists)
    kill_jvm(shop)
    (shop.root / "slow").unlink()
    shop.wait(lambda: shop.status()["tick"] >= 3 and shop.status()["rows_behind"] == 0)
    assert shop.status()["last_error"] is None

    os.kill(process, signal.SIGTERM)
    out, err = shop.process.communicate(timeout=120)
    assert (shop.process.returncode, out.splitlines()[-1]) == (0, "shop ended cleanly."), err
    assert err.count("Spark has ended while shop was running. Starting it again.") == 2
    assert "Traceback" not in err
    shop.check_totals()


WITH_A_SESSION_OF_ITS_OWN = """
import sys
import headrace as hr
from headrace.pipeline.loader import load_pipeline

session = hr.spark(master="local[2]")
print(session.sparkContext.applicationId, flush=True)
load_pipeline(sys.argv[1]).run(state=sys.argv[2])
"""


def test_a_run_on_the_callers_session_ends_with_an_error(shop: Shop) -> None:
    shop.feed()
    shop.process = subprocess.Popen(
        [sys.executable, "-c", WITH_A_SESSION_OF_ITS_OWN, str(shop.file), str(shop.state)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    shop.wait(lambda: shop.status()["tick"] >= 1 and shop.status()["rows_behind"] == 0)
    kill_jvm(shop)
    killed_s = time.monotonic()
    _, err = shop.process.communicate(timeout=60)
    assert shop.process.returncode != 0
    assert time.monotonic() - killed_s < 30
    assert "SparkLost: Spark has ended while shop was running." in err
