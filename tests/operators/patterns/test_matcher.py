"""The matcher over sorted rows, held against the oracle."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from headrace.columnar.buffers import Ints, Mask
from headrace.errors import BadPattern
from headrace.operators.patterns.automaton import build_automaton
from headrace.operators.patterns.matcher import Matcher, MatchRules
from headrace.operators.patterns.parser import parse_pattern, parse_skip_strategy
from headrace.operators.patterns.path_memory import Columns
from headrace.operators.patterns.row_buffer import SortedRows
from headrace.operators.patterns.walker import MatchRows
from tests.operators.patterns.oracle import Oracle, Path
from tests.operators.patterns.strategies import AFTER, ROWS, doubt, patterns
from tests.short_forms import examples

SYMBOLS = "abcx"


class SumMemory:
    """The sum of the numbers of a path, this row included, and conditions on it."""

    def __init__(self, values: list[int]) -> None:
        self.values = np.array(values, np.int64)

    def begin(self) -> Columns:
        return [np.zeros(1, np.int64)]

    def extend(self, columns: Columns, parents: Ints, rows: Ints, states: Ints) -> Columns:
        return [columns[0][parents] + self.values[rows]]

    def holds(self, symbol: str, columns: Columns, rows: Ints, states: Ints) -> Mask:
        values = self.values[rows]
        return np.array(
            [
                doubt(symbol, value, total - value)
                for value, total in zip(values.tolist(), columns[0].tolist(), strict=True)
            ],
            np.bool_,
        )

    def columns_read(self, symbols: Collection[str]) -> Ints:
        return np.arange(min(len(symbols), 1))


def matches(
    text: str,
    rows: list[tuple[int, int, int]],
    within: int | None,
    after: str,
    match_dependent: frozenset[str] = frozenset(),
) -> tuple[list[Path], list[Path]]:
    """What the matcher finds, and what the oracle does. A row is: which symbols it fits, the time
    since the last, a number.
    """
    pattern = parse_pattern(text)
    automaton = build_automaton(pattern)
    times = (
        np.cumsum([gap for _, gap, _ in rows]).astype(np.int64) if rows else np.zeros(0, np.int64)
    )
    values = [value for _, _, value in rows]
    fits = {
        name: np.array([bool(bits >> at & 1) for bits, _, _ in rows], np.bool_)
        for at, name in enumerate(SYMBOLS)
    }

    def holds(
        symbol: str, match_rows: MatchRows, count: int
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        paths = [match_rows.row[match_rows.owner == at] for at in range(count)]
        return np.array(
            [
                doubt(symbol, values[path[-1]], sum(values[row] for row in path[:-1]))
                for path in paths
            ],
            np.bool_,
        )

    def fits_row(symbol: str, row: int, path: Path) -> bool:
        plain = bool(fits[symbol][row])
        return plain and (
            symbol not in match_dependent
            or doubt(symbol, values[row], sum(values[each] for each, _ in path))
        )

    strategy = parse_skip_strategy(after, tuple("abcx"), where="test")
    rules = MatchRules(
        automaton, match_dependent, within, strategy, max_matches=100_000, max_threads=1 << 40
    )
    sorted_rows = SortedRows(np.zeros(len(rows), np.int64), times, fits)
    may_begin = np.ones(len(rows), np.bool_)
    if pattern.is_anchored:
        may_begin[1:] = False
    outcome = Matcher(rules, sorted_rows, 1 << 60, holds, SumMemory(values), may_begin).run()
    found = outcome.matches
    paths = [
        tuple(
            (int(row), automaton.symbols[state])
            for row, state in zip(found.rows.row[mine], found.rows.state[mine], strict=True)
        )
        for at in range(len(found))
        for mine in [found.rows.owner == at]
    ]
    certain = [path for path, when in zip(paths, found.decided_us, strict=True) if when < 1 << 60]
    return certain, Oracle(pattern, times.tolist(), fits_row, within).matches(strategy)


@settings(max_examples=examples(100), deadline=None)
@given(patterns(), ROWS, st.sampled_from([3, 6, 12]), AFTER)
@example("a b+ c", [(1, 1, 0), (2, 1, 0), (2, 1, 0), (4, 1, 0)], 6, "skip past last row")
def test_matches_are_the_oracles(
    text: str, rows: list[tuple[int, int, int]], within: int, after: str
) -> None:
    try:
        found, expected = matches(text, rows, within, after)
    except BadPattern:
        reject()  # Hypothesis reports if too few are left
    assert sorted(found) == sorted(expected)


@settings(max_examples=examples(100), deadline=None)
@given(patterns(), ROWS, st.sampled_from([3, 6, 12]), AFTER)
def test_matches_with_conditions_that_look_back_are_the_oracles(
    text: str, rows: list[tuple[int, int, int]], within: int, after: str
) -> None:
    try:
        found, expected = matches(text, rows, within, after, frozenset("bc"))
    except BadPattern:
        reject()  # Hypothesis reports if too few are left
    assert sorted(found) == sorted(expected)


@settings(max_examples=examples(80), deadline=None)
@given(
    patterns(1),
    st.sampled_from([" !x", " $"]),
    ROWS,
    st.sampled_from([3, 6, 12]),
    AFTER,
    st.sampled_from(["", "^"]),
)
def test_negated_steps_match_the_oracle(
    text: str, absent: str, rows: list[tuple[int, int, int]], within: int, after: str, anchor: str
) -> None:
    try:
        found, expected = matches(anchor + text + absent, rows, within, after)
    except BadPattern:
        reject()  # Hypothesis reports if too few are left
    assert sorted(found) == sorted(expected)
