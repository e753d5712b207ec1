"""Window kernels on the engine's state: they emit the same as on a dictionary, also
with long keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headrace.engine.state.local_store import LocalStore
from headrace.engine.state.step_state import StepState
from headrace.operators.aggregates import functions as agg
from headrace.operators.windows.factory import window_kernel
from headrace.operators.windows.kernel import WindowSettings
from headrace.operators.windows.late_policy import Correct
from headrace.operators.windows.specs import Hopping, Session, Sliding, Tumbling
from headrace.testing.kernels import MemoryState
from tests.operators.windows.feeding import STREAM, random_feed

COUNT = (("n", agg.count()), ("total", agg.sum("v")))
SCHEMA = STREAM.set(0, pa.field("k", pa.string()))


@pytest.mark.parametrize(
    "aggregates", [COUNT, (*COUNT, ("all", agg.collect("v")))], ids=["states", "rows"]
)
@pytest.mark.parametrize("window", [Tumbling(10), Hopping(20, 5), Session(7), Sliding(30)], ids=str)
@pytest.mark.parametrize("emit", ["final", "changes"])
def test_the_store_is_a_state_as_any(
    window: Any, aggregates: Any, emit: str, tmp_path: Path
) -> None:
    feed = random_feed(3)
    kernel = window_kernel(
        WindowSettings("w", SCHEMA, "t", window, ("k",), aggregates, Correct(20), emit)
    )
    store, memory = LocalStore.open(tmp_path, range(128)), MemoryState()
    for tick in range(len(feed.ticks)):
        rows = [{**row, "k": ["a", "b" * 500][row["k"]], "_tick": tick} for row in feed.ticks[tick]]
        table = pa.Table.from_pylist(rows, pa.schema([*SCHEMA, ("_tick", pa.int64())]))
        with store.transaction() as txn:
            state = StepState(txn, 1)
            emitted = kernel.step_timed(state, [table], [feed.watermarks(tick, tick + 1)])
            due = kernel.due(state)
        assert emitted.equals(kernel.step_timed(memory, [table], [feed.watermarks(tick, tick + 1)]))
        assert due == kernel.due(memory)
    with store.transaction() as txn:
        assert StepState(txn, 1).scan(b"", b"\xff" * 400)[0] == []
    assert memory.values == {}
    store.close()
