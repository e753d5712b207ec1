"""`headrace run`: stopped by signals in the middle of a batch, retrying a batch that fails, and
reporting its progress.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

import pytest

from headrace.cli.output import RunProgress
from headrace.pipeline.loader import load_pipeline
from headrace.run_status import Status
from tests.cli.conftest import Run
from tests.cli.shop import Shop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
    assert "OSError" in status.out
    assert "broken on purpose" in status.out
    assert "Py4J" not in status.out
    assert "A batch of shop failed (1 in a row): OSError" in caplog.text
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


def test_a_run_that_diverted_rows_said_that_it_had_caught_up_and_nothing_else() -> None:
    progress = RunProgress()
    before = {"orders.diverted": 5, "sums.diverted": 1}
    progress(replace(STATUS, counts=before))
    counts = {"orders.diverted": 1_012, "sums.diverted": 1, "orders.unknown_fields": 3}
    progress(replace(STATUS, tick=2, newest_tick=2, batch_rows=9, batches=1, counts=counts))
    assert progress.dead_letters() == {"orders": 1_007}
    assert progress.losses() == (
        "1,007 rows became dead letters: 1,007 of orders. See `headrace dead list`.\n"
        "Fields that the topic does not have were ignored: 3 of orders."
    )
    assert RunProgress().losses() == ""


@pytest.mark.spark
def test_a_run_with_dead_letters_ends_with_a_code_of_its_own_when_asked(
    shop: Shop, run: Run, spark: SparkSession
) -> None:
    options = "--until-caught-up", "--master", "local[2]", "--fail-on-dead-letters"
    declared = shop.file.read_text().replace("orders.group", 'orders.where("k IS NOT NULL").group')
    shop.file.write_text(declared + 'shop.view("newest", orders.to_table("k"))\n')
    command = "run", shop.file, *options, "--log", shop.log.address
    shop.feed(20)
    run(*command)
    with shop.log.producer("orders") as producer:
        producer.append([{"k": None, "v": 1}, {"k": None, "v": 2}])
    ended = run(*command, code=6)
    assert "2 rows became dead letters: 2 of " in ended.err
    assert run(*command).err == ""
    shop.check_totals()
