"""The steps of joins and of other operations on tables: rankings, distinct rows, versions, and the
steps that settle a join's changes.

`headrace.pipeline.joins` and `headrace.pipeline.aggregates` check and build them; the kernels are
in `headrace.operators.joins`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.durations import format_us
from headrace.plan.plan import Step, TimeColumn, Times

if TYPE_CHECKING:
    from headrace.operators.aggregates.kernel import AggregateKernel
    from headrace.operators.joins.sides import ResultColumn, SettleKernel, Side
    from headrace.operators.joins.stream_stream import StreamStreamJoin
    from headrace.operators.joins.stream_table import StreamTableJoin
    from headrace.operators.joins.table_table import TableTableJoin
    from headrace.operators.joins.timeline import HistoryKernel
    from headrace.operators.joins.versioned_join import CorrectedJoin, VersionedJoin
    from headrace.operators.latest_rows import NewestKernel
    from headrace.operators.top_rows import Order, TopKernel


@dataclass(frozen=True, kw_only=True, eq=False)
class TopStep(Step):
    """The first `n` rows of each group of `per`."""

    operation: ClassVar[str] = "top"
    stateful: ClassVar[bool] = True

    n: int
    order: tuple[Order, ...]
    per: tuple[str, ...]

    @property
    def shard_key(self) -> tuple[str, ...]:
        return self.per

    @property
    def allows_null_keys(self) -> bool:
        return True

    def kernel(self) -> TopKernel:
        from headrace.operators.top_rows import TopKernel

        return TopKernel(self.name, self.schema, self.key, n=self.n, by=self.order, per=self.per)

    def details(self) -> dict[str, Any]:
        return {"n": self.n, "by": [list(each) for each in self.order], "per": list(self.per)}

    def summary(self) -> str:
        by = ", ".join(f"{name} {'desc' if largest else 'asc'}" for name, largest in self.order)
        return f"{self.n} by {by}" + (f" per {', '.join(self.per)}" if self.per else "")


@dataclass(frozen=True, kw_only=True, eq=False)
class DistinctStep(Step):
    """Each different row once, or each different value of some columns: those of its key."""

    operation: ClassVar[str] = "distinct"
    stateful: ClassVar[bool] = True

    @property
    def allows_null_keys(self) -> bool:
        return True

    @property
    def key_may_be_null(self) -> bool:
        return True

    def kernel(self) -> AggregateKernel:
        from headrace.operators.top_rows import distinct_kernel

        return distinct_kernel(self.name, self.input.schema, self.input.key, self.key)

    def summary(self) -> str:
        return ", ".join(self.key)


@dataclass(frozen=True, kw_only=True, eq=False)
class SettleStep(Step):
    """A table's changes, merged to one change per key and tick. Before, the changes of one key may
    come from different shards.
    """

    operation: ClassVar[str] = "settle"
    stateful: ClassVar[bool] = True

    @property
    def allows_null_keys(self) -> bool:
        return True

    def kernel(self) -> SettleKernel:
        from headrace.operators.joins.sides import SettleKernel

        return SettleKernel(self.name, self.schema, self.key)


@dataclass(frozen=True, kw_only=True, eq=False)
class NewestStep(Step):
    """The latest row of each key by event time. It stands behind a join that corrects its answers,
    since a stream may have a key more than once.
    """

    operation: ClassVar[str] = "newest"
    stateful: ClassVar[bool] = True

    own: tuple[str, ...]
    """The stream's columns."""
    row_time: str

    def kernel(self) -> NewestKernel:
        from headrace.operators.latest_rows import NewestKernel

        return NewestKernel(self.name, self.schema, self.key, own=self.own, time=self.row_time)

    def details(self) -> dict[str, Any]:
        return {"own": list(self.own), "row_time": self.row_time}

    def summary(self) -> str:
        return f"of each {', '.join(self.key)} by {self.row_time}"


if TYPE_CHECKING:
    JoinKernel = StreamStreamJoin | StreamTableJoin | TableTableJoin | VersionedJoin | CorrectedJoin

WAIT, CORRECT = "wait", "correct"
"""What a join as of a time does while a version may still come: wait, or answer and correct."""


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinStep(Step):
    """A join of two inputs. `columns` says where each column of the result comes from."""

    operation: ClassVar[str] = "join"
    stateful: ClassVar[bool] = True

    left: Side
    right: Side
    columns: tuple[ResultColumn, ...]
    how: str
    before_us: int = 0
    after_us: int = 0
    history_us: int | None = None
    """How long old versions are kept, in a join as of a time; None in others."""
    late_versions: str = WAIT

    @property
    def shard_key(self) -> tuple[str, ...]:
        return self.left.on

    @property
    def input_keys(self) -> tuple[tuple[str, ...] | None, ...]:
        return self.left.on, self.right.on

    @property
    def allows_null_keys(self) -> bool:
        return True

    @property
    def kind(self) -> str:
        """The kinds of both sides: "stream-stream", "stream-table" or "table-table"."""
        left, right = self.inputs
        return f"{'table' if left.is_table else 'stream'}-{'table' if right.is_table else 'stream'}"

    def kernel(self) -> JoinKernel:
        from headrace.operators.joins.stream_stream import StreamStreamJoin
        from headrace.operators.joins.stream_table import StreamTableJoin
        from headrace.operators.joins.table_table import TableTableJoin
        from headrace.operators.joins.versioned_join import CorrectedJoin, VersionedJoin

        if self.kind == "stream-stream":
            bounds = {"before_us": self.before_us, "after_us": self.after_us}
            return StreamStreamJoin(
                self.name, self.left, self.right, self.columns, **bounds, how=self.how
            )
        if self.history_us is not None:
            versioned = VersionedJoin if self.late_versions == WAIT else CorrectedJoin
            return versioned(
                self.name,
                self.left,
                self.right,
                self.columns,
                history_us=self.history_us,
                how=self.how,
            )
        if self.kind == "stream-table":
            return StreamTableJoin(self.name, self.left, self.right, self.columns, how=self.how)
        return TableTableJoin(self.name, self.left, self.right, self.columns, how=self.how)

    @cached_property
    def _hold_us(self) -> int:
        return self.kernel().hold_us

    @property
    def watermark_delay_us(self) -> int:
        return self._hold_us

    @property
    def allowed_lateness_us(self) -> int:
        """A join that corrects its answers does so as far back as versions are kept."""
        return self.history_us or 0 if self.late_versions == CORRECT else 0

    @property
    def watermark_inputs(self) -> tuple[Step, ...]:
        """A stream that is joined with a table keeps its own watermark."""
        if self.kind == "stream-table" and self.history_us is None:
            return self.inputs[:1]
        return self.inputs

    @property
    def key_may_be_null(self) -> bool:
        if self.kind == "table-table":
            may_miss = {
                "inner": set(),
                "left": {"right"},
                "right": {"left"},
                "full": {"left", "right"},
            }[self.how]
            if any(side in may_miss and name in self.key for side, _, name in self.columns):
                return True
        return super().key_may_be_null

    @property
    def versioned_inputs(self) -> tuple[int, ...]:
        return (1,) if self.history_us is not None else ()

    def time(self, inputs: Times) -> TimeColumn | None:
        """The event time of the left row."""
        left_time = inputs[0]
        if left_time is None or self.is_table:
            return None
        names = {(kind, column): name for kind, column, name in self.columns}
        for kind in ("time", "left", "key"):
            if (name := names.get((kind, left_time.name))) is not None:
                producer = names.get(("left", left_time.producer or ""))
                return TimeColumn(name, left_time.shift_us, producer)
        return None

    def details(self) -> dict[str, Any]:
        bounds: dict[str, Any] = (
            {"before_us": self.before_us, "after_us": self.after_us}
            if self.kind == "stream-stream"
            else {}
        )
        if self.history_us is not None:
            bounds = {"history_us": self.history_us, "late_versions": self.late_versions}
        return {
            "left_on": list(self.left.on),
            "right_on": list(self.right.on),
            "how": self.how,
            "columns": [list(each) for each in self.columns],
            **bounds,
        }

    def summary(self) -> str:
        on = ", ".join(
            a if a == b else f"{a} = {b}" for a, b in zip(self.left.on, self.right.on, strict=True)
        )
        text = f"{self.how} on {on}"
        if self.kind == "stream-stream":
            text += f", {_bounds_text(self.before_us, self.after_us)}"
        if self.history_us is not None:
            text += (
                f" as of {self.left.time}, history {format_us(self.history_us)}, late versions"
                f" {self.late_versions}"
            )
        return text

    def identity(self) -> dict[str, Any]:
        """How long versions are kept may change."""
        return {name: value for name, value in super().identity().items() if name != "history_us"}


def _bounds_text(before_us: int, after_us: int) -> str:
    if before_us == after_us:
        return f"within {format_us(before_us)}"
    return f"from {format_us(before_us)} before to {format_us(after_us)} after"


@dataclass(frozen=True, kw_only=True, eq=False)
class HistoryStep(Step):
    """Each version of a table's rows, with the time at which it ceased to be valid."""

    operation: ClassVar[str] = "history"
    stateful: ClassVar[bool] = True

    valid_from: str
    valid_to: str
    history_us: int

    @property
    def shard_key(self) -> tuple[str, ...]:
        return self.input.key

    @property
    def key_may_be_null(self) -> bool:
        return False

    @property
    def versioned_inputs(self) -> tuple[int, ...]:
        return (0,)

    @property
    def by(self) -> tuple[str, ...]:
        return self.input.key

    def kernel(self) -> HistoryKernel:
        from headrace.operators.joins.sides import Side
        from headrace.operators.joins.timeline import HistoryKernel

        table = self.input
        return HistoryKernel(
            self.name,
            Side(table.schema, table.key, table.key, self.valid_from),
            history_us=self.history_us,
            valid_to=self.valid_to,
        )

    def time(self, inputs: Times) -> TimeColumn | None:  # noqa: ARG002
        return None

    def details(self) -> dict[str, Any]:
        return {
            "valid_from": self.valid_from,
            "valid_to": self.valid_to,
            "history_us": self.history_us,
        }

    def summary(self) -> str:
        return f"from {self.valid_from} to {self.valid_to}, of {format_us(self.history_us)}"

    def identity(self) -> dict[str, Any]:
        return {name: value for name, value in super().identity().items() if name != "history_us"}
