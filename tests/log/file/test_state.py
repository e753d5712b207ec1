"""A queue's state of its messages, compared with a plain model."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from headrace.log.file.state import MAX_LEASED, MessageLease, PartitionQueue, QueueState


def over_at(time_us: int) -> Callable[[int, MessageLease], bool]:
    return lambda _offset, lease: lease.visible_us <= time_us


def test_messages_are_given_out_once_until_their_visibility_runs_out() -> None:
    state = QueueState()
    state.apply("take", 0, [0, 1], 100, "r")
    queue = state.partition(0)
    assert queue.available(4, over_at(50), 10) == [2, 3]
    assert queue.available(4, over_at(100), 10) == [0, 1, 2, 3]
    state.apply("take", 0, [0], 200, "s")
    assert (queue.leases[0].deliveries, queue.leases[0].receiver) == (2, "s")


def test_the_floor_rises_over_what_is_done_out_of_order() -> None:
    state = QueueState()
    state.apply("take", 0, [0, 1, 2], 100, "r")
    state.apply("done", 0, [2])
    state.apply("done", 0, [0])
    queue = state.partition(0)
    assert (queue.floor, queue.done.ranges(), queue.waiting(5)) == (1, [(2, 3)], 3)
    state.apply("done", 0, [1])
    assert (queue.floor, queue.done.ranges(), queue.waiting(5)) == (3, [], 2)


def test_a_released_message_is_redelivered_after_its_delay() -> None:
    state = QueueState()
    state.apply("take", 0, [0], 1000, "r")
    state.apply("return", 0, [0], 500)
    queue = state.partition(0)
    assert queue.available(1, over_at(499), 1) == []
    assert queue.available(1, over_at(500), 1) == [0]


def test_leased_messages_are_bounded() -> None:
    queue = PartitionQueue()
    assert len(queue.available(10**9, over_at(0), 10**9)) == MAX_LEASED


def test_a_held_message_costs_no_memory_for_those_behind_it() -> None:
    state = QueueState()
    state.apply("take", 0, [0], 1000, "r")
    queue = state.partition(0)
    for first in range(1, 1_000_000, 5_000):
        offsets = queue.available(10**9, over_at(0), 5_000)
        assert offsets[0] == first
        state.apply("take", 0, offsets, 1000, "r")
        state.apply("done", 0, offsets)
    assert (queue.floor, queue.done.ranges()) == (0, [(1, 1_000_001)])


operations = st.lists(
    st.tuples(
        st.sampled_from(["take", "done", "return", "renew"]), st.integers(0, 9), st.integers(0, 50)
    ),
    max_size=40,
)


@given(operations)
def test_any_history_agrees_with_a_plain_model_and_survives_a_checkpoint(
    history: list[tuple[str, int, int]],
) -> None:
    state = QueueState()
    done: set[int] = set()
    leased: dict[int, tuple[int, int]] = {}  # offset -> (deliveries, visible from)
    for what, offset, when in history:
        if what == "take" and offset not in done:
            state.apply("take", 0, [offset], when, "r")
            leased[offset] = (leased.get(offset, (0, 0))[0] + 1, when)
        elif what == "done":
            state.apply("done", 0, [offset])
            done.add(offset)
            leased.pop(offset, None)
        elif what in {"return", "renew"} and offset in leased:
            state.apply(what, 0, [offset], when)
            leased[offset] = (leased[offset][0], when)
        state = QueueState.load(state.dump())
    queue = state.partition(0)
    assert queue.waiting(10) == 10 - len(done)
    assert {o: (g.deliveries, g.visible_us) for o, g in queue.leases.items()} == leased
    again = sorted(o for o, (_, visible) in leased.items() if visible <= 25)
    assert queue.available(queue.next, over_at(25), 100) == again
