"""What a processor's methods are given besides rows: the state and timers of the keys of a call,
and the time of the tick. `ColumnContext` has them as Arrow columns, `KeyContext` as Python values
of one key at a time.

Three keys with the value `items INT` (default 0) and the timer `left`:

    keys     cart: a, b, c
    stored   items: 4, null, 1        left: 12:30, null, null
    read     ctx["items"]: 4, 0, 1    ctx["left"]: 12:30, null, null
    set      ctx["items"] = 5, 0, null
    stored   items: 5, 0, null        of c nothing is left, so c is forgotten
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.columnar.buffers import Ints
from headrace.columnar.columns import CHANGE_TYPE, DELETE
from headrace.columnar.keys import as_array
from headrace.columnar.murmur2 import hash64, mix64
from headrace.errors import PlanError, nearest
from headrace.operators.kernel import UNSTARTED
from headrace.operators.processors.processor import Declaration, StateSlot, TimerSlot
from headrace.types.values import Misfit, column_converter, fit_column, plain_copy

TIMER_TYPE = pa.timestamp("us", "UTC")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_TIME, _LAST_TIME = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
Columns = dict[str, pa.Array]
Emission = tuple[str | None, Any]
"""What was emitted to an output; None is the main one."""


@dataclass(frozen=True)
class Moment:
    """When a call happens: its tick, the tick's time, and the watermark."""

    tick: int
    time_us: int
    watermark_us: int


@dataclass(frozen=True)
class KeyFrame:
    """The keys of a call, and what is stored of each: a column per value and timer, null where
    nothing is.
    """

    keys: pa.Table
    key_bytes: pa.Array
    columns: Columns

    def __len__(self) -> int:
        return len(self.key_bytes)

    def take(self, indices: Ints) -> KeyFrame:
        """Some of the keys."""
        chosen = pa.array(indices)
        columns = {name: column.take(chosen) for name, column in self.columns.items()}
        return KeyFrame(self.keys.take(chosen), self.key_bytes.take(chosen), columns)


class SlotTypes:
    """The columns of a processor's values and timers."""

    def __init__(self, declaration: Declaration) -> None:
        self.fields: dict[str, pa.Field] = {slot.name: slot.field for slot in declaration.states}
        self.fields |= {slot.name: pa.field(slot.name, TIMER_TYPE) for slot in declaration.timers}
        self.defaults: dict[str, pa.Array] = {
            slot.name: column_converter(slot.field).array([slot.default])
            for slot in declaration.states
            if slot.default is not None
        }
        self.nested = frozenset(
            name for name, field in self.fields.items() if pa.types.is_nested(field.type)
        )
        outputs = [declaration.output, *(side.schema for side in declaration.sides)]
        self.emits_nested = any(
            pa.types.is_nested(field.type) for schema in outputs for field in schema
        )

    def name_of(self, which: str | StateSlot | TimerSlot) -> str:
        """The name of a value or timer. Raises PlanError if there is none."""
        name = which if isinstance(which, str) else which.name
        if name not in self.fields:
            raise PlanError(
                f"There is no value or timer {name!r}: {nearest(name, self.fields)}",
                fix="declare it in the class with hr.state or hr.timer.",
            )
        return name

    def with_default(self, name: str, column: pa.Array) -> pa.Array:
        """A column of values, with the default where nothing is stored."""
        default = self.defaults.get(name)
        if default is None or not column.null_count:
            return column
        indices = np.where(
            column.is_null().to_numpy(zero_copy_only=False), len(column), np.arange(len(column))
        )
        return pa.concat_arrays([column, default]).take(pa.array(indices))

    def fit(self, name: str, value: Any, length: int) -> pa.Array:
        """What a method set, as a column with one value for each key. Raises Misfit."""
        field = self.fields[name]
        if isinstance(value, pa.Array | pa.ChunkedArray | np.ndarray) or hasattr(value, "to_numpy"):
            array = (
                as_array(value)
                if isinstance(value, pa.Array | pa.ChunkedArray)
                else (pa.array(value, from_pandas=True))
            )
            column = fit_column(_zoned(array, field), field)
        elif isinstance(value, list):
            column = column_converter(field).array(value)
        else:
            value = value.as_py() if isinstance(value, pa.Scalar) else value
            column = column_converter(field).array([value])
            column = column.take(pa.array(np.zeros(length, np.int64)))
        if len(column) != length:
            raise Misfit(f"{name!r} was set to {len(column):,} values for {length:,} keys")
        return column


def _zoned(array: pa.Array, field: pa.Field) -> pa.Array:
    """Times without a zone, as numpy has them, are UTC."""
    if pa.types.is_timestamp(array.type) and field.type == TIMER_TYPE:
        return array.cast(pa.timestamp("us", array.type.tz), safe=False)
    return array


def to_datetime(time_us: int) -> datetime | None:
    """A time in microseconds as a datetime in UTC; None before the first watermark. Times that
    a datetime cannot have become the nearest one that it can.
    """
    if time_us == UNSTARTED:
        return None
    try:
        return _EPOCH + timedelta(microseconds=time_us)
    except OverflowError:
        return _LAST_TIME if time_us > 0 else _FIRST_TIME


class CallContext:
    """What both forms of a processor's methods are given: the time and the tick.

    Attributes:
        now: The time of the tick, in UTC: the processing time of the rows, the same in a replay.
        watermark: The watermark: in `on_rows` that before the tick, in `on_timer` that after it.
            None before the first one.
        tick: The number of the tick.
        timer: In `on_timer`, the name of the timer that fired; otherwise None.
    """

    def __init__(self, moment: Moment, timer: str | None, source: str | None) -> None:
        self._origin = f"{moment.tick} {timer} {source}"
        self.now: datetime = to_datetime(moment.time_us) or _EPOCH
        self.watermark = to_datetime(moment.watermark_us)
        self.tick = moment.tick
        self.timer = timer


class ColumnContext(CallContext):
    """State, timers and time for `on_rows` and `on_timer` of a processor by columns.

    `ctx["name"]` is the column of a value or timer, with one element for each row of `keys`;
    `ctx["name"] = column` sets it, from an Arrow or numpy array, a pandas series, a list, or one
    value for all keys. Null removes a timer, and returns a value to its default.

    Attributes:
        keys: The keys of this call: a table with the columns of the key, each key once.
        key_of: For each row, the index of its key in `keys`, as a numpy array.
        fired_at: In `on_timer`, the time at which each key's timer was set to fire.
    """

    def __init__(
        self,
        slots: SlotTypes,
        frame: KeyFrame,
        moment: Moment,
        *,
        key_of: Ints,
        timer: str | None = None,
        fired_at: pa.Array | None = None,
        source: str | None = None,
    ) -> None:
        super().__init__(moment, timer, source)
        self.keys = frame.keys
        self.key_of = key_of
        self.fired_at = fired_at
        self._slots, self._frame = slots, frame
        self._columns: Columns = dict(frame.columns)
        self._draws = 0
        self._emitted: list[Emission] = []

    def __len__(self) -> int:
        return len(self._frame)

    def __getitem__(self, which: str) -> pa.Array:
        name = self._slots.name_of(which)
        return self._slots.with_default(name, self._columns[name])

    def __setitem__(self, which: str, value: Any) -> None:
        name = self._slots.name_of(which)
        self._columns[name] = self._slots.fit(name, value, len(self))

    def per_key(self, column: pa.Array | pa.ChunkedArray, function: str) -> pa.Array:
        """Aggregate a column of the rows by key.

        Args:
            column: A column of the rows.
            function: `"sum"`, `"count"`, `"min"`, `"max"`, `"mean"`, `"first"`, `"last"`, `"list"`
                or another of Arrow's hash aggregates.

        Returns:
            An array with one value for each key; null for a key without rows.

        Example:
            ```python
            ctx["items"] = pc.add(ctx["items"], ctx.per_key(rows["items"], "sum"))
            ```
        """
        pairs = pa.table({"key": pa.array(self.key_of), "value": column})
        grouped = pairs.group_by("key", use_threads=False).aggregate([("value", function)])
        at = np.full(len(self), -1)
        at[as_array(grouped["key"]).to_numpy()] = np.arange(grouped.num_rows)
        values = as_array(grouped[f"value_{function}"])
        return values.take(pa.array(at, mask=at < 0))

    def random(self) -> npt.NDArray[np.float64]:
        """A number in [0, 1) for each key, the same in every replay; others at each call.

        Returns:
            An array with one number for each key.
        """
        words = hash64(self._frame.key_bytes)
        seed = blake2b(f"{self._origin} {self._draws}".encode(), digest_size=8).digest()
        self._draws += 1
        if self.fired_at is not None:  # a timer may fire more than once in a tick
            words = mix64(words ^ self.fired_at.cast(pa.int64()).to_numpy().astype(np.uint64))
        words = mix64(words ^ np.uint64(int.from_bytes(seed, "little")))
        return (words >> np.uint64(11)).astype(np.float64) / 2.0**53

    def forget(self, which: pa.Array | npt.NDArray[np.bool_] | None = None) -> None:
        """Forget keys: their values return to the defaults, their timers are removed.

        Args:
            which: True for each key to forget; by default all keys of this call.
        """
        gone = np.ones(len(self), np.bool_) if which is None else np.asarray(which, np.bool_)
        if len(gone) != len(self):
            raise Misfit(f"forget was given {len(gone):,} values for {len(self):,} keys")
        indices = pa.array(np.arange(len(self)), mask=gone)
        self._columns = {name: column.take(indices) for name, column in self._columns.items()}

    def emit(self, rows: Any) -> None:
        """Emit rows, besides those that the method returns.

        Args:
            rows: An Arrow table with the columns of the output.
        """
        self._emitted.append((None, rows))

    def emit_to(self, output: str, rows: Any) -> None:
        """Emit rows to a side output.

        Args:
            output: The name of the side output.
            rows: An Arrow table with its columns.
        """
        self._emitted.append((output, rows))

    def take_emitted(self) -> list[Emission]:
        """Internal: what was emitted, by output."""
        return self._emitted

    def take_columns(self) -> Columns:
        """Internal: values and timers after the call."""
        return self._columns


class KeyContext(CallContext):
    """State, timers and time for `on_row` and `on_timer` of a processor with `each_key=True`.

    `ctx["name"]` is a value or timer of the present key as a Python value; a timer that is not set
    is None. `ctx["name"] = value` sets it, and `del ctx["name"]` returns it to the default. Lists
    and dictionaries may be changed in place.

    Attributes:
        key: The columns of the present key.
        fired_at: In `on_timer`, the time at which the timer was set to fire.
    """

    def __init__(
        self,
        slots: SlotTypes,
        frame: KeyFrame,
        moment: Moment,
        *,
        timer: str | None = None,
        fired_at: pa.Array | None = None,
        source: str | None = None,
    ) -> None:
        super().__init__(moment, timer, source)
        self.key: dict[str, Any] = {}
        self.fired_at: datetime | None = None
        self._slots, self._frame = slots, frame
        self._fired_at = None if fired_at is None else fired_at.to_pylist()
        self._keys: list[dict[str, Any]] = frame.keys.to_pylist()
        self._index = 0
        self._visits = [0] * len(self._keys)
        self._random: random.Random | None = None
        self._values = {
            name: self._listed(name, slots.with_default(name, column))
            for name, column in frame.columns.items()
        }
        self._emitted: list[Mapping[str, Any]] = []
        self._aside: list[tuple[str, Mapping[str, Any]]] = []

    def _listed(self, name: str, column: pa.Array) -> list[Any]:
        values: list[Any] = column.to_pylist()
        if pa.types.is_map(self._slots.fields[name].type):
            return [None if value is None else dict(value) for value in values]
        return values

    def __getitem__(self, which: str) -> Any:
        return self._values[self._slots.name_of(which)][self._index]

    def __setitem__(self, which: str, value: Any) -> None:
        name = self._slots.name_of(which)
        # A list that is changed later, elsewhere, is no longer this key's.
        self._values[name][self._index] = plain_copy(value) if name in self._slots.nested else value

    def __delitem__(self, which: str) -> None:
        name = self._slots.name_of(which)
        default = self._slots.defaults.get(name)
        self._values[name][self._index] = (
            None if default is None else self._listed(name, default)[0]
        )

    @property
    def random(self) -> random.Random:
        """Random numbers of the present row, or timer, of the present key: the same in every
        replay.
        """
        if self._random is None:
            key: bytes = self._frame.key_bytes[self._index].as_py()
            # Which other keys the call has must not matter: their number depends on the shards.
            which = f"{self._origin} {self._visits[self._index]} {self.fired_at}"
            hashed = blake2b(
                key, digest_size=8, salt=blake2b(which.encode(), digest_size=16).digest()
            )
            self._random = random.Random(hashed.digest())  # noqa: S311 - not for secrets
        return self._random

    def emit(self, row: Mapping[str, Any] | None = None, /, **columns: Any) -> None:
        """Emit a row.

        Args:
            row: The row's columns.
            **columns: Further columns.
        """
        self._emitted.append(self._own({**(row or {}), **columns}))

    def emit_to(self, output: str, row: Mapping[str, Any] | None = None, /, **columns: Any) -> None:
        """Emit a row to a side output.

        Args:
            output: The name of the side output.
            row: The row's columns.
            **columns: Further columns.
        """
        self._aside.append((output, self._own({**(row or {}), **columns})))

    def delete(self, row: Mapping[str, Any] | None = None, /, **columns: Any) -> None:
        """Delete the row with a key, if the output is a table.

        Args:
            row: The columns of the table's key.
            **columns: Further columns.
        """
        self._emitted.append({**(row or {}), **columns, CHANGE_TYPE: DELETE})

    def _own(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row whose lists do not change any more when those in state do."""
        if not self._slots.emits_nested:
            return row
        return {name: plain_copy(value) for name, value in row.items()}

    def forget(self) -> None:
        """Forget the present key: its values return to the defaults, its timers are removed."""
        for name in self._values:
            self._values[name][self._index] = None

    def move_to(self, index: int) -> None:
        """Internal: the next call is about this key."""
        self._random = None
        self._visits[index] += 1
        self._index, self.key = index, self._keys[index]
        if self._fired_at is not None:
            self.fired_at = self._fired_at[index]

    def snapshot(self) -> dict[str, Any]:
        """Internal: the present key's values, to go back to."""
        return {name: plain_copy(values[self._index]) for name, values in self._values.items()}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Internal: go back to the present key's values of before."""
        for name, value in values.items():
            self._values[name][self._index] = value

    def take_emitted(self, returned: Any) -> list[Mapping[str, Any]]:
        """Internal: the rows that a call emitted and those that it returned."""
        if returned is None:
            return self.take_main()
        if isinstance(returned, Mapping):
            return [*self.take_main(), self._own(returned)]
        if isinstance(returned, str | bytes) or not isinstance(returned, Iterable):
            raise Misfit(
                f"it returned a {type(returned).__name__}, not a dictionary or dictionaries"
            )
        more: list[Mapping[str, Any]] = []
        for row in returned:
            if not isinstance(row, Mapping):
                raise Misfit(f"it emitted a {type(row).__name__}, not a dictionary")
            more.append(self._own({**row}))  # a method may yield one dictionary again and again
        return [*self.take_main(), *more]

    def take_main(self) -> list[Mapping[str, Any]]:
        """Internal: the rows of the main output that were emitted."""
        rows, self._emitted = self._emitted, []
        return rows

    def take_aside(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Internal: the rows of side outputs that were emitted."""
        rows, self._aside = self._aside, []
        return rows

    def check_values(self) -> None:
        """Internal: raise Misfit if a value of the present key does not fit its type."""
        for name, values in self._values.items():
            self._slots.fit(name, [values[self._index]], 1)

    def take_columns(self) -> Columns:
        """Internal: values and timers after the calls."""
        count = len(self._frame)
        return {name: self._slots.fit(name, values, count) for name, values in self._values.items()}
