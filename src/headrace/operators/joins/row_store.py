"""The row store of the joins: rows by key, the rows of a key sorted by a sort key (a time, or the
hash of an id).

The rows of a key are kept in sections, such as the left and the right rows of a join. A small
section lies inline in the header of its key. A section that outgrows the header is split into
chunks, which are state entries of their own, and the header lists the lowest sort key of each. So a
key with one row costs one entry, and a batch that touches a key with a million rows reads and
writes only the chunks that it looks at.

The state of the key `b"k"` with three left rows at the times 10, 20 and 30 and no right rows, and
of the same key once its left section has outgrown the header:

    b"h" b"k"                 header: registers, counts (3, 0), sizes, the three rows
                              ------
    b"h" b"k"                 header: registers, counts (2 chunks, 0), sizes, lows 10, 90
    b"l" section=0 10 b"k"    chunk: rows with sort keys below 90
    b"l" section=0 90 b"k"    chunk: rows with sort keys from 90 on

The layout of the entries:

    header   `h`, key                            version 1; registers, 8 bytes each; counts of the
                                                 sections, 4 bytes each (top bit: chunks, not rows);
                                                 sizes of the sections, 4 bytes each; the sections
    chunk    `l`, section, lowest sort key, key  version 1; row count, 4 bytes; the rows
    rows     (in a header or a chunk)            per row: sort key, 8 bytes; flags, 1 byte; size,
                                                 4 bytes; then the bytes of all rows
    chunks   (in a header)                       the lowest sort key of each chunk, 8 bytes; the
                                                 first chunk also holds every row below it

Registers are 64-bit numbers that a kernel keeps with a key, such as the time of the key's timer
(`timers.py`) or its row count. A sort key takes 24 bytes instead of 8 where 8 do not suffice
(`wide`).
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

from headrace.columnar.buffers import Ints, Mask, expand_ranges, offsets_of
from headrace.columnar.keys import key_groups
from headrace.columnar.lookup import group_start_mask, search_within, sort_order
from headrace.columnar.row_codec import gather_ranges
from headrace.errors import BugError, CorruptionError, NewerFormat
from headrace.operators.aggregates.accumulator import index_in_slot
from headrace.operators.kernel import Groups, KeyedState

VERSION = 1
LOWEST, HIGHEST = -(2**63), 2**63 - 1
"""Bounds of the sort keys and of times. A register that is not set holds HIGHEST."""
MAX_CHUNK_ROWS = 64
"""A chunk with more rows is split."""
_SPLIT_CHUNK_ROWS = 32
"""Rows of each part of a chunk that is split; a last chunk with at most this many rows moves into
the header.
"""
CHUNKED = np.uint32(1 << 31)
"""The bit of a section's count that says that it counts chunks, not rows."""
WIDE_SORT_KEY_BYTES = 24
CHUNK_HEADER = np.dtype([("version", "u1"), ("count", "<u4")])
Flags = npt.NDArray[np.uint8]
Data = npt.NDArray[np.uint8]
SortKeys = npt.NDArray[Any]
"""What the rows of a key are sorted by: integers, or bytes."""
StateEntries = tuple[pa.Array, pa.Array, Groups]
"""Names, values (null: delete) and key groups of entries to write."""
_EMPTY = pa.scalar(b"", pa.large_binary())


@dataclass(frozen=True)
class StoredRows:
    """Rows of a row store: per row the index of its key, its sort key, its flags and its bytes
    (large binary).
    """

    keys: Ints
    sort_keys: SortKeys
    flags: Flags
    rows: pa.Array

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, indices: Ints) -> StoredRows:
        return StoredRows(
            keys=self.keys[indices],
            sort_keys=self.sort_keys[indices],
            flags=self.flags[indices],
            rows=self.rows.take(pa.array(indices)),
        )

    @staticmethod
    def concat(parts: list[StoredRows]) -> StoredRows:
        return StoredRows(
            keys=np.concatenate([part.keys for part in parts]),
            sort_keys=np.concatenate([part.sort_keys for part in parts]),
            flags=np.concatenate([part.flags for part in parts]),
            rows=pa.concat_arrays([part.rows for part in parts]),
        )

    @staticmethod
    def empty() -> StoredRows:
        nothing = np.zeros(0, np.int64)
        return StoredRows(
            keys=nothing,
            sort_keys=nothing,
            flags=np.zeros(0, np.uint8),
            rows=pa.array([], pa.large_binary()),
        )


@dataclass
class Section:
    """One section of many keys: where it lies in their headers, and its chunks. A section that lies
    inline counts as one chunk that is loaded.
    """

    number: int
    starts: Ints  # by key: where the section begins in the header bytes
    sizes: Ints  # by key
    counts: Ints  # by key: rows of an inline section, chunks of a chunked one
    is_chunked: Mask  # by key
    chunk_starts: Ints  # by key: the index of its first chunk; one more for the end
    lows: SortKeys  # by chunk: its lowest sort key
    is_loaded: Mask  # by chunk

    @cached_property
    def chunk_keys(self) -> Ints:
        """The key index of each chunk."""
        return np.repeat(np.arange(len(self.is_chunked)), np.diff(self.chunk_starts))

    @cached_property
    def has_chunks(self) -> bool:
        return bool(self.is_chunked.any())

    def chunks_of(self, keys: Ints, sort_keys: SortKeys) -> Ints:
        """The index of the chunk in which each sort key of a key lies, or would lie."""
        first = self.chunk_starts[keys]
        if not self.has_chunks:
            return first
        end = self.chunk_starts[keys + 1]
        return np.maximum(search_within(self.lows, first, end, sort_keys, right=True) - 1, first)


class KeyedRowStore:
    """The stored rows of some keys. Load what a batch looks at; a `RowStoreWriter` writes what it
    changes.
    """

    def __init__(
        self,
        step: str,
        state: KeyedState,
        keys: pa.Array,
        *,
        sections: int,
        registers: int,
        wide: bool = False,
    ) -> None:
        """Read the headers of some keys.

        Args:
            step: the name of the step, for errors.
            state: the state of the step.
            keys: the bytes of the keys, distinct and in order.
            sections: the number of sections of a key.
            registers: the number of registers of a key.
            wide: whether sort keys are 24 bytes, not integers.
        """
        self.step, self.state = step, state
        self.sort_key_type: np.dtype[Any] = np.dtype(f"S{WIDE_SORT_KEY_BYTES}" if wide else "<i8")
        self.row_type = np.dtype(
            [("sort_key", self.sort_key_type), ("flags", "u1"), ("size", "<u4")]
        )
        self.keys = keys.cast(pa.binary()).cast(pa.large_binary())
        self.groups: Groups = key_groups(keys)
        self.header_type = np.dtype(
            [
                ("version", "u1"),
                ("registers", "<i8", (registers,)),
                ("counts", "<u4", (sections,)),
                ("sizes", "<u4", (sections,)),
            ]
        )
        self.names = concat_bytes([pa.scalar(b"h", pa.large_binary()), self.keys]).cast(pa.binary())
        new_header = np.zeros(1, self.header_type)
        new_header["version"], new_header["registers"] = VERSION, HIGHEST
        values = state.get_array(self.names, self.groups).fill_null(new_header.tobytes())
        self.data, starts = value_bytes(values), offsets_of(values)[:-1]
        headers = _read_structs(self.data, starts, self.header_type)
        self._check_version(headers["version"])
        self.registers: Ints = headers["registers"].T.copy()
        self.registers_before = self.registers.copy()
        sizes = headers["sizes"].astype(np.int64)
        ends = starts[:, None] + self.header_type.itemsize + np.cumsum(sizes, axis=1)
        section_starts = ends - sizes
        self.sections = [
            self._section(
                number, headers["counts"][:, number], section_starts[:, number], sizes[:, number]
            )
            for number in range(sections)
        ]

    def __len__(self) -> int:
        return len(self.keys)

    def _check_version(self, versions: Flags) -> None:
        if len(versions) and int(versions.max()) > VERSION:
            raise NewerFormat(
                f"The state of step {self.step!r} was written by a newer Headrace.",
                fix="run the newer Headrace that wrote it.",
            )

    def _section(self, number: int, counts: Ints, starts: Ints, sizes: Ints) -> Section:
        is_chunked = counts >= CHUNKED
        counts = (counts & ~CHUNKED).astype(np.int64)
        chunks = np.where(is_chunked, counts, 1)
        chunk_starts = np.append(0, np.cumsum(chunks))
        lowest = LOWEST if self.sort_key_type.kind == "i" else b""
        lows = np.full(chunk_starts[-1], lowest, self.sort_key_type)
        is_entry = np.repeat(is_chunked, chunks)
        if is_chunked.any():
            list_sizes = self.sort_key_type.itemsize * counts[is_chunked]
            list_bytes = self.data[expand_ranges(starts[is_chunked], list_sizes)]
            lows[is_entry] = list_bytes.view(self.sort_key_type)
        return Section(
            number=number,
            starts=starts,
            sizes=sizes,
            counts=counts,
            is_chunked=is_chunked,
            chunk_starts=chunk_starts,
            lows=lows,
            is_loaded=~is_entry,
        )

    # Loading

    def load(self, section: int, low: Ints, high: Ints, *, beyond: bool = False) -> StoredRows:
        """Load the rows of each key whose sort keys lie between `low` and `high`, both included.

        More may come: all rows of a section that lies inline, and of a chunk that holds one of the
        rows. A key whose `low` is above its `high` loads none of its chunks. A section is loaded
        once.

        Args:
            section: the number of the section.
            low: the lowest sort key, by key.
            high: the highest sort key, by key.
            beyond: load the chunk behind the range too, so that the row after it is among them.
        """
        part = self.sections[section]
        inline = self.load_inline(section)
        if not part.has_chunks:
            return inline
        keys = np.flatnonzero(part.is_chunked & (low <= high))
        first = part.chunks_of(keys, low[keys])
        last = part.chunks_of(keys, high[keys]) + (1 if beyond else 0)
        last = np.minimum(last, part.chunk_starts[keys + 1] - 1)
        chunked = self.load_chunks(section, expand_ranges(first, last - first + 1))
        rows = StoredRows.concat([inline, chunked])
        return rows.take(np.argsort(rows.keys, kind="stable"))

    def load_touched(
        self, section: int, keys: Ints, sort_keys: SortKeys, whole_keys: Mask
    ) -> StoredRows:
        """Load all rows of some keys (`whole_keys`), and of the others the chunks in which these
        sort keys lie; in order of key and sort key.
        """
        part, inline = self.sections[section], self.load_inline(section)
        if not part.has_chunks:
            return inline
        wanted = whole_keys[part.chunk_keys]
        wanted[part.chunks_of(keys, sort_keys)] = True
        wanted &= part.is_chunked[part.chunk_keys]
        rows = StoredRows.concat([inline, self.load_chunks(section, np.flatnonzero(wanted))])
        return rows.take(np.argsort(rows.keys, kind="stable"))

    def load_all(self, section: int, of: Mask | None = None) -> StoredRows:
        """Load all rows of the keys, or of some of them."""
        wanted = np.ones(len(self), np.bool_) if of is None else of
        return self.load(
            section, np.where(wanted, LOWEST, HIGHEST), np.where(wanted, HIGHEST, LOWEST)
        )

    def load_inline(self, section: int) -> StoredRows:
        """Load the rows that lie in headers."""
        part = self.sections[section]
        keys = np.flatnonzero(~part.is_chunked)
        return self._read_rows(self.data, part.starts[keys], part.counts[keys], keys)

    def load_chunks(self, section: int, chunks: Ints) -> StoredRows:
        """Load the rows of some chunks, each of which is given once."""
        part = self.sections[section]
        part.is_loaded[chunks] = True
        keys = part.chunk_keys[chunks]
        values = self.state.get_array(
            self.chunk_names(part, keys, part.lows[chunks]), self.groups[keys]
        )
        if values.null_count:
            raise CorruptionError(
                f"The state of step {self.step!r} lacks {values.null_count} of its parts.",
                fix="rebuild it from its files.",
            )
        data, starts = value_bytes(values), offsets_of(values)[:-1]
        headers = _read_structs(data, starts, CHUNK_HEADER)
        self._check_version(headers["version"])
        counts = headers["count"].astype(np.int64)
        return self._read_rows(data, starts + CHUNK_HEADER.itemsize, counts, keys)

    def chunk_names(self, part: Section, keys: Ints, lows: SortKeys) -> pa.Array:
        """The names of the state entries of chunks."""
        return entry_names(b"l" + bytes([part.number]), lows, self.keys.take(pa.array(keys)))

    def _read_rows(self, data: Data, starts: Ints, counts: Ints, keys: Ints) -> StoredRows:
        """Decode runs of rows: where each begins in the data, its number of rows, and its key."""
        ends = np.cumsum(counts)
        index = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
        structs = _read_structs(
            data, np.repeat(starts, counts) + index * self.row_type.itemsize, self.row_type
        )
        sizes = structs["size"].astype(np.int64)
        row_ends = np.cumsum(sizes)
        bytes_of_earlier_runs = np.append(0, row_ends)[ends - counts]
        bytes_start = starts + counts * self.row_type.itemsize - bytes_of_earlier_runs
        row_starts = np.repeat(bytes_start, counts) + row_ends - sizes
        return StoredRows(
            keys=np.repeat(keys, counts),
            sort_keys=structs["sort_key"].copy(),
            flags=structs["flags"].copy(),
            rows=gather_ranges(data, row_starts, sizes),
        )


def delete_keys(row_store: KeyedRowStore) -> None:
    """Delete everything that is stored of the keys: their headers and chunks."""
    names, groups = [row_store.names], [row_store.groups]
    for part in row_store.sections:
        entries = np.flatnonzero(part.is_chunked[part.chunk_keys])
        keys = part.chunk_keys[entries]
        names.append(row_store.chunk_names(part, keys, part.lows[entries]))
        groups.append(row_store.groups[keys])
    deleted = pa.concat_arrays(names)
    row_store.state.put_array(deleted, pa.nulls(len(deleted), pa.binary()), np.concatenate(groups))


# Writing


@dataclass(frozen=True)
class HeaderSections:
    """The new contents of a section in the headers of some keys: its bytes and its count, whose top
    bit says that it counts chunks.
    """

    keys: Ints
    bytes: pa.Array
    counts: Ints


@dataclass(frozen=True)
class NewChunks:
    """The rows of changed chunks, split into new chunks."""

    old_chunks: Ints  # the chunk that each comes from
    starts: Ints  # where each begins in the rows, and the end
    lows: SortKeys
    bytes: pa.Array

    @property
    def counts(self) -> Ints:
        return np.diff(self.starts)


class RowStoreWriter:
    """Collects the new contents of sections, then writes the headers and chunks that changed:
    chunks that grew too large are split, and those that are empty are deleted.
    """

    def __init__(self, row_store: KeyedRowStore) -> None:
        self.row_store = row_store
        self._sections: dict[int, HeaderSections] = {}
        self._entries: list[StateEntries] = []

    def replace(
        self, section: int, rows: StoredRows, touched_keys: Ints, touched_sort_keys: SortKeys
    ) -> None:
        """Replace the loaded rows of a section.

        Args:
            section: the number of the section.
            rows: all rows that the loaded part holds from now on, in order of key and sort key.
            touched_keys: the key of each row that was added, removed or changed.
            touched_sort_keys: the sort key of each of these rows.
        """
        part = self.row_store.sections[section]
        dirty = np.zeros(len(part.lows), np.bool_)
        dirty[part.chunks_of(touched_keys, touched_sort_keys)] = True
        if not dirty.any():
            return
        if (dirty & ~part.is_loaded).any():
            raise BugError(f"Step {self.row_store.step!r} changes rows that it has not loaded.")
        chunks = part.chunks_of(rows.keys, rows.sort_keys)
        if not dirty.all():
            in_dirty = np.flatnonzero(dirty[chunks])
            rows, chunks = rows.take(in_dirty), chunks[in_dirty]
        new = _split_chunks(part, rows, chunks, self.row_store.row_type)
        stays_inline = not part.has_chunks and bool(group_start_mask(new.old_chunks).all())
        self._sections[section] = (
            self._inline_sections(part, dirty, new)
            if stays_inline
            else self._chunked_sections(part, dirty, new)
        )

    @staticmethod
    def _inline_sections(part: Section, dirty: Mask, new: NewChunks) -> HeaderSections:
        """The usual case: the sections of all keys lie in their headers, and continue to."""
        keys = part.chunk_keys[dirty]
        counts = np.zeros(len(part.lows), np.int64)
        source = np.zeros(len(part.lows), np.int64)
        counts[new.old_chunks] = new.counts
        source[new.old_chunks] = np.arange(len(new.old_chunks))
        counts, source = counts[dirty], source[dirty]
        if len(new.old_chunks) == len(keys):
            return HeaderSections(keys, new.bytes, counts)
        taken = new.bytes.take(pa.array(source, mask=counts == 0)).fill_null(_EMPTY)
        return HeaderSections(keys, taken, counts)

    def _chunked_sections(self, part: Section, dirty: Mask, new: NewChunks) -> HeaderSections:
        """1. List the chunks that exist from now on. 2. Delete those that no longer exist. 3. Write
        those that changed. 4. Headers list the chunks, or hold the rows of the only one.
        """
        row_store = self.row_store
        # 1. The chunks that stay as they are (-1), and the new ones.
        new_keys = part.chunk_keys[new.old_chunks]
        stays = np.flatnonzero(~dirty)
        keys = np.concatenate([part.chunk_keys[stays], new_keys])
        lows = np.concatenate([part.lows[stays], new.lows])
        source = np.concatenate([np.full(len(stays), -1), np.arange(len(new_keys))])
        order = sort_order(keys, lows)
        keys, lows, source = keys[order], lows[order], source[order]
        counts = np.bincount(keys, minlength=len(row_store))
        # The only chunk of a key moves into the header if it is small. A header that has its rows
        # already keeps them.
        was_inline = ~part.is_chunked[keys]
        is_small = np.append(new.counts <= _SPLIT_CHUNK_ROWS, True)[source] | was_inline
        is_new = source >= 0
        inline = (counts[keys] == 1) & is_small & (is_new | was_inline)

        # 2. Chunks that changed and whose names are no longer in use.
        was_entry = dirty & part.is_chunked[part.chunk_keys]
        old_keys, old_lows = part.chunk_keys[was_entry], part.lows[was_entry]
        all_keys = np.concatenate([keys[~inline], old_keys])
        all_lows = np.concatenate([lows[~inline], old_lows])
        order = sort_order(all_keys, all_lows)
        is_first = np.empty(len(order), np.bool_)
        is_first[order] = group_start_mask(all_keys[order], all_lows[order])
        unused = is_first[len(keys[~inline]) :]
        self._entries.append(
            (
                row_store.chunk_names(part, old_keys[unused], old_lows[unused]),
                pa.nulls(int(unused.sum()), pa.binary()),
                row_store.groups[old_keys[unused]],
            )
        )

        # 3. Chunks that changed.
        written = ~inline & is_new
        headers = np.zeros(int(written.sum()), CHUNK_HEADER)
        headers["version"], headers["count"] = VERSION, new.counts[source[written]]
        values = concat_bytes([struct_bytes(headers), new.bytes.take(pa.array(source[written]))])
        self._entries.append(
            (
                row_store.chunk_names(part, keys[written], lows[written]),
                values.cast(pa.binary()),
                row_store.groups[keys[written]],
            )
        )

        # 4. The headers that change: not those whose chunks changed and keep their names.
        changes = np.zeros(len(part.is_chunked), np.bool_)
        changes[part.chunk_keys[dirty & ~part.is_chunked[part.chunk_keys]]] = True
        changes[keys[inline & is_new]] = True
        changes[part.chunk_keys[new.old_chunks[part.lows[new.old_chunks] != new.lows]]] = True
        emptied = dirty.copy()
        emptied[new.old_chunks] = False
        changes[part.chunk_keys[emptied]] = True
        which = np.flatnonzero(changes)
        ends = np.append(0, np.cumsum(counts))
        lists = slice_bytes(lows.view(np.uint8), lows.dtype.itemsize * ends).take(pa.array(which))
        inline_source = np.full(len(counts), -1)
        inline_source[keys[inline]] = source[inline]
        inline_rows = np.zeros(len(counts), np.int64)
        inline_rows[keys[inline]] = np.append(new.counts, 0)[source[inline]]
        holds_rows = inline_source[which] >= 0
        taken = np.where(holds_rows, len(which) + inline_source[which], np.arange(len(which)))
        is_list = (counts[which] > 0) & ~holds_rows
        return HeaderSections(
            which,
            pa.concat_arrays([lists, new.bytes]).take(pa.array(taken)),
            np.where(is_list, counts[which] | int(CHUNKED), inline_rows[which]),
        )

    def save(self, others: Sequence[StateEntries] = ()) -> None:
        """Write everything that changed, and other entries (such as timers) with it."""
        row_store = self.row_store
        changed = (row_store.registers != row_store.registers_before).any(axis=0)
        for contents in self._sections.values():
            changed[contents.keys] = True
        self._save_headers(np.flatnonzero(changed))
        entries = [each for each in (*self._entries, *others) if len(each[0])]
        if entries:
            row_store.state.put_array(
                pa.concat_arrays([names for names, _, _ in entries]),
                pa.concat_arrays([values for _, values, _ in entries]),
                np.concatenate([groups for _, _, groups in entries]),
            )

    def _save_headers(self, which: Ints) -> None:
        row_store = self.row_store
        headers = np.zeros(len(which), row_store.header_type)
        headers["version"], headers["registers"] = VERSION, row_store.registers[:, which].T
        parts = []
        for number, part in enumerate(row_store.sections):
            section_bytes, counts = self._section_bytes(number, part, which)
            headers["counts"][:, number] = counts
            sizes = pc.binary_length(section_bytes).to_numpy(zero_copy_only=False)
            headers["sizes"][:, number] = sizes
            parts.append(section_bytes)
        values = concat_bytes([struct_bytes(headers), *parts])
        is_empty = ~np.logical_or.reduce(headers["counts"], axis=1)
        if is_empty.any():
            values = values.take(pa.array(np.arange(len(values)), mask=is_empty))
        values = values.cast(pa.binary())
        if len(which) and len(which) == len(row_store):
            # The very column that was read: the state need not look the old values up again.
            row_store.state.put_array(row_store.names, values, row_store.groups)
        else:
            names = row_store.names.take(pa.array(which))
            self._entries.append((names, values, row_store.groups[which]))

    def _section_bytes(self, number: int, part: Section, which: Ints) -> tuple[pa.Array, Ints]:
        """What the headers of some keys hold of a section, changed or not, and its count."""
        contents = self._sections.get(number)
        if contents is not None and len(contents.keys) == len(which):
            return contents.bytes, contents.counts
        unchanged = gather_ranges(self.row_store.data, part.starts[which], part.sizes[which])
        counts = part.counts[which] | np.where(part.is_chunked[which], int(CHUNKED), 0)
        if contents is None:
            return unchanged, counts
        changed = np.searchsorted(which, contents.keys)
        source = np.arange(len(which))
        source[changed] = len(which) + np.arange(len(changed))
        counts[changed] = contents.counts
        return pa.concat_arrays([unchanged, contents.bytes]).take(pa.array(source)), counts


def _split_chunks(
    part: Section, rows: StoredRows, chunks: Ints, row_type: np.dtype[np.void]
) -> NewChunks:
    """Split the rows of chunks into new chunks. Rows with the same sort key stay together, so that
    the sort key of a row determines its chunk.
    """
    is_first = group_start_mask(chunks)
    starts = is_first.copy()
    sizes = np.bincount(chunks, minlength=len(part.lows))
    if sizes.max(initial=0) > MAX_CHUNK_ROWS:
        is_new_sort_key = np.append(True, rows.sort_keys[1:] != rows.sort_keys[:-1])
        is_cut = index_in_slot(chunks) % _SPLIT_CHUNK_ROWS == 0
        starts |= is_cut & (sizes[chunks] > MAX_CHUNK_ROWS) & is_new_sort_key
    first = np.flatnonzero(starts)
    old_lows, new_lows = part.lows[chunks[first]], rows.sort_keys[first]
    ends = np.append(first, len(chunks))
    structs = np.zeros(len(rows), row_type)
    row_starts = large_offsets(rows.rows)
    structs["sort_key"] = rows.sort_keys
    structs["flags"] = rows.flags
    structs["size"] = np.diff(row_starts)
    return NewChunks(
        old_chunks=chunks[first],
        starts=ends,
        lows=np.where(is_first[first] & (old_lows <= new_lows), old_lows, new_lows),
        bytes=concat_bytes(
            [
                slice_bytes(structs.view(np.uint8), ends * row_type.itemsize),
                slice_bytes(value_bytes(rows.rows), row_starts[ends]),
            ]
        ),
    )


# Columns of bytes


def entry_names(prefix: bytes, sort_keys: SortKeys, keys: pa.Array) -> pa.Array:
    """Names of state entries that sort by a sort key: the prefix, the sort key, the key."""
    ordered = (
        sort_keys
        if sort_keys.dtype.kind == "S"
        else (sort_keys.view(np.uint64) ^ np.uint64(1 << 63)).astype(">u8")
    )
    width = ordered.dtype.itemsize
    ordered_bytes = slice_bytes(ordered.view(np.uint8), np.arange(len(sort_keys) + 1) * width)
    return concat_bytes([pa.scalar(prefix, pa.large_binary()), ordered_bytes, keys]).cast(
        pa.binary()
    )


def value_bytes(array: pa.Array) -> Data:
    """The bytes of all values of a binary column, as they lie in memory."""
    data = array.buffers()[2] if len(array) else None
    return np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)


def large_offsets(array: pa.Array) -> Ints:
    """Where each value of a large binary column begins, and where the last ends."""
    if not len(array):
        return np.zeros(1, np.int64)
    return np.frombuffer(
        array.buffers()[1], np.int64, count=len(array) + 1, offset=array.offset * 8
    )


def slice_bytes(data: Data, offsets: Ints) -> pa.Array:
    """Bytes cut at these offsets, as a column of large binary."""
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(),
        len(offsets) - 1,
        [None, pa.py_buffer(offsets.astype(np.int64)), pa.py_buffer(data)],
    )


def struct_bytes(structs: npt.NDArray[Any]) -> pa.Array:
    """The bytes of each struct, as a column of large binary."""
    return slice_bytes(structs.view(np.uint8), np.arange(len(structs) + 1) * structs.itemsize)


def concat_bytes(parts: list[pa.Array | pa.Scalar]) -> pa.Array:
    """Columns of bytes concatenated row by row."""
    return pc.binary_join_element_wise(*parts, _EMPTY)


def _read_structs(data: Data, starts: Ints, kind: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """The structs that begin at these offsets of the data."""
    if not len(starts):
        return np.zeros(0, kind)
    return (
        np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(data, kind.itemsize)[starts])
        .view(kind)
        .reshape(-1)
    )
