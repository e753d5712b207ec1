"""State that expires: kernels around another kernel that drop the state of its keys by time.

`ForgettingKernel` drops what can no longer change: of rows whose time is part of their key, such as
the end of a window, once the horizon has passed that time. It emits nothing, and no result changes.

`ExpiringKernel` drops the keys of a table after a time, and retracts their rows. A key comes to its
end when no tick has had a row of it for `ttl`, or with a time column when the watermark has reached
the time in its key plus `ttl`. With `ttl` = 10 s around a count by `k`, by ticks:

    tick at 0 s    k=a           a -> 1; timer 10 a                   insert a 1
    tick at 6 s    k=a           a -> 2; last 6; timer 10 a           update a 1 -> a 2
    tick at 12 s                 timer 16 a (it was set too early)
    tick at 16 s                 nothing                              delete a 2
    tick at 17 s   k=a           a -> 1; timer 27 a                   insert a 1

A key that comes back begins anew. It expires in the first tick that is late enough, before the rows
of that tick, however ticks are grouped into calls. The cost follows the rows and the keys that
expire: timers are found by time, and move only when they are due.

State, beside that of the inner kernel (no key of which begins so, see `columnar/keys.py`):

    timer   8 bytes 254, `t`, time (8 bytes, sortable), key     version 1; the key
    last    8 bytes 254, `l`, key                               version 1; time of the key's newest
                                                                tick, 8 bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import (
    CHANGE_TYPE,
    DELETE,
    INSERT,
    TICK,
    TICK_FIELD,
    UPDATE_POSTIMAGE,
    UPDATE_PREIMAGE,
)
from headrace.columnar.keys import as_array, encode_keys, key_groups
from headrace.columnar.lookup import rank_keys
from headrace.errors import NewerFormat
from headrace.operators.changelog import differs
from headrace.operators.kernel import (
    ENDED,
    UNSTARTED,
    Groups,
    Kernel,
    KeyedState,
    TimedKernel,
    Times,
    Watermarks,
    big_endian,
    microseconds,
)

PREFIX = b"\xfe" * 8
"""How the names of these entries begin."""
_TIMER, _LAST = PREFIX + b"t", PREFIX + b"l"
_VERSION = b"\x01"


class ForgettableKernel(Protocol):
    """What a kernel needs so that the state of its keys can be dropped."""

    def forget(self, state: KeyedState, keys: pa.Array) -> None:
        """Delete everything that is stored of some keys."""
        ...


class RetractableKernel(ForgettableKernel, Kernel, Protocol):
    """A kernel whose result is a table with one row for each key of its state."""

    def stored_rows(self, state: KeyedState, keys: pa.Array) -> pa.Table:
        """The present rows of those of the keys that have one."""
        ...


# Timers


def _due_keys(state: KeyedState, up_to_us: int) -> tuple[list[bytes], list[bytes], Groups]:
    """The names of the timers before a time (which is not included), their keys and groups."""
    if up_to_us == UNSTARTED:
        return [], [], np.zeros(0, np.uint8)
    (end,) = big_endian(np.array([up_to_us]))
    names, values, groups = state.scan(_TIMER, _TIMER + end)
    if values and max(value[:1] for value in values) > _VERSION:
        raise NewerFormat(
            "A timer was written by a newer Headrace.", fix="run the newer Headrace that wrote it."
        )
    return names, [value[1:] for value in values], groups


def _timer_names(times: Times, keys: Sequence[bytes]) -> list[bytes]:
    pairs = zip(big_endian(times), keys, strict=True)
    return [_TIMER + time + key for time, key in pairs]


def _earliest_timer(state: KeyedState) -> int | None:
    name = state.first(_TIMER, _TIMER + b"\xff" * 9)
    if name is None:
        return None
    start = len(_TIMER)
    return int.from_bytes(name[start : start + 8], "big") - (1 << 63)


def _byte_list(keys: pa.Array) -> list[bytes]:
    listed: list[bytes] = keys.cast(pa.binary()).to_pylist()
    return listed


def _groups_of(keys: Sequence[bytes]) -> Groups:
    return key_groups(pa.array(keys, pa.binary()))


# Forgetting what can no longer change


@dataclass(frozen=True)
class SettledKey:
    """The columns by which an input's rows are stored, and the one of them that has the time by
    which a row is settled; less `shift_us`.
    """

    columns: tuple[str, ...]
    time: str
    shift_us: int = 0


class ForgettingKernel:
    """Runs a kernel, and drops the state of keys whose time the horizon of all inputs has passed. A
    row behind the horizon is dropped, and counted as late.

    Args:
        kernel: The kernel.
        inputs: The key of each input.
    """

    def __init__(self, kernel: Any, inputs: Sequence[SettledKey]) -> None:
        self.kernel = kernel
        self.inputs = tuple(inputs)
        self.output: pa.Schema = kernel.output
        self.dead_letters = getattr(kernel, "dead_letters", None)
        self.unknown_results: dict[str, int] = getattr(kernel, "unknown_results", {})
        self.left_out: dict[str, int] = getattr(kernel, "left_out", {})
        self.counts: dict[str, int] = {}

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """1. Drop late rows. 2. Run the kernel. 3. Set the timers of new keys. 4. Forget keys."""
        horizon = np.minimum.reduce([each.horizon for each in watermarks])
        before = np.minimum.reduce([each.horizon_before for each in watermarks])
        self.counts = {"late": 0}
        kept = []  # 1
        for rows, settled, own in zip(inputs, self.inputs, watermarks, strict=True):
            times, is_known = _settled_times(rows, settled)
            index = own.tick_indices(as_array(rows[TICK]).to_numpy())
            is_late = is_known & (times < before[index]) if rows.num_rows else is_known
            if is_late.any():
                self.counts["late"] += int(is_late.sum())
                rows = rows.filter(pa.array(~is_late))  # noqa: PLW2901
            kept.append(rows)
        if isinstance(self.kernel, TimedKernel):  # 2
            result = self.kernel.step_timed(state, kept, watermarks)
        else:
            result = self.kernel.step(state, kept[0])
        for rows, settled in zip(kept, self.inputs, strict=True):  # 3
            _set_timers(state, rows, settled)
        names, keys, groups = _due_keys(state, int(horizon[-1]) if len(horizon) else UNSTARTED)  # 4
        if names:
            self.kernel.forget(state, pa.array(sorted(set(keys)), pa.binary()))
            state.put(names, [None] * len(names), groups)
        return result

    def due(self, state: KeyedState) -> int | None:
        """What the kernel waits for. What can be forgotten waits for the next call."""
        return self.kernel.due(state) if isinstance(self.kernel, TimedKernel) else None


def _settled_times(rows: pa.Table, settled: SettledKey) -> tuple[Times, Mask]:
    """The time of each row, and whether it has one."""
    column = as_array(rows.column(settled.time))
    is_known: Mask = column.is_valid().to_numpy(zero_copy_only=False)
    filled = column.fill_null(pa.scalar(0, pa.int64()).cast(column.type))
    return microseconds(filled) + settled.shift_us, is_known


def _set_timers(state: KeyedState, rows: pa.Table, settled: SettledKey) -> None:
    """Set a timer for each key that has none."""
    if not rows.num_rows:
        return
    times, is_known = _settled_times(rows, settled)
    encoded = encode_keys(rows, settled.columns).cast(pa.binary()).dictionary_encode()
    _, first = np.unique(encoded.indices.to_numpy(), return_index=True)
    is_first = np.zeros(rows.num_rows, np.bool_)
    is_first[first] = True
    chosen = np.flatnonzero(is_first & is_known)
    keys = _byte_list(encoded.dictionary.take(encoded.indices.take(pa.array(chosen))))
    names, groups = _timer_names(times[chosen], keys), _groups_of(keys)
    missing = [at for at, value in enumerate(state.get(names, groups)) if value is None]
    if missing:
        state.put(
            [names[at] for at in missing],
            [_VERSION + keys[at] for at in missing],
            groups[np.array(missing)],
        )


# Expiring


class ExpiringKernel:
    """Runs a kernel whose result is a table, and expires its keys.

    Args:
        kernel: The kernel.
        key: The columns of its input by which its state is stored: the key of the result.
        ttl_us: How long a key lives after its newest tick; with `time`, after that time.
        time: The column of the key that has its time, by which it lives instead; less `shift_us`.
        shift_us: What is added to the time.
    """

    def __init__(
        self,
        kernel: RetractableKernel,
        key: Sequence[str],
        ttl_us: int,
        *,
        time: str | None = None,
        shift_us: int = 0,
    ) -> None:
        self.kernel = kernel
        self.key = tuple(key)
        self.ttl_us = ttl_us
        self.settled = None if time is None else SettledKey(self.key, time, shift_us)
        self.output: pa.Schema = kernel.output
        self.dead_letters = getattr(kernel, "dead_letters", None)
        self.unknown_results: dict[str, int] = getattr(kernel, "unknown_results", {})
        self.left_out: dict[str, int] = getattr(kernel, "left_out", {})
        self.counts: dict[str, int] = {}
        self._has_ended = False

    def due(self, state: KeyedState) -> int | None:
        """The earliest timer: a time of ticks; with a time column, of the watermark."""
        if self._has_ended:
            return None
        earliest = _earliest_timer(state)
        return earliest if earliest is None or self.settled is None else earliest + self.ttl_us

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        self.counts = {"expired": 0}
        if self.settled is None:
            return self._step_by_ticks(state, inputs[0], watermarks[0])
        return self._step_by_time(state, inputs[0], watermarks[0], self.settled)

    # By the time in the key

    def _step_by_time(
        self, state: KeyedState, rows: pa.Table, watermarks: Watermarks, settled: SettledKey
    ) -> pa.Table:
        """1. Drop the rows that have expired by the end of their tick. 2. Run the kernel. 3. Set
        timers. 4. Expire the keys that are due.
        """
        clock = _watermark_before_end(watermarks)
        self._has_ended = bool(len(clock)) and bool(clock[-1] != watermarks.watermark[-1])
        if rows.num_rows:  # 1
            times, is_known = _settled_times(rows, settled)
            index = watermarks.tick_indices(as_array(rows[TICK]).to_numpy())
            is_over = is_known & (times + self.ttl_us <= clock[index])
            rows = rows.filter(pa.array(~is_over)) if is_over.any() else rows
        result = self._run(state, rows)  # 2
        _set_timers(state, rows, settled)  # 3
        now_us = int(clock[-1]) if len(clock) else UNSTARTED
        up_to = UNSTARTED if now_us == UNSTARTED else now_us - self.ttl_us + 1
        names, keys, groups = _due_keys(state, up_to)  # 4
        if not names:
            return result
        start = len(_TIMER)
        times_us = [int.from_bytes(name[start : start + 8], "big") - (1 << 63) for name in names]
        deadlines = np.array(times_us, np.int64) + self.ttl_us
        state.put(names, [None] * len(names), groups)
        deletes = self._expire(state, keys, deadlines, watermarks.ticks, clock)
        return self._merge([result], [deletes])

    # By ticks

    def _step_by_ticks(self, state: KeyedState, rows: pa.Table, watermarks: Watermarks) -> pa.Table:
        """1. Find the lives of each key: a new one begins with a row that comes `ttl` after the one
        before. 2. Run the kernel for the first lives of all keys and expire those that end, then
        for the second ones, and so on; usually there is one. 3. Store when keys had their newest
        tick, and set timers.
        """
        if not len(watermarks):
            return self._run(state, rows)
        times, now_us = watermarks.times_us, int(watermarks.times_us[-1])
        names, due_keys, due_groups = _due_keys(state, now_us + 1)
        encoded = encode_keys(rows, self.key).cast(pa.binary()).dictionary_encode()
        own_keys = _byte_list(encoded.dictionary)
        numbers = {key: number for number, key in enumerate(own_keys)}
        keys = own_keys + [key for key in dict.fromkeys(due_keys) if key not in numbers]
        if not keys:
            return self._run(state, rows)
        groups = _groups_of(keys)
        last_names = [_LAST + key for key in keys]
        stored = [
            None if value is None else int.from_bytes(value[1:9], "big", signed=True)
            for value in state.get(last_names, groups)
        ]
        lives = self._find_lives(rows, encoded, watermarks, stored, now_us)  # 1
        outputs, deletes = [], []
        for life in range(lives.count):  # 2
            own = rows if lives.count == 1 else rows.filter(pa.array(lives.of_row == life))
            outputs.append(self._run(state, own))
            ends = lives.ended_in(life)
            if len(ends):
                ended = [keys[at] for at in lives.ended_keys[ends].tolist()]
                deadlines = lives.deadlines[ends]
                deletes.append(self._expire(state, ended, deadlines, watermarks.ticks, times))
        self._store(state, keys, groups, stored, lives.newest, set(due_keys))  # 3
        if names:
            state.put(names, [None] * len(names), due_groups)
            due = set(due_keys)
            alive = [
                at for at, key in enumerate(keys) if key in due and lives.newest[at] != UNSTARTED
            ]
            self._put_timers(state, keys, groups, lives.newest, alive)
        return self._merge(outputs, deletes)

    def _find_lives(
        self,
        rows: pa.Table,
        encoded: pa.DictionaryArray,
        watermarks: Watermarks,
        stored: Sequence[int | None],
        now_us: int,
    ) -> _Lives:
        """The lives of each key up to now, from the ticks in which it has rows."""
        known = np.array([UNSTARTED if each is None else each for each in stored], np.int64)
        key_of = encoded.indices.to_numpy().astype(np.int64)
        row_times = watermarks.times_us[watermarks.tick_indices(as_array(rows[TICK]).to_numpy())]
        order = np.lexsort((row_times, key_of))
        sorted_keys, sorted_times = key_of[order], row_times[order]
        is_first = np.append(True, sorted_keys[1:] != sorted_keys[:-1])[: len(order)]
        before = np.append(0, sorted_times[:-1])[: len(order)]
        before = np.where(is_first, known[sorted_keys], before)
        begins = (before != UNSTARTED) & (before + self.ttl_us <= sorted_times)
        total = np.cumsum(begins)
        first = np.flatnonzero(is_first)
        counts = np.diff(np.append(first, len(order)))
        life_sorted = total - np.repeat(total[first] - begins[first], counts)
        of_row = np.empty(len(order), np.int64)
        of_row[order] = life_sorted
        newest, lives_of_key = known.copy(), np.zeros(len(known), np.int64)
        last = np.append(first[1:], len(order)) - 1 if len(first) else first
        newest[sorted_keys[last]] = sorted_times[last]
        lives_of_key[sorted_keys[last]] = life_sorted[last]
        over = np.flatnonzero((newest != UNSTARTED) & (newest + self.ttl_us <= now_us))
        ended_keys = np.concatenate([sorted_keys[begins], over])
        deadlines = np.concatenate([before[begins], newest[over]]) + self.ttl_us
        ended_lives = np.concatenate([life_sorted[begins] - 1, lives_of_key[over]])
        newest[over] = UNSTARTED
        return _Lives(of_row, ended_keys, ended_lives, deadlines, newest)

    def _store(
        self,
        state: KeyedState,
        keys: Sequence[bytes],
        groups: Groups,
        stored: Sequence[int | None],
        newest: Ints,
        due: set[bytes],
    ) -> None:
        """Store the newest tick of each key that had one, and a first timer for new keys."""
        changed = [
            at
            for at, (before, after) in enumerate(zip(stored, newest.tolist(), strict=True))
            if (UNSTARTED if before is None else before) != after
        ]
        if changed:
            values = [
                None
                if newest[at] == UNSTARTED
                else _VERSION + int(newest[at]).to_bytes(8, "big", signed=True)
                for at in changed
            ]
            names = [_LAST + keys[at] for at in changed]
            state.put(names, values, groups[np.array(changed)])
        fresh = [
            at
            for at, before in enumerate(stored)
            if before is None and newest[at] != UNSTARTED and keys[at] not in due
        ]
        self._put_timers(state, keys, groups, newest, fresh)

    def _put_timers(
        self,
        state: KeyedState,
        keys: Sequence[bytes],
        groups: Groups,
        newest: Ints,
        which: Sequence[int],
    ) -> None:
        if not which:
            return
        index = np.array(which)
        chosen = [keys[at] for at in which]
        names = _timer_names(newest[index] + self.ttl_us, chosen)
        state.put(names, [_VERSION + key for key in chosen], groups[index])

    # Both

    def _run(self, state: KeyedState, rows: pa.Table) -> pa.Table:
        if not rows.num_rows:
            return self.output.append(TICK_FIELD).empty_table()
        return self.kernel.step(state, rows)

    def _expire(
        self, state: KeyedState, keys: Sequence[bytes], deadlines: Times, ticks: Ints, clock: Times
    ) -> pa.Table:
        """Forget some keys. Returns their rows as deletes, each in the first tick whose time has
        reached its deadline.
        """
        self.counts["expired"] += len(keys)
        array = pa.array(keys, pa.binary())
        rows = self.kernel.stored_rows(state, array)
        self.kernel.forget(state, array)
        ticks_by_key = dict(
            zip(keys, ticks[np.searchsorted(clock, deadlines)].tolist(), strict=True)
        )
        row_keys = _byte_list(encode_keys(rows, self.key))
        return rows.append_column(
            self.output.field(CHANGE_TYPE), pa.repeat(DELETE, rows.num_rows)
        ).append_column(TICK_FIELD, pa.array([ticks_by_key[key] for key in row_keys], pa.int64()))

    def _merge(self, outputs: Sequence[pa.Table], deletes: Sequence[pa.Table]) -> pa.Table:
        """All changes in order of tick and key. A key that expires and comes back in the same tick
        is updated.
        """
        schema = self.output.append(TICK_FIELD)
        parts = [part.select(schema.names).cast(schema) for part in (*deletes, *outputs)]
        if sum(part.num_rows > 0 for part in parts) <= 1 and not any(
            part.num_rows for part in deletes
        ):
            return next((part for part in outputs if part.num_rows), schema.empty_table())
        changes = pa.concat_tables(parts).combine_chunks()
        expired = sum(part.num_rows for part in deletes)
        keys = rank_keys([encode_keys(changes, self.key)]).ranks[0]
        ticks = as_array(changes[TICK]).to_numpy()
        is_expiry = np.arange(changes.num_rows) < expired
        order = np.lexsort((~is_expiry, keys, ticks))
        changes = changes.take(pa.array(order))
        keys, ticks, is_expiry = keys[order], ticks[order], is_expiry[order]
        follows = np.append(
            False, is_expiry[:-1] & (keys[1:] == keys[:-1]) & (ticks[1:] == ticks[:-1])
        )
        if not follows.any():
            return changes
        second = np.flatnonzero(follows)
        kinds = np.array(as_array(changes[CHANGE_TYPE]).to_pylist(), object)
        assert (kinds[second] == INSERT).all()
        kinds[second - 1], kinds[second] = UPDATE_PREIMAGE, UPDATE_POSTIMAGE
        position = schema.get_field_index(CHANGE_TYPE)
        merged = changes.set_column(position, schema.field(CHANGE_TYPE), pa.array(kinds.tolist()))
        before, after = pa.array(second - 1), pa.array(second)
        columns = [as_array(changes[name]) for name in schema.names if name[:1] != "_"]
        is_same = ~np.logical_or.reduce(
            [differs(column.take(before), column.take(after)) for column in columns]
        )
        stays = np.ones(changes.num_rows, np.bool_)
        stays[second[is_same]] = stays[second[is_same] - 1] = False
        return merged.filter(pa.array(stays))


def _watermark_before_end(watermarks: Watermarks) -> Times:
    """The watermark of each tick; from the end of event time on the one before it. That no row
    comes any more makes no row old: a final run would otherwise leave nothing of a table.
    """
    is_ended = watermarks.watermark >= ENDED // 2
    if not is_ended.any():
        return watermarks.watermark
    before = int(watermarks.watermark_before[np.argmax(is_ended)])
    return np.where(is_ended, UNSTARTED if before >= ENDED // 2 else before, watermarks.watermark)


@dataclass(frozen=True)
class _Lives:
    """The lives of keys in one call: of each row, and those that end."""

    of_row: Ints
    ended_keys: Ints
    ended_lives: Ints
    deadlines: Times
    newest: Times
    """The newest tick of each key that is alive; UNSTARTED for others."""

    @property
    def count(self) -> int:
        return 1 + int(max(self.of_row.max(initial=0), self.ended_lives.max(initial=0)))

    def ended_in(self, life: int) -> npt.NDArray[np.intp]:
        return np.flatnonzero(self.ended_lives == life)
