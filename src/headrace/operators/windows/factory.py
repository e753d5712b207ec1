"""From the settings of a window step to the kernel that carries it out."""

from __future__ import annotations

from headrace.operators.aggregates.factory import build
from headrace.operators.windows.buffered_window import BufferedSessions, BufferedSlidingWindows
from headrace.operators.windows.fixed_window import FixedWindows
from headrace.operators.windows.kernel import WindowKernel, WindowSettings
from headrace.operators.windows.session_window import SessionWindows
from headrace.operators.windows.sliding_window import SlidingWindows
from headrace.operators.windows.specs import Hopping, Session, Tumbling


def window_kernel(settings: WindowSettings) -> WindowKernel:
    """The kernel for a window step.

    Sessions and sliding windows keep aggregate states if these can be merged, and rows otherwise.
    """
    if isinstance(settings.window, Tumbling | Hopping):
        return FixedWindows(settings)
    if isinstance(settings.window, Session):
        return BufferedSessions(settings) if keeps_rows(settings) else SessionWindows(settings)
    return BufferedSlidingWindows(settings) if keeps_rows(settings) else SlidingWindows(settings)


def keeps_rows(settings: WindowSettings) -> bool:
    """Whether the kernel must buffer the rows of open windows: over a table, and for aggregates
    whose states cannot be merged.
    """
    if isinstance(settings.window, Tumbling | Hopping):
        return False
    return settings.over_table or not all(
        build(spec, settings.schema, over_table=False).combinable
        for _, spec in settings.timed_aggregates
    )
