"""The cost of a batch follows what it changes, not what is kept: 10,000 rows of random keys against
5 million keys, compared with 50,000.

Kernel and state alone, without Spark. Both sides take turns. The large state is updated often
enough beforehand that its folding is under way; that of the small one soon is.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.report import Result, judged, note
from benchmarks.state_runs import directory
from headrace.columnar.keys import KEY_GROUPS
from headrace.engine.state.files import StateFiles, StateIds
from headrace.engine.state.local_store import LocalStore
from headrace.engine.state.step_state import StepState, write_states
from headrace.operators.aggregates import functions as agg
from headrace.operators.aggregates.kernel import AggregateKernel

BATCHES, ROWS = 200, 10_000
MANY, FEW = 5_000_000, 50_000
WARM_UP = 25
STEP = "totals"


class Shard:
    """All key groups of a running count and sum."""

    def __init__(self, root: Path, keys: int) -> None:
        self.root, self.keys, self.tick = root, keys, 0
        self.files = StateFiles(root / "files")
        schema = pa.schema([("k", pa.int64()), ("v", pa.int64())])
        self.kernel = AggregateKernel(
            STEP, schema, ["k"], [("n", agg.count()), ("s", agg.sum("v"))]
        )
        self.ids: dict[str, StateIds] = {STEP: {}}
        self.rng = np.random.default_rng(keys)

    def batch(self, keys: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
        """One tick with a row for each key. Returns the seconds of kernel and state, up to the
        store's commit.
        """
        self.tick += 1
        rows = pa.table(
            {
                "k": keys,
                "v": self.rng.integers(0, 1000, len(keys)),
                "_tick": np.full(len(keys), self.tick),
            }
        )
        started = time.perf_counter()
        store = LocalStore.open(self.root / "local", list(range(KEY_GROUPS)))
        with store.transaction() as txn:
            txn.bring_to(self.ids, [STEP], {STEP: self.files})
            state = StepState(txn, 1)
            self.kernel.step(state, rows)
            self.ids, _ = write_states(txn, {STEP: state}, {STEP: self.files}, self.ids)
        store.close()
        return time.perf_counter() - started

    def small_batch(self) -> float:
        return self.batch(self.rng.integers(0, self.keys, ROWS))

    def fill(self) -> None:
        """Every key once, and then updates of about as many bytes as the state has."""
        self.batch(self.rng.permutation(self.keys))
        for _ in range(5):
            self.batch(self.rng.choice(self.keys, self.keys // 4, replace=False))

    def written_bytes(self) -> int:
        """Of all files, those that nothing leads to any more included: none was removed."""
        return sum(path.stat().st_size for path in self.files.directory.iterdir())


def results() -> Iterator[Result]:
    note(
        f"state_change: {BATCHES} batches of {ROWS:,} rows against {MANY:,} keys, and against"
        f" {FEW:,}"
    )
    with directory() as root:
        many, few = (Shard(root / str(keys), keys) for keys in (MANY, FEW))
        for shard in (many, few):
            shard.fill()
        for _ in range(WARM_UP):
            few.small_batch(), many.small_batch()
        before = many.written_bytes(), few.written_bytes()
        gc.collect()
        took = [(many.small_batch(), few.small_batch()) for _ in range(BATCHES)]
        written = [
            shard.written_bytes() - bytes_before
            for shard, bytes_before in zip((many, few), before, strict=True)
        ]
    params = {"rows": ROWS, "batches": BATCHES, "keys": MANY, "peer_keys": FEW}
    many_ms, few_ms = (np.percentile(each, [50, 99]) * 1000 for each in zip(*took, strict=True))
    note(f"medians {many_ms[0]:.1f} and {few_ms[0]:.1f} ms")
    peer = f"{FEW:,} keys"
    yield judged(
        "state_change",
        "state files of 200 batches, 5 million keys",
        "bytes",
        written[0],
        peer,
        written[1],
        bar=1 / 1.5,
        better="lower",
        params=params,
    )
    yield judged(
        "state_change",
        "p99 of kernel and state, 5 million keys",
        "ms",
        float(many_ms[1]),
        peer,
        float(few_ms[1]),
        bar=1 / 3,
        better="lower",
        params=params,
    )
