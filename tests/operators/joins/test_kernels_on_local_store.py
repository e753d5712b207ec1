"""Joins over the store that pipelines have: the same rows as over a dictionary, also with keys that
are too long for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headrace.columnar.keys import KEY_GROUPS
from headrace.engine.state.local_store import LocalStore
from headrace.engine.state.step_state import StepState
from headrace.operators.joins import row_store
from headrace.operators.joins.sides import Side
from headrace.operators.joins.stream_stream import StreamStreamJoin
from headrace.operators.joins.table_table import TableTableJoin
from headrace.operators.joins.versioned_join import CorrectedJoin, VersionedJoin
from headrace.operators.kernel import UNSTARTED, KeyedState, TimedKernel, Watermarks
from headrace.testing.kernels import MemoryState

TIME = pa.timestamp("us", "UTC")
ROWS = Side(
    pa.schema([("n", pa.int64()), ("k", pa.string()), ("t", TIME)]), ("k",), ("n",), time="t"
)
OTHERS = Side(
    pa.schema([("m", pa.int64()), ("k", pa.string()), ("at", TIME)]), ("k",), ("m",), time="at"
)
VERSIONS = Side(OTHERS.schema, ("k",), ("k",), time="at")
COLUMNS = [("key", "k", "k"), ("left", "n", "n"), ("right", "m", "m")]
KERNELS: dict[str, TimedKernel] = {
    "stream_stream": StreamStreamJoin(
        "j", ROWS, OTHERS, COLUMNS, before_us=5, after_us=5, how="full"
    ),
    "table_table": TableTableJoin("j", ROWS, OTHERS, COLUMNS, how="full"),
    "versioned": VersionedJoin("j", ROWS, VERSIONS, COLUMNS, history_us=10, how="left"),
    "corrected": CorrectedJoin("j", ROWS, VERSIONS, COLUMNS, history_us=10, how="left"),
}


def long_key(number: int) -> str:
    return f"{number}".ljust(100 + 400 * (number % 2), "x")


def batches(table: str) -> list[tuple[list[pa.Table], list[Watermarks]]]:
    """Ten ticks of rows that only come, so that they do for streams and tables alike."""
    chance, made = random.Random(5), []
    for tick in range(10):
        inputs = []
        for name, time in (("n", "t"), ("m", "at")):
            keys = [long_key(chance.randrange(6)) for _ in range(30)]
            keys = (
                sorted(set(keys)) if table in {"versioned", "corrected"} and name == "m" else keys
            )
            columns: dict[str, Any] = {
                name: [tick * 100 + at for at in range(len(keys))],
                "k": keys,
                time: pa.array([tick * 5 + chance.randrange(10) for _ in keys], TIME),
                "_change_type": ["insert"] * len(keys),
                "_tick": [tick] * len(keys),
            }
            inputs.append(pa.table(columns))
        now, before = np.array([tick * 5]), tick * 5 - 5 if tick else UNSTARTED
        made.append((inputs, [Watermarks(np.array([tick]), now, now, now, before, before)] * 2))
    return made


@pytest.mark.parametrize("name", list(KERNELS))
def test_joins_over_the_local_store_equal_those_over_a_dictionary(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_store, "MAX_CHUNK_ROWS", 8)
    monkeypatch.setattr(row_store, "_SPLIT_CHUNK_ROWS", 4)
    store, memory = LocalStore.open(tmp_path / "store", range(KEY_GROUPS)), MemoryState()
    emitted: list[tuple[list[Any], list[Any]]] = []
    for inputs, watermarks in batches(name):

        def step(
            state: KeyedState,
            inputs: list[pa.Table] = inputs,
            watermarks: list[Watermarks] = watermarks,
        ) -> list[Any]:
            rows: list[Any] = KERNELS[name].step_timed(state, inputs, watermarks).to_pylist()
            return rows

        emitted.append((in_store(store, step), step(memory)))
    store.close()
    assert all(one == other for one, other in emitted)
    assert sum(len(one) for one, _ in emitted) > 200


def in_store(store: LocalStore, step: Callable[[KeyedState], list[Any]]) -> list[Any]:
    with store.transaction() as transaction:
        return step(StepState(transaction, 1))
