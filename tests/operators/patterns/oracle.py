"""A reference matcher: the tree of a pattern, tried in order with turning back, as the SQL standard
defines the preferred match. One key's rows at a time, slowly.

`fits(symbol, row, path)` says whether a row fits a symbol behind a path, which is a list of (row,
symbol).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, permutations

from headrace.operators.patterns.parser import (
    NEXT_ROW,
    NO_SKIP,
    PAST_LAST,
    SKIP_TILL_NEXT,
    STRICT,
    STRICT_CONTIGUITY,
    TO_FIRST,
    Alternation,
    Concatenation,
    Contiguity,
    Node,
    Pattern,
    Permutation,
    Repetition,
    SkipStrategy,
    Symbol,
)

Path = tuple[tuple[int, str], ...]
Fits = Callable[[str, int, Path], bool]


@dataclass
class Oracle:
    """Over one key's rows, given by their times, all of them there."""

    pattern: Pattern
    times: list[int]
    fits: Fits
    within: int | None = None

    def matches(
        self, after: SkipStrategy, members: Callable[[str], tuple[str, ...]] = lambda name: (name,)
    ) -> list[Path]:
        found: list[Path] = []
        start = 0
        while start < len(self.times):
            every = self.from_row(start)
            paths = (
                [path for path in every if path] if after.kind == NO_SKIP else [*islice(every, 1)]
            )
            if after.kind == NO_SKIP:
                paths = [path for path in paths if path]
            found += dict.fromkeys(paths)  # one without rows is an empty match
            start = self._next(start, paths, after, members)
            if self.pattern.is_anchored:
                break
        return found

    @staticmethod
    def _next(
        start: int,
        paths: list[Path],
        after: SkipStrategy,
        members: Callable[[str], tuple[str, ...]],
    ) -> int:
        if not paths or not paths[0] or after.kind in {NO_SKIP, NEXT_ROW}:
            return start + 1
        if after.kind == PAST_LAST:
            return paths[0][-1][0] + 1
        rows = [row for row, symbol in paths[0] if symbol in members(after.symbol or "")]
        if not rows:
            return start + 1
        return max(start + 1, rows[0] if after.kind == TO_FIRST else rows[-1])

    # One start

    def from_row(self, start: int) -> Iterator[Path]:
        """All matches that begin with a row, the preferred one first."""
        last = len(self.times) - 1
        if self.within is not None:
            last = max(
                row
                for row in range(len(self.times))
                if self.times[row] <= self.times[start] + self.within
            )
        for path, _ in self._node(self.pattern.root, (), STRICT_CONTIGUITY, start, last):
            if not self._broken(path, last):
                yield path

    def _broken(self, path: Path, last: int) -> bool:
        """Whether something comes that must be absent at the end."""
        if not path:
            return False
        behind = range(path[-1][0] + 1, last + 1)
        if self.pattern.no_row_follows and behind:
            return True
        return any(
            self.fits(symbol, row, path) for row in behind for symbol in self.pattern.absent_symbols
        )

    def _node(
        self, node: Node, path: Path, link: Contiguity, start: int, last: int
    ) -> Iterator[tuple[Path, Contiguity]]:
        if isinstance(node, Symbol):
            yield from (
                ((*path, (row, node.name)), STRICT_CONTIGUITY)
                for row in self._rows(node.name, path, link, start, last)
            )
        elif isinstance(node, Alternation):
            for option in node.options:
                yield from self._node(option, path, link, start, last)
        elif isinstance(node, Concatenation):
            yield from self._items(node.items, path, link, start, last)
        elif isinstance(node, Permutation):
            for order in permutations(node.nodes):
                yield from self._items(
                    tuple((STRICT_CONTIGUITY, each) for each in order), path, link, start, last
                )
        elif isinstance(node, Repetition):
            yield from self._repeat(node, 0, path, link, start, last)

    def _items(
        self,
        items: tuple[tuple[Contiguity, Node], ...],
        path: Path,
        link: Contiguity,
        start: int,
        last: int,
    ) -> Iterator[tuple[Path, Contiguity]]:
        if not items:
            yield path, link
            return
        (before, first), *rest = items
        for longer, pending in self._node(first, path, link.then(before), start, last):
            yield from self._items(tuple(rest), longer, pending, start, last)

    def _repeat(
        self, node: Repetition, done: int, path: Path, link: Contiguity, start: int, last: int
    ) -> Iterator[tuple[Path, Contiguity]]:
        if not node.is_greedy and done >= node.min_count:
            yield path, link
        if node.max_count is None or done < node.max_count:
            for longer, pending in self._node(node.node, path, link, start, last):
                if len(longer) > len(path) or done < node.min_count or node.max_count is not None:
                    yield from self._repeat(node, done + 1, longer, pending, start, last)
        if node.is_greedy and done >= node.min_count:
            yield path, link

    def _rows(
        self, symbol: str, path: Path, link: Contiguity, start: int, last: int
    ) -> Iterator[int]:
        """The rows that a symbol may take next."""
        if not path:
            yield from [start] if self.fits(symbol, start, path) else []
            return
        for row in range(path[-1][0] + 1, last + 1):
            if self.fits(symbol, row, path):
                yield row
                if link.mode == SKIP_TILL_NEXT:
                    return
            if link.mode == STRICT or any(
                self.fits(absent_symbols, row, path) for absent_symbols in link.absent_symbols
            ):
                return
