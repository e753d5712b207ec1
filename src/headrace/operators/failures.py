"""What stops a kernel: a user's own aggregate that raises, and a group with more values than it may keep."""

from __future__ import annotations

from typing import Any

from headrace.errors import InputError


class AggregateFailed(InputError):
    """A user's own aggregate raised, or gave back something else than it promised. `row` is the row it raised on, where that can be told."""

    def __init__(self, *, step: str, aggregate: str, row: dict[str, Any] | None, cause: str, trace: str) -> None:
        place = "" if row is None else f" on the row {row!r}"
        super().__init__(
            f"The aggregate {aggregate!r} of the step {step!r} failed{place}: {cause}\n{trace}".rstrip(),
            fix='mend it and run again, or let such rows go to dead letters with errors="divert".',
        )
        self.step, self.aggregate, self.row, self.trace = step, aggregate, row, trace


class GroupFull(InputError):
    """A group has as many values as an aggregate may keep, and another came."""

    def __init__(self, *, step: str, aggregate: str, group: dict[str, Any], most: int) -> None:
        super().__init__(
            f"The aggregate {aggregate!r} of the step {step!r} keeps up to {most:,} values a group, and the group {group!r} has more.",
            fix='give it a larger most=, or let what is too much go to dead letters with when_full="divert".',
        )
        self.step, self.aggregate, self.group, self.most = step, aggregate, group, most
