"""The checkpoint of a sink: who writes to a target, and which offsets of the topic it has applied.

It is stored in the target itself, in the same commit as the rows. So rows and offsets cannot
disagree, whatever happens between two commits, and the target alone decides where a sink resumes.

The checkpoint also fences: each process that takes over a target increments `epoch` and writes its
own `owner`. A process that finds another owner there must stop.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from headrace.errors import NewerFormat, SinkFenced, TargetMismatch, TargetUnavailable
from headrace.sinks.batch import SinkBatch, TargetShape

VERSION = 1


@dataclass(frozen=True)
class SinkCheckpoint:
    """Stored as JSON; the names of the fields are part of the format."""

    topic: str
    topic_id: str
    epoch: int
    """How many processes have owned the target."""
    owner: int
    """A random number that identifies the process that writes to the target."""
    positions: Mapping[int, int] = field(default_factory=dict)
    """By partition, the next offset to apply."""
    at_us: int = 0
    """When rows were last applied."""

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> SinkCheckpoint:
        stored = json.loads(text)
        if stored.pop("version") > VERSION:
            raise NewerFormat(
                "The sink's target was written by a newer Headrace.", fix="upgrade Headrace."
            )
        stored["positions"] = {
            int(partition): offset for partition, offset in stored["positions"].items()
        }
        return cls(**stored)

    def with_offsets(self, offsets: Mapping[int, int]) -> SinkCheckpoint:
        """Return this checkpoint after rows up to the given offsets were applied now."""
        positions = {**self.positions, **offsets}
        return replace(self, positions=positions, at_us=time.time_ns() // 1000)


def new_owner() -> int:
    """Return a number that identifies this process among all that write to a target."""
    return secrets.randbits(62)


def take_over(
    stored: SinkCheckpoint | None,
    shape: TargetShape,
    owner: int,
    *,
    resume: bool,
    start_over: bool,
) -> SinkCheckpoint:
    """Return the checkpoint with which a process begins to write.

    Args:
        stored: The target's checkpoint; None if the target has none.
        shape: The target's shape, for the topic that it must be filled from.
        owner: The process that begins.
        resume: Whether the process only goes on after a failure: it must still be the owner.
        start_over: Whether the target is emptied and filled from the topic's beginning.

    Raises:
        SinkFenced: Another process has taken over the target meanwhile.
        TargetMismatch: The target is filled from another topic.
    """
    if stored is None or (start_over and not resume):
        return SinkCheckpoint(
            topic=shape.topic,
            topic_id=shape.topic_id,
            epoch=1 if stored is None else stored.epoch + 1,
            owner=owner,
            at_us=time.time_ns() // 1000,
        )
    if resume:
        check_owner(stored, owner)
        return stored
    is_other_id = bool(stored.topic_id and shape.topic_id and stored.topic_id != shape.topic_id)
    if stored.topic != shape.topic or is_other_id:
        filled_from = f"the topic {stored.topic!r}"
        if stored.topic == shape.topic:
            filled_from = f"an earlier topic {stored.topic!r}, which was deleted and made again"
        raise TargetMismatch(
            f"The target is filled from {filled_from}.",
            fix=(
                "choose another target with table=… (--table …). --start-over fills this one from"
                f" {shape.topic!r} instead, and removes the rows that it has now."
            ),
        )
    return replace(stored, epoch=stored.epoch + 1, owner=owner)


def check_owner(stored: SinkCheckpoint | None, owner: int) -> None:
    """Raise SinkFenced if another process owns the target."""
    if stored is None:
        raise TargetUnavailable(
            "The target has lost its checkpoint: it was emptied, or restored from a backup.",
            fix="nothing: it is filled again from the topic's beginning.",
        )
    if stored.owner != owner:
        raise SinkFenced(
            f"Another process writes to this target (it has epoch {stored.epoch}).",
            fix=(
                "nothing, if that was intended: the other process goes on where this one stopped."
                " Run one sync a target."
            ),
        )


def is_next_batch(stored: SinkCheckpoint, batch: SinkBatch) -> bool:
    """Return whether a batch follows what the target has; False if the target has applied it.

    Raises:
        TargetUnavailable: The target is at other offsets; the sink must read on from there.
    """
    expected = {
        partition: None if partition in batch.new_partitions else start
        for partition, start in batch.start.items()
    }
    actual = {partition: stored.positions.get(partition) for partition in batch.stop}
    if actual == expected:
        return True
    if all((actual[partition] or 0) >= stop for partition, stop in batch.stop.items()):
        return False
    raise TargetUnavailable(
        "The target is at other offsets of the topic than it was: it lost rows, or was restored"
        " from a backup.",
        fix="nothing: the topic is read again from there.",
    )
