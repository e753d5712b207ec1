"""A pipeline in a child process that is killed at given points and started again, to its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from headrace.log.api import Log
from tests.crash.engine_child import Plan

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORKER, DRIVER = "self", "driver"
PATIENCE_S = 1800


def run_through(
    root: Path, address: str, name: str, plan: Plan, *, deaths: int, kind: str = "numbers"
) -> None:
    """Start the program until it ends. It must die exactly `deaths` times, always of SIGKILL."""
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
