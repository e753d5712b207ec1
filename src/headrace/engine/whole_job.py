"""A whole job in one task: all stages over all rows, chained in memory, with one local store, one
state file and one report.

Most batches of a live pipeline are small. For them, a second task costs more than it computes:
Spark only places this one, retries it and kills it. Everything that a wide job's tasks promise
holds: an attempt that fails, repeats or comes late leaves files that nothing refers to.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import pyarrow as pa

from headrace.columnar.keys import KEY_GROUPS
from headrace.engine.context import BatchContext, StageSpec
from headrace.engine.job_graph import JobNode, MapNode, nodes, run_whole
from headrace.engine.reports import JobMemory, write_report
from headrace.engine.shard import ShardFunction, ShardTooLarge, state_report
from headrace.engine.state.task_state import open_task_state, share_state
from headrace.engine.worker_daemon import settle_worker

STORE = "+whole"
"""The local store of a whole job, beside those of the stages. No step has such a name."""
MAX_RESULT_BYTES = 256 << 20
"""More than that is not sent to the driver: the batch runs wide instead, and leaves files."""


@dataclass(frozen=True)
class WholeJob:
    """Runs a whole job. Its result is what the job has written to its files."""

    job: JobNode
    context: BatchContext

    def run(self) -> dict[str, bytes]:
        settle_worker()
        files, stages = self.context.files, self.stages()
        assert isinstance(files, JobMemory)
        with ExitStack() as stack:
            state = None
            if stages and self.context.shards == 1:
                state = stack.enter_context(
                    open_task_state(
                        self.context.local / STORE / "0-of-1",
                        range(KEY_GROUPS),
                        self.context.steps_directory,
                        sorted(step.name for stage in stages for step in stage.steps),
                        self.context.ids,
                    )
                )
                stack.enter_context(share_state(state))
            run_whole(self.job)
            if state is not None:
                report = state_report(state, stages)
                report["counts"] = report.pop("key_counts")
                write_report(files, "state", report)
        contents = files.to_bytes()
        size = sum(map(len, contents.values()))
        if size > MAX_RESULT_BYTES:
            raise ShardTooLarge(
                f"A job in one task has written {size:,} bytes.",
                fix="nothing: the batch is computed over many tasks.",
            )
        return contents

    def stages(self) -> list[StageSpec]:
        """The stages of the job."""
        functions = [node.function for node in nodes(self.job) if isinstance(node, MapNode)]
        return [function.stage for function in functions if isinstance(function, ShardFunction)]

    def in_rdd(self, items: Iterable[Any]) -> Iterator[tuple[dict[str, bytes], tuple[str, ...]]]:
        """As a function over the one item of an RDD. It is read to its end: otherwise Spark would
        not use the worker again. Returns the names of the machine too, for the next job.
        """
        for _ in items:
            yield self.run(), _host_names()

    def in_frame(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """As a function over the one row of a DataFrame."""
        for batch in batches:
            if batch.num_rows:
                yield pa.record_batch({"files": [pickle.dumps(self.run())]})


@cache
def _host_names() -> tuple[str, ...]:
    """The names under which Spark may know this machine: those in its settings, or its own."""
    configured = [os.environ.get(setting) for setting in ("SPARK_LOCAL_HOSTNAME", "SPARK_LOCAL_IP")]
    names = {name for name in configured if name}
    if names:
        return tuple(sorted(names))
    name = socket.gethostname()
    names = {name, socket.getfqdn()}
    with suppress(OSError):
        names.add(socket.gethostbyname(name))
    return tuple(sorted(names))
