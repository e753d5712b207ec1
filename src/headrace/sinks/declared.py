"""A sink, declared: what `hr.sinks.postgres(…)` and its siblings return. It opens nothing until it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any

from headrace.errors import InputError, nearest
from headrace.log.names import check_name

if TYPE_CHECKING:
    from headrace.log.api import Log
    from headrace.sinks.checking import Comparison
    from headrace.sinks.shape import Shape
    from headrace.sinks.syncing import SyncStatus
    from headrace.sinks.target import Target

MERGE, APPEND = "merge", "append"
DEFAULT_BATCH_ROWS = 50_000


@dataclass(frozen=True)
class Sink:
    """One place in another system that is kept equal to a topic of the log.

    `table` is what it is called there (the topic's name, if nothing is said). `mode` is "merge" (one row a key, the newest; the default for a table's topic and for
    one with a key given here) or "append" (every row of the topic once, with `_partition` and `_offset`). `create` says whether what is missing is made.
    """

    kind: str
    opener: Callable[[Sink, Shape], Target] = field(repr=False, compare=False)
    table: str | None = None
    name: str | None = None
    mode: str | None = None
    key: tuple[str, ...] = ()
    create: bool = True
    batch_rows: int = DEFAULT_BATCH_ROWS
    keeps_marks: bool = False
    """Whether `_marks` goes along also when rows are merged: the target cannot be asked for what a change left as it was."""
    options: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in {None, MERGE, APPEND}:
            raise InputError(f"A sink has no mode {self.mode!r}: {nearest(str(self.mode), [MERGE, APPEND])}")
        if self.name is not None:
            check_name(self.name, what="sink name")
        if self.batch_rows < 1:
            raise InputError("batch_rows must be at least 1.")

    def name_for(self, topic: str) -> str:
        """Under which its dead letters stand: those of `orders.postgres` in the topic `orders.postgres.dead`."""
        return self.name or f"{topic}.{self.kind}"

    def open(self, shape: Shape, log: Log) -> Target:
        """The target, ready to be prepared."""
        target = self.opener(self, shape)
        target.log = log
        return target

    def run(
        self,
        topic: str,
        *,
        log: str,
        stop: Event | None = None,
        until_caught_up: bool = False,
        start_over: bool = False,
        on_status: Callable[[SyncStatus], None] | None = None,
    ) -> None:
        """Follow a topic in this process until `stop` is set, or until everything that is there now has been applied.

        `start_over` empties the target first, and applies the topic from its beginning.
        """
        from headrace.log import open_log
        from headrace.sinks.syncing import Syncing

        with open_log(log) as opened:
            Syncing(self, opened, topic, start_over=start_over, on_status=on_status).run(stop=stop, until_caught_up=until_caught_up)

    def check(self, topic: str, *, log: str) -> Comparison:
        """Compare the target with the topic, key by key, as of what was applied."""
        from headrace.log import open_log
        from headrace.sinks.checking import compare

        with open_log(log) as opened:
            return compare(self, opened, topic)
