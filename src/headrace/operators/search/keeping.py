"""The index of queries between calls: what a shard's state has, and the index that a worker made of it. The state is the truth; an index is kept in memory and checked.

| key | value |
|---|---|
| `q`, key group, key of the query | version, the query's row |
| `s`, key group | version, a digest over all changes of the group: an index made of the same is the same |

A worker that has an index of other digests reads only the groups that differ. One that has none takes the one that another process of the machine wrote down.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from headrace._version import __version__
from headrace.errors import NewerFormat
from headrace.operators.kernel import KeyedState, Remembering
from headrace.operators.search.index import Key, QueryIndex, Stored
from headrace.operators.search.parsing import Language

QUERY, STAMP = b"q", b"s"
VERSION = b"\x01"
LEAST_KEPT, MOST_QUERIES_KEPT = 2, 2_000_000
"""Indexes that a process keeps: of its shards, and for an attempt that is repeated the one it started from. Their queries in sum, where there are more than a few."""

LEAST_NOTED, _NOTED_TIMES = 1_000, 8
"""An index is written down when so many queries have changed since, and so much of it."""
_WRITTEN_BY = f"search index 1, {__version__}, ".encode()

Stamps = dict[int, bytes]


@dataclass(frozen=True)
class Kept:
    """An index, the digests of what it was made of, and how many queries were put or taken since it was last written down."""

    index: QueryIndex
    stamps: Stamps
    since: int = 0


_kept: OrderedDict[tuple[str, Language, bytes], Kept] = OrderedDict()


class Keeper:
    """Gives a step's index for the state at hand, and takes in changes of both. `read` gives the keys and texts of stored rows."""

    def __init__(self, step: str, language: Language, read: Callable[[list[bytes]], Iterator[tuple[bytes, str, bytes]]]) -> None:
        self._step, self._language, self._read = step, language, read

    def load(self, state: KeyedState) -> Kept:
        """1. Which digests has the state? 2. An index with the same is right. 3. Else that with most of them is brought to it, group by group."""
        stamps = _stamps(state)
        kept = _kept.get(self._name(stamps))
        if kept is None:
            kept = self._noted(state, self._brought(state, stamps))
            self._keep(kept)
        return kept

    def _brought(self, state: KeyedState, stamps: Stamps) -> Kept:
        base = self._nearest(stamps) or self._recalled(state) or Kept(QueryIndex.empty(self._language), {})
        differing = {group for group in {*stamps, *base.stamps} if stamps.get(group) != base.stamps.get(group)}
        changes: dict[Key, Stored | None] = {key: None for key in base.index.all_keys() if key[0] in differing}
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
        """The index with most groups as they are wanted, or at least of the same groups: what did not change in them need not be read again."""
        mine = [kept for (step, language, _), kept in _kept.items() if step == self._step and language == self._language]
        best = max(mine, key=lambda kept: _likeness(kept.stamps, stamps), default=None)
        return best if best is not None and set(best.stamps) & set(stamps) else None

    # What another process finds

    def _recalled(self, state: KeyedState) -> Kept | None:
        """The index that a process of this machine wrote down, if it is of this step and these settings."""
        content = state.recall() if isinstance(state, Remembering) else None
        if content is None or not content.startswith(_WRITTEN_BY):
            return None
        step, language, kept = pickle.loads(content[len(_WRITTEN_BY) :])  # noqa: S301  # the engine has checked that it is what we wrote
        return kept if (step, language) == (self._step, self._language) else None

    def _noted(self, state: KeyedState, kept: Kept) -> Kept:
        """Write the index down, if much of it is not: a query that is in it need not be read again."""
        if kept.since < LEAST_NOTED or kept.since * _NOTED_TIMES < len(kept.index) or not isinstance(state, Remembering):
            return kept
        kept = replace(kept, since=0)
        state.remember(_WRITTEN_BY + pickle.dumps((self._step, self._language, kept), pickle.HIGHEST_PROTOCOL))
        return kept

    # What changes

    def save(self, state: KeyedState, kept: Kept, index: QueryIndex, changes: Mapping[Key, bytes | None]) -> None:
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
        state.put([STAMP + bytes([group]) for group in touched], [VERSION + stamps[group] for group in touched], np.array(touched, np.uint8))
        self._keep(self._noted(state, Kept(index, stamps, kept.since + len(real))))

    def _name(self, stamps: Stamps) -> tuple[str, Language, bytes]:
        return self._step, self._language, hashlib.blake2b(repr(sorted(stamps.items())).encode(), digest_size=16).digest()

    def _keep(self, kept: Kept) -> None:
        name = self._name(kept.stamps)
        _kept[name] = kept
        _kept.move_to_end(name)
        while len(_kept) > LEAST_KEPT and sum(len(each.index) for each in _kept.values()) > MOST_QUERIES_KEPT:
            _kept.popitem(last=False)


def _likeness(one: Stamps, other: Stamps) -> tuple[int, int, int]:
    """How many groups have the same queries, how many may have some of the same, and how many have none for sure."""
    return sum(other.get(group) == stamp for group, stamp in one.items()), len(set(one) & set(other)), -len(one)


def forget_indexes() -> None:
    """For tests: as in a process that has just begun."""
    _kept.clear()


def _stamps(state: KeyedState) -> Stamps:
    keys, values, _ = state.scan(STAMP, STAMP + b"\xff")
    return {key[1]: _body(value) for key, value in zip(keys, values, strict=True)}


def _body(value: bytes) -> bytes:
    if value[:1] != VERSION:
        raise NewerFormat(f"A stored query has the format {value[0]}, and this Headrace knows 1.", fix="install a newer Headrace.")
    return value[1:]


def _prefix(group: int) -> bytes:
    return QUERY + bytes([group])


def _chained(before: Stamps, changes: list[tuple[Key, bytes | None]]) -> Stamps:
    """Each group's digest over the one it had and what changed since."""
    digests = {group: hashlib.blake2b(before.get(group, b""), digest_size=16) for group in {key[0] for key, _ in changes}}
    for key, value in changes:
        digest = digests[key[0]]
        for part in (key, b"\0" if value is None else b"\1" + value):
            digest.update(len(part).to_bytes(8, "big") + part)
    return {group: digest.digest() for group, digest in digests.items()}


def as_large_binary(values: list[bytes]) -> pa.Array:
    return pa.array(values, pa.large_binary())
