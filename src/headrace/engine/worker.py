"""What a Python worker of Spark does once, before its first task."""

from __future__ import annotations

import gc

_is_settled = False


def settle_worker() -> None:
    """Tell the garbage collector, once in a worker, that what is loaded by now stays.

    Spark's workers collect garbage after every task. With numpy and pyarrow loaded, walking over
    their modules again and again was most of a worker's time in small batches.
    """
    global _is_settled  # noqa: PLW0603 - once in a process
    if not _is_settled:
        _is_settled = True
        gc.collect()
        gc.freeze()
