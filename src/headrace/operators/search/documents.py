"""Documents, up to some hundred at a time, as the features that they have: for each feature a bit a
document. So one operation asks a question of all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, offsets_of
from headrace.columnar.keys import whole
from headrace.operators.search.analyzer import NO_WORD, Analysis, Tokens
from headrace.operators.search.parser import Language
from headrace.operators.search.syntax import BOOLEAN, DATE, FLOAT, INTEGER, STRING, TIME, Fields
from headrace.operators.search.vocabulary import NONE, TRUE, Terms, Vocabulary

# Documents that carry their words: analysed once, before they go to every shard. Words are columns
# beside the documents' own, a list for each text column.
#
# `SearchKernel.prepare` adds them where documents are sent, `documents` takes them where they
# arrive.


_WORDS, _STARTS, _ENDS = "_words", "_starts", "_ends"


def with_words(rows: pa.Table, language: Language, *, places: bool) -> pa.Table:
    """The documents with their words; with `places`, also where each begins and ends in its
    text.
    """
    for name in language.fields.text:
        tokens = language.analysis.tokens(whole(rows.column(name)))
        offsets = pa.array(tokens.begins.astype(np.int32))
        codes = pa.array(tokens.codes.astype(np.int32), mask=tokens.codes == NO_WORD)
        columns = {_WORDS: pa.DictionaryArray.from_arrays(codes, tokens.terms.array)}
        columns |= (
            {_STARTS: pa.array(tokens.starts), _ENDS: pa.array(tokens.ends)} if places else {}
        )
        for kind, values in columns.items():
            rows = rows.append_column(f"{kind}.{name}", pa.ListArray.from_arrays(offsets, values))
    return rows


def carried_words(rows: pa.Table | pa.RecordBatch, name: str) -> Tokens | None:
    """The words of a text column, if documents carry them."""
    if f"{_WORDS}.{name}" not in rows.schema.names:
        return None
    lists = whole(rows.column(f"{_WORDS}.{name}"))
    words = lists.flatten()
    codes, terms = _used(
        words.indices.fill_null(NO_WORD).to_numpy().astype(np.int64), words.dictionary
    )
    begins = offsets_of(lists)
    begins = begins - begins[0]
    starts, ends = (
        _places(rows, f"{_STARTS}.{name}", len(codes)),
        _places(rows, f"{_ENDS}.{name}", len(codes)),
    )
    return Tokens(
        np.repeat(np.arange(len(lists)), np.diff(begins)), starts, ends, codes, Terms(terms), begins
    )


def _used(codes: Ints, terms: pa.Array) -> tuple[Ints, pa.Array]:
    """A few documents of many share the others' words: those that they do not have are left out."""
    if 2 * len(codes) > len(terms):
        return codes, terms
    used, places = np.unique(codes, return_inverse=True)
    missing = int(len(used) > 0 and used[0] == NO_WORD)
    return places.astype(np.int64) - missing, terms.take(pa.array(used[missing:]))


def _places(rows: pa.Table | pa.RecordBatch, name: str, count: int) -> Ints:
    """Zeros where nobody asks for places."""
    return (
        whole(rows.column(name)).flatten().to_numpy()
        if name in rows.schema.names
        else np.broadcast_to(np.int64(0), count)
    )


Words64 = npt.NDArray[np.uint64]
MAX_DOCUMENTS = 256
MAX_ANALYSED, MAX_TEXT_BYTES = 16_384, 16 << 20
"""Documents that are asked at once, a bit each; and those that are analysed at once: what is found
out about a word is found out for all of them.
"""


@dataclass(frozen=True)
class Column:
    """A filter column as numbers: whole ones or doubles; `there` says which are not null."""

    values: npt.NDArray[np.int64] | npt.NDArray[np.float64]
    there: Mask


@dataclass(frozen=True)
class Documents:
    """Analysed documents: words by text column, values by filter column. Nothing in it depends on
    the queries.
    """

    count: int
    words: Mapping[str, Tokens]
    columns: Mapping[str, Column]

    def slice(self, first: int, count: int) -> Documents:
        words = {name: tokens.slice(first, count) for name, tokens in self.words.items()}
        columns = {
            name: Column(column.values[first : first + count], column.there[first : first + count])
            for name, column in self.columns.items()
        }
        return Documents(count, words, columns)


def analysed(rows: pa.Table | pa.RecordBatch, fields: Fields, analysis: Analysis) -> Documents:
    """The documents' words and values."""
    words = {
        name: carried_words(rows, name) or analysis.tokens(whole(rows.column(name)))
        for name in fields.text
    }
    strings = {
        name: _as_tokens(whole(rows.column(name)))
        for name, kind in fields.filters
        if kind == STRING
    }
    columns = {
        name: _column(whole(rows.column(name)), kind)
        for name, kind in fields.filters
        if kind != STRING
    }
    return Documents(rows.num_rows, {**words, **strings}, columns)


def chunks(
    rows: pa.Table | pa.RecordBatch, fields: Fields, analysis: Analysis
) -> Iterator[tuple[int, Documents]]:
    """Analysed documents in bounded numbers and bytes, each chunk with the place of its first."""
    start = 0
    while start < rows.num_rows:
        length = min(MAX_ANALYSED, rows.num_rows - start)
        while (
            length > 1
            and sum(rows.column(name).slice(start, length).nbytes for name in fields.text)
            > MAX_TEXT_BYTES
        ):
            length //= 2
        documents = analysed(rows.slice(start, length), fields, analysis)
        for first in range(0, length, MAX_DOCUMENTS):
            yield start + first, documents.slice(first, min(MAX_DOCUMENTS, length - first))
        start += length


def _as_tokens(values: pa.Array) -> Tokens:
    """A string column as texts of one word each, the value."""
    rows = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
    distinct = values.cast(pa.string()).drop_null().dictionary_encode()
    ends = pc.utf8_length(values.drop_null()).to_numpy(zero_copy_only=False).astype(np.int64)
    begins = np.searchsorted(rows, np.arange(len(values) + 1))
    return Tokens(
        rows,
        np.zeros(len(rows), np.int64),
        ends,
        distinct.indices.to_numpy().astype(np.int64),
        Terms(distinct.dictionary),
        begins,
    )


def _column(values: pa.Array, kind: str) -> Column:
    there = values.is_valid().to_numpy(zero_copy_only=False)
    if kind == FLOAT:
        numbers = values.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)
        return Column(numbers, there & ~np.isnan(numbers))
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
    return Column(values.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64), there)


class Features:
    """Which of a vocabulary's features some documents have. Those of words are known at once, the
    others when they are asked for (`evaluating`).
    """

    def __init__(self, documents: Documents, vocabulary: Vocabulary) -> None:
        self.documents, self.vocabulary = documents, vocabulary
        self.width = max(1, -(-documents.count // 64))
        self.bits: Words64 = np.zeros((len(vocabulary), self.width), np.uint64)
        self.known = np.ones(len(vocabulary), np.bool_)
        self.known[vocabulary.costly()] = False
        self.everyone = pack_bits(np.ones((1, documents.count), np.bool_), self.width)[0]
        self.bits[TRUE] = self.everyone
        self.present = self._find_words()
        self.masks: dict[int, int] = {}

    def _find_words(self) -> Ints:
        """Set the bits of words; gives the features of words that some document has, a few of them
        twice.
        """
        present = []
        for name, tokens in self.documents.words.items():
            words = tokens.terms.numbers(self.vocabulary)
            scopes = {
                self.vocabulary.fields.numbers[name],
                *([0] if name in self.vocabulary.fields.text else []),
            }
            present += [
                self._set(tokens, self.vocabulary.word_features(scope, words)) for scope in scopes
            ]
        return np.concatenate(present) if present else np.zeros(0, np.int64)

    def _set(self, tokens: Tokens, features: npt.NDArray[np.int32]) -> Ints:
        """Of each word of a text that some query asks for: its feature, and whose it is; each
        feature's documents as a row of booleans, and then of bits.
        """
        asked = features[tokens.codes]
        there = asked != NONE
        asked, documents = asked[there], tokens.rows[there]
        seen = np.zeros(len(self.known), np.bool_)
        seen[asked] = True
        present = np.flatnonzero(seen)
        row_of = np.empty(len(seen), np.int32)
        row_of[present] = np.arange(len(present), dtype=np.int32)
        has = np.zeros((len(present), self.documents.count), np.bool_)
        has[row_of[asked], documents] = True
        self.bits[present] |= pack_bits(has, self.width)
        return present

    def set(self, feature: int, documents: Mask) -> None:
        """What was found out about a feature."""
        self.bits[feature] = pack_bits(documents.reshape(1, -1), self.width)[0]
        self.known[feature] = True

    def mask(self, feature: int) -> int:
        """A feature's bits as one whole number."""
        found = self.masks.get(feature)
        if found is None:
            found = self.masks[feature] = int.from_bytes(self.bits[feature].tobytes(), "little")
        return found


def pack_bits(has: Mask, width: int) -> Words64:
    """Rows of booleans as rows of 64-bit words, the first document in the lowest bit."""
    packed = np.zeros((len(has), width * 8), np.uint8)
    bits = np.packbits(has, axis=1, bitorder="little")
    packed[:, : bits.shape[1]] = bits
    return packed.view(np.uint64).reshape(len(has), width)


def unpack_bits(bits: Words64, count: int) -> Mask:
    """The other way round."""
    found = np.unpackbits(
        bits.view(np.uint8).reshape(len(bits), -1), axis=1, count=count, bitorder="little"
    )
    return found.view(np.bool_)
