"""`headrace demo`: a small shop on an embedded log, Spark beside it, and a pipeline with a live view. Every number it shows is checked; a wrong one is exit code 1.

A till produces orders and now and then repeats an append, as after a lost answer. One group writes invoices in transactions, another reads slowly and falls
behind, Spark streams the large orders into a topic of their own, and a pipeline keeps each customer's revenue in a view. When the time is up, everyone reads
to the end, and what was stored is compared with what was sent: the same rows, each once, each customer's in order, the view equal to a recomputation. At last a few rows
show what time is to a pipeline (`demo_windows`).
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import typer

from headrace.cli.demo_windows import show_time
from headrace.cli.output import say, seconds_text
from headrace.log.api import Consumer, Log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from headrace.pipeline.pipeline import Pipeline
    from headrace.pipeline.runner import Runner

ORDERS = "order_id BIGINT, customer_id BIGINT, amount DOUBLE, placed_at TIMESTAMP"
CUSTOMERS = 97
ROWS_AN_APPEND = 500
REPEAT_EVERY = 5
LARGE = 400.0
SHOW_SECONDS = 5.0
BATCHES_TO_SEE = 4
SPARK_SECONDS = 40.0
OPEN_SHARE = 0.6
"""Orders come in for this share of the time; the rest is for reading to the end, and counting. On a busy machine Spark may need longer to start."""


def demo(
    seconds: Annotated[
        float, typer.Option(min=1, envvar="DEMO_SECONDS", help="About how long it takes; Spark's start is the least it needs.")
    ] = 15.0,
    keep: Annotated[Path | None, typer.Option(help="Keep the log in this directory, to look at it afterwards.")] = None,
) -> None:
    """Show the log, Spark and a pipeline at work: producing, two groups, lag, transactions, a stream, a live view. Each number is checked.

    Example: headrace demo --seconds 30
    """
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as scratch:
        failed = Shop(keep or Path(scratch) / "log", Path(scratch), seconds).run()
    if failed:
        raise typer.Exit(1)


@dataclass
class Checks:
    """What was expected and what was found."""

    failed: list[str] = field(default_factory=list)

    def equal(self, what: str, found: Any, expected: Any) -> None:
        good = found == expected
        say(f"  {'ok ' if good else 'BAD'} {what}: {found:,}" + ("" if good else f", not {expected:,}"))
        if not good:
            self.failed.append(what)

    def true(self, what: str, good: bool) -> None:
        say(f"  {'ok ' if good else 'BAD'} {what}")
        if not good:
            self.failed.append(what)


class Shop:
    """The demo's actors, and what they know of what should be there."""

    def __init__(self, directory: Path, scratch: Path, seconds: float) -> None:
        self.address = f"file:{directory}"
        self.checkpoint, self.state = scratch / "checkpoint", scratch / "state"
        self.seconds = seconds
        self.started = time.monotonic()
        self.closing = threading.Event()
        self.spark: SparkSession | None = None
        self.runner: Runner | None = None
        self.sent = 0
        self.repeats = 0
        self.invoiced = 0
        self.reported = 0
        self.reported_amount = 0.0

    def run(self) -> list[str]:
        """Open the shop, keep it open, close it, count. Returns what was not as it should be."""
        from headrace.log import open_log

        with open_log(self.address) as log, ThreadPoolExecutor(max_workers=5) as pool:
            try:
                self._create_topics(log)
                spark = pool.submit(self._start_spark, log)
                actors = [pool.submit(self._guarded, act, log) for act in (self._till, self._invoicing, self._reports, self._pipeline)]
                query = self._live(log, spark, actors)
                self._close(log, query, actors, pool)
                failed = self._check(log)
            finally:
                self.closing.set()
                if self.runner is not None:
                    self.runner.close()
                if self.spark is not None:
                    self.spark.stop()
        say(f"{'FAILED: ' + ', '.join(failed) if failed else 'All as it should be'}, in {seconds_text(self._elapsed())}.")
        return failed

    def _create_topics(self, log: Log) -> None:
        say(f"1. A log in a directory, no server ({self.address}), with three topics")
        log.create_topic("orders", ORDERS, key="customer_id", partitions=4)
        log.create_topic("invoices", "order_id BIGINT, total DOUBLE", key="order_id", partitions=2)
        log.create_topic("large_orders", ORDERS, key="customer_id", partitions=2)

    # Actors, each in a thread of its own

    def _guarded(self, act: Callable[[Log], None], log: Log) -> None:
        """An actor that fails closes the shop, so that the others do not wait for it."""
        try:
            act(log)
        except BaseException:
            self.closing.set()
            raise

    def _till(self, log: Log) -> None:
        """Sends orders; every few appends it sends one again, as if the answer had been lost."""
        with log.producer("orders", id="till-7") as producer:
            while not self.closing.is_set():
                rows = orders(self.sent, ROWS_AN_APPEND)
                sequence = producer.last_sequence + 1
                producer.append(rows, sequence=sequence)
                self.sent += rows.num_rows
                if sequence % REPEAT_EVERY == 0 and producer.append(rows, sequence=sequence).duplicate:
                    self.repeats += 1
                time.sleep(0.05)

    def _invoicing(self, log: Log) -> None:
        """Reads orders and writes invoices: rows and position in one transaction, so each order has one invoice."""
        with log.consumer("orders", group="invoicing") as consumer:
            while not self._finished(log, consumer):
                batches = consumer.poll(timeout="200 milliseconds")
                if not batches:
                    continue
                with log.transaction("invoicing-job") as tx:
                    for batch in batches:
                        tx.append("invoices", pa.table({"order_id": batch["order_id"], "total": pc.multiply(batch["amount"], 1.2)}))
                    tx.commit_offsets("invoicing", consumer.positions())
                self.invoiced += sum(batch.num_rows for batch in batches)

    def _reports(self, log: Log) -> None:
        """Reads in small bites and takes its time: it falls behind, and nobody else notices."""
        with log.consumer("orders", group="reports") as consumer:
            while not self._finished(log, consumer):
                for batch in consumer.poll(timeout="200 milliseconds", max_rows=100_000 if self.closing.is_set() else ROWS_AN_APPEND):
                    self.reported += batch.num_rows
                    self.reported_amount += pc.sum(batch["amount"]).as_py()
                consumer.commit()
                self.closing.wait(0.15)

    def _finished(self, log: Log, consumer: Consumer) -> bool:
        """The shop is closed, and this group has read everything."""
        return self.closing.is_set() and consumer.positions().get("orders") == log.end_offsets("orders") == {
            **log.committed(consumer.group).get("orders", {})
        }

    def _start_spark(self, log: Log) -> StreamingQuery:
        import headrace
        from headrace.pipeline.runner import Runner

        self.spark = headrace.spark()
        self.runner = Runner(revenue(self.address).plan(), log, self.spark, self.state)
        return self._stream(self.spark)

    def _pipeline(self, _log: Log) -> None:
        """Keeps the view, batch after batch, from the moment Spark is there."""
        while self.runner is None and not self.closing.wait(0.1):
            continue
        if self.runner is not None:
            self.runner.run(stop=self.closing)

    def _stream(self, spark: SparkSession) -> StreamingQuery:
        """Large orders into a topic of their own, batch after batch, exactly once."""
        source = spark.readStream.format("headrace").option("log", self.address).option("topic", "orders").load()
        large = source.where(f"amount >= {LARGE}").select("order_id", "customer_id", "amount", "placed_at")
        sink = large.writeStream.format("headrace").option("log", self.address).option("topic", "large_orders").option("writer", "large-orders")
        return sink.option("checkpointLocation", str(self.checkpoint)).trigger(processingTime="500 milliseconds").start()

    # The day

    def _live(self, log: Log, spark: Future[StreamingQuery], actors: list[Future[None]]) -> StreamingQuery:
        """Show what happens until closing time. Spark takes some seconds to start; meanwhile orders come in, and it catches up."""
        say(
            "2. A till sends orders; two groups read them; Spark starts, streams the large ones into a topic, and a pipeline keeps a view of them all"
        )
        everyone: list[Future[Any]] = [spark, *actors]
        while not self.closing.wait(min(1.0, self.seconds / 5)):
            failed = spark.done() and spark.exception() is not None
            self._show(log, "failed" if failed else "running" if spark.done() else "starting")
            if failed or self._closing_time():
                self.closing.set()
        if not spark.done():
            say("  The shop is closed; Spark is still starting")
            self._wait(log, everyone, "starting")
        for each in everyone:
            if each.done():
                each.result()  # raises what went wrong, if anything
        return spark.result()

    def _closing_time(self) -> bool:
        """When the time is up, and the view has been seen to change; but a machine that is too busy for that is not waited for."""
        batches = self.runner.batches if self.runner is not None else 0
        return self._elapsed() > self.seconds * OPEN_SHARE and (batches >= BATCHES_TO_SEE or self._elapsed() > self.seconds + SPARK_SECONDS)

    def _wait(self, log: Log, work: list[Future[Any]], spark: str) -> None:
        """Until all of it is done or some has failed; what happens meanwhile is shown, as it may take long on a busy machine."""
        while True:
            done, pending = wait(work, timeout=SHOW_SECONDS, return_when=FIRST_EXCEPTION)
            if not pending or any(each.exception() for each in done):
                return
            self._show(log, spark)

    def _elapsed(self) -> float:
        return time.monotonic() - self.started

    def _show(self, log: Log, spark: str) -> None:
        behind = {name: sum(each.rows for each in log.lag(name)) for name in log.groups()}
        lags = "; ".join(f"{name} {rows:>6,} behind" for name, rows in sorted(behind.items())) or "nobody has read yet"
        large = sum(log.end_offsets("large_orders").values())
        say(f"  {self._elapsed():5.1f} s  {self.sent:>8,} orders sent; {lags}; Spark {spark + ',':9} {large:>6,} large orders{self._in_view()}")

    def _in_view(self) -> str:
        """The view as it is now: complete up to one moment, whatever that is."""
        if self.runner is None or self.runner.views is None:
            return ""
        rows = self.runner.views.reader.sql("SELECT sum(orders) AS orders, max(revenue) AS best FROM revenue").to_pylist()
        counted, best = rows[0]["orders"] or 0, rows[0]["best"] or 0.0
        return f"; view: {counted:>8,} orders, best customer {best:,.2f}"

    def _close(self, log: Log, query: StreamingQuery, actors: list[Future[None]], pool: ThreadPoolExecutor) -> None:
        say("3. Closing time: everyone reads to the end")
        for actor in actors:
            actor.result(timeout=60)
        rest = pool.submit(query.processAllAvailable)
        self._wait(log, [rest], "running")
        rest.result()
        query.stop()
        assert self.runner is not None
        self.runner.run(until_caught_up=True)
        self._show(log, "done")

    def _check(self, log: Log) -> list[str]:
        say("4. Counting")
        checks = Checks()
        stored = log.read("orders").to_table()
        expected = orders(0, self.sent)
        self._check_orders(checks, stored, expected)
        invoices = log.read("invoices").to_table()
        checks.true("each order has one invoice", same_set(invoices["order_id"], expected["order_id"]))
        checks.equal("orders in the slow group's report", self.reported, self.sent)
        checks.true("its total is right", abs(self.reported_amount - pc.sum(expected["amount"]).as_py()) < 0.01)
        large = log.read("large_orders").to_table()
        wanted = expected.filter(pc.greater_equal(expected["amount"], LARGE))
        checks.equal("large orders that came through Spark", large.num_rows, wanted.num_rows)
        checks.true("they are the right ones, each once", same_set(large["order_id"], wanted["order_id"]))
        self._check_view(checks, expected)
        checks.equal("rows that a group has not read", sum(each.rows for each in log.lag()), 0)
        checks.equal("damaged places that `log verify` finds", sum(each.kind != "ok" for each in log.verify()), 0)
        if self.spark is not None:
            show_time(log, self.spark, self.state.with_name("time-state"), checks)
        return checks.failed

    def _check_view(self, checks: Checks, expected: pa.Table) -> None:
        """The view that grew order by order, beside one computed now from all of them."""
        assert self.runner is not None
        assert self.runner.views is not None
        kept = self.runner.views.reader.table("revenue").sort_by("customer_id")
        wanted = expected.group_by("customer_id").aggregate([([], "count_all"), ("amount", "sum")]).sort_by("customer_id")
        checks.equal(f"orders counted in the view, in {self.runner.batches} batches", sum(kept["orders"].to_pylist()), self.sent)
        checks.true(
            "each customer's orders and revenue are right",
            kept["orders"].equals(wanted["count_all"]) and bool(np.allclose(kept["revenue"].to_numpy(), wanted["amount_sum"].to_numpy(), rtol=1e-9)),
        )

    def _check_orders(self, checks: Checks, stored: pa.Table, expected: pa.Table) -> None:
        checks.equal("orders stored", stored.num_rows, self.sent)
        checks.true("each once, and none invented", same_set(stored["order_id"], expected["order_id"]))
        checks.true(f"{self.repeats:,} appends were sent twice and stored once", self.repeats > 0)
        checks.true("each customer's orders are in order", in_order(stored))


def revenue(address: str) -> Pipeline:
    """The pipeline: from a topic to a view, in three lines."""
    import headrace as hr

    shop = hr.Pipeline("demo", log=address)
    placed = shop.topic("orders", schema=ORDERS, key="customer_id", partitions=4)
    shop.view("revenue", placed.group_by("customer_id").aggregate(orders=hr.agg.count(), revenue=hr.agg.sum("amount")))
    return shop


def orders(first: int, count: int) -> pa.Table:
    """Orders by their number: the same number is always the same order, so that the demo knows what should be there."""
    numbers = np.arange(first, first + count, dtype=np.int64)
    times = np.datetime64("2026-01-31T12:00:00", "us") + numbers * np.timedelta64(1000, "us")
    return pa.table(
        {
            "order_id": numbers,
            "customer_id": numbers * 7919 % CUSTOMERS,
            "amount": (numbers * 104_729 % 50_000) / 100,
            "placed_at": pa.array(times).cast(pa.timestamp("us", tz="UTC")),
        }
    )


def same_set(found: pa.ChunkedArray, expected: pa.ChunkedArray) -> bool:
    """The same values, each once."""
    return bool(np.array_equal(np.sort(found.to_numpy()), np.sort(expected.to_numpy())))


def in_order(stored: pa.Table) -> bool:
    """Whether, for each customer, order numbers rise with offsets. A customer's orders are all in one partition."""
    rows = stored.sort_by([("_partition", "ascending"), ("_offset", "ascending")])
    customers, numbers = rows["customer_id"].to_numpy(), rows["order_id"].to_numpy()
    by_customer = np.argsort(customers, kind="stable")
    same, rises = np.diff(customers[by_customer]) == 0, np.diff(numbers[by_customer]) > 0
    return bool(np.all(rises | ~same))
