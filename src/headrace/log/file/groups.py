"""Who reads what in a consumer group: pure decisions over the group's state, made under the log's lock.

A partition has an owner and a target. It moves from one live member to another in two steps: the owner lets go of it when it next polls
(so what it delivered has been committed by then), and the target takes it when it is free.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.errors import BadPartition, InputError, MemberFenced, OffsetOutOfRange
from headrace.log.api import Positions
from headrace.log.file.draft import Draft
from headrace.log.file.state import GroupState, State


def partition_key(topic: str, partition: int) -> str:
    return f"{topic}/{partition}"


def parse_partition_key(key: str) -> tuple[str, int]:
    topic, partition = key.rsplit("/", 1)
    return topic, int(partition)


def share_out(members: Mapping[str, Mapping[str, Any]], counts: Mapping[str, int], before: Mapping[str, str]) -> dict[str, str]:
    """Partition -> member: each topic's partitions evenly among those who want it, moving as few as possible."""
    target: dict[str, str] = {}
    for index, (topic, count) in enumerate(sorted(counts.items())):
        wanting = sorted(name for name, about in members.items() if topic in about["topics"])
        if wanting:
            target |= _share_topic(topic, count, wanting, before, turn=index)
    return target


def _share_topic(topic: str, count: int, wanting: list[str], before: Mapping[str, str], *, turn: int) -> dict[str, str]:
    keys = [partition_key(topic, number) for number in range(count)]
    held = {name: [key for key in keys if before.get(key) == name] for name in wanting}
    least, extra = divmod(count, len(wanting))
    # Who holds most already keeps one more; ties go round from topic to topic.
    order = sorted(wanting, key=lambda name: (-len(held[name]), (wanting.index(name) + turn) % len(wanting)))
    quota = {name: least + (position < extra) for position, name in enumerate(order)}
    target = {key: name for name in wanting for key in held[name][: quota[name]]}
    free = [key for key in keys if key not in target]
    for name in order:
        room = quota[name] - min(len(held[name]), quota[name])
        for key in free[:room]:
            target[key] = name
        free = free[room:]
    return target


def coordinate(draft: Draft, group: str, member: str | None, about: Mapping[str, Any], dead: Iterable[str]) -> tuple[int, set[str]]:
    """One step of a member: be in the group, leave out the dead, let go of what is another's, take what is free.

    Returns the generation and what the member owns now. With `member` None only the dead are removed.
    """
    known = draft.state.groups.get(group) or GroupState()
    gone = set(dead)
    members = {name: entry for name, entry in known.members.items() if name not in gone}
    if member is not None:
        members[member] = dict(about)
    wanted = {topic for entry in members.values() for topic in entry["topics"]}
    counts = {topic: len(draft.state.topics[topic].partitions) for topic in wanted if topic in draft.state.topics}
    target = share_out(members, counts, known.target)
    owners = {key: name for key, name in known.owners.items() if name in members and key in target and (name != member or target[key] == member)}
    owners |= {key: name for key, name in target.items() if name == member and key not in owners}
    generation = known.generation
    if (members, owners, target) != (known.members, known.owners, known.target):
        generation += 1
        draft.do("group", group, generation, members, owners, target)
    return generation, {key for key, name in owners.items() if name == member}


def leave(draft: Draft, group: str, member: str) -> None:
    """Go in good order: what was owned is free at once."""
    known = draft.state.groups.get(group)
    if known is not None and member in known.members:
        coordinate(draft, group, None, {}, [member])


def plain_positions(positions: Mapping[str, Mapping[int, int]]) -> Positions:
    """As the journal can store them: what a user computed may be numpy's numbers."""
    try:
        plain = {
            topic: {operator.index(partition): operator.index(offset) for partition, offset in offsets.items()}
            for topic, offsets in positions.items()
        }
    except (TypeError, AttributeError):
        raise InputError(f"{positions!r} are not positions.", fix="use {topic: {partition: next offset}}, or consumer.positions().") from None
    return Positions(plain, member=positions.member if isinstance(positions, Positions) else None)


def check_places(state: State, positions: Mapping[str, Mapping[int, int]]) -> None:
    """A group can have read what there is, and no more. What retention removed since it may have read, too."""
    for topic, offsets in positions.items():
        partitions = state.topic(topic).partitions
        for partition, offset in offsets.items():
            if not 0 <= partition < len(partitions):
                raise BadPartition(f"The topic {topic!r} has no partition {partition}.", fix=f"name one from 0 to {len(partitions) - 1}.")
            if offset < 0:
                raise InputError(f"The offset {offset} of {topic}[{partition}] is negative.", fix="an offset is 0 or more.")
            if offset > partitions[partition].end:
                raise OffsetOutOfRange(topic, partition, offset, partitions[partition].start, partitions[partition].end)


def check_owner(state: State, group: str, positions: Mapping[str, Mapping[int, int]], member: str | None) -> None:
    """Only its owner may commit for a partition; positions without a member are an outsider's, who is trusted when nobody reads."""
    for topic, offsets in positions.items():
        state.topic(topic)
        for partition in offsets:
            owner = state.groups[group].owners.get(partition_key(topic, partition)) if group in state.groups else None
            if owner != member and (member is not None or owner is not None):
                raise MemberFenced(
                    f"This member no longer owns {topic}[{partition}] in group {group!r}" + (f": {owner!r} does." if owner else "."),
                    fix="poll again: rows since the last commit will be delivered to the new owner.",
                )
