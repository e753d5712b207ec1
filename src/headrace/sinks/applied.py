"""What a target knows of itself: who writes to it, and up to which place of the topic it was written. It is stored there, in the same commit as the rows."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from headrace.errors import NewerFormat, SinkFenced, TargetMismatch, TargetUnavailable
from headrace.sinks.batch import Batch
from headrace.sinks.shape import Shape

VERSION = 1


@dataclass(frozen=True)
class Applied:
    """`owner` is a number that the writing process chose for itself, `epoch` counts the owners; `positions` are the next offsets of the topic's partitions."""

    topic: str
    topic_id: str
    epoch: int
    owner: int
    positions: Mapping[int, int] = field(default_factory=dict)
    at_us: int = 0

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Applied:
        stored = json.loads(text)
        if stored.pop("version") > VERSION:
            raise NewerFormat("The sink's target was written by a newer Headrace.", fix="upgrade Headrace.")
        stored["positions"] = {int(partition): offset for partition, offset in stored["positions"].items()}
        return cls(**stored)

    def advanced(self, positions: Mapping[int, int]) -> Applied:
        return replace(self, positions={**self.positions, **positions}, at_us=time.time_ns() // 1000)


def taken_over(known: Applied | None, shape: Shape, owner: int, *, resume: bool, start_over: bool) -> Applied:
    """What the target says from now on. An owner that only goes on after a fault must still be the newest one."""
    if known is None or (start_over and not resume):
        return Applied(shape.topic, shape.topic_id, 1 if known is None else known.epoch + 1, owner, at_us=time.time_ns() // 1000)
    if resume:
        check_owner(known, owner)
        return known
    if known.topic != shape.topic or (known.topic_id and shape.topic_id and known.topic_id != shape.topic_id):
        same = known.topic == shape.topic
        raise TargetMismatch(
            f"The target is filled from {'an earlier topic ' + repr(known.topic) + ', which was deleted and made again' if same else 'the topic ' + repr(known.topic)}.",
            fix="choose another target with table=… (--table …); or, to empty this one and fill it anew, --start-over.",
        )
    return replace(known, epoch=known.epoch + 1, owner=owner)


def check_owner(known: Applied | None, owner: int) -> None:
    if known is None:
        raise TargetUnavailable(
            "The target has forgotten what it had: it was emptied, or restored.", fix="nothing: it is filled again from the beginning."
        )
    if known.owner != owner:
        raise SinkFenced(
            f"Another process writes to this target (it has epoch {known.epoch}).",
            fix="nothing, if that was meant: it goes on where this one stopped. Start one sync of a target only.",
        )


def is_due(known: Applied, batch: Batch) -> bool:
    """Whether a batch is the next one. What the target has already is not applied again."""
    expected = {partition: None if partition in batch.fresh else start for partition, start in batch.start.items()}
    at = {partition: known.positions.get(partition) for partition in batch.stop}
    if at == expected:
        return True
    if all((at[partition] or 0) >= stop for partition, stop in batch.stop.items()):
        return False
    raise TargetUnavailable(
        "The target is at another place of the topic than it was: it lost what it had, or was restored.", fix="nothing: it is read again from there."
    )
