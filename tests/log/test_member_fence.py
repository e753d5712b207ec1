"""The fence of a group member, apart from any backend."""

from __future__ import annotations

import pickle

import pytest

from headrace.errors import MemberFenced
from headrace.log.member_fence import MemberFence
from headrace.log.values import Offsets


@pytest.fixture
def fence() -> MemberFence:
    """The fence of a member that has delivered rows of two of its three partitions."""
    fence = MemberFence("g")
    for number, position in enumerate((5, 0, 7)):
        fence.assign(("t", number), position)
    fence.deliver(("t", 0), 10)
    fence.deliver(("t", 1), 3)
    return fence


def test_a_partition_with_uncommitted_rows_fences_until_it_is_told_and_goes_back(
    fence: MemberFence,
) -> None:
    positions = Offsets({"t": {0: 10, 1: 3}}, epoch=fence.epoch)
    fence.check(positions)
    fence.lose([("t", 1)])
    assert fence.rewind() == {}, "polling does not help as long as nobody has heard of it"
    for _ in range(2):
        with pytest.raises(MemberFenced, match=r"t\[1\]") as caught:
            fence.check()
        assert "poll again" in str(caught.value.fix)
    assert fence.rewind() == {("t", 0): 5}
    fence.check()
    with pytest.raises(MemberFenced, match="before"):
        fence.check(positions)


def test_what_is_committed_fences_nobody(fence: MemberFence) -> None:
    fence.commit({"t": {0: 10, 1: 2}})
    fence.lose([("t", 0), ("t", 2)])
    fence.check()
    fence.commit({"t": {1: 3}})
    fence.lose([("t", 1)])
    fence.check()


def test_rows_of_a_deleted_topic_fence_nobody(fence: MemberFence) -> None:
    fence.forget([("t", 0), ("t", 1)])
    fence.lose([("t", 0), ("t", 1)])
    fence.check()


def test_a_seek_moves_where_to_go_back_to_only_if_all_is_committed(fence: MemberFence) -> None:
    fence.seek(("t", 0), 8)
    fence.seek(("t", 2), 20)
    fence.deliver(("t", 2), 25)
    fence.report()
    assert fence.rewind() == {("t", 0): 5, ("t", 1): 0, ("t", 2): 20}


def test_positions_can_go_to_another_process(fence: MemberFence) -> None:
    positions = Offsets({"t": {0: 1}}, member="m", handle=fence, epoch=3)
    copy = pickle.loads(pickle.dumps(positions))
    assert (copy, copy.member, copy.handle, copy.epoch) == ({"t": {0: 1}}, "m", None, None)
