"""Sweeping without Spark: what entries lead to stays, whatever is young stays, all else goes; a
little at a time.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from headrace.engine.state.files import StateIds
from headrace.engine.state.sweeper import Sweeper
from headrace.engine.watermarks import (
    InputWatermark,
    WatermarkState,
    sweep_watermarks,
    write_watermarks,
)
from headrace.errors import CorruptionError
from tests.engine.state.state_shard import Shard, apply, in_files, some_changes

LONG_AGO_S = time.time() - 10_000


class Past:
    """A step with a history of batches, and a sweeper for it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, batches: int = 80) -> None:
        monkeypatch.setattr("headrace.engine.state.folding_schedule._SMALL_BYTES", 200)
        self.state = root / "state"
        shard, rng = Shard(root), random.Random(3)
        shard.files.directory = self.state / "steps" / "s"
        self.files = shard.files
        self.history: list[tuple[StateIds, dict[bytes, bytes]]] = [({}, {})]
        for _ in range(batches):
            changes = some_changes(rng, 30)
            ids, model = self.history[-1]
            self.history.append((shard.batch(ids, changes), apply(model, changes)))
        self.roots = {"s": [ids for ids, _ in self.history[-3:]]}
        self.sweeper = Sweeper(
            self.state, self.state / "local", lambda: self.roots, lambda: {2}, lambda: {"main"}
        )

    def age(self) -> None:
        """As if everything that is there were from long ago."""
        for path in self.state.rglob("*"):
            os.utime(path, (LONG_AGO_S, LONG_AGO_S))

    def count(self) -> int:
        return len(list(self.files.directory.glob("*")))


@pytest.fixture
def past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Past:
    return Past(tmp_path, monkeypatch)


def test_what_entries_lead_to_stays_and_the_rest_goes(past: Past) -> None:
    past.age()
    before = past.count()
    removed = past.sweeper.finish()
    assert 0 < removed == before - past.count()
    assert past.count() == len(set(past.files.reach(past.roots["s"])))
    for ids, model in past.history[-3:]:
        assert in_files(past.files, ids) == model
    assert past.sweeper.finish() == 0


def test_the_state_goes_on_from_what_was_swept(past: Past) -> None:
    past.age()
    past.sweeper.finish()
    ids, model = past.history[-1]
    shard = Shard(past.state.parent / "elsewhere")
    shard.files = past.files
    changes = some_changes(random.Random(4), 40)
    assert in_files(past.files, shard.batch(ids, changes)) == apply(model, changes)


def test_what_is_young_stays_since_a_batch_may_be_under_way(past: Past) -> None:
    assert past.sweeper.finish() == 0
    (past.files.directory / ".unfinished").write_text("")
    past.age()
    (past.state / "jobs" / "now").mkdir(parents=True)
    (past.state / "jobs" / "over").mkdir()
    os.utime(past.state / "jobs" / "over", (LONG_AGO_S, LONG_AGO_S))
    past.sweeper.finish()
    assert not (past.files.directory / ".unfinished").exists()
    assert [path.name for path in (past.state / "jobs").iterdir()] == ["now"]


def test_local_stores_of_another_number_of_shards_go(past: Past, tmp_path: Path) -> None:
    local = tmp_path / "state" / "local" / "main"
    for stage in ("one", "3-of-4"):
        for shard in ("0-of-2", "1-of-2", "0-of-3"):
            (local / stage / shard).mkdir(parents=True)
            (local / stage / shard / "data.mdb").write_text("")
    past.age()
    past.sweeper.finish()
    assert sorted(str(path.relative_to(local)) for path in local.glob("*/*")) == [
        "3-of-4/0-of-2",
        "3-of-4/1-of-2",
        "one/0-of-2",
        "one/1-of-2",
    ]


def test_a_round_takes_as_many_turns_as_it_needs(past: Past) -> None:
    past.age()
    expected = len(set(past.files.reach(past.roots["s"])))
    turns = 0
    while past.count() > expected:
        before = past.count()
        past.sweeper.work(budget_s=0.0005)
        turns += 1
        assert before - past.count() < 500
        assert turns < 10_000
    assert turns > 3
    for _ in range(100):
        past.sweeper.work()

    def too_early() -> dict[str, list[StateIds]]:
        raise AssertionError("the next round is not due for minutes")

    past.sweeper.roots = too_early
    past.sweeper.work()
    with pytest.raises(AssertionError, match="not due"):
        past.sweeper.finish()


def test_files_of_a_step_whose_chain_is_broken_are_left_alone(past: Past) -> None:
    past.age()
    newest = next(iter(past.roots["s"][-1].values()))
    (past.files.directory / f"{newest}.state").unlink()
    before = past.count()
    with pytest.raises(CorruptionError, match=newest):
        past.sweeper.finish()
    assert past.count() == before


def test_a_step_that_no_entry_speaks_of_goes_once_it_is_old(past: Past) -> None:
    past.roots = {}
    past.age()
    assert past.sweeper.finish() == 0, "nothing is known yet"
    young = past.files.directory / "young.state"
    young.write_text("")
    past.roots = {"another": []}
    assert past.sweeper.finish() > 10
    assert list(past.files.directory.iterdir()) == [young]
    past.age()
    past.sweeper.finish()
    assert not past.files.directory.exists()


def test_local_stores_of_queries_that_are_over_go(past: Past) -> None:
    local = past.state / "local"
    for query in ("main", "added-2", "added-3"):
        (local / query / "s" / "0-of-2").mkdir(parents=True)
        (local / query / "s" / "0-of-2" / "data.mdb").write_text("")
    past.age()
    os.utime(local / "added-3")
    past.sweeper.finish()
    assert sorted(path.name for path in local.iterdir()) == ["added-3", "main"]


def test_clocks_of_a_newer_runner_stay_however_long_an_older_one_was_held_up(
    tmp_path: Path,
) -> None:
    mine, before, newer = (
        write_watermarks(tmp_path, WatermarkState({"orders": InputWatermark(n)})) for n in range(3)
    )
    begun_s = time.time()
    for name, age_s in ((mine, 500), (before, 400), (newer, 200)):
        os.utime(tmp_path / f"{name}.clocks", (begun_s - age_s,) * 2)
    sweep_watermarks(tmp_path, {mine}, begun_s=begun_s - 300)
    assert {path.stem for path in tmp_path.iterdir()} == {mine, newer}
