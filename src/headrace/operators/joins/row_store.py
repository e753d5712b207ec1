"""Rows kept by key, each key's in the order of a number (a time, the hash of an id): what joins
keep in their state.

A key's pile has sections (a join's left and right rows). A small section lies whole in the key's
head; one that outgrows it is cut into leaves, entries of their own, of which the head lists the
lowest numbers. So a key with one row costs one entry, and a key with a million costs what is looked
at.

| entry | under | bytes |
|---|---|---|
| head | `h`, key | version 1; marks, 8 bytes each; counts of the sections, 4 bytes each (top bit:
of leaves, not rows); their sizes, 4 each; they |
| leaf | `l`, section, lowest number, key | version 1; count, 4 bytes; the rows |
| rows | | for each: number, 8 bytes; flags, 1 byte; size, 4 bytes; then the rows' own bytes |
| leaves | | the lowest number of each, 8 bytes; the first also has all below |

Marks are numbers that a kernel keeps for a key, such as when it is to be woken. Where the order
needs more than a number, 24 bytes take its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, offsets_of, runs
from headrace.columnar.keys import key_groups
from headrace.columnar.lookup import begins, search, sorting
from headrace.columnar.row_codec import cut_out
from headrace.errors import BugError, CorruptionError, NewerFormat
from headrace.operators.aggregates.accumulator import place_in_slot
from headrace.operators.kernel import UNSTARTED, Groups, KeyedState, big_endian

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
    """Rows of piles: the number of each one's key, its number in the pile, its flags, its bytes
    (large binary).
    """

    keys: Ints
    at: Numbers
    flags: Flags
    rows: pa.Array

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, which: Ints) -> Records:
        return Records(
            self.keys[which], self.at[which], self.flags[which], self.rows.take(pa.array(which))
        )

    @staticmethod
    def together(parts: list[Records]) -> Records:
        keys, at, flags = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("keys", "at", "flags")
        )
        return Records(keys, at, flags, pa.concat_arrays([part.rows for part in parts]))

    @staticmethod
    def none() -> Records:
        empty = np.zeros(0, np.int64)
        return Records(empty, empty, np.zeros(0, np.uint8), pa.array([], pa.large_binary()))


@dataclass
class Section:
    """One section of many keys' piles: where it lies in the heads, and its leaves. A section that
    lies in the head has one leaf, which is loaded.
    """

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
        return np.maximum(
            search(self.lows, first, self.firsts[keys + 1], at, right=True) - 1, first
        )


class Piles:
    """The piles of some keys (distinct, in order) as they are in the state. Load what is to be
    looked at; `PileWriter` stores it again.
    """

    def __init__(
        self,
        step: str,
        state: KeyedState,
        keys: pa.Array,
        *,
        sections: int,
        marks: int,
        wide: bool = False,
    ) -> None:
        """`wide`: in the order of 24 bytes, not of a number."""
        self.step, self.state = step, state
        self.number: np.dtype[Any] = np.dtype(f"S{WIDE}" if wide else "<i8")
        self.record = np.dtype([("at", self.number), ("flags", "u1"), ("size", "<u4")])
        self.keys = keys.cast(pa.binary()).cast(pa.large_binary())
        self.groups: Groups = key_groups(keys)
        self.header = np.dtype(
            [
                ("version", "u1"),
                ("marks", "<i8", (marks,)),
                ("counts", "<u4", (sections,)),
                ("sizes", "<u4", (sections,)),
            ]
        )
        self.names = joined([pa.scalar(b"h", pa.large_binary()), self.keys]).cast(pa.binary())
        self.data, starts = self._read(state.get_array(self.names, self.groups))
        heads = _fixed_at(self.data, starts, self.header)
        self._check(heads["version"])
        self.marks: Ints = heads["marks"].T.copy()
        self.marks_before = self.marks.copy()
        ends = (
            starts[:, None]
            + self.header.itemsize
            + np.cumsum(heads["sizes"], axis=1, dtype=np.int64)
        )
        self.sections = [
            self._section(
                at,
                heads["counts"][:, at],
                ends[:, at] - heads["sizes"][:, at],
                heads["sizes"][:, at],
            )
            for at in range(sections)
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
            raise NewerFormat(
                f"The state of step {self.step!r} was written by a newer Headrace.",
                fix="run the newer Headrace that wrote it.",
            )

    def _section(self, number: int, counts: Ints, starts: Ints, sizes: Ints) -> Section:
        tree = counts >= TREE
        counts = (counts & ~TREE).astype(np.int64)
        leaves = np.where(tree, counts, 1)
        firsts = np.append(0, np.cumsum(leaves))
        lows = np.full(firsts[-1], LOWEST if self.number.kind == "i" else b"", self.number)
        in_trees = np.repeat(tree, leaves)
        if tree.any():
            lows[in_trees] = self.data[
                runs(starts[tree], self.number.itemsize * counts[tree])
            ].view(self.number)
        return Section(
            number, starts, sizes.astype(np.int64), counts, tree, firsts, lows, ~in_trees
        )

    # Loading

    def load(self, section: int, low: Ints, high: Ints, *, beyond: bool = False) -> Records:
        """The rows of each key from low to high (and others that lie near them; all, of a small
        pile); none if low is above high. Once a section.

        `beyond`: also the first row behind them.
        """
        part = self.sections[section]
        found = self.load_whole(section)
        if not part.has_trees:
            return found
        together = Records.together(
            [found, self.load_leaves(section, self._wanted(part, low, high, 1 if beyond else 0))]
        )
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
        """All rows of some keys, and of others those that lie at these numbers, or near them; in
        order of key and number.
        """
        part, found = self.sections[section], self.load_whole(section)
        if not part.has_trees:
            return found
        wanted = whole[part.leaf_keys]
        wanted[part.leaves_of(keys, at)] = True
        together = Records.together(
            [found, self.load_leaves(section, np.flatnonzero(wanted & part.tree[part.leaf_keys]))]
        )
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
        values = self.state.get_array(
            self.leaf_names(part, keys, part.lows[leaves]), self.groups[keys]
        )
        if values.null_count:
            raise CorruptionError(
                f"The state of step {self.step!r} lacks {values.null_count} of its parts.",
                fix="rebuild it from its files.",
            )
        data, starts = data_of(values), offsets_of(values)[:-1]
        headers = _fixed_at(data, starts, LEAF_HEADER)
        self._check(headers["version"])
        return data, starts + LEAF_HEADER.itemsize, headers["count"].astype(np.int64)

    def leaf_names(self, part: Section, keys: Ints, lows: Numbers) -> pa.Array:
        return names(b"l" + bytes([part.number]), lows, self.keys.take(pa.array(keys)))

    def _records(self, data: Data, starts: Ints, counts: Ints, keys: Ints) -> Records:
        """The rows that lie at these places, so many at each, of these keys."""
        places = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        fixed = _fixed_at(
            data, np.repeat(starts, counts) + places * self.record.itemsize, self.record
        )
        sizes = fixed["size"].astype(np.int64)
        ends = np.cumsum(sizes)
        before = np.append(0, ends)[
            np.cumsum(counts) - counts
        ]  # the bytes of all rows of earlier piles
        row_starts = (
            np.repeat(starts + counts * self.record.itemsize - before, counts) + ends - sizes
        )
        return Records(
            np.repeat(keys, counts),
            fixed["at"].copy(),
            fixed["flags"].copy(),
            cut_out(data, row_starts, sizes),
        )


def names(prefix: bytes, numbers: Numbers, keys: pa.Array) -> pa.Array:
    """Names of entries that lie in the order of a number: of some kind, the number, the key."""
    ordered = (
        numbers
        if numbers.dtype.kind == "S"
        else (numbers.view(np.uint64) ^ np.uint64(1 << 63)).astype(">u8")
    )
    in_order = pieces(ordered.view(np.uint8), np.arange(len(numbers) + 1) * ordered.dtype.itemsize)
    return joined([pa.scalar(prefix, pa.large_binary()), in_order, keys]).cast(pa.binary())


def data_of(array: pa.Array) -> Data:
    """The bytes of all values, as they lie in memory."""
    data = array.buffers()[2] if len(array) else None
    return np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)


def pieces(data: Data, offsets: Ints) -> pa.Array:
    """Bytes cut at these places, as large binary."""
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(),
        len(offsets) - 1,
        [None, pa.py_buffer(offsets.astype(np.int64)), pa.py_buffer(data)],
    )


def joined(parts: list[pa.Array | pa.Scalar]) -> pa.Array:
    """The bytes of several columns, one behind the other."""
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))


def _fixed_at(data: Data, starts: Ints, kind: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """Values of one kind that lie at these places."""
    if not len(starts):
        return np.zeros(0, kind)
    return (
        np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(data, kind.itemsize)[starts])
        .view(kind)
        .reshape(-1)
    )


# When keys are to be woken: entries in the state that are found by time.
#
# | under | bytes | |---|---| | `t`, kind of timer, time, key | version 1, key | | `s`, kind of
# timer, time, key group, tick | version 1; count, 4 bytes; the sizes of the keys, 4 bytes each;
# they |
#
# A kernel that moves a key's timer must know where it was: it keeps that as a mark in the key's
# pile.
#
# Where nothing is to be told at that time, only forgotten, many keys share an entry (a *list*),
# which costs far less. It is not changed when a key's timer moves: who is woken for nothing goes on
# waiting.


_VERSION = 1
_TIMER, _LIST = b"t", b"s"
_LIST_HEADER = np.dtype([("version", "u1"), ("count", "<u4")])
Entries = tuple[pa.Array, pa.Array, Groups]
"""Names, values (null: deleted) and key groups."""


def fired(state: KeyedState, kind: int, clock_us: int) -> pa.Array:
    """The keys whose timers of a kind the clock has reached."""
    prefix = _prefix(kind)
    (end,) = big_endian(np.array([min(clock_us, NONE - 1) + 1]))
    values = [] if clock_us == UNSTARTED else state.scan(prefix, prefix + end)[1]
    if not values:
        return pa.array([], pa.binary())
    data, starts, lengths = _side_by_side(values)
    return cut_out(data, starts + 1, lengths - 1).cast(pa.binary())


def _side_by_side(values: list[bytes]) -> tuple[Data, Ints, Ints]:
    """Values of entries as they follow each other, where each begins, and their lengths."""
    data, lengths = (
        np.frombuffer(b"".join(values), np.uint8),
        np.fromiter(map(len, values), np.int64, len(values)),
    )
    starts = np.cumsum(lengths) - lengths
    if int(data[starts].max()) > _VERSION:
        raise NewerFormat(
            "A timer was written by a newer Headrace.", fix="run the newer Headrace that wrote it."
        )
    return data, starts, lengths


def earliest(state: KeyedState, kind: int) -> int | None:
    """The time of the first timer of a kind."""
    prefix = _prefix(kind)
    found = state.first(prefix, _prefix(kind + 1))
    return None if found is None else int.from_bytes(found[2:10], "big") - (1 << 63)


def of_the_rest(piles: Piles, section: int, kind: int, woken: Mask, later: int) -> Ints:
    """For each key a time before which nothing that was not loaded is to be woken: `later` than its
    number. It need not be exact: who is woken too early sets the timer again. Where a key was
    woken, what was not loaded lies behind what was.
    """
    part, before = piles.sections[section], piles.marks_before[kind]
    bound = np.full(len(before), NONE)
    left = np.flatnonzero(~part.loaded)
    keys = part.leaf_keys[left]
    np.minimum.at(bound, keys, np.where(woken[keys], part.lows[left] + later, before[keys]))
    return bound


def moved(piles: Piles, kind: int) -> Entries:
    """The entries that move a kind of timer to where the marks of that number have gone; a mark of
    NONE is no timer.
    """
    before, after = piles.marks_before[kind], piles.marks[kind]
    differs = before != after
    goes, comes = (
        np.flatnonzero(differs & (before != NONE)),
        np.flatnonzero(differs & (after != NONE)),
    )
    which = np.concatenate([goes, comes])
    keys = piles.keys.take(pa.array(which))
    values = joined([pa.scalar(bytes([_VERSION]), pa.large_binary()), keys.slice(len(goes))]).cast(
        pa.binary()
    )
    times = np.concatenate([before[goes], after[comes]])
    return (
        names(_prefix(kind), times, keys),
        pa.concat_arrays([pa.nulls(len(goes), pa.binary()), values]),
        piles.groups[which],
    )


# Lists


def fired_lists(state: KeyedState, kind: int, clock_us: int) -> tuple[pa.Array, Entries]:
    """The keys of the lists of a kind that the clock has reached, some of them perhaps twice; and
    the entries that take these lists away.
    """
    prefix = _LIST + bytes([kind])
    (end,) = big_endian(np.array([min(clock_us, NONE - 1) + 1]))
    found, values, groups = (
        ([], [], np.zeros(0, np.uint8))
        if clock_us == UNSTARTED
        else state.scan(prefix, prefix + end)
    )
    gone = pa.array(found, pa.binary()), pa.nulls(len(found), pa.binary()), groups
    if not values:
        return pa.array([], pa.binary()), gone
    data, starts, _ = _side_by_side(values)
    counts = (
        np.ascontiguousarray(data[starts[:, None] + np.arange(1, 5)])
        .view("<u4")
        .reshape(-1)
        .astype(np.int64)
    )
    sizes_at = starts + _LIST_HEADER.itemsize
    sizes = data[runs(sizes_at, 4 * counts)].view("<u4").astype(np.int64)
    ends = np.cumsum(sizes)
    before = np.append(0, ends)[
        np.cumsum(counts) - counts
    ]  # the bytes of the keys of all lists before
    return (
        cut_out(data, np.repeat(sizes_at + 4 * counts - before, counts) + ends - sizes, sizes).cast(
            pa.binary()
        ),
        gone,
    )


def listed(piles: Piles, kind: int, tick: int) -> Entries:
    """New lists of the keys whose mark of that number has moved to another time; a mark of NONE is
    no timer. `tick`: the last of the call.
    """
    after = piles.marks[kind]
    which = np.flatnonzero((piles.marks_before[kind] != after) & (after != NONE))
    which = which[sorting(piles.groups[which].astype(np.int64), after[which])]
    first = np.flatnonzero(begins(piles.groups[which], after[which]))
    bounds = np.append(first, len(which))
    keys = piles.keys.take(pa.array(which))
    offsets = (
        np.frombuffer(keys.buffers()[1], np.int64, count=len(keys) + 1, offset=keys.offset * 8)
        if len(keys)
        else np.zeros(1, np.int64)
    )
    headers = np.zeros(len(first), _LIST_HEADER)
    headers["version"], headers["count"] = _VERSION, np.diff(bounds)
    sizes = np.diff(offsets).astype("<u4").view(np.uint8)
    parts = [
        pieces(headers.view(np.uint8), np.arange(len(first) + 1) * headers.itemsize),
        pieces(sizes, 4 * bounds),
        pieces(data_of(keys), offsets[bounds]),
    ]
    groups, (suffix,) = piles.groups[which[first]], big_endian(np.array([tick]))
    behind = joined(
        [pieces(groups, np.arange(len(groups) + 1)), pa.scalar(suffix, pa.large_binary())]
    )
    return (
        names(_LIST + bytes([kind]), after[which[first]], behind),
        joined(parts).cast(pa.binary()),
        groups,
    )


def _prefix(kind: int) -> bytes:
    return _TIMER + bytes([kind])


# Storing piles again: only the leaves and heads that changed, cut where they grew too large,
# deleted where nothing is left.


MAX_IN_A_LEAF = 64
_CUT_TO = 32
_NOTHING = pa.scalar(b"", pa.large_binary())


@dataclass(frozen=True)
class Bodies:
    """What sections hold in their heads from now on: for some keys the bytes and the count, with
    its top bit for leaves.
    """

    keys: Ints
    bytes: pa.Array
    counts: Ints


@dataclass(frozen=True)
class Chunks:
    """Rows of leaves that changed, cut into new leaves; `starts` in the rows, and their end."""

    leaves: Ints  # the old leaf that each comes from
    starts: Ints
    lows: Numbers
    bytes: pa.Array

    @property
    def counts(self) -> Ints:
        return np.diff(self.starts)


class PileWriter:
    """Takes in what sections hold now, then stores all of it."""

    def __init__(self, piles: Piles) -> None:
        self.piles = piles
        self._bodies: dict[int, Bodies] = {}
        self._entries: list[Entries] = []

    def replace(
        self, section: int, records: Records, touched_keys: Ints, touched_at: Numbers
    ) -> None:
        """`records`: what the loaded part holds now, in order of key and number. `touched`: where
        something came, went or changed.
        """
        part = self.piles.sections[section]
        dirty = np.zeros(len(part.lows), np.bool_)
        dirty[part.leaves_of(touched_keys, touched_at)] = True
        if not dirty.any():
            return
        if (dirty & ~part.loaded).any():
            raise BugError(f"Step {self.piles.step!r} changes rows that it has not loaded.")
        leaves = part.leaves_of(records.keys, records.at)
        if not dirty.all():
            which = np.flatnonzero(dirty[leaves])
            records, leaves = records.take(which), leaves[which]
        chunks = _chunks(part, records, leaves, self.piles.record)
        self._bodies[section] = (
            self._without_trees(part, dirty, chunks)
            if _all_whole(part, chunks)
            else self._with_trees(part, dirty, chunks)
        )

    @staticmethod
    def _without_trees(part: Section, dirty: Mask, chunks: Chunks) -> Bodies:
        """The usual case: every pile lies in its head, and goes on to."""
        keys = part.leaf_keys[dirty]
        counts, at = np.zeros(len(part.lows), np.int64), np.zeros(len(part.lows), np.int64)
        counts[chunks.leaves], at[chunks.leaves] = chunks.counts, np.arange(len(chunks.leaves))
        counts, at = counts[dirty], at[dirty]
        if len(chunks.leaves) == len(keys):
            return Bodies(keys, chunks.bytes, counts)
        return Bodies(
            keys, chunks.bytes.take(pa.array(at, mask=counts == 0)).fill_null(_NOTHING), counts
        )

    def _with_trees(self, part: Section, dirty: Mask, chunks: Chunks) -> Bodies:
        """1. Which leaves there are now. 2. Those that are no more, go. 3. Those that changed come.
        4. Heads list them, or have the only one.
        """
        of_chunk = part.leaf_keys[chunks.leaves]
        stays = np.flatnonzero(~dirty)
        keys, lows = (
            np.concatenate([part.leaf_keys[stays], of_chunk]),
            np.concatenate([part.lows[stays], chunks.lows]),
        )
        chunk = np.concatenate([np.full(len(stays), -1), np.arange(len(of_chunk))])
        order = sorting(keys, lows)
        keys, lows, chunk = keys[order], lows[order], chunk[order]
        counts = np.bincount(keys, minlength=len(self.piles))
        # One leaf goes into the head if it is small; a head that has its rows already keeps them as
        # they are.
        small = np.append(chunks.counts <= _CUT_TO, True)[chunk] | ~part.tree[keys]
        whole = (counts[keys] == 1) & small & ((chunk >= 0) | ~part.tree[keys])
        self._let_go(part, dirty & part.tree[part.leaf_keys], keys[~whole], lows[~whole])
        self._write_leaves(part, keys, lows, chunk, ~whole & (chunk >= 0), chunks)
        return self._heads(
            self._relisted(part, dirty, chunks, keys[whole & (chunk >= 0)]),
            counts,
            keys,
            lows,
            chunk,
            whole,
            chunks,
        )

    @staticmethod
    def _relisted(part: Section, dirty: Mask, chunks: Chunks, whole: Ints) -> Mask:
        """The keys whose heads change: not those where leaves changed that keep their names."""
        relisted = np.zeros(len(part.tree), np.bool_)
        relisted[part.leaf_keys[dirty & ~part.tree[part.leaf_keys]]] = True
        relisted[whole] = True
        relisted[part.leaf_keys[chunks.leaves[part.lows[chunks.leaves] != chunks.lows]]] = True
        emptied = dirty.copy()
        emptied[chunks.leaves] = False
        relisted[part.leaf_keys[emptied]] = True
        return relisted

    def _let_go(self, part: Section, were: Mask, keys: Ints, lows: Numbers) -> None:
        """Leaves that changed and are not there any more under their names."""
        old_keys, old_lows = part.leaf_keys[were], part.lows[were]
        all_keys, all_lows = np.concatenate([keys, old_keys]), np.concatenate([lows, old_lows])
        order = sorting(all_keys, all_lows)
        first = np.empty(len(order), np.bool_)
        first[order] = begins(all_keys[order], all_lows[order])
        gone = first[len(keys) :]
        self._put(
            self.piles.leaf_names(part, old_keys[gone], old_lows[gone]),
            pa.nulls(int(gone.sum()), pa.binary()),
            self.piles.groups[old_keys[gone]],
        )

    def _write_leaves(
        self, part: Section, keys: Ints, lows: Numbers, chunk: Ints, fresh: Mask, chunks: Chunks
    ) -> None:
        headers = np.zeros(int(fresh.sum()), LEAF_HEADER)
        headers["version"], headers["count"] = VERSION, chunks.counts[chunk[fresh]]
        bytes_ = chunks.bytes.take(pa.array(chunk[fresh]))
        values = joined(
            [
                pieces(headers.view(np.uint8), np.arange(len(headers) + 1) * LEAF_HEADER.itemsize),
                bytes_,
            ]
        )
        self._put(
            self.piles.leaf_names(part, keys[fresh], lows[fresh]),
            values.cast(pa.binary()),
            self.piles.groups[keys[fresh]],
        )

    @staticmethod
    def _heads(
        relisted: Mask,
        counts: Ints,
        keys: Ints,
        lows: Numbers,
        chunk: Ints,
        whole: Mask,
        chunks: Chunks,
    ) -> Bodies:
        """For each key that changed: its rows, or the list of its leaves, or nothing."""
        which = np.flatnonzero(relisted)
        begin = np.append(0, np.cumsum(counts))
        lists = pieces(lows.view(np.uint8), lows.dtype.itemsize * begin).take(pa.array(which))
        in_head = np.full(len(counts), -1)
        in_head[keys[whole]] = chunk[whole]
        rows_in_head = np.zeros(len(counts), np.int64)
        rows_in_head[keys[whole]] = np.append(chunks.counts, 0)[chunk[whole]]
        source = np.where(in_head[which] >= 0, len(which) + in_head[which], np.arange(len(which)))
        bytes_ = pa.concat_arrays([lists, chunks.bytes]).take(pa.array(source))
        is_tree = (counts[which] > 0) & (in_head[which] < 0)
        return Bodies(
            which, bytes_, np.where(is_tree, counts[which] | int(TREE), rows_in_head[which])
        )

    # All of it

    def save(self, timers: Sequence[int] = (), others: Sequence[Entries] = ()) -> None:
        """Store everything that changed, and other entries with it, and move the timers of these
        kinds to where the marks have gone.
        """
        piles = self.piles
        changed = (piles.marks != piles.marks_before).any(axis=0)
        for bodies in self._bodies.values():
            changed[bodies.keys] = True
        self._save_heads(np.flatnonzero(changed))
        entries = [
            each
            for each in (*self._entries, *others, *(moved(piles, kind) for kind in timers))
            if len(each[0])
        ]
        if entries:
            names, values = (pa.concat_arrays([each[at] for each in entries]) for at in range(2))
            piles.state.put_array(names, values, np.concatenate([each[2] for each in entries]))

    def _save_heads(self, which: Ints) -> None:
        piles = self.piles
        headers = np.zeros(len(which), piles.header)
        headers["version"], headers["marks"] = VERSION, piles.marks[:, which].T
        parts = []
        for number, part in enumerate(piles.sections):
            bytes_, counts = self._section_bytes(number, part, which)
            headers["counts"][:, number], headers["sizes"][:, number] = (
                counts,
                pc.binary_length(bytes_).to_numpy(zero_copy_only=False),
            )
            parts.append(bytes_)
        heads = joined(
            [
                pieces(headers.view(np.uint8), np.arange(len(which) + 1) * piles.header.itemsize),
                *parts,
            ]
        )
        empty = ~np.logical_or.reduce(headers["counts"], axis=1)
        values = (
            heads.take(pa.array(np.arange(len(heads)), mask=empty)) if empty.any() else heads
        ).cast(pa.binary())
        if len(which) and len(which) == len(
            piles
        ):  # the very column that was got: a state need not look up again what was there
            piles.state.put_array(piles.names, values, piles.groups)
        else:
            self._put(piles.names.take(pa.array(which)), values, piles.groups[which])

    def _section_bytes(self, number: int, part: Section, which: Ints) -> tuple[pa.Array, Ints]:
        """What the heads of some keys hold of a section, new or as it was; and its count."""
        bodies = self._bodies.get(number)
        if bodies is not None and len(bodies.keys) == len(which):
            return bodies.bytes, bodies.counts
        were = cut_out(self.piles.data, part.starts[which], part.sizes[which])
        counts = part.counts[which] | np.where(part.tree[which], int(TREE), 0)
        if bodies is None:
            return were, counts
        at = np.searchsorted(which, bodies.keys)
        source = np.arange(len(which))
        source[at] = len(which) + np.arange(len(at))
        counts[at] = bodies.counts
        return pa.concat_arrays([were, bodies.bytes]).take(pa.array(source)), counts

    def _put(self, names: pa.Array, values: pa.Array, groups: Groups) -> None:
        self._entries.append((names, values, groups))


def _all_whole(part: Section, chunks: Chunks) -> bool:
    return not part.has_trees and bool(begins(chunks.leaves).all())


def _chunks(part: Section, records: Records, leaves: Ints, record: np.dtype[np.void]) -> Chunks:
    """Rows of leaves cut into new leaves. Rows with the same number stay together, so that a number
    says where a row is.
    """
    first = begins(leaves)
    starts = first.copy()
    sizes = np.bincount(leaves, minlength=len(part.lows))
    if sizes.max(initial=0) > MAX_IN_A_LEAF:
        fresh_number = np.append(True, records.at[1:] != records.at[:-1])
        starts |= (
            (place_in_slot(leaves) % _CUT_TO == 0) & (sizes[leaves] > MAX_IN_A_LEAF) & fresh_number
        )
    at = np.flatnonzero(starts)
    known = part.lows[leaves[at]]
    lows = np.where(first[at] & (known <= records.at[at]), known, records.at[at])
    ends = np.append(at, len(leaves))
    fixed = np.zeros(len(records), record)
    row_starts = _offsets(records.rows)
    fixed["at"], fixed["flags"], fixed["size"] = records.at, records.flags, np.diff(row_starts)
    rows = data_of(records.rows)
    return Chunks(
        leaves[at],
        ends,
        lows,
        joined(
            [pieces(fixed.view(np.uint8), ends * record.itemsize), pieces(rows, row_starts[ends])]
        ),
    )


def _offsets(array: pa.Array) -> Ints:
    if not len(array):
        return np.zeros(1, np.int64)
    return np.frombuffer(
        array.buffers()[1], np.int64, count=len(array) + 1, offset=array.offset * 8
    )
