"""Windows as a plan holds them: kinds and sizes. `hr.tumbling(...)` and its siblings build them.

Windows are half open: a row at a window's end belongs to the next one. Sizes in a time zone follow
its local clock: with `tumbling("1 day", timezone="Europe/Berlin")` a window begins at each midnight
there, and has 23 or 25 hours on the days when daylight saving time begins or ends. What becomes of
late rows is in `late_policy`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from headrace.durations import format_us, to_us
from headrace.errors import PlanError, nearest
from headrace.operators.windows.late_policy import DAY_US, LONGEST_US, Duration, LatePolicy

MAX_WINDOWS_OF_A_ROW = 2_000
_MONDAY_US = 4 * DAY_US  # the first Monday of 1970
EMITS = ("final", "changes")


@dataclass(frozen=True)
class Tumbling:
    """Adjacent windows of one size. Windows of whole weeks begin on a Monday; all others are
    aligned to 1970-01-01 00:00.
    """

    kind: ClassVar[str] = "tumbling"
    size_us: int
    offset_us: int = 0
    timezone: str | None = None

    @property
    def every_us(self) -> int:
        """The time between two window starts: the size."""
        return self.size_us

    @property
    def origin_us(self) -> int:
        """The start of some window, on the local clock."""
        return _origin(self.every_us) + self.offset_us

    def __str__(self) -> str:
        return f"tumbling({format_us(self.size_us)}{_more(self.offset_us, self.timezone)})"


@dataclass(frozen=True)
class Hopping:
    """Windows of one size that begin at fixed intervals, so that a row is in several. If `every`
    does not divide the size, the number of windows that a row is in varies by one.
    """

    kind: ClassVar[str] = "hopping"
    size_us: int
    every_us: int
    offset_us: int = 0
    timezone: str | None = None

    @property
    def origin_us(self) -> int:
        """The start of some window, on the local clock."""
        return _origin(self.every_us) + self.offset_us

    def __str__(self) -> str:
        return (
            f"hopping({format_us(self.size_us)},"
            f" every={format_us(self.every_us)}{_more(self.offset_us, self.timezone)})"
        )


@dataclass(frozen=True)
class Sliding:
    """For each row at t, the rows of its key in (t - size, t]."""

    kind: ClassVar[str] = "sliding"
    size_us: int

    def __str__(self) -> str:
        return f"sliding({format_us(self.size_us)})"


@dataclass(frozen=True)
class Session:
    """Rows of a key that follow each other by less than the gap. A session ends one gap after its
    last row; a row at that time begins the next session.
    """

    kind: ClassVar[str] = "session"
    gap_us: int

    def __str__(self) -> str:
        return f"session({format_us(self.gap_us)})"


WindowSpec = Tumbling | Hopping | Sliding | Session


def identity(spec: WindowSpec | LatePolicy) -> dict[str, Any]:
    """The kind and parameters of a window or late policy as JSON values, for a plan's
    fingerprint.
    """
    return {"kind": spec.kind, **asdict(spec)}


# Public constructors


def tumbling(
    size: Duration, *, offset: Duration = "0 seconds", timezone: str | None = None
) -> Tumbling:
    """Adjacent windows of one size.

    Windows of whole weeks begin on a Monday; all others are aligned to 1970-01-01 00:00.

    Args:
        size: The length of a window, as `"1 minute"` or a timedelta.
        offset: How much later windows begin.
        timezone: An IANA time zone whose local clock windows follow; UTC unless given.

    Returns:
        A window for `window(...)`.

    Raises:
        PlanError: A duration is not valid, or the time zone does not exist.

    Example:
        ```python
        orders.window(hr.tumbling("1 day", timezone="Europe/Berlin"))
        ```

    """
    size_us = positive_us(size, "size of a tumbling window")
    return Tumbling(
        size_us, to_us(offset, what="offset of a tumbling window") % size_us, _zone(timezone)
    )


def hopping(
    size: Duration, *, every: Duration, offset: Duration = "0 seconds", timezone: str | None = None
) -> Hopping:
    """Windows of one size that begin at fixed intervals, so that a row is in several.

    Args:
        size: The length of a window, as `"1 hour"` or a timedelta.
        every: The time between the starts of two windows; at most the size.
        offset: How much later windows begin.
        timezone: An IANA time zone whose local clock windows follow; UTC unless given.

    Returns:
        A window for `window(...)`.

    Raises:
        PlanError: A duration is not valid, `every` is longer than the size, a row would be in more
            than 2,000 windows, or the time zone does not exist.

    Example:
        ```python
        orders.window(hr.hopping("1 hour", every="5 minutes"))
        ```

    """
    size_us = positive_us(size, "size of a hopping window")
    every_us = positive_us(every, "hop of a hopping window")
    if every_us > size_us:
        raise PlanError(
            f"A hopping window of {format_us(size_us)} every {format_us(every_us)} leaves out the"
            " rows in between.",
            fix="set every= to the size or less.",
        )
    if size_us > MAX_WINDOWS_OF_A_ROW * every_us:
        raise PlanError(
            f"With windows of {format_us(size_us)} every {format_us(every_us)} a row is in more"
            f" than {MAX_WINDOWS_OF_A_ROW:,} of them.",
            fix="set a longer every=, or use hr.sliding(size), which has one window per row.",
        )
    return Hopping(
        size_us=size_us,
        every_us=every_us,
        offset_us=to_us(offset, what="offset of a hopping window") % every_us,
        timezone=_zone(timezone),
    )


def sliding(size: Duration) -> Sliding:
    """A window for each row at t: the rows of its key in (t - size, t].

    Args:
        size: The length of a window, as `"10 minutes"` or a timedelta.

    Returns:
        A window for `window(...)`.

    Raises:
        PlanError: The size is not a valid duration.

    Example:
        ```python
        orders.window(hr.sliding("10 minutes"))
        ```

    """
    return Sliding(positive_us(size, "size of a sliding window"))


def session(gap: Duration) -> Session:
    """Sessions: rows of a key that follow each other by less than `gap`.

    Args:
        gap: The time without rows that ends a session, as `"30 minutes"` or a timedelta.

    Returns:
        A window for `window(...)`.

    Raises:
        PlanError: The gap is not a valid duration.

    Example:
        ```python
        orders.window(hr.session("30 minutes"))
        ```

    """
    return Session(positive_us(gap, "gap of a session window"))


def check_emit(emit: str) -> str:
    """The value of `emit=`, if it is one of those allowed."""
    if emit not in EMITS:
        raise PlanError(f"A window has emit={emit!r}: {nearest(str(emit), EMITS)}")
    return emit


def positive_us(duration: Duration, what: str) -> int:
    """A duration in microseconds, above zero and at most 10 years."""
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
