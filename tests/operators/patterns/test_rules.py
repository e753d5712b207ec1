"""Rules that come, change and go: each gives what a declared pattern gives over the rows from its
coming on, until it goes; whatever the calls and shards.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headrace.columnar.keys import KEY_GROUPS, encode_keys, key_groups
from headrace.errors import NewerFormat
from headrace.operators.kernel import UNSTARTED
from headrace.operators.patterns.compiled_pattern import PatternSpec
from headrace.operators.patterns.rules import (
    PatternRule,
    RuledKernel,
    RuleSettings,
    decode_rules,
    encode_rules,
    prototype_settings,
)
from headrace.operators.patterns.settings import MatchSettings
from headrace.testing.kernels import MemoryState
from tests.operators.patterns.pattern_driver import SCHEMA, Feed, Row, feed_to, row, settings
from tests.operators.patterns.strategies import feeds
from tests.operators.windows.feeding import spread
from tests.short_forms import examples

FITS: dict[str, Callable[[int], bool]] = {
    "a": lambda v: v % 2 == 0,
    "b": lambda v: v % 3 == 0,
    "c": lambda v: v > 5,
    "x": lambda v: v < 2,
}
DEFINE = {"a": "v % 2 = 0", "b": "v % 3 = 0", "c": "v > 5", "x": "x.v < 2"}
TEXTS = ["a b", "a -> b ->> c", "a+ c", "b{2} x", "a !x -> c", "b+ !x", "x (a | b)"]
MEASURES = (("first_id", "first(id)"), ("last_id", "last(id)"), ("n", "count(*)"))
RULES = pa.schema(
    [
        ("name", pa.string()),
        ("pattern", pa.string()),
        ("define", pa.string()),
        ("within", pa.string()),
    ]
)
CHANGES = pa.schema([*RULES, ("_change_type", pa.string()), ("_tick", pa.int64())])
Change = tuple[int, str, str | None, int]
"""Tick, rule, its pattern (None: it goes), and how long a match may take."""


def rule_settings(**more: Any) -> RuleSettings:
    matching = prototype_settings(
        MatchSettings("test", SCHEMA, ("k",), "t", (), timed_out=True), MEASURES
    )
    return replace(
        RuleSettings(matching, RULES, "name", MEASURES, None, "skip past last row", 5, 1000, 1000),
        **more,
    )


def fitted(feed: Feed) -> Feed:
    """The rows of a feed, each with the kind that its value implies."""
    return Feed(
        [
            [
                row(
                    each["k"],
                    each["t"],
                    "".join(name for name, fits in FITS.items() if fits(each["v"])),
                    each["id"],
                    each["v"],
                )
                for each in tick
            ]
            for tick in feed.ticks
        ],
        feed.closed,
    )


def changes_of(changes: Sequence[Change], first: int, stop: int) -> pa.Table:
    rows = [
        {
            "name": name,
            "pattern": text,
            "define": json.dumps({s: DEFINE[s] for s in DEFINE if s in (text or "")}),
            "within": f"{within} microseconds",
            "_change_type": "delete" if text is None else "update_postimage",
            "_tick": tick,
        }
        for tick, name, text, within in changes
        if first <= tick < stop
    ]
    return pa.Table.from_pylist(rows, CHANGES)


def ruled(
    feed: Feed, changes: Sequence[Change], cuts: Sequence[int], shards: Sequence[int]
) -> tuple[list[Row], list[Row], list[MemoryState]]:
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(feed.ticks)}), len(feed.ticks)]
    states, emitted, timed_out_rows = [MemoryState()], list[Row](), list[Row]()
    for call, (first, stop) in enumerate(pairwise(bounds)):
        states = spread(states, shards[call % len(shards)])
        rows, watermarks = feed.table(first, stop), feed.watermarks(first, stop)
        of_row = key_groups(encode_keys(rows, ["k"])).astype(np.int64) * len(states) // KEY_GROUPS
        for number, state in enumerate(states):
            kernel = pickle.loads(pickle.dumps(RuledKernel(rule_settings())))
            emitted += kernel.step_timed(
                state,
                [rows.filter(pa.array(of_row == number)), changes_of(changes, first, stop)],
                [watermarks, watermarks],
            ).to_pylist()
            timed_out_rows += kernel.take_side_output().to_pylist()
    return emitted, timed_out_rows, states


def expected(feed: Feed, changes: Sequence[Change]) -> tuple[list[Row], list[Row]]:
    """Each life of a rule as a pattern that was declared, over the rows that it looks at."""
    emitted, timed_out_rows = list[Row](), list[Row]()
    for at, (tick, name, text, within) in enumerate(changes):
        before = next((each for each in reversed(changes[:at]) if each[1] == name), None)
        if text is None or (before is not None and before[2:] == (text, within)):
            continue
        later = [
            each for each in changes[at + 1 :] if each[1] == name and each[2:] != (text, within)
        ]
        end = later[0][0] if later else len(feed.ticks)
        since = feed.closed[tick - 1] if tick else UNSTARTED
        seen = Feed(
            [
                [each for each in rows if each["t"] >= since and each in feed.in_time]
                for rows in feed.ticks
            ],
            feed.closed,
        )
        by_row = feed_to(settings(PatternSpec(text, (), MEASURES, within), timed_out=True), seen)
        emitted += [
            {**each, "pattern": name} for each in by_row.emitted if tick <= each["_tick"] < end
        ]
        timed_out_rows += [
            {**each, "pattern": name}
            for each in by_row.timed_out_rows
            if tick <= each["_tick"] < end
        ]
    return emitted, timed_out_rows


def in_order(rows: list[Row]) -> list[str]:
    return sorted(str(sorted(each.items())) for each in rows)


@hypothesis_settings(max_examples=examples(120), deadline=None)
@given(
    feeds(),
    st.lists(
        st.tuples(
            st.integers(0, 12),
            st.sampled_from("pqr"),
            st.none() | st.sampled_from(TEXTS),
            st.sampled_from([3, 6, 12]),
        ),
        max_size=7,
    ),
    st.lists(st.integers(1, 20), max_size=5),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
)
def test_a_rule_gives_what_a_pattern_gives_while_it_is_in_force(
    feed: Feed, describe: list[Change], cuts: list[int], shards: list[int]
) -> None:
    feed = fitted(feed)
    once = {(each[0], each[1]): each for each in describe if each[0] < len(feed.ticks)}
    changes = sorted(once.values(), key=lambda each: each[0])
    emitted, timed_out_rows, states = ruled(feed, changes, cuts, shards)
    wanted, wanted_timed_out = expected(feed, changes)
    assert in_order(emitted) == in_order(wanted)
    assert in_order(timed_out_rows) == in_order(wanted_timed_out)
    left = {key for state in states for key in state.values if key[:1] != b"R"}
    assert left == set(), "when the time is up, a key holds nothing"


def test_the_format_of_rules_is_checked() -> None:
    rules = (
        PatternRule(
            "one",
            3,
            UNSTARTED,
            PatternSpec(
                "a b",
                (("a", "v > 1"),),
                MEASURES,
                5,
                "no skip",
                (("both", ("a", "b")),),
                1000,
                1000,
            ),
        ),
    )
    assert decode_rules(encode_rules(rules), rule_settings()) == rules
    with pytest.raises(NewerFormat, match="newer Headrace"):
        decode_rules(b"\x02" + encode_rules(rules)[1:], rule_settings())
