"""The kernel of patterns: the oracle's matches, whatever the calls, the shards and the order in
which rows come; and nothing kept when the time is up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product, starmap

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, reject
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headrace.errors import BadPattern
from headrace.operators.patterns.compiled_pattern import PatternSpec
from headrace.operators.patterns.conditions import MatchSource, Term
from headrace.operators.patterns.parser import parse_pattern, parse_skip_strategy
from headrace.operators.patterns.walker import MatchRows
from tests.operators.patterns.oracle import Oracle, Path
from tests.operators.patterns.pattern_driver import (
    MEASURES,
    Feed,
    Row,
    feed_to,
    row,
    settings,
)
from tests.operators.patterns.strategies import AFTER, AFTERS, doubt, feeds, patterns
from tests.short_forms import examples

DOUBTS = (("b", "sum(v) % 3 <> 0"), ("c", "sum(v) - v < 20"))


def expected(
    text: str, feed: Feed, within: int, after: str, match_dependent: frozenset[str]
) -> list[Row]:
    """The oracle's matches as rows, without when they were emitted."""
    found: list[Row] = []
    pattern = parse_pattern(text)
    for key in (0, 1):
        rows = sorted(
            (each for each in feed.in_time if each["k"] == key), key=lambda each: each["t"]
        )

        def fits(symbol: str, at: int, path: Path, rows: list[Row] = rows) -> bool:
            return rows[at][f"_{symbol}"] and (
                symbol not in match_dependent
                or doubt(symbol, rows[at]["v"], sum(rows[each]["v"] for each, _ in path))
            )

        oracle = Oracle(pattern, [each["t"] for each in rows], fits, within)
        for path in oracle.matches(parse_skip_strategy(after, tuple("abcx"), where="test")):
            mine = [rows[at] for at, _ in path]
            bs = sum(symbol == "b" for _, symbol in path)
            found.append(
                {
                    "k": key,
                    "first_id": mine[0]["id"],
                    "last_id": mine[-1]["id"],
                    "n": len(mine),
                    "total": sum(each["v"] for each in mine),
                    "bs": bs,
                }
            )
    return sorted(found, key=str)


def without_time(emitted: list[Row]) -> list[Row]:
    return sorted(
        (
            {name: value for name, value in each.items() if name not in {"_tick", "matched_at"}}
            for each in emitted
        ),
        key=str,
    )


def run(
    text: str,
    feed: Feed,
    within: int,
    after: str,
    define: tuple[tuple[str, str], ...],
    cuts: list[int],
    shards: list[int],
) -> None:
    names = parse_pattern(text).symbols
    used = tuple(each for each in define if each[0] in names)
    spec = PatternSpec(
        text,
        used,
        tuple(each for each in MEASURES if "b." not in each[1] or "b" in names),
        within,
        after,
    )
    given_settings = settings(spec, timed_out=True)
    whole = feed_to(given_settings, feed)
    plain = expected(text, feed, within, after, frozenset(name for name, _ in used))
    assert without_time(whole.emitted) == sorted(
        (
            {name: value for name, value in each.items() if name != "bs" or "b" in names}
            for each in plain
        ),
        key=str,
    )
    pieces = feed_to(given_settings, feed, cuts, shards)
    assert sorted(pieces.emitted, key=str) == sorted(whole.emitted, key=str)
    assert sorted(pieces.timed_out_rows, key=str) == sorted(whole.timed_out_rows, key=str)
    assert pieces.counts == whole.counts
    assert whole.state == pieces.state == {}, "when the time is up, a key holds nothing"
    assert pieces.due[-1] is None


@hypothesis_settings(max_examples=examples(80), deadline=None)
@given(
    patterns(),
    feeds(),
    st.sampled_from([3, 6, 12]),
    AFTER,
    st.lists(st.integers(1, 20), max_size=6),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
)
def test_any_cut_gives_the_oracles_matches(
    text: str, feed: Feed, within: int, after: str, cuts: list[int], shards: list[int]
) -> None:
    try:
        run(text, feed, within, after, (), cuts, shards)
    except BadPattern:
        reject()  # Hypothesis reports if too few are left


@hypothesis_settings(max_examples=examples(80), deadline=None)
@given(
    patterns(),
    feeds(),
    st.sampled_from([3, 6, 12]),
    AFTER,
    st.lists(st.integers(1, 20), max_size=6),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
)
def test_conditions_that_look_back_give_the_oracles_matches(
    text: str, feed: Feed, within: int, after: str, cuts: list[int], shards: list[int]
) -> None:
    try:
        run(text, feed, within, after, DOUBTS, cuts, shards)
    except BadPattern:
        reject()  # Hypothesis reports if too few are left


@hypothesis_settings(max_examples=examples(60), deadline=None)
@given(
    patterns(1),
    st.sampled_from([" !x", " $"]),
    feeds(),
    st.sampled_from([3, 6, 12]),
    AFTER,
    st.lists(st.integers(1, 20), max_size=6),
)
def test_absence_gives_the_oracles_matches(
    text: str, absent: str, feed: Feed, within: int, after: str, cuts: list[int]
) -> None:
    try:
        run(text + absent, feed, within, after, (), cuts, [1, 2])
    except BadPattern:
        reject()  # Hypothesis reports if too few are left


@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 4, 5, 6, 7]])
def test_a_match_is_emitted_as_soon_as_it_is_certain(cuts: list[int]) -> None:
    ticks = [
        [row(0, 10, "a", 0)],
        [row(0, 20, "b", 1)],
        [row(0, 30, "b", 2)],
        [row(0, 40, "c", 3)],
        [],
    ]
    feed = Feed(ticks, [11, 21, 31, 41, 1000])

    def emitted(pattern: str) -> list[tuple[int, int]]:
        found = feed_to(
            settings(PatternSpec(pattern, (), (("last_id", "last(id)"),), 100)), feed, cuts
        ).emitted
        return [(each["_tick"], each["last_id"]) for each in found]

    assert emitted("a b+?") == [(1, 1)], "with its last row, if nothing else would be preferred"
    assert emitted("a b+") == [(3, 2)], "with the row that ends the run"
    assert emitted("a b+ c") == [(3, 3)]
    assert emitted("a (-> b)+") == [(4, 2)], "when the time is up, since another b could have come"
    assert emitted("a !x") == [(4, 0)], "absence, by the clock alone"
    assert emitted("a !b") == []


def _wanted(text: str, within: int, after: str) -> PatternSpec:
    return PatternSpec(
        text, (), (("first_id", "first(id)"), ("last_id", "last(id)")), within, after
    )


def _can_be(wanted: PatternSpec) -> bool:
    """Not one that skips to a symbol which it does not have."""
    try:
        settings(wanted)
    except BadPattern:
        return False
    return True


SOME_TEXTS = ("a b", "a -> b ->> c", "a+ c", "b{2} x", "a !x -> c", "c c", "b+ !x", "x (a | b)")
SOME_PATTERNS = [
    wanted for wanted in starmap(_wanted, product(SOME_TEXTS, (3, 12), AFTERS)) if _can_be(wanted)
]


@hypothesis_settings(max_examples=examples(60), deadline=None)
@given(
    feeds(),
    st.lists(st.sampled_from(SOME_PATTERNS), min_size=9, max_size=9),
    st.lists(st.integers(1, 20), max_size=4),
)
def test_many_patterns_at_once_give_what_each_gives_alone(
    feed: Feed, specs: list[PatternSpec], cuts: list[int]
) -> None:
    by_row = [settings(spec) for spec in specs]
    patterns_by_name = tuple((f"p{at}", each.patterns[0][1]) for at, each in enumerate(by_row))
    together = replace(
        by_row[0],
        patterns=patterns_by_name,
        fits=tuple(each.fits[0] for each in by_row),
        several=True,
    )
    found = feed_to(together, feed, cuts, [1, 2])
    expected_rows = [
        {**row, "pattern": f"p{at}"}
        for at, each in enumerate(by_row)
        for row in feed_to(each, feed).emitted
    ]
    assert sorted(found.emitted, key=_text) == sorted(expected_rows, key=_text)
    assert found.state == {}


def _text(row: Row) -> str:
    return str(sorted(row.items()))


def test_rows_of_long_matches_are_emitted_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(0, number, "a", number, number) for number in range(40)]
    feed = Feed([[*rows, row(0, 40, "c", 40, 0)], []], [41, 1000])
    given_settings = settings(
        PatternSpec("a+ c", (), (("n", "count(*)"), ("total", "sum(v)")), 100), rows="all"
    )
    monkeypatch.setattr("headrace.operators.patterns.settings.MAX_PREFIX_ROWS", 50)
    emitted = feed_to(given_settings, feed).emitted
    assert [(each["n"], each["total"]) for each in emitted] == [
        (at + 1, at * (at + 1) // 2 if at < 40 else 780) for at in range(41)
    ]


@pytest.mark.parametrize("few", [1, 2])
@hypothesis_settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    patterns(),
    feeds(),
    st.sampled_from([3, 6, 12]),
    AFTER,
    st.lists(st.integers(1, 20), max_size=6),
    st.booleans(),
)
def test_beginnings_that_are_looked_at_one_by_one_give_the_oracles_matches(
    monkeypatch: pytest.MonkeyPatch,
    few: int,
    text: str,
    feed: Feed,
    within: int,
    after: str,
    cuts: list[int],
    looks_back: bool,
) -> None:
    monkeypatch.setattr("headrace.operators.patterns.matcher.MIN_QUEUE_STEP", few)
    monkeypatch.setattr("headrace.operators.patterns.matcher.MIN_STARTS_FOR_QUEUE", 0)
    try:
        run(text, feed, within, after, DOUBTS if looks_back else (), cuts, [1, 2])
    except BadPattern:
        reject()  # Hypothesis reports if too few are left


@pytest.mark.parametrize("last", ["c", "a"])
def test_a_long_match_whose_conditions_look_back_is_not_tried_from_each_of_its_rows(
    monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    looked_at = 0
    plain = MatchSource.values

    def counting(
        source: MatchSource, terms: Sequence[Term], match_rows: MatchRows, count: int
    ) -> list[pa.Array]:
        nonlocal looked_at
        looked_at += len(match_rows.row)
        return plain(source, terms, match_rows, count)

    monkeypatch.setattr(MatchSource, "values", counting)
    rows = [row(0, number, "a", number) for number in range(200)]
    feed = Feed([[*rows, row(0, 200, last, 200)]], [201])
    emitted = feed_to(
        settings(PatternSpec("a+ c?", (("a", "sum(a.v) < 1000"),), (("n", "count(*)"),), 1000)),
        feed,
    ).emitted
    assert [each["n"] for each in emitted] == ([201] if last == "c" else [])
    assert looked_at < 10 * 200 * 200, "not the third power"
