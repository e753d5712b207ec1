"""What a window is, as a plan holds it: its kind and its sizes; what becomes of late rows; when
results are told. `hr.tumbling(…)`, `hr.late.drop()` and the like build these.

Windows are half open: a row at a window's end is in the next one. Sizes in a time zone go by its
clock: with `tumbling("1 day", timezone="Europe/Berlin")` a window begins at each midnight there,
and has 23 or 25 hours where the clock is put forward or back.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from headrace.durations import format_us, to_us
from headrace.errors import PlanError, nearest
from headrace.operators.windows.late import DAY_US, LONGEST_US, Duration, LatePolicy

MAX_WINDOWS_OF_A_ROW = 2_000
_MONDAY_US = 4 * DAY_US  # 1970 began on a Thursday
EMITS = ("final", "changes")


@dataclass(frozen=True)
class Tumbling:
    """Windows of one size, one after the other. Those of whole weeks begin on a Monday, all others
    are counted from 1970-01-01 00:00.
    """

    kind: ClassVar[str] = "tumbling"
    size_us: int
    offset_us: int = 0
    timezone: str | None = None

    @property
    def every_us(self) -> int:
        return self.size_us

    @property
    def origin_us(self) -> int:
        """Where some window begins, on the local clock."""
        return _origin(self.every_us) + self.offset_us

    def __str__(self) -> str:
        return f"tumbling({format_us(self.size_us)}{_more(self.offset_us, self.timezone)})"


@dataclass(frozen=True)
class Hopping:
    """Windows of one size, one beginning `every` so often: a row is in several. `every` need not
    divide the size: then rows are in one more or one fewer.
    """

    kind: ClassVar[str] = "hopping"
    size_us: int
    every_us: int
    offset_us: int = 0
    timezone: str | None = None

    @property
    def origin_us(self) -> int:
        return _origin(self.every_us) + self.offset_us

    def __str__(self) -> str:
        return (
            f"hopping({format_us(self.size_us)},"
            f" every={format_us(self.every_us)}{_more(self.offset_us, self.timezone)})"
        )


@dataclass(frozen=True)
class Sliding:
    """For each row, the rows of its key in (t - size, t]."""

    kind: ClassVar[str] = "sliding"
    size_us: int

    def __str__(self) -> str:
        return f"sliding({format_us(self.size_us)})"


@dataclass(frozen=True)
class Session:
    """Rows of a key that follow each other in less than the gap. A session ends a gap after its
    last row; a row at its end begins the next.
    """

    kind: ClassVar[str] = "session"
    gap_us: int

    def __str__(self) -> str:
        return f"session({format_us(self.gap_us)})"


WindowSpec = Tumbling | Hopping | Sliding | Session


def identity(spec: WindowSpec | LatePolicy) -> dict[str, Any]:
    """What tells one from another, as JSON has it."""
    return {"kind": spec.kind, **asdict(spec)}


# What users write


def tumbling(
    size: Duration, *, offset: Duration = "0 seconds", timezone: str | None = None
) -> Tumbling:
    """Windows of one size, one after the other; `offset` later than they would begin. With a time
    zone, by the clock there.
    """
    size_us = positive_us(size, "size of a tumbling window")
    return Tumbling(
        size_us, to_us(offset, what="offset of a tumbling window") % size_us, _zone(timezone)
    )


def hopping(
    size: Duration, *, every: Duration, offset: Duration = "0 seconds", timezone: str | None = None
) -> Hopping:
    """Windows of one size, of which one begins `every` so often."""
    size_us, every_us = (
        positive_us(size, "size of a hopping window"),
        positive_us(every, "hop of a hopping window"),
    )
    if every_us > size_us:
        raise PlanError(
            f"A hopping window of {format_us(size_us)} every {format_us(every_us)} leaves out the"
            " rows in between.",
            fix="hop by the size or less.",
        )
    if size_us > MAX_WINDOWS_OF_A_ROW * every_us:
        raise PlanError(
            f"With windows of {format_us(size_us)} every {format_us(every_us)} a row is in more"
            f" than {MAX_WINDOWS_OF_A_ROW:,} of them.",
            fix="hop farther, or take hr.sliding(size), which has a result for each row.",
        )
    return Hopping(
        size_us,
        every_us,
        to_us(offset, what="offset of a hopping window") % every_us,
        _zone(timezone),
    )


def sliding(size: Duration) -> Sliding:
    """For each row at t, the rows of its key in (t - size, t]."""
    return Sliding(positive_us(size, "size of a sliding window"))


def session(gap: Duration) -> Session:
    """Rows of a key that follow each other in less than `gap`."""
    return Session(positive_us(gap, "gap of a session window"))


def check_emit(emit: str) -> str:
    if emit not in EMITS:
        raise PlanError(f"A window has emit={emit!r}: {nearest(str(emit), EMITS)}")
    return emit


def positive_us(duration: Duration, what: str) -> int:
    """A duration in microseconds, of more than zero and not absurdly long."""
    us = to_us(duration, what=what)
    if us == 0:
        raise PlanError(f"The {what} is zero.", fix="give more than zero.")
    if us > LONGEST_US:
        raise PlanError(
            f"The {what}, {format_us(us)}, is longer than 10 years.", fix="give a shorter one."
        )
    return us


def _zone(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError):
        raise PlanError(
            f"There is no time zone {name!r}: {nearest(str(name), available_timezones())}"
        ) from None
    return name


def _origin(every_us: int) -> int:
    return _MONDAY_US if every_us % (7 * DAY_US) == 0 else 0


def _more(offset_us: int, timezone: str | None) -> str:
    offset = f", offset={format_us(offset_us)}" if offset_us else ""
    return offset + (f", timezone={timezone}" if timezone else "")
