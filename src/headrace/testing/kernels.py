"""Testing one step alone: its kernel, with its state in memory, tick by tick. No Spark, no log, no
clock but the one that the test sets.

    minutes = orders.window(hr.tumbling("1 minute")).group_by("region").aggregate(n=hr.agg.count())
    test = KernelTest(minutes) assert test.tick([{"region": "eu", "at": at("12:00:10")}],
    complete=at("12:00:30")) == [] assert test.tick([], complete=at("12:01:00")) == [{"region":
    "eu", …, "n": 1, "_change_type": "insert"}]

Steps before the kernel are not carried out: the rows are those that it would be given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace.columnar.columns import CHANGE_TYPE, TICK
from headrace.columnar.keys import GROUPS, key_groups
from headrace.durations import to_time_us
from headrace.errors import InputError
from headrace.operators.kernel import UNSTARTED, Groups, TimedKernel, Watermarks
from headrace.plan.plan import Step, TopicStep

if TYPE_CHECKING:
    from headrace.pipeline.stream import Stream, Table


# A kernel's state as a dictionary: for tests of kernels, ours and users'. Remembers which keys
# changed, as a real host must.


class MemoryState:
    """State in memory. `changed` has every key put since the last `take_changes`, with the value it
    now has (None: deleted).
    """

    def __init__(
        self, values: Mapping[bytes, bytes] | None = None, owned_groups: Sequence[int] = range(GROUPS)
    ) -> None:
        self.owned_groups = owned_groups
        self.values: dict[bytes, bytes] = dict(values or {})
        self.groups: dict[bytes, int] = {}  # of keys that were put under a group of another's
        self.changed: dict[bytes, bytes | None] = {}
        self.memo: bytes | None = None

    def read_cache(self) -> bytes | None:
        return self.memo

    def write_cache(self, content: bytes) -> None:
        self.memo = content

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
        found = sorted(key for key in self.values if low <= key < high)
        own = key_groups(pa.array(found, pa.binary())).tolist()
        groups = [self.groups.get(key, group) for key, group in zip(found, own, strict=True)]
        return found, [self.values[key] for key in found], np.array(groups, np.uint8)

    def first(self, low: bytes, high: bytes) -> bytes | None:
        return min((key for key in self.values if low <= key < high), default=None)

    def take_changes(self) -> dict[bytes, bytes | None]:
        """What changed since the last time, for a host that writes it down."""
        changes, self.changed = self.changed, {}
        return changes

    def copy(self) -> MemoryState:
        fresh = MemoryState(self.values, self.owned_groups)
        fresh.groups, fresh.memo = dict(self.groups), self.memo
        return fresh


Row = Mapping[str, Any]
Moment = datetime | str


class KernelTest:
    """The last step of a stream or table, which must be one that keeps state. `state` is what it
    remembers; a copy of it is as good as the original.
    """

    def __init__(self, declared: Stream | Table) -> None:
        step = declared.step
        if not step.keeps_state:
            raise InputError(
                f"{step.path} keeps no state, so it has no kernel.",
                fix="name the step that does: an aggregate, a window, a join, ….",
            )
        self.step: Step = replace(step, name=step.name or step.path)
        self.kernel = self.step.kernel()
        self.state = MemoryState()
        self._tick = 0
        self._watermark_us = self._horizon_us = UNSTARTED

    def tick(
        self, *inputs: Sequence[Row], complete: Moment | None = None, closed: Moment | None = None
    ) -> list[dict[str, Any]]:
        """One tick with the rows of each of the step's inputs, in their order; a table's rows are
        changes, with a `_change_type`. Returns what the step tells.

        `complete`: no earlier row is expected any more; without it, time stands still. `closed`: an
        earlier row is too late for anyone; the same unless it is given.
        """
        before = (self._watermark_us, self._horizon_us)
        self._watermark_us = self._watermark_us if complete is None else to_time_us(complete)
        self._horizon_us = self._watermark_us if closed is None else to_time_us(closed)
        self._tick += 1
        tables = self._tables(inputs)
        if isinstance(self.kernel, TimedKernel):
            told = self.kernel.step_timed(
                self.state, tables, [self._watermarks(before)] * len(tables)
            )
        else:
            told = self.kernel.step(self.state, pa.concat_tables(tables))
        rows: list[dict[str, Any]] = told.drop_columns([TICK]).to_pylist()
        return rows

    @property
    def waits_until_us(self) -> int | None:
        """The time that something in the state waits for: a `complete` at or past it lets the step
        tell more, or forget.
        """
        return self.kernel.due(self.state) if isinstance(self.kernel, TimedKernel) else None

    def _tables(self, inputs: Sequence[Sequence[Row]]) -> list[pa.Table]:
        schemas = (
            [self.step.stored_schema]
            if isinstance(self.step, TopicStep)
            else [given.schema for given in self.step.inputs]
        )
        tables = (
            [self.step.is_table]
            if isinstance(self.step, TopicStep)
            else [given.is_table for given in self.step.inputs]
        )
        if len(inputs) != len(schemas):
            raise InputError(
                f"{self.step.name} has {len(schemas)} inputs, and {len(inputs)} were given.",
                fix="give the rows of each: tick(left, right).",
            )
        return [
            self._table(rows, schema, is_table=kind)
            for rows, schema, kind in zip(inputs, schemas, tables, strict=True)
        ]

    def _table(self, rows: Sequence[Row], schema: pa.Schema, *, is_table: bool) -> pa.Table:
        changes = [pa.field(CHANGE_TYPE, pa.string())] if is_table else []
        return pa.Table.from_pylist(
            [{**row, TICK: self._tick} for row in rows],
            pa.schema([*schema, *changes, pa.field(TICK, pa.int64())]),
        )

    def _watermarks(self, before: tuple[int, int]) -> Watermarks:
        def one(value: int) -> Any:
            return np.array([value], np.int64)

        return Watermarks(
            one(self._tick),
            one(max(self._watermark_us, 0)),
            one(self._watermark_us),
            one(self._horizon_us),
            *before,
        )
