"""A user's own aggregate, hosted: called with many keys at a time, its states stored as Arrow
values, its mistakes traced to the row.

A key's values of one tick always come in one call. If the call raises, it is made again with fewer
keys, and for a key that it raises on, with fewer rows, until the rows are found that cannot be
taken: so a bad row never disturbs other keys, whatever else came in the batch.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask, runs
from headrace.columnar.segments import Segments
from headrace.operators.aggregates.accumulator import Advanced, Keeper, LeftOut

# A user's own aggregate: a small class over Arrow arrays, given to `hr.agg.custom`.


class CustomAggregate(ABC):
    """One value for each key, kept up to date from Arrow arrays, many keys at a time.

    A state is one element of an Arrow array of `state_type`, whatever the aggregate wants to
    remember of a key; it is stored between ticks, so it must hold everything. All methods are pure:
    the same arguments, the same result, no clock, no randomness.

    `groups` says for each value to which key it belongs: a position in `states`. Values come in the
    pipeline's order. `states[i]` is null for a key that is new.
    """

    state_type: pa.DataType
    result_type: pa.DataType

    @abstractmethod
    def add(self, states: pa.Array, groups: pa.Array, values: pa.Array) -> pa.Array:
        """The states after these values."""

    @abstractmethod
    def result(self, states: pa.Array) -> pa.Array:
        """The aggregate of each state."""

    def retract(self, states: pa.Array, groups: pa.Array, values: pa.Array) -> pa.Array:
        """The states after these values, which were added before, are taken back. Needed over
        tables only.
        """
        raise NotImplementedError

    @property
    def retractable(self) -> bool:
        return type(self).retract is not CustomAggregate.retract

    def __repr__(self) -> str:
        """The aggregate's settings are part of its identity: state that was made with others is not
        used.
        """
        settings = ", ".join(
            f"{name}={value!r}"
            for name, value in sorted(vars(self).items())
            if not name.startswith("_")
        )
        return f"{type(self).__qualname__}({settings})"


Change = Callable[[pa.Array, pa.Array, pa.Array], pa.Array]


class Raised(Exception):
    """A user's aggregate raised. `row` is a position in the segments' order, or None."""

    def __init__(self, row: int | None, cause: Exception) -> None:
        super().__init__(row, cause)
        self.row, self.cause = row, cause

    @property
    def trace(self) -> str:
        return "".join(traceback.format_exception(self.cause))


@dataclass
class Refused:
    """Rows that the aggregate raised on, by why."""

    rows: dict[str, list[int]] = field(default_factory=dict)

    def left_out(self) -> tuple[LeftOut, ...]:
        return tuple(
            LeftOut(np.array(sorted(rows)), reason) for reason, rows in sorted(self.rows.items())
        )


class Custom(Keeper):
    """Hosts an aggregate. Rows that it raises on are left out if `divert`, else they stop the
    query.
    """

    def __init__(self, column: str, aggregate: CustomAggregate, *, divert: bool) -> None:
        self.column, self.aggregate, self.divert = column, aggregate, divert
        self.state_type = pa.struct([pa.field("state", aggregate.state_type)])

    def keep(self, there: Mask, stored: pa.Array, segments: Segments) -> Advanced:
        values, refused = segments.column(self.column), Refused()
        at = np.full(len(there), -1)
        at[there] = np.arange(len(stored))
        rounds = [stored.field(0)]
        version_at = np.full(segments.versions, -1)
        version_at[segments.before_all] = at
        total = len(stored)
        states = _taken(stored.field(0), at)
        keys = np.arange(len(there))
        for turn in segments.rounds():
            states = states.take(pa.array(np.searchsorted(keys, segments.key_of[turn])))
            keys = segments.key_of[turn]
            states = self._round(states, values, turn, segments, refused)
            version_at[segments.after[turn]] = np.where(
                states.is_valid().to_numpy(zero_copy_only=False), total + np.arange(len(turn)), -1
            )
            rounds.append(states)
            total += len(turn)
        return self._outcome(_taken(pa.concat_arrays(rounds), version_at), segments, refused)

    def _outcome(self, versions: pa.Array, segments: Segments, refused: Refused) -> Advanced:
        newest = versions.take(pa.array(np.append(segments.before_all[1:], segments.versions) - 1))
        there = newest.is_valid().to_numpy(zero_copy_only=False)
        states = pa.StructArray.from_arrays([newest.drop_null()], fields=list(self.state_type))
        return self.kept(self._results(versions), there, states, left_out=refused.left_out())

    def _results(self, versions: pa.Array) -> pa.Array:
        """Asked of states that are there; a group whose rows were all left out has no answer."""
        valid = versions.is_valid().to_numpy(zero_copy_only=False)
        try:
            found = _checked(
                self.aggregate.result(versions.drop_null()),
                int(valid.sum()),
                self.aggregate.result_type,
                "result",
            )
        except Exception as error:
            raise Raised(None, error) from error
        at = np.full(len(versions), -1)
        at[valid] = np.arange(len(found))
        return _taken(found, at)

    def _round(
        self, states: pa.Array, values: pa.Array, turn: Ints, segments: Segments, refused: Refused
    ) -> pa.Array:
        """A segment of each of some keys: first what comes, then what goes. A group that has no
        rows any more is forgotten.
        """
        signs = segments.signs
        rows = runs(segments.starts[turn], segments.sizes[turn])
        slots = np.repeat(np.arange(len(turn)), segments.sizes[turn])
        if signs is None:
            return self._changed(self.aggregate.add, "add", states, slots, rows, values, refused)
        comes = signs[rows] > 0
        states = self._changed(
            self.aggregate.add, "add", states, slots[comes], rows[comes], values, refused
        )
        states = self._changed(
            self.aggregate.retract, "retract", states, slots[~comes], rows[~comes], values, refused
        )
        if segments.exists is not None:
            states = _taken(
                states, np.where(segments.exists[segments.after[turn]], np.arange(len(turn)), -1)
            )
        return states

    def _changed(
        self,
        change: Change,
        name: str,
        states: pa.Array,
        slots: Ints,
        rows: Ints,
        values: pa.Array,
        refused: Refused,
    ) -> pa.Array:
        """States after some rows; split in two, again and again, where the aggregate raises."""
        if not len(rows):
            return states
        try:
            changed = change(states, pa.array(slots), values.take(pa.array(rows)))
            return _checked(changed, len(states), self.aggregate.state_type, name)
        except Exception as error:
            if len(rows) == 1:
                return self._refuse(states, int(rows[0]), error, refused)
        if len(states) == 1:
            middle = len(rows) // 2
            states = self._changed(
                change, name, states, slots[:middle], rows[:middle], values, refused
            )
            return self._changed(
                change, name, states, slots[middle:], rows[middle:], values, refused
            )
        half = len(states) // 2
        cut = int(np.searchsorted(slots, half))
        lower = self._changed(
            change, name, states.slice(0, half), slots[:cut], rows[:cut], values, refused
        )
        upper = self._changed(
            change, name, states.slice(half), slots[cut:] - half, rows[cut:], values, refused
        )
        return pa.concat_arrays([lower, upper])

    def _refuse(self, states: pa.Array, row: int, error: Exception, refused: Refused) -> pa.Array:
        if not self.divert:
            raise Raised(row, error) from error
        refused.rows.setdefault(f"{type(error).__name__}: {error}", []).append(row)
        return states


def _taken(array: pa.Array, at: Ints) -> pa.Array:
    """Elements at positions; null at -1."""
    return array.take(pa.array(at, mask=at < 0))


def _checked(array: pa.Array, length: int, kind: pa.DataType, method: str) -> pa.Array:
    if not isinstance(array, pa.Array):
        raise TypeError(f"{method} gave a {type(array).__name__}, not an Arrow array")
    if len(array) != length:
        raise ValueError(f"{method} gave {len(array)} elements for {length}")
    return array if array.type == kind else array.cast(kind)
