"""The end of a shard's batch: what the kernels changed becomes durable, and the local store knows what it holds and how to go back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.engine.chain_sizes import ChainSizes
from headrace.engine.local_store import StoreTransaction
from headrace.engine.state_files import GROUPS, StateFiles, StateIds, share
from headrace.engine.step_state import Changed, StepState

_LONGEST = 1 << 10  # longer than any key that the store takes


def write_states(
    txn: StoreTransaction, states: Mapping[str, StepState], files: Mapping[str, StateFiles], held: Mapping[str, StateIds]
) -> tuple[dict[str, StateIds], int]:
    """Returns the new ids of each step's states, which were `held` before, and how many keys changed.

    1. What changed goes into delta files. 2. Groups whose deltas have outgrown them are folded into snapshots. 3. What was there before is kept, to go back to.
    4. The store is stamped with the new ids.
    """
    fresh = {step: dict(held[step]) for step in states}
    undo = []
    for step, state in states.items():
        if (changed := state.changed()) is None:
            continue
        sizes = txn.sizes.setdefault(step, ChainSizes())
        written = _write_delta(files[step], changed, fresh[step], sizes)  # 1
        _fold(txn, state.number, files[step], fresh[step], sizes, written)  # 2
        undo.append((changed.stored, changed.before))
    kept = txn.keep_undo(*(pa.concat_arrays(column) for column in zip(*undo, strict=True))) if undo else None  # 3
    txn.stamp(fresh, list(states), before=held, undo=kept)  # 4
    return fresh, sum(len(keys) for keys, _ in undo)


def _write_delta(files: StateFiles, changed: Changed, ids: StateIds, sizes: ChainSizes) -> int:
    """Returns the file's size."""
    rows = np.bincount(changed.groups, minlength=GROUPS)
    touched = np.flatnonzero(rows).tolist()
    name, size = files.write(changed.keys, changed.after, changed.groups, {group: ids.get(group) for group in touched})
    for group in touched:
        sizes.add(group, share(size, int(rows[group]), len(changed)), begins=group not in ids)
        ids[group] = name
    return size


def _fold(txn: StoreTransaction, number: int, files: StateFiles, ids: StateIds, sizes: ChainSizes, written_bytes: int) -> None:
    """All groups whose turn it is, as they are now, in one file."""
    chosen = sorted(sizes.to_fold(written_bytes))
    if not chosen:
        return
    contents = [txn.scan(bytes([number, group])) for group in chosen]
    counts = [len(content) for content in contents]
    keys, values = _columns([pair for content in contents for pair in content])
    name, size = files.write(keys, values, np.repeat(np.array(chosen, np.uint8), counts), dict.fromkeys(chosen))
    for group, count in zip(chosen, counts, strict=True):
        ids[group] = name
        sizes.add(group, share(size, count, sum(counts)), begins=True)


def _columns(pairs: Sequence[tuple[bytes, bytes]]) -> tuple[pa.Array, pa.Array]:
    """Keys, without step and group, and values."""
    keys = pa.array([key for key, _ in pairs], pa.binary())
    return pc.binary_slice(keys, 2, _LONGEST), pa.array([value for _, value in pairs], pa.binary())
