"""The matcher over sorted rows, held against the oracle."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from headrace.errors import BadPattern
from headrace.operators.patterns.automaton import build
from headrace.operators.patterns.matcher import Matcher, Rules
from headrace.operators.patterns.parser import after_match, parse_pattern
from headrace.operators.patterns.row_buffer import SortedRows
from headrace.operators.patterns.walker import Entries
from tests.operators.patterns.oracle import Oracle, Path

SYMBOLS = "abcx"


def patterns(depth: int = 2) -> st.SearchStrategy[str]:
    """Patterns as texts; some of them cannot be used, and are refused."""
    symbol = st.sampled_from("abc")
    if depth == 0:
        return symbol
    inner = patterns(depth - 1)
    count = st.sampled_from(
        ["", "", "", "?", "*", "+", "+?", "??", "*?", "{2}", "{1,2}", "{2,}", "{,2}?"]
    )
    group = st.builds("({})".format, st.lists(inner, min_size=1, max_size=3).map(" | ".join))
    lead = st.builds("(-> {})".format, inner)
    permute = st.builds("PERMUTE({}, {})".format, symbol, symbol)
    element = st.builds("{}{}".format, st.one_of(symbol, symbol, group, lead, permute), count)
    link = st.sampled_from([" ", " ", " -> ", " ->> ", " !x -> ", " !x ->> "])
    return st.builds(
        lambda first, rest: first + "".join(before + each for before, each in rest),
        element,
        st.lists(st.tuples(link, element), max_size=2),
    )


ROWS = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 3), st.integers(0, 9)), max_size=14)
AFTERS = (
    "skip past last row",
    "skip to next row",
    "skip to first b",
    "skip to last b",
    "skip to last c",
    "no skip",
)
AFTER = st.sampled_from(AFTERS)


def doubt(name: str, value: int, total: int) -> bool:
    """A condition that looks back."""
    return (total + value) % 3 != 0 if name == "b" else total < 20


def matches(
    text: str,
    rows: list[tuple[int, int, int]],
    within: int | None,
    after: str,
    doubtful: frozenset[str] = frozenset(),
) -> tuple[list[Path], list[Path]]:
    """What the matcher finds, and what the oracle does. A row is: which symbols it fits, the time
    since the last, a number.
    """
    pattern = parse_pattern(text)
    automaton = build(pattern)
    times = (
        np.cumsum([gap for _, gap, _ in rows]).astype(np.int64) if rows else np.zeros(0, np.int64)
    )
    values = [value for _, _, value in rows]
    fits = {
        name: np.array([bool(bits >> at & 1) for bits, _, _ in rows], np.bool_)
        for at, name in enumerate(SYMBOLS)
    }

    def holds(
        symbol: str, entries: Entries, count: int
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        paths = [entries.row[entries.owner == at] for at in range(count)]
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
            symbol not in doubtful
            or doubt(symbol, values[row], sum(values[each] for each, _ in path))
        )

    strategy = after_match(after, tuple("abcx"), where="test")
    rules = Rules(automaton, doubtful, within, strategy, max_matches=100_000)
    sorted_rows = SortedRows(np.zeros(len(rows), np.int64), times, fits)
    may_begin = np.ones(len(rows), np.bool_)
    if pattern.from_first:
        may_begin[1:] = False
    outcome = Matcher(rules, sorted_rows, 1 << 60, holds, may_begin).run()
    found = outcome.matches
    paths = [
        tuple(
            (int(row), automaton.symbols[place])
            for row, place in zip(found.entries.row[mine], found.entries.place[mine], strict=True)
        )
        for at in range(len(found))
        for mine in [found.entries.owner == at]
    ]
    certain = [path for path, when in zip(paths, found.certain_us, strict=True) if when < 1 << 60]
    return certain, Oracle(pattern, times.tolist(), fits_row, within).matches(strategy)


@settings(max_examples=100, deadline=None)
@given(patterns(), ROWS, st.sampled_from([3, 6, 12]), AFTER)
@example("a b+ c", [(1, 1, 0), (2, 1, 0), (2, 1, 0), (4, 1, 0)], 6, "skip past last row")
def test_matches_are_the_oracles(
    text: str, rows: list[tuple[int, int, int]], within: int, after: str
) -> None:
    try:
        found, expected = matches(text, rows, within, after)
    except BadPattern:
        reject()  # Hypothesis tells if too few are left
    assert sorted(found) == sorted(expected)


@settings(max_examples=100, deadline=None)
@given(patterns(), ROWS, st.sampled_from([3, 6, 12]), AFTER)
def test_matches_with_conditions_that_look_back_are_the_oracles(
    text: str, rows: list[tuple[int, int, int]], within: int, after: str
) -> None:
    try:
        found, expected = matches(text, rows, within, after, frozenset("bc"))
    except BadPattern:
        reject()  # Hypothesis tells if too few are left
    assert sorted(found) == sorted(expected)


@settings(max_examples=80, deadline=None)
@given(
    patterns(1),
    st.sampled_from([" !x", " $"]),
    ROWS,
    st.sampled_from([3, 6, 12]),
    AFTER,
    st.sampled_from(["", "^"]),
)
def test_what_must_be_absent_is_the_oracles(
    text: str, absent: str, rows: list[tuple[int, int, int]], within: int, after: str, anchor: str
) -> None:
    try:
        found, expected = matches(anchor + text + absent, rows, within, after)
    except BadPattern:
        reject()  # Hypothesis tells if too few are left
    assert sorted(found) == sorted(expected)
