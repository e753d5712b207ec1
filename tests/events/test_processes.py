"""Many processes on one hot entity, some of them killed: nothing acknowledged is lost, nothing is
doubled, versions and offsets have no gaps, and who follows sees all of it once, in order.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import headrace as hr
from headrace.events import open_store
from headrace.events.event import RecordedEvent

pytestmark = pytest.mark.process

WRITERS = Path(__file__).with_name("writers.py")
Acknowledged = dict[int, list[tuple[int, int, int]]]


def run(directory: Path, writers: int, count: int, killed: int) -> Acknowledged:
    """Start writers, kill some of them in the middle, and collect what was acknowledged to each."""
    chosen = random.Random(writers)
    processes = [
        subprocess.Popen(
            [sys.executable, str(WRITERS), str(directory), str(number), str(count)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(writers)
    ]
    outputs: dict[int, str] = {}
    errors: dict[int, str] = {}

    def collect(number: int) -> None:
        outputs[number], errors[number] = processes[number].communicate()

    threads = [threading.Thread(target=collect, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    with hr.open_log(f"file:{directory}") as log, open_store(log, "bank") as store:
        for number in chosen.sample(range(writers), killed):
            deadline = time.monotonic() + 60
            goal = store.end() + chosen.randrange(1, 20)
            while (
                store.end() < goal
                and processes[number].poll() is None
                and time.monotonic() < deadline
            ):
                time.sleep(0.001)
            if processes[number].poll() is None:
                os.kill(processes[number].pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    for number, process in enumerate(processes):
        assert process.returncode in {0, -signal.SIGKILL}, errors[number]
    return {
        number: [
            tuple(map(int, line.split()))  # type: ignore[misc]
            for line in output.splitlines()
            if len(line.split()) == 3
        ]
        for number, output in outputs.items()
    }


def check(events: list[RecordedEvent], acknowledged: Acknowledged) -> None:
    assert [event.offset for event in events] == list(range(len(events)))
    hot = [event for event in events if event.entity == "hot"]
    assert [event.version for event in hot] == list(range(1, len(hot) + 1))
    stored = [(event.data["writer"], event.data["n"]) for event in hot]
    assert len(set(stored)) == len(stored)
    positions = {
        (event.data["writer"], event.data["n"]): (event.version, event.offset) for event in hot
    }
    for writer, lines in acknowledged.items():
        for n, version, offset in lines:
            assert positions[writer, n] == (version, offset)
        own = [event.data["n"] for event in events if event.entity == f"own-{writer}"]
        assert own == list(range(len(own)))
        assert len(own) == len(
            [one for one, _ in stored if one == writer]
        )  # both entities of an append, or neither
        assert len(lines) <= len(own) <= len(lines) + 1


@pytest.mark.parametrize(
    ("writers", "count", "killed"), [(4, 25, 2), pytest.param(16, 60, 5, marks=pytest.mark.slow)]
)
def test_processes_on_a_hot_entity(tmp_path: Path, writers: int, count: int, killed: int) -> None:
    directory = tmp_path / "log"
    followed: list[RecordedEvent] = []
    done = threading.Event()
    with hr.open_log(f"file:{directory}") as log, open_store(log, "bank") as store:

        def follow() -> None:
            reached = 0
            while not done.is_set() or reached < store.end():
                for event in store.follow(reached, idle="20 ms"):
                    followed.append(event)
                    reached = event.offset + 1

        follower = threading.Thread(target=follow)
        follower.start()
        acknowledged = run(directory, writers, count, killed)
        done.set()
        follower.join(timeout=60)
        events = list(store.read())
        assert [event.data["n"] for event in store.load("hot")] == [
            event.data["n"] for event in events if event.entity == "hot"
        ]
    assert sum(map(len, acknowledged.values())) >= (writers - killed) * count
    check(events, acknowledged)
    assert followed == events
    with hr.open_log(f"file:{directory}") as log, open_store(log, "bank") as store:
        assert store.version("hot") == len([event for event in events if event.entity == "hot"])
        assert log.verify() == []
