"""Chains of state files stay short, at a cost that follows the change: folding, merging, and their
bookkeeping, which survives the loss of the local store.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from headrace.columnar.keys import KEY_GROUPS
from headrace.engine.state.files import StateFile, StateIds
from headrace.engine.state.folding_schedule import FoldingSchedule
from headrace.engine.state.local_store import LocalStore
from tests.engine.state.state_shard import STEP, Shard, apply, in_files, some_changes


def sizes_of(shard: Shard, ids: StateIds) -> FoldingSchedule:
    store = LocalStore.open(shard.local, list(shard.groups))
    with store.transaction() as txn:
        txn.bring_to({STEP: ids}, [STEP], {STEP: shard.files})
        found = txn.schedules[STEP]
    store.close()
    return found


def sizes(schedule: FoldingSchedule) -> dict[int, tuple[int, int, int, int]]:
    return {
        group: (chain.first_bytes, chain.delta_bytes, chain.deltas, chain.live_bytes)
        for group, chain in schedule.chains.items()
    }


def test_sizes_are_the_same_when_they_are_computed_from_the_files_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engine.state.folding_schedule._SMALL_BYTES", 500)
    monkeypatch.setattr("headrace.engine.state.folding_schedule._MERGE_FILES", 12)
    shard, rng = Shard(tmp_path), random.Random(1)
    ids: StateIds = {}
    for _ in range(40):
        ids = shard.batch(ids, some_changes(rng, 40))
    kept = sizes_of(shard, ids)
    assert shard.how == "there"
    shutil.rmtree(shard.local)
    assert sizes(sizes_of(shard, ids)) == sizes(kept)
    assert any(chain.delta_bytes for chain in kept.chains.values())


def test_sizes_go_back_with_the_undo(tmp_path: Path) -> None:
    shard, rng = Shard(tmp_path), random.Random(2)
    first = shard.batch({}, some_changes(rng, 100))
    before = sizes(sizes_of(shard, first))
    shard.batch(first, some_changes(rng, 100))
    assert sizes(sizes_of(shard, first)) == before
    assert shard.content(first) == in_files(shard.files, first)


def test_a_store_that_is_behind_is_given_the_files_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, rng = Shard(tmp_path), random.Random(3)
    ids = shard.batch({}, some_changes(rng, 100))
    behind = Shard(tmp_path)
    behind.local = tmp_path / "another"
    assert behind.content(ids) == in_files(shard.files, ids)
    for _ in range(5):
        ids = shard.batch(ids, some_changes(rng, 30))
    read: list[str] = []
    real = behind.files.read

    def noted(name: str) -> StateFile:
        read.append(name)
        return real(name)

    monkeypatch.setattr(behind.files, "read", noted)
    assert behind.content(ids) == in_files(shard.files, ids)
    assert behind.how == "caught up"
    assert len(read) == 5
    assert sizes(sizes_of(behind, ids)) == sizes(sizes_of(shard, ids))


def test_many_small_deltas_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large state and small changes: it would take long until folding is worth it, and chains
    stay short all the same.
    """
    monkeypatch.setattr("headrace.engine.state.folding_schedule._MERGE_FILES", 10)
    shard, rng = Shard(tmp_path), random.Random(4)
    model = {b"k%d" % number: b"x" * 50 for number in range(3000)}
    ids = shard.batch({}, dict(model))
    for number in range(95):
        changes = {
            b"k%d" % rng.randrange(200): None if rng.random() < 0.2 else b"v%d" % number
            for _ in range(3)
        }
        held, ids, model = ids, shard.batch(ids, dict(changes)), apply(model, changes)
        if number % 20 == 0:
            shard.batch(held, dict(changes))  # an attempt that came to nothing
            assert shard.content(ids) == model
    longest = max(len(list(shard.files.chain(group, name))) for group, name in ids.items())
    assert longest < 1 + 10 + 95 / 10
    assert in_files(shard.files, ids) == model
    shutil.rmtree(shard.local)
    assert shard.content(ids) == model


def test_no_more_is_folded_than_deltas_pay_for() -> None:
    """A state that is only updated, a thousand times as large as a change: about a quarter as many
    bytes again, never many at once, and deltas at most six times the state.
    """
    known = FoldingSchedule()
    for group in range(KEY_GROUPS):
        known.start_chain(group, 1_000_000)
    folded: list[int] = []
    for _ in range(9000):
        for group in range(KEY_GROUPS):
            known.add_delta(group, 1000)
        known.add_credit(1000 * KEY_GROUPS)
        chosen = known.groups_to_fold()
        for group in chosen:
            known.record_fold(group, 1_000_000)
        folded.append(len(chosen))
        assert max(chain.delta_bytes for chain in known.chains.values()) < 6_200_000
    assert max(folded) == 1
    assert sum(folded[5000:]) * 1_000_000 == pytest.approx(
        0.25 * 4000 * 1000 * KEY_GROUPS, rel=0.05
    )


def test_chains_stay_short_where_all_keys_are_new() -> None:
    known = FoldingSchedule()
    for _ in range(1000):
        for group in range(KEY_GROUPS):
            _grow(known, group, 20_000)
        known.add_credit(20_000 * KEY_GROUPS)
        for group in known.groups_to_fold():
            known.record_fold(group, known.live_bytes(group))
        assert all(
            chain.deltas < 128 or chain.delta_bytes < 7 * chain.first_bytes
            for chain in known.chains.values()
        )


def _grow(known: FoldingSchedule, group: int, size: int) -> None:
    if known.live_bytes(group):
        known.add_delta(group, size, growth=size)
    else:
        known.start_chain(group, size)


def test_nothing_is_folded_while_all_of_it_is_there_still() -> None:
    """Few large deltas of keys that are all new: a snapshot would hold the same bytes once more."""
    known = FoldingSchedule()
    for _ in range(60):
        _grow(known, 0, 1_000_000)
        known.add_credit(1_000_000)
        assert not known.groups_to_fold()


def test_what_was_deleted_is_worth_folding() -> None:
    """Deltas that only delete are small, and what they leave behind in the files is not."""
    known = FoldingSchedule()
    known.start_chain(0, 1_000_000)
    for _ in range(9):
        known.add_delta(0, 10_000, growth=-100_000)
        known.add_credit(10_000)
    assert known.live_bytes(0) == 100_000
    known.add_credit(1_000_000)
    assert known.groups_to_fold() == [0]
