"""The index of queries: a large segment and a small one of recent changes. An index is a value: a change gives another, which shares what did not change.

So an attempt that failed leaves the index that it started from as it was, and a worker can keep it from batch to batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from headrace.operators.buffers import Ints, Mask
from headrace.operators.search.compiling import Compiled, compiled
from headrace.operators.search.documents import MOST_DOCUMENTS, MOST_TEXT_BYTES, Documents, Features, analysed, unpack_bits
from headrace.operators.search.evaluating import Evaluator
from headrace.operators.search.parsing import Language
from headrace.operators.search.segment import Segment
from headrace.operators.search.syntax import Node, told_leaves
from headrace.operators.search.vocabulary import Vocabulary

Key = bytes
_LEAST_RECENT, _RECENT_PART = 1_000, 20
"""Recent changes are folded into the large segment when they are more than this, and more than one in so many of all."""
_GAP = 24


@dataclass(frozen=True)
class Matches:
    """Which query fits which document: rows of the documents and places of queries in `QueryIndex.keys`, by document and, in it, by query key."""

    documents: Ints
    queries: Ints
    scores: np.ndarray[tuple[int], np.dtype[np.float64]]
    run: int
    """How many queries were looked at, each counted once for each chunk of documents."""


@dataclass(frozen=True)
class _Part:
    """A segment with its queries, in order of key. `live`: which are still there; None if all are."""

    keys: tuple[Key, ...]
    nodes: tuple[Node, ...]
    compiled: tuple[Compiled, ...]
    segment: Segment
    live: Mask | None = None

    @property
    def count(self) -> int:
        return len(self.keys) if self.live is None else int(self.live.sum())

    def entries(self) -> Iterator[tuple[Key, Node, Compiled]]:
        for at, entry in enumerate(zip(self.keys, self.nodes, self.compiled, strict=True)):
            if self.live is None or self.live[at]:
                yield entry


@dataclass(frozen=True)
class QueryIndex:
    """Stored queries by key."""

    language: Language
    vocabulary: Vocabulary
    main: _Part
    recent: _Part
    places: Mapping[Key, int] = field(repr=False)
    """Of the main part's keys."""

    @classmethod
    def empty(cls, language: Language) -> QueryIndex:
        vocabulary = Vocabulary(language.fields)
        nothing = _part({}, vocabulary)
        return cls(language, vocabulary, nothing, nothing, {})

    def __len__(self) -> int:
        return self.main.count + self.recent.count

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, without the texts and trees."""
        return self.main.segment.nbytes + self.recent.segment.nbytes

    def key(self, place: int) -> Key:
        return self.main.keys[place] if place < len(self.main.keys) else self.recent.keys[place - len(self.main.keys)]

    def node(self, place: int) -> Node:
        return self.main.nodes[place] if place < len(self.main.keys) else self.recent.nodes[place - len(self.main.keys)]

    def changed(self, changes: Mapping[Key, Node | None]) -> QueryIndex:
        """The index with some queries put, or taken out where there is None."""
        if not changes:
            return self
        recent = {key: (node, made) for key, node, made in self.recent.entries() if key not in changes}
        put = {key: (node, compiled(node, self.vocabulary)) for key, node in changes.items() if node is not None}
        gone = [place for key in changes if (place := self.places.get(key)) is not None]
        main = self.main
        if gone:
            live = np.ones(len(main.keys), np.bool_) if main.live is None else main.live.copy()
            live[gone] = False
            main = _Part(main.keys, main.nodes, main.compiled, main.segment, live)
        recent.update(put)
        if len(recent) > max(_LEAST_RECENT, main.count // _RECENT_PART) or (len(main.keys) > _LEAST_RECENT and main.count < len(main.keys) // 2):
            return self._folded(main, recent)
        return QueryIndex(self.language, self.vocabulary, main, _part(recent, self.vocabulary), self.places)

    def _folded(self, main: _Part, recent: Mapping[Key, tuple[Node, Compiled]]) -> QueryIndex:
        """One segment of all. Where many queries have gone, what they asked for is forgotten too."""
        entries = {key: (node, made) for key, node, made in main.entries()} | dict(recent)
        vocabulary = self.vocabulary
        if 2 * main.count < len(main.keys):
            vocabulary = Vocabulary(self.language.fields)
            entries = {key: (node, compiled(node, vocabulary)) for key, (node, _) in entries.items()}
        whole = _part(entries, vocabulary)
        return QueryIndex(self.language, vocabulary, whole, _part({}, vocabulary), {key: place for place, key in enumerate(whole.keys)})

    # Matching

    def match(self, rows: pa.Table | pa.RecordBatch) -> Matches:
        """All matches of some documents, a chunk at a time."""
        found = [self.match_analysed(analysed(chunk, self.language.fields, self.language.analysis), first) for first, chunk in chunks(rows, self.language.fields.text)]
        return together(found)

    def match_analysed(self, documents: Documents, first: int = 0) -> Matches:
        features = Features(documents, self.vocabulary)
        evaluator = Evaluator(features)
        parts = [(0, self.main), *([(len(self.main.keys), self.recent)] if self.recent.keys else [])]
        found = [(offset, part, part.segment.match(features, evaluator, part.live)) for offset, part in parts]
        pairs = [_pairs(each.slots + offset, each.bits, documents.count) for offset, _, each in found]
        document, query = (np.concatenate([pair[at] for pair in pairs]) for at in (0, 1))
        if len(parts) > 1 and len(pairs[1][0]):
            order = np.lexsort((self._rank()[query], document))
            document, query = document[order], query[order]
        scores = self._scores(evaluator, document, query)
        return Matches(document + first, query, scores, sum(each.run for _, _, each in found))

    def _rank(self) -> Ints:
        """The order of keys over both parts: a recent key stands before the first of the main ones that is greater."""
        main = np.arange(len(self.main.keys), dtype=np.int64) << _GAP | ((1 << _GAP) - 1)
        before = np.array([bisect_left(self.main.keys, key) for key in self.recent.keys], np.int64)
        return np.concatenate([main, before << _GAP | np.arange(len(before))])

    def _scores(self, evaluator: Evaluator, document: Ints, query: Ints) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Mostly known of the query; else the boosts of what the document has are added up, query by query."""
        fixed = np.concatenate([self.main.segment.scores, self.recent.segment.scores])
        scores = fixed[query]
        open_ = np.flatnonzero(np.isnan(scores))
        for place in np.unique(query[open_]).tolist():
            rows = open_[query[open_] == place]
            scores[rows] = self._score(evaluator, self.node(place))[document[rows]]
        return scores

    @staticmethod
    def _score(evaluator: Evaluator, node: Node) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        evaluator.ensure_trees(told_leaves(node))
        features = evaluator.features
        total = np.zeros(features.documents.count)
        for leaf in told_leaves(node):
            has = unpack_bits(features.bits[[features.vocabulary.feature(leaf.test)]], features.documents.count)[0]
            total += has * leaf.boost
        return total


def _part(entries: Mapping[Key, tuple[Node, Compiled]], vocabulary: Vocabulary) -> _Part:
    keys = tuple(sorted(entries))
    made = tuple(entries[key][1] for key in keys)
    return _Part(keys, tuple(entries[key][0] for key in keys), made, Segment(made, vocabulary))


def _pairs(places: Ints, bits: np.ndarray[tuple[int, ...], np.dtype[np.uint64]], count: int) -> tuple[Ints, Ints]:
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
        sum(each.run for each in found),
    )  # fmt: skip


