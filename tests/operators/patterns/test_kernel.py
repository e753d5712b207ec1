"""The kernel of patterns: the oracle's matches, whatever the calls, the shards and the order in
which rows come; and nothing kept when the time is up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product, starmap
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, reject
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headrace.columnar.buffers import Ints
from headrace.errors import BadPattern, HeadraceError
from headrace.operators.patterns.compiled_pattern import PatternSpec
from headrace.operators.patterns.conditions import MatchSource, Term
from headrace.operators.patterns.parser import parse_pattern, parse_skip_strategy
from headrace.operators.patterns.path_memory import Columns, TermMemory
from headrace.operators.patterns.path_search import MAX_THREADS
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
                    "first_id": mine[0]["id"] if mine else None,
                    "last_id": mine[-1]["id"] if mine else None,
                    "n": len(mine),
                    "total": sum(each["v"] for each in mine) if mine else None,
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


# Loops whose conditions look back


def matched_rows(
    pattern: str,
    define: tuple[tuple[str, str], ...],
    values: list[int],
    *,
    fits: Sequence[str] | None = None,
    within: int | None = None,
    after: str = "skip past last row",
    one_by_one: bool = False,
    **more: Any,
) -> list[tuple[int, int, int]]:
    """The tick of each match, a row a tick, and its first and last row."""
    fits = fits or ["ab"] * len(values)
    rows = [
        row(0, at, fit, at, value) for at, (value, fit) in enumerate(zip(values, fits, strict=True))
    ]
    feed = Feed([*([each] for each in rows), []], [*range(1, len(rows) + 1), 1_000_000])
    spec = PatternSpec(pattern, define, (("f", "first(id)"), ("l", "last(id)")), within, after)
    cuts = range(len(feed.ticks)) if one_by_one else ()
    emitted = feed_to(settings(spec, **more), feed, list(cuts)).emitted
    return [(each["_tick"], each["f"], each["l"]) for each in emitted]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_loop_with_a_condition_that_looks_back_never_ended(one_by_one: bool) -> None:
    prices = [12, 17, 13, 16, 25, 2, 4, 10, 15, 25, 25, 30]
    found = matched_rows("a+ b", (("a", "avg(a.v) < 15"),), prices, one_by_one=one_by_one)
    assert found == [(4, 0, 4), (11, 5, 11)]
    values = [5, 7, 9, 1, 2, 3, 0, 9]
    found = matched_rows("a b+", (("b", "v > a.v"),), values, one_by_one=one_by_one)
    assert found == [(3, 0, 2), (6, 3, 5)]


class PathWork:
    """Counts the rows that paths are continued by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        plain = TermMemory.extend

        def counting(
            memory: TermMemory, columns: Columns, parents: Ints, rows: Ints, states: Ints
        ) -> Columns:
            self.rows += len(rows)
            return plain(memory, columns, parents, rows, states)

        monkeypatch.setattr(TermMemory, "extend", counting)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_dead_beginning_blocked_those_behind_it(one_by_one: bool) -> None:
    values, fits = [9, 1, 2, 3, 0, 0], ["a", "ab", "ab", "ab", "c", "x"]
    found = matched_rows("a b+ c", (("b", "v > a.v"),), values, fits=fits, one_by_one=one_by_one)
    assert found == [(4, 1, 4)], "the beginning in row 0 is dead since row 1"


def test_a_long_alternation_never_ended() -> None:
    fits = ["a", "b"] * 50 + ["x", "a", "b", "c"]
    assert matched_rows("(a b)+ c", (), [1] * 104, fits=fits) == [(103, 101, 103)]


@pytest.mark.parametrize("after", ["skip past last row", "skip to next row", "no skip"])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_backtracking_over_32_rows_took_10_seconds(
    monkeypatch: pytest.MonkeyPatch, after: str, one_by_one: bool
) -> None:
    rows = [row(0, at, "abc", at, 1 << at) for at in range(32)]
    feed = Feed([*([each] for each in rows), []], [*range(1, 33), 1_000_000])
    define = (("b", "sum(b.v) % 2 < 5"), ("c", "sum(b.v) = -1"))
    given_settings = settings(PatternSpec("(a | b)+ c", define, (), 1000, after))
    work = PathWork(monkeypatch)
    fed = feed_to(given_settings, feed, list(range(33)) if one_by_one else [])
    per_beginning = 4 * MAX_THREADS
    assert work.rows < 32 * per_beginning * (33 if one_by_one else 1)
    assert fed.emitted == []
    assert fed.counts["given_up"] == 24, "where paths double with each row, the last eight can end"
    assert fed.state == {}


def test_600_rows_in_one_tick_took_as_many_times_the_work_of_a_long_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each row is a beginning, and each place where `a` may end is a path of it."""
    count = 600
    rows = [row(0, at, "ab", at, 1) for at in range(count)]
    define = (("b", "v <= sum(a.v)"),)
    given_settings = settings(PatternSpec("a+ b+ c", define, (), 2 * count))
    work = PathWork(monkeypatch)
    fed = feed_to(given_settings, Feed([rows], [count]), [])
    assert work.rows < count * 30 * MAX_THREADS
    assert fed.counts["given_up"] > count / 2


def test_paths_to_the_same_place_from_several_others_gave_up_12_rows() -> None:
    """The sum of `c` tells a dozen paths apart, in each of nine places that all lead to all."""
    values = [6, 1, 0, 0, 0, 0, 2, 1, 2, 3, 5, 0]
    fits = ["ac", "c", *(["bc"] * 5), "c", "bc", "ac", "ac", "bc"]
    fits[0] = "abc"
    found = matched_rows(
        "((c | c | b)*?){1,3} b+ c a", (("c", "sum(c.v) < 12"),), values, fits=fits
    )
    assert found == [(10, 0, 10)]


def test_paths_that_remember_the_same_were_tried_one_by_one() -> None:
    fits = ["abc"] * 200 + ["x"]
    found = matched_rows("(a | b)+ c", (("c", "v > first(v)"),), [1] * 199 + [2, 0], fits=fits)
    assert found == [(200, 0, 199)], "there are 2 to the power of 199 paths, and two of each state"


@pytest.mark.parametrize("one_by_one", [False, True])
def test_match_numbers_under_skip_to_next_followed_when_matches_were_certain(
    one_by_one: bool,
) -> None:
    rows = [row(0, at, fit, at) for at, fit in enumerate(["a", "x", "b", "b", "x", "c", "x"])]
    feed = Feed([*([each] for each in rows), []], [1, 2, 3, 4, 5, 6, 7, 1000])
    cuts = list(range(8)) if one_by_one else []

    def emitted(*measures: tuple[str, str]) -> list[Row]:
        measures = (("f", "first(id)"), *measures)
        spec = PatternSpec("a -> c | b b", (), measures, 100, "skip to next row")
        return feed_to(settings(spec), feed, cuts).emitted

    assert [(each["_tick"], each["f"]) for each in emitted()] == [(3, 2), (5, 0)]
    numbered = emitted(("n", "match_number()"))
    assert [(each["_tick"], each["f"], each["n"]) for each in numbered] == [(5, 0, 1), (5, 2, 2)]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_excluded_rows_belong_to_the_match_and_are_left_out(one_by_one: bool) -> None:
    rows = [row(0, at, fit, at, at) for at, fit in enumerate(["a", "b", "b", "c", "x"])]
    feed = Feed([*([each] for each in rows), []], [1, 2, 3, 4, 5, 1000])
    spec = PatternSpec("a {- b+ -} c", (), (("total", "sum(v)"), ("bs", "count(b.*)")), 100)
    cuts = list(range(6)) if one_by_one else []
    emitted = feed_to(settings(spec, rows="all"), feed, cuts).emitted
    assert [(each["id"], each["classifier"], each["total"], each["bs"]) for each in emitted] == [
        (0, "a", 0, 0),
        (3, "c", 6, 2),
    ]
    (match,) = feed_to(settings(spec), feed, cuts).emitted
    assert (match["total"], match["bs"]) == (6, 2), (
        "one row for each match has nothing to leave out"
    )


@pytest.mark.parametrize("one_by_one", [False, True])
def test_rows_of_one_time_are_matched_in_the_order_that_was_asked_for(one_by_one: bool) -> None:
    values = [3, 1, None, 2, 1]
    rows = [{**row(0, at // 4, "ab", at), "v": value} for at, value in enumerate(values)]
    feed = Feed([*([each] for each in rows), []], [0, 0, 0, 1, 2, 1000])
    spec = PatternSpec("a{4}", (), (("first_id", "first(id)"), ("last_id", "last(id)")), 100)
    cuts = list(range(6)) if one_by_one else []
    for order, ends in ((False, (2, 0)), (True, (0, 2))):
        given_settings = settings(spec, tie_order=(("v", order),))
        (match,) = feed_to(given_settings, feed, cuts).emitted
        assert (match["first_id"], match["last_id"]) == ends
    (match,) = feed_to(settings(spec), feed, cuts).emitted
    assert (match["first_id"], match["last_id"]) == (0, 3), "by arrival"


@pytest.mark.parametrize("one_by_one", [False, True])
def test_aggregates_of_expressions(one_by_one: bool) -> None:
    values = [5, 7, 9, 1, 2, 3, 0, 9]
    rows = [row(0, at, "ab", at, value) for at, value in enumerate(values)]
    feed = Feed([*([each] for each in rows), []], [*range(1, 9), 1000])
    measures = (
        ("twice", "sum(b.v * 2 + b.id)"),
        ("first_ten", "first(v * 10)"),
        ("farthest", "max(abs(v - 5))"),
        ("large", "count(CASE WHEN v > 6 THEN 1 END)"),
        ("rows", "sum(1)"),
    )
    define = (("b", "sum(b.v * 2) < 40 AND v > prev(v - 3)"),)
    given_settings = settings(PatternSpec("a b+", define, measures, None))
    emitted = feed_to(given_settings, feed, list(range(9)) if one_by_one else []).emitted
    found = [tuple(each[name] for name, _ in measures) for each in emitted]
    # Rows 0 to 2, of which 7 and 9 are b; rows 3 to 5, of which 2 and 3 are.
    assert found == [(2 * 16 + 3, 50, 4, 2, 3), (2 * 5 + 9, 10, 4, 0, 3)]


@pytest.mark.parametrize(
    ("measure", "says"),
    [
        ("sum(a.v * b.v)", "different symbols"),
        ("sum(max(v) + 1)", "other rows"),
        ("sum(nope + 1)", "no column 'nope'"),
    ],
)
def test_aggregates_of_what_is_not_one_row_are_refused(measure: str, says: str) -> None:
    with pytest.raises(HeadraceError, match=says):
        settings(PatternSpec("a b", (), (("m", measure),)))


def test_patterns_with_symbols_of_one_name_found_the_rows_of_each_others_symbols() -> None:
    rows = [row(0, at, fit, at) for at, fit in enumerate(["a", "x", "b", "x", "c", "x"])]
    feed = Feed([rows, []], [0, 1000])
    one = settings(PatternSpec("a -> b", (), (("last_id", "last(id)"),), 100))
    pattern = one.patterns[0][1]
    together = replace(
        one,
        patterns=(("b_is_b", pattern), ("b_is_c", pattern)),
        fits=((("a", 0), ("b", 1)), (("a", 0), ("b", 2))),
        several=True,
    )
    emitted = feed_to(together, feed).emitted
    assert {each["pattern"]: each["last_id"] for each in emitted} == {"b_is_b": 2, "b_is_c": 4}


@pytest.mark.parametrize("one_by_one", [False, True])
def test_rows_that_the_first_row_of_an_open_match_looks_back_at_were_dropped(
    one_by_one: bool,
) -> None:
    # The row at 8 begins a match since it is above the one at 0, which is older than `within` when
    # the row at 15 comes.
    rows = [row(0, at, "ab", at, value) for at, value in ((0, 1), (8, 2), (15, 3))]
    feed = Feed([*([each] for each in rows), [], []], [1, 9, 12, 16, 1000])
    define = (("a", "v > prev(v)"), ("b", "v > prev(v)"))
    measures = (("before", "prev(first(id))"), ("last_id", "last(id)"))
    spec = PatternSpec("a b", define, measures, 10)
    cuts = list(range(6)) if one_by_one else []
    (match,) = feed_to(settings(spec), feed, cuts).emitted
    assert (match["before"], match["last_id"]) == (0, 15)


LOOKING_BACK = (
    ("a", "v >= prev(v)"),
    ("b", "v > prev(v, 2) OR prev(v, 2) IS NULL"),
    ("c", "prev(last(v), 1) < 3"),
)


@hypothesis_settings(max_examples=examples(100), deadline=None)
@given(
    patterns(1),
    feeds(),
    st.sampled_from([6, 12]),
    AFTER,
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
)
def test_conditions_on_rows_before_a_match_see_the_same_rows_however_batches_are_cut(
    text: str, feed: Feed, within: int, after: str, shards: list[int]
) -> None:
    measures = (("before", "prev(first(id), 2)"), ("last_id", "last(id)"))
    try:
        names = parse_pattern(text).symbols
        define = tuple(each for each in LOOKING_BACK if each[0] in names)
        given_settings = settings(PatternSpec(text, define, measures, within, after))
    except BadPattern:
        reject()
    whole = feed_to(given_settings, feed)
    pieces = feed_to(given_settings, feed, range(1, 40), shards)
    assert sorted(pieces.emitted, key=str) == sorted(whole.emitted, key=str)
    assert pieces.counts == whole.counts
    assert pieces.state == {}
