"""A shard as the engine drives it, without Spark: for tests of state files and the local store."""

from __future__ import annotations

import random
from pathlib import Path

from headrace.columnar.keys import KEY_GROUPS
from headrace.engine.state.files import StateFiles, StateIds
from headrace.engine.state.local_store import LocalStore
from headrace.engine.state.step_state import StepState, write_states

ALL = range(KEY_GROUPS)
STEP = "step"


class Shard:
    """A shard as the engine drives it, with one step."""

    def __init__(self, root: Path, groups: range = ALL) -> None:
        self.files, self.groups, self.local = (
            StateFiles(root / "files"),
            groups,
            root / f"local-{groups.start}-{groups.stop}",
        )
        self.how = ""

    def batch(self, ids: StateIds, changes: dict[bytes, bytes | None]) -> StateIds:
        """Apply changes on top of a state; returns the new one's ids."""
        store = LocalStore.open(self.local, list(self.groups))
        wanted = {STEP: {group: name for group, name in ids.items() if group in self.groups}}
        with store.transaction() as txn:
            self.how = txn.bring_to(wanted, [STEP], {STEP: self.files})
            state = StepState(txn, 1)
            state.put(list(changes), list(changes.values()))
            fresh, _ = write_states(txn, {STEP: state}, {STEP: self.files}, wanted)
        store.close()
        return fresh[STEP]

    def content(self, ids: StateIds) -> dict[bytes, bytes]:
        """What the local store holds once brought to a state."""
        store = LocalStore.open(self.local, list(self.groups))
        with store.transaction() as txn:
            self.how = txn.bring_to({STEP: ids}, [STEP], {STEP: self.files})
            found = {
                key[2:]: value
                for group in self.groups
                for key, value in zip(*txn.scan(bytes([1, group])), strict=True)
            }
        store.close()
        return found


def in_files(files: StateFiles, ids: StateIds) -> dict[bytes, bytes]:
    return {
        key: value for content in files.load(ALL, ids).values() for key, value in content.items()
    }


def some_changes(rng: random.Random, count: int) -> dict[bytes, bytes | None]:
    return {
        b"k%d" % rng.randrange(200): None if rng.random() < 0.2 else b"v%d" % rng.randrange(10**6)
        for _ in range(count)
    }


def apply(model: dict[bytes, bytes], changes: dict[bytes, bytes | None]) -> dict[bytes, bytes]:
    return {key: value for key, value in {**model, **changes}.items() if value is not None}
