"""Which kernel carries out which step, and which steps keep state."""

from __future__ import annotations

from headrace.errors import NotSupported
from headrace.operators.aggregates.kernel import AggregateKernel
from headrace.operators.deduplication import DedupeKernel
from headrace.operators.device_time import DeviceColumns, DeviceTimeKernel
from headrace.operators.joins.latest import LatestKernel
from headrace.operators.kernel import Kernel, TimedKernel
from headrace.operators.windows.factory import window_kernel
from headrace.operators.windows.kernel import WindowStep as WindowSettings
from headrace.plan.join_steps import DistinctStep, HistoryStep, JoinStep, NewestStep, SettleStep, TopStep
from headrace.plan.match_steps import MatchStep
from headrace.plan.plan import DIVERT, AggregateStep, DedupeStep, PipelinePlan, Step, TopicStep, ToTableStep
from headrace.plan.search_steps import GatherStep, SearchStep
from headrace.plan.time_paths import time_column
from headrace.plan.window_steps import CompareStep, WindowStep


def keeps_state(step: Step) -> bool:
    """A table's topic does too: its rows say what is now, and those downstream must also hear what was. And one whose devices' clocks are put right."""
    return step.stateful or (isinstance(step, TopicStep) and (step.is_table or step.device_time is not None))


def kernel_of(step: Step) -> Kernel | TimedKernel:
    if isinstance(step, AggregateStep):
        source = step.input
        row_key = source.key if source.is_table else ()
        return AggregateKernel(
            step.name, source.schema, step.by, step.aggregates, over_table=source.is_table, row_key=row_key, divert=step.errors == DIVERT
        )
    if isinstance(step, WindowStep):
        return _windows(step)
    if isinstance(step, JoinStep | HistoryStep | TopStep | DistinctStep | SettleStep | NewestStep | CompareStep | MatchStep | SearchStep | GatherStep):
        return step.kernel()
    if isinstance(step, DedupeStep):
        time = time_column(step)
        return DedupeKernel(step.name, step.schema, step.on, step.within_us, None if time is None else time.name)
    if isinstance(step, ToTableStep):
        return LatestKernel(step.name, step.schema, step.key)
    if isinstance(step, TopicStep) and step.is_table:
        return LatestKernel(step.name, step.schema, step.key)
    if isinstance(step, TopicStep) and (times := step.device_time) is not None:
        columns = DeviceColumns(times.event, times.sent, times.received, times.device, times.column, times.flag)
        return DeviceTimeKernel(step.name, step.stored_schema, columns, times.tolerance_us)
    raise NotSupported(f"The step {step.name!r} ({step.operation}) can be declared and drawn, but not run yet.", fix="leave it out.")


def _windows(step: WindowStep) -> TimedKernel:
    source = step.input
    settings = WindowSettings(
        step.name, source.schema, step.over.name, step.window, step.by, step.aggregates, late=step.late, emit=step.emit, over_table=source.is_table,
        row_key=source.key if source.is_table else (), producer=step.over.producer, time_shift_us=step.over.shift_us, divert_errors=step.errors == DIVERT,
    )  # fmt: skip
    return window_kernel(settings)


def check_hosted(plan: PipelinePlan) -> None:
    """Before anything starts: every step that keeps state has a kernel."""
    for step in plan.steps():
        if keeps_state(step):
            kernel_of(step)
