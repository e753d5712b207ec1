"""`table.compare("7 days")` in a plan: each window beside the same window a period earlier, and what is checked when it is declared."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from headrace.durations import format_us
from headrace.errors import PlanError
from headrace.log.api import CHANGE_TYPE
from headrace.operators.windows.specs import Hopping, Tumbling, positive_us
from headrace.pipeline.columns import check_columns
from headrace.pipeline.plan import KeyByStep, SelectStep, Step, TimeColumn, Times, WhereStep
from headrace.pipeline.timing import time_column
from headrace.pipeline.windowing import WINDOW_END, WINDOW_START, WindowStep

if TYPE_CHECKING:  # kernels are loaded where they are used
    from headrace.operators.windows.compare import CompareKernel
    from headrace.pipeline.stream import Rows


@dataclass(frozen=True, kw_only=True, eq=False)
class CompareStep(Step):
    """A table of windows with the columns of the same window a period earlier under names with a prefix; null where there is none."""

    operation: ClassVar[str] = "compare"
    stateful: ClassVar[bool] = True

    by: tuple[str, ...]
    period_us: int
    window: Tumbling | Hopping
    prefix: str

    def kernel(self) -> CompareKernel:
        from headrace.operators.windows.compare import CompareKernel

        return CompareKernel(self.name, self.input.schema, self.by, self.period_us, self.window, self.prefix)

    def time(self, inputs: Times) -> TimeColumn | None:
        return inputs[0]

    def details(self) -> dict[str, Any]:
        zone = {} if self.window.timezone is None else {"timezone": self.window.timezone}
        return {"by": list(self.by), "period": format_us(self.period_us), **zone}

    def summary(self) -> str:
        return f"with {format_us(self.period_us)} earlier"


def compared(table: Rows, period: str | timedelta, prefix: str, name: str | None) -> CompareStep:
    """`table.compare(…)`, checked."""
    where = table._place("compare", name)  # noqa: SLF001
    window = _window(table.step, where=where)
    period_us = positive_us(period, f"period of the step {where}")
    if period_us % window.every_us:
        raise PlanError(
            f"The step {where} compares windows with those {format_us(period_us)} earlier, and there are none: one begins every {format_us(window.every_us)}.",
            fix=f"give a multiple of {format_us(window.every_us)}.",
        )
    if not prefix:
        raise PlanError(f"The step {where} has no prefix to tell the earlier window's columns by.", fix='give one, such as prefix="previous_".')
    by = tuple(each for each in table.key if each not in {WINDOW_START, WINDOW_END})
    fields: dict[str, Any] = {
        "inputs": (table.step,), "key": (*by, WINDOW_START, WINDOW_END), "is_table": True,
        "by": by, "period_us": period_us, "window": window, "prefix": prefix,
    }  # fmt: skip
    kernel = CompareStep(name=where, schema=table.schema, **fields).kernel()
    schema = check_columns(pa.schema([field for field in kernel.output if field.name != CHANGE_TYPE]), where=f"The step {where}")
    return CompareStep(name=name or "", schema=schema, **fields)


def _window(step: Step, *, where: str) -> Tumbling | Hopping:
    """The windows that a table is made of, behind steps that keep each of them."""
    source = step
    while isinstance(source, SelectStep | WhereStep | KeyByStep | CompareStep):
        source = source.input
    time = time_column(step)
    if not isinstance(source, WindowStep) or not {WINDOW_START, WINDOW_END} <= set(step.key) or time is None or time.name != WINDOW_END:
        raise PlanError(
            f"The step {where} compares windows, and {step.place} is no table of windows.",
            fix="use it on what window(…).aggregate(…) gives, and keep the columns window_start and window_end.",
        )
    if not isinstance(source.window, Tumbling | Hopping):
        raise PlanError(
            f"The step {where} compares {source.window}, of which no two begin and end at the same time of different days.",
            fix="compare tumbling or hopping windows.",
        )
    return source.window
