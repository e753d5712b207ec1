"""`headrace run`: stopped by signals in the middle of a batch, retrying a batch that fails, and
reporting its progress.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest

import headrace as hr
from headrace.cli.output import RunProgress
from headrace.pipeline.loader import load_pipeline
from headrace.run_status import Status
from headrace.views.reader import ViewReader
from tests.cli.conftest import CommandResult, Run
from tests.waits import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# An aggregate that is slow, or raises, while a file `slow` or `broken` is next to the pipeline's.
SHOP = """
import time
from pathlib import Path
import numpy as np
import pyarrow as pa
import headrace as hr

HERE = str(Path(__file__).parent)

class Watched(hr.agg.CustomAggregate):
    state_type = result_type = pa.int64()

    def add(self, states, groups, values):
        here = Path(HERE)
        if (here / "broken").exists():
            raise ValueError("broken on purpose")
        if (here / "slow").exists():
            (here / "busy").touch()
            time.sleep(float((here / "slow").read_text()))
        total = states.fill_null(0).to_numpy().copy()
        np.add.at(total, groups.to_numpy(), values.to_numpy())
        return pa.array(total)

    def result(self, states):
        return states

shop = hr.Pipeline("shop", log=f"file:{HERE}/log")
orders = shop.topic("orders", schema="k BIGINT, v BIGINT", key="k")
totals = orders.group_by("k").aggregate(n=hr.agg.count(), s=hr.agg.custom(Watched(), "v"))
shop.view("totals", totals)
shop.write("changes", totals)
"""


class Shop:
    """A pipeline's file, its log, and the `headrace run` that runs it: a process or a thread."""

    def __init__(self, root: Path) -> None:
        self.root, self.file, self.state = root, root / "shop.py", root / "shop.state"
        self.file.write_text(SHOP)
        self.log = hr.open_log(f"file:{root / 'log'}")
        self.log.create_topic("orders", "k BIGINT, v BIGINT", key="k")
        self.process: subprocess.Popen[str] | None = None
        self.fed = 0

    def feed(self, count: int = 100) -> None:
        with self.log.producer("orders") as producer:
            producer.append([{"k": n % 7, "v": n} for n in range(self.fed, self.fed + count)])
        self.fed += count

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "headrace.cli",
            "run",
            str(self.file),
            "--master",
            "local[2]",
        ]
        environment = {name: value for name, value in os.environ.items() if name != "HEADRACE_LOG"}
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def status(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.state / "status.json").read_text())
        except FileNotFoundError:
            return {"tick": 0, "last_error": None, "rows_behind": -1}
        return found

    def wait(self, condition: Callable[[], bool]) -> None:
        def check() -> bool:
            if self.process is not None and self.process.poll() is not None:
                pytest.fail(f"it ended early: {self.process.communicate()}")
            return condition()

        wait_until(check, 240, interval_s=0.05, describe=self.status)

    def run_until(self, run: Run, done: Callable[[], None]) -> CommandResult:
        """`headrace run` in this process, on the tests' session. SIGTERM ends it once `done`, which
        runs in a thread, has returned.
        """

        def end() -> None:
            try:
                done()
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once the command has ended
        try:
            with ThreadPoolExecutor(1) as executor:
                ended = executor.submit(end)
                result = run("run", self.file, "--master", "local[2]", "--log", self.log.address)
                ended.result()
        finally:
            signal.signal(signal.SIGTERM, before)
        return result

    def check_totals(self) -> None:
        """That every row counts exactly once, in the view and in the topic."""
        expected = {
            k: (len(values := [n for n in range(self.fed) if n % 7 == k]), sum(values))
            for k in range(7)
        }
        with ViewReader(self.state / "views.db") as views:
            assert {
                row["k"]: (row["n"], row["s"]) for row in views.table("totals").to_pylist()
            } == expected
        newest: dict[int, tuple[int, int]] = {}
        for row in self.log.read("changes").to_pylist():
            if row["_change_type"] == "update_preimage":
                assert newest.pop(row["k"]) == (row["n"], row["s"])
            else:
                assert row["k"] not in newest
                newest[row["k"]] = (row["n"], row["s"])
        assert newest == expected

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
        self.log.close()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    yield made
    made.close()


def stop_in_the_middle_of_a_batch(shop: Shop) -> None:
    """Wait for the first batch, then for the second one to be in its kernel."""
    shop.wait(lambda: shop.status()["tick"] >= 1)
    (shop.root / "slow").write_text("3")
    shop.feed()
    shop.wait((shop.root / "busy").exists)


def check_next_run(shop: Shop) -> None:
    (shop.root / "slow").unlink()
    shop.feed()
    load_pipeline(shop.file).run(state=shop.state, until_caught_up=True, master="local[2]")
    shop.check_totals()


@pytest.mark.usefixtures("spark")
def test_ctrl_c_in_the_middle_of_a_batch_ends_a_run_cleanly(shop: Shop) -> None:
    """A process of its own: Ctrl-C in a terminal reaches Spark's workers too."""
    shop.feed()
    shop.start()
    stop_in_the_middle_of_a_batch(shop)
    assert shop.process is not None
    os.killpg(shop.process.pid, signal.SIGINT)
    out, err = shop.process.communicate(timeout=120)
    assert (shop.process.returncode, out.splitlines()[-1]) == (0, "shop ended cleanly."), err
    assert "Traceback" not in err
    check_next_run(shop)


@pytest.mark.usefixtures("spark")
def test_sigterm_in_the_middle_of_a_batch_ends_a_run_cleanly(shop: Shop, run: Run) -> None:
    shop.feed()
    result = shop.run_until(run, lambda: stop_in_the_middle_of_a_batch(shop))
    assert result.out.splitlines()[-1] == "shop ended cleanly.", result.err
    assert "Traceback" not in result.err
    check_next_run(shop)


@pytest.mark.spark
def test_a_batch_that_does_not_finish_in_time_is_abandoned_without_harm(
    shop: Shop, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.runtime.run.PATIENCE_S", 0.5)
    (shop.root / "slow").write_text("600")
    shop.feed()
    stop = Event()
    running = Thread(
        target=load_pipeline(shop.file).run,
        kwargs={"state": shop.state, "stop": stop, "master": "local[2]"},
    )
    running.start()
    shop.wait((shop.root / "busy").exists)
    stop.set()
    running.join(60)
    assert not running.is_alive()
    (shop.root / "slow").unlink()
    load_pipeline(shop.file).run(state=shop.state, until_caught_up=True, master="local[2]")
    shop.check_totals()


@pytest.mark.usefixtures("spark")
def test_a_batch_that_fails_is_retried_and_the_reason_reported(
    shop: Shop, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    failing = shop.root / "failing"
    (shop.root / "broken").touch()
    shop.feed()

    def see_it_fail_and_repair_it() -> None:
        shop.wait(lambda: bool(shop.status()["last_error"]))
        failing.mkdir()
        shutil.copy(shop.state / "status.json", failing)
        (shop.root / "broken").unlink()
        shop.wait(lambda: shop.status()["last_error"] is None and shop.status()["tick"] >= 1)

    shop.run_until(run, see_it_fail_and_repair_it)
    status = run("status", failing)
    assert "AggregateFailed" in status.out
    assert "broken on purpose" in status.out
    assert "Py4J" not in status.out
    assert "A batch of shop failed (1 in a row): AggregateFailed" in caplog.text
    assert "Trying again in 2 s." in caplog.text
    shop.check_totals()


@pytest.mark.spark
def test_a_run_until_caught_up_reports_its_rows(shop: Shop, run: Run, spark: SparkSession) -> None:
    shop.feed(200)
    done = run(
        "run", shop.file, "--until-caught-up", "--master", "local[2]", "--log", shop.log.address
    )
    assert done.out.splitlines()[-1].startswith("Caught up at tick 1: 200 rows in ")
    shop.check_totals()
    assert (
        run("run", shop.file, "--until-caught-up", "--log", shop.log.address).out.splitlines()[-1]
        == "There was nothing to process."
    )


STATUS = Status("shop", 1, 1, 2, 0.0, 0.0, 0, 0, 1.0, 0, 0.0, 0, 0, 0)


def test_progress_is_printed_while_ticks_are_left(capsys: pytest.CaptureFixture[str]) -> None:
    progress = RunProgress(every_s=0)
    progress(replace(STATUS, tick=1, newest_tick=1, batch_rows=10, batches=1))
    assert capsys.readouterr().err == ""
    progress(
        replace(
            STATUS, tick=5, newest_tick=40, batch_rows=1_000_000, rows_behind=8_000_000, batches=2
        )
    )
    line = capsys.readouterr().err
    assert line.startswith("tick 5 of 40, 8,000,000 rows behind, ")
    assert " rows/s, about " in line
    assert progress.summary().startswith("Caught up at tick 5: 1,000,010 rows in 0.")


def test_progress_is_printed_every_few_seconds_only(capsys: pytest.CaptureFixture[str]) -> None:
    progress = RunProgress(every_s=60)
    for tick in range(5):
        progress(replace(STATUS, tick=tick, newest_tick=9, batches=tick))
    assert capsys.readouterr().err == ""


def test_time_left_follows_from_the_rows_behind() -> None:
    progress = RunProgress()
    progress(replace(STATUS, tick=1, newest_tick=3, batch_rows=500, batches=1))
    status = replace(STATUS, tick=1, newest_tick=3, rows_behind=3_000)
    assert (
        progress.line(status, 5.0)
        == "tick 1 of 3, 3,000 rows behind, 100 rows/s, about 30.0 s left"
    )
    assert (
        RunProgress().line(status, 5.0)
        == "tick 1 of 3, 3,000 rows behind, 0 rows/s, time left unknown"
    )
