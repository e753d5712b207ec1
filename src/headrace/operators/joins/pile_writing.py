"""Storing piles again: only the leaves and heads that changed, cut where they grew too large, deleted where nothing is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import BugError
from headrace.operators.accumulators.keeper import place_in_slot
from headrace.operators.buffers import Ints, Mask
from headrace.operators.joins.matching import begins, sorting
from headrace.operators.joins.piles import LEAF_HEADER, TREE, VERSION, Numbers, Piles, Records, Section, data_of, joined, pieces
from headrace.operators.joins.timers import Entries, moved
from headrace.operators.kernel import Groups
from headrace.operators.row_codec import cut_out

MOST_IN_A_LEAF = 64
_CUT_TO = 32
_NOTHING = pa.scalar(b"", pa.large_binary())


@dataclass(frozen=True)
class Bodies:
    """What sections hold in their heads from now on: for some keys the bytes and the count, with its top bit for leaves."""

    keys: Ints
    bytes: pa.Array
    counts: Ints


@dataclass(frozen=True)
class Chunks:
    """Rows of leaves that changed, cut into new leaves; `starts` in the rows, and their end."""

    leaves: Ints  # the old leaf that each comes from
    starts: Ints
    lows: Numbers
    bytes: pa.Array

    @property
    def counts(self) -> Ints:
        return np.diff(self.starts)


class PileWriter:
    """Takes in what sections hold now, then stores all of it."""

    def __init__(self, piles: Piles) -> None:
        self.piles = piles
        self._bodies: dict[int, Bodies] = {}
        self._entries: list[Entries] = []

    def replace(self, section: int, records: Records, touched_keys: Ints, touched_at: Numbers) -> None:
        """`records`: what the loaded part holds now, in order of key and number. `touched`: where something came, went or changed."""
        part = self.piles.sections[section]
        dirty = np.zeros(len(part.lows), np.bool_)
        dirty[part.leaves_of(touched_keys, touched_at)] = True
        if not dirty.any():
            return
        if (dirty & ~part.loaded).any():
            raise BugError(f"Step {self.piles.step!r} changes rows that it has not loaded.")
        leaves = part.leaves_of(records.keys, records.at)
        if not dirty.all():
            which = np.flatnonzero(dirty[leaves])
            records, leaves = records.take(which), leaves[which]
        chunks = _chunks(part, records, leaves, self.piles.record)
        self._bodies[section] = self._without_trees(part, dirty, chunks) if _all_whole(part, chunks) else self._with_trees(part, dirty, chunks)

    @staticmethod
    def _without_trees(part: Section, dirty: Mask, chunks: Chunks) -> Bodies:
        """The usual case: every pile lies in its head, and goes on to."""
        keys = part.leaf_keys[dirty]
        counts, at = np.zeros(len(part.lows), np.int64), np.zeros(len(part.lows), np.int64)
        counts[chunks.leaves], at[chunks.leaves] = chunks.counts, np.arange(len(chunks.leaves))
        counts, at = counts[dirty], at[dirty]
        if len(chunks.leaves) == len(keys):
            return Bodies(keys, chunks.bytes, counts)
        return Bodies(keys, chunks.bytes.take(pa.array(at, mask=counts == 0)).fill_null(_NOTHING), counts)

    def _with_trees(self, part: Section, dirty: Mask, chunks: Chunks) -> Bodies:
        """1. Which leaves there are now. 2. Those that are no more, go. 3. Those that changed come. 4. Heads list them, or have the only one."""
        of_chunk = part.leaf_keys[chunks.leaves]
        stays = np.flatnonzero(~dirty)
        keys, lows = np.concatenate([part.leaf_keys[stays], of_chunk]), np.concatenate([part.lows[stays], chunks.lows])
        chunk = np.concatenate([np.full(len(stays), -1), np.arange(len(of_chunk))])
        order = sorting(keys, lows)
        keys, lows, chunk = keys[order], lows[order], chunk[order]
        counts = np.bincount(keys, minlength=len(self.piles))
        # One leaf goes into the head if it is small; a head that has its rows already keeps them as they are.
        small = np.append(chunks.counts <= _CUT_TO, True)[chunk] | ~part.tree[keys]
        whole = (counts[keys] == 1) & small & ((chunk >= 0) | ~part.tree[keys])
        self._let_go(part, dirty & part.tree[part.leaf_keys], keys[~whole], lows[~whole])
        self._write_leaves(part, keys, lows, chunk, ~whole & (chunk >= 0), chunks)
        return self._heads(self._relisted(part, dirty, chunks, keys[whole & (chunk >= 0)]), counts, keys, lows, chunk, whole, chunks)

    @staticmethod
    def _relisted(part: Section, dirty: Mask, chunks: Chunks, whole: Ints) -> Mask:
        """The keys whose heads change: not those where leaves changed that keep their names."""
        relisted = np.zeros(len(part.tree), np.bool_)
        relisted[part.leaf_keys[dirty & ~part.tree[part.leaf_keys]]] = True
        relisted[whole] = True
        relisted[part.leaf_keys[chunks.leaves[part.lows[chunks.leaves] != chunks.lows]]] = True
        emptied = dirty.copy()
        emptied[chunks.leaves] = False
        relisted[part.leaf_keys[emptied]] = True
        return relisted

    def _let_go(self, part: Section, were: Mask, keys: Ints, lows: Numbers) -> None:
        """Leaves that changed and are not there any more under their names."""
        old_keys, old_lows = part.leaf_keys[were], part.lows[were]
        all_keys, all_lows = np.concatenate([keys, old_keys]), np.concatenate([lows, old_lows])
        order = sorting(all_keys, all_lows)
        first = np.empty(len(order), np.bool_)
        first[order] = begins(all_keys[order], all_lows[order])
        gone = first[len(keys) :]
        self._put(
            self.piles.leaf_names(part, old_keys[gone], old_lows[gone]), pa.nulls(int(gone.sum()), pa.binary()), self.piles.groups[old_keys[gone]]
        )

    def _write_leaves(self, part: Section, keys: Ints, lows: Numbers, chunk: Ints, fresh: Mask, chunks: Chunks) -> None:
        headers = np.zeros(int(fresh.sum()), LEAF_HEADER)
        headers["version"], headers["count"] = VERSION, chunks.counts[chunk[fresh]]
        bytes_ = chunks.bytes.take(pa.array(chunk[fresh]))
        values = joined([pieces(headers.view(np.uint8), np.arange(len(headers) + 1) * LEAF_HEADER.itemsize), bytes_])
        self._put(self.piles.leaf_names(part, keys[fresh], lows[fresh]), values.cast(pa.binary()), self.piles.groups[keys[fresh]])

    @staticmethod
    def _heads(relisted: Mask, counts: Ints, keys: Ints, lows: Numbers, chunk: Ints, whole: Mask, chunks: Chunks) -> Bodies:
        """For each key that changed: its rows, or the list of its leaves, or nothing."""
        which = np.flatnonzero(relisted)
        begin = np.append(0, np.cumsum(counts))
        lists = pieces(lows.view(np.uint8), lows.dtype.itemsize * begin).take(pa.array(which))
        in_head = np.full(len(counts), -1)
        in_head[keys[whole]] = chunk[whole]
        rows_in_head = np.zeros(len(counts), np.int64)
        rows_in_head[keys[whole]] = np.append(chunks.counts, 0)[chunk[whole]]
        source = np.where(in_head[which] >= 0, len(which) + in_head[which], np.arange(len(which)))
        bytes_ = pa.concat_arrays([lists, chunks.bytes]).take(pa.array(source))
        is_tree = (counts[which] > 0) & (in_head[which] < 0)
        return Bodies(which, bytes_, np.where(is_tree, counts[which] | int(TREE), rows_in_head[which]))

    # All of it

    def save(self, timers: Sequence[int] = (), others: Sequence[Entries] = ()) -> None:
        """Store everything that changed, and other entries with it, and move the timers of these kinds to where the marks have gone."""
        piles = self.piles
        changed = (piles.marks != piles.marks_before).any(axis=0)
        for bodies in self._bodies.values():
            changed[bodies.keys] = True
        self._save_heads(np.flatnonzero(changed))
        entries = [each for each in (*self._entries, *others, *(moved(piles, kind) for kind in timers)) if len(each[0])]
        if entries:
            names, values = (pa.concat_arrays([each[at] for each in entries]) for at in range(2))
            piles.state.put_array(names, values, np.concatenate([each[2] for each in entries]))

    def _save_heads(self, which: Ints) -> None:
        piles = self.piles
        headers = np.zeros(len(which), piles.header)
        headers["version"], headers["marks"] = VERSION, piles.marks[:, which].T
        parts = []
        for number, part in enumerate(piles.sections):
            bytes_, counts = self._section_bytes(number, part, which)
            headers["counts"][:, number], headers["sizes"][:, number] = counts, pc.binary_length(bytes_).to_numpy(zero_copy_only=False)
            parts.append(bytes_)
        heads = joined([pieces(headers.view(np.uint8), np.arange(len(which) + 1) * piles.header.itemsize), *parts])
        empty = ~np.logical_or.reduce(headers["counts"], axis=1)
        values = (heads.take(pa.array(np.arange(len(heads)), mask=empty)) if empty.any() else heads).cast(pa.binary())
        if len(which) and len(which) == len(piles):  # the very column that was got: a state need not look up again what was there
            piles.state.put_array(piles.names, values, piles.groups)
        else:
            self._put(piles.names.take(pa.array(which)), values, piles.groups[which])

    def _section_bytes(self, number: int, part: Section, which: Ints) -> tuple[pa.Array, Ints]:
        """What the heads of some keys hold of a section, new or as it was; and its count."""
        bodies = self._bodies.get(number)
        if bodies is not None and len(bodies.keys) == len(which):
            return bodies.bytes, bodies.counts
        were = cut_out(self.piles.data, part.starts[which], part.sizes[which])
        counts = part.counts[which] | np.where(part.tree[which], int(TREE), 0)
        if bodies is None:
            return were, counts
        at = np.searchsorted(which, bodies.keys)
        source = np.arange(len(which))
        source[at] = len(which) + np.arange(len(at))
        counts[at] = bodies.counts
        return pa.concat_arrays([were, bodies.bytes]).take(pa.array(source)), counts

    def _put(self, names: pa.Array, values: pa.Array, groups: Groups) -> None:
        self._entries.append((names, values, groups))


def _all_whole(part: Section, chunks: Chunks) -> bool:
    return not part.has_trees and bool(begins(chunks.leaves).all())


def _chunks(part: Section, records: Records, leaves: Ints, record: np.dtype[np.void]) -> Chunks:
    """Rows of leaves cut into new leaves. Rows with the same number stay together, so that a number says where a row is."""
    first = begins(leaves)
    starts = first.copy()
    sizes = np.bincount(leaves, minlength=len(part.lows))
    if sizes.max(initial=0) > MOST_IN_A_LEAF:
        fresh_number = np.append(True, records.at[1:] != records.at[:-1])
        starts |= (place_in_slot(leaves) % _CUT_TO == 0) & (sizes[leaves] > MOST_IN_A_LEAF) & fresh_number
    at = np.flatnonzero(starts)
    known = part.lows[leaves[at]]
    lows = np.where(first[at] & (known <= records.at[at]), known, records.at[at])
    ends = np.append(at, len(leaves))
    fixed = np.zeros(len(records), record)
    row_starts = _offsets(records.rows)
    fixed["at"], fixed["flags"], fixed["size"] = records.at, records.flags, np.diff(row_starts)
    rows = data_of(records.rows)
    return Chunks(leaves[at], ends, lows, joined([pieces(fixed.view(np.uint8), ends * record.itemsize), pieces(rows, row_starts[ends])]))


def _offsets(array: pa.Array) -> Ints:
    if not len(array):
        return np.zeros(1, np.int64)
    return np.frombuffer(array.buffers()[1], np.int64, count=len(array) + 1, offset=array.offset * 8)
