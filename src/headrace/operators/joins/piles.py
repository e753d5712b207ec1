"""Rows kept by key, each key's in the order of a number (a time, the hash of an id): what joins keep in their state.

A key's pile has sections (a join's left and right rows). A small section lies whole in the key's head; one that outgrows it is cut into leaves,
entries of their own, of which the head lists the lowest numbers. So a key with one row costs one entry, and a key with a million costs what is looked
at.

| entry | under | bytes |
|---|---|---|
| head | `h`, key | version 1; marks, 8 bytes each; counts of the sections, 4 bytes each (top bit: of leaves, not rows); their sizes, 4 each; they |
| leaf | `l`, section, lowest number, key | version 1; count, 4 bytes; the rows |
| rows | | for each: number, 8 bytes; flags, 1 byte; size, 4 bytes; then the rows' own bytes |
| leaves | | the lowest number of each, 8 bytes; the first also has all below |

Marks are numbers that a kernel keeps for a key, such as when it is to be woken. Where the order needs more than a number, 24 bytes take its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import CorruptionError, NewerFormat
from headrace.operators.buffers import Ints, Mask, offsets_of, runs
from headrace.operators.joins.matching import search
from headrace.operators.kernel import Groups, KeyedState
from headrace.operators.keys import key_groups
from headrace.operators.row_codec import cut_out

VERSION = 1
LOWEST, NONE = -(2**63), 2**63 - 1
"""Below all numbers; and a mark that is not set."""
TREE = np.uint32(1 << 31)
WIDE = 24
LEAF_HEADER = np.dtype([("version", "u1"), ("count", "<u4")])
Flags = npt.NDArray[np.uint8]
Data = npt.NDArray[np.uint8]
Numbers = npt.NDArray[Any]
"""What piles are ordered by: integers, or bytes."""


@dataclass(frozen=True)
class Records:
    """Rows of piles: the number of each one's key, its number in the pile, its flags, its bytes (large binary)."""

    keys: Ints
    at: Numbers
    flags: Flags
    rows: pa.Array

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, which: Ints) -> Records:
        return Records(self.keys[which], self.at[which], self.flags[which], self.rows.take(pa.array(which)))

    @staticmethod
    def together(parts: list[Records]) -> Records:
        keys, at, flags = (np.concatenate([getattr(part, name) for part in parts]) for name in ("keys", "at", "flags"))
        return Records(keys, at, flags, pa.concat_arrays([part.rows for part in parts]))

    @staticmethod
    def none() -> Records:
        empty = np.zeros(0, np.int64)
        return Records(empty, empty, np.zeros(0, np.uint8), pa.array([], pa.large_binary()))


@dataclass
class Section:
    """One section of many keys' piles: where it lies in the heads, and its leaves. A section that lies in the head has one leaf, which is loaded."""

    number: int
    starts: Ints
    sizes: Ints
    counts: Ints
    tree: Mask
    firsts: Ints  # the first leaf of each key, and the end
    lows: Numbers  # by leaf
    loaded: Mask  # by leaf

    @cached_property
    def leaf_keys(self) -> Ints:
        return np.repeat(np.arange(len(self.tree)), np.diff(self.firsts))

    @cached_property
    def has_trees(self) -> bool:
        return bool(self.tree.any())

    def leaves_of(self, keys: Ints, at: Numbers) -> Ints:
        """The leaf in which a number of a key lies, or would lie."""
        first = self.firsts[keys]
        if not self.has_trees:
            return first
        return np.maximum(search(self.lows, first, self.firsts[keys + 1], at, right=True) - 1, first)


class Piles:
    """The piles of some keys (distinct, in order) as they are in the state. Load what is to be looked at; `PileWriter` stores it again."""

    def __init__(self, step: str, state: KeyedState, keys: pa.Array, *, sections: int, marks: int, wide: bool = False) -> None:
        """`wide`: in the order of 24 bytes, not of a number."""
        self.step, self.state = step, state
        self.number: np.dtype[Any] = np.dtype(f"S{WIDE}" if wide else "<i8")
        self.record = np.dtype([("at", self.number), ("flags", "u1"), ("size", "<u4")])
        self.keys = keys.cast(pa.binary()).cast(pa.large_binary())
        self.groups: Groups = key_groups(keys)
        self.header = np.dtype([("version", "u1"), ("marks", "<i8", (marks,)), ("counts", "<u4", (sections,)), ("sizes", "<u4", (sections,))])
        self.names = joined([pa.scalar(b"h", pa.large_binary()), self.keys]).cast(pa.binary())
        self.data, starts = self._read(state.get_array(self.names, self.groups))
        heads = _fixed_at(self.data, starts, self.header)
        self._check(heads["version"])
        self.marks: Ints = heads["marks"].T.copy()
        self.marks_before = self.marks.copy()
        ends = starts[:, None] + self.header.itemsize + np.cumsum(heads["sizes"], axis=1, dtype=np.int64)
        self.sections = [
            self._section(at, heads["counts"][:, at], ends[:, at] - heads["sizes"][:, at], heads["sizes"][:, at]) for at in range(sections)
        ]

    def __len__(self) -> int:
        return len(self.keys)

    def _read(self, values: pa.Array) -> tuple[Data, Ints]:
        """The heads side by side, and where each begins."""
        nothing = np.zeros(1, self.header)
        nothing["version"], nothing["marks"] = VERSION, NONE
        heads = values.fill_null(nothing.tobytes())
        return data_of(heads), offsets_of(heads)[:-1]

    def _check(self, versions: Flags) -> None:
        if len(versions) and int(versions.max()) > VERSION:
            raise NewerFormat(f"The state of step {self.step!r} was written by a newer Headrace.", fix="run the newer Headrace that wrote it.")

    def _section(self, number: int, counts: Ints, starts: Ints, sizes: Ints) -> Section:
        tree = counts >= TREE
        counts = (counts & ~TREE).astype(np.int64)
        leaves = np.where(tree, counts, 1)
        firsts = np.append(0, np.cumsum(leaves))
        lows = np.full(firsts[-1], LOWEST if self.number.kind == "i" else b"", self.number)
        in_trees = np.repeat(tree, leaves)
        if tree.any():
            lows[in_trees] = self.data[runs(starts[tree], self.number.itemsize * counts[tree])].view(self.number)
        return Section(number, starts, sizes.astype(np.int64), counts, tree, firsts, lows, ~in_trees)

    # Loading

    def load(self, section: int, low: Ints, high: Ints, *, beyond: bool = False) -> Records:
        """The rows of each key from low to high (and others that lie near them; all, of a small pile); none if low is above high. Once a section.

        `beyond`: also the first row behind them.
        """
        part = self.sections[section]
        found = self.load_whole(section)
        if not part.has_trees:
            return found
        together = Records.together([found, self.load_leaves(section, self._wanted(part, low, high, 1 if beyond else 0))])
        return together.take(np.argsort(together.keys, kind="stable"))

    def load_whole(self, section: int) -> Records:
        """The rows that lie in heads."""
        part = self.sections[section]
        whole = np.flatnonzero(~part.tree)
        return self._records(self.data, part.starts[whole], part.counts[whole], whole)

    def load_leaves(self, section: int, leaves: Ints) -> Records:
        """The rows of some leaves, of none twice."""
        part = self.sections[section]
        part.loaded[leaves] = True
        return self._records(*self._leaves(part, leaves), part.leaf_keys[leaves])

    def load_touched(self, section: int, keys: Ints, at: Numbers, whole: Mask) -> Records:
        """All rows of some keys, and of others those that lie at these numbers, or near them; in order of key and number."""
        part, found = self.sections[section], self.load_whole(section)
        if not part.has_trees:
            return found
        wanted = whole[part.leaf_keys]
        wanted[part.leaves_of(keys, at)] = True
        together = Records.together([found, self.load_leaves(section, np.flatnonzero(wanted & part.tree[part.leaf_keys]))])
        return together.take(np.argsort(together.keys, kind="stable"))

    def load_all(self, section: int, of: Mask | None = None) -> Records:
        """All rows of the keys, or of some of them."""
        wanted = np.ones(len(self), np.bool_) if of is None else of
        return self.load(section, np.where(wanted, LOWEST, NONE), np.where(wanted, NONE, LOWEST))

    @staticmethod
    def _wanted(part: Section, low: Ints, high: Ints, more: int) -> Ints:
        keys = np.flatnonzero(part.tree & (low <= high))
        first, last = part.leaves_of(keys, low[keys]), part.leaves_of(keys, high[keys])
        return runs(first, np.minimum(last + more, part.firsts[keys + 1] - 1) - first + 1)

    def _leaves(self, part: Section, leaves: Ints) -> tuple[Data, Ints, Ints]:
        """Leaves side by side, where the rows of each begin, and how many they are."""
        keys = part.leaf_keys[leaves]
        values = self.state.get_array(self.leaf_names(part, keys, part.lows[leaves]), self.groups[keys])
        if values.null_count:
            raise CorruptionError(f"The state of step {self.step!r} lacks {values.null_count} of its parts.", fix="rebuild it from its files.")
        data, starts = data_of(values), offsets_of(values)[:-1]
        headers = _fixed_at(data, starts, LEAF_HEADER)
        self._check(headers["version"])
        return data, starts + LEAF_HEADER.itemsize, headers["count"].astype(np.int64)

    def leaf_names(self, part: Section, keys: Ints, lows: Numbers) -> pa.Array:
        return names(b"l" + bytes([part.number]), lows, self.keys.take(pa.array(keys)))

    def _records(self, data: Data, starts: Ints, counts: Ints, keys: Ints) -> Records:
        """The rows that lie at these places, so many at each, of these keys."""
        places = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        fixed = _fixed_at(data, np.repeat(starts, counts) + places * self.record.itemsize, self.record)
        sizes = fixed["size"].astype(np.int64)
        ends = np.cumsum(sizes)
        before = np.append(0, ends)[np.cumsum(counts) - counts]  # the bytes of all rows of earlier piles
        row_starts = np.repeat(starts + counts * self.record.itemsize - before, counts) + ends - sizes
        return Records(np.repeat(keys, counts), fixed["at"].copy(), fixed["flags"].copy(), cut_out(data, row_starts, sizes))


def names(prefix: bytes, numbers: Numbers, keys: pa.Array) -> pa.Array:
    """Names of entries that lie in the order of a number: of some kind, the number, the key."""
    ordered = numbers if numbers.dtype.kind == "S" else (numbers.view(np.uint64) ^ np.uint64(1 << 63)).astype(">u8")
    in_order = pieces(ordered.view(np.uint8), np.arange(len(numbers) + 1) * ordered.dtype.itemsize)
    return joined([pa.scalar(prefix, pa.large_binary()), in_order, keys]).cast(pa.binary())


def data_of(array: pa.Array) -> Data:
    """The bytes of all values, as they lie in memory."""
    data = array.buffers()[2] if len(array) else None
    return np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)


def pieces(data: Data, offsets: Ints) -> pa.Array:
    """Bytes cut at these places, as large binary."""
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets.astype(np.int64)), pa.py_buffer(data)])


def joined(parts: list[pa.Array | pa.Scalar]) -> pa.Array:
    """The bytes of several columns, one behind the other."""
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))


def _fixed_at(data: Data, starts: Ints, kind: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """Values of one kind that lie at these places."""
    if not len(starts):
        return np.zeros(0, kind)
    return np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(data, kind.itemsize)[starts]).view(kind).reshape(-1)
