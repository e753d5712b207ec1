"""The kernel of a processor: it loads the state of the keys of each tick, calls the user's methods,
and stores what they set.

`Reminders` with the key `cart`, by event time, and a timer an hour after the newest row:

    tick 1   a at 12:00        on_row   a: items 1, left 13:00       watermark 12:00
    tick 2   b at 12:30        on_row   b: items 1, left 13:30       watermark 12:30
    tick 3   a at 12:40        on_row   a: items 2, left 13:40       watermark 13:30
             left of b fired   on_timer b: emits (b, 1)
    tick 4                                                           watermark 14:00
             left of a fired   on_timer a: emits (a, 2)

Within a tick, keys that were not used for the step's `ttl` are forgotten first, then rows are
processed, input by input, then timers fire that the watermark (for timers by processing time, the
time of the tick) has reached: of each key the earliest first, also those that are set by a timer
that fires. A timer that is set to the time that has just fired, or an earlier one, waits for the
next tick. The result does not depend on how ticks are grouped into calls.

State:

    key     `k`, key                        version 1; the key's columns, values, timers, for each
                                            timer the time of its entry, and with a ttl the time of
                                            the newest tick that had a row, as one row
                                            (`columnar/row_codec.py`)
    timer   `t`, number, time, key          version 1; the key
    expiry  `x`, time, key                  version 1; the key

Entries of timers and of expiry move only when they are due: a timer that each row sets to a later
time, as that of `Reminders`, costs one entry a key, not two for each row. The entry of a timer is
never later than the timer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar import row_codec
from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import CHANGE_FIELD, CHANGE_TYPE, TICK, TICK_FIELD
from headrace.columnar.keys import as_array, encode_keys, key_groups
from headrace.columnar.lookup import group_start_mask, number_keys, sort_order
from headrace.errors import NewerFormat, ProcessorFailed
from headrace.operators.joins.row_store import concat_bytes, entry_names
from headrace.operators.kernel import (
    UNSTARTED,
    DeadLetterBuffer,
    Groups,
    KeyedState,
    Times,
    Watermarks,
    big_endian,
)
from headrace.operators.processors.calls import CallOutcome, ProcessorCalls
from headrace.operators.processors.context import TIMER_TYPE, Columns, KeyFrame, Moment
from headrace.operators.processors.processor import (
    PROCESSING,
    Declaration,
    Processor,
)

_VERSION = 1
_KEY, _TIMER, _EXPIRY = b"k", b"t", b"x"
_NO_TIMER = 2**63 - 1
_MAX_BYTES = 2**31
MAX_ROUNDS = 10_000
"""How often timers of one key may fire in one tick."""


@dataclass(frozen=True)
class ProcessorInput:
    """An input: its name (None for the first one), its columns, and whether it is a table."""

    name: str | None
    schema: pa.Schema
    is_table: bool


@dataclass
class _LoadedKeys:
    """Keys with what is stored of them. `names` and `stored` are the entries of the state."""

    frame: KeyFrame
    groups: Groups
    names: pa.Array
    stored: pa.Array
    touched_us: Times
    entries_us: dict[str, Times]
    """Per timer, the times of the keys' entries; `_NO_TIMER` where there is none."""

    def take(self, which: Ints) -> _LoadedKeys:
        """Some of the keys."""
        chosen = pa.array(which)
        return _LoadedKeys(
            self.frame.take(which),
            self.groups[which],
            self.names.take(chosen),
            self.stored.take(chosen),
            self.touched_us[which],
            {timer: times[which] for timer, times in self.entries_us.items()},
        )


@dataclass(frozen=True)
class _DueTimers:
    """Timers that are due: their keys, times and numbers."""

    keys: pa.Array
    times_us: Times
    numbers: Ints

    @staticmethod
    def none() -> _DueTimers:
        nothing = np.zeros(0, np.int64)
        return _DueTimers(pa.array([], pa.binary()), nothing, nothing)

    def earliest_of_each_key(self) -> _DueTimers:
        """Of each key the earliest timer, in order of key."""
        _, (rank,) = number_keys([self.keys])
        order = sort_order(rank, self.times_us, self.numbers)
        return self._take(order[group_start_mask(rank[order])])

    def later_than(self, fired: _DueTimers) -> _DueTimers:
        """Of each key the earliest timer that is later than those that have fired; of one time the
        timers go in the order in which they are declared.
        """
        distinct, (own, others) = number_keys([self.keys, fired.keys])
        newest = np.full(len(distinct), UNSTARTED)
        np.maximum.at(newest, others, fired.times_us)
        number = np.full(len(distinct), -1)
        is_newest = fired.times_us == newest[others]
        np.maximum.at(number, others[is_newest], fired.numbers[is_newest])
        is_next = (self.times_us == newest[own]) & (self.numbers > number[own])
        is_later = (self.times_us > newest[own]) | is_next
        return self._take(np.flatnonzero(is_later)).earliest_of_each_key()

    def followed_by(self, later: _DueTimers) -> _DueTimers:
        """These timers and others that fired after them."""
        return _DueTimers(
            pa.concat_arrays([self.keys, later.keys]),
            np.concatenate([self.times_us, later.times_us]),
            np.concatenate([self.numbers, later.numbers]),
        )

    def _take(self, which: Ints) -> _DueTimers:
        return _DueTimers(
            self.keys.take(pa.array(which)), self.times_us[which], self.numbers[which]
        )


class ProcessorKernel:
    """Runs a processor over the rows of a shard.

    Args:
        step: The step's name, for errors.
        processor: The user's processor.
        declaration: What it declares.
        inputs: The inputs, the first one without a name.
        key: The columns of the key, which all inputs and the output have.
        ttl_us: How long a key is kept after its newest row, in tick time; None for ever.
        diverts: Whether rows on which the processor fails become dead letters.
    """

    def __init__(
        self,
        step: str,
        processor: Processor,
        declaration: Declaration,
        inputs: Sequence[ProcessorInput],
        key: Sequence[str],
        *,
        ttl_us: int | None = None,
        diverts: bool = False,
    ) -> None:
        self.step_name, self.inputs, self.key = step, tuple(inputs), tuple(key)
        self.declaration, self.ttl_us = declaration, ttl_us
        self.calls = ProcessorCalls(step, processor, declaration, key, diverts=diverts)
        self.dead_letters = DeadLetterBuffer(_all_columns(self.inputs))
        self.counts: dict[str, int] = {}

    @property
    def output(self) -> pa.Schema:
        return self.calls.emitted_schema

    @cached_property
    def _row_type(self) -> pa.StructType:
        """What is stored of a key."""
        fields = [
            *(pa.field(f"key {field.name}", field.type) for field in self.key_fields),
            *(field.with_nullable(True) for field in self.calls.slots.fields.values()),
            *(pa.field(f"entry {timer}", pa.int64()) for timer in self._timer_names),
            *([pa.field("touched", pa.int64())] if self.ttl_us is not None else []),
        ]
        return pa.struct(fields)

    @property
    def _timer_names(self) -> list[str]:
        return [slot.name for slot in self.declaration.timers]

    @property
    def goes_by_ticks(self) -> bool:
        """Whether the timers go by the time of ticks."""
        return self.declaration.clock == PROCESSING

    def due(self, state: KeyedState) -> int | None:
        """The time of the earliest timer; without timers, when the first key may expire."""
        if self.declaration.timers:
            earliest = self._earliest_timer(state)
            return None if earliest == _NO_TIMER else earliest
        name = state.first(_EXPIRY, _after(_EXPIRY)) if self.ttl_us is not None else None
        return None if name is None else _time_in(name, 1)

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """For each tick: 1. Forget keys whose time is up. 2. Process the rows of each input.
        3. Fire timers. Ticks in which none of this can happen are skipped.
        """
        own = watermarks[0]
        watermark = np.minimum.reduce([each.watermark for each in watermarks])
        watermark_before = np.minimum.reduce([each.watermark_before for each in watermarks])
        self.counts = {"fired": 0, "expired": 0}
        bounds = [_tick_bounds(rows, own.ticks) for rows in inputs]
        emitted: list[pa.Table] = []
        earliest = self._earliest_timer(state)
        for at, tick in enumerate(own.ticks.tolist()):
            before = Moment(tick, int(own.times_us[at]), int(watermark_before[at]))
            after = Moment(tick, int(own.times_us[at]), int(watermark[at]))
            self._expire(state, after)
            had_rows = False
            for number, rows in enumerate(inputs):
                first, stop = bounds[number][at : at + 2].tolist()
                if first < stop:
                    had_rows = True
                    of_tick = rows.slice(first, stop - first)
                    emitted += self._process(state, self.inputs[number], of_tick, before)
            if had_rows:
                earliest = self._earliest_timer(state)
            if earliest <= self._clock_us(after):
                emitted += self._fire(state, after)
                earliest = self._earliest_timer(state)
        return self._in_order(emitted)

    def _clock_us(self, moment: Moment) -> int:
        return moment.time_us if self.goes_by_ticks else moment.watermark_us

    # Rows

    def _process(
        self, state: KeyedState, source: ProcessorInput, rows: pa.Table, moment: Moment
    ) -> list[pa.Table]:
        """Call the method of an input for its rows of one tick."""
        keys, (key_of,) = number_keys([encode_keys(rows, self.key)])
        firsts = np.empty(len(keys), np.int64)
        firsts[key_of[::-1]] = np.arange(len(key_of))[::-1]
        of_keys = rows.select(list(self.key)).take(pa.array(firsts))
        loaded = self._load(state, keys, of_keys)
        visible = [*source.schema.names, *([CHANGE_TYPE] if source.is_table else [])]
        outcome = self.calls.call_for_rows(
            source.name, rows.select(visible), key_of, loaded.frame, moment
        )
        if outcome.rejected:
            self._divert(rows, outcome)
        touched = np.full(len(keys), moment.time_us)
        self._store(state, loaded, outcome.columns, touched)
        return self._with_tick(outcome.emitted, moment)

    def _divert(self, rows: pa.Table, outcome: CallOutcome) -> None:
        for reason in sorted({reason for _, reason in outcome.rejected}):
            which = np.array(sorted(row for row, of_row in outcome.rejected if of_row == reason))
            self.dead_letters.add(rows, which, self.step_name, reason)

    def _with_tick(self, emitted: Sequence[pa.Table], moment: Moment) -> list[pa.Table]:
        return [
            table.append_column(TICK_FIELD, pa.array(np.full(table.num_rows, moment.tick)))
            for table in emitted
        ]

    def _in_order(self, emitted: Sequence[pa.Table]) -> pa.Table:
        """The emitted rows in order of tick and key; of those of one key, as they were emitted."""
        if not emitted:
            return self.output.append(TICK_FIELD).empty_table()
        rows = pa.concat_tables(emitted).combine_chunks()
        _, (rank,) = number_keys([encode_keys(rows, self.key)])
        return rows.take(pa.array(sort_order(as_array(rows[TICK]).to_numpy(), rank)))

    # Timers

    def _earliest_timer(self, state: KeyedState) -> int:
        """The time of the earliest timer, or `_NO_TIMER`."""
        prefixes = [_TIMER + bytes([number]) for number in range(len(self._timer_names))]
        names = [state.first(prefix, _after(prefix)) for prefix in prefixes]
        return min((_time_in(name, 2) for name in names if name is not None), default=_NO_TIMER)

    def _fire(self, state: KeyedState, moment: Moment) -> list[pa.Table]:
        """Fire the timers up to the clock, of each key the earliest first, until none is left but
        those that wait for the next tick.
        """
        emitted: list[pa.Table] = []
        fired = _DueTimers.none()
        self._settle_entries(state, self._clock_us(moment))
        for _ in range(MAX_ROUNDS):
            due = self._due_timers(state, self._clock_us(moment), fired)
            if not len(due.keys):
                return emitted
            for number, timer in enumerate(self._timer_names):
                which = np.flatnonzero(due.numbers == number)
                if len(which):
                    keys = due.keys.take(pa.array(which))
                    emitted += self._fire_one(state, timer, keys, due.times_us[which], moment)
            fired = due if not len(fired.keys) else fired.followed_by(due)
        key = self._load(state, due.keys.slice(0, 1), None).frame.keys.to_pylist()[0]
        raise ProcessorFailed(
            step=self.step_name,
            method="on_timer",
            row=key,
            cause=f"its timers fired {MAX_ROUNDS:,} times in one tick",
            trace="",
        )

    def _settle_entries(self, state: KeyedState, up_to_us: int) -> None:
        """Move the entries up to a time to the times of their timers, where these are later."""
        entries = self._due_entries(state, up_to_us)
        if not len(entries.keys):
            return
        keys, _ = number_keys([entries.keys])
        loaded = self._load(state, keys, None)
        later = np.zeros(len(keys), np.bool_)
        for timer, entry_us in loaded.entries_us.items():
            later |= _timer_times(loaded.frame.columns[timer]) != entry_us
        if later.any():
            moved = loaded.take(np.flatnonzero(later))
            self._store(state, moved, moved.frame.columns, moved.touched_us, moves_all=True)

    def _due_timers(self, state: KeyedState, up_to_us: int, fired: _DueTimers) -> _DueTimers:
        """Of each key its earliest timer that is due, and later than those that have fired."""
        due = self._due_entries(state, up_to_us)
        return due.later_than(fired) if len(fired.keys) else due.earliest_of_each_key()

    def _due_entries(self, state: KeyedState, up_to_us: int) -> _DueTimers:
        """The entries of timers up to a time."""
        if up_to_us == UNSTARTED:
            return _DueTimers.none()
        (end,) = big_endian(np.array([min(up_to_us, _NO_TIMER - 1) + 1]))
        keys: list[bytes] = []
        times: list[bytes] = []
        counts = []
        for number in range(len(self._timer_names)):
            prefix = _TIMER + bytes([number])
            names, values, _ = state.scan(prefix, prefix + end)
            for version in {value[0] for value in values}:
                _check_version(version, self.step_name)
            keys += [value[1:] for value in values]
            times += [name[2:10] for name in names]
            counts.append(len(names))
        words = np.frombuffer(b"".join(times), ">u8").astype(np.uint64) ^ np.uint64(1 << 63)
        return _DueTimers(
            pa.array(keys, pa.binary()),
            words.view(np.int64),
            np.repeat(np.arange(len(counts)), counts),
        )

    def _fire_one(
        self, state: KeyedState, timer: str, keys: pa.Array, times: Times, moment: Moment
    ) -> list[pa.Table]:
        """Remove a timer of some keys, and call `on_timer` for them."""
        loaded = self._load(state, keys, None)
        fired_at = pa.array(times).cast(TIMER_TYPE)
        columns = {**loaded.frame.columns, timer: pa.nulls(len(keys), TIMER_TYPE)}
        frame = KeyFrame(loaded.frame.keys, loaded.frame.key_bytes, columns)
        outcome = self.calls.call_for_timer(timer, fired_at, frame, moment)
        if outcome.rejected:
            ticks = pa.array(np.full(len(keys), moment.tick))
            changes = pa.nulls(len(keys), pa.string())
            rows = frame.keys.append_column(TICK_FIELD, ticks)
            self._divert(rows.append_column(CHANGE_FIELD, changes), outcome)
        self.counts["fired"] += len(keys)
        self._store(state, loaded, outcome.columns, loaded.touched_us, moves_all=True)
        return self._with_tick(outcome.emitted, moment)

    # Expiry

    def _expire(self, state: KeyedState, moment: Moment) -> None:
        """Forget the keys of which no tick had a row for `ttl`. An entry that is due of a key that
        was used since moves to when it is due next.
        """
        if self.ttl_us is None:
            return
        (end,) = big_endian(np.array([moment.time_us + 1]))
        names, values, groups = state.scan(_EXPIRY, _EXPIRY + end)
        if not names:
            return
        state.put(names, [None] * len(names), groups)
        keys = pa.array([value[1:] for value in values], pa.binary())
        loaded = self._load(state, keys, None)
        expires_us = loaded.touched_us + self.ttl_us
        is_known = loaded.stored.is_valid().to_numpy(zero_copy_only=False)
        later = np.flatnonzero(is_known & (expires_us > moment.time_us))
        if len(later):
            moved = keys.take(pa.array(later))
            state.put_array(
                entry_names(_EXPIRY, expires_us[later], moved.cast(pa.large_binary())),
                _versioned(moved),
                loaded.groups[later],
            )
        gone = np.flatnonzero(is_known & (expires_us <= moment.time_us))
        if len(gone):
            self.counts["expired"] += len(gone)
            old = loaded.take(gone)
            empty = {
                name: pa.nulls(len(gone), column.type) for name, column in old.frame.columns.items()
            }
            self._store(state, old, empty, old.touched_us)

    # State

    @property
    def inspected_prefix(self) -> bytes:
        return _KEY

    @property
    def key_fields(self) -> list[pa.Field]:
        return [self.inputs[0].schema.field(name) for name in self.key]

    def describe(self, keys: pa.Array, values: pa.Array) -> pa.Table:  # noqa: ARG002
        """The values and timers of each key, for people."""
        stored, slots = self._decode(values), self.calls.slots
        count = len(self.key)
        columns = [stored.field(number) for number in range(count)]
        columns += [
            slots.with_default(name, stored.field(count + number))
            for number, name in enumerate(slots.fields)
        ]
        names = [*self.key, *(f"_{name}" if name in self.key else name for name in slots.fields)]
        return pa.Table.from_arrays(columns, names=names)

    def _load(self, state: KeyedState, keys: pa.Array, of_keys: pa.Table | None) -> _LoadedKeys:
        """What is stored of some keys. `of_keys` has their columns; without it, all are stored."""
        groups = key_groups(keys)
        prefix = pa.scalar(_KEY, pa.large_binary())
        names = concat_bytes([prefix, keys.cast(pa.binary()).cast(pa.large_binary())])
        names = names.cast(pa.binary())
        stored = state.get_array(names, groups)
        is_stored = stored.is_valid().to_numpy(zero_copy_only=False)
        rows = self._decode(stored.drop_null())
        at = pa.array(np.cumsum(is_stored) - 1, mask=~is_stored)
        fields = [rows.field(number).take(at) for number in range(self._row_type.num_fields)]
        count = len(self.key)
        if of_keys is None:
            key_columns = fields[:count]
        else:
            key_columns = [as_array(of_keys[name]) for name in self.key]
        slots = dict(zip(self.calls.slots.fields, fields[count:], strict=False))
        entries = {
            timer: fields[count + len(slots) + number].fill_null(_NO_TIMER).to_numpy()
            for number, timer in enumerate(self._timer_names)
        }
        touched = (
            fields[-1].fill_null(UNSTARTED).to_numpy()
            if self.ttl_us is not None
            else np.zeros(len(keys), np.int64)
        )
        of_keys_schema = pa.schema(self.key_fields)
        frame = KeyFrame(pa.Table.from_arrays(key_columns, schema=of_keys_schema), keys, slots)
        return _LoadedKeys(frame, groups, names, stored, touched, entries)

    def _decode(self, stored: pa.Array) -> pa.StructArray:
        if len(stored):
            versions = pc.binary_slice(stored, 0, 1).unique().to_pylist()
            for version in versions:
                _check_version(version[0], self.step_name)
        content = pc.binary_slice(stored.cast(pa.large_binary()), 1, _MAX_BYTES)
        return row_codec.decode_array(content, self._row_type)

    def _store(
        self,
        state: KeyedState,
        loaded: _LoadedKeys,
        columns: Columns,
        touched_us: Times,
        *,
        moves_all: bool = False,
    ) -> None:
        """Store values and timers of some keys, and move the entries of their timers; with
        `moves_all` also those that need not move yet. A key with neither is deleted.
        """
        entries = {
            timer: _entry_times(_timer_times(columns[timer]), before, moves_all=moves_all)
            for timer, before in loaded.entries_us.items()
        }
        kept = {name: self._without_default(name, column) for name, column in columns.items()}
        arrays = [as_array(column) for column in loaded.frame.keys.columns] + list(kept.values())
        is_used = np.zeros(len(loaded.frame), np.bool_)
        for column in kept.values():
            is_used |= column.is_valid().to_numpy(zero_copy_only=False)
        for times in entries.values():
            arrays.append(pa.array(times, mask=times == _NO_TIMER))
        if self.ttl_us is not None:
            arrays.append(pa.array(touched_us))
        rows = pa.StructArray.from_arrays(arrays, fields=list(self._row_type))
        values = pc.if_else(
            pa.array(is_used),
            _versioned(row_codec.encode_array(rows)),
            pa.scalar(None, pa.binary()),
        )
        changed = _differs(values, loaded.stored)
        if changed.all():
            state.put_array(loaded.names, values, loaded.groups)
        elif changed.any():
            which = pa.array(np.flatnonzero(changed))
            state.put_array(loaded.names.take(which), values.take(which), loaded.groups[changed])
        self._move_entries(state, loaded, entries)
        if self.ttl_us is not None:
            was_used = loaded.stored.is_valid().to_numpy(zero_copy_only=False)
            new = np.flatnonzero(is_used & ~was_used)
            if len(new):
                keys = loaded.frame.key_bytes.take(pa.array(new)).cast(pa.binary())
                state.put_array(
                    entry_names(
                        _EXPIRY, touched_us[new] + self.ttl_us, keys.cast(pa.large_binary())
                    ),
                    _versioned(keys),
                    loaded.groups[new],
                )

    def _without_default(self, name: str, column: pa.Array) -> pa.Array:
        """A column with null where it has the default, which need not be stored."""
        default = self.calls.slots.defaults.get(name)
        if default is None or not len(column):
            return column
        (content,) = row_codec.encode(default)
        same = pc.equal(row_codec.encode_array(column), pa.scalar(content, pa.large_binary()))
        is_default = pc.and_(same, column.is_valid()).to_numpy(zero_copy_only=False)
        if not is_default.any():
            return column
        return column.take(pa.array(np.arange(len(column)), mask=is_default))

    def _move_entries(
        self, state: KeyedState, loaded: _LoadedKeys, entries: dict[str, Times]
    ) -> None:
        keys = loaded.frame.key_bytes.cast(pa.binary()).cast(pa.large_binary())
        for number, (timer, after) in enumerate(entries.items()):
            prefix = _TIMER + bytes([number])
            before = loaded.entries_us[timer]
            moved = before != after
            for times, is_set in ((before, False), (after, True)):
                which = np.flatnonzero(moved & (times != _NO_TIMER))
                if len(which):
                    own = keys.take(pa.array(which))
                    value = _versioned(own) if is_set else pa.nulls(len(which), pa.binary())
                    names = entry_names(prefix, times[which], own)
                    state.put_array(names, value, loaded.groups[which])


def _entry_times(timers: Times, before: Times, *, moves_all: bool) -> Times:
    """Where the entries of timers go, given where they were: a timer that is later than its entry
    leaves it where it is.

        timer     13:40    12:10    none
        entry     13:30    12:30    12:30
        after     13:30    12:10    none
    """
    if moves_all:
        return timers
    stays = (before <= timers) & (timers != _NO_TIMER)
    return np.where(stays, before, timers)


def _all_columns(inputs: Sequence[ProcessorInput]) -> pa.Schema:
    """The columns of all inputs; of those with one name, the first one's."""
    fields: dict[str, pa.Field] = {}
    for source in inputs:
        for column in source.schema:
            fields.setdefault(column.name, column)
    return pa.schema(list(fields.values()))


def _tick_bounds(rows: pa.Table, ticks: Times) -> Ints:
    """Where the rows of each tick begin, and where the last ones end. Rows are in order of tick."""
    row_ticks = as_array(rows[TICK]).to_numpy()
    return np.append(np.searchsorted(row_ticks, ticks), len(row_ticks))


def _timer_times(column: pa.Array) -> Times:
    times: Times = column.cast(pa.int64()).fill_null(_NO_TIMER).to_numpy()
    return times


def _versioned(content: pa.Array) -> pa.Array:
    """Values of entries: the version, and what they say."""
    version = pa.scalar(bytes([_VERSION]), pa.large_binary())
    return concat_bytes([version, content.cast(pa.large_binary())]).cast(pa.binary())


def _check_version(version: int, step: str) -> None:
    if version > _VERSION:
        raise NewerFormat(
            f"The state of step {step!r} was written by a newer Headrace.", fix="upgrade Headrace."
        )


def _differs(after: pa.Array, before: pa.Array) -> Mask:
    """Where two columns of bytes differ; null equals null."""
    same = pc.equal(after, before).fill_null(False)
    both_null = pc.and_(after.is_null(), before.is_null())
    differs: Mask = ~pc.or_(same, both_null).to_numpy(zero_copy_only=False)
    return differs


def _time_in(name: bytes, start: int) -> int:
    """The time in an entry's name."""
    return int.from_bytes(name[start : start + 8], "big") - (1 << 63)


def _after(prefix: bytes) -> bytes:
    """The first name behind all that begin with a prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
