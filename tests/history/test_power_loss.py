"""Histories that end with a power cut. A kill cannot show that a sync is missing, since the kernel
keeps what was written; here what was not synced is lost, and the history must still hold.

The roles run in this process, on a disk that records every change. A second handle of the log reads
at the worst moment: whenever a commit is written and not yet synced.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace.log.file import producer, transaction
from headrace.log.file.committer import Committer
from headrace.log.file.log import FileLog
from headrace.log.file.state import State
from headrace.log.file.store import Store
from headrace.testing.power_loss import RebootedDisk, RecordingDisk, Trace
from tests.crash.workloads import shrink
from tests.history.checker import Anomaly, Kind, Rules, TopicRules, check, summary
from tests.history.client import (
    PARTITIONS,
    SCHEMA,
    Auditor,
    Client,
    ClientSettings,
    move,
    write,
)
from tests.history.history import History, Recorder
from tests.short_forms import examples

RULES = Rules(topics={"latest": TopicRules(is_compacted=True)})
ROUNDS = 25
"""How many operations each role does."""


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


class CountingRecorder(Recorder):
    """Notes with each line how many changes the disk had seen."""

    def __init__(self, path: Path, process: str, disk: RecordingDisk) -> None:
        super().__init__(path, process)
        self._disk = disk

    def write(self, line: Mapping[str, Any]) -> None:
        super().write({**line, "changes": len(self._disk.trace.changes)})


class BriefClient(Client):
    """A client that stops by itself after some rounds."""

    def __init__(self, log: FileLog, recorder: Recorder, settings: ClientSettings) -> None:
        super().__init__(log, recorder, settings)
        self._rounds = count()

    def is_stopped(self) -> bool:
        return next(self._rounds) >= ROUNDS


class RecordedLoad:
    """Writers and transactions on a recorded disk, and all that an auditor saw meanwhile."""

    def __init__(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, *, not_synced: str = "none"
    ) -> None:
        self.directory = directory
        self.disk = RecordingDisk(directory / "disk")
        self.lines: list[dict[str, Any]] = []
        histories = directory / "histories"
        histories.mkdir()
        log = FileLog.open(directory / "disk" / "log", disk=self.disk)
        reader = FileLog.open(directory / "disk" / "log", disk=self.disk)
        for topic, partitions in PARTITIONS.items():
            log.create_topic(topic, SCHEMA, key="key", partitions=partitions, segment_bytes=4_000)

        def client(role: str, of: FileLog) -> BriefClient:
            settings = ClientSettings(address="file:", directory=histories, role=role, pace_s=0.0)
            recorder = CountingRecorder(histories / f"{role}.history", settings.part, self.disk)
            return BriefClient(of, recorder, settings)

        auditor = Auditor(client("look", reader))
        sync = Committer._sync

        def look_and_sync(self: Committer, journal: Any) -> None:
            auditor.look()
            sync(self, journal)

        self.first_change = len(self.disk.trace.changes)
        self.disk.ignores_sync = lambda path: path.suffix == not_synced
        with monkeypatch.context() as patched:
            patched.setattr(Committer, "_sync", look_and_sync)
            move(client("move", log))
            write(client("write", log))
            auditor.look()
        self.trace: Trace = self.disk.freeze()
        log.close()
        reader.close()
        for path in sorted(histories.glob("*.history")):
            self.lines += [json.loads(line) for line in path.read_text().splitlines()]

    def cuts(self, total: int, chance: Random) -> Iterator[list[Anomaly]]:
        """What is wrong after each of some power cuts."""
        for number in range(total):
            after = chance.randint(self.first_change, len(self.trace.changes))
            mode = ("dropped", "mixed")[number % 2]
            yield self._cut(after, mode, chance)

    def _cut(self, after: int, mode: str, chance: Random) -> list[Anomaly]:
        into = self.directory / "crashed"
        self.trace.cut_power(after, into, mode=mode, chance=chance)
        try:
            lines = [line for line in self.lines if line["changes"] <= after]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            for role in {line["process"] for line in lines}:
                own = [line for line in text.splitlines() if json.loads(line)["process"] == role]
                (into / f"{role}.history").write_text("".join(f"{line}\n" for line in own))
            settings = ClientSettings(address="file:", directory=into, role="look")
            with FileLog.open(into / "log", disk=RebootedDisk()) as log:
                recorder = Recorder(into / "final.history", "final")
                Auditor(Client(log, recorder, settings)).look(is_final=True)
            return check(History.load(into), RULES)
        finally:
            shutil.rmtree(into)


def read_past_the_marker(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Readers see what is written, durable or not. Nothing is staged here: staged files are moved
    after the sync, so a reader that is too early would not find them.
    """
    monkeypatch.setattr(producer, "MAX_COMMIT_BYTES", 1 << 20)
    monkeypatch.setattr(transaction, "MAX_BYTES_IN_MEMORY", 1 << 20)
    view = Store.view

    def newest(self: Store) -> State:
        view(self)
        assert self._view is not None
        self._view.advance()
        return self._view.state

    monkeypatch.setattr(Store, "view", newest)
    return {}


def no_journal_sync(_: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"not_synced": ".journal"}


@pytest.mark.parametrize("mutate", [read_past_the_marker, no_journal_sync])
def test_a_history_with_a_power_cut_catches(
    mutate: Callable[[pytest.MonkeyPatch], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with monkeypatch.context() as patched:
        load = RecordedLoad(tmp_path, patched, **mutate(patched))
    found: set[Kind] = set()
    for anomalies in load.cuts(50, Random(1)):
        found |= {anomaly.kind for anomaly in anomalies}
        if Kind.LOST_WRITE in found:
            return
    pytest.fail(f"not found as a lost write, but as {sorted(found)}")


def test_a_history_with_a_power_cut_is_sound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    load = RecordedLoad(tmp_path, monkeypatch)
    assert {line["process"] for line in load.lines} == {"look-0", "move-0", "write-0"}
    seed = random.getrandbits(32)
    for number, anomalies in enumerate(load.cuts(examples(200), Random(seed))):
        assert not anomalies, f"cut {number} of seed {seed}:\n{summary(anomalies)}"
