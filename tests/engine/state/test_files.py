"""State without Spark: files and their chains, the local store brought to an id by whatever way,
folding, sweeping.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headrace.columnar.keys import KEY_GROUPS
from headrace.engine.state import files
from headrace.engine.state.files import StateIds
from headrace.engine.state.local_store import LocalStore
from headrace.engine.state.step_state import StepState
from headrace.errors import CorruptionError
from tests.engine.state.state_shard import ALL, STEP, Shard, apply, in_files, some_changes


def test_state_in_files_and_in_the_store_agree_with_a_plain_model(tmp_path: Path) -> None:
    shard, rng = Shard(tmp_path), random.Random(1)
    ids: StateIds = {}
    model: dict[bytes, bytes] = {}
    for number in range(30):
        changes = some_changes(rng, 40)
        ids, model = shard.batch(ids, changes), apply(model, changes)
        assert shard.how == ("rebuilt" if number == 0 else "there")
        assert in_files(shard.files, ids) == model
    assert shard.content(ids) == model


def test_a_repeated_batch_goes_back_by_the_undo_and_gives_the_same(tmp_path: Path) -> None:
    shard, rng = Shard(tmp_path), random.Random(2)
    first = shard.batch({}, some_changes(rng, 100))
    changes = some_changes(rng, 100)
    failed = shard.batch(first, changes)
    again = shard.batch(first, changes)
    assert shard.how == "undone"
    assert failed != again
    assert in_files(shard.files, failed) == in_files(shard.files, again) == shard.content(again)
    assert shard.content(first) == in_files(shard.files, first)


def test_a_store_that_is_elsewhere_is_rebuilt(tmp_path: Path) -> None:
    shard, rng = Shard(tmp_path), random.Random(3)
    states: list[StateIds] = [{}]
    for _ in range(5):
        states.append(shard.batch(states[-1], some_changes(rng, 50)))
    assert shard.content(states[2]) == in_files(shard.files, states[2])
    assert shard.how == "rebuilt"
    assert shard.content(states[5]) == in_files(shard.files, states[5])


@pytest.mark.parametrize("damage", ["deleted", "truncated", "foreign", "another boot"])
def test_a_store_that_was_lost_or_damaged_is_rebuilt(tmp_path: Path, damage: str) -> None:
    shard = Shard(tmp_path)
    ids = shard.batch({}, some_changes(random.Random(4), 150))
    data, about = shard.local / "data.mdb", shard.local / "about.json"
    if damage == "deleted":
        data.unlink()
    elif damage == "truncated":
        data.write_bytes(data.read_bytes()[:-4096])
    elif damage == "foreign":
        about.write_text("{}")
    else:
        about.write_text(about.read_text().replace('"boot": "', '"boot": "00'))
    assert shard.content(ids) == in_files(shard.files, ids)
    assert shard.how == "rebuilt"


def test_more_or_fewer_shards_regroup_the_same_state(tmp_path: Path) -> None:
    whole, rng = Shard(tmp_path), random.Random(5)
    ids = whole.batch({}, some_changes(rng, 150))
    parts = [Shard(tmp_path, range(50)), Shard(tmp_path, range(50, KEY_GROUPS))]
    changes = some_changes(rng, 100)
    expected = apply(in_files(whole.files, ids), changes)
    import pyarrow as pa

    from headrace.columnar.keys import key_groups

    for part in parts:
        mine = {
            key: value
            for key, value in changes.items()
            if key_groups(pa.array([key], pa.binary()))[0] in part.groups
        }
        ids = {**ids, **part.batch(ids, mine)}
    assert in_files(whole.files, ids) == expected
    assert whole.content(ids) == expected


def test_deltas_are_folded_before_they_outgrow_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engine.state.folding_schedule._SMALL_BYTES", 200)
    shard, rng = Shard(tmp_path), random.Random(6)
    ids: StateIds = {}
    model: dict[bytes, bytes] = {}
    for _ in range(120):
        changes = some_changes(rng, 30)
        ids, model = shard.batch(ids, changes), apply(model, changes)
    assert in_files(shard.files, ids) == model
    longest = max(len(list(shard.files.chain(group, name))) for group, name in ids.items())
    assert longest < 100
    assert len(set(shard.files.reach([ids]))) < len(list((tmp_path / "files").glob("*.state")))


def test_keys_too_long_for_the_store_are_kept_apart(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    keys = {b"x" * 1000 + bytes([number]): b"%d" % number for number in range(5)}
    ids = shard.batch({}, dict(keys))
    store = LocalStore.open(shard.local, list(ALL))
    with store.transaction() as txn:
        assert txn.bring_to({STEP: ids}, [STEP], {STEP: shard.files}) == "there"
        assert StepState(txn, 1).get(list(keys)) == list(keys.values())
    store.close()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    ids = shard.batch({}, some_changes(random.Random(7), 10))
    (path,) = (tmp_path / "files").glob("*.state")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CorruptionError, match=path.name):
        in_files(shard.files, ids)


def test_no_byte_of_a_file_can_change_unnoticed(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    ids = shard.batch({}, some_changes(random.Random(7), 10))
    (path,) = (tmp_path / "files").glob("*.state")
    sound = path.read_bytes()
    for position in random.Random(8).sample(range(len(sound)), 100):
        path.write_bytes(sound[:position] + bytes([sound[position] ^ 1]) + sound[position + 1 :])
        with pytest.raises(CorruptionError, match="checksum"):
            in_files(shard.files, ids)
    path.write_bytes(sound)
    assert in_files(shard.files, ids)


def test_wide_rows_are_compressed_and_those_of_earlier_versions_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(7)
    letters = b"abcdefghijklmnopqrstuvwxyz"
    changes: dict[bytes, bytes | None] = {
        b"key %d" % number: bytes(rng.choices(letters, k=200)) for number in range(1_000)
    }
    shard = Shard(tmp_path)
    with monkeypatch.context() as earlier:
        earlier.setattr(files, "MIN_COMPRESSED_BYTES", 1 << 60)
        plain = shard.batch({}, changes)
    (plain_file,) = shard.files.directory.glob("*.state")
    rewritten = {key: value + b"!" for key, value in changes.items() if value is not None}
    ids = shard.batch(plain, dict(rewritten))
    (wide_file,) = set(shard.files.directory.glob("*.state")) - {plain_file}
    assert plain_file.stat().st_size > 200_000
    assert wide_file.stat().st_size < 0.75 * plain_file.stat().st_size
    assert in_files(shard.files, plain) == shard.content(plain) == changes
    assert in_files(shard.files, ids) == shard.content(ids) == rewritten
