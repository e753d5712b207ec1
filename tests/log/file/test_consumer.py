"""Sharing partitions out: even, sticky, and handed over in two steps."""

from __future__ import annotations

import time
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
counts = st.dictionaries(st.sampled_from("tuvwxyz"), st.integers(0, 12), min_size=1)


@given(members, members, counts)
def test_sharing_out_is_complete_and_even_and_moves_few(
    first: set[str], second: set[str], counts: dict[str, int]
) -> None:
    about = {"topics": list(counts)}
    before = assign_partitions(dict.fromkeys(first, about), counts, {})
    after = assign_partitions(dict.fromkeys(second, about), counts, before)
    assert len(after) == sum(counts.values())
    totals = Counter(after.values())
    sizes = [totals[name] for name in second]
    assert max(sizes) - min(sizes) <= 1, "over all topics"
    for topic in counts:
        shares = Counter(name for key, name in after.items() if key.startswith(f"{topic}/"))
        sizes = [shares[name] for name in second]
        assert max(sizes) - min(sizes) <= 1, "and in each"
    if first <= second or second <= first:
        # Each member gives up what it must, and to level the topics little else.
        moved = sum(before[key] != after[key] for key in after)
        must = sum(name not in second for name in before.values()) + sum(
            max(0, Counter(before.values())[name] - len(after) // len(second) - 1)
            for name in first & second
        )
        assert moved <= must + 2 * len(counts) * len(second)


subscriptions = st.dictionaries(
    st.sampled_from("abcde"), st.sets(st.sampled_from("tuvw"), min_size=1), min_size=1
)


@given(subscriptions, subscriptions, counts)
def test_an_assignment_that_was_computed_again_moved_partitions_for_ever(
    first: dict[str, set[str]], second: dict[str, set[str]], counts: dict[str, int]
) -> None:
    def entries(wanted: dict[str, set[str]]) -> dict[str, dict[str, set[str]]]:
        return {name: {"topics": topics} for name, topics in wanted.items()}

    before = assign_partitions(entries(first), counts, {})
    after = assign_partitions(entries(second), counts, before)
    assert assign_partitions(entries(second), counts, after) == after
    for key, name in after.items():
        assert key.split("/")[0] in second[name]
    subscribed = {topic for topics in second.values() for topic in topics}
    assert len(after) == sum(counts.get(topic, 0) for topic in subscribed)


def test_members_with_different_topics_have_equal_shares_where_they_can() -> None:
    """`b` could read everything, and `a` and `c` a part each: b passes on what it has."""
    members = {"a": {"topics": ["t"]}, "b": {"topics": ["t", "u"]}, "c": {"topics": ["u"]}}
    shared = assign_partitions(members, {"t": 6, "u": 3}, {})
    assert Counter(shared.values()) == {"a": 3, "b": 3, "c": 3}
    alone = {"a": {"topics": ["t"]}, "b": {"topics": ["t", "u"]}}
    assert Counter(assign_partitions(alone, {"t": 4, "u": 4}, {}).values()) == {"a": 4, "b": 4}


def test_a_large_group_is_shared_out_quickly() -> None:
    counts = {f"t{number}": number % 5 + 1 for number in range(300)}
    about = {"topics": list(counts)}
    shared: dict[str, str] = {}
    begun = time.process_time()
    for size in (1, 2, 10, 39, 40, 20):
        shared = assign_partitions({f"m{n}": about for n in range(size)}, counts, shared)
        totals = Counter(shared.values())
        assert max(totals.values()) - min(totals.values()) <= 1
        assert len(totals) == size
    assert time.process_time() - begun < 10


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
