"""The local store is a cache that may be lost, cut short, replaced or left behind by a killed
attempt: what it holds afterwards is what the files say.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import lmdb
import pyarrow as pa
import pytest

from headrace.engine.state import local_store
from headrace.engine.state.files import StateIds
from headrace.engine.state.local_store import LocalStore, StoreTransaction
from tests.engine.state.state_shard import Shard, apply, in_files, some_changes


class Died(Exception):
    """Where a process would have been killed."""


def test_an_attempt_that_died_behind_its_undo_does_not_spoil_the_undo_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt took in many ticks and was not committed; the second, of fewer ticks, dies
    between its undo and the store's commit.
    """
    shard = Shard(tmp_path)
    ids = shard.batch({}, {b"a": b"1", b"b": b"1"})
    shard.batch(ids, {b"a": b"2", b"b": b"2"})
    real = StoreTransaction.keep_undo

    def dies_behind(txn: StoreTransaction, keys: pa.Array, values: pa.Array) -> str:
        real(txn, keys, values)
        raise Died

    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(StoreTransaction, "keep_undo", dies_behind)
        shard.batch(ids, {b"a": b"2"})
    assert shard.content(ids) == in_files(shard.files, ids) == {b"a": b"1", b"b": b"1"}
    assert shard.how == "undone"


def test_undo_files_do_not_pile_up(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    ids: StateIds = {}
    for number in range(5):
        ids = shard.batch(ids, {b"k": b"%d" % number})
    assert len(list(shard.local.glob("*.undo"))) == 1


@pytest.mark.parametrize("kept", ["0", "1", "4096", "5000", "8192", "half", "-4096", "-1"])
@pytest.mark.parametrize("about", ["intact", "missing", "older"])
def test_a_store_that_was_cut_short_is_filled_again(tmp_path: Path, kept: str, about: str) -> None:
    """With `about.json` of an earlier commit, as a killed process leaves it, the length that it
    states proves nothing.
    """
    shard = Shard(tmp_path)
    ids = shard.batch({}, some_changes(random.Random(1), 20))
    first = (shard.local / "about.json").read_text()
    model = in_files(shard.files, ids)
    more = {b"more%d" % number: b"x" * 100 for number in range(2000)}
    ids = shard.batch(ids, dict(more))
    data = shard.local / "data.mdb"
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2 if kept == "half" else int(kept)])
    if about == "missing":
        (shard.local / "about.json").unlink()
    elif about == "older":
        (shard.local / "about.json").write_text(first)
    assert shard.content(ids) == in_files(shard.files, ids) == apply(model, dict(more))
    assert shard.how == "rebuilt"


@pytest.mark.parametrize("byte", [b"\0", b"x"])
def test_a_file_that_is_no_store_is_replaced(tmp_path: Path, byte: bytes) -> None:
    shard = Shard(tmp_path)
    ids = shard.batch({}, some_changes(random.Random(2), 50))
    data = shard.local / "data.mdb"
    data.write_bytes(byte * data.stat().st_size)
    assert shard.content(ids) == in_files(shard.files, ids)
    assert shard.how == "rebuilt"


def test_another_pipelines_store_in_its_place_is_not_believed(tmp_path: Path) -> None:
    shard, other = Shard(tmp_path / "ours"), Shard(tmp_path / "theirs")
    ids = shard.batch({}, {b"a": b"ours"})
    other.batch({}, {b"a": b"theirs", b"b": b"theirs"})
    shutil.rmtree(shard.local)
    shutil.copytree(other.local, shard.local)
    assert shard.content(ids) == {b"a": b"ours"}
    assert shard.how == "rebuilt"


def test_a_store_that_fails_in_a_batch_is_thrown_away_for_the_next_attempt(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    ids = shard.batch({}, {b"a": b"1"})
    store = LocalStore.open(shard.local, list(shard.groups))
    with pytest.raises(lmdb.CorruptedError), store.transaction():
        raise lmdb.CorruptedError("a page is not what it should be")
    store.close()
    assert shard.content(ids) == {b"a": b"1"}
    assert shard.how == "rebuilt"


def test_a_store_of_other_key_groups_or_steps_is_filled_again(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    ids = shard.batch({}, some_changes(random.Random(3), 50))
    part = Shard(tmp_path, range(64))
    part.local = shard.local
    mine = {group: name for group, name in ids.items() if group < 64}
    assert part.content(mine) == {
        key: value
        for group, content in part.files.load(range(64), ids).items()
        for key, value in content.items()
    }
    assert part.how == "rebuilt"


def test_a_store_stays_open_in_its_process_and_is_looked_at_before_it_is_used_again(
    tmp_path: Path,
) -> None:
    """What is damaged or replaced while it is open must not be read: it would end the process."""
    directory = tmp_path / "store"
    first = local_store.open_environment(directory)
    local_store.release_environment(directory, first)
    assert local_store.open_environment(directory) is first
    local_store.release_environment(directory, first)
    shutil.rmtree(directory)
    second = local_store.open_environment(directory)
    assert second is not first
    with second.begin(write=True) as txn:
        txn.put(b"key", b"value" * 10_000)
    local_store.release_environment(directory, second)
    data = directory / local_store.DATA
    data.write_bytes(b"")
    third = local_store.open_environment(directory)
    assert third is not second
    local_store.release_environment(directory, third)
    data.write_bytes(b"x" * 8192)
    with pytest.raises(lmdb.Error):
        local_store.open_environment(directory)


def test_a_process_does_not_keep_too_many_stores_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_store, "_MAX_IDLE", 4)
    for number in range(20):
        local_store.release_environment(
            tmp_path / str(number), local_store.open_environment(tmp_path / str(number))
        )
    assert len(local_store._idle) == 4
