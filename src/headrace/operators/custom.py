"""A user's own aggregate: a small class over Arrow arrays, given to `hr.agg.custom`."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pyarrow as pa


class CustomAggregate(ABC):
    """One value for each key, kept up to date from Arrow arrays, many keys at a time.

    A state is one element of an Arrow array of `state_type`, whatever the aggregate wants to remember of a key; it is stored between ticks, so it must
    hold everything. All methods are pure: the same arguments, the same result, no clock, no randomness.

    `groups` says for each value to which key it belongs: a position in `states`. Values come in the pipeline's order. `states[i]` is null for a key that is new.
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
        """The states after these values, which were added before, are taken back. Needed over tables only."""
        raise NotImplementedError

    @property
    def retractable(self) -> bool:
        return type(self).retract is not CustomAggregate.retract

    def __repr__(self) -> str:
        """The aggregate's settings are part of its identity: state that was made with others is not used."""
        settings = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()) if not name.startswith("_"))
        return f"{type(self).__qualname__}({settings})"
