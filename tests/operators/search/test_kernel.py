"""Documents and changing queries, tick by tick, against every query with every document: any split
into calls, any number of shards, restarts between.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.columnar.columns import CHANGE_TYPE, TICK
from headrace.columnar.keys import encode_keys, key_groups
from headrace.errors import BadSearch, NewerFormat
from headrace.operators.kernel import Watermarks
from headrace.operators.search import index as index_module
from headrace.operators.search.index import clear_index_cache
from headrace.operators.search.kernel import SearchKernel, SearchSettings, snippet
from headrace.operators.search.parser import Language
from headrace.operators.search.syntax import Node
from headrace.testing.kernels import MemoryState
from tests.operators.search.oracle import fits, score
from tests.operators.search.strategies import LANGUAGE, SCHEMA, documents, queries
from tests.short_forms import examples

QUERIES = pa.schema([("id", pa.int64()), ("query", pa.string()), ("owner", pa.string())])
SETTINGS = SearchSettings(
    "alerts",
    SCHEMA,
    QUERIES,
    ("id",),
    "query",
    (("id", "id"), ("query", "query"), ("owner", "owner")),
    LANGUAGE,
)
Tick = tuple[list[dict[str, Any]], dict[int, str | None]]
_NEVER = np.zeros(0, np.int64)
NO_CLOCKS = [Watermarks(_NEVER, _NEVER, _NEVER, _NEVER)] * 2


def changes_of(history: list[Tick]) -> list[dict[str, Any]]:
    """The queries' changes, each with the old and the new row."""
    now: dict[int, dict[str, Any]] = {}
    rows = []
    for tick, (_, puts) in enumerate(history, 1):
        for number, text in puts.items():
            before, after = (
                now.pop(number, None),
                (
                    None
                    if text is None
                    else {"id": number, "query": text, "owner": f"o{number}-{tick}"}
                ),
            )
            if after is not None:
                now[number] = after
            kinds = {
                (False, True): ["insert"],
                (True, False): ["delete"],
                (True, True): ["update_preimage", "update_postimage"],
                (False, False): [],
            }
            found = kinds[before is not None, after is not None]
            rows += [
                {
                    **((before if kind in {"delete", "update_preimage"} else after) or {}),
                    CHANGE_TYPE: kind,
                    TICK: tick,
                }
                for kind in found
            ]
    return rows


def expected(history: list[Tick]) -> list[tuple[int, str | None, int, str, Any]]:
    now: dict[int, tuple[Any, str]] = {}
    emitted = []
    for tick, (rows, puts) in enumerate(history, 1):
        for number, text in puts.items():
            now.pop(number, None)
            try:
                if text is not None:
                    now[number] = LANGUAGE.parse(text), f"o{number}-{tick}"
            except BadSearch:
                continue
        emitted += [
            (tick, row["title"], number, owner, pytest.approx(score(node, row, LANGUAGE)))
            for row in rows
            for number, (node, owner) in now.items()
            if fits(node, row, LANGUAGE)
        ]
    return sorted(emitted, key=lambda each: (each[0], str(each[1]), each[2]))


class Shards:
    """A kernel for each shard, with its state, as a host has them."""

    def __init__(self, count: int) -> None:
        self.states = [MemoryState() for _ in range(count)]

    def call(self, rows: pa.Table, changes: pa.Table) -> list[dict[str, Any]]:
        owner = key_groups(encode_keys(changes, ["id"])).astype(np.int64) * len(self.states) // 128
        emitted = []
        for shard, state in enumerate(self.states):
            kernel = pickle.loads(pickle.dumps(SearchKernel(SETTINGS)))
            emitted += kernel.step_timed(
                state, [rows, changes.filter(pa.array(owner == shard))], NO_CLOCKS
            ).to_pylist()
        return emitted


def tables(history: list[Tick], first: int, last: int) -> tuple[pa.Table, pa.Table]:
    rows = [
        {**row, TICK: tick}
        for tick, (given, _) in enumerate(history, 1)
        for row in given
        if first <= tick < last
    ]
    changes = [row for row in changes_of(history) if first <= row[TICK] < last]
    ticked = pa.field(TICK, pa.int64())
    return (
        pa.Table.from_pylist(rows, pa.schema([*SCHEMA, ticked])),
        pa.Table.from_pylist(
            changes, pa.schema([*QUERIES, pa.field(CHANGE_TYPE, pa.string()), ticked])
        ),
    )


bad = st.sampled_from(["(", "titel:x", "*a*"])
histories = st.lists(
    st.tuples(
        st.lists(documents, max_size=3),
        st.dictionaries(st.integers(0, 6), st.none() | queries | bad, max_size=3),
    ),
    min_size=1,
    max_size=6,
)


@pytest.fixture(params=[0, index_module.MIN_UNSAVED_QUERIES], ids=["written down", "in memory"])
def _noted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Indexes are written down after every change, or not at all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "MIN_UNSAVED_QUERIES", request.param)
        yield


@pytest.mark.usefixtures("_noted")
@settings(max_examples=examples(60))
@given(histories, st.sets(st.integers(2, 6)), st.integers(1, 3), st.booleans())
def test_any_split_and_any_number_of_shards_equal_the_oracle(
    history: list[Tick], cuts: set[int], shards: int, forgets: bool
) -> None:
    bounds = sorted({1, len(history) + 1, *(cut for cut in cuts if cut <= len(history))})
    running, emitted = Shards(shards), []
    for first, last in itertools.pairwise(bounds):
        if forgets:
            clear_index_cache()
        emitted += running.call(*tables(history, first, last))
    found = sorted(
        ((row[TICK], row["title"], row["id"], row["owner"], row["score"]) for row in emitted),
        key=lambda each: (each[0], str(each[1]), each[2]),
    )
    assert found == expected(history)


def call(
    kernel: SearchKernel, state: MemoryState, history: list[Tick], first: int, last: int
) -> list[dict[str, Any]]:
    emitted: list[dict[str, Any]] = kernel.step_timed(
        state, list(tables(history, first, last)), NO_CLOCKS
    ).to_pylist()
    return emitted


def document(title: str) -> dict[str, Any]:
    return {**dict.fromkeys(SCHEMA.names), "title": title}


HISTORY: list[Tick] = [
    ([], {1: "sea", 2: "storm OR ("}),
    ([document("sea")], {3: "sea*"}),
    ([document("seas")], {1: None}),
]


def test_a_repeated_attempt_starts_from_the_state_and_not_from_what_the_last_one_left() -> None:
    kernel, state = SearchKernel(SETTINGS), MemoryState()
    call(kernel, state, HISTORY, 1, 2)
    before = state.copy()
    first = call(kernel, state, HISTORY, 2, 4)
    assert call(kernel, before, HISTORY, 2, 4) == first
    assert [(row["title"], row["id"]) for row in first] == [("sea", 1), ("sea", 3), ("seas", 3)]
    assert before.values == state.values


def test_a_query_that_cannot_be_read_is_diverted_with_its_place_and_others_go_on() -> None:
    kernel = SearchKernel(SETTINGS)
    call(kernel, MemoryState(), HISTORY, 1, 4)
    (dead_letter,) = kernel.dead_letters.take().to_pylist()
    assert (dead_letter["id"], dead_letter["query"], dead_letter[TICK]) == (2, "storm OR (", 1)
    assert "(at character 9)" in dead_letter["_reason"]
    assert kernel.dead_letters.take().num_rows == 0


def test_a_query_that_can_no_longer_be_read_is_no_longer_in_force() -> None:
    history: list[Tick] = [
        ([document("sea")], {1: "sea"}),
        ([document("sea")], {1: "sea("}),
        ([document("sea")], {1: "sea -x"}),
    ]
    emitted = call(SearchKernel(SETTINGS), MemoryState(), history, 1, 4)
    assert [row[TICK] for row in emitted] == [1, 3]


def test_a_restart_reads_only_changes_since_the_index_was_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = index_module.MIN_UNSAVED_QUERIES
    history: list[Tick] = [
        ([], {number: f"word{number}" for number in range(count)}),
        ([], {3: "other", 4: None}),
        ([document("word3 word4 word5 other")], {}),
    ]
    kernel, state = SearchKernel(SETTINGS), MemoryState()
    call(kernel, state, history, 1, 2)
    call(kernel, state, history, 2, 3)
    assert state.cache is not None
    read: list[str | None] = []
    parse = Language.parse

    def noted(self: Language, text: str | None) -> Node:
        read.append(text)
        return parse(self, text)

    monkeypatch.setattr(Language, "parse", noted)
    clear_index_cache()
    assert [row["id"] for row in call(SearchKernel(SETTINGS), state, history, 3, 4)] == [3, 5]
    assert read == ["other"]
    clear_index_cache()
    read.clear()
    for content in (
        None,
        b"something else",
        state.cache.replace(b"search index 3", b"search index 0"),
    ):
        state.cache = content
        assert [row["id"] for row in call(SearchKernel(SETTINGS), state, history, 3, 4)] == [3, 5]
        clear_index_cache()
    assert len(read) == 3 * (count - 1)


def test_figures_of_a_batch() -> None:
    kernel, state = SearchKernel(SETTINGS), MemoryState()
    history: list[Tick] = [
        ([], {number: f"word{number}" for number in range(50)}),
        ([document("word3 word4 x")], {}),
    ]
    call(kernel, state, history, 1, 3)
    assert kernel.counts == {"queries_run": 2}
    (tag,) = kernel.gauges.values()
    assert sum(key.startswith(tag) for key in state.values) == 50


def test_a_newer_format_is_refused() -> None:
    kernel, state = SearchKernel(SETTINGS), MemoryState()
    call(kernel, state, HISTORY, 1, 2)
    clear_index_cache()
    state.values = {key: b"\x02" + value[1:] for key, value in state.values.items()}
    with pytest.raises(NewerFormat):
        call(kernel, state, HISTORY, 2, 3)


def test_highlights_and_explanations() -> None:
    kernel = SearchKernel(replace(SETTINGS, highlights=True, explain=True))
    emitted = call(
        kernel, MemoryState(), [([document("the Sea is wide")], {1: "sea AND w*"})], 1, 2
    )
    assert emitted[0]["explanation"] == "sea, w*"
    assert emitted[0]["highlights"] == [
        {"column": "title", "start": 4, "end": 7, "snippet": "the Sea is wide"},
        {"column": "title", "start": 11, "end": 15, "snippet": "the Sea is wide"},
    ]


def test_many_matches_of_large_documents_come_in_pieces_that_arrow_can_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    history: list[Tick] = [
        (
            [document(f"sea {'x' * (at % 3) * 100} {at}") for at in range(20)] + [document("")],
            dict.fromkeys(range(7), "sea -19"),
        )
    ]
    settings = replace(SETTINGS, highlights=True, explain=True)
    whole = SearchKernel(settings).step_timed(MemoryState(), list(tables(history, 1, 2)), NO_CLOCKS)
    monkeypatch.setattr("headrace.operators.search.kernel.MAX_BYTES", 1_000)
    pieces = SearchKernel(settings).step_timed(
        MemoryState(), list(tables(history, 1, 2)), NO_CLOCKS
    )
    assert whole["title"].num_chunks < 5 < pieces["title"].num_chunks
    assert whole.num_rows == 19 * 7
    assert pieces.to_pylist() == whole.to_pylist()


def test_snippets_say_that_there_is_more() -> None:
    text = "a" * 100 + "needle" + "b" * 100
    assert snippet(text, 100, 106) == "…" + "a" * 40 + "needle" + "b" * 40 + "…"
