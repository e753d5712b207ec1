"""A pipeline in a child process that is killed at given points and started again, to its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import headrace as hr
from headrace.log.api import Log
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark
from headrace.views.reader import ViewReader
from tests.crash.engine_child import GROUPS, Plan, numbers

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORKER, DRIVER, JVM, EXECUTOR = "self", "driver", "jvm", "executor"
PATIENCE_S = 1800


def run_through(
    root: Path,
    address: str,
    name: str,
    plan: Plan,
    *,
    deaths: int,
    kind: str = "numbers",
    options: Sequence[str] = (),
) -> str:
    """Start the program until it ends. It must die exactly `deaths` times, always of SIGKILL.
    Returns what it printed at last.
    """
    armed = root / "armed"
    armed.mkdir()
    paths = [str(HERE / "inject"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HEADRACE_ARMED": str(armed),
    }
    command = [
        sys.executable,
        "-m",
        "tests.crash.engine_child",
        kind,
        name,
        address,
        str(root / "state"),
        json.dumps(plan),
        *options,
    ]
    for ending in [*[-signal.SIGKILL] * deaths, 0]:
        printed = root / "printed"  # no pipe: processes of a killed driver would hold it open
        with printed.open("w") as output:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=output,
                timeout=PATIENCE_S,
                check=False,
            )
        assert done.returncode == ending, printed.read_text()
    assert {path.stem for path in armed.iterdir()} == {
        point.replace(" ", "_") for point, _ in plan.values()
    }
    assert {path.suffix for path in armed.iterdir()} == {".struck"}
    return printed.read_text()


def in_order(log: Log, topic: str) -> list[list[tuple[Any, ...]]]:
    """Each partition's rows, without offsets and times, which a broker gives."""
    names = log.topic(topic).arrow_schema.names
    found = []
    for partition in range(2):
        table = log.read(topic, partition).to_table()
        kinds = (
            [table["_change_type"]]
            if "_change_type" in table.column_names
            else [table["_partition"]]
        )
        found.append(
            list(
                zip(
                    *(column.to_pylist() for column in [*kinds, *(table[name] for name in names)]),
                    strict=True,
                )
            )
        )
    return found


def in_turn(*kills: tuple[str, str]) -> Plan:
    """A plan of one kill per tick."""
    return dict(enumerate(kills, 1))


def prepared(root: Path, address: str, name: str, rows: int, ticks: int) -> None:
    """Rows in ticks, recorded, and nothing done yet. That needs no Spark."""
    session: Any = PlainSpark()
    root.mkdir()
    with hr.open_log(address) as log, PipelineTest(numbers(name), root, session, log=log) as test:
        for tick in range(ticks):
            first, stop = rows * tick // ticks, rows * (tick + 1) // ticks
            test.feed(
                f"{name}.numbers",
                [{"n": n, "k": n * n % GROUPS, "v": n % 1000 - 300} for n in range(first, stop)],
            )
            assert test.cut() == 1


class Outcome:
    """All that came out: topics in their order, views and their changes with ticks."""

    def __init__(self, log: Log, name: str, state: Path) -> None:
        self.topics = {topic: in_order(log, f"{name}.{topic}") for topic in ("totals", "copy")}
        with ViewReader(state / "views.db") as reader:
            self.views = {view.name: reader.table(view.name).to_pylist() for view in reader.views()}
            self.changes = {
                view.name: [
                    (tick, rows.to_pylist()) for tick, rows in reader.changes_since(view.name, 0)
                ]
                for view in reader.views()
            }

    def check(self, rows: int) -> None:
        """Against plain arithmetic."""
        copied = [row for partition in self.topics["copy"] for row in partition]
        assert Counter(row[1] for row in copied) == Counter(range(rows))
        assert all(v == n % 1000 - 300 for _, n, _, v in copied)
        assert [row["n"] for row in self.views["numbers"]] == list(range(rows))
        assert sum(row["n"] for row in self.views["totals"]) == rows
        assert sum(row["s"] for row in self.views["totals"]) == sum(
            n % 1000 - 300 for n in range(rows)
        )


def undisturbed(root: Path, address: str, name: str) -> Outcome:
    """Without Spark: that its rows are the same is part of what is to be shown."""
    session: Any = PlainSpark()
    with hr.open_log(address) as log, PipelineTest(numbers(name), root, session, log=log) as test:
        while test.step(1):
            continue
        return Outcome(log, name, root / "state")
