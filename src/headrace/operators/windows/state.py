"""How windows and buffered rows are laid out in a kernel's state.

One entry per group and window, found by its group and bounds, or by its end. Its name:

    1 byte    `w` if the window waits to be emitted, `p` if it has been (or emits every change)
    8 bytes   its end, big-endian and sortable, so that a scan finds what a watermark has passed
    8 bytes   its start, likewise
    the rest  the group's key

All entries of a group are stored under the key group of the group's own key. The store shortens
long names; the value of such an entry therefore ends with the group's key and its length (4 bytes).

One entry per group with its buffered rows, in the order in which they arrived (`RowStore`):

    name      `r`, the group's key
    value     version 1; an ARRAY of STRUCT as `row_codec` encodes it: the time, the row's own key
              if the input is a table, and the columns that aggregates read

The second half of the module holds a call's versions of windows (`WindowHistory`), for kernels
whose windows depend on the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar import row_codec
from headrace.columnar.buffers import Ints, Mask, fixed_width_values, offsets_of
from headrace.columnar.keys import key_groups
from headrace.columnar.lookup import lower_bound, sort_order
from headrace.errors import InputError, NewerFormat
from headrace.operators.aggregates.accumulator import lists
from headrace.operators.kernel import Groups, KeyedState, Times

WAITING, EMITTED = b"w", b"p"
_HEAD = 17
_SHORTENED_FROM = 400  # names of at least this length may be shortened by the store
_SIGN = np.uint64(1 << 63)
_NOTHING = pa.scalar(b"", pa.binary())
_ONE = b"\x01"


@dataclass(frozen=True)
class Windows:
    """Windows of groups: the group's key, the bounds, and the key group of each."""

    group_keys: pa.Array
    starts: Times
    ends: Times
    groups: Groups

    def __len__(self) -> int:
        return len(self.starts)

    @staticmethod
    def of(group_keys: pa.Array, starts: Times, ends: Times) -> Windows:
        """Windows whose key groups follow from their groups' keys."""
        return Windows(
            group_keys=group_keys, starts=starts, ends=ends, groups=key_groups(group_keys)
        )

    def take(self, which: npt.NDArray[np.int64] | Mask) -> Windows:
        """The windows at some positions, or those that a mask selects."""
        at = np.flatnonzero(which) if which.dtype == np.bool_ else which
        return Windows(
            group_keys=self.group_keys.take(pa.array(at)),
            starts=self.starts[at],
            ends=self.ends[at],
            groups=self.groups[at],
        )

    def names(self, waiting: Mask) -> pa.Array:
        """The names of the windows' entries; `waiting` selects those that wait to be emitted."""
        head = np.empty((len(self), _HEAD), np.uint8)
        head[:, 0] = np.where(waiting, WAITING[0], EMITTED[0])
        head[:, 1:9], head[:, 9:17] = _sortable_bytes(self.ends), _sortable_bytes(self.starts)
        if pa.types.is_fixed_size_binary(self.group_keys.type):
            return _fixed_size(
                np.hstack(
                    [
                        head,
                        fixed_width_values(self.group_keys, np.uint8).reshape(
                            -1, self.group_keys.type.byte_width
                        ),
                    ]
                )
            )
        return pc.binary_join_element_wise(
            _fixed_size(head).cast(pa.binary()), self.group_keys, _NOTHING
        )


NO_WINDOWS = Windows(
    group_keys=pa.nulls(0, pa.binary()),
    starts=np.zeros(0, np.int64),
    ends=np.zeros(0, np.int64),
    groups=np.zeros(0, np.uint8),
)


def scan_windows(
    state: KeyedState, tag: bytes, after_us: int, until_us: int
) -> tuple[list[bytes], Windows]:
    """The windows under a tag that end in (after_us, until_us]: the names of their entries, and the
    windows.
    """
    names, values, groups = state.scan(prefix(tag, after_us + 1), prefix(tag, until_us + 1))
    group_keys, heads = _split_equal_names(names) or _split_names(names, values)
    times = (np.ascontiguousarray(heads).view(">u8") ^ _SIGN).astype(np.uint64).view(np.int64)
    return names, Windows(
        group_keys=group_keys,
        starts=times[:, 1].copy(),
        ends=times[:, 0].copy(),
        groups=groups,
    )


def _split_equal_names(names: list[bytes]) -> tuple[pa.Array, npt.NDArray[np.uint8]] | None:
    """The parts of names that all have the same length, decoded as one matrix; None if lengths
    differ.
    """
    if (
        not names
        or not _HEAD < len(names[0]) < _SHORTENED_FROM
        or len(data := b"".join(names)) != len(names) * len(names[0])
    ):
        return None
    if len(set(map(len, names))) > 1:
        return None
    matrix = np.frombuffer(data, np.uint8).reshape(len(names), -1)
    return _fixed_size(matrix[:, _HEAD:]), matrix[:, 1:_HEAD]


def _split_names(names: list[bytes], values: list[bytes]) -> tuple[pa.Array, npt.NDArray[np.uint8]]:
    """The groups' keys, and the ends and starts as bytes, of names of any length."""
    group_keys = [
        name[_HEAD:] if len(name) < _SHORTENED_FROM else _long_key(value)
        for name, value in zip(names, values, strict=True)
    ]
    return pa.array(group_keys, pa.binary()), np.frombuffer(
        b"".join([name[1:_HEAD] for name in names]), np.uint8
    ).reshape(-1, _HEAD - 1)


def first_end(state: KeyedState, tag: bytes) -> int | None:
    """The earliest end of all windows under a tag; None if there are none."""
    name = state.first(tag, bytes([tag[0] + 1]))
    return None if name is None else int.from_bytes(name[1:9], "big") - (1 << 63)


def bounds_of(name: bytes) -> tuple[int, int]:
    """The start and the end of the window whose entry has this name."""
    return int.from_bytes(name[9:17], "big") - (1 << 63), int.from_bytes(name[1:9], "big") - (
        1 << 63
    )


def prefix(tag: bytes, end_us: int) -> bytes:
    """The lower bound of the names of windows under a tag that end at `end_us` or later."""
    return (
        tag + (end_us + (1 << 63)).to_bytes(9, "big")[1:]
        if end_us < 1 << 63
        else bytes([tag[0] + 1])
    )


def with_long_keys(names: pa.Array, values: pa.Array) -> pa.Array:
    """The values to store: followed by the group's key where the name may be shortened."""
    if not len(names) or pc.max(pc.binary_length(names)).as_py() < _SHORTENED_FROM:
        return values
    pairs = zip(names.to_pylist(), values.to_pylist(), strict=True)
    return pa.array(
        [
            (
                value
                if len(name) < _SHORTENED_FROM
                else value + name[_HEAD:] + len(name[_HEAD:]).to_bytes(4, "big")
            )
            for name, value in pairs
        ],
        pa.binary(),
    )


def _long_key(value: bytes) -> bytes:
    size = int.from_bytes(value[-4:], "big")
    return value[-4 - size : -4]


def _fixed_size(data: npt.NDArray[np.uint8]) -> pa.Array:
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(data.shape[1]), len(data), [None, pa.py_buffer(np.ascontiguousarray(data))]
    )


def _sortable_bytes(times: Times) -> npt.NDArray[np.uint8]:
    """Times as eight bytes each that sort as the times do."""
    return (times.view(np.uint64) ^ _SIGN).astype(">u8").view(np.uint8).reshape(-1, 8)


def concat_keys(first: pa.Array, second: pa.Array) -> pa.Array:
    """Key bytes of both arrays, of fixed width if all have the same one."""
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


@dataclass(frozen=True)
class GroupKeys:
    """The groups that a call is about: their keys, key groups, and the names of their row
    entries.
    """

    group_keys: pa.Array
    groups: Groups
    names: pa.Array


def distinct_windows(
    grouped: GroupKeys, keys: Ints, starts: Times, ends: Times
) -> tuple[Windows, Ints]:
    """The distinct windows in order of group, start and end, and the position of each given window
    among them.
    """
    order = sort_order(keys, starts, ends)
    keys = keys[order]
    starts = starts[order]
    ends = ends[order]
    new = np.ones(len(order), np.bool_)
    new[1:] = (keys[1:] != keys[:-1]) | (starts[1:] != starts[:-1]) | (ends[1:] != ends[:-1])
    position = np.empty(len(order), np.int64)
    position[order] = np.cumsum(new) - 1
    return (
        Windows(
            group_keys=grouped.group_keys.take(pa.array(keys[new])),
            starts=starts[new],
            ends=ends[new],
            groups=grouped.groups[keys[new]],
        ),
        position,
    )


def put_timers(
    state: KeyedState, old: tuple[pa.Array, Groups], new: tuple[pa.Array, Groups]
) -> None:
    """Replace the timers of groups: `old` and `new` are names and key groups."""
    gone = pc.invert(pc.is_in(old[0], new[0])).to_numpy(zero_copy_only=False)
    state.put_array(
        old[0].filter(pa.array(gone)), pa.nulls(int(gone.sum()), pa.binary()), old[1][gone]
    )
    fresh = pc.invert(pc.is_in(new[0], old[0])).to_numpy(zero_copy_only=False)
    names = new[0].filter(pa.array(fresh))
    state.put_array(
        names, with_long_keys(names, pa.array([_ONE] * len(names), pa.binary())), new[1][fresh]
    )


# Buffered rows

MAX_ROWS = 1_000_000
_VERSION = 1
_NAME = pa.scalar(b"r", pa.binary())
_FIRST_BYTE = pa.scalar(bytes([_VERSION]), pa.large_binary())
_NO_BYTES = pa.scalar(b"", pa.large_binary())
TIME, ID = "\0time", "\0id"
"""Columns of buffered rows beside the user's, under names that no schema can declare."""


@dataclass
class BufferedRows:
    """The rows of some groups during a call: the stored ones, followed by the new ones."""

    rows: pa.Table
    stored: int
    """How many of the rows were stored before the call."""
    keys: Ints
    """The number of each row's group."""
    times: Times
    tick_index: Ints
    """The index of the tick that brought the row; -1 for stored rows."""
    ranks: Ints
    """The position of each row in the order of arrival within its group."""
    is_addition: Mask
    """False for a retraction: a row that a table removes."""
    same: Ints | None
    """For a table's rows: a number for each pair of group and row key."""

    def in_order(self, which: Ints) -> Ints:
        """The given rows in order of group, time and rank."""
        return which[sort_order(self.keys[which], self.times[which], self.ranks[which])]

    def ranked(self, sets: Ints, which: Ints) -> Ints:
        """The given rows, each of which is in a set, in order of set and rank."""
        return which[sort_order(sets, self.ranks[which])]


class RowStore:
    """Reads and writes the buffered rows of groups.

    Args:
        step: The step's name, for errors.
        fields: The columns that aggregates read.
        with_id: Whether rows have a key of their own, as a table's rows do.

    """

    def __init__(self, step: str, fields: Sequence[pa.Field], *, with_id: bool) -> None:
        self.step_name = step
        identity = [pa.field(ID, pa.binary())] if with_id else []
        self.fields = [pa.field(TIME, pa.int64()), *identity, *fields]
        self._type = pa.list_(pa.struct(self.fields))

    @staticmethod
    def names(group_keys: pa.Array) -> pa.Array:
        """The names of the groups' entries."""
        return pc.binary_join_element_wise(_NAME, group_keys.cast(pa.binary()), _NOTHING)

    def read(self, state: KeyedState, names: pa.Array, groups: Groups) -> tuple[Ints, pa.Table]:
        """The number of buffered rows of each group, and all rows in order of group."""
        return self.decode(state.get_array(names, groups))

    def decode(self, values: pa.Array) -> tuple[Ints, pa.Table]:
        """The number of rows of each entry, and all rows; a null entry has none."""
        decoded = row_codec.decode_array(self._without_version(values.drop_null()), self._type)
        counts = np.zeros(len(values), np.int64)
        counts[values.is_valid().to_numpy(zero_copy_only=False)] = np.diff(offsets_of(decoded))
        structs = decoded.flatten()
        return counts, pa.Table.from_arrays(
            [structs.field(at) for at in range(len(self.fields))], schema=pa.schema(self.fields)
        )

    def _without_version(self, values: pa.Array) -> pa.Array:
        if not len(values):
            return pa.array([], pa.large_binary())
        data, offsets = np.frombuffer(values.buffers()[2], np.uint8), offsets_of(values)
        if int(data[offsets[:-1]].max()) > _VERSION:
            raise NewerFormat(
                f"The state of step {self.step_name!r} was written by a newer Headrace.",
                fix="upgrade Headrace.",
            )
        return row_codec.gather_ranges(data, offsets[:-1] + 1, np.diff(offsets) - 1)

    def write(
        self, state: KeyedState, names: pa.Array, groups: Groups, counts: Ints, rows: pa.Table
    ) -> None:
        """Store the rows of groups: `rows` in order of group, `counts[i]` of them for group i.

        The entry of a group without rows is deleted.
        """
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
        """Raise InputError if a group has more than MAX_ROWS rows."""
        if len(counts) and int(counts.max()) > MAX_ROWS:
            raise InputError(
                f"The step {step!r} keeps up to {MAX_ROWS:,} rows a group for its windows, and one"
                " group has more.",
                fix=(
                    "use aggregates that need no rows (count, sum, avg, stddev; min and max of"
                    " numbers), shorter windows or a shorter lateness, or smaller groups."
                ),
            )


# Versions of windows during a call

FOREVER = np.iinfo(np.int64).max
"""The end of a version that no tick of the call replaces."""


@dataclass(frozen=True)
class WindowVersions:
    """Versions of windows: the number of each one's group, its bounds, and its rows.

    `entries` are the rows of all windows one after the other, `lengths[i]` of them for window i.
    """

    keys: Ints
    starts: Times
    ends: Times
    lengths: Ints
    entries: Ints

    def __len__(self) -> int:
        return len(self.keys)


class WindowHistory:
    """All versions of windows during a call, numbered in the order in which they are added."""

    def __init__(self) -> None:
        self._window_versions: list[WindowVersions] = []
        self._born: list[Ints] = []
        self._died: list[tuple[Ints, int]] = []
        self._count = 0
        self.current = CurrentVersions(*(np.zeros(0, np.int64) for _ in range(4)))

    def add(self, sets: WindowVersions, born: int) -> None:
        """Add versions that all begin with the same tick."""
        self.add_each(sets, np.full(len(sets), born))

    def add_each(self, sets: WindowVersions, born: Ints) -> None:
        """Add versions, each of which begins with its own tick."""
        numbers = self._count + np.arange(len(sets))
        self._count += len(sets)
        self._window_versions.append(sets)
        self._born.append(born)
        old = self.current
        self.current = CurrentVersions(
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

    def end(self, which: Mask, tick_index: int) -> None:
        """End some of the current versions with a tick."""
        self._died.append((self.current.numbers[which], tick_index))
        self.current = self.current.filter(~which)

    def forget(self, which: Mask) -> None:
        """Drop some of the current versions from view: their windows are final and stay as they
        are.
        """
        self.current = self.current.filter(~which)

    def all(self) -> WindowVersions:
        """All versions, in order of number."""
        return WindowVersions(
            *(
                np.concatenate([getattr(each, name) for each in self._window_versions])
                for name in ("keys", "starts", "ends", "lengths", "entries")
            )
        )

    @property
    def born(self) -> Ints:
        """The index of the tick with which each version begins; -1 if it was stored."""
        return np.concatenate(self._born)

    @property
    def died(self) -> Ints:
        """The index of the tick with which each version ends; FOREVER if it does not."""
        died = np.full(self._count, FOREVER)
        for numbers, tick_index in self._died:
            died[numbers] = tick_index
        return died


@dataclass(frozen=True)
class CurrentVersions:
    """The versions that are current at this point of the call."""

    numbers: Ints
    keys: Ints
    starts: Times
    ends: Times

    def filter(self, which: Mask) -> CurrentVersions:
        return CurrentVersions(
            numbers=self.numbers[which],
            keys=self.keys[which],
            starts=self.starts[which],
            ends=self.ends[which],
        )


def any_within(keys: Ints, times: Times, of: Ints, lows: Times, highs: Times) -> Mask:
    """For each range [low, high) of a group, whether the group has one of the given times in it.

    Args:
        keys: The groups of the times.
        times: The times.
        of: The group of each range.
        lows: The start of each range.
        highs: The end of each range.

    """
    order = sort_order(keys, times)
    keys, times = keys[order], times[order]
    position = lower_bound(keys, times, of, lows)
    inside: Mask = position < len(keys)
    there = position[inside]
    inside[inside] = (keys[there] == of[inside]) & (times[there] < highs[inside])
    return inside


def chains(keys: Ints, starts: Times, ends: Times) -> Ints:
    """Number the chains of overlapping ranges.

    Ranges are half open and in order of group and start. Those that overlap, directly or through
    others, get the same number.
    """
    if not len(keys):
        return keys
    new = np.ones(len(keys), np.bool_)
    new[1:] = keys[1:] != keys[:-1]
    latest = ends if (new[1:] | (ends[1:] >= ends[:-1])).all() else _latest_ends(keys, ends)
    new[1:] |= starts[1:] >= latest[:-1]
    return np.cumsum(new) - 1


def _latest_ends(keys: Ints, ends: Times) -> Times:
    """The latest end so far within each group. Ends are replaced by their ranks, offset by group,
    so that one running maximum serves all groups.
    """
    ranks = np.empty(len(ends), np.int64)
    by_end = np.argsort(ends, kind="stable")
    ranks[by_end] = np.arange(len(ends))
    so_far = np.maximum.accumulate(keys * len(ends) + ranks)
    latest: Times = ends[by_end[so_far % len(ends)]]
    return latest
