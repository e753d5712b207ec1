"""The rows that a key still needs, in the state: those that are not certain to be in order yet, and
those from the first on whose fate as a beginning is open. And when to look again.

| entry | name | bytes |
|---|---|---|
| rows | `r`, the key | as `windows.kept_rows` has it: time, mark, which conditions the row alone
meets, and the columns that the pattern needs |
| timer | `w`, time, zeros, the key | as `windows.entries` has it |
| account | `k`, the key | version 1, then how many matches each pattern has had: kept for good,
where matches are numbered or begin with a key's first row |

The mark of a key's first row is its timer, -1 if it has none. Behind the conditions stands, for
each pattern, whether the row may still begin a match of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, runs
from headrace.columnar.lookup import sorting
from headrace.errors import NewerFormat
from headrace.operators.kernel import Groups, KeyedState, Times
from headrace.operators.windows.state import RowStore, Windows, with_long_keys

MARK = "_mark"
BITS = "_bits"
NO_TIMER = -1
WORD = 63
_ACCOUNT = pa.scalar(b"k", pa.binary())
_NOTHING = pa.scalar(b"", pa.binary())
_ONE = pa.scalar(b"\x01", pa.binary())
_VERSION = 1
Numbers = npt.NDArray[np.int64]
"""A row for each key, a column for each pattern."""


def words_of(count: int) -> int:
    """How many words hold so many conditions."""
    return -(-count // WORD)


def bit_fields(count: int) -> list[pa.Field]:
    """Columns that hold so many conditions of a row."""
    return [pa.field(f"{BITS}{word}", pa.int64()) for word in range(words_of(count))]


def packed(masks: Sequence[Mask], more: int, count: int) -> list[pa.Array]:
    """Conditions as words, and behind them so many more that are true."""
    total = len(masks) + more
    words = [
        np.full(
            count,
            sum(1 << at % WORD for at in range(max(first, len(masks)), min(first + WORD, total))),
        )
        for first in range(0, total, WORD)
    ]
    for at, mask in enumerate(masks):
        words[at // WORD] |= mask.astype(np.int64) << (at % WORD)
    return [pa.array(word) for word in words]


class Bits:
    """Conditions of rows, as words; taken out when they are asked for, since there can be
    thousands.
    """

    def __init__(self, words: list[Ints]) -> None:
        self.words = words

    def get(self, at: int, rows: Ints | None = None) -> Mask:
        """One of them, of all rows or some."""
        word = self.words[at // WORD] if rows is None else self.words[at // WORD][rows]
        found: Mask = (word & (1 << at % WORD)) != 0
        return found

    def clear(self, at: int, rows: Ints) -> None:
        """Let one of them be false for some rows."""
        self.words[at // WORD][rows] &= ~(1 << at % WORD)


def put_rows(
    store: RowStore,
    state: KeyedState,
    by: pa.Array,
    groups: Groups,
    names: pa.Array,
    rows: pa.Table,
    counts: tuple[Ints, Ints],
    timers: tuple[Times, Times],
) -> None:
    """Store the rows of keys, so many of each, and move their timers; of both what was before comes
    first.
    """
    (had, has), (old, new) = counts, timers
    some = np.flatnonzero((had > 0) | (has > 0))
    every = len(some) == len(has)
    store.write(
        state,
        names if every else names.take(pa.array(some)),
        groups if every else groups[some],
        has if every else has[some],
        rows,
    )
    moved = old != new
    gone, set_anew = (
        _timer_names(by, groups, times, np.flatnonzero(moved & (times != NO_TIMER)))
        for times in (old, new)
    )
    state.put_array(gone[0], pa.nulls(len(gone[0]), pa.binary()), gone[1])
    state.put_array(
        set_anew[0], with_long_keys(set_anew[0], pa.repeat(_ONE, len(set_anew[0]))), set_anew[1]
    )


def _timer_names(
    by: pa.Array, groups: Groups, times: Times, which: Ints
) -> tuple[pa.Array, Groups]:
    windows = Windows(
        by.take(pa.array(which)), np.zeros(len(which), np.int64), times[which], groups[which]
    )
    return windows.names(np.ones(len(which), np.bool_)).cast(pa.binary()), groups[which]


class Accounts:
    """How many matches keys have had, one number for each pattern; a key without an account has had
    no row.
    """

    def __init__(self, step: str, patterns: int) -> None:
        self.step_name, self._dtype = (
            step,
            np.dtype([("version", "u1"), ("matches", "<i8", (patterns,))]),
        )

    @staticmethod
    def _names(by: pa.Array) -> pa.Array:
        return pc.binary_join_element_wise(_ACCOUNT, by.cast(pa.binary()), _NOTHING)

    def read(self, state: KeyedState, by: pa.Array, groups: Groups) -> tuple[Mask, Numbers]:
        """Which keys are known, and their numbers."""
        values = state.get_array(self._names(by), groups)
        known = values.is_valid().to_numpy(zero_copy_only=False)
        found = np.zeros(len(by), self._dtype)
        found[known] = np.frombuffer(b"".join(values.drop_null().to_pylist()), self._dtype)
        if int(found["version"].max(initial=0)) > _VERSION:
            raise NewerFormat(
                f"The state of step {self.step_name!r} was written by a newer Headrace.",
                fix="upgrade Headrace.",
            )
        numbers: Numbers = found["matches"].copy()
        return known, numbers

    def write(
        self, state: KeyedState, by: pa.Array, groups: Groups, matches: Numbers, which: Mask
    ) -> None:
        at = np.flatnonzero(which)
        made = np.zeros(len(at), self._dtype)
        made["version"], made["matches"] = _VERSION, matches[at]
        values = [each.tobytes() for each in made]
        state.put_array(
            self._names(by.take(pa.array(at))), pa.array(values, pa.binary()), groups[at]
        )


def timers_of(marks: Ints, counts: Ints) -> Times:
    """The timer of each key, from the marks of its rows."""
    timers = np.full(len(counts), NO_TIMER)
    some = counts > 0
    timers[some] = marks[(np.cumsum(counts) - counts)[some]]
    return timers


def marks_of(timers: Times, counts: Ints) -> Ints:
    """The other way round."""
    marks = np.full(int(counts.sum()), NO_TIMER)
    some = counts > 0
    marks[(np.cumsum(counts) - counts)[some]] = timers[some]
    return marks


# Rows in order of key and time, as the matcher sees them: which key each belongs to, when it was,
# and which symbols it fits. All by position, whole columns at a time.


NEVER = 1 << 32
"""A position behind all rows: it does not happen."""


@dataclass(frozen=True)
class SortedRows:
    """`keys`: numbers, in order. `fits`: for each symbol the rows that fit it, as far as a row
    alone tells; None if all do.
    """

    keys: Ints
    times: Times
    fits: Mapping[str, Mask | None]
    _found: dict[frozenset[str], Ints] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def begins(self) -> Mask:
        """Where a key begins."""
        new = np.ones(len(self), np.bool_)
        new[1:] = self.keys[1:] != self.keys[:-1]
        return new

    @cached_property
    def start(self) -> Ints:
        """For each row the first of its key."""
        starts = np.flatnonzero(self.begins)
        return np.repeat(starts, np.diff(starts, append=len(self)))

    @cached_property
    def end(self) -> Ints:
        """For each row the position behind the last of its key: where rows that are not there yet
        will be.
        """
        starts = np.append(np.flatnonzero(self.begins), len(self))
        return np.repeat(starts[1:], np.diff(starts))

    @cached_property
    def is_last(self) -> Mask:
        """Where a key ends."""
        return np.append(self.begins[1:], True) if len(self) else self.begins

    @cached_property
    def at(self) -> Ints:
        """The positions themselves."""
        return np.arange(len(self))

    @cached_property
    def everywhere(self) -> Mask:
        return np.ones(len(self), np.bool_)

    def mask(self, symbol: str) -> Mask:
        found = self.fits[symbol]
        return self.everywhere if found is None else found

    def any_of(self, symbols: Sequence[str]) -> Mask:
        found = np.zeros(len(self), np.bool_)
        for name in symbols:
            found |= self.mask(name)
        return found

    def following(self, symbols: Sequence[str]) -> Ints:
        """For each row the next one of its key that fits any of these; NEVER if there is none."""
        key = frozenset(symbols)
        if key not in self._found:
            self._found[key] = self._following(self.any_of(symbols))
        return self._found[key]

    def _following(self, mask: Mask) -> Ints:
        at = np.where(mask, self.at, NEVER)
        nearest = np.append(np.minimum.accumulate(at[::-1])[::-1], NEVER)[1:]
        return np.where(nearest < self.end, nearest, NEVER)


def suffix_min(values: Ints, begins: Mask) -> Ints:
    """For each the least from it to the end of its segment; segments begin where `begins` says."""
    segment = np.cumsum(begins) << 33
    lowest: Ints = np.minimum.accumulate((values + segment)[::-1])[::-1] - segment
    return lowest


def suffix_max(values: Ints, begins: Mask) -> Ints:
    """The same for the greatest."""
    return -suffix_min(-values, begins)


# The rows of a call, stored ones and new ones, in order of key and time.


@dataclass(frozen=True)
class Batch:
    """The rows of a call, stored and new, in order of key and time: where in `rows` each is, its
    key's number, its time, and its conditions. `certain`: how many keys' rows are.
    """

    by: pa.Array
    groups: Groups
    names: pa.Array
    rows: pa.Table
    order: Ints
    keys: Ints
    times: Times
    bits: Bits
    stored: Ints
    timers: Times
    certain: Ints  # positions of rows that the clock has passed


def merged(counts: Ints, keys: Ints, order: Ints) -> tuple[Ints, Ints]:
    """Stored rows, so many for each key, and new ones, of these keys, as one sequence in order of
    key; new ones, which `order` has in that order, come behind stored ones.
    """
    fresh = np.bincount(keys, minlength=len(counts))
    stored = int(counts.sum())
    ends = np.cumsum(counts + fresh)
    order_of = np.empty(stored + len(keys), np.int64)
    order_of[runs(ends - fresh - counts, counts)] = np.arange(stored)
    order_of[runs(ends - fresh, fresh)] = stored + order
    return order_of, np.repeat(np.arange(len(counts)), counts + fresh)


def by_time(order: Ints, keys: Ints, times: Times) -> tuple[Ints, Times]:
    """Rows that are in order of key and arrival, put into order of key and time. Most keys' rows
    are already.
    """
    in_order = times[order]
    wrong = np.flatnonzero((in_order[1:] < in_order[:-1]) & (keys[1:] == keys[:-1]))
    if len(wrong):
        mixed = np.zeros(int(keys[-1]) + 1, np.bool_)
        mixed[keys[wrong]] = True
        where = np.flatnonzero(mixed[keys])
        again = where[sorting(keys[where], in_order[where])]
        order[where] = order[again]
        in_order[where] = in_order[again]
    return order, in_order
