"""The steps of joins and of other operations on tables: rankings, distinct rows, versions, and the
steps that settle a join's changes.

`headrace.pipeline.joins` and `headrace.pipeline.aggregates` check and build them; the kernels are
in `headrace.operators.joins`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.durations import format_us
from headrace.plan.plan import (
    SettledColumns,
    Step,
    TimeColumn,
    Times,
    among,
    has_nullable,
    settled_columns,
    settled_keys_of,
)
from headrace.types.schema import to_ddl

if TYPE_CHECKING:
    from headrace.expressions.evaluator import RowStep
    from headrace.operators.aggregates.kernel import AggregateKernel
    from headrace.operators.file_table import FileTable
    from headrace.operators.hold import HoldKernel
    from headrace.operators.joins.interval_join import IntervalJoin
    from headrace.operators.joins.sides import ResultColumn, SettleKernel, Side
    from headrace.operators.joins.stream_stream import StreamStreamJoin
    from headrace.operators.joins.stream_table import StreamTableJoin
    from headrace.operators.joins.table_table import TableTableJoin
    from headrace.operators.joins.timeline import HistoryKernel
    from headrace.operators.joins.versioned_join import CorrectedJoin, VersionedJoin
    from headrace.operators.latest_rows import NewestKernel
    from headrace.operators.ranked_rows import RankedRowsKernel
    from headrace.operators.top_rows import Order, TopKernel


@dataclass(frozen=True, kw_only=True, eq=False)
class TopStep(Step):
    """The first `n` rows of each group of `per`."""

    operation: ClassVar[str] = "top"
    stateful: ClassVar[bool] = True

    n: int
    order: tuple[Order, ...]
    per: tuple[str, ...]
    ties_by_length: bool = False
    """Whether rows that are equal in the order are sorted by the length of a composite key's
    values, as earlier versions did.
    """

    @property
    def shard_key(self) -> tuple[str, ...]:
        return self.per

    @property
    def allows_null_keys(self) -> bool:
        return True

    def settled_keys(self) -> Sequence[tuple[tuple[str, ...], TimeColumn]]:
        return settled_keys_of(self.input, self.per)

    def settled_by(self, inputs: Sequence[SettledColumns]) -> SettledColumns:
        return among(inputs[0], self.per)

    def kernel(self) -> TopKernel:
        from headrace.operators.top_rows import TopKernel

        return TopKernel(
            self.name,
            self.schema,
            self.key,
            n=self.n,
            by=self.order,
            per=self.per,
            key_by_length=self.ties_by_length,
        )

    def identity(self) -> dict[str, Any]:
        """Stored rows have their order as bytes, and with it how ties are sorted."""
        sorts_ties = len(self.key) > 1 and not self.ties_by_length
        return {**super().identity(), **({"ties": "by value"} if sorts_ties else {})}

    def former(self) -> Step:
        return replace(self, ties_by_length=True) if len(self.key) > 1 else self

    def details(self) -> dict[str, Any]:
        return {"n": self.n, "by": [list(each) for each in self.order], "per": list(self.per)}

    def summary(self) -> str:
        by = ", ".join(f"{name} {'desc' if largest else 'asc'}" for name, largest in self.order)
        return f"{self.n} by {by}" + (f" per {', '.join(self.per)}" if self.per else "")


@dataclass(frozen=True, kw_only=True, eq=False)
class RankStep(Step):
    """The first `n` rows of each group of `per` of a stream, keyed by group and `rank`; by group
    alone if `rank` is None. Without an order, rows are ranked as they arrive.
    """

    operation: ClassVar[str] = "rank"
    stateful: ClassVar[bool] = True

    n: int
    order: tuple[Order, ...]
    per: tuple[str, ...]
    rank: str | None

    @property
    def shard_key(self) -> tuple[str, ...]:
        return self.per

    @property
    def allows_null_keys(self) -> bool:
        return True

    @property
    def key_may_be_null(self) -> bool:
        return any(self.schema.field(name).nullable for name in self.per)

    def kernel(self) -> RankedRowsKernel:
        from headrace.operators.ranked_rows import RankedRowsKernel

        return RankedRowsKernel(
            self.name, self.input.schema, n=self.n, by=self.order, per=self.per, rank=self.rank
        )

    def details(self) -> dict[str, Any]:
        order = [list(each) for each in self.order]
        return {"n": self.n, "by": order, "per": list(self.per), "rank": self.rank}

    def summary(self) -> str:
        by = ", ".join(f"{name} {'desc' if largest else 'asc'}" for name, largest in self.order)
        per = f" per {', '.join(self.per)}" if self.per else ""
        return f"{self.n} by {by or 'arrival'}{per}"


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

    def settled_keys(self) -> Sequence[tuple[tuple[str, ...], TimeColumn]]:
        return settled_keys_of(self.input, self.key)

    def settled_by(self, inputs: Sequence[SettledColumns]) -> SettledColumns:
        return among(inputs[0], self.key)

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

    def settled_by(self, inputs: Sequence[SettledColumns]) -> SettledColumns:
        return inputs[0]

    def kernel(self) -> SettleKernel:
        from headrace.operators.joins.sides import SettleKernel

        return SettleKernel(self.name, self.schema, self.key)


@dataclass(frozen=True, kw_only=True, eq=False)
class HoldStep(Step):
    """The rows of a table whose keys have been in it for `for_us` of tick time."""

    operation: ClassVar[str] = "hold"
    stateful: ClassVar[bool] = True

    for_us: int

    @property
    def allows_null_keys(self) -> bool:
        return True

    @property
    def goes_by_ticks(self) -> bool:
        return True

    def kernel(self) -> HoldKernel:
        from headrace.operators.hold import HoldKernel

        return HoldKernel(self.name, self.schema, self.key, for_us=self.for_us)

    def details(self) -> dict[str, Any]:
        return {"for_us": self.for_us}

    def summary(self) -> str:
        return f"for {format_us(self.for_us)}"


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
    JoinKernel = (
        StreamStreamJoin
        | IntervalJoin
        | StreamTableJoin
        | TableTableJoin
        | VersionedJoin
        | CorrectedJoin
    )

UNBOUNDED_US = 1 << 60
"""The `after_us` of a join whose rows have a last time of their own and no other bound."""
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
    since: str | None = None
    """The left column with the first time that a right row may have, in a join of two streams."""
    until: str | None = None
    """The left column with the last time that a right row may have."""
    history_us: int | None = None
    """How long old versions are kept, in a join as of a time; None in others."""
    late_versions: str = WAIT
    null_matches: bool = False
    """Whether a stream's row with a null key meets a table's row with a null key, as a question by
    key does. In other joins null matches nothing.
    """

    def former(self) -> Step:
        """Before, questions did not find the rows of null groups."""
        return replace(self, null_matches=False) if self.null_matches else self

    @property
    def former_can_be_declared(self) -> bool:
        return not self.null_matches

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

    @property
    def has_row_bounds(self) -> bool:
        """Whether the left rows have bounds of their own."""
        return self.since is not None or self.until is not None

    def kernel(self) -> JoinKernel:
        from headrace.operators.joins.interval_join import IntervalJoin
        from headrace.operators.joins.stream_stream import StreamStreamJoin
        from headrace.operators.joins.stream_table import StreamTableJoin
        from headrace.operators.joins.table_table import TableTableJoin
        from headrace.operators.joins.versioned_join import CorrectedJoin, VersionedJoin

        if self.has_row_bounds:
            return IntervalJoin(
                self.name,
                self.left,
                self.right,
                self.columns,
                before_us=self.before_us,
                after_us=self.after_us,
                since=self.since,
                until=self.until,
            )
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
            return StreamTableJoin(
                self.name,
                self.left,
                self.right,
                self.columns,
                how=self.how,
                null_matches=self.null_matches,
            )
        return TableTableJoin(
            self.name,
            self.left,
            self.right,
            self.columns,
            how=self.how,
            nulls_in_both_keys=all(table.key_may_be_null for table in self.inputs),
        )

    def settled_keys(self) -> Sequence[tuple[tuple[str, ...], TimeColumn]]:
        """A join of tables on a time by which both are settled."""
        if self.kind != "table-table":
            return ()
        pairs = self._settled_pairs([settled_columns(source) for source in self.inputs])
        if not pairs:
            return ()
        left, right = pairs[0]
        return (self.left.on, left), (self.right.on, right)

    def _settled_pairs(
        self, inputs: Sequence[SettledColumns]
    ) -> list[tuple[TimeColumn, TimeColumn]]:
        """The columns by which both sides are settled, and that are joined on each other."""
        joined = set(zip(self.left.on, self.right.on, strict=True))
        return [
            (left, right)
            for left in inputs[0]
            for right in inputs[1]
            if (left.name, right.name) in joined and left.shift_us == right.shift_us
        ]

    def settled_by(self, inputs: Sequence[SettledColumns]) -> SettledColumns:
        if self.kind != "table-table":
            return ()
        names = {(source, column): name for source, column, name in self.columns}
        settled = []
        for left, right in self._settled_pairs(inputs):
            name = names.get(("key", left.name))
            if name is None and self.how in {"inner", "left"}:
                name = names.get(("left", left.name))
            if name is None and self.how in {"inner", "right"}:
                name = names.get(("right", right.name))
            if name is not None:
                settled.append(TimeColumn(name, left.shift_us))
        return tuple(settled)

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
        """The event time of the left row; of the right row where left rows have bounds of their
        own, which may be far apart.
        """
        left_time = inputs[0]
        if left_time is None or self.is_table:
            return None
        names = {(kind, column): name for kind, column, name in self.columns}
        if self.has_row_bounds:
            right_time = inputs[1]
            if right_time is None or ("right", right_time.name) not in names:
                return None
            producer = names.get(("right", right_time.producer or ""))
            return TimeColumn(names["right", right_time.name], right_time.shift_us, producer)
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
        shifts = [self.left.shift_us, self.right.shift_us]
        if self.has_row_bounds:
            bounds |= {"since": self.since, "until": self.until}
        if self.history_us is not None:
            bounds = {"history_us": self.history_us, "late_versions": self.late_versions}
        return {
            "left_on": list(self.left.on),
            "right_on": list(self.right.on),
            "how": self.how,
            "columns": [list(each) for each in self.columns],
            **bounds,
            **({"shift_us": shifts} if any(shifts) else {}),
        }

    def summary(self) -> str:
        on = ", ".join(
            a if a == b else f"{a} = {b}" for a, b in zip(self.left.on, self.right.on, strict=True)
        )
        text = f"{self.how} on {on}"
        if self.kind == "stream-stream":
            text += f", {self._bounds_text()}"
        if self.history_us is not None:
            text += (
                f" as of {self.left.time}, history {format_us(self.history_us)}, late versions"
                f" {self.late_versions}"
            )
        return text

    def _bounds_text(self) -> str:
        before_us, after_us = self.before_us, self.after_us
        if not self.has_row_bounds and before_us == after_us:
            return f"within {format_us(before_us)}"
        since = f" and since {self.since}" if self.since is not None else ""
        if self.until is None:
            return f"from {format_us(before_us)} before{since} to {format_us(after_us)} after"
        last = "" if after_us >= UNBOUNDED_US else f" and {format_us(after_us)} after"
        return f"from {format_us(before_us)} before{since} until {self.until}{last}"

    def identity(self) -> dict[str, Any]:
        """How long versions are kept may change."""
        identity = {
            name: value for name, value in super().identity().items() if name != "history_us"
        }
        nullable = self.null_matches and has_nullable(self.right.schema, self.right.on)
        return {**identity, "null_matches": True} if nullable else identity

    def further_meaning(self) -> dict[str, Any]:
        """How long versions are kept decides which rows find theirs."""
        return {} if self.history_us is None else {"history_us": self.history_us}


@dataclass(frozen=True, kw_only=True, eq=False)
class LookupStep(Step):
    """The rows of a stream with the columns of a table in a file. It keeps no state."""

    operation: ClassVar[str] = "lookup"

    file: FileTable
    on: tuple[str, ...]
    columns: tuple[ResultColumn, ...]
    how: str

    def row_step(self, *, optimistic: bool) -> RowStep | None:  # noqa: ARG002
        from headrace.operators.file_table import FileLookup

        columns = tuple((source == "right", column) for source, column, _ in self.columns)
        return FileLookup(self.file, self.on, columns, self.schema, self.how == "left")

    def details(self) -> dict[str, Any]:
        return {
            "file": self.file.fingerprint,
            "file_schema": to_ddl(self.file.schema),
            "file_key": list(self.file.key),
            "on": list(self.on),
            "how": self.how,
            "columns": [list(each) for each in self.columns],
        }

    def summary(self) -> str:
        return f"{self.how} on {', '.join(self.on)} in {self.file.path}"


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

    def further_meaning(self) -> dict[str, Any]:
        return {"history_us": self.history_us}
