"""Stored queries meet passing documents: the kernel. Queries are a table, and state; each document
meets those in force at the end of its tick's changes.

A shard has the queries of its key groups and sees every document. A query that cannot be read is
diverted, with place and reason, and is not in force.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar import row_codec
from headrace.columnar.buffers import Ints
from headrace.columnar.columns import CHANGE_TYPE, TICK_FIELD
from headrace.columnar.keys import encode_keys, key_groups, key_list, whole
from headrace.errors import BadSearch
from headrace.operators.changelog import DELETE, UPDATE_PREIMAGE
from headrace.operators.joins.sides import ticks_of
from headrace.operators.kernel import Diverted, KeyedState, Watermarks
from headrace.operators.search.documents import with_words
from headrace.operators.search.index import (
    QUERY,
    Keeper,
    Key,
    Matches,
    QueryIndex,
    Stored,
    as_large_binary,
    together,
)
from headrace.operators.search.parser import Language

SCORE, HIGHLIGHTS, EXPLANATION, PLACE = "score", "highlights", "explanation", "_document"
HIGHLIGHT_TYPE = pa.list_(
    pa.struct(
        [
            ("column", pa.string()),
            ("start", pa.int64()),
            ("end", pa.int64()),
            ("snippet", pa.string()),
        ]
    )
)
_SNIPPET = 40
MAX_BYTES = 256 << 20
_ORDER = ("_rank", "_partition", "_offset")


@dataclass(frozen=True)
class SearchSettings:
    """A search as it was declared. `query_columns`: the queries' columns in the result, each with
    its name there; the key is among them.
    """

    step: str
    documents: pa.Schema
    queries: pa.Schema
    key: tuple[str, ...]
    query: str
    query_columns: tuple[tuple[str, str], ...]
    language: Language
    highlights: bool = False
    explain: bool = False
    places: bool = False
    """Whether a hidden column says which document it is, for a step that puts its matches
    together.
    """

    @property
    def reasons(self) -> bool:
        """Whether each match is looked at closely."""
        return self.highlights or self.explain

    @cached_property
    def output(self) -> pa.Schema:
        told = [
            pa.field(name, self.queries.field(column).type) for column, name in self.query_columns
        ]
        more = [pa.field(HIGHLIGHTS, HIGHLIGHT_TYPE)] if self.highlights else []
        more += [pa.field(EXPLANATION, pa.string())] if self.explain else []
        more += [pa.field(PLACE, pa.binary())] if self.places else []
        return pa.schema([*self.documents, *told, pa.field(SCORE, pa.float64()), *more])


class SearchKernel:
    """Inputs: the documents, the changes of the queries. `counts` and `gauges`: how many queries
    were looked at in a batch, and how many there are.
    """

    hold_us = 0
    gauges = {"queries_stored": QUERY}  # noqa: RUF012

    def __init__(self, settings: SearchSettings) -> None:
        self.settings = settings
        kept = [settings.query, *settings.key, *(column for column, _ in settings.query_columns)]
        self._kept = pa.schema([settings.queries.field(name) for name in dict.fromkeys(kept)])
        self._keeper = Keeper(settings.step, settings.language, self._stored)
        self.diverted = Diverted(settings.queries)
        self.counts: dict[str, int] = {}

    @property
    def output(self) -> pa.Schema:
        return self.settings.output

    def due(self, state: KeyedState) -> int | None:  # noqa: ARG002
        """Nothing waits for time."""
        return None

    def prepare(self, rows: pa.Table) -> pa.Table:
        """Documents with their words."""
        return with_words(rows, self.settings.language, places=self.settings.reasons)

    def step_timed(
        self,
        state: KeyedState,
        inputs: Sequence[pa.Table],
        watermarks: Sequence[Watermarks],  # noqa: ARG002
    ) -> pa.Table:
        """1. The index as of the state. 2. Tick by tick where queries change: documents before it,
        then the changes. 3. The documents behind. 4. Put what changed.
        """
        documents, changes = inputs
        self.counts = {"queries_run": 0}
        kept = self._keeper.load(state)
        index, told, start = kept.index, [], 0
        ticks, put = ticks_of(documents), dict[Key, bytes | None]()
        for tick, part in self._by_tick(changes):
            end = int(np.searchsorted(ticks, tick))
            told.append(self._told(index, documents.slice(start, end - start)))
            start = end
            fresh = self._changes(part)
            index = index.changed(fresh)
            put |= {key: None if stored is None else stored.value for key, stored in fresh.items()}
        told.append(self._told(index, documents.slice(start)))
        self._keeper.save(state, kept, index, put)
        return pa.concat_tables(told)

    @staticmethod
    def _by_tick(changes: pa.Table) -> Iterator[tuple[int, pa.Table]]:
        ticks = ticks_of(changes)
        found, begins = np.unique(ticks, return_index=True)
        ends = np.append(begins[1:], len(ticks))[: len(found)]
        for tick, begin, end in zip(found.tolist(), begins.tolist(), ends.tolist(), strict=True):
            yield tick, changes.slice(begin, end - begin)

    # Queries

    def _changes(self, changes: pa.Table) -> dict[Key, Stored | None]:
        """What a tick puts and takes, by key. What cannot be read is diverted, and its key has no
        query then.
        """
        keys = encode_keys(changes, self.settings.key)
        groups, kinds = key_groups(keys).tolist(), changes[CHANGE_TYPE].to_pylist()
        values = self._values(changes)
        found: dict[Key, Stored | None] = {}
        refused: dict[str, list[int]] = {}
        texts = changes[self.settings.query].to_pylist()
        for row, (key, kind) in enumerate(zip(key_list(keys), kinds, strict=True)):
            name = bytes([groups[row]]) + key
            if kind == UPDATE_PREIMAGE:
                continue
            found[name] = None
            if kind == DELETE:
                continue
            try:
                found[name] = Stored.of(self.settings.language, texts[row], values[row])
            except BadSearch as bad:
                refused.setdefault(bad.message, []).append(row)
        for reason, rows in refused.items():
            self.diverted.add(changes, np.array(rows), self.settings.query, reason)
        return found

    def _values(self, changes: pa.Table) -> list[bytes]:
        columns = [whole(changes.column(name)) for name in self._kept.names]
        values: list[bytes] = row_codec.encode(
            pa.StructArray.from_arrays(columns, fields=list(self._kept))
        )
        return values

    def _rows(self, values: list[bytes]) -> pa.Table:
        struct = row_codec.decode_array(as_large_binary(values), pa.struct(list(self._kept)))
        return pa.Table.from_arrays(
            [struct.field(at) for at in range(len(self._kept))], schema=self._kept
        )

    def _stored(self, values: list[bytes]) -> Iterator[tuple[bytes, str, bytes]]:
        """The keys and texts of stored rows, and these."""
        rows = self._rows(values)
        return zip(
            key_list(encode_keys(rows, self.settings.key)),
            rows[self.settings.query].to_pylist(),
            values,
            strict=True,
        )

    # Matches

    def _told(self, index: QueryIndex, documents: pa.Table) -> pa.Table:
        """The matches of some documents, each with its document's columns: in pieces that Arrow can
        count, since a document may fit thousands of queries.
        """
        reasons = self.settings.reasons
        found = (
            index.match(documents, reasons=reasons)
            if len(index) and documents.num_rows
            else together([])
        )
        self.counts["queries_run"] += found.run
        return pa.concat_tables(
            [
                self._told_piece(index, documents, found.slice(first, last))
                for first, last in pairwise(_bounds(documents, found.documents))
            ]
        )

    def _told_piece(self, index: QueryIndex, documents: pa.Table, found: Matches) -> pa.Table:
        settings = self.settings
        which = pa.array(found.documents)
        columns = [whole(documents.column(name)).take(which) for name in settings.documents.names]
        columns += [*self._of_queries(index, found.queries), pa.array(found.scores)]
        texts = {name: documents.column(name) for name in settings.language.fields.text}
        columns += [highlight_lists(texts, found)] if settings.highlights else []
        columns += [pa.array(found.explanations, pa.string())] if settings.explain else []
        columns += [_places(documents, found.documents)] if settings.places else []
        ticks = ticks_of(documents)[found.documents]
        return pa.Table.from_arrays(
            [*columns, pa.array(ticks)],
            schema=self.output.append(TICK_FIELD),
        )

    def _of_queries(self, index: QueryIndex, queries: Ints) -> list[pa.Array]:
        """The queries' columns, each query's row read once."""
        places, which = np.unique(queries, return_inverse=True)
        rows = self._rows([index.value(place) for place in places.tolist()])
        return [
            whole(rows.column(column)).take(pa.array(which))
            for column, _ in self.settings.query_columns
        ]


def _bounds(documents: pa.Table, which: Ints) -> list[int]:
    """Where pieces of matches begin and end, by the bytes of the documents in them."""
    if not len(which):
        return [0, 0]
    each = sum(column.nbytes for column in documents.columns) // documents.num_rows
    sizes = np.full(documents.num_rows, each, np.int64)
    for name in documents.column_names:
        if pa.types.is_string(documents[name].type) or pa.types.is_binary(documents[name].type):
            sizes += pc.binary_length(documents[name]).fill_null(0).to_numpy()
    total = np.cumsum(sizes[which])
    cuts = np.searchsorted(total, np.arange(MAX_BYTES, total[-1], MAX_BYTES)).tolist()
    return sorted({0, *cuts, len(which)})


def highlight_lists(texts: Mapping[str, pa.ChunkedArray], found: Matches) -> pa.Array:
    """For each match the places that fit, each with what stands around it."""
    lists = []
    for document, places in zip(found.documents.tolist(), found.highlights, strict=True):
        of = {name: texts[name][document].as_py() for name in {name for name, _, _ in places}}
        lists.append(
            [
                {
                    "column": name,
                    "start": start,
                    "end": end,
                    "snippet": snippet(of[name], start, end),
                }
                for name, start, end in places
            ]
        )
    return pa.array(lists, HIGHLIGHT_TYPE)


def snippet(text: str, start: int, end: int) -> str:
    """What stands around a place, with dots where there is more."""
    first, last = max(0, start - _SNIPPET), min(len(text), end + _SNIPPET)
    return ("…" if first else "") + text[first:last] + ("…" if last < len(text) else "")


def _places(documents: pa.Table, which: Ints) -> pa.Array:
    """Where each document stood in the pipeline's order, as bytes in that order."""
    if not all(
        name in documents.column_names for name in _ORDER
    ):  # a kernel alone, under test: the place in the call
        numbers = np.stack([ticks_of(documents), np.arange(documents.num_rows)], axis=1)
    else:
        numbers = np.stack(
            [
                ticks_of(documents),
                *(documents[name].to_numpy().astype(np.int64) for name in _ORDER),
            ],
            axis=1,
        )
    big = (numbers.astype(np.int64) ^ np.int64(-(2**63))).astype(">i8")
    matrix = np.ascontiguousarray(big).view(np.uint8).reshape(len(numbers), 8 * numbers.shape[1])
    return (
        pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(matrix.shape[1]), len(matrix), [None, pa.py_buffer(matrix)]
        )
        .cast(pa.binary())
        .take(pa.array(which))
    )


# One row a document: the matches that the shards found of it, put together, by query key. It
# remembers nothing: a document's matches are all of one tick.


class GatherKernel:
    """`documents`: the columns of a document. `matches`: those of a match, which become the list in
    `column`, in order of `order`.
    """

    def __init__(
        self, documents: pa.Schema, matches: pa.Schema, order: tuple[str, ...], column: str
    ) -> None:
        self.documents, self.matches, self.order, self.column = documents, matches, order, column

    @cached_property
    def output(self) -> pa.Schema:
        return self.documents.append(pa.field(self.column, pa.list_(pa.struct(list(self.matches)))))

    def step(self, state: KeyedState, rows: pa.Table) -> pa.Table:  # noqa: ARG002
        """Sorted by tick, document and query key; then each run of one document is a row."""
        ticks, place = ticks_of(rows), whole(rows.column(PLACE))
        sorted_by = pa.table({"tick": ticks, "place": place, "key": encode_keys(rows, self.order)})
        order = pc.sort_indices(
            sorted_by, sort_keys=[(name, "ascending") for name in sorted_by.column_names]
        ).to_numpy()
        of = place.dictionary_encode().indices.to_numpy()[order]
        begins = np.flatnonzero(np.append(True, of[1:] != of[:-1])) if len(order) else order
        first = pa.array(order[begins])
        columns = [whole(rows.column(name)).take(first) for name in self.documents.names]
        struct = pa.StructArray.from_arrays(
            [whole(rows.column(name)).take(pa.array(order)) for name in self.matches.names],
            fields=list(self.matches),
        )
        offsets = pa.array(np.append(begins, len(order)).astype(np.int32))
        lists = pa.ListArray.from_arrays(offsets, struct, type=self.output.field(self.column).type)
        schema = self.output.append(TICK_FIELD)
        return pa.Table.from_arrays(
            [*columns, lists, pa.array(ticks[order[begins]])], schema=schema
        )
