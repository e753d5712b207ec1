"""Streaming DataFrames brought into a pipeline: every row once, over runs and failures, and a
status that says how it goes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.views.reader import ViewReader
from tests.waits import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


class Shop:
    """A pipeline that counts what comes in from a directory of JSON files."""

    def __init__(self, root: Path) -> None:
        self.root, self.state, self.files = root, root / "state", root / "files"
        self.files.mkdir()
        self.pipeline = hr.Pipeline("shop", log=f"file:{root / 'log'}")
        orders = self.pipeline.topic("orders", schema="k BIGINT, v STRING", key="k")
        self.pipeline.view("counts", orders.group_by("k").aggregate(n=hr.agg.count()))
        self.pipeline.ingest(self.stream, orders)

    def stream(self, spark: SparkSession) -> DataFrame:
        broken = str(self.root / "broken")

        def checked(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            if Path(broken).exists():
                raise ValueError("broken on purpose")
            yield from batches

        return (
            spark.readStream.schema("k BIGINT, v STRING")
            .json(str(self.files))
            .mapInArrow(checked, "k BIGINT, v STRING")
        )

    def add_file(self, name: str, count: int) -> None:
        (self.files / name).write_text(
            "\n".join(json.dumps({"k": n % 3, "v": f"{name}-{n}"}) for n in range(count))
        )

    def run(self, **options: Any) -> None:
        self.pipeline.run(state=self.state, master="local[2]", **options)

    def rows(self) -> list[str]:
        with hr.open_log(f"file:{self.root / 'log'}") as log:
            return sorted(log.read("orders").to_table()["v"].to_pylist())

    def counted(self) -> int:
        with ViewReader(self.state / "views.db") as views:
            return sum(row["n"] for row in views.table("counts").to_pylist())

    def status(self) -> str:
        try:
            found: str = json.loads((self.state / "status.json").read_text())["ingests"].get(
                "orders.ingest", ""
            )
        except FileNotFoundError:
            return ""
        return found


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def names(file: str, count: int) -> list[str]:
    return [f"{file}-{n}" for n in range(count)]


def test_existing_rows_are_ingested_once_over_several_runs(shop: Shop, spark: SparkSession) -> None:
    shop.add_file("a", 30)
    shop.run(until_caught_up=True)
    assert (shop.rows(), shop.counted(), shop.status()) == (sorted(names("a", 30)), 30, "done")
    shop.add_file("b", 5)
    for _ in range(2):
        shop.run(until_caught_up=True)
        assert (shop.rows(), shop.counted()) == (sorted([*names("a", 30), *names("b", 5)]), 35)


def test_a_failed_ingest_is_restarted_and_its_reason_reported(
    shop: Shop, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    (shop.root / "broken").touch()
    shop.add_file("a", 10)
    stop = Event()
    running = Thread(target=shop.run, kwargs={"stop": stop})
    running.start()
    try:
        wait_until(lambda: shop.status().startswith("failed"), 120)
        assert "ValueError: broken on purpose" in shop.status()
        (shop.root / "broken").unlink()
        wait_until(lambda: shop.status().startswith("running"), 120)
        shop.add_file("b", 4)
        wait_until(lambda: len(shop.rows()) == 14, 120)
    finally:
        stop.set()
        running.join(60)
    assert not running.is_alive()
    assert shop.rows() == sorted([*names("a", 10), *names("b", 4)])
    assert "The ingest orders.ingest failed (1 in a row)" in caplog.text
    assert not [query for query in spark.streams.active if query.name == "shop.orders.ingest"]


def test_a_lost_checkpoint_doubles_nothing(shop: Shop, spark: SparkSession) -> None:
    for name in ("a", "b"):
        shop.add_file(name, 3)
        shop.run(until_caught_up=True)
    shutil.rmtree(shop.state / "ingest")
    stop = Event()
    running = Thread(target=shop.run, kwargs={"stop": stop})
    running.start()
    try:
        wait_until(lambda: shop.status().startswith("failed"), 120)
        assert "another checkpoint" in shop.status()
    finally:
        stop.set()
        running.join(60)
    assert shop.rows() == sorted([*names("a", 3), *names("b", 3)])


def test_a_batch_is_no_stream(tmp_path: Path, spark: SparkSession) -> None:
    pipeline = hr.Pipeline("shop", log=f"file:{tmp_path / 'log'}")
    orders = pipeline.topic("orders", schema="id BIGINT")
    pipeline.write("copy", orders)
    with pytest.raises(hr.errors.PlanError, match="no streaming DataFrame"):
        pipeline.ingest(spark.range(3), orders)
    pipeline.ingest(lambda session: session.range(3), orders)
    with pytest.raises(hr.errors.ConfigurationError, match="no streaming DataFrame"):
        pipeline.run(state=tmp_path / "state", master="local[2]")
