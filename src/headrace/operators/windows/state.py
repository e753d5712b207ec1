"""How windows lie in the state: one entry for each group and window, found again by its group and
window, or by its end.

| bytes of a name | what |
|---|---|
| 1 | `w` if the window waits to be told, `p` if it has been (or tells every change) |
| 8 | its end, big-endian in order; so a scan finds what a clock has passed |
| 8 | its start, likewise |
| … | the group's key |

All entries of a group are filed under the key group of the group's own key. A store cuts long
names: then the group's key stands at the end of the value too, and its length behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar import row_codec
from headrace.columnar.buffers import Ints, Mask, fixed_width, offsets_of
from headrace.columnar.keys import key_groups
from headrace.columnar.lookup import first_from, sorting
from headrace.errors import InputError, NewerFormat
from headrace.operators.aggregates.accumulator import lists
from headrace.operators.kernel import Groups, KeyedState, Times

WAITING, TOLD = b"w", b"p"
_HEAD = 17
_CUT_FROM = 400  # names this long may have been cut by the store
_SIGN = np.uint64(1 << 63)
_NOTHING = pa.scalar(b"", pa.binary())


@dataclass(frozen=True)
class Windows:
    """Windows of groups: the key bytes of each one's group, when it starts and ends, and the key
    group it is filed under.
    """

    by: pa.Array
    starts: Times
    ends: Times
    groups: Groups

    def __len__(self) -> int:
        return len(self.starts)

    @staticmethod
    def of(by: pa.Array, starts: Times, ends: Times) -> Windows:
        return Windows(by, starts, ends, key_groups(by))

    def take(self, which: npt.NDArray[np.int64] | Mask) -> Windows:
        at = np.flatnonzero(which) if which.dtype == np.bool_ else which
        return Windows(self.by.take(pa.array(at)), self.starts[at], self.ends[at], self.groups[at])

    def names(self, waiting: Mask) -> pa.Array:
        """The names of their entries."""
        head = np.empty((len(self), _HEAD), np.uint8)
        head[:, 0] = np.where(waiting, WAITING[0], TOLD[0])
        head[:, 1:9], head[:, 9:17] = _ordered(self.ends), _ordered(self.starts)
        if pa.types.is_fixed_size_binary(self.by.type):
            return _fixed(
                np.hstack(
                    [head, fixed_width(self.by, np.uint8).reshape(-1, self.by.type.byte_width)]
                )
            )
        return pc.binary_join_element_wise(_fixed(head).cast(pa.binary()), self.by, _NOTHING)


NO_WINDOWS = Windows(
    pa.nulls(0, pa.binary()), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint8)
)


def scan_until(
    state: KeyedState, tag: bytes, after_us: int, until_us: int
) -> tuple[list[bytes], Windows]:
    """The entries of windows that end after one time and at another at the latest: their names in
    the state, and the windows.
    """
    names, values, groups = state.scan(prefix(tag, after_us + 1), prefix(tag, until_us + 1))
    by, heads = _alike(names) or _unlike(names, values)
    times = (np.ascontiguousarray(heads).view(">u8") ^ _SIGN).astype(np.uint64).view(np.int64)
    return names, Windows(by, times[:, 1].copy(), times[:, 0].copy(), groups)


def _alike(names: list[bytes]) -> tuple[pa.Array, npt.NDArray[np.uint8]] | None:
    """The groups' keys, and the windows' ends and starts, of names of one length; None if they are
    not.
    """
    if (
        not names
        or not _HEAD < len(names[0]) < _CUT_FROM
        or len(data := b"".join(names)) != len(names) * len(names[0])
    ):
        return None
    if len(set(map(len, names))) > 1:
        return None
    matrix = np.frombuffer(data, np.uint8).reshape(len(names), -1)
    return _fixed(matrix[:, _HEAD:]), matrix[:, 1:_HEAD]


def _unlike(names: list[bytes], values: list[bytes]) -> tuple[pa.Array, npt.NDArray[np.uint8]]:
    by = [
        name[_HEAD:] if len(name) < _CUT_FROM else _long_key(value)
        for name, value in zip(names, values, strict=True)
    ]
    return pa.array(by, pa.binary()), np.frombuffer(
        b"".join([name[1:_HEAD] for name in names]), np.uint8
    ).reshape(-1, _HEAD - 1)


def first_end(state: KeyedState, tag: bytes) -> int | None:
    """The earliest end of all windows under a tag."""
    name = state.first(tag, bytes([tag[0] + 1]))
    return None if name is None else int.from_bytes(name[1:9], "big") - (1 << 63)


def bounds_of(name: bytes) -> tuple[int, int]:
    """The start and the end of the window whose entry has this name."""
    return int.from_bytes(name[9:17], "big") - (1 << 63), int.from_bytes(name[1:9], "big") - (
        1 << 63
    )


def prefix(tag: bytes, end_us: int) -> bytes:
    """What the names of windows that end then or later begin with, or come after."""
    return (
        tag + (end_us + (1 << 63)).to_bytes(9, "big")[1:]
        if end_us < 1 << 63
        else bytes([tag[0] + 1])
    )


def with_long_keys(names: pa.Array, values: pa.Array) -> pa.Array:
    """Values as they are stored: with the group's key where the name is long."""
    if not len(names) or pc.max(pc.binary_length(names)).as_py() < _CUT_FROM:
        return values
    pairs = zip(names.to_pylist(), values.to_pylist(), strict=True)
    return pa.array(
        [
            (
                value
                if len(name) < _CUT_FROM
                else value + name[_HEAD:] + len(name[_HEAD:]).to_bytes(4, "big")
            )
            for name, value in pairs
        ],
        pa.binary(),
    )


def _long_key(value: bytes) -> bytes:
    size = int.from_bytes(value[-4:], "big")
    return value[-4 - size : -4]


def _fixed(data: npt.NDArray[np.uint8]) -> pa.Array:
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(data.shape[1]), len(data), [None, pa.py_buffer(np.ascontiguousarray(data))]
    )


def _ordered(times: Times) -> npt.NDArray[np.uint8]:
    return (times.view(np.uint64) ^ _SIGN).astype(">u8").view(np.uint8).reshape(-1, 8)


def joined(first: pa.Array, second: pa.Array) -> pa.Array:
    """Key bytes, one after the other; of a fixed width if all have it."""
    if not len(second):
        return first
    if pa.types.is_fixed_size_binary(first.type):
        width = first.type.byte_width
        if pa.types.is_fixed_size_binary(second.type) and second.type.byte_width == width:
            return pa.concat_arrays([first, second])
        if pa.types.is_binary(second.type) and bool(
            pc.all(pc.equal(pc.binary_length(second), width)).as_py()
        ):
            return pa.concat_arrays([first, second.cast(first.type)])
    return pa.concat_arrays([first.cast(pa.binary()), second.cast(pa.binary())])


# Rows that a kernel keeps for as long as a window may need them: all of a group's in one entry, in
# the order in which they came into it.
#
# | entry | name | bytes | |---|---|---| | rows | `r`, the group's key | version 1; an ARRAY of
# STRUCT as `row_codec` has it: time, the row's own key if it is a table's, the columns that
# aggregates read |


MAX_ROWS = 1_000_000
_VERSION = 1
_NAME = pa.scalar(b"r", pa.binary())
_FIRST_BYTE = pa.scalar(bytes([_VERSION]), pa.large_binary())
_NO_BYTES = pa.scalar(b"", pa.large_binary())
TIME, ID = "_time", "_id"


@dataclass
class Kept:
    """Rows of some groups: those that were stored, and behind them those that come now. A row has a
    number of its group, a time, the tick it came with (its place in the call, -1 for stored ones)
    and a rank, its place among the group's rows. `comes` is false for a row of a table that goes.
    """

    rows: pa.Table
    stored: int
    keys: Ints
    times: Times
    places: Ints
    ranks: Ints
    comes: Mask
    same: Ints | None  # for a table's rows: a number for group and row key

    def in_order(self, which: Ints) -> Ints:
        """Some rows in order of group, time and rank."""
        return which[sorting(self.keys[which], self.times[which], self.ranks[which])]

    def ranked(self, sets: Ints, which: Ints) -> Ints:
        """Some rows, each in a set, in order of set and rank."""
        return which[sorting(sets, self.ranks[which])]


class RowStore:
    """Reads and writes them. `columns` are those that aggregates read."""

    def __init__(self, step: str, fields: Sequence[pa.Field], *, with_id: bool) -> None:
        self.step_name = step
        identity = [pa.field(ID, pa.binary())] if with_id else []
        self.fields = [pa.field(TIME, pa.int64()), *identity, *fields]
        self._type = pa.list_(pa.struct(self.fields))

    @staticmethod
    def names(by: pa.Array) -> pa.Array:
        return pc.binary_join_element_wise(_NAME, by.cast(pa.binary()), _NOTHING)

    def read(self, state: KeyedState, names: pa.Array, groups: Groups) -> tuple[Ints, pa.Table]:
        """How many rows each group has, and all of them."""
        return self.decoded(state.get_array(names, groups))

    def decoded(self, values: pa.Array) -> tuple[Ints, pa.Table]:
        """The same from entries; null for a group that has none."""
        found = row_codec.decode_array(self._behind_version(values.drop_null()), self._type)
        counts = np.zeros(len(values), np.int64)
        counts[values.is_valid().to_numpy(zero_copy_only=False)] = np.diff(offsets_of(found))
        structs = found.flatten()
        return counts, pa.Table.from_arrays(
            [structs.field(at) for at in range(len(self.fields))], schema=pa.schema(self.fields)
        )

    def _behind_version(self, values: pa.Array) -> pa.Array:
        if not len(values):
            return pa.array([], pa.large_binary())
        data, offsets = np.frombuffer(values.buffers()[2], np.uint8), offsets_of(values)
        if int(data[offsets[:-1]].max()) > _VERSION:
            raise NewerFormat(
                f"The state of step {self.step_name!r} was written by a newer Headrace.",
                fix="upgrade Headrace.",
            )
        return row_codec.cut_out(data, offsets[:-1] + 1, np.diff(offsets) - 1)

    def write(
        self, state: KeyedState, names: pa.Array, groups: Groups, counts: Ints, rows: pa.Table
    ) -> None:
        """`rows` are in order of group, so many for each; a group without any goes."""
        self.check(self.step_name, counts)
        columns = [rows.column(field.name).combine_chunks() for field in self.fields]
        structs = pa.StructArray.from_arrays(columns, fields=self.fields)
        encoded = row_codec.encode_array(lists(counts, structs))
        values = pc.binary_join_element_wise(_FIRST_BYTE, encoded, _NO_BYTES).cast(pa.binary())
        state.put_array(
            names, pc.if_else(pa.array(counts > 0), values, pa.scalar(None, pa.binary())), groups
        )

    @staticmethod
    def check(step: str, counts: Ints) -> None:
        """That no entry is too large."""
        if len(counts) and int(counts.max()) > MAX_ROWS:
            raise InputError(
                f"The step {step!r} keeps up to {MAX_ROWS:,} rows a group for its windows, and a"
                " group has more.",
                fix=(
                    "use aggregates that need no rows (count, sum, avg, stddev; min and max of"
                    " numbers), shorter windows or a shorter lateness, or smaller groups."
                ),
            )


# What to tell of rows that a table of windows showed before a tick, and shows after it.

FOR_EVER = np.iinfo(np.int64).max


# What windows were made of during a call, for kernels whose windows depend on the rows: versions of
# windows, each from the tick that made it until the one that changed it.


@dataclass(frozen=True)
class Sets:
    """Windows with what is in them: the group of each as its number, its bounds, and how many of
    the `entries` are its, one window's behind the other's.
    """

    keys: Ints
    starts: Times
    ends: Times
    lengths: Ints
    entries: Ints

    def __len__(self) -> int:
        return len(self.keys)


class History:
    """Versions of windows, by number in the order of their making."""

    def __init__(self) -> None:
        self._sets: list[Sets] = []
        self._born: list[Ints] = []
        self._died: list[tuple[Ints, int]] = []
        self._count = 0
        self.current = Current(*(np.zeros(0, np.int64) for _ in range(4)))

    def add(self, sets: Sets, born: int) -> None:
        self.add_each(sets, np.full(len(sets), born))

    def add_each(self, sets: Sets, born: Ints) -> None:
        numbers = self._count + np.arange(len(sets))
        self._count += len(sets)
        self._sets.append(sets)
        self._born.append(born)
        old = self.current
        self.current = Current(
            *(
                np.concatenate(pair)
                for pair in (
                    (old.numbers, numbers),
                    (old.keys, sets.keys),
                    (old.starts, sets.starts),
                    (old.ends, sets.ends),
                )
            )
        )

    def end(self, which: Mask, place: int) -> None:
        """Some of the current versions end with a tick."""
        self._died.append((self.current.numbers[which], place))
        self.current = self.current.only(~which)

    def forget(self, which: Mask) -> None:
        """Some of the current versions are closed: they stay as they are, and are known no more."""
        self.current = self.current.only(~which)

    def all(self) -> Sets:
        return Sets(
            *(
                np.concatenate([getattr(each, name) for each in self._sets])
                for name in ("keys", "starts", "ends", "lengths", "entries")
            )
        )

    @property
    def born(self) -> Ints:
        return np.concatenate(self._born)

    @property
    def died(self) -> Ints:
        died = np.full(self._count, FOR_EVER)
        for numbers, place in self._died:
            died[numbers] = place
        return died


@dataclass(frozen=True)
class Current:
    """The versions that hold now."""

    numbers: Ints
    keys: Ints
    starts: Times
    ends: Times

    def only(self, which: Mask) -> Current:
        return Current(self.numbers[which], self.keys[which], self.starts[which], self.ends[which])


def any_within(keys: Ints, times: Times, of: Ints, lows: Times, highs: Times) -> Mask:
    """Whether a group has some of these times in [low, high), for each of some groups and
    ranges.
    """
    order = sorting(keys, times)
    keys, times = keys[order], times[order]
    found = first_from(keys, times, of, lows)
    inside: Mask = found < len(keys)
    there = found[inside]
    inside[inside] = (keys[there] == of[inside]) & (times[there] < highs[inside])
    return inside


def chains(keys: Ints, starts: Times, ends: Times) -> Ints:
    """For ranges in order of group and start: a number for each, the same for those that overlap or
    are joined by others that do. Ranges are half open.
    """
    if not len(keys):
        return keys
    new = np.ones(len(keys), np.bool_)
    new[1:] = keys[1:] != keys[:-1]
    latest = ends if (new[1:] | (ends[1:] >= ends[:-1])).all() else _latest(keys, ends)
    new[1:] |= starts[1:] >= latest[:-1]
    return np.cumsum(new) - 1


def _latest(keys: Ints, ends: Times) -> Times:
    """The latest end so far within the group: by the ends' places in their order, those of a later
    group above all others.
    """
    ranks = np.empty(len(ends), np.int64)
    by_end = np.argsort(ends, kind="stable")
    ranks[by_end] = np.arange(len(ends))
    so_far = np.maximum.accumulate(keys * len(ends) + ranks)
    latest: Times = ends[by_end[so_far % len(ends)]]
    return latest
