"""A pipeline runs its sources: a run that is to catch up reads what is there first."""

import sqlite3
from pathlib import Path

import pytest

import headrace as hr
from headrace.errors import DuplicateStep, PlanError

ORDERS = "order_id BIGINT, region STRING"


def test_a_source_needs_a_declared_topic_and_a_name_of_its_own(tmp_path: Path) -> None:
    shop = hr.Pipeline("shop", log=f"file:{tmp_path / 'log'}")
    files = hr.sources.directory(tmp_path, topic="orders", name="files")
    with pytest.raises(PlanError, match="declare it"):
        shop.source(files)
    shop.topic("orders", schema=ORDERS)
    shop.source(files)
    with pytest.raises(DuplicateStep, match="files"):
        shop.source(hr.sources.directory(tmp_path, topic="orders", name="files", pattern="*.csv"))


@pytest.mark.spark  # it looks for Java, although nothing here needs a batch
def test_a_run_that_is_to_catch_up_reads_what_is_there(tmp_path: Path) -> None:
    """The topic is created as the pipeline declares it, before the source looks for it."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("order_id,region\n1,north\n2,north\n3,south\n")
    shop = hr.Pipeline("shop", log=f"file:{tmp_path / 'log'}")
    orders = shop.topic("orders", schema=ORDERS, partitions=3)
    shop.sink(hr.sinks.sqlite(tmp_path / "reports.db"), orders)
    shop.source(hr.sources.directory(tmp_path / "in", topic="orders"))
    for _ in range(2):
        shop.run(state=tmp_path / "state", until_caught_up=True)
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        assert log.topic("orders").partitions == 3
        assert sorted(row["order_id"] for row in log.read("orders").to_pylist()) == [1, 2, 3]
    with sqlite3.connect(tmp_path / "reports.db") as db:
        assert db.execute("SELECT count(*) FROM orders").fetchone() == (3,)
    db.close()
