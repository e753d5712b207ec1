"""A run with a call is killed at random moments, and its service too: every row has one fate, and
no answer that is recorded is asked for again.
"""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pytest

from headrace.log import open_log
from headrace.log.api import Log
from headrace.log.dead_letters import read_dead_letters
from headrace.testing.pipelines import PipelineTest
from tests.calls.killed_child import declared
from tests.servers.answer_server import AnswerServer
from tests.waits import wait_until

ROOT = Path(__file__).parents[2]
START = datetime(2026, 1, 1, tzinfo=UTC)
ANSWERS = "__calls.numbers.double"


def recorded_keys(log: Log) -> set[str]:
    if ANSWERS not in log.topics():
        return set()
    keys = [row["_call"] for row in log.read(ANSWERS).to_pylist()]
    given = [key for key in keys if key is not None]
    assert len(given) == len(set(given)), "a row was answered twice"
    return set(given)


@pytest.mark.parametrize(("kills", "seed"), [(2, 0), pytest.param(60, 1, marks=pytest.mark.slow)])
def test_kills_of_the_run_and_of_the_service(tmp_path: Path, kills: int, seed: int) -> None:
    chance = Random(seed)
    server = AnswerServer(tmp_path / "server", fail=0.1, stall=0.01, twice=0.1, delay_s=0.01)
    server.start()
    log = open_log(f"file:{tmp_path / 'log'}")
    log.create_topic("numbers", "n BIGINT, at TIMESTAMP")
    count = 0
    try:
        for life in range(kills + 1):
            rows = [{"n": n, "at": START + timedelta(seconds=n)} for n in range(count, count + 60)]
            count += len(rows)
            with log.producer("numbers") as producer:
                producer.append(rows)
            before = server.asked()
            known = recorded_keys(log)
            (tmp_path / "settled").unlink(missing_ok=True)
            command = [sys.executable, "-m", "tests.calls.killed_child"]
            child = subprocess.Popen([*command, str(tmp_path), str(server.port)], cwd=ROOT)
            try:
                if life == kills:
                    wait_until((tmp_path / "settled").exists, 60)
                else:
                    wait_until(lambda: server.asked() != before, 60)  # noqa: B023
                    time.sleep(chance.uniform(0, 0.3))  # the moment of the kill
                    if chance.random() < 0.3:
                        server.kill()
                        server.start()
            finally:
                child.kill()
                child.wait()
            asked = server.asked()
            again = [key for key in known if asked[key] != before[key]]
            assert not again, "recorded answers were asked for again"
        check(log, tmp_path, server.port, count)
    finally:
        server.kill()
        log.close()


def check(log: Log, root: Path, port: int, count: int) -> None:
    answered = {row["n"]: row["double"] for row in log.read("answered").to_pylist()}
    assert sum(1 for _ in log.read("answered").to_pylist()) == len(answered)
    dead = set()
    if "double.dead" in log.topics():
        letters = read_dead_letters(log, "double")
        dead = {int(letter["row"].split('"n":')[1].split(",")[0]) for letter in letters}
        assert len(dead) == len(letters)
    assert answered == {n: 2 * n for n in range(count) if n not in dead}
    assert dead <= set(range(count))
    with PipelineTest(declared(port), root, log=log) as test:
        test.settle(final=True)
        windows = {row["window_start"]: (row["rows"], row["total"]) for row in test.view("windows")}
        expected: dict[datetime, tuple[int, int]] = {}
        for n, double in answered.items():
            start = START + timedelta(seconds=n // 10 * 10)
            rows, total = expected.get(start, (0, 0))
            expected[start] = rows + 1, total + double
        assert windows == expected
        version = test.replay("v2")
        version.settle()
        assert version.rows("answered.v2") == test.rows("answered")
        assert version.view("windows.v2") == test.view("windows")
