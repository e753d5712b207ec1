"""Sharing partitions out: even, sticky, and handed over in two steps."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import MemberFenced
from headrace.log.file.commit_draft import CommitDraft
from headrace.log.file.consumer import assign_partitions, check_owner, coordinate, leave_group
from headrace.log.file.state import State

TOPIC = {
    "ddl": "a BIGINT",
    "key": [],
    "partitions": 4,
    "is_table": False,
    "retention_us": None,
    "retention_bytes": None,
    "compact": False,
    "history_us": None,
    "tombstone_us": 1,
    "segment_bytes": 1,
    "segment_us": 1,
    "compression": "none",
}
ABOUT = {"topics": ["t"], "timeout_us": 1, "host": "h"}


@pytest.fixture
def state() -> State:
    state = State()
    state.apply(1, 0, [["topic", "t", TOPIC]])
    return state


def step(state: State, member: str | None, dead: tuple[str, ...] = ()) -> set[str]:
    return coordinate(CommitDraft(state, 0), "g", member, ABOUT, dead)[1]


members = st.sets(st.sampled_from("abcdefg"), min_size=1, max_size=5)


@given(members, members, st.integers(1, 12), st.integers(0, 5))
def test_sharing_out_is_complete_even_and_moves_no_more_than_it_must(
    first: set[str], second: set[str], partitions: int, others: int
) -> None:
    counts = {"t": partitions, "u": others}
    about = {"topics": ["t", "u"]}
    before = assign_partitions(dict.fromkeys(first, about), counts, {})
    after = assign_partitions(dict.fromkeys(second, about), counts, before)
    for topic, count in counts.items():
        keys = [key for key in after if key.startswith(f"{topic}/")]
        assert len(keys) == count
        shares = Counter(after[key] for key in keys)
        sizes = [shares[name] for name in second]
        assert max(sizes) - min(sizes) <= 1
        stayed = sum(before[key] == after[key] for key in keys)
        could_stay = sum(
            min(Counter(before[key] for key in keys)[name], count // len(second))
            for name in first & second
        )
        assert stayed >= could_stay


def test_a_topic_goes_only_to_members_who_want_it() -> None:
    shared = assign_partitions(
        {"a": {"topics": ["t"]}, "b": {"topics": ["u"]}}, {"t": 3, "u": 2}, {}
    )
    assert {key.split("/")[0]: name for key, name in shared.items()} == {"t": "a", "u": "b"}


def test_a_newcomer_waits_until_the_owner_lets_go(state: State) -> None:
    assert len(step(state, "a")) == 4
    assert step(state, "b") == set()  # a has not polled since
    assert len(step(state, "a")) == 2  # lets go of two
    taken = step(state, "b")
    assert len(taken) == 2
    assert taken.isdisjoint(step(state, "a"))


def test_the_dead_are_replaced_at_once(state: State) -> None:
    step(state, "a")
    step(state, "b")
    assert len(step(state, "b", dead=("a",))) == 4


def test_a_consumer_that_leaves_frees_its_partitions(state: State) -> None:
    step(state, "a")
    leave_group(CommitDraft(state, 0), "g", "a")
    assert state.groups["g"].owners == {}
    assert len(step(state, "b")) == 4


def test_only_the_owner_commits(state: State) -> None:
    step(state, "a")
    check_owner(state, "g", {"t": {0: 5}}, "a")
    with pytest.raises(MemberFenced, match=r"t\[0\].*'a' does"):
        check_owner(state, "g", {"t": {0: 5}}, "b")
    with pytest.raises(MemberFenced):
        check_owner(state, "g", {"t": {0: 5}}, None)


def test_an_outsider_may_commit_when_nobody_reads(state: State) -> None:
    check_owner(state, "g", {"t": {0: 5}}, None)
    step(state, "a")
    leave_group(CommitDraft(state, 0), "g", "a")
    check_owner(state, "g", {"t": {0: 5}}, None)
    with pytest.raises(MemberFenced):
        check_owner(state, "g", {"t": {0: 5}}, "a")
