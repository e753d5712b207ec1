"""The daemon from which Spark forks its Python workers (`spark.python.daemon.module`): PySpark's
own, with all that tasks need imported first.

A worker that PySpark's daemon forks imports Arrow, numpy, pandas and Headrace again, for about
a second. And after every task it runs `gc.collect()` over all that is loaded, which in small
batches takes most of a worker's time. Here the daemon imports them once and freezes them: a forked
worker is ready in milliseconds, and a collection looks only at what the tasks have made since.

`hr.spark()` sets this module for local sessions. In any other session, `settle_worker`, called at
the beginning of a task, at least freezes what that worker has imported by then.

Nothing that is imported here may start a thread or open a connection: neither survives a fork.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

PRELOADED = (
    "numpy",
    "pandas",  # pyarrow imports it with the first array that it makes from Python values
    "pyarrow.compute",
    "pyspark.worker",
    "pyspark.sql.pandas.serializers",
    "headrace.engine.map_tasks",
    "headrace.engine.outputs",
    "headrace.engine.shard",
    "headrace.engine.whole_job",
    "headrace.log.file.log",
    "headrace.operators.aggregates.factory",
    "headrace.operators.aggregates.kernel",
    "headrace.operators.deduplication",
    "headrace.operators.latest_rows",
    "headrace.operators.joins.stream_stream",
    "headrace.operators.joins.stream_table",
    "headrace.operators.joins.table_table",
    "headrace.operators.top_rows",
    "headrace.operators.windows.factory",
    "headrace.operators.windows.kernel",
    "headrace.plan.plan",
    "headrace.runtime.spark_jobs",
)
NO_BACKGROUND_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Arrow's second allocator would start a thread when it is loaded."""
_settled = False


def settle_worker() -> None:
    """Exempt what this process has loaded from garbage collection, once. For the beginning of
    tasks; after the first call it costs nothing.
    """
    global _settled  # noqa: PLW0603 - once a process
    if not _settled:
        _settled = True
        gc.collect()
        gc.freeze()


def settle_partition(rows: Iterable[Any]) -> None:
    """`settle_worker` as a task of its own."""
    settle_worker()
    for _ in rows:  # Spark reuses a worker only if it has read its input to the end
        pass


def preload() -> None:
    """Import what tasks need, and freeze it. What cannot be imported here is left to the tasks,
    which will say why.
    """
    os.environ.update({**NO_BACKGROUND_THREAD, **os.environ})
    with _standard_output_free():
        for name in PRELOADED:
            try:
                import_module(name)
            except ImportError:
                continue
    # Python's own generator sees to it itself.
    os.register_at_fork(after_in_child=_seed_numpy)
    gc.collect()
    gc.freeze()


def _seed_numpy() -> None:
    """Give a forked worker random numbers of its own, as one that imports numpy itself has."""
    import numpy as np

    np.random.seed()  # noqa: NPY002 - the generator that users' functions may use


@contextmanager
def _standard_output_free() -> Iterator[None]:
    """Send what is printed meanwhile to standard error: Spark reads the daemon's port from standard
    output.
    """
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(output, 1)
        os.close(output)


def main() -> None:
    from pyspark.daemon import manager

    # Other kinds of workers, such as the one that looks up data sources, need little of it.
    if sys.argv[1:2] in ([], ["pyspark.worker"]):
        preload()
    manager()


if __name__ == "__main__":
    main()
