"""The local stores of a pipeline under test: something to fill them with, and their content."""

from __future__ import annotations

import random
import shutil
from tempfile import TemporaryDirectory

import lmdb

from headrace.testing.pipelines import PipelineTest

Contents = dict[str, dict[bytes, bytes]]


def feed_some(test: PipelineTest, seed: int, *, ticks: int = 2) -> None:
    rng = random.Random(seed)
    for _ in range(ticks):
        test.feed(
            "orders",
            [
                {"k": rng.randrange(40), "v": rng.randrange(9), "note": rng.choice("abc")}
                for _ in range(60)
            ],
        )
        test.feed(
            "people",
            [
                {
                    "id": rng.randrange(30),
                    "city": rng.choice(["Oslo", "Rome"]),
                    "age": rng.randrange(90),
                }
                for _ in range(20)
            ],
        )
        test.cut(forced=True)


def contents(test: PipelineTest) -> Contents:
    """Every local store's keys and values, without what it says of itself; from copies, since a
    process may have a store open only once.
    """
    found = {}
    for data in sorted((test.root / "state" / "local").rglob("data.mdb")):
        with TemporaryDirectory() as copy:
            shutil.copy(data, copy)
            with lmdb.open(copy, readonly=True, lock=False) as store, store.begin() as txn:
                found[str(data.parent.relative_to(test.root))] = {
                    key: value for key, value in txn.cursor() if not key.startswith(b"\x00")
                }
    return found
