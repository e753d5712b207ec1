"""A shard at work on a batch, behind the shuffle: everything it needs comes with the data or from its files, everything it made goes out as files and ids.

An attempt that fails, repeats or comes late leaves files that nobody refers to, and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.engine.labels import labels
from headrace.engine.local_store import LocalStore, StoreTransaction
from headrace.engine.packing import hello, pack, packed_rows, shard_groups, to_blob, unpack
from headrace.engine.spec import BatchContext, StageSpec, TopicTarget
from headrace.engine.state_files import StateFiles
from headrace.engine.step_state import StepState
from headrace.engine.tasks import ORDER_FIELDS, TICK
from headrace.log.keys import partitions_by_key

_SIZES = b"\x00sizes"


@dataclass(frozen=True)
class ShardFunction:
    """What `mapInArrow` runs for one stage: one call a shard."""

    stage: StageSpec
    context: BatchContext
    number: int  # of the stage in its query

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        label, ports = unpack(batches)
        if label is None:
            return
        shard = labels(self.context.shards).index(label)
        rows = _in_order([table for tables in ports.values() for table in tables])
        result, report = self._run(shard, rows)
        yield from self._hand_on(shard, result, report)
        self._report(shard, report)

    def _run(self, shard: int, rows: pa.Table | None) -> tuple[pa.Table | None, dict[str, Any]]:
        """Check, step and put in one transaction of the local store; then the files; both before anything is handed on."""
        groups = list(shard_groups(shard, self.context.shards))
        names = [step.name for step in self.stage.steps]
        files = {name: StateFiles(self.context.step_directory(name)) for name in names}
        wanted = {name: {g: i for g, i in self.context.ids.get(name, {}).items() if g in set(groups)} for name in names}
        store = LocalStore(self.context.local / self.stage.name / f"{shard}-of-{self.context.shards}", groups)
        try:
            with store.transaction() as txn:
                how = txn.bring_to(wanted, names, files)
                result, fresh = self._step(txn, rows, wanted, files, groups)
        finally:
            store.close()
        report = {
            "ids": fresh,
            "how": how,
            "rows_in": rows.num_rows if rows is not None else 0,
            "rows_out": result.num_rows if result is not None else 0,
        }
        return result, report

    def _step(
        self, txn: StoreTransaction, rows: pa.Table | None, wanted: dict[str, Any], files: dict[str, StateFiles], groups: list[int]
    ) -> tuple[pa.Table | None, dict[str, Any]]:
        states = {step.name: StepState(txn, number) for number, step in enumerate(self.stage.steps, 1)}
        result = rows
        for step in self.stage.steps:
            if result is not None and result.num_rows:
                result = step.kernel.step(states[step.name], result)
        sizes: dict[str, dict[str, list[int]]] = json.loads(txn.txn.get(_SIZES) or b"{}")
        fresh = {name: state.write(files[name], wanted[name], groups, sizes.setdefault(name, {})) for name, state in states.items()}
        undo = {key: value for state in states.values() for key, value in state.undo.items()}
        kept = txn.keep_undo(list(undo), list(undo.values())) if undo else None
        if undo:
            txn.txn.put(_SIZES, json.dumps(sizes).encode())
        txn.stamp(fresh, [step.name for step in self.stage.steps], before=wanted, undo=kept)
        return result, fresh

    # What goes on

    def _hand_on(self, shard: int, result: pa.Table | None, report: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        if self.stage.next_key is not None and shard == 0:
            yield hello(self.context.shards)
        if result is None or not result.num_rows:
            return
        for view in self.stage.views:
            report.setdefault("views", {})[view.name] = self._write_changes(f"view-{view.name}-{shard}", result)
        for port, topic in enumerate(self.stage.topics):
            yield from _by_partition(port, topic, result, self.context.shards)
        if self.stage.next_key is not None:
            yield from pack(0, _with_order(result).to_batches(), self.stage.next_key, self.context.shards)

    def _write_changes(self, name: str, rows: pa.Table) -> str:
        path = self.context.job_directory / f"{name}-{os.urandom(4).hex()}.arrow"
        path.parent.mkdir(parents=True, exist_ok=True)
        with pa.ipc.new_file(str(path), rows.schema) as writer:
            writer.write_table(rows)
        return path.name

    def _report(self, shard: int, report: dict[str, Any]) -> None:
        """A small file a task: whichever attempt's is found, it stands for the same rows."""
        write_report(self.context.job_directory, f"stage-{self.number}-{shard}", report)


def write_report(directory: Path, name: str, report: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    fresh = directory / f".{name}-{os.urandom(4).hex()}"
    fresh.write_text(json.dumps(report))
    fresh.rename(directory / f"{name}.json")


def _in_order(tables: list[pa.Table]) -> pa.Table | None:
    """Rows in the pipeline's order: tick, tables before streams, topic, partition, offset."""
    if not tables:
        return None
    rows = pa.concat_tables(tables)
    ordered = [field.name for field in ORDER_FIELDS]
    columns = [rows[name].to_numpy() for name in ordered]
    if all(bool((np.diff(column) >= 0).all()) for column in columns[:1]) and _is_sorted(columns):
        return rows
    return rows.take(pa.array(np.lexsort(columns[::-1])))


def _is_sorted(columns: list[np.ndarray[Any, Any]]) -> bool:
    """Whether rows already lie in order, as they do when they come from one partition."""
    return bool(all((column[1:] == column[:-1]).all() for column in columns[1:3]) and (np.diff(columns[3]) > 0).all())


def _with_order(rows: pa.Table) -> pa.Table:
    """For the next stage: within a tick, results keep the order in which this shard gave them."""
    count = rows.num_rows
    numbers = pa.array(np.arange(count, dtype=np.int64))
    zeros = pa.array(np.zeros(count, np.int32))
    columns = {name: rows[name] for name in rows.column_names if name not in {"_rank", "_partition", "_offset"}}
    return pa.table({**columns, "_rank": zeros, "_partition": zeros, "_offset": numbers})


def _by_partition(port: int, topic: TopicTarget, rows: pa.Table, shards: int) -> Iterator[pa.RecordBatch]:
    """Blobs for the tasks that write a topic: task t has the partitions p with p % shards == t."""
    batch = rows.combine_chunks().to_batches()[0]
    chosen = partitions_by_key(batch, topic.key, topic.partitions) if topic.key else np.zeros(batch.num_rows, np.int32)
    for task in range(shards):
        mask = pa.array(chosen % shards == task)
        part = batch.filter(mask)
        if part.num_rows:
            yield packed_rows([labels(shards)[task]], port, [to_blob(part)])


def ticks_in(rows: pa.Table) -> list[int]:
    return sorted(pc.unique(rows[TICK]).to_pylist())
