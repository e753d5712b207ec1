"""A shard at work on a batch, behind the shuffle: everything it needs comes with the data or from
its files, everything it made goes out as files and ids.

An attempt that fails, repeats or comes late leaves files that nobody refers to, and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import pieces
from headrace.columnar.columns import ORDER_FIELDS, TICK
from headrace.columnar.keys import encode_keys, key_groups
from headrace.columnar.sort import order_of
from headrace.engine.context import BatchContext, HostedStep, StageSpec, StageTarget, TopicTarget
from headrace.engine.dead_letters import Diverter
from headrace.engine.reader import DERIVED
from headrace.engine.shuffle import heartbeat, labels, pack, packed_rows, shard_groups, to_blob, unpack
from headrace.engine.state.files import StateFiles, write_report
from headrace.engine.state.local_store import LocalStore, StoreTransaction
from headrace.engine.state.step_state import StepState, write_states
from headrace.engine.watermarks import BatchWatermarks, corrected
from headrace.log.dead_letters import ASIDE, rows_to_texts
from headrace.log.partitioning import partitions_by_key
from headrace.operators.aggregates.aggregation import PARTIAL
from headrace.operators.kernel import Diverted, Gauged, PutsAside, TimedKernel
from headrace.operators.windows.late_rows import LateRows

# The account of a stage's rows that were not used: left out by an aggregate, or too late. A shard's
# report carries it, the commit makes it exact.


def account(steps: Iterable[HostedStep], directory: Path) -> dict[str, Any]:
    """For the report: counts by step, files with letters for rows that could not be taken in, late
    rows by minute and producer, and files with those that go to a topic.
    """
    report: dict[str, Any] = {"counts": {}, "diverted": {}, "late": {}, "late_rows": {}}
    for step in steps:
        report["counts"] |= {
            f"{step.name}.{what}": count
            for what, count in getattr(step.kernel, "counts", {}).items()
            if count
        }
        report["counts"] |= {
            f"{step.name}.{aggregate}.unknown": count
            for aggregate, count in getattr(step.kernel, "lost", {}).items()
        }
        if isinstance(diverted := getattr(step.kernel, "diverted", None), Diverted):
            _add_diverted(step.name, diverted.take(), directory, report)
        if isinstance(late := getattr(step.kernel, "late", None), LateRows):
            _add_late(step, late, directory, report)
        if (
            step.aside_topic is not None
            and isinstance(step.kernel, PutsAside)
            and (rows := step.kernel.take_aside()).num_rows
        ):
            report["late_rows"][step.aside_topic] = write_rows(
                directory, f"aside-{step.name}", rows
            )
    return report


def _add_diverted(step: str, rows: pa.Table, directory: Path, report: dict[str, Any]) -> None:
    if not rows.num_rows:
        return
    report["counts"][f"{step}.diverted"] = rows.num_rows
    names = [name for name in rows.column_names if not name.startswith("_")]
    reasons = pc.binary_join_element_wise(rows["_aggregate"], rows["_reason"], ": ")
    nowhere = [pa.nulls(rows.num_rows, kind) for kind in (pa.int32(), pa.int64())]
    letters = pa.Table.from_arrays(
        [rows_to_texts(rows.select(names)), rows[TICK], reasons, *nowhere], schema=ASIDE
    )
    report["diverted"][step] = write_rows(directory, f"diverted-{step}", letters)


def _add_late(step: HostedStep, late: LateRows, directory: Path, report: dict[str, Any]) -> None:
    counted = late.take_counts()
    if counted.num_rows:
        minutes, producers = (
            counted["minute"].cast(pa.int64()).to_pylist(),
            counted["producer"].to_pylist(),
        )
        texts = [None if producer is None else str(producer) for producer in producers]
        report["late"][step.name] = [
            list(each) for each in zip(minutes, texts, counted["rows"].to_pylist(), strict=True)
        ]
    rows = late.take_rows()
    if step.late_topic is not None and rows.num_rows:
        names = [field.name for field in step.inputs[0].schema if not field.name.startswith("_")]
        report["late_rows"][step.late_topic] = write_rows(
            directory, f"late-{step.name}", rows.select([*names, TICK])
        )


def write_rows(directory: Path, name: str, rows: pa.Table) -> str:
    """Rows in a file that the commit will read; returns its name."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{os.urandom(4).hex()}.arrow"
    with pa.ipc.new_file(str(path), rows.schema) as writer:
        writer.write_table(rows)
    return path.name


@dataclass(frozen=True)
class ShardFunction:
    """What `mapInArrow` runs for one stage: one call a shard."""

    stage: StageSpec
    context: BatchContext

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        label, ports = unpack(batches)
        if label is None:
            return
        shard = labels(self.context.shards).index(label)
        result, report = self._run(
            shard,
            {
                port: rows
                for port, tables in ports.items()
                if (rows := _in_order(tables)) is not None
            },
        )
        yield from self._hand_on(shard, result, report)
        self._report(shard, report)

    def _run(
        self, shard: int, inputs: dict[int, pa.Table]
    ) -> tuple[pa.Table | None, dict[str, Any]]:
        """Check, step and put in one transaction of the local store; then the files; both before
        anything is handed on.
        """
        groups = list(shard_groups(shard, self.context.shards))
        names = [step.name for step in self.stage.steps]
        files = {name: StateFiles(self.context.step_directory(name)) for name in names}
        wanted = {
            name: {g: i for g, i in self.context.ids.get(name, {}).items() if g in set(groups)}
            for name in names
        }
        store = LocalStore(
            self.context.local / self.stage.name / f"{shard}-of-{self.context.shards}", groups
        )
        try:
            with store.transaction() as txn:
                how = txn.bring_to(wanted, names, files)
                result, fresh, counts, due_us = self._step(shard, txn, inputs, wanted, files)
        finally:
            store.close()
        counts[f"{self.stage.name}.rows_out"] = result.num_rows if result else 0
        if plain := [rows for rows in inputs.values() if PARTIAL not in rows.column_names]:
            counts[f"{self.stage.name}.rows_in"] = sum(rows.num_rows for rows in plain)
        report = account(self.stage.steps, self.context.job_directory)
        return result, {
            **report,
            "ids": fresh,
            "how": how,
            "counts": counts | report["counts"],
            "due_us": due_us,
        }

    def _step(
        self,
        shard: int,
        txn: StoreTransaction,
        inputs: dict[int, pa.Table],
        wanted: dict[str, Any],
        files: dict[str, StateFiles],
    ) -> tuple[pa.Table | None, dict[str, Any], dict[str, int], dict[str, int]]:
        states = {
            step.name: StepState(txn, number) for number, step in enumerate(self.stage.steps, 1)
        }
        watermarks = self._watermarks()
        due_us: dict[str, int] = {}
        result: pa.Table | None = None
        for number, step in enumerate(self.stage.steps):
            given = inputs if number == 0 else {} if result is None else {0: result}
            result = _stepped(step, states[step.name], given, watermarks)
            if step.clock is not None and result is not None:
                result = corrected(
                    step.clock,
                    result,
                    given[0],
                    self.context.time,
                    shard,
                    self.context.job_directory,
                )
            if (
                isinstance(step.kernel, TimedKernel)
                and (waits_us := step.kernel.due(states[step.name])) is not None
            ):
                due_us[step.name] = waits_us
        fresh, touched = write_states(txn, states, files, wanted)
        return result, fresh, {f"{self.stage.name}.keys": touched, **self._gauged(states)}, due_us

    def _gauged(self, states: dict[str, StepState]) -> dict[str, int]:
        """How many more entries there are of those that people want to know the number of: in sum
        over all batches, how many there are.
        """
        gauged = [
            (step.name, step.kernel.gauges)
            for step in self.stage.steps
            if isinstance(step.kernel, Gauged)
        ]
        found = {
            f"{name}.{figure}": states[name].more(tag)
            for name, gauges in gauged
            for figure, tag in gauges.items()
        }
        return {name: count for name, count in found.items() if count}

    def _watermarks(self) -> BatchWatermarks | None:
        """The clocks of the inputs upstream, if a step goes by them."""
        if not any(isinstance(step.kernel, TimedKernel) for step in self.stage.steps):
            return None
        names = {
            path.name
            for step in self.stage.steps
            for given in step.inputs
            for path in given.watermarks
        }
        return self.context.time.watermarks(
            self.context.watermark_directory, self.context.job_directory, names
        )[0]

    # What goes on

    def _hand_on(
        self, shard: int, result: pa.Table | None, report: dict[str, Any]
    ) -> Iterator[pa.RecordBatch]:
        following = self.stage.next
        if isinstance(following, StageTarget | TopicTarget) and shard == 0:
            yield heartbeat(self.context.shards)
        if result is None or not result.num_rows or (following is None and not self.stage.views):
            return
        placed = result if self.stage.key is None else with_order(result, self.stage.key)
        for view in self.stage.views:
            report.setdefault("views", {})[view] = write_rows(
                self.context.job_directory, f"view-{view}-{shard}", placed
            )
        if isinstance(following, TopicTarget):
            yield from by_partition(0, following, placed, self.context.shards)
        elif isinstance(following, StageTarget):
            yield from self._to_stage(shard, following, placed)
        elif following == "rows":
            yield from placed.to_batches(max_chunksize=100_000)

    def _to_stage(
        self, shard: int, following: StageTarget, rows: pa.Table
    ) -> Iterator[pa.RecordBatch]:
        diverter = Diverter(self.context.job_directory, following.step)
        keyed = (
            diverter.keyed(batch, following.key, nulls=following.nulls)
            for batch in rows.to_batches()
        )
        yield from pack(
            following.port,
            keyed,
            following.key,
            self.context.shards,
            following.prepare.prepare if following.prepare else None,
        )
        diverter.finish(f"{following.port}-{shard}")

    def _report(self, shard: int, report: dict[str, Any]) -> None:
        """A small file a task: whichever attempt's is found, it stands for the same rows."""
        write_report(self.context.job_directory, f"stage-{self.stage.name}-{shard}", report)


def _stepped(
    step: HostedStep,
    state: StepState,
    inputs: dict[int, pa.Table],
    watermarks: BatchWatermarks | None,
) -> pa.Table | None:
    """One kernel's result. A kernel that goes by clocks is called also when no row came."""
    if isinstance(step.kernel, TimedKernel):
        assert watermarks is not None
        rows = [
            inputs.get(port, given.schema.empty_table()) for port, given in enumerate(step.inputs)
        ]
        return step.kernel.step_timed(
            state, rows, [watermarks.of(given.watermarks) for given in step.inputs]
        )
    found = [rows for rows in inputs.values() if rows.num_rows]
    return (
        step.kernel.step(state, found[0] if len(found) == 1 else _in_order(found))
        if found
        else None
    )


def _in_order(tables: list[pa.Table]) -> pa.Table | None:
    """Rows in the pipeline's order: tick, tables before streams, topic, partition, offset."""
    if not tables:
        return None
    rows = pa.concat_tables(tables)
    ordered = [field.name for field in ORDER_FIELDS]
    order = order_of([rows[name].to_numpy() for name in ordered])
    return rows if order is None else rows.take(pa.array(order))


def with_order(rows: pa.Table, key: tuple[str, ...]) -> pa.Table:
    """Results with their place in a tick: by key group, and within one as the kernel gave them. So
    it does not depend on the number of shards.
    """
    groups = key_groups(encode_keys(rows, list(key))).astype(np.int32)
    order = {
        "_rank": pa.array(np.full(rows.num_rows, DERIVED, np.int32)),
        "_partition": pa.array(groups),
        "_offset": pa.array(np.arange(rows.num_rows, dtype=np.int64)),
    }
    columns = {name: rows[name] for name in rows.column_names if name not in {TICK, *order}}
    return pa.table({**columns, TICK: rows[TICK], **order})


def chosen_partitions(
    batch: pa.RecordBatch, topic: TopicTarget
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The partition of each row: by its key, as any producer would choose it; rows without a key
    all go to the first, so that they keep their order.
    """
    return (
        partitions_by_key(batch, topic.key, topic.partitions)
        if topic.key
        else np.zeros(batch.num_rows, np.int32)
    )


def by_partition(
    port: int, topic: TopicTarget, rows: pa.Table, shards: int
) -> Iterator[pa.RecordBatch]:
    """Blobs for the tasks that write a topic: task t has the partitions p with p % shards == t."""
    for batch in pieces(rows):
        chosen = chosen_partitions(batch, topic)
        for task in range(shards):
            mask = pa.array(chosen % shards == task)
            part = batch.filter(mask)
            if part.num_rows:
                yield packed_rows([labels(shards)[task]], port, [to_blob(part)])
