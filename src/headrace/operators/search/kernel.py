"""The kernel of searches: stored queries, which are a table, match passing documents.

Example: queries by `id`, documents with a `title`.

    tick 1   queries: insert (1, "storm AND wind"), insert (2, "st?rm")
             state: both queries, by key; index: query 1 under one of its words, query 2 unindexed
    tick 2   documents: "Storm, and wind", "A stormy day", "storm"
             emits  ("Storm, and wind", id=1, score=2.0), ("Storm, and wind", id=2, score=1.0),
                    ("storm", id=2, score=1.0)
    tick 3   queries: delete (1); documents: "wind and storm"
             emits  ("wind and storm", id=2, score=1.0)

A document is matched with the queries that are stored at the end of its tick's changes. A shard has
the queries of its key groups and sees every document. A query that cannot be parsed goes to the
dead letters, with position and reason, and is not stored.
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
from headrace.columnar.columns import CHANGE_TYPE, DELETE, TICK_FIELD, UPDATE_PREIMAGE
from headrace.columnar.keys import as_array, encode_keys, key_groups, key_list
from headrace.columnar.lookup import group_start_mask
from headrace.errors import BadSearch
from headrace.operators.joins.sides import ticks_of
from headrace.operators.kernel import DeadLetterBuffer, KeyedState, Watermarks
from headrace.operators.search.documents import add_token_columns
from headrace.operators.search.index import (
    QUERY,
    IndexCache,
    Key,
    QueryIndex,
    QueryMatches,
    StoredQuery,
    as_large_binary,
    concat_matches,
)
from headrace.operators.search.parser import Language

SCORE, HIGHLIGHTS, EXPLANATION, DOCUMENT_ID = "score", "highlights", "explanation", "_document"
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
_SNIPPET_CONTEXT = 40
MAX_BYTES = 256 << 20
_ORDER = ("_rank", "_partition", "_offset")


@dataclass(frozen=True)
class SearchSettings:
    """A search as it was declared. `query_columns` are the queries' columns in the result, each
    with its name there; the key is among them.
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
    with_document_ids: bool = False
    """Whether a hidden column identifies the document, for the step that gathers its matches."""

    @property
    def explains_matches(self) -> bool:
        """Whether the positions and reasons of each match are needed."""
        return self.highlights or self.explain

    @cached_property
    def output(self) -> pa.Schema:
        query_fields = [
            pa.field(name, self.queries.field(column).type) for column, name in self.query_columns
        ]
        more = [pa.field(HIGHLIGHTS, HIGHLIGHT_TYPE)] if self.highlights else []
        more += [pa.field(EXPLANATION, pa.string())] if self.explain else []
        more += [pa.field(DOCUMENT_ID, pa.binary())] if self.with_document_ids else []
        return pa.schema([*self.documents, *query_fields, pa.field(SCORE, pa.float64()), *more])


class SearchKernel:
    """The kernel of a search. Its inputs are the documents and the changes of the queries. `counts`
    has the number of queries that were run in a batch.
    """

    hold_us = 0
    gauges = {"queries_stored": QUERY}  # noqa: RUF012

    def __init__(self, settings: SearchSettings) -> None:
        self.settings = settings
        columns = [settings.query, *settings.key, *(column for column, _ in settings.query_columns)]
        self._stored_fields = pa.schema(
            [settings.queries.field(name) for name in dict.fromkeys(columns)]
        )
        self._index_cache = IndexCache(settings.step, settings.language, self._read_queries)
        self.dead_letters = DeadLetterBuffer(settings.queries)
        self.counts: dict[str, int] = {}

    @property
    def output(self) -> pa.Schema:
        return self.settings.output

    def due(self, state: KeyedState) -> int | None:  # noqa: ARG002
        """None: no row waits for a watermark."""
        return None

    def prepare(self, rows: pa.Table) -> pa.Table:
        """Add the words of documents, so that they are analyzed once and not in every shard."""
        return add_token_columns(
            rows, self.settings.language, with_positions=self.settings.explains_matches
        )

    def step_timed(
        self,
        state: KeyedState,
        inputs: Sequence[pa.Table],
        watermarks: Sequence[Watermarks],  # noqa: ARG002
    ) -> pa.Table:
        """1. Load the index. 2. For each tick in which queries change: match the documents before
        it, then apply the changes. 3. Match the remaining documents. 4. Store what changed.
        """
        documents, changes = inputs
        self.counts = {"queries_run": 0}
        cached = self._index_cache.load(state)
        index, results, start = cached.index, [], 0
        ticks, put = ticks_of(documents), dict[Key, bytes | None]()
        for tick, part in self._by_tick(changes):
            end = int(np.searchsorted(ticks, tick))
            results.append(self._match_documents(index, documents.slice(start, end - start)))
            start = end
            fresh = self._parse_changes(part)
            index = index.with_changes(fresh)
            put |= {key: None if stored is None else stored.value for key, stored in fresh.items()}
        results.append(self._match_documents(index, documents.slice(start)))
        self._index_cache.save(state, cached, index, put)
        return pa.concat_tables(results)

    @staticmethod
    def _by_tick(changes: pa.Table) -> Iterator[tuple[int, pa.Table]]:
        ticks = ticks_of(changes)
        distinct, starts = np.unique(ticks, return_index=True)
        ends = np.append(starts[1:], len(ticks))[: len(distinct)]
        for tick, start, end in zip(distinct.tolist(), starts.tolist(), ends.tolist(), strict=True):
            yield tick, changes.slice(start, end - start)

    # Queries

    def _parse_changes(self, changes: pa.Table) -> dict[Key, StoredQuery | None]:
        """The queries that a tick stores, or None for those that it removes, by key. A query that
        cannot be parsed goes to the dead letters, and its key has no query then.
        """
        keys = encode_keys(changes, self.settings.key)
        groups, kinds = key_groups(keys).tolist(), changes[CHANGE_TYPE].to_pylist()
        columns = [as_array(changes.column(name)) for name in self._stored_fields.names]
        values: list[bytes] = row_codec.encode(
            pa.StructArray.from_arrays(columns, fields=list(self._stored_fields))
        )
        queries: dict[Key, StoredQuery | None] = {}
        refused: dict[str, list[int]] = {}
        texts = changes[self.settings.query].to_pylist()
        for row, (key, kind) in enumerate(zip(key_list(keys), kinds, strict=True)):
            name = bytes([groups[row]]) + key
            if kind == UPDATE_PREIMAGE:
                continue
            queries[name] = None
            if kind == DELETE:
                continue
            try:
                queries[name] = StoredQuery.of(self.settings.language, texts[row], values[row])
            except BadSearch as error:
                refused.setdefault(error.message, []).append(row)
        for reason, rows in refused.items():
            self.dead_letters.add(changes, np.array(rows), self.settings.query, reason)
        return queries

    def _decode_queries(self, values: list[bytes]) -> pa.Table:
        struct = row_codec.decode_array(
            as_large_binary(values), pa.struct(list(self._stored_fields))
        )
        return pa.Table.from_arrays(
            [struct.field(index) for index in range(len(self._stored_fields))],
            schema=self._stored_fields,
        )

    def _read_queries(self, values: list[bytes]) -> Iterator[tuple[bytes, str, bytes]]:
        """The key, text and bytes of stored queries."""
        rows = self._decode_queries(values)
        return zip(
            key_list(encode_keys(rows, self.settings.key)),
            rows[self.settings.query].to_pylist(),
            values,
            strict=True,
        )

    # Matches

    def _match_documents(self, index: QueryIndex, documents: pa.Table) -> pa.Table:
        """The matches of some documents, each with its document's columns: in parts that fit into
        Arrow's columns, since a document may match thousands of queries.
        """
        matches = (
            index.match(documents, explain=self.settings.explains_matches)
            if len(index) and documents.num_rows
            else concat_matches([])
        )
        self.counts["queries_run"] += matches.queries_run
        return pa.concat_tables(
            [
                self._result_rows(index, documents, matches.slice(first, last))
                for first, last in pairwise(_part_bounds(documents, matches.documents))
            ]
        )

    def _result_rows(
        self, index: QueryIndex, documents: pa.Table, matches: QueryMatches
    ) -> pa.Table:
        settings = self.settings
        which = pa.array(matches.documents)
        columns = [
            as_array(documents.column(name)).take(which) for name in settings.documents.names
        ]
        columns += [*self._query_columns(index, matches.queries), pa.array(matches.scores)]
        texts = {name: documents.column(name) for name in settings.language.fields.text}
        columns += [highlight_lists(texts, matches)] if settings.highlights else []
        columns += [pa.array(matches.explanations, pa.string())] if settings.explain else []
        columns += (
            [_document_ids(documents, matches.documents)] if settings.with_document_ids else []
        )
        ticks = ticks_of(documents)[matches.documents]
        return pa.Table.from_arrays(
            [*columns, pa.array(ticks)],
            schema=self.output.append(TICK_FIELD),
        )

    def _query_columns(self, index: QueryIndex, queries: Ints) -> list[pa.Array]:
        """The queries' columns of each match; the row of a query is decoded once."""
        positions, which = np.unique(queries, return_inverse=True)
        rows = self._decode_queries([index.value(position) for position in positions.tolist()])
        return [
            as_array(rows.column(column)).take(pa.array(which))
            for column, _ in self.settings.query_columns
        ]


def _part_bounds(documents: pa.Table, which: Ints) -> list[int]:
    """Where parts of matches begin and end, by the bytes of the documents in them."""
    if not len(which):
        return [0, 0]
    mean_bytes = sum(column.nbytes for column in documents.columns) // documents.num_rows
    sizes = np.full(documents.num_rows, mean_bytes, np.int64)
    for name in documents.column_names:
        if pa.types.is_string(documents[name].type) or pa.types.is_binary(documents[name].type):
            sizes += pc.binary_length(documents[name]).fill_null(0).to_numpy()
    total = np.cumsum(sizes[which])
    cuts = np.searchsorted(total, np.arange(MAX_BYTES, total[-1], MAX_BYTES)).tolist()
    return sorted({0, *cuts, len(which)})


def highlight_lists(texts: Mapping[str, pa.ChunkedArray], matches: QueryMatches) -> pa.Array:
    """For each match the positions that match, each with a snippet around it."""
    lists = []
    for document, highlights in zip(matches.documents.tolist(), matches.highlights, strict=True):
        names = {name for name, _, _ in highlights}
        text_of = {name: texts[name][document].as_py() for name in names}
        lists.append(
            [
                {
                    "column": name,
                    "start": start,
                    "end": end,
                    "snippet": snippet(text_of[name], start, end),
                }
                for name, start, end in highlights
            ]
        )
    return pa.array(lists, HIGHLIGHT_TYPE)


def snippet(text: str, start: int, end: int) -> str:
    """The text around a highlight, with an ellipsis where there is more."""
    first, last = max(0, start - _SNIPPET_CONTEXT), min(len(text), end + _SNIPPET_CONTEXT)
    return ("…" if first else "") + text[first:last] + ("…" if last < len(text) else "")


def _document_ids(documents: pa.Table, which: Ints) -> pa.Array:
    """The position of each document in the pipeline's order, as bytes in that order."""
    if all(name in documents.column_names for name in _ORDER):
        order = [documents[name].to_numpy().astype(np.int64) for name in _ORDER]
    else:  # a kernel alone, under test: the index in the batch
        order = [np.arange(documents.num_rows)]
    numbers = np.stack([ticks_of(documents), *order], axis=1)
    big = (numbers.astype(np.int64) ^ np.int64(-(2**63))).astype(">i8")
    matrix = np.ascontiguousarray(big).view(np.uint8).reshape(len(numbers), 8 * numbers.shape[1])
    return (
        pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(matrix.shape[1]), len(matrix), [None, pa.py_buffer(matrix)]
        )
        .cast(pa.binary())
        .take(pa.array(which))
    )


# Gathering


class GatherKernel:
    """Gathers the matches of each document, which come from all shards, into one row. It has no
    state: the matches of a document are all of one tick.

    `documents` are the columns of a document, `matches` those of a match, which become the list in
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
        """Sort by tick, document and query key; then each run of one document is a row."""
        ticks, document_id = ticks_of(rows), as_array(rows.column(DOCUMENT_ID))
        sorted_by = pa.table(
            {"tick": ticks, "document": document_id, "key": encode_keys(rows, self.order)}
        )
        order = pc.sort_indices(
            sorted_by, sort_keys=[(name, "ascending") for name in sorted_by.column_names]
        ).to_numpy()
        codes = document_id.dictionary_encode().indices.to_numpy()[order]
        starts = np.flatnonzero(group_start_mask(codes)) if len(order) else order
        first = pa.array(order[starts])
        columns = [as_array(rows.column(name)).take(first) for name in self.documents.names]
        struct = pa.StructArray.from_arrays(
            [as_array(rows.column(name)).take(pa.array(order)) for name in self.matches.names],
            fields=list(self.matches),
        )
        offsets = pa.array(np.append(starts, len(order)).astype(np.int32))
        lists = pa.ListArray.from_arrays(offsets, struct, type=self.output.field(self.column).type)
        schema = self.output.append(TICK_FIELD)
        return pa.Table.from_arrays(
            [*columns, lists, pa.array(ticks[order[starts]])], schema=schema
        )
