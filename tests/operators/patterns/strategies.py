"""Patterns, rows and feeds by chance, for the tests of matchers and kernels against the oracle."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.operators.patterns.pattern_driver import SYMBOLS, Feed, Row, row


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


@st.composite
def feeds(draw: Any) -> Feed:
    """Rows of two keys at different times, which come at most 3 later than their time says, or too
    late.
    """
    gaps = draw(
        st.lists(
            st.tuples(
                st.integers(1, 3),
                st.integers(0, 1),
                st.integers(0, 15),
                st.integers(0, 9),
                st.integers(0, 3),
            ),
            max_size=14,
        )
    )
    at, rows = 0, []
    for number, (gap, key, bits, value, delay) in enumerate(gaps):
        at += gap
        rows.append(
            (
                at + delay,
                row(
                    key,
                    at,
                    "".join(name for index, name in enumerate(SYMBOLS) if bits >> index & 1),
                    number,
                    value,
                ),
            )
        )
    rows.sort(key=lambda each: each[0])
    ticks: list[list[Row]] = [[]]
    for _, each in rows:
        if draw(st.booleans()):
            ticks.append([])
        ticks[-1].append(each)
    closed, newest = [], 0
    late = draw(st.integers(2, 4))
    for tick in ticks:
        newest = max([newest, *(found["t"] for found in tick)])
        closed.append(newest - late)
    for _ in range(draw(st.integers(1, 3))):
        ticks.append([])
        closed.append(closed[-1] + draw(st.integers(0, 4)))
    ticks.append([])
    closed.append(10_000)
    return Feed(ticks, closed)
