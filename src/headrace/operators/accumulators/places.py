"""Values of a table's rows in the order in which the rows came into their group: the first, the last, all of them.

A row is known by the table's key. An update keeps its row's place; a row that goes and comes again within a tick keeps it too, one that comes in a later
tick is new. A key keeps up to `most` rows:

- `first` keeps the earliest and `last` the latest; the others are only counted. If all that were kept have gone and others remain, the answer cannot be
  told: it is null, and counted, until it can.
- `collect` leaves out a row that would be one too many; it goes to dead letters.

With `when_full="stop"` either stops the query instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headrace.errors import BugError
from headrace.operators.accumulators.accumulator import Advanced, LeftOut
from headrace.operators.accumulators.keeper import Bags, Full, Keeper, lists, place_in_slot
from headrace.operators.buffers import Ints, Mask, offsets_of, runs
from headrace.operators.keys import encode_keys
from headrace.operators.segments import Segments


@dataclass(frozen=True)
class Work:
    """What a step works on: bags of (row's id, position of its value), what was forgotten, and the rows' side."""

    bags: Bags
    forgotten: Ints
    values: pa.Array
    ids: pa.Array  # by code
    id_of_row: Ints
    first_row: int  # where rows begin in `values`
    segments: Segments


class Places(Keeper):
    """The rows of each key, in their places."""

    counts_forgotten = True

    def __init__(self, column: str, type: pa.DataType, row_key: Sequence[str], *, most: int, stop: bool) -> None:
        self.column, self.type, self.row_key, self.most, self.stop = column, type, tuple(row_key), most, stop
        self.state_type = pa.struct([
            pa.field("forgotten", pa.int64()), pa.field("ids", pa.list_(pa.binary())), pa.field("values", pa.list_(type)),
        ])  # fmt: skip

    # Opening and storing

    def _opened(self, there: Mask, stored: pa.Array, segments: Segments) -> Work:
        lengths, forgotten = np.zeros(len(there), np.int64), np.zeros(len(there), np.int64)
        lengths[there] = np.diff(offsets_of(stored.field(1)))
        forgotten[there] = stored.field(0).to_numpy()
        known = stored.field(1).flatten()
        of_rows = encode_keys(segments.rows, self.row_key).cast(pa.binary()).take(pa.array(segments.order))
        ids = pa.concat_arrays([known, of_rows]).dictionary_encode()
        codes = ids.indices.to_numpy().astype(np.int64)
        values = pa.concat_arrays([stored.field(2).flatten(), segments.column(self.column)])
        bags = Bags(lengths, codes[: len(known)], np.arange(len(known)))
        return Work(bags, forgotten, values, ids.dictionary, codes[len(known) :], len(known), segments)

    def _stored(self, work: Work, results: pa.Array, lost: Mask | None, left_out: tuple[LeftOut, ...]) -> Advanced:
        there = (work.bags.lengths > 0) | (work.forgotten > 0)
        which = np.flatnonzero(there)
        _, codes, at = work.bags.of(which)
        lengths = work.bags.lengths[which]
        parts = [pa.array(work.forgotten[which]), lists(lengths, work.ids.take(pa.array(codes))), lists(lengths, work.values.take(pa.array(at)))]
        return self.kept(results, there, pa.StructArray.from_arrays(parts, fields=list(self.state_type)), lost=lost, left_out=left_out)

    # Going on

    def _round(self, work: Work, turn: Ints) -> Ints:
        """Take in a segment of each of some keys; gives the rows that were left out."""
        keys = work.segments.key_of[turn]
        slots, ids, at, order, fate = self._fates(work, turn, keys)
        stays, comes = fate == _STAYS, fate == _COMES
        work.forgotten[keys] -= np.bincount(slots[fate == _FORGOTTEN_GOES], minlength=len(keys))
        if self.counts_forgotten and (work.forgotten[keys] < 0).any():
            raise BugError(f"A row went that never came, by the key {self.row_key}.")
        refused = at[fate == _FORGOTTEN_STAYS] - work.first_row
        in_place = np.lexsort((order, comes, slots))
        in_place = in_place[(stays | comes)[in_place]]
        slots, ids, at, comes = slots[in_place], ids[in_place], at[in_place], comes[in_place]
        kept, forgotten = self._within_bounds(slots, comes, work.forgotten[keys])
        if self.stop and not kept.all():
            raise Full(int(keys[slots[~kept][0]]), self.most)
        work.forgotten[keys] = forgotten
        work.bags.replace(keys, slots[kept], ids[kept], at[kept])
        return np.concatenate([refused, at[~kept] - work.first_row])

    def _fates(self, work: Work, turn: Ints, keys: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """What becomes of each row of these keys, old or new: slot, id, position of its value, order, fate."""
        slots, ids, at = work.bags.of(keys)
        segments = work.segments
        rows = runs(segments.starts[turn], segments.sizes[turn])
        assert segments.signs is not None
        slots = np.concatenate([slots, np.repeat(np.arange(len(turn)), segments.sizes[turn])])
        ids, at = np.concatenate([ids, work.id_of_row[rows]]), np.concatenate([at, work.first_row + rows])
        was = np.arange(len(slots)) < len(slots) - len(rows)
        comes = np.concatenate([np.ones(len(slots) - len(rows), np.bool_), segments.signs[rows] > 0])
        order = np.lexsort((np.arange(len(slots)), ids, slots))
        new = np.ones(len(order), np.bool_)
        new[1:] = (slots[order][1:] != slots[order][:-1]) | (ids[order][1:] != ids[order][:-1])
        first = order[np.flatnonzero(new)]
        last = order[np.append(np.flatnonzero(new)[1:], len(order)) - 1] if len(order) else order
        known, unknown = was[first], ~was[first] & ~comes[first]
        fate = np.select(
            [known & comes[last], unknown & comes[last], unknown, ~known & comes[last]], [_STAYS, _FORGOTTEN_STAYS, _FORGOTTEN_GOES, _COMES], _GOES
        )
        return slots[last], ids[last], at[last], np.where(known, first, last), fate

    def _within_bounds(self, slots: Ints, comes: Mask, forgotten: Ints) -> tuple[Mask, Ints]:
        """Which rows (in order of key and place) are kept, and how many of each key are forgotten then."""
        raise NotImplementedError


_GOES, _STAYS, _COMES, _FORGOTTEN_STAYS, _FORGOTTEN_GOES = range(5)


class TableFirst(Places):
    """The value of the row that came first; of those with a value, if nulls are ignored."""

    def __init__(self, column: str, type: pa.DataType, row_key: Sequence[str], *, ignore_nulls: bool, most: int, stop: bool) -> None:
        super().__init__(column, type, row_key, most=most, stop=stop)
        self.ignore_nulls = ignore_nulls

    def keep(self, there: Mask, stored: pa.Array, segments: Segments) -> Advanced:
        work = self._opened(there, stored, segments)
        counts = work.values.is_valid().to_numpy(zero_copy_only=False) | (not self.ignore_nulls)
        chosen, lost = np.full(segments.versions, -1), np.zeros(segments.versions, np.bool_)
        chosen[segments.before_all], lost[segments.before_all] = self._answer(work, np.arange(len(there)), counts)
        for turn in segments.rounds():
            self._round(work, turn)
            chosen[segments.after[turn]], lost[segments.after[turn]] = self._answer(work, segments.key_of[turn], counts)
        results = work.values.take(pa.array(chosen, mask=chosen < 0))
        return self._stored(work, results, lost if lost.any() else None, ())

    def _answer(self, work: Work, keys: Ints, counts: Mask) -> tuple[Ints, Mask]:
        """For each key the position of its value, -1 for none; and whether it cannot be told."""
        slots, _, at = work.bags.of(keys)
        slots, at = slots[counts[at]], at[counts[at]]
        answer = np.full(len(keys), -1)
        best = self._best(slots)
        answer[slots[best]] = at[best]
        return answer, (answer < 0) & (work.forgotten[keys] > 0)

    def _best(self, slots: Ints) -> Ints:
        return np.flatnonzero(place_in_slot(slots) == 0)

    def _within_bounds(self, slots: Ints, comes: Mask, forgotten: Ints) -> tuple[Mask, Ints]:
        """What comes is behind what was forgotten, and so is forgotten too."""
        kept = (place_in_slot(slots) < self.most) & ~(comes & (forgotten[slots] > 0))
        return kept, forgotten + np.bincount(slots[~kept], minlength=len(forgotten))


class TableLast(TableFirst):
    """The value of the row that came last."""

    def _best(self, slots: Ints) -> Ints:
        return np.flatnonzero(np.append(slots[1:] != slots[:-1], True)) if len(slots) else slots

    def _within_bounds(self, slots: Ints, comes: Mask, forgotten: Ints) -> tuple[Mask, Ints]:  # noqa: ARG002
        from_the_end = np.bincount(slots, minlength=len(forgotten))[slots] - place_in_slot(slots)
        kept = from_the_end <= self.most
        return kept, forgotten + np.bincount(slots[~kept], minlength=len(forgotten))


class TableCollect(Places):
    """All values that are not null."""

    counts_forgotten = False

    def keep(self, there: Mask, stored: pa.Array, segments: Segments) -> Advanced:
        work = self._opened(there, stored, segments)
        valid = work.values.is_valid().to_numpy(zero_copy_only=False)
        told = [(segments.before_all, *self._lists(work, np.arange(len(there)), valid))]
        refused = []
        for turn in segments.rounds():
            refused.append(self._round(work, turn))
            told.append((segments.after[turn], *self._lists(work, segments.key_of[turn], valid)))
        left_out = np.sort(np.concatenate(refused)) if refused else np.zeros(0, np.int64)
        reason = f"the group has {self.most} values of {self.column!r} already"
        return self._stored(work, _in_order(told, work.values, segments.versions), None, (LeftOut(left_out, reason),) if len(left_out) else ())

    @staticmethod
    def _lists(work: Work, keys: Ints, valid: Mask) -> tuple[Ints, Ints]:
        slots, _, at = work.bags.of(keys)
        return np.bincount(slots[valid[at]], minlength=len(keys)), at[valid[at]]

    def _within_bounds(self, slots: Ints, comes: Mask, forgotten: Ints) -> tuple[Mask, Ints]:  # noqa: ARG002
        """What is left out is not remembered: when it goes, it is not found, and that is that."""
        return place_in_slot(slots) < self.most, np.zeros(len(forgotten), np.int64)


def _in_order(told: list[tuple[Ints, Ints, Ints]], values: pa.Array, versions: int) -> pa.Array:
    """Lists told in rounds, in the order of their versions."""
    version, lengths, at = (np.concatenate(each) for each in zip(*told, strict=True))
    starts = np.cumsum(lengths) - lengths
    order = np.empty(versions, np.int64)
    order[version] = np.arange(versions)
    return lists(lengths[order], values.take(pa.array(at[runs(starts[order], lengths[order])])))
