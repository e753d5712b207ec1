"""Testing one step alone: its kernel, with its state in memory, tick by tick. No Spark, no log, no
clock but the one that the test sets.

    minutes = orders.window(hr.tumbling("1 minute")).group_by("region").aggregate(n=hr.agg.count())
    test = KernelTest(minutes)
    assert test.tick([{"region": "eu", "at": at("12:00:10")}], watermark=at("12:00:30")) == []
    assert test.tick([], watermark=at("12:01:00")) == [{"region": "eu", …, "n": 1}]

The steps before the kernel are not run: the rows are those that the kernel would receive.
`pipelines` tests a whole pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace.columnar.columns import CHANGE_TYPE, TICK
from headrace.columnar.keys import KEY_GROUPS, key_groups
from headrace.durations import to_time_us
from headrace.errors import InputError
from headrace.operators.kernel import UNSTARTED, Groups, TimedKernel, Watermarks
from headrace.plan.plan import Step, TopicStep

if TYPE_CHECKING:
    from headrace.pipeline.stream import Stream, Table


class MemoryState:
    """A kernel's state as a dictionary. `changed` has every key that was put since the last
    `take_changes`, with its present value (None if it was deleted).
    """

    def __init__(
        self,
        values: Mapping[bytes, bytes] | None = None,
        owned_groups: Sequence[int] = range(KEY_GROUPS),
    ) -> None:
        self.owned_groups = owned_groups
        self.values: dict[bytes, bytes] = dict(values or {})
        self.groups: dict[bytes, int] = {}  # of keys that were put under a given group
        self.changed: dict[bytes, bytes | None] = {}
        self.cache: bytes | None = None

    def read_cache(self) -> bytes | None:
        return self.cache

    def write_cache(self, content: bytes) -> None:
        self.cache = content

    def get(self, keys: Sequence[bytes], groups: Groups | None = None) -> list[bytes | None]:  # noqa: ARG002
        return list(map(self.values.get, keys))

    def put(
        self, keys: Sequence[bytes], values: Sequence[bytes | None], groups: Groups | None = None
    ) -> None:
        changes = dict(zip(keys, values, strict=True))
        if groups is not None:
            self.groups.update(zip(keys, groups.tolist(), strict=True))
        self.changed.update(changes)
        self.values.update(changes)  # type: ignore[arg-type]  # deletions are taken out below
        if None in values:
            for key in [key for key, value in changes.items() if value is None]:
                self.values.pop(key)

    def get_array(self, keys: pa.Array, groups: Groups | None = None) -> pa.Array:
        return pa.array(self.get(keys.to_pylist(), groups), pa.binary())

    def put_array(self, keys: pa.Array, values: pa.Array, groups: Groups | None = None) -> None:
        self.put(keys.to_pylist(), values.to_pylist(), groups)

    def scan(self, low: bytes, high: bytes) -> tuple[list[bytes], list[bytes], Groups]:
        keys = sorted(key for key in self.values if low <= key < high)
        own_groups = key_groups(pa.array(keys, pa.binary())).tolist()
        groups = [self.groups.get(key, group) for key, group in zip(keys, own_groups, strict=True)]
        return keys, [self.values[key] for key in keys], np.array(groups, np.uint8)

    def first(self, low: bytes, high: bytes) -> bytes | None:
        return min((key for key in self.values if low <= key < high), default=None)

    def take_changes(self) -> dict[bytes, bytes | None]:
        """The changes since the last call, for a host that stores them."""
        changes, self.changed = self.changed, {}
        return changes

    def copy(self) -> MemoryState:
        fresh = MemoryState(self.values, self.owned_groups)
        fresh.groups = dict(self.groups)
        fresh.cache = self.cache
        return fresh


Row = Mapping[str, Any]
Moment = datetime | str


class KernelTest:
    """Runs the kernel of one step: the last step of a stream or table, which must keep state.

    Args:
        declared: The stream or table.

    Raises:
        InputError: The step keeps no state.

    Example:
        test = KernelTest(orders.group_by("region").aggregate(n=hr.agg.count()))
        test.tick([{"region": "eu"}])

    Attributes:
        state: What the kernel keeps; a copy of it is as good as the original.

    """

    def __init__(self, declared: Stream | Table) -> None:
        step = declared.step
        if not step.keeps_state:
            raise InputError(
                f"{step.path} keeps no state, so it has no kernel.",
                fix="name the step that does: an aggregate, a window, a join, ….",
            )
        self.step: Step = replace(step, name=step.name or step.path)
        self.kernel = self.step.hosted_kernel()
        self.state = MemoryState()
        self._tick = 0
        self._watermark_us = self._horizon_us = UNSTARTED

    def tick(
        self,
        *inputs: Sequence[Row],
        watermark: Moment | None = None,
        horizon: Moment | None = None,
    ) -> list[dict[str, Any]]:
        """Run one tick.

        Args:
            *inputs: The rows of each of the step's inputs, in their order. A table's rows are
                changes, with a `_change_type`.
            watermark: The watermark at the end of the tick; by default it does not move.
            horizon: The horizon at the end of the tick: earlier rows are late. By default the
                watermark.

        Returns:
            The rows that the step emits.

        Raises:
            InputError: Another number of inputs was given than the step has.

        Example:
            test.tick([{"region": "eu", "at": noon}], watermark="2026-01-01T12:01:00Z")

        """
        before = (self._watermark_us, self._horizon_us)
        self._watermark_us = self._watermark_us if watermark is None else to_time_us(watermark)
        self._horizon_us = self._watermark_us if horizon is None else to_time_us(horizon)
        self._tick += 1
        tables = self._tables(inputs)
        if isinstance(self.kernel, TimedKernel):
            watermarks = [self._watermarks(before)] * len(tables)
            emitted = self.kernel.step_timed(self.state, tables, watermarks)
        else:
            emitted = self.kernel.step(self.state, pa.concat_tables(tables))
        rows: list[dict[str, Any]] = emitted.drop_columns([TICK]).to_pylist()
        return rows

    @property
    def waits_until_us(self) -> int | None:
        """The time that something in the state waits for: a watermark at or past it lets the step
        emit more, or drop state. None if nothing waits.
        """
        return self.kernel.due(self.state) if isinstance(self.kernel, TimedKernel) else None

    def _tables(self, inputs: Sequence[Sequence[Row]]) -> list[pa.Table]:
        """The rows of each input as a table."""
        if isinstance(self.step, TopicStep):
            declared = [(self.step.stored_schema, self.step.is_table)]
        else:
            declared = [(source.schema, source.is_table) for source in self.step.inputs]
        if len(inputs) != len(declared):
            raise InputError(
                f"{self.step.name} has {len(declared)} inputs, and {len(inputs)} were given.",
                fix="give the rows of each: tick(left, right).",
            )
        tables = []
        for rows, (schema, is_table) in zip(inputs, declared, strict=True):
            system = [pa.field(CHANGE_TYPE, pa.string())] if is_table else []
            tables.append(
                pa.Table.from_pylist(
                    [{**row, TICK: self._tick} for row in rows],
                    pa.schema([*schema, *system, pa.field(TICK, pa.int64())]),
                )
            )
        return tables

    def _watermarks(self, before: tuple[int, int]) -> Watermarks:
        watermark_before_us, horizon_before_us = before
        return Watermarks(
            ticks=np.array([self._tick], np.int64),
            times_us=np.array([max(self._watermark_us, 0)], np.int64),
            watermark=np.array([self._watermark_us], np.int64),
            horizon=np.array([self._horizon_us], np.int64),
            watermark_at_start=watermark_before_us,
            horizon_at_start=horizon_before_us,
        )
