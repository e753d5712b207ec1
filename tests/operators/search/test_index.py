"""The index of queries against every query with every document: the same matches and scores,
whatever changes and however documents are split.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, date, datetime
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import BadSearch
from headrace.operators.search import index as index_module
from headrace.operators.search.analyzer import Analyzer
from headrace.operators.search.character_table import FOLDING_VERSION
from headrace.operators.search.documents import MAX_DOCUMENTS, add_token_columns, analyzed_chunks
from headrace.operators.search.evaluator import MAX_HIGHLIGHTS
from headrace.operators.search.index import QueryIndex, StoredQuery, concat_matches
from headrace.operators.search.parser import Language
from headrace.operators.search.syntax import Fields, Node
from tests.operators.search.oracle import fits, score
from tests.operators.search.strategies import LANGUAGE, documents, queries, table
from tests.short_forms import examples

Matched = list[tuple[int, bytes, float]]


def matched(index: QueryIndex, rows: pa.Table) -> Matched:
    found = index.match(rows)
    return [
        (at, index.key(query), total)
        for at, query, total in zip(
            found.documents.tolist(), found.queries.tolist(), found.scores.tolist(), strict=True
        )
    ]


def stored(texts: Mapping[bytes, str | None]) -> dict[bytes, StoredQuery | None]:
    return {
        key: None if text is None else StoredQuery.of(LANGUAGE, text) for key, text in texts.items()
    }


def read(texts: Mapping[bytes, str | None]) -> dict[bytes, Node]:
    return {key: LANGUAGE.parse(text) for key, text in texts.items() if text is not None}


def expected(
    nodes: dict[bytes, Node], rows: list[dict[str, Any]], language: Language = LANGUAGE
) -> list[tuple[int, bytes, Any]]:
    found = [
        (at, key, score(node, row, language))
        for at, row in enumerate(rows)
        for key, node in sorted(nodes.items())
        if fits(node, row, language)
    ]
    return [(at, key, pytest.approx(total)) for at, key, total in found]


@settings(max_examples=examples(150))
@given(st.lists(queries, max_size=12), st.lists(documents, max_size=8))
def test_the_index_finds_what_every_query_against_every_document_finds(
    texts: list[str], rows: list[dict[str, Any]]
) -> None:
    named = {b"%03d" % at: text for at, text in enumerate(texts)}
    assert matched(QueryIndex.empty(LANGUAGE).with_changes(stored(named)), table(rows)) == expected(
        read(named), rows
    )


changes = st.dictionaries(
    st.sampled_from([b"%02d" % at for at in range(8)]), st.none() | queries, max_size=5
)


@settings(max_examples=examples(80))
@given(st.lists(st.tuples(changes, st.lists(documents, max_size=3)), max_size=6), st.booleans())
def test_changes_between_documents(
    history: list[tuple[dict[bytes, str | None], list[dict[str, Any]]]], fold: bool
) -> None:
    """Also where recent changes are folded at once, and an older index stays as it was."""
    kept = index_module._MIN_SEGMENT_QUERIES
    index_module._MIN_SEGMENT_QUERIES = 0 if fold else kept
    try:
        index, nodes = QueryIndex.empty(LANGUAGE), dict[bytes, Node]()
        seen = []
        for texts, rows in history:
            put = {
                key: None if text is None else LANGUAGE.parse(text) for key, text in texts.items()
            }
            index = index.with_changes(stored(texts))
            nodes = {key: node for key, node in (nodes | put).items() if node is not None}
            assert len(index) == len(nodes)
            seen.append((index, nodes, rows))
        for index, nodes, rows in seen:
            assert matched(index, table(rows)) == expected(nodes, rows)
    finally:
        index_module._MIN_SEGMENT_QUERIES = kept


@settings(max_examples=examples(60))
@given(
    st.lists(queries, max_size=6),
    st.lists(documents, min_size=1, max_size=8),
    st.integers(0, 8),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_documents_that_carry_their_words_are_the_same_documents(
    texts: list[str], rows: list[dict[str, Any]], cut: int, chance: Random, stops: bool
) -> None:
    """Analysed in two parts, put together, mixed, and taken in pieces."""
    language = (
        Language(LANGUAGE.fields, Analyzer(stop_words=frozenset({"the", "sea"})))
        if stops
        else LANGUAGE
    )
    found: dict[bytes, StoredQuery | None] = {}
    for at, text in enumerate(texts):
        with suppress(BadSearch):  # nothing but a stop word
            found[b"%03d" % at] = StoredQuery.of(language, text)
    index = QueryIndex.empty(language).with_changes(found)
    order = chance.sample(range(len(rows)), len(rows))
    carrying = pa.concat_tables(
        [
            add_token_columns(part, language, with_positions=True)
            for part in (table(rows[:cut]), table(rows[cut:]))
        ]
    ).take(pa.array(order))
    plain = table([rows[at] for at in order])
    assert (
        index.match(carrying, explain=True).highlights
        == index.match(plain, explain=True).highlights
    )
    for first in range(0, len(rows), 3):
        assert matched(index, carrying.slice(first, 3)) == matched(index, plain.slice(first, 3))


def test_how_documents_are_split_does_not_matter() -> None:
    texts = [
        "sea",
        "sea AND storm",
        '"new york"',
        "s* -wind",
        "(sea storm wind)~2",
        "title:sea OR price:[1 TO 2]",
    ]
    index = QueryIndex.empty(LANGUAGE).with_changes(
        {text.encode(): StoredQuery.of(LANGUAGE, text) for text in texts}
    )
    words = ["sea", "storm", "wind", "new", "york", "x"]
    chance = np.random.default_rng(7)
    rows = [
        {
            "title": " ".join(chance.choice(words, 2)),
            "body": " ".join(chance.choice(words, 4)),
            "price": float(at % 4),
        }
        for at in range(600)
    ]
    whole = matched(index, table(rows))
    assert whole == expected(
        {text.encode(): LANGUAGE.parse(text) for text in texts},
        [{**dict.fromkeys(("language", "day", "at", "stars")), **row} for row in rows],
    )
    for size in (1, 7, 64, 65, 500):
        parts = [
            [
                (at + start, key, total)
                for at, key, total in matched(index, table(rows[start : start + size]))
            ]
            for start in range(0, len(rows), size)
        ]
        assert [each for part in parts for each in part] == whole


def test_queries_that_cannot_fit_are_not_looked_at() -> None:
    texts = {b"%04d" % at: f"word{at} AND other{at}" for at in range(2_000)} | {
        b"x": "-word7",
        b"y": '"word1 other1"',
        b"z": "word3 OR word4",
    }
    index = QueryIndex.empty(LANGUAGE).with_changes(
        {key: StoredQuery.of(LANGUAGE, text) for key, text in texts.items()}
    )
    found = index.match(table([{"title": "word1 other1"}]))
    assert [index.key(query) for query in found.queries] == [b"0001", b"x", b"y"]
    assert found.queries_run == 3


def test_chunks_are_bounded_in_documents_and_in_bytes() -> None:
    rows = pa.table({"body": ["a" * 5_000_000] * 8 + ["b"] * 600})
    language = Language(Fields(("body",)))
    found = list(analyzed_chunks(rows, language.fields, language.analyzer))
    assert [first for first, _ in found] == np.cumsum([0, *(chunk.count for _, chunk in found)])[
        :-1
    ].tolist()
    assert sum(chunk.count for _, chunk in found) == 608
    assert max(chunk.count for _, chunk in found) <= MAX_DOCUMENTS
    assert found[0][1].count <= 3


def test_no_documents_and_no_queries() -> None:
    index = QueryIndex.empty(LANGUAGE)
    assert matched(index, table([{"title": "sea"}])) == []
    assert matched(index.with_changes({b"a": StoredQuery.of(LANGUAGE, "sea")}), table([])) == []
    assert concat_matches([]).queries_run == 0


def test_megabytes_of_text_in_one_word_and_in_many() -> None:
    language = Language(Fields(("body",)))
    index = QueryIndex.empty(language).with_changes(
        {
            key: StoredQuery.of(language, text)
            for key, text in ((b"a", "needle"), (b"b", "x*"), (b"c", '"hay needle"'))
        }
    )
    rows = pa.table({"body": ["x" * 3_000_000, "hay " * 500_000 + "needle", None, ""]})
    assert [(at, key) for at, key, _ in matched(index, rows)] == [(0, b"b"), (1, b"a"), (1, b"c")]


def test_the_cost_of_hostile_queries_and_documents_is_bounded() -> None:
    """Each of these took minutes or days where every place, or every way to fit, was tried."""
    texts = (
        '"needle hay"~5',
        '"hay hay hay hay hay hay hay hay needle"~4',
        "aaa*a*a*a*a*a*a*b",
        "*aaa*a?a*a*ab*",
    )
    language = Language(Fields(("body",)))
    index = QueryIndex.empty(language).with_changes(
        {text.encode(): StoredQuery.of(language, text) for text in texts}
    )
    rows = pa.table(
        {"body": ["needle " + "x " * 1000 + "hay " * 200_000, "a" * 200_000, "hay hay x " * 50_000]}
    )
    started = time.process_time()
    assert matched(index, rows) == []
    assert time.process_time() - started < 10


def test_highlights_of_a_long_document_are_its_first() -> None:
    language = Language(Fields(("body",)))
    index = QueryIndex.empty(language).with_changes(
        {b"a": StoredQuery.of(language, '"hay hay" AND ha*')}
    )
    (places,) = index.match(pa.table({"body": ["hay " * 300_000]}), explain=True).highlights
    assert places == [("body", 4 * at, 4 * at + 3) for at in range(MAX_HIGHLIGHTS)]


# Cases as data

_PARSERS: tuple[Callable[[str], Any], ...] = (
    str,
    str,
    str,
    float,
    date.fromisoformat,
    lambda text: datetime.fromisoformat(text).replace(tzinfo=UTC),
    int,
)
_NAMES = ("title", "body", "language", "price", "day", "at", "stars")


def _document(line: str) -> dict[str, Any]:
    values = [value.strip() for value in line.split("|")]
    given = {
        name: None if value == "~" else parse(value)
        for name, parse, value in zip(_NAMES, _PARSERS, values, strict=False)
    }
    return {**dict.fromkeys(_NAMES), **given}


def _cases() -> list[tuple[str, list[tuple[str, str]]]]:
    cases: list[tuple[str, list[tuple[str, str]]]] = []
    for line in (Path(__file__).parent / "cases.txt").read_text().splitlines():
        if line.startswith("? "):
            cases.append((line[2:], []))
        elif line[:1] in {"+", "-", "!"}:
            cases[-1][1].append((line[0], line[1:].strip()))
    return cases


@pytest.mark.parametrize(("query", "lines"), _cases(), ids=[query for query, _ in _cases()])
def test_cases(query: str, lines: list[tuple[str, str]]) -> None:
    if lines[0][0] == "!":
        with pytest.raises(BadSearch):
            LANGUAGE.parse(query)
        return
    rows = [_document(line) for _, line in lines]
    node = LANGUAGE.parse(query)
    found = {
        at
        for at, _, _ in matched(
            QueryIndex.empty(LANGUAGE).with_changes({b"q": StoredQuery.of(LANGUAGE, query)}),
            table(rows),
        )
    }
    assert [(line, at in found) for at, (_, line) in enumerate(lines)] == [
        (line, sign == "+") for sign, line in lines
    ]
    assert [fits(node, row, LANGUAGE) for row in rows] == [sign == "+" for sign, _ in lines]


def test_changes_of_many_queries_in_small_portions() -> None:
    """Parts of falling size, folded as they grow; what goes is not found any more."""
    nodes: dict[bytes, Node] = {}
    index = QueryIndex.empty(LANGUAGE)
    for portion in range(60):
        put: dict[bytes, str | None] = {
            b"%05d" % ((portion * 37 + at * 11) % 900): f"sea{at} OR storm{portion}"
            for at in range(40)
        }
        put |= {b"%05d" % (portion * 13 % 900): None}
        index = index.with_changes(stored(put))
        nodes = {key: node for key, node in nodes.items() if key not in put} | read(put)
    assert set(index.all_keys()) == set(nodes)
    assert len(index.parts) <= 4
    rows = [{**dict.fromkeys(_NAMES), "title": f"sea{at} storm{at}"} for at in range(60)]
    assert matched(index, table(rows)) == expected(nodes, rows)
    fewer = index.with_changes(dict.fromkeys(sorted(nodes)[:-3]))
    assert len(fewer) == 3
    assert len(fewer.vocabulary) < len(index.vocabulary) / 4


def test_reasons() -> None:
    index = QueryIndex.empty(LANGUAGE).with_changes(
        {
            b"a": StoredQuery.of(
                LANGUAGE, '"new york"~1 AND (st* OR brooklyn) AND language:en -rain'
            ),
            b"b": StoredQuery.of(LANGUAGE, "-rain"),
        }
    )
    found = index.match(
        table([{"title": "Störms, near", "body": "new in york; Storm", "language": "en"}]),
        explain=True,
    )
    assert found.highlights == (
        [("body", 0, 3), ("body", 7, 11), ("body", 13, 18), ("title", 0, 6)],
        [],
    )
    assert found.explanations == ('"new york"~1, st*, language:en', "nothing that it must not have")


def test_a_regular_expression_fits_whole_words() -> None:
    rows = pa.table({"t": ["Storms at sea", "a stork", "brainstorm", "x" * 50_000 + "!", None]})
    language = Language(Fields(("t",)))
    texts = {b"\0a": "/stor[mk]s?/", b"\0b": "/.*storm/", b"\0c": "/(x+x+)+y/", b"\0d": "/a|b/"}
    index = QueryIndex.empty(language).with_changes(
        {key: StoredQuery.of(language, text) for key, text in texts.items()}
    )
    assert [match[:2] for match in matched(index, rows)] == [
        (0, b"\0a"),
        (1, b"\0a"),
        (1, b"\0d"),
        (2, b"\0b"),
    ]


def test_a_stored_query_that_a_newer_version_refuses_fits_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    language = Language(Fields(("t",)))
    query = StoredQuery.of_stored(language, "/(/ OR storm", b"value")
    index = QueryIndex.empty(language).with_changes({b"\0q": query})
    assert matched(index, pa.table({"t": ["storm"]})) == []
    assert index.get(b"\0q") == b"value"
    assert "fits no document any more" in caplog.text


def test_a_saved_index_with_words_of_an_older_folding_is_built_again() -> None:
    assert f"folding {FOLDING_VERSION}" in index_module._WRITTEN_BY.decode()
