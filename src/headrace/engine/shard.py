"""A shard of a stage: the function that runs behind the shuffle, with the stage's kernels and
state.

`ShardFunction` is called once per shard and batch. It loads the state, runs the kernels, writes the
new state files, passes the rows on and reports. Everything that it needs comes with the data or
from files; everything that it produces goes into new files and their ids. An attempt that fails,
repeats or comes late leaves files that nothing refers to, and no other trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import split_table
from headrace.columnar.columns import (
    CHANGE_TYPE,
    OFFSET_COLUMN,
    ORDER_FIELDS,
    PARTITION_COLUMN,
    RANK,
    TICK,
)
from headrace.columnar.keys import KEY_GROUPS, as_array, encode_keys, key_groups
from headrace.columnar.sort import row_order
from headrace.engine.context import BatchContext, HostedStep, StageSpec, StageTarget, TopicTarget
from headrace.engine.dead_letters import Diverter
from headrace.engine.event_times import with_event_times
from headrace.engine.reader import DERIVED
from headrace.engine.reports import (
    STATE_BYTES,
    STATE_KEYS,
    JobFiles,
    write_report,
    write_rows,
)
from headrace.engine.shuffle import (
    heartbeat,
    labels,
    pack,
    packed_row,
    shard_groups,
    to_blob,
    unpack,
    without_unread,
)
from headrace.engine.state.files import to_ranges
from headrace.engine.state.step_state import StepState
from headrace.engine.state.task_state import TaskState, open_task_state, whole_state
from headrace.engine.watermarks import BatchWatermarks
from headrace.errors import RetryError
from headrace.log.dead_letters import PENDING_SCHEMA, rows_to_json_column
from headrace.log.partitioning import partitions_by_key
from headrace.operators.aggregates.partial_aggregation import PARTIAL
from headrace.operators.kernel import (
    AGGREGATE,
    REASON,
    DeadLetterBuffer,
    GaugedKernel,
    SideOutputKernel,
    TimedKernel,
)
from headrace.operators.windows.late_rows import LateRowCounter, LateRowKernel

_MAX_ROWS_A_BATCH = 100_000
MAX_SHARD_BYTES = 1 << 30
"""Above it, text of one column may not fit into one Arrow array, which ends at 2 GiB."""


class ShardTooLarge(RetryError):
    """The rows of one shard are too large; with more shards, each has less."""


@dataclass(frozen=True)
class ShardFunction:
    """What `mapInArrow` runs for one stage: one call per shard."""

    stage: StageSpec
    context: BatchContext

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        label, ports = unpack(batches)
        if label is None:
            return
        shards = self.context.shards
        shard = labels(shards).index(label)
        size = sum(table.nbytes for tables in ports.values() for table in tables)
        if size > MAX_SHARD_BYTES and shards < KEY_GROUPS:
            raise ShardTooLarge(
                f"A shard of the stage {self.stage.name!r} has {size:,} bytes, of {shards} shards.",
                fix="nothing: the batch is computed with more shards.",
            )
        inputs = {port: _sort_rows(pa.concat_tables(tables)) for port, tables in ports.items()}
        result, report = self._run(shard, inputs)
        yield from self._emit(shard, result, report)
        self._report(shard, report)

    def _run(
        self, shard: int, inputs: dict[int, pa.Table]
    ) -> tuple[pa.Table | None, dict[str, Any]]:
        """Run the kernels over the inputs. Returns the last kernel's rows and the report.

        State files are durable when this returns, before any row is passed on. In a task that runs
        a whole job, all stages share one state, and `whole_job` writes it at the end.
        """
        shared = whole_state()
        if shared is not None:
            result, report = self._run_kernels(shard, shared.steps, inputs)
        else:
            shards = self.context.shards
            with open_task_state(
                self.context.local / self.stage.name / f"{shard}-of-{shards}",
                shard_groups(shard, shards),
                self.context.steps_directory,
                [step.name for step in self.stage.steps],
                self.context.ids,
            ) as state:
                result, report = self._run_kernels(shard, state.steps, inputs)
                report |= state_report(state, [self.stage])
        counts = report["counts"]
        counts[f"{self.stage.name}.rows_out"] = result.num_rows if result else 0
        plain = [rows for rows in inputs.values() if PARTIAL not in rows.column_names]
        if plain:  # partial aggregates were counted before the shuffle
            counts[f"{self.stage.name}.rows_in"] = sum(rows.num_rows for rows in plain)
        side_report = take_side_outputs(self.stage.steps, self.context.files)
        counts |= side_report.pop("counts") | report.pop("key_counts", {})
        return result, {**side_report, **report}

    def _run_kernels(
        self, shard: int, states: Mapping[str, StepState], inputs: dict[int, pa.Table]
    ) -> tuple[pa.Table | None, dict[str, Any]]:
        """Run each kernel over the rows of the one before. Returns the last kernel's rows, and what
        the kernels say about their state.
        """
        steps = self.stage.steps
        watermarks: BatchWatermarks | None = None
        if any(isinstance(step.kernel, TimedKernel) for step in steps):
            names = {
                path.name for step in steps for port in step.inputs for path in port.watermarks
            }
            watermarks, _ = self.context.watermarks.compute(
                self.context.watermark_directory, self.context.files, names
            )
        due_us: dict[str, int] = {}
        result: pa.Table | None = None
        for number, step in enumerate(steps):
            if number > 0:
                inputs = {} if result is None else {0: result}
            result = _run_kernel(step, states[step.name], inputs, watermarks)
            if step.watermark is not None and result is not None:
                result = with_event_times(
                    step.watermark,
                    result,
                    inputs[0],
                    self.context.watermarks,
                    shard,
                    self.context.files,
                )
            if isinstance(step.kernel, TimedKernel):
                step_due_us = step.kernel.due(states[step.name])
                if step_due_us is not None:
                    due_us[step.name] = step_due_us
        counts: dict[str, int] = {}
        for step in steps:
            if isinstance(step.kernel, GaugedKernel):
                # The sum of these over all batches is the number of entries in the state.
                for gauge, prefix in step.kernel.gauges.items():
                    growth = states[step.name].key_growth(prefix)
                    if growth:
                        counts[f"{step.name}.{gauge}"] = growth
        return result, {"counts": counts, "due_us": due_us}

    def _emit(
        self, shard: int, result: pa.Table | None, report: dict[str, Any]
    ) -> Iterator[pa.RecordBatch]:
        """Write the stage's rows to its views, and pass them on to its target."""
        target = self.stage.next
        if isinstance(target, StageTarget | TopicTarget) and shard == 0:
            yield heartbeat(self.context.shards)
        if result is None or not result.num_rows or (target is None and not self.stage.views):
            return
        rows = result if self.stage.key is None else with_order_columns(result, self.stage.key)
        for view in self.stage.views:
            file = write_rows(self.context.files, f"view-{view}-{shard}", rows)
            report.setdefault("views", {})[view] = file
        if isinstance(target, TopicTarget):
            yield from pack_by_partition(0, target, rows, self.context.shards)
        elif isinstance(target, StageTarget):
            diverter = Diverter(self.context.files, target.step)
            with_key = (
                without_unread(
                    diverter.divert_null_keys(batch, target.key, nulls=target.nulls), target.unread
                )
                for batch in rows.to_batches()
            )
            transform = target.prepare.prepare if target.prepare else None
            yield from pack(target.port, with_key, target.key, self.context.shards, transform)
            diverter.finish(f"{target.port}-{shard}")
        elif target == "rows":
            yield from rows.to_batches(max_chunksize=_MAX_ROWS_A_BATCH)

    def _report(self, shard: int, report: dict[str, Any]) -> None:
        write_report(self.context.files, f"stage-{self.stage.name}-{shard}", report)


def state_report(state: TaskState, stages: Iterable[StageSpec]) -> dict[str, Any]:
    """Make the state of some stages durable. Returns the part of a report that is about it."""
    new_ids, growth = state.write()
    changed_keys = {step: grown.changed_keys for step, grown in growth.items()}
    counts = {
        f"{stage.name}.keys": sum(changed_keys.get(step.name, 0) for step in stage.steps)
        for stage in stages
    }
    for step, grown in growth.items():
        counts[f"{step}{STATE_KEYS}"] = grown.new_keys
        counts[f"{step}{STATE_BYTES}"] = grown.new_bytes
    return {
        "ids": {step: to_ranges(ids) for step, ids in new_ids.items()},
        "key_counts": counts,
        "how": state.how,
    }


def _run_kernel(
    step: HostedStep,
    state: StepState,
    inputs: dict[int, pa.Table],
    watermarks: BatchWatermarks | None,
) -> pa.Table | None:
    """The rows that a kernel emits; None if it was not called. A timed kernel is called even if no
    row came: the watermark may have moved.
    """
    if isinstance(step.kernel, TimedKernel):
        assert watermarks is not None
        tables = [
            inputs.get(port, hosted.schema.empty_table()) for port, hosted in enumerate(step.inputs)
        ]
        input_watermarks = watermarks.of_ports([hosted.watermarks for hosted in step.inputs])
        return step.kernel.step_timed(state, tables, input_watermarks)
    tables = [rows for rows in inputs.values() if rows.num_rows]
    if not tables:
        return None
    rows = tables[0] if len(tables) == 1 else _sort_rows(pa.concat_tables(tables))
    return step.kernel.step(state, rows)


def take_side_outputs(steps: Iterable[HostedStep], job: JobFiles) -> dict[str, Any]:
    """The part of a shard's report that is about rows which kernels did not emit as results: their
    counts, dead letters, late rows by minute and producer, and files with rows for side outputs.
    """
    report: dict[str, Any] = {
        "counts": {},
        "dead_letters": {},
        "late_counts": {},
        "side_outputs": {},
    }
    for step in steps:
        kernel = step.kernel
        for metric, count in getattr(kernel, "counts", {}).items():
            if count:
                report["counts"][f"{step.name}.{metric}"] = count
        for aggregate, count in getattr(kernel, "unknown_results", {}).items():
            report["counts"][f"{step.name}.{aggregate}.unknown"] = count
        for aggregate, count in getattr(kernel, "left_out", {}).items():
            report["counts"][f"{step.name}.{aggregate}.left_out"] = count
        if isinstance(rejected := getattr(kernel, "dead_letters", None), DeadLetterBuffer):
            _take_dead_letters(step.name, rejected.take(), job, report)
        if isinstance(kernel, LateRowKernel):
            _take_late_rows(step, kernel.late_rows, job, report)
        if step.timeout_topic is not None and isinstance(kernel, SideOutputKernel):
            rows = kernel.take_side_output()
            if rows.num_rows:
                file = write_rows(job, f"aside-{step.name}", rows)
                report["side_outputs"][step.timeout_topic] = file
    return report


def _take_dead_letters(step: str, rows: pa.Table, job: JobFiles, report: dict[str, Any]) -> None:
    """Rows that an aggregate rejected. They have no partition and offset: the kernel gets none."""
    if not rows.num_rows:
        return
    system = {TICK, CHANGE_TYPE, AGGREGATE, REASON}
    names = [name for name in rows.column_names if name not in system]
    dead_letters = pa.Table.from_arrays(
        [
            rows_to_json_column(rows.select(names)),
            rows[TICK],
            pc.binary_join_element_wise(rows["_aggregate"], rows["_reason"], ": "),
            pa.nulls(rows.num_rows, pa.int32()),
            pa.nulls(rows.num_rows, pa.int64()),
        ],
        schema=PENDING_SCHEMA,
    )
    report["counts"][f"{step}.diverted"] = rows.num_rows
    report["dead_letters"][step] = write_rows(job, f"diverted-{step}", dead_letters)


def _take_late_rows(
    step: HostedStep, late: LateRowCounter, job: JobFiles, report: dict[str, Any]
) -> None:
    counts = late.take_counts()
    if counts.num_rows:
        report["late_counts"][step.name] = [
            [minute_us, None if producer is None else str(producer), count]
            for minute_us, producer, count in zip(
                counts["minute"].cast(pa.int64()).to_pylist(),
                counts["producer"].to_pylist(),
                counts["rows"].to_pylist(),
                strict=True,
            )
        ]
    rows = late.take_rows()
    if step.late_topic is not None and rows.num_rows:
        names = [name for name in rows.schema.names if name not in {TICK, CHANGE_TYPE, REASON}]
        report["side_outputs"][step.late_topic] = write_rows(
            job, f"late-{step.name}", rows.select([*names, TICK])
        )


# The order of rows


def _sort_rows(rows: pa.Table) -> pa.Table:
    """Rows in the pipeline's order: tick, rank (tables before streams), partition, offset."""
    order = row_order([rows[field.name].to_numpy() for field in ORDER_FIELDS])
    return rows if order is None else rows.take(pa.array(order))


def with_order_columns(rows: pa.Table, key: tuple[str, ...]) -> pa.Table:
    """Results with order columns: within a tick by key group, and within that as the kernel emitted
    them. The order does not depend on the number of shards.
    """
    groups = key_groups(encode_keys(rows, list(key))).astype(np.int32)
    order = {
        RANK: pa.array(np.full(rows.num_rows, DERIVED, np.int32)),
        PARTITION_COLUMN: pa.array(groups),
        OFFSET_COLUMN: pa.array(np.arange(rows.num_rows, dtype=np.int64)),
    }
    columns = {name: rows[name] for name in rows.column_names if name not in {TICK, *order}}
    return pa.table({**columns, TICK: rows[TICK], **order})


# Derived topics


def topic_partitions(
    batch: pa.RecordBatch, topic: TopicTarget
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The partition of each row: by its key, as every producer chooses it. Rows without a key go by
    the partition that they were read from, and those of a stage by their key group: both keep their
    order, and neither depends on the number of shards.
    """
    if not topic.key and topic.partitions == 1:
        return np.zeros(batch.num_rows, np.int32)
    if not topic.key:
        sources = as_array(batch.column(PARTITION_COLUMN)).to_numpy()
        return np.asarray(sources % topic.partitions, np.int32)
    return partitions_by_key(batch, topic.key, topic.partitions)


def pack_by_partition(
    port: int, topic: TopicTarget, rows: pa.Table, shards: int
) -> Iterator[pa.RecordBatch]:
    """Pack rows for the tasks that write a topic: task t writes the partitions p with
    p % shards == t.
    """
    for batch in split_table(rows):
        tasks = topic_partitions(batch, topic) % shards
        for task in np.flatnonzero(np.bincount(tasks)).tolist():
            is_mine = tasks == task
            part = batch if is_mine.all() else batch.filter(pa.array(is_mine))
            yield packed_row(labels(shards)[task], port, to_blob(part))
