"""Compiled queries as columns: what a segment is made of, and what is put together when segments are folded. A query costs some numbers here, and no object of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from headrace.operators.buffers import Ints, runs
from headrace.operators.search.compiling import Compiled
from headrace.operators.search.syntax import Node

Numbers = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Lists:
    """A list of numbers for each query: all of them one after the other, and where each begins; behind them where the last ends."""

    starts: Ints
    values: Numbers

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Lists:
        starts = np.zeros(len(lists) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, lists), np.int64, len(lists)), out=starts[1:])
        return cls(starts, np.fromiter(chain.from_iterable(lists), np.int32, int(starts[-1])))

    @classmethod
    def together(cls, parts: Sequence[Lists]) -> Lists:
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(np.append(0, np.cumsum(lengths)), np.concatenate([part.values for part in parts]))

    @property
    def lengths(self) -> Ints:
        return np.diff(self.starts)

    @property
    def nbytes(self) -> int:
        return self.starts.nbytes + self.values.nbytes

    def take(self, which: Ints) -> Lists:
        lengths = self.lengths[which]
        return Lists(np.append(0, np.cumsum(lengths)), self.values[runs(self.starts[which], lengths)])

    def padded(self, width: int, filler: int) -> Numbers:
        """As rows of a table; what is beyond its width is left out."""
        table = np.full((len(self.starts) - 1, width), filler, np.int32)
        row = np.repeat(np.arange(len(table)), self.lengths)
        column = np.arange(len(self.values)) - self.starts[row]
        inside = column < width
        table[row[inside], column[inside]] = self.values[inside]
        return table


@dataclass(frozen=True)
class Columns:
    """`told` and `boosts`: what a score is added up from, of queries whose score is not known before. `rest` and `filing`: of the few that have some."""

    needs: Lists
    without: Lists
    late: Lists
    either: Lists
    told: Lists
    boosts: Floats
    scores: Floats
    rest: Mapping[int, tuple[Node, ...]]
    filing: Mapping[int, tuple[tuple[int, ...], ...]]

    @classmethod
    def of(cls, queries: Sequence[Compiled]) -> Columns:
        return cls(
            needs=Lists.of([query.needs for query in queries]),
            without=Lists.of([query.without for query in queries]),
            late=Lists.of([query.late for query in queries]),
            either=Lists.of([query.either for query in queries]),
            told=Lists.of([[feature for feature, _ in query.told] for query in queries]),
            boosts=np.array([boost for query in queries for _, boost in query.told], np.float64),
            scores=np.array([np.nan if query.score is None else query.score for query in queries], np.float64),
            rest={at: tuple(query.rest) for at, query in enumerate(queries) if query.rest},
            filing={at: tuple(map(tuple, query.filing)) for at, query in enumerate(queries) if query.filing and not query.needs},
        )

    @property
    def nbytes(self) -> int:
        return self.boosts.nbytes + self.scores.nbytes + sum(each.nbytes for each in (self.needs, self.without, self.late, self.either, self.told))

    def take(self, which: Ints) -> Columns:
        """Some of the queries, in this order."""
        place = dict(zip(which.tolist(), range(len(which)), strict=True)) if self.rest or self.filing else {}
        return Columns(
            self.needs.take(which), self.without.take(which), self.late.take(which), self.either.take(which), self.told.take(which),
            self.boosts[runs(self.told.starts[which], self.told.lengths[which])], self.scores[which],
            {place[at]: nodes for at, nodes in self.rest.items() if at in place}, {place[at]: ways for at, ways in self.filing.items() if at in place},
        )  # fmt: skip


def together(parts: Sequence[Columns]) -> Columns:
    """The queries of several, one behind the other."""
    firsts = np.cumsum([0, *(len(part.scores) for part in parts)]).tolist()
    return Columns(
        Lists.together([part.needs for part in parts]), Lists.together([part.without for part in parts]), Lists.together([part.late for part in parts]),
        Lists.together([part.either for part in parts]), Lists.together([part.told for part in parts]),
        np.concatenate([part.boosts for part in parts]), np.concatenate([part.scores for part in parts]),
        {first + at: nodes for first, part in zip(firsts, parts, strict=False) for at, nodes in part.rest.items()},
        {first + at: ways for first, part in zip(firsts, parts, strict=False) for at, ways in part.filing.items()},
    )  # fmt: skip
