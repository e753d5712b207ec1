"""The topics that a pipeline writes to: made if they are missing, refused at start if they do not
fit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import TopicExists
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark

ROWS = [{"k": k, "v": 1.0} for k in range(20)]


def shop(
    column: str = "n", *, partitions: int = 2, keyed: bool = True, table: bool = False
) -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    orders = pipeline.topic("orders", schema="k BIGINT, v DOUBLE")
    rows: Any = orders.select("k", f"v AS {column}")
    pipeline.write(
        "out",
        rows.to_table("k") if table else rows.key_by("k") if keyed else rows,
        partitions=partitions,
    )
    return pipeline


@pytest.mark.parametrize(
    ("edited", "message"),
    [
        (lambda: shop("m"), "m DOUBLE"),
        (lambda: shop(partitions=3), "declare it with partitions=2"),
        (lambda: shop(partitions=1), "declare it with partitions=2"),
        (lambda: shop(keyed=False), "key: none"),
        (lambda: shop(table=True), "table, key: k"),
    ],
)
def test_an_output_that_no_longer_fits_its_topic_is_refused_at_start(
    tmp_path: Path, edited: Callable[[], hr.Pipeline], message: str
) -> None:
    spark: Any = PlainSpark()
    with PipelineTest(shop(), tmp_path, spark) as test:
        test.feed("orders", ROWS)
        test.settle()
        test.pipeline = edited()
        with pytest.raises(TopicExists, match=message):
            test.restart()
        test.pipeline = shop()
        test.restart()
        test.feed("orders", ROWS)
        test.settle()
        assert len(test.rows("out")) == 2 * len(ROWS)


def test_somebody_elses_topic_is_not_written_to(tmp_path: Path) -> None:
    spark: Any = PlainSpark()
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_topic("out", "text STRING")
    with pytest.raises(TopicExists, match="text STRING"):
        PipelineTest(shop(), tmp_path, spark)
