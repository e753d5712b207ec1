"""A pipeline in a file of its own and the `headrace run` that runs it, in a process or a thread."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.views.reader import ViewReader
from tests.cli.conftest import CommandResult, Run
from tests.waits import wait_until

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
            raise OSError("broken on purpose")
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
