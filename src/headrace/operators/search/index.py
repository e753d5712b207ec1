"""The index of queries: segments of falling size, the smallest with the newest changes. An index is a value: a change gives another, which shares what did not change.

So an attempt that failed leaves the index that it started from as it was, and a worker can keep it from batch to batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.operators.buffers import Ints, Mask
from headrace.operators.search.compiling import Compiled, compiled
from headrace.operators.search.documents import MOST_DOCUMENTS, MOST_TEXT_BYTES, Documents, Features, Words64, analysed, unpack_bits
from headrace.operators.search.evaluating import Evaluator
from headrace.operators.search.parsing import Language
from headrace.operators.search.reasons import Highlight, Reasons
from headrace.operators.search.segment import Segment
from headrace.operators.search.syntax import Node, told_leaves
from headrace.operators.search.vocabulary import Vocabulary

Key = bytes
_LEAST, _TIMES = 500, 8
"""A segment up to the first takes newer queries in; one is folded into the next when it is more than a so-manieth of it."""
_GAP = 24


@dataclass(frozen=True)
class Stored:
    """A query as it is kept: its tree, and bytes that the index only hands out again."""

    node: Node
    value: bytes = b""


@dataclass(frozen=True)
class Matches:
    """Which query fits which document: rows of the documents and places of queries in the index, by document and, in it, by query key."""

    documents: Ints
    queries: Ints
    scores: npt.NDArray[np.float64]
    run: int
    """How many queries were looked at, each counted once for each chunk of documents."""
    highlights: tuple[list[Highlight], ...] = ()
    explanations: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Part:
    """A segment with its queries, in order of key. `live`: which are still there; None if all are."""

    keys: tuple[Key, ...]
    stored: tuple[Stored, ...]
    compiled: tuple[Compiled, ...]
    segment: Segment
    live: Mask | None = None

    @cached_property
    def count(self) -> int:
        return len(self.keys) if self.live is None else int(self.live.sum())

    def entries(self) -> Iterator[tuple[Key, Stored, Compiled]]:
        for at, entry in enumerate(zip(self.keys, self.stored, self.compiled, strict=True)):
            if self.live is None or self.live[at]:
                yield entry

    def find(self, key: Key) -> int | None:
        at = bisect_left(self.keys, key)
        there = at < len(self.keys) and self.keys[at] == key and (self.live is None or self.live[at])
        return at if there else None

    def without(self, keys: Mapping[Key, object]) -> _Part:
        gone = [at for key in keys if (at := self.find(key)) is not None]
        if not gone:
            return self
        live = np.ones(len(self.keys), np.bool_) if self.live is None else self.live.copy()
        live[gone] = False
        return replace(self, live=live)


Entries = dict[Key, tuple[Stored, Compiled]]


@dataclass(frozen=True)
class QueryIndex:
    """Stored queries by key. A query's place is its slot in its part, behind those of the parts before."""

    language: Language
    vocabulary: Vocabulary
    parts: tuple[_Part, ...] = ()

    @classmethod
    def empty(cls, language: Language) -> QueryIndex:
        return cls(language, Vocabulary(language.fields))

    def __len__(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, without the texts and trees."""
        return sum(part.segment.nbytes for part in self.parts)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *np.cumsum([len(part.keys) for part in self.parts]).tolist()]

    def _at(self, place: int) -> tuple[_Part, int]:
        number = next(number for number, start in enumerate(self._starts[1:]) if place < start)
        return self.parts[number], place - self._starts[number]

    def key(self, place: int) -> Key:
        part, slot = self._at(place)
        return part.keys[slot]

    def stored(self, place: int) -> Stored:
        part, slot = self._at(place)
        return part.stored[slot]

    def get(self, key: Key) -> Stored | None:
        return next((part.stored[slot] for part in self.parts if (slot := part.find(key)) is not None), None)

    def all_keys(self) -> Iterator[Key]:
        return (key for part in self.parts for key, _, _ in part.entries())

    def changed(self, changes: Mapping[Key, Stored | None]) -> QueryIndex:
        """The index with some queries put, or taken out where there is None."""
        if not changes:
            return self
        parts = [left for part in self.parts if (left := part.without(changes)).count]
        total = sum(len(part.keys) for part in parts)
        vocabulary = self.vocabulary
        if total > _LEAST and 2 * sum(part.count for part in parts) < total:  # many have gone, and what they asked for is forgotten too
            vocabulary = Vocabulary(self.language.fields)
            kept = {key: (stored, compiled(stored.node, vocabulary)) for part in parts for key, stored, _ in part.entries()}
            parts = [_part(kept, vocabulary)] if kept else []
        put = {key: (stored, compiled(stored.node, vocabulary)) for key, stored in changes.items() if stored is not None}
        return replace(self, vocabulary=vocabulary, parts=tuple(_folded(parts, put, vocabulary)))

    # Matching

    def match(self, rows: pa.Table | pa.RecordBatch, *, reasons: bool = False) -> Matches:
        """All matches of some documents, a chunk at a time; with `reasons`, each with what fits where."""
        fields, analysis = self.language.fields, self.language.analysis
        return together([self.match_analysed(analysed(chunk, fields, analysis), first, reasons=reasons) for first, chunk in chunks(rows, fields.text)])

    def match_analysed(self, documents: Documents, first: int = 0, *, reasons: bool = False) -> Matches:
        features = Features(documents, self.vocabulary)
        evaluator = Evaluator(features)
        found = [part.segment.match(features, evaluator, part.live) for part in self.parts]
        pairs = [_pairs(each.slots + start, each.bits, documents.count) for start, each in zip(self._starts, found, strict=False)]
        document = np.concatenate([pair[0] for pair in pairs] or [np.zeros(0, np.int64)])
        query = np.concatenate([pair[1] for pair in pairs] or [np.zeros(0, np.int64)])
        if sum(len(each.slots) > 0 for each in found) > 1:
            order = np.lexsort((self._ranks(query), document))
            document, query = document[order], query[order]
        told = Reasons(evaluator)
        nodes = {place: self.stored(place).node for place in np.unique(query).tolist()} if reasons else {}
        why = [told.of(nodes[place], at) for at, place in zip(document.tolist(), query.tolist(), strict=True)] if reasons else []
        scores = self._scores(evaluator, document, query)
        run = sum(each.run for each in found)
        return Matches(document + first, query, scores, run, tuple(each for each, _ in why), tuple(text for _, text in why))

    def _ranks(self, query: Ints) -> Ints:
        """The order of the queries' keys over all parts: a key of a later part stands before the first of the first part's that is greater."""
        main = len(self.parts[0].keys)
        others, which = np.unique(query[query >= main], return_inverse=True)
        keys = [self.key(place) for place in others.tolist()]
        in_order = sorted(range(len(keys)), key=keys.__getitem__)
        rank = np.empty(len(keys), np.int64)
        rank[in_order] = [(bisect_left(self.parts[0].keys, keys[at]) << _GAP) + number for number, at in enumerate(in_order)]
        ranks = query << _GAP | ((1 << _GAP) - 1)
        ranks[query >= main] = rank[which]
        return ranks

    def _scores(self, evaluator: Evaluator, document: Ints, query: Ints) -> npt.NDArray[np.float64]:
        """Mostly known of the query; else the boosts of what the document has are added up, query by query."""
        fixed = np.concatenate([np.zeros(0), *(part.segment.scores for part in self.parts)])
        scores = fixed[query]
        unknown = np.flatnonzero(np.isnan(scores))
        unknown = unknown[np.argsort(query[unknown], kind="stable")]
        places, begins = np.unique(query[unknown], return_index=True)
        for place, rows in zip(places.tolist(), np.split(unknown, begins[1:]), strict=False):
            scores[rows] = self._score(evaluator, self.stored(place).node)[document[rows]]
        return scores

    @staticmethod
    def _score(evaluator: Evaluator, node: Node) -> npt.NDArray[np.float64]:
        evaluator.ensure_trees(told_leaves(node))
        features = evaluator.features
        total = np.zeros(features.documents.count)
        for leaf in told_leaves(node):
            has = unpack_bits(features.bits[[features.vocabulary.feature(leaf.test)]], features.documents.count)[0]
            total += has * leaf.boost
        return total


def _folded(parts: list[_Part], put: Entries, vocabulary: Vocabulary) -> list[_Part]:
    """New entries as the smallest part; parts that are not much larger are folded into it."""
    if not put:
        return parts
    while parts and (parts[-1].count <= _LEAST or len(put) * _TIMES > parts[-1].count):
        put = {key: (stored, made) for key, stored, made in parts.pop().entries()} | put
    return [*parts, _part(put, vocabulary)]


def _part(entries: Entries, vocabulary: Vocabulary) -> _Part:
    keys = tuple(sorted(entries))
    made = tuple(entries[key][1] for key in keys)
    return _Part(keys, tuple(entries[key][0] for key in keys), made, Segment(made, vocabulary))


def _pairs(places: Ints, bits: Words64, count: int) -> tuple[Ints, Ints]:
    """Documents and queries, document by document."""
    if not len(places):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    has = np.ascontiguousarray(unpack_bits(bits, count).T)
    document, which = np.divmod(np.flatnonzero(has), len(places))
    return document, places[which]


def chunks(rows: pa.Table | pa.RecordBatch, text: Sequence[str]) -> Iterator[tuple[int, pa.Table | pa.RecordBatch]]:
    """Documents in bounded numbers and bytes, each chunk with the place of its first."""
    start = 0
    while start < rows.num_rows:
        length = min(MOST_DOCUMENTS, rows.num_rows - start)
        while length > 1 and sum(rows.column(name).slice(start, length).nbytes for name in text) > MOST_TEXT_BYTES:
            length //= 2
        yield start, rows.slice(start, length)
        start += length


def together(found: Sequence[Matches]) -> Matches:
    if not found:
        return Matches(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), 0)
    return Matches(
        np.concatenate([each.documents for each in found]), np.concatenate([each.queries for each in found]), np.concatenate([each.scores for each in found]),
        sum(each.run for each in found), tuple(each for one in found for each in one.highlights), tuple(each for one in found for each in one.explanations),
    )  # fmt: skip
