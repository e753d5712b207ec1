"""Joins of tables. The cost of a change follows the change, not the tables: kernel and state alone,
without Spark.

And a post of a celebrity reaches all who follow: the kernel's rate, and the time until everyone
sees it in a view.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

import headrace as hr
from benchmarks.report import Result, judged, limited, note
from benchmarks.state_runs import Run, directory, session
from headrace.columnar.columns import CHANGE_TYPE, TICK
from headrace.columnar.keys import KEY_GROUPS
from headrace.engine.state.files import StateFiles, StateIds
from headrace.engine.state.local_store import LocalStore
from headrace.engine.state.step_state import StepState, write_states
from headrace.operators.joins.sides import Side
from headrace.operators.joins.table_table import TableTableJoin
from headrace.operators.kernel import Watermarks

MANY, FEW, CHANGES, BATCHES, WARM_UP = 1_000_000, 10_000, 1_000, 60, 15
FOLLOWERS, POSTS = 100_000, 8
STEP = "timeline"
ROWS_A_FILLING = 100_000
Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]
_STILL = Watermarks(*(np.zeros(0, np.int64),) * 4)


class Shard:
    """All key groups of a join of `orders` (by `id`, with a `customer`) and `customers` (by
    `customer`).
    """

    def __init__(
        self, root: Path, left: Side, right: Side, columns: list[tuple[str, str, str]]
    ) -> None:
        self.root, self.left, self.right, self.tick = root, left, right, 0
        self.files = StateFiles(root / "files")
        self.kernel = TableTableJoin(STEP, left, right, columns)
        self.ids: dict[str, StateIds] = {STEP: {}}

    def batch(
        self,
        left: dict[str, Numbers],
        right: dict[str, Numbers],
        kinds: tuple[str, ...] = ("insert",),
    ) -> tuple[float, float, int]:
        """One tick. Returns the seconds of kernel and state up to the store's commit, those of the
        kernel alone, and how many rows came.
        """
        self.tick += 1
        inputs = [
            self._changes(rows, kinds, side)
            for rows, side in ((left, self.left), (right, self.right))
        ]
        started = time.perf_counter()
        store = LocalStore.open(self.root / "local", list(range(KEY_GROUPS)))
        with store.transaction() as txn:
            txn.bring_to(self.ids, [STEP], {STEP: self.files})
            state = StepState(txn, 1)
            kernel_started = time.perf_counter()
            emitted = self.kernel.step_timed(state, inputs, [_STILL, _STILL])
            kernel_s = time.perf_counter() - kernel_started
            self.ids, _ = write_states(txn, {STEP: state}, {STEP: self.files}, self.ids)
        store.close()
        return time.perf_counter() - started, kernel_s, emitted.num_rows

    def _changes(self, rows: dict[str, Numbers], kinds: tuple[str, ...], side: Side) -> pa.Table:
        count = len(next(iter(rows.values()))) if rows else 0
        columns = [pa.array(rows.get(field.name, np.zeros(0)), field.type) for field in side.schema]
        kind = pa.array(np.resize(np.array(kinds, object), count), pa.string())
        return pa.table(
            [*columns, kind, pa.array(np.full(count, self.tick))],
            [*side.schema.names, CHANGE_TYPE, TICK],
        )


class Orders(Shard):
    """As many orders as customers, each of some customer."""

    def __init__(self, root: Path, rows: int) -> None:
        orders = Side(
            pa.schema([("id", pa.int64()), ("customer", pa.int64()), ("amount", pa.int64())]),
            ("customer",),
            ("id",),
        )
        customers = Side(
            pa.schema([("customer", pa.int64()), ("city", pa.int64())]),
            ("customer",),
            ("customer",),
        )
        columns = [("left", name, name) for name in orders.schema.names]
        super().__init__(root, orders, customers, [*columns, ("right", "city", "city")])
        self.rows, self.rng = rows, np.random.default_rng(rows)
        self.customer, self.amount, self.city = (
            self.rng.integers(0, rows, rows),
            np.zeros(rows, np.int64),
            np.zeros(rows, np.int64),
        )

    def fill(self) -> None:
        for first in range(0, self.rows, ROWS_A_FILLING):
            which = np.arange(first, min(self.rows, first + ROWS_A_FILLING))
            self.batch(
                {"id": which, "customer": self.customer[which], "amount": self.amount[which]},
                {"customer": which, "city": self.city[which]},
            )

    def change(self) -> float:
        """A thousand changes, half of them on either side: an order's amount, a customer's city."""
        orders, customers = (
            self.rng.choice(self.rows, CHANGES // 2, replace=False) for _ in range(2)
        )
        left = {
            "id": np.repeat(orders, 2),
            "customer": np.repeat(self.customer[orders], 2),
            "amount": _before_and_after(self.amount, orders),
        }
        right = {
            "customer": np.repeat(customers, 2),
            "city": _before_and_after(self.city, customers),
        }
        return self.batch(left, right, ("update_preimage", "update_postimage"))[0]


def _before_and_after(values: Numbers, which: Numbers) -> Numbers:
    before = values[which]
    values[which] += 1
    return np.stack([before, values[which]], axis=1).reshape(-1)


def small_changes() -> Iterator[Result]:
    note(
        f"joins_tables: {BATCHES} batches of {CHANGES:,} changes against tables of {MANY:,} rows,"
        f" and of {FEW:,}"
    )
    with directory() as root:
        many, few = Orders(root / "many", MANY), Orders(root / "few", FEW)
        for shard in (many, few):
            shard.fill()
        for _ in range(WARM_UP):
            many.change(), few.change()
        gc.collect()
        took = [(many.change(), few.change()) for _ in range(BATCHES)]
    many_ms, few_ms = (statistics.median(each) * 1_000 for each in zip(*took, strict=True))
    what = f"kernel and commit of {CHANGES:,} changes, tables of {MANY:,} rows"
    yield judged(
        "joins_tables",
        what,
        "ms",
        many_ms,
        f"tables of {FEW:,} rows",
        few_ms,
        bar=1 / 1.5,
        better="lower",
        params={"batches": BATCHES},
    )


def celebrity_kernel() -> Iterator[Result]:
    posts = Side(
        pa.schema([("post", pa.int64()), ("author", pa.int64()), ("words", pa.int64())]),
        ("author",),
        ("post",),
    )
    follows = Side(
        pa.schema([("follower", pa.int64()), ("author", pa.int64())]),
        ("author",),
        ("follower", "author"),
    )
    columns = [
        ("right", "follower", "follower"),
        *(("left", name, name) for name in posts.schema.names),
    ]
    with directory() as root:
        shard = Shard(root, posts, follows, columns)
        shard.batch({}, {"follower": np.arange(FOLLOWERS), "author": np.ones(FOLLOWERS, np.int64)})
        rates = []
        for post in range(POSTS):
            _, kernel_s, rows = shard.batch(
                {"post": np.array([post]), "author": np.array([1]), "words": np.array([7])}, {}
            )
            assert rows == FOLLOWERS
            rates.append(rows / kernel_s)
    what = f"a post to {FOLLOWERS:,} timelines, the kernel"
    yield judged(
        "joins_tables",
        what,
        "rows/s",
        statistics.median(rates),
        "limit",
        300_000,
        bar=1.0,
        better="higher",
        params={"posts": POSTS},
    )


def social() -> hr.Pipeline:
    made = hr.Pipeline("social")
    posts = made.table("posts", schema="post BIGINT, author BIGINT, text STRING", key="post")
    follows = made.table(
        "follows", schema="follower BIGINT, author BIGINT", key=["follower", "author"]
    )
    made.view("timeline", posts.join(follows, on="author"))
    return made


def celebrity_view() -> Iterator[Result]:
    """From the append of a post until everyone's timeline shows it."""
    seconds = []
    with session() as spark, directory() as root, Run(social().plan(), root, spark) as run:
        with run.log.producer("follows") as producer:
            producer.upsert(
                pa.table({"follower": np.arange(FOLLOWERS), "author": np.ones(FOLLOWERS, np.int64)})
            )
        for post in range(POSTS):
            started = time.perf_counter()
            with run.log.producer("posts") as producer:
                producer.upsert([{"post": post, "author": 1, "text": f"post {post}"}])
            run.runner.cut()
            while run.runner.step():
                continue
            seconds.append(time.perf_counter() - started)
            assert run.runner.views is not None
            with run.runner.views.reader.snapshot() as snap:
                assert snap.count("timeline") == FOLLOWERS * (post + 1)
    note(f"seconds {[round(each, 2) for each in seconds]}")
    yield limited(
        "joins_tables",
        f"a post visible in {FOLLOWERS:,} timelines",
        "s",
        statistics.median(seconds[2:]),
        limit=3.0,
    )


def results() -> Iterator[Result]:
    yield from small_changes()
    yield from celebrity_kernel()
    yield from celebrity_view()
