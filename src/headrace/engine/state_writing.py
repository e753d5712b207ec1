"""The end of a shard's batch: what the kernels changed becomes durable, and the local store knows what it holds and how to go back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.engine.chain_sizes import ChainSizes
from headrace.engine.local_store import StoreTransaction
from headrace.engine.state_files import GROUPS, StateFile, StateFiles, StateIds, folded, growth, weights
from headrace.engine.step_state import Changed, StepState

_LONGEST = 1 << 10  # longer than any key that the store takes


def write_states(
    txn: StoreTransaction, states: Mapping[str, StepState], files: Mapping[str, StateFiles], held: Mapping[str, StateIds]
) -> tuple[dict[str, StateIds], int]:
    """Returns the new ids of each step's states, which were `held` before, and how many keys changed.

    1. What changed goes into delta files. 2. Chains that have grown long are folded or merged. 3. What was there before is kept, to go back to.
    4. The store is stamped with the new ids.
    """
    fresh = {step: dict(held[step]) for step in states}
    undo = []
    for step, state in states.items():
        if (changed := state.changed()) is None:
            continue
        sizes = txn.sizes.setdefault(step, ChainSizes())
        _write_delta(files[step], changed, fresh[step], sizes)  # 1
        _fold(txn, state.number, files[step], fresh[step], sizes)  # 2
        _merge(files[step], fresh[step], sizes)
        undo.append((changed.stored, changed.before))
    kept = txn.keep_undo(*(pa.concat_arrays(column) for column in zip(*undo, strict=True))) if undo else None  # 3
    txn.stamp(fresh, list(states), before=held, undo=kept)  # 4
    return fresh, sum(len(keys) for keys, _ in undo)


def _write_delta(files: StateFiles, changed: Changed, ids: StateIds, sizes: ChainSizes) -> None:
    touched = np.unique(changed.groups).tolist()
    name = files.write(changed.keys, changed.after, changed.groups, {group: ids.get(group) for group in touched})
    of_rows = weights(changed.keys, changed.after), growth(changed.keys, changed.before, changed.after)
    written, more = (np.bincount(changed.groups, each, minlength=GROUPS).astype(np.int64) for each in of_rows)
    for group in touched:
        if group in ids:
            sizes.add(group, int(written[group]), more=int(more[group]))
        else:
            sizes.begin(group, int(written[group]))
            sizes.holds(group, int(more[group]))  # not what it deletes in vain
        ids[group] = name
    sizes.earn(int(written.sum()))


def _fold(txn: StoreTransaction, number: int, files: StateFiles, ids: StateIds, sizes: ChainSizes) -> None:
    """All groups whose turn it is, as they are now, in one file."""
    chosen = sorted(sizes.to_fold())
    if not chosen:
        return
    contents = [_columns(*txn.scan(bytes([number, group]))) for group in chosen]
    name, sizes_now = _written(files, chosen, contents, dict.fromkeys(chosen))
    for group, size in zip(chosen, sizes_now, strict=True):
        ids[group] = name
        sizes.folded(group, size)


def _merge(files: StateFiles, ids: StateIds, sizes: ChainSizes) -> None:
    """The newest deltas of all groups, in one file that stands in their place."""
    chosen = sizes.to_merge()
    if not chosen:
        return
    cache: dict[str, StateFile] = {}
    chains = {group: list(files.chain(group, ids[group], most=count, cache=cache)) for group, count in chosen.items()}
    contents = [folded(chain, group, with_deletions=True) for group, chain in chains.items()]
    name, sizes_now = _written(files, list(chosen), contents, {group: chain[-1].parents[group] for group, chain in chains.items()})
    for group, size in zip(chosen, sizes_now, strict=True):
        ids[group] = name
        sizes.merged(group, size)


def _written(
    files: StateFiles, groups: Sequence[int], contents: Sequence[tuple[pa.Array, pa.Array]], parents: Mapping[int, str | None]
) -> tuple[str, list[int]]:
    """A file with the keys and values of some groups; returns its id, and the bytes of each group in it."""
    counts = [len(keys) for keys, _ in contents]
    keys, values = (pa.concat_arrays(column) for column in zip(*contents, strict=True))
    name = files.write(keys, values, np.repeat(np.array(groups, np.uint8), counts), parents)
    return name, [int(weights(*content).sum()) for content in contents]


def _columns(keys: Sequence[bytes], values: Sequence[bytes]) -> tuple[pa.Array, pa.Array]:
    """Keys, without step and group, and values."""
    return pc.binary_slice(pa.array(keys, pa.binary()), 2, _LONGEST), pa.array(values, pa.binary())
