"""The index of queries: segments of falling size, the smallest with the newest changes. An index is
a value: a change gives another, which shares what did not change.

So an attempt that failed leaves the index that it started from as it was, and a worker can keep it
from batch to batch.
"""

from __future__ import annotations

import hashlib
import pickle
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
from headrace.columnar.buffers import Ints, Mask, runs
from headrace.errors import NewerFormat
from headrace.operators.kernel import KeyedState, Remembering
from headrace.operators.search import segment
from headrace.operators.search.documents import Documents, Features, Words64, chunks, unpack_bits
from headrace.operators.search.evaluator import Evaluator, Highlight, Reasons
from headrace.operators.search.parser import Language
from headrace.operators.search.segment import Columns, Floats, Segment, compiled
from headrace.operators.search.syntax import Node
from headrace.operators.search.vocabulary import Vocabulary

Key = bytes
_LEAST, _TIMES = 500, 8
"""A segment up to the first takes newer queries in; one is folded into the next when it is more
than a so-manieth of it.
"""
_GAP = 24


@dataclass(frozen=True)
class Stored:
    """A query to be kept: its text and its tree, and bytes that the index only hands out again. The
    tree is not kept: it is most of what a query weighs.
    """

    text: str
    node: Node
    value: bytes = b""

    @classmethod
    def of(cls, language: Language, text: str, value: bytes = b"") -> Stored:
        return cls(text, language.parse(text), value)


@dataclass(frozen=True)
class Matches:
    """Which query fits which document: rows of the documents and places of queries in the index, by
    document and, in it, by query key.
    """

    documents: Ints
    queries: Ints
    scores: Floats
    run: int
    """How many queries were looked at, each counted once for each chunk of documents."""
    highlights: tuple[list[Highlight], ...] = ()
    explanations: tuple[str, ...] = ()

    def slice(self, first: int, last: int) -> Matches:
        """Some of them."""
        mine = slice(first, last)
        return Matches(
            self.documents[mine],
            self.queries[mine],
            self.scores[mine],
            self.run,
            self.highlights[mine],
            self.explanations[mine],
        )


@dataclass(frozen=True)
class _Entries:
    """Queries in order of key."""

    keys: tuple[Key, ...]
    texts: tuple[str, ...]
    values: tuple[bytes, ...]
    columns: Columns

    def take(self, which: Ints) -> _Entries:
        at = which.tolist()
        return _Entries(
            tuple(map(self.keys.__getitem__, at)),
            tuple(map(self.texts.__getitem__, at)),
            tuple(map(self.values.__getitem__, at)),
            self.columns.take(which),
        )

    @classmethod
    def of(cls, queries: Mapping[Key, Stored], vocabulary: Vocabulary) -> _Entries:
        keys = tuple(sorted(queries))
        stored = [queries[key] for key in keys]
        made = Columns.of([compiled(each.node, vocabulary) for each in stored])
        return cls(
            keys, tuple(each.text for each in stored), tuple(each.value for each in stored), made
        )

    @classmethod
    def together(cls, parts: Sequence[_Entries]) -> _Entries:
        if len(parts) == 1:
            return parts[0]
        keys, texts, values = (
            tuple(chain.from_iterable(each))
            for each in zip(*((part.keys, part.texts, part.values) for part in parts), strict=True)
        )
        mixed = cls(keys, texts, values, segment.together([part.columns for part in parts]))
        return mixed.take(np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64))


@dataclass(frozen=True)
class _Part:
    """A segment with its queries. `live`: which are still there; None if all are."""

    entries: _Entries
    segment: Segment
    live: Mask | None = None

    @property
    def keys(self) -> tuple[Key, ...]:
        return self.entries.keys

    @cached_property
    def count(self) -> int:
        return len(self.keys) if self.live is None else int(self.live.sum())

    def left(self) -> _Entries:
        """The queries that are still there."""
        return self.entries if self.live is None else self.entries.take(np.flatnonzero(self.live))

    def find(self, key: Key) -> int | None:
        at = bisect_left(self.keys, key)
        there = (
            at < len(self.keys) and self.keys[at] == key and (self.live is None or self.live[at])
        )
        return at if there else None

    def without(self, keys: Mapping[Key, object]) -> _Part:
        gone = [at for key in keys if (at := self.find(key)) is not None]
        if not gone:
            return self
        live = np.ones(len(self.keys), np.bool_) if self.live is None else self.live.copy()
        live[gone] = False
        return replace(self, live=live)


@dataclass(frozen=True)
class QueryIndex:
    """Stored queries by key. A query's place is its slot in its part, behind those of the parts
    before.
    """

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
        """What the queries weigh in memory: columns, texts, keys and values."""
        columns = sum(part.segment.nbytes + part.entries.columns.nbytes for part in self.parts)
        return columns + sum(
            8 + getsizeof(each)
            for part in self.parts
            for kept in (part.keys, part.entries.texts, part.entries.values)
            for each in kept
        )

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *np.cumsum([len(part.keys) for part in self.parts]).tolist()]

    def _at(self, place: int) -> tuple[_Part, int]:
        number = next(number for number, start in enumerate(self._starts[1:]) if place < start)
        return self.parts[number], place - self._starts[number]

    def key(self, place: int) -> Key:
        part, slot = self._at(place)
        return part.keys[slot]

    def value(self, place: int) -> bytes:
        part, slot = self._at(place)
        return part.entries.values[slot]

    def node(self, place: int) -> Node:
        """A query's tree, read again."""
        part, slot = self._at(place)
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
        return (key for part in self.parts for key in part.left().keys)

    def changed(self, changes: Mapping[Key, Stored | None]) -> QueryIndex:
        """The index with some queries put, or taken out where there is None."""
        if not changes:
            return self
        parts = [left for part in self.parts if (left := part.without(changes)).count]
        total = sum(len(part.keys) for part in parts)
        put = {key: stored for key, stored in changes.items() if stored is not None}
        if total > _LEAST and 2 * sum(part.count for part in parts) < total:
            return self._anew([part.left() for part in parts], put)
        return replace(self, parts=tuple(_folded(parts, put, self.vocabulary)))

    def _anew(self, left: Sequence[_Entries], put: Mapping[Key, Stored]) -> QueryIndex:
        """Many have gone, and what they asked for is forgotten too."""
        read = {
            key: Stored.of(self.language, text, value)
            for each in left
            for key, text, value in zip(each.keys, each.texts, each.values, strict=True)
        }
        return QueryIndex.empty(self.language).changed({**read, **put})

    # Matching

    def match(self, rows: pa.Table | pa.RecordBatch, *, reasons: bool = False) -> Matches:
        """All matches of some documents, a chunk at a time; with `reasons`, each with what fits
        where.
        """
        analysed = chunks(rows, self.language.fields, self.language.analysis)
        return together(
            [self.match_analysed(chunk, first, reasons=reasons) for first, chunk in analysed]
        )

    def match_analysed(
        self, documents: Documents, first: int = 0, *, reasons: bool = False
    ) -> Matches:
        features = Features(documents, self.vocabulary)
        evaluator = Evaluator(features)
        found = [part.segment.match(features, evaluator, part.live) for part in self.parts]
        pairs = [
            _pairs(each.slots + start, each.bits, documents.count)
            for start, each in zip(self._starts, found, strict=False)
        ]
        document = np.concatenate([pair[0] for pair in pairs] or [np.zeros(0, np.int64)])
        query = np.concatenate([pair[1] for pair in pairs] or [np.zeros(0, np.int64)])
        if sum(len(each.slots) > 0 for each in found) > 1:
            order = np.lexsort((self._ranks(query), document))
            document, query = document[order], query[order]
        told = Reasons(evaluator)
        nodes = {place: self.node(place) for place in np.unique(query).tolist()} if reasons else {}
        why = (
            [
                told.of(nodes[place], at)
                for at, place in zip(document.tolist(), query.tolist(), strict=True)
            ]
            if reasons
            else []
        )
        scores = self._scores(evaluator, document, query)
        run = sum(each.run for each in found)
        return Matches(
            document + first,
            query,
            scores,
            run,
            tuple(each for each, _ in why),
            tuple(text for _, text in why),
        )

    def _ranks(self, query: Ints) -> Ints:
        """The order of the queries' keys over all parts: a key of a later part stands before the
        first of the first part's that is greater.
        """
        main = len(self.parts[0].keys)
        others, which = np.unique(query[query >= main], return_inverse=True)
        keys = [self.key(place) for place in others.tolist()]
        in_order = sorted(range(len(keys)), key=keys.__getitem__)
        rank = np.empty(len(keys), np.int64)
        rank[in_order] = [
            (bisect_left(self.parts[0].keys, keys[at]) << _GAP) + number
            for number, at in enumerate(in_order)
        ]
        ranks = query << _GAP | ((1 << _GAP) - 1)
        ranks[query >= main] = rank[which]
        return ranks

    def _scores(self, evaluator: Evaluator, document: Ints, query: Ints) -> Floats:
        """Mostly known of the query; else the boosts of what the document has are added up."""
        scores = np.empty(len(query))
        for part, first, end in zip(self.parts, self._starts, self._starts[1:], strict=False):
            mine = (
                slice(None)
                if len(self.parts) == 1
                else np.flatnonzero((query >= first) & (query < end))
            )
            scores[mine] = _scores(
                part.entries.columns, evaluator, document[mine], query[mine] - first
            )
        return scores


def _scores(columns: Columns, evaluator: Evaluator, document: Ints, slots: Ints) -> Floats:
    scores: Floats = columns.scores[slots]
    unknown = np.flatnonzero(np.isnan(scores))
    if not len(unknown):
        return scores
    starts, lengths = columns.told.starts[slots[unknown]], columns.told.lengths[slots[unknown]]
    at = runs(starts, lengths)
    told = columns.told.values[at].astype(np.int64)
    evaluator.ensure(told)
    of = np.repeat(document[unknown], lengths)
    has = evaluator.features.bits[told, of >> 6] >> (of & 63).astype(np.uint64) & np.uint64(1)
    scores[unknown] = np.add.reduceat(
        has * columns.boosts[at], np.append(0, np.cumsum(lengths))[:-1]
    )
    return scores


def _folded(parts: list[_Part], put: Mapping[Key, Stored], vocabulary: Vocabulary) -> list[_Part]:
    """New entries as the smallest part; parts that are not much larger are folded into it."""
    if not put:
        return parts
    folded, count = [_Entries.of(put, vocabulary)], len(put)
    while parts and (parts[-1].count <= _LEAST or count * _TIMES > parts[-1].count):
        folded.append(parts.pop().left())
        count += len(folded[-1].keys)
    entries = _Entries.together(folded)
    return [*parts, _Part(entries, Segment(entries.columns, vocabulary))]


def _pairs(places: Ints, bits: Words64, count: int) -> tuple[Ints, Ints]:
    """Documents and queries, document by document."""
    if not len(places):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    has = np.ascontiguousarray(unpack_bits(bits, count).T)
    document, which = np.divmod(np.flatnonzero(has), len(places))
    return document, places[which]


def together(found: Sequence[Matches]) -> Matches:
    if not found:
        return Matches(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), 0)
    return Matches(
        np.concatenate([each.documents for each in found]),
        np.concatenate([each.queries for each in found]),
        np.concatenate([each.scores for each in found]),
        sum(each.run for each in found),
        tuple(each for one in found for each in one.highlights),
        tuple(each for one in found for each in one.explanations),
    )


# The index of queries between calls: what a shard's state has, and the index that a worker made of
# it. The state is the truth; an index is kept in memory and checked.
#
# | key | value | |---|---| | `q`, key group, key of the query | version, the query's row | | `s`,
# key group | version, a digest over all changes of the group: an index made of the same is the same
# |
#
# A worker that has an index of other digests reads only the groups that differ. One that has none
# takes the one that another process of the machine wrote down.


QUERY, STAMP = b"q", b"s"
VERSION = b"\x01"
MIN_KEPT, MAX_QUERIES_KEPT = 2, 2_000_000
"""Indexes that a process keeps: of its shards, and for an attempt that is repeated the one it
started from. Their queries in sum, where there are more than a few.
"""

MIN_NOTED, _NOTED_TIMES = 1_000, 8
"""An index is written down when so many queries have changed since, and so much of it."""
_WRITTEN_BY = f"search index 1, {__version__}, ".encode()

Stamps = dict[int, bytes]


@dataclass(frozen=True)
class Kept:
    """An index, the digests of what it was made of, and how many queries were put or taken since it
    was last written down.
    """

    index: QueryIndex
    stamps: Stamps
    since: int = 0


_kept: OrderedDict[tuple[str, Language, bytes], Kept] = OrderedDict()


class Keeper:
    """Gives a step's index for the state at hand, and takes in changes of both. `read` gives the
    keys and texts of stored rows.
    """

    def __init__(
        self,
        step: str,
        language: Language,
        read: Callable[[list[bytes]], Iterator[tuple[bytes, str, bytes]]],
    ) -> None:
        self._step, self._language, self._read = step, language, read

    def load(self, state: KeyedState) -> Kept:
        """1. Which digests has the state? 2. An index with the same is right. 3. Else that with
        most of them is brought to it, group by group.
        """
        stamps = _stamps(state)
        kept = _kept.get(self._name(stamps))
        if kept is None:
            kept = self._noted(state, self._brought(state, stamps))
            self._keep(kept)
        return kept

    def _brought(self, state: KeyedState, stamps: Stamps) -> Kept:
        base = (
            self._nearest(stamps)
            or self._recalled(state)
            or Kept(QueryIndex.empty(self._language), {})
        )
        differing = {
            group
            for group in {*stamps, *base.stamps}
            if stamps.get(group) != base.stamps.get(group)
        }
        changes: dict[Key, Stored | None] = {
            key: None for key in base.index.all_keys() if key[0] in differing
        }
        for group in sorted(differing & set(stamps)):
            _, values, _ = state.scan(_prefix(group), _prefix(group + 1))
            for key, text, value in self._read([_body(each) for each in values]):
                name = bytes([group]) + key
                if base.index.get(name) == value:
                    del changes[name]
                else:
                    changes[name] = Stored.of(self._language, text, value)
        return Kept(base.index.changed(changes), stamps, base.since + len(changes))

    def _nearest(self, stamps: Stamps) -> Kept | None:
        """The index with most groups as they are wanted, or at least of the same groups: what did
        not change in them need not be read again.
        """
        mine = [
            kept
            for (step, language, _), kept in _kept.items()
            if step == self._step and language == self._language
        ]
        best = max(mine, key=lambda kept: _likeness(kept.stamps, stamps), default=None)
        return best if best is not None and set(best.stamps) & set(stamps) else None

    # What another process finds

    def _recalled(self, state: KeyedState) -> Kept | None:
        """The index that a process of this machine wrote down, if it is of this step and these
        settings.
        """
        content = state.recall() if isinstance(state, Remembering) else None
        if content is None or not content.startswith(_WRITTEN_BY):
            return None
        step, language, kept = pickle.loads(content[len(_WRITTEN_BY) :])  # noqa: S301  # the engine has checked that it is what we wrote
        return kept if (step, language) == (self._step, self._language) else None

    def _noted(self, state: KeyedState, kept: Kept) -> Kept:
        """Write the index down, if much of it is not: a query that is in it need not be read
        again.
        """
        if (
            kept.since < MIN_NOTED
            or kept.since * _NOTED_TIMES < len(kept.index)
            or not isinstance(state, Remembering)
        ):
            return kept
        kept = replace(kept, since=0)
        state.remember(
            _WRITTEN_BY + pickle.dumps((self._step, self._language, kept), pickle.HIGHEST_PROTOCOL)
        )
        return kept

    # What changes

    def save(
        self, state: KeyedState, kept: Kept, index: QueryIndex, changes: Mapping[Key, bytes | None]
    ) -> None:
        """Put what changed, and the index with it."""
        if not changes:
            return
        keys = sorted(changes)
        groups = np.array([key[0] for key in keys], np.uint8)
        stored = state.get([QUERY + key for key in keys], groups)
        wanted = [None if (value := changes[key]) is None else VERSION + value for key in keys]
        real = [at for at in range(len(keys)) if stored[at] != wanted[at]]
        state.put([QUERY + keys[at] for at in real], [wanted[at] for at in real], groups[real])
        stamps = {**kept.stamps, **_chained(kept.stamps, [(keys[at], wanted[at]) for at in real])}
        touched = sorted({int(group) for group in groups[real]})
        state.put(
            [STAMP + bytes([group]) for group in touched],
            [VERSION + stamps[group] for group in touched],
            np.array(touched, np.uint8),
        )
        self._keep(self._noted(state, Kept(index, stamps, kept.since + len(real))))

    def _name(self, stamps: Stamps) -> tuple[str, Language, bytes]:
        return (
            self._step,
            self._language,
            hashlib.blake2b(repr(sorted(stamps.items())).encode(), digest_size=16).digest(),
        )

    def _keep(self, kept: Kept) -> None:
        name = self._name(kept.stamps)
        _kept[name] = kept
        _kept.move_to_end(name)
        while (
            len(_kept) > MIN_KEPT
            and sum(len(each.index) for each in _kept.values()) > MAX_QUERIES_KEPT
        ):
            _kept.popitem(last=False)


def _likeness(one: Stamps, other: Stamps) -> tuple[int, int, int]:
    """How many groups have the same queries, how many may have some of the same, and how many have
    none for sure.
    """
    return (
        sum(other.get(group) == stamp for group, stamp in one.items()),
        len(set(one) & set(other)),
        -len(one),
    )


def forget_indexes() -> None:
    """For tests: as in a process that has just begun."""
    _kept.clear()


def _stamps(state: KeyedState) -> Stamps:
    keys, values, _ = state.scan(STAMP, STAMP + b"\xff")
    return {key[1]: _body(value) for key, value in zip(keys, values, strict=True)}


def _body(value: bytes) -> bytes:
    if value[:1] != VERSION:
        raise NewerFormat(
            f"A stored query has the format {value[0]}, and this Headrace knows 1.",
            fix="install a newer Headrace.",
        )
    return value[1:]


def _prefix(group: int) -> bytes:
    return QUERY + bytes([group])


def _chained(before: Stamps, changes: list[tuple[Key, bytes | None]]) -> Stamps:
    """Each group's digest over the one it had and what changed since."""
    digests = {
        group: hashlib.blake2b(before.get(group, b""), digest_size=16)
        for group in {key[0] for key, _ in changes}
    }
    for key, value in changes:
        digest = digests[key[0]]
        for part in (key, b"\0" if value is None else b"\1" + value):
            digest.update(len(part).to_bytes(8, "big") + part)
    return {group: digest.digest() for group, digest in digests.items()}


def as_large_binary(values: list[bytes]) -> pa.Array:
    return pa.array(values, pa.large_binary())
