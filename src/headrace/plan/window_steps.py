"""The steps of windows: `WindowStep` for `window(…).aggregate(…)`, `CompareStep` for
`table.compare(…)`, and `OverStep` for `over(…).aggregate(…)`.

`headrace.pipeline.windows` and `headrace.pipeline.frames` check and build them; the kernels are in
`headrace.operators.windows` and `headrace.operators.row_frames`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from headrace.durations import format_us
from headrace.error_policy import DIVERT, NULL
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.operators.kernel import TimedKernel
from headrace.operators.row_functions import LEAD, RowFunction
from headrace.operators.windows.late_policy import DAY_US, Divert, Drop, LatePolicy
from headrace.operators.windows.specs import Hopping, Sliding, Tumbling, WindowSpec, identity
from headrace.plan.plan import (
    SettledColumns,
    SideOutput,
    Step,
    TimeColumn,
    Times,
    aggregated_columns,
    aggregates_identity,
    code_of_aggregates,
    code_to_send,
    former_aggregates,
    has_nullable,
    may_reject,
    null_groups_identity,
    watermark_paths,
)
from headrace.types.schema import to_ddl

if TYPE_CHECKING:
    from headrace.operators.row_frames import FrameKernel
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
    null_groups: bool = True
    """Whether null is a group. If not, rows with a null group become dead letters."""

    @property
    def shard_key(self) -> tuple[str, ...]:
        return self.by

    @property
    def allows_null_keys(self) -> bool:
        return self.null_groups

    @property
    def key_may_be_null(self) -> bool:
        return self.null_groups and has_nullable(self.schema, self.by)

    def former(self) -> Step:
        """Before, null was no group, `first` and `last` went by arrival, and a row of a table that
        moved out of a closed window was counted twice.
        """
        source = self.input.input if isinstance(self.input, LateMoveStep) else self.input
        return replace(
            self,
            inputs=(source,),
            null_groups=False,
            aggregates=former_aggregates(self.aggregates),
        )

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

    def time(self, inputs: Times) -> TimeColumn:  # noqa: ARG002
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

    def settled_by(self, inputs: Sequence[SettledColumns]) -> SettledColumns:  # noqa: ARG002
        """The end of a window, and the start of one whose length is known. In a time zone it may be
        up to two days longer than its size.
        """
        end = self.time([None])
        if not isinstance(self.window, Tumbling | Hopping):
            return (end,)
        longer_us = 0 if self.window.timezone is None else 2 * DAY_US
        start = TimeColumn(WINDOW_START, end.shift_us + self.window.size_us + longer_us)
        return (end, start)

    def column_needs(self, needed: frozenset[str]) -> tuple[frozenset[str], ...]:  # noqa: ARG002
        if isinstance(self.late, Divert):
            return (frozenset(self.input.schema.names),)  # late rows go on as they are
        names = aggregated_columns(self.input, self.by, self.aggregates) | {self.over.name}
        producers = {self.over.producer} if self.over.producer is not None else set[str]()
        return (frozenset((names | producers) & set(self.input.schema.names)),)

    def read_columns(self, port: int) -> frozenset[str]:
        if self.input.is_table or may_reject(self.aggregates):
            return super().read_columns(port)
        return self.column_needs(frozenset(self.schema.names))[port]

    def meaning(self, needed: frozenset[str], *, parsed: bool) -> Any | None:  # noqa: ARG002
        """How late rows may be decides which ones are in the result."""
        return {
            **self.identity(),
            "errors": self.errors,
            "lateness_us": self.late.lateness_us,
            "producer": self.over.producer,
        }

    def identity(self) -> dict[str, Any]:
        """How late rows may be can change; the windows and their aggregates cannot."""
        details = {
            name: value
            for name, value in super().identity().items()
            if name not in {"late", "window"}
        }
        return {
            **details,
            "window": identity(self.window),
            **aggregates_identity(self.input.schema, self.aggregates),
            **null_groups_identity(self.schema, self.by, self.null_groups),
            "shift_us": self.over.shift_us,
        }

    def further_meaning(self) -> dict[str, Any]:
        return code_of_aggregates(self.aggregates)

    @property
    def user_code(self) -> tuple[tuple[str, Any], ...]:
        return code_to_send(self.aggregates)

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
class LateMoveStep(Step):
    """The changes of a table, without those that move a row out of a closed window. It stands
    before a window over a table whose rows can change their event time.
    """

    operation: ClassVar[str] = "late_moves"
    stateful: ClassVar[bool] = True

    window: WindowSpec
    late: LatePolicy
    over: TimeColumn
    by: tuple[str, ...]

    @property
    def allows_null_keys(self) -> bool:
        return True

    @property
    def late_topic(self) -> str | None:
        return self.late.topic if isinstance(self.late, Divert) else None

    def version_fields(self, version: str) -> dict[str, Any]:
        if not isinstance(self.late, Divert):
            return {}
        return {"late": replace(self.late, topic=f"{self.late.topic}.{version}")}

    def details(self) -> dict[str, Any]:
        return {
            "window": str(self.window),
            "late": str(self.late),
            "time": self.over.name,
            "by": list(self.by),
        }

    def identity(self) -> dict[str, Any]:
        """How late rows may be can change."""
        details = {name: value for name, value in super().identity().items() if name != "late"}
        return {**details, "window": identity(self.window), "shift_us": self.over.shift_us}

    def meaning(self, needed: frozenset[str], *, parsed: bool) -> Any | None:  # noqa: ARG002
        """How late rows may be decides which moves are held back."""
        return {**self.identity(), "lateness_us": self.late.lateness_us}

    def summary(self) -> str:
        return f"out of {self.window}"

    def kernel(self) -> TimedKernel:
        from headrace.operators.windows.late_moves import LateMoveKernel, LateMoveSettings

        return LateMoveKernel(
            LateMoveSettings(
                name=self.name,
                schema=self.schema,
                key=self.key,
                time=self.over.name,
                time_shift_us=self.over.shift_us,
                by=self.by,
                window=self.window,
                late=self.late,
                producer=self.over.producer,
            )
        )


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

    @property
    def allows_null_keys(self) -> bool:
        return True

    def kernel(self) -> CompareKernel:
        from headrace.operators.windows.comparison import CompareKernel

        return CompareKernel(
            self.name, self.input.schema, self.by, self.period_us, self.window, self.prefix
        )

    def time(self, inputs: Times) -> TimeColumn | None:
        return inputs[0]

    def settled_by(self, inputs: Sequence[SettledColumns]) -> SettledColumns:
        return inputs[0]

    def details(self) -> dict[str, Any]:
        zone = {} if self.window.timezone is None else {"timezone": self.window.timezone}
        return {"by": list(self.by), "period": format_us(self.period_us), **zone}

    def summary(self) -> str:
        return f"with {format_us(self.period_us)} earlier"


@dataclass(frozen=True, kw_only=True, eq=False)
class OverStep(Step):
    """The rows of a stream with functions over the frame of each. `columns` are those of its input
    that it emits; the others are computed for the functions. `over` is the event time of the
    input's rows, None if the step goes by arrival.
    """

    operation: ClassVar[str] = "over"
    stateful: ClassVar[bool] = True

    columns: tuple[str, ...]
    by: tuple[str, ...]
    over: TimeColumn | None
    order: tuple[tuple[str, bool], ...]
    rows: int | None
    range_us: int | None
    gap_us: int | None
    results: tuple[tuple[str, AggregateSpec | RowFunction], ...]
    late: LatePolicy

    @property
    def shard_key(self) -> tuple[str, ...]:
        return self.by

    @property
    def allows_null_keys(self) -> bool:
        return True

    @property
    def late_topic(self) -> str | None:
        return self.late.topic if isinstance(self.late, Divert) else None

    @property
    def side_outputs(self) -> tuple[SideOutput, ...]:
        if not isinstance(self.late, Divert):
            return ()
        own = pa.schema([self.input.schema.field(name) for name in self.columns])
        return (SideOutput(self.late.topic, own, self.input.key, "diverts late rows"),)

    def version_fields(self, version: str) -> dict[str, Any]:
        if not isinstance(self.late, Divert):
            return {}
        return {"late": replace(self.late, topic=f"{self.late.topic}.{version}")}

    @property
    def _horizon_lag_us(self) -> int:
        """How far the horizon of the input is behind its watermark."""
        return max(
            (path.horizon_lag_us - path.watermark_lag_us for path in watermark_paths(self.input)),
            default=0,
        )

    @property
    def watermark_delay_us(self) -> int:
        """Rows are emitted once the horizon has passed them, and `lead` has found its row."""
        if self.over is None:
            return 0
        patience = [
            result.within_us or 0
            for _, result in self.results
            if isinstance(result, RowFunction) and result.kind == LEAD
        ]
        return self._horizon_lag_us + max(patience, default=0)

    def kernel(self) -> FrameKernel:
        from headrace.operators.row_frames import FrameKernel, FrameSettings

        over = self.over
        return FrameKernel(
            FrameSettings(
                name=self.name,
                schema=self.input.schema,
                columns=self.columns,
                by=self.by,
                time=None if over is None else over.name,
                tie_order=self.order,
                rows=self.rows,
                range_us=self.range_us,
                gap_us=self.gap_us,
                results=self.results,
                late=self.late,
                producer=None if over is None else over.producer,
                time_shift_us=0 if over is None else over.shift_us,
                horizon_lag_us=self._horizon_lag_us,
            )
        )

    def details(self) -> dict[str, Any]:
        frame: dict[str, Any] = {} if self.rows is None else {"rows": self.rows}
        if self.range_us is not None:
            frame["range"] = format_us(self.range_us)
        if self.gap_us is not None:
            frame["gap"] = format_us(self.gap_us)
        return {
            "by": list(self.by),
            "time": None if self.over is None else self.over.name,
            "order_by": [f"{name} desc" if descends else name for name, descends in self.order],
            **frame,
            "results": {name: str(result) for name, result in self.results},
            "late": str(self.late),
        }

    def identity(self) -> dict[str, Any]:
        """What becomes of late rows can change."""
        details = {name: value for name, value in super().identity().items() if name != "late"}
        return {
            **details,
            "given": to_ddl(self.input.schema),
            "shift_us": 0 if self.over is None else self.over.shift_us,
        }

    def further_meaning(self) -> dict[str, Any]:
        return code_of_aggregates(self.results)

    @property
    def user_code(self) -> tuple[tuple[str, Any], ...]:
        return code_to_send(self.results)

    def summary(self) -> str:
        by = f"by {', '.join(self.by)}" if self.by else "all rows"
        frame = "" if self.rows is None else f", {self.rows} rows"
        if self.range_us is not None:
            frame = f", {format_us(self.range_us)}"
        return f"{by}{frame}: " + ", ".join(f"{name} = {result}" for name, result in self.results)
