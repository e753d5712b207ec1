"""The steps of windows: `WindowStep` for `window(…).aggregate(…)`, `CompareStep` for
`table.compare(…)`.

`headrace.pipeline.windows` checks and builds them; the kernels are in
`headrace.operators.windows`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.durations import format_us
from headrace.error_policy import DIVERT, NULL
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.operators.kernel import TimedKernel
from headrace.operators.windows.late_policy import Divert, Drop, LatePolicy
from headrace.operators.windows.specs import Hopping, Sliding, Tumbling, WindowSpec, identity
from headrace.plan.plan import SideOutput, Step, TimeColumn, Times

if TYPE_CHECKING:
    from headrace.operators.windows.comparison import CompareKernel


WINDOW_START, WINDOW_END = "window_start", "window_end"


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowStep(Step):
    """One aggregate per group and window, as a table keyed by both. `over` is the event time of the
    input's rows.
    """

    operation: ClassVar[str] = "window"
    stateful: ClassVar[bool] = True

    window: WindowSpec
    late: LatePolicy
    emit: str
    over: TimeColumn
    by: tuple[str, ...]
    aggregates: tuple[tuple[str, AggregateSpec], ...]
    errors: str = NULL

    @property
    def shard_key(self) -> tuple[str, ...]:
        return self.by

    @property
    def late_topic(self) -> str | None:
        return self.late.topic if isinstance(self.late, Divert) else None

    @property
    def allowed_lateness_us(self) -> int:
        return self.late.lateness_us

    @property
    def side_outputs(self) -> tuple[SideOutput, ...]:
        if not isinstance(self.late, Divert):
            return ()
        source = self.input
        return (SideOutput(self.late.topic, source.schema, source.key, "diverts late rows"),)

    def version_fields(self, version: str) -> dict[str, Any]:
        if not isinstance(self.late, Divert):
            return {}
        return {"late": replace(self.late, topic=f"{self.late.topic}.{version}")}

    def time(self, inputs: Times) -> TimeColumn | None:  # noqa: ARG002
        """A window's event time is its last microsecond. A sliding window ends with its row."""
        return TimeColumn(WINDOW_END, 0 if isinstance(self.window, Sliding) else -1)

    def details(self) -> dict[str, Any]:
        return {
            "window": str(self.window),
            "late": str(self.late),
            "emit": self.emit,
            "time": self.over.name,
            "by": list(self.by),
            "aggregates": {name: str(spec) for name, spec in self.aggregates},
            "errors": self.errors,
        }

    def identity(self) -> dict[str, Any]:
        """How late rows may be can change; the windows and their aggregates cannot."""
        read = {
            name: str(self.input.schema.field(spec.column).type)
            for name, spec in self.aggregates
            if spec.column is not None
        }
        kept = {name: str(spec.without_bounds()) for name, spec in self.aggregates}
        details = {
            name: value
            for name, value in super().identity().items()
            if name not in {"late", "window"}
        }
        return {
            **details,
            "window": identity(self.window),
            "aggregates": kept,
            "read": read,
            "shift_us": self.over.shift_us,
        }

    def summary(self) -> str:
        by = f" by {', '.join(self.by)}" if self.by else ""
        late = "" if isinstance(self.late, Drop) else f", late {self.late}"
        return f"{self.window}{by}{late}: " + ", ".join(
            f"{name} = {spec}" for name, spec in self.aggregates
        )

    def kernel(self) -> TimedKernel:
        from headrace.operators.windows.factory import window_kernel
        from headrace.operators.windows.kernel import WindowSettings

        source = self.input
        settings = WindowSettings(
            name=self.name,
            schema=source.schema,
            time=self.over.name,
            window=self.window,
            by=self.by,
            aggregates=self.aggregates,
            late=self.late,
            emit=self.emit,
            over_table=source.is_table,
            row_key=source.key if source.is_table else (),
            producer=self.over.producer,
            time_shift_us=self.over.shift_us,
            divert_errors=self.errors == DIVERT,
        )
        return window_kernel(settings)


@dataclass(frozen=True, kw_only=True, eq=False)
class CompareStep(Step):
    """A table of windows, each with the columns of the same window a period earlier, whose names
    have a prefix; null where there is none.
    """

    operation: ClassVar[str] = "compare"
    stateful: ClassVar[bool] = True

    by: tuple[str, ...]
    period_us: int
    window: Tumbling | Hopping
    prefix: str

    @property
    def shard_key(self) -> tuple[str, ...]:
        return self.by

    def kernel(self) -> CompareKernel:
        from headrace.operators.windows.comparison import CompareKernel

        return CompareKernel(
            self.name, self.input.schema, self.by, self.period_us, self.window, self.prefix
        )

    def time(self, inputs: Times) -> TimeColumn | None:
        return inputs[0]

    def details(self) -> dict[str, Any]:
        zone = {} if self.window.timezone is None else {"timezone": self.window.timezone}
        return {"by": list(self.by), "period": format_us(self.period_us), **zone}

    def summary(self) -> str:
        return f"with {format_us(self.period_us)} earlier"
