"""Batches of documents and their features: for each feature of the vocabulary a bit per document,
so that one operation answers a question for all of them at once.

    documents        0: "storm and wind"    1: "wind"    2: "storm"
    feature "storm"  bits 101 (document 0 is the lowest bit)
    feature "wind"   bits 011
    storm AND wind   101 & 011 = 001: document 0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, offsets_of
from headrace.columnar.keys import as_array
from headrace.operators.search.analyzer import NO_WORD, Analyzer, Tokens
from headrace.operators.search.parser import Language
from headrace.operators.search.syntax import BOOLEAN, DATE, FLOAT, INTEGER, STRING, TIME, Fields
from headrace.operators.search.vocabulary import ABSENT, TRUE, Terms, Vocabulary

# Words as columns: documents are analyzed once, before they go to every shard.
# `SearchKernel.prepare` adds the columns where documents are sent, `read_token_columns` reads them
# where they arrive.


_WORDS, _STARTS, _ENDS = "_words", "_starts", "_ends"


def add_token_columns(rows: pa.Table, language: Language, *, with_positions: bool) -> pa.Table:
    """Add the words of each text column as a column of lists; with `with_positions` also where each
    word begins and ends in its text.
    """
    for name in language.fields.text:
        tokens = language.analyzer.tokens(as_array(rows.column(name)))
        offsets = pa.array(tokens.row_starts.astype(np.int32))
        codes = pa.array(tokens.codes.astype(np.int32), mask=tokens.codes == NO_WORD)
        columns = {_WORDS: pa.DictionaryArray.from_arrays(codes, tokens.terms.array)}
        columns |= (
            {_STARTS: pa.array(tokens.starts), _ENDS: pa.array(tokens.ends)}
            if with_positions
            else {}
        )
        for kind, values in columns.items():
            rows = rows.append_column(f"{kind}.{name}", pa.ListArray.from_arrays(offsets, values))
    return rows


def read_token_columns(rows: pa.Table | pa.RecordBatch, name: str) -> Tokens | None:
    """The words of a text column, if the documents have a column of them; else None."""
    if f"{_WORDS}.{name}" not in rows.schema.names:
        return None
    lists = as_array(rows.column(f"{_WORDS}.{name}"))
    words = lists.flatten()
    codes: Ints = words.indices.fill_null(NO_WORD).to_numpy().astype(np.int64)
    terms = words.dictionary
    if 2 * len(codes) <= len(terms):
        # These are some of many documents: the terms that they do not have are left out.
        used, new_codes = np.unique(codes, return_inverse=True)
        missing = int(len(used) > 0 and used[0] == NO_WORD)
        codes, terms = new_codes.astype(np.int64) - missing, terms.take(pa.array(used[missing:]))
    row_starts = offsets_of(lists)
    row_starts = row_starts - row_starts[0]
    starts, ends = (
        _positions(rows, f"{_STARTS}.{name}", len(codes)),
        _positions(rows, f"{_ENDS}.{name}", len(codes)),
    )
    return Tokens(
        rows=np.repeat(np.arange(len(lists)), np.diff(row_starts)),
        starts=starts,
        ends=ends,
        codes=codes,
        terms=Terms(terms),
        row_starts=row_starts,
    )


def _positions(rows: pa.Table | pa.RecordBatch, name: str, count: int) -> Ints:
    """The positions of words; zeros if the documents do not have them."""
    return (
        as_array(rows.column(name)).flatten().to_numpy()
        if name in rows.schema.names
        else np.broadcast_to(np.int64(0), count)
    )


Words64 = npt.NDArray[np.uint64]
MAX_DOCUMENTS = 256
MAX_ANALYZED, MAX_TEXT_BYTES = 16_384, 16 << 20
"""Documents that are matched at once, a bit each; and documents that are analyzed at once, which
share what is known about a word.
"""


@dataclass(frozen=True)
class FilterColumn:
    """A filter column as numbers, integers or doubles, and which values are not null."""

    values: npt.NDArray[np.int64] | npt.NDArray[np.float64]
    is_valid: Mask


@dataclass(frozen=True)
class DocumentBatch:
    """Analyzed documents: words by text column, values by filter column. Nothing in it depends on
    the queries.
    """

    count: int
    words: Mapping[str, Tokens]
    columns: Mapping[str, FilterColumn]

    def slice(self, first: int, count: int) -> DocumentBatch:
        words = {name: tokens.slice(first, count) for name, tokens in self.words.items()}
        columns = {
            name: FilterColumn(
                column.values[first : first + count], column.is_valid[first : first + count]
            )
            for name, column in self.columns.items()
        }
        return DocumentBatch(count, words, columns)


def analyze(rows: pa.Table | pa.RecordBatch, fields: Fields, analyzer: Analyzer) -> DocumentBatch:
    """Analyze documents: their words and values."""
    words = {
        name: read_token_columns(rows, name) or analyzer.tokens(as_array(rows.column(name)))
        for name in fields.text
    }
    strings = {
        name: _as_tokens(as_array(rows.column(name)))
        for name, kind in fields.filters
        if kind == STRING
    }
    columns = {
        name: _column(as_array(rows.column(name)), kind)
        for name, kind in fields.filters
        if kind != STRING
    }
    return DocumentBatch(rows.num_rows, {**words, **strings}, columns)


def analyzed_chunks(
    rows: pa.Table | pa.RecordBatch, fields: Fields, analyzer: Analyzer
) -> Iterator[tuple[int, DocumentBatch]]:
    """Analyze documents in chunks of bounded number and bytes; each chunk comes with the index of
    its first document.
    """
    start = 0
    while start < rows.num_rows:
        length = min(MAX_ANALYZED, rows.num_rows - start)
        while (
            length > 1
            and sum(rows.column(name).slice(start, length).nbytes for name in fields.text)
            > MAX_TEXT_BYTES
        ):
            length //= 2
        documents = analyze(rows.slice(start, length), fields, analyzer)
        for first in range(0, length, MAX_DOCUMENTS):
            yield start + first, documents.slice(first, min(MAX_DOCUMENTS, length - first))
        start += length


def _as_tokens(values: pa.Array) -> Tokens:
    """A string column as texts of one word each, the value."""
    rows = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
    distinct = values.cast(pa.string()).drop_null().dictionary_encode()
    ends = pc.utf8_length(values.drop_null()).to_numpy(zero_copy_only=False).astype(np.int64)
    return Tokens(
        rows=rows,
        starts=np.zeros(len(rows), np.int64),
        ends=ends,
        codes=distinct.indices.to_numpy().astype(np.int64),
        terms=Terms(distinct.dictionary),
        row_starts=np.searchsorted(rows, np.arange(len(values) + 1)),
    )


def _column(values: pa.Array, kind: str) -> FilterColumn:
    is_valid = values.is_valid().to_numpy(zero_copy_only=False)
    if kind == FLOAT:
        numbers = values.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)
        return FilterColumn(numbers, is_valid & ~np.isnan(numbers))
    if kind == TIME:
        values = values.cast(pa.timestamp("us", values.type.tz)).cast(pa.int64())
    elif kind == DATE:
        values = values.cast(pa.date32()).cast(pa.int32())
    elif kind in {BOOLEAN, INTEGER}:
        values = (
            values.cast(pa.int64())
            if not pa.types.is_uint64(values.type)
            else pc.min_element_wise(values, pa.scalar(2**63 - 1, pa.uint64())).cast(pa.int64())
        )
    return FilterColumn(
        values.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64), is_valid
    )


class Features:
    """The features of a vocabulary that some documents have. Those of words are known at once, the
    others when a query needs them (`evaluator.py`).
    """

    def __init__(self, documents: DocumentBatch, vocabulary: Vocabulary) -> None:
        self.documents, self.vocabulary = documents, vocabulary
        self.width = max(1, -(-documents.count // 64))
        self.bits: Words64 = np.zeros((len(vocabulary), self.width), np.uint64)
        self.is_known = np.ones(len(vocabulary), np.bool_)
        self.is_known[vocabulary.costly_features()] = False
        self.all_documents = pack_bits(np.ones((1, documents.count), np.bool_), self.width)[0]
        self.bits[TRUE] = self.all_documents
        # The bits of words, and the features of words that some document has, some perhaps twice.
        present = []
        for name, tokens in self.documents.words.items():
            words = tokens.terms.word_numbers(self.vocabulary)
            scopes = {
                self.vocabulary.fields.numbers[name],
                *([0] if name in self.vocabulary.fields.text else []),
            }
            present += [
                self._set(tokens, self.vocabulary.word_features(scope, words)) for scope in scopes
            ]
        self.present = np.concatenate(present) if present else np.zeros(0, np.int64)
        self.masks: dict[int, int] = {}

    def _set(self, tokens: Tokens, features: npt.NDArray[np.int32]) -> Ints:
        """Set the bits of the features of a field's words; returns those that some document has."""
        feature = features[tokens.codes]
        is_used = feature != ABSENT
        feature, document = feature[is_used], tokens.rows[is_used]
        is_present = np.zeros(len(self.is_known), np.bool_)
        is_present[feature] = True
        present = np.flatnonzero(is_present)
        row_of = np.empty(len(is_present), np.int32)
        row_of[present] = np.arange(len(present), dtype=np.int32)
        has = np.zeros((len(present), self.documents.count), np.bool_)
        has[row_of[feature], document] = True
        self.bits[present] |= pack_bits(has, self.width)
        return present

    def set(self, feature: int, documents: Mask) -> None:
        """Set the documents that have a feature."""
        self.bits[feature] = pack_bits(documents.reshape(1, -1), self.width)[0]
        self.is_known[feature] = True

    def mask(self, feature: int) -> int:
        """The bits of a feature as one integer."""
        mask = self.masks.get(feature)
        if mask is None:
            mask = self.masks[feature] = int.from_bytes(self.bits[feature].tobytes(), "little")
        return mask


def pack_bits(has: Mask, width: int) -> Words64:
    """Rows of booleans as rows of 64-bit words, the first document in the lowest bit."""
    packed = np.zeros((len(has), width * 8), np.uint8)
    bits = np.packbits(has, axis=1, bitorder="little")
    packed[:, : bits.shape[1]] = bits
    return packed.view(np.uint64).reshape(len(has), width)


def unpack_bits(bits: Words64, count: int) -> Mask:
    """Rows of 64-bit words as rows of booleans, the inverse of `pack_bits`."""
    unpacked = np.unpackbits(
        bits.view(np.uint8).reshape(len(bits), -1), axis=1, count=count, bitorder="little"
    )
    return unpacked.view(np.bool_)
