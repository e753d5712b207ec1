"""Users' own aggregates: the interface that they implement, and the accumulator that hosts them.

The aggregate is called for many groups at once, its states are stored as Arrow values, and its
errors are traced to a row. A mean, over two groups in one tick:

    states [(4, 2), null], groups [0, 1, 1], values [3, 5, 7]
    add    -> [(7, 3), (12, 2)]
    result -> [2.33, 6.0]

All values of a group and tick come in one call. If the call raises, it is repeated with fewer
groups, and for a group that it raises on with fewer rows, until the rows that cannot be added are
found. A bad row therefore never affects other groups, whatever else is in the batch. An error of
the machine, such as a file that cannot be read, is no row's: the batch fails and is tried again.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask, expand_ranges
from headrace.columnar.segments import Segments
from headrace.operators.aggregates.accumulator import (
    AccumulatorOutcome,
    RejectedRows,
    StoredValueAccumulator,
)


class CustomAggregate(ABC):
    """The interface of a user's own aggregate, given to `hr.agg.custom`.

    An aggregate is a small class over Arrow arrays. The state of a group is one element of an array
    of `state_type`. It is all that is stored between ticks. All methods are pure: the same
    arguments give the same result, without clock or randomness. They are called for many groups at
    once: `groups[j]` is the index in `states` of the group that `values[j]` belongs to, and
    `states[i]` is null for a new group. Values are in the pipeline's order.

    What a method raises is the fault of a row (`errors=` of `aggregate` says what becomes of it),
    unless it is an OSError or a MemoryError: then the batch is tried again.

    Example:
        ```python
        class Longest(hr.agg.CustomAggregate):
            state_type = result_type = pa.string()

            def add(self, states, groups, values):
                longest = states.to_pylist()
                for group, value in zip(groups.to_pylist(), values.to_pylist()):
                    longest[group] = max(longest[group] or "", value or "", key=len)
                return pa.array(longest, pa.string())

            def result(self, states):
                return states
        ```
    """

    state_type: pa.DataType
    result_type: pa.DataType
    version: ClassVar[str | None] = None
    """If set, the aggregate's version: another class of the same version counts as the same code.
    """

    @abstractmethod
    def add(self, states: pa.Array, groups: pa.Array, values: pa.Array) -> pa.Array:
        """Add values to the states of their groups.

        Args:
            states: The state of each group; null for a new one.
            groups: For each value, the index of its group in `states`.
            values: The values, in the pipeline's order; they may be null.

        Returns:
            The new states: an array of `state_type` with as many elements as `states`.
        """

    @abstractmethod
    def result(self, states: pa.Array) -> pa.Array:
        """The result of each state.

        Args:
            states: States, none null.

        Returns:
            An array of `result_type` with as many elements as `states`.
        """

    def retract(self, states: pa.Array, groups: pa.Array, values: pa.Array) -> pa.Array:
        """Remove values that were added before. Needed over tables only.

        Args:
            states: The state of each group.
            groups: For each value, the index of its group in `states`.
            values: The values to remove.

        Returns:
            The new states: an array of `state_type` with as many elements as `states`.
        """
        raise NotImplementedError

    @property
    def retractable(self) -> bool:
        """Whether the aggregate overrides `retract`, and so works over tables."""
        return type(self).retract is not CustomAggregate.retract

    def __repr__(self) -> str:
        """The class and its settings. They identify the aggregate: state of other settings is not
        used.
        """
        settings = ", ".join(
            f"{name}={value!r}"
            for name, value in sorted(vars(self).items())
            if not name.startswith("_")
        )
        return f"{type(self).__qualname__}({settings})"


Change = Callable[[pa.Array, pa.Array, pa.Array], pa.Array]
PASSING = (OSError, MemoryError)
"""Errors of the machine, not of a row: the batch is tried again."""


class CustomAggregateRaised(Exception):
    """A user's aggregate raised. `row` is a position in the segments' order, or None."""

    def __init__(self, row: int | None, cause: Exception) -> None:
        super().__init__(row, cause)
        self.row, self.cause = row, cause

    @property
    def trace(self) -> str:
        """The traceback of the cause."""
        return "".join(traceback.format_exception(self.cause))


@dataclass
class RefusedRows:
    """Rows that the aggregate raised on, by reason."""

    rows: dict[str, list[int]] = field(default_factory=dict)

    def rejected(self) -> tuple[RejectedRows, ...]:
        return tuple(
            RejectedRows(np.array(sorted(rows)), reason)
            for reason, rows in sorted(self.rows.items())
        )


class Custom(StoredValueAccumulator):
    """Hosts a user's aggregate. Rows that it raises on are rejected with `divert`, else they stop
    the query.
    """

    def __init__(self, column: str, aggregate: CustomAggregate, *, divert: bool) -> None:
        self.column = column
        self.aggregate = aggregate
        self.divert = divert
        self.state_type = pa.struct([pa.field("state", aggregate.state_type)])

    def advance_values(
        self, there: Mask, stored: pa.Array, segments: Segments
    ) -> AccumulatorOutcome:
        values, refused = segments.column(self.column), RefusedRows()
        at = np.full(len(there), -1)
        at[there] = np.arange(len(stored))
        rounds = [stored.field(0)]
        version_at = np.full(segments.versions, -1)
        version_at[segments.initial_versions] = at
        total = len(stored)
        states = _take_or_null(stored.field(0), at)
        keys = np.arange(len(there))
        for turn in segments.rounds():
            states = states.take(pa.array(np.searchsorted(keys, segments.key_of[turn])))
            keys = segments.key_of[turn]
            states = self._apply_round(states, values, turn, segments, refused)
            version_at[segments.after[turn]] = np.where(
                states.is_valid().to_numpy(zero_copy_only=False), total + np.arange(len(turn)), -1
            )
            rounds.append(states)
            total += len(turn)
        return self._outcome(_take_or_null(pa.concat_arrays(rounds), version_at), segments, refused)

    def _outcome(
        self, versions: pa.Array, segments: Segments, refused: RefusedRows
    ) -> AccumulatorOutcome:
        newest = versions.take(
            pa.array(np.append(segments.initial_versions[1:], segments.versions) - 1)
        )
        there = newest.is_valid().to_numpy(zero_copy_only=False)
        states = pa.StructArray.from_arrays([newest.drop_null()], fields=list(self.state_type))
        return self.pack_values(self._results(versions), there, states, rejected=refused.rejected())

    def _results(self, versions: pa.Array) -> pa.Array:
        """The results of the states that exist; a group whose rows were all rejected has none."""
        valid = versions.is_valid().to_numpy(zero_copy_only=False)
        try:
            found = _check_array(
                self.aggregate.result(versions.drop_null()),
                int(valid.sum()),
                self.aggregate.result_type,
                "result",
            )
        except PASSING:
            raise
        except Exception as error:
            raise CustomAggregateRaised(None, error) from error
        at = np.full(len(versions), -1)
        at[valid] = np.arange(len(found))
        return _take_or_null(found, at)

    def _apply_round(
        self,
        states: pa.Array,
        values: pa.Array,
        turn: Ints,
        segments: Segments,
        refused: RefusedRows,
    ) -> pa.Array:
        """Apply one segment of each of some groups: additions first, then retractions. The state of
        a group without rows is deleted.
        """
        signs = segments.signs
        rows = expand_ranges(segments.starts[turn], segments.sizes[turn])
        slots = np.repeat(np.arange(len(turn)), segments.sizes[turn])
        if signs is None:
            return self._apply_change(
                self.aggregate.add, "add", states, slots, rows, values, refused
            )
        is_added = signs[rows] > 0
        states = self._apply_change(
            self.aggregate.add, "add", states, slots[is_added], rows[is_added], values, refused
        )
        states = self._apply_change(
            self.aggregate.retract,
            "retract",
            states,
            slots[~is_added],
            rows[~is_added],
            values,
            refused,
        )
        if segments.exists is not None:
            states = _take_or_null(
                states, np.where(segments.exists[segments.after[turn]], np.arange(len(turn)), -1)
            )
        return states

    def _apply_change(
        self,
        change: Change,
        name: str,
        states: pa.Array,
        slots: Ints,
        rows: Ints,
        values: pa.Array,
        refused: RefusedRows,
    ) -> pa.Array:
        """The states after some rows. Where the aggregate raises, the rows are split in two,
        recursively.
        """
        if not len(rows):
            return states
        try:
            changed = change(states, pa.array(slots), values.take(pa.array(rows)))
            return _check_array(changed, len(states), self.aggregate.state_type, name)
        except PASSING:
            raise
        except Exception as error:
            if len(rows) == 1:
                return self._refuse(states, int(rows[0]), error, refused)
        if len(states) == 1:
            middle = len(rows) // 2
            states = self._apply_change(
                change, name, states, slots[:middle], rows[:middle], values, refused
            )
            return self._apply_change(
                change, name, states, slots[middle:], rows[middle:], values, refused
            )
        half = len(states) // 2
        cut = int(np.searchsorted(slots, half))
        lower = self._apply_change(
            change, name, states.slice(0, half), slots[:cut], rows[:cut], values, refused
        )
        upper = self._apply_change(
            change, name, states.slice(half), slots[cut:] - half, rows[cut:], values, refused
        )
        return pa.concat_arrays([lower, upper])

    def _refuse(
        self, states: pa.Array, row: int, error: Exception, refused: RefusedRows
    ) -> pa.Array:
        if not self.divert:
            raise CustomAggregateRaised(row, error) from error
        refused.rows.setdefault(f"{type(error).__name__}: {error}", []).append(row)
        return states


def _take_or_null(array: pa.Array, at: Ints) -> pa.Array:
    """The elements at some positions; null at -1."""
    return array.take(pa.array(at, mask=at < 0))


def _check_array(array: pa.Array, length: int, kind: pa.DataType, method: str) -> pa.Array:
    """The array that a method returned, if it has the right type and length."""
    if not isinstance(array, pa.Array):
        raise TypeError(f"{method} returned a {type(array).__name__}, not an Arrow array")
    if len(array) != length:
        raise ValueError(f"{method} returned {len(array)} elements, expected {length}")
    return array if array.type == kind else array.cast(kind)
