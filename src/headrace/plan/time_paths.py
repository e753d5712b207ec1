"""Time in a plan: how each input's clock goes, which way leads from there to a step's clocks, and which column of a step is its event time."""

from __future__ import annotations

from headrace.operators.watermark import ClockPath, ClockSpec
from headrace.plan.event_time import EventTime
from headrace.plan.plan import Step, TimeColumn, TopicStep, ordered


def clock_spec(step: TopicStep) -> ClockSpec:
    """A table's clock follows the ticks unless its event time names a delay or a producer; so does that of a topic without event time."""
    times = step.event_time
    if not isinstance(times, EventTime) or (step.is_table and not times.delay_given and times.producer is None):
        return ClockSpec(step.name)
    return ClockSpec(step.name, times.column, times.producer, times.delay_us, times.idle_us, times.most_ahead_us)


def read_clock(step: TopicStep) -> ClockSpec:
    """What tasks that read a topic tell of its clock: nothing, if times are known only behind them."""
    return clock_spec(step) if step.device_time is None else ClockSpec(step.name)


def clock_paths(step: Step) -> tuple[ClockPath, ...]:
    """From the inputs' clocks to this step's: what all steps on the way hold back and allow for adds up; of several ways to one input the longest counts."""
    found: dict[int, dict[str, ClockPath]] = {}
    for each in ordered([step]):
        if isinstance(each, TopicStep):
            found[id(each)] = {each.name: ClockPath(each.name)}
            continue
        paths: dict[str, ClockPath] = {}
        for path in (path for given in each.timed_by for path in found[id(given)].values()):
            known = paths.get(path.name, ClockPath(path.name))
            complete, closed = path.complete_back_us + each.holds_back_us, path.closed_back_us + each.holds_back_us + each.allows_late_us
            paths[path.name] = ClockPath(path.name, max(known.complete_back_us, complete), max(known.closed_back_us, closed))
        found[id(each)] = paths
    return tuple(found[id(step)].values())


def time_column(step: Step) -> TimeColumn | None:
    """The event time of a step's rows, if it has one."""
    found: dict[int, TimeColumn | None] = {}
    for each in ordered([step]):
        found[id(each)] = each.time([found[id(given)] for given in each.inputs])
    return found[id(step)]
