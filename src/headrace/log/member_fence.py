"""The fence of a group member: what it has delivered and not committed, and whether it lost any.

A member may poll several times before it commits. When a rebalance takes a partition away in
between, the rows of that partition are in the member's hands and will be delivered to the new owner
as well. Whatever the member makes of them must not be committed:

    poll     rows 0-9 of partition 0, rows 0-4 of partition 1
    poll     partition 1 has moved to another member          the member is fenced
    commit   MemberFenced, and so are positions() and Transaction.commit_offsets()
    poll     partition 0 goes back to its last commit: rows 0-9 are delivered again

The fence stays until its error has been raised and the member polls again. Both backends use it;
what they have in common ends there, so the fence knows nothing of how partitions are assigned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headrace.errors import MemberFenced
from headrace.log.values import Offsets

TopicPartitionId = tuple[str, int]
"""A topic and the number of one of its partitions."""

FIX_FENCED = (
    "discard what was read since the last commit (abort the transaction) and poll again: those rows"
    " are delivered again, to whoever owns their partitions now. An on_revoked callback can commit"
    " before partitions move."
)


class MemberFence:
    """What one member has delivered since its last commit. For one thread at a time."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._committed: dict[TopicPartitionId, int] = {}  # or where reading began
        self._delivered: dict[TopicPartitionId, int] = {}  # behind the last uncommitted row
        self._lost: set[TopicPartitionId] = set()
        self._is_reported = False
        self.epoch = 0
        """Changes when rows are lost or go back: positions of an earlier epoch are stale."""

    def assign(self, partition: TopicPartitionId, position: int) -> None:
        """A partition was assigned, to be read from a position on."""
        self._committed[partition] = position
        self._delivered.pop(partition, None)

    def deliver(self, partition: TopicPartitionId, position: int) -> None:
        """Rows in front of a position were delivered."""
        self._delivered[partition] = position

    def commit(self, offsets: Mapping[str, Mapping[int, int]]) -> None:
        """This member's offsets were committed."""
        for topic, partitions in offsets.items():
            for number, offset in partitions.items():
                partition = (topic, number)
                if partition in self._committed:
                    self._committed[partition] = offset
                    if offset >= self._delivered.get(partition, 0):
                        self._delivered.pop(partition, None)

    def seek(self, partition: TopicPartitionId, position: int) -> None:
        """The member continues at another position."""
        if partition not in self._delivered:
            self._committed[partition] = position

    def forget(self, partitions: Iterable[TopicPartitionId]) -> None:
        """Partitions are gone whose rows nobody will read again."""
        for partition in partitions:
            self._committed.pop(partition, None)
            self._delivered.pop(partition, None)

    def lose(self, partitions: Iterable[TopicPartitionId]) -> None:
        """Partitions were taken away. Fences the member if rows of them are not committed."""
        partitions = list(partitions)
        lost = {partition for partition in partitions if partition in self._delivered}
        self.forget(partitions)
        if lost:
            self._lost |= lost
            self.epoch += 1

    def check(self, offsets: Mapping[str, Mapping[int, int]] | None = None) -> None:
        """Raise MemberFenced if rows were lost, or if offsets are from before that."""
        is_stale = isinstance(offsets, Offsets) and offsets.epoch not in {None, self.epoch}
        if not self._lost and not is_stale:
            return
        self._is_reported = True
        lost = ", ".join(f"{topic}[{number}]" for topic, number in sorted(self._lost))
        raise MemberFenced(
            f"This member of group {self._group!r} has lost {lost}, with rows that it had delivered"
            " and not committed."
            if lost
            else f"These positions are from before this member of group {self._group!r} lost a"
            " partition.",
            fix=FIX_FENCED,
        )

    def report(self) -> None:
        """MemberFenced was raised for another reason: the next poll goes back as well."""
        self._is_reported = True

    def rewind(self) -> dict[TopicPartitionId, int]:
        """The positions to go back to, at the beginning of a poll: none, unless the member was
        fenced and has been told. The fence is gone then.
        """
        if not self._is_reported:
            return {}
        self._is_reported = False
        self._lost = set()
        self.epoch += 1
        positions = {partition: self._committed[partition] for partition in self._delivered}
        self._delivered = {}
        return positions
