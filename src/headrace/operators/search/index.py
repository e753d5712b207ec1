"""The index of queries: segments of falling size, the smallest with the newest changes (a log-
structured merge). An index is a value: a change returns another index, which shares what did not
change.

So an attempt that failed leaves the index that it started from as it was, and a worker can cache it
from batch to batch (`IndexCache`).
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from sys import getsizeof

import numpy as np
import pyarrow as pa

from headrace._version import __version__
from headrace.columnar.buffers import Ints, Mask, expand_ranges
from headrace.errors import BadSearch, NewerFormat
from headrace.operators.kernel import CachingState, KeyedState
from headrace.operators.search.character_table import FOLDING_VERSION
from headrace.operators.search.documents import (
    DocumentBatch,
    Features,
    Words64,
    analyzed_chunks,
    unpack_bits,
)
from headrace.operators.search.evaluator import Evaluator, Highlight, Highlighter
from headrace.operators.search.index_codec import UnreadableIndex, decode, encode
from headrace.operators.search.parser import Language
from headrace.operators.search.segment import (
    Floats,
    IndexSegment,
    IntLists,
    QueryColumns,
    compile_query,
    concat_columns,
)
from headrace.operators.search.syntax import (
    AllOf,
    AtLeast,
    Everything,
    Exists,
    Fuzzy,
    Leaf,
    Node,
    Not,
    Phrase,
    Prefix,
    Range,
    Regex,
    Wildcard,
    Word,
)
from headrace.operators.search.vocabulary import Vocabulary

logger = logging.getLogger("headrace.search")

Key = bytes
_MIN_SEGMENT_QUERIES, _FOLD_RATIO = 500, 8
"""A segment with at most so many queries takes newer ones in; a segment is folded into the next
larger one when that has less than so many times its queries.
"""
_GAP = 24


@dataclass(frozen=True)
class StoredQuery:
    """A query to be indexed: its text, its tree, and a value that the index returns with it. The
    tree is not kept: it is most of a query's size.
    """

    text: str
    node: Node
    value: bytes = b""

    @classmethod
    def of(cls, language: Language, text: str, value: bytes = b"") -> StoredQuery:
        return cls(text, language.parse(text), value)

    @classmethod
    def of_stored(cls, language: Language, text: str, value: bytes) -> StoredQuery:
        """A query that was accepted when it was stored. If an earlier version accepted what this
        one does not, the query fits nothing, and the log says so: a pipeline goes on without it.
        """
        try:
            return cls.of(language, text, value)
        except BadSearch as error:
            logger.warning(
                "A stored query fits no document any more, until it is stored again: %s", error
            )
            return cls(text, Not(Leaf(Everything())), value)


@dataclass(frozen=True)
class QueryMatches:
    """Which query matches which document: rows of the documents and positions of queries in the
    index, by document and, in it, by query key.
    """

    documents: Ints
    queries: Ints
    scores: Floats
    queries_run: int
    """The number of candidate queries, each counted once for each chunk of documents."""
    highlights: tuple[list[Highlight], ...] = ()
    explanations: tuple[str, ...] = ()

    def slice(self, first: int, last: int) -> QueryMatches:
        """Some of the matches."""
        return QueryMatches(
            documents=self.documents[first:last],
            queries=self.queries[first:last],
            scores=self.scores[first:last],
            queries_run=self.queries_run,
            highlights=self.highlights[first:last],
            explanations=self.explanations[first:last],
        )


@dataclass(frozen=True)
class _QueryEntries:
    """Queries in order of key."""

    keys: tuple[Key, ...]
    texts: tuple[str, ...]
    values: tuple[bytes, ...]
    columns: QueryColumns

    def take(self, which: Ints) -> _QueryEntries:
        indices = which.tolist()
        return _QueryEntries(
            keys=tuple(map(self.keys.__getitem__, indices)),
            texts=tuple(map(self.texts.__getitem__, indices)),
            values=tuple(map(self.values.__getitem__, indices)),
            columns=self.columns.take(which),
        )

    @classmethod
    def of(cls, queries: Mapping[Key, StoredQuery], vocabulary: Vocabulary) -> _QueryEntries:
        keys = tuple(sorted(queries))
        stored = [queries[key] for key in keys]
        return cls(
            keys=keys,
            texts=tuple(query.text for query in stored),
            values=tuple(query.value for query in stored),
            columns=QueryColumns.of([compile_query(query.node, vocabulary) for query in stored]),
        )

    @classmethod
    def concat(cls, parts: Sequence[_QueryEntries]) -> _QueryEntries:
        if len(parts) == 1:
            return parts[0]
        keys = tuple(chain.from_iterable(part.keys for part in parts))
        unsorted = cls(
            keys=keys,
            texts=tuple(chain.from_iterable(part.texts for part in parts)),
            values=tuple(chain.from_iterable(part.values for part in parts)),
            columns=concat_columns([part.columns for part in parts]),
        )
        return unsorted.take(np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64))


@dataclass(frozen=True)
class _SegmentEntries:
    """A segment with its queries. `live` says which of them are not removed; None if all are
    live.
    """

    entries: _QueryEntries
    segment: IndexSegment
    live: Mask | None = None

    @property
    def keys(self) -> tuple[Key, ...]:
        return self.entries.keys

    @cached_property
    def count(self) -> int:
        return len(self.keys) if self.live is None else int(self.live.sum())

    def live_entries(self) -> _QueryEntries:
        """The queries that are not removed."""
        return self.entries if self.live is None else self.entries.take(np.flatnonzero(self.live))

    def find(self, key: Key) -> int | None:
        slot = bisect_left(self.keys, key)
        if slot == len(self.keys) or self.keys[slot] != key:
            return None
        return slot if self.live is None or self.live[slot] else None

    def without(self, keys: Mapping[Key, object]) -> _SegmentEntries:
        gone = [at for key in keys if (at := self.find(key)) is not None]
        if not gone:
            return self
        live = np.ones(len(self.keys), np.bool_) if self.live is None else self.live.copy()
        live[gone] = False
        return replace(self, live=live)


@dataclass(frozen=True)
class QueryIndex:
    """Stored queries by key. The position of a query is its slot in its segment, behind those of
    the segments before.
    """

    language: Language
    vocabulary: Vocabulary
    parts: tuple[_SegmentEntries, ...] = ()

    @classmethod
    def empty(cls, language: Language) -> QueryIndex:
        return cls(language, Vocabulary(language.fields))

    def __len__(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def nbytes(self) -> int:
        """The size of the queries in memory: columns, texts, keys and values."""
        columns = sum(part.segment.nbytes + part.entries.columns.nbytes for part in self.parts)
        return columns + sum(
            8 + getsizeof(each)
            for part in self.parts
            for cached in (part.keys, part.entries.texts, part.entries.values)
            for each in cached
        )

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *np.cumsum([len(part.keys) for part in self.parts]).tolist()]

    def _at(self, position: int) -> tuple[_SegmentEntries, int]:
        number = next(number for number, start in enumerate(self._starts[1:]) if position < start)
        return self.parts[number], position - self._starts[number]

    def key(self, position: int) -> Key:
        part, slot = self._at(position)
        return part.keys[slot]

    def value(self, position: int) -> bytes:
        part, slot = self._at(position)
        return part.entries.values[slot]

    def node(self, position: int) -> Node:
        """The tree of a query, parsed again."""
        part, slot = self._at(position)
        return self.language.parse(part.entries.texts[slot])

    def get(self, key: Key) -> bytes | None:
        """The value of a key's query; None if there is none."""
        return next(
            (
                part.entries.values[slot]
                for part in self.parts
                if (slot := part.find(key)) is not None
            ),
            None,
        )

    def all_keys(self) -> Iterator[Key]:
        return (key for part in self.parts for key in part.live_entries().keys)

    def with_changes(self, changes: Mapping[Key, StoredQuery | None]) -> QueryIndex:
        """The index with some queries stored, or removed where there is None."""
        if not changes:
            return self
        parts = [left for part in self.parts if (left := part.without(changes)).count]
        total = sum(len(part.keys) for part in parts)
        put = {key: stored for key, stored in changes.items() if stored is not None}
        if total > _MIN_SEGMENT_QUERIES and 2 * sum(part.count for part in parts) < total:
            # A new index and vocabulary, once most queries were removed.
            read = {
                key: StoredQuery.of_stored(self.language, text, value)
                for live in [part.live_entries() for part in parts]
                for key, text, value in zip(live.keys, live.texts, live.values, strict=True)
            }
            return QueryIndex.empty(self.language).with_changes({**read, **put})
        return replace(self, parts=tuple(_fold_in(parts, put, self.vocabulary)))

    # Matching

    def match(self, rows: pa.Table | pa.RecordBatch, *, explain: bool = False) -> QueryMatches:
        """All matches of some documents, a chunk at a time; with `explain`, each with its
        highlights and an explanation.
        """
        chunks = analyzed_chunks(rows, self.language.fields, self.language.analyzer)
        return concat_matches(
            [self.match_analyzed(documents, first, explain=explain) for first, documents in chunks]
        )

    def match_analyzed(
        self, documents: DocumentBatch, first: int = 0, *, explain: bool = False
    ) -> QueryMatches:
        """All matches of a chunk of analyzed documents; `first` is the index of its first one."""
        features = Features(documents, self.vocabulary)
        evaluator = Evaluator(features)
        by_segment = [part.segment.match(features, evaluator, part.live) for part in self.parts]
        pairs = [
            _pairs(matches.slots + start, matches.bits, documents.count)
            for start, matches in zip(self._starts, by_segment, strict=False)
        ]
        document = np.concatenate([pair[0] for pair in pairs] or [np.zeros(0, np.int64)])
        query = np.concatenate([pair[1] for pair in pairs] or [np.zeros(0, np.int64)])
        if sum(len(matches.slots) > 0 for matches in by_segment) > 1:
            order = np.lexsort((self._ranks(query), document))
            document, query = document[order], query[order]
        explained: list[tuple[list[Highlight], str]] = []
        if explain:
            highlighter = Highlighter(evaluator)
            nodes = {position: self.node(position) for position in np.unique(query).tolist()}
            explained = [
                highlighter.explain(nodes[position], row)
                for row, position in zip(document.tolist(), query.tolist(), strict=True)
            ]
        return QueryMatches(
            documents=document + first,
            queries=query,
            scores=self._scores(evaluator, document, query),
            queries_run=sum(matches.queries_run for matches in by_segment),
            highlights=tuple(highlights for highlights, _ in explained),
            explanations=tuple(text for _, text in explained),
        )

    def _ranks(self, query: Ints) -> Ints:
        """The order of queries by key over all segments: a key of a later segment stands before the
        first of the first segment's keys that is greater.
        """
        main = len(self.parts[0].keys)
        later, which = np.unique(query[query >= main], return_inverse=True)
        keys = [self.key(position) for position in later.tolist()]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        rank = np.empty(len(keys), np.int64)
        rank[order] = [
            (bisect_left(self.parts[0].keys, keys[index]) << _GAP) + number
            for number, index in enumerate(order)
        ]
        ranks = query << _GAP | ((1 << _GAP) - 1)
        ranks[query >= main] = rank[which]
        return ranks

    def _scores(self, evaluator: Evaluator, document: Ints, query: Ints) -> Floats:
        """The scores of matches: mostly known of the query; else the boosts of the features that
        the document has are added up.
        """
        scores = np.empty(len(query))
        for part, first, end in zip(self.parts, self._starts, self._starts[1:], strict=False):
            of_part = (
                slice(None)
                if len(self.parts) == 1
                else np.flatnonzero((query >= first) & (query < end))
            )
            scores[of_part] = _segment_scores(
                part.entries.columns, evaluator, document[of_part], query[of_part] - first
            )
        return scores


def _segment_scores(
    columns: QueryColumns, evaluator: Evaluator, document: Ints, slots: Ints
) -> Floats:
    scores: Floats = columns.scores[slots]
    unknown = np.flatnonzero(np.isnan(scores))
    if not len(unknown):
        return scores
    starts, lengths = columns.scored.starts[slots[unknown]], columns.scored.lengths[slots[unknown]]
    index = expand_ranges(starts, lengths)
    scored = columns.scored.values[index].astype(np.int64)
    evaluator.ensure(scored)
    row = np.repeat(document[unknown], lengths)
    word, bit = row >> 6, (row & 63).astype(np.uint64)
    has_feature = evaluator.features.bits[scored, word] >> bit & np.uint64(1)
    scores[unknown] = np.add.reduceat(
        has_feature * columns.boosts[index], np.append(0, np.cumsum(lengths))[:-1]
    )
    return scores


def _fold_in(
    parts: list[_SegmentEntries], put: Mapping[Key, StoredQuery], vocabulary: Vocabulary
) -> list[_SegmentEntries]:
    """Add new queries as the smallest segment; segments that are not much larger are folded into
    it.
    """
    if not put:
        return parts
    folded, count = [_QueryEntries.of(put, vocabulary)], len(put)
    while parts and (
        parts[-1].count <= _MIN_SEGMENT_QUERIES or count * _FOLD_RATIO > parts[-1].count
    ):
        folded.append(parts.pop().live_entries())
        count += len(folded[-1].keys)
    entries = _QueryEntries.concat(folded)
    return [*parts, _SegmentEntries(entries, IndexSegment(entries.columns, vocabulary))]


def _pairs(positions: Ints, bits: Words64, count: int) -> tuple[Ints, Ints]:
    """Pairs of documents and queries, document by document."""
    if not len(positions):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    has = np.ascontiguousarray(unpack_bits(bits, count).T)
    document, which = np.divmod(np.flatnonzero(has), len(positions))
    return document, positions[which]


def concat_matches(parts: Sequence[QueryMatches]) -> QueryMatches:
    """The matches of several chunks of documents, concatenated."""
    if not parts:
        return QueryMatches(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), 0)
    return QueryMatches(
        documents=np.concatenate([part.documents for part in parts]),
        queries=np.concatenate([part.queries for part in parts]),
        scores=np.concatenate([part.scores for part in parts]),
        queries_run=sum(part.queries_run for part in parts),
        highlights=tuple(chain.from_iterable(part.highlights for part in parts)),
        explanations=tuple(chain.from_iterable(part.explanations for part in parts)),
    )


# The cache of indexes between batches: the state is the truth; an index is cached in memory and
# checked. The entries in the state:
#
#     query   `q`, key group, key of the query   version; the query's row
#     digest  `s`, key group                     version; a digest over all changes of the group: an
#                                                index built from the same changes is the same
#
# A worker that has an index with other digests reads only the groups that differ. One that has none
# takes the index that another process of the machine has saved.


QUERY, STAMP = b"q", b"s"
VERSION = b"\x01"
MIN_CACHED_INDEXES, MAX_CACHED_QUERIES = 2, 2_000_000
"""The indexes that a process always caches: those of its shards, and the one that a repeated
attempt starts from; and the limit of their queries in sum, beyond these.
"""

MIN_UNSAVED_QUERIES, _UNSAVED_RATIO = 1_000, 8
"""An index is saved when so many queries have changed since, and more than one in so many."""
_WRITTEN_BY = f"search index 3, folding {FOLDING_VERSION}, {__version__}, ".encode()
_SAVED_CLASSES: dict[str, type] = {
    each.__name__: each
    for each in (
        _QueryEntries,
        QueryColumns,
        IntLists,
        Leaf,
        Not,
        AllOf,
        AtLeast,
        Word,
        Phrase,
        Prefix,
        Wildcard,
        Fuzzy,
        Regex,
        Range,
        Exists,
        Everything,
    )
}
"""The classes that a saved index consists of."""

GroupDigests = dict[int, bytes]


@dataclass(frozen=True)
class CachedIndex:
    """An index, the digests of what it was built from, and the number of changes since it was last
    saved.
    """

    index: QueryIndex
    digests: GroupDigests
    unsaved: int = 0


_cached_indexes: OrderedDict[tuple[str, Language, bytes], CachedIndex] = OrderedDict()


class IndexCache:
    """Loads the index of a step for a state, and stores changes of both. `read` returns the keys,
    texts and values of stored rows.
    """

    def __init__(
        self,
        step: str,
        language: Language,
        read: Callable[[list[bytes]], Iterator[tuple[bytes, str, bytes]]],
    ) -> None:
        self._step, self._language, self._read = step, language, read

    def load(self, state: KeyedState) -> CachedIndex:
        """1. Read the digests of the state. 2. A cached index with the same digests is right. 3.
        Else the one with most of them is updated, group by group.
        """
        keys, values, _ = state.scan(STAMP, STAMP + b"\xff")
        digests = {key[1]: _without_version(value) for key, value in zip(keys, values, strict=True)}
        cached = _cached_indexes.get(self._cache_key(digests))
        if cached is None:
            cached = self._write_down(state, self._update(state, digests))
            self._remember(cached)
        return cached

    def _update(self, state: KeyedState, digests: GroupDigests) -> CachedIndex:
        base = (
            self._nearest_cached(digests)
            or self._read_cache(state)
            or CachedIndex(QueryIndex.empty(self._language), {})
        )
        differing = {
            group
            for group in {*digests, *base.digests}
            if digests.get(group) != base.digests.get(group)
        }
        changes: dict[Key, StoredQuery | None] = {
            key: None for key in base.index.all_keys() if key[0] in differing
        }
        for group in sorted(differing & set(digests)):
            _, values, _ = state.scan(_prefix(group), _prefix(group + 1))
            for key, text, value in self._read([_without_version(each) for each in values]):
                name = bytes([group]) + key
                if base.index.get(name) == value:
                    del changes[name]
                else:
                    changes[name] = StoredQuery.of_stored(self._language, text, value)
        return CachedIndex(base.index.with_changes(changes), digests, base.unsaved + len(changes))

    def _nearest_cached(self, digests: GroupDigests) -> CachedIndex | None:
        """The cached index with most groups as they are in the state, or at least of the same
        groups: what did not change in them need not be parsed again.
        """
        of_step = [
            cached
            for (step, language, _), cached in _cached_indexes.items()
            if step == self._step and language == self._language
        ]
        best = max(of_step, key=lambda cached: _similarity(cached.digests, digests), default=None)
        return best if best is not None and set(best.digests) & set(digests) else None

    # What another process finds

    def _read_cache(self, state: KeyedState) -> CachedIndex | None:
        """The index that a process of this machine saved, if it is of this step and these
        settings.
        """
        content = state.read_cache() if isinstance(state, CachingState) else None
        if content is None or not content.startswith(_WRITTEN_BY):
            return None
        try:
            saved = decode(content[len(_WRITTEN_BY) :], _SAVED_CLASSES)
        except UnreadableIndex:
            return None
        step, language, digests, tests, parts = saved
        if (step, language) != (self._step, repr(self._language)):
            return None
        vocabulary = Vocabulary(self._language.fields)
        for test in tests:
            vocabulary.feature(test)
        segments = tuple(
            _SegmentEntries(entries, IndexSegment(entries.columns, vocabulary), live)
            for entries, live in parts
        )
        return CachedIndex(QueryIndex(self._language, vocabulary, segments), digests)

    def _write_down(self, state: KeyedState, cached: CachedIndex) -> CachedIndex:
        """Save the index if much of it is not saved: another process need not parse its queries
        again.
        """
        if (
            cached.unsaved < MIN_UNSAVED_QUERIES
            or cached.unsaved * _UNSAVED_RATIO < len(cached.index)
            or not isinstance(state, CachingState)
        ):
            return cached
        cached = replace(cached, unsaved=0)
        parts = tuple((part.entries, part.live) for part in cached.index.parts)
        tests = tuple(cached.index.vocabulary.tests[Vocabulary.BUILT_IN :])
        saved = (self._step, repr(self._language), cached.digests, tests, parts)
        state.write_cache(_WRITTEN_BY + encode(saved))
        return cached

    # What changes

    def save(
        self,
        state: KeyedState,
        cached: CachedIndex,
        query_index: QueryIndex,
        changes: Mapping[Key, bytes | None],
    ) -> None:
        """Store what changed, and cache the index."""
        if not changes:
            return
        keys = sorted(changes)
        groups = np.array([key[0] for key in keys], np.uint8)
        stored = state.get([QUERY + key for key in keys], groups)
        new = [None if (value := changes[key]) is None else VERSION + value for key in keys]
        changed = [index for index in range(len(keys)) if stored[index] != new[index]]
        state.put(
            [QUERY + keys[index] for index in changed],
            [new[index] for index in changed],
            groups[changed],
        )
        # The digest of each group is over its digest before and its changes.
        touched = sorted({int(group) for group in groups[changed]})
        hashes = {
            group: hashlib.blake2b(cached.digests.get(group, b""), digest_size=16)
            for group in touched
        }
        for index in changed:
            key, value = keys[index], new[index]
            for part in (key, b"\0" if value is None else b"\1" + value):
                hashes[key[0]].update(len(part).to_bytes(8, "big") + part)
        new_digests = {group: digest.digest() for group, digest in hashes.items()}
        digests = {**cached.digests, **new_digests}
        state.put(
            [STAMP + bytes([group]) for group in touched],
            [VERSION + digests[group] for group in touched],
            np.array(touched, np.uint8),
        )
        fresh = CachedIndex(query_index, digests, cached.unsaved + len(changed))
        self._remember(self._write_down(state, fresh))

    def _cache_key(self, digests: GroupDigests) -> tuple[str, Language, bytes]:
        return (
            self._step,
            self._language,
            hashlib.blake2b(repr(sorted(digests.items())).encode(), digest_size=16).digest(),
        )

    def _remember(self, cached: CachedIndex) -> None:
        name = self._cache_key(cached.digests)
        _cached_indexes[name] = cached
        _cached_indexes.move_to_end(name)
        while (
            len(_cached_indexes) > MIN_CACHED_INDEXES
            and sum(len(each.index) for each in _cached_indexes.values()) > MAX_CACHED_QUERIES
        ):
            _cached_indexes.popitem(last=False)


def _similarity(one: GroupDigests, other: GroupDigests) -> tuple[int, int, int]:
    """How many groups have the same queries, how many may have some of the same, and how many have
    none.
    """
    return (
        sum(other.get(group) == digest for group, digest in one.items()),
        len(set(one) & set(other)),
        -len(one),
    )


def clear_index_cache() -> None:
    """Forget all cached indexes, for tests: as in a process that has just begun."""
    _cached_indexes.clear()


def _without_version(value: bytes) -> bytes:
    if value[:1] != VERSION:
        raise NewerFormat(
            f"A stored query has the format {value[0]}, and this Headrace knows 1.",
            fix="install a newer Headrace.",
        )
    return value[1:]


def _prefix(group: int) -> bytes:
    return QUERY + bytes([group])


def as_large_binary(values: list[bytes]) -> pa.Array:
    return pa.array(values, pa.large_binary())
