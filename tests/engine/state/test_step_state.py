"""A step's state over the local store, beside the same in memory: whatever kernels do with it, as
lists or as columns; and what is left of it in files and undo.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.columnar.keys import KEY_GROUPS, key_groups
from headrace.engine.state.files import StateFiles, StateIds
from headrace.engine.state.local_store import LocalStore
from headrace.engine.state.step_state import StepState, write_states
from headrace.operators.kernel import Groups, KeyedState
from headrace.testing.kernels import MemoryState

STEP, OTHER = "step", "other"
ALL = range(KEY_GROUPS)

keys = (
    st.binary(max_size=3)
    | st.binary(min_size=8, max_size=8)
    | st.sampled_from([b"x" * 399 + b"a", b"x" * 400 + b"a", b"x" * 400 + b"b"])
)
values = st.none() | st.binary(max_size=3) | st.binary(min_size=33, max_size=33)
entries = st.dictionaries(keys, values, max_size=8)
filed = st.none() | st.integers(
    0, KEY_GROUPS - 1
)  # a group to file entries under, or the keys' own
action = st.tuples(st.sampled_from(["get", "put", "get and put"]), st.booleans(), entries, filed)
batches = st.lists(st.lists(action, max_size=5), min_size=1, max_size=4)


class Shard:
    """A shard with two steps; the other has entries with the same keys, which must stay apart."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = {name: StateFiles(root / name) for name in (STEP, OTHER)}
        self.ids: dict[str, StateIds] = {STEP: {}, OTHER: {}}
        self.how = ""

    @contextmanager
    def batch(
        self, ids: dict[str, StateIds] | None = None, *, local: str = "local"
    ) -> Iterator[StepState]:
        store = LocalStore.open(self.root / local, list(ALL))
        held = ids or self.ids
        with store.transaction() as txn:
            self.how = txn.bring_to(held, [STEP, OTHER], self.files)
            states = {STEP: StepState(txn, 1), OTHER: StepState(txn, 2)}
            states[OTHER].put([b"", b"\0\0", b"\xff\xff"], [b"other"] * 3)
            yield states[STEP]
            self.ids, _ = write_states(txn, states, self.files, held)
        store.close()


def groups_of(found: dict[bytes, Any], group: int | None) -> Groups | None:
    """Keys under one group must not be found under another: those of a given group have it in
    front.
    """
    return None if group is None else np.full(len(found), group, np.uint8)


def named(found: dict[bytes, Any], group: int | None) -> dict[bytes, Any]:
    return (
        found if group is None else {b"%03d" % group + key: value for key, value in found.items()}
    )


def do(
    state: KeyedState, what: str, as_columns: bool, found: dict[bytes, Any], group: int | None
) -> list[bytes | None]:
    """Carry out an action; returns what was got."""
    found, groups = named(found, group), groups_of(found, group)
    names, stored = list(found), list(found.values())
    got: list[bytes | None] = []
    if as_columns:
        column = pa.array(names, pa.binary())
        if "get" in what:
            got = state.get_array(column, groups).to_pylist()
        if "put" in what:
            state.put_array(column, pa.array(stored, pa.binary()), groups)
        return got
    if "get" in what:
        got = state.get(names, groups)
    if "put" in what:
        state.put(names, stored, groups)
    return got


def content(
    state: KeyedState, low: bytes = b"", high: bytes = b"\xff" * 500
) -> list[tuple[bytes, bytes, int]]:
    """All that is there, without long keys, which a store shows as it has them."""
    return sorted(each for each in zip(*state.scan(low, high), strict=True) if len(each[0]) < 300)


@given(batches)
@settings(max_examples=60, deadline=None)
def test_whatever_kernels_do_it_is_as_in_memory_and_so_are_undo_files_and_a_store_filled_from_them(
    history: list[list[Any]],
) -> None:
    model = MemoryState()
    with tempfile.TemporaryDirectory() as root:
        shard = Shard(Path(root))
        for actions in history:
            before, held = model.copy(), shard.ids
            with shard.batch() as state:
                assert [do(state, *each) for each in actions] == [
                    do(model, *each) for each in actions
                ]
                check_scans(state, model)
            after = shard.ids
            with shard.batch(held) as state:
                assert shard.how == (
                    "undone"
                    if after[STEP] != held[STEP] or after[OTHER] != held[OTHER]
                    else "there"
                )
                check_scans(state, before)
                again = [do(state, *each) for each in actions]
            assert len(again) == len(actions)
            with shard.batch(local="another machine") as state:
                check_scans(state, model)


def check_scans(state: StepState, model: MemoryState) -> None:
    assert len(state.scan(b"", b"\xff" * 500)[0]) == len(model.values)
    for low, high in ((b"", b"\xff" * 500), (b"\x01", b"\x80"), (b"050", b"060"), (b"1", b"1")):
        assert content(state, low, high) == content(model, low, high)
        if all(len(key) < 300 for key in model.values):
            assert state.first(low, high) == model.first(low, high)


def test_a_key_that_comes_twice_in_a_put_has_its_last_value(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    with shard.batch() as state:
        state.put([b"a", b"b", b"a"], [b"1", b"2", b"3"])
        assert state.get([b"a", b"b"]) == [b"3", b"2"]
    found = {
        key: value
        for rows in shard.files[STEP].load(ALL, shard.ids[STEP]).values()
        for key, value in rows.items()
    }
    assert found == {b"a": b"3", b"b": b"2"}


def test_fixed_size_and_sliced_columns_are_taken_as_they_are(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    numbers = np.arange(1000, dtype=">u8")
    column = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(8), 1000, [None, pa.py_buffer(numbers.tobytes())]
    ).slice(100, 500)
    stored = pa.array([b"%d" % number for number in range(700)], pa.binary()).slice(200, 500)
    with shard.batch() as state:
        assert state.get_array(column).null_count == 500
        state.put_array(column, stored)
        assert state.get_array(column).equals(stored)
    with shard.batch() as state:
        assert state.get([number.to_bytes(8, "big") for number in (100, 101, 102)]) == [
            b"200",
            b"201",
            b"202",
        ]
        assert state.get_array(column).equals(stored)
    in_files = shard.files[STEP].load(ALL, shard.ids[STEP])
    groups = key_groups(column)
    assert all(
        in_files[int(group)][key] == value
        for group, key, value in zip(groups, column.to_pylist(), stored.to_pylist(), strict=True)
    )


def test_what_was_just_got_is_not_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    shard = Shard(tmp_path)
    with shard.batch() as state:
        real = state.store.get

        def noted(names: Sequence[bytes]) -> list[bytes | None]:
            asked.append(len(names))
            return real(names)

        monkeypatch.setattr(state.store, "get", noted)
        column = pa.array([b"a", b"b"], pa.binary())
        state.get_array(column)
        state.put_array(column, pa.array([b"1", None], pa.binary()))
        assert asked == [2]
        state.put_array(column, pa.array([None, b"2"], pa.binary()))
        assert asked == [2, 2]
    with shard.batch() as state:
        assert state.get([b"a", b"b"]) == [None, b"2"]
