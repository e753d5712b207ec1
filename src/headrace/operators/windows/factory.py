"""From a window step as a plan has it to the kernel that carries it out."""

from __future__ import annotations

from headrace.operators.aggregates.factory import build
from headrace.operators.windows.buffered_window import SessionRows, SlidingRows
from headrace.operators.windows.fixed_window import FixedWindows
from headrace.operators.windows.kernel import Windowed, WindowStep
from headrace.operators.windows.session_window import Sessions
from headrace.operators.windows.sliding_window import SlidingStates
from headrace.operators.windows.specs import Hopping, Session, Tumbling


def window_kernel(step: WindowStep) -> Windowed:
    """The kernel: sessions and sliding windows keep states where these can be put together, else
    the rows themselves.
    """
    if isinstance(step.window, Tumbling | Hopping):
        return FixedWindows(step)
    if isinstance(step.window, Session):
        return SessionRows(step) if keeps_rows(step) else Sessions(step)
    return SlidingRows(step) if keeps_rows(step) else SlidingStates(step)


def keeps_rows(step: WindowStep) -> bool:
    """Whether the kernel must keep the rows of windows that are not closed: over tables, and for
    aggregates whose states cannot be put together.
    """
    if isinstance(step.window, Tumbling | Hopping):
        return False
    return step.over_table or not all(
        build(spec, step.schema, over_table=False).combinable for _, spec in step.timed_aggregates
    )
